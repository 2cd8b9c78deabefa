"""What estimators over the table of scalar features share: fitting, and a conformal bound from out-of-fold residuals.

Start reading at `TabularEstimator.fit`; a subclass brings the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from conf.errors import UsageError
from learn.cases import Case
from learn.data import Rows
from learn.estimators import (
    LEVEL,
    Estimator,
    ResidualPrediction,
    open_state,
    require_rows,
    to_space,
    too_few_for,
    write_state,
)
from learn.learned.features import FeatureTable, why_not
from learn.step_store import StepStore
from learn.targets import Target

FOLDS = 5


class TabularEstimator(Estimator, ABC):
    """One model for the point; the residuals of grouped 5-fold models inside the training rows for the rest.

    Errors are taken in the target's space: relative (natural logarithm) for memory, time and power, absolute for
    ratios. The result does not depend on the rows' order, nor on the number of cores. Modules are refused by row.
    """

    target: Target  # with the table, once it is fitted or loaded
    _table: FeatureTable

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)
        self._model: Any = None
        self._residuals = np.empty(0)

    @abstractmethod
    def _train(self, features: np.ndarray, label: np.ndarray) -> Any:
        """A model of (n, columns) features, NaN where missing, and (n,) labels in the target's space."""

    @abstractmethod
    def _raw(self, model: Any, features: np.ndarray) -> np.ndarray:
        """(n,) what the model says, in the target's space."""

    @abstractmethod
    def _save_model(self, folder: Path) -> None: ...

    @classmethod
    @abstractmethod
    def _load_model(cls, folder: Path) -> Any: ...

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Fit on the rows with exact labels; at least 10 of them, in at least 2 groups, or `UsageError`.

        Out-of-memory rows are left out: a regressor has no use for "at least this much". So estimates near the
        device's memory lean low; `learn.evaluation.evaluate` shows it as the recall of the top bin.
        """
        rows = require_rows(rows, least=10)
        rows = require_rows(rows.subset([i for i, case in enumerate(rows.cases) if why_not(case) is None]), least=10)
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
            model = self._train(features[inside], label[inside])
            held_out[~inside] = self._centre(model, features[~inside])
        self._residuals = np.sort(label - held_out)
        self._model = self._train(features, label)
        return self

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> ResidualPrediction:
        refusals = {i: reason for i, case in enumerate(cases) if (reason := why_not(case)) is not None}
        known = [i for i in range(len(cases)) if i not in refusals]
        features = np.full((len(cases), len(self.table.columns)), np.nan)
        features[known] = self.table.matrix([cases[i] for i in known])
        return self.prediction_of(features, refusals)

    @property
    def table(self) -> FeatureTable:
        """The columns that the model reads. Raises `RuntimeError` before a fit."""
        if self._model is None:
            raise RuntimeError("fit or load the estimator before predicting")
        return self._table

    def prediction_of(self, features: np.ndarray, refusals: Mapping[int, str]) -> ResidualPrediction:
        """Return the prediction for (n, columns) features of `table`; NaN for the rows of `refusals`."""
        warning = too_few_for(LEVEL, len(self._residuals))
        known = [i for i in range(len(features)) if i not in refusals]
        centre = np.full(len(features), np.nan)
        if known:
            centre[known] = self._centre(self._model, features[known])
        return ResidualPrediction(centre, self._residuals, self.target.space, (warning,) if warning else (), refusals)

    def save(self, folder: Path) -> None:
        folder = Path(folder)
        self._save_model(folder)
        state = {
            "features": self._table.to_mapping(),
            "residuals": self._residuals.tolist(),
        }
        write_state(folder, self, state)

    @classmethod
    def load(cls, folder: Path) -> Self:
        folder = Path(folder)
        loaded, state = open_state(cls, folder)
        loaded._table = FeatureTable.from_mapping(state["features"])
        loaded._residuals = np.asarray(state["residuals"], dtype=float)
        loaded._model = cls._load_model(folder)
        return loaded

    def _centre(self, model: Any, features: np.ndarray) -> np.ndarray:
        raw = self._raw(model, features)
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
