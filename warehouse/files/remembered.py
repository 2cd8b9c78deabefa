"""Caches what was read from a file while the file stays the same, judged by inode, size and time.

Start reading at `remembered`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_MOST = 4096
_memory: dict[Hashable, Any] = {}
_lock = threading.Lock()


def remembered(
    path: Path,
    read: Callable[[], T],
    part: Hashable,
    memory: dict[Hashable, Any] = _memory,
    most: int = _MOST,
) -> T:
    """Return the result of `read`, which is called once per process while the file stays the same.

    `part` names which content of the file is read. Raises what `read` raises, and `OSError` where there is no file.
    """
    return remembered_by((file_key(path), part), read, memory, most)


def file_key(path: Path) -> Hashable:
    """Return a key that changes when the file is replaced or written. Raises `OSError` if there is no file."""
    status = os.stat(path)
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns


def remembered_by(key: Hashable, read: Callable[[], T], memory: dict[Hashable, Any] = _memory, most: int = _MOST) -> T:
    """Return the result of `read`, called once per process and key. `memory` is emptied at `most` entries."""
    with _lock:
        if key in memory:
            known: T = memory[key]
            return known
    value = read()
    with _lock:
        if len(memory) >= most:
            memory.clear()
        memory[key] = value
    return value
