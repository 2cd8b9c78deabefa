"""Makes texts from a trial safe to store and print. Start reading at `safe_text`."""

from __future__ import annotations

import re

from conf.plain_text import left_out, printable

ERROR_CHARACTERS = 32_000  # of an error's text that are kept
_HEAD_SHARE = 0.25  # of the kept text; the rest is its end, where a traceback has its message
_QUOTED_CHARACTERS = 200
_TAB_OR_LINE_FEED = re.compile("([\t\n])")  # what is kept as it is
_LINE_END = re.compile("\r\n?")


def safe_text(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Return `text` escaped as `conf.plain_text` does, but for tabs, cut to about `limit` characters.

    The beginning and the end are kept; a line between them says how many characters were left out.
    """
    parts = _TAB_OR_LINE_FEED.split(_LINE_END.sub("\n", cut(text, limit)))
    return "".join(part if part == "\t" else printable(part) for part in parts)


def cut(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Return the beginning and the end of `text`, with a line that says how many characters were left out."""
    if len(text) <= limit:
        return text
    head = int(limit * _HEAD_SHARE)
    tail = limit - head
    return f"{text[:head]}{left_out(len(text) - limit, 'characters')}{text[-tail:]}"


def quoted(data: bytes | str) -> str:
    """Return the beginning of `data` in quotes and plain ASCII, with the full length where that is more."""
    shown = data[:_QUOTED_CHARACTERS]
    text = ascii(shown.decode("utf-8", "backslashreplace") if isinstance(shown, bytes) else shown)
    unit = "bytes" if isinstance(data, bytes) else "characters"
    return text if len(shown) == len(data) else f"{text}... ({len(data):,} {unit})"
