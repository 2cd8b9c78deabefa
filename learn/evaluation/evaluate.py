"""Judge an estimator on rows it has not seen: grouped, stratified splits and the figures papers report.

Start reading at `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.errors import UsageError
from learn.data import MIN_GROUPS, Rows
from learn.estimators import Estimator, make_estimator
from learn.evaluation.benchmark_figures import Figures, Given, Scored, described, figures_of, given_of
from learn.evaluation.scores import has_relative, labels_are_its_own, mean, median, p90
from learn.evaluation.splits import hold_out, require_groups, split
from learn.step_store import StepStore
from learn.targets import Bins

TEST = "held-out test"
PUBLISHED = "published"  # name of the classes that a benchmark has, too
CV_FOLDS = 3


@dataclass(frozen=True)
class Evaluation:
    """Cross-validation inside the training rows, and the held-out test rows that took no part in it. Rows that the
    estimator refused are in neither, and in `warnings`.

    cv, test  `metrics_of` each fold, and the test
    scored    the test rows with their answers; figures: what a benchmark says of them
    """

    cv: tuple[dict[str, Any], ...]
    test: dict[str, Any]
    train_rows: Rows
    test_rows: Rows
    scored: Sequence[Scored]
    figures: Figures
    bins: Bins
    warnings: tuple[str, ...]

    @property
    def one_class(self) -> bool:
        """Return whether all rows are of one class, so that accuracy and recall say nothing."""
        both = (self.train_rows, self.test_rows)
        return len(np.unique(np.concatenate([classes_of(rows, self.bins) for rows in both]))) == 1

    def summary(self) -> dict:
        """{metric: {"cv_mean", "cv_std", "test"}} of the scalar metrics; std over the folds, NULL as None."""
        table = {}
        for name, value in self.test.items():
            if isinstance(value, dict) or name.startswith("n_") or name == "n":
                continue
            folds = [fold[name] for fold in self.cv if fold[name] is not None]
            table[name] = {
                "cv_mean": float(np.mean(folds)) if folds else None,
                "cv_std": float(np.std(folds, ddof=1)) if len(folds) > 1 else None,
                "test": value,
            }
        return table


def evaluate(
    estimator: str,
    rows: Rows,
    bins: Bins,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _step: None,
    *,
    steps: StepStore | None = None,
) -> Evaluation:
    """Fit `estimator` by name on splits of `rows`: 30 % held out, 3-fold cross-validation on the other 70 %.

    `steps` has the records of the rows' steps (None: a new store).

    Raises `UsageError` where there are too few groups to split.
    `progress` hears the name of each step before it starts.
    """
    steps = StepStore() if steps is None else steps
    classes = classes_of(rows, bins)
    require_groups(rows, MIN_GROUPS, "holding some out")
    train, test = hold_out(rows, classes, seed)
    train_rows, test_rows = rows.subset(train), rows.subset(test)

    folds = []
    unanswered: list[str] = []  # of the training rows, each of which is asked once: why
    for k, (inside, outside) in enumerate(split(train_rows, classes[train], CV_FOLDS, seed)):
        progress(f"cross-validation {k + 1}/{CV_FOLDS}")
        fitted = make_estimator(estimator, seed).fit(train_rows.subset(inside), steps)
        held, reasons_without = answered(fitted, train_rows.subset(outside), steps)
        unanswered += reasons_without
        if len(held):
            folds.append(judged(fitted, train_rows, held, bins, [], steps=steps).test)
    progress("held-out test")
    fitted = make_estimator(estimator, seed).fit(train_rows, steps)
    asked = len(test_rows)
    test_rows, refused = answered(fitted, test_rows, steps)
    reasons = "; ".join(dict.fromkeys([*refused, *unanswered]))
    if not len(test_rows):
        raise UsageError(f"estimator={estimator} has no answer for any of the {asked} held-out rows: {reasons}")
    without = len(refused) + len(unanswered)
    notes = [f"{without} of {len(rows)} rows have no answer and are in no figure: {reasons}"] if without else []
    return judged(fitted, train_rows, test_rows, bins, notes, folds, steps=steps)


def judged(
    fitted: Estimator,
    train_rows: Rows,
    test_rows: Rows,
    bins: Bins,
    notes: Sequence[str],
    cv: Sequence[dict[str, Any]] = (),
    *,
    steps: StepStore | None = None,
) -> Evaluation:
    """Judge a fitted model on rows that it has not seen and all answers; `notes` follow its own warnings."""
    prediction = fitted.predict(test_rows.cases, steps)
    given = given_of(prediction, test_rows, {PUBLISHED: bins})
    scored = scored_of(test_rows, given)
    space = test_rows.target.space
    figures = figures_of(TEST, fitted.name, scored, bins={PUBLISHED: bins}, space=space, learned=True)
    return Evaluation(
        cv=tuple(cv),
        test=metrics_of(scored, figures, space),
        train_rows=train_rows,
        test_rows=test_rows,
        scored=scored,
        figures=figures,
        bins=bins,
        warnings=(*prediction.warnings, *notes),
    )


def scored_of(rows: Rows, given: Sequence[Given]) -> list[Scored]:
    """Return rows with their answers."""
    return [Scored(**vars(one), **described(row, rows.target)) for one, row in zip(given, rows.records, strict=True)]


def metrics_of(scored: Sequence[Scored], figures: Figures, space: str) -> dict[str, Any]:
    """Return the figures of one split. Classes come from all rows, out-of-memory ones included; errors and
    underestimates only from rows with an exact label. None: could not be computed.

    macro_f1 is the mean over the classes that occur in the labels; recall and support are by those classes.
    Relative errors are |point - label| / label, over rows whose label is at least 0.01 for ratios (`n_relative`
    of them); absolute errors, in the target's unit, are over all exact rows. `coverage` is the share of labels at
    or under the 99 % bound, `bound_excess` the median of upper / label - 1, its price.
    """
    pairs = [(row.label, row.estimate) for row in scored if row.label is not None and row.estimate is not None]
    label, estimate = np.array(pairs, dtype=float).reshape(-1, 2).T
    usable = has_relative(label, space)
    absolute = np.abs(estimate - label)
    relative = absolute[usable] / label[usable]
    classes, bound = figures.classes[PUBLISHED], figures.bound
    return {
        "n": len(scored),
        "n_censored": figures.oom,
        "accuracy": classes.accuracy,
        "macro_f1": classes.macro_f1,
        "recall": classes.recall,
        "support": classes.support,
        "n_relative": int(usable.sum()),
        "mean_relative_error": mean(relative),
        "median_relative_error": median(relative),
        "p90_relative_error": p90(relative),
        "mean_absolute_error": mean(absolute),
        "p90_absolute_error": p90(absolute),
        "underestimates": figures.raw.under,
        "coverage": None if bound is None else bound.coverage,
        "bound_excess": None if bound is None else bound.excess,
    }


def own_labels(estimator: str, rows: Rows, point: np.ndarray) -> bool:
    """Return whether the rows' exact labels are simulated by the estimator itself; `point` is (n,)."""
    exact = ~rows.censored
    return labels_are_its_own(estimator, rows.source[exact], rows.label[exact], np.asarray(point)[exact])


def classes_of(rows: Rows, bins: Bins) -> np.ndarray:
    """Return the class of each row, (n,) int. Out-of-memory rows have the least that they may belong to: the top bin
    unless they had a share of the device only."""
    return bins.classify(rows.label, rows.family)


def judged_classes(rows: Rows, bins: Bins, predicted: np.ndarray) -> np.ndarray:
    """`classes_of`, but out-of-memory rows that were told to belong to a higher class do: nothing says otherwise."""
    classes = classes_of(rows, bins)
    return np.where(rows.censored, np.maximum(classes, predicted), classes)


def answered(fitted: Estimator, rows: Rows, steps: StepStore | None = None) -> tuple[Rows, list[str]]:
    """Return the rows that the estimator has an answer for, and the reason of each of the others."""
    refusals = fitted.predict(rows.cases, steps).refusals
    if not refusals:
        return rows, []
    return rows.subset(np.setdiff1d(np.arange(len(rows)), list(refusals))), list(refusals.values())
