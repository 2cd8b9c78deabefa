"""Draws the layouts of a plan as SVG: memory over throughput, the best of each mesh, and the frontier.

Start reading at `plan_svg`.
"""

from __future__ import annotations

from conf.reports.svg import LETTER_PX, Drawing, PlotArea, Svg, nice_step
from learn.planning.rows import LayoutPlan, PlanRow

DOT, BEST, FRONTIER = "k3", "k1", "k6"  # colour classes
_AREA = PlotArea(width=1000.0, height=440.0, left=66.0, right=24.0, top=30.0, bottom=46.0)
_GIB = 1024.0
_RADIUS, _DOT = 6.0, 3.5
_LINE = 14.0  # pixels that a label is high


class _Scale:
    """Samples a second -> x, MiB -> y. Both axes begin at 0."""

    def __init__(self, done: LayoutPlan) -> None:
        self.most_rate = 1.08 * max(row.samples_per_s or 0.0 for row in done.fitting)
        self.most_mib = 1.06 * done.limit_mib

    def x(self, row: PlanRow) -> float:
        return _AREA.x((row.samples_per_s or 0.0) / self.most_rate)

    def y(self, mib: float) -> float:
        return _AREA.y(mib / self.most_mib)


def plan_svg(done: LayoutPlan) -> Svg:
    """Return the picture of the rows that fit; there is at least one."""
    drawing, scale = Drawing(), _Scale(done)
    _axes(drawing, scale)
    y = scale.y(done.limit_mib)
    drawing.path("limit", _AREA.across(y))
    drawing.text("capacity", _AREA.left + 6, y - 6, f"{done.device}: {done.limit_mib:,.0f} MiB", "start")
    _frontier(drawing, scale, done)
    best, frontier = set(done.best_of_meshes), set(done.frontier)
    for row in done.fitting:
        if row not in best:
            css = FRONTIER if row in frontier else DOT
            drawing.circle(f"dot {css}", scale.x(row), scale.y(row.needed_mib), _DOT, _text(row))
    for row in reversed(done.best_of_meshes):
        css = FRONTIER if row in frontier else BEST
        drawing.circle(f"full {css}", scale.x(row), scale.y(row.needed_mib), _RADIUS, _text(row))
    _labels(drawing, scale, done)
    quickest = done.fitting[0]
    label = f"Memory of a rank over samples a second; the most: {_text(quickest)}"
    return drawing.svg(_AREA.width, _AREA.height, label, css="timeline")


def _axes(drawing: Drawing, scale: _Scale) -> None:
    step = nice_step(scale.most_mib / _GIB / 5)
    value = 0.0
    while value * _GIB <= scale.most_mib:
        _AREA.grid_line(drawing, scale.y(value * _GIB), f"{value:,.6g}")
        value += step
    drawing.text("axis", _AREA.left - 8, _AREA.top - 10, "GiB", "end")
    step = nice_step(scale.most_rate / 6)
    value = 0.0
    while value <= scale.most_rate:
        drawing.text("axis", _AREA.x(value / scale.most_rate), _AREA.bottom_edge + 18, f"{value:,.6g}")
        value += step
    drawing.text("axis", _AREA.right_edge, _AREA.height - 6, "samples a second of all ranks →", "end")


def _frontier(drawing: Drawing, scale: _Scale, done: LayoutPlan) -> None:
    """Draw the frontier as steps: for less memory, samples a second fall to the next row's."""
    points = [(scale.x(row), scale.y(row.needed_mib)) for row in done.frontier]
    first, *others = points
    steps = [f"M{first[0]:.1f} {first[1]:.1f}", *(f"V{y:.1f}H{x:.1f}" for x, y in others)]
    drawing.path(f"line {FRONTIER}", "".join(steps))


def _labels(drawing: Drawing, scale: _Scale, done: LayoutPlan) -> None:
    """Name the best of each mesh where there is room; all have their name as a tooltip."""
    taken: list[tuple[float, float, float, float]] = []
    limit = scale.y(done.limit_mib)
    for row in done.best_of_meshes:
        width = len(row.mesh) * LETTER_PX
        x, y = scale.x(row) - _RADIUS - 4, scale.y(row.needed_mib) + 4
        if y < limit + _LINE:  # clear of the line of the card
            y = limit + _LINE + 4
        left, anchored_right = x - width, True
        if left < _AREA.left:
            left, anchored_right = scale.x(row) + _RADIUS + 4, False
        box = (left, y - _LINE, left + width, y)
        if any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
            continue
        taken.append(box)
        drawing.text("peak", x if anchored_right else left, y, row.mesh, "end" if anchored_right else "start")


def _text(row: PlanRow) -> str:
    return f"{row.mesh}: {row.step_text}, {row.samples_per_s or 0.0:,.1f} samples/s, {row.needed_mib:,.0f} MiB"
