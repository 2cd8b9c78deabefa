"""Bounds: scores of held-out rows, by row or by group, what share of left-out rows they hold, shares of causes.

Start reading at `conformal_score`. A score says how far a row lies above its estimate, as a multiple of its margin. A
learned estimator's bound follows from such scores (`learn.estimators.protocol.ResidualPrediction`), that of a traced
step from its causes (`learn.estimation.memory_causes`), of which `learn.fit_bound` fits how much of each is taken.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LEVEL = 0.99  # of the bounds that are told and judged


def conformal_score(scores: np.ndarray, level: float) -> float:
    """Return what `level` of new scores stay under, by these ascending ones of held-out rows; never below 0."""
    rank = min(conformal_rank(len(scores), level), len(scores))
    return max(float(scores[rank - 1]), 0.0) if scores.size else 0.0


def conformal_rank(m: int, level: float) -> int:
    """1-based rank of the calibration residual that bounds a new one with probability `level`; may exceed m."""
    return math.ceil((m + 1) * level - 1e-9)


def too_few_for(level: float, m: int) -> str | None:
    """The warning a bound from m residuals has to carry at `level`, or None."""
    if conformal_rank(m, level) <= m:
        return None
    needed = math.ceil(level / (1 - level) - 1e-9)
    return (
        f"{m} calibration rows are too few for a {level:.0%} bound (it takes {needed}): the bound is the largest "
        f"error seen, which holds for about {m / (m + 1):.1%}"
    )


@dataclass(frozen=True, kw_only=True)
class Held:
    """Share of left-out rows that a bound held.

    Args:
        share: Of the rows, each judged by a bound that had seen none of its group.
        rows: Their number.
        groups: The number of groups; each was left out once.
        kind: What a group is, in the plural.
    """

    share: float
    rows: int
    groups: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class MemoryBound:
    """A bound that a job's memory stays below, whoever gives it.

    Args:
        coverage: Share of jobs that stay below the bound, which is `quantiles_mib[coverage]`.
        quantiles_mib: Probability -> MiB that memory stays below with it, or falls to below one half.
        causes_mib: Cause -> MiB by which the bound lies above the estimate for it.
        least_card_mib: Memory of the smallest card that has room for the job. None: what the bound says.
        held_out: What such bounds held of left-out rows, as `Memory.bound_held_out` has it; empty where nobody counted.
    """

    coverage: float
    quantiles_mib: Mapping[float, float]
    causes_mib: Mapping[str, float]
    least_card_mib: float | None = None
    held_out: Mapping[str, Any] = field(default_factory=dict)


def group_score(score: np.ndarray, group: np.ndarray, level: float) -> float:
    """Return what `level` of the scores stay under, where each group counts alike, however many rows it has.

    So a new group's scores do on average, as far as the groups are like it (pooled distributions of groups: Dunn,
    Wasserman and Ramdas 2022, arXiv 1809.07441). A single wrong label moves it little.

    Args:
        score: (n,) of rows whose group took no part in making estimate and margin.
        group: (n,) names.
        level: A share of rows.
    """
    _, member, sizes = np.unique(group.astype(str), return_inverse=True, return_counts=True)
    order = np.argsort(score)
    below = np.cumsum((1 / (sizes[member] * len(sizes)))[order])
    return float(score[order][min(int(np.searchsorted(below, level - 1e-9)), len(score) - 1)])


def held_of(score: np.ndarray, group: np.ndarray, bound_of: Callable[[np.ndarray], float], kind: str) -> Held | None:
    """Return what share of rows lies below the bounds that the other groups' rows make; None with a single group.

    Args:
        score, group: (n,) as above.
        bound_of: Takes (n,) bool, the rows that may be seen, and returns the bound of the others' scores.
        kind: What a group is, in the plural.
    """
    names, member = np.unique(group.astype(str), return_inverse=True)
    if len(names) < 2:
        return None
    bounds = np.array([bound_of(member != index) for index in range(len(names))])
    return Held(share=float((score <= bounds[member]).mean()), rows=len(score), groups=len(names), kind=kind)


def least_held(checked: Iterable[Held]) -> Held:
    """Return the answer of the kind of group whose left-out rows a bound held least."""
    return min(checked, key=lambda held: held.share)


@dataclass(frozen=True, kw_only=True)
class BoundShares:
    """The content of the file.

    Args:
        of_causes: Cause -> how many times its own figure it adds to the 99 % margin.
        scores: Coverage -> share of that margin.
        held: What the 99 % bound held of left-out rows, by kind of group.
        rows: Source -> number of its rows.
    """

    of_causes: Mapping[str, float]
    scores: Mapping[float, float]
    held: tuple[Held, ...] = ()
    rows: Mapping[str, int]

    def text(self) -> str:
        """Return the file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def packaged_path() -> Path:
    """Return the place of the packaged file."""
    return Path(__file__).parents[1] / "estimation" / "bound_by_causes.json"


@functools.cache
def bound_shares() -> BoundShares:
    """Return the packaged shares."""
    stored = json.loads(packaged_path().read_text())
    return BoundShares(
        of_causes=stored["of_causes"],
        scores={float(coverage): score for coverage, score in stored["scores"].items()},
        held=tuple(Held(**held) for held in stored["held"]),
        rows=stored["rows"],
    )
