"""Opens plain files of a data folder, for reading or as locks, and caches results until the files change.

Start reading at `open_plain`: opening a pipe instead would block forever. `remember` detects changed files by inode,
size and time. `open_lock` keeps a hostile or copied folder from redirecting writes to another file.
`is_shared_by_any` sees the locks of DuckDB clients. `queue_copy` makes the queue's file readable in a read-only folder:
SQLite writes beside a file in WAL mode, even to read it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from conf.errors import PASSING_ERRNOS, EnvironmentProblem

# Errors of this process or computer, not of the file.
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_OF_THE_NAME = (errno.ELOOP, errno.ENXIO, errno.ENODEV)  # a link to itself, a socket, a missing device
T = TypeVar("T")
_MOST = 4096
_PAUSES_S = (0.02, 0.1)  # between attempts to read
_memory: dict[Hashable, Any] = {}
_lock = threading.Lock()
# O_NONBLOCK: opening a fifo must not wait for its other end.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class NoPlainFile(OSError):
    """The name does not lead to a plain file, but to a pipe, a device, a folder or a broken link."""


def open_plain(path: Path) -> int:
    """Return a descriptor of a plain file, opened for reading. Never blocks.

    Raises `NoPlainFile`, `FileNotFoundError` only if the name does not exist, and `OSError` as opening does.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if os.path.islink(path):
            raise NoPlainFile("it is a link to a file that does not exist") from error
        raise
    except OSError as error:
        if error.errno in _OF_THE_NAME:
            raise NoPlainFile(f"it is not a plain file: {error.strerror}") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoPlainFile("it is not a plain file")
    return descriptor


def plain(path: Path) -> Path:
    """Check that `path` is a plain file and return it, for readers that open by name. Raises as `open_plain`."""
    os.close(open_plain(path))
    return path


def open_binary(path: Path) -> BinaryIO:
    """Open a plain file for reading, as `open_plain` does."""
    return os.fdopen(open_plain(path), "rb")


def is_out_of_descriptors(error: BaseException) -> bool:
    """Return whether an error means that too many files are open, not that the file is damaged."""
    return isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS


def is_passing(error: BaseException) -> bool:
    """Return whether an error comes from this machine or its disk, not from a file's contents, and may pass."""
    return isinstance(error, OSError) and error.errno in PASSING_ERRNOS


def patiently(read: Callable[[], T]) -> T:
    """Return the result of `read`; repeat it a few times, with pauses, while its error may pass."""
    for pause_s in _PAUSES_S:
        try:
            return read()
        except OSError as error:
            if not is_passing(error):
                raise
            time.sleep(pause_s)
    return read()


def names_in(path: Path) -> list[str]:
    """Return the names in a folder, sorted; none if it does not exist. Raises `OSError` if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def identity(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when the file does (for a broken link, the link); None if it does not exist."""
    try:
        return identity_of(os.stat(path) if os.path.exists(path) else os.lstat(path))
    except OSError:
        return None


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """Return the `identity` of the file with this status."""
    return status.st_dev, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns


def remember(path: Path, read: Callable[[], T], part: Hashable, memory: dict[Hashable, Any] = _memory) -> T:
    """Return the result of `read`, called once per process while the file is unchanged.

    `part` names the content to read. Raises as `read` does, after repeated attempts if the error may pass, and
    `OSError` if there is no file.
    """
    return remember_by((file_key(path), part), read, memory)


def file_key(path: Path) -> Hashable:
    """Return a key that changes when the file (a broken link: the link) is replaced or written.

    Raises `OSError` if it does not exist.
    """
    try:
        status = os.stat(path)
    except OSError:
        status = os.lstat(path)
    return str(path), identity_of(status)


def remember_by(key: Hashable, read: Callable[[], T], memory: dict[Hashable, Any] = _memory) -> T:
    """Return the result of `read`, called once per process and key. A full `memory` is emptied."""
    with _lock:
        if key in memory:
            known: T = memory[key]
            return known
    value = patiently(read)
    with _lock:
        if len(memory) >= _MOST:
            memory.clear()
        memory[key] = value
    return value


def forget_all(memory: dict[Hashable, Any]) -> None:
    """Empty a memory of `remember_by`, which other threads may be reading."""
    with _lock:
        memory.clear()


def open_lock(path: Path, *, written: bool = False) -> BinaryIO:
    """Open a lock file for reading and writing, and create it if missing. The caller locks it.

    Args:
        path: the lock, in the folder `locks/` of a data folder.
        written: whether the caller writes into it. Then a file with a second hard link is refused, too.

    Raises `EnvironmentProblem` unless it is a plain file: for a symbolic link, a device, a pipe, a folder.
    """
    no_plain_file = f"{path} is not a plain file, so it cannot be a lock of this data folder; remove it"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
    except OSError as error:
        if error.errno in (errno.EISDIR, *_OF_THE_NAME):
            raise EnvironmentProblem(no_plain_file) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise EnvironmentProblem(no_plain_file)
        if written and status.st_nlink > 1:
            raise EnvironmentProblem(f"{path} is a hard link: writing the lock would overwrite another file; remove it")
        return os.fdopen(descriptor, "r+b")
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[], Exception], *, written: bool = False) -> Iterator[BinaryIO]:
    """Hold a lock file, which the kernel drops with the process.

    Raises `busy()` if another process holds it, and as `open_lock` does.
    """
    with open_lock(path, written=written) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise busy() from error
        yield file


def read_lock(path: Path, limit_bytes: int) -> bytes:
    """Return the first `limit_bytes` of a lock file; empty if it does not exist or is not a plain file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(limit_bytes) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def is_held(path: Path) -> bool:
    """Return whether another process holds the lock, by trying a shared one; False if the file cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)  # and the lock with it
    return False


def is_shared_by_any(descriptor: int) -> bool:
    """Return whether any process, including this one, holds a POSIX lock on the file. Raises `OSError` as `fcntl`."""
    # A `struct flock` of the whole file: l_type, l_whence, l_start, l_len, l_pid.
    write_lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, write_lock)
    (lock_type,) = struct.unpack_from("h", answer)
    return bool(lock_type != fcntl.F_UNLCK)


_COPY_TRIES = 5
_PARTS = ("", "-wal")  # SQLite rebuilds the shared memory from these


@contextlib.contextmanager
def queue_copy(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary copy of the queue, with its write-ahead log.

    Raises `EnvironmentProblem` if another process keeps writing to it, `OSError` if it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="gpufarm-queue-") as folder:
        copy = Path(folder, path.name)
        _copy(path, copy)
        yield copy


def _copy(path: Path, copy: Path) -> None:
    """Copy the database and its write-ahead log; repeat if another process wrote meanwhile."""
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


def _state(path: Path) -> list[tuple[int, ...] | None]:
    return [identity(Path(f"{path}{suffix}")) for suffix in _PARTS]
