"""A model's inputs as a command line has them: shapes, also by keyword, of one type or each of its own.

Start reading at `model_inputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.errors import UsageError
from learn.batch_sizes import batch_size_of, with_batch_size
from learn.workload import is_shape, torch_dtype

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
    inputs = None if given is None else _typed(given, "input")
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

    if not is_shape(shape) or min(shape) < 1:
        raise UsageError(f"{name}.shape must be a shape such as [64,3,224,224], got {shape!r}")
    return torch.empty(tuple(shape), dtype=torch_dtype(dtype, f"{name}.dtype"), device="meta")
