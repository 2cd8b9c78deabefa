"""Sections of the page on runs: estimates beside measurements, protocols, kernels, groups, ranks, power sensors.

Start reading at `memory_blocks`. Each function makes a section's blocks, and raises `Absent` where there is nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import warehouse
from conf.errors import UsageError
from conf.reports.blocks import (
    Block,
    Bullets,
    Cell,
    Code,
    Drawn,
    Fold,
    Group,
    Heading,
    Lead,
    Legend,
    ShareBar,
    SharePart,
    SideBySide,
    table,
)
from conf.reports.page_text import MISSING, count_of, figure
from infra.offline.probe_sections import Absent, mib, records
from learn.collocation.learned import packaged_slowdowns
from learn.collocation.rows import measured_groups
from learn.collocation.slowdown import NoUtilization
from learn.evaluation.estimated_runs import (
    FIGURES,
    SHIPPED,
    TRACE,
    EstimatedRun,
    EstimatedRuns,
    OperatorTimes,
    Spread,
    operator_times,
    spread_of,
)
from warehouse.explorer.plot import against

MEMORY = ("allocated", "reserved", "process")
ACTIVITY = ("step_time", "smact", "smocc", "drama")
ENERGY = ("power", "energy")
CAUSES = {"tensors": "k1", "allocator": "k5", "context": "k4"}
OF_TARGET = {"memory": "process", "smact": "smact", "smocc": "smocc", "drama": "drama", "step_time": "step_time"}
_SHOWN = 12
_BENCH_JOB = re.compile(r"bench-(\w+)-(\w+)-(\d+)-(\d+)")


def _solo(runs: EstimatedRuns) -> tuple[EstimatedRun, ...]:
    if not runs.solo:
        raise Absent("The results hold no runs of single jobs that ended well.")
    return runs.solo


def memory_blocks(runs: EstimatedRuns) -> tuple[Block, ...]:
    """Return memory beside its estimates: pictures, errors by family, errors by cause, bounds, out-of-memory runs."""
    kept = _solo(runs)
    return (
        Lead(
            "Estimates of the trace for the runs' own GPU model. Errors are estimate less measurement, relative: "
            "median with its sign / 90th percentile of the size."
        ),
        *_pictures(kept, MEMORY),
        family_table(kept, MEMORY),
        *_cause_blocks(kept),
        *_bound_blocks(runs, kept),
        *_furthest_blocks(kept),
    )


def activity_blocks(runs: EstimatedRuns) -> tuple[Block, ...]:
    """Return step time and GPU activity beside their estimates."""
    kept = _solo(runs)
    lead = "Errors as above; those of SMACT, SMOCC and DRAMA are differences of ratios."
    return (Lead(lead), *_pictures(kept, ACTIVITY), family_table(kept, ACTIVITY))


def energy_blocks(runs: EstimatedRuns, data: Path) -> tuple[Block, ...]:
    """Return power and energy beside their estimates, and the power sensors beside the energy counter."""
    kept = _solo(runs)
    return (*_pictures(kept, ENERGY), family_table(kept, ENERGY), *_sensor_blocks(data))


def _pictures(runs: Sequence[EstimatedRun], names: Iterable[str]) -> list[Block]:
    groups = []
    for name in names:
        points = [(*pair, f"{one.run['family']} {one.run['run_id']}") for one in runs if (pair := one.pair(name))]
        picture = against(FIGURES[name].title, points, is_log=not FIGURES[name].is_ratio)
        if picture is not None:
            groups.append(Group(FIGURES[name].title, (Drawn(picture),)))
    return [SideBySide(tuple(groups))] if groups else []


def spread_text(name: str, spread: Spread | None) -> str:
    """Return `bias / 90th percentile` of a figure's errors."""
    if spread is None:
        return MISSING
    if FIGURES[name].is_ratio:
        return f"{spread.bias:+.3f} / {spread.p90:.3f}"
    return f"{spread.bias:+.1%} / {spread.p90:.1%}"


def family_table(runs: Sequence[EstimatedRun], names: Sequence[str]) -> Block:
    """Return the errors of some figures by family, all families last; columns that nobody measured are left out."""
    measured = [name for name in names if spread_of(runs, name)]
    if not measured:
        return Lead(f"Nobody measured {', '.join(FIGURES[name].title for name in names)}.")
    families: dict[str, list[EstimatedRun]] = defaultdict(list)
    for one in runs:
        families[one.run["family"]].append(one)
    rows = [
        (family, len(own), *(spread_text(name, spread_of(own, name)) for name in measured))
        for family, own in [*sorted(families.items()), ("all", list(runs))]
    ]
    return table(("family", "runs", *(FIGURES[name].title for name in measured)), rows)


def _cause_blocks(runs: Sequence[EstimatedRun]) -> list[Block]:
    families: dict[str, list[dict[str, float]]] = defaultdict(list)
    for one in runs:
        if (causes := one.causes_mib) is not None:
            families[one.run["family"]].append(causes)
    if not families:
        return [Lead("No run has allocated, reserved and process memory, so errors have no causes here.")]
    rows: list[tuple[Cell, ...]] = []
    everything = [causes for own in families.values() for causes in own]
    for family, own in [*sorted(families.items()), ("all", everything)]:
        sums = {cause: sum(abs(causes[cause]) for causes in own) for cause in CAUSES}
        total = sum(sums.values()) or 1.0
        parts = tuple(
            SharePart(css, sums[cause] / total, f"{cause}: {sums[cause] / total:.0%}") for cause, css in CAUSES.items()
        )
        medians = (f"{statistics.median(causes[cause] for causes in own):+,.1f}" for cause in CAUSES)
        rows.append((family, len(own), *medians, ShareBar(parts)))
    return [
        Heading("Errors of process memory by cause, MiB"),
        Lead(
            "Tensors: allocated memory, which the trace and its workspaces give. Allocator: reserved less allocated. "
            "Context: process less reserved. Medians with their sign; bars are shares of the summed sizes."
        ),
        Legend(CAUSES),
        table(("family", "runs", *CAUSES, "shares"), rows),
    ]


def _bound_blocks(runs: EstimatedRuns, kept: Sequence[EstimatedRun]) -> list[Block]:
    rows: list[dict[str, Cell]] = []
    for by in (TRACE, SHIPPED):
        bounds = [(one.estimates[by].upper_mib, pair[0]) for one in kept if (pair := one.pair("process", by))]
        known = [(upper, measured) for upper, measured in bounds if upper is not None]
        held = sum(measured <= upper for upper, measured in known)
        excess = statistics.median(upper / measured - 1 for upper, measured in known) if known else None
        ooms = [one for one in runs.runs if one.run["status"] == "oom"]
        foreseen = sum(not one.estimates[by].fits(one.run["device_memory_mib"]) for one in ooms)
        rows.append(
            {
                "estimate": by,
                "runs below the 99 % bound": f"{held} of {len(known)}",
                "bound over need, median": MISSING if excess is None else f"{excess:+.1%}",
                "out-of-memory runs foreseen": f"{foreseen} of {len(ooms)}",
            }
        )
    return [Heading("Bounds"), records(rows)]


def _furthest_blocks(runs: Sequence[EstimatedRun]) -> list[Block]:
    errors = [(abs(pair[1] / pair[0] - 1), pair, one) for one in runs if (pair := one.pair("process"))]
    rows: list[tuple[Cell, ...]] = []
    for _, (measured, estimated), one in sorted(errors, key=lambda error: -error[0])[:_SHOWN]:
        causes = one.causes_mib or {}
        largest = max(causes, key=lambda cause: abs(causes[cause]), default=MISSING)
        shift = f"{estimated / measured - 1:+.1%}"
        rows.append((Code(one.run["run_id"]), one.run["family"], largest, mib(measured), mib(estimated), shift))
    heads = ("run", "family", "largest cause", "measured", "estimated", "error")
    return [Fold("runs furthest off", (table(heads, rows, words=3),))] if rows else []


def shipped_blocks(runs: EstimatedRuns) -> tuple[Block, ...]:
    """Return the corrected models that come along beside the plain trace, on runs that both answer."""
    kept = _solo(runs)
    rows = []
    for target, name in OF_TARGET.items():
        own = [one for one in kept if is_corrected(one, target)]
        trace, shipped = spread_of(own, name), spread_of(own, name, SHIPPED)
        if trace and shipped:
            families = ", ".join(sorted({one.run["family"] for one in own}))
            better = "trace" if trace.median <= shipped.median else "corrected model"
            texts = (spread_text(name, trace), spread_text(name, shipped))
            rows.append(
                (target, own[0].estimates[SHIPPED].answered_by[target], better, families, shipped.count, *texts)
            )
    if not rows:
        raise Absent("No corrected model that comes along knows a family of these runs.")
    heads = ("target", "model", "nearer", "*families", "runs", "trace", "corrected model")
    lead = "The models of activity were fitted on plain training loops, and these runs keep their batch on the GPU."
    return (Lead(lead), table(heads, rows, words=3))


def is_corrected(one: EstimatedRun, target: str) -> bool:
    return one.estimates[SHIPPED].answered_by.get(target, TRACE) != TRACE


def protocol_blocks(data: Path) -> tuple[Block, ...]:
    """Return runs per GPU-hour by protocol and how labels repeat, of each benchmark in the folder."""
    from tests.bench import gpu_figures

    columns = (
        "run_id",
        "job_id",
        "family",
        "status",
        "started_at",
        "finished_at",
        "startup_s",
        "warmup_s",
        "window_s",
        "prepared",
        gpu_figures.MEMORY,
        *gpu_figures.RATIOS,
        *gpu_figures.OTHERS,
    )
    with contextlib.closing(warehouse.connect(data)) as connection:
        stored = connection.execute(f"SELECT {', '.join(columns)} FROM runs ORDER BY run_id").fetchall()
    plans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for values in stored:
        row = dict(zip(columns, values, strict=True))
        if (named := _BENCH_JOB.fullmatch(row["job_id"])) is not None:
            plans[named[1]].append({**row, "protocol": named[2], "repeat": int(named[3]), "k": int(named[4])})
    path = data / "bench-published.jsonl"
    published = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    if not plans:
        raise Absent("The results have no runs of the benchmark (step bench).")
    blocks: list[Block] = []
    for key, rows in plans.items():
        own = [trial for trial in published if trial["key"] == key]
        windows = [trial["window_s"] for trial in own if trial["window_s"]]
        windows += [row["window_s"] for row in rows if row["protocol"] == "fixed" and row["window_s"]]
        seconds = statistics.median(windows) if windows else float("nan")
        blocks += markdown_blocks(gpu_figures.lines(gpu_figures.figures(rows, own, round(seconds, 1))))
    return tuple(blocks)


def markdown_blocks(lines: Iterable[str]) -> list[Block]:
    """Return Markdown lines as blocks: tables, and paragraphs of a line each."""
    blocks: list[Block] = []
    cells: list[list[str]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            cells.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if cells:
            blocks.append(table(cells[0], cells[2:]))  # the second line has the rules
            cells = []
        if line:
            blocks.append(Lead(line))
    return blocks


def kernel_blocks(runs: EstimatedRuns, data: Path) -> tuple[Block, ...]:
    """Return the time of kernels by operator, measured and by the kernel model, for each way of timing."""
    times = operator_times(data, runs.runs)
    if not times:
        raise Absent("The results have no kernels of runs (step kernels).")
    words = {
        "cupti": "by CUPTI: kernels alone",
        "cpu": "on a CPU: operators, which say nothing of a GPU",
        "model": "of the kernel model itself: the device was simulated",
    }
    blocks: list[Block] = []
    for timing, operators in times.items():
        measured, modelled = sum(one.measured_ms for one in operators), sum(one.modelled_ms for one in operators)
        points = [(one.measured_ms, one.modelled_ms, one.operator) for one in operators]
        picture = against("kernels of an operator, ms", points, is_log=True)
        rows: list[dict[str, Cell]] = [
            {
                "operator": Code(one.operator),
                "runs": one.runs,
                "measured, ms": figure(one.measured_ms) if one.measured_ms else MISSING,
                "modelled, ms": figure(one.modelled_ms) if one.modelled_ms else MISSING,
                "modelled / measured": operator_ratio(one),
                "share of the time": f"{one.measured_ms / measured:.1%}" if one.measured_ms else MISSING,
            }
            for one in operators[: 2 * _SHOWN]
        ]
        sums = f"{figure(measured)} ms measured, {figure(modelled)} ms by the kernel model"
        blocks += [Heading(words.get(timing, timing)), Lead(f"Kernels of a step, summed over the runs: {sums}.")]
        if picture is not None:
            blocks.append(SideBySide((Group("Modelled against measured, ms a step", (Drawn(picture),)),)))
        blocks.append(records(rows))
    return tuple(blocks)


def operator_ratio(one: OperatorTimes) -> str:
    """Return modelled over measured time of an operator; which side lacks it where one does."""
    if not one.measured_ms:
        return "only modelled"
    return f"{one.modelled_ms / one.measured_ms:.2f}" if one.modelled_ms else "only measured"


@dataclass(frozen=True, kw_only=True)
class PairErrors:
    """Way of sharing -> (measured, expected slowdown, job) of each member, and reason -> groups without."""

    members: Mapping[str, Sequence[tuple[float, float, str]]]
    left_out: Mapping[str, int]


def pair_errors(data: Path) -> PairErrors:
    """Return slowdowns beside those that the packaged model expects of the measured jobs alone. Raises `Absent`."""
    try:
        groups, reasons = measured_groups(data)
    except UsageError:
        raise Absent("The results have no groups of jobs on one GPU (step pairs).") from None
    with contextlib.closing(warehouse.connect(data)) as connection:
        sharing = dict(connection.execute("SELECT DISTINCT group_id, sharing FROM collocations").fetchall())
    members: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    left_out = Counter(reasons)
    for group in groups:
        try:
            expected = packaged_slowdowns().slowdowns(group.jobs)
        except NoUtilization:
            left_out["a member's utilization alone is not known"] += 1
            continue
        for job, slowdown, one in zip(group.jobs, group.slowdowns, expected, strict=True):
            members[sharing[group.group_id]].append((slowdown, one.median, job.name))
    return PairErrors(members=dict(sorted(members.items())), left_out=left_out)


def pair_blocks(data: Path) -> tuple[Block, ...]:
    """Return slowdowns of jobs that share a GPU, by way of sharing."""
    errors = pair_errors(data)
    rows: list[dict[str, Cell]] = []
    pictures = []
    for sharing, members in errors.members.items():
        slowdowns = np.array([member[:2] for member in members])
        speeds = 1 / np.maximum(slowdowns, 1.0)
        error = np.abs(speeds[:, 1] - speeds[:, 0])
        measured, expected = np.median(slowdowns, axis=0)
        rows.append(
            {
                "sharing": sharing,
                "members": len(members),
                "measured slowdown, median": f"{measured:.2f}",
                "expected, median": f"{expected:.2f}",
                "error of the speed, median / p90": f"{np.median(error):.3f} / {np.quantile(error, 0.9):.3f}",
            }
        )
        picture = against(f"slowdown, {sharing}", members, is_log=True)
        if picture is not None:
            pictures.append(Group(sharing.replace("_", " "), (Drawn(picture),)))
    lead = "Expected from the measured figures of each job alone, by the packaged model. Speed: 1 / slowdown."
    left_out = tuple(f"{count_of(count, 'group')} left out: {reason}" for reason, count in errors.left_out.items())
    drawn = (SideBySide(tuple(pictures)), records(rows)) if rows else ()
    return (Lead(lead), *((Bullets(left_out),) if left_out else ()), *drawn)


def rank_blocks(runs: EstimatedRuns) -> tuple[Block, ...]:
    """Return runs on several GPUs beside their estimates, by layout."""
    layouts: dict[str, list[EstimatedRun]] = defaultdict(list)
    for one in runs.runs:
        if one.run["parallel"] is not None:
            layouts[one.run["parallel"]].append(one)
    if not layouts:
        raise Absent("The results have no runs on several GPUs (step ranks).")
    names = ("process", "step_time")
    rows = [
        (layout, len(own), *(spread_text(name, spread_of(own, name)) for name in names))
        for layout, own in sorted(layouts.items())
    ]
    return (table(("layout", "runs", *(FIGURES[name].title for name in names)), rows),)


def _sensor_blocks(data: Path) -> list[Block]:
    """Return mean power by each sensor beside the first energy counter, over the windows of the runs."""
    power, energy = "power_w IS NOT NULL", "energy_j IS NOT NULL"
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            "SELECT run_id, sensor, avg(power_w), (max(energy_j) - min(energy_j)) * 1e3 / "
            f"nullif(max(t_ms) FILTER ({energy}) - min(t_ms) FILTER ({energy}), 0) FROM telemetry "
            f"WHERE phase = 'window' AND coalesce(quality, 'measured') = 'measured' AND ({power} OR {energy}) "
            "GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    watts: dict[str, dict[str, float]] = defaultdict(dict)  # source -> run -> W
    for run_id, sensor, mean_w, counter_w in rows:
        for source, value in ((f"{sensor}, power", mean_w), (f"{sensor}, energy counter", counter_w)):
            if value:
                watts[source][run_id] = value
    counters = [source for source in watts if source.endswith("energy counter")]
    if not counters:
        return [Heading("Power sensors"), Lead("No sensor gave an energy counter to check power against.")]
    reference = max(counters, key=lambda source: (len(watts[source]), "nvml" in source))
    cells = []
    for source, own in sorted(watts.items()):
        ratios = [value / watts[reference][run] for run, value in own.items() if run in watts[reference]]
        if ratios and source != reference:
            low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
            cells.append((source, len(ratios), f"{middle:.3f}", f"{low:.3f} to {high:.3f}"))
    heads = ("source", "runs", f"ratio to {reference}, median", "10th to 90th percentile")
    return [Heading("Power sensors"), table(heads, cells)]
