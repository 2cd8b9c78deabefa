"""Notes of an estimate, each with a code for programs.

Start reading at `Note`; `most_important` chooses those that are shown first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST_SHOWN = 3
PROBLEM, WARNING, INFO = SEVERITIES = ("problem", "warning", "info")  # the most urgent first
TARGETS = ("memory", "smact", "smocc", "drama", "step_time")  # the targets of an Estimate
OUT_OF_MEMORY, MAY_RUN_OUT, BOUND, AMD_GPU = "out-of-memory", "may-run-out", "bound", "amd-gpu"  # codes that code reads


@dataclass(frozen=True)
class Note:
    """A remark on an estimate.

    Args:
        code: The subject, as `out-of-memory`. It stays the same where `text` is reworded.
        severity: `problem` (the job does not fit, or may not), `warning` (a figure is missing or may be off), or
            `info`.
        text: The remark, for people.
        targets: Targets of the figures that the remark is about; empty where it is about the whole estimate.
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
