"""Experiment loggers in a script that is estimated: every call does nothing.

Start reading at `SilentLoggers`. One that is not installed is absent where the script is ready for that.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_LOGGERS = (
    "wandb",
    "mlflow",
    "comet_ml",
    "neptune",
    "aim",
    "clearml",
    "swanlab",
    "tensorboardX",
    "torch.utils.tensorboard",
)
_CATCHING = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


class SilentLoggers(MetaPathFinder, Loader):
    """Imports of experiment loggers give a module that takes every call and does nothing.

    note   hears which logger was kept from logging
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        logger = _logger_of(fullname)
        if logger is None:
            return None
        if not _is_installed(logger) and is_ready_for_its_absence():
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

    def __bool__(self) -> bool:
        return True


def _logger_of(name: str) -> str | None:
    return next((logger for logger in _LOGGERS if f"{name}.".startswith(f"{logger}.")), None)


def _is_installed(logger: str) -> bool:
    """Whether a package is there: a mere folder of that name, as wandb leaves in the working folder, is none."""
    spec = PathFinder.find_spec("tensorboard" if logger == "torch.utils.tensorboard" else logger)
    return spec is not None and spec.origin is not None


def is_ready_for_its_absence() -> bool:
    """Whether who imports catches the failure, or only asks whether there is such a module."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name == "find_spec" and frame.f_globals.get("__name__") == "importlib.util":
            return True
        frame = frame.f_back
    if frame is None:
        return False
    if frame.f_globals.get("__name__") == "importlib.util":
        return True
    return frame.f_lineno in _lines_that_may_fail(frame.f_code.co_filename)


@functools.cache
def _lines_that_may_fail(path: str) -> frozenset[int]:
    """The lines of a source file at which a failing import is caught."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    caught: set[int] = set()
    for node in ast.walk(tree):
        ready = isinstance(node, ast.Try) and any(_catches(handler.type) for handler in node.handlers)
        ready |= isinstance(node, ast.With) and any(_suppresses(item.context_expr) for item in node.items)
        if ready:
            assert isinstance(node, ast.Try | ast.With)
            for statement in node.body:
                caught.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return frozenset(caught)


def _catches(handler: ast.expr | None) -> bool:
    if handler is None:
        return True
    names = {node.id for node in ast.walk(handler) if isinstance(node, ast.Name)}
    return bool(names & _CATCHING)


def _suppresses(context: ast.expr) -> bool:
    if not isinstance(context, ast.Call):
        return False
    called = {node.id for node in ast.walk(context.func) if isinstance(node, ast.Name)}
    called |= {node.attr for node in ast.walk(context.func) if isinstance(node, ast.Attribute)}
    return "suppress" in called and any(_catches(argument) for argument in context.args)
