"""Runs operators on meta tensors, most of them only once: what one gives depends on its arguments' shapes alone.

Start reading at `meta_result`. Half of PyTorch's meta kernels are written in Python and take 0.1 ms and more; a step
repeats the same few hundred calls over and over.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from featurize.operators.table import MULTI_TENSOR
from featurize.operators.tensor_parts import tensors_in

# For-each operators that give new tensors like those of their first list; all of them floating-point.
_FOREACH = frozenset(
    f"aten::_foreach_{name}" for name in ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sqrt")
)
_UNKNOWN = object()
_ITSELF = object()  # the first argument, which stays as it is but for its values
_PLAIN = frozenset({type(None), bool, str, int, float})
_NUMBERS = frozenset({bool, int, float})
_META = torch.device("meta")


class _Uncached(Exception):
    """An argument whose influence on the result is not known."""


# Of all traces of the process: those of one family, or of one model at several sizes, run many of the same calls.
_known: dict[tuple, object] = {}
_MOST_KNOWN = 20_000  # some 20 MB


def meta_result(func: OpOverload, name: str, args: tuple, kwargs: dict) -> Any:
    """Return `func(*args, **kwargs)`, below autograd, of an operator that is no view. New tensors are remembered, and
    that an operator gives its first argument back. Raises what the operator raises."""
    # In place, a for-each operator and a whole step of an optimizer have nothing to compute and nothing to return.
    if name.endswith("_") and name.startswith(MULTI_TENSOR) and all(t.is_meta for t in args[0]):
        return None  # but of an optimizer's step counters, which are not on meta
    if name in _FOREACH and all(t.is_meta and t.is_floating_point() for t in args[0]):
        # `empty_like` of a meta tensor is written in Python.
        return [
            _make(_Spec((t.shape, t.stride(), t.dtype))) if t.is_contiguous() else torch.empty_like(t) for t in args[0]
        ]
    try:
        # The default type decides where a call names none.
        key = (func, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items())) if kwargs else None)
    except _Uncached:
        if name == "aten::add_" and args[0].is_meta and isinstance(args[1], Tensor) and args[1].is_sparse:
            return args[0]  # rows of a sparse gradient are added: there is no meta kernel for it
        return func(*args, **kwargs)
    known = _known.get(key, _UNKNOWN)
    if known is _UNKNOWN:
        out = func(*args, **kwargs)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = _ITSELF if _is_first(out, func, args, key[2]) else _recipe(out, (*args, *kwargs.values()))
        return out
    if known is _ITSELF:
        return args[0]
    return func(*args, **kwargs) if known is None else _make(known)


def _is_first(out: object, func: OpOverload, args: tuple, before: tuple) -> bool:
    """Return whether a result is the first argument, as it was before the call but for its values."""
    if not (isinstance(out, Tensor) and out.is_meta and args and out is args[0]):
        return False
    # Others, as `set_`, may point the argument to other memory under the same shape.
    return torch.Tag.inplace_view not in func.tags and _key(args)[:2] == before[:2]


def _key(values) -> tuple:
    """Return what decides the result's shape. Numbers carry their type: 1 and 1.0 promote differently."""
    parts: list[Hashable] = []
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            if value.is_sparse or (not value.is_meta and value.dim()):  # its values may matter
                raise _Uncached
            parts += (value.shape, value.stride(), value.dtype, value.is_meta)
        elif kind in _PLAIN:
            parts.append((kind, value))
        elif kind is tuple or kind is list:
            plain = not value or type(value[0]) in _NUMBERS
            parts += (tuple(value), tuple(map(type, value))) if plain else (_key(value),)
        elif kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
            parts.append(value)
        else:
            raise _Uncached
    return tuple(parts)


class _Spec(tuple):
    """Size, stride and type of a new tensor."""


def _recipe(out, given) -> object:
    """How to make such a result again; None where it must be run again."""
    if not isinstance(out, Tensor | tuple | list):  # a value that was read, not a tensor
        return None
    inputs = list(tensors_in(given))
    storages = {t.untyped_storage()._cdata for t in inputs}
    shapes_decide = all(t.is_meta for t in inputs)

    def one(value):
        if isinstance(value, Tensor):
            if value.is_sparse:
                raise _Uncached
            storage = value.untyped_storage()
            if type(value) is not Tensor or not value.is_meta or storage._cdata in storages:
                raise _Uncached
            if value.storage_offset() or storage.nbytes() != _span(value) * value.element_size():
                raise _Uncached
            storages.add(storage._cdata)
            return _Spec((tuple(value.shape), value.stride(), value.dtype))
        if type(value) in (tuple, list):
            return type(value)(map(one, value))
        if value is None or (shapes_decide and isinstance(value, bool | int | float)):
            return value
        raise _Uncached

    try:
        return one(out)
    except _Uncached:
        return None


def _make(recipe):
    if type(recipe) is _Spec:
        size, stride, dtype = recipe
        return torch.empty_strided(size, stride, dtype=dtype, device=_META)
    if type(recipe) in (tuple, list):
        return type(recipe)(map(_make, recipe))
    return recipe


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
