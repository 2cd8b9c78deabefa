"""Draws replays as SVG: makespans with their intervals, and distributions over the jobs.

Start reading at `makespan_svg` and `distribution_svg`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from conf.reports.page_text import figure
from conf.reports.svg import LETTER_PX, Drawing, PlotArea, Svg, nice_step
from farm.replaying.crossing import Interval

_ROW = 20.0  # pixels
_AREA = PlotArea(width=560.0, height=300.0, left=52.0, right=22.0, top=16.0, bottom=46.0)
_POINTS = 200  # of a curve at most


def makespan_svg(rows: Sequence[tuple[str, str, Interval]], unit: str) -> Svg:
    """Draw one dot a row with its interval; `rows`: name, colour class, value. The axis begins at 0."""
    left = max(len(name) for name, _, _ in rows) * LETTER_PX + 14
    most = max(value.mean + (value.half or 0.0) for _, _, value in rows) * 1.04
    area = PlotArea(
        width=left + 480.0, height=34.0 + _ROW * len(rows) + 24.0, left=left, right=60.0, top=10.0, bottom=40.0
    )
    drawing = Drawing()
    step = nice_step(most / 6)
    for k in range(int(most / step) + 1):
        x = area.x(k * step / most)
        drawing.path("grid", f"M{x:.1f} {area.top:g}V{area.bottom_edge:g}")
        drawing.text("axis", x, area.bottom_edge + 16, figure(k * step))
    drawing.text("axis", area.right_edge, area.height - 6, f"{unit} →", "end")
    for place, (name, css, value) in enumerate(rows):
        y = area.top + _ROW * (place + 0.5)
        drawing.text("name", left - 8, y + 4, name, "end")
        half = value.half or 0.0
        drawing.path(
            f"line {css}", f"M{area.x((value.mean - half) / most):.1f} {y:.1f}H{area.x((value.mean + half) / most):.1f}"
        )
        drawing.circle(
            f"full {css}", area.x(value.mean / most), y, 4.5, f"{name}: {value.mean:.2f} ± {half:.2f} {unit}"
        )
        drawing.text("value", area.x((value.mean + half) / most) + 8, y + 4, f"{value.mean:.2f}", "start")
    return drawing.svg(area.width, area.height, f"Makespan in {unit} by policy and estimator")


def distribution_svg(curves: Mapping[str, tuple[str, Sequence[float]]], unit: str) -> Svg:
    """Draw the share of jobs below a value, over the logarithm of the value; `curves`: name -> colour class, values."""
    drawing = Drawing()
    known = [value for _, values in curves.values() for value in values if value == value]
    highest = max([*known, 2.0])
    decades = math.ceil(math.log10(highest))
    least = min(0, decades - 4)  # what is shorter than a ten-thousandth of the longest lies on the axis
    for k in range(5):
        _AREA.grid_line(drawing, _AREA.y(k / 4), f"{25 * k} %")
    for power in range(least, decades + 1):
        x = _AREA.x((power - least) / (decades - least))
        drawing.path("grid", f"M{x:.1f} {_AREA.top:g}V{_AREA.bottom_edge:g}")
        drawing.text("axis", x, _AREA.bottom_edge + 16, f"{10.0**power:,.6g}")
    drawing.text("axis", _AREA.right_edge, _AREA.height - 8, f"{unit}, logarithmic →", "end")
    for name, (css, values) in curves.items():
        ordered = sorted(value for value in values if value == value)
        if ordered:
            drawing.path(f"line {css}", _curve(ordered, least, decades), name)
    return drawing.svg(_AREA.width, _AREA.height, f"Share of jobs below a time in {unit}: {', '.join(curves)}")


def _curve(ordered: Sequence[float], least: int, decades: int) -> str:
    count = len(ordered)
    ranks = sorted({round(k * (count - 1) / _POINTS) for k in range(_POINTS + 1)})
    points: list[str] = []
    for rank in ranks:
        power = max(least, math.log10(ordered[rank])) if ordered[rank] > 0 else least
        x, y = _AREA.x((power - least) / (decades - least)), _AREA.y((rank + 1) / count)
        points.append(f"{'L' if points else 'M'}{x:.1f} {y:.1f}")
    return "".join(points)
