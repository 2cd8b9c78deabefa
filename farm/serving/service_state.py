"""What answers depend on besides the question: the code, and the models in the data folder.

Start reading at `ServiceState`.
"""

from __future__ import annotations

import os
import time
from importlib.metadata import PackageNotFoundError, version

from featurize.version import FEATURES_STAMP
from warehouse.folder import DataFolder

_LOOK_EVERY_S = 10.0


class ServiceState:
    """Knows the state as text, and reads the names of the fitted models anew every few seconds."""

    def __init__(self, folder: DataFolder) -> None:
        self._models = folder.models
        self._looked_at = float("-inf")
        self._text = ""

    @property
    def text(self) -> str:
        """Return a text that changes where answers may."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._text = "\n".join([_release(), FEATURES_STAMP, *self._fitted()])
        return self._text

    def _fitted(self) -> list[str]:
        try:
            targets = sorted(entry.path for entry in os.scandir(self._models) if entry.is_dir())
            return [f"{os.path.basename(one)}/{name}" for one in targets for name in sorted(os.listdir(one))]
        except OSError:
            return []


def _release() -> str:
    try:
        return version("gpufarm")
    except PackageNotFoundError:
        return "unknown"
