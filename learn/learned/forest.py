"""Extremely randomised trees over the scalar features: SchedTune's shape, where device features are among them.

Start reading at `ForestEstimator`; `TreeArrays` is the fitted forest, which predicts without scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from learn.learned.tabular import TabularEstimator

TREES = 100
MIN_LEAF = 2
MAX_DEPTH = 24


class ForestEstimator(TabularEstimator):
    """Extra trees (Geurts et al. 2006) over the config's and the device's features, as SchedTune (Albahar et al.,
    CCGrid 2022) learns from a model's and a GPU's features. Words are codes; a missing value takes a side of its own.
    """

    name: ClassVar[str] = "forest"

    def _train(self, features: np.ndarray, label: np.ndarray) -> TreeArrays:
        from sklearn.ensemble import ExtraTreesRegressor

        forest = ExtraTreesRegressor(
            TREES, min_samples_leaf=MIN_LEAF, max_depth=MAX_DEPTH, n_jobs=1, random_state=self.seed
        )
        return TreeArrays.of(forest.fit(features, label).estimators_)

    def _raw(self, model: TreeArrays, features: np.ndarray) -> np.ndarray:
        return model.predict(features)

    def _save_model(self, folder: Path) -> None:
        self._model.save(folder / "forest.npz")

    @classmethod
    def _load_model(cls, folder: Path) -> TreeArrays:
        return TreeArrays.load(folder / "forest.npz")


@dataclass(frozen=True, eq=False)
class TreeArrays:
    """All nodes of all trees, tree after tree; n nodes.

    root       (trees,) int32, position of each tree's first node
    left, right  (n,) int32, positions of the children; a leaf is its own child
    feature    (n,) int16; threshold (n,) float32: left where `x <= threshold` or, with missing_left (n,) bool, x is NaN
    value      (n,) float64, of leaves; 0 elsewhere
    """

    root: np.ndarray
    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    missing_left: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, trees: Sequence) -> Self:
        """Of fitted regression trees of scikit-learn."""
        sizes = [tree.tree_.node_count for tree in trees]
        root = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
        parts: dict[str, list[np.ndarray]] = {field.name: [] for field in fields(cls) if field.name != "root"}
        for first, fitted in zip(root, trees, strict=True):
            tree = fitted.tree_
            leaf = tree.children_left < 0
            own = np.arange(tree.node_count)
            parts["left"].append(first + np.where(leaf, own, tree.children_left))
            parts["right"].append(first + np.where(leaf, own, tree.children_right))
            parts["feature"].append(np.where(leaf, 0, tree.feature))
            parts["threshold"].append(_rounded_down(np.where(leaf, 0.0, tree.threshold)))
            parts["missing_left"].append(tree.missing_go_to_left)
            parts["value"].append(np.where(leaf, tree.value[:, 0, 0], 0.0))
        types = {"left": np.int32, "right": np.int32, "feature": np.int16, "missing_left": bool}
        joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        return cls(root, **{name: array.astype(types.get(name, array.dtype)) for name, array in joined.items()})

    def predict(self, features: np.ndarray) -> np.ndarray:
        """(n,) the mean over the trees, summed in their order as scikit-learn does."""
        x = np.asarray(features, dtype=np.float32)
        row = np.arange(len(x))[:, None]
        at = np.repeat(self.root[None, :], len(x), axis=0)
        while True:
            value = x[row, self.feature[at]]
            go_left = np.where(np.isnan(value), self.missing_left[at], value <= self.threshold[at])
            following = np.where(go_left, self.left[at], self.right[at])
            if np.array_equal(following, at):
                break
            at = following
        total = np.zeros(len(x))
        for tree in range(len(self.root)):
            total += self.value[at[:, tree]]
        return total / len(self.root)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Self:
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{field.name: arrays[field.name] for field in fields(cls)})


def _rounded_down(thresholds: np.ndarray) -> np.ndarray:
    """float32, never above: `x <= threshold` is then the same for every float32 x, which is what trees compare."""
    rounded = thresholds.astype(np.float32)
    return np.where(rounded > thresholds, np.nextafter(rounded, np.float32(-np.inf)), rounded)
