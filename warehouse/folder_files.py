"""A read-only file system through which DuckDB sees those Parquet files of a data folder that count.

Start reading at `FolderFiles`; `warehouse.connection` registers it, and closes every other way to files.

DuckDB's `allowed_directories` permits writing as well as reading, so no path of the folder is allowed. This file system
is: it knows no operation that writes, and no file but those of the warehouse's tables that count.
"""

from __future__ import annotations

import datetime
import errno
import functools
import io
import os
import re
import resource
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from conf.errors import CommandError, EnvironmentProblem
from warehouse import damage
from warehouse.catalogue import Catalogue, counting, look, merged_damage
from warehouse.damage import DamagedFile
from warehouse.layout import KINDS, FolderLayout
from warehouse.merged import is_merged_name
from warehouse.plain_file import identity, identity_of, open_plain
from warehouse.schema import TABLES

SCHEME = "gpufarm"
_PINNED = 256  # files that are kept open for a view of a query that has begun, at most
_PLANS = 128  # views of queries whose files are kept open, at most
_VIEWS_OF_A_QUERY = 32  # so many that views named earlier are of a query that has ended, as good as always
_ATTEMPTS = 100  # at a list of files that all stay until they are opened
_NO_ROWS = "no-rows.parquet"
_PATH = re.compile(rf"{SCHEME}://(\w+)/(\d+)/((?:family=[^/]+/)?[^/]+\.parquet)")


def files_of(kind: str) -> str:
    """Return the glob that stands for the files of `kind` that count."""
    return f"{SCHEME}://{kind}/*.parquet"


class FolderFiles(AbstractFileSystem):
    """The files of one data folder for one DuckDB connection and its cursors.

    A query's globs are answered with the files that count at that moment. Up to `_PINNED` of them are opened then, so
    that compaction may delete them, with up to a quarter of the descriptors that the process may have. Further ones are
    opened by name, and those that are gone by then are counted in `lost`. What queries open is in `opened`.
    """

    protocol = SCHEME
    cachable = False

    def __init__(self, folder: FolderLayout) -> None:
        super().__init__()
        self._folder = folder
        self._lock = threading.RLock()
        self._plans = 0
        self._pinned: OrderedDict[int, dict[str, _SharedFile]] = OrderedDict()  # plan -> files that it keeps open
        self._shared: weakref.WeakValueDictionary[tuple[int, ...], _SharedFile] = weakref.WeakValueDictionary()
        self._damaged: dict[str, tuple[int, ...]] = {}
        self._whole: dict[str, tuple[int, ...]] = {}  # verified, page by page
        # Counts, as several cursors may be at work: each compares what there was before its query and after.
        self.failures = 0
        self.failure: CommandError | None = None  # the last one
        self.lost = 0
        self.unpinned = 0  # queries that open files by name
        self.opened: set[Path] = set()

    @property
    def damaged(self) -> tuple[Path, ...]:
        """Return the damaged files that are left out."""
        with self._lock:
            return tuple(sorted(map(Path, self._damaged)))

    def leave_out_damaged(self) -> list[DamagedFile]:
        """Find damaged files among those that the query opened, report each on stderr, and stop serving them."""
        identities = {path: known for path in sorted(self.opened) if (known := identity(path)) is not None}
        paths = [
            path
            for path, known in identities.items()
            if known not in (self._damaged.get(str(path)), self._whole.get(str(path)))
        ]
        # Footers first; only where all are whole, every page is decoded, and last as DuckDB does it.
        damaged = (
            damage.damaged_among(paths)
            or damage.damaged_among(paths, pages=True)
            or damage.damaged_among(paths, judge=damage.damage_for_duckdb)
        )
        self._leave_out(damaged, identities)
        if not damaged:
            with self._lock:
                self._whole |= {str(path): identities[path] for path in paths}
        return damaged

    def _leave_out(self, damaged: list[DamagedFile], identities: dict[Path, tuple[int, ...]]) -> None:
        with self._lock:
            self._damaged |= {str(file.path): identities[file.path] for file in damaged}
        damage.report(damaged)

    def glob(self, path: str, **_options: Any) -> list[str]:
        """Return the files that `path` stands for: a glob of `files_of`, or a file of an earlier answer."""
        for kind in TABLES:
            if path == files_of(kind):
                try:
                    return self._plan(kind)
                except CommandError as error:
                    self.failure = error
                    self.failures += 1
                    raise
        return [path] if _PATH.fullmatch(path) else []

    def open(self, path: str, mode: str = "rb", **_options: Any) -> _OpenFile:
        if mode != "rb":
            _refuse(path)
        match = _PATH.fullmatch(path)
        if match is None or match[1] not in TABLES:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        kind, plan, name = match[1], int(match[2]), match[3]
        if name == _NO_ROWS:
            return _OpenFile(_NoRows(_empty_file(kind)))
        real = self._folder.root / kind / name
        self.opened.add(real)
        with self._lock:
            pinned = self._pinned.get(plan, {}).get(name)
        try:
            return _OpenFile(pinned or self._shared_file(real))
        except FileNotFoundError:
            self.lost += 1
            raise

    def exists(self, path: str, **_options: Any) -> bool:
        return _PATH.fullmatch(path) is not None

    def isfile(self, path: str) -> bool:
        return False  # DuckDB asks before it writes

    def isdir(self, path: str) -> bool:
        return False

    def size(self, path: str) -> int:
        with self.open(path) as file:
            return file.size

    def modified(self, path: str) -> datetime.datetime:
        with self.open(path) as file:
            return file.modified

    def unstrip_protocol(self, name: str) -> str:
        return name

    def _refused(self, *paths: Any, **_options: Any) -> NoReturn:
        _refuse(str(paths[0] if paths else self._folder.root))

    mkdir = makedirs = rmdir = rm = rm_file = _rm = mv = move = rename = touch = pipe = pipe_file = put = put_file = (
        cp_file
    ) = copy = delete = write_bytes = write_text = _refused

    def close(self) -> None:
        """Close the files that are kept open; those that DuckDB has open stay until it drops them."""
        with self._lock:
            self._pinned.clear()

    def _plan(self, kind: str) -> list[str]:
        for _ in range(_ATTEMPTS):
            names = self._counting(kind)
            pinned: dict[str, _SharedFile] = {}
            try:
                for name in names[:_PINNED]:
                    if not self._has_room():
                        break
                    self._pin(kind, name, pinned)
            except FileNotFoundError:  # merged and deleted since the folder was listed: a new listing knows better
                continue
            with self._lock:
                self._plans += 1
                self._pinned[self._plans] = pinned
                self.unpinned += len(pinned) < len(names)
            return [f"{SCHEME}://{kind}/{self._plans}/{name}" for name in (_NO_ROWS, *names)]
        raise EnvironmentProblem(
            f"the files of {self._folder.root / kind} change faster than a query is planned; run it again"
        )

    def _pin(self, kind: str, name: str, pinned: dict[str, _SharedFile]) -> None:
        try:
            pinned[name] = self._shared_file(self._folder.root / kind / name)
        except FileNotFoundError:
            raise
        except OSError:  # no plain file, which the query finds out, or too many are open
            pass

    def _has_room(self) -> bool:
        """Return whether one more file may be kept open, after dropping those of the oldest queries."""
        most = _descriptors() // 4
        with self._lock:
            while self._pinned and (len(self._shared) >= most or len(self._pinned) > _PLANS):
                plan, pinned = self._pinned.popitem(last=False)
                self.unpinned += bool(pinned) and plan > self._plans - _VIEWS_OF_A_QUERY
                del pinned
            return len(self._shared) < most

    def _shared_file(self, real: Path) -> _SharedFile:
        """Return the file, opened once for all queries."""
        known = identity(real)
        with self._lock:
            shared = None if known is None else self._shared.get(known)
            if shared is None:
                shared = _SharedFile(open_plain(real))
                self._shared[shared.identity] = shared
            return shared

    def _counting(self, kind: str) -> list[str]:
        """The files that count, below the folder of `kind`, without those that are known to be damaged."""
        root = self._folder.root / kind
        if kind not in KINDS:
            names = sorted(os.listdir(root)) if root.is_dir() else []
            names = [name for name in names if name.endswith(".parquet") and not name.startswith("_")]
            return [name for name in names if not self._is_left_out(root / name)]

        def at(catalogue: Catalogue) -> tuple[list[str], list[str]]:
            return catalogue.lost_lines(), counting(catalogue)

        lost, names = look(self._folder, kind, at, self._is_left_out)
        if lost:
            raise EnvironmentProblem("; ".join(lost))
        kept = [name for name in names if not self._is_left_out(root / name)]
        damaged = [
            DamagedFile(root / name, reason)
            for name in kept
            if is_merged_name(os.path.basename(name)) and (reason := merged_damage(root / name)) is not None
        ]
        damage.report(damaged)
        return [name for name in kept if root / name not in {file.path for file in damaged}]

    def _is_left_out(self, path: Path) -> bool:
        if not self._damaged:
            return False
        known = self._damaged.get(str(path))
        return known is not None and known == identity(path)


class _SharedFile:
    """A file's content, which any number of threads read at once; closed when nobody holds it any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self.size, self.modified_s, self.identity = status.st_size, status.st_mtime, identity_of(status)
        # Not in `__del__`: while that runs, a weak reference still leads here, and a thread that follows it would
        # read from a descriptor that is closed, or is another file's by then.
        weakref.finalize(self, os.close, descriptor).atexit = False

    def read(self, at: int, size: int) -> bytes:
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, at)):
            parts.append(part)
            at, size = at + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _NoRows(_SharedFile):
    """The content of a file without rows, which is nowhere on the disk."""

    def __init__(self, content: bytes) -> None:
        self._content, self.size, self.modified_s = content, len(content), 0.0

    def read(self, at: int, size: int) -> bytes:
        return self._content[at : at + size]


class _OpenFile:
    """A file as DuckDB reads it. Each thread has its own position, since several seek and read at once."""

    def __init__(self, file: _SharedFile) -> None:
        self._file: _SharedFile | None = file
        self._places: dict[int, int] = {}
        self.size = file.size

    @property
    def modified(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._open_file().modified_s, datetime.UTC)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.size}[whence]
        self._places[threading.get_ident()] = place
        return place

    def tell(self) -> int:
        return self._places.get(threading.get_ident(), 0)

    def read(self, size: int = -1) -> bytes:
        at = self.tell()
        content = self._open_file().read(at, self.size - at if size < 0 else size)
        self._places[threading.get_ident()] = at + len(content)
        return content

    def write(self, content: bytes) -> NoReturn:
        _refuse("a file of the data folder")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._file = None

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _open_file(self) -> _SharedFile:
        if self._file is None:
            raise ValueError("the file is closed")
        return self._file


def _refuse(path: str) -> NoReturn:
    raise OSError(errno.EROFS, "the warehouse is read-only", path)


def _descriptors() -> int:
    """Return the number of descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


@functools.cache
def _empty_file(kind: str) -> bytes:
    buffer = pa.BufferOutputStream()
    # Not `empty_table()`, which imports pandas where there is one, for a quarter of a second.
    pq.write_table(pa.Table.from_batches([], TABLES[kind]), buffer)
    return bytes(buffer.getvalue())
