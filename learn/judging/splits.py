"""Share rows out to fit on and to ask: near-copies are never on both sides.

Start reading at `parts_of`; `split` and `hold_out` are what it and `learn.judging.evaluate` share.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from conf.errors import UsageError
from featurize.device.device_spec import plain_device
from learn.rows.data import Rows

SPLITS = ("cv", "holdout", "leave_one_out")
GROUPINGS = ("module", "family", "device", "source")
TEST_TENTHS = 3  # of ten folds: 30 % held out


@dataclass(frozen=True)
class Part:
    """One fit: positions of the rows that it sees, and of those that it is asked, ascending and of no common group."""

    name: str
    inside: np.ndarray
    outside: np.ndarray


def parts_of(
    rows: Rows,
    strata: np.ndarray,
    *,
    how: str,
    folds: int = 3,
    by: str | None = None,
    seed: int = 0,
    fitted_on: np.ndarray | None = None,
    asked: np.ndarray | None = None,
) -> tuple[Part, ...]:
    """The fits of one split. Every asked row is outside exactly one part; with `holdout`, of the rows that may be
    fitted on only the held-out ones are.

    how        cv: `folds` folds, stratified and grouped; holdout: 30 % held out, as `learn.fit` does; leave_one_out:
               each group of `by` in turn
    strata     (n,) int: shared out evenly over folds
    fitted_on  (n,) bool: rows that may be fitted on (default all); the others are asked of a fit on all of these
    asked      (n,) bool: rows that answers are wanted of (default all)

    Raises `UsageError` where a split needs more groups than there are.
    """
    fitted_on = np.ones(len(rows), dtype=bool) if fitted_on is None else np.asarray(fitted_on, dtype=bool)
    asked = np.ones(len(rows), dtype=bool) if asked is None else np.asarray(asked, dtype=bool)
    known = np.flatnonzero(fitted_on)
    own = rows.subset(known)
    named: list[tuple[str, np.ndarray]] = []
    if not (asked & fitted_on).any():
        pass
    elif how == "cv":
        require_groups(own, folds, f"folds={folds}")
        for k, (_, outside) in enumerate(split(own, strata[known], folds, seed)):
            named.append((f"fold {k + 1} of {folds}", known[outside]))
    elif how == "holdout":
        require_groups(own, 10, "split=holdout")
        named.append(("held out", known[hold_out(own, strata[known], seed)[1]]))
    else:
        assert by is not None  # leave_one_out is refused without
        keys = keys_of(own, by)
        names = sorted(set(keys))
        if len(names) < 2:
            raise UsageError(f"split=leave_one_out by={by}: all rows are of {by} {names[0]}; it takes two or more")
        named += [(name, known[keys == name]) for name in names]
    if (asked & ~fitted_on).any():
        named.append(("never fitted on", np.flatnonzero(asked & ~fitted_on)))

    group = rows.group.astype(str)
    parts = []
    for name, outside in named:
        inside = np.setdiff1d(known, outside)
        inside = inside[~np.isin(group[inside], group[outside])]
        outside = outside[asked[outside]]
        if len(outside):
            parts.append(Part(name, inside, outside))
    return tuple(parts)


def keys_of(rows: Rows, by: str) -> np.ndarray:
    """(n,) str: what each row is told apart by; spellings of one device are the same."""
    if by == "device":
        return np.array([plain_device(name) for name in rows.device], dtype=object)
    return getattr(rows, by).astype(str)


def split(rows: Rows, classes: np.ndarray, folds: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(inside, outside) positions of each fold: groups whole, classes about equally shared."""
    from sklearn.model_selection import StratifiedGroupKFold

    strata = np.asarray(classes).copy()
    names, counts = np.unique(strata, return_counts=True)
    strata[np.isin(strata, names[counts < folds])] = -1  # classes too rare to share out are shared out together
    if np.unique(strata, return_counts=True)[1].max() < folds:
        strata[:] = 0
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        for inside, outside in splitter.split(np.zeros(len(rows)), strata, rows.group.astype(str)):
            if len(outside):  # with one large group, another fold can be left without any
                yield inside, outside


def hold_out(rows: Rows, classes: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(train, test) positions, ascending; about 30 % of the rows in test, no group in both."""
    tenths = [outside for _, outside in split(rows, classes, 10, seed)]
    test = np.sort(np.concatenate(tenths[:TEST_TENTHS]))
    return np.setdiff1d(np.arange(len(rows)), test), test


def require_groups(rows: Rows, least: int, asker: str) -> None:
    """Raise `UsageError` where there are fewer different configurations than `asker` takes."""
    groups = len(set(rows.group.astype(str)))
    if groups < least:
        raise UsageError(
            f"the {len(rows)} rows of target={rows.target.name} are near-copies of {groups} configurations; {asker} "
            f"takes at least {least} different ones"
        )
