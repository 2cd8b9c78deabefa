"""Measure how far answers lie from labels: the figures of each estimator on each set of rows.

Start reading at `Scored`, then `figures_of`, then `Benchmark`, which has all of them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from learn.estimators.protocol import LEVEL, Prediction
from learn.judging.published_figures import PublishedFigure
from learn.judging.scores import (
    RELATIVE_FLOOR,
    BoundScores,
    ClassScores,
    bound_scores,
    class_scores,
    exceeds,
    has_relative,
    labels_are_its_own,
    mean,
    median,
    p90,
)
from learn.rows.data import LabelledRow, Rows
from learn.rows.targets import Bins, Target

TRUSTED_ALONE = ", doubted rows apart"  # behind a file's name: the same estimates, without these rows
RELIABILITY = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # quantiles that are checked against the labels


@dataclass(frozen=True, kw_only=True)
class Given:
    """One estimator's answer on one row; no `estimate` has a `reason`.

    seconds    what this answer took, where each was timed
    upper      the bound that 99 of 100 labels should stay under; quantiles: those of `RELIABILITY`; where calibrated
    classes    name of the bins -> index of the class it is told to be in; where absent, that of the estimate
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

    learns       it was fitted to rows like these; `fit_seconds` is the median over `fits` fits
    latency      seconds of one answer by file, where they were timed apart
    warnings     its own
    """

    answers: Mapping[int, Given]
    learns: bool = False
    latency: Mapping[str, float] = field(default_factory=dict)
    fit_seconds: float | None = None
    fits: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scored(Given):
    """One row and one estimator's answer. `label` None: out of memory, the job needs more than the card.

    group   what errors are told apart by; card: the device's memory in the label's unit, where the target is memory
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


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One estimator on one file's rows.

    ok, oom        rows asked, by what happened to them; answered_ok and answered_oom of those have an estimate
    refusals       reason -> rows
    raw            of the estimates as they are, over the ok rows; relative, for ratios absolute
    constant       median of label - estimate over the same rows, in the target's unit: the one thing that is fitted of
                   what learns nothing; None for learned estimators
    shifted        with the constant added to every estimate
    classes        name of the bins -> scores over the ok and oom rows, oom in the top class; classes_shifted with the
                   constant added
    bound          of the 99 % bound, over the ok rows; reliability: quantile -> share of labels at or under it
    fit_right      share of the ok and oom rows told right whether they need more than the card, constant added;
                   fit_right_raw without it; fit_right_oom of the oom rows alone; fit_right_bound by the bound. None
                   without a card
    median_seconds of one answer; fit_seconds: of one fit, the median over `fits` of them
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
    classes_shifted: dict[str, ClassScores]
    bound: BoundScores | None
    reliability: dict[str, float]
    fit_right: float | None
    fit_right_raw: float | None
    fit_right_oom: float | None
    fit_right_bound: float | None
    median_seconds: float | None
    fit_seconds: float | None
    fits: int
    own_labels: bool = False


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
    """Return what `Scored` says of a row, under its id and by its family."""
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
    *,
    bins: Mapping[str, Bins] | None = None,
    space: str = "log",
    learned: bool = False,
    median_seconds: float | None = None,
    fit_seconds: float | None = None,
    fits: int = 0,
) -> Figures:
    """Return the figures of rows that were all asked of one estimator. `median_seconds` None: of the rows' own.

    `space` is the target's: `ratio` has absolute errors. `learned`: no constant is fitted.
    """
    answered = [row for row in rows if row.estimate is not None]
    oom = np.array([row.label is None for row in answered], dtype=bool)
    card, upper, seconds = (_values(answered, name) for name in ("card", "upper", "seconds"))
    ok = [row for row in answered if row.label is not None]
    label, estimate = _values(ok, "label"), _values(ok, "estimate")
    constant = None if learned else median(label - estimate)
    shift = constant or 0.0
    need = _values(answered, "label")
    need[oom] = card[oom]
    bounded = ~(np.isnan(upper) | np.isnan(need))

    def right(limit: np.ndarray, mask: np.ndarray) -> float | None:
        """Return the share of rows of which it is said rightly whether the job fits the card."""
        return mean(((limit > card) == oom)[mask & (card > 0)])

    def classes(shift: float | None) -> dict[str, ClassScores]:
        scores = {name: class_scores(*told_classes(answered, name, b, shift), b.labels) for name, b in known.items()}
        return {name: of_bins for name, of_bins in scores.items() if of_bins is not None}

    known = bins or {}
    total = _values(answered, "estimate")
    everything = np.ones(len(answered), dtype=bool)
    out_of_memory = sum(row.label is None for row in rows)
    none = Errors(mean=None, median=None, p90=None, under=None)
    return Figures(
        own_labels=labels_are_its_own(estimator, np.array([row.source for row in ok]), label, estimate),
        file=file,
        estimator=estimator,
        ok=len(rows) - out_of_memory,
        oom=out_of_memory,
        answered_ok=len(ok),
        answered_oom=len(answered) - len(ok),
        refusals=dict(Counter(row.reason or "no answer" for row in rows if row.estimate is None).most_common()),
        raw=_errors(label, estimate, space),
        constant=constant,
        shifted=none if learned else _errors(label, estimate + shift, space),
        classes=classes(None),
        classes_shifted={} if learned else classes(shift),
        bound=bound_scores(need[bounded], upper[bounded], oom[bounded], space),
        reliability=_reliability([row for row in ok if row.upper is not None and row.quantiles]),
        fit_right=right(total + shift, everything),
        fit_right_raw=right(total, everything),
        fit_right_oom=right(total + shift, oom),
        fit_right_bound=right(upper, ~np.isnan(upper)),
        median_seconds=median(seconds[~np.isnan(seconds)]) if median_seconds is None else median_seconds,
        fit_seconds=fit_seconds,
        fits=fits,
    )


def _values(rows: Sequence[Scored], name: str) -> np.ndarray:
    """Return (n,) values; NaN where a row has none."""
    return np.array([getattr(row, name) for row in rows], dtype=float)


@dataclass(frozen=True)
class Benchmark:
    """The figures of every file and estimator, the answers behind them in the same order of rows, and what to know.

    bins       file -> name -> the classes that its rows were judged by
    published  what others published for this target, on their own rows
    """

    target: Target
    device: str
    card_mib: float | None
    bins: Mapping[str, Mapping[str, Bins]]
    figures: tuple[Figures, ...]
    scored: Mapping[tuple[str, str], Sequence[Scored]]
    published: tuple[PublishedFigure, ...]
    notes: tuple[str, ...]

    @property
    def relative(self) -> bool:
        return self.target.space == "log"


def judged(
    sets: Mapping[str, Mapping[int, Mapping[str, Any]]],
    asked: Mapping[str, Asked],
    bins: Mapping[str, Mapping[str, Bins]],
    space: str,
) -> tuple[list[Figures], dict[tuple[str, str], list[Scored]]]:
    """Judge every estimator on sets of rows: title -> row -> what `Scored` says of it. An estimator without an answer
    or a reason for any of them is left out. `bins` are by title, doubted rows apart or not."""
    figures = []
    scored = {}
    for (title, rows), (name, of) in itertools.product(sets.items(), asked.items()):
        own = [Scored(**vars(of.answers[i]), **about) for i, about in rows.items() if i in of.answers]
        if not own:
            continue
        scored[title, name] = own
        file = title.removesuffix(TRUSTED_ALONE)
        times: dict[str, Any] = {"median_seconds": of.latency.get(file), "fit_seconds": of.fit_seconds, "fits": of.fits}
        figures.append(figures_of(title, name, own, bins=bins[file], space=space, learned=of.learns, **times))
    return figures, scored


def by_group(rows: Sequence[Scored], constant: float | None, *, space: str = "log") -> dict[str, tuple[int, Errors]]:
    """Return group -> (ok rows answered, errors with the file's constant added), groups in alphabetical order."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        if row.label is not None and row.estimate is not None:
            groups[row.group].append(row)
    return {
        group: (len(own), _errors(_values(own, "label"), _values(own, "estimate") + (constant or 0.0), space))
        for group, own in sorted(groups.items())
    }


def worst_of(
    rows: Sequence[Scored], constant: float | None, n: int, *, space: str = "log"
) -> list[tuple[Scored, float]]:
    """Return the `n` ok rows furthest off, constant added: (row, signed error), the furthest first."""
    pairs = signed_errors(rows, constant, space=space)
    return sorted(pairs, key=lambda pair: -abs(pair[1]))[:n]


def signed_errors(rows: Sequence[Scored], constant: float | None, *, space: str = "log") -> list[tuple[Scored, float]]:
    """Return (row, estimate + constant - label) of the ok rows answered: relative, for ratios absolute."""
    errors = []
    for row in rows:
        if row.label is None or row.estimate is None:
            continue
        gap = row.estimate + (constant or 0.0) - row.label
        if space == "ratio":
            errors.append((row, gap))
        elif row.label >= RELATIVE_FLOOR:
            errors.append((row, gap / row.label))
    return errors


def sample(groups: Sequence[str], n: int | None, seed: int | str) -> list[int]:
    """`n` positions, ascending, each group in proportion to its size; all for None. The same seed, the same choice; a
    larger `n` only adds to it."""
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


def told_classes(
    rows: Sequence[Scored], name: str, bins: Bins, shift: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (n,) int twice: the classes that answered rows belong to, and those that they were told to belong to.

    `shift` None: the classes as told; else those of the estimates with it added. A job that ran out of memory needs at
    least so much: it belongs to any higher class that it was told to belong to.
    """
    families = [row.family for row in rows]
    predicted = bins.classify(_values(rows, "estimate") + (shift or 0.0), families)
    if shift is None:
        predicted = np.array([row.classes.get(name, k) for row, k in zip(rows, predicted.tolist(), strict=True)], int)
    oom = np.array([row.label is None for row in rows], dtype=bool)
    label = np.where(oom, _values(rows, "card"), _values(rows, "label"))
    true = bins.classify(label, families)
    true[np.isnan(label)] = len(bins.labels) - 1
    return np.where(oom, np.maximum(true, predicted), true), predicted


def _reliability(rows: Sequence[Scored]) -> dict[str, float]:
    if not rows:
        return {}
    label, table = _values(rows, "label"), np.array([row.quantiles for row in rows])
    return {f"{q:g}": float((~exceeds(label, table[:, k])).mean()) for k, q in enumerate(RELIABILITY)}


def _errors(label: np.ndarray, estimate: np.ndarray, space: str) -> Errors:
    errors = np.abs(estimate - label)
    if space != "ratio":
        usable = has_relative(label, space)
        errors = errors[usable] / label[usable]
    return Errors(mean=mean(errors), median=median(errors), p90=p90(errors), under=mean(exceeds(label, estimate)))
