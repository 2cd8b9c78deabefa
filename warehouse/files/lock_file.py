"""Lock files of a data folder: opened so that a hostile or copied folder cannot have another file written to.

Start reading at `open_lock`; `hold_shared` and `is_shared_by_any` are of locks that DuckDB clients see, too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path
from typing import BinaryIO

from conf.errors import EnvironmentProblem

# O_NONBLOCK: opening a fifo must not wait for its other end.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_lock(path: Path, *, written: bool = False) -> BinaryIO:
    """Open a lock file for reading and writing, and create it if missing. The caller locks it.

    Args:
        path: the lock, in the folder `locks/` of a data folder.
        written: whether the caller writes into it. Then a file with a second name is refused, too.

    Raises `EnvironmentProblem` for anything but a plain file: a symbolic link, a device, a pipe, a folder.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
    except OSError as error:
        raise _explained(error, path) from error
    try:
        _check_plain(os.fstat(descriptor), path, written)
        return os.fdopen(descriptor, "r+b")
    except BaseException:
        os.close(descriptor)
        raise


def read_lock(path: Path, limit_bytes: int) -> bytes:
    """Return the first `limit_bytes` of a lock file; empty if it does not exist or is no plain file."""
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


def hold_shared(descriptor: int) -> bool:
    """Take a POSIX read lock on an open file, as DuckDB does on a database; return whether it was acquired.

    The lock belongs to the open file and not to the process, so closing another descriptor does not drop it.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK))
    except (OSError, AttributeError):  # a file system without locks, or a system without this kind of lock
        return False
    return True


def is_shared_by_any(descriptor: int) -> bool:
    """Return whether any process, also this one, holds a POSIX lock on the file. Raises `OSError` as `fcntl` does."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
    (lock_type,) = struct.unpack_from("h", answer)
    return bool(lock_type != fcntl.F_UNLCK)


def _flock(lock_type: int) -> bytes:
    """A `struct flock` of the whole file: l_type, l_whence, l_start, l_len, l_pid."""
    return struct.pack("hhqqi4x", lock_type, os.SEEK_SET, 0, 0, 0)


def _check_plain(status: os.stat_result, path: Path, written: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise EnvironmentProblem(f"{path} is not a plain file, so it cannot be a lock of this data folder; remove it")
    if written and status.st_nlink > 1:
        raise EnvironmentProblem(f"{path} is a hard link: writing the lock would overwrite another file; remove it")


def _explained(error: OSError, path: Path) -> OSError | EnvironmentProblem:
    if error.errno == errno.ELOOP and path.is_symlink():
        return EnvironmentProblem(f"{path} is a symbolic link, so it cannot be a lock of this data folder; remove it")
    if error.errno in (errno.EISDIR, errno.ENXIO, errno.ENODEV):
        return EnvironmentProblem(f"{path} is not a plain file, so it cannot be a lock of this data folder; remove it")
    return error
