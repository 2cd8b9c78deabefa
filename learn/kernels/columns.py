"""Kernels of many rows as one sequence of columns.

Start reading at `joined`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import torch

from featurize.kernel_model.calls import Calls

Columns = TypeVar("Columns")


def joined(parts: Sequence[Columns]) -> Columns:
    """Return dataclasses of columns as one: arrays and tuples one behind the other, single numbers added up.

    Args:
        parts: At least one, all of the same class.
    """
    first = parts[0]
    columns = {one.name: [getattr(part, one.name) for part in parts] for one in fields(first)}  # type: ignore[arg-type]
    return type(first)(**{name: _one_column(column) for name, column in columns.items()})


def row_of_kernels(rows: Sequence[int], calls: Sequence[Calls]) -> torch.Tensor:
    """Return the row of each kernel of joined calls, (kernels,), where `calls[i]` are those of `rows[i]`."""
    return torch.repeat_interleave(torch.tensor(rows), torch.tensor([len(one.kind) for one in calls]))


def _one_column(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return tuple(itertools.chain.from_iterable(parts)) if isinstance(parts[0], tuple) else sum(parts)
