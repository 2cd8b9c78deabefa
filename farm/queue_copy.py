"""The queue for whoever only looks at it, also in a folder that cannot be written to.

Start reading at `queue_to_read`. SQLite needs to write beside a file in WAL mode, even to read it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conf.errors import UsageError
from farm.jobs import Queue, QueueError

_UNWRITABLE = (errno.EROFS, errno.EACCES)
_COPY_TRIES = 5
_PARTS = ("", "-wal")  # the shared memory beside them is made anew from these


@contextlib.contextmanager
def queue_to_read(path: Path) -> Iterator[Queue]:
    """Open the queue of an existing file for reading: where its folder cannot be written to, a copy of it.

    Says so in one line on standard error. Nothing is written to the folder. Errors as of `Queue.open`.
    """
    with contextlib.ExitStack() as held:
        try:
            queue = held.enter_context(Queue.open(path))
            queue.next_device()  # a file that may not be written to can fail as late as here
        except QueueError as error:
            if error.errno not in _UNWRITABLE:
                raise
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="gpufarm-queue-"))
            copy = Path(folder, path.name)
            _copy(path, copy)
            print(
                f"{path.parent} cannot be written to: the queue is read from a copy made just now, as if nobody were "
                "writing to it",
                file=sys.stderr,
            )
            queue = held.enter_context(Queue.open(copy))
        yield queue


def _copy(path: Path, copy: Path) -> None:
    """Copy the database and its log of changes; again where somebody wrote meanwhile."""
    for _ in range(_COPY_TRIES):
        before = _state(path)
        for suffix in _PARTS:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        if _state(path) == before:
            return
        for suffix in _PARTS:
            Path(f"{copy}{suffix}").unlink(missing_ok=True)
    raise UsageError(
        f"{path} cannot be copied: somebody writes to it all the time; try again, or where it can be written"
    )


def _state(path: Path) -> list[tuple[int, int, int] | None]:
    states: list[tuple[int, int, int] | None] = []
    for suffix in _PARTS:
        try:
            status = os.stat(f"{path}{suffix}")
            states.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except FileNotFoundError:
            states.append(None)
    return states
