"""A batch of another size: the first dimension of every input, counted and scaled.

Start reading at `with_batch_size`; `learn.job.of_module` says what inputs are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from learn.job import checked_shape, first_sizes, holds_tensors, is_shape, is_tensor

if TYPE_CHECKING:
    from torch import Tensor


def batch_size_of(inputs: Any) -> int:
    """Return the number of samples in a module's inputs: the first dimension of the first tensor or shape.

    Raises:
        UsageError: No input has a first dimension.
    """
    sizes = first_sizes(inputs)
    if not len(sizes):
        raise UsageError("inputs have no batch to scale: give tensors or shapes, as in input=[64,3,224,224]")
    return checked_shape(sizes)[0]


def with_batch_size(inputs: Any, batch_size: int, *, from_size: int) -> Any:
    """Return a module's inputs, or its target, for a batch of another size.

    Rows of tensors with values are repeated in turn. Large tensors lose their values, which the trace does not keep
    either. A list of tensors is a list of samples where it is as long as the batch. A first dimension of 1 in a larger
    batch is broadcast, and stays.

    Args:
        inputs: As `learn.job.of_module` takes them.
        batch_size: Samples in the new batch.
        from_size: Samples in the batch that is given.

    Raises:
        UsageError: A first dimension is not the batch's.
    """
    if batch_size == from_size:
        return inputs
    if isinstance(inputs, Sequence) and not is_shape(inputs) and not isinstance(inputs, str):
        return tuple(_scaled(one, batch_size, from_size, f"input {at}") for at, one in enumerate(inputs, start=1))
    return _scaled(inputs, batch_size, from_size, "the input")


def _scaled(value: Any, to: int, size: int, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _scaled(one, to, size, f"input {key}") for key, one in value.items()}
    if is_tensor(value):
        return resized(value, [to, *value.shape[1:]]) if value.dim() and _has_batch(value.shape, size, name) else value
    if is_shape(value):
        return [to, *value[1:]] if _has_batch(value, size, name) else value
    if isinstance(value, list | tuple) and holds_tensors(value):
        if len(value) == size:
            return [value[at % size] for at in range(to)]
        return [_scaled(one, to, size, f"{name}, element {at}") for at, one in enumerate(value, start=1)]
    return value


def _has_batch(sizes: Sequence[int], size: int, name: str) -> bool:
    if sizes[0] == size:
        return True
    if sizes[0] == 1:
        return False
    raise UsageError(
        f"{name} has the shape {list(sizes)}, but the batch has {size} samples: only a first dimension of {size} or 1 "
        "can be scaled"
    )


def resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of another shape in the same memory format: shortened, or its values repeated in turn.

    Large tensors lose their values, which a trace does not keep either.
    """
    import torch

    from featurize.values import LARGEST

    if list(shape) == list(tensor.shape):
        return tensor
    made = torch.empty(tuple(shape), dtype=tensor.dtype, device="meta")
    if not tensor.is_meta and made.numel() <= LARGEST:
        made = tensor.detach()
        for dim, size in enumerate(shape):
            made = made.index_select(dim, torch.arange(size, device=made.device) % tensor.shape[dim])
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format):
        made = made.contiguous(memory_format=memory_format)
    return made.requires_grad_(tensor.requires_grad)
