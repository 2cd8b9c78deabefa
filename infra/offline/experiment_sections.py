"""Sections of the page on single experiments: protocols, kernels, jobs that share a GPU, jobs on several GPUs.

Start reading at `protocol_blocks`. Each function makes a section's blocks, and raises `Absent` where there is nothing.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import warehouse
from conf.errors import UsageError
from conf.reports.blocks import Block, Bullets, Cell, Code, Drawn, Group, Heading, Lead, SideBySide, table
from conf.reports.charts import against
from conf.reports.page_text import MISSING, count_of, figure
from infra.offline.estimated_runs import (
    FIGURES,
    EstimatedRun,
    EstimatedRuns,
    OperatorTimes,
    operator_times,
    spread_of,
)
from infra.offline.probe_sections import Absent, records
from infra.offline.run_sections import spread_text
from learn.sharing.command import memory_errors
from learn.sharing.learned import measured_groups, packaged_slowdowns
from learn.sharing.profile import NoUtilization

_MOST_OPERATORS = 24  # in the table


def protocol_blocks(data: Path) -> tuple[Block, ...]:
    """Return runs per GPU-hour by protocol and how labels repeat, of each benchmark in the folder."""
    from tests.bench import gpu_figures
    from tests.bench.gpu_protocols import published_trials

    measured, published = gpu_figures.measured(data), published_trials(data)
    keys = dict.fromkeys(one["key"] for one in (*measured, *published))
    if not keys:
        raise Absent("The results have no runs of the benchmark (step bench).")
    blocks: list[Block] = []
    for key in keys:
        rows, trials = ([one for one in of_all if one["key"] == key] for of_all in (measured, published))
        windows = [one["window_s"] for one in (*trials, *rows) if one["window_s"] and one.get("protocol") != "adaptive"]
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
        measured, modelled = sum(one.measured_ms for one in operators), sum(one.modelled_ms for one in operators)
        points = [(one.measured_ms, one.modelled_ms, one.operator) for one in operators]
        picture = against("kernels of an operator, ms", points, is_log=True, axes=("measured", "modelled"))
        rows: list[dict[str, Cell]] = [
            {
                "operator": Code(one.operator),
                "runs": one.runs,
                "measured, ms": figure(one.measured_ms) if one.measured_ms else MISSING,
                "modelled, ms": figure(one.modelled_ms) if one.modelled_ms else MISSING,
                "modelled / measured": operator_ratio(one),
                "share of the time": f"{one.measured_ms / measured:.1%}" if one.measured_ms else MISSING,
            }
            for one in operators[:_MOST_OPERATORS]
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
        for job, slowdown, one in zip(group.jobs, group.slowdowns, expected, strict=True):
            members[sharing[group.group_id]].append((slowdown, one.median, job.name))
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
    for one in runs.runs:
        if one.run["parallel"] is not None:
            layouts[one.run["parallel"]].append(one)
    if not layouts:
        raise Absent("The results have no runs on several GPUs (step ranks).")
    names = ("process", "step_time")
    rows: list[tuple[Cell, ...]] = [
        (layout, len(own), *(spread_text(name, spread_of(own, name)) for name in names))
        for layout, own in sorted(layouts.items())
    ]
    return (table(("layout", "runs", *(FIGURES[name].title for name in names)), rows),)
