"""Gradient-boosted trees with a robust, one-sided loss: LightGBM behind what the hybrid estimator needs of it.

Start reading at `Boosted.fit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from learn.learned.tree_model import SavedBooster

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


class Boosted:
    """The mean of a few boosters. What it gives depends neither on the rows' order nor on the number of cores."""

    def __init__(self, settings: Settings, seed: int, members: int = MEMBERS) -> None:
        self.settings, self.seed, self.members = settings, seed, members
        self._boosters: list = []

    def fit(self, table: np.ndarray, label: np.ndarray, at_least: np.ndarray | None, weight: np.ndarray) -> Self:
        """table (n, columns), label (n,), weight (n,); at_least (n,) bool: the label is a bound from below, so that a
        prediction above it is no error."""
        import lightgbm

        s, n = self.settings, len(label)
        bound = np.zeros(n, dtype=bool) if at_least is None else at_least
        spread = max(_ROBUST, float(np.median(np.abs(label - np.median(label)))))

        def objective(predicted: np.ndarray, _data) -> tuple[np.ndarray, np.ndarray]:
            gap = predicted - label
            satisfied = bound & (gap > 0)
            gradient = np.where(satisfied, 0.0, np.clip(gap, -spread, spread))
            return gradient * weight, np.where(satisfied, _NOTHING_KNOWN, 1.0) * weight

        wanted: dict[str, Any]
        if s.quantile is None:  # the objective has the weights, and begins at the start
            self._start = float(np.median(label[~bound])) if (~bound).any() else 0.0
            wanted, of_data = {"objective": objective}, {"label": label, "init_score": np.full(n, self._start)}
        else:
            self._start = float(np.quantile(label, s.quantile))
            wanted = {"objective": "quantile", "alpha": s.quantile}
            of_data = {"label": label - self._start, "weight": weight}
        about = {"verbosity": -1, "num_threads": 1, "min_data_in_bin": 1}
        parameters = {
            **wanted,
            **about,
            "boost_from_average": False,
            "learning_rate": 0.05,
            "num_leaves": s.leaves,
            "min_data_in_leaf": int(np.clip(n // 50, 3, s.least)),
            "lambda_l2": s.l2,
            "feature_fraction": s.share,
            "bagging_fraction": 0.7,
            "bagging_freq": 1,
            "deterministic": True,
            "force_row_wise": True,
        }
        self._boosters = []
        for member in range(self.members):
            data = lightgbm.Dataset(table, **of_data, params=about)
            seeded = {**parameters, "seed": self.seed + member}
            self._boosters.append(lightgbm.train(seeded, data, num_boost_round=s.rounds))
        return self

    def predict(self, table: np.ndarray) -> np.ndarray:
        """(n,) the members' mean."""
        predictions = [booster.predict(table, num_threads=1) for booster in self._boosters]
        return self._start + np.mean(predictions, axis=0)

    def save(self, folder: Path, name: str) -> None:
        """`NAME-0.txt`, ... in `folder`, as LightGBM writes them; the first line tells the start."""
        for index, booster in enumerate(self._boosters):
            (folder / f"{name}-{index}.txt").write_text(f"{self._start!r}\n{booster.model_to_string()}")

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """What `save` wrote, for predicting."""
        loaded = cls.__new__(cls)
        loaded._boosters = []
        for path in sorted(folder.glob(f"{name}-*.txt")):
            text = path.read_text()
            loaded._start = float(text.partition("\n")[0])
            loaded._boosters.append(SavedBooster(text))
        return loaded
