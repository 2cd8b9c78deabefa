"""Draws the charts of all pages as SVG with escaped texts: shapes, axes, plots, heat maps.

Start reading at `Plot`; `Axis` places values, `Drawing` collects shapes, `heat_map` draws rows by cell. Charts are
never scaled down, to keep figures readable: a page scrolls charts that are too wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple, TypeAlias

from conf.plain_text import clean_text, figure, short

LETTER_PX = 7.7  # width of a digit at 12 pixels in the widest usual system fonts (DejaVu Sans, Verdana)
Anchor: TypeAlias = Literal["start", "middle", "end"]
_MOST_LOG_TICKS = 8
_LEAST_GAP = 10.0  # pixels between two texts
SHADES = 6  # not counting the empty one
DARK_SHADE = 4  # from this shade on, text is drawn light


class Markup(str):
    """Finished HTML, which a template inserts unchanged: a picture, the style sheet, base64."""

    def __html__(self) -> str:
        return str(self)


class Svg(Markup):
    """Finished markup of a picture. Only `Drawing.svg` makes it."""


class Drawing:
    """Collects the shapes of one picture in drawing order. Lengths are in pixels."""

    def __init__(self) -> None:
        self._shapes: list[str] = []

    def text(self, css: str, x: float, y: float, content: str, anchor: Anchor = "middle") -> None:
        self._shapes.append(
            f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(content)}</text>'
        )

    def path(self, css: str, d: str, title: str = "") -> None:
        """Add a line or an area; `d` is SVG path data."""
        self._shapes.append(f'<path class="{css}" d="{d}">{_title(title)}</path>')

    def rect(
        self, css: str, x: float, y: float, width: float, height: float, *, title: str = "", radius: float = 0.0
    ) -> None:
        corner = f' rx="{radius:g}"' if radius else ""
        self._shapes.append(
            f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{corner}>'
            f"{_title(title)}</rect>"
        )

    def circle(self, css: str, x: float, y: float, radius: float, title: str = "") -> None:
        self._shapes.append(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{_title(title)}</circle>')

    def svg(self, width: float, height: float, label: str, *, css: str = "") -> Svg:
        """Return the picture.

        Args:
            width, height: in pixels.
            label: description of the picture for readers who cannot see it.
            css: a class whose pictures take the page's width; empty: the picture keeps its size.
        """
        size = f'class="{css}"' if css else f'width="{width:.0f}" height="{height:.0f}"'
        return Svg(
            f'<svg {size} viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{_escape(label)}">'
            f"{''.join(self._shapes)}</svg>"
        )


def _escape(text: str) -> str:
    return escape(clean_text(text))


def _title(text: str) -> str:
    return f"<title>{_escape(text)}</title>" if text else ""


def nice_step(least: float, steps: Sequence[float] = (1, 2, 2.5, 5, 10)) -> float:
    """Return the smallest of `steps` times a power of ten that is at least `least`, which is positive."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((step * power for step in steps if step * power >= least * (1 - 1e-9)), 10 * power)


@dataclass(frozen=True)
class Axis:
    """The values along one side of a plot; `ticks` are labelled."""

    low: float
    high: float
    ticks: tuple[float, ...] = ()
    is_log: bool = False

    @classmethod
    def of(cls, low: float, high: float, steps: int = 4) -> Axis:
        """Return a linear axis with about this many round steps, from a step to a step."""
        step = nice_step(max(high - low, 1e-9) / steps)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = tuple(step * k for k in range(first, max(last, first + 1) + 1))
        return cls(ticks[0], ticks[-1], ticks)

    @classmethod
    def within(cls, low: float, high: float, steps: int = 5) -> Axis:
        """Return a linear axis with exactly these ends, and with round ticks between them."""
        rounded = cls.of(low, high, steps)
        return cls(low, high, tuple(tick for tick in rounded.ticks if low <= tick <= high))

    @classmethod
    def log(cls, low: float, high: float) -> Axis:
        """Return a logarithmic axis with a few round ticks. Both ends are positive."""
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        for factors, stride in (((1, 2, 5), 1), ((1,), 1), ((1,), 2), ((1,), 4)):
            powers = range(first, last + 1, stride)
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
            if len(ticks) <= _MOST_LOG_TICKS:
                break
        if len(ticks) < 2:
            ticks = [float(f"{end:.2g}") for end in (low, high)]
        return cls(low, high, tuple(ticks), is_log=True)

    @classmethod
    def decades(cls, low: float, high: float) -> Axis:
        """Return a logarithmic axis whose ends are powers of ten. Both values are positive."""
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9)
        return cls.log(10.0**first, 10.0 ** max(last, first + 1))

    def share(self, value: float) -> float:
        """Return the position of a value, from 0 at the axis's start to 1 at its end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Size of a picture, and the space around its plot area, in pixels."""

    width: float = 560.0
    height: float = 230.0
    left: float = 62.0
    right: float = 22.0
    top: float = 20.0
    bottom: float = 32.0


class Plot(Drawing):
    """A drawing between two axes. `x` and `y` return the pixels of values."""

    def __init__(self, x_axis: Axis, y_axis: Axis, margins: Margins) -> None:
        super().__init__()
        self.x_axis, self.y_axis = x_axis, y_axis
        self.width, self.height = margins.width, margins.height
        self.left, self.top = margins.left, margins.top
        self.right, self.bottom = margins.width - margins.right, margins.height - margins.bottom

    def x(self, value: float) -> float:
        return self.left + self.x_axis.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.y_axis.share(value) * (self.bottom - self.top)

    def grid(self, texts: Sequence[str] | None = None, unit: str = "") -> None:
        """Draw a horizontal line at each tick with its text beside it, and `unit` above the texts."""
        for tick, text in zip(self.y_axis.ticks, texts or map(figure, self.y_axis.ticks), strict=True):
            self.across("grid", tick)
            self.text("axis", self.left - 8, self.y(tick) + 4, text, "end")
        if unit:
            self.text("axis", self.left - 8, self.top - 9, unit, "end")

    def ticks_below(self, title: str = "", unit: str = "") -> None:
        """Label the ticks of the horizontal axis if there is room, and write `title` below."""
        self.texts([(self.x(tick), self.bottom + 18, figure(tick) + unit) for tick in self.x_axis.ticks])
        if title:
            self.text("axis", self.right, self.height - 5, title, "end")

    def across(self, css: str, value: float) -> None:
        """Draw a horizontal line over the whole width at a value."""
        self.path(css, f"M{self.left:g} {self.y(value):.1f}H{self.right:g}")

    def line(self, css: str, points: Iterable[tuple[float, float]], title: str = "") -> None:
        """Draw a line through points."""
        places = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points]
        if places:
            self.path(css, f"M{'L'.join(places)}", title)

    def dot(self, css: str, x: float, y: float, radius: float, title: str = "") -> None:
        """Draw a dot at a point."""
        self.circle(css, self.x(x), self.y(y), radius, title)

    def column(
        self, css: str, left: float, right: float, low: float, high: float, title: str = "", *, gap: float = 0.0
    ) -> None:
        """Draw a column between two values on each axis, with `gap` pixels on both sides."""
        x, y = self.x(left) + gap, self.y(high)
        self.rect(css, x, y, self.x(right) - gap - x, self.y(low) - y, title=title)

    def texts(self, places: Sequence[tuple[float, float, str]]) -> None:
        """Write an axis's texts at pixels from right to left; skip those without room, but never the rightmost."""
        free_to = math.inf
        for x, y, text in sorted(places, reverse=True):
            half = len(text) * LETTER_PX / 2
            x = min(x, self.width - half - 2)
            if x + half <= free_to:
                self.text("axis", x, y, text)
                free_to = x - half - _LEAST_GAP

    def picture(self, label: str, *, css: str = "") -> Svg:
        """Return the picture; `label` and `css` as in `Drawing.svg`."""
        return self.svg(self.width, self.height, label, css=css)


class Curve(NamedTuple):
    """One line over names; None has no point, and the line goes on to the next."""

    name: str
    css: str
    values: Sequence[float | None]


def curves(names: Sequence[str], lines: Sequence[Curve], unit: str, most: float | None = None) -> Svg:
    """Draw lines over `names`, from 0 on.

    Args:
        names: Names from left to right; every line has a value or None for each. The last is always written, others
            if there is room.
        lines: The lines to draw.
        unit: Unit of the values.
        most: The largest possible value, a limit for the axis.
    """
    known = [value for line in lines for value in line.values if value is not None]
    top = 1.08 * max(known, default=0.0) or 1.0
    y_axis = Axis.of(0.0, top if most is None else min(top, most))
    plot = Plot(Axis(0.0, max(len(names), 1)), y_axis, Margins())
    plot.grid(unit=unit)
    plot.texts([(plot.x(k + 0.5), plot.bottom + 20, name) for k, name in enumerate(names)])
    for line in lines:
        points = [(k + 0.5, value) for k, value in enumerate(line.values) if value is not None]
        plot.line(f"line {line.css}", points, line.name)
        for x, value in points:
            plot.dot(line.css, x, value, 2.5, figure(value))
    return plot.picture(f"{', '.join(line.name for line in lines)} [{unit}]")


def against(
    name: str,
    points: Sequence[tuple[float, float, str]],
    *,
    is_log: bool,
    axes: tuple[str, str] = ("in the run", "estimate"),
) -> Svg | None:
    """Plot estimates against measurements, with a line where both are equal; return None without points.

    Args:
        name: The target, with its unit.
        points: (measured, estimated, owner).
        is_log: Whether both axes are logarithmic, without figures that are not positive.
        axes: Names of both axes, the measured one first.
    """
    used = [point for point in points if not is_log or min(point[0], point[1]) > 0]
    if not used:
        return None
    values = [value for point in used for value in point[:2]]
    axis = Axis.decades(min(values), max(values)) if is_log else Axis.of(0.0, max(values), 5)
    plot = Plot(axis, axis, Margins(width=420, height=380, right=30, top=30, bottom=46))
    plot.grid()
    plot.ticks_below()
    plot.line("limit", [(axis.low, axis.low), (axis.high, axis.high)], "estimate and measurement are equal")
    for known, estimated, owner in used:
        title = f"{owner}: {figure(estimated)} estimated, {figure(known)} in the run"
        plot.dot("dot k1", known, estimated, 3, title)
    plot.text("axis", (plot.left + plot.right) / 2, plot.height - 4, axes[0])
    plot.text("axis", 4, 12, axes[1], "start")
    return plot.picture(f"{name}: estimates of {len(used)} runs against the runs' own figures", css="drawn")


_CELL_WIDTH, _CELL_HEIGHT = 38.0, 31.0


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Usable rows by cell (row names, column names): in total, and from this cycle."""

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    tonight: tuple[tuple[int, ...], ...]

    @property
    def empty(self) -> int:
        return sum(not count for counts in self.counts for count in counts)


def shade(count: int) -> int:
    """Return the shade of a count: 0 for none, then two shades per decade, the last from 316 rows on."""
    return 0 if count < 1 else min(SHADES, 1 + int(2 * math.log10(count) + 1e-9))


class GridCell(NamedTuple):
    """The appearance of a grid's cell: `more` is written small below its text, `ink` is the class of both."""

    css: str
    title: str
    text: str = ""
    more: str = ""
    ink: str = "on"


def heat_map(grid: Grid, row_title: str = "", column_title: str = "") -> Svg:
    """Draw the number of rows in each cell, with this cycle's below; outlined cells had none before."""

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
    """Draw a cell for each row and column, except where `cell` returns None. `label` describes the picture."""
    # Cells are as wide as the longest column name.
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
