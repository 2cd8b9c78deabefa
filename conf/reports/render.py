"""Turns a page's typed blocks into HTML: one file that needs no network and runs no script.

Start reading at `render_page`. Jinja2 is imported on use; every value that a template shows is cleaned and escaped.
"""

from __future__ import annotations

import base64
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from conf.plain_text import one_line
from conf.reports.blocks import Block, Page
from conf.reports.page_text import Markup, cell_text, clean_text

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(page: Page) -> str:
    """Return the HTML of a whole page, its style sheet inside."""
    return _environment().get_template("page.html.j2").render(page=page, title=one_line(page.title), style=_style())


def render_for_notebook(*blocks: Block) -> str:
    """Return the HTML of blocks with their style sheet, which applies to nothing else on the page that shows them."""
    style = Markup(_style().replace(":root", ":scope"))
    return _environment().get_template("notebook.html.j2").render(blocks=blocks, style=style)


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
    environment.filters |= {"cell": cell_text, "base64": _base64}
    return environment


@cache
def _style() -> Markup:
    return Markup(resources.files("conf.reports").joinpath("templates", "report.css").read_text("utf-8"))


def _base64(content: bytes) -> Markup:
    return Markup(base64.b64encode(content).decode("ascii"))


def _cleaned(value: object) -> object:
    """Return finished markup as it is, and every other value as cleaned text, which Jinja2 then escapes."""
    return value if hasattr(value, "__html__") else clean_text(value)
