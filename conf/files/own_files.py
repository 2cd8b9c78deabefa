"""Opens folders and files that only this user can change.

Start reading at `open_own_folder`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_MAY = 0o077
_OTHERS_MAY_WRITE = 0o022


def open_own_folder(path: str | os.PathLike[str], *, private: bool) -> int | None:
    """Return a descriptor of a real folder of this user; None for a link, another user's folder, or none.

    Args:
        path: the folder.
        private: whether it must also be closed to everybody else, as mode 0700 is.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and not (private and stat.S_IMODE(status.st_mode) & _OTHERS_MAY):
        return descriptor
    os.close(descriptor)
    return None


def open_own_file(folder: int, name: str, flags: int = os.O_RDONLY, *, private: bool = False) -> int:
    """Return a descriptor of a plain file of this user in an open folder, made with mode 0600; it never waits.

    `flags` are those of `os.open`. A `private` file is one that nobody else may write to. Raises `OSError` as opening
    does, and `PermissionError` for whatever is no such file.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK | _NO_LINK, 0o600, dir_fd=folder)
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if is_own and not (private and status.st_mode & _OTHERS_MAY_WRITE):
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "it is no plain file of this user alone", str(Path(name)))
