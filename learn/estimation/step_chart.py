"""Draws a training step's memory over time as SVG: what is allocated by kind, what is reserved, phases, the peak.

Start reading at `timeline_svg`; `columns_of` reduces a replay's moments to what a page can show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from featurize.device_spec import DeviceSpec
from featurize.library_calls import CUBLAS
from learn.traced import TracedStep

MIB = 2**20
# Part -> (block kinds of the trace, CSS class), bottom to top.
BANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "parameters": (("parameter",), "k1"),
    "optimizer state": (("optimizer_state",), "k2"),
    "buffers and batch": (("buffer", "batch"), "k3"),
    "gradients": (("gradient",), "k4"),
    "activations": (("activation",), "k5"),
    "temporaries": (("temporary",), "k6"),
    "workspace": (("workspace",), "k7"),
}
COLOURS = {name: css for name, (_, css) in BANDS.items()} | {"fragmentation": "k8", "context": "k0"}

_WIDTH, _HEIGHT = 1000.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 14.0, 62.0, 40.0
_MOST_COLUMNS = 640
_LEAST_PHASE_LABEL = 52.0  # pixels that a phase's name takes
_LETTER, _MOST_LETTERS = 7.2, 125  # width of one, in bold; what the picture is wide
_OFF_SCALE = 2.5  # a card this many times the peak would squash the picture: it is told instead of drawn
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
        return _HEIGHT - _BOTTOM - mib / self.top_mib * (_HEIGHT - _TOP - _BOTTOM)

    def x(self, moment: float) -> float:
        return _LEFT + moment / max(self.moments, 1) * (_WIDTH - _LEFT - _RIGHT)


def columns_of(traced: TracedStep, most: int = _MOST_COLUMNS) -> list[Column]:
    """At most about `most` columns, never across phases, the peak among them. Needs the replay's timeline."""
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


def timeline_svg(traced: TracedStep, device: DeviceSpec, peak_text: str) -> str:
    """The picture. What is drawn lies above the context, so that the scale is the process's memory on the card."""
    columns = columns_of(traced)
    context = traced.breakdown["context"]
    highest = context + max((column.reserved for column in columns), default=0) / MIB
    off_scale = device.memory_mib > _OFF_SCALE * highest
    top_mib = 1.15 * highest if off_scale else 1.06 * max(highest, device.memory_mib)
    scale = _Scale(top_mib, sum(column.moments for column in columns))
    edges = [0]
    for column in columns:
        edges.append(edges[-1] + column.moments)
    xs = [scale.x(edge) for edge in edges]

    drawn = [_phases(columns, xs), _grid(scale)]
    below = [context] * len(columns)
    drawn.append(_band(xs, [scale.y(0)] * len(columns), [scale.y(context)] * len(columns), "k0", "context"))
    for i, (name, (_, css)) in enumerate(BANDS.items()):
        above = [low + column.parts[i] / MIB for low, column in zip(below, columns, strict=True)]
        drawn.append(_band(xs, [scale.y(v) for v in below], [scale.y(v) for v in above], css, name))
        below = above
    reserved = [context + column.reserved / MIB for column in columns]
    drawn.append(_band(xs, [scale.y(v) for v in below], [scale.y(v) for v in reserved], "k8", "reserved, not in use"))
    drawn.append(f'<path class="reserved" d="{_steps(xs, [scale.y(v) for v in reserved])}"/>')
    drawn.append(_capacity(scale, device, highest, off_scale))
    drawn.append(_peak(columns, xs, below, scale, peak_text))
    label = f"Memory of the training step on {device.name}, {highest:,.0f} MiB at its peak"
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(label)}">'
        + "".join(drawn)
        + "</svg>"
    )


def _phases(columns: Sequence[Column], xs: Sequence[float]) -> str:
    """A shade and a name for each phase, and where the steps begin."""
    bottom = _HEIGHT - _BOTTOM
    found, start = [], 0
    steps: dict[int, list[float]] = {}
    for i, column in enumerate(columns):
        steps.setdefault(column.step, [xs[i], xs[i]])[1] = xs[i + 1]
        last = i + 1 == len(columns)
        if not last and (columns[i + 1].step, columns[i + 1].phase) == (column.step, column.phase):
            continue
        left, right = xs[start], xs[i + 1]
        css = _PHASE_CSS.get(column.phase, "p0")
        said = column.phase if column.step == 0 else f"{column.phase}, step {column.step}"
        found.append(
            f'<rect class="{css}" x="{left:.1f}" y="{_TOP:g}" width="{right - left:.1f}" height="{bottom - _TOP:g}">'
            f"<title>{escape(said)}</title></rect>"
        )
        if right - left >= _LEAST_PHASE_LABEL:
            found.append(f'<text class="phase" x="{(left + right) / 2:.1f}" y="{_TOP - 8:g}">{column.phase}</text>')
        start = i + 1
    for step, (left, right) in steps.items():
        if step:
            found.append(f'<path class="edge" d="M{left:.1f} {_TOP - 22:g}V{bottom + 6:g}"/>')
            found.append(f'<text class="step" x="{(left + right) / 2:.1f}" y="{bottom + 20:g}">step {step}</text>')
    found.append(
        f'<text class="axis" x="{_WIDTH - _RIGHT:g}" y="{_HEIGHT - 6:g}" text-anchor="end">'
        "allocations and frees, in order →</text>"
    )
    return "".join(found)


def _grid(scale: _Scale) -> str:
    unit, name = (1024.0, "GiB") if scale.top_mib >= 4096 else (1.0, "MiB")
    step = _nice(scale.top_mib / unit / 5)
    found = [f'<text class="axis" x="{_LEFT - 8:g}" y="{_TOP - 8:g}" text-anchor="end">{name}</text>']
    value = 0.0
    while value * unit <= scale.top_mib:
        y = scale.y(value * unit)
        found.append(f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{_WIDTH - _RIGHT:g}"/>')
        found.append(f'<text class="axis" x="{_LEFT - 8:g}" y="{y + 4:.1f}" text-anchor="end">{value:,.6g}</text>')
        value += step
    return "".join(found)


def _nice(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value)


def _capacity(scale: _Scale, device: DeviceSpec, highest: float, off_scale: bool) -> str:
    said = f"{device.name}: {device.memory_mib:,.0f} MiB"
    if off_scale:
        times = device.memory_mib / highest
        return (
            f'<text class="capacity" x="{_LEFT + 6:g}" y="{_TOP + 16:g}">'
            f"↑ {escape(said)}, {times:.1f} times the peak</text>"
        )
    y = scale.y(device.memory_mib)
    over = ""
    if highest > device.memory_mib:
        over = (
            f'<rect class="over" x="{_LEFT:g}" y="{_TOP:g}" width="{_WIDTH - _LEFT - _RIGHT:g}" '
            f'height="{y - _TOP:.1f}"/>'
        )
    # Under the line where there is no room above it.
    at = y - 6 if y - _TOP > 18 else y + 16
    return (
        f'{over}<path class="limit" d="M{_LEFT:g} {y:.1f}H{_WIDTH - _RIGHT:g}"/>'
        f'<text class="capacity" x="{_LEFT + 6:g}" y="{at:.1f}">{escape(said)}</text>'
    )


def _peak(columns: Sequence[Column], xs: Sequence[float], allocated: Sequence[float], scale: _Scale, text: str) -> str:
    at = next((i for i, column in enumerate(columns) if column.is_peak), None)
    if at is None:
        return ""
    x, y = (xs[at] + xs[at + 1]) / 2, scale.y(allocated[at])
    full = f"Peak, {allocated[at]:,.0f} MiB in use with the context: {text}"
    shown = full if len(full) <= _MOST_LETTERS else full[: _MOST_LETTERS - 1] + "…"
    half = len(shown) * _LETTER / 2
    centre = min(max(x, _LEFT + half), _WIDTH - _RIGHT - half)
    return (
        f'<path class="leader" d="M{x:.1f} 22V{y:.1f}"/><circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4.5">'
        f'<title>{escape(full)}</title></circle><text class="peak" x="{centre:.1f}" y="15" text-anchor="middle">'
        f"{escape(shown)}<title>{escape(full)}</title></text>"
    )


def _band(xs: Sequence[float], low: Sequence[float], high: Sequence[float], css: str, name: str) -> str:
    """The area between two step curves; nothing where it has no height anywhere."""
    if all(abs(a - b) < 0.05 for a, b in zip(low, high, strict=True)):
        return ""
    back = [f"V{low[-1]:.1f}"]
    for i in range(len(low) - 1, 0, -1):
        if abs(low[i - 1] - low[i]) >= 0.05:
            back.append(f"H{xs[i]:.1f}V{low[i - 1]:.1f}")
    back.append(f"H{xs[0]:.1f}Z")
    return f'<path class="{css}" d="{_steps(xs, high)}{"".join(back)}"><title>{escape(name)}</title></path>'


def _steps(xs: Sequence[float], ys: Sequence[float]) -> str:
    path = [f"M{xs[0]:.1f} {ys[0]:.1f}"] if ys else []
    for i in range(1, len(ys)):
        if abs(ys[i] - ys[i - 1]) >= 0.05:
            path.append(f"H{xs[i]:.1f}V{ys[i]:.1f}")
    if ys:
        path.append(f"H{xs[-1]:.1f}")
    return "".join(path)
