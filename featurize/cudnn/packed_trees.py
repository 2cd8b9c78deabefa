"""Boosted trees as small arrays, answered by numpy alone: every node compares a feature's rank with one byte.

Start reading at `PackedTrees.scores`. `learn.workspaces.fitting` packs what LightGBM has fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

_ARRAYS = ("thresholds", "counts", "feature", "rank", "left", "right", "leaves")


@dataclass(frozen=True)
class PackedTrees:
    """T trees of at most N inner nodes and L leaves, for K outputs; tree t adds to output `t % K`.

    thresholds   (sum of counts,) of all features, one behind the other, each ascending
    counts       (F,) thresholds of each feature
    feature, rank, left, right
                 (T, N) of the inner nodes: a row goes left where its feature is <= the threshold of that rank; a child
                 below 0 is the leaf `-1 - child`
    leaves       (T, L) what a leaf adds
    outputs      K
    """

    thresholds: np.ndarray
    counts: np.ndarray
    feature: np.ndarray
    rank: np.ndarray
    left: np.ndarray
    right: np.ndarray
    leaves: np.ndarray
    outputs: int

    def scores(self, table: np.ndarray) -> np.ndarray:
        """Return (n, K) sums of leaves for the rows of (n, F)."""
        ranks = self._ranks(table)
        rows, trees = np.arange(len(table))[:, None], np.arange(len(self.feature))
        node = np.zeros((len(table), len(trees)), dtype=np.int16)
        while (inner := node >= 0).any():
            at = np.maximum(node, 0)
            left = ranks[rows, self.feature[trees, at]] <= self.rank[trees, at]
            child = np.where(left, self.left[trees, at], self.right[trees, at])
            node = np.where(inner, child, node)
        values = self.leaves[trees, -1 - node].astype(np.float32)
        return values.reshape(len(table), -1, self.outputs).sum(axis=1)

    def _ranks(self, table: np.ndarray) -> np.ndarray:
        """Return (n, F): how many of a feature's thresholds lie below each value."""
        ends = np.cumsum(self.counts)
        columns = [
            np.searchsorted(self.thresholds[end - count : end], table[:, place], side="left")
            for place, (count, end) in enumerate(zip(self.counts, ends, strict=True))
        ]
        return np.stack(columns, axis=1).astype(np.int16)

    def to_arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays by name, as `from_arrays` reads them."""
        return {f"{prefix}{name}": np.asarray(getattr(self, name)) for name in (*_ARRAYS, "outputs")}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str) -> Self:
        """Return the trees that `to_arrays` wrote. Raises `KeyError` where an array is missing."""
        values = {name: arrays[f"{prefix}{name}"] for name in _ARRAYS}
        return cls(**values, outputs=int(arrays[f"{prefix}outputs"]))
