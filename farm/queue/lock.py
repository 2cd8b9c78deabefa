"""The lock that lets one dispatcher work on a data folder, and its holder. Start reading at `hold_dispatcher_lock`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from conf.errors import EnvironmentProblem
from conf.files.identity import alive, identity
from farm.queue.leftovers import parse_marker, sweep_leftovers
from warehouse.files.plain_file import is_held, locked, read_lock

_LIMIT_BYTES = 4096  # largest lock that is read: one line


class DispatcherBusy(EnvironmentProblem):
    """Another dispatcher works on this data folder."""


@contextlib.contextmanager
def hold_dispatcher_lock(path: Path) -> Iterator[None]:
    """Be the one dispatcher of a data folder: an advisory lock that the kernel drops with the process, however it ends.

    What killed dispatchers of this user left behind is swept at the begin and at the end. The file says who holds it,
    for messages only: any process that may write to the folder may write anything there.

    Raises `DispatcherBusy` naming the holder; `EnvironmentProblem` where the lock is a link or no plain file.
    """

    def busy() -> DispatcherBusy:
        marker = parse_marker(_holder_of(path))
        named = f"process {marker.pid}" if marker else "its process is not known"
        return DispatcherBusy(f"a dispatcher ({named}) already works on data={path.parent.parent}")

    with locked(path, busy, written=True) as file:
        file.truncate()
        file.write(json.dumps({"dispatcher": identity(os.getpid())}).encode())
        file.flush()
        try:
            sweep_leftovers()
            yield
        finally:
            sweep_leftovers()  # left by workers that were killed, as Ray's are at the end


def dispatcher_of(path: Path) -> int | None:
    """Return the process id of the dispatcher that works on this folder, None if there is none.

    It counts while the lock is held, also where its process is of another boot or namespace and cannot be looked at.
    """
    text = _holder_of(path)
    marker = parse_marker(text)
    return marker.pid if marker is not None and alive(str(text)) and is_held(path) else None


def _holder_of(path: Path) -> str | None:
    """Return the marker in the lock; None if it holds no complete marker of a dispatcher."""
    try:
        content = json.loads(read_lock(path, _LIMIT_BYTES))
    except (ValueError, RecursionError):  # ValueError: also of bytes that are not UTF-8
        return None
    marker = content.get("dispatcher") if isinstance(content, dict) else None
    return marker if isinstance(marker, str) and parse_marker(marker) else None
