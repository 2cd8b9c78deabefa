"""Values as a report page shows them: cleaned text, counts, durations, energy. Start reading at `clean_text`."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from html import escape

from conf.plain_text import counted

MISSING = "–"
_TERMINAL_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONGEST = 20_000  # characters of one text on a page
_LONGEST_CELL = 120  # characters of an explorer cell


class Markup(str):
    """Text that is HTML already, which a template inserts as it is: a picture, the style sheet, base64."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)


def clean_text(value: object, longest: int = _LONGEST) -> str:
    """Return a value as text for a page, not yet escaped.

    Terminal escapes are removed, control characters replaced, and of a text beyond `longest` characters the end is
    kept. None becomes a dash.
    """
    text = MISSING if value is None else str(value)
    if len(text) > longest:
        text = f"… {len(text) - longest:,} characters left out …{text[-longest:]}"
    return _CONTROL.sub("�", _TERMINAL_ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


def cell_text(value: object) -> str:
    """Return a table cell's text; integers get thousands separators."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else clean_text(value)


def count_of(count: int, noun: str) -> str:
    """Return `1 row`, `12 rows`."""
    return counted(count, noun, f"{noun}s")


def duration(seconds: float | None) -> str:
    """Return a duration in s, min or h, whichever reads best."""
    if seconds is None:
        return MISSING
    if seconds < 99.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def energy(joule: float | None) -> str:
    """Return an energy in J or kWh."""
    if joule is None:
        return MISSING
    return f"{joule / 3.6e6:,.2f} kWh" if joule >= 36_000 else f"{joule:,.0f} J"


def short(count: float) -> str:
    """Return a count with two digits and a unit: 32k, 1M."""
    rounded = float(f"{count:.2g}")
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rounded >= unit:
            return f"{rounded / unit:.3g}{name}"
    return f"{rounded:.3g}"


def figure(value: float) -> str:
    """Return a number with three digits and no power of ten."""
    if value == 0:
        return "0"
    if abs(value) >= 99_950:
        return short(value)
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"


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
