"""How far above the fast path's point its memory bound lies: learned of the teacher's, and calibrated.

Start reading at `calibrate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from learn.estimators import LEVEL, Prediction

NEEDS = 200  # quantiles that a teacher's distribution is told by
_LEAST = 1e-3  # of log(bound / point) that is learned: a teacher that is certain has no logarithm
# How much further off the point can be for each reason why a config is unlike what was distilled on, three at most. Of
# MLPs with one or two numbers up to 2.5 times above their range, 1.5 brings the needs covered from 97.4 to 99.1 %.
_FURTHER, _REASONS = 1.5, 3


@dataclass(frozen=True)
class Taught:
    """What the teacher says of n cases, in the target's unit. NaN: no answer.

    point  (n,)
    upper  (n,) its bound, or None
    needs  (n, k) what it holds possible, each as likely as the next; None: all that is known of it is its bound
    """

    point: np.ndarray
    upper: np.ndarray | None = None
    needs: np.ndarray | None = None

    @classmethod
    def of(cls, prediction: Prediction) -> Self:
        """With its bound, where it has one."""
        upper = prediction.upper(LEVEL)
        if upper is None:
            return cls(prediction.point)
        return cls(
            prediction.point, upper, np.stack([prediction.quantile((i + 0.5) / NEEDS) for i in range(NEEDS)], axis=1)
        )

    def rows(self, places: np.ndarray) -> Taught:
        upper, needs = (None if values is None else values[places] for values in (self.upper, self.needs))
        return Taught(self.point[places], upper, needs)

    @property
    def log_ratio(self) -> np.ndarray:
        """(n,) the logarithm of log(bound / point). What makes a teacher unsure multiplies log(bound / point), so this
        is what networks learn of it."""
        if self.upper is None:
            raise ValueError("a teacher without a bound has no ratio of one")
        return np.log(np.maximum(np.log(self.upper / self.point), _LEAST))


@dataclass(frozen=True)
class Bound:
    """log(bound / point) is `times` the teacher's own, as learned, and `off`, how far off the point can well be from
    the teacher's, taken together as independent errors are."""

    times: float
    off: float

    def log_ratio(self, learned: np.ndarray, unlike: np.ndarray | int = 0) -> np.ndarray:
        """(n,) log(bound / point), for (n,) learned values of `Taught.log_ratio` and how many reasons there are why a
        config is unlike what was distilled on."""
        return self.times * np.hypot(np.exp(learned), self.off * _FURTHER ** np.minimum(unlike, _REASONS))


def calibrate(point: np.ndarray, learned: np.ndarray, taught: Taught) -> tuple[Bound, dict[str, float]]:
    """The least bound that, of what the teacher holds possible, 99 % lies below; and how it compares.

    point, learned (n,): what was said of cases by networks that had not seen them. Conformal risk control (Angelopoulos
    et al. 2022, arXiv 2208.02814); the risk of a case is the share of its needs above the bound. Fewer than 100 cases
    are too few for that: the bound is then above all needs.

    Figures: `median`, `p90` of bound over point, `teacher_median` and `teacher_p90` of the teacher's own, `covered`
    (the share of needs below) and `above_teacher` (the share of cases whose bound is above the teacher's own).
    """
    if taught.upper is None:
        raise ValueError("nothing is calibrated on a teacher without a bound")
    known = np.isfinite(taught.point) & np.isfinite(taught.upper)
    own = (taught.upper / taught.point)[known]
    upper = np.log(taught.upper[known])
    taught, centre, learned = taught.rows(known), np.log(point[known]), learned[known]
    needs = upper[:, None] if taught.needs is None else np.log(np.maximum(taught.needs, 1e-9))
    off = float(np.quantile(np.abs(centre - np.log(taught.point)), LEVEL))
    scale = Bound(1.0, off).log_ratio(learned)
    scores = np.sort(((needs - centre[:, None]) / scale[:, None]).ravel())
    n = len(centre)
    may_exceed = max(((1 - LEVEL) * (n + 1) - 1) / n, 0.0) * len(scores)
    times = max(float(scores[len(scores) - 1 - math.floor(may_exceed + 1e-9)]), 0.0)
    bound = Bound(times, off)
    ratio = bound.log_ratio(learned)
    return bound, {
        "median": float(np.median(np.exp(ratio))),
        "p90": float(np.quantile(np.exp(ratio), 0.9)),
        "teacher_median": float(np.median(own)),
        "teacher_p90": float(np.quantile(own, 0.9)),
        "covered": float(np.mean(needs <= (centre + ratio)[:, None])),
        "above_teacher": float(np.mean(upper <= centre + ratio)),
    }
