"""The text that tells a job from all others, by which its trace and its answers are found again.

Start reading at `key_of`. A stale answer is worse than a slow one. So a key holds all that a trace follows from:

- A trial config is its fields; one that names somebody's own code has no key.
- A module is pickled into a hash: the classes of its parts with the bytecode of their functions and the globals that
  these name, what its parts hold, and the shapes of its parameters. Values of buffers, inputs and small parameters
  count, since models read them; no model is known to read a value of a large parameter.
- A factory is built first, on meta, and then pickled: what it reads on the way (a file, a setting) shows in what it
  makes. Only one that an installed library holds under its own name is known by that name.
- Code of installed libraries counts by its place, size and time of change; `forward` and what it names also by where it
  is defined, so that a replaced one is noticed.

What pickle cannot write (an open file, a lock, a weak reference) has no key: such a job is traced each time.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import os
import pickle
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping
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
_NOT_OF_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_OF_PYTHON = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl")
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_INSTALLED = tuple({os.path.realpath(path) + os.sep for path in (
    *site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
)})  # fmt: skip


def key_of(job: Workload) -> tuple[str | None, Build]:
    """Return a job's key, and what builds its model: a factory that was built to tell its key is not built again.

    A factory of a job on several GPUs has no key, unless it is a library's.
    """
    from featurize import flash_attention
    from featurize.skeleton import BuiltOnMeta, build_on_meta

    if job.key is not None or job.recorded is not None:
        return job.key or None, job.build
    if job.config is not None:
        return trace_cache.config_key(job.config, job.parallel), job.build
    if not job.given:
        return None, job.build
    model, *rest = job.given
    build = job.build
    if not isinstance(model, nn.Module) and not _is_of_library(model):
        if job.parallel is not None:  # a rank's factory builds in its rank's place
            return None, build
        try:
            with kept_from_exit(), as_a_training_script():
                model = flash_attention.building(lambda: build_on_meta(job.build))
        except Exception:  # a factory may raise anything, and raises it again where it is traced
            return None, build
        if not isinstance(model, nn.Module):
            return None, build
        build = BuiltOnMeta(model, build)
    digest = hashlib.sha256()
    known = (model, rest, job.settings, repr(job.parallel), trace_cache.torch_state())
    try:
        _Teller(types.SimpleNamespace(write=digest.update), protocol=5).dump(known)
    except Exception:  # somebody's object may raise anything as it is pickled
        return None, build
    return digest.hexdigest(), build


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


def _told(*_: object) -> None:
    """Stand, in the pickle, for what makes an object."""


class _Teller(pickle.Pickler):
    """Pickles values, but writes of tensors, functions and classes what a trace follows from."""

    def reducer_override(self, value: Any) -> Any:
        """Return what is written of an object, as `object.__reduce__` does."""
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, nn.Module):
            return copyreg.__newobj__, (type(value),), _ordered(vars(value))  # type: ignore[attr-defined]
        if isinstance(value, type):
            return _class(value)
        if isinstance(value, types.FunctionType):
            return NotImplemented if value is _told else _function(value)
        if isinstance(value, types.ModuleType):
            return _told, ("module", value.__name__)
        if isinstance(value, _BUILTINS):
            return _told, ("builtin", getattr(value, "__module__", None), value.__qualname__)
        if isinstance(value, types.MethodType):
            return _told, ("method",), (value.__func__, value.__self__)
        if isinstance(value, property):
            return _told, ("property",), (value.fget, value.fset)
        if isinstance(value, staticmethod | classmethod):
            return _told, ("method",), value.__func__
        if isinstance(value, types.MappingProxyType):
            return _told, ("mapping",), dict(value)
        return NotImplemented


def _tensor(value: Tensor) -> Any:
    if is_lazy(value) or value.layout is not torch.strided:
        raise pickle.PicklingError
    content = None
    largest = _LARGEST_PARAMETER if isinstance(value, nn.Parameter) else _LARGEST_TENSOR
    if value.numel() <= largest and not value.is_meta:
        held = value.detach().cpu()
        content = (held.float() if held.dtype in _NOT_OF_NUMPY else held).numpy().tobytes()
    shape = tuple(value.shape), value.stride(), str(value.dtype), value.device.type, value.requires_grad
    state = {name: one for name, one in vars(value).items() if not name.startswith("_backward")}
    return _told, (type(value).__qualname__, shape, content), state or None


def _class(kind: type) -> Any:
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    if not _is_installed(module):
        state = {name: part for name, part in vars(kind).items()
                 if name not in _OF_PYTHON and not isinstance(part, _DESCRIPTORS)}  # fmt: skip
        return _told, (kind.__module__, kind.__qualname__), (kind.__bases__, _ordered(state))
    forward = getattr(kind, "forward", None)
    own = forward if isinstance(forward, types.FunctionType) else None
    return _told, (kind.__module__, kind.__qualname__, _stamp(path) if path else None), own


def _function(function: types.FunctionType) -> Any:
    code = function.__code__
    named = {name: function.__globals__[name] for name in sorted(_names(code)) if name in function.__globals__}
    if _is_installed(sys.modules.get(function.__module__)):
        places = [(name, _place(value)) for name, value in named.items()]
        return _told, (code.co_filename, code.co_firstlineno, len(code.co_code), places)
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    of_modules = [
        (name, attribute, vars(value)[attribute])
        for name, value in named.items()
        if isinstance(value, types.ModuleType) and not _is_installed(value)
        for attribute in sorted(_names(code) & vars(value).keys())
    ]
    defaults = function.__defaults__, function.__kwdefaults__, vars(function)
    return _told, (_text_of(code),), (defaults, cells, _ordered(named), of_modules)


def _place(value: object) -> tuple[object, ...]:
    line = getattr(getattr(value, "__code__", None), "co_firstlineno", None)
    return getattr(value, "__module__", None), getattr(value, "__qualname__", None), line


def _ordered(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return values by name, sets as sorted lists; most of a module's values are empty mappings of hooks."""
    ordered = []
    for name, one in values.items():
        if isinstance(one, set | frozenset):
            one = sorted(one, key=repr)
        ordered.append((name, "{}" if isinstance(one, dict) and not one else one))
    return ordered


@functools.cache
def _text_of(code: types.CodeType) -> str:
    constants = [
        _text_of(one) if isinstance(one, types.CodeType)
        else sorted(map(repr, one)) if isinstance(one, frozenset) else repr(one)
        for one in code.co_consts
    ]  # fmt: skip
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants))


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Return all names that a function and those within it look up."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(code.co_names).union(*inner)
