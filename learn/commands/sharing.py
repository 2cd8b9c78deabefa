"""The commands for jobs that share a GPU: `learn.admit`, and `target=slowdown` of `learn.fit` and `learn.benchmark`.

Start reading at `admit_entry` (a job and the jobs of a GPU in, yes or no out; `learn.sharing.admitting` decides),
`fit_slowdowns` and `benchmark_slowdowns`. `judge_slowdowns` judges estimators of slowdowns on groups that they were not
fitted on: a model, or a GPU model, is left out in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.cli.settings import Checked, data_key, format_key, group as key_group, key
from conf.errors import UsageError, refuse, shown
from conf.plain_text import MISSING, table_lines
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, load_device
from learn.commands.estimate import described_device, open_data
from learn.judging.evaluate import SLOWDOWN_GROUPINGS
from learn.judging.scores import Asked, Benchmark, Errors, Figures, Given, errors_of, judge
from learn.rows.data import SLOWDOWN, Bins, Target
from learn.sharing.admitting import Admission, GpuState, KnownJob, admit
from learn.sharing.slowdowns import (
    PERCENTILE,
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


_SHARES = ("gpu_util", "memory_util", "smact", "smocc", "drama", "tensor")
_FIGURES = tuple(field.name for field in fields(JobProfile) if field.name != "name")


@dataclass(frozen=True, kw_only=True)
class AdmitSettings(Checked):
    """The job to admit, and the GPU with its jobs. Raises `UsageError`.

      python -m learn.admit job='{memory_mib: 9000, memory_bound_mib: 10000, smact: 0.4}' \\
        jobs='[{name: old, memory_mib: 12000, memory_bound_mib: 13500, smact: 0.5}]' used_mib=12400
      python -m learn.admit job='{family: mlp, batch_size: 64, input_size: 784, classes: 10, depth: 3}' max_slowdown=1.5

    A job is a mapping: of figures of the job alone on the GPU, measured or estimated, or of a trial config, which is
    estimated. Figures are memory_bound_mib (required: what 99 of 100 such jobs stay below), memory_mib, step_ms,
    gpu_util, memory_util, smact, smocc, drama, tensor (shares from 0 to 1), launches_per_s and power_w; name is free.
    The exit code is 0 for yes and for no. docs/admission.md says how risk and slowdowns are computed.
    """

    device: DeviceSpec | None = key_group(None, "GPU model, by default A100-SXM4-40GB", described_device)
    job: Mapping[str, Any] = key(help="the job that asks: its figures, or its trial config")
    jobs: list[Any] = key((), "the jobs that are there, likewise")
    memory_mib: float | None = key(None, "what jobs can use of the GPU; default that of the model", "number | null")
    used_mib: float | None = key(None, "memory in use now, as measured", "number | null")
    risk: float = key(0.01, "probability of running out of memory up to which the job is admitted")
    max_slowdown: float | None = key(2.0, "expected slowdown of any job up to which it is admitted", "number | null")
    format: str = format_key()
    data: str | None = data_key()


def admit_entry(settings: AdmitSettings) -> int:
    """Print the answer. Returns 0 for yes and for no."""
    open_data(settings.data)
    device = settings.device or load_device(DEFAULT_DEVICE)
    memory = device.memory_mib if settings.memory_mib is None else settings.memory_mib
    jobs = tuple(_job(given, f"jobs[{place}]", f"job {place + 1}") for place, given in enumerate(settings.jobs))
    state = GpuState(memory_mib=memory, jobs=jobs, used_mib=settings.used_mib, device=device)
    with contextlib.redirect_stdout(sys.stderr):
        answer = admit(
            _job(settings.job, "job", "new job"),
            state,
            risk=settings.risk,
            max_slowdown=settings.max_slowdown,
            data=settings.data,
        )
    print(json.dumps(answer.to_mapping(), indent=1) if settings.format == "json" else "\n".join(_lines(answer)))
    return 0


def _job(values: object, key_name: str, name: str) -> KnownJob:
    """Return a trial config unchanged, or figures as a profile. Raises `UsageError` that names every bad figure."""
    if not isinstance(values, Mapping) or not values:
        raise UsageError(f"{key_name} must be a mapping such as {{memory_bound_mib: 9000}}, got {shown(values)}")
    if "family" in values:
        return {str(field): value for field, value in values.items()}
    problems = [
        f"unknown {shown(field)}; known: name, {', '.join(_FIGURES)}"
        for field in values
        if field not in ("name", *_FIGURES)
    ]
    figures = {field: value for field, value in values.items() if field in _FIGURES and value is not None}
    for field, value in figures.items():
        most = 1.0 if field in _SHARES else 1e12
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not 0 <= value <= most:
            problems.append(f"{field} must be a number from 0 to {most:g}, got {shown(value)}")
    if not isinstance(values.get("name", name), str):
        problems.append(f"name must be text, got {shown(values['name'])}")
    refuse(f"{key_name}: {problem}" for problem in problems)
    return JobProfile(values.get("name", name), **{field: float(value) for field, value in figures.items()})


def _lines(answer: Admission) -> list[str]:
    rows = [
        (name, *((f"{slowdown.median:.2f}", f"{slowdown.p90:.2f}") if slowdown is not None else (MISSING, MISSING)))
        for name, slowdown in answer.slowdowns
    ]
    return [
        f"{'yes' if answer.admitted else 'no'}: {answer.why}",
        *table_lines(("job", "expected slowdown", "90 % below"), rows),
        f"risk of out-of-memory: {100 * answer.risk:.3g} %",
    ]


BOTH_KEEP = 0.85  # share of the speed alone: pairs in which both jobs keep it are worth forming
SPEED_LOST = Target(SLOWDOWN, SLOWDOWN, "ratio", "ratio")
_KEEPS = "a job keeps 85 % of its speed alone, or loses more"
KEEPING = Bins(("keeps 85 %", "loses more"), (1.0 - BOTH_KEEP,), {}, _KEEPS)
_TREES, _LEAF = 200, 5


def _trees(groups: Sequence[MeasuredGroup]) -> PointSlowdowns:
    """Fit trees on the job's utilization and the sum of its partners', the usual method (Hu et al., Lucid)."""
    from sklearn.ensemble import RandomForestRegressor

    rows = [utilizations(group.jobs, place) for group in groups for place in range(len(group.jobs))]
    forest = RandomForestRegressor(_TREES, min_samples_leaf=_LEAF, random_state=0, n_jobs=1)
    forest.fit(np.array(rows), np.array(_speeds(groups)))

    def of_group(group: Sequence[JobProfile]) -> list[float]:
        rows = [utilizations(group, place) for place in range(len(group))]
        return [1.0 / float(speed) for speed in forest.predict(np.array(rows))]

    return PointSlowdowns(of_group)


def _horus_sum(groups: Sequence[MeasuredGroup]) -> PointSlowdowns:
    """Fit Horus' line (Yeung et al., 2021) through the sum of utilizations, the same for every job of a group."""
    sums = [sum(utilizations(group.jobs, 0)) for group in groups for _ in group.jobs]
    speeds = _speeds(groups)
    slope, level = np.polyfit(sums, speeds, 1).tolist() if len(set(sums)) > 1 else (0.0, float(np.mean(speeds)))
    return PointSlowdowns(
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


def benchmark_slowdowns(
    settings: BenchmarkSettings, progress: Callable[[int, int], None] = lambda completed, total: None
) -> Benchmark:
    """Judge every estimator on groups with a model, or a GPU model, that it was not fitted on.

    The notes hold the AUC, the error of the sum of the members' memory, and the groups that are left out.
    """
    from learn.judging.benchmark_view import error_text  # its plots are not for `learn.admit`

    groups, left_out = measured_groups(settings.data, settings.source, settings.device_name)
    split = settings.by or SLOWDOWN_GROUPINGS[0]
    figures, aucs = judge_slowdowns(groups, split, progress)
    notes = [f"each {split} is left out in turn; labels and errors are shares of a job's speed that it loses to others"]
    for title in dict.fromkeys(title for title, _ in aucs):
        known = ", ".join(f"{name} {auc:.3f}" for (of, name), auc in aucs.items() if of == title and auc is not None)
        notes.append(f"{title}: AUC for groups in which all keep {BOTH_KEEP:.0%} of their speed: {known or 'none'}")
    notes += [
        f"memory of {title}: {count:,} groups; the sum of the members alone is off by {error_text(True, off.median)} "
        f"(median), {error_text(True, off.mean)} (mean), {error_text(True, off.p90)} (p90)"
        for title, (count, off) in memory_errors(groups).items()
    ]
    if not figures:
        notes.append(f"no estimator was judged: of one {split} alone there are no groups to learn from")
    notes += [f"left out: {count:,} groups: {reason}" for reason, count in left_out.items()]
    device = ", ".join(sorted({group.device for group in groups}))
    return Benchmark(target=SPEED_LOST, device=device, figures=figures, notes=tuple(notes), level=PERCENTILE)


def judge_slowdowns(
    groups: Sequence[MeasuredGroup], split: str, progress: Callable[[int, int], None] = lambda completed, total: None
) -> tuple[tuple[Figures, ...], dict[tuple[str, str], float | None]]:
    """Return the figures of every estimator for each source and series, and the AUC.

    The AUC, by source and estimator, is for groups in which all keep 85 % of their speed; None where all or none do.

    A row is a member of a group. Its label is the share of its speed alone that it loses to the others, 1 - 1 /
    slowdown, and 0 where it was faster; its bound follows from the 90th percentile of the slowdown.

    Args:
        groups: Groups of any sources; each source and series is judged by itself.
        split: `model`: every group in which a model takes part is left out, each model in turn; `device`: every group
            of a GPU model. A group counts once for each part that it is left out in.
        progress: Called with the number of completed parts and their total.

    Members that did not train at the same time are never fitted on, and are judged as rows in doubt.
    """
    by_title: dict[str, list[MeasuredGroup]] = defaultdict(list)
    for group in groups:
        by_title[f"{group.title} {group.series}".strip()].append(group)
    parts = [(title, *part) for title in sorted(by_title) for part in left_out_parts(by_title[title], split)]
    sets: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    answers: dict[str, dict[int, Given]] = {name: {} for name in ESTIMATORS}
    keeps: dict[tuple[str, str], list[tuple[bool, float]]] = defaultdict(list)
    rows = itertools.count()
    for completed, (title, inside, outside) in enumerate(parts, start=1):
        numbers = [list(itertools.islice(rows, len(group.jobs))) for group in outside]
        for group, of_group in zip(outside, numbers, strict=True):
            for member, row in enumerate(of_group):
                sets[title][row] = _about(group, member, split) | {"name": f"{group.group_id}-{row}"}
        for name, fit in ESTIMATORS.items():
            for group, of_group, given in zip(outside, numbers, _answers(fit, inside, outside), strict=True):
                answers[name] |= dict(zip(of_group, given, strict=True))
                lost = [answer.estimate for answer in given if answer.estimate is not None]
                if lost and not group.is_apart:
                    keeps[title, name].append((max(group.slowdowns) <= 1.0 / BOTH_KEEP, -max(lost)))
        progress(completed, len(parts))
    asked = {name: Asked(answers=of_name, learns=True) for name, of_name in answers.items()}
    bins = {title: {"published": KEEPING} for title in sets}
    aucs = {key: _auc(*map(np.array, zip(*pairs, strict=True))) for key, pairs in keeps.items()}
    return judge(SPEED_LOST, sets, bins, asked), aucs


def _about(group: MeasuredGroup, member: int, split: str) -> dict[str, Any]:
    """Return the entry of `Scored` for a member of a group, except its name."""
    return {
        "group": group.models[member] if split == "model" else group.device,
        "label": max(0.0, 1.0 - 1.0 / group.slowdowns[member]),
        "doubt": group.doubt if group.is_apart else None,
        "family": group.models[member],
        "source": group.title,
    }


def _answers(
    fit: Callable[[Sequence[MeasuredGroup]], SlowdownEstimator],
    inside: Sequence[MeasuredGroup],
    outside: Sequence[MeasuredGroup],
) -> Iterator[list[Given]]:
    """Yield the answers for the members of each left-out group."""
    estimator = None
    for group in outside:
        try:
            estimator = estimator or fit(inside)
            yield [_given(slowdown) for slowdown in estimator.slowdowns(group.jobs)]
        except NoUtilization as error:
            yield [Given(estimate=None, reason=str(error))] * len(group.jobs)


def _given(slowdown: Slowdown) -> Given:
    has_bound = slowdown.p90 > slowdown.median
    return Given(estimate=1.0 - 1.0 / slowdown.median, upper=1.0 - 1.0 / slowdown.p90 if has_bound else None)


def _auc(keeps: np.ndarray, scores: np.ndarray) -> float | None:
    if keeps.all() or not keeps.any():
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(keeps, scores))


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
    print(f"artifact: {fitted.path}")
    return 0


def memory_errors(
    groups: Iterable[MeasuredGroup], title: Callable[[MeasuredGroup], str] = lambda group: group.title
) -> dict[str, tuple[int, Errors]]:
    """Return title -> number of groups, and errors of the sum of the members' memory alone, relative to the group's
    measured memory."""
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for group in groups:
        if group.joint_memory_mib and not group.is_apart and all(job.memory_mib is not None for job in group.jobs):
            pairs[title(group)].append((group.joint_memory_mib, group_memory(group.jobs).expected_mib))
    tables = {name: np.array(values) for name, values in pairs.items()}
    return {name: (len(table), errors_of(table[:, 0], table[:, 1], "log")) for name, table in tables.items()}
