"""Charts of a cycle's report as SVG: curves and columns over the cycles.

Start reading at `curves` and `columns`. Nothing is scaled down: a page scrolls what is too wide for it, so
that figures stay readable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conf.reports.page_text import figure
from conf.reports.svg import LETTER_PX, Drawing, PlotArea, Svg, nice_step

_AREA = PlotArea(width=560.0, height=230.0, left=58.0, right=22.0, top=20.0, bottom=30.0)
_LEAST_NAME_GAP, _LEAST_FIGURE_GAP = 8.0, 12.0  # pixels between two texts


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line over the cycles. `values` has None where there is none; `marks`: places that are drawn as a full dot."""

    name: str
    css: str
    values: Sequence[float | None]
    marks: frozenset[int] = frozenset()
    figures: bool = True  # written beside the line


def curves(
    names: Sequence[str], lines: Sequence[Curve], unit: str, limit: float | None = None, most: float | None = None
) -> Svg:  # fmt: skip
    """Draw lines over the cycles `names`, from 0 on.

    Args:
        names: cycles, oldest first; every line has a value, or None, for each.
        lines: what is drawn.
        unit: of the values.
        limit: a value drawn across, dashed.
        most: the largest value that there can be, where the axis ends at the latest.
    """
    known = [value for line in lines for value in line.values if value is not None]
    top = _axis_end(max([*known, limit or 0.0]))
    top = top if most is None else min(top, most)
    drawing = Drawing()
    _frame(drawing, names, top, unit)
    if limit:
        drawing.path("limit", _AREA.across(_AREA.y(limit / top)))
    for line in lines:
        _line(drawing, line, len(names), top)
    for line in lines:  # figures last, so that no line runs over them
        if line.figures:
            _figures(drawing, line, len(names), top)
    return drawing.svg(
        _AREA.width, _AREA.height, ", ".join(line.name for line in lines) + f" [{unit}] over the cycles"
    )  # fmt: skip


def columns(names: Sequence[str], parts: Mapping[str, tuple[str, Sequence[float]]], unit: str) -> Svg:
    """Draw a stacked column for each cycle; `parts`: name -> (CSS class, values)."""
    sums = [sum(values[k] for _, values in parts.values()) for k in range(len(names))]
    top = _axis_end(max(sums, default=0.0))
    drawing = Drawing()
    _frame(drawing, names, top, unit)
    slot = (_AREA.right_edge - _AREA.left) / max(len(names), 1)
    wide = min(38.0, slot * 0.72)
    free_to = math.inf
    for k in range(len(names) - 1, -1, -1):  # the newest has its figure, others as far as there is room
        x, low = _x(k, len(names)), 0.0
        for part, (css, values) in parts.items():
            if values[k] <= 0:
                continue
            y = _AREA.y((low + values[k]) / top)
            title = f"{names[k]}: {part} {figure(values[k])} {unit}"
            drawing.rect(css, x - wide / 2, y, wide, _AREA.y(low / top) - y, title=title)
            low += values[k]
        text = figure(sums[k])
        half = len(text) * LETTER_PX / 2
        if sums[k] and x + half <= free_to:
            drawing.text("value", x, _AREA.y(sums[k] / top) - 5, text)
            free_to = x - half - _LEAST_NAME_GAP
    return drawing.svg(_AREA.width, _AREA.height, f"{', '.join(parts)} [{unit}] over the cycles")


def _x(place: int, count: int) -> float:
    return _AREA.x((place + 0.5) / max(count, 1))


def _axis_end(value: float) -> float:
    """Return four steps of 1, 2, 2.5 or 5 times a power of ten, with room for a figure above `value`."""
    return 4 * nice_step(value * 1.08 / 4) if value > 0 else 1.0


def _frame(drawing: Drawing, names: Sequence[str], top: float, unit: str) -> None:
    drawing.text("axis", _AREA.left - 8, 11, unit, "end")
    for k in range(5):
        _AREA.grid_line(drawing, _AREA.y(k / 4), figure(top * k / 4))
    # The newest cycle is always named, others as far as there is room: from the right.
    free_to = math.inf
    for k in range(len(names) - 1, -1, -1):
        text = _day(names[k])
        half = len(text) * LETTER_PX / 2
        x = min(_x(k, len(names)), _AREA.width - half - 2)
        if x + half <= free_to:
            drawing.text("axis", x, _AREA.height - 10, text)
            free_to = x - half - _LEAST_NAME_GAP


def _day(name: str) -> str:
    """Return `2026-11-20.2` as `11-20.2`."""
    return name[5:] if len(name) >= 10 and name[4] == "-" else name[:14]


def _line(drawing: Drawing, line: Curve, count: int, top: float) -> None:
    path, dots, pen_down = [], Drawing(), False
    for k, value in enumerate(line.values):
        if value is None:
            pen_down = False
            continue
        x, y = _x(k, count), _AREA.y(value / top)
        path.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = True
        is_full = k in line.marks
        dots.circle(f"{line.css} full" if is_full else line.css, x, y, 4.5 if is_full else 2.5)
    if path:
        drawing.path(f"line {line.css}", "".join(path), line.name)
        drawing.add(dots)


def _figures(drawing: Drawing, line: Curve, count: int, top: float) -> None:
    """Write figures beside as many dots as there is room for, the newest first, and where they differ."""
    free_to, last = math.inf, ""
    for k in range(len(line.values) - 1, -1, -1):
        if (value := line.values[k]) is None:
            continue
        text = figure(value)
        half = len(text) * LETTER_PX / 2
        x = min(_x(k, count), _AREA.width - half - 2)
        if x + half <= free_to and text != last:
            last = text
            drawing.text(f"value {line.css}", x, _AREA.y(value / top) - 8, text)
            free_to = x - half - _LEAST_FIGURE_GAP
