"""Heat maps as SVG: rows by cell, and what was added of late. Start reading at `heat_map`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from conf.reports.page_text import short
from conf.reports.svg import LETTER_PX, Drawing, Svg

SHADES = 6  # beside empty
_CELL_WIDTH, _CELL_HEIGHT = 38.0, 31.0


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Usable rows by cell (row names, column names): in total, and those of this cycle."""

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    tonight: tuple[tuple[int, ...], ...]

    @property
    def gained(self) -> tuple[tuple[str, str, int], ...]:
        """Return (row, column, rows) of the cells that had no rows before this cycle."""
        return tuple(
            (row, column, count)
            for row, counts, new in zip(self.rows, self.counts, self.tonight, strict=True)
            for column, count, gain in zip(self.columns, counts, new, strict=True)
            if count and count == gain
        )

    @property
    def empty(self) -> int:
        return sum(not count for counts in self.counts for count in counts)


def shade(count: int) -> int:
    """Return the shade of a count: 0 for none, then two shades a decade, the last from 316 rows on."""
    return 0 if count < 1 else min(SHADES, 1 + int(2 * math.log10(count) + 1e-9))


def heat_map(grid: Grid, row_title: str = "", column_title: str = "") -> Svg:
    """Draw the rows of each cell, and below them what this cycle added; cells outlined had no row before."""
    # Column names stand beside one another, so cells are as wide as the longest.
    cell = max(_CELL_WIDTH, max(map(len, grid.columns), default=0) * LETTER_PX + 9)
    left = max([len(name) for name in grid.rows] + [len(row_title)]) * LETTER_PX + 10
    top = 40.0 if column_title else 22.0
    width = max(left + cell * len(grid.columns), left + len(column_title) * LETTER_PX) + 4
    height = top + _CELL_HEIGHT * len(grid.rows) + 4
    drawing = Drawing()
    if column_title:
        drawing.text("axis", left, 12, column_title, "start")
    if row_title:
        drawing.text("axis", left - 6, top - 8, row_title, "end")
    for k, name in enumerate(grid.columns):
        drawing.text("name", left + cell * (k + 0.5), top - 8, name)
    for i, name in enumerate(grid.rows):
        y = top + _CELL_HEIGHT * i
        drawing.text("name", left - 6, y + 20, name, "end")
        for k, column in enumerate(grid.columns):
            place = f"{row_title} {name}, {column_title or grid.name} {column}".strip()
            _cell(drawing, left + cell * k, y, cell, grid.counts[i][k], grid.tonight[i][k], place)
    return drawing.svg(width, height, f"{grid.name}: rows by cell")


def _cell(drawing: Drawing, x: float, y: float, width: float, count: int, new: int, place: str) -> None:
    css = f"h{shade(count)}" + (" fresh" if count and count == new else "")
    of_tonight = f", {new:,} of them tonight" if new else ""
    title = f"{place}: {count:,} rows{of_tonight}" if count else f"{place}: no row"
    drawing.rect(css, x + 1.5, y + 1.5, width - 3, _CELL_HEIGHT - 3, title=title, radius=3)
    if not count:
        return
    ink = "over" if shade(count) >= 4 else "on"
    middle = x + width / 2
    if not new:
        drawing.text(ink, middle, y + 20, short(count))
        return
    drawing.text(ink, middle, y + 14.5, short(count))
    drawing.text(f"{ink} more", middle, y + 26, f"+{short(new)}")
