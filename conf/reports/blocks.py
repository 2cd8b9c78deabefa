"""Typed blocks of a report page, and their rendering as one HTML file without network or script.

Start reading at `Page`; `render_page` turns it into HTML, `rendered` fills any other template. A block holds plain
values and never markup: `templates/` has all HTML, and cleans and escapes every text. The only exception is `Svg`,
which `charts.Drawing` makes. `print_page` prints a page's text and tables in the terminal, without its pictures, facts
and folded blocks. Jinja2 and rich are imported on use.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from conf.errors import EnvironmentProblem, one_line
from conf.files.outputs import write_file, write_output
from conf.plain_text import clean_text, count_of
from conf.reports.charts import Markup, Svg

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console, JustifyMethod


Level: TypeAlias = Literal["good", "look", "bad"]  # how urgent a note or an outcome is
ColumnKind: TypeAlias = Literal["word", "text", "figure"]  # left-aligned; left-aligned and wrapped; right-aligned
_LONGEST_CELL = 120  # characters of an explorer cell


@dataclass(frozen=True)
class Code:
    """Text in a fixed-width font, within a sentence or as a table cell."""

    text: str


@dataclass(frozen=True)
class Swatch:
    """A table cell with a coloured square before its text. `css` is a colour class of the style sheet, such as `k1`."""

    css: str
    text: str


@dataclass(frozen=True)
class SharePart:
    """One part of a `ShareBar`. `share` is its width, from 0 to 1."""

    css: str
    share: float
    title: str


@dataclass(frozen=True)
class ShareBar:
    """A horizontal bar of coloured parts, also as a table cell. `share` is the bar's width, from 0 to 1."""

    parts: tuple[SharePart, ...]
    share: float = 1.0
    tall: bool = False


Cell: TypeAlias = str | int | float | Code | Swatch | ShareBar | None


@dataclass(frozen=True)
class TableColumn:
    """One column of a table. A terminal never folds a column with `is_copied`, so that its text can be copied."""

    name: str
    kind: ColumnKind
    is_copied: bool = False


@dataclass(frozen=True)
class Row:
    """A table row. `css` marks it: `moved` highlights, `sum` is a total."""

    cells: tuple[Cell, ...]
    css: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a header row; every row has one cell for each column."""

    columns: tuple[TableColumn, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Facts:
    """Rows that begin with a name, without a header row."""

    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, init=False)
class Lead:
    """A paragraph of plain text, which may include `Code`."""

    parts: tuple[str | Code, ...]

    def __init__(self, *parts: str | Code) -> None:
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True)
class Callout:
    """A paragraph with a coloured edge."""

    text: str
    level: Level = "look"


@dataclass(frozen=True)
class Outcome:
    """One word on a coloured pill, and a sentence."""

    level: Level
    word: str
    sentence: str


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True)
class Preformatted:
    """Text whose line breaks count, such as a log."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Legend:
    """Name -> colour class."""

    items: Mapping[str, str]


@dataclass(frozen=True)
class Drawn:
    """An SVG picture as wide as the page."""

    svg: Svg


@dataclass(frozen=True)
class Chart:
    """An SVG picture in its own size, with a title.

    With `newest_first_seen`, a picture that is too wide for the page shows its right end, where time is latest.
    """

    title: str
    svg: Svg
    below: tuple[Block, ...] = ()
    newest_first_seen: bool = False


@dataclass(frozen=True)
class Charts:
    """Charts side by side, as many as fit."""

    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Fold:
    """Blocks that unfold with a click on `summary`."""

    summary: str
    blocks: tuple[Block, ...]
    is_open: bool = False


@dataclass(frozen=True)
class Group:
    """Blocks under a heading, within `SideBySide`."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class SideBySide:
    """Groups of blocks side by side, as many as fit."""

    groups: tuple[Group, ...]


Block: TypeAlias = (
    Bullets
    | Chart
    | Charts
    | Drawn
    | Facts
    | Fold
    | Heading
    | Lead
    | Legend
    | Callout
    | Outcome
    | Preformatted
    | SideBySide
    | ShareBar
    | Table
)


@dataclass(frozen=True)
class Section:
    """A section of a page. `key` is its address on the page, `name` its link in the header; empty: no link."""

    key: str
    title: str
    blocks: tuple[Block, ...]
    name: str = ""
    apart: bool = False  # whether it has its own background


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole page.

    title     plain text, possibly from an untrusted source
    head      blocks of the header, above the links
    """

    title: str
    head: tuple[Block, ...]
    sections: tuple[Section, ...]


def linked(sections: Mapping[str, Section | None]) -> tuple[Section, ...]:
    """Return the sections that exist, with the keys of the mapping as the names of their links."""
    return tuple(replace(section, name=name) for name, section in sections.items() if section is not None)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    words: int = 1,
    marked: Collection[int] = (),
    *,
    copied: str | None = None,
) -> Table:
    """Return a table.

    Args:
        heads: column names; a leading `*` marks a column of long text.
        rows: cells of each row, one per head.
        words: number of leading columns with words; the others hold figures.
        marked: indexes of rows to highlight.
        copied: the column that a terminal never folds.
    """
    kinds: list[ColumnKind] = [
        "text" if name.startswith("*") else "word" if k < words else "figure" for k, name in enumerate(heads)
    ]
    columns = tuple(
        TableColumn(name.removeprefix("*"), kind, name == copied) for name, kind in zip(heads, kinds, strict=True)
    )
    return Table(columns, tuple(Row(tuple(cells), "moved" if k in marked else "") for k, cells in enumerate(rows)))


def render_page(page: Page) -> str:
    """Return the HTML of a whole page, including its style sheet."""
    return rendered("page", page=page, title=one_line(page.title))


def page_bytes(page: Page) -> bytes:
    """Return the content of the page's file."""
    return render_page(page).encode("utf-8", errors="replace")


def write_page(path: str | Path, page: Page) -> None:
    """Write the page to the path of `report=`, replacing an older one. Raises the errors of `write_output`."""
    write_output(path, page_bytes(page), key="report")


def keep_page(path: Path, page: Page, figures: str) -> Path:
    """Write the page into a data folder, and its figures, in JSON, beside it; return the page's path.

    Raises `EnvironmentProblem` if it cannot be written.
    """
    try:
        write_file(path.with_suffix(".json"), figures.encode() + b"\n")
        write_file(path, page_bytes(page))
    except OSError as error:
        raise EnvironmentProblem(
            f"{path} cannot be written: {error.strerror or error}; name another with report="
        ) from error
    return path


def render_for_notebook(*blocks: Block) -> str:
    """Return the HTML of blocks with their style sheet, which does not affect the rest of a notebook."""
    return rendered("notebook", blocks=blocks, style=Markup(_style("report").replace(":root", ":scope")))


def rendered(template: str, *more_styles: str, **values: Any) -> str:
    """Return the HTML of a template, every value cleaned and escaped.

    Args:
        template: Its name in `templates/`.
        *more_styles: Names of style sheets to add to the common one.
        **values: Values for the template.
    """
    styles = Markup("".join(map(_style, ("report", *more_styles))))
    return _environment().get_template(f"{template}.html.j2").render({"style": styles} | values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("conf.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        # Finished markup stays; every other value is cleaned, and Jinja2 then escapes it.
        finalize=lambda value: value if hasattr(value, "__html__") else clean_text(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "class_name": lambda value: type(value).__name__,
        "cell": cell_text,
        "shown": _explorer_cell,
        "counted": count_of,
        "wrapped": wrapped,
        "numeric": numeric_places,
    }
    return environment


@cache
def _style(name: str) -> str:
    return resources.files("conf.reports").joinpath("templates", f"{name}.css").read_text("utf-8")


_PLAIN_WIDTH = 200  # characters per line in a file or a pipe, where rich would fold figures at 80


def print_page(page: Page) -> None:
    """Print the title, the head and the sections of a page in the terminal."""
    of_sections = [block for section in page.sections for block in (Heading(section.title), *section.blocks)]
    print_blocks(Lead(page.title), *page.head, *of_sections)


def print_blocks(*blocks: Block) -> None:
    """Print blocks in the terminal; skip a heading if nothing below it is printed."""
    from rich.console import Console

    screen = Console(highlight=False, emoji=False)
    if not screen.is_terminal:
        screen.width = _PLAIN_WIDTH
    heading = ""
    for block in blocks:
        if isinstance(block, Heading):
            heading = block.text
        elif isinstance(block, Table) or (texts := _texts(block)):
            if heading:
                screen.print(f"\n{clean_text(heading)}", soft_wrap=True, markup=False)
            heading = ""
            if isinstance(block, Table):
                _print_table(screen, block)
            else:
                style = "yellow" if isinstance(block, Callout) else None
                screen.print("\n".join(map(clean_text, texts)), soft_wrap=True, markup=False, style=style)


def _texts(block: Block) -> list[str]:
    """Return the lines of a text block; empty for other blocks."""
    match block:
        case Lead():
            return ["".join(part.text if isinstance(part, Code) else part for part in block.parts)]
        case Callout():
            return [f"note: {block.text}"]
        case Bullets():
            return [f"- {item}" for item in block.items]
        case Outcome():
            return [f"{block.word}: {block.sentence}"]
        case Preformatted():
            return block.text.splitlines()
        case Fold():
            return [block.summary]
    return []


def _print_table(screen: Console, table: Table) -> None:
    from rich import table as rich_table
    from rich.text import Text

    drawn = rich_table.Table()
    for column in table.columns:
        # If a table is too wide, rich folds the widest columns first; a column that may not fold would be cut off.
        justify: JustifyMethod = "right" if column.kind == "figure" else "left"
        drawn.add_column(Text(column.name), justify=justify, overflow="fold", no_wrap=column.is_copied)
    for row in table.rows:
        drawn.add_row(*(Text(cell.text if isinstance(cell, Code | Swatch) else cell_text(cell)) for cell in row.cells))
    screen.print(drawn)


def cell_text(value: object) -> str:
    """Return a table cell's text; integers get thousands separators."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else clean_text(value)


def _explorer_cell(value: object) -> str:
    """Return a cell's text: numbers short, times to the second, long texts cut."""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    text = cell_text(value)
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"


def wrapped(name: str) -> Markup:
    """Return a column's name that may break only after underscores."""
    return Markup(str(escape(clean_text(name))).replace("_", "_<wbr>"))


def numeric_places(rows: Iterable[Iterable[object]]) -> frozenset[int]:
    """Return the indexes of columns with numbers."""
    return frozenset(
        place
        for place, column in enumerate(zip(*rows, strict=True))
        if all(isinstance(value, int | float) or value is None for value in column)
        and any(value is not None for value in column)
    )
