"""Notes of an estimate, each with a code for programs, and how an estimate is printed: a table for people, JSON for
programs.

Start reading at `Note`, of which `most_important` chooses those that are shown first, and at `print_table`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from conf.errors import UsageError, one_line
from conf.plain_text import MISSING, count_of
from featurize.configs.trial import TrialConfig, UnreadableConfig, config_of_row, printable
from learn.job.training_job import LEGEND, LOOPS, loop_of_source
from learn.rows.data import get_target

if TYPE_CHECKING:
    from rich.console import Console

    from learn.estimation.job_estimate import Estimate
    from learn.fitting.artifacts import DataPlace

MOST_SHOWN = 3
PROBLEM, WARNING, INFO = SEVERITIES = ("problem", "warning", "info")  # the most urgent first
TARGETS = ("memory", "smact", "smocc", "drama", "step_time")  # the targets of an Estimate
OUT_OF_MEMORY, MAY_RUN_OUT, BOUND, AMD_GPU = "out-of-memory", "may-run-out", "bound", "amd-gpu"  # codes that code reads


@dataclass(frozen=True)
class Note:
    """A remark on an estimate.

    Args:
        code: The subject, as `out-of-memory`. It stays the same where `text` is reworded.
        severity: `problem` (the job does not fit, or may not), `warning` (a figure is missing or may be off), or
            `info`.
        text: The remark, for people.
        targets: Targets of the figures that the remark is about; empty where it is about the whole estimate.
    """

    code: str
    severity: str
    text: str
    targets: tuple[str, ...] = ()


def most_important(notes: Iterable[Note]) -> list[Note]:
    """Return the notes to show first: at most three, one of each code, problems before warnings."""
    urgent = [note for note in notes if note.severity in (PROBLEM, WARNING)]
    first_of_code: dict[str, Note] = {}
    for note in sorted(urgent, key=lambda note: SEVERITIES.index(note.severity)):
        first_of_code.setdefault(note.code, note)
    return list(first_of_code.values())[:MOST_SHOWN]


TOP_SHOWN = 5  # modules in the table's last line
_ALWAYS_SHOWN = 6  # figures
_RATE = "rate"
# Name (of the bound: its coverage), field of `Estimate`, its format and unit, and the target that it belongs to.
_FIGURES = (
    ("peak memory", "peak_memory_mib", ",.0f", " MiB", "memory"),
    ("", "upper_mib", ",.0f", " MiB", "bound"),
    ("smact (SM activity)", "smact", ".3f", "", "smact"),
    ("smocc (SM occupancy)", "smocc", ".3f", "", "smocc"),
    ("drama (DRAM activity)", "drama", ".3f", "", "drama"),
    ("step time", "step_time_ms", ",.3f", " ms", "step_time"),
    ("90 % of steps below", "step_time_upper_ms", ",.3f", " ms", "step_time"),
    ("bound by", "bound_by", "", "", "step_time"),
    ("waits for other GPUs", "exposed_ms", ",.3f", " ms", "step_time"),
    ("bubble of the pipeline", "bubble_ms", ",.3f", " ms", "step_time"),
    ("throughput", "samples_per_s", _RATE, " samples/s", "step_time"),
    ("tokens", "tokens_per_s", _RATE, " tokens/s", "step_time"),
    ("mfu (FLOPs of peak)", "mfu", ".3f", "", "step_time"),
    ("energy a step", "energy_j", _RATE, " J", "step_time"),
)
WHOLE = "(the model)"  # its own path is empty


def print_table(title: str, estimate: Estimate, past: PastRun | None, *, all_notes: bool = False) -> None:
    """Print the figures, a past run's beside them, the breakdown of the traced peak, and notes.

    Args:
        title: The job's name.
        estimate: The estimate.
        past: The run, if there was one.
        all_notes: Whether to print all notes; else at most three.
    """
    from rich.console import Console
    from rich.table import Table

    from conf.reports.blocks import print_blocks, table

    screen = Console()
    say = partial(screen.print, soft_wrap=True, highlight=False, markup=False)
    size = "" if estimate.parameters is None else f", {estimate.parameters:,} parameters"
    screen.print(f"{title} on {estimate.device}{size}", highlight=False, markup=False)
    figure_table = Table()
    alone = past is None  # else the run's columns need the room
    figure_table.add_column("", no_wrap=alone)
    figure_table.add_column("estimate", justify="right", no_wrap=alone)
    if past is not None:
        figure_table.add_column(f"{past.source} ({past.status})", justify="right")
        figure_table.add_column("difference", justify="right")
    figure_table.add_column("for", no_wrap=alone)
    figure_table.add_column("by", overflow="fold")
    for figure in figures(estimate):
        of_run = () if past is None else _of_run(estimate, past, figure)
        figure_table.add_row(figure.name, figure.text, *of_run, figure.basis, figure.by)
    blanks = ("",) if past is None else ("", "", "")
    for name, text, why in _of_card(estimate):
        figure_table.add_row(name, text, *blanks, why)
    screen.print(figure_table)
    checked = coverage_text(estimate)
    for text in (
        f"{bound_name(estimate)}: {checked}" if checked else "",
        held_out_text(estimate.held_out_errors),
        legend(estimate.loops.values()),
        instruments_text(estimate),
    ):
        if text:
            say(text)
    if estimate.breakdown:
        total = sum(estimate.breakdown.values())
        whose = (
            f"the peak by {estimate.answered_by['memory']}" if estimate.trace_memory_mib is None else "the traced peak"
        )
        screen.print(f"{whose}, {total:,.0f} MiB, consists of", highlight=False, markup=False)
        rows = [
            (name, f"{mib:,.1f}", f"{mib / total:.1%}" if total else "–") for name, mib in estimate.breakdown.items()
        ]
        print_blocks(table(("part", "MiB", "share"), rows))
    if estimate.communication_ms is not None:
        sent = ", ".join(f"{kind} {mib:,.1f} MiB" for kind, mib in estimate.sent_mib.items())
        takes = f"that takes {estimate.communication_ms:,.3f} ms, hidden except for what is waited"
        say(f"each rank sends in a step: {sent}; {takes}")
    if estimate.peak_operator is not None:
        say(f"at the peak: {peak_text(estimate)}")
    if estimate.activations:
        most = [f"{name or WHOLE} {mib:,.1f}" for name, mib in list(estimate.activations.items())[:TOP_SHOWN]]
        say(f"most activations (MiB): {', '.join(most)}")
    print_notes(screen, estimate.notes, all_notes=all_notes)
    screen.print(f"estimated in {estimate.seconds:.2f} s", highlight=False)


def _of_card(estimate: Estimate) -> Iterator[tuple[str, str, str]]:
    """Yield (name, text, source) rows: whether the job fits the card."""
    card_mib, limit_mib = estimate.device_memory_mib, estimate.limit_mib
    if card_mib is None:
        return
    yield "memory of the card", f"{card_mib:,.0f} MiB", ""
    if limit_mib is not None and limit_mib < card_mib:
        yield "the job's share of it", f"{limit_mib:,.0f} MiB", "per_process_memory_fraction"
    yield "fits", "yes" if estimate.fits_device else "no", "by the bound" if estimate.upper_mib else "by the point"


def bound_name(estimate: Estimate) -> str:
    """Return the bound's name: its coverage in per cent."""
    return f"{100 * estimate.coverage:g} % bound"


def legend(loops: Iterable[str]) -> str:
    """Return one line that explains the loops among these figures."""
    named = set(loops)
    return "; ".join(f"loop {loop}: {LEGEND[loop]}" for loop in LOOPS if loop in named)


def print_notes(screen: Console, notes: Collection[Note], *, all_notes: bool) -> None:
    """Print notes: the most important ones and how many more there are, or all."""
    shown = notes if all_notes else most_important(notes)
    for note in shown:
        screen.print(f"note: {note.text}", soft_wrap=True, highlight=False, markup=False, style="yellow")
    if more := len(notes) - len(shown):
        screen.print(
            f"{count_of(more, 'more note')}: notes=all shows all, format=json with their codes", highlight=False
        )


def estimate_text(estimate: Estimate) -> str:
    """Return an estimate in fewer than 15 lines: six figures, the card, their estimators, at most three notes."""
    lines = [f"estimate of a training job on {estimate.device}"]
    for figure in figures(estimate)[:6]:
        basis = coverage_text(estimate) if figure.target == "bound" else figure.basis
        lines.append(f"{figure.name:<24}{figure.text}{f' ({basis})' if basis and figure.value is not None else ''}")
    if estimate.fits_device is not None:
        by = "the bound" if estimate.upper_mib is not None else "the estimate"
        lines.append(
            f"{'fits':<24}{'yes' if estimate.fits_device else 'no'}, by {by}: {estimate.device_memory_mib:,.0f} MiB"
        )
    targets_by: dict[str, list[str]] = {}
    for target, by in estimate.answered_by.items():
        targets_by.setdefault(by, []).append(target.replace("_", " "))
    lines.append("; ".join(f"{', '.join(targets)} by {by}" for by, targets in targets_by.items()))
    shown = most_important(estimate.notes)
    lines += [f"note: {one_line(note.text)}" for note in shown]
    if more := len(estimate.notes) - len(shown):
        lines.append(f"{count_of(more, 'more note')} in .notes")
    return "\n".join(lines)


def coverage_text(estimate: Estimate) -> str:
    """Return the share of left-out rows for which the bound held; empty without a bound."""
    if estimate.upper_mib is None:
        return ""
    if not estimate.bound_held_out:
        return "not checked on left-out rows"
    share, rows = estimate.bound_held_out["share"], estimate.bound_held_out["rows"]
    if "kind" not in estimate.bound_held_out:
        return f"{100 * share:.1f} % held on {rows:,} held-out rows"
    groups = f"{estimate.bound_held_out['groups']:,} left-out {estimate.bound_held_out['kind']}"
    return f"{100 * share:.1f} % held on {rows:,} rows of {groups}"


def instruments_text(estimate: Estimate) -> str:
    """Return the traced peak as each instrument shows it; empty without a trace."""
    if estimate.card_mib is None:
        return ""
    names = ("allocated", "reserved", "the process", "the card")
    values = (estimate.allocated_mib, estimate.reserved_mib, estimate.process_mib, estimate.card_mib)
    parts = [f"{name} {mib:,.0f} MiB" for name, mib in zip(names, values, strict=True) if mib is not None]
    return f"the traced peak, with the machine {estimate.machine}: {', '.join(parts)}"


def peak_text(estimate: Estimate) -> str:
    """Return where the peak is, as `aten::mm of layer4.1.conv2, in the backward pass`."""
    operator = estimate.peak_operator or "what the step begins with"
    where = f" of {estimate.peak_module}" if estimate.peak_module else ""
    when = {"setup": "before the first step", "optimizer": "in the optimizer's step"}
    return f"{operator}{where}, {when.get(estimate.peak_phase or '', f'in the {estimate.peak_phase} pass')}"


def held_out_text(errors: Mapping[str, Mapping[str, float]]) -> str:
    """Return one line on how far off `method=fast` was on held-out rows, by target; empty for other methods."""
    parts = []
    for target in (name for name in TARGETS if name in errors):
        form = ".3f" if get_target(target).space == "ratio" else ".1%"
        median, p90 = (format(errors[target][name], form) for name in ("median", "p90"))
        parts.append(f"{target.replace('_', ' ')} {median} ({p90})")
    return f"error on held-out configurations, median (90th percentile): {', '.join(parts)}" if parts else ""


def print_json(title: str, estimate: Estimate, past: PastRun | None) -> None:
    """Print the estimate's fields, with `subject`, and `run` (status, source, measured figures) for a past run."""
    mapping: dict[str, object] = {"subject": title, **estimate.to_mapping()}
    if past is not None:
        mapping["run"] = {
            "run_id": past.run_id,
            "status": past.status,
            "source": past.source,
            "loop": past.loop,
            **past.labels,
        }
    print(json.dumps(mapping, indent=1))


class ShownFigure(NamedTuple):
    """A figure of an estimate as it is shown: the columns of `_FIGURES`, and

    value    the figure; None: not known
    basis    its condition: `machine current` for memory placed by a profile, else `loop resident`
    by       its estimator
    """

    name: str
    column: str
    form: str
    unit: str
    target: str
    value: float | str | None
    basis: str
    by: str

    @property
    def text(self) -> str:
        """The figure with its unit."""
        if self.value is None:
            return "not calibrated" if self.target == "bound" else MISSING
        return self.write(self.value)

    def write(self, value: float | str) -> str:
        """Return a value of the figure as text."""
        return f"{rate(float(value)) if self.form == _RATE else format(value, self.form)}{self.unit}"


def figures(estimate: Estimate) -> list[ShownFigure]:
    """Return the figures in their order; the first six are included even if they are not known."""
    shown = []
    for place, (name, column, form, unit, target) in enumerate(_FIGURES):
        value, by = getattr(estimate, column), estimate.answered_by.get(target, "")
        basis = f"loop {estimate.loops[target]}" if target in estimate.loops else ""
        if target == "memory" and (by.endswith("(default)") or (by == "trace" and estimate.card_mib is not None)):
            basis = f"machine {estimate.machine}"
        if value is not None or place < _ALWAYS_SHOWN:
            name = name or bound_name(estimate)
            shown.append(ShownFigure(name, column, form, unit, target, value, basis, by))
    return shown


def rate(value: float) -> str:
    """Return a rate as text with about three significant digits."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"


def _of_run(estimate: Estimate, past: PastRun, figure: ShownFigure) -> tuple[str, str]:
    """Return the run's figure, and the estimate's deviation from it; a text where the deviation is meaningless."""
    if figure.column not in past.labels:
        return "", ""
    in_run, target = past.labels[figure.column], figure.target
    if in_run is None:
        return MISSING, ""
    text, estimated = figure.write(in_run), getattr(estimate, figure.column)
    if estimated is None:
        return text, ""
    # Memory hardly depends on the loop.
    if target != "memory" and estimate.loops.get(target) != past.loop:
        return text, "other loop"
    by_trace = past.source == "simulated" and figure.by == "trace"
    if by_trace and math.isclose(estimated, in_run, rel_tol=1e-9):  # the run was simulated with the estimate's figure
        return text, "same trace"
    if target in ("smact", "smocc", "drama"):
        return text, f"{estimated - in_run:+.3f}"
    return text, f"{estimated / in_run - 1:+.1%}" if in_run > 0 else ""


@dataclass(frozen=True)
class PastRun:
    """A stored run: its config, and its measured figures by column; missing ones are None.

    Of a run that shared its device, only the process's memory is its own.
    """

    run_id: str
    config: TrialConfig
    status: str
    source: str
    device: str | None
    labels: Mapping[str, float | None]

    @property
    def loop(self) -> str:
        """The loop of the run, a name of `learn.job.training_job.LOOPS`."""
        return loop_of_source(self.source)


def load_run(data: DataPlace, run_id: str, trust: Sequence[str] = ()) -> PastRun:
    """Return one run by its id. Raises `UsageError` where it is unknown or its config cannot be read.

    The row is data: code that its config names is imported only from modules in `trust`
    (`featurize.configs.trial`)."""
    import warehouse

    columns = ["peak_memory_mib", "smact", "smocc", "drama", "step_time_ms"]
    selected = [columns[0], *(f"CASE WHEN group_id IS NULL THEN {name} END" for name in columns[1:])]
    with warehouse.connect(data) as connection:
        row = connection.execute(
            f"SELECT config, status, source, device_name, {', '.join(selected)} FROM runs WHERE run_id = ?",
            [str(run_id)],
        ).fetchone()
    if row is None:
        raise UsageError(f"no run {run_id!r} in the warehouse; python -m warehouse.query lists them")
    try:
        config = config_of_row(row[0], trust)
    except UnreadableConfig as error:
        raise UsageError(f"run {printable(str(run_id))}: {error}") from error
    return PastRun(str(run_id), config, row[1], row[2], row[3], dict(zip(columns, row[4:], strict=True)))
