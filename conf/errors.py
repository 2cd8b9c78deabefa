"""The one exception that means "the user can mend this": every command prints it in one line and exits with 2.

Start reading at `UsageError`; `one_line` makes any text fit for a terminal.
"""

from __future__ import annotations

import re
import unicodedata

_LONGEST_LINE = 4000  # characters; some messages list every valid name
_LONGEST_SHOWN = 200  # characters of a value that is quoted back


class UsageError(ValueError):
    """Bad input, or an environment the user has to mend; the message names the key and the valid choices.

    `keep_lines`: the message has lines of its own, such as DuckDB's, which points at a position. Otherwise a line break
    comes from a name that is quoted, and is shown escaped.
    """

    def __init__(self, *args: object, keep_lines: bool = False) -> None:
        super().__init__(*args)
        self.keep_lines = keep_lines


def unknown_name(kind: str, name: object, known) -> UsageError:
    """An unknown name lists the known names: `unknown family 'cmm'; known: cnn, mlp, transformer`."""
    return UsageError(f"unknown {kind} {shown(name)}; known: {', '.join(sorted(map(str, known)))}")


def shown(value: object) -> str:
    """Return a value as a message quotes it: its `repr`, cut where it is long, with bytes that are no UTF-8 as such."""
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\udc([89a-f][0-9a-f])", r"\1\\x\2", repr(value))
    if len(text) <= _LONGEST_SHOWN:
        return text
    half = _LONGEST_SHOWN // 2
    return f"{text[:half]}...{text[-half:]} ({len(text):,} characters)"


def one_line(text: str, keep_lines: bool = False) -> str:
    """Return the text without control characters and lone surrogates, which are escaped, and of bounded length.

    A byte of a file name that is no UTF-8 is shown as `\\xff`. With `keep_lines` line breaks stay.
    """
    if len(text) > _LONGEST_LINE:
        half = _LONGEST_LINE // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(character if keep_lines and character == "\n" else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte that Python could not decode (PEP 383)
        return f"\\x{ord(character) - 0xDC00:02x}"
    # Cc, Cs: controls, surrogates; Cf: among them those that turn the direction of what follows; Zl, Zp: line ends.
    if unicodedata.category(character) in ("Cc", "Cs", "Cf", "Zl", "Zp"):
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return character
