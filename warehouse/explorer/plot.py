"""The explorer's pictures as SVG: telemetry over time, estimates against runs, columns, histograms.

Start reading at `over_time`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from conf.reports.page_text import figure
from conf.reports.svg import Anchor, Drawing, PlotArea, Svg, nice_step

_AREA = PlotArea(width=560, height=170, left=62, right=14, top=14, bottom=30)
_SQUARE = PlotArea(width=420, height=380, left=62, right=30, top=30, bottom=46)
_WIDEST_COLUMN = 46.0  # pixels
_LINES = 3  # of the grid, at least
_TICKS = 5
_BINS_OF_A_DECADE, _RATIO_BINS = 8, 20
LOG_BIN = f"floor(log10({{}}) * {_BINS_OF_A_DECADE})"  # SQL of a value's bin in a histogram
RATIO_BIN = f"least(floor({{}} * {_RATIO_BINS}), {_RATIO_BINS - 1})"
_MOST_BINS, _FEWEST_BINS, _MOST_TICKS = 40, 8, 8
SOURCE_COLOURS = {"measured": "k4", "simulated": "k5", "imported": "k1"}


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


def against(
    name: str,
    points: Sequence[tuple[float, float, str]],
    *,
    is_log: bool,
    axes: tuple[str, str] = ("in the run", "estimate"),
) -> Svg | None:
    """Return estimates against measurements, with the line on which both are equal; None without points.

    Args:
        name: The target, with its unit.
        points: (measured, estimated, whose).
        is_log: Whether both axes are logarithmic; figures that are not positive are left out then.
        axes: Names of both axes, the measured one first.
    """
    used = [point for point in points if not is_log or min(point[0], point[1]) > 0]
    if not used:
        return None
    values = [value for point in used for value in point[:2]]
    low, high, ticks = _decades(min(values), max(values)) if is_log else _from_zero(max(values))

    def share(value: float) -> float:
        return math.log(value / low) / math.log(high / low) if is_log else value / high

    drawing = Drawing()
    for tick in ticks:
        _SQUARE.grid_line(drawing, _SQUARE.y(share(tick)), figure(tick))
        drawing.text("axis", _SQUARE.x(share(tick)), _SQUARE.bottom_edge + 18, figure(tick))
    diagonal = f"M{_SQUARE.x(0):.1f} {_SQUARE.y(0):.1f}L{_SQUARE.x(1):.1f} {_SQUARE.y(1):.1f}"
    drawing.path("limit", diagonal, title="estimate and measurement are equal")
    for known, estimated, whose in used:
        title = f"{whose}: {figure(estimated)} estimated, {figure(known)} in the run"
        drawing.circle("dot k1", _SQUARE.x(share(known)), _SQUARE.y(share(estimated)), 3, title)
    drawing.text("axis", _SQUARE.x(0.5), _SQUARE.height - 4, axes[0])
    drawing.text("axis", 4, 12, axes[1], "start")
    label = f"{name}: estimates of {len(used)} runs against the runs' own figures"
    return drawing.svg(_SQUARE.width, _SQUARE.height, label, css="drawn")


def columns_chart(name: str, values: Sequence[tuple[str, float]]) -> Svg | None:
    """Return a column for each (name, value), from left to right; None without a value above 0."""
    highest = max((value for _, value in values), default=0.0)
    if highest <= 0:
        return None
    step = nice_step(highest / _LINES)
    top = step * math.ceil(highest / step - 1e-9)
    drawing = Drawing()
    for line in range(round(top / step) + 1):
        _AREA.grid_line(drawing, _AREA.y(line * step / top), figure(line * step))
    width = 1 / len(values)
    for at, (column, value) in enumerate(values):
        left, right, y = _AREA.x((at + 0.1) * width), _AREA.x((at + 0.9) * width), _AREA.y(value / top)
        right = min(right, left + _WIDEST_COLUMN)
        drawing.rect("k1", left, y, right - left, _AREA.bottom_edge - y, title=f"{column}: {figure(value)}")
    for at in sorted({0, len(values) - 1}):
        anchor: Anchor = "start" if at == 0 else "end"
        place = _AREA.x(at * width) if at == 0 else _AREA.x(1)
        drawing.text("axis", place, _AREA.bottom_edge + 18, values[at][0], anchor)
    return drawing.svg(_AREA.width, _AREA.height, f"{name}, up to {figure(highest)}", css="drawn")


def histogram(name: str, counts: Mapping[str, Mapping[int, int]], *, is_log: bool) -> Svg:
    """Return how many runs of each source lie in each bin, as columns stacked by source.

    Args:
        name: The label, with its unit.
        counts: Source -> place of a bin -> runs, binned by `LOG_BIN` or `RATIO_BIN`; at least one run.
        is_log: Which of the two.
    """
    places = sorted({place for by_place in counts.values() for place in by_place})
    first, last = (places[0], places[-1]) if is_log else (0, _RATIO_BINS - 1)
    missing = max(0, _FEWEST_BINS - (last - first + 1))
    first, last = first - missing // 2, last + missing - missing // 2
    per = max(1, math.ceil((last - first + 1) / _MOST_BINS))  # bins that are drawn as one
    merged: dict[str, Counter[int]] = {source: Counter() for source in sorted(counts)}
    for source, by_place in counts.items():
        for place, runs in by_place.items():
            merged[source][(place - first) // per] += runs
    bins = (last - first) // per + 1
    sums = [sum(one[place] for one in merged.values()) for place in range(bins)]
    step = max(1.0, nice_step(max(sums) / _LINES))
    top = step * math.ceil(max(sums) / step)
    drawing = Drawing()
    for line in range(round(top / step) + 1):
        _AREA.grid_line(drawing, _AREA.y(line * step / top), figure(line * step))

    def edge(place: float) -> float:
        at = first + place * per
        return 10 ** (at / _BINS_OF_A_DECADE) if is_log else at / _RATIO_BINS

    low = [0] * bins
    for source, by_place in merged.items():
        for place, runs in sorted(by_place.items()):
            left, right = _AREA.x(place / bins), _AREA.x((place + 1) / bins)
            y, base = _AREA.y((low[place] + runs) / top), _AREA.y(low[place] / top)
            title = f"{figure(edge(place))} to {figure(edge(place + 1))}: {runs:,} {source}"
            drawing.rect(SOURCE_COLOURS.get(source, "k0"), left + 0.5, y, right - left - 1, base - y, title=title)
            low[place] += runs
    for value in _log_ticks(edge(0), edge(bins)) if is_log else (0.0, 0.25, 0.5, 0.75, 1.0):
        at = math.log10(value) * _BINS_OF_A_DECADE if is_log else value * _RATIO_BINS
        drawing.text("axis", _AREA.x((at - first) / per / bins), _AREA.bottom_edge + 18, figure(value))
    label = f"{name} of {sum(sums):,} runs, from {figure(edge(0))} to {figure(edge(bins))}"
    return drawing.svg(_AREA.width, _AREA.height, label, css="drawn")


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round figures from `low` to `high` for a logarithmic axis, few enough to stand side by side."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors, stride in (((1, 2, 5), 1), ((1,), 1), ((1,), 2), ((1,), 4)):
        powers = range(first, last + 1, stride)
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) <= _MOST_TICKS:
            break
    return ticks[:_MOST_TICKS]


def _decades(least: float, most: float) -> tuple[float, float, list[float]]:
    """Return the ends of a logarithmic axis and its ticks: powers of ten, with 2 and 5 where there are few."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most) + 1e-9)
    last = max(last, first + 1)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last) for factor in factors] + [10.0**last]
    return 10.0**first, 10.0**last, ticks


def _from_zero(most: float) -> tuple[float, float, list[float]]:
    step = nice_step(max(most, 1e-9) / _TICKS)
    count = math.ceil(most / step - 1e-9) or 1
    return 0.0, count * step, [step * tick for tick in range(count + 1)]
