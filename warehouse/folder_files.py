"""A data folder's Parquet files as DuckDB sees them: a file system that can only read, and only what counts.

Start reading at `FolderFiles`; `warehouse.connection` registers it, and closes every other way to files.

DuckDB's `allowed_directories` permits writing as well as reading, so no path of the folder is allowed. This file system
is: it knows no operation that writes, and no file but those of `runs`, `telemetry`, `jobs` and `stale` that count.
"""

from __future__ import annotations

import datetime
import errno
import functools
import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from conf.errors import UsageError
from warehouse import damage
from warehouse.counting import counting_plan
from warehouse.damage import DamagedFile
from warehouse.folder import KINDS, DataFolder
from warehouse.schema import JOB_SCHEMA, RUN_SCHEMA, STALE_SCHEMA, TELEMETRY_SCHEMA

SCHEME = "gpufarm"
SCHEMAS = {"runs": RUN_SCHEMA, "telemetry": TELEMETRY_SCHEMA, "jobs": JOB_SCHEMA, "stale": STALE_SCHEMA}
_PINNED = 256  # open files a connection keeps for queries that have begun
_NO_ROWS = "no-rows.parquet"
_PATH = re.compile(rf"{SCHEME}://(\w+)/(\d+)/((?:family=[^/]+/)?[^/]+\.parquet)")


def files_of(kind: str) -> str:
    """The glob that stands for the files of `kind` that count."""
    return f"{SCHEME}://{kind}/*.parquet"


class FolderFiles(AbstractFileSystem):
    """The files of one data folder for one DuckDB connection and its cursors.

    A query's globs are answered with the files that count at that moment. As many as `_PINNED` of them are opened
    then, so that compaction may delete them; a larger folder's small files are opened by name, and those that are gone
    by then are counted in `lost`. What queries open is in `opened`.
    """

    protocol = SCHEME
    cachable = False

    def __init__(self, folder: DataFolder) -> None:
        super().__init__()
        self._folder = folder
        self._lock = threading.RLock()
        self._plans = 0
        self._pinned: OrderedDict[str, bytes | _SharedFile] = OrderedDict()  # path of DuckDB -> what it reads
        self._damaged: dict[str, tuple[int, int, int]] = {}
        # Counts, as several cursors may be at work: each compares what there was before its query and after.
        self.failures = 0
        self.failure: UsageError | None = None  # the last one
        self.lost = 0
        self.unpinned = 0  # queries that open files by name
        self.opened: set[Path] = set()

    def leave_out_damaged(self) -> list[DamagedFile]:
        """Find the damaged ones of the files that the query opened, and serve them no more. Names each on stderr."""
        paths = sorted(path for path in self.opened if not self._is_left_out(path))
        # Footers first; only where all are whole, every page is decoded, and last as DuckDB does it.
        damaged = (
            damage.damaged_among(paths)
            or damage.damaged_among(paths, pages=True)
            or damage.damaged_among(paths, judge=damage.damage_for_duckdb)
        )
        with self._lock:
            for file in damaged:
                self._damaged[str(file.path)] = _identity(file.path)
        damage.report(damaged)
        return damaged

    def glob(self, path: str, **_options: Any) -> list[str]:
        """The files that `path` stands for: one of `files_of`, or a file of an earlier answer."""
        for kind in SCHEMAS:
            if path == files_of(kind):
                try:
                    return self._plan(kind)
                except UsageError as error:
                    self.failure = error
                    self.failures += 1
                    raise
        return [path] if _PATH.fullmatch(path) else []

    def open(self, path: str, mode: str = "rb", **_options: Any) -> _OpenFile:
        if mode != "rb":
            _refuse(path)
        with self._lock:
            pinned = self._pinned.get(path)
            if pinned is not None:
                return _OpenFile(_SharedFile(pinned) if isinstance(pinned, bytes) else pinned)
        real = self._real(path)
        self.opened.add(real)
        try:
            return _OpenFile(_SharedFile(os.open(real, os.O_RDONLY)))
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
        """Close what is kept open; DuckDB's own open files stay until it drops them."""
        with self._lock:
            self._pinned.clear()

    def _plan(self, kind: str) -> list[str]:
        with self._lock:
            self._plans += 1
            plan = f"{SCHEME}://{kind}/{self._plans}/"
        while True:
            paths = [plan + _NO_ROWS]
            kept: dict[str, bytes | _SharedFile] = {plan + _NO_ROWS: _empty_file(kind)}
            is_pinned = True
            try:
                for name, doubled in self._counting(kind):
                    paths.append(plan + name)
                    real = self._folder.root / kind / name
                    if doubled:
                        kept[plan + name] = _without_runs(real, doubled)
                    elif len(kept) < _PINNED:
                        kept[plan + name] = _SharedFile(os.open(real, os.O_RDONLY))
                        self.opened.add(real)
                    else:
                        is_pinned = False
            except FileNotFoundError:  # merged and deleted since the folder was listed: a new listing knows better
                continue
            with self._lock:
                self.unpinned += not is_pinned
                self._pinned |= kept
                while len(self._pinned) > 4 * _PINNED:
                    self._pinned.popitem(last=False)
            return paths

    def _counting(self, kind: str) -> Iterator[tuple[str, frozenset[str]]]:
        """(name below `kind`, runs that another file holds) of each file that counts."""
        if kind in KINDS:
            for family in counting_plan(self._folder, kind, self._is_left_out):
                for name in family.names:
                    yield f"family={family.family}/{name}", family.doubled.get(name, frozenset())
            return
        root = self._folder.root / kind
        for name in sorted(os.listdir(root)) if root.is_dir() else ():
            if name.endswith(".parquet") and not name.startswith("_") and not self._is_left_out(root / name):
                yield name, frozenset()

    def _is_left_out(self, path: Path) -> bool:
        if not self._damaged:
            return False
        known = self._damaged.get(str(path))
        return known is not None and known == _identity(path)

    def _real(self, path: str) -> Path:
        match = _PATH.fullmatch(path)
        if match is None or match[1] not in SCHEMAS:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._folder.root / match[1] / match[3]


class _SharedFile:
    """A file's content, which any number of threads read at once; closed when nobody holds it any more."""

    def __init__(self, source: int | bytes) -> None:
        self._content = source if isinstance(source, bytes) else None
        self._descriptor = source if isinstance(source, int) else -1
        status = None if self._content is not None else os.fstat(self._descriptor)
        self.size = len(self._content) if status is None else status.st_size
        self.modified_s = 0.0 if status is None else status.st_mtime

    def read(self, at: int, size: int) -> bytes:
        if self._content is not None:
            return self._content[at : at + size]
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, at)):
            parts.append(part)
            at, size = at + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)


class _OpenFile:
    """What DuckDB reads from. Each thread has a place of its own: DuckDB seeks and then reads, in several at once."""

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


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _without_runs(path: Path, run_ids: frozenset[str]) -> bytes:
    """The content of a merged file without some of its runs."""
    table = pq.ParquetFile(path).read()
    is_doubled = pc.is_in(table.column("run_id"), pa.array(sorted(run_ids), pa.string()))
    return _parquet_bytes(table.filter(pc.invert(is_doubled)))


@functools.cache
def _empty_file(kind: str) -> bytes:
    # Not `empty_table()`, which imports pandas where there is one, for a quarter of a second.
    return _parquet_bytes(pa.Table.from_batches([], SCHEMAS[kind]))


def _parquet_bytes(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()
