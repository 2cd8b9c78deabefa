"""How far estimates lie from labels: the figures of one file and one estimator, raw and with one constant.

Start reading at `Scored`, then `figures_of`.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from learn.evaluate import RELATIVE_FLOOR

_QUANTILE = 0.9


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One row and one estimator's answer. `label` None: out of memory, the job needs more than the card."""

    name: str
    group: str
    label: float | None
    estimate: float | None
    reason: str | None = None
    seconds: float | None = None
    doubt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Median and 90th percentile of the errors, and the share of labels above their estimate; None without rows."""

    median: float | None
    p90: float | None
    under: float | None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One estimator on one file's rows.

    ok, oom        rows asked, by what happened to them; answered_ok and answered_oom of those have an estimate
    refusals       reason -> rows
    raw            of the estimates as they are, over the ok rows; relative, for ratios absolute
    constant       median of label - estimate over the same rows, in the target's unit: the one thing that is fitted
    shifted        with the constant added to every estimate
    fit_right      share of the ok and oom rows told right whether they need more than the card, constant added;
                   fit_right_raw without it; fit_right_oom of the oom rows alone. None without a card
    """

    file: str
    estimator: str
    ok: int
    oom: int
    answered_ok: int
    answered_oom: int
    refusals: dict[str, int]
    raw: Errors
    constant: float | None
    shifted: Errors
    fit_right: float | None
    fit_right_raw: float | None
    fit_right_oom: float | None
    median_seconds: float | None

    def to_mapping(self) -> dict:
        return asdict(self)


def figures_of(
    file: str, estimator: str, rows: Sequence[Scored], *, card: float | None, relative: bool = True
) -> Figures:
    """The figures of rows that were all asked of one estimator. `card`: the device's memory, in the labels' unit."""
    ok = [row for row in rows if row.label is not None]
    label, estimate = _answered(ok)
    constant = float(np.median(label - estimate)) if label.size else None
    answered = [row for row in rows if row.estimate is not None]
    seconds = [row.seconds for row in answered if row.seconds is not None]

    def right(rows: Sequence[Scored], shift: float) -> float | None:
        if card is None or not rows:
            return None
        return float(np.mean([(row.estimate + shift > card) == (row.label is None) for row in rows]))

    return Figures(
        file=file,
        estimator=estimator,
        ok=len(ok),
        oom=len(rows) - len(ok),
        answered_ok=int(label.size),
        answered_oom=len(answered) - int(label.size),
        refusals=dict(Counter(row.reason or "no answer" for row in rows if row.estimate is None).most_common()),
        raw=_errors(label, estimate, relative),
        constant=constant,
        shifted=_errors(label, estimate + (constant or 0.0), relative),
        fit_right=right(answered, constant or 0.0),
        fit_right_raw=right(answered, 0.0),
        fit_right_oom=right([row for row in answered if row.label is None], constant or 0.0),
        median_seconds=float(np.median(seconds)) if seconds else None,
    )


def by_group(rows: Sequence[Scored], constant: float | None, *, relative: bool = True) -> dict[str, tuple[int, Errors]]:
    """group -> (ok rows answered, errors with the whole file's constant added), groups in alphabetical order."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        if row.label is not None and row.estimate is not None:
            groups[row.group].append(row)
    found = {}
    for group, members in sorted(groups.items()):
        label, estimate = _answered(members)
        found[group] = len(members), _errors(label, estimate + (constant or 0.0), relative)
    return found


def worst_of(
    rows: Sequence[Scored], constant: float | None, n: int, *, relative: bool = True
) -> list[tuple[Scored, float]]:
    """The `n` ok rows furthest off, constant added: (row, signed error), the furthest first."""
    ok = [row for row in rows if row.label is not None and row.estimate is not None]
    signed = []
    for row in ok:
        gap = row.estimate + (constant or 0.0) - row.label
        if not relative or row.label >= RELATIVE_FLOOR:
            signed.append((row, gap / row.label if relative else gap))
    return sorted(signed, key=lambda pair: -abs(pair[1]))[:n]


def sample(groups: Sequence[str], n: int | None, seed: int | str) -> list[int]:
    """`n` positions, ascending, each group in proportion to its size; all for None. The same seed, the same choice; a
    larger `n` only adds to it."""
    if n is None or n >= len(groups):
        return list(range(len(groups)))
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    ranked = []
    for group in sorted(members):
        order = members[group]
        draw = random.Random(f"{seed}/{group}")
        draw.shuffle(order)
        # A random place between equal steps, so that of many groups of a few rows each some are in, not all or none.
        ranked += [((rank + draw.random()) / len(order), index) for rank, index in enumerate(order)]
    return sorted(index for _, index in sorted(ranked)[:n])


def _answered(rows: Sequence[Scored]) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(row.label, row.estimate) for row in rows if row.estimate is not None]
    table = np.array(pairs, dtype=float).reshape(len(pairs), 2)
    return table[:, 0], table[:, 1]


def _errors(label: np.ndarray, estimate: np.ndarray, relative: bool) -> Errors:
    if not label.size:
        return Errors(median=None, p90=None, under=None)
    errors = np.abs(estimate - label)
    under = float((estimate < label).mean())
    if relative:
        usable = label > 0
        errors = errors[usable] / label[usable]
    if not errors.size:
        return Errors(median=None, p90=None, under=under)
    return Errors(median=float(np.median(errors)), p90=float(np.quantile(errors, _QUANTILE)), under=under)
