"""Truths about all numbers of a tensor that only computing the step would give: they are taken to be finite.

Start reading at `Truths.of`. Models ask `isnan(x).any()`, `isfinite(x).all()`, and what follows from the answers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Iterable

import torch
from torch import Tensor

FINITE = "numbers that the step computes are taken to be finite where the model asks"
# Of numbers that the step computes, only this is assumed: they are finite.
_OF_FINITE = {"aten::isnan": False, "aten::isinf": False}
_NEGATIONS = frozenset({"aten::logical_not", "aten::bitwise_not"})
_CONJUNCTIONS = frozenset({"aten::logical_and", "aten::bitwise_and", "aten::mul"})
_DISJUNCTIONS = frozenset({"aten::logical_or", "aten::bitwise_or"})
_REDUCTIONS = frozenset({"aten::any", "aten::all"})
ABOUT_FINITE = frozenset(
    {*_OF_FINITE, *_NEGATIONS, *_CONJUNCTIONS, *_DISJUNCTIONS, *_REDUCTIONS, "aten::eq", "aten::ne"}
)


class Truths:
    """Truth values that are the same for all places of a tensor, of any size, as long as it lives.

    Args:
        known: Storages of which the values themselves are known.
    """

    def __init__(self, known: Container[int]) -> None:
        self._known = known
        self._uniform: dict[int, tuple[weakref.ref, bool]] = {}

    def note(self, tensor: Tensor, truth: bool) -> None:
        """Note what holds at all places of a tensor."""
        storage = tensor.untyped_storage()
        self._uniform[storage._cdata] = weakref.ref(storage, forgetter(self._uniform, storage._cdata)), truth

    def forget(self, storages: Iterable[int]) -> None:
        """Forget what was overwritten."""
        for key in storages:
            self._uniform.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._uniform.clear()

    def of(self, name: str, args: tuple) -> bool | None:
        """Return what an operator of `ABOUT_FINITE` gives at all places; None where that is not known."""
        first = args[0]
        if not isinstance(first, Tensor) or not first.is_meta:
            return None
        if first.is_floating_point():
            if first.untyped_storage()._cdata in self._known:
                return None
            if name in _OF_FINITE:
                return _OF_FINITE[name]
            itself = len(args) > 1 and args[1] is first  # as in isfinite
            if name in ("aten::eq", "aten::ne") and (itself or _is_infinite(args[1])):
                return (name == "aten::eq") == itself
            return None
        if first.dtype is not torch.bool or not self._uniform:
            return None
        truths = [self._uniform.get(t.untyped_storage()._cdata) for t in args if isinstance(t, Tensor)]
        if None in truths:
            return None
        held = [truth for _, truth in filter(None, truths)]
        if name in _NEGATIONS:
            return not held[0]
        if name in _CONJUNCTIONS:
            return all(held)
        return any(held) if name in _DISJUNCTIONS else held[0] if name in _REDUCTIONS else None


def forgetter(table: dict, key: int) -> Callable[[weakref.ref], None]:
    """Return what drops a table's entry when the storage ends whose reference is its first value."""

    def forget(ref: weakref.ref) -> None:
        if key in table and table[key][0] is ref:
            del table[key]

    return forget


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and math.isinf(value)
