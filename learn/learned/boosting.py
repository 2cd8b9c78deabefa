"""Gradient-boosted trees of LightGBM, which only a fit imports; for the hybrid with a robust, one-sided loss.

Start reading at `boost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from learn.learned.trees import Trees

if TYPE_CHECKING:
    import lightgbm

MEMBERS = 3  # fits that differ in their random choices; the mean of them is smoother than one
_ROBUST = 0.05  # errors beyond it pull no harder (Huber): a few labels are wrong
_NOTHING_KNOWN = 1e-3  # curvature where a row has nothing to say


@dataclass(frozen=True)
class Settings:
    """least: rows a leaf, of large tables (a fiftieth of small ones); share: of the columns, tried by each tree.
    quantile: what is estimated; None: the middle."""

    rounds: int
    leaves: int
    least: int
    l2: float
    share: float
    quantile: float | None = None


@dataclass(frozen=True)
class Boosters:
    """The start plus the mean of a few boosters, for as long as a fit lasts; `trees` is what is kept."""

    boosters: list[lightgbm.Booster]
    start: float = 0.0

    def predict(self, table: np.ndarray) -> np.ndarray:
        """Return (n,) values for the rows of (n, columns) float64."""
        return self.start + np.mean([booster.predict(table, num_threads=1) for booster in self.boosters], axis=0)

    def trees(self) -> Trees:
        """Return the trees, which predict the same figures."""
        return Trees.of_lightgbm([booster.model_to_string() for booster in self.boosters], self.start)


def boost(
    settings: Settings,
    seed: int,
    table: np.ndarray,
    label: np.ndarray,
    at_least: np.ndarray | None,
    weight: np.ndarray,
    members: int = MEMBERS,
) -> Boosters:
    """Fit boosters. What they give depends neither on the rows' order nor on the number of cores.

    Args:
        settings: Of the trees.
        seed: Of the first member; each has one of its own.
        table: (n, columns).
        label: (n,).
        at_least: (n,) bool: the label is a bound from below, so that a prediction above it is not an error. None: no
            label is.
        weight: (n,).
        members: The number of boosters.
    """
    import lightgbm

    n = len(label)
    bound = np.zeros(n, dtype=bool) if at_least is None else at_least
    spread = max(_ROBUST, float(np.median(np.abs(label - np.median(label)))))

    def objective(predicted: np.ndarray, _data) -> tuple[np.ndarray, np.ndarray]:
        gap = predicted - label
        satisfied = bound & (gap > 0)
        gradient = np.where(satisfied, 0.0, np.clip(gap, -spread, spread))
        return gradient * weight, np.where(satisfied, _NOTHING_KNOWN, 1.0) * weight

    wanted: dict[str, Any]
    if settings.quantile is None:  # the objective has the weights, and begins at the start
        start = float(np.median(label[~bound])) if (~bound).any() else 0.0
        wanted, of_data = {"objective": objective}, {"label": label, "init_score": np.full(n, start)}
    else:
        start = float(np.quantile(label, settings.quantile))
        wanted = {"objective": "quantile", "alpha": settings.quantile}
        of_data = {"label": label - start, "weight": weight}
    about = {"verbosity": -1, "num_threads": 1, "min_data_in_bin": 1}
    parameters = {
        **wanted,
        **about,
        "boost_from_average": False,
        "learning_rate": 0.05,
        "num_leaves": settings.leaves,
        "min_data_in_leaf": int(np.clip(n // 50, 3, settings.least)),
        "lambda_l2": settings.l2,
        "feature_fraction": settings.share,
        "bagging_fraction": 0.7,
        "bagging_freq": 1,
        "deterministic": True,
        "force_row_wise": True,
    }
    boosters = []
    for member in range(members):
        data = lightgbm.Dataset(table, **of_data, params=about)
        boosters.append(lightgbm.train({**parameters, "seed": seed + member}, data, num_boost_round=settings.rounds))
    return Boosters(boosters, start)
