"""A read-only file system that shows DuckDB the Parquet files of a data folder that count.

Start reading at `FolderFiles`; `warehouse.reading.connection` registers it, and blocks all other access to files.

DuckDB's `allowed_directories` permits writing as well as reading, so no path of the folder is allowed. This file system
is allowed: it has no write operation, and serves only files of the warehouse's tables that count.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from conf.errors import CommandError, EnvironmentProblem
from warehouse.files.counting import counting_plan
from warehouse.files.folder import DamagedFile, DataFolder, damage_for_duckdb, damage_of, find_damaged, report_damage
from warehouse.files.plain_file import identity, identity_of, is_out_of_descriptors, open_plain
from warehouse.files.views import SCHEME, files_of
from warehouse.tables.schema import KINDS, TABLES

_PINNED = 256  # most files to keep open for each view of a running query
_PATHS = 16 * _PINNED  # file names to remember for such queries
_VIEWS_OF_A_QUERY = 32  # views to remember; older ones almost always belong to a finished query
_ATTEMPTS = 100  # attempts to list files that all exist until they are opened
_NO_ROWS = "no-rows.parquet"
_ALTERED = "altered/"  # above a file that is served without some of its runs
_PATH = re.compile(rf"{SCHEME}://(\w+)/(\d+)/({_ALTERED})?((?:family=[^/]+/)?[^/]+\.parquet)")


class FolderFiles(AbstractFileSystem):
    """The files of one data folder for one DuckDB connection and its cursors.

    A query's globs are answered with the files that count at that moment. Up to `_PINNED` of them are opened then, so
    compaction may delete them. Further files are opened by name, and those that are gone by then are counted in `lost`.
    `opened` has all files that queries open. Pinned files take up to a quarter of the process's descriptors, files
    opened by name up to half; beyond that, each read reopens the file.
    """

    protocol = SCHEME
    cachable = False

    def __init__(self, folder: DataFolder) -> None:
        super().__init__()
        self._folder = folder
        self._lock = threading.RLock()
        self._plans = 0
        self._pinned: OrderedDict[str, _SharedFile] = OrderedDict()  # DuckDB's path -> its content
        self._shared: weakref.WeakValueDictionary[tuple[int, ...], _SharedFile] = weakref.WeakValueDictionary()
        self._damaged: dict[str, tuple[int, ...]] = {}
        self._intact: dict[str, tuple[int, ...]] = {}  # verified page by page
        # Counts: several cursors may run, and each compares the values before and after its query.
        self.failures = 0
        self.failure: CommandError | OSError | None = None  # the last one
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
            if known not in (self._damaged.get(str(path)), self._intact.get(str(path)))
        ]
        # Footers first; if all are intact, every page by Arrow, then by DuckDB.
        damaged = (
            find_damaged(paths)
            or find_damaged(paths, functools.partial(damage_of, pages=True))
            or find_damaged(paths, damage_for_duckdb)
        )
        with self._lock:
            self._damaged |= {str(file.path): identities[file.path] for file in damaged}
            if not damaged:
                self._intact |= {str(path): identities[path] for path in paths}
        report_damage(damaged)
        return damaged

    def glob(self, path: str, **_options: Any) -> list[str]:
        """Return the files that `path` matches: a glob of `files_of`, or a file of an earlier answer."""
        for kind in TABLES:
            if path == files_of(kind):
                try:
                    return self._plan(kind)
                except (CommandError, OSError) as error:
                    self._fail(error)
                    raise
        return [path] if _PATH.fullmatch(path) else []

    def open(self, path: str, mode: str = "rb", **_options: Any) -> _OpenFile:
        if mode != "rb":
            _refuse(path)
        with self._lock:
            if (pinned := self._pinned.get(path)) is not None:
                return _OpenFile(pinned)
        kind, _, altered, name = self._parts(path)
        if name == _NO_ROWS:
            return _OpenFile(_SharedFile(_empty_file(kind)))
        real = self._folder.root / kind / name
        self.opened.add(real)
        try:
            if altered:
                raise FileNotFoundError(errno.ENOENT, "the query has to be planned again", path)
            return _OpenFile(self._shared_file(real, _descriptors() // 2) or _NamedFile(real, self))
        except OSError as error:
            self.note(error)
            raise

    def note(self, error: OSError) -> None:
        """Count a file that could not be read because it is gone, or because too many are open."""
        if isinstance(error, FileNotFoundError):
            self.lost += 1
        elif is_out_of_descriptors(error):
            self._fail(error)

    def _fail(self, error: CommandError | OSError) -> None:
        self.failure = error
        self.failures += 1

    def exists(self, path: str, **_options: Any) -> bool:
        return _PATH.fullmatch(path) is not None

    def isfile(self, path: str) -> bool:
        return False  # DuckDB asks before it writes

    def isdir(self, path: str) -> bool:
        return False

    def size(self, path: str) -> int:
        return self.open(path).size

    def modified(self, path: str) -> datetime.datetime:
        return self.open(path).modified

    def unstrip_protocol(self, name: str) -> str:
        return name

    def _refused(self, *paths: Any, **_options: Any) -> NoReturn:
        _refuse(str(paths[0] if paths else self._folder.root))

    mkdir = makedirs = rmdir = rm = rm_file = _rm = mv = move = rename = touch = pipe = pipe_file = put = put_file = (
        cp_file
    ) = copy = delete = write_bytes = write_text = _refused

    def close(self) -> None:
        """Close the pinned files; those that DuckDB has open stay until it drops them."""
        with self._lock:
            self._pinned.clear()

    def _plan(self, kind: str) -> list[str]:
        with self._lock:
            self._plans += 1
            plan = f"{SCHEME}://{kind}/{self._plans}/"
        most = min(_PINNED, _descriptors() // 4)
        for _ in range(_ATTEMPTS):
            paths = [plan + _NO_ROWS]
            contents: dict[str, _SharedFile] = {}
            counting: list[tuple[str, frozenset[str]]] = []
            is_pinned = True
            try:
                counting = list(self._counting(kind))
                for name, doubled in counting:
                    path = plan + _ALTERED + name if doubled else plan + name
                    paths.append(path)
                    real = self._folder.root / kind / name
                    if len(contents) >= most and not doubled:
                        is_pinned = False
                        continue
                    self.opened.add(real)
                    content = _without_runs(real, doubled) if doubled else self._shared_file(real, _descriptors() // 4)
                    if content is None:
                        is_pinned = False
                    else:
                        contents[path] = content
            except FileNotFoundError:  # merged and deleted since the folder was listed: list it again
                continue
            except (pa.ArrowException, OSError, ValueError) as error:
                self.opened.update(self._folder.root / kind / name for name, _ in counting)
                if not counting or is_out_of_descriptors(error) or not self.leave_out_damaged():
                    raise
                continue  # the files that they hide may exist
            with self._lock:
                self.unpinned += not is_pinned
                self._pinned |= contents
                while len(self._pinned) > _PATHS:
                    self._drop_oldest()
            return paths
        raise EnvironmentProblem(
            f"the files of {self._folder.root / kind} change faster than a query is planned; run it again"
        )

    def _drop_oldest(self) -> None:
        path, _ = self._pinned.popitem(last=False)
        _, plan, _, _ = self._parts(path)
        self.unpinned += int(plan) > self._plans - _VIEWS_OF_A_QUERY

    def _shared_file(self, real: Path, most: int) -> _SharedFile | None:
        """Return the file, opened once for all queries; None if that would take more than `most` descriptors."""
        known = identity(real)
        with self._lock:
            shared = None if known is None else self._shared.get(known)
            if shared is not None:
                return shared
            while len(self._shared) >= most and self._pinned:
                self._drop_oldest()
            if len(self._shared) >= most:
                return None
        try:
            shared = _SharedFile(open_plain(real))
        except OSError as error:
            if is_out_of_descriptors(error):
                return None
            raise
        with self._lock:
            self._shared[shared.identity] = shared
        return shared

    def _counting(self, kind: str) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield (name below `kind`, runs that another file holds) of each file that counts."""
        if kind in KINDS:
            yield from counting_plan(self._folder, kind, self._is_left_out)
            return
        root = self._folder.root / kind
        for name in sorted(os.listdir(root)) if root.is_dir() else ():
            if name.endswith(".parquet") and not name.startswith("_") and not self._is_left_out(root / name):
                yield name, frozenset()

    def _is_left_out(self, path: Path) -> bool:
        if not self._damaged:
            return False
        known = self._damaged.get(str(path))
        return known is not None and known == identity(path)

    def _parts(self, path: str) -> tuple[str, str, str | None, str]:
        """Return (kind, number of the plan, `_ALTERED` or None, name below the kind) of a file of an earlier answer."""
        match = _PATH.fullmatch(path)
        if match is None or match[1] not in TABLES:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return match[1], match[2], match[3], match[4]


class _SharedFile:
    """A file's content, which any number of threads may read; closed with the last reference."""

    def __init__(self, source: int | bytes) -> None:
        self._content: bytes | None = None
        self._descriptor = -1
        self.identity: tuple[int, ...] = ()  # of a file that is read as it is
        if isinstance(source, bytes):
            self._content, self.size, self.modified_s = source, len(source), 0.0
        else:
            self._descriptor = source
            status = os.fstat(source)
            self.size, self.modified_s, self.identity = status.st_size, status.st_mtime, identity_of(status)
        if self._descriptor >= 0:
            # Not in `__del__`: while it runs, weak references are still valid, and another thread could read from a
            # descriptor that is closed or belongs to another file by then.
            weakref.finalize(self, os.close, self._descriptor).atexit = False

    def read(self, at: int, size: int) -> bytes:
        if self._content is not None:
            return self._content[at : at + size]
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, at)):
            parts.append(part)
            at, size = at + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _NamedFile(_SharedFile):
    """A file that is reopened for each read, because the process has no spare descriptors."""

    def __init__(self, path: Path, files: FolderFiles) -> None:
        file = _SharedFile(open_plain(path))
        self.size, self.modified_s, self.identity = file.size, file.modified_s, file.identity
        self._path, self._files = path, files

    def read(self, at: int, size: int) -> bytes:
        try:
            file = _SharedFile(open_plain(self._path))
            if file.identity != self.identity:
                raise FileNotFoundError(errno.ENOENT, "another file has taken its place", str(self._path))
        except OSError as error:
            self._files.note(error)
            raise
        return file.read(at, size)


class _OpenFile:
    """A file as DuckDB reads it. Each thread has its own position, since several seek and read in parallel."""

    def __init__(self, file: _SharedFile) -> None:
        self._file = file
        self._places: dict[int, int] = {}
        self.size = file.size

    @property
    def modified(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._file.modified_s, datetime.UTC)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.size}[whence]
        self._places[threading.get_ident()] = place
        return place

    def tell(self) -> int:
        return self._places.get(threading.get_ident(), 0)

    def read(self, size: int = -1) -> bytes:
        position = self.tell()
        content = self._file.read(position, self.size - position if size < 0 else size)
        self._places[threading.get_ident()] = position + len(content)
        return content

    def write(self, content: bytes) -> NoReturn:
        _refuse("a file of the data folder")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # closed twice
            del self._file


def _refuse(path: str) -> NoReturn:
    raise OSError(errno.EROFS, "the warehouse is read-only", path)


def _descriptors() -> int:
    """Return the number of descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def _without_runs(path: Path, run_ids: frozenset[str]) -> _SharedFile:
    """Return a merged file without some of its runs."""
    with os.fdopen(open_plain(path), "rb") as file:
        table = pq.ParquetFile(file).read()
    is_doubled = pc.is_in(table.column("run_id"), pa.array(sorted(run_ids), pa.string()))
    return _SharedFile(_parquet_bytes(table.filter(pc.invert(is_doubled))))


@functools.cache
def _empty_file(kind: str) -> bytes:
    # Not `empty_table()`, which imports pandas if it is installed, for a quarter of a second.
    return _parquet_bytes(pa.Table.from_batches([], TABLES[kind]))


def _parquet_bytes(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    return bytes(buffer.getvalue())
