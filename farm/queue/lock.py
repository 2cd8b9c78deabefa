"""The lock that lets one dispatcher work on a data folder, and its holder. Start reading at `DispatcherLock`."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import BinaryIO

from conf.errors import EnvironmentProblem
from conf.files.identity import alive
from farm.queue.leftovers import parse_marker, session_marker, sweep_leftovers
from warehouse.files.plain_file import is_held, open_lock, read_lock

_LIMIT_BYTES = 4096  # largest lock that is read: one line


class DispatcherBusy(EnvironmentProblem):
    """Another dispatcher works on this data folder."""


class DispatcherLock:
    """One dispatcher for a data folder: an advisory lock that the kernel drops with the process, however it ends.

    The file says who holds it, for messages only: any process that may write to the folder may write anything there.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> DispatcherLock:
        """Take the lock, then sweep what killed dispatchers of this user left behind.

        Raises `DispatcherBusy` naming the holder; `EnvironmentProblem` where the lock is a link or no plain file.
        """
        self._file = open_lock(self._path, written=True)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            holder = _holder_of(self._path)
            folder = self._path.parent.parent
            marker = parse_marker(holder)
            named = f"process {marker.pid}" if marker else "its process is not known"
            raise DispatcherBusy(f"a dispatcher ({named}) already works on data={folder}") from error
        try:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps({"dispatcher": session_marker()}).encode())
            self._file.flush()
            sweep_leftovers()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None, "the lock is held"
        with self._file:
            sweep_leftovers()  # left by workers that were killed, as Ray's are at the end


def dispatcher_of(path: Path) -> int | None:
    """Return the process id of the dispatcher that works on this folder, None if there is none.

    A process of another boot or namespace cannot be looked at: it counts while somebody holds the lock.
    """
    text = _holder_of(path)
    marker = parse_marker(text)
    if marker is None:
        return None
    works = alive(str(text)) if marker.is_here else is_held(path)
    return marker.pid if works else None


def _holder_of(path: Path) -> str | None:
    """Return the marker in the lock; None if it holds no complete marker of a dispatcher."""
    try:
        content = json.loads(read_lock(path, _LIMIT_BYTES))
    except (ValueError, RecursionError):  # ValueError: also of bytes that are not UTF-8
        return None
    marker = content.get("dispatcher") if isinstance(content, dict) else None
    return marker if isinstance(marker, str) and parse_marker(marker) else None
