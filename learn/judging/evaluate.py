"""Judge an estimator on rows it has not seen: grouped, stratified splits and the figures papers report.

Start reading at `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from conf.errors import UsageError
from learn.estimators.protocol import Prediction, make_estimator
from learn.judging.benchmark_figures import Figures, Scored, described, figures_of, given_of
from learn.judging.scores import has_relative, mean, median, p90
from learn.judging.splits import hold_out, require_groups, split
from learn.rows.data import MIN_GROUPS, Rows
from learn.rows.step_store import StepStore
from learn.rows.targets import Bins

TEST = "held-out test"
PUBLISHED = "published"  # name of the classes that a benchmark has, too
CV_FOLDS = 3


@dataclass(frozen=True)
class Evaluation:
    """Held-out rows that took no part in a fit, and cross-validation inside the rows that did. Rows that the estimator
    refused are in neither, and in `warnings`.

    scored    the test rows with their answers; figures: what a benchmark says of them
    refused   why other rows have no answer, a reason each
    cv        `metrics_of` each fold
    """

    train_rows: Rows
    test_rows: Rows
    scored: Sequence[Scored]
    figures: Figures
    bins: Bins
    warnings: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    cv: tuple[dict[str, Any], ...] = ()

    @cached_property
    def test(self) -> dict[str, Any]:
        """`metrics_of` the test rows."""
        return metrics_of(self.scored, self.figures, self.test_rows.target.space)

    def among(self, run_ids: np.ndarray) -> Evaluation:
        """Return the evaluation of the test rows with these ids."""
        index = np.flatnonzero(np.isin(self.test_rows.run_ids.astype(str), run_ids.astype(str))).tolist()
        rows, scored = self.test_rows.subset(index), [self.scored[i] for i in index]
        return replace(
            self, test_rows=rows, scored=scored, figures=_figures(self.figures.estimator, scored, rows, self.bins)
        )

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
    train_rows = rows.subset(train)

    def fitted_and_judged(known: Rows, asked: Rows) -> Evaluation:
        fitted = make_estimator(estimator, seed).fit(known, steps)
        return judged(fitted.predict(asked.cases, steps), asked, bins, estimator, train_rows)

    folds = []
    for k, (inside, outside) in enumerate(split(train_rows, classes[train], CV_FOLDS, seed)):
        progress(f"cross-validation {k + 1}/{CV_FOLDS}")
        folds.append(fitted_and_judged(train_rows.subset(inside), train_rows.subset(outside)))
    progress("held-out test")
    done = fitted_and_judged(train_rows, rows.subset(test))
    refused = [*done.refused, *(reason for fold in folds for reason in fold.refused)]
    reasons = "; ".join(dict.fromkeys(refused))
    if not len(done.test_rows):
        raise UsageError(f"estimator={estimator} has no answer for any of the {len(test)} held-out rows: {reasons}")
    notes = [f"{len(refused)} of {len(rows)} rows have no answer and are in no figure: {reasons}"] if refused else []
    cv = tuple(fold.test for fold in folds if len(fold.test_rows))
    return replace(done, cv=cv, warnings=(*done.warnings, *notes))


def judged(prediction: Prediction, rows: Rows, bins: Bins, estimator: str, train_rows: Rows) -> Evaluation:
    """Judge an estimator's prediction of rows that it has not seen.

    Args:
        prediction: Of the rows.
        rows: Held-out rows.
        bins: Classes that the rows are told apart by.
        estimator: Its name.
        train_rows: What it was fitted on.
    """
    given = given_of(prediction, rows, {PUBLISHED: bins})
    answered = [i for i, one in enumerate(given) if one.estimate is not None]
    held = rows.subset(answered)
    answers = zip((given[i] for i in answered), held.records, strict=True)
    scored = [Scored(**vars(one), **described(row, rows.target)) for one, row in answers]
    return Evaluation(
        train_rows=train_rows,
        test_rows=held,
        scored=scored,
        figures=_figures(estimator, scored, held, bins),
        bins=bins,
        warnings=prediction.warnings,
        refused=tuple(one.reason or "" for one in given if one.estimate is None),
    )


def _figures(estimator: str, scored: Sequence[Scored], rows: Rows, bins: Bins) -> Figures:
    return figures_of(TEST, estimator, scored, bins={PUBLISHED: bins}, space=rows.target.space, learned=True)


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


def classes_of(rows: Rows, bins: Bins) -> np.ndarray:
    """Return the class of each row, (n,) int. Out-of-memory rows have the least that they may belong to: the top bin
    unless they had a share of the device only."""
    return bins.classify(rows.label, rows.family)
