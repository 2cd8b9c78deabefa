"""Charts of a cycle's report as SVG: heat maps of coverage, curves and columns over the cycles.

Start reading at `heat_map`, `curves` and `columns`. Nothing is scaled down: a page scrolls what is too wide for it, so
that figures stay readable. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from farm.reports.rows import Grid, short

SHADES = 6  # of a heat map, beside empty
_CELL_WIDTH, _CELL_HEIGHT = 38.0, 31.0
_LETTER = 7.7  # width of a digit at 12 pixels in the widest of the usual system fonts (DejaVu Sans, Verdana)

_WIDTH, _HEIGHT = 560.0, 230.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 22.0, 20.0, 30.0
_LEAST_NAME_GAP, _LEAST_FIGURE_GAP = 8.0, 12.0  # pixels between two texts


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line over the cycles. `values` has None where there is none; `marks`: places that are drawn as a full dot."""

    name: str
    css: str
    values: Sequence[float | None]
    marks: frozenset[int] = frozenset()
    figures: bool = True  # written beside the line


def shade(count: int) -> int:
    """0 for none, then two shades a decade, the last from 316 rows on."""
    return 0 if count < 1 else min(SHADES, 1 + int(2 * math.log10(count) + 1e-9))


def heat_map(grid: Grid, row_title: str = "", column_title: str = "") -> str:
    """A cell's upper figure is its rows, the lower one what this cycle added; outlined: it had none before."""
    # Column names stand beside one another, so cells are as wide as the longest.
    cell = max(_CELL_WIDTH, max(map(len, grid.columns), default=0) * _LETTER + 9)
    left = max([len(name) for name in grid.rows] + [len(row_title)]) * _LETTER + 10
    top = 40.0 if column_title else 22.0
    width = max(left + cell * len(grid.columns), left + len(column_title) * _LETTER) + 4
    height = top + _CELL_HEIGHT * len(grid.rows) + 4
    drawn = []
    if column_title:
        drawn.append(f'<text class="axis" x="{left:.0f}" y="12">{escape(column_title)}</text>')
    if row_title:
        x, y = left - 6, top - 8
        drawn.append(f'<text class="axis" x="{x:.0f}" y="{y:.0f}" text-anchor="end">{escape(row_title)}</text>')
    for k, name in enumerate(grid.columns):
        x = left + cell * (k + 0.5)
        drawn.append(f'<text class="name" x="{x:.1f}" y="{top - 8:.0f}" text-anchor="middle">{escape(name)}</text>')
    for i, name in enumerate(grid.rows):
        y = top + _CELL_HEIGHT * i
        drawn.append(
            f'<text class="name" x="{left - 6:.0f}" y="{y + 20:.1f}" text-anchor="end">{escape(name)}</text>'
        )  # fmt: skip
        for k, column in enumerate(grid.columns):
            said = f"{row_title} {name}, {column_title or grid.name} {column}".strip()
            drawn.append(_cell(left + cell * k, y, cell, grid.counts[i][k], grid.tonight[i][k], said))
    return _svg(width, height, f"{grid.name}: rows by cell", drawn)


def _cell(x: float, y: float, width: float, count: int, new: int, said: str) -> str:
    css = f"h{shade(count)}" + (" fresh" if count and count == new else "")
    text = f"{said}: {count:,} rows, {new:,} of them tonight" if count else f"{said}: no row"
    found = (
        f'<rect class="{css}" x="{x + 1.5:.1f}" y="{y + 1.5:.1f}" width="{width - 3:.1f}" '
        f'height="{_CELL_HEIGHT - 3:g}" rx="3"><title>{escape(text)}</title></rect>'
    )
    if not count:
        return found
    ink = "over" if shade(count) >= 4 else "on"
    middle = x + width / 2
    if not new:
        return found + _centred(ink, middle, y + 20, short(count))
    below = _centred(f"{ink} more", middle, y + 26, f"+{short(new)}")
    return found + _centred(ink, middle, y + 14.5, short(count)) + below


def _centred(css: str, x: float, y: float, text: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def curves(
    names: Sequence[str], lines: Sequence[Curve], unit: str, limit: float | None = None, most: float | None = None
) -> str:  # fmt: skip
    """Lines over the cycles `names`, from 0 on; `limit`: a value drawn across, dashed; `most`: the largest value that
    there can be, where the axis ends at the latest."""
    found = [value for line in lines for value in line.values if value is not None]
    top = _nice_top(max([*found, limit or 0.0]))
    top = top if most is None else min(top, most)
    drawn = [_frame(names, top, unit)]
    if limit:
        drawn.append(f'<path class="limit" d="M{_LEFT:g} {_y(limit, top):.1f}H{_WIDTH - _RIGHT:g}"/>')
    for line in lines:
        drawn.append(_line(line, len(names), top))
    # Figures last, so that no line runs over them.
    drawn += [_figures(line, len(names), top) for line in lines if line.figures]
    return _svg(_WIDTH, _HEIGHT, ", ".join(line.name for line in lines) + f" [{unit}] over the cycles", drawn)


def columns(names: Sequence[str], parts: Mapping[str, tuple[str, Sequence[float]]], unit: str) -> str:
    """A stacked column for each cycle; `parts`: name -> (CSS class, values)."""
    sums = [sum(values[k] for _, values in parts.values()) for k in range(len(names))]
    top = _nice_top(max(sums, default=0.0))
    drawn = [_frame(names, top, unit)]
    slot = (_WIDTH - _LEFT - _RIGHT) / max(len(names), 1)
    wide = min(38.0, slot * 0.72)
    free_to = math.inf
    for k in range(len(names) - 1, -1, -1):  # the newest has its figure, others as far as there is room
        name = names[k]
        x, low = _x(k, len(names)), 0.0
        for part, (css, values) in parts.items():
            if values[k] <= 0:
                continue
            y, said = _y(low + values[k], top), f"{name}: {part} {figure(values[k])} {unit}"
            drawn.append(
                f'<rect class="{css}" x="{x - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" '
                f'height="{_y(low, top) - y:.1f}"><title>{escape(said)}</title></rect>'
            )
            low += values[k]
        text = figure(sums[k])
        half = len(text) * _LETTER / 2
        if sums[k] and x + half <= free_to:
            drawn.append(_centred("value", x, _y(sums[k], top) - 5, text))
            free_to = x - half - _LEAST_NAME_GAP
    return _svg(_WIDTH, _HEIGHT, f"{', '.join(parts)} [{unit}] over the cycles", drawn)


def figure(value: float) -> str:
    """Three figures, without powers of ten."""
    if value == 0:
        return "0"
    if abs(value) >= 99_950:
        return short(value)
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"


def _svg(width: float, height: float, label: str, drawn: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(label)}">{"".join(drawn)}</svg>'
    )


def _x(place: int, count: int) -> float:
    return _LEFT + (place + 0.5) / max(count, 1) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)


def _nice_top(value: float) -> float:
    """The end of the axis: four steps of 1, 2, 2.5 or 5 times a power of ten, with room for a figure above."""
    if not value > 0:
        return 1.0
    step = value * 1.08 / 4
    power = 10.0 ** math.floor(math.log10(step))
    return 4 * next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= step * (1 - 1e-9))


def _frame(names: Sequence[str], top: float, unit: str) -> str:
    found = [f'<text class="axis" x="{_LEFT - 8:g}" y="11" text-anchor="end">{escape(unit)}</text>']
    for k in range(5):
        y = _y(top * k / 4, top)
        found.append(f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{_WIDTH - _RIGHT:g}"/>')
        found.append(
            f'<text class="axis" x="{_LEFT - 8:g}" y="{y + 4:.1f}" text-anchor="end">{figure(top * k / 4)}</text>'
        )
    # The newest cycle is always named, others as far as there is room: from the right.
    free_to = math.inf
    for k in range(len(names) - 1, -1, -1):
        text = _day(names[k])
        x, half = _x(k, len(names)), len(text) * _LETTER / 2
        x = min(x, _WIDTH - half - 2)
        if x + half <= free_to:
            found.append(_centred("axis", x, _HEIGHT - 10, text))
            free_to = x - half - _LEAST_NAME_GAP
    return "".join(found)


def _day(name: str) -> str:
    """`2026-11-20.2` as `11-20.2`."""
    return name[5:] if len(name) >= 10 and name[4] == "-" else name[:14]


def _line(line: Curve, count: int, top: float) -> str:
    path, pen_down, dots = [], False, []
    for k, value in enumerate(line.values):
        if value is None:
            pen_down = False
            continue
        x, y = _x(k, count), _y(value, top)
        path.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = True
        full = " full" if k in line.marks else ""
        dots.append(f'<circle class="{line.css}{full}" cx="{x:.1f}" cy="{y:.1f}" r="{4.5 if full else 2.5}"/>')
    title = f"<title>{escape(line.name)}</title>"
    return f'<path class="line {line.css}" d="{"".join(path)}">{title}</path>{"".join(dots)}' if path else ""


def _figures(line: Curve, count: int, top: float) -> str:
    """Beside as many dots as there is room for, the newest first, and where they differ."""
    found, free_to, last = [], math.inf, ""
    for k in range(len(line.values) - 1, -1, -1):
        if (value := line.values[k]) is None:
            continue
        text = figure(value)
        x, half = _x(k, count), len(text) * _LETTER / 2
        x = min(x, _WIDTH - half - 2)
        if x + half <= free_to and text != last:
            last = text
            found.append(_centred(f"value {line.css}", x, _y(value, top) - 8, text))
            free_to = x - half - _LEAST_FIGURE_GAP
    return "".join(found)
