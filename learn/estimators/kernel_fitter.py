"""Tools of all fits of kernels: kernels of many rows as columns, gradient descent, rows left out in turn.

Start reading at `descended`, and at `judged_by_splits`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch

from featurize.timing.calls import Calls

Values = Mapping[str, torch.Tensor]
Columns = TypeVar("Columns")
Fitted = TypeVar("Fitted")
LEARNED_FROM = "learned from"  # which rows are judged: those that were fitted on
_LAST_PART = 0.7  # of the iterations, from which on the rate is the last one
_FREE = (-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How values are found.

    Args:
        of_priors: What a squared distance of 1 from where a value began adds to the error.
        firmness: Name -> by how many times more it adds for this value.
        iterations: Number of steps; 0 gives where the values begin.
        rate, last_rate: Learning rate, and the one of the last 30 % of the steps.
        limits: Name -> the least and the most that the value may be.
    """

    of_priors: float
    firmness: Mapping[str, float] = field(default_factory=dict)
    iterations: int
    rate: float
    last_rate: float
    limits: Mapping[str, tuple[float, float]]


def descended(
    begin: Values, losses: Callable[[Values], torch.Tensor], weights: np.ndarray, how: Descent
) -> dict[str, torch.Tensor]:
    """Return the values that make the rows' weighted losses small and stay near to where they began, found by Adam.

    All values are one vector that the optimizer steps over: with one of its own each, starting the many small operators
    takes longer than their arithmetic.

    Args:
        begin: Name -> where the value begins; left as it is.
        losses: Gives each row's loss, (rows,), for values with the names and shapes of `begin`.
        weights: Of the rows, (rows,).
        how: Steps, rates and limits.
    """
    sizes = torch.tensor([value.numel() for value in begin.values()])
    weight = of_rows(weights)

    def of_each(numbers: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.float64).repeat_interleave(sizes)

    def named(vector: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(begin.items(), vector.split(sizes.tolist()), strict=True)
        return {name: part.view(value.shape) for (name, value), part in parts}

    start = torch.cat([value.flatten() for value in begin.values()])
    cost = how.of_priors * of_each(how.firmness.get(name, 1.0) for name in begin)
    least, most = (of_each(how.limits.get(name, _FREE)[end] for name in begin) for end in (0, 1))
    vector = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([vector], lr=how.rate)
    for iteration in range(how.iterations):
        if iteration == int(_LAST_PART * how.iterations):
            optimizer.param_groups[0]["lr"] = how.last_rate
        optimizer.zero_grad()
        ((weight * losses(named(vector))).sum() + (cost * (vector - start) ** 2).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            vector.clamp_(least, most)
    return named(vector.detach())


def robust(off: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return the Huber loss over the tolerance: what is further off than it counts in proportion, not squared."""
    zero = torch.zeros_like(off)
    return torch.nn.functional.huber_loss(off, zero, delta=tolerance, reduction="none") / tolerance


def weights_by(
    labels: np.ndarray, of: np.ndarray, *, power: float, factors: Mapping[str, float] | None = None
) -> np.ndarray:
    """Return each row's weight, (rows,), 1 in sum: 0 outside the mask `of`, else by the number of rows of its label.

    Args:
        labels: Of the rows.
        of: Mask of the rows that are fitted on.
        power: 1: all labels count alike; 0.5: a label counts by the root of its number.
        factors: Label -> weight beside that.
    """
    weight = np.zeros(len(labels))
    for label in np.unique(labels[of]):
        inside = of & (labels == label)
        weight[inside] = (factors or {}).get(label, 1.0) / inside.sum() ** power
    return weight / weight.sum()


def left_out_errors(
    known: np.ndarray, masks: Iterable[np.ndarray], errors_without: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return each row's errors from a fit without it, as `known` is shaped; NaN where no such fit is possible.

    Args:
        known: Errors of the fit on all rows, (rows, ...).
        masks: Of the rows that are left out in turn.
        errors_without: Mask of what is left out -> errors of all rows, fitted on the others.
    """
    errors = np.full_like(known, np.nan)
    for mask in masks:
        if mask.any() and not mask.all():
            errors[mask] = errors_without(mask)[mask]
    return errors


def judged_by_splits(
    fitted: Callable[[np.ndarray], Fitted],
    errors_of: Callable[[Fitted], np.ndarray],
    splits: Mapping[str, Collection[np.ndarray]],
    progress: Callable[[str, int, int], None] = lambda _text, _done, _of: None,
    label: str = "fitting",
) -> tuple[Fitted, dict[str, np.ndarray]]:
    """Return the fit on all rows, and how far each row is off by it (`LEARNED_FROM`) and by fits without the row.

    Args:
        fitted: Fits to the rows of a mask, (rows,).
        errors_of: Errors of all rows by a fit, (rows, ...).
        splits: Title -> masks of the rows that are left out in turn; at least one of them all.
        progress: Called before each fit with a text, the number of fits done and their total.
        label: How the text begins.
    """
    fits, total = itertools.count(), 1 + sum(map(len, splits.values()))

    def errors_without(split: str, mask: np.ndarray) -> np.ndarray:
        progress(f"{label}, {split}", next(fits), total)
        return errors_of(fitted(~mask))

    progress(label, next(fits), total)
    learned = fitted(np.ones_like(next(itertools.chain.from_iterable(splits.values()))))
    errors = {LEARNED_FROM: errors_of(learned)}
    for split, masks in splits.items():
        errors[split] = left_out_errors(errors[LEARNED_FROM], masks, functools.partial(errors_without, split))
    return learned, errors


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


def of_rows(values: Iterable[float]) -> torch.Tensor:
    """Return one number a row as a column in double precision."""
    return torch.tensor(list(values), dtype=torch.float64)


def _one_column(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return tuple(itertools.chain.from_iterable(parts)) if isinstance(parts[0], tuple) else sum(parts)
