"""Turns the explorer's pages into HTML, with links that a service or files have. Start reading at `rendered`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from conf.reports.blocks import rendered as rendered_template
from warehouse.explorer.plot import SOURCE_COLOURS

# Inline style sheets and data pictures only; forms stay on the service.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; frame-ancestors 'none'"
Link: TypeAlias = Callable[..., "str | None"]


def served_link(path: str, query: str = "") -> str | None:
    """Return the address of a page of the service."""
    return f"{path}?{query}" if query else path


def rendered(template: str, link: Link = served_link, **values: Any) -> str:
    """Return the HTML of a template of the explorer, every value cleaned and escaped.

    Args:
        template: Its name.
        link: Gives the address of a page by its path and query; None where there is no such page.
        **values: What the template shows.
    """
    links = {"link": link, "is_served": link is served_link}
    return rendered_template(f"explorer/{template}", "explorer", colours=SOURCE_COLOURS, **links, **values)
