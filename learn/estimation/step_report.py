"""An estimate as one HTML page: memory over the step, the peak and its operator, and its parts, module by module.

Start reading at `step_page`; `conf.reports` draws it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from conf.plain_text import MISSING, count_of
from conf.reports.blocks import (
    Block,
    Branch,
    Callout,
    Cell,
    Code,
    Drawn,
    Facts,
    Fold,
    Group,
    Heading,
    Lead,
    Legend,
    Outcome,
    Page,
    Row,
    Section,
    ShareBar,
    SharePart,
    SideBySide,
    Swatch,
    Table,
    Tile,
    Tiles,
    Tree,
    render_for_notebook,
    table,
    write_page,
)
from conf.reports.charts import Axis, Drawing, Margins, Plot, Svg
from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import training_of
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.operators.library_calls import CUBLAS
from featurize.recording.step_trace import BUCKET, COMMUNICATION, GATHERED, MASTER, UNREDUCED
from featurize.timing.overlap import SimulatedStep
from featurize.timing.times import precision_in_words
from learn.estimation.estimate_view import basis_of, bound_name, coverage_text, figures, peak_text, rate
from learn.estimation.notes import (
    OUT_OF_MEMORY,
    PIPELINE,
    PROBLEM,
    Note,
    legend,
    loading_ms,
    most_important,
    times,
)

if TYPE_CHECKING:
    from featurize.timing.step_time import TimedStep
    from learn.estimation.job_estimate import Estimate
    from learn.estimation.platforms import Platform
    from learn.job.training_job import TrainingJob

TOP_TENSORS = 12


def write_step_report(
    path: Path,
    job: TrainingJob,
    platform: Platform,
    estimate: Estimate,
    traced: SimulatedStep | None,
) -> None:
    """Write the page in one step, replacing an existing one. `traced` has its timeline; None if there is no trace."""
    write_page(path, step_page(job, platform, estimate, traced))


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
        sections = (timeline, breakdown, time, _activations(traced), _tensors(traced), facts)
    return Page(
        title=f"{job.name} on {device.name}",
        head=(_outcome(device, estimate), _tiles(job, device, estimate), *_notes(estimate)),
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
        (
            figure.name,
            figure.text,
            basis_of(estimate, figure.target),
            bound if figure.target == "bound" else estimate.answered_by.get(figure.target, ""),
        )
        for figure in figures(estimate)
    )


def _outcome(device: DeviceSpec, estimate: Estimate) -> Outcome:
    fits = estimate.fits(device.memory_mib)
    return Outcome(
        "good" if fits else "bad",
        "fits" if fits else "does not fit",
        f"one training job on a card of {device.memory_mib:,.0f} MiB",
    )


def _tiles(job: TrainingJob, device: DeviceSpec, estimate: Estimate) -> Tiles:
    used = estimate.peak_memory_mib / device.memory_mib
    share = f"{used:,.0%} of the card" if used >= 0.01 else "less than 1% of the card"
    tiles = [Tile(_name(estimate, "peak memory", "memory"), f"{estimate.peak_memory_mib:,.0f} MiB", share)]
    if estimate.upper_mib is not None:
        tiles.append(Tile(bound_name(estimate), f"{estimate.upper_mib:,.0f} MiB", coverage_text(estimate)))
    if estimate.step_time_ms is not None:
        tiles.append(
            Tile(
                _name(estimate, "step time", "step_time"),
                f"{estimate.step_time_ms:,.1f} ms",
                f"SM activity {estimate.smact:.0%}",
            )
        )
    if estimate.samples_per_s is not None:
        tokens = "of one GPU" if estimate.tokens_per_s is None else f"{rate(estimate.tokens_per_s)} tokens/s"
        tiles.append(Tile("samples a second", rate(estimate.samples_per_s), tokens))
    if estimate.energy_j is not None:
        joule = f"{rate(estimate.energy_j)} J"
        by_power = Tile("energy a step", joule, "by estimated power")
        tiles.append(
            by_power if estimate.mfu is None else Tile("model FLOPs", f"{estimate.mfu:.1%} of peak", f"{joule} a step")
        )
    if estimate.drama is not None:
        tiles.append(
            Tile(
                _name(estimate, "DRAM activity", "drama"), f"{estimate.drama:.0%}", f"SM occupancy {estimate.smocc:.0%}"
            )
        )
    if estimate.parameters is not None:
        tiles.append(Tile("parameters", _short(estimate.parameters), f"batch of {job.batch_size:,}"))
    return Tiles(tuple(tiles))


def _name(estimate: Estimate, name: str, target: str) -> str:
    basis = basis_of(estimate, target)
    return f"{name} ({basis})" if basis else name


def _short(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)


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
    retries = f" Cached memory has to be given back {times(memory.retries)}." if memory.retries else ""
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
    free = [css for name, css in COLOURS.items() if name not in estimate.breakdown]
    for name, mib in estimate.breakdown.items():
        css = COLOURS.get(name) or (free.pop(0) if free else "k0")
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
    from featurize.timing.step_time import time_step

    waits_ms = 0.0
    if estimate.loops["step_time"] == PIPELINE:
        waits_ms = loading_ms(traced, job)
    timed = time_step(traced.trace, device, job.settings, input_ms=waits_ms)
    parts = time_parts(timed, waits_ms)
    if not parts:
        return None
    total_ms = timed.step_time_ms
    rows = [
        Row((Swatch(part.css, part.name), time_text(part.ms, total_ms), f"{part.ms / total_ms:.1%}")) for part in parts
    ]
    columns = table(("kind", "ms", "share"), ()).columns
    by = estimate.answered_by["step_time"]
    remark = "" if by == "trace" else f" The estimate's step time, {estimate.step_time_ms:,.1f} ms, is that of {by}."
    if ranks_ms := (estimate.exposed_ms or 0.0) + (estimate.bubble_ms or 0.0):
        remark += f" For other GPUs it waits {ranks_ms:,.1f} ms more."
    longest_parts = sorted(parts, key=lambda part: -part.ms)[:3]
    longest = ", ".join(f"{part.name} {part.ms / total_ms:.0%}" for part in longest_parts)
    label = f"Time of a step by kind of kernel: {longest}"
    bars = Group(f"{time_text(total_ms, total_ms)} ms a step", (Drawn(time_svg(parts, label)),))
    numbers = Group("In figures", (Table(columns, (*rows, Row(("in all", time_text(total_ms, total_ms), ""), "sum"))),))
    present = {part.css for part in parts}
    return Section(
        "time",
        "What the step's time consists of, by the trace",
        (
            Lead(
                "Kernels run one after the other. The GPU waits where the host launches them more slowly than they "
                f"run.{remark}"
            ),
            Legend({name: css for css, name in GROUPS.items() if css in present}),
            SideBySide((bars, numbers)),
        ),
    )


def _activations(traced: SimulatedStep) -> Section:
    title = "Activations by module"
    if not traced.memory.peak_modules:
        return Section("activations", title, (Lead("None are alive at the peak."),))
    intro = Lead("Made in a forward pass and alive at the moment of the peak, by the module that made them, in MiB.")
    return Section("activations", title, (intro, module_tree(traced.memory.peak_modules)))


def _tensors(traced: SimulatedStep) -> Section:
    """Return the largest blocks alive at the peak; equal ones are counted together."""
    live: dict[int, None] = {}
    highest = -1
    at_peak: list[int] = []
    for moment in traced.memory.timeline:
        if moment.block in live:
            del live[moment.block]
        else:
            live[moment.block] = None
        if moment.allocated > highest:
            highest, at_peak = moment.allocated, list(live)
    blocks = traced.trace.blocks
    equal = Counter((b.nbytes, b.kind, b.operator, b.module) for b in map(blocks.__getitem__, at_peak) if b.nbytes)
    largest = sorted(equal.items(), key=lambda item: -item[0][0] * item[1])[:TOP_TENSORS]
    rows: list[tuple[Cell, ...]] = [
        (
            kind.replace("_", " "),
            f"{nbytes * count / MIB:,.1f}",
            count,
            Code(operator or MISSING),
            Code(module or MISSING),
        )
        for (nbytes, kind, operator, module), count in largest
    ]
    tensors = table(("kind", "MiB", "tensors", "*made by", "*of module"), rows)
    return Section("tensors", "Largest tensors at the peak", (tensors,))


def _facts(job: TrainingJob, platform: Platform, estimate: Estimate, traced: SimulatedStep | None) -> Section:
    device, allocator = platform.device, platform.allocator
    settings: dict[str, object] = {}
    if job.config is not None:
        settings |= job.config.to_mapping()
    else:
        from featurize.recording.values import tensors_of

        inputs, _targets = job.batch("meta")
        settings["inputs"] = ", ".join(
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors_of(inputs)
        )
        if job.batches:
            settings["batches"] = f"{len(job.batches)} steps; the inputs are the longest batch's"
        for name in ("optimizer", "precision", "cudnn_benchmark", "channels_last"):
            settings[name] = getattr(job.settings, name)
        settings |= dict(setting.split("=", 1) for setting in training_of(job.settings).beyond_trials())
    if traced is not None:
        settings["precision"] = precision_in_words(traced.trace, job.settings.precision)
    chosen = vars(allocator).items() if allocator is not None else ()
    changed = [f"{name}:{value}" for name, value in chosen if value != getattr(AllocatorSettings, name)]
    settings["allocator"] = ", ".join(changed) or "defaults"
    settings["loop"] = (
        "each batch copied to the device, output and loss kept until the next ones"
        if job.training_loop
        else "the farm's: the batch lies on the device, a step leaves nothing behind"
    )
    described = {
        "name": device.name,
        "memory": f"{device.memory_mib:,.0f} MiB",
        "architecture": device.architecture.title,
        "bandwidth": f"{device.bandwidth_gb_s:,.0f} GB/s",
        "multiprocessors": str(device.sm_count),
        "machine": estimate.machine or MISSING,
    }
    answer = (
        Facts(_answers(estimate)),
        Lead(legend(estimate.loops.values())),
        Lead(f"by {estimate.estimator}, in {estimate.seconds:.2f} s"),
    )
    given = Facts(tuple((name, str(value)) for name, value in settings.items()))
    groups = (
        Group("Estimate", answer),
        Group("Settings", (given,)),
        Group("Device", (Facts(tuple(described.items())),)),
    )
    return Section("facts", "Figures and settings", (SideBySide(groups),))


MOST_CHILDREN = 64  # children of a node that are shown
LEAST_SHARE = 0.001  # of all bytes; smaller children are added up
OPEN_SHARE, MOST_OPEN = 0.4, 16  # a node with this share of all bytes is unfolded, if it has few enough children
NOWHERE = "outside any module"


@dataclass
class Node:
    """A module: `own` bytes allocated by itself, and `total` bytes with its children's."""

    name: str
    own: int = 0
    total: int = 0
    children: dict[str, Node] = field(default_factory=dict)


def tree_of(sizes: Mapping[str, int]) -> Node:
    """Return the tree of `named_modules`' paths. A chain of modules with one child each is one node,
    as `model.layers`."""
    root = Node("")
    for path, nbytes in sizes.items():
        node = root
        node.total += nbytes
        for part in (path or NOWHERE).split("."):
            node = node.children.setdefault(part, Node(part))
            node.total += nbytes
        node.own += nbytes
    root.children = {child.name: child for child in map(_join, root.children.values())}
    return root


def _join(node: Node) -> Node:
    node.children = {child.name: child for child in map(_join, node.children.values())}
    if len(node.children) == 1 and not node.own:
        (child,) = node.children.values()
        return Node(f"{node.name}.{child.name}", child.own, child.total, child.children)
    return node


def module_tree(sizes: Mapping[str, int]) -> Tree:
    """Return the tree of a page: largest modules first, each with a gauge of its share of all bytes."""
    root = tree_of(sizes)
    return Tree(_branches(root, max(root.total, 1)))


def _branches(node: Node, all_bytes: int) -> tuple[Branch, ...]:
    ordered = sorted(node.children.values(), key=lambda child: (-child.total, _natural(child.name)))
    branches = []
    if node.own and ordered:
        branches.append(_branch("(its own operators)", node.own, all_bytes))
    shown = [child for child in ordered[:MOST_CHILDREN] if child.total >= LEAST_SHARE * all_bytes]
    for child in shown:
        is_open = child.total >= OPEN_SHARE * all_bytes and len(child.children) <= MOST_OPEN
        branches.append(_branch(child.name, child.total, all_bytes, _branches(child, all_bytes), is_open))
    if hidden := ordered[len(shown) :]:
        branches.append(_branch(f"{len(hidden)} more", sum(child.total for child in hidden), all_bytes))
    return tuple(branches)


def _branch(name: str, nbytes: int, all_bytes: int, children: tuple[Branch, ...] = (), is_open: bool = False) -> Branch:
    share = nbytes / all_bytes
    return Branch(name, share, (f"{nbytes / MIB:,.1f}", f"{share:.1%}"), children, is_open)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts `layer10` after `layer9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


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
_LEAST_PHASE_LABEL = 52.0  # pixels that the name of a phase needs
_LETTER, _MOST_LETTERS = 7.2, 125  # width in pixels of a bold letter; letters that fit into the picture's width
_OFF_SCALE = 2.5  # a card with this many times the peak would squash the picture: text states its size instead
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
    live = [0] * len(BANDS)
    before = 0
    columns: list[Column] = []
    best_parts: tuple[int, ...] = ()
    count, best, reserved, has_peak = 0, -1, 0, False
    for index, moment in enumerate(timeline):
        block = blocks[moment.block]
        change = moment.allocated - before
        parts = list(live)
        parts[band_of[block.kind]] += change
        passing = block.call is not None and block.call.kind != CUBLAS  # a workspace is freed before the next moment
        if not passing:
            live, before = parts, moment.allocated
        count += 1
        reserved = max(reserved, moment.reserved)
        has_peak |= index == peak_at
        if moment.allocated > best:
            best, best_parts = moment.allocated, tuple(parts)
        following = timeline[index + 1] if index + 1 < len(timeline) else None
        if count >= size or following is None or (following.step, following.phase) != (moment.step, moment.phase):
            columns.append(Column(moment.step, moment.phase, count, best_parts, reserved, has_peak))
            count, best, best_parts, reserved, has_peak = 0, -1, (), 0, False
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
    """Draw a shade and a name for each phase, and where the steps begin."""
    top, bottom = plot.top, plot.bottom
    start = 0
    steps: dict[int, list[float]] = {}
    for i, column in enumerate(columns):
        steps.setdefault(column.step, [xs[i], xs[i]])[1] = xs[i + 1]
        last = i + 1 == len(columns)
        if not last and (columns[i + 1].step, columns[i + 1].phase) == (column.step, column.phase):
            continue
        left, right = xs[start], xs[i + 1]
        title = column.phase if column.step == 0 else f"{column.phase}, step {column.step}"
        plot.rect(_PHASE_CSS.get(column.phase, "p0"), left, top, right - left, bottom - top, title=title)
        if right - left >= _LEAST_PHASE_LABEL:
            plot.text("phase", (left + right) / 2, top - 8, column.phase)
        start = i + 1
    for step, (left, right) in steps.items():
        if step:
            plot.path("edge", f"M{left:.1f} {top - 22:g}V{bottom + 6:g}")
            plot.text("step", (left + right) / 2, bottom + 20, f"step {step}")
    plot.text("axis", plot.right, plot.height - 6, "allocations and frees, in order →", "end")


def _capacity(plot: Plot, device: DeviceSpec, highest: float, off_scale: bool) -> None:
    label, x = f"{device.name}: {device.memory_mib:,.0f} MiB", plot.left + 6
    if off_scale:
        ratio = device.memory_mib / highest
        plot.text("capacity", x, plot.top + 16, f"↑ {label}, {ratio:.1f} times the peak", "start")
        return
    y = plot.y(device.memory_mib)
    if highest > device.memory_mib:
        plot.rect("over", plot.left, plot.top, plot.right - plot.left, y - plot.top)
    plot.across("limit", device.memory_mib)
    # The label goes under the line where there is no room above it.
    plot.text("capacity", x, y - 6 if y - plot.top > 18 else y + 16, label, "start")


def _peak(plot: Plot, columns: Sequence[Column], xs: Sequence[float], in_use: Sequence[float], text: str) -> None:
    peak = next((i for i, column in enumerate(columns) if column.is_peak), None)
    if peak is None:
        return
    x, y = (xs[peak] + xs[peak + 1]) / 2, plot.y(in_use[peak])
    full = f"Peak, {in_use[peak]:,.0f} MiB in use with the context: {text}"
    shown = full if len(full) <= _MOST_LETTERS else full[: _MOST_LETTERS - 1] + "…"
    half = len(shown) * _LETTER / 2
    plot.path("leader", f"M{x:.1f} 22V{y:.1f}")
    plot.circle("peak", x, y, 4.5, full)
    plot.text("peak", min(max(x, plot.left + half), plot.right - half), 15, shown, title=full)


def _band(
    plot: Plot, xs: Sequence[float], low_mib: Sequence[float], high_mib: Sequence[float], css: str, name: str
) -> None:
    """Draw the area between two step curves; nothing where it has no height anywhere."""
    low, high = ([plot.y(mib) for mib in side] for side in (low_mib, high_mib))
    if all(abs(a - b) < 0.05 for a, b in zip(low, high, strict=True)):
        return
    back = [f"V{low[-1]:.1f}"]
    for i in range(len(low) - 1, 0, -1):
        if abs(low[i - 1] - low[i]) >= 0.05:
            back.append(f"H{xs[i]:.1f}V{low[i - 1]:.1f}")
    back.append(f"H{xs[0]:.1f}Z")
    plot.path(css, f"{_steps(xs, high)}{''.join(back)}", name)


def _steps(xs: Sequence[float], ys: Sequence[float]) -> str:
    path = [f"M{xs[0]:.1f} {ys[0]:.1f}"] if ys else []
    for i in range(1, len(ys)):
        if abs(ys[i] - ys[i - 1]) >= 0.05:
            path.append(f"H{xs[i]:.1f}V{ys[i]:.1f}")
    if ys:
        path.append(f"H{xs[-1]:.1f}")
    return "".join(path)


OTHER, LAUNCH, INPUT = "other", "GPU waits for kernel launches", "GPU waits for input"
ARITHMETIC, STREAMS, WAITS = "k1", "k5", "k0"  # colour classes
GROUPS = {ARITHMETIC: "products, convolutions, attention", STREAMS: "other kernels", WAITS: "GPU waits"}
_LEAST_SHARE = 0.01  # share of the step; smaller kinds are added to "other"
# Prefix of a kernel's kind, as `featurize.timing.calls` names it -> name in the chart. The first match counts.
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
_ARITHMETIC = ("matrix products", "attention")

_WIDTH, _ROW, _BAR = 352.0, 34.0, 12.0  # pixels; a phone's width


class TimePart(NamedTuple):
    """One bar: its name, its time, and its colour class."""

    name: str
    ms: float
    css: str


def time_parts(timed: TimedStep, input_ms: float = 0.0) -> list[TimePart]:
    """Return the parts of a step's time: kinds of kernels, the longest first, then what the GPU waits for.

    The parts sum to `timed.step_time_ms`. Parts below 1 % of it are merged into one, "other".

    Args:
        timed: The step.
        input_ms: The input pipeline's share of the step, as passed to `time_step`.
    """
    by_name: dict[str, float] = defaultdict(float)
    for kind, ms in timed.by_kind_ms.items():
        by_name[_name_of(kind)] += ms
    waits = {LAUNCH: timed.step_time_ms - input_ms - timed.busy_ms, INPUT: input_ms}
    least_ms = _LEAST_SHARE * timed.step_time_ms
    small_ms = sum(ms for ms in (*by_name.values(), *waits.values()) if ms < least_ms)
    other_ms = small_ms + (by_name[OTHER] if by_name[OTHER] >= least_ms else 0.0)
    parts = [
        TimePart(name, ms, ARITHMETIC if name in _ARITHMETIC or name.startswith("convolutions") else STREAMS)
        for name, ms in sorted(by_name.items(), key=lambda item: -item[1])
        if ms >= least_ms and name != OTHER
    ]
    parts += [TimePart(OTHER, other_ms, STREAMS)] if other_ms > 0 else []
    return parts + [TimePart(name, ms, WAITS) for name, ms in waits.items() if ms >= least_ms and ms > 0]


def time_svg(parts: Sequence[TimePart], label: str) -> Svg:
    """Return the bars, each under its name, time and share; `label` describes them. There is at least one."""
    drawing = Drawing()
    total_ms, longest_ms = sum(part.ms for part in parts), max(part.ms for part in parts)
    for place, part in enumerate(parts):
        top = place * _ROW
        text = f"{time_text(part.ms, total_ms)} ms, {part.ms / total_ms:.1%}"
        drawing.text("name", 0, top + 13, part.name, "start")
        drawing.text("axis", _WIDTH, top + 13, text, "end")
        drawing.rect("track", 0, top + 18, _WIDTH, _BAR, radius=2)
        width = max(1.0, _WIDTH * part.ms / longest_ms)
        drawing.rect(part.css, 0, top + 18, width, _BAR, radius=2, title=f"{part.name}: {text}")
    return drawing.svg(_WIDTH, len(parts) * _ROW, label)


def time_text(ms: float, total_ms: float) -> str:
    """Return a time in ms as text; all times that sum to `total_ms` have the same number of decimals."""
    decimals = 1 if total_ms >= 1000 else 2 if total_ms >= 10 else 3
    return f"{ms:,.{decimals}f}"


def _name_of(kind: str) -> str:
    if "convolution" in kind:
        direction = {"data": "input gradient", "weight": "weight gradient"}.get(kind.rpartition("_")[2], "forward")
        return f"convolutions, {direction}"
    return next((name for beginning, name in _NAMES.items() if kind.startswith(beginning)), OTHER)
