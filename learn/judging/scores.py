"""Score answers as papers do: classes, errors and bounds, of plain arrays.

Start reading at `class_scores`; `learn.judging.evaluate` and `learn.judging.benchmark_figures` count with these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCE = 1e-6  # of a label: figures that differ by less are equal, whatever order their sums were taken in
_TOLERANCE_AT_LEAST = 1e-9  # in the target's unit, for labels of 0
_SIMULATES = ("trace", "hybrid")  # estimators that answer with what makes simulated labels, corrected or not
NOT_INFORMATIVE = "not informative"  # instead of the figures of such an estimator on its own labels
RELATIVE_FLOOR = 0.01  # ratios below this have no relative error: 0.004 read as 0.008 is no 100 % mistake
_P90 = 0.9


def exceeds(label: np.ndarray, estimate: np.ndarray) -> np.ndarray:
    """Return (n,) bool: the label is above the estimate or bound by more than rounding (`TOLERANCE`)."""
    return label > estimate + np.maximum(TOLERANCE * np.abs(label), _TOLERANCE_AT_LEAST)


def labels_are_its_own(estimator: str, source: np.ndarray, label: np.ndarray, point: np.ndarray) -> bool:
    """Return whether the labels, (n,), are simulated and most of them the estimator's very points: then errors, classes
    and bounds say nothing. Labels that another version simulated differ, and their figures count."""
    if estimator not in _SIMULATES or not len(label) or not (source == "simulated").all():
        return False
    return bool(np.median(exceeds(label, point) | exceeds(point, label)) == 0)


@dataclass(frozen=True, kw_only=True)
class ClassScores:
    """Scores of a classifier: means are over the classes that occur in the labels; recall and support are by those."""

    accuracy: float
    macro_f1: float
    macro_recall: float
    recall: dict[str, float]
    support: dict[str, int]


def class_scores(true: np.ndarray, predicted: np.ndarray, labels: Sequence[str]) -> ClassScores | None:
    """Score the class indices, (n,) int each, that rows belong to and were told to belong to; None without rows."""
    if not len(true):
        return None
    recall, support, f1 = {}, {}, []
    for index in np.unique(true):
        hits = int(((true == index) & (predicted == index)).sum())
        of_class, predicted_count = int((true == index).sum()), int((predicted == index).sum())
        recall[labels[index]], support[labels[index]] = hits / of_class, of_class
        f1.append(2 * hits / (of_class + predicted_count))
    return ClassScores(
        accuracy=float((true == predicted).mean()),
        macro_f1=float(np.mean(f1)),
        macro_recall=float(np.mean(list(recall.values()))),
        recall=recall,
        support=support,
    )


@dataclass(frozen=True, kw_only=True)
class BoundScores:
    """Scores of an upper bound: share of labels at or under it, share above it by more than rounding, and the median of
    upper / label - 1 over exact labels."""

    n: int
    coverage: float
    above: float
    excess: float | None


def bound_scores(label: np.ndarray, upper: np.ndarray, censored: np.ndarray, space: str) -> BoundScores | None:
    """Score bounds of labels, (n,) each; None without an exact label. A `censored` job needs more than its label:
    it is above a bound that is below that, and else taken to be under it."""
    if censored.all():
        return None
    over = exceeds(label, upper)
    usable = has_relative(label, space) & ~censored
    return BoundScores(
        n=len(label),
        coverage=float((~over).mean()),
        above=float(over.mean()),
        excess=median(upper[usable] / label[usable] - 1),
    )


def has_relative(label: np.ndarray, space: str) -> np.ndarray:
    """(n,) bool: the labels that are large enough for a relative error."""
    return label >= RELATIVE_FLOOR if space == "ratio" else label > 0


@dataclass(frozen=True, kw_only=True)
class RowScores:
    """Figures of one way to estimate on some rows, as `COLUMNS` names them.

    Args:
        rows: Which rows are judged.
        by: Who is judged, or what was left out of the fit.
        count: Of the rows with an answer; left_out: of those without.
        figures: Name in `COLUMNS` -> figure; None: there is none.
    """

    rows: str
    by: str
    count: int
    left_out: int = 0
    figures: Mapping[str, float | None]


# Name of a figure -> the head of its column, and the figure's format.
COLUMNS = {
    "factor_median": ("factor, median", ".3f"),
    "factor_p90": ("p90", ".3f"),
    "bias": ("estimated / measured", ".3f"),
    "mean_error": ("mean error", ".1%"),
    "smact_median": ("SM activity off by, median", ".3f"),
    "smact_p90": ("p90", ".3f"),
    "smocc_median": ("occupancy, median", ".3f"),
    "smocc_p90": ("p90", ".3f"),
    "power_median": ("power off by, median", ".1%"),
    "power_p90": ("p90", ".1%"),
    "power_bias": ("signed", ".1%"),
    "slower_median": ("time by limit, median", ".1%"),
    "slower_p90": ("p90", ".1%"),
    "speed_mae": ("speed MAE", ".3f"),
    "raw_mae": ("MAE as measured", ".3f"),
    "pair_mae": ("MAE of the group's mean", ".3f"),
    "median": ("median", ".3f"),
    "p90": ("p90", ".3f"),
    "auc": ("AUC keep 85 %", ".3f"),
    "covered": ("below p90", ".1%"),
}


def score_table(scores: Sequence[RowScores], about: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of a table; `about`: head -> the score's field, for the columns before figures."""
    names = list(scores[0].figures)
    rows = [
        [f"{cell:,}" if isinstance(cell, int) else cell for cell in (getattr(score, field) for field in about.values())]
        + ["-" if (value := score.figures[name]) is None else format(value, COLUMNS[name][1]) for name in names]
        for score in scores
    ]
    return [*about, *(COLUMNS[name][0] for name in names)], rows


def spread(errors: np.ndarray) -> tuple[float, float]:
    """Return the median and the 90th percentile of the size of the errors that are known; NaN without any."""
    size = np.abs(errors[np.isfinite(errors)])
    return (float(np.median(size)), float(np.quantile(size, _P90))) if len(size) else (math.nan, math.nan)


def mean(values: np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def p90(values: np.ndarray) -> float | None:
    return float(np.quantile(values, _P90)) if len(values) else None
