"""The explorer's pictures of telemetry over time and of labels as histograms. Start reading at `over_time`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from conf.reports.charts import Axis, Margins, Plot, Svg
from conf.reports.page_text import figure

_MARGINS = Margins(height=170, right=14, top=14, bottom=30)
_LINES = 3  # of the grid, at least
_BINS_OF_A_DECADE, _RATIO_BINS = 8, 20
LOG_BIN = f"floor(log10({{}}) * {_BINS_OF_A_DECADE})"  # SQL of a value's bin in a histogram
RATIO_BIN = f"least(floor({{}} * {_RATIO_BINS}), {_RATIO_BINS - 1})"
_MOST_BINS, _FEWEST_BINS = 40, 8
SOURCE_COLOURS = {"measured": "k4", "simulated": "k5", "imported": "k1"}


def over_time(
    name: str, points: Sequence[tuple[float, float]], window: tuple[float, float] | None = None
) -> Svg | None:
    """Return the picture of one metric; None with fewer than two points.

    Args:
        name: The metric's column, with its unit.
        points: (time in ms, value), in the order of time.
        window: Begin and end of the measured window in ms, which is shaded; None where they are unknown.
    """
    if len(points) < 2:
        return None
    first, values = points[0][0], [value for _, value in points]
    seconds = max((points[-1][0] - first) / 1e3, 1e-12)
    plot = Plot(Axis.within(0.0, seconds), Axis.of(min(0.0, *values), max(values), _LINES), _MARGINS)
    if window is not None:
        left, right = (plot.x(min(seconds, max(0.0, (t_ms - first) / 1e3))) for t_ms in window)
        plot.rect("window", left, plot.top, max(right - left, 1.0), plot.bottom - plot.top, title="window")
    plot.grid()
    plot.ticks_below(unit=" s")
    plot.line("line", [((t_ms - first) / 1e3, value) for t_ms, value in points])
    return plot.picture(f"{name} over time, up to {figure(max(values))}", css="drawn")


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
    edges = [10 ** (at / _BINS_OF_A_DECADE) if is_log else at / _RATIO_BINS for at in range(first, last + per + 1, per)]
    runs_of: Counter[tuple[int, str]] = Counter()
    for source, by_place in counts.items():
        for place, runs in by_place.items():
            runs_of[(place - first) // per, source] += runs
    heights: Counter[int] = Counter()
    for (place, _), runs in runs_of.items():
        heights[place] += runs
    x_axis = Axis.log(edges[0], edges[-1]) if is_log else Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))
    most = max(heights.values())
    plot = Plot(x_axis, Axis.of(0.0, max(most, _LINES), _LINES), _MARGINS)
    plot.grid()
    plot.ticks_below()
    low: Counter[int] = Counter()
    for (place, source), runs in sorted(runs_of.items()):
        left, right = edges[place], edges[place + 1]
        title = f"{figure(left)} to {figure(right)}: {runs:,} {source}"
        plot.column(SOURCE_COLOURS.get(source, "k0"), left, right, low[place], low[place] + runs, title, gap=0.5)
        low[place] += runs
    label = f"{name} of {sum(heights.values()):,} runs, from {figure(edges[0])} to {figure(edges[-1])}"
    return plot.picture(label, css="drawn")
