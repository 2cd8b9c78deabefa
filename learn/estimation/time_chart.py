"""Where a training step's time goes, by kind of kernel, as a bar chart.

Start reading at `time_parts`, which `time_svg` draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from conf.reports.svg import Drawing, Svg

if TYPE_CHECKING:
    from featurize.kernel_model.step_time import TimedStep

OTHER, LAUNCH, INPUT = "other", "GPU waits for kernel launches", "GPU waits for input"
ARITHMETIC, STREAMS, WAITS = "k1", "k5", "k0"  # colour classes
GROUPS = {ARITHMETIC: "products, convolutions, attention", STREAMS: "other kernels", WAITS: "GPU waits"}
_LEAST_SHARE = 0.01  # of the step; a kind below it is one of the others
# Beginnings of kernels' kinds, as `featurize.kernel_model.calls` names them -> name in the chart. The first one counts.
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
    """Return what a step's time consists of: kinds of kernels, the longest first, then what the GPU waits for.

    The parts sum to `timed.step_time_ms`. What is less than 1 % of it goes into one part, "other".

    Args:
        timed: The step.
        input_ms: Its share for the input pipeline, as given to `time_step`.
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
        for name, ms in sorted(by_name.items(), key=lambda one: -one[1])
        if ms >= least_ms and name != OTHER
    ]
    parts += [TimePart(OTHER, other_ms, STREAMS)] if other_ms > 0 else []
    return parts + [TimePart(name, ms, WAITS) for name, ms in waits.items() if ms >= least_ms and ms > 0]


def time_svg(parts: Sequence[TimePart], label: str) -> Svg:
    """Return the bars, each under its name, time and share; `label` says what they show. There is at least one."""
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
    """Return one of the times that sum to `total_ms`, all with the same number of decimals."""
    decimals = 1 if total_ms >= 1000 else 2 if total_ms >= 10 else 3
    return f"{ms:,.{decimals}f}"


def _name_of(kind: str) -> str:
    if "convolution" in kind:
        direction = {"data": "input gradient", "weight": "weight gradient"}.get(kind.rpartition("_")[2], "forward")
        return f"convolutions, {direction}"
    return next((name for beginning, name in _NAMES.items() if kind.startswith(beginning)), OTHER)
