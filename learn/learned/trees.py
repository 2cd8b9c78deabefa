"""Regression trees as arrays: what LightGBM and scikit-learn fit, kept in one `.npz` and answered by numpy alone.

Start reading at `Trees.predict`: its figures are the libraries', bit for bit. `boost` fits the hybrid's trees.
"""

from __future__ import annotations

import itertools
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
_CELLS = 20_000  # rows times trees that are followed at a time: their arrays stay in the processor's cache
_DEEPEST = 1000
_OBJECTIVES = ("none", "custom", "quantile", "regression")  # of LightGBM, whose value is the plain sum of the trees
_CATEGORICAL, _DEFAULT_LEFT = 1, 2  # bits of its decision_type; the next two say what is missing
_ZERO_IS_MISSING, _NAN_IS_MISSING = 1, 2
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

    def predict(self, table: np.ndarray) -> np.ndarray:
        """Return (n,) values for the rows of (n, columns) float64. Raises `ValueError` for too few columns."""
        table = np.ascontiguousarray(table, dtype=np.float64)
        if table.shape[1] <= self._most:
            raise ValueError(f"the trees read {self._most + 1} columns, and the table has {table.shape[1]}")
        rows = max(_CELLS // len(self.root), 1)
        parts = [self._predict(table[at : at + rows]) for at in range(0, len(table), rows)]
        return np.concatenate(parts) if parts else np.empty(0)

    @cached_property
    def _most(self) -> int:
        return int(self.feature.max())

    def _predict(self, table: np.ndarray) -> np.ndarray:
        values, children = table.ravel(), self.children.ravel()
        of_row = np.tile(np.arange(len(table)) * table.shape[1], len(self.root))
        node = np.repeat(self.root, len(table))  # of each row in the first tree, then in the second one
        some_missing = bool(np.isnan(values).any())
        for _ in range(self.depth):
            value = values.take(of_row + self.feature.take(node))
            right = ~(value <= self.threshold.take(node))
            if some_missing:
                right &= ~(np.isnan(value) & self.missing_left.take(node))
            node = children.take(2 * node + right)
        leaf = self.value.take(node).reshape(len(self.root), len(table))
        # Added one after the other, as the libraries add them; `sum` adds in pairs.
        ends = [*self.first[1:].tolist(), len(self.root)]
        members = [np.cumsum(leaf[low:high], axis=0)[-1] for low, high in zip(self.first, ends, strict=True)]
        return self.start + np.cumsum(members, axis=0)[-1] / len(members)

    # ---- on disk

    def save(self, folder: Path, name: str) -> None:
        """Write `NAME.npz`."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        small = {key: array.astype(np.int32) if array.dtype == np.intp else array for key, array in arrays.items()}
        np.savez_compressed(folder / f"{name}.npz", **small)

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """Read `NAME.npz`, or what older versions wrote in its place. Raises `ValueError` for what is not whole."""
        path = folder / f"{name}.npz"
        if not path.is_file() and (texts := [path.read_text() for path in sorted(folder.glob(f"{name}*.txt"))]):
            first = texts[0].partition("\n")[0]  # LightGBM's text, which may follow the start
            return cls.of_lightgbm(texts, 0.0 if first == "tree" else float(first))
        with np.load(path, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
        if "left" in arrays:
            arrays["children"] = np.column_stack([arrays.pop("left"), arrays.pop("right")])
            arrays |= {"first": np.arange(len(arrays["root"])), "start": np.array(0.0)}
        if arrays.keys() != _KINDS.keys():
            raise ValueError(f"{path.name} holds {', '.join(sorted(arrays))} instead of {', '.join(sorted(_KINDS))}")
        return cls(**arrays)

    # ---- of the libraries' models

    @classmethod
    def of_lightgbm(cls, texts: Sequence[str], start: float = 0.0) -> Self:
        """Take what `lightgbm.Booster.model_to_string` wrote, a text a member. Raises `ValueError`.

        Categories are whole numbers from 0 on; a split by them becomes a search among thresholds.
        """
        return cls._joined([_nodes_of_text(text) for text in texts], start)

    @classmethod
    def of_scikit_learn(cls, fitted: Sequence[Any]) -> Self:
        """Take fitted regression trees, each a member. scikit-learn compares a table's values as float32."""
        nodes = []
        for tree in (one.tree_ for one in fitted):
            leaf, own = tree.children_left < 0, np.arange(tree.node_count)
            nodes.append(
                {
                    "children": np.where(leaf, own, [tree.children_left, tree.children_right]).T,
                    "feature": np.where(leaf, 0, tree.feature),
                    "threshold": np.where(leaf, 0.0, tree.threshold),
                    "missing_left": tree.missing_go_to_left.astype(bool),
                    "value": np.where(leaf, tree.value[:, 0, 0], 0.0),
                    "root": np.zeros(1, dtype=int),
                }
            )
        return cls._joined(nodes, 0.0)

    @classmethod
    def _joined(cls, members: Sequence[Mapping[str, np.ndarray]], start: float) -> Self:
        before = np.cumsum([0, *(len(member["value"]) for member in members)])
        first = np.cumsum([0, *(len(member["root"]) for member in members[:-1])])
        shifted = [
            {**member, "children": member["children"] + at, "root": member["root"] + at}
            for member, at in zip(members, before, strict=False)
        ]
        joined = {name: np.concatenate([member[name] for member in shifted]) for name in shifted[0]}
        return cls(**joined, first=first, start=np.array(start))


def _nodes_of_text(text: str) -> dict[str, np.ndarray]:
    """Return the nodes of LightGBM's text: of each tree the inner ones, then the leaves; in the end those that splits
    by categories take beside their own. Raises `ValueError` for what is not a plain sum of trees."""
    whole, end, _ = text.partition("\nend of trees\n")
    head, *blocks = whole.split("\nTree=")
    about, trees = _fields(head), [_fields(block) for block in blocks]
    objective = about.get("objective", "none").partition(" ")[0]
    plain = about.get("num_class") == about.get("num_tree_per_iteration") == "1" and "average_output" not in head
    if not end or not trees or not plain or objective not in _OBJECTIVES:
        raise ValueError("LightGBM's text is not whole, or is not a plain sum of trees")
    leaves = np.array([int(tree["num_leaves"]) for tree in trees])
    inner = leaves - 1

    def figures(name: str, kind: type, counts: np.ndarray) -> np.ndarray:
        values: np.ndarray = np.array(" ".join(tree.get(name, "") for tree in trees).split(), dtype=kind)
        if len(values) != counts.sum():
            raise ValueError(f"LightGBM's text has {len(values)} values of {name} instead of {counts.sum()}")
        return values

    decision, threshold = figures("decision_type", int, inner), figures("threshold", float, inner)
    missing = decision >> 2
    if any(tree.get("is_linear", "0") != "0" for tree in trees) or (missing == _ZERO_IS_MISSING).any():
        raise ValueError("LightGBM's trees have linear leaves, or take 0 for missing")
    n = int((inner + leaves).sum())
    root = np.cumsum(inner + leaves) - inner - leaves
    is_leaf = np.repeat(np.tile([False, True], len(trees)), np.column_stack([inner, leaves]).ravel())
    child = np.column_stack([figures("left_child", int, inner), figures("right_child", int, inner)])
    child = np.where(child < 0, np.repeat(inner, inner)[:, None] - 1 - child, child) + np.repeat(root, inner)[:, None]
    nodes = {
        "children": np.repeat(np.arange(n)[:, None], 2, axis=1),
        "feature": np.zeros(n, dtype=int),
        "threshold": np.zeros(n),
        "missing_left": np.zeros(n, dtype=bool),
        "value": np.zeros(n),
        "root": root,
    }
    nodes["children"][~is_leaf] = child
    nodes["feature"][~is_leaf] = figures("split_feature", int, inner)
    nodes["threshold"][~is_leaf] = threshold
    # Where NaN is not missing, it counts as 0.
    nodes["missing_left"][~is_leaf] = np.where(
        missing == _NAN_IS_MISSING, decision & _DEFAULT_LEFT != 0, threshold >= 0.0
    )
    nodes["value"][is_leaf] = figures("leaf_value", float, leaves)
    by_category = decision & _CATEGORICAL != 0
    owners = np.repeat(np.arange(len(trees)), inner)[by_category].tolist()
    splits = threshold[by_category].astype(int).tolist()
    sets = [_categories(trees[owner], split) for owner, split in zip(owners, splits, strict=True)]
    return _with_searches(nodes, dict(zip(np.flatnonzero(~is_leaf)[by_category].tolist(), sets, strict=True)))


def _fields(text: str) -> dict[str, str]:
    return {key: value for key, equals, value in (line.partition("=") for line in text.splitlines()) if equals}


def _categories(tree: Mapping[str, str], split: int) -> list[int]:
    """Return the categories that a split sends to the left, ascending."""
    low, high = map(int, tree["cat_boundaries"].split()[split : split + 2])
    words = map(int, tree["cat_threshold"].split()[low:high])
    return [32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> bit & 1]


def _with_searches(nodes: Mapping[str, np.ndarray], sets: Mapping[int, Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the nodes with a binary search in place of each node in `sets`: its categories go to the left, all others,
    and what is missing, to the right."""
    count = len(nodes["value"])
    placed: dict[int, tuple[int, float, list[int]]] = {}  # node -> the split it belongs to, threshold, children
    unused = itertools.count(count)

    def search(node: int, of: int, limits: Sequence[float], goals: Sequence[int]) -> None:
        middle = len(limits) // 2
        children: list[int] = []
        placed[node] = of, limits[middle], children
        for some, theirs in (
            (limits[:middle], goals[: middle + 1]), (limits[middle + 1 :], goals[middle + 1 :])
        ):  # fmt: skip
            children.append(next(unused) if some else theirs[0])
            if some:
                search(children[-1], of, some, theirs)

    for node, categories in sets.items():
        left, right = nodes["children"][node].tolist()
        limits: list[float] = []  # between whole numbers, ascending; below the first one lies what goes to the right
        for category in categories:
            if limits and limits[-1] == category - 0.5:
                limits[-1] = category + 0.5
            else:
                limits += [category - 0.5, category + 0.5]
        search(node, node, limits, [left if place % 2 else right for place in range(len(limits) + 1)])
    if not placed:
        return dict(nodes)
    at = np.array(list(placed))
    of, thresholds, children = (np.array(values) for values in zip(*placed.values(), strict=True))
    more = at.max() + 1 - count if at.max() >= count else 0
    grown = {
        name: array if name == "root" else np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])
        for name, array in nodes.items()
    }
    grown["feature"][at] = nodes["feature"][of]
    grown["threshold"][at], grown["children"][at], grown["missing_left"][at] = thresholds, children, False
    return grown


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
