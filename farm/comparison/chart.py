"""Draws the difference of a label over its size before, a dot a configuration. Start reading at `shift_chart`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from conf.reports.svg import Drawing, PlotArea, Svg
from farm.comparison.pairs import Pair
from farm.comparison.view import figure, percent

_AREA = PlotArea(width=560.0, height=250.0, left=66.0, right=16.0, top=14.0, bottom=40.0)


def shift_chart(
    pairs: Sequence[Pair], label: str, unit: str, css: Mapping[str, str], tolerance: float
) -> Svg | None:  # fmt: skip
    """Draw the shift of each pair over its label before; None where no pair has figures.

    Args:
        pairs: configurations of both sides.
        label: the column that is compared.
        unit: of the label.
        css: family -> class of its dots.
        tolerance: relative; dashed lines show it.
    """
    dots: list[tuple[Pair, float, float]] = []
    for pair in pairs:
        size, shift = pair.before.labels[label], pair.shift(label)
        if shift is not None and size is not None and size > 0:
            dots.append((pair, size, shift))
    if not dots:
        return None
    sizes = [size for _, size, _ in dots]
    low, high = math.log10(min(sizes)) - 0.05, math.log10(max(sizes)) + 0.05
    reach = 1.15 * max([abs(shift) for _, _, shift in dots] + [1.3 * tolerance, 1e-4])

    def x(size: float) -> float:
        return _AREA.x((math.log10(size) - low) / (high - low))

    def y(shift: float) -> float:
        return _AREA.y(0.5 + shift / reach / 2)

    drawing = Drawing()
    for tick in _ticks(reach):
        _AREA.grid_line(drawing, y(tick), _percent(tick))
    drawing.path("zero", _AREA.across(y(0)))
    for edge in (tolerance, -tolerance):
        drawing.path("limit", _AREA.across(y(edge)))
    for size in _decades(min(sizes), max(sizes)):
        drawing.text("axis", x(size), _AREA.bottom_edge + 18, f"{size:,g}")
    drawing.text("axis", (_AREA.left + _AREA.right_edge) / 2, _AREA.height - 5, f"before, {unit}")
    for pair, size, shift in dots:
        title = f"{pair.config_hash} ({pair.before.family}): {figure(size)} {unit}, {percent(shift)}"
        drawing.circle(f"dot {css[pair.before.family]}", x(size), y(shift), 3.6, title)
    words = f"Relative difference of {label} over its size before, {len(dots):,} configurations"
    return drawing.svg(_AREA.width, _AREA.height, words)


def _ticks(reach: float) -> list[float]:
    """Return round figures on both sides of zero, two or three on each."""
    power = 10.0 ** math.floor(math.log10(reach / 2))
    step = max(m * power for m in (1, 2, 5) if m * power <= reach / 2)
    count = math.floor(reach / step + 1e-9)
    return [k * step for k in range(-count, count + 1)]


def _percent(tick: float) -> str:
    return "0" if abs(tick) < 1e-12 else f"{100 * tick:+.4g} %"


def _decades(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 of each decade between the two, thinned where there are many; the ends where there are none."""
    sizes = [
        m * 10.0**e
        for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for m in (1, 2, 5)
        if low <= m * 10.0**e <= high
    ]
    if len(sizes) > 8:
        sizes = [size for size in sizes if math.isclose(math.log10(size) % 1, 0, abs_tol=1e-9)]
    if len(sizes) > 1:
        return sizes
    return sorted({float(figure(low).replace(",", "")), float(figure(high).replace(",", ""))})
