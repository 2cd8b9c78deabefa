"""State that a model and its loss keep over steps, as far as Python shows it: compared before and after a step.

Start reading at `state_of`. Objects that do not show what they hold (generators, locks, files) cannot be compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from featurize.operators.tensor_parts import plain_parts
from featurize.trace.installed import is_installed, names_in

MOST_PARTS = 2_000_000  # of one state; a module has some 40
_LARGEST = 2**16  # bytes of a tensor or array on the host up to which its values are compared
_VALUES = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        types.NoneType,
        types.EllipsisType,
        types.NotImplementedType,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        types.ModuleType,
        types.CodeType,
        types.WrapperDescriptorType,
        types.MethodDescriptorType,
        types.ClassMethodDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
    }
)
_MAPPINGS = frozenset({dict, OrderedDict})
_COLLECTIONS = frozenset({list, tuple, set, frozenset, deque, *_MAPPINGS})
_OF_PYTHON = frozenset({"__annotations__", "__doc__", "__abstractmethods__", "_abc_impl"})
_CACHED = type(functools.cache(lambda: None))


class State:
    """All that objects hold at a moment, and the states of random generators. Tensors count by where they lie."""

    def __init__(self) -> None:
        self.parts: list[object] = []
        self.tensors: list[weakref.ref[Tensor]] = []

    def stays(self, later: State | None) -> bool:
        """Return whether a later state is the same."""
        # A tensor that ended meanwhile may have left its address to another one.
        return later is not None and self.parts == later.parts and all(one() is not None for one in self.tensors)


def state_of(*roots: object) -> State | None:
    """Return the state of objects and of all that they hold; None where it is too large, or cannot be told.

    Of code that no library holds, the globals that it names count, too.
    """
    state = State()
    parts, waiting = state.parts, list[Any](roots)
    seen: dict[int, int] = {}
    made: list[object] = []  # on the way: what ended now would leave its address to another
    while waiting:
        value = waiting.pop()
        kind = type(value)
        parts.append(kind)
        if kind in _VALUES:
            parts.append(value)
            continue
        if kind in _COLLECTIONS and not value:  # most of a module's mappings
            continue
        if (place := seen.get(id(value))) is not None:
            parts.append(place)
            continue
        seen[id(value)] = len(seen)
        if len(parts) > MOST_PARTS:
            return None
        if kind in _COLLECTIONS:
            parts.append(len(value))
            waiting += value
            if kind in _MAPPINGS:
                waiting += value.values()
        elif isinstance(value, nn.Module):
            own = vars(value)
            parts += own
            waiting.append(kind)
            waiting += own.values()
        else:
            try:
                held = _held_by(value, kind, state)
            except Exception:  # somebody's object may raise anything as it tells what it holds
                return None
            made.append(held)
            waiting += held
    # PyTorch's generator on the CPU, Python's, and NumPy's: a model may draw which of its layers run.
    of_numpy: Any = np.random.get_state()
    parts += (torch.default_generator.get_state().numpy().tobytes(), random.getstate())
    parts += (part.tobytes() if isinstance(part, np.ndarray) else part for part in of_numpy)
    return state


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Leave the random generators as they were, whatever is drawn within."""
    drawn = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        try:
            yield
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])


def _held_by(value: Any, kind: type, state: State) -> list[object]:
    """Return what an object holds, and note what it is besides."""
    parts = state.parts
    if isinstance(value, Tensor):
        return _of_tensor(value, state)
    if isinstance(value, type):
        parts.append(value)
        return [] if is_installed(sys.modules.get(value.__module__)) else [*value.__bases__, *_own(vars(value))]
    if kind is types.FunctionType:
        parts.append(value.__code__)
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [cells, value.__defaults__, value.__kwdefaults__, vars(value), *_globals_of(value)]
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if kind in (types.BuiltinFunctionType, types.MethodWrapperType):
        parts.append(value.__name__)
        return [value.__self__]
    if kind is _CACHED:
        parts += (value.cache_info().misses, value.cache_info().currsize)
        return [value.__wrapped__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if kind is types.MappingProxyType:
        return [dict(value)]
    if isinstance(value, weakref.ref):
        return [value()]
    if kind is np.ndarray:
        if value.nbytes > _LARGEST or value.dtype.hasobject:
            raise ValueError("its values are too many to compare")
        parts += (value.shape, value.dtype, value.tobytes())
        return []
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global of that name
        return []
    _make, arguments, *more = reduced
    content, items, pairs = (*more, None, None, None)[:3]
    return [kind, arguments, content, list(items or ()), list(pairs or ())]


def _of_tensor(value: Tensor, state: State) -> list[object]:
    for part in plain_parts(value):
        state.parts += (part.shape, part.dtype, part.requires_grad)
        storage = part.untyped_storage()
        if part.is_cpu and storage.nbytes() <= _LARGEST:
            state.parts.append(ctypes.string_at(storage.data_ptr(), storage.nbytes()))
            continue
        state.tensors.append(weakref.ref(part))
        state.parts += (id(part), storage._cdata, None if part.is_meta or part.is_inference() else part._version)
    return [vars(value), value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None)]


def _own(values: Mapping[str, object]) -> list[object]:
    """Return what the code of a class holds."""
    return [value for name, value in values.items() if name not in _OF_PYTHON]


def _globals_of(function: types.FunctionType) -> list[object]:
    """Return the globals that a function names, and those of its modules' that it names, of the user's own code."""
    if is_installed(sys.modules.get(function.__module__)):
        return []
    names, within = names_in(function.__code__), function.__globals__
    named = [within[name] for name in names if name in within]
    modules = [vars(one) for one in named if type(one) is types.ModuleType and not is_installed(one)]
    return [*named, *(module[name] for module in modules for name in names if name in module)]
