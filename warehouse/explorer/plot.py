"""Telemetry of one run over time, as an SVG. Start reading at `over_time`."""

from __future__ import annotations

from collections.abc import Sequence

from conf.reports.page_text import figure
from conf.reports.svg import Drawing, PlotArea, Svg, nice_step

_AREA = PlotArea(width=560, height=170, left=62, right=14, top=14, bottom=30)
_LINES = 3  # of the grid, at least
_TICKS = 5


def over_time(
    name: str, points: Sequence[tuple[float, float]], window: tuple[float, float] | None = None
) -> Svg | None:  # fmt: skip
    """Return the picture of one metric; None with fewer than two points.

    Args:
        name: The metric's column, with its unit.
        points: (time in ms, value), in the order of time.
        window: Begin and end of the measured window in ms, which is shaded.
    """
    if len(points) < 2:
        return None
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1e-9)
    low, high = min(0.0, *(value for _, value in points)), max(value for _, value in points)
    step = nice_step(max(high - low, 1e-9) / _LINES)
    top = low + step * max(1, -(-(high - low) // step))
    drawing = Drawing()

    def x(t_ms: float) -> float:
        return _AREA.x(min(1.0, max(0.0, (t_ms - first) / (last - first))))

    def y(value: float) -> float:
        return _AREA.y((value - low) / (top - low))

    if window is not None:
        left, right = x(window[0]), x(window[1])
        drawing.rect("window", left, _AREA.top, max(right - left, 1.0), _AREA.bottom_edge - _AREA.top, title="window")
    line = low
    while line <= top + 1e-9 * step:
        _AREA.grid_line(drawing, y(line), figure(line))
        line += step
    tick_s = nice_step((last - first) / 1e3 / _TICKS)
    count = int((last - first) / 1e3 / tick_s)
    for tick in range(count + 1):
        at = first + 1e3 * tick * tick_s
        drawing.text("axis", x(at), _AREA.bottom_edge + 18, f"{figure(tick * tick_s)} s")
    path = "".join(f"{'L' if at else 'M'}{x(t_ms):.1f} {y(value):.1f}" for at, (t_ms, value) in enumerate(points))
    drawing.path("line", path)
    return drawing.svg(_AREA.width, _AREA.height, f"{name} over time, up to {figure(high)}", css="drawn")
