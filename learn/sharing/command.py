"""`learn.fit target=slowdown` and `learn.benchmark target=slowdown`: what they do and print.

Start reading at `fit_slowdowns` and `benchmark_slowdowns`. `judged` judges estimators of slowdowns on groups with a
model, or a GPU, that they were not fitted on.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from learn.judging.scores import RowScores, score_table, spread
from learn.rows.data import SLOWDOWN
from learn.sharing.slowdowns import (
    JobProfile,
    LearnedSlowdowns,
    MeasuredGroup,
    NoUtilization,
    PointSlowdowns,
    Slowdown,
    SlowdownEstimator,
    constant_slowdown,
    fitted_slowdowns,
    group_memory,
    left_out_parts,
    measured_groups,
    shared_time,
    utilizations,
)

if TYPE_CHECKING:
    import os

    from learn.commands.benchmark_rows import BenchmarkSettings
    from learn.commands.fit import FitSettings


BOTH_KEEP = 0.85  # share of the speed alone: a pair in which both keep it is one to put together
SPLITS = ("model", "device")
_TREES, _LEAF = 200, 5
Answered = tuple[MeasuredGroup, list[Slowdown] | None]


def _trees(groups: Sequence[MeasuredGroup]) -> PointSlowdowns:
    """Fit trees on the utilization of the job and the sum of its partners': what is usual (Hu et al., Lucid)."""
    from sklearn.ensemble import RandomForestRegressor

    rows = [utilizations(group.jobs, place) for group in groups for place in range(len(group.jobs))]
    forest = RandomForestRegressor(_TREES, min_samples_leaf=_LEAF, random_state=0, n_jobs=1)
    forest.fit(np.array(rows), np.array(_speeds(groups)))

    def of_group(group: Sequence[JobProfile]) -> list[float]:
        rows = [utilizations(group, place) for place in range(len(group))]
        return [1.0 / float(speed) for speed in forest.predict(np.array(rows))]

    return PointSlowdowns("trees", of_group)


def _horus_sum(groups: Sequence[MeasuredGroup]) -> PointSlowdowns:
    """Fit Horus' line (Yeung et al., 2021) through the sum of utilizations, the same for every job of a group."""
    sums = [sum(utilizations(group.jobs, 0)) for group in groups for _ in group.jobs]
    speeds = _speeds(groups)
    slope, level = np.polyfit(sums, speeds, 1).tolist() if len(set(sums)) > 1 else (0.0, float(np.mean(speeds)))
    return PointSlowdowns(
        "horus_sum",
        lambda group: [1.0 / min(1.0, max(0.05, level + slope * sum(utilizations(group, 0))))] * len(group),
    )


def _speeds(groups: Sequence[MeasuredGroup]) -> list[float]:
    """Return the normalised speed of every member."""
    return [1.0 / max(1.0, slowdown) for group in groups for slowdown in group.slowdowns]


ESTIMATORS: dict[str, Callable[[Sequence[MeasuredGroup]], SlowdownEstimator]] = {
    "learned": fitted_slowdowns,
    "trees": _trees,
    "horus_sum": _horus_sum,
    "shared_time": lambda _: shared_time(),
    "constant": lambda groups: constant_slowdown(1.0 / float(np.mean(_speeds(groups)))),
}


def judged(
    groups: Sequence[MeasuredGroup], split: str, progress: Callable[[int, int], None] = lambda completed, total: None
) -> list[RowScores]:
    """Return the figures of every estimator for each source and series.

    speed_mae        mean absolute error of normalised speed, 1 / slowdown; what was measured above 1 counts as 1
    raw_mae          the same, with measured speeds as they are
    pair_mae         mean absolute error of the mean speed of a group's members, as measured
    median, p90      those of the absolute errors of normalised speed
    auc              AUC for groups in which all keep 85 % of their speed; None where all do, or none
    covered          share of members whose slowdown stays below the 90th percentile; None for estimators without one

    Args:
        groups: Groups of any sources; each source and series is judged by itself.
        split: `model`: every group in which a model takes part is left out, each model in turn; `device`: every group
            of a GPU model. A group counts once for each part that it is left out in.
        progress: Is called with the parts done and in all.

    Members that did not train at the same time are never fitted on, and are judged in rows of their own.
    """
    by_title: dict[tuple[str, str], list[MeasuredGroup]] = defaultdict(list)
    for group in groups:
        by_title[group.title, group.series].append(group)
    parts = {title: left_out_parts(of_title, split) for title, of_title in sorted(by_title.items())}
    total, completed = sum(map(len, parts.values())), 0
    scores = []
    for (title, series), own_parts in parts.items():
        answers: dict[str, list[Answered]] = {name: [] for name in ESTIMATORS}
        for inside, outside in own_parts:
            for name, fit in ESTIMATORS.items():
                answers[name] += _answers(fit, inside, outside)
            completed += 1
            progress(completed, total)
        shown = f"{title} {series}".strip()
        for name, given in answers.items():
            together = [(group, answer) for group, answer in given if not group.is_apart]
            scores.append(_score(shown, name, together))
            if len(together) < len(given):
                scores.append(_score(f"{shown}, also groups that were not together", name, given))
    return sorted((score for score in scores if score is not None), key=lambda score: score.rows)


def _answers(
    fit: Callable[[Sequence[MeasuredGroup]], SlowdownEstimator],
    inside: Sequence[MeasuredGroup],
    outside: Sequence[MeasuredGroup],
) -> Iterator[Answered]:
    """Yield the left-out groups with their answers; without one where a job's utilization is not known."""
    estimator = None
    for group in outside:
        try:
            estimator = estimator or fit(inside)
            yield group, estimator.slowdowns(group.jobs)
        except NoUtilization:
            yield group, None


def _score(title: str, name: str, given: Sequence[Answered]) -> RowScores | None:
    answered = [(group, answer) for group, answer in given if answer is not None]
    if not answered:
        return None
    raw = [np.array([1.0 / slowdown for slowdown in group.slowdowns]) for group, _ in answered]
    expected = [np.array([1.0 / member.median for member in answer]) for _, answer in answered]
    signed = np.concatenate(expected) - np.concatenate(raw)
    errors = np.abs(np.concatenate(expected) - np.minimum(1.0, np.concatenate(raw)))
    median, p90 = spread(errors)
    of_members = [zip(group.slowdowns, answer, strict=True) for group, answer in answered]
    bounds = list(itertools.chain.from_iterable(of_members))
    has_bound = any(predicted.p90 > predicted.median for _, predicted in bounds)
    figures = {
        "speed_mae": float(errors.mean()),
        "raw_mae": float(np.abs(signed).mean()),
        "pair_mae": float(np.mean([abs(a.mean() - b.mean()) for a, b in zip(expected, raw, strict=True)])),
        "median": median,
        "p90": p90,
        "auc": _auc(
            np.array([group_speeds.min() >= BOTH_KEEP for group_speeds in raw]),
            np.array([ours.min() for ours in expected]),
        ),
        "covered": float(np.mean([slowdown <= predicted.p90 for slowdown, predicted in bounds])) if has_bound else None,
    }
    return RowScores(rows=title, by=name, count=len(answered), left_out=len(given) - len(answered), figures=figures)


def _auc(kept: np.ndarray, scores: np.ndarray) -> float | None:
    if kept.all() or not kept.any():
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(kept, scores))


@dataclass(frozen=True)
class FittedSlowdowns:
    """Result of a fit: the artifact's folder, the estimator, and what it was fitted on."""

    path: Path
    slowdowns: LearnedSlowdowns
    meta: dict[str, Any]


def fit_slowdowns(
    data: str | os.PathLike[str] | None = None,
    *,
    source: str | Sequence[str] | None = None,
    device_name: str | None = None,
    now: datetime | None = None,
) -> FittedSlowdowns:
    """Fit slowdowns to the groups of a data folder, and keep them as `models/slowdown/VERSION/`.

    Args:
        data: Data folder; None: the default one.
        source: measured, simulated or imported, or several of them; needed where groups are of several.
        device_name: GPU model; None: all.
        now: Time that names the version; time-zone aware. None is the current time.

    Raises:
        UsageError: There are too few groups, or groups of several sources. Nothing is written then.
    """
    from learn.fitting.artifacts import environment, save_artifact

    groups, left_out = measured_groups(data, source, device_name)
    model = fitted_slowdowns(groups)
    together = [group for group in groups if not group.is_apart]
    if len(together) < len(groups):
        left_out = {**left_out, "its members did not train at the same time": len(groups) - len(together)}
    meta = {
        "estimator": model.name,
        "groups": len(together),
        "left_out": left_out,
        "of": dict(Counter(group.title for group in together)),
        "device": dict(Counter(group.device for group in together)),
        "environment": environment(),
    }
    report = {"group_ids": [group.group_id for group in together]}
    path = save_artifact(data, SLOWDOWN, model, meta, report, now=now or datetime.now(UTC))
    return FittedSlowdowns(path, model, meta)


def fit_entry(settings: FitSettings) -> int:
    """Fit with the settings, and print what was fitted and where it is."""
    fitted = fit_slowdowns(settings.data, source=settings.source, device_name=settings.device_name)
    sources = ", ".join(f"{name} {count:,}" for name, count in fitted.meta["of"].items())
    print(f"slowdown: {fitted.meta['groups']:,} groups ({sources}) on {', '.join(fitted.meta['device'])}")
    for reason, count in fitted.meta["left_out"].items():
        print(f"left out: {count:,} groups: {reason}")
    contention = fitted.slowdowns.contention
    if contention is not None:
        print("contention: " + ", ".join(f"{name} {value:.3g}" for name, value in asdict(contention).items()))
    print(f"jobs known by name: {len(fitted.slowdowns.known.suffers):,}")
    print(f"artifact: {fitted.path}")
    return 0


@dataclass(frozen=True)
class SlowdownBenchmark:
    """Figures of every estimator, of the memory of groups, and how many groups are left out for which reason."""

    split: str
    scores: tuple[RowScores, ...]
    memory_errors: dict[str, dict[str, float]]  # title -> groups, median, mean, p90: relative, of the sum alone
    left_out: dict[str, int]

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        scores = [
            {
                "title": score.rows,
                "estimator": score.by,
                "groups": score.count,
                "left_out": score.left_out,
                **score.figures,
            }
            for score in self.scores
        ]
        return {**vars(self), "scores": scores}


def benchmark_slowdowns(
    settings: BenchmarkSettings, progress: Callable[[int, int], None] = lambda completed, total: None
) -> SlowdownBenchmark:
    """Judge every estimator on groups with a model, or a GPU model, that it was not fitted on."""
    groups, left_out = measured_groups(settings.data, settings.source, settings.device_name)
    split = settings.by or "model"
    return SlowdownBenchmark(split, tuple(judged(groups, split, progress)), memory_errors(groups), left_out)


def memory_errors(
    groups: Iterable[MeasuredGroup], title: Callable[[MeasuredGroup], str] = lambda group: group.title
) -> dict[str, dict[str, float]]:
    """Return title -> errors of the sum of the members' memory alone, relative to what the group took together."""
    errors: dict[str, list[float]] = {}
    for group in groups:
        if group.joint_memory_mib and not group.is_apart and all(job.memory_mib is not None for job in group.jobs):
            off = abs(group_memory(group.jobs).expected_mib / group.joint_memory_mib - 1.0)
            errors.setdefault(title(group), []).append(off)
    return {
        name: {
            "groups": len(values),
            "median": float(np.median(values)),
            "mean": float(np.mean(values)),
            "p90": float(np.quantile(values, 0.9)),
        }
        for name, values in errors.items()
    }


def benchmark_entry(settings: BenchmarkSettings) -> int:
    """Judge with the settings, print the tables, and write the file that is asked for."""
    from conf.files.outputs import write_output
    from learn.judging.benchmark_view import BenchmarkProgress

    with BenchmarkProgress("slowdown") as progress:
        benchmark = benchmark_slowdowns(settings, progress.update)
    _print(benchmark)
    if settings.out is not None:
        text = json.dumps(benchmark.to_mapping(), indent=1)
        write_output(settings.out, text.encode(), key="out")
    return 0


def _print(benchmark: SlowdownBenchmark) -> None:
    from conf.reports.blocks import Lead
    from conf.reports.terminal import print_blocks
    from learn.judging.benchmark_view import table_blocks

    for title, scores in itertools.groupby(benchmark.scores, key=lambda score: score.rows):
        table = score_table(list(scores), {"estimator": "by", "groups": "count"})
        print_blocks(*table_blocks(f"{title}: groups with a {benchmark.split} left out", *table))
    lines = [
        f"memory of {title}: {of['groups']:,.0f} groups; the sum of the members alone is off by "
        f"{of['median']:.1%} (median), {of['mean']:.1%} (mean), {of['p90']:.1%} (p90)"
        for title, of in benchmark.memory_errors.items()
    ]
    if not benchmark.scores:
        lines.insert(0, f"no estimator was judged: of one {benchmark.split} alone there are no groups to learn from")
    lines += [f"left out: {count:,} groups: {reason}" for reason, count in benchmark.left_out.items()]
    print_blocks(*map(Lead, lines))
