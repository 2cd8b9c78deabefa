"""Keeps torch's compiler out of a command that compiles nothing: its import takes longer than most estimates.

Start reading at `without_compiler`. torch imports `torch._dynamo` to mark functions that must not be compiled.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


def without_compiler() -> None:
    """Let torch run without its compiler until something asks for more of it than to leave functions alone.

    For the process of a command only: functions that were marked meanwhile stay unmarked. Does nothing where the
    compiler is imported already.
    """
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _NoCompiler(_NAME)
        sys.meta_path.insert(0, _PartsOfCompiler())


class _NoCompiler(ModuleType):
    """Stands for `torch._dynamo`; any other attribute brings the real one."""

    __path__: Sequence[str] = ()  # so that `import torch._dynamo.PART` asks the finders

    def disable(self, fn: Callable | None = None, *_: Any, **__: Any) -> Callable:
        """Return the function, which nothing compiles."""
        return (lambda function: function) if fn is None else fn

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing: no graph is being captured."""

    def is_compiling(self) -> bool:
        """Return False."""
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(), name)


class _PartsOfCompiler(MetaPathFinder, Loader):
    """Brings the real module before a part of it is imported, and hands out the part that it has imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{_NAME}.") or not isinstance(sys.modules.get(_NAME), _NoCompiler):
            return None
        _real()
        importlib.import_module(fullname)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = sys.modules[spec.name]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _real() -> ModuleType:
    if isinstance(sys.modules.get(_NAME), _NoCompiler):
        del sys.modules[_NAME]
        package = sys.modules["torch"]
        if isinstance(vars(package).get("_dynamo"), _NoCompiler):
            del package._dynamo
    return importlib.import_module(_NAME)
