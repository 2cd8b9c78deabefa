"""Where autograd adds a second gradient into the first one's memory instead of making a third tensor, or keeps one.

Start reading at `in_place_overload`. On a GPU the engine adds in place where nothing else holds the first gradient
(`accumulate` of torch/csrc/autograd/input_buffer.cpp); it never does so under a dispatch mode or on meta tensors.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ADD = torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default


def in_place_overload(func, args: tuple, kwargs: dict, alone: tuple[int, int] | None):
    """`aten.add_.Tensor` if this call of `func`, made during a backward pass, would be in place on a GPU; else None.
    `alone` is what `references_of_the_last_holder` gave.

    A sum within a node's own formula whose first operand nothing else holds is taken for one of the engine's.
    """
    if func is not _ADD or kwargs or len(args) != 2 or not isinstance(args[1], Tensor) or torch.is_grad_enabled():
        return None
    old, new = args
    if old.is_sparse or not old.is_meta or old.shape != new.shape or old.dtype is not new.dtype or not _is_dense(old):
        return None
    return torch.ops.aten.add_.Tensor if _references(old) == alone else None


def taken_over(func, args: tuple) -> Tensor | None:
    """A tensor that shares a sparse gradient's indices and values, which the engine, as it makes them the parameter's,
    takes over on a GPU and copies under a dispatch mode (`accumulateGrad` of autograd/functions/accumulate_grad.h).
    None if this call of `func`, made during a backward pass, is no such copy."""
    if func is not _CLONE or not args[0].is_sparse or torch.is_grad_enabled():
        return None
    indices, values = args[0]._indices(), args[0]._values()
    return torch.sparse_coo_tensor(indices, values, args[0].shape, check_invariants=False)


_use_count = operator.methodcaller("_use_count")  # which the stubs of torch leave out


def _references(tensor: Tensor) -> tuple[int, int]:
    return _use_count(tensor), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def references_of_the_last_holder() -> tuple[int, int] | None:
    """The reference counts that a dispatch mode sees of a gradient that the engine alone holds, and of its storage.

    Counted on a small graph, as they differ between releases; None in one that does not tell. Not for use within a
    dispatch mode, where there is no autograd."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is _ADD:
                seen.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    try:
        with torch.enable_grad():
            h = torch.empty(2, device="meta", requires_grad=True) * 1.0
            outputs = torch.relu(h), torch.tanh(h)
            ones = [torch.empty_like(y) for y in outputs]
            with Watch():
                torch.autograd.backward(outputs, ones)
    except AttributeError:  # a release that does not tell
        return None
    return seen[0] if seen else None


def _is_dense(tensor: Tensor) -> bool:
    """Return whether its elements fill its memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if step != expected:
            return False
        expected *= size
    return True
