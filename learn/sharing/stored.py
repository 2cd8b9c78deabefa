"""Keeps fitted slowdowns as artifacts of a data folder, `models/slowdown/VERSION/`, and finds the newest.

Start reading at `find_slowdowns`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import EnvironmentProblem
from learn.fitting.artifact_files import DamagedArtifact, checked, read_json, say_damaged
from learn.fitting.artifacts import DataPlace, models_folder
from learn.rows.targets import SLOWDOWN
from learn.sharing.contention import ContentionFormula
from learn.sharing.learned import KnownJobs, LearnedSlowdowns, packaged_slowdowns

FORMAT = 1
_FILE = "slowdown.json"


@dataclass(frozen=True)
class Saved:
    """Content that `learn.fitting.artifacts.save_artifact` writes of the fitted slowdowns."""

    slowdowns: LearnedSlowdowns

    def save(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(_to_mapping(self.slowdowns), indent=1, sort_keys=True))


def default_slowdowns(data: DataPlace) -> LearnedSlowdowns:
    """Return the newest of a data folder, else the packaged ones."""
    return find_slowdowns(data) or packaged_slowdowns()


def find_slowdowns(data: DataPlace) -> LearnedSlowdowns | None:
    """Return the newest version of a data folder; None where nothing was fitted.

    A version that is not what was written is named on standard error, and the next older one takes its place.
    """
    home = models_folder(data) / SLOWDOWN
    if not home.is_dir():
        return None
    for path in sorted(home.iterdir(), reverse=True):
        if path.name.startswith(".") or not (path / "meta.json").is_file():
            continue
        try:
            return load_slowdowns(path)
        except DamagedArtifact as error:
            say_damaged(error, "an older version or the packaged one takes its place")
    return None


def load_slowdowns(path: Path) -> LearnedSlowdowns:
    """Return one version, its files verified first. Raises `DamagedArtifact`."""
    checked(path, read_json(path / "meta.json"))
    try:
        return _from_mapping(json.loads((path / "model" / _FILE).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedArtifact(f"{path} is damaged: {type(error).__name__} in {_FILE}") from error


def _to_mapping(model: LearnedSlowdowns) -> dict[str, Any]:
    known = model.known
    return {
        "format": FORMAT,
        "contention": None if model.contention is None else asdict(model.contention),
        "known": {
            **vars(known),
            "groups": [[name, list(partners), value] for (name, partners), value in sorted(known.groups.items())],
        },
        "typical": model.typical,
        "spread": model.spread,
        "spread_known": model.spread_known,
    }


def _from_mapping(stored: dict[str, Any]) -> LearnedSlowdowns:
    if stored["format"] != FORMAT:
        raise EnvironmentProblem(f"slowdown models of format {stored['format']}, this code knows {FORMAT}")
    known, contention = stored["known"], stored["contention"]
    groups = {(name, tuple(partners)): value for name, partners, value in known["groups"]}
    return LearnedSlowdowns(
        contention=None if contention is None else ContentionFormula(**contention),
        known=KnownJobs(**{**known, "groups": groups}),
        typical=stored["typical"],
        spread=stored["spread"],
        spread_known=stored["spread_known"],
    )
