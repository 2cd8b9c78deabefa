"""The one exception that means "the user can mend this": every command prints it in one line and exits with 2."""

from __future__ import annotations

from collections.abc import Iterable

from conf.plain_text import shown

__all__ = ["UsageError", "shown", "unknown_name"]


class UsageError(ValueError):
    """Bad input, or an environment the user has to mend; the message names the key and the valid choices.

    `keep_lines`: the message has lines of its own, such as DuckDB's, which points at a position. Otherwise a line break
    comes from a name that is quoted, and is shown escaped.
    """

    def __init__(self, *args: object, keep_lines: bool = False) -> None:
        super().__init__(*args)
        self.keep_lines = keep_lines


def unknown_name(kind: str, name: object, known: Iterable[object]) -> UsageError:
    """An unknown name lists the known names: `unknown family 'cmm'; known: cnn, mlp, transformer`."""
    return UsageError(f"unknown {kind} {shown(name)}; known: {', '.join(sorted(map(str, known)))}")
