"""Asks before a submission queues more than a million trials, and refuses one that the disk cannot hold.

Start reading at `require_consent`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from conf.errors import UsageError
from warehouse.files.folder import DataFolder

ASK_ABOVE = 1_000_000  # trials that one command adds
EXAMPLES = 200  # configurations that tell how long the others are
_BYTES_BESIDE = (
    90  # of a trial in the queue beside its configuration: 80 to 100 were measured, half-filled pages included
)


def require_consent(folder: DataFolder, trials: int, example_texts: Sequence[str], agreed: bool) -> None:
    """Return if so many trials may be queued: they are few, `agreed` to (`yes=true`), or confirmed on the terminal.

    `example_texts` are configurations as the queue holds them. Raises `UsageError` where the disk has no room for all
    of them, where the user says no, and without a terminal, where the message names `yes=true`.
    """
    if trials <= ASK_ABOVE:
        return
    needed_bytes = queue_bytes(trials, example_texts)
    free_bytes = shutil.disk_usage(_existing(folder.root)).free
    asked = (
        f"this queues {trials:,} trials, about {_size(needed_bytes)} in {folder.queue} ({_size(free_bytes)} are free)"
    )
    if needed_bytes > free_bytes:
        raise UsageError(f"{asked}; take a smaller n")
    if agreed:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{asked}; confirm with yes=true")
    print(f"{asked}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was queued")


def queue_bytes(trials: int, example_texts: Iterable[str]) -> int:
    """Estimate the size in bytes of so many trials in the queue's file, from the texts of a few."""
    lengths = [len(text.encode()) for text in example_texts]
    return round(trials * (sum(lengths) / max(1, len(lengths)) + _BYTES_BESIDE))


def _existing(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _size(size_bytes: int) -> str:
    mib = size_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"
