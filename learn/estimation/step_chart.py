"""Draws a training step's memory over time as SVG: what is allocated by kind, what is reserved, phases, the peak.

Start reading at `timeline_svg`; `columns_of` reduces a replay's moments to what a page can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conf.reports.svg import Drawing, PlotArea, Svg, nice_step
from conf.units import MIB
from featurize.device_spec import DeviceSpec
from featurize.library_calls import CUBLAS
from featurize.step_trace import BUCKET, COMMUNICATION, GATHERED, MASTER, UNREDUCED
from learn.traced import TracedStep

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

_AREA = PlotArea(width=1000.0, height=420.0, left=66.0, right=14.0, top=62.0, bottom=40.0)
_MOST_COLUMNS = 640
_LEAST_PHASE_LABEL = 52.0  # pixels that a phase's name takes
_LETTER, _MOST_LETTERS = 7.2, 125  # width of one, in bold; what the picture is wide
_OFF_SCALE = 2.5  # a card with this many times the peak would squash the picture: text states its size instead
_PHASE_CSS = {"setup": "p0", "forward": "p1", "backward": "p2", "optimizer": "p3"}


class Column(NamedTuple):
    """One column of the picture: the moment of a few neighbours when most was allocated. Bytes.

    moments   how many it stands for
    parts     allocated, by `BANDS`, blocks' rounding included; reserved is the most of any of its moments
    """

    step: int
    phase: str
    moments: int
    parts: tuple[int, ...]
    reserved: int
    is_peak: bool


@dataclass(frozen=True)
class _Scale:
    """MiB -> y, moments -> x, in the picture's units."""

    top_mib: float
    moments: int

    def y(self, mib: float) -> float:
        return _AREA.y(mib / self.top_mib)

    def x(self, moment: float) -> float:
        return _AREA.x(moment / max(self.moments, 1))


def columns_of(traced: TracedStep, most: int = _MOST_COLUMNS) -> list[Column]:
    """Return about `most` columns at most, none across phases, the peak among them. Needs the replay's timeline."""
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
        passing = block.call is not None and block.call.kind != CUBLAS  # a workspace is gone by the next moment
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


def timeline_svg(traced: TracedStep, device: DeviceSpec, peak_text: str) -> Svg:
    """Return the picture. Everything lies above the context, so the scale is the process's memory on the card."""
    columns = columns_of(traced)
    context = traced.breakdown["context"] + traced.communication_mib
    highest = context + max((column.reserved for column in columns), default=0) / MIB
    off_scale = device.memory_mib > _OFF_SCALE * highest
    top_mib = 1.15 * highest if off_scale else 1.06 * max(highest, device.memory_mib)
    scale = _Scale(top_mib, sum(column.moments for column in columns))
    edges = [0]
    for column in columns:
        edges.append(edges[-1] + column.moments)
    xs = [scale.x(edge) for edge in edges]

    drawing = Drawing()
    _phases(drawing, columns, xs)
    _grid(drawing, scale)
    below = [context] * len(columns)
    _band(drawing, xs, [scale.y(0)] * len(columns), [scale.y(context)] * len(columns), "k0", "context")
    for i, (name, (_, css)) in enumerate(BANDS.items()):
        above = [low + column.parts[i] / MIB for low, column in zip(below, columns, strict=True)]
        _band(drawing, xs, [scale.y(v) for v in below], [scale.y(v) for v in above], css, name)
        below = above
    reserved = [context + column.reserved / MIB for column in columns]
    _band(drawing, xs, [scale.y(v) for v in below], [scale.y(v) for v in reserved], "k8", "reserved, not in use")
    drawing.path("reserved", _steps(xs, [scale.y(v) for v in reserved]))
    _capacity(drawing, scale, device, highest, off_scale)
    _peak(drawing, columns, xs, below, scale, peak_text)
    label = f"Memory of the training step on {device.name}, {highest:,.0f} MiB at its peak"
    return drawing.svg(_AREA.width, _AREA.height, label, css="timeline")


def _phases(drawing: Drawing, columns: Sequence[Column], xs: Sequence[float]) -> None:
    """Draw a shade and a name for each phase, and where the steps begin."""
    top, bottom = _AREA.top, _AREA.bottom_edge
    start = 0
    steps: dict[int, list[float]] = {}
    for i, column in enumerate(columns):
        steps.setdefault(column.step, [xs[i], xs[i]])[1] = xs[i + 1]
        last = i + 1 == len(columns)
        if not last and (columns[i + 1].step, columns[i + 1].phase) == (column.step, column.phase):
            continue
        left, right = xs[start], xs[i + 1]
        title = column.phase if column.step == 0 else f"{column.phase}, step {column.step}"
        drawing.rect(_PHASE_CSS.get(column.phase, "p0"), left, top, right - left, bottom - top, title=title)
        if right - left >= _LEAST_PHASE_LABEL:
            drawing.text("phase", (left + right) / 2, top - 8, column.phase)
        start = i + 1
    for step, (left, right) in steps.items():
        if step:
            drawing.path("edge", f"M{left:.1f} {top - 22:g}V{bottom + 6:g}")
            drawing.text("step", (left + right) / 2, bottom + 20, f"step {step}")
    drawing.text("axis", _AREA.right_edge, _AREA.height - 6, "allocations and frees, in order →", "end")


def _grid(drawing: Drawing, scale: _Scale) -> None:
    unit, name = (1024.0, "GiB") if scale.top_mib >= 4096 else (1.0, "MiB")
    step = nice_step(scale.top_mib / unit / 5)
    drawing.text("axis", _AREA.left - 8, _AREA.top - 8, name, "end")
    value = 0.0
    while value * unit <= scale.top_mib:
        _AREA.grid_line(drawing, scale.y(value * unit), f"{value:,.6g}")
        value += step


def _capacity(drawing: Drawing, scale: _Scale, device: DeviceSpec, highest: float, off_scale: bool) -> None:
    label, x = f"{device.name}: {device.memory_mib:,.0f} MiB", _AREA.left + 6
    if off_scale:
        ratio = device.memory_mib / highest
        drawing.text("capacity", x, _AREA.top + 16, f"↑ {label}, {ratio:.1f} times the peak", "start")
        return
    y = scale.y(device.memory_mib)
    if highest > device.memory_mib:
        drawing.rect("over", _AREA.left, _AREA.top, _AREA.right_edge - _AREA.left, y - _AREA.top)
    drawing.path("limit", _AREA.across(y))
    # Under the line where there is no room above it.
    drawing.text("capacity", x, y - 6 if y - _AREA.top > 18 else y + 16, label, "start")


def _peak(
    drawing: Drawing, columns: Sequence[Column], xs: Sequence[float], in_use: Sequence[float], scale: _Scale, text: str
) -> None:  # fmt: skip
    at = next((i for i, column in enumerate(columns) if column.is_peak), None)
    if at is None:
        return
    x, y = (xs[at] + xs[at + 1]) / 2, scale.y(in_use[at])
    full = f"Peak, {in_use[at]:,.0f} MiB in use with the context: {text}"
    shown = full if len(full) <= _MOST_LETTERS else full[: _MOST_LETTERS - 1] + "…"
    half = len(shown) * _LETTER / 2
    drawing.path("leader", f"M{x:.1f} 22V{y:.1f}")
    drawing.circle("peak", x, y, 4.5, full)
    drawing.text("peak", min(max(x, _AREA.left + half), _AREA.right_edge - half), 15, shown, title=full)


def _band(
    drawing: Drawing, xs: Sequence[float], low: Sequence[float], high: Sequence[float], css: str, name: str
) -> None:  # fmt: skip
    """Draw the area between two step curves; nothing where it has no height anywhere."""
    if all(abs(a - b) < 0.05 for a, b in zip(low, high, strict=True)):
        return
    back = [f"V{low[-1]:.1f}"]
    for i in range(len(low) - 1, 0, -1):
        if abs(low[i - 1] - low[i]) >= 0.05:
            back.append(f"H{xs[i]:.1f}V{low[i - 1]:.1f}")
    back.append(f"H{xs[0]:.1f}Z")
    drawing.path(css, f"{_steps(xs, high)}{''.join(back)}", name)


def _steps(xs: Sequence[float], ys: Sequence[float]) -> str:
    path = [f"M{xs[0]:.1f} {ys[0]:.1f}"] if ys else []
    for i in range(1, len(ys)):
        if abs(ys[i] - ys[i - 1]) >= 0.05:
            path.append(f"H{xs[i]:.1f}V{ys[i]:.1f}")
    if ys:
        path.append(f"H{xs[-1]:.1f}")
    return "".join(path)
