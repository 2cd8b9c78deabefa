"""Folders and files that belong to this user alone, and temporary folders that name the process that made them.

Start reading at `make_folder`, or at `own_folder` for folders that others may have put there. A temporary folder holds
a file `owner` with the identity of its process. If the process is killed, `farm.queue.leftovers` deletes the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conf.files.identity import identity

# How the names of temporary folders begin: of CUDA's multi-process service, of a private Ray, of children.
PREFIXES = ("gpufarm-trial-", "gpufarm-ray-", "gpufarm-child-")
OWNER_FILE = "owner"
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_MAY = 0o077
_OTHERS_MAY_WRITE = 0o022


def make_folder(prefix: str, base: str | os.PathLike[str] | None = None) -> Path:
    """Make a temporary folder (mode 0700) with the identity of this process. Raises `OSError`."""
    assert prefix.startswith(PREFIXES), prefix
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        (path / OWNER_FILE).write_text(identity(os.getpid()))
    except OSError:
        delete_folder(path)
        raise
    return path


@contextlib.contextmanager
def kept_folder(base: str) -> Iterator[str]:
    """Make such a folder for a child, and delete it at the end."""
    path = make_folder("gpufarm-child-", base)
    try:
        yield str(path)
    finally:
        delete_folder(path)


def delete_folder(path: Path) -> bool:
    """Delete a folder of this user with its contents, following no link; return whether it is gone.

    The owner file goes last, and stays beside what a process that still ends has written meanwhile: without it, the
    next sweep would leave the folder alone for a day.
    """
    with own_folder(path, private=False) as folder:
        if folder is None:
            return False
        inside = f"/proc/self/fd/{folder}"  # no link can redirect this
        with contextlib.suppress(OSError):
            os.chmod(inside, 0o700)  # from now on only this user can put links there
            _empty(inside)
            if os.listdir(inside) == [OWNER_FILE]:
                os.unlink(f"{inside}/{OWNER_FILE}")
            os.rmdir(path)  # a folder put in its place would stay unless it is empty
            return True
    return False


def _empty(top: str) -> None:
    """Delete everything in a folder except its owner file.

    Each folder inside is moved to the top before it is emptied. A child may nest folders too deeply for recursion, for
    a descriptor per level, and for the kernel's limit on paths.
    """
    folders = _delete_files(top, top)
    while folders:
        folder = folders.pop()
        with contextlib.suppress(OSError):
            folders += _delete_files(folder, top)
            os.rmdir(folder)


def _delete_files(folder: str, top: str) -> list[str]:
    """Delete a folder's files, except the owner file, and move its folders to `top`; return their new paths."""
    moved = []
    for entry in list(os.scandir(folder)):  # listed first: a renamed entry may be listed again
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry, 0o700)  # else it can be neither moved nor read
                path = f"{top}/{os.urandom(6).hex()}"
                os.rename(entry, path)
                moved.append(path)
            elif entry.path != f"{top}/{OWNER_FILE}":
                os.unlink(entry)
    return moved


@contextlib.contextmanager
def own_folder(path: str | os.PathLike[str], *, private: bool) -> Iterator[int | None]:
    """Open a real folder of this user and yield its descriptor; None for a link, another user's or a missing folder.

    The descriptor names the folder (`O_PATH`), so that even one without any rights can be opened.

    Args:
        path: the folder.
        private: whether it must also be closed to everybody else, as with mode 0700.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | _NO_LINK)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.geteuid() and not (private and stat.S_IMODE(status.st_mode) & _OTHERS_MAY)
        yield descriptor if is_own else None
    finally:
        os.close(descriptor)


def open_own_file(folder: int, name: str, flags: int = os.O_RDONLY, *, private: bool = False) -> int:
    """Open a plain file of this user in an open folder and return its descriptor. Never blocks.

    `flags` are those of `os.open`; created files have mode 0600. With `private`, nobody else may write to the file.
    Raises the `OSError` of opening, and `PermissionError` for any other kind of file.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK | _NO_LINK, 0o600, dir_fd=folder)
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if is_own and not (private and status.st_mode & _OTHERS_MAY_WRITE):
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "it is not a plain file of this user alone", str(Path(name)))
