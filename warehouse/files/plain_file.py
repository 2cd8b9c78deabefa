"""Opens plain files of the data folder for reading; opening a pipe instead would block for ever.

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
    """The name leads to no plain file, but to a pipe, a device, a folder or a broken link."""


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
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoPlainFile("it is no plain file")
    return descriptor


def plain(path: Path) -> Path:
    """Check that `path` is a plain file and return it, for readers that open by name. Raises as `open_plain`."""
    os.close(open_plain(path))
    return path


def open_binary(path: Path) -> BinaryIO:
    """Open a plain file for reading, as `open_plain` does."""
    return os.fdopen(open_plain(path), "rb")


def is_out_of_descriptors(error: BaseException) -> bool:
    """Return whether an error means that too many files are open, and so nothing about the file itself."""
    return isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS


def identity(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when the file does (for a broken link, the link); None if there is no such name."""
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
