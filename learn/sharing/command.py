"""`learn.fit target=slowdown` and `learn.benchmark target=slowdown`: what they do and print.

Start reading at `fit_slowdowns` and `benchmark_slowdowns`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from learn.judging.scores import RowScores, score_table
from learn.rows.targets import SLOWDOWN
from learn.sharing.judging import judged
from learn.sharing.learned import LearnedSlowdowns, fitted_slowdowns
from learn.sharing.profile import group_memory
from learn.sharing.rows import MeasuredGroup, measured_groups

if TYPE_CHECKING:
    import os

    from learn.commands.benchmark_settings import BenchmarkSettings
    from learn.fitting.fit_call import FitSettings


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
    from learn.sharing.stored import Saved

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
    path = save_artifact(data, SLOWDOWN, Saved(model), meta, report, now=now or datetime.now(UTC))
    return FittedSlowdowns(path, model, meta)


def fit_entry(settings: FitSettings) -> int:
    """Fit with the settings, and print what was fitted and where it is."""
    done = fit_slowdowns(settings.data, source=settings.source, device_name=settings.device_name)
    sources = ", ".join(f"{name} {count:,}" for name, count in done.meta["of"].items())
    print(f"slowdown: {done.meta['groups']:,} groups ({sources}) on {', '.join(done.meta['device'])}")
    for reason, count in done.meta["left_out"].items():
        print(f"left out: {count:,} groups: {reason}")
    contention = done.slowdowns.contention
    if contention is not None:
        print("contention: " + ", ".join(f"{name} {value:.3g}" for name, value in asdict(contention).items()))
    print(f"jobs known by name: {len(done.slowdowns.known.suffers):,}")
    print(f"artifact: {done.path}")
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
            {"title": one.rows, "estimator": one.by, "groups": one.count, "left_out": one.left_out, **one.figures}
            for one in self.scores
        ]
        return {**vars(self), "scores": scores}


def benchmark_slowdowns(
    settings: BenchmarkSettings, progress: Callable[[int, int], None] = lambda done, of: None
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
        done = benchmark_slowdowns(settings, progress.update)
    _print(done)
    if settings.out is not None:
        text = json.dumps(done.to_mapping(), indent=1)
        write_output(settings.out, text.encode(), key="out")
    return 0


def _print(done: SlowdownBenchmark) -> None:
    from learn.judging.benchmark_view import print_table, screen_of

    for title, scores in itertools.groupby(done.scores, key=lambda score: score.rows):
        table = score_table(list(scores), {"estimator": "by", "groups": "count"})
        print_table((f"{title}: groups with a {done.split} left out", *table))
    screen = screen_of(140)
    if not done.scores:
        screen.print(f"no estimator was judged: of one {done.split} alone there are no groups to learn from")
    for title, of in done.memory_errors.items():
        screen.print(
            f"memory of {title}: {of['groups']:,.0f} groups; the sum of the members alone is off by "
            f"{of['median']:.1%} (median), {of['mean']:.1%} (mean), {of['p90']:.1%} (p90)",
            soft_wrap=True,
        )
    for reason, count in done.left_out.items():
        screen.print(f"left out: {count:,} groups: {reason}", soft_wrap=True)
