"""An estimate as one HTML page: memory over the step, the peak, its operator and its parts, and the step's time.

Start reading at `step_page`; `conf.reports` draws it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from conf.plain_text import count_of
from conf.reports.blocks import (
    Block,
    Callout,
    Cell,
    Code,
    Drawn,
    Facts,
    Fold,
    Heading,
    Lead,
    Legend,
    Outcome,
    Page,
    Row,
    Section,
    ShareBar,
    SharePart,
    Swatch,
    Table,
    render_for_notebook,
    table,
)
from conf.reports.charts import Axis, Margins, Plot, Svg
from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import training_of
from featurize.memory.allocator import AllocatorSettings
from featurize.operators.library_calls import CUBLAS
from featurize.recording.step_trace import BUCKET, COMMUNICATION, GATHERED, MASTER, UNREDUCED
from featurize.recording.values import tensors_of
from featurize.timing.kernels import precision_in_words
from featurize.timing.simulation import SimulatedStep
from learn.estimation.estimate_view import (
    OUT_OF_MEMORY,
    PROBLEM,
    WHOLE,
    Note,
    coverage_text,
    figures,
    legend,
    most_important,
    peak_text,
)
from learn.job.training_job import PIPELINE

if TYPE_CHECKING:
    from featurize.timing.simulation import TimedStep
    from learn.estimation.job_estimate import Estimate
    from learn.estimation.requests import Platform
    from learn.job.training_job import TrainingJob


def step_page(
    job: TrainingJob,
    platform: Platform,
    estimate: Estimate,
    traced: SimulatedStep | None,
) -> Page:
    """Return the page's contents. `traced` has its timeline; None if the model could not be traced."""
    device = platform.device
    breakdown, facts = _breakdown(estimate), _facts(job, platform, estimate, traced)
    sections: tuple[Section | None, ...] = (breakdown, facts)
    if traced is not None:
        timeline, time = _timeline(device, estimate, traced), _time(job, device, estimate, traced)
        sections = (timeline, breakdown, time, _activations(estimate), facts)
    fits = estimate.fits(device.memory_mib)
    outcome = Outcome(
        "good" if fits else "bad",
        "fits" if fits else "does not fit",
        f"one training job on a card of {device.memory_mib:,.0f} MiB",
    )
    return Page(
        title=f"{job.name} on {device.name}",
        head=(outcome, Facts(_answers(estimate)), *_notes(estimate)),
        sections=tuple(section for section in sections if section is not None),
    )


def estimate_html(estimate: Estimate) -> str:
    """Return an estimate for a notebook: its figures, the parts of its peak, at most three notes."""
    breakdown, shown = _breakdown(estimate), most_important(estimate.notes)
    more = len(estimate.notes) - len(shown)
    return render_for_notebook(
        Lead(f"Estimate of a training job on {estimate.device}"),
        Facts(_answers(estimate)),
        *(() if breakdown is None else (Heading(breakdown.title), *breakdown.blocks)),
        *map(_note, shown),
        *((Lead(f"{count_of(more, 'more note')} in ", Code(".notes")),) if more else ()),
    )


def _answers(estimate: Estimate) -> tuple[tuple[str, ...], ...]:
    bound = coverage_text(estimate)
    return tuple(
        (figure.name, figure.text, figure.basis, bound if figure.target == "bound" else figure.by)
        for figure in figures(estimate)
    )


def _notes(estimate: Estimate) -> list[Block]:
    """Show notes on running out of memory, and fold the others: the chart comes first."""
    others = [note for note in estimate.notes if note.severity != PROBLEM]
    notes: list[Block] = [_note(note) for note in estimate.notes if note.severity == PROBLEM]
    if others:
        notes.append(Fold(f"{count_of(len(others), 'note')} on this estimate", tuple(map(_note, others))))
    return notes


def _note(note: Note) -> Callout:
    return Callout(note.text, "bad" if note.code == OUT_OF_MEMORY else "look")


def _timeline(device: DeviceSpec, estimate: Estimate, traced: SimulatedStep) -> Section:
    memory = traced.memory
    when = "" if memory.peak_phase == "setup" else f" (step {memory.peak_step})"
    remark = ""
    if estimate.answered_by["memory"] != "trace":
        remark = (
            f" The trace's own peak is {estimate.trace_memory_mib:,.0f} MiB; the estimate above is "
            f"{estimate.answered_by['memory']}'s."
        )
    times = "once" if memory.retries == 1 else f"{memory.retries} times"
    retries = f" Cached memory has to be given back {times}." if memory.retries else ""
    return Section(
        "memory",
        "Memory over two steps",
        (
            Drawn(timeline_svg(traced, device, peak_text(estimate))),
            Legend(
                {
                    **{name: css for name, css in COLOURS.items() if name != "fragmentation"},
                    "reserved, not in use": COLOURS["fragmentation"],
                    "reserved by the allocator": "line",
                }
            ),
            Lead(
                "Most is in use at ",
                Code(peak_text(estimate)),
                f"{when}: {memory.peak_allocated / MIB:,.0f} MiB in blocks, of {memory.peak_reserved / MIB:,.0f} MiB "
                f"that the caching allocator reserves at its peak.{remark}{retries} The optimizer makes its state in "
                "the first step; all later steps are like the second.",
            ),
        ),
    )


def _breakdown(estimate: Estimate) -> Section | None:
    total = sum(estimate.breakdown.values())
    if not total:
        return None
    by = "the trace" if estimate.trace_memory_mib is not None else estimate.answered_by["memory"]
    parts: list[SharePart] = []
    rows: list[Row] = []
    for name, mib in estimate.breakdown.items():
        css = COLOURS.get(name, "k0")
        parts.append(SharePart(css, mib / total, f"{name} {mib:,.0f} MiB"))
        rows.append(Row((Swatch(css, name), f"{mib:,.1f}", f"{mib / total:.1%}")))
    columns = table(("part", "MiB", "share"), ()).columns
    blocks: list[Block] = [
        ShareBar(tuple(parts), tall=True),
        Table(columns, (*rows, Row(("in all", f"{total:,.1f}", ""), "sum"))),
    ]
    if "fragmentation" in estimate.breakdown:
        blocks.append(
            Lead(
                "Live tensors at the moment of the most memory in use. Fragmentation is what the allocator has "
                "reserved at its own peak beyond their bytes; context lies outside the allocator."
            )
        )
    return Section("parts", f"What the peak consists of, by {by}", tuple(blocks))


def _time(job: TrainingJob, device: DeviceSpec, estimate: Estimate, traced: SimulatedStep) -> Section | None:
    """Show the parts of the traced step's time, in the loop of the estimate's step time."""
    from featurize.timing.simulation import time_step

    waits_ms = 0.0
    if estimate.loops["step_time"] == PIPELINE:
        waits_ms = job.loading_ms(traced.trace)
    timed = time_step(traced.trace, device, job.settings, input_ms=waits_ms)
    parts = time_parts(timed, waits_ms)
    if not parts:
        return None
    rows: list[tuple[Cell, ...]] = []
    for part in parts:
        bar = ShareBar((SharePart(part.css, 1.0, part.name),), part.ms / parts[0].ms)
        rows.append((part.name, f"{part.ms:,.3f}", f"{part.ms / timed.step_time_ms:.1%}", bar))
    by = estimate.answered_by["step_time"]
    remark = "" if by == "trace" else f" The estimate's step time, {estimate.step_time_ms:,.1f} ms, is that of {by}."
    if ranks_ms := (estimate.exposed_ms or 0.0) + (estimate.bubble_ms or 0.0):
        remark += f" For other GPUs it waits {ranks_ms:,.1f} ms more."
    return Section(
        "time",
        "What the step's time consists of, by the trace",
        (
            Lead(
                "Kernels run one after the other. The GPU waits where the host launches them more slowly than they "
                f"run.{remark}"
            ),
            table(("kind", "ms", "share", ""), rows),
        ),
    )


def _activations(estimate: Estimate) -> Section | None:
    if not estimate.activations:
        return None
    lead = Lead("Made in a forward pass and alive at the moment of the peak, in the modules that made most of it.")
    rows = [(Code(module or WHOLE), f"{mib:,.1f}") for module, mib in estimate.activations.items()]
    return Section("activations", "Activations by module", (lead, table(("module", "MiB"), rows)))


def _facts(job: TrainingJob, platform: Platform, estimate: Estimate, traced: SimulatedStep | None) -> Section:
    if job.config is not None:
        settings = job.config.to_mapping()
    else:
        always = ("optimizer", "precision", "cudnn_benchmark", "channels_last")
        settings = {name: getattr(job.settings, name) for name in always} | training_of(job.settings).beyond_trials()
        settings["inputs"] = ", ".join(
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors_of(job.batch("meta")[0])
        )
    if traced is not None:
        settings["precision"] = precision_in_words(traced.trace, job.settings.precision)
    if platform.allocator is not None:
        chosen = vars(platform.allocator).items()
        changed = [f"{name}:{value}" for name, value in chosen if value != getattr(AllocatorSettings, name)]
        settings["allocator"] = ", ".join(changed)
    lead = Lead(f"{legend(estimate.loops.values())}. By {estimate.estimator}, in {estimate.seconds:.2f} s.")
    return Section("facts", "Settings", (lead, Facts(tuple((name, str(value)) for name, value in settings.items()))))


# Part -> (block kinds of the trace, CSS class), bottom to top.
BANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "parameters": (("parameter", GATHERED), "k1"),
    "optimizer state": (("optimizer_state", MASTER), "k2"),
    "buffers and batch": (("buffer", "batch"), "k3"),
    "gradients": (("gradient", BUCKET, UNREDUCED), "k4"),
    "activations": (("activation",), "k5"),
    "temporaries": (("temporary", COMMUNICATION), "k6"),
    "workspace": (("workspace",), "k7"),
}
COLOURS = {name: css for name, (_, css) in BANDS.items()} | {"fragmentation": "k8", "context": "k0"}

_MARGINS = Margins(width=1000.0, height=420.0, left=66.0, right=14.0, top=62.0, bottom=40.0)
_MOST_COLUMNS = 640
_LEAST_PHASE_LABEL = 100.0  # pixels that the name of a phase needs
_OFF_SCALE = 2.5  # a card with this many times the peak would squash the picture, and is left out
_PHASE_CSS = {"setup": "p0", "forward": "p1", "backward": "p2", "optimizer": "p3"}


class Column(NamedTuple):
    """One column of the picture: of a few neighbouring moments, the one with the most allocated memory. In bytes.

    moments   the number of moments
    parts     allocated memory by `BANDS`, with the blocks' rounding; reserved is the maximum over the moments
    """

    step: int
    phase: str
    moments: int
    parts: tuple[int, ...]
    reserved: int
    is_peak: bool


def columns_of(traced: SimulatedStep, most: int = _MOST_COLUMNS) -> list[Column]:
    """Return about `most` columns, none across phases, with the peak among them. Needs the replay's timeline."""
    blocks, timeline = traced.trace.blocks, traced.memory.timeline
    band_of = {kind: i for i, (kinds, _) in enumerate(BANDS.values()) for kind in kinds}
    size = max(1, math.ceil(len(timeline) / most))
    peak_at = max(range(len(timeline)), key=lambda i: timeline[i].allocated, default=-1)  # the first of equals
    live, before = [0] * len(BANDS), 0
    moments: list[tuple[int, ...]] = []
    for moment in timeline:
        block = blocks[moment.block]
        parts = list(live)
        parts[band_of[block.kind]] += moment.allocated - before
        passing = block.call is not None and block.call.kind != CUBLAS  # a workspace is freed before the next moment
        if not passing:
            live, before = parts, moment.allocated
        moments.append(tuple(parts))
    columns = []
    for (step, phase), group in itertools.groupby(
        range(len(timeline)), key=lambda i: (timeline[i].step, timeline[i].phase)
    ):
        places = list(group)
        for start in range(0, len(places), size):
            part = places[start : start + size]
            best = max(part, key=lambda i: timeline[i].allocated)
            reserved = max(timeline[i].reserved for i in part)
            columns.append(Column(step, phase, len(part), moments[best], reserved, peak_at in part))
    return columns


def timeline_svg(traced: SimulatedStep, device: DeviceSpec, peak_text: str) -> Svg:
    """Return the picture. Everything lies above the context, so the scale is the process's memory on the card."""
    columns = columns_of(traced)
    context = traced.breakdown["context"] + traced.communication.buffers_mib
    highest = context + max((column.reserved for column in columns), default=0) / MIB
    off_scale = device.memory_mib > _OFF_SCALE * highest
    top_mib = 1.15 * highest if off_scale else 1.06 * max(highest, device.memory_mib)
    unit, unit_name = (1024.0, "GiB") if top_mib >= 4096 else (1.0, "MiB")
    ticks = Axis.within(0.0, top_mib / unit).ticks
    edges = list(itertools.accumulate((column.moments for column in columns), initial=0))
    plot = Plot(Axis(0.0, max(edges[-1], 1)), Axis(0.0, top_mib, tuple(tick * unit for tick in ticks)), _MARGINS)
    xs = [plot.x(edge) for edge in edges]

    _phases(plot, columns, xs)
    plot.grid([f"{tick:,.6g}" for tick in ticks], unit_name)
    below = [0.0] * len(columns)
    for i, (name, css) in enumerate([("context", "k0"), *((name, css) for name, (_, css) in BANDS.items())]):
        heights = [context if i == 0 else column.parts[i - 1] / MIB for column in columns]
        above = [low + mib for low, mib in zip(below, heights, strict=True)]
        _band(plot, xs, below, above, css, name)
        below = above
    reserved = [context + column.reserved / MIB for column in columns]
    _band(plot, xs, below, reserved, "k8", "reserved, not in use")
    plot.path("reserved", _steps(xs, [plot.y(mib) for mib in reserved]))
    _capacity(plot, device, highest, off_scale)
    _peak(plot, columns, xs, below, peak_text)
    label = f"Memory of the training step on {device.name}, {highest:,.0f} MiB at its peak"
    return plot.picture(label, css="timeline")


def _phases(plot: Plot, columns: Sequence[Column], xs: Sequence[float]) -> None:
    """Draw a shade for each phase of each step, with its name where there is room."""
    for (step, phase), group in itertools.groupby(range(len(columns)), key=lambda i: columns[i][:2]):
        places = list(group)
        left, right = xs[places[0]], xs[places[-1] + 1]
        title = f"{phase}, step {step}" if step else phase
        plot.rect(_PHASE_CSS.get(phase, "p0"), left, plot.top, right - left, plot.bottom - plot.top, title=title)
        if right - left >= _LEAST_PHASE_LABEL:
            plot.text("phase", (left + right) / 2, plot.top - 8, title)
    plot.text("axis", plot.right, plot.height - 6, "allocations and frees, in order →", "end")


def _capacity(plot: Plot, device: DeviceSpec, highest: float, off_scale: bool) -> None:
    if off_scale:
        return
    y = plot.y(device.memory_mib)
    if highest > device.memory_mib:
        plot.rect("over", plot.left, plot.top, plot.right - plot.left, y - plot.top)
    plot.across("limit", device.memory_mib)
    # The label goes under the line where there is no room above it.
    label = f"{device.name}: {device.memory_mib:,.0f} MiB"
    plot.text("capacity", plot.left + 6, y - 6 if y - plot.top > 18 else y + 16, label, "start")


def _peak(plot: Plot, columns: Sequence[Column], xs: Sequence[float], in_use: Sequence[float], text: str) -> None:
    peak = next((i for i, column in enumerate(columns) if column.is_peak), None)
    if peak is None:
        return
    x, y = (xs[peak] + xs[peak + 1]) / 2, plot.y(in_use[peak])
    plot.path("leader", f"M{x:.1f} {plot.top:g}V{y:.1f}")
    plot.circle("peak", x, y, 4.5, f"Peak, {in_use[peak]:,.0f} MiB in use with the context: {text}")


def _band(
    plot: Plot, xs: Sequence[float], low_mib: Sequence[float], high_mib: Sequence[float], css: str, name: str
) -> None:
    """Draw the area between two step curves; nothing where it has no height anywhere."""
    low, high = ([plot.y(mib) for mib in side] for side in (low_mib, high_mib))
    if all(abs(a - b) < 0.05 for a, b in zip(low, high, strict=True)):
        return
    plot.path(css, f"{_steps(xs, high)}L{_steps(xs[::-1], low[::-1])[1:]}Z", name)


def _steps(xs: Sequence[float], ys: Sequence[float]) -> str:
    path = [f"M{xs[0]:.1f} {ys[0]:.1f}"] if ys else []
    for i in range(1, len(ys)):
        if abs(ys[i] - ys[i - 1]) >= 0.05:
            path.append(f"H{xs[i]:.1f}V{ys[i]:.1f}")
    if ys:
        path.append(f"H{xs[-1]:.1f}")
    return "".join(path)


OTHER, LAUNCH, INPUT = "other", "GPU waits for kernel launches", "GPU waits for input"
WORKS, WAITS = "k1", "k0"  # colour classes
# Prefix of a kernel's kind, as `featurize.timing.kernels` names it -> name in the chart. The first match counts.
_NAMES = {
    "product": "matrix products",
    "attention": "attention",
    "batch_norm": "normalizations",
    "group_norm": "normalizations",
    "layer_norm": "normalizations",
    "softmax": "softmax",
    "pool": "pooling",
    "reduction": "reductions",
    "gather": "gather and scatter",
    "scatter": "gather and scatter",
    "optimizer": "optimizer",
    "elementwise": "elementwise",
    "binary": "elementwise",
    "broadcast": "elementwise",
    "accumulate": "elementwise",
    "cast": "copies and casts",
    "copy": "copies and casts",
    "pad": "copies and casts",
}


class TimePart(NamedTuple):
    """One bar: its name, its time, and its colour class."""

    name: str
    ms: float
    css: str


def time_parts(timed: TimedStep, input_ms: float = 0.0) -> list[TimePart]:
    """Return the parts of a step's time, the longest first: kinds of kernels, and what the GPU waits for.

    The parts sum to `timed.step_time_ms`.

    Args:
        timed: The step.
        input_ms: The input pipeline's share of the step, as passed to `time_step`.
    """
    by_name: dict[str, float] = defaultdict(float)
    for kind, ms in timed.by_kind_ms.items():
        by_name[_name_of(kind)] += ms
    parts = [TimePart(name, ms, WORKS) for name, ms in by_name.items()]
    parts += [TimePart(LAUNCH, timed.step_time_ms - input_ms - timed.busy_ms, WAITS), TimePart(INPUT, input_ms, WAITS)]
    return sorted((part for part in parts if part.ms > 0), key=lambda part: -part.ms)


def _name_of(kind: str) -> str:
    if "convolution" in kind:
        direction = {"data": "input gradient", "weight": "weight gradient"}.get(kind.rpartition("_")[2], "forward")
        return f"convolutions, {direction}"
    return next((name for beginning, name in _NAMES.items() if kind.startswith(beginning)), OTHER)
