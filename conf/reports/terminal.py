"""Prints a page in the terminal: its text and tables. Pictures, facts and what a reader unfolds are on the page alone.

Start reading at `print_page`. rich is imported on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Code,
    Fold,
    Heading,
    Lead,
    Outcome,
    Page,
    Preformatted,
    Swatch,
    Table,
)
from conf.reports.page_text import cell_text, clean_text

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

_PLAIN_WIDTH = 200  # characters of a line in a file or a pipe, where rich would fold figures at 80


def print_page(page: Page) -> None:
    """Print the title, the head and the sections of a page."""
    of_sections = [block for section in page.sections for block in (Heading(section.title), *section.blocks)]
    print_blocks(Lead(page.title), *page.head, *of_sections)


def print_blocks(*blocks: Block) -> None:
    """Print blocks in order; a heading only where something below it is printed before the next one."""
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
    """Return the lines of a block of text; none for another one."""
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
        # Where a table is too wide, rich folds the widest columns first; one that may not fold would be cut off.
        justify: JustifyMethod = "right" if column.kind == "figure" else "left"
        drawn.add_column(Text(column.name), justify=justify, overflow="fold")
    for place, row in enumerate(table.rows):
        if place and "first" in row.css.split():
            drawn.add_section()
        drawn.add_row(*(Text(cell.text if isinstance(cell, Code | Swatch) else cell_text(cell)) for cell in row.cells))
    screen.print(drawn)
