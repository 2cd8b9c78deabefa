"""Estimators over the table of a configuration's scalar features, with a conformal bound from out-of-fold residuals.

Start reading at `TabularEstimator.fit`; a subclass fits the trees, as `LightGBMEstimator` and `SchedTune` (`forest`)
do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np

from conf.errors import CommandError, UsageError
from featurize.device.device_spec import DeviceSpec, device_features
from featurize.families import get_family
from learn.estimators.protocol import (
    LEVEL,
    Estimator,
    ResidualPrediction,
    require_rows,
    to_space,
    too_few_for,
)
from learn.estimators.trees import Trees
from learn.job.training_job import Case
from learn.rows.data import Rows
from learn.rows.step_store import StepStore

FOLDS = 5
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
        rows = require_rows(rows, least=10)
        rows = require_rows(rows.subset([i for i, case in enumerate(rows.cases) if why_not(case) is None]), least=10)
        rows = rows.subset(np.argsort(rows.run_ids.astype(str), kind="stable"))
        self.target = rows.target
        self.table = FeatureTable.learn(rows.cases)
        features = self.table.matrix(rows.cases).astype(self.dtype)
        label = to_space(rows.label / self._rough(rows.cases), rows.target.space)
        if rows.target.space == "ratio":
            label = np.clip(label, 0.0, 1.0)

        held_out = cross_fit(
            group_folds(rows.group, FOLDS, self.seed),
            lambda inside: self._within(self._train(features[inside], label[inside]).predict(features[~inside])),
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
            self._within(raw),
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

    def _within(self, raw: np.ndarray) -> np.ndarray:
        return np.clip(raw, 0.0, 1.0) if self.target.space == "ratio" else raw


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
            categorical_feature=self.table.categorical,
            params={"verbosity": -1, "min_data_in_bin": 1, "num_threads": 1},
        )
        booster = lightgbm.train(self._parameters(len(label)), table, num_boost_round=self.rounds)
        return Trees.of_lightgbm([booster])

    def _parameters(self, n: int) -> dict[str, Any]:
        """Return settings for n rows. LightGBM's defaults, 20 rows a leaf and 100 a category, make a stump of 60
        rows."""
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
            "num_threads": 1,  # a sum's order depends on the threads, and small tables are faster on one
            "verbosity": -1,
        }


def group_folds(groups: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Return the fold of each row, (n,) int in 0..folds-1: whole groups, dealt at random, with even numbers of rows."""
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


def cross_fit(fold: np.ndarray, answers: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return (n,) figures, each from a fit without the row's fold: `answers` fits inside a mask and answers outside."""
    figures = np.empty(len(fold))
    for k in range(fold.max() + 1):
        figures[fold == k] = answers(fold != k)
    return figures


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

    @property
    def categorical(self) -> list[int]:
        """Positions of the categorical columns."""
        return [i for i, name in enumerate(self.columns) if name in self.words]

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
