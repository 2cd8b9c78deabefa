"""A batch of another size: the first dimension of every input, counted and scaled.

Start reading at `with_batch_size`; `learn.workload.of_module` says what inputs are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from learn.workload import checked_shape, first_sizes, holds_tensors, is_shape, is_tensor

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
        inputs: As `learn.workload.of_module` takes them.
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
        if not value.dim() or not _has_batch(value.shape, size, name):
            return value
        return _rows(value, to)
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


def _rows(tensor: Tensor, to: int) -> Tensor:
    """Return a tensor of `to` rows in the same memory format."""
    import torch

    from featurize.values import LARGEST

    shape = (to, *tensor.shape[1:])
    if tensor.is_meta or to * tensor[0].numel() > LARGEST:
        rows = torch.empty(shape, dtype=tensor.dtype, device="meta")
    else:
        rows = tensor.detach()[torch.arange(to, device=tensor.device) % tensor.shape[0]]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(tensor.dim())
    if memory_format is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format):
        rows = rows.contiguous(memory_format=memory_format)
    return rows.requires_grad_(tensor.requires_grad)
