"""Keeps torch's compiler out of a process that compiles nothing: its import takes longer than most estimates.

Start reading at `without_compiler`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def without_compiler() -> None:
    """Run torch without its compiler until something needs more of it than to leave functions uncompiled.

    torch imports `torch._dynamo` to mark functions that must not be compiled, and torchvision to check whether it can
    compile. For processes of our own only (a command, a simulated trial server, a Ray task): functions that were marked
    before the compiler is imported stay unmarked. Does nothing if the compiler is imported already.
    """
    _stand_in("torch._dynamo", {"disable": _as_it_is, "graph_break": _nothing, "is_compiling": lambda: False})
    _stand_in("torch._dynamo.utils", {"is_compile_supported": lambda _device: False})  # torchvision imports it


@contextlib.contextmanager
def compiler_aside() -> Iterator[None]:
    """Run torch without its compiler inside the block, in a process that may be a user's: no mark is left."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    marked: list[Callable[..., Any]] = []

    def disable(fn: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
        if fn is None:
            return _as_it_is()
        marked.append(fn)
        return fn

    _stand_in("torch._dynamo", {"disable": disable, "graph_break": _nothing, "is_compiling": lambda: False})
    try:
        yield
    finally:
        for function in marked:  # torch keeps the marked function there (torch/_compile.py: `_disable_dynamo`)
            vars(function).pop("__dynamo_disable", None)
        if isinstance(stand_in := sys.modules.get("torch._dynamo"), _StandIn):
            stand_in._leave()
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Parts)]


def _as_it_is(fn: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    return (lambda function: function) if fn is None else fn


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _stand_in(name: str, attributes: Mapping[str, Any]) -> None:
    if name not in sys.modules:
        sys.modules[name] = module = _StandIn(name, attributes)
        sys.meta_path.insert(0, _Parts(module))


class _StandIn(ModuleType):
    """Has a few attributes; any other attribute imports the real module, which answers from then on."""

    def __init__(self, name: str, attributes: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__ = []  # so that `import NAME.PART` asks the finders
        self.__spec__ = ModuleSpec(name, None, is_package=True)  # `find_spec` refuses a module without one
        self.__dict__.update(attributes)
        self.__dict__["_attributes"] = tuple(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real_module(), name)

    def _real_module(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            for module in [module for module in sys.modules.values() if isinstance(module, _StandIn)]:
                module._leave()
        return importlib.import_module(self.__name__)

    def _leave(self) -> None:
        for attribute in self._attributes:
            del self.__dict__[attribute]
        del sys.modules[self.__name__]
        package, _, attribute = self.__name__.rpartition(".")
        if package in sys.modules and vars(sys.modules[package]).get(attribute) is self:
            delattr(sys.modules[package], attribute)


class _Parts(MetaPathFinder, Loader):
    """Imports the real module before one of its submodules, and returns the submodule that this has imported."""

    def __init__(self, stand_in: _StandIn) -> None:
        self._stand_in = stand_in
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        name = self._stand_in.__name__
        if not fullname.startswith(f"{name}.") or sys.modules.get(name) is not self._stand_in:
            return None
        self._stand_in._real_module()
        self._specs[fullname] = importlib.import_module(fullname).__spec__
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs.pop(module.__name__)
