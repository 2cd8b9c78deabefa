"""What the pages of reports and comparisons are made of: clean text, tables, sections. Start reading at `page`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from conf.html_page import html_page, stylesheet

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b")  # colours of a terminal
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MOST = 20_000  # characters of one text on a page


def clean(value: Any, most: int = _MOST) -> str:
    """Anybody's text as it may stand in the page: escaped, without control characters, its end where it is too long."""
    text = "–" if value is None else str(value)
    if len(text) > most:
        text = f"… {len(text) - most:,} characters left out …{text[-most:]}"
    return escape(_CONTROL.sub("�", _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")))


def page(title: str, sections: Mapping[str, tuple[str, str]], head: Callable[[str], str]) -> str:
    """Return a whole page.

    Args:
        title: plain text.
        sections: key -> name and HTML of each section; empty ones are left out.
        head: makes the header, given the HTML of the links to the sections.
    """
    shown = {key: (name, content) for key, (name, content) in sections.items() if content}
    links = " ".join(f'<a href="#{key}">{clean(name)}</a>' for key, (name, _) in shown.items())
    parts = [head(links), *(content for _, content in shown.values())]
    return html_page(title, stylesheet("farm.reports", "report.css"), parts)


class Html(str):
    """Text that is HTML already and goes into a table as it is."""


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], words: int = 1, marked: Iterable[int] = ()) -> str:
    """The first `words` columns are of words, columns named with a leading `*` of long text, the others of figures.

    `marked`: places of rows that stand out.
    """
    kinds = ["text" if name.startswith("*") else "word" if k < words else "" for k, name in enumerate(columns)]

    def cell(tag: str, kind: str, value: Any) -> str:
        css = f' class="{kind}"' if kind else ""
        if isinstance(value, Html):
            return f'<{tag} class="bar">{value}</{tag}>'
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        return f"<{tag}{css}>{clean(shown)}</{tag}>"

    head = "".join(cell("th", kind, name.removeprefix("*")) for kind, name in zip(kinds, columns, strict=True))
    marked, body = set(marked), []
    for k, row in enumerate(rows):
        css = ' class="moved"' if k in marked else ""
        body.append(f"<tr{css}>{''.join(cell('td', kind, value) for kind, value in zip(kinds, row, strict=True))}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def section(key: str, title: str, *parts: str) -> str:
    return f'<section id="{key}"><h2>{clean(title)}</h2>{"".join(parts)}</section>'


def lead(text: str) -> str:
    return f'<p class="lead">{clean(text)}</p>'


def note(text: str, level: str = "look") -> str:
    return f'<p class="note {level}">{clean(text)}</p>'


def fold(summary: str, inside: str, open_: bool = False) -> str:
    """`summary` is text, `inside` HTML."""
    return f"<details{' open' if open_ else ''}><summary>{clean(summary)}</summary>{inside}</details>"


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    """Name, figure and a remark of each tile, as the header shows them."""
    cards = "".join(
        f'<div class="tile"><span>{clean(name)}</span><b>{clean(value)}</b><span>{clean(more)}</span></div>'
        for name, value, more in figures
    )
    return f'<div class="tiles">{cards}</div>'


def legend(items: Mapping[str, str]) -> str:
    """Name -> CSS class."""
    chips = "".join(f'<li><i class="{css}"></i>{clean(name)}</li>' for name, css in items.items())
    return f'<ul class="legend">{chips}</ul>'


def chart(title: str, svg: str, *more: str, newest: bool = False) -> str:
    """`newest`: time runs to the right, and that end is the one to see first."""
    css = "wide newest" if newest else "wide"
    return f'<div><h3>{clean(title)}</h3><div class="{css}">{svg}</div>{"".join(more)}</div>'


def charts(drawn: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(drawn)}</div>'


def count_of(n: int, noun: str) -> str:
    """`1 row`, `12 rows`."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def duration(seconds: float | None) -> str:
    """In the unit that a person would use."""
    if seconds is None:
        return "–"
    if seconds < 99.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def energy(joule: float | None) -> str:
    if joule is None:
        return "–"
    return f"{joule / 3.6e6:,.2f} kWh" if joule >= 36_000 else f"{joule:,.0f} J"
