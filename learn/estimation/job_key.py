"""The text that tells a job from all others, by which its trace and its answers are found again.

Start reading at `key_of`. A stale answer is worse than a slow one. So a key holds all that a trace follows from:

- A trial config is its fields; one that names somebody's own code has no key.
- A module is walked: the classes of its parts with the bytecode of their functions and the globals that these name,
  what its parts hold, and the shapes of its parameters. Values of buffers, inputs and small parameters count, since
  models read them; no model is known to read a value of a large parameter.
- A factory is built first, on meta, and then walked: what it reads on the way (a file, a setting) shows in what it
  makes. Only one that an installed library holds under its own name is known by that name.
- Code of installed libraries counts by its place, size and time of change; `forward` and what it names also by where it
  is defined, so that a replaced one is noticed.

What is neither of these (a generator, an open file, an object of a compiled extension) has no key, nor has a job whose
batches have several shapes: such a job is traced each time.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import site
import sys
import sysconfig
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from conf.errors import kept_from_exit
from featurize import trace_cache
from featurize.disk_cache import PACKAGES
from learn.workload import Workload, as_a_training_script

if TYPE_CHECKING:
    Build = Callable[[], nn.Module]

_LARGEST_PARAMETER = 64  # elements, up to which a parameter's values count
_LARGEST_TENSOR = 2**20  # of other tensors, as `featurize.values` keeps them
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.Size,
          torch.layout, torch.memory_format, type(Ellipsis))  # fmt: skip
_OF_PYTHON = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl")
_COLLECTIONS = (dict, list, tuple, set, frozenset, OrderedDict, defaultdict, Counter, types.MappingProxyType)
_INSTALLED = tuple({os.path.realpath(path) + os.sep for path in (
    *site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
)})  # fmt: skip


class _Untold(Exception):
    """Something of the job is nothing that a text can stand for."""


def key_of(job: Workload) -> tuple[str | None, Build]:
    """Return a job's key, and what builds its model: a factory that was built to tell its key is not built again.

    Within `featurize.trace_cache.nothing_is_traced`, a factory that is not a library's has no key, nor has that of a
    job on several GPUs.
    """
    if job.key is not None or job.recorded is not None:
        return job.key or None, job.build
    if job.config is not None:
        return trace_cache.config_key(job.config, job.parallel), job.build
    if not job.given or job.batches:
        return None, job.build
    model, *rest = job.given
    build = job.build
    try:
        if not isinstance(model, nn.Module) and not _is_of_library(model):
            if job.parallel is not None or not trace_cache.may_trace():  # a rank's factory builds in its rank's place
                return None, build
            model, build = _built(build)
        walk = _Walk()
        walk.see((model, rest, job.settings, repr(job.parallel), trace_cache.torch_state()))
    except _Untold:
        return None, build
    return walk.digest.hexdigest(), build


def _built(build: Build) -> tuple[nn.Module, Build]:
    from featurize import attention
    from featurize.skeleton import BuiltOnMeta, build_on_meta

    try:
        with kept_from_exit(), as_a_training_script():
            built = attention.building(lambda: build_on_meta(build))
    except Exception as error:  # a factory may raise anything, and raises it again where it is traced
        raise _Untold from error
    if not isinstance(built, nn.Module):
        raise _Untold
    return built, BuiltOnMeta(built, build)


def _is_of_library(value: object) -> bool:
    """Return whether an installed library holds this function or class under its own name."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return _is_installed(module) and vars(module).get(getattr(value, "__qualname__", "")) is value


@functools.cache
def _is_installed(module: types.ModuleType | None) -> bool:
    if module is None or module.__name__ == "__main__":
        return False
    if module.__name__.partition(".")[0] in PACKAGES:  # which `code_version` follows
        return True
    path = getattr(module, "__file__", None)
    return module.__name__ in sys.builtin_module_names or (
        path is not None and os.path.realpath(path).startswith(_INSTALLED)
    )


@functools.cache
def _stamp(path: str) -> tuple[str, int, int]:
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


class _Walk:
    """Goes through values, each object once, and digests what they are."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._seen: dict[int, tuple[int, object]] = {}  # by identity; held, so that no other takes its place

    def see(self, value: object) -> None:
        """Digest a value. Raises `_Untold`."""
        if isinstance(value, _PLAIN):
            return self._note(value)
        if type(value) in _COLLECTIONS and not value:
            return self._note(type(value).__name__)
        if id(value) in self._seen:
            return self._note("seen", self._seen[id(value)][0])
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, Tensor):
            self._see_tensor(value)
        elif isinstance(value, dict | types.MappingProxyType):
            self._see_object(value, [part for pair in value.items() for part in pair])
        elif isinstance(value, list | tuple):
            self._see_object(value, value)
        elif isinstance(value, set | frozenset):
            self._see_object(value, sorted(value, key=repr))
        elif isinstance(value, type):
            self._see_class(value)
        elif isinstance(value, types.FunctionType):
            self._see_function(value)
        elif isinstance(value, types.ModuleType):
            self._note("module", value.__name__)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
            self._note("builtin", getattr(value, "__module__", None), value.__qualname__)
        elif isinstance(value, types.MethodType):
            self._see_parts("method", value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._see_parts("partial", value.func, value.args, value.keywords)
        elif isinstance(value, property):
            self._see_parts("property", value.fget, value.fset)
        elif isinstance(value, staticmethod | classmethod):
            self._see_parts("method", value.__func__)
        elif isinstance(value, enum.Enum):
            self._see_parts("enum", type(value), value.name)
        else:
            self._see_object(value, ())

    def _note(self, *texts: object) -> None:
        self.digest.update(repr(texts).encode())

    def _see_parts(self, name: str, *parts: object) -> None:
        self._note(name, len(parts))
        for part in parts:
            self.see(part)

    def _see_tensor(self, value: Tensor) -> None:
        if is_lazy(value) or value.layout is not torch.strided:
            raise _Untold
        shape = tuple(value.shape), value.stride(), value.dtype, value.device.type, value.requires_grad
        self._note(type(value).__qualname__, shape)
        largest = _LARGEST_PARAMETER if isinstance(value, nn.Parameter) else _LARGEST_TENSOR
        if value.numel() <= largest and not value.is_meta:
            self.digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        if state := {name: one for name, one in vars(value).items() if not name.startswith("_backward")}:
            self.see(state)

    def _see_object(self, value: Any, parts: Iterable[object]) -> None:
        """An object with all that it holds: in its dictionary, its slots, and `parts` of a collection."""
        kind: Any = type(value)  # mypy takes a class for unhashable
        if not _is_transparent(kind):
            raise _Untold
        held = list(parts)
        self._note("object", len(held))
        self.see(kind)
        for part in held:
            self.see(part)
        for name in _slots(kind):
            self.see(getattr(value, name, None))
        for name, part in getattr(value, "__dict__", {}).items():
            self._note(name)
            self.see(part)

    def _see_class(self, kind: type) -> None:
        self._note("class", kind.__module__, kind.__qualname__)
        module = sys.modules.get(kind.__module__)
        if kind.__module__ == "builtins":
            return
        if _is_installed(module):
            if path := getattr(module, "__file__", None):
                self._note(_stamp(path))
            if isinstance(forward := getattr(kind, "forward", None), types.FunctionType):
                self._see_function(forward)
            return
        for base in kind.__bases__:
            self.see(base)
        for name, part in vars(kind).items():
            if name not in _OF_PYTHON and not isinstance(part, types.MemberDescriptorType | types.GetSetDescriptorType):
                self._note(name)
                self.see(part)

    def _see_function(self, function: types.FunctionType) -> None:
        code = function.__code__
        named = {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
        if _is_installed(sys.modules.get(function.__module__)):
            self._note("function", code.co_filename, code.co_firstlineno, len(code.co_code))
            for name, value in named.items():
                self._note(name, getattr(value, "__module__", None), getattr(value, "__qualname__", None))
                self._note(getattr(getattr(value, "__code__", None), "co_firstlineno", None))
            return
        self._see_code(code)
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
        self._see_parts("function", function.__defaults__, function.__kwdefaults__, vars(function), *cells)
        for name, value in sorted(named.items()):
            self._note(name)
            self.see(value)
            if isinstance(value, types.ModuleType) and not _is_installed(value):
                for attribute in sorted(_names(code) & vars(value).keys()):
                    self._note(attribute)
                    self.see(vars(value)[attribute])

    def _see_code(self, code: types.CodeType) -> None:
        self._note("code", code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._see_code(constant)
            else:
                self.see(constant)


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Return all names that a function and those within it look up."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _is_transparent(kind: Any) -> bool:
    """Return whether all that an object of this class holds can be seen: no compiled code but Python's own collections
    keeps anything in it."""
    known = (object, *_COLLECTIONS)
    return all(one in known or (one.__flags__ & (1 << 9) and _is_written(one)) for one in kind.__mro__)


def _is_written(kind: type) -> bool:
    """Return whether a class is written in Python: its module has a file of source, or is the caller's own."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return path is None or path.endswith((".py", ".pyc"))


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    named = [vars(one).get("__slots__", ()) for one in kind.__mro__]
    return tuple(name for names in named for name in ((names,) if isinstance(names, str) else names)
                 if name not in ("__dict__", "__weakref__"))  # fmt: skip
