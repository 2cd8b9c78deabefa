"""Turns pages into HTML: one file that needs no network and runs no script.

Start reading at `render_page` for pages of typed blocks, at `rendered` for the explorer's. Jinja2 is imported on use;
every value that a template shows is cleaned and escaped.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import EnvironmentProblem
from conf.files.outputs import write_file, write_output
from conf.plain_text import counted, one_line
from conf.reports.blocks import Block, Page
from conf.reports.page_text import Markup, cell_text, clean_text, numeric_places, shown, wrapped

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(page: Page) -> str:
    """Return the HTML of a whole page, its style sheet inside."""
    return rendered("page", page=page, title=one_line(page.title))


def page_bytes(page: Page) -> bytes:
    """Return the page as its file holds it."""
    return render_page(page).encode("utf-8", errors="replace")


def write_page(path: str | Path, page: Page) -> None:
    """Write the page to where `report=` leads, in place of what was there. Raises as `write_output` does."""
    write_output(path, page_bytes(page), key="report")


def keep_page(path: Path, page: Page, figures: str) -> Path:
    """Write the page into a data folder, and beside it its figures, which are JSON; return the page's path.

    Raises `EnvironmentProblem` where it cannot be written.
    """
    try:
        write_file(path.with_suffix(".json"), figures.encode() + b"\n")
        write_file(path, page_bytes(page))
    except OSError as error:
        why = error.strerror or error
        raise EnvironmentProblem(f"{path} cannot be written: {why}; name another with report=") from error
    return path


def render_for_notebook(*blocks: Block) -> str:
    """Return the HTML of blocks with their style sheet, which applies to nothing else on the page that shows them."""
    return rendered("notebook", blocks=blocks, style=Markup(_style("report").replace(":root", ":scope")))


def rendered(template: str, *more_styles: str, **values: Any) -> str:
    """Return the HTML of a template, every value cleaned and escaped.

    Args:
        template: Its name in `templates/`.
        *more_styles: Names of style sheets after that of all pages.
        **values: What the template shows.
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
        finalize=_cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "cell": cell_text,
        "shown": shown,
        "counted": counted,
        "wrapped": wrapped,
        "numeric": numeric_places,
    }
    return environment


@cache
def _style(name: str) -> str:
    return resources.files("conf.reports").joinpath("templates", f"{name}.css").read_text("utf-8")


def _cleaned(value: object) -> object:
    """Return finished markup as it is, and every other value as cleaned text, which Jinja2 then escapes."""
    return value if hasattr(value, "__html__") else clean_text(value)
