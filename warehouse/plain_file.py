"""Opens a file of the data folder for reading, and nothing but a file: a pipe of that name would block for ever.

Start reading at `open_plain`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Not of the file, but of this process or computer.
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class NoPlainFile(OSError):
    """A name in the folder that leads to no plain file: a pipe, a device, a folder, a link to nothing."""


def open_plain(path: Path) -> int:
    """Return a descriptor of a plain file, opened for reading; it never waits.

    Raises `NoPlainFile`, `FileNotFoundError` only if the name itself is gone, and `OSError` as opening does.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if os.path.islink(path):
            raise NoPlainFile("it is a link to a file that does not exist") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoPlainFile("it is no plain file")
    return descriptor


def plain(path: Path) -> Path:
    """Return `path` once it is found to be a plain file, for a reader that opens it by name. Raises as `open_plain`."""
    os.close(open_plain(path))
    return path


def open_binary(path: Path) -> BinaryIO:
    """Open a plain file for reading, as `open_plain` does."""
    return os.fdopen(open_plain(path), "rb")


def is_out_of_descriptors(error: BaseException) -> bool:
    """Whether an error says nothing of the file that was to be opened: too many others are open."""
    return isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS


def identity(path: Path) -> tuple[int, ...] | None:
    """Return what stays the same while a file does, of a link to nothing the link's; None if the name is gone."""
    try:
        status = os.stat(path)
    except OSError:
        try:
            status = os.lstat(path)
        except OSError:
            return None
    return identity_of(status)


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """The `identity` of what `status` describes."""
    return status.st_dev, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns
