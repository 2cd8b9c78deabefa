"""Draws replays as SVG: makespans with their intervals, and distributions over the jobs.

Start reading at `makespan_svg` and `distribution_svg`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from conf.reports.charts import LETTER_PX, Axis, Margins, Plot, Svg
from farm.replaying.crossing import Interval

_ROW = 20.0  # pixels
_MARGINS = Margins(height=300.0, left=52.0, top=16.0, bottom=46.0)
_POINTS = 200  # of a curve at most


def makespan_svg(rows: Sequence[tuple[str, str, Interval]], unit: str) -> Svg:
    """Draw one dot a row with its interval; `rows`: name, colour class, value. The axis begins at 0."""
    left = max(len(name) for name, _, _ in rows) * LETTER_PX + 14
    most = max(value.mean + (value.half or 0.0) for _, _, value in rows) * 1.04
    height = 34.0 + _ROW * len(rows) + 24.0
    margins = Margins(width=left + 480.0, height=height, left=left, right=60.0, top=10.0, bottom=40.0)
    plot = Plot(Axis.within(0.0, most, 6), Axis(len(rows), 0.0), margins)
    plot.ticks_below(f"{unit} →", lines=True)
    for place, (name, css, value) in enumerate(rows, start=1):
        half, y = value.half or 0.0, place - 0.5
        plot.text("name", left - 8, plot.y(y) + 4, name, "end")
        plot.line(f"line {css}", [(value.mean - half, y), (value.mean + half, y)])
        plot.dot(f"full {css}", value.mean, y, 4.5, f"{name}: {value.mean:.2f} ± {half:.2f} {unit}")
        plot.text("value", plot.x(value.mean + half) + 8, plot.y(y) + 4, f"{value.mean:.2f}", "start")
    return plot.picture(f"Makespan in {unit} by policy and estimator")


def distribution_svg(curves: Mapping[str, tuple[str, Sequence[float]]], unit: str) -> Svg:
    """Draw the share of jobs below a value, over the logarithm of the value; `curves`: name -> colour class, values."""
    known = {name: sorted(v for v in values if not math.isnan(v)) for name, (_, values) in curves.items()}
    decades = math.ceil(math.log10(max([2.0, *(value for values in known.values() for value in values)])))
    least = 10.0 ** min(0, decades - 4)  # what is shorter than a ten-thousandth of the longest lies on the axis
    plot = Plot(Axis.decades(least, 10.0**decades), Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0)), _MARGINS)
    plot.grid([f"{25 * k} %" for k in range(5)])
    plot.ticks_below(f"{unit}, logarithmic →", lines=True)
    for name, values in known.items():
        ranks = sorted({round(k * (len(values) - 1) / _POINTS) for k in range(_POINTS + 1)}) if values else []
        points = [(max(least, values[rank]), (rank + 1) / len(values)) for rank in ranks]
        plot.line(f"line {curves[name][0]}", points, name)
    return plot.picture(f"Share of jobs below a time in {unit}: {', '.join(curves)}")
