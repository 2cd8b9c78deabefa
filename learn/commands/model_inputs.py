"""A model's inputs as a command line has them: shapes, also by keyword, of one type or each of its own.

Start reading at `model_inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.errors import UsageError, shown
from learn.job.batch_lengths import is_of_lengths
from learn.job.inputs import batch_size_of, checked_shape, is_shape, torch_dtype, with_batch_size

_TYPED = {"shape", "dtype"}  # the keys of a shape with a type of its own


def model_inputs(given: list[Any] | Mapping[str, Any] | None, batch: int | None) -> Any:
    """Return the inputs as `learn.estimate` takes them.

    Args:
        given: A shape, a list of positional inputs or a mapping of keyword inputs. Where a shape may stand,
            `{shape: [8, 128], dtype: int64}` may stand as well, and becomes a tensor on meta.
        batch: Samples to scale the first dimension of every input to; None leaves the inputs as they are.

    Raises:
        UsageError: A shape or a type that is none, or a first dimension that is not the batch's.
    """
    return None if given is None else _scaled(_typed(given, "input"), batch)


def model_batches(given: list[Any] | Mapping[Any, Any] | None, batch: int | None) -> Any:
    """Return the batches as `learn.estimate` takes them.

    Args:
        given: Inputs of each step, each as `model_inputs` takes them; sequence lengths, or a mapping of their shares.
        batch: Samples to scale the first dimension of every input to; None leaves the inputs as they are.

    Raises:
        UsageError: As `model_inputs`.
    """
    if given is None or isinstance(given, Mapping) or is_of_lengths(given):
        return given
    return [_scaled(_typed(one, f"batches[{at}]"), batch) for at, one in enumerate(given)]


def _scaled(inputs: Any, batch: int | None) -> Any:
    return inputs if batch is None else with_batch_size(inputs, batch, from_size=batch_size_of(inputs))


def _typed(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        if set(value) == _TYPED:
            return _meta_tensor(value["shape"], value["dtype"], name)
        return {key: _typed(one, f"{name}.{key}") for key, one in value.items()}
    if isinstance(value, list) and not is_shape(value):
        return [_typed(one, f"{name}[{at}]") for at, one in enumerate(value)]
    return value


def _meta_tensor(shape: Any, dtype: Any, name: str) -> Any:
    import torch

    if not is_shape(shape):
        raise UsageError(f"{name}.shape must be a shape such as [64,3,224,224], got {shown(shape)}")
    return torch.empty(checked_shape(shape, f"{name}.shape"), dtype=torch_dtype(dtype, f"{name}.dtype"), device="meta")
