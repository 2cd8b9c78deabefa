"""A model's batch: positional or keyword arguments, with tensors anywhere in lists, tuples and mappings.

Start reading at `call`. Positional arguments are a tuple or a list, keyword arguments a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from featurize.recording.values import remember

Inputs: TypeAlias = "tuple[object, ...] | list[object] | Mapping[str, object]"


def call(model: nn.Module, inputs: Inputs) -> object:
    """Run the model on positional or keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def tensors_of(value: object) -> Iterator[Tensor]:
    """Return every tensor of a value, in order."""
    return (tensor for _name, tensor in named_tensors(value))


def named_tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a batch with its name: `input_ids`, `targets[0].boxes`, `input 1` for a positional one."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from named_tensors(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for at, one in enumerate(value):
            yield from named_tensors(one, f"{name}[{at}]" if name else f"input {at + 1}")


def mapped(value: object, function: Callable[[Tensor], Tensor]) -> object:
    """Return the value with every tensor replaced by what `function` makes of it; mappings become plain ones."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(one, function) for key, one in value.items()}
    if isinstance(value, list | tuple):
        made = [mapped(one, function) for one in value]
        if isinstance(value, tuple):
            return value._make(made) if hasattr(value, "_make") else tuple(made)
        return made
    return value


def arguments(value: object) -> Inputs:
    """Return a batch as arguments: one tensor is a single positional one."""
    if isinstance(value, Mapping):
        return {str(key): one for key, one in value.items()}
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def shape_of(value: object) -> Hashable:
    """Return what tells two batches apart for a trace: structure, shapes, types, and which masks are all ones.

    Other values decide nothing of a step's memory in most models: two batches of token ids count as one.
    """
    if isinstance(value, Tensor):
        kind = tuple(value.shape), value.stride(), value.dtype, value.requires_grad
        values = vars(value).get("gpufarm_values") if value.is_meta else value
        if values is None or values.is_floating_point() or values.is_complex() or not values.numel():
            return kind
        return kind, bool((values == 1).all()) if bool((values <= 1).all()) else None
    if isinstance(value, Mapping):
        return tuple((key, shape_of(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(shape_of(one) for one in value)
    return type(value), repr(value)


def as_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same layout on meta, which stands for the given values where these are few."""
    if tensor.is_meta:
        return tensor
    made = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    return remember(made, tensor)


def own_loss(output: object) -> Tensor | None:
    """Return the loss that a model's output holds: its `loss`, or the sum of a mapping of losses, as detectors return
    while they train. None if there is none."""
    held = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(held, Tensor):
        return held if held.dim() == 0 else held.mean()
    if isinstance(output, Mapping) and output:
        losses = [one for one in output.values() if isinstance(one, Tensor) and one.dim() == 0]
        if len(losses) == len(output) and all(one.is_floating_point() for one in losses):
            return sum(losses[1:], losses[0])
    return None
