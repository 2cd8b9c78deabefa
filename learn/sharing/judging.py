"""Judge estimators of slowdowns on groups with a model, or a GPU, that they were not fitted on.

Start reading at `judged`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from learn.judging.scores import RowScores, spread
from learn.sharing.learned import LEAST_GROUPS, fitted_slowdowns
from learn.sharing.profile import JobProfile, utilization
from learn.sharing.rows import MeasuredGroup
from learn.sharing.slowdown import ConstantSlowdown, NoUtilization, SharedTime, Slowdown, SlowdownEstimator

BOTH_KEEP = 0.85  # of the speed alone: a pair in which both do is one to put together
SPLITS = ("model", "device")
_TREES, _LEAF = 200, 5
Answered = tuple[MeasuredGroup, list[Slowdown] | None]


@dataclass(frozen=True)
class _Trees:
    """Trees on the utilization of the job and the sum of its partners': what is usual (Hu et al., Lucid)."""

    forest: object
    name: str = "trees"

    @classmethod
    def fitted(cls, groups: Sequence[MeasuredGroup]) -> _Trees:
        from sklearn.ensemble import RandomForestRegressor

        rows = [_utilizations(group.jobs, place) for group in groups for place in range(len(group.jobs))]
        forest = RandomForestRegressor(_TREES, min_samples_leaf=_LEAF, random_state=0, n_jobs=1)
        return cls(forest.fit(np.array(rows), np.array(_speeds(groups))))

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]:
        rows = np.array([_utilizations(group, place) for place in range(len(group))])
        speeds = self.forest.predict(rows)  # type: ignore[attr-defined]
        return [Slowdown(1.0 / speed, 1.0 / speed) for speed in speeds.tolist()]


@dataclass(frozen=True)
class _UtilizationSum:
    """Horus (Yeung et al., 2021): a line through the sum of utilizations, the same for every job of a group."""

    slope: float
    level: float
    name: str = "horus_sum"

    @classmethod
    def fitted(cls, groups: Sequence[MeasuredGroup]) -> _UtilizationSum:
        sums = [sum(_utilizations(group.jobs, 0)) for group in groups for _ in group.jobs]
        speeds = _speeds(groups)
        slope, level = np.polyfit(sums, speeds, 1) if len(set(sums)) > 1 else (0.0, float(np.mean(speeds)))
        return cls(float(slope), float(level))

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]:
        speed = min(1.0, max(0.05, self.level + self.slope * sum(_utilizations(group, 0))))
        return [Slowdown(1.0 / speed, 1.0 / speed) for _ in group]


def _utilizations(group: Sequence[JobProfile], place: int) -> tuple[float, float]:
    """Return the utilization of one job, and the sum of its partners'. Raises `NoUtilization`."""
    busy = [known for job in group if (known := utilization(job)) is not None]
    if len(busy) < len(group):
        raise NoUtilization("the utilization of a job alone is not known")
    return busy[place], sum(busy) - busy[place]


def _speeds(groups: Sequence[MeasuredGroup]) -> list[float]:
    """Return the normalised speed of every member."""
    return [1.0 / max(1.0, slowdown) for group in groups for slowdown in group.slowdowns]


def _constant(groups: Sequence[MeasuredGroup]) -> ConstantSlowdown:
    return ConstantSlowdown(1.0 / float(np.mean(_speeds(groups))))


ESTIMATORS: dict[str, Callable[[Sequence[MeasuredGroup]], SlowdownEstimator]] = {
    "learned": fitted_slowdowns,
    "trees": _Trees.fitted,
    "horus_sum": _UtilizationSum.fitted,
    "shared_time": lambda _: SharedTime(),
    "constant": _constant,
}


def judged(
    groups: Sequence[MeasuredGroup], split: str, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[RowScores]:
    """Return the figures of every estimator for each source and series.

    speed_mae        mean absolute error of normalised speed, 1 / slowdown; what was measured above 1 counts as 1
    raw_mae          the same, with measured speeds as they are
    pair_mae         of the mean speed of a group's members, as measured
    median, p90      of the absolute errors of normalised speed
    auc              of telling groups in which all keep 85 % of their speed; None where all do, or none
    covered          share of members whose slowdown stays below the 90th percentile; None for estimators without one

    Args:
        groups: Of any sources; each source and series is judged by itself.
        split: `model`: every group in which a model takes part is left out, each model in turn; `device`: every group
            of a GPU model. A group counts once for each part that it is left out in.
        progress: Is called with the parts done and in all.

    Members that did not train at the same time are never fitted on, and are judged in rows of their own.
    """
    by_title: dict[tuple[str, str], list[MeasuredGroup]] = defaultdict(list)
    for group in groups:
        by_title[group.title, group.series].append(group)
    parts = {title: _parts(own, split) for title, own in sorted(by_title.items())}
    total, done = sum(map(len, parts.values())), 0
    scores = []
    for (title, series), own_parts in parts.items():
        answers: dict[str, list[Answered]] = {name: [] for name in ESTIMATORS}
        for inside, outside in own_parts:
            for name, fit in ESTIMATORS.items():
                answers[name] += _answers(fit, inside, outside)
            done += 1
            progress(done, total)
        shown = f"{title} {series}".strip()
        for name, given in answers.items():
            together = [(group, answer) for group, answer in given if not group.is_apart]
            scores.append(_score(shown, name, together))
            if len(together) < len(given):
                scores.append(_score(f"{shown}, also groups that were not together", name, given))
    return sorted((score for score in scores if score is not None), key=lambda score: score.rows)


def _parts(groups: Sequence[MeasuredGroup], split: str) -> list[tuple[list[MeasuredGroup], list[MeasuredGroup]]]:
    def names(group: MeasuredGroup) -> tuple[str, ...]:
        return group.models if split == "model" else (group.device,)

    parts = []
    for name in sorted({name for group in groups for name in names(group)}):
        inside = [group for group in groups if name not in names(group) and not group.is_apart]
        if len(inside) >= LEAST_GROUPS:
            parts.append((inside, [group for group in groups if name in names(group)]))
    return parts


def _answers(
    fit: Callable[[Sequence[MeasuredGroup]], SlowdownEstimator],
    inside: Sequence[MeasuredGroup],
    outside: Sequence[MeasuredGroup],
) -> list[Answered]:
    """Return the left-out groups with their answers; without one where a job's utilization is not known."""
    given: list[Answered] = []
    estimator = None
    for group in outside:
        try:
            estimator = estimator or fit(inside)
            given.append((group, estimator.slowdowns(group.jobs)))
        except NoUtilization:
            given.append((group, None))
    return given


def _score(title: str, name: str, given: Sequence[Answered]) -> RowScores | None:
    answered = [(group, answer) for group, answer in given if answer is not None]
    if not answered:
        return None
    raw = [np.array([1.0 / slowdown for slowdown in group.slowdowns]) for group, _ in answered]
    expected = [np.array([1.0 / one.median for one in answer]) for _, answer in answered]
    signed = np.concatenate(expected) - np.concatenate(raw)
    errors = np.abs(np.concatenate(expected) - np.minimum(1.0, np.concatenate(raw)))
    median, p90 = spread(errors)
    of_members = [zip(group.slowdowns, answer, strict=True) for group, answer in answered]
    bounds = list(itertools.chain.from_iterable(of_members))
    has_bound = any(one.p90 > one.median for _, one in bounds)
    figures = {
        "speed_mae": float(errors.mean()),
        "raw_mae": float(np.abs(signed).mean()),
        "pair_mae": float(np.mean([abs(a.mean() - b.mean()) for a, b in zip(expected, raw, strict=True)])),
        "median": median,
        "p90": p90,
        "auc": _auc(np.array([own.min() >= BOTH_KEEP for own in raw]), np.array([ours.min() for ours in expected])),
        "covered": float(np.mean([slowdown <= one.p90 for slowdown, one in bounds])) if has_bound else None,
    }
    return RowScores(rows=title, by=name, count=len(answered), left_out=len(given) - len(answered), figures=figures)


def _auc(kept: np.ndarray, scores: np.ndarray) -> float | None:
    if kept.all() or not kept.any():
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(kept, scores))
