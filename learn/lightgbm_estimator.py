"""Gradient-boosted trees over the scalar features, with a conformal bound from out-of-fold residuals.

Start reading at `LightGBMEstimator.fit`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from conf.errors import UsageError
from learn.cases import Case
from learn.data import Rows
from learn.estimators import ResidualPrediction, require_rows, to_space, too_few_for
from learn.features import FeatureTable
from learn.targets import Target, get_target

FOLDS = 5
LEVEL = 0.99  # whose attainability the warnings speak of


class LightGBMEstimator:
    """One booster for the point; the residuals of grouped 5-fold models inside the training rows for the rest.

    Errors are taken in the target's space: relative (natural logarithm) for memory, time and power, absolute for
    ratios. The result does not depend on the rows' order, nor on the number of cores.
    """

    name: ClassVar[str] = "lightgbm"
    targets: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)
        self.target: Target | None = None
        self._table: FeatureTable | None = None
        self._booster = None
        self._residuals = np.empty(0)

    def fit(self, rows: Rows) -> Self:
        """Fit on the rows with exact labels; at least 10 of them, in at least 2 groups, or `UsageError`.

        Out-of-memory rows are left out: a regressor has no use for "at least this much". So estimates near the
        device's memory lean low; `learn.evaluate` shows it as the recall of the top bin.
        """
        rows = require_rows(rows, least=10)
        rows = rows.subset(np.argsort(rows.run_ids.astype(str), kind="stable"))
        self.target = rows.target
        self._table = FeatureTable.learn(rows.cases)
        features = self._table.matrix(rows.cases)
        label = to_space(rows.label, rows.target.space)
        if rows.target.space == "ratio":
            label = np.clip(label, 0.0, 1.0)

        fold = group_folds(rows.group, FOLDS, self.seed)
        held_out = np.empty(len(rows))
        for k in range(fold.max() + 1):
            inside = fold != k
            booster = self._boost(features[inside], label[inside])
            held_out[~inside] = self._centre(booster, features[~inside])
        self._residuals = np.sort(label - held_out)
        self._booster = self._boost(features, label)
        return self

    def predict(self, cases: Sequence[Case]) -> ResidualPrediction:
        if self._booster is None:
            raise RuntimeError("fit or load the estimator before predicting")
        warning = too_few_for(LEVEL, len(self._residuals))
        centre = self._centre(self._booster, self._table.matrix(cases)) if len(cases) else np.empty(0)
        return ResidualPrediction(centre, self._residuals, self.target.space, (warning,) if warning else ())

    def importances(self) -> dict[str, float]:
        """Share of the total gain by feature, largest first."""
        gain = self._booster.feature_importance("gain")
        shares = gain / max(gain.sum(), 1e-12)
        order = np.argsort(-shares, kind="stable")
        return {self._table.columns[i]: float(shares[i]) for i in order if shares[i] > 0}

    def save(self, folder: Path) -> None:
        folder = Path(folder)
        (folder / "model.txt").write_text(self._booster.model_to_string())
        state = {
            "estimator": self.name,
            "target": self.target.name,
            "seed": self.seed,
            "features": self._table.to_mapping(),
            "residuals": self._residuals.tolist(),
        }
        (folder / "estimator.json").write_text(json.dumps(state, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        import lightgbm

        folder = Path(folder)
        state = json.loads((folder / "estimator.json").read_text())
        loaded = cls(state["seed"])
        loaded.target = get_target(state["target"])
        loaded._table = FeatureTable.from_mapping(state["features"])
        loaded._residuals = np.asarray(state["residuals"], dtype=float)
        loaded._booster = lightgbm.Booster(model_str=(folder / "model.txt").read_text())
        return loaded

    def _boost(self, features: np.ndarray, label: np.ndarray):
        import lightgbm

        table = lightgbm.Dataset(
            features,
            label,
            feature_name=[f"f{i}" for i in range(features.shape[1])],  # its names may hold no JSON characters
            categorical_feature=self._table.categorical,
            params={"verbosity": -1, "min_data_in_bin": 1, "num_threads": 1},
        )
        return lightgbm.train(self._parameters(len(label)), table, num_boost_round=400)

    def _parameters(self, n: int) -> dict:
        """LightGBM's defaults want 20 rows a leaf and 100 a category, which is a stump on 60 rows."""
        return {
            "objective": "regression",
            "learning_rate": 0.05,
            "num_leaves": 15 if n < 1000 else 31,
            "min_data_in_leaf": int(np.clip(n // 50, 3, 10)),
            "min_data_in_bin": 1,
            "min_data_per_group": 5,
            "cat_smooth": 2.0,
            "cat_l2": 2.0,
            "lambda_l2": 0.5,
            "feature_fraction": 0.8,
            "bagging_fraction": 0.8,
            "bagging_freq": 1,
            "seed": self.seed,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": 1,  # a sum's order depends on the threads; and small tables are faster on one
            "verbosity": -1,
        }

    def _centre(self, booster, features: np.ndarray) -> np.ndarray:
        raw = booster.predict(features, num_threads=1)
        return np.clip(raw, 0.0, 1.0) if self.target.space == "ratio" else raw


def group_folds(groups: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Fold of each row, (n,) int in 0..folds-1: whole groups, dealt at random, about equally many rows a fold."""
    names, member, sizes = np.unique(np.asarray(groups).astype(str), return_inverse=True, return_counts=True)
    folds = min(folds, len(names))
    if folds < 2:
        raise UsageError("all rows are near-copies of one configuration: nothing can be held out to judge by")
    shuffled = np.random.default_rng(seed).permutation(len(names))
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]  # largest first, each to the emptiest fold
    load = np.zeros(folds, dtype=int)
    fold_of = np.empty(len(names), dtype=int)
    for group in order:
        fold_of[group] = np.argmin(load)
        load[fold_of[group]] += sizes[group]
    return fold_of[member]
