"""Scores of answers beside labels: classes, errors and bounds as papers have them, and the figures of each estimator on
each set of rows.

Start reading at `class_scores`, which counts on plain arrays; then at `Scored`, `figures_of` and `Benchmark`, which has
all figures; `PUBLISHED_FIGURES` are those that others published of their estimators, to stand beside ours.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conf.reports.blocks import Cell, Table, table
from learn.estimators.protocol import LEVEL, Prediction
from learn.rows.data import Bins, LabelledRow, Rows, Target

TOLERANCE = 1e-6  # share of a label; figures that differ by less are equal, whatever order their sums were taken in
_TOLERANCE_AT_LEAST = 1e-9  # in the target's unit, for labels of 0
_SIMULATES = ("trace", "hybrid")  # estimators that answer with what makes simulated labels, corrected or not
NOT_INFORMATIVE = "not informative"  # instead of the figures of such an estimator on its own labels
RELATIVE_FLOOR = 0.01  # ratios below this have no relative error: 0.004 read as 0.008 is not a 100 % mistake
_P90 = 0.9


def exceeds(label: np.ndarray, estimate: np.ndarray) -> np.ndarray:
    """Return (n,) bool: the label is above the estimate or bound by more than rounding (`TOLERANCE`)."""
    return np.asarray(label > estimate + np.maximum(TOLERANCE * np.abs(label), _TOLERANCE_AT_LEAST))


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
    """Score the class indices, (n,) int each, that rows belong to and are estimated to belong to; None without rows."""
    if not len(true):
        return None
    present, support = np.unique(true, return_counts=True)
    estimated = predicted == present[:, None]  # (classes, n)
    hits = (estimated & (true == predicted)).sum(axis=1)
    recall = hits / support
    names = [labels[index] for index in present]
    return ClassScores(
        accuracy=float((true == predicted).mean()),
        macro_f1=float(np.mean(2 * hits / (support + estimated.sum(axis=1)))),
        macro_recall=float(np.mean(recall)),
        recall=dict(zip(names, recall.tolist(), strict=True)),
        support=dict(zip(names, support.tolist(), strict=True)),
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
    """Return (n,) bool: the labels that are large enough for a relative error."""
    return label >= RELATIVE_FLOOR if space == "ratio" else label > 0


@dataclass(frozen=True, kw_only=True)
class RowScores:
    """Figures of one way to estimate on some rows, as `COLUMNS` names them.

    Args:
        rows: Which rows are judged.
        by: Who is judged, or what was left out of the fit.
        count: Rows with an answer.
        figures: Name in `COLUMNS` -> figure; NaN: there is none.
    """

    rows: str
    by: str
    count: int
    figures: Mapping[str, float]


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
}


def score_table(scores: Sequence[RowScores], subset: str = "judged on") -> Table:
    """Return scores as a table; `subset` is the head over which rows each is of."""
    names = [name for name in COLUMNS if name in scores[0].figures]
    rows: list[tuple[Cell, ...]] = [
        (score.by, score.rows, score.count, *(format(score.figures[name], COLUMNS[name][1]) for name in names))
        for score in scores
    ]
    return table(("by", subset, "rows judged", *(COLUMNS[name][0] for name in names)), rows, words=2)


def scores_of_errors(rows: str, by: str, errors: Mapping[str, np.ndarray], **more: float) -> RowScores:
    """Return the median and the 90th percentile of the size of each kind of errors, and more figures."""
    figures = dict(more)
    for name, off in errors.items():
        figures[f"{name}_median"], figures[f"{name}_p90"] = spread(off)
    return RowScores(rows=rows, by=by, count=len(next(iter(errors.values()))), figures=figures)


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


GPUMEMNET = "GPUMemNet, arXiv 2602.17817"
OVERHEADS = "GPUMemNet's repository (github.com/itu-rad/GPUMemNet), Ensemble/Overheads.md"
XMEM = "xMem, Middleware 2025"


@dataclass(frozen=True)
class PublishedFigure:
    """One figure as its authors give it. `low` and `high` are equal where they give one value; shares lie in [0, 1].

    rows     the rows that it is about: a family of configurations, a set of models
    measure  what the figure is, with bins and split
    unit     share, ms or s
    bin_gb   widths of the memory classes of an accuracy
    """

    target: str
    estimator: str
    rows: str
    measure: str
    low: float
    high: float
    source: str
    unit: str = "share"
    bin_gb: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Return it as `95% to 98%` or `24 s`."""
        low, high = (f"{value:.0%}" if self.unit == "share" else f"{value:g}" for value in (self.low, self.high))
        return (low if low == high else f"{low} to {high}") + ("" if self.unit == "share" else f" {self.unit}")


_FOLDS = "accuracy, 3-fold"
_KNOWN = "well-known models (realworld)"
_MEAN = "mean relative error"
_OWN_ROWS = "its own rows"
_INFERENCE = "inference alone, mean, on a GPU; its model's description is parsed before"
_UTILIZATION = {  # family -> target -> accuracy
    "mlp": {"smact": 0.92, "smocc": 0.94, "drama": 0.88},
    "cnn": {"smact": 0.77, "smocc": 0.71, "drama": 0.73},
    "transformer": {"smact": 0.82, "smocc": 0.68, "drama": 0.62},
}
PUBLISHED_FIGURES = (
    PublishedFigure("memory", "GPUMemNet", "mlp", f"{_FOLDS}, 1 to 2 GB bins", 0.95, 0.98, GPUMEMNET, bin_gb=(1, 2)),
    PublishedFigure("memory", "GPUMemNet", "cnn", f"{_FOLDS}, 8 GB bins", 0.81, 0.83, GPUMEMNET, bin_gb=(8,)),
    PublishedFigure("memory", "GPUMemNet", "transformer", f"{_FOLDS}, 8 GB bins", 0.86, 0.88, GPUMEMNET, bin_gb=(8,)),
    PublishedFigure("memory", "GPUMemNet", _KNOWN, _MEAN, 0.57, 0.57, GPUMEMNET),
    PublishedFigure("memory", "FakeTensor", _KNOWN, _MEAN, 0.46, 0.46, GPUMEMNET),
    PublishedFigure("memory", "Horus", _KNOWN, _MEAN, 0.67, 0.67, GPUMEMNET),
    PublishedFigure("memory", "GPUMemNet, MLP-based", _OWN_ROWS, _INFERENCE, 2.29, 2.37, OVERHEADS, "ms"),
    PublishedFigure("memory", "GPUMemNet, Transformer-based", _OWN_ROWS, _INFERENCE, 10.69, 10.72, OVERHEADS, "ms"),
    PublishedFigure("memory", "xMem", "its own models", "median relative error, about", 0.04, 0.04, XMEM),
    PublishedFigure("memory", "xMem", "its own models", "time of one estimate", 24.0, 24.0, XMEM, "s"),
    *(
        PublishedFigure(target, "GPUMemNet", family, f"{_FOLDS}, low/medium/high", share, share, GPUMEMNET)
        for family, shares in _UTILIZATION.items()
        for target, share in shares.items()
    ),
)


NEVER_FITTED_ON = "models"  # form of the published comparison's files
TRUSTED_ALONE = ", doubted rows apart"  # behind a file's name: the same estimates, without these rows
RELIABILITY = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # quantiles that are checked against the labels


@dataclass(frozen=True, kw_only=True)
class Given:
    """One estimator's answer on one row; no `estimate` has a `reason`.

    seconds    what this answer took, where each was timed
    upper      the bound that 99 of 100 labels should stay under; quantiles: those of `RELIABILITY`; where calibrated
    classes    name of the bins -> index of the predicted class; defaults to the class of the estimate
    """

    estimate: float | None
    reason: str | None = None
    seconds: float | None = None
    upper: float | None = None
    quantiles: tuple[float, ...] = ()
    classes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One estimator's answers by row.

    learns       it was fitted to rows like these; `fit_seconds` is the median over the fits
    latency      seconds of one answer by file, where they were timed apart
    warnings     its own
    """

    answers: Mapping[int, Given]
    learns: bool = False
    latency: Mapping[str, float | None] = field(default_factory=dict)
    fit_seconds: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scored(Given):
    """One row and one estimator's answer. `label` None: out of memory, the job needs more than the card.

    group   what errors are grouped by; card: the device's memory in the label's unit, where the target is memory
    operator  the kind that makes most of what the forward pass makes, where the step is traced
    """

    name: str
    group: str
    label: float | None
    doubt: str | None = None
    family: str = ""
    batch_size: int = 0
    card: float | None = None
    operator: str | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Mean, median and p90 of the errors, and the share of labels above their estimate; None without rows."""

    mean: float | None
    median: float | None
    p90: float | None
    under: float | None


NO_ERRORS = Errors(mean=None, median=None, p90=None, under=None)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One estimator on one file's rows.

    rows           the rows with its answers; bins: name -> the classes that they were judged by
    ok, oom        rows asked, by what happened to them; answered_ok and answered_oom of those have an estimate
    refusals       reason -> rows
    raw            errors of the unchanged estimates, over the ok rows; relative, for ratios absolute
    constant       median of label - estimate over the same rows, in the target's unit: the one thing that is fitted of
                   what learns nothing; None for learned estimators
    shifted        errors with the constant added to every estimate
    classes        name of the bins -> scores over the ok and oom rows, oom in the top class
    bound          scores of the 99 % bound, over the ok rows; reliability: quantile -> share of labels at or under it
    fit_right      share of the ok and oom rows rightly estimated to need more than the card or not, constant added;
                   fit_right_bound by the bound. None without a card
    median_seconds time of one answer; fit_seconds: of one fit, the median over the fits
    """

    file: str
    estimator: str
    ok: int
    oom: int
    answered_ok: int
    answered_oom: int
    refusals: dict[str, int]
    raw: Errors
    constant: float | None
    shifted: Errors
    classes: dict[str, ClassScores]
    bound: BoundScores | None
    reliability: dict[str, float]
    fit_right: float | None
    fit_right_bound: float | None
    median_seconds: float | None
    fit_seconds: float | None
    own_labels: bool
    rows: Sequence[Scored]
    bins: Mapping[str, Bins]

    @property
    def answered(self) -> list[Scored]:
        """The rows with an estimate."""
        return [row for row in self.rows if row.estimate is not None]

    @property
    def exact(self) -> list[Scored]:
        """The answered rows with a label, which those that ran out of memory lack."""
        return [row for row in self.answered if row.label is not None]


def given_of(prediction: Prediction, rows: Rows, bins: Mapping[str, Bins]) -> list[Given]:
    """Return the answer of each row, with its class by each of the bins."""
    point, upper = prediction.point, prediction.upper(LEVEL)
    quantiles = None if upper is None else np.stack([prediction.quantile(q) for q in RELIABILITY], axis=1)
    classes = {
        name: prediction.bin_probabilities(b.edges_of(rows.family)).argmax(axis=1).tolist() for name, b in bins.items()
    }
    given = []
    for i in range(len(rows)):
        if i in prediction.refusals or not math.isfinite(point[i]):
            given.append(Given(estimate=None, reason=prediction.refusals.get(i, "no finite figure")))
            continue
        given.append(
            Given(
                estimate=float(point[i]),
                upper=None if upper is None else float(upper[i]),
                quantiles=() if quantiles is None else tuple(quantiles[i].tolist()),
                classes={name: of_row[i] for name, of_row in classes.items()},
            )
        )
    return given


def described(row: LabelledRow, target: Target) -> dict[str, Any]:
    """Return the entry of `Scored` for a row, under its id and by its family."""
    return {
        "name": str(row.run_id),
        "group": str(row.family),
        "label": None if row.censored else float(row.label),
        "doubt": str(row.doubt) or None,
        "family": str(row.family),
        "batch_size": row.case.batch_size,
        "card": float(row.device_memory_mib) if target.is_memory else None,
        "source": str(row.source),
    }


def figures_of(
    file: str,
    estimator: str,
    rows: Sequence[Scored],
    asked: Asked,
    *,
    bins: Mapping[str, Bins],
    space: str,
) -> Figures:
    """Return the figures of rows that were all asked of one estimator.

    `space` is the target's: `ratio` has absolute errors. `asked` says whether it learns, so that no constant is
    fitted, and its times.
    """
    latency = asked.latency.get(file.removesuffix(TRUSTED_ALONE))
    answered = [row for row in rows if row.estimate is not None]
    oom = np.array([row.label is None for row in answered], dtype=bool)
    card, upper, seconds = (values_of(answered, name) for name in ("card", "upper", "seconds"))
    ok = [row for row in answered if row.label is not None]
    label, estimate = values_of(ok, "label"), values_of(ok, "estimate")
    constant = None if asked.learns else median(label - estimate)
    shift = constant or 0.0
    need = values_of(answered, "label")
    need[oom] = card[oom]
    bounded = ~(np.isnan(upper) | np.isnan(need))

    def right(limit: np.ndarray) -> float | None:
        """Return the share of rows of which it is said rightly whether the job fits the card."""
        return mean(((limit > card) == oom)[~np.isnan(limit) & (card > 0)])

    classes = {name: class_scores(*estimated_classes(answered, name, b), b.labels) for name, b in bins.items()}
    out_of_memory = sum(row.label is None for row in rows)
    return Figures(
        file=file,
        estimator=estimator,
        ok=len(rows) - out_of_memory,
        oom=out_of_memory,
        answered_ok=len(ok),
        answered_oom=len(answered) - len(ok),
        refusals=dict(Counter(row.reason or "no answer" for row in rows if row.estimate is None).most_common()),
        raw=errors_of(label, estimate, space),
        constant=constant,
        shifted=NO_ERRORS if asked.learns else errors_of(label, estimate + shift, space),
        classes={name: scores for name, scores in classes.items() if scores is not None},
        bound=bound_scores(need[bounded], upper[bounded], oom[bounded], space),
        reliability=_reliability([row for row in ok if row.upper is not None and row.quantiles]),
        fit_right=right(values_of(answered, "estimate") + shift),
        fit_right_bound=right(upper),
        median_seconds=median(seconds[~np.isnan(seconds)]) if latency is None else latency,
        fit_seconds=asked.fit_seconds,
        own_labels=labels_are_its_own(estimator, np.array([row.source for row in ok]), label, estimate),
        rows=rows,
        bins=bins,
    )


def values_of(rows: Sequence[Scored], name: str) -> np.ndarray:
    """Return (n,) values of a field, (n, quantiles) of `quantiles`; NaN where a row has none."""
    return np.array([getattr(row, name) for row in rows], dtype=float)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The figures of every file and estimator, and what to know.

    level      share of labels that bounds should hold
    """

    target: Target
    device: str
    card_mib: float | None = None
    figures: tuple[Figures, ...]
    notes: tuple[str, ...] = ()
    level: float = LEVEL

    @property
    def by_file(self) -> dict[str, list[Figures]]:
        """File -> the figures of each estimator on it."""
        by_file: dict[str, list[Figures]] = defaultdict(list)
        for figures in self.figures:
            by_file[figures.file].append(figures)
        return by_file

    @property
    def published(self) -> tuple[PublishedFigure, ...]:
        """Figures that others published for this target, on their own rows."""
        return tuple(figure for figure in PUBLISHED_FIGURES if figure.target == self.target.name)

    @property
    def relative(self) -> bool:
        return self.target.space == "log"

    @property
    def error_kind(self) -> str:
        """Kind of the errors: relative or absolute."""
        return "relative" if self.relative else "absolute"


def judge(
    target: Target,
    sets: Mapping[str, Mapping[int, Mapping[str, Any]]],
    bins: Mapping[str, Mapping[str, Bins]],
    asked: Mapping[str, Asked],
) -> tuple[Figures, ...]:
    """Judge every estimator on sets of rows, and beside a set with some rows in doubt on the others alone. An estimator
    without an answer or a reason for any row of a set is left out there.

    Args:
        target: The target of all rows.
        sets: Title -> row -> its entry of `Scored`.
        bins: Title -> the classes of its rows.
        asked: Estimator -> its answers.
    """
    figures = []
    for title, rows in sets.items():
        trusted = {i: about for i, about in rows.items() if about.get("doubt") is None}
        alone = {f"{title}{TRUSTED_ALONE}": trusted} if len(trusted) < len(rows) else {}
        for (file, of_file), (name, of) in itertools.product({title: rows, **alone}.items(), asked.items()):
            if scored := [Scored(**vars(of.answers[i]), **about) for i, about in of_file.items() if i in of.answers]:
                figures.append(figures_of(file, name, scored, of, bins=bins[title], space=target.space))
    return tuple(figures)


def signed_errors(rows: Sequence[Scored], constant: float | None, space: str) -> Iterator[tuple[Scored, float, float]]:
    """Yield each answered ok row with its estimate, constant added, and the signed error of that. Errors are relative,
    those of ratios absolute; a label of 0 has no relative one."""
    for row in rows:
        if row.label is not None and row.estimate is not None and (space == "ratio" or row.label > 0):
            estimate = row.estimate + (constant or 0.0)
            gap = estimate - row.label
            yield row, estimate, gap if space == "ratio" else gap / row.label


def errors_by(
    key: Callable[[Scored], Any], rows: Sequence[Scored], constant: float | None, space: str
) -> dict[Any, np.ndarray]:
    """Return the `signed_errors` of the rows of each key, keys in order; those of None are left out."""
    errors: dict[Any, list[float]] = defaultdict(list)
    for row, _, error in signed_errors(rows, constant, space):
        errors[key(row)].append(error)
    return {value: np.array(errors[value]) for value in sorted(errors.keys() - {None})}


def sample(groups: Sequence[str], n: int | None, seed: int | str) -> list[int]:
    """Return `n` positions, ascending, each group in proportion to its size; all for None. The same seed, the same
    choice; a larger `n` only adds to it."""
    if n is None or n >= len(groups):
        return list(range(len(groups)))
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    ranked = []
    for group in sorted(members):
        order = members[group]
        draw = random.Random(f"{seed}/{group}")
        draw.shuffle(order)
        # A random place between equal steps, so that of many groups of a few rows each some are in, not all or none.
        ranked += [((rank + draw.random()) / len(order), index) for rank, index in enumerate(order)]
    return sorted(index for _, index in sorted(ranked)[:n])


def estimated_classes(rows: Sequence[Scored], name: str, bins: Bins) -> tuple[np.ndarray, np.ndarray]:
    """Return (n,) int twice: the classes that answered rows belong to, and those that they are estimated to belong to.

    A job that ran out of memory needs at least this much: it belongs to any higher class that it is estimated to belong
    to.
    """
    families = [row.family for row in rows]
    by_point = bins.classify(values_of(rows, "estimate"), families)
    predicted = np.array([row.classes.get(name, k) for row, k in zip(rows, by_point.tolist(), strict=True)], int)
    oom = np.array([row.label is None for row in rows], dtype=bool)
    label = np.where(oom, values_of(rows, "card"), values_of(rows, "label"))
    true = bins.classify(label, families)
    true[np.isnan(label)] = len(bins.labels) - 1
    return np.where(oom, np.maximum(true, predicted), true), predicted


def _reliability(rows: Sequence[Scored]) -> dict[str, float]:
    if not rows:
        return {}
    label, table = values_of(rows, "label"), np.array([row.quantiles for row in rows])
    return {f"{q:g}": float((~exceeds(label, table[:, k])).mean()) for k, q in enumerate(RELIABILITY)}


def errors_of(label: np.ndarray, estimate: np.ndarray, space: str, *, relative: bool | None = None) -> Errors:
    """Return the errors of estimates, (n,), relative or absolute; `relative` None: as the target's space has them.

    Relative ones leave labels out that are too small for one.
    """
    errors = np.abs(estimate - label)
    if space != "ratio" if relative is None else relative:
        usable = has_relative(label, space)
        errors = errors[usable] / label[usable]
    return Errors(mean=mean(errors), median=median(errors), p90=p90(errors), under=mean(exceeds(label, estimate)))
