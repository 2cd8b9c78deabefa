"""Keeps what a script saves in a folder that is removed: it is written there and read back from there.

Start reading at `SavedFiles.install`; `saved_tensors` says what a file holds in place of tensors. Files that the script
writes by other means than saving are written where it says.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from featurize.replacing import replace_attribute

NOTE = "files that the script saves were kept in a folder that is removed"
# Names of functions below which files are saved, in any library and in the script. Data sets that are saved to disk
# are read by C++, which knows nothing of another folder.
_SAVES = re.compile(
    r"_*(atomic_)?save(_(?!to_disk)\w+|fig|z|z_compressed|txt)?"
    r"|_*(write|dump|remove|delete|rotate|prune|clean|cleanup)_\w*checkpoints?(_\w+)?"
)
_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".pth.tar")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Functions of `os` whose first argument is a path that is looked at, and those that change a file which stays.
_LOOKING = ("stat", "lstat", "access", "readlink", "listxattr", "getxattr", "statvfs")
_ALTERING = ("setxattr", "utime", "chmod", "chown", "truncate")
_CHANGING = ("open", "mkdir", "remove", "unlink", "rmdir", "rename", "replace", "symlink", "link", "listdir", "scandir")


class SavedFiles:
    """The files that a script has saved. A path keeps its name below `root`, and is looked up there first.

    note   called with `NOTE` where a file is kept
    """

    def __init__(self, root: Path, note: Callable[[str], None]) -> None:
        self._root, self._note = os.path.abspath(root), note
        self._apart = os.path.dirname(self._root) + os.sep  # this project's own files
        self._used = False
        self._removed: set[str] = set()  # what the script has removed while saving, and is still there
        self._os: dict[str, Callable[..., Any]] = {
            name: getattr(os, name) for name in (*_LOOKING, *_ALTERING, *_CHANGING) if hasattr(os, name)
        }
        self._builtin_open, self._remove_tree = builtins.open, shutil.rmtree

    def install(self) -> None:
        """Replace the functions of Python that open, list, make and remove files, in this process."""
        replace_attribute(builtins, "open", self.open)
        replace_attribute(io, "open", self.open)
        for name in (*_LOOKING, *_ALTERING):
            if name in self._os:
                way = self._look if name in _LOOKING else self._alter
                looking = functools.partial(way, self._os[name])  # which no class that holds it binds
                replace_attribute(os, name, functools.update_wrapper(looking, self._os[name]))
        for name in _CHANGING:
            replace_attribute(os, name, getattr(self, f"_{name}"))
        supported = (os.supports_fd, os.supports_follow_symlinks, os.supports_dir_fd, os.supports_effective_ids)
        for functions in supported:  # sets of the functions themselves
            functions.update({getattr(os, name) for name, real in self._os.items() if real in functions})
        replace_attribute(shutil, "rmtree", self._rmtree)

    # -- where a path is

    def at(self, path: Any) -> Any:
        """Return where the content of a path lies: in the folder if it was saved. Raises `FileNotFoundError`."""
        if not self._used or isinstance(path, int) or (full := self._full(path)) is None:
            return path
        kept = self._root + full
        if self._there(kept) and not (self._is_folder(kept) and self._is_folder(full) and not self._gone(full)):
            return kept
        if self._gone(full):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return path

    def into(self, path: Any) -> str:
        """Return where to write what is saved at a path; its folder is there then."""
        full = self._full(path)
        assert full is not None, "a path outside this project's own"
        self._used = True
        kept = self._root + full
        self._make_folders(os.path.dirname(kept))
        if stat.S_ISLNK(self._mode(kept)):
            self._os["unlink"](kept)
        return kept

    def takes(self, path: Any) -> bool:
        """Whether what is written to a path now is saved."""
        if isinstance(path, int) or (full := self._full(path)) is None:
            return False
        if (mode := self._mode(full)) and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            return False  # a device
        if full.endswith(_SUFFIXES) or _a_saver_runs():
            return True
        folder = os.path.dirname(full)
        return self._used and (
            self._there(self._root + full)
            or self._gone(full)
            or (self._there(self._root + folder) and not self._there(folder))
        )

    def _full(self, path: Any) -> str | None:
        """The absolute path; None for this project's own files."""
        try:
            full = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return None
        return None if full.startswith(self._apart) else full

    def _mode(self, path: str) -> int:
        try:
            return self._os["lstat"](path).st_mode
        except (OSError, ValueError):
            return 0

    def _there(self, path: str) -> bool:
        return self._mode(path) != 0

    def _is_folder(self, path: str) -> bool:
        return stat.S_ISDIR(self._mode(path))

    def _gone(self, full: str) -> bool:
        return bool(self._removed) and any(full == one or full.startswith(one + os.sep) for one in self._removed)

    def _make_folders(self, kept: str) -> None:
        if not self._there(kept):
            self._make_folders(os.path.dirname(kept))
            self._os["mkdir"](kept)

    # -- in the place of Python's own

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as Python's own function does; one that is saved in the folder."""
        if not set(mode) & set("wax+"):
            return self._builtin_open(self.at(file), mode, *args, **kwargs)
        if not self.takes(file):
            return self._builtin_open(file, mode, *args, **kwargs)
        if "x" in mode and os.path.lexists(file):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
        return self._builtin_open(self._kept_copy(file, whole="a" in mode or "r" in mode), mode, *args, **kwargs)

    def _kept_copy(self, path: Any, *, whole: bool) -> str:
        """Where to write, with the content that is there already."""
        self._note(NOTE)
        before = self.at(path) if whole and os.path.lexists(path) else None
        kept = self.into(path)
        if before is not None and before != kept:
            with self._builtin_open(before, "rb") as source, self._builtin_open(kept, "wb") as target:
                shutil.copyfileobj(source, target)
        return kept

    def _look(self, function: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        return function(path if kwargs.get("dir_fd") is not None else self.at(path), *args, **kwargs)

    def _alter(self, function: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Change a file's content or attributes; those of a file that is changed while saving, in the folder."""
        if kwargs.get("dir_fd") is None and os.path.isfile(path) and self.takes(path):
            return function(self._kept_copy(path, whole=True), *args, **kwargs)
        return self._look(function, path, *args, **kwargs)

    def _opened_by_number(self, path: Any, flags: int) -> Any:
        return self._kept_copy(path, whole=True) if flags & _WRITING and self.takes(path) else self.at(path)

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if kwargs.get("dir_fd") is None:
            path = self._opened_by_number(path, flags)
        return self._os["open"](path, flags, *args, **kwargs)

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("dir_fd") is not None or not self.takes(path):
            self._os["mkdir"](path, *args, **kwargs)
        elif os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        else:
            self._make_folders(self.into(path))

    def _remove(self, path: Any, **kwargs: Any) -> None:
        self._take_away("remove", path, **kwargs)

    def _unlink(self, path: Any, **kwargs: Any) -> None:
        self._take_away("unlink", path, **kwargs)

    def _rmdir(self, path: Any, **kwargs: Any) -> None:
        self._take_away("rmdir", path, **kwargs)

    def _rmtree(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._take_away("", path, *args, **kwargs)

    def _take_away(self, name: str, path: Any, *args: Any, **kwargs: Any) -> None:
        """Remove a file or folder; one that is none of those saved stays, if it is removed while saving."""
        function = self._os[name] if name else self._remove_tree
        full = self._full(path) if kwargs.get("dir_fd") is None else None
        if full is None or not self.takes(path):
            function(path, *args, **kwargs)
            return
        if not os.path.lexists(path):
            function(path, *args, **kwargs)  # which says that there is none
            return
        if self._there(self._root + full):
            function(self._root + full, *args, **kwargs)
        if self._there(full):
            self._used = True
            self._removed.add(full)

    def _rename(self, source: Any, target: Any, **kwargs: Any) -> None:
        self._move("rename", source, target, **kwargs)

    def _replace(self, source: Any, target: Any, **kwargs: Any) -> None:
        self._move("replace", source, target, **kwargs)

    def _move(self, name: str, source: Any, target: Any, **kwargs: Any) -> None:
        if kwargs or not (self.takes(source) or self.takes(target)) or not os.path.lexists(source):
            self._os[name](source, target, **kwargs)
            return
        place, full = self.at(source), self._full(source)
        kept = self.into(target)
        if full is not None and place == self._root + full:
            self._os[name](place, kept)
        else:
            self._borrow(os.path.abspath(os.fsdecode(place)), kept)
        if full is not None and self._there(full):
            self._removed.add(full)
        self._removed.discard(self._full(target) or "")

    def _borrow(self, place: str, kept: str) -> None:
        """Let a kept path have the content of a file, or of the files of a folder, which stay where they are."""
        if not self._is_folder(place):
            self._os["symlink"](place, kept)
            return
        self._make_folders(kept)
        for name in self._os["listdir"](place):
            self._borrow(os.path.join(place, name), os.path.join(kept, name))

    def _symlink(self, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        self._point("symlink", source, target, *args, **kwargs)

    def _link(self, source: Any, target: Any, **kwargs: Any) -> None:
        self._point("link", source, target, **kwargs)

    def _point(self, name: str, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("dir_fd") is not None or not self.takes(target):
            self._os[name](source if name == "symlink" else self.at(source), target, *args, **kwargs)
            return
        beside = os.path.join(os.path.dirname(os.path.abspath(os.fsdecode(target))), os.fsdecode(source))
        self._os["symlink"](os.path.abspath(self.at(beside)), self.into(target))

    def _listdir(self, path: Any = ".") -> list:
        return [entry.name for entry in self._scandir(path)] if self._lists(path) else self._os["listdir"](path)

    def _lists(self, path: Any) -> bool:
        """Whether a folder's files are not all where it lies, or some of them are removed."""
        if not self._used or isinstance(path, int | bytes):
            return False
        if (full := self._full(path)) is None:
            return False
        return self._there(self._root + full) or self._gone(full) or full in map(os.path.dirname, self._removed)

    def _scandir(self, path: Any = ".") -> Any:
        if not self._lists(path):
            return self._os["scandir"](path)
        full = self._full(path)
        assert full is not None
        kept = self._root + full
        if self._gone(full) and not self._there(kept):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        names = dict.fromkeys(self._os["listdir"](kept) if self._there(kept) else ())
        if self._is_folder(full):
            names |= {n: None for n in self._os["listdir"](full) if not self._gone(os.path.join(full, n))}
        return _Entries([_Entry(os.fspath(path), name) for name in names])


class _Entry:
    """What `os.scandir` gives of one name; each question is asked of the file system."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path)

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path)

    def inode(self) -> int:
        return self.stat().st_ino


class _Entries:
    """An iterator over entries that can be entered and closed, as that of `os.scandir`."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None: ...


def _a_saver_runs() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _is_saver(frame.f_code.co_name):
            return True
        frame = frame.f_back
    return False


@functools.cache
def _is_saver(name: str) -> bool:
    return _SAVES.fullmatch(name) is not None
