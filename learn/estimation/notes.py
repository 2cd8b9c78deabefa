"""The notes of an estimate, each with a code that programs read in place of the text.

Start reading at `Note`. A note is made, with its code, by whoever knows the fact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PROBLEM, WARNING, INFO = SEVERITIES = ("problem", "warning", "info")  # the most urgent first
TARGETS = ("memory", "smact", "smocc", "drama", "step_time")  # what an Estimate gives
MOST_SHOWN = 3
OUT_OF_MEMORY, MAY_RUN_OUT, BOUND, AMD_GPU = "out-of-memory", "may-run-out", "bound", "amd-gpu"  # codes that are read


@dataclass(frozen=True)
class Note:
    """A remark on an estimate.

    Args:
        code: The subject, as `out-of-memory`. It stays the same where `text` is reworded.
        severity: `problem` (the job does not fit, or may not), `warning` (a figure is missing or may be off), or
            `info`.
        text: The remark, for people.
        targets: The targets of the figures that the remark is on; empty where it is on the estimate as a whole.
    """

    code: str
    severity: str
    text: str
    targets: tuple[str, ...] = ()


def most_important(notes: Iterable[Note]) -> list[Note]:
    """Return the notes to show first: at most three, one of each code, problems before warnings."""
    urgent = [note for note in notes if note.severity in (PROBLEM, WARNING)]
    first_of_code: dict[str, Note] = {}
    for note in sorted(urgent, key=lambda note: SEVERITIES.index(note.severity)):
        first_of_code.setdefault(note.code, note)
    return list(first_of_code.values())[:MOST_SHOWN]


def times(count: int) -> str:
    """Return how often, in words."""
    return "once" if count == 1 else f"{count} times"
