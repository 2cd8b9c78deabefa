"""Gradient-boosted trees over the scalar features.

Start reading at `learn.learned.tabular.TabularEstimator.fit`; here is what is LightGBM's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from learn.learned.lightgbm_text import booster_of
from learn.learned.tabular import TabularEstimator


class LightGBMEstimator(TabularEstimator):
    """Small trees, a round each; categorical columns as such."""

    name: ClassVar[str] = "lightgbm"
    rounds = 400

    def _save_model(self, folder: Path) -> None:
        (folder / "model.txt").write_text(self._model.model_to_string())

    @classmethod
    def _load_model(cls, folder: Path):
        return booster_of((folder / "model.txt").read_text())

    def _train(self, features: np.ndarray, label: np.ndarray):
        import lightgbm

        table = lightgbm.Dataset(
            features,
            label,
            feature_name=[f"f{i}" for i in range(features.shape[1])],  # its names may hold no JSON characters
            categorical_feature=self._table.categorical,
            params={"verbosity": -1, "min_data_in_bin": 1, "num_threads": 1},
        )
        return lightgbm.train(self._parameters(len(label)), table, num_boost_round=self.rounds)

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

    def _raw(self, model, features: np.ndarray) -> np.ndarray:
        return model.predict(features, num_threads=1)
