"""Sections of the page on runs: estimates beside measurements, protocols, kernels, shared GPUs, several GPUs.

Start reading at `label_blocks`, and at `protocol_blocks` for single experiments. Each function makes a section's
blocks, and raises `Absent` where there is nothing.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from conf.reports.charts import against
from conf.reports.page_text import MISSING, count_of, figure
from infra.offline.estimated_runs import (
    FIGURES,
    SHIPPED,
    TRACE,
    EstimatedRun,
    EstimatedRuns,
    OperatorTimes,
    by_family,
    operator_times,
    spread_of,
)
from infra.offline.probe_sections import Absent, mib, records
from learn.estimation.notes import RESIDENT
from learn.sharing.command import memory_errors
from learn.sharing.slowdowns import NoUtilization, measured_groups, packaged_slowdowns
from warehouse.reading.pairing import Shift

MEMORY = ("allocated", "reserved", "process")
ACTIVITY = ("step_time", "smact", "smocc", "drama")
ENERGY = ("power", "energy")
CAUSES = {"tensors": "k1", "allocator": "k5", "context": "k4"}
OF_TARGET = {"memory": "process", "smact": "smact", "smocc": "smocc", "drama": "drama", "step_time": "step_time"}
_SHOWN = 12
_MOST_OPERATORS = 24  # in the table


def _solo(runs: EstimatedRuns) -> tuple[EstimatedRun, ...]:
    if not runs.solo:
        raise Absent("The results hold no runs of single jobs that ended well.")
    return runs.solo


def label_blocks(data: Path) -> tuple[Block, ...]:
    """Return the farm's own verdicts on the labels, their reasons, and the sensors that read nothing."""
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(
            "SELECT status, coalesce(quality, 'not judged'), quality_reasons, telemetry_missing FROM runs"
        ).fetchall()
    if not rows:
        raise Absent("The results hold no runs.")
    verdicts = Counter((status, quality) for status, quality, _, _ in rows)
    blocks: list[Block] = [table(("status", "labels", "runs"), [(*key, n) for key, n in sorted(verdicts.items())], 2)]
    for title, column in (("Reasons", 2), ("Sensors that gave nothing", 3)):
        named_texts = [(name, str(text)) for row in rows for name, text in json.loads(row[column] or "{}").items()]
        counts = Counter(name for name, _ in named_texts)
        examples = dict(named_texts)
        if counts:
            cells = [(name, count, examples[name]) for name, count in counts.most_common()]
            blocks += [Heading(title), table(("name", "runs", "*example"), cells)]
    return tuple(blocks)


def memory_blocks(runs: EstimatedRuns) -> tuple[Block, ...]:
    """Return memory beside its estimates: pictures, errors by family, errors by cause, bounds, out-of-memory runs."""
    kept = _solo(runs)
    return (
        Lead(
            "Estimates are those of the trace. Errors are estimate less measurement, relative to the measurement: "
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
        points = [
            (*pair, f"{estimated_run.run['family']} {estimated_run.run['run_id']}")
            for estimated_run in runs
            if (pair := estimated_run.pair(name))
        ]
        picture = against(
            FIGURES[name].title, points, is_log=not FIGURES[name].is_ratio, axes=("measured", "estimated")
        )
        if picture is not None:
            groups.append(Group(FIGURES[name].title, (Drawn(picture),)))
    return [SideBySide(tuple(groups))] if groups else []


def spread_text(name: str, spread: Shift | None) -> str:
    """Return `bias / 90th percentile` of a figure's errors."""
    if spread is None:
        return MISSING
    return f"{bias_text(name, spread)} / {spread.p90:{'.3f' if FIGURES[name].is_ratio else '.1%'}}"


def bias_text(name: str, spread: Shift) -> str:
    """Return the median error of a figure with its sign."""
    return f"{round(spread.median, 3) + 0.0:{'+.3f' if FIGURES[name].is_ratio else '+.1%'}}"  # no -0.000


def family_table(runs: Sequence[EstimatedRun], names: Sequence[str]) -> Block:
    """Return the errors of some figures by family, all families last; columns that nobody measured are left out."""
    measured = [name for name in names if spread_of(runs, name)]
    if not measured:
        return Lead(f"Not measured: {'; '.join(FIGURES[name].title for name in names)}.")
    rows: list[tuple[Cell, ...]] = [
        (family, len(family_runs), *(spread_text(name, spread_of(family_runs, name)) for name in measured))
        for family, family_runs in [*by_family(runs).items(), ("all", runs)]
    ]
    return table(("family", "runs", *(FIGURES[name].title for name in measured)), rows)


def _cause_blocks(runs: Sequence[EstimatedRun]) -> list[Block]:
    known = [estimated_run for estimated_run in runs if estimated_run.causes_mib is not None]
    if not known:
        return [Lead("No run has allocated, reserved and process memory, so errors have no causes here.")]
    rows: list[tuple[Cell, ...]] = []
    for family, of_family in [*by_family(known).items(), ("all", known)]:
        causes_known = [causes for estimated_run in of_family if (causes := estimated_run.causes_mib) is not None]
        sums = {cause: sum(abs(causes[cause]) for causes in causes_known) for cause in CAUSES}
        total = sum(sums.values()) or 1.0
        parts = tuple(
            SharePart(css, sums[cause] / total, f"{cause}: {sums[cause] / total:.0%}") for cause, css in CAUSES.items()
        )
        medians = (f"{statistics.median(causes[cause] for causes in causes_known):+,.1f}" for cause in CAUSES)
        rows.append((family, len(causes_known), *medians, ShareBar(parts)))
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
        bounds = [
            (estimated_run.estimates[by].upper_mib, pair[0])
            for estimated_run in kept
            if (pair := estimated_run.pair("process", by))
        ]
        known = [(upper, measured) for upper, measured in bounds if upper is not None]
        held = sum(measured <= upper for upper, measured in known)
        excess = statistics.median(upper / measured - 1 for upper, measured in known) if known else None
        ooms = [estimated_run for estimated_run in runs.runs if estimated_run.run["status"] == "oom"]
        predicted = sum(
            not estimated_run.estimates[by].fits(
                estimated_run.run["device_memory_mib"] or estimated_run.estimates[by].device_memory_mib or 0.0
            )
            for estimated_run in ooms
        )
        rows.append(
            {
                "estimate": by,
                "runs below the 99 % bound": f"{held} of {len(known)}",
                "bound over need, median": MISSING if excess is None else f"{excess:+.1%}",
                "out-of-memory runs predicted": f"{predicted} of {len(ooms)}",
            }
        )
    return [Heading("Bounds"), records(rows)]


def _furthest_blocks(runs: Sequence[EstimatedRun]) -> list[Block]:
    errors = [
        (abs(pair[1] / pair[0] - 1), pair, estimated_run)
        for estimated_run in runs
        if (pair := estimated_run.pair("process"))
    ]
    rows: list[tuple[Cell, ...]] = []
    for _, (measured, estimated), estimated_run in sorted(errors, key=lambda error: -error[0])[:_SHOWN]:
        causes = estimated_run.causes_mib or {}
        largest = max(causes, key=lambda cause: abs(causes[cause]), default=MISSING)
        shift = f"{estimated / measured - 1:+.1%}"
        rows.append(
            (
                Code(estimated_run.run["run_id"]),
                estimated_run.run["family"],
                largest,
                mib(measured),
                mib(estimated),
                shift,
            )
        )
    heads = ("run", "family", "largest cause", "measured", "estimated", "error")
    return [Fold("runs furthest off", (table(heads, rows, words=3),))] if rows else []


def shipped_blocks(runs: EstimatedRuns, data: Path) -> tuple[Block, ...]:
    """Return the packaged corrected models beside the plain trace, on runs that both answer."""
    rows: list[dict[str, Cell]] = []
    for target, name in OF_TARGET.items():
        corrected = [estimated_run for estimated_run in _solo(runs) if is_corrected(estimated_run, target)]
        trace, shipped = spread_of(corrected, name), spread_of(corrected, name, SHIPPED)
        if trace and shipped:
            texts = spread_text(name, trace), spread_text(name, shipped)
            nearer = "trace" if trace.median_size <= shipped.median_size else "corrected model"
            rows.append(
                {
                    "target": target,
                    "model": corrected[0].estimates[SHIPPED].answered_by[target],
                    "nearer": nearer if texts[0] != texts[1] else "neither",
                    "*families": ", ".join(sorted({estimated_run.run["family"] for estimated_run in corrected})),
                    "runs": shipped.pairs,
                    "trace": texts[0],
                    "corrected model": texts[1],
                }
            )
    if not rows:
        raise Absent("No packaged corrected model covers these families.")
    return (
        records(rows, words=3),
        Lead(
            "A correction fitted on these runs, judged on runs held out: ",
            Code(f"python -m learn.benchmark target=memory estimators=[trace,hybrid] data={shlex.quote(str(data))}"),
        ),
    )


def is_corrected(one: EstimatedRun, target: str) -> bool:
    """Return True if a model that was fitted on measured rows has the run's figure, for the loop that the run had."""
    shipped = one.estimates[SHIPPED]
    is_of_loop = target == "memory" or shipped.loops.get(target) == RESIDENT  # memory hardly depends on the loop
    return is_of_loop and shipped.answered_by.get(target, TRACE) != TRACE


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
    for source, watts_of_run in sorted(watts.items()):
        ratios = [value / watts[reference][run] for run, value in watts_of_run.items() if run in watts[reference]]
        if ratios and source != reference:
            low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
            cells.append((source, len(ratios), f"{middle:.3f}", f"{low:.3f} to {high:.3f}"))
    heads = ("source", "runs", f"ratio to {reference}, median", "10th to 90th percentile")
    return [Heading("Power sensors"), table(heads, cells)]


def protocol_blocks(data: Path) -> tuple[Block, ...]:
    """Return runs per GPU-hour by protocol and how labels repeat, of each benchmark in the folder."""
    from tests.bench import gpu_figures
    from tests.bench.gpu_protocols import published_trials

    measured, published = gpu_figures.measured(data), published_trials(data)
    keys = dict.fromkeys(row["key"] for row in (*measured, *published))
    if not keys:
        raise Absent("The results have no runs of the benchmark (step bench).")
    blocks: list[Block] = []
    for key in keys:
        rows, trials = ([row for row in of_all if row["key"] == key] for of_all in (measured, published))
        windows = [row["window_s"] for row in (*trials, *rows) if row["window_s"] and row.get("protocol") != "adaptive"]
        seconds = statistics.median(windows) if windows else float("nan")
        blocks += markdown_blocks(gpu_figures.lines(gpu_figures.figures(rows, trials, round(seconds, 1))))
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
        "cpu": "on a CPU: whole operators; not comparable with a GPU",
        "model": "of the kernel model itself: the device was simulated",
    }
    blocks: list[Block] = []
    for timing, operators in times.items():
        measured, modelled = (
            sum(operator.measured_ms for operator in operators),
            sum(operator.modelled_ms for operator in operators),
        )
        points = [(operator.measured_ms, operator.modelled_ms, operator.operator) for operator in operators]
        picture = against("kernels of an operator, ms", points, is_log=True, axes=("measured", "modelled"))
        rows: list[dict[str, Cell]] = [
            {
                "operator": Code(operator.operator),
                "runs": operator.runs,
                "measured, ms": figure(operator.measured_ms) if operator.measured_ms else MISSING,
                "modelled, ms": figure(operator.modelled_ms) if operator.modelled_ms else MISSING,
                "modelled / measured": operator_ratio(operator),
                "share of the time": f"{operator.measured_ms / measured:.1%}" if operator.measured_ms else MISSING,
            }
            for operator in operators[:_MOST_OPERATORS]
        ]
        sums = f"{figure(measured)} ms measured, {figure(modelled)} ms by the kernel model"
        blocks += [Heading(words.get(timing, timing)), Lead(f"Kernels of a step, summed over the runs: {sums}.")]
        if picture is not None:
            blocks.append(SideBySide((Group("Kernels by operator, ms a step", (Drawn(picture),)),)))
        blocks.append(records(rows))
    return tuple(blocks)


def operator_ratio(one: OperatorTimes) -> str:
    """Return modelled over measured time of an operator; which side lacks it where one does."""
    if not one.measured_ms:
        return "only modelled"
    return f"{one.modelled_ms / one.measured_ms:.2f}" if one.modelled_ms else "only measured"


@dataclass(frozen=True, kw_only=True)
class PairErrors:
    """Way of sharing -> figures of its groups, and reason -> groups without.

    Args:
        members: (measured, expected slowdown, job) of each member.
        memory: `learn.sharing.command.memory_errors` of the groups.
        left_out: Reason -> number of groups.
    """

    members: Mapping[str, Sequence[tuple[float, float, str]]]
    memory: Mapping[str, Mapping[str, float]]
    left_out: Mapping[str, int]

    def of_speed(self, sharing: str) -> np.ndarray:
        """Return the error of each member's speed, 1 / slowdown."""
        slowdowns = np.array([member[:2] for member in self.members[sharing]])
        speeds = 1 / np.maximum(slowdowns, 1.0)
        errors: np.ndarray = np.abs(speeds[:, 1] - speeds[:, 0])
        return errors


def pair_errors(data: Path) -> PairErrors:
    """Return slowdowns beside those that the packaged model expects of the measured jobs alone. Raises `Absent`."""
    try:
        groups, reasons = measured_groups(data)
    except UsageError as error:
        raise Absent(f"The results have no pairs to judge: {error}.") from None
    with contextlib.closing(warehouse.connect(data)) as connection:
        sharing = dict(connection.execute("SELECT DISTINCT group_id, sharing FROM collocations").fetchall())
    members: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    left_out = Counter(reasons)
    for group in groups:
        if group.is_apart:
            left_out["its members did not train at the same time"] += 1
            continue
        try:
            expected = packaged_slowdowns().slowdowns(group.jobs)
        except NoUtilization:
            left_out["a member's solo utilization is unknown"] += 1
            continue
        for job, slowdown, expectation in zip(group.jobs, group.slowdowns, expected, strict=True):
            members[sharing[group.group_id]].append((slowdown, expectation.median, job.name))
    memory = memory_errors(groups, lambda group: sharing[group.group_id])
    return PairErrors(members=dict(sorted(members.items())), memory=memory, left_out=left_out)


def pair_blocks(data: Path) -> tuple[Block, ...]:
    """Return slowdowns of jobs that share a GPU, by way of sharing."""
    errors = pair_errors(data)
    rows: list[dict[str, Cell]] = []
    pictures = []
    for sharing, members in errors.members.items():
        error, memory = errors.of_speed(sharing), errors.memory.get(sharing)
        measured, expected = (statistics.median(member[side] for member in members) for side in (0, 1))
        rows.append(
            {
                "sharing": sharing,
                "members": len(members),
                "measured slowdown, median": f"{measured:.2f}",
                "expected, median": f"{expected:.2f}",
                "error of the speed, median / p90": f"{np.median(error):.3f} / {np.quantile(error, 0.9):.3f}",
                "error of the memory, median / p90": f"{memory['median']:.1%} / {memory['p90']:.1%}"
                if memory
                else MISSING,
            }
        )
        picture = against(f"slowdown, {sharing}", members, is_log=True, axes=("measured", "expected"))
        if picture is not None:
            pictures.append(Group(sharing.replace("_", " "), (Drawn(picture),)))
    lead = (
        "Slowdowns are expected by the packaged model from the measured figures of each job alone. Speed is 1 / "
        "slowdown. Memory is expected as the sum of the members' peaks alone."
    )
    left_out = tuple(f"{count_of(count, 'group')} left out: {reason}" for reason, count in errors.left_out.items())
    drawn = (SideBySide(tuple(pictures)), records(rows)) if rows else ()
    return (Lead(lead), *((Bullets(left_out),) if left_out else ()), *drawn)


def rank_blocks(runs: EstimatedRuns) -> tuple[Block, ...]:
    """Return runs on several GPUs beside their estimates, by layout."""
    layouts: dict[str, list[EstimatedRun]] = defaultdict(list)
    for estimated_run in runs.runs:
        if estimated_run.run["parallel"] is not None:
            layouts[estimated_run.run["parallel"]].append(estimated_run)
    if not layouts:
        raise Absent("The results have no runs on several GPUs (step ranks).")
    names = ("process", "step_time")
    rows: list[tuple[Cell, ...]] = [
        (layout, len(own), *(spread_text(name, spread_of(own, name)) for name in names))
        for layout, own in sorted(layouts.items())
    ]
    return (table(("layout", "runs", *(FIGURES[name].title for name in names)), rows),)
