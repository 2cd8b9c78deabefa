"""Turns the explorer's pages into HTML: no script, the reports' style sheet. Start reading at `rendered`."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeAlias

from conf.plain_text import counted
from conf.reports.page_text import MISSING, Markup, clean_text
from warehouse.explorer.plot import SOURCE_COLOURS

if TYPE_CHECKING:
    from jinja2 import Environment

# Inline style sheets and data pictures only; forms stay on the service.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; frame-ancestors 'none'"
_LONGEST_CELL = 120
Link: TypeAlias = Callable[..., "str | None"]


def served_link(path: str, query: str = "") -> str | None:
    """Return the address of a page of the service."""
    return f"{path}?{query}" if query else path


def rendered(template: str, link: Link = served_link, **values: Any) -> str:
    """Return the HTML of a template of `templates/`, every value cleaned and escaped.

    Args:
        template: Its name.
        link: Gives the address of a page by its path and query; None where there is no such page.
        **values: What the template shows.
    """
    return (
        _environment()
        .get_template(f"{template}.html.j2")
        .render(style=_style(), link=link, is_served=link is served_link, colours=SOURCE_COLOURS, **values)
    )


def shown(value: object) -> str:
    """Return a cell's text: numbers short, times to the second, long texts cut."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    text = clean_text(value)
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"


def wrapped(name: str) -> Markup:
    """Return a column's name that may be broken behind its underscores, and nowhere else."""
    return Markup(str(escape(clean_text(name))).replace("_", "_<wbr>"))


def numeric_places(rows: Iterable[Iterable[object]]) -> frozenset[int]:
    """Return the places of the columns that hold numbers."""
    return frozenset(
        place
        for place, column in enumerate(zip(*rows, strict=True))
        if all(isinstance(value, int | float) or value is None for value in column)
        and any(value is not None for value in column)
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("warehouse.explorer", "templates"), autoescape=True, undefined=StrictUndefined,
        finalize=_cleaned, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["shown"] = shown
    environment.filters["counted"] = counted
    environment.filters["wrapped"] = wrapped
    environment.filters["numeric"] = numeric_places
    return environment


def _cleaned(value: object) -> object:
    return value if hasattr(value, "__html__") else clean_text(value)


@cache
def _style() -> Markup:
    reports = resources.files("conf.reports").joinpath("templates", "report.css").read_text("utf-8")
    own = resources.files("warehouse.explorer").joinpath("templates", "explorer.css").read_text("utf-8")
    return Markup(reports + own)
