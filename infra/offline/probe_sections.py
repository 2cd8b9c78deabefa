"""Sections of the page on probes: contexts, workspaces, allocator histories, questions, tests.

Start reading at `histories`. A section yields blocks and findings, and raises `Absent` without results.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.errors import CommandError
from conf.plain_text import MISSING, count_of, exception_line, first_line
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Cell,
    Drawn,
    Fold,
    Group,
    Heading,
    Lead,
    Legend,
    Level,
    Outcome,
    SideBySide,
    Table,
    table,
)
from conf.reports.charts import Axis, Margins, Plot, Svg
from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from infra.offline.block_comparison import (
    ALLOCATOR,
    NONE,
    ORDER,
    REQUESTS,
    WORKSPACES,
    BlockComparison,
    BlockMatch,
    compare_blocks,
    history_of,
)
from infra.offline.estimated_runs import (
    CONTEXT_MIB,
    LEAST,
    NO_COMMAND,
    WORKSPACE_MIB,
    Absent,
    Finding,
    Part,
    Results,
)
from infra.offline.results import DATA, TESTS, outcomes_of
from learn.calibrate import calibrate, measured_in_csv
from learn.estimation.platforms import machine_for
from workers.probes.children import Measured, measured_in
from workers.probes.questions import ANSWERS

_MARGINS = Margins(width=400, height=210, left=52, right=10, top=12, bottom=28)
_MOST_COLUMNS = 200  # columns of a curve
_SHOWN = 12  # most rows of a long table
_MEASURED_CSS, _TRACED_CSS = "k1", "k5"
_NUMBERS = "numbers.csv"  # file with measurements of the current machine
_VERDICTS = {
    NONE: "trace and recording reserve the same within 2 MiB or 1 %",
    ALLOCATOR: "our allocator places the recorded requests differently",
    REQUESTS: "the recorded blocks differ from the trace's",
    WORKSPACES: "recorded workspaces or other short-lived blocks differ from the trace's",
    ORDER: "the reserved peaks differ, though both sides request the same blocks",
}
QUESTIONS = {
    "tf32_under_half": "TF32 in operators that autocast leaves in fp32",
    "gpm_first_sample": "GPM's first sample",
    "nvml_process_and_card": "NVML's process memory beside the card's",
    "peak_memory_under_mps": "Peak memory under MPS",
}


def measured_rows(results: Results, probe: str) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return the rows of a probe's measurements, each with its `name`, and the reasons of failures.

    Raises `Absent`.
    """
    measurements = measured_in(results.work / "probes" / probe)
    if not measurements:
        raise Absent(f"The results have no {probe}.")
    rows = [{"name": measured.name, **row} for measured in measurements for row in measured.rows]
    return rows, Counter(measured.reason for measured in measurements if measured.reason is not None)


def records(rows: Sequence[Mapping[str, Cell]], words: int = 1) -> Table:
    """Return a table of rows, whose common keys are the column names; `words` as in `table`. `rows` is not empty."""
    return table(tuple(rows[0]), [tuple(row.values()) for row in rows], words=words)


def drawn(pictures: Iterable[tuple[str, Svg | None]]) -> Iterator[Part]:
    """Yield pictures side by side under their titles; skip those that are None."""
    if groups := tuple(Group(title, (Drawn(picture),)) for title, picture in pictures if picture is not None):
        yield SideBySide(groups)


def mib(value: float | None) -> str:
    """Return MiB as text; a dash for None."""
    return MISSING if value is None else f"{value:,.1f}"


def contexts(results: Results) -> Iterator[Part]:
    """Yield the memory outside the allocator."""
    if results.device is not None:
        yield from _context_finding(results, results.device)
    rows: list[dict[str, Cell]] = []
    measured, reasons = measured_rows(results, "contexts")
    for context in measured:
        process_mib, card_mib, before_mib = (context.get(f"{name}_mib") for name in ("process", "card", "card_before"))
        reserved_mib = context.get("reserved_mib")
        rows.append(
            {
                "measurement": context["name"],
                "cuDNN": "yes" if context["cudnn"] else "no",
                "card before": mib(before_mib),
                "growth of the card": mib(None if card_mib is None or before_mib is None else card_mib - before_mib),
                "process": mib(process_mib),
                "reserved": mib(reserved_mib),
                "outside the allocator": mib(None if process_mib is None else process_mib - (reserved_mib or 0.0)),
                "*remark": context.get("reason") or "",
            }
        )
    for reason, count in reasons.items():
        yield Callout(f"Not measured ({count}): {reason}")
    if rows:
        yield Lead("In MiB, each in a fresh process.")
        yield records(rows, words=2)


def _context_finding(results: Results, device: DeviceSpec) -> Iterator[Finding]:
    numbers_path = results.work / "probes" / _NUMBERS
    numbers = measured_in_csv(numbers_path, device) if numbers_path.is_file() else None
    assumed_mib = machine_for(None, device, results.work / DATA).outside_mib(True)
    count, context_mib = 0, 0.0
    if results.runs.estimates:
        ((count, context_mib),) = results.rows("SELECT count(*), median(context) FROM causes")
    if numbers:
        measured_mib = calibrate(numbers, device).outside_mib(True)
        measured = f" measured={shlex.quote(str(numbers_path))}"
    elif count >= LEAST:
        measured_mib, measured = assumed_mib - context_mib, ""
    else:
        return
    if abs(measured_mib - assumed_mib) > CONTEXT_MIB:
        yield Finding(
            f"python -m learn.calibrate{measured} device={device.name} {results.data_key}",
            f"context, kernels and cuDNN: measured {measured_mib:,.0f} MiB, assumed {assumed_mib:,.0f} MiB",
        )


def workspaces(results: Results) -> Iterator[Part]:
    """Yield the workspaces of single operators."""
    all_rows, reasons = measured_rows(results, "workspaces")
    rows = [row for row in all_rows if row.get("measured_bytes") is not None and row.get("assumed_bytes") is not None]
    if not rows:
        reason = next((row["reason"] for row in all_rows if row.get("reason")), None)
        reason = reason or next(iter(reasons), "no row has both figures")
        raise Absent(f"No workspace was measured: {reason}.")
    rows.sort(key=lambda row: -abs(row["measured_bytes"] - row["assumed_bytes"]))
    cells: list[dict[str, Cell]] = [
        {
            "operator": f"{row['operator']} {row.get('phase') or ''}",
            "dtype": str(row["dtype"]),
            "*shapes and arguments": f"{json.dumps(row['shapes'])} {_arguments(row.get('config'))}",
            "measured": mib(row["measured_bytes"] / MIB),
            "assumed": mib(row["assumed_bytes"] / MIB),
            "difference": f"{(row['assumed_bytes'] - row['measured_bytes']) / MIB:+,.1f}",
        }
        for row in rows[:_SHOWN]
    ]
    for reason, count in reasons.items():
        yield Callout(f"Not measured ({count}): {reason}")
    yield Lead(f"{count_of(len(rows), 'call')} measured. The table has the largest differences, in MiB.")
    yield records(cells, words=2)
    off_mib: dict[str, list[float]] = {}
    for row in rows:
        difference_mib = abs(row["measured_bytes"] - row["assumed_bytes"]) / MIB
        off_mib.setdefault(row["operator"], []).append(difference_mib)
    for operator, values in off_mib.items():
        if wrong := [value for value in values if value > WORKSPACE_MIB]:
            calls_off = f"{len(wrong)} of {count_of(len(values), 'call')}"
            yield Finding(NO_COMMAND, f"workspaces: {operator}, {calls_off}, by at most {max(wrong):,.1f} MiB")


def _arguments(config: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (config or {}).items() if value not in (None, False))


def comparisons_of(work: Path) -> tuple[list[BlockComparison], dict[str, str]]:
    """Return the comparison of each recorded history, and name -> reason of failures. Raises `Absent`."""
    measurements = measured_in(work / "probes" / "histories")
    if not measurements:
        raise Absent("The results have no allocator histories.")
    compared, failed = [], {}
    for measured in measurements:
        try:
            compared.append(compare_blocks(history_of(measured)))
        except Exception as error:  # one damaged or untraceable job must not hide the others
            failed[measured.name] = (first_line if isinstance(error, CommandError) else exception_line)(error)
    return compared, failed


def histories(results: Results) -> Iterator[Part]:
    """Yield the recorded jobs compared with their traces, block by block."""
    compared, failed = comparisons_of(results.work)
    for name, reason in failed.items():
        yield Callout(f"Not compared: {name}: {reason}")
    if not compared:
        return
    verdicts = Counter(comparison.verdict for comparison in compared)
    counted = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
    yield Lead(
        f"{count_of(len(compared), 'job')} recorded; verdicts: {counted}. Each picture shows the last step, "
        "request by request; the two sides have different numbers of requests."
    )
    yield Legend({"measured": _MEASURED_CSS, "traced": _TRACED_CSS})
    yield SideBySide(tuple(map(_group, compared)))
    for verdict, words in _VERDICTS.items():
        if verdicts[verdict] and verdict != NONE:
            jobs = ", ".join(comparison.name for comparison in compared if comparison.verdict == verdict)
            yield Finding(NO_COMMAND, f"{words}: {jobs}")


def _group(comparison: BlockComparison) -> Group:
    level: Level = "good" if comparison.verdict == NONE else "look"
    peaks = [
        ("allocated", mib(comparison.measured_allocated_bytes / MIB), mib(comparison.traced_allocated_bytes / MIB)),
        ("reserved", mib(comparison.measured_reserved_bytes / MIB), mib(comparison.traced_reserved_bytes / MIB)),
        ("recorded requests, replayed", mib(comparison.replayed_reserved_bytes / MIB), ""),
        *((f"gap by {cause}", mib(nbytes / MIB), "") for cause, nbytes in comparison.gap_bytes.items()),
    ]
    details: list[Block] = [table(("peak, MiB", "measured", "traced"), peaks)]
    for title, match in (("At the peak", comparison.at_peak), ("In the step", comparison.in_step)):
        details += [Heading(title), *_match_blocks(match)]
    return Group(
        comparison.name,
        (
            Outcome(
                level, "equal" if comparison.verdict == NONE else comparison.verdict, _VERDICTS[comparison.verdict]
            ),
            Drawn(curves_svg(comparison)),
            *((Lead(f"Recorded in part: {comparison.cut_off}."),) if comparison.cut_off else ()),
            *((Lead(f"{comparison.allocator_difference}."),) if comparison.allocator_difference else ()),
            Fold("figures and blocks", tuple(details)),
        ),
    )


def _match_blocks(match: BlockMatch) -> list[Block]:
    sides = (("only measured", match.only_measured), ("only traced", match.only_traced))
    rows = [
        (side, f"{block.nbytes / MIB:,.2f} × {block.count}", block.where or MISSING)
        for side, apart in sides
        for block in apart[:_SHOWN]
    ]
    lead = Lead(f"{count_of(match.matched_count, 'block')} on both sides, {match.matched_bytes / MIB:,.1f} MiB.")
    return [lead, table(("side", "MiB", "*made by"), rows)] if rows else [lead]


def curves_svg(comparison: BlockComparison) -> Svg:
    """Draw allocated (solid) and reserved (dashed) MiB over the last step, measured and traced."""
    sides = ((_MEASURED_CSS, "measured", comparison.measured_curve), (_TRACED_CSS, "traced", comparison.traced_curve))
    lines = []
    for css, side, curve in sides:
        if curve:
            allocated_bytes, reserved_bytes = zip(*curve, strict=True)
            lines.append((f"line {css} dashed", f"{side} reserved", _thin(reserved_bytes)))
            lines.append((f"line {css}", f"{side} allocated", _thin(allocated_bytes)))
    most = max((max(values) for _, _, values in lines), default=1.0)
    plot = Plot(Axis(0.0, 1.0), Axis.of(0.0, max(most, 1e-3)), _MARGINS)
    plot.grid()
    plot.ticks_below("solid: allocated, dashed: reserved, MiB")
    for css, title, values in lines:
        plot.line(css, [(k / max(len(values) - 1, 1), value) for k, value in enumerate(values)], title)
    label = f"{comparison.name}: allocated and reserved memory over the last step, measured and traced"
    return plot.picture(label, css="timeline")


def _thin(values: Sequence[int]) -> list[float]:
    """Return at most `_MOST_COLUMNS` values in MiB, each the largest of a group of neighbours."""
    size = -(-len(values) // _MOST_COLUMNS)
    return [max(values[start : start + size]) / MIB for start in range(0, len(values), size)]


def questions(results: Results) -> Iterator[Part]:
    """Yield the answers to questions that only hardware answers."""
    measurements = {measured.name: measured for measured in measured_in(results.work / "probes" / "questions")}
    if not measurements:
        raise Absent("The results have no questions.")
    for name, title in QUESTIONS.items():
        measured = measurements.get(name, Measured(name, [], "it was not asked"))
        yield Heading(title)
        if measured.reason is None and measured.rows:
            yield Lead(ANSWERS[name](measured.rows))
        else:
            yield Callout(f"Not answered: {measured.reason or 'its process gave no figures'}.")


def tests(results: Results) -> Iterator[Part]:
    """Yield the outcomes of the machine's tests."""
    outcomes = outcomes_of(results.work / TESTS)
    if outcomes is None:
        raise Absent("The results have no outcomes of tests (step test).")
    if outcomes.not_run:
        yield Callout("The tests did not end.")
    yield Lead(f"{outcomes}.")
    for kind in ("failed", "skipped"):
        texts = tuple(f"{test}: {reason}" for test, (ended, reason) in outcomes.tests.items() if ended == kind)
        if texts:
            yield Fold(f"{kind}: {len(texts)}", (Bullets(texts),), is_open=kind == "failed")
