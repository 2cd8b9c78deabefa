"""Answers of a saved LightGBM model without LightGBM, whose import takes longer than most estimates.

Start reading at `SavedBooster.predict`. The figures are LightGBM's, bit for bit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np

from learn.learned.lightgbm_text import require_whole, unnumbered, whole_booster

if TYPE_CHECKING:
    import lightgbm

_ZERO = 1e-35  # LightGBM's kZeroThreshold
_MISSING_ZERO, _MISSING_NAN = 1, 2  # of decision_type, bits 2 and 3
_CELLS = 400_000  # rows times trees that take about half as long here as LightGBM takes to be imported
_PADDED = 4_000_000  # trees times leaves that are worth padded arrays


class SavedBooster:
    """A saved model: small tables are answered here, and by LightGBM once it is imported or worth its import."""

    _cells = 0  # answered here, by all models of the process

    def __init__(self, text: str) -> None:
        """Take what LightGBM or `Boosted.save` wrote. `ValueError` for a text that is not whole."""
        require_whole(text)
        self._text = unnumbered(text)

    def predict(self, table: np.ndarray, num_threads: int = 1) -> np.ndarray:
        """Return (n,) values for the rows of (n, columns) float64."""
        if "lightgbm" in sys.modules or self._trees is None or table.shape[1] != self._trees.features:
            return np.asarray(self._booster.predict(table, num_threads=num_threads))
        cells = SavedBooster._cells + len(table) * len(self._trees.root_T)
        if cells > _CELLS:
            return np.asarray(self._booster.predict(table, num_threads=num_threads))
        SavedBooster._cells = cells
        return self._trees.predict(table)

    def model_to_string(self) -> str:
        """Return the model as LightGBM wrote it."""
        return self._text

    @cached_property
    def _trees(self) -> TreeModel | None:
        try:
            return TreeModel.parse(self._text)
        except UnknownTreeModel:
            return None

    @cached_property
    def _booster(self) -> lightgbm.Booster:
        return whole_booster(self._text)


class UnknownTreeModel(ValueError):
    """The text holds what this module does not read: categories, linear leaves, several classes."""


@dataclass(frozen=True)
class TreeModel:
    """T trees with at most N inner nodes and L leaves; padded arrays. A child below 0 is the leaf `-1 - child`."""

    feature_TN: np.ndarray
    threshold_TN: np.ndarray
    default_left_TN: np.ndarray
    missing_TN: np.ndarray
    left_TN: np.ndarray
    right_TN: np.ndarray
    leaf_TL: np.ndarray
    root_T: np.ndarray  # 0, or -1 in trees of a single leaf
    depth: int
    features: int  # columns that a table needs

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `lightgbm.Booster.model_to_string` wrote. Raises `UnknownTreeModel`."""
        head, *trees = text.partition("end of trees")[0].split("\nTree=")
        about = _fields(head)
        if about.get("num_class") != "1" or about.get("num_tree_per_iteration") != "1" or "average_output" in head:
            raise UnknownTreeModel("one value a row is wanted")
        objective = about.get("objective", "none").partition(" ")[0]
        if not trees or objective not in ("none", "quantile", "regression", "custom"):
            raise UnknownTreeModel(f"objective {objective} without a plain sum of trees")
        parsed = [_fields(tree) for tree in trees]
        if any(tree.get("num_cat", "0") != "0" or tree.get("is_linear", "0") != "0" for tree in parsed):
            raise UnknownTreeModel("categories or linear leaves")

        leaves = np.array([int(tree["num_leaves"]) for tree in parsed])
        if len(leaves) * int(leaves.max()) > _PADDED:
            raise UnknownTreeModel("a few trees are much larger than the others")

        def table(name: str, kind: type) -> np.ndarray:
            rows: list[np.ndarray] = [np.array(tree.get(name, "").split(), dtype=kind) for tree in parsed]
            padded: np.ndarray = np.zeros((len(rows), max(1, *(len(row) for row in rows))), dtype=kind)
            for padded_row, row in zip(padded, rows, strict=True):
                padded_row[: len(row)] = row
            return padded

        decision = table("decision_type", int)
        left, right = table("left_child", int), table("right_child", int)
        return cls(
            feature_TN=table("split_feature", int),
            threshold_TN=table("threshold", float),
            default_left_TN=decision & 2 != 0,
            missing_TN=decision >> 2 & 3,
            left_TN=left,
            right_TN=right,
            leaf_TL=table("leaf_value", float),
            root_T=np.where(leaves > 1, 0, -1),
            depth=int(leaves.max()) - 1,
            features=int(about["max_feature_idx"]) + 1,
        )

    def predict(self, table: np.ndarray) -> np.ndarray:
        """Return (n,) sums over the trees of the leaves that rows of (n, columns) fall into."""
        table = np.asarray(table, dtype=np.float64)
        trees, rows = np.arange(len(self.root_T)), np.arange(len(table))[:, None]
        node = np.broadcast_to(self.root_T, (len(table), len(trees)))  # of each row in each tree
        for _ in range(self.depth):
            inner = np.maximum(node, 0)
            value = table[rows, self.feature_TN[trees, inner]]
            missing = self.missing_TN[trees, inner]
            unknown = np.isnan(value)
            value = np.where(unknown & (missing != _MISSING_NAN), 0.0, value)
            by_default = (missing == _MISSING_NAN) & unknown | (missing == _MISSING_ZERO) & (np.abs(value) <= _ZERO)
            goes_left = np.where(by_default, self.default_left_TN[trees, inner],
                                 value <= self.threshold_TN[trees, inner])  # fmt: skip
            child = np.where(goes_left, self.left_TN[trees, inner], self.right_TN[trees, inner])
            node = np.where(node < 0, node, child)
            if (node < 0).all():
                break
        # Added one after the other, as LightGBM adds them.
        return np.add.accumulate(self.leaf_TL[trees, -1 - node], axis=1)[:, -1]


def _fields(text: str) -> dict[str, str]:
    return {key: value for key, equals, value in (line.partition("=") for line in text.splitlines()) if equals}
