"""One dispatcher at a time for a data folder, and who it is. Start reading at `DispatcherLock`."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from conf.errors import UsageError
from farm.sweep import alive, session_marker, sweep_orphans


class DispatcherBusy(UsageError):
    """Another dispatcher works on this data folder."""


class DispatcherLock:
    """One dispatcher for a data folder: an advisory lock that the kernel drops with the process, however it ends.

    The file also says who holds it and what processes it started, for the sweep of a later dispatcher.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = None

    def __enter__(self) -> DispatcherLock:
        """Raises `DispatcherBusy` naming the holder; sweeps what a killed holder left behind."""
        self._file = open(self._path, "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = _parse(self._file.read()).get("dispatcher", "?").partition("@")[0]
            self._file.close()
            folder = self._path.parent.parent
            raise DispatcherBusy(f"a dispatcher (process {holder}) already works on data={folder}") from error
        self._file.seek(0)
        left = _parse(self._file.read())
        sweep_orphans(recorded=left.get("processes", ()))
        self.record([])
        return self

    def record(self, processes: list[str]) -> None:
        """Write down the processes that are to be swept should this one be killed."""
        self._file.seek(0)
        self._file.truncate()
        json.dump({"dispatcher": session_marker(), "processes": processes}, self._file)
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        self._file.close()


def dispatcher_of(path: Path) -> int | None:
    """The process id of the dispatcher that works on this folder, None when there is none."""
    try:
        marker = _parse(path.read_text()).get("dispatcher")
    except FileNotFoundError:
        return None
    return int(marker.partition("@")[0]) if marker and alive(marker) else None


def _parse(text: str) -> dict:
    try:
        return json.loads(text) if text else {}
    except json.JSONDecodeError:  # the holder was killed while it wrote
        return {}
