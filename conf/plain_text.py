"""Makes text safe for terminals, pages, storage and SQL: escape sequences and control characters are escaped.

Start reading at `printable`. `shown` is for values that a message quotes, `error_line` for stored errors, `safe_text`
for texts from a trial, `sql_text` for a value in a query, `clean_text` for a page. `count_of`, `duration`, `energy` and
`figure` format figures.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

_LONGEST_LINE = 4000  # characters; some messages list every valid name
_LONGEST_SHOWN = 200  # characters of a value that is quoted back

OUTPUT_STARTS = "\n--- the trial's output ends:"  # separates the error of a run from the last output of its trial
_TRACEBACK_STARTS = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*(?:[|+]\s*)?File ".*", line \d+')
_IN_A_GROUP = re.compile(r"^ {2,}[|+] ")  # frame that a traceback draws around the exceptions of a group
ERROR_CHARACTERS = 32_000  # characters of an error's text that are kept
_HEAD_SHARE = 0.25  # share of a kept text for its beginning; a traceback has its message at the end
_TAB_OR_LINE_FEED = re.compile("([\t\n])")
_LINE_END = re.compile("\r\n?")
MISSING = "–"  # shown for a missing value on pages and in tables
_TERMINAL_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LONGEST_ON_PAGE = 20_000  # characters of one text on a page


def printable(text: str) -> str:
    """Return `text` with control characters escaped, such as `\\x1b`. Line feeds stay, tabs become blanks."""
    if text.isprintable():
        return text
    return "".join(map(_spell, text))


def one_line(text: str) -> str:
    """Return `printable` text in one line: tabs and line feeds are also escaped."""
    return printable(text.replace("\t", "\\t")).replace("\n", "\\n")


def print_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines on standard output or `file`, each through `one_line`: file names may hold any character."""
    for line in lines:
        print(one_line(line), file=file)


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns, indented by two; empty without rows."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in (heads, *rows)
    ]


def counted(count: int, one: str, many: str) -> str:
    """Return `1 run`, `1,200 runs`."""
    return f"{count:,} {one if count == 1 else many}"


def first_few(texts: Sequence[str], most: int, between: str = "; ") -> str:
    """Return the first `most` texts and the number of the others: `a; b; 3 more`."""
    more = [f"{len(texts) - most:,} more"] if len(texts) > most else []
    return between.join([*texts[:most], *more])


def left_out(count: int, unit: str) -> str:
    """Return the line that marks a cut."""
    return f"\n[... {count:,} {unit} left out ...]\n"


def truncated(text: str) -> str:
    """Return `text`, or its beginning and end if it is too long for a message."""
    return _cut(text, _LONGEST_LINE, " ... ")


def shown(value: object) -> str:
    """Return the `repr` of a value for a message, cut if it is long; bytes that are not UTF-8 appear as `\\xNN`."""
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\udc([89a-f][0-9a-f])", r"\1\\x\2", repr(value))
    cut = _cut(text, _LONGEST_SHOWN, "...")
    return text if cut == text else f"{cut} ({len(text):,} characters)"


def first_line(error: BaseException) -> str:
    """Return the first non-blank line of an exception's text, or the name of its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def exception_line(error: BaseException) -> str:
    """Return an exception as one line: `TypeError: first non-blank line of its text`, or only its type."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"


def error_line(text: str) -> str:
    """Return the line of an error that says what happened, made `printable`; empty for an empty text.

    In a traceback this is the first line of its last exception (`TypeError: ...`), otherwise the first line that is not
    blank. The output of a trial, which may follow, is ignored.
    """
    lines = [line for line in text.partition(OUTPUT_STARTS)[0].splitlines() if line.strip()]
    traced = [number for number, line in enumerate(lines) if _TRACEBACK_STARTS in line or _FRAME.match(line)]
    if not traced and lines and lines[0].startswith("Traceback"):  # a shortened one
        traced = [0]
    if traced:  # source lines and their markers are indented, the exception is not
        behind = [_IN_A_GROUP.sub("", line) for line in lines[traced[-1] + 1 :]]
        lines = [line for line in behind if not line[0].isspace()] or lines[traced[-1] :]
    return printable(lines[0].strip()) if lines else ""


def _cut(text: str, limit: int, between: str) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}{between}{text[-half:]}"


def _spell(character: str) -> str:
    if character == "\n" or character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    if character == "\t":
        return " "
    # Control characters, surrogates, direction marks, invisible characters, line ends and unassigned characters.
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that Python could not decode (PEP 383)
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe_text(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Return `printable` text, but with its tabs, cut to about `limit` characters.

    The beginning and the end are kept; a line between them says how many characters were left out.
    """
    parts = _TAB_OR_LINE_FEED.split(_LINE_END.sub("\n", shortened(text, limit)))
    return "".join(part if part == "\t" else printable(part) for part in parts)


def shortened(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Return the beginning and the end of `text`, with a line that says how many characters were left out."""
    if len(text) <= limit:
        return text
    head = int(limit * _HEAD_SHARE)
    tail = limit - head
    return f"{text[:head]}{left_out(len(text) - limit, 'characters')}{text[-tail:]}"


def sql_text(value: str) -> str:
    """Return the value as a string literal."""
    return "'" + value.replace("'", "''") + "'"


def escaped_glob(path: Path) -> str:
    """Return the path as a glob that matches only itself."""
    return re.sub(r"([\[*?])", r"[\1]", str(path))


def clean_text(value: object, longest: int = _LONGEST_ON_PAGE) -> str:
    """Return a value as text for a page, not yet escaped.

    Terminal escapes are removed and control characters replaced. Of a text longer than `longest` characters only the
    end is kept. None becomes a dash.
    """
    text = MISSING if value is None else str(value)
    if len(text) > longest:
        text = f"… {len(text) - longest:,} characters left out …{text[-longest:]}"
    return _CONTROL.sub("�", _TERMINAL_ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


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
