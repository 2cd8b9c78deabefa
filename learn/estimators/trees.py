"""Regression trees as arrays: what LightGBM and scikit-learn fit, kept in one `.npz` and answered by numpy alone.

Start reading at `Trees.predict`: its figures are the libraries', bit for bit. `boost` fits the hybrid's trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import lightgbm

MEMBERS = 3  # fits that differ in their random choices; the mean of them is smoother than one
_ROBUST = 0.05  # errors beyond it pull no harder (Huber): a few labels are wrong
_NOTHING_KNOWN = 1e-3  # curvature where a row has nothing to say
_ROWS = 1000  # followed at a time
_CELLS = 24_000  # rows times trees: these trees and their rows stay in the processor's cache
_FEW = 50  # rows, of which it does not pay to look for what they have in common
_MOST_GOING = 0.5  # share of them, from which on those that are at their end are not taken out yet
_DEEPEST = 1000
_INFINITE = 1e300  # what LightGBM writes for an infinite threshold
_KINDS: Mapping[str, type] = {
    "children": np.intp,
    "feature": np.intp,
    "threshold": np.float64,
    "missing_left": np.bool_,
    "value": np.float64,
    "root": np.intp,
    "first": np.intp,
    "start": np.float64,
}


@dataclass(frozen=True, eq=False)
class Trees:
    """The start plus the mean over members of the sum of a member's trees; n nodes, tree after tree.

    Raises `ValueError` where the arrays do not make trees.

    children      (n, 2) node that follows on the left and on the right; a leaf follows itself
    feature       (n,) column; threshold (n,): left where `x <= threshold` or, with missing_left (n,) bool, x is NaN
    value         (n,) of leaves; 0 elsewhere
    root          (trees,) first node of each tree; first (members,): first tree of each member
    start         () what the members' mean is added to
    """

    children: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    missing_left: np.ndarray
    value: np.ndarray
    root: np.ndarray
    first: np.ndarray
    start: np.ndarray

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            array = np.asarray(getattr(self, name))
            if array.dtype.kind != np.dtype(kind).kind:
                raise ValueError(f"{name} of the trees holds values of the type {array.dtype}")
            object.__setattr__(self, name, array.astype(kind))
        n, trees, members = self.value.size, self.root.size, self.first.size
        shapes = {**dict.fromkeys(_KINDS, (n,)), "children": (n, 2), "root": (trees,), "first": (members,), "start": ()}
        if any(getattr(self, name).shape != shape for name, shape in shapes.items()):
            raise ValueError("the arrays of the trees have other shapes than n nodes have")
        indices = (self.children, n), (self.root, n), (self.first, trees), (self.feature, np.inf)
        if any(not array.size or array.min() < 0 or array.max() >= end for array, end in indices):
            raise ValueError("the trees point to nodes, trees or columns that do not exist")
        if self.first[0] != 0 or (np.diff(self.first) < 1).any():
            raise ValueError("a member of the trees has no tree")
        if not np.isfinite(self.value).all() or not np.isfinite(self.start) or np.isnan(self.threshold).any():
            raise ValueError("a value of the trees is not a number")
        if self.depth > _DEEPEST:
            raise ValueError(f"a tree has no end, or more than {_DEEPEST} levels")

    @cached_property
    def depth(self) -> int:
        """Steps from a root to the deepest leaf."""
        level, depth = self.root, 0
        while depth <= _DEEPEST:
            following = self.children[level]
            level = np.unique(following[following != level[:, None]])
            if not level.size:
                break
            depth += 1
        return depth

    @classmethod
    def joined(cls, forests: Sequence[Trees]) -> Self:
        """Return trees whose `members` are those of all forests, one after the other; they read the same table."""
        nodes = np.cumsum([0, *(len(forest.value) for forest in forests)])
        trees = np.cumsum([0, *(len(forest.root) for forest in forests)])
        arrays = {name: [getattr(forest, name) for forest in forests] for name in _KINDS if name != "start"}
        for name, shift in (("children", nodes), ("root", nodes), ("first", trees)):
            arrays[name] = [array + by for array, by in zip(arrays[name], shift, strict=False)]
        return cls(**{name: np.concatenate(of_all) for name, of_all in arrays.items()}, start=np.array(0.0))

    def predict(self, table: np.ndarray) -> np.ndarray:
        """Return (n,) values for the rows of (n, columns) float64. Raises `ValueError` for too few columns."""
        return self.predict_along(table, None)[:, 0]

    def predict_along(self, table: np.ndarray, last: np.ndarray | None) -> np.ndarray:
        """Return (n, k) values for the rows with each of the (k,) values in their last column; None: the row's own.

        Splits by other columns are the same for all k: each row follows them once.
        """
        members = self.members(table, last)
        values: np.ndarray = self.start + np.cumsum(members, axis=0)[-1] / len(members)
        return values.reshape(len(table), 1 if last is None else len(last))

    def members(self, table: np.ndarray, last: np.ndarray | None = None) -> np.ndarray:
        """Return the members' own sums, (members, n * k), of the rows as `predict_along` takes them."""
        table = np.ascontiguousarray(table, dtype=np.float64)
        if table.shape[1] <= self._most:
            raise ValueError(f"the trees read {self._most + 1} columns, and the table has {table.shape[1]}")
        rows = max(_ROWS // (1 if last is None else len(last)), 1)
        parts = [self._sums(table[start : start + rows], last) for start in range(0, len(table), rows)]
        return np.concatenate(parts, axis=1) if parts else np.empty((len(self.first), 0))

    @cached_property
    def _most(self) -> int:
        return int(self.feature.max())

    def _past(self, same: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the roots and children that are left without splits by columns with the `same` value in all rows."""
        value, nodes = row.take(self.feature), np.arange(len(self.value))
        right = (value > self.threshold) | (np.isnan(value) & ~self.missing_left)
        goal = np.where(same.take(self.feature), self.children[nodes, right.astype(np.intp)], nodes)
        while not np.array_equal(goal, further := goal.take(goal)):
            goal = further
        return goal.take(self.root), goal.take(self.children)

    def _sums(self, table: np.ndarray, last: np.ndarray | None) -> np.ndarray:
        roots, children = self.root, self.children
        if last is not None or len(table) > _FEW:
            same = (table == table[0]).all(axis=0) | np.isnan(table).all(axis=0)
            same[-1] &= last is None
            roots, children = self._past(same, table[0])
            table = np.where(same, 0.0, table)  # no split that is left asks for these
        trees = max(_CELLS // len(table), 1)  # a few at a time
        leaves = [
            self._leaves(table, last, roots[start : start + trees], children) for start in range(0, len(roots), trees)
        ]
        reached = self.value.take(np.concatenate(leaves))
        # Added one after the other, as the libraries add them; `sum` adds in pairs.
        ends = [*self.first[1:].tolist(), len(roots)]
        return np.stack([np.cumsum(reached[low:high], axis=0)[-1] for low, high in zip(self.first, ends, strict=True)])

    def _leaves(
        self, table: np.ndarray, last: np.ndarray | None, roots: np.ndarray, children: np.ndarray
    ) -> np.ndarray:
        """Return the (trees, n * k) leaves that the rows reach from the roots."""
        row = np.tile(np.arange(len(table)), len(roots))  # in the first tree, then in the second one
        node = np.repeat(roots, len(table))
        if last is None:
            return self._followed(table, row, node, children).reshape(len(roots), -1)
        held = (self.feature == table.shape[1] - 1)[:, None]  # such a split follows itself, as a leaf does
        node = self._followed(table, row, node, np.where(held, np.arange(len(children))[:, None], children))
        leaves = np.repeat(node[:, None], len(last), axis=1)
        split = np.flatnonzero(children[node, 0] != node)
        table = np.repeat(table, len(last), axis=0)
        table[:, -1] = np.tile(last, len(table) // len(last))
        row = np.add.outer(row[split] * len(last), np.arange(len(last))).ravel()
        leaves[split] = self._followed(table, row, leaves[split].ravel(), children).reshape(-1, len(last))
        return leaves.reshape(len(roots), -1)

    def _followed(self, table: np.ndarray, row: np.ndarray, node: np.ndarray, children: np.ndarray) -> np.ndarray:
        """Return where each node leads for its row: a node that follows itself."""
        values, following, ends = table.ravel(order="F"), children.ravel(), node.copy()
        some_missing = bool(np.isnan(values).any())
        column = self.feature * len(table)  # where the column begins that a node compares
        going = np.arange(len(node))  # those that are not at their end
        while going.size:
            value = values.take(column.take(node) + row)
            right = value > self.threshold.take(node)
            if some_missing:
                right |= np.isnan(value) & ~self.missing_left.take(node)
            before, node = node, following.take(2 * node + right)
            on = before != node
            if np.count_nonzero(on) < _MOST_GOING * len(node):
                ends[going] = node
                on = np.flatnonzero(on)
                going, node, row = going.take(on), node.take(on), row.take(on)
        return ends

    # ---- on disk

    def save(self, folder: Path, name: str) -> None:
        """Write `NAME.npz`."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        small = {key: array.astype(np.int32) if array.dtype == np.intp else array for key, array in arrays.items()}
        np.savez_compressed(folder / f"{name}.npz", **small)

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """Read `NAME.npz`. Raises `ValueError` for what is not whole."""
        with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
            arrays = dict(stored)
        if arrays.keys() != _KINDS.keys():
            raise ValueError(f"{name}.npz holds {', '.join(sorted(arrays))} instead of {', '.join(sorted(_KINDS))}")
        return cls(**arrays)

    # ---- of the libraries' models

    @classmethod
    def of_lightgbm(cls, boosters: Sequence[lightgbm.Booster], start: float = 0.0) -> Self:
        """Take LightGBM's boosters, each a member.

        Categories are whole numbers from 0 on; a split by them becomes splits at the limits between them.
        """
        nodes = _Nodes()
        columns = nodes.columns
        for booster in boosters:
            columns["first"].append(len(columns["root"]))
            for tree in booster.dump_model()["tree_info"]:
                columns["root"].append(nodes.add(tree["tree_structure"]))
        arrays: dict[str, np.ndarray] = {name: np.array(values, _KINDS[name]) for name, values in columns.items()}
        return cls(**arrays, start=np.array(start))

    @classmethod
    def of_scikit_learn(cls, fitted: Sequence[Any]) -> Self:
        """Take fitted regression trees, each a member. scikit-learn compares a table's values as float32."""
        trees = [fitted_tree.tree_ for fitted_tree in fitted]
        root = np.cumsum([0, *(tree.node_count for tree in trees[:-1])])
        leaf = np.concatenate([tree.children_left < 0 for tree in trees])
        branches = [
            np.column_stack([tree.children_left, tree.children_right]) + root_index
            for tree, root_index in zip(trees, root, strict=True)
        ]
        return cls(
            children=np.where(leaf[:, None], np.arange(len(leaf))[:, None], np.concatenate(branches)),
            feature=np.where(leaf, 0, np.concatenate([tree.feature for tree in trees])),
            threshold=np.where(leaf, 0.0, np.concatenate([tree.threshold for tree in trees])),
            missing_left=np.concatenate([tree.missing_go_to_left.astype(bool) for tree in trees]),
            value=np.where(leaf, np.concatenate([tree.value[:, 0, 0] for tree in trees]), 0.0),
            root=root,
            first=np.arange(len(trees)),
            start=np.array(0.0),
        )


class _Nodes:
    """The columns of `Trees`, as they grow while LightGBM's nested nodes are read."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in _KINDS if name != "start"}

    def add(self, node: Mapping[str, Any]) -> int:
        """Add a node of `Booster.dump_model` with all below it, and return its number."""
        if "leaf_value" in node:
            return self._append(value=node["leaf_value"])
        feature, threshold = node["split_feature"], node["threshold"]
        left, right = self.add(node["left_child"]), self.add(node["right_child"])
        if node["decision_type"] == "<=":
            if threshold >= _INFINITE:
                threshold = np.inf
            # Where NaN is not missing, it counts as 0.
            missing_left = node["default_left"] if node["missing_type"] == "NaN" else threshold >= 0.0
            return self._append(children=[left, right], feature=feature, threshold=threshold, missing_left=missing_left)
        limits: list[float] = []  # ascending, between what goes right, left, right ...
        for category in map(int, threshold.split("||")):
            if limits and limits[-1] == category - 0.5:
                limits[-1] = category + 0.5
            else:
                limits += [category - 0.5, category + 0.5]
        return self._search(feature, limits, [(right, left)[place % 2] for place in range(len(limits) + 1)])

    def _search(self, feature: int, limits: Sequence[float], goals: Sequence[int]) -> int:
        """Add a binary search among ascending limits, with the goals between them; NaN goes right."""
        if not limits:
            return goals[0]
        middle = len(limits) // 2
        left = self._search(feature, limits[:middle], goals[: middle + 1])
        right = self._search(feature, limits[middle + 1 :], goals[middle + 1 :])
        return self._append(children=[left, right], feature=feature, threshold=limits[middle])

    def _append(self, **values: Any) -> int:
        node = len(self.columns["value"])
        leaf = {"children": [node, node], "feature": 0, "threshold": 0.0, "missing_left": False, "value": 0.0}
        for name, value in {**leaf, **values}.items():
            self.columns[name].append(value)
        return node


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
        of_members = [booster.predict(table, num_threads=1) for booster in self.boosters]
        return np.asarray(self.start + np.mean(of_members, axis=0))

    def predict_along(self, table: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Predict as `Trees.predict_along` does."""
        wide = np.repeat(table, len(last), axis=0)
        wide[:, -1] = np.tile(last, len(table))
        return self.predict(wide).reshape(len(table), len(last))

    def trees(self) -> Trees:
        """Return the trees, which predict the same figures."""
        return Trees.of_lightgbm(self.boosters, self.start)


def boost(
    settings: Settings,
    seed: int,
    table: np.ndarray,
    label: np.ndarray,
    at_least: np.ndarray | None,
    weight: np.ndarray,
    members: int = MEMBERS,
) -> Boosters:
    """Fit boosters. The result depends neither on the rows' order nor on the number of cores.

    Args:
        settings: The trees' settings.
        seed: Seed of the first member; each has its own.
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

    def objective(predicted: np.ndarray, _data: object) -> tuple[np.ndarray, np.ndarray]:
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
