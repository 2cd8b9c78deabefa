"""Heat maps as SVG: rows by cell, and what was added of late. Start reading at `heat_map`, or at `draw_grid` for
other cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conf.reports.page_text import short
from conf.reports.svg import LETTER_PX, Drawing, Svg

SHADES = 6  # beside empty
DARK_SHADE = 4  # from which on a text is light
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


class GridCell(NamedTuple):
    """How one cell of a grid is drawn: `more` stands small below its text, `ink` is the class of both."""

    css: str
    title: str
    text: str = ""
    more: str = ""
    ink: str = "on"


def heat_map(grid: Grid, row_title: str = "", column_title: str = "") -> Svg:
    """Draw the rows of each cell, and below them what this cycle added; cells outlined had no row before."""

    def cell(i: int, k: int) -> GridCell:
        count, new = grid.counts[i][k], grid.tonight[i][k]
        place = f"{row_title} {grid.rows[i]}, {column_title or grid.name} {grid.columns[k]}".strip()
        if not count:
            return GridCell("h0", f"{place}: no row")
        css = f"h{shade(count)}" + (" fresh" if count == new else "")
        of_tonight = f", {new:,} of them tonight" if new else ""
        ink, more = "over" if shade(count) >= DARK_SHADE else "on", f"+{short(new)}" if new else ""
        return GridCell(css, f"{place}: {count:,} rows{of_tonight}", short(count), more, ink)

    return draw_grid(grid.rows, grid.columns, cell, f"{grid.name}: rows by cell", row_title, column_title)


def draw_grid(
    rows: Sequence[str],
    columns: Sequence[str],
    cell: Callable[[int, int], GridCell | None],
    label: str,
    row_title: str = "",
    column_title: str = "",
) -> Svg:
    """Draw a cell for each row and column; where `cell` returns None there is none. `label` says what it shows."""
    # Column names stand beside one another, so cells are as wide as the longest.
    wide = max(_CELL_WIDTH, max(map(len, columns), default=0) * LETTER_PX + 9)
    left = max([len(name) for name in rows] + [len(row_title)]) * LETTER_PX + 10
    top = 40.0 if column_title else 22.0
    drawing = Drawing()
    if column_title:
        drawing.text("axis", left, 12, column_title, "start")
    if row_title:
        drawing.text("axis", left - 6, top - 8, row_title, "end")
    for k, name in enumerate(columns):
        drawing.text("name", left + wide * (k + 0.5), top - 8, name)
    for i, name in enumerate(rows):
        drawing.text("name", left - 6, top + _CELL_HEIGHT * i + 20, name, "end")
        for k in range(len(columns)):
            if (drawn := cell(i, k)) is not None:
                _draw_cell(drawing, drawn, left + wide * k, top + _CELL_HEIGHT * i, wide)
    width = max(left + wide * len(columns), left + len(column_title) * LETTER_PX) + 4
    return drawing.svg(width, top + _CELL_HEIGHT * len(rows) + 4, label)


def _draw_cell(drawing: Drawing, cell: GridCell, x: float, y: float, width: float) -> None:
    drawing.rect(cell.css, x + 1.5, y + 1.5, width - 3, _CELL_HEIGHT - 3, title=cell.title, radius=3)
    middle = x + width / 2
    if cell.text:
        drawing.text(cell.ink, middle, y + (14.5 if cell.more else 20), cell.text)
    if cell.more:
        drawing.text(f"{cell.ink} more", middle, y + 26, cell.more)
