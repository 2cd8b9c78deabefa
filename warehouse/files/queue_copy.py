"""Copies the queue's file, so that it can be read in a read-only folder.

Start reading at `queue_copy`. SQLite needs to write beside a file in WAL mode, even to read it. A module of its own:
commands import it that do not wait for the kernels of Arrow.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conf.errors import EnvironmentProblem

_COPY_TRIES = 5
_PARTS = ("", "-wal")  # the shared memory beside them is made again from these


@contextlib.contextmanager
def queue_copy(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary copy of the queue, with its log of changes.

    Raises `EnvironmentProblem` if another process keeps writing to it, `OSError` if it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="gpufarm-queue-") as folder:
        copy = Path(folder, path.name)
        _copy(path, copy)
        yield copy


def _copy(path: Path, copy: Path) -> None:
    """Copy the database and its log of changes; repeat if another process wrote in the meantime."""
    for _ in range(_COPY_TRIES):
        before = _state(path)
        for suffix in _PARTS:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        if _state(path) == before:
            return
        for suffix in _PARTS:
            Path(f"{copy}{suffix}").unlink(missing_ok=True)
    raise EnvironmentProblem(
        f"{path} cannot be copied: another process keeps writing to it; try again, or use a writable folder"
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
