"""Experiment loggers in a script that is estimated: every call does nothing.

Start reading at `SilentLoggers`. One that is not installed is absent where the script is ready for that.
"""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_LOGGERS = (
    "wandb", "mlflow", "comet_ml", "neptune", "aim", "clearml", "swanlab", "tensorboardX", "torch.utils.tensorboard",
)  # fmt: skip


class SilentLoggers(MetaPathFinder, Loader):
    """Imports of experiment loggers give a module that takes every call and does nothing.

    note   called with which logger was kept from logging
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        logger = _logger_of(fullname)
        if logger is None or (not _is_installed(logger) and is_ready_for_its_absence()):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Silent(spec.name, self._note)

    def exec_module(self, module: types.ModuleType) -> None: ...


class _Silent(types.ModuleType):
    """Every attribute can be called, entered, indexed and asked for more."""

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        super().__init__(name)
        self._note = note

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent(f"{self.__name__}.{name}", self._note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note(f"{_logger_of(self.__name__)} was kept from logging")
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):  # a decorator
            return args[0]
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Any:
        return iter(())


def _logger_of(name: str) -> str | None:
    return next((logger for logger in _LOGGERS if f"{name}.".startswith(f"{logger}.")), None)


def _is_installed(logger: str) -> bool:
    """Return whether a package is there. wandb leaves a mere folder of its name in the working folder."""
    spec = PathFinder.find_spec("tensorboard" if logger == "torch.utils.tensorboard" else logger)
    return spec is not None and spec.origin is not None


def is_ready_for_its_absence() -> bool:
    """Return whether the import stands in a `try`, or only asks whether there is such a module."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        if frame.f_code.co_name == "find_spec" and frame.f_globals["__name__"] == "importlib.util":
            return True
        frame = frame.f_back
    if frame is None:
        return False
    handlers = dis.Bytecode(frame.f_code).exception_entries  # those with `lasti` are of `with`, and of `except` itself
    return any(entry.start <= frame.f_lasti < entry.end and not entry.lasti for entry in handlers)
