"""`forest`: SchedTune's shape, extremely randomised trees over features of the model and of the GPU.

Start reading at `learn.estimators.tabular.TabularEstimator.fit`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from learn.estimators.tabular import TabularEstimator
from learn.estimators.trees import Trees

TREES = 100
MIN_LEAF = 2
MAX_DEPTH = 24


class SchedTune(TabularEstimator):
    """Extra trees (Geurts et al. 2006) over the config's and the device's features, as SchedTune (Albahar et al.,
    CCGrid 2022) learns from a model's and a GPU's features. Words are codes; a missing value takes a side of its own.
    """

    name: ClassVar[str] = "forest"
    model_name: ClassVar[str] = "forest"
    dtype: ClassVar[type[np.floating]] = np.float32  # as scikit-learn casts them

    def _train(self, features: np.ndarray, label: np.ndarray) -> Trees:
        from sklearn.ensemble import ExtraTreesRegressor

        forest = ExtraTreesRegressor(
            TREES, min_samples_leaf=MIN_LEAF, max_depth=MAX_DEPTH, n_jobs=1, random_state=self.seed
        )
        return Trees.of_scikit_learn(forest.fit(features, label).estimators_)
