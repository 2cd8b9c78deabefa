"""Stored texts as a terminal may show them: no escape sequence, control or direction character gets through.

Start reading at `printable`.
"""

from __future__ import annotations

import re

# C0 but line feed, DEL, C1, marks that turn the direction of text, invisible joins, line separators, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return `text` with what could command a terminal spelled out, as in `\\x1b`. Line feeds stay, tabs are blanks."""
    return _UNSAFE.sub(_spelled, text)


def one_line(text: str) -> str:
    """Return `text` as `printable` does, in one line: a line feed is spelled out too."""
    return printable(text).replace("\n", "\\n")


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] == "\t":
        return " "
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
