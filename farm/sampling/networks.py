"""Finds the candidates whose network cannot be built here. Start reading at `Networks.problem`."""

from __future__ import annotations

from featurize.configs.row_config import problem_of
from featurize.configs.trial import TrialConfig
from featurize.families import get_family


class Networks:
    """Tries each network once, since that takes up to tenths of a second and many candidates share one."""

    def __init__(self) -> None:
        self._problems: dict[tuple[str, str, str | None], str | None] = {}

    def problem(self, config: TrialConfig) -> str | None:
        """Return why the config's network cannot be built, or None. Imports the code that it names."""
        identity = getattr(get_family(config.family), "identity", None)
        if identity is None:  # its layers follow from fields that were checked when the config was made
            return None
        # Whether a loss can be taken of a network's output depends on the target.
        key = (config.family, identity(config), getattr(config, "target", None))
        if key not in self._problems:
            self._problems[key] = problem_of(config)
        return self._problems[key]
