"""Tensors that consist of other tensors: one rank's part of a distributed tensor, float8 values and their scale.

Start reading at `plain_parts`. PyTorch calls them traceable wrapper subclasses; operators on them run as operators on
their parts, and only these have memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn, strided

PLAIN = (Tensor, nn.Parameter)  # compared first: `isinstance` of a parameter's class runs Python
SEQUENCES = (list, tuple)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with memory that a tensor consists of: itself, if it wraps no others."""
    if type(tensor) in PLAIN or not is_wrapper(type(tensor)):
        return [tensor]
    # Not by __tensor_flatten__: torchao's weights read a value there, which tensors on meta do not have.
    attributes = [getattr(tensor, name, None) for name in (*_slots(type(tensor)), *vars(tensor))]
    return [part for item in attributes if isinstance(item, Tensor) for part in plain_parts(item)]


def is_freed(tensor: Tensor) -> bool:
    """Return whether the memory of a strided tensor was freed (`resize_(0)` of its storage): it has no values."""
    if type(tensor) not in PLAIN or tensor.layout is not strided or not tensor.numel():
        return False
    return (tensor.storage_offset() + span(tensor)) * tensor.itemsize > tensor.untyped_storage().nbytes()


def make_empty(like: Tensor, device: str = "meta") -> Tensor:
    """Return `torch.empty_like` of a tensor on a device. For meta tensors, that is written in Python."""
    if type(like) in PLAIN and like.layout is strided and not like.is_quantized:
        made = torch.empty(like.shape, dtype=like.dtype, device=device)
        if made.stride() == like.stride():
            return made
    return torch.empty_like(like, device=device)


def span(tensor: Tensor) -> int:
    """Return the number of elements of a strided tensor's memory from its first to its last."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a rank's part of a distributed tensor; any other tensor unchanged."""
    return plain_parts(tensor)[0]


def own_part(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a rank's part of a gradient. The gradient of an embedding's rows is full on each rank before the
    update."""
    if is_shared(parameter):
        placements = cast(Any, parameter).placements
        if cast(Any, gradient).placements != placements:
            gradient = cast(Any, gradient).redistribute(placements=placements)
    return local_tensor(gradient)


def mesh_of(tensor: Tensor) -> Any:
    """Return the mesh of ranks that a tensor is spread over (a DTensor's); None for any other tensor."""
    return getattr(tensor, "device_mesh", None)


def is_shared(tensor: Tensor) -> bool:
    """Return whether a tensor is spread over ranks (a DTensor)."""
    return mesh_of(tensor) is not None


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and those in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, SEQUENCES):
            yield from tensors_in(value)


def meta_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors on meta that have memory, also those in lists; for a sparse tensor, its indices and its
    values."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_sparse:
                tensors += meta_tensors((value._indices(), value._values()))
            elif value.is_meta and type(value) in PLAIN:  # nearly always
                tensors.append(value)
            elif value.is_meta:
                tensors += plain_parts(value)
        elif isinstance(value, SEQUENCES):
            tensors += meta_tensors(value)
    return tensors


def bytes_read(tensor: Tensor) -> int:
    """Return the bytes of reading a tensor once; an expanded one takes at most its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


@functools.cache
def is_wrapper(kind: type) -> bool:
    """Return whether tensors of a type wrap others."""
    return kind not in PLAIN and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for parent in kind.__mro__ for name in vars(parent).get("__slots__", ()))
