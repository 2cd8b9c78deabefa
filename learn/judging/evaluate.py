"""Judge an estimator on rows it has not seen: grouped, stratified splits and the figures papers report.

Start reading at `evaluate`. Near-copies are never on both sides of a split; `parts_of` shares rows out for a benchmark.
Fits of constants have no near-copies: `judged_by_splits` leaves out masks of their rows in turn (`held_out_by`).
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from conf.errors import UsageError
from featurize.device.device_spec import plain_device
from learn.estimators.protocol import OF_CONFIGS, PREFERRED, Estimator, Prediction, make_estimator
from learn.judging.scores import (
    Asked,
    Figures,
    Scored,
    described,
    errors_of,
    figures_of,
    given_of,
    has_relative,
    mean,
    values_of,
)
from learn.rows.data import MIN_GROUPS, Bins, Rows
from learn.rows.step_store import StepStore

TEST = "held-out test"
PUBLISHED = "published"  # name of the classes that a benchmark has, too
CV_FOLDS = 3
LEARNED_FROM = "learned from"  # which rows are judged: those that were fitted on
Fitted = TypeVar("Fitted")


@dataclass(frozen=True)
class Evaluation:
    """Held-out rows that took no part in a fit, and cross-validation inside the rows that did. Rows that the estimator
    refused are in neither, and in `warnings`.

    figures   a benchmark's figures of the test rows
    refused   why other rows have no answer, a reason each
    cv        `metrics_of` each fold
    """

    train_rows: Rows
    test_rows: Rows
    figures: Figures
    warnings: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    cv: tuple[dict[str, Any], ...] = ()

    @property
    def bins(self) -> Bins:
        return self.figures.bins[PUBLISHED]

    @cached_property
    def test(self) -> dict[str, Any]:
        """`metrics_of` the test rows."""
        return metrics_of(self.figures, self.test_rows.target.space)

    def among(self, run_ids: np.ndarray) -> Evaluation:
        """Return the evaluation of the test rows with these ids."""
        index = np.flatnonzero(np.isin(self.test_rows.run_ids.astype(str), run_ids.astype(str))).tolist()
        rows = self.test_rows.subset(index)
        figures = _figures(self.figures.estimator, rows, [self.figures.rows[i] for i in index], self.bins)
        return replace(self, test_rows=rows, figures=figures)

    @property
    def one_class(self) -> bool:
        """Return whether all rows are of one class, so that accuracy and recall say nothing."""
        both = (self.train_rows, self.test_rows)
        return len(np.unique(np.concatenate([classes_of(rows, self.bins) for rows in both]))) == 1

    def summary(self) -> dict[str, Any]:
        """Return {metric: {"cv_mean", "cv_std", "test"}} of the scalar metrics; std over the folds, NULL as None."""
        return {
            name: over_folds(fold[name] for fold in self.cv) | {"test": value}
            for name, value in self.test.items()
            if not (isinstance(value, dict) or name.startswith("n_") or name == "n")
        }


def over_folds(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return mean and standard deviation of a metric's values, those of folds without one left out."""
    known = np.array([value for value in values if value is not None])
    return {"cv_mean": mean(known), "cv_std": float(np.std(known, ddof=1)) if len(known) > 1 else None}


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
    `progress` is called with the name of each step before it starts.
    """
    steps = StepStore() if steps is None else steps
    classes = classes_of(rows, bins)
    require_groups(rows, MIN_GROUPS, "holding some out")
    train, test = hold_out(rows, classes, seed)
    train_rows = rows.subset(train)

    def judge_side(text: str, known: Rows, asked: Rows) -> Evaluation:
        progress(text)
        fitted = make_estimator(estimator, seed).fit(known, steps)
        return judged(fitted.predict(asked.cases, steps), asked, bins, estimator, train_rows)

    folds = [
        judge_side(f"cross-validation {k}/{CV_FOLDS}", train_rows.subset(inside), train_rows.subset(outside))
        for k, (inside, outside) in enumerate(split(train_rows, classes[train], CV_FOLDS, seed), start=1)
    ]
    held_out = judge_side("held-out test", train_rows, rows.subset(test))
    refused = [*held_out.refused, *(reason for fold in folds for reason in fold.refused)]
    reasons = "; ".join(dict.fromkeys(refused))
    if not len(held_out.test_rows):
        raise UsageError(f"estimator={estimator} has no answer for any of the {len(test)} held-out rows: {reasons}")
    notes = [f"{len(refused)} of {len(rows)} rows have no answer and are in no figure: {reasons}"] if refused else []
    cv = tuple(fold.test for fold in folds if len(fold.test_rows))
    return replace(held_out, cv=cv, warnings=(*held_out.warnings, *notes))


def judged(prediction: Prediction, rows: Rows, bins: Bins, estimator: str, train_rows: Rows) -> Evaluation:
    """Judge an estimator's prediction of rows that it has not seen.

    Args:
        prediction: Prediction of the rows.
        rows: Held-out rows.
        bins: Classes of the rows.
        estimator: Its name.
        train_rows: What it was fitted on.
    """
    given = given_of(prediction, rows, {PUBLISHED: bins})
    answered = [i for i, answer in enumerate(given) if answer.estimate is not None]
    held = rows.subset(answered)
    answers = zip((given[i] for i in answered), held.records, strict=True)
    scored = [Scored(**vars(answer), **described(row, rows.target)) for answer, row in answers]
    return Evaluation(
        train_rows=train_rows,
        test_rows=held,
        figures=_figures(estimator, held, scored, bins),
        warnings=prediction.warnings,
        refused=tuple(answer.reason or "" for answer in given if answer.estimate is None),
    )


def _figures(estimator: str, rows: Rows, scored: Sequence[Scored], bins: Bins) -> Figures:
    return figures_of(
        TEST, estimator, scored, Asked(answers={}, learns=True), bins={PUBLISHED: bins}, space=rows.target.space
    )


def metrics_of(figures: Figures, space: str) -> dict[str, Any]:
    """Return the figures of one split. Classes come from all rows, out-of-memory ones included; errors and
    underestimates only from rows with an exact label. None: could not be computed.

    macro_f1 is the mean over the classes that occur in the labels; recall and support are by those classes.
    Relative errors are |point - label| / label, over rows whose label is at least 0.01 for ratios (`n_relative`
    of them); absolute errors, in the target's unit, are over all exact rows. `coverage` is the share of labels at
    or under the 99 % bound, `bound_excess` the median of upper / label - 1, its price.
    """
    label, estimate = values_of(figures.exact, "label"), values_of(figures.exact, "estimate")
    relative, absolute = (errors_of(label, estimate, space, relative=kind) for kind in (True, False))
    classes, bound = figures.classes[PUBLISHED], figures.bound
    return {
        "n": len(figures.rows),
        "n_censored": figures.oom,
        "accuracy": classes.accuracy,
        "macro_f1": classes.macro_f1,
        "recall": classes.recall,
        "support": classes.support,
        "n_relative": int(has_relative(label, space).sum()),
        "mean_relative_error": relative.mean,
        "median_relative_error": relative.median,
        "p90_relative_error": relative.p90,
        "mean_absolute_error": absolute.mean,
        "p90_absolute_error": absolute.p90,
        "underestimates": absolute.under,
        "coverage": None if bound is None else bound.coverage,
        "bound_excess": None if bound is None else bound.excess,
    }


def classes_of(rows: Rows, bins: Bins) -> np.ndarray:
    """Return the class of each row, (n,) int. Out-of-memory rows have the least that they may belong to: the top bin
    unless they had a share of the device only."""
    return bins.classify(rows.label, rows.family)


def remarks(estimator: type[Estimator], rows: Rows, bins: Bins) -> Iterator[str]:
    """Yield what a reader of the figures has to know of the rows that are fitted on and judged."""
    present = np.unique(classes_of(rows, bins))
    if len(present) == 1:
        exact = rows.exact.label
        span = f"{exact.min():.4g} to {exact.max():.4g} {rows.target.unit}" if exact.size else "out of memory"
        yield f"all {len(rows)} rows fall into one class, {bins.labels[present[0]]} ({span}): no accuracy"
    if rows.censored.any():
        known = (
            "they are fitted on as lower bounds"
            if estimator.uses_out_of_memory
            else "they are not fitted on, so estimates near the device's memory lean low"
        )
        shares = int((rows.censored & (rows.device_memory_mib < rows.card_mib)).sum())
        yield (
            f"{int(rows.censored.sum())} out-of-memory rows count as members of the bin {bins.labels[-1]}"
            + (f", {shares} of them, which had a share of the device only, of any from their own on" * bool(shares))
            + f"; {known}"
        )
    if doubted := int((rows.doubt != "").sum()):
        yield (
            f"{doubted} rows are in doubt (runs.error says why, or the rows beside them do): judged, but not fitted on"
        )
    if "simulated" in rows.count("source"):
        yield (
            "the labels are of simulated devices: the figures say how well their model is reproduced, "
            "nothing about real GPUs"
        )
        if estimator.name in ("trace", PREFERRED):  # whose figures are the trace's own, corrected or not
            yield (
                "the trace made these very labels, so that errors here are near zero by construction; "
                f"estimator={OF_CONFIGS} learns them from configurations"
            )
    yield from rows.left_out


SPLITS = ("cv", "holdout", "leave_one_out")
GROUPINGS = ("module", "family", "device", "source")
SLOWDOWN_GROUPINGS = ("model", "device")
NEVER_FITTED = "never fitted on"  # name of the part of rows that no fit may see
TEST_TENTHS = 3  # three of ten folds: 30 % held out


@dataclass(frozen=True)
class Part:
    """One fit: the rows that it sees, (n,) bool, and the positions of those that it is asked, ascending; no group is on
    both sides."""

    name: str
    inside: np.ndarray
    outside: np.ndarray


def parts_of(
    rows: Rows,
    strata: np.ndarray,
    *,
    how: str,
    folds: int = 3,
    by: str | None = None,
    seed: int = 0,
    fitted_on: np.ndarray | None = None,
    asked: np.ndarray | None = None,
) -> tuple[Part, ...]:
    """Return the fits of one split. Every asked row is outside exactly one part; with `holdout`, of the rows that may
    be fitted on only the held-out ones are.

    how        cv: `folds` folds, stratified and grouped; holdout: 30 % held out, as `learn.fit` does; leave_one_out:
               each group of `by` in turn
    strata     (n,) int: shared out evenly over folds
    fitted_on  (n,) bool: rows that may be fitted on (default all); the others are asked of a fit on all of these
    asked      (n,) bool: rows that answers are wanted of (default all)

    Raises `UsageError` where a split needs more groups than there are.
    """
    fitted_on = np.ones(len(rows), dtype=bool) if fitted_on is None else np.asarray(fitted_on, dtype=bool)
    asked = np.ones(len(rows), dtype=bool) if asked is None else np.asarray(asked, dtype=bool)
    known = np.flatnonzero(fitted_on)
    outsides: dict[str, np.ndarray] = {}
    if (asked & fitted_on).any():
        left_out = _left_out(rows.subset(known), strata[known], how, folds, by, seed)
        outsides = {name: known[outside] for name, outside in left_out}
    outsides[NEVER_FITTED] = np.flatnonzero(asked & ~fitted_on)

    group = rows.group.astype(str)
    parts = [
        Part(name, fitted_on & ~np.isin(group, group[outside]), outside[asked[outside]])
        for name, outside in outsides.items()
    ]
    return tuple(part for part in parts if len(part.outside))


def _left_out(
    rows: Rows, strata: np.ndarray, how: str, folds: int, by: str | None, seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the positions of the rows that are left out in turn."""
    if how == "cv":
        require_groups(rows, folds, f"folds={folds}")
        for k, (_, outside) in enumerate(split(rows, strata, folds, seed), start=1):
            yield f"fold {k} of {folds}", outside
    elif how == "holdout":
        require_groups(rows, 10, "split=holdout")
        yield "held out", hold_out(rows, strata, seed)[1]
    else:
        assert by is not None  # leave_one_out is refused without
        keys = keys_of(rows, by)
        names = sorted(set(keys))
        if len(names) < 2:
            raise UsageError(f"split=leave_one_out by={by}: all rows are of {by} {names[0]}; it takes two or more")
        yield from ((name, np.flatnonzero(keys == name)) for name in names)


def keys_of(rows: Rows, by: str) -> np.ndarray:
    """Return (n,) str: the kind that each row counts as; spellings of one device are the same."""
    if by == "device":
        return np.array([plain_device(name) for name in rows.device], dtype=object)
    return np.asarray(getattr(rows, by)).astype(str)


def split(rows: Rows, classes: np.ndarray, folds: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (inside, outside) positions of each fold: groups whole, classes about equally shared."""
    from sklearn.model_selection import StratifiedGroupKFold

    strata = np.asarray(classes).copy()
    names, counts = np.unique(strata, return_counts=True)
    strata[np.isin(strata, names[counts < folds])] = -1  # classes too rare to share out are shared out together
    if np.unique(strata, return_counts=True)[1].max() < folds:
        strata[:] = 0
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        for inside, outside in splitter.split(np.zeros(len(rows)), strata, rows.group.astype(str)):
            if len(outside):  # with one large group, another fold can be left without any
                yield inside, outside


def hold_out(rows: Rows, classes: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, test) positions, ascending; about 30 % of the rows in test, no group in both."""
    tenths = [outside for _, outside in split(rows, classes, 10, seed)]
    test = np.sort(np.concatenate(tenths[:TEST_TENTHS]))
    return np.setdiff1d(np.arange(len(rows)), test), test


def require_groups(rows: Rows, least: int, asker: str) -> None:
    """Raise `UsageError` where there are fewer different configurations than `asker` takes."""
    groups = len(set(rows.group.astype(str)))
    if groups < least:
        raise UsageError(
            f"the {len(rows)} rows of target={rows.target.name} are near-copies of {groups} configurations; {asker} "
            f"takes at least {least} different ones"
        )


def held_out_by(labels: np.ndarray, folds: int | None = None) -> list[np.ndarray]:
    """Return the mask of what is left out: each label in turn, or this many parts of labels that stay together."""
    if folds is None:
        return [labels == label for label in np.unique(labels)]
    part = np.array([zlib.crc32(str(label).encode()) % folds for label in labels])
    return [part == fold for fold in range(folds)]


def left_out_errors(
    known: np.ndarray, masks: Iterable[np.ndarray], errors_without: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return each row's errors from a fit without it, as `known` is shaped; NaN where no such fit is possible.

    Args:
        known: Errors of the fit on all rows, (rows, ...).
        masks: Masks of the rows that are left out in turn.
        errors_without: Mask of what is left out -> errors of all rows, fitted on the others.
    """
    errors = np.full_like(known, np.nan)
    for mask in masks:
        if mask.any() and not mask.all():
            errors[mask] = errors_without(mask)[mask]
    return errors


def judged_by_splits(
    fitted: Callable[[np.ndarray], Fitted],
    errors_by: Callable[[Fitted], np.ndarray],
    splits: Mapping[str, Collection[np.ndarray]],
    progress: Callable[[str, int, int], None] = lambda _text, _done, _of: None,
    label: str = "fitting",
) -> tuple[Fitted, dict[str, np.ndarray]]:
    """Return the fit on all rows, and how far each row is off by it (`LEARNED_FROM`) and by fits without the row.

    Args:
        fitted: Fits to the rows of a mask, (rows,).
        errors_by: Errors of all rows by a fit, (rows, ...).
        splits: Title -> masks of the rows that are left out in turn; at least one of them all.
        progress: Called before each fit with a text, the number of fits done and their total.
        label: How the text begins.
    """
    fits, total = itertools.count(), 1 + sum(map(len, splits.values()))

    def errors_without(split: str, mask: np.ndarray) -> np.ndarray:
        progress(f"{label}, {split}", next(fits), total)
        return errors_by(fitted(~mask))

    progress(label, next(fits), total)
    learned = fitted(np.ones_like(next(itertools.chain.from_iterable(splits.values()))))
    errors = {LEARNED_FROM: errors_by(learned)}
    for split, masks in splits.items():
        errors[split] = left_out_errors(errors[LEARNED_FROM], masks, partial(errors_without, split))
    return learned, errors
