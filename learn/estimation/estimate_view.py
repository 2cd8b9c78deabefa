"""How an estimate is printed: a table for people, JSON for programs.

Start reading at `print_table`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from conf.plain_text import one_line
from conf.reports.page_text import count_of
from learn.estimation.loops import legend
from learn.estimation.notes import Note, most_important
from learn.estimation.past_run import PastRun, agrees_by_construction
from learn.estimation.sources import TARGETS
from learn.targets import get_target

if TYPE_CHECKING:
    from rich.console import Console

    from learn.estimation.job_estimate import Estimate

TOP_SHOWN = 5  # modules in the table's last line
WHOLE = "(the model)"  # which has no path of its own


def print_table(title: str, done: Estimate, past: PastRun | None, *, all_notes: bool = False) -> None:
    """Print the figures, beside what the run showed if there was one, the traced peak's breakdown, and notes.

    Args:
        title: The job's name.
        done: The estimate.
        past: The run, if there was one.
        all_notes: Whether to print all notes; else at most three.
    """
    from rich.console import Console
    from rich.table import Table

    screen = Console()
    size = "" if done.parameters is None else f", {done.parameters:,} parameters"
    screen.print(f"{title} on {done.device}{size}", highlight=False, markup=False)
    table = Table()
    alone = past is None  # else the columns of the run need the room
    table.add_column("", no_wrap=alone)
    table.add_column("estimate", justify="right", no_wrap=alone)
    if past is not None:
        table.add_column(f"{past.source} ({past.status})", justify="right")
        table.add_column("difference", justify="right")
    table.add_column("for", no_wrap=alone)
    table.add_column("by", overflow="fold")
    for name, value, text, target in figures(done):
        cells = [name, text(value)]
        if past is not None:
            column = _COLUMN.get(name)
            in_run = past.labels[column] if column else None
            cells += [text(in_run) if column else "", _difference(done, past, target) if column else ""]
        table.add_row(*cells, basis_of(done, target), done.answered_by.get(target, ""))
    if done.fits_device is not None:
        rest = [""] * (1 if past is None else 3)
        table.add_row("memory of the card", f"{done.device_memory_mib:,.0f} MiB", *rest, "")
        card_mib, limit_mib = done.device_memory_mib, done.limit_mib
        if card_mib is not None and limit_mib is not None and limit_mib < card_mib:
            table.add_row("the job's share of it", f"{limit_mib:,.0f} MiB", *rest, "per_process_memory_fraction")
        table.add_row(
            "fits", "yes" if done.fits_device else "no", *rest, "by the bound" if done.upper_mib else "by the point"
        )
    screen.print(table)
    if done.upper_mib is not None:
        screen.print(f"{bound_name(done)}: {coverage_text(done)}", soft_wrap=True, highlight=False, markup=False)
    if done.held_out_errors:
        screen.print(held_out_text(done.held_out_errors), soft_wrap=True, highlight=False, markup=False)
    if done.loops:
        screen.print(legend(done.loops.values()), soft_wrap=True, highlight=False, markup=False)

    if done.card_mib is not None:
        screen.print(instruments_text(done), soft_wrap=True, highlight=False, markup=False)
    if done.breakdown:
        total = sum(done.breakdown.values())
        whose = f"the peak by {done.answered_by['memory']}" if done.trace_memory_mib is None else "the traced peak"
        screen.print(f"{whose}, {total:,.0f} MiB, consists of", highlight=False, markup=False)
        parts = Table()
        parts.add_column("part")
        parts.add_column("MiB", justify="right")
        parts.add_column("share", justify="right")
        for name, mib in done.breakdown.items():
            parts.add_row(name, f"{mib:,.1f}", f"{mib / total:.1%}" if total else "–")
        screen.print(parts)
    if done.communication_ms is not None:
        screen.print(communication_text(done), soft_wrap=True, highlight=False, markup=False)
    if done.peak_operator is not None:
        screen.print(f"at the peak: {peak_text(done)}", soft_wrap=True, highlight=False, markup=False)
    if done.activations:
        most = [f"{name or WHOLE} {mib:,.1f}" for name, mib in list(done.activations.items())[:TOP_SHOWN]]
        screen.print(f"most activations (MiB): {', '.join(most)}", soft_wrap=True, highlight=False, markup=False)
    print_notes(screen, done.notes, all_notes=all_notes)
    screen.print(f"estimated in {done.seconds:.2f} s", highlight=False)


def bound_name(done: Estimate) -> str:
    """Return what the bound is called: its coverage in per cent."""
    return f"{100 * done.coverage:g} % bound"


def print_notes(screen: Console, notes: Collection[Note], *, all_notes: bool) -> None:
    """Print notes: the most important ones and how many more there are, or all."""
    shown = notes if all_notes else most_important(notes)
    for note in shown:
        screen.print(f"note: {note.text}", soft_wrap=True, highlight=False, markup=False, style="yellow")
    if more := len(notes) - len(shown):
        screen.print(
            f"{count_of(more, 'more note')}: notes=all shows all, format=json with their codes", highlight=False
        )


def estimate_text(done: Estimate) -> str:
    """Return an estimate in fewer than 15 lines: six figures, the card, who gave them, at most three notes."""
    lines = [f"estimate of a training job on {done.device}"]
    for name, value, text, target in list(figures(done))[:6]:
        basis = coverage_text(done) if target == "bound" else basis_of(done, target)
        lines.append(f"{name:<24}{text(value)}{f' ({basis})' if basis and value is not None else ''}")
    if done.fits_device is not None:
        by = "the bound" if done.upper_mib is not None else "the estimate"
        lines.append(f"{'fits':<24}{'yes' if done.fits_device else 'no'}, by {by}: {done.device_memory_mib:,.0f} MiB")
    targets_by: dict[str, list[str]] = {}
    for target, by in done.answered_by.items():
        targets_by.setdefault(by, []).append(target.replace("_", " "))
    by_whom = [f"{', '.join(targets)} by {by}" for by, targets in targets_by.items()]
    lines.append("; ".join(by_whom))
    shown = most_important(done.notes)
    lines += [f"note: {one_line(note.text)}" for note in shown]
    if more := len(done.notes) - len(shown):
        lines.append(f"{count_of(more, 'more note')} in .notes")
    return "\n".join(lines)


def basis_of(done: Estimate, target: str) -> str:
    """Return what a figure holds for: `machine current` of memory that a profile places, else `loop resident`."""
    by = done.answered_by.get(target, "")
    if target == "memory" and (by.endswith("(default)") or (by == "trace" and done.card_mib is not None)):
        return f"machine {done.machine}"
    return f"loop {done.loops[target]}" if target in done.loops else ""


def coverage_text(done: Estimate) -> str:
    """Return what share of left-out rows the bound held; empty without a bound."""
    if done.upper_mib is None:
        return ""
    if not done.bound_held_out:
        return "not checked on left-out rows"
    share, rows = done.bound_held_out["share"], done.bound_held_out["rows"]
    if "kind" not in done.bound_held_out:
        return f"{100 * share:.1f} % held on {rows:,} held-out rows"
    groups = f"{done.bound_held_out['groups']:,} left-out {done.bound_held_out['kind']}"
    return f"{100 * share:.1f} % held on {rows:,} rows of {groups}"


def instruments_text(done: Estimate) -> str:
    """Return the traced peak as each instrument shows it."""
    shown = {
        "allocated": done.allocated_mib,
        "reserved": done.reserved_mib,
        "the process": done.process_mib,
        "the card": done.card_mib,
    }
    parts = ", ".join(f"{name} {mib:,.0f} MiB" for name, mib in shown.items() if mib is not None)
    return f"the traced peak, with the machine {done.machine}: {parts}"


def communication_text(done: Estimate) -> str:
    """Return what the ranks of a job on several GPUs send in a step, and how long that takes."""
    sent = ", ".join(f"{kind} {mib:,.1f} MiB" for kind, mib in done.sent_mib.items())
    return (
        f"each rank sends in a step: {sent}; that takes {done.communication_ms:,.3f} ms, hidden but for what is waited"
    )


def peak_text(done: Estimate) -> str:
    """Return where the peak is, as `aten::mm of layer4.1.conv2, in the backward pass`."""
    operator = done.peak_operator or "what the step begins with"
    where = f" of {done.peak_module}" if done.peak_module else ""
    when = {"setup": "before the first step", "optimizer": "in the optimizer's step"}
    return f"{operator}{where}, {when.get(done.peak_phase or '', f'in the {done.peak_phase} pass')}"


def held_out_text(errors: Mapping[str, Mapping[str, float]]) -> str:
    """Return one line on how far off `method=fast` was on held-out rows, for each target in the order of the table."""
    parts = []
    for target in (name for name in TARGETS if name in errors):
        ratio = get_target(target).space == "ratio"
        median, p90 = (
            f"{value:.3f}" if ratio else f"{value:.1%}" for value in map(errors[target].get, ("median", "p90"))
        )
        parts.append(f"{target.replace('_', ' ')} {median} ({p90})")
    return f"error on held-out configurations, median (90th percentile): {', '.join(parts)}"


def print_json(title: str, done: Estimate, past: PastRun | None) -> None:
    """The estimate's fields, with `subject`, and `run` (status, source, what was found) if there was one."""
    mapping: dict[str, object] = {"subject": title, **done.to_mapping()}
    if past is not None:
        mapping["run"] = {
            "run_id": past.run_id, "status": past.status, "source": past.source, "loop": past.loop, **past.labels
        }  # fmt: skip
    print(json.dumps(mapping, indent=1))


_COLUMN: Mapping[str, str] = {
    "peak memory": "peak_memory_mib",
    "smact (SM activity)": "smact",
    "smocc (SM occupancy)": "smocc",
    "drama (DRAM activity)": "drama",
    "step time": "step_time_ms",
}


def figures(done: Estimate):
    def mib(value) -> str:
        return "–" if value is None else f"{value:,.0f} MiB"

    def ratio(value) -> str:
        return "–" if value is None else f"{value:.3f}"

    def ms(value) -> str:
        return "–" if value is None else f"{value:,.3f} ms"

    yield "peak memory", done.peak_memory_mib, mib, "memory"
    yield bound_name(done), done.upper_mib, (lambda v: "not calibrated" if v is None else mib(v)), "bound"
    yield "smact (SM activity)", done.smact, ratio, "smact"
    yield "smocc (SM occupancy)", done.smocc, ratio, "smocc"
    yield "drama (DRAM activity)", done.drama, ratio, "drama"
    yield "step time", done.step_time_ms, ms, "step_time"
    if done.step_time_upper_ms is not None:
        yield "90 % of steps below", done.step_time_upper_ms, ms, "step_time"
    if done.bound_by is not None:
        yield "bound by", done.bound_by, (lambda name: name), "step_time"
    if done.exposed_ms is not None:
        yield "waits for other GPUs", done.exposed_ms, ms, "step_time"
    if done.bubble_ms is not None:
        yield "bubble of the pipeline", done.bubble_ms, ms, "step_time"
    for name, value, text in throughput_rows(done):
        if value is not None:
            yield name, value, text, "step_time"


def throughput_rows(done: Estimate) -> tuple[tuple[str, float | None, Callable[[float], str]], ...]:
    """Return what follows from the step time: name, value, and how the value is written."""
    return (
        ("throughput", done.samples_per_s, lambda value: f"{rate(value)} samples/s"),
        ("tokens", done.tokens_per_s, lambda value: f"{rate(value)} tokens/s"),
        ("mfu (FLOPs of peak)", done.mfu, lambda value: f"{value:.3f}"),
        ("energy a step", done.energy_j, lambda value: f"{rate(value)} J"),
    )


def rate(value: float) -> str:
    """Return a number with three digits or more and no power of ten."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"


def _difference(done: Estimate, past: PastRun, target: str) -> str:
    """The estimate less what the run showed; in words where a figure would say nothing."""
    column = get_target(target).column
    estimated, in_run = getattr(done, column), past.labels[column]
    if estimated is None or in_run is None:
        return ""
    if target != "memory" and done.loops.get(target) != past.loop:  # memory hardly depends on the loop
        return "other loop"
    if agrees_by_construction(past, done, target):
        return "same trace"
    if target in ("smact", "smocc", "drama"):
        return f"{estimated - in_run:+.3f}"
    return f"{estimated / in_run - 1:+.1%}" if in_run > 0 else ""
