"""Regression trees as arrays, fitted by LightGBM or scikit-learn, and estimators that read configurations with them.

Start reading at `TabularEstimator.fit`: trees over scalar features, bounded by out-of-fold residuals; subclasses fit
the trees. `Trees.predict` is numpy alone, its figures the libraries' bit for bit. `boost` fits the hybrid's trees.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from conf.errors import CommandError
from featurize.device.device_spec import DeviceSpec, device_features
from featurize.families import get_family
from learn.estimators.protocol import (
    FOLDS,
    LEAST_ROWS,
    LEVEL,
    Estimator,
    ResidualPrediction,
    cross_fit,
    group_folds,
    require_rows,
    to_space,
    too_few_for,
    within_space,
)
from learn.job.training_job import Case
from learn.rows.data import Rows
from learn.rows.step_store import StepStore

if TYPE_CHECKING:
    import lightgbm


MEMBERS = 3  # fits that differ in their random choices; their mean is smoother than one of them
_ROBUST = 0.05  # beyond it, errors have a constant gradient (Huber): a few labels are wrong
_NOTHING_KNOWN = 1e-3  # curvature of a row that does not pull at all
_ROWS = 4096  # compared at a time
_WORDS = 4  # of 64 rows: their bits at all nodes stay in the processor's cache
_DEEPEST = 1000  # levels
_INFINITE = 1e300  # LightGBM's text for an infinite threshold
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
    """The start plus the mean over members, each the sum of its trees; n nodes, tree after tree.

    children      (n, 2) the node's left and right child; a leaf is its own child
    feature       (n,) column; threshold (n,): left where `x <= threshold` or, with missing_left (n,) bool, x is NaN
    value         (n,) of leaves; 0 elsewhere
    root          (trees,) first node of each tree; first (members,): first tree of each member
    start         () added to the members' mean
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
            object.__setattr__(self, name, np.asarray(getattr(self, name)).astype(kind))

    @cached_property
    def levels(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (n,) the longest distance of a node from its root, and (n,) the node's tree. Raises `ValueError` for a
        cycle."""
        levels, tree = np.zeros(len(self.value), np.int16), np.zeros(len(self.value), np.intp)
        level, nodes = 0, self.root
        tree[nodes] = np.arange(len(nodes))
        while nodes.size:
            if level > _DEEPEST:
                raise ValueError(f"a tree has no end, or more than {_DEEPEST} levels")
            levels[nodes] = level
            following = self.children[nodes]
            tree[following] = tree[nodes][:, None]
            reached = np.zeros(len(levels), np.bool_)
            reached[following[following != nodes[:, None]]] = True
            level, nodes = level + 1, np.flatnonzero(reached)
        return levels, tree

    @classmethod
    def join(cls, forests: Sequence[Trees]) -> Self:
        """Return trees whose `members` are those of all forests, one after the other; they read the same table."""
        nodes = np.cumsum([0, *(len(forest.value) for forest in forests)])
        trees = np.cumsum([0, *(len(forest.root) for forest in forests)])
        arrays = {name: [getattr(forest, name) for forest in forests] for name in _KINDS if name != "start"}
        for name, shift in (("children", nodes), ("root", nodes), ("first", trees)):
            arrays[name] = [array + by for array, by in zip(arrays[name], shift, strict=False)]
        return cls(**{name: np.concatenate(of_all) for name, of_all in arrays.items()}, start=np.array(0.0))

    def predict(self, table: np.ndarray) -> np.ndarray:
        """Return (n,) values for the rows of (n, columns) float64."""
        members = self.members(table)
        return np.asarray(self.start + np.cumsum(members, axis=0)[-1] / len(members))

    def members(self, table: np.ndarray) -> np.ndarray:
        """Return the members' sums, (members, n), of the rows as `predict` takes them."""
        columns = np.ascontiguousarray(table.T, dtype=np.float64)
        if len(table) == 1:  # two to three times as quick as by paths, which need not be made
            return self._sums_of_row(columns[:, 0])
        parts = [np.empty((len(self.first), 0))]
        for start in range(0, len(table), _ROWS):
            rights, n = self._paths.rights(columns[:, start : start + _ROWS]), len(table) - start
            for word in range(0, rights.shape[1], _WORDS):
                parts.append(self._paths.sums(rights[:, word : word + _WORDS], min(n - 64 * word, 64 * _WORDS)))
        return np.concatenate(parts, axis=1)

    def _sums_of_row(self, row: np.ndarray) -> np.ndarray:
        """Return the members' sums, (members, 1), of one row."""
        depth, left, right, members = self._of_row
        values, nodes = row.take(self.feature), self.root
        goes_right = values > self.threshold
        if np.isnan(row).any():
            goes_right |= np.isnan(values) & ~self.missing_left
        following = np.where(goes_right, right, left)
        for _ in range(depth):
            nodes = following.take(nodes)
        leaves = self.value.take(nodes)
        # Added one after another, as the libraries do: numpy's sum adds in pairs.
        return np.array([leaves[low:high].cumsum()[-1:] for low, high in members])

    @cached_property
    def _of_row(self) -> tuple[int, np.ndarray, np.ndarray, list[tuple[int, int]]]:
        """The longest path, the children of each node, and each member's first tree and end."""
        left, right = np.ascontiguousarray(self.children.T)
        return int(self.levels[0].max()), left, right, _limits_of(self.first, len(self.root))

    @cached_property
    def _paths(self) -> _Paths:
        return _Paths(self)

    # ---- on disk

    def save(self, folder: Path, name: str) -> None:
        """Write `NAME.npz`."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        small = {key: array.astype(np.int32) if array.dtype == np.intp else array for key, array in arrays.items()}
        np.savez_compressed(folder / f"{name}.npz", **small)

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """Read `NAME.npz`. Raises an error where its nodes do not form trees."""
        with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
            trees = cls(**stored)
        _ = trees.levels  # follows every child
        return trees

    # ---- of the libraries' models

    @classmethod
    def of_lightgbm(cls, boosters: Sequence[lightgbm.Booster], start: float = 0.0) -> Self:
        """Convert LightGBM's boosters, each a member.

        Categories are whole numbers from 0 on; a split by them becomes splits at the boundaries between them.
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
        """Convert fitted regression trees, each a member. scikit-learn compares a table's values as float32."""
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


class _Paths:
    """The paths of many rows through all trees in one pass: each node holds a bit for each row that reaches it.

    A node's bits are its parents' bits, masked by their splits. Nodes are numbered by level, leaves last; within a
    level, those with most parents come first (nodes below a split by categories have several).
    """

    def __init__(self, trees: Trees) -> None:
        levels, tree = trees.levels
        is_inner = trees.children[:, 0] != np.arange(len(levels))
        inner, leaves = np.flatnonzero(is_inner), np.flatnonzero(~is_inner)
        # Splits that many trees share, sorted by column and side of missing values, then by threshold.
        splits = np.empty(len(inner), complex)
        splits.real, splits.imag = 2 * trees.feature[inner] + trees.missing_left[inner], trees.threshold[inner]
        splits, split = np.unique(splits, return_inverse=True)
        kind = splits.real.astype(np.intp)
        self.column, self.missing_left, self.threshold = kind // 2, kind % 2 == 1, splits.imag.copy()
        limits = _limits(np.bincount(kind))
        self.groups = [(*divmod(number, 2), begin, end) for number, (begin, end) in enumerate(limits) if begin < end]

        children = trees.children[inner].ravel()
        levels = np.where(is_inner, levels, levels.max())
        order = np.lexsort((-np.bincount(children, minlength=len(levels)), levels))
        place = np.empty(len(order), np.intp)
        place[order] = np.arange(len(order))
        self.roots, self.nodes = place[trees.root], len(order)
        by_goal = np.argsort(place[children], kind="stable")
        goals, levels = place[children][by_goal], levels[children[by_goal]]
        turn = np.arange(len(goals)) - np.searchsorted(goals, goals)  # index of a parent among its node's parents
        edges = by_goal[np.lexsort((turn, levels))]
        parents, sides = place[inner[edges // 2]], edges % 2 * len(splits) + split[edges // 2]
        self.steps = [
            (int(goals[low]), _limits(np.bincount(turn[low:high])), parents[low:high], sides[low:high])
            for low, high in _limits(np.bincount(levels)[1:])
        ]

        leaves = leaves[np.argsort(tree[leaves], kind="stable")]
        tree = tree[leaves]
        self.first_leaf = np.searchsorted(tree, np.arange(len(self.roots)))[:, None]
        number = np.arange(len(leaves)) - self.first_leaf[tree, 0]
        self.digits = int(number.max()).bit_length()
        self.leaves = np.full((2**self.digits, len(self.roots)), self.nodes)
        self.leaves[number, tree] = place[leaves]
        self.values = trees.value[leaves]
        self.members = _limits_of(trees.first, len(self.roots))

    def rights(self, columns: np.ndarray) -> np.ndarray:
        """Return (splits, words) with a set bit for each row of (columns, n) that goes right."""
        n, first = columns.shape[1], columns[:, 0].take(self.column)
        right = (first > self.threshold) | (np.isnan(first) & ~self.missing_left)
        word = np.dtype(np.uint64 if n > 8 else np.uint8)
        rights = np.where(right, ~word.type(0), word.type(0))[:, None].repeat(-(-n // (8 * word.itemsize)), axis=1)
        whole = 8 * -(-n // 8)  # rows that fill bytes: those beyond n repeat the last one, and are not read
        bits = rights.view(np.uint8)[:, : whole // 8]
        pattern = columns.view(np.int64)  # bit patterns, as NaN equals itself there
        varies = (pattern != pattern[:, :1]).any(axis=1)
        columns = columns.take(np.minimum(np.arange(whole), n - 1), axis=1)
        missing = np.isnan(columns).any(axis=1)
        for column, missing_left, begin, end in self.groups:
            if varies[column]:
                goes_right = columns[column] > self.threshold[begin:end, None]
                if missing[column] and not missing_left:
                    goes_right |= np.isnan(columns[column])
                bits[begin:end] = np.packbits(goes_right, bitorder="little").reshape(end - begin, -1)
        return rights

    def sums(self, rights: np.ndarray, n: int) -> np.ndarray:
        """Return the (members, n) sums of the leaves' values that the n rows of these words reach."""
        sides = np.concatenate([~rights, rights])
        reached = np.zeros((self.nodes + 1, rights.shape[1]), rights.dtype)  # the last node is never reached
        reached[self.roots] = ~rights.dtype.type(0)
        for begin, turns, parents, sides_of in self.steps:
            rows = sides.take(sides_of, axis=0, mode="clip") & reached.take(parents, axis=0, mode="clip")
            for low, high in turns:
                goals = reached[begin : begin + high - low]
                goals |= rows[low:high]
        rows = reached.take(self.leaves, axis=0, mode="clip")
        number = np.zeros((len(self.roots), n + 1), np.min_scalar_type(len(rows)))
        for digit in range(self.digits):  # binary digits of the number of the leaf that has the row's bit
            odd = rows[1::2]
            bits = np.bitwise_or.reduce(odd, axis=0).view(np.uint8)
            bits = np.unpackbits(bits, axis=1, count=n + 1, bitorder="little")
            number |= bits.astype(number.dtype, copy=False) << digit
            rows = rows[::2] | odd
        # Added one after another, as the libraries do: numpy adds in pairs where there is a single column.
        values = self.values.take(number + self.first_leaf)
        return np.stack([values[low:high].sum(axis=0)[:n] for low, high in self.members])


def _limits_of(first: np.ndarray, end: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*first.tolist(), end]))


def _limits(counts: np.ndarray) -> list[tuple[int, int]]:
    """Return begin and end of consecutive groups with these counts."""
    return list(itertools.pairwise([0, *np.cumsum(counts).tolist()]))


class _Nodes:
    """The columns of `Trees`, as they grow while LightGBM's nested nodes are read."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in _KINDS if name != "start"}

    def add(self, node: Mapping[str, Any]) -> int:
        """Add a node of `Booster.dump_model` with its descendants, and return its number."""
        if "leaf_value" in node:
            return self._append(value=node["leaf_value"])
        feature, threshold = node["split_feature"], node["threshold"]
        left, right = self.add(node["left_child"]), self.add(node["right_child"])
        if node["decision_type"] == "<=":
            if threshold >= _INFINITE:
                threshold = np.inf
            # LightGBM treats NaN as 0 where it is not missing.
            missing_left = node["default_left"] if node["missing_type"] == "NaN" else threshold >= 0.0
            return self._append(children=[left, right], feature=feature, threshold=threshold, missing_left=missing_left)
        limits: list[float] = []  # ascending, alternating between right, left, right ...
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
    """Settings of `boost`. `least`: rows a leaf in large tables (a fiftieth in small ones); `share`: of the columns,
    tried by each tree; `quantile`: the estimated quantile; None: the middle."""

    rounds: int
    leaves: int
    least: int
    l2: float
    share: float
    quantile: float | None = None


@dataclass(frozen=True)
class Boosters:
    """The start plus the mean of a few boosters, used during a fit; `trees` is what is stored."""

    boosters: list[lightgbm.Booster]
    start: float = 0.0

    def predict(self, table: np.ndarray) -> np.ndarray:
        """Return (n,) values for the rows of (n, columns) float64."""
        of_members = [booster.predict(table, num_threads=1) for booster in self.boosters]
        return np.asarray(self.start + np.mean(of_members, axis=0))

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
        at_least: (n,) bool: the label is a lower bound, so that a prediction above it is not an error. None: all labels
            are exact.
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
    if settings.quantile is None:  # else LightGBM weighs the rows and finds the start
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


_LAUNCHES = 5  # launches of a layer in a step


class TabularEstimator(Estimator):
    """One model for the point; residuals of grouped 5-fold models inside the training rows for the distribution.

    Errors are taken in the target's space: relative (natural logarithm) for memory, time and power, absolute for
    ratios. The result does not depend on the rows' order, nor on the number of cores. Modules are refused by row.
    """

    model_name: ClassVar[str]  # name of the file of its trees
    dtype: ClassVar[type[np.floating]] = np.float64  # type in which the trees compare features
    table: FeatureTable  # the columns that the model reads; set by `fit` and `load`
    trees: Trees
    times_rough = False  # whether the trees learn the ratio of a label to `rough_figures`

    @abstractmethod
    def _train(self, features: np.ndarray, label: np.ndarray) -> Trees:
        """Fit trees to (n, columns) features, NaN where missing, and (n,) labels in the target's space."""

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Fit on the rows with exact labels. Raises `UsageError` for fewer than 10 rows or 2 groups.

        Out-of-memory rows are left out, as a regressor cannot use "at least this much". Estimates near the device's
        memory are therefore low; `learn.judging.evaluate` shows it as the recall of the top bin.
        """
        rows = require_rows(rows, least=LEAST_ROWS)
        rows = require_rows(
            rows.subset([i for i, case in enumerate(rows.cases) if why_not(case) is None]), least=LEAST_ROWS
        )
        rows = rows.subset(np.argsort(rows.run_ids.astype(str), kind="stable"))
        self.target = rows.target
        self.table = FeatureTable.learn(rows.cases)
        features = self.table.matrix(rows.cases).astype(self.dtype)
        space = rows.target.space
        label = within_space(to_space(rows.label / self._rough(rows.cases), space), space)

        held_out = cross_fit(
            group_folds(rows.group, FOLDS, self.seed),
            lambda inside: within_space(self._train(features[inside], label[inside]).predict(features[~inside]), space),
        )
        self._residuals = np.sort(label - held_out)
        self.trees = self._train(features, label)
        return self

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> ResidualPrediction:
        self.require_fitted()
        refusals = {i: reason for i, case in enumerate(cases) if (reason := why_not(case)) is not None}
        known = [i for i in range(len(cases)) if i not in refusals]
        raw, rough = np.full(len(cases), np.nan), np.ones(len(cases))
        if known:
            answered = [cases[i] for i in known]
            raw[known] = self.trees.predict(self.table.matrix(answered).astype(self.dtype))
            rough[known] = self._rough(answered)
        return self.prediction_of(raw, rough, refusals)

    def prediction_of(
        self, raw: np.ndarray, rough: np.ndarray | float = 1.0, refusals: Mapping[int, str] = MappingProxyType({})
    ) -> ResidualPrediction:
        """Return the prediction for the trees' values, (n,), and the rough figures; NaN for the rows of `refusals`."""
        return ResidualPrediction(
            within_space(raw, self.target.space),
            self._residuals,
            self.target.space,
            warnings=too_few_for(LEVEL, len(self._residuals)),
            refusals=refusals,
            times=rough,
        )

    def rough_figures(self, cases: Sequence[Case], columns: Mapping[str, np.ndarray]) -> np.ndarray | float:
        """Return (n,) rough memory (MiB) or step times (ms) of one family's cases with these features. Unlike trees,
        they extrapolate beyond the fitted rows. 1 for other targets, and where `times_rough` is False."""
        if self.times_rough and self.target.name == "memory":
            return np.asarray(columns["rough_memory_mib"] + columns["gpu_context_mib"])
        if not self.times_rough or self.target.name != "step_time":
            return 1.0
        of_type = [columns[f"gpu_{rate}_tflops"] for rate in ("fp32", "tf32", "half")]
        tflops = np.select([columns["precision"] == "fp32", columns["precision"] == "tf32"], of_type[:2], of_type[2])
        compute_us = 3 * columns["batch_flops"] / (1e6 * tflops)
        moved = 24 * columns["batch_output_elements"] + 28 * columns["parameters"]  # bytes
        launch_us = np.array([case.spec.launch_overhead_us for case in cases if case.spec is not None])
        launches_us = _LAUNCHES * columns["layers"] * launch_us
        return np.asarray((compute_us + moved / (1e3 * columns["gpu_bandwidth_gb_s"]) + launches_us) / 1e3)

    def _rough(self, cases: Sequence[Case]) -> np.ndarray:
        rough = np.ones(len(cases))
        for places, columns in case_columns(cases) if self.times_rough else ():
            rough[places] = self.rough_figures([cases[place] for place in places], columns)
        return rough

    def write_fit(self, folder: Path) -> dict[str, Any]:
        self.trees.save(folder, self.model_name)
        features, residuals = asdict(self.table), self._residuals.tolist()
        return {"features": features, "residuals": residuals, "times_rough": self.times_rough}

    def read_fit(self, folder: Path, state: Mapping[str, Any]) -> None:
        words = {name: tuple(of_name) for name, of_name in state["features"]["words"].items()}
        self.table = FeatureTable(tuple(state["features"]["columns"]), words)
        self._residuals = np.asarray(state["residuals"], dtype=float)
        self.times_rough = bool(state.get("times_rough"))
        self.trees = Trees.load(folder, self.model_name)


class LightGBMEstimator(TabularEstimator):
    """Small trees, one a round; categorical columns are passed as such."""

    name: ClassVar[str] = "lightgbm"
    rounds = 400
    model_name: ClassVar[str] = "model"

    def _train(self, features: np.ndarray, label: np.ndarray) -> Trees:
        import lightgbm

        table = lightgbm.Dataset(
            features,
            label,
            feature_name=[f"f{i}" for i in range(features.shape[1])],  # LightGBM's names may not hold JSON characters
            categorical_feature=[i for i, name in enumerate(self.table.columns) if name in self.table.words],
            params={"verbosity": -1, "min_data_in_bin": 1, "num_threads": 1},
        )
        n = len(label)  # LightGBM's defaults, 20 rows a leaf and 100 a category, make a stump of 60 rows
        parameters = {
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
            "num_threads": 1,  # a sum's order depends on the threads, and small tables are faster on one
            "verbosity": -1,
        }
        return Trees.of_lightgbm([lightgbm.train(parameters, table, num_boost_round=self.rounds)])


def case_columns(cases: Sequence[Case]) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yield, family by family, the places of its cases, and name -> (m,) features that need no trace: the configs', as
    `featurize.configs.features.feature_columns` has them, and `gpu_*` of described devices."""
    from featurize.configs.features import feature_columns

    of_family: dict[str, list[int]] = {}
    for place, case in enumerate(cases):
        of_family.setdefault(case.family, []).append(place)
    for places in of_family.values():
        columns = feature_columns([case.config for place in places if (case := cases[place]).config is not None])
        of_spec: dict[DeviceSpec, list[int]] = {}
        for row, place in enumerate(places):
            if (spec := cases[place].spec) is not None:
                of_spec.setdefault(spec, []).append(row)
        for spec, rows in of_spec.items():
            for name, value in _device_features(spec).items():
                columns.setdefault(name, np.full(len(places), np.nan))[rows] = value
        yield np.array(places), columns


def why_not(case: Case) -> str | None:
    """Return why a case has no such features, or None: it is a module, or a config without known layers."""
    if case.config is None:
        return "it reads trial configs only, and this is a module"
    try:
        if hasattr(family := get_family(case.config.family), "layers"):
            family.layers(case.config)
    except CommandError as error:
        return str(error)
    return None


_device_features = lru_cache(maxsize=256)(device_features)


@dataclass(frozen=True)
class FeatureTable:
    """The columns in their order, and the words of the categorical ones.

    A column that a config lacks (another family's field), or an unknown word, is NaN: missing, not 0.
    """

    columns: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]  # categorical column -> its words; code = position

    @classmethod
    def learn(cls, cases: Sequence[Case]) -> FeatureTable:
        """Return the table of the cases' columns, in alphabetical order, so that the rows' order changes nothing."""
        columns: set[str] = set()
        words: dict[str, set[str]] = {}
        for _, of_family in case_columns(cases):
            columns.update(of_family)
            for name, column in of_family.items():
                if column.dtype == object:
                    words.setdefault(name, set()).update(value for value in column.tolist() if value is not None)
        return cls(tuple(sorted(columns)), {name: tuple(sorted(seen)) for name, seen in sorted(words.items())})

    def matrix(self, cases: Sequence[Case]) -> np.ndarray:
        """Return (n, columns) float64; NaN is missing."""
        table = np.full((len(cases), len(self.columns)), np.nan)
        for places, columns in case_columns(cases):
            table[places] = self.encode(columns, len(places))
        return table

    def encode(self, columns: Mapping[str, np.ndarray], n: int) -> np.ndarray:
        """Return the features of n cases of one family as (n, columns) float64; NaN is missing."""
        table = np.full((len(self.columns), n), np.nan)
        for row, name in zip(table, self.columns, strict=True):
            column = columns.get(name)
            if column is None or (column.dtype == object) != (name in self.words):
                continue
            if name in self.words:
                codes = {word: code for code, word in enumerate(self.words[name])}
                row[:] = [codes.get(word, np.nan) for word in column.tolist()]
            else:
                row[:] = column
        return table.T


TREES = 100
MIN_LEAF = 2
MAX_DEPTH = 24


class SchedTune(TabularEstimator):
    """Extra trees (Geurts et al. 2006) over features of the config and the device, as in SchedTune (Albahar et al.,
    CCGrid 2022). Words are encoded as codes; missing values go to one side of a split.
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
