"""Bounds that hold for groups of rows that no fit has seen: families, sources, GPU models.

Start reading at `group_score`. A score says how far a row lies above its estimate, as a multiple of its margin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Held:
    """What share of left-out rows a bound held.

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
