"""Text and figures for pages, tables and SQL.

Start reading at `clean_text`, for a page, at `table_lines`, for a terminal, or at `sql_text`, for a value in a query.
`count_of`, `duration`, `energy` and `figure` format figures. `conf.errors` has the text of messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

MISSING = "–"  # shown for a missing value on pages and in tables
_TERMINAL_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONGEST_ON_PAGE = 20_000  # characters of one text on a page


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns, indented by two; empty without rows."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in (heads, *rows)
    ]


def count_of(count: int, one: str, many: str | None = None) -> str:
    """Return `1 row`, `1,200 rows`. `many` is the plural, if it is not `one` and an s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def sql_text(value: str) -> str:
    """Return the value as a string literal."""
    return "'" + value.replace("'", "''") + "'"


def escaped_glob(path: Path) -> str:
    """Return the path as a glob that matches only itself."""
    return re.sub(r"([\[*?])", r"[\1]", str(path))


def clean_text(value: object) -> str:
    """Return a value as text for a page, not yet escaped.

    Terminal escapes are removed and control characters replaced. Only the end of a long text is kept. None becomes a
    dash.
    """
    text = MISSING if value is None else str(value)
    if len(text) > _LONGEST_ON_PAGE:
        text = f"… {len(text) - _LONGEST_ON_PAGE:,} characters left out …{text[-_LONGEST_ON_PAGE:]}"
    return _CONTROL.sub("�", _TERMINAL_ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


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
