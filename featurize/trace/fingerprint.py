"""Fingerprints of objects and of all that they hold: of a job, whose trace may be known, and of a model at a moment.

Start reading at `Fingerprint.of`. The hash is of what pickle writes, with tensors, functions and classes reduced to
what a trace follows from. A `State` is compared with a later one of the same process: tensors count by where they lie.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import hashlib
import os
import site
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pickle import Pickler, PicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from conf.files.disk_cache import PACKAGES
from featurize.operators.tensor_parts import plain_parts

_LARGEST_PARAMETER = 64  # elements, up to which a parameter's values count
_LARGEST_TENSOR = 2**20  # elements of other tensors, as `featurize.recording.values` keeps them
_SETS = frozenset({set, frozenset})
_COLLECTIONS = _SETS | {dict, OrderedDict}
_NOT_OF_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_OF_PYTHON = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl")
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
_CACHED = type(functools.cache(lambda: None))
_INSTALLED = tuple(
    {
        os.path.realpath(path) + os.sep
        for path in (
            *site.getsitepackages(),
            site.getusersitepackages(),
            *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
        )
    }
)


@functools.cache
def is_installed(module: types.ModuleType | None) -> bool:
    """Return whether a module is this project's, an installed library's or Python's."""
    if module is None or module.__name__ == "__main__":
        return False
    if module.__name__.partition(".")[0] in PACKAGES:
        return True
    path = getattr(module, "__file__", None)
    return module.__name__ in sys.builtin_module_names or (
        path is not None and os.path.realpath(path).startswith(_INSTALLED)
    )


def _rebuild_marker(*_: object) -> None:
    """Marker that is pickled in place of an object's constructor."""


class Fingerprint(Pickler):
    """Hashes one tuple of objects, the same in each process.

    Of the user's code, functions count with the globals that they name; installed code by its place and time of change,
    `forward` and what it names also by where it is defined, so that a replaced one is noticed. Values of buffers,
    inputs and small parameters count, since models read them.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        super().__init__(types.SimpleNamespace(write=self._digest.update), protocol=5)

    def of(self, *roots: object) -> str:
        """Return the hash of objects. Raises whatever somebody's object raises as it is pickled, and for what pickle
        cannot write."""
        try:
            self.dump(roots)
        finally:
            self.clear_memo()  # it would keep alive whatever was written: tensors that a step replaces would stay
        return self._digest.hexdigest()

    def reducer_override(self, value: Any) -> Any:
        """Return what is written of an object, as `object.__reduce__` does."""
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, nn.Module):
            return copyreg.__newobj__, (type(value),), _order(vars(value))  # type: ignore[attr-defined]
        return self.other(value)

    def other(self, value: Any) -> Any:
        """Return what is written of an object that is neither a tensor nor a module."""
        if isinstance(value, type):
            return self.installed(value) if _is_of_library(value) else _own_class(value)
        if isinstance(value, types.FunctionType):
            if value is _rebuild_marker:
                return NotImplemented
            return self.installed(value) if _is_of_library(value) else _own_function(value)
        if isinstance(value, types.ModuleType):
            return _rebuild_marker, ("module", value.__name__)
        if isinstance(value, _BUILTINS):
            return _rebuild_marker, ("builtin", getattr(value, "__module__", None), value.__qualname__)
        if isinstance(value, types.MethodType):
            return _rebuild_marker, ("method",), (value.__func__, value.__self__)
        if isinstance(value, property):
            return _rebuild_marker, ("property",), (value.fget, value.fset)
        if isinstance(value, staticmethod | classmethod):
            return _rebuild_marker, ("method",), value.__func__
        if isinstance(value, types.MappingProxyType):
            return _rebuild_marker, ("mapping",), dict(value)
        return NotImplemented

    def tensor(self, value: Tensor) -> Any:
        """Return what is written of a tensor. Raises `PicklingError` for one that is not simply laid out."""
        if is_lazy(value) or value.layout is not torch.strided or value.is_quantized:
            raise PicklingError
        largest = _LARGEST_PARAMETER if isinstance(value, nn.Parameter) else _LARGEST_TENSOR
        content = None if value.is_meta or value.numel() > largest else _content(value)
        shape = tuple(value.shape), value.stride(), value.dtype, value.device.type, value.requires_grad
        return _rebuild_marker, (type(value).__qualname__, shape, content), _attached(value)

    def installed(self, code: type | types.FunctionType) -> Any:
        """Return what is written of a class or function of an installed library."""
        if isinstance(code, type):
            path = getattr(sys.modules[code.__module__], "__file__", None)
            forward = getattr(code, "forward", None)
            own_forward = forward if isinstance(forward, types.FunctionType) else None
            return _rebuild_marker, (code.__module__, code.__qualname__, _stamp(path) if path else None), own_forward
        compiled = code.__code__
        places = [(name, _place(value)) for name, value in _named_by(code).items()]
        return _rebuild_marker, (compiled.co_filename, compiled.co_firstlineno, len(compiled.co_code), places)


class State(Fingerprint):
    """All that objects hold at a moment, to tell whether they still hold the same. Of libraries' code, only state
    counts: what functions close over.

    Args:
        roots: The objects.

    Raises:
        Exception: As `Fingerprint.of`.
    """

    def __init__(self, *roots: object) -> None:
        super().__init__()
        self.tensors: list[weakref.ref[Tensor]] = []
        self._places: list[object] = []
        self._held = self.of(*roots)

    def stays(self, later: State | None) -> bool:
        """Return whether the objects hold the same at a later moment."""
        # A tensor that has ended since may have left its address to another one.
        return (
            later is not None
            and (self._held, self._places) == (later._held, later._places)
            and all(reference() is not None for reference in self.tensors)
        )

    def other(self, value: Any) -> Any:
        """Return what is written of an object, with state that a fingerprint of a job leaves out or refuses."""
        kind = type(value)
        if kind in _BOUND:
            return _rebuild_marker, (value.__name__,), value.__self__
        if kind is _CACHED:
            info = value.cache_info()  # a hit changes nothing of what it holds
            return _rebuild_marker, (info.misses, info.currsize), value.__wrapped__
        if kind is weakref.ref:
            return _rebuild_marker, ("reference",), value()
        return super().other(value)

    def tensor(self, value: Tensor) -> Any:
        """Note where a tensor lies; of a small one on the host, its values. Return what it holds besides."""
        for part in plain_parts(value):
            storage = part.untyped_storage()
            self._places += (part.shape, part.dtype, part.requires_grad)
            if part.is_cpu and storage.nbytes() <= _LARGEST_TENSOR:
                self._places.append(ctypes.string_at(storage.data_ptr(), storage.nbytes()))
                continue
            self.tensors.append(weakref.ref(part))
            self._places += (id(part), storage._cdata, None if part.is_meta or part.is_inference() else part._version)
        return _rebuild_marker, (), _attached(value)

    def installed(self, code: type | types.FunctionType) -> Any:
        """Return what is written of a class or function of an installed library: what the function holds."""
        if isinstance(code, type):
            return _rebuild_marker, ("class", id(code))
        return _rebuild_marker, (_text_of(code.__code__),), _closed_over(code)


def _is_of_library(code: type | types.FunctionType) -> bool:
    return is_installed(sys.modules.get(code.__module__))


@functools.cache
def _stamp(path: str) -> tuple[str, int, int]:
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def _content(value: Tensor) -> bytes:
    laid_out = type(value) in (Tensor, nn.Parameter) and (value.data_ptr() or not value.numel())
    if laid_out and value.is_cpu and value.is_contiguous() and not (value.is_conj() or value.is_neg()):
        return ctypes.string_at(value.data_ptr(), value.nbytes)
    held = value.detach().cpu()
    return (held.float() if held.dtype in _NOT_OF_NUMPY else held).numpy().tobytes()


def _attached(value: Tensor) -> Any:
    """Return a tensor's attributes and hooks; None where it has none."""
    registered = value._backward_hooks, value._post_accumulate_grad_hooks
    if not (value.__dict__ or any(registered)):
        return None
    state = {name: attribute for name, attribute in value.__dict__.items() if not name.startswith("_backward")}
    # Their numbers are the process's: they count in their order.
    hooks = [list(hooks.values()) for hooks in registered if hooks]
    return (state, hooks) if state or hooks else None


def _own_class(kind: type) -> Any:
    state = {
        name: part for name, part in vars(kind).items() if name not in _OF_PYTHON and not isinstance(part, _DESCRIPTORS)
    }
    return _rebuild_marker, (kind.__module__, kind.__qualname__), (kind.__bases__, _order(state))


def _own_function(function: types.FunctionType) -> Any:
    code, named = function.__code__, _named_by(function)
    of_modules = [
        (name, attribute, vars(value)[attribute])
        for name, value in named.items()
        if isinstance(value, types.ModuleType) and not is_installed(value)
        for attribute in sorted(_names_in(code) & vars(value).keys())
    ]
    return _rebuild_marker, (_text_of(code),), (_closed_over(function), _order(named), of_modules)


def _closed_over(function: types.FunctionType) -> tuple[object, ...]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return function.__defaults__, function.__kwdefaults__, vars(function), cells


def _named_by(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function names, in an order that is the same in each process."""
    names = sorted(_names_in(function.__code__))
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return all names that a function and those within it look up."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _place(value: object) -> tuple[object, ...]:
    line = getattr(getattr(value, "__code__", None), "co_firstlineno", None)
    return getattr(value, "__module__", None), getattr(value, "__qualname__", None), line


def _order(values: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the names and kinds of empty collections, which most of a module's values are, and the other values by
    name, sets as sorted lists."""
    empty: list[Any] = []
    ordered: list[Any] = []
    for name, value in values.items():
        kind = type(value)
        if kind in _COLLECTIONS and not value:
            empty += (name, kind)
        else:
            ordered += (name, sorted(value, key=repr) if kind in _SETS else value)
    return _same(tuple(empty)), ordered


@functools.cache
def _same(names: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return equal names as one object, which is written once."""
    return names


@functools.cache
def _text_of(code: types.CodeType) -> str:
    constants = [
        _text_of(constant)
        if isinstance(constant, types.CodeType)
        else sorted(map(repr, constant))
        if isinstance(constant, frozenset)
        else repr(constant)
        for constant in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants))
