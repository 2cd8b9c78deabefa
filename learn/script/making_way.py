"""Lets a script import its own packages that bear names of this project's: `conf`, `learn`, `workers`, ...

Start reading at `OwnPackages`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from conf.own_packages import PACKAGES, ROOT


class OwnPackages(MetaPathFinder):
    """The packages of this project, out of the way while a script runs that has others of the same names.

    Modules of this project that are loaded keep working: what they have imported, they hold. They import nothing more
    of each other until `come_back`.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._ours: dict[str, ModuleType] = {}

    def make_way(self) -> None:
        """Take the packages that `sys.path` has elsewhere too out of `sys.modules`."""
        self._names = tuple(name for name in PACKAGES if _elsewhere(name) is not None)
        if not self._names:
            return
        for name in list(sys.modules):
            if name.partition(".")[0] in self._names:
                self._ours[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def come_back(self) -> None:
        """Put this project's packages back: the script has ended."""
        if not self._names:
            return
        sys.meta_path.remove(self)
        for name in list(sys.modules):
            if name.partition(".")[0] in self._names:
                del sys.modules[name]
        sys.modules.update(self._ours)
        self._names = ()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Find the script's own package, also where it has no `__init__.py` and an installed one of ours would win."""
        return _elsewhere(fullname) if fullname in self._names else None


def _elsewhere(name: str) -> ModuleSpec | None:
    """Where an import finds a module or package that is not this project's; None where there is none with code."""
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if Path(entry).resolve() != ROOT.resolve()])
    if spec is None or spec.origin is not None:
        return spec
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return spec if any(next(folder.glob(form), None) for folder in folders for form in ("*.py", "*/*.py")) else None
