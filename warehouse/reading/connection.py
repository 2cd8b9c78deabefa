"""Opens the warehouse read-only: a DuckDB connection that sees only its views, or a snapshot's.

Start reading at `connect`. A `WarehouseConnection` and its relations survive damaged files and compaction: a query that
fails because of a file is planned again. DuckDB reads through `warehouse.files.folder_files`.

DuckDB itself prevents writes: `enable_external_access` is off and `lock_configuration` on, so statements reach only
paths that were allowed before. There are two: `gpufarm://`, whose file system has no write operation, and DuckDB's
directory for spilling, which is private to the connection and outside the data folder. DuckDB also allows the database
file that it opened and its log; so it opens a copy whose folder has been deleted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import duckdb
import pyarrow as pa

from conf.plain_text import sql_text
from warehouse.files import views
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from warehouse.files.folder_files import FolderFiles


_NOWHERE = Path("/nonexistent")
_MEMORY = Path("/dev/shm")  # for the copy of the views if the temporary folder is full
T = TypeVar("T")
_ATTEMPTS = 100  # attempts at a query whose files keep vanishing
# Errors of the statement, unless the message mentions a file's contents.
_OF_EITHER = (duckdb.InvalidInputException, duckdb.OutOfRangeException, duckdb.ConversionException)
_TEXTS_OF_EITHER = ("Invalid Input Error", "Out of Range Error", "Conversion Error")
_OF_A_FILE = re.compile(
    r"gpufarm://|parquet|thrift|TProtocol|TTransport|snappy|zstd|gzip|lz4|brotli|decompress|"
    r"dictionary|bit.?pack|\brle\b|out of buffer|unicode|utf-?8",
    re.IGNORECASE,
)
# Errors from damage after which DuckDB refuses every further query of the database.
_GIVES_UP = (duckdb.InternalException, duckdb.FatalException)
_ROWS = ("fetchone", "fetchmany", "fetchall")
_DERIVED = tuple(
    kind
    for kind in (duckdb.DuckDBPyRelation, getattr(getattr(duckdb, "_relation", None), "GroupedRelation", None))
    if kind is not None
)


@dataclass(frozen=True)
class ReadingLimits:
    """Limits of a connection on a shared machine; it spills nothing to disk."""

    memory_bytes: int
    threads: int


def connect(
    data: str | os.PathLike[str] | DataFolder | None = None,
    *,
    snapshot: str | None = None,
    share: ReadingLimits | None = None,
    views_file: bytes | None = None,
) -> WarehouseConnection:
    """Open the warehouse's views read-only; any number of readers may, also while the farm writes.

    `snapshot` names one of the folder's snapshots (`warehouse.snapshot`), whose rows never change. Raises `UsageError`
    naming each snapshot file that has changed. `share` limits queries; without it they may use the whole machine.
    `views_file` is the result of `make_views_file()` from another process, to save the time of making it.

    The result behaves as a DuckDB connection. It reads only the folder's Parquet files that count. INSERT, CREATE,
    ATTACH of a file, SET and COPY to a file fail in DuckDB itself, and so does `relation.write_parquet`; a Python
    caller can write fetched rows. pandas and Arrow tables can be joined after `connection.register("name", table)`. A
    query sees each run exactly once, also while files are merged and deleted. A damaged file is named on stderr and
    only its rows are missing; a listed merged file that is gone raises `UsageError`. Timestamps are UTC. Close the
    connection when done.
    """
    from warehouse.files.folder_files import FolderFiles

    folder = DataFolder.resolve(data).open()
    if snapshot is not None:
        from warehouse.files.snapshots import check_snapshot

        folder = check_snapshot(folder, snapshot).folder
    with contextlib.suppress(OSError):  # the folder may be read-only: the file is for other DuckDB clients
        views.refresh(folder)
    files, spill = FolderFiles(folder), None if share else _spill_folder()
    reopen = functools.partial(_opened_views, views_file or make_views_file(), files, spill, share)
    return WarehouseConnection(reopen(), _Opened(files, spill, reopen))


def select(
    data: str | os.PathLike[str] | DataFolder | None, query: str, values: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """Return the rows of one query of a data folder, each by its columns. Raises as `connect` does."""
    with connect(data) as connection:
        answer = connection.execute(query, list(values))
        columns = [name for name, *_ in answer.description]
        return [dict(zip(columns, row, strict=True)) for row in answer.fetchall()]


def make_views_file() -> bytes:
    """Return a DuckDB file of the views over `gpufarm://`, which is the same for every folder."""
    return _views_file(tuple(views.reading_statements()))


def _opened_views(
    content: bytes, files: FolderFiles, spill: Path | None, share: ReadingLimits | None
) -> duckdb.DuckDBPyConnection:
    """Open the views over `files`, without other access."""
    connection = _open_copy(content)
    try:
        connection.register_filesystem(files)
        if share is not None:
            connection.execute(f"SET memory_limit = '{share.memory_bytes} B'")
            connection.execute(f"SET threads = {share.threads}")
        _confine(connection, spill)
    except BaseException:
        connection.close()
        raise
    return connection


@functools.lru_cache(1)
def _views_file(statements: tuple[str, ...]) -> bytes:
    from warehouse.files.folder_files import FolderFiles

    with tempfile.TemporaryDirectory(prefix="gpufarm-", dir=_scratch()) as building:
        path = Path(building) / "warehouse.duckdb"
        with duckdb.connect(str(path)) as connection:
            connection.register_filesystem(FolderFiles(DataFolder(_NOWHERE)))
            views.create_views(connection, statements)
        return path.read_bytes()


def _open_copy(content: bytes) -> duckdb.DuckDBPyConnection:
    """Open a DuckDB file read-only and remove its path, since DuckDB lets COPY overwrite the file that it has open."""
    folder = tempfile.mkdtemp(prefix="gpufarm-", dir=_scratch())
    try:
        path = Path(folder) / "warehouse.duckdb"
        path.write_bytes(content)
        return duckdb.connect(str(path), read_only=True)
    finally:
        shutil.rmtree(folder)


def _scratch() -> str:
    """Return a folder with free space for short-lived files."""
    wanted_bytes = 4 * 2**20
    for candidate in (Path(tempfile.gettempdir()), _MEMORY):
        with contextlib.suppress(OSError):
            if os.access(candidate, os.W_OK) and shutil.disk_usage(candidate).free > wanted_bytes:
                return str(candidate)
    return tempfile.gettempdir()


def _spill_folder() -> Path:
    """Make a folder where queries spill rows; no other user may read it."""
    spill = Path(tempfile.gettempdir()) / f"gpufarm-spill-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with contextlib.suppress(OSError):  # the disk may be full; queries that spill would then fail anyway
        spill.mkdir(mode=0o700)
    return spill


def _confine(connection: duckdb.DuckDBPyConnection, spill: Path | None) -> None:
    """Close the connection's access to all files but `gpufarm://`, and lock this configuration."""
    connection.execute(f"SET temp_directory = {sql_text(str(spill or ''))}")
    connection.execute("SET secret_directory = ''")
    # Names resolve to the warehouse or to registered tables, never to variables of the calling Python code. File
    # contents are not cached between queries, since a later query may find another file of that name.
    for name in ("python_enable_replacements", "enable_external_file_cache", "autoload_known_extensions"):
        connection.execute(f"SET {name} = false")
    connection.execute(f"SET allowed_directories = [{sql_text(views.SCHEME + '://')}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


# Errors of the user's statement, whatever the files contain.
_OF_THE_STATEMENT = (
    duckdb.ParserException,
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.PermissionException,
    duckdb.ConnectionException,
    duckdb.TransactionException,
    duckdb.InterruptException,
    duckdb.OutOfMemoryException,
)
# Methods whose rows are read after the call returns, too late to plan the query again.
_STREAMS = (
    "to_arrow_reader",
    "fetch_arrow_reader",
    "fetch_record_batch",
    "arrow",
    "iter_rows",
    "pl",
    "__arrow_c_stream__",
)


class _Opened:
    """State shared by a connection and its cursors: the folder's files, and the folder for spilling.

    `renew` reopens the database if a damaged file has made DuckDB give it up. Registered tables are then gone.
    """

    def __init__(self, files: FolderFiles, spill: Path | None, renew: Callable[[], duckdb.DuckDBPyConnection]) -> None:
        self.files = files
        self.renew = renew
        self._remove_spill = weakref.finalize(self, _remove, spill, os.getpid())

    def close(self) -> None:
        self.files.close()
        self._remove_spill()


def _remove(spill: Path | None, pid: int) -> None:
    if spill is not None and os.getpid() == pid:  # not in a child, which inherits the object
        shutil.rmtree(spill, ignore_errors=True)


class _Planned:
    """Forwards everything to a DuckDB object, and repeats calls that fail because of a file without this file."""

    def __init__(self, wrapped: Any, opened: _Opened) -> None:
        self._wrapped = wrapped
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__arrow") and name != "_repr_mimebundle_":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = self.retry(lambda: getattr(self._wrapped, name))
        if not callable(value) or isinstance(value, _DERIVED):
            return self._own(value)

        def call(*args: Any, **options: Any) -> Any:
            return self._call(name, args, options)

        return call

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self._wrapped) if not name.startswith("_"))})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._wrapped!r}>"

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        args = tuple(_bare(value) for value in args)
        options = {key: _bare(value) for key, value in options.items()}
        return self._own(self.retry(lambda: getattr(self._wrapped, name)(*args, **options)))

    def retry(self, act: Callable[[], T], before_retry: Callable[[], None] | None = None) -> T:
        """Return the result of `act`, repeated while it fails because files vanished or are damaged.

        Each damaged file is named on stderr and left out from then on. For callers, `act` reads a stream of rows; the
        calls of DuckDB's methods are repeated already.
        """
        files = self._opened.files
        for _ in range(_ATTEMPTS):
            failures, lost = files.failures, files.lost
            try:
                return act()
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                if files.failures > failures and files.failure is not None:
                    raise files.failure from error
                if files.lost == lost and (is_of_the_statement(error) or not files.leave_out_damaged()):
                    raise
                if isinstance(error, _GIVES_UP):
                    self._renew()
                failed = error
                if before_retry is not None:
                    before_retry()
        raise failed

    def _renew(self) -> None:
        """Replace a database that DuckDB has given up. A relation cannot: it belongs to its connection."""

    def _own(self, result: Any) -> Any:
        return WarehouseRelation(result, self._opened) if isinstance(result, _DERIVED) else result


class WarehouseRelation(_Planned):
    """A DuckDB relation over the warehouse: a query that has not run, with all of DuckDB's methods."""

    def __len__(self) -> int:
        return self.retry(lambda: len(self._wrapped))

    def __contains__(self, name: object) -> bool:
        return name in self._wrapped

    def __getitem__(self, name: str) -> Any:
        return self._own(self._wrapped[name])

    def __str__(self) -> str:
        return self.retry(lambda: str(self._wrapped))

    def __repr__(self) -> str:
        return self.retry(lambda: repr(self._wrapped))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> Any:
        return self._call("__arrow_c_stream__", (requested_schema,), {})

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        unpinned = self._opened.files.unpinned
        result = super()._call(name, args, options)
        if name in _STREAMS and self._opened.files.unpinned > unpinned and hasattr(self._wrapped, "materialize"):
            # Files that are opened later by name may be gone by then: fetch all rows now.
            if hasattr(result, "close"):
                result.close()
            del result
            rows = self.retry(self._wrapped.materialize)
            return getattr(rows, name)(*args, **options)
        return result


class WarehouseConnection(_Planned):
    """A read-only DuckDB connection to a data folder, with all of DuckDB's methods; a context manager.

    Unlike DuckDB's own, it plans a query again that loses a file to compaction or meets a damaged file. A damaged file
    is named on stderr and left out from then on. Rows are never duplicated or missing: if some have been returned
    already, the error is raised, and says to run the query again.
    """

    def __init__(self, wrapped: duckdb.DuckDBPyConnection, opened: _Opened, *, is_cursor: bool = False) -> None:
        super().__init__(wrapped, opened)
        self._is_cursor = is_cursor
        self._executed: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the arguments of `execute`
        self._is_fetched = False  # some rows have been returned
        self._is_unpinned = False  # it may open files by name, which may be gone by then
        self._rows: deque[tuple[Any, ...]] | None = None

    def _renew(self) -> None:
        self._wrapped = self._opened.renew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection with its cursors, or a cursor alone."""
        self._wrapped.close()
        if not self._is_cursor:
            self._opened.close()

    @property
    def damaged(self) -> tuple[Path, ...]:
        """Return the damaged files that queries have met and left out."""
        return self._opened.files.damaged

    def execute(self, *args: Any, **options: Any) -> Self:
        """Run a query; its rows are fetched from this connection."""
        self._executed, self._is_fetched, self._rows = (args, options), False, None
        args = tuple(_bare(value) for value in args)
        unpinned = self._opened.files.unpinned
        self.retry(lambda: self._wrapped.execute(*args, **options))
        self._is_unpinned = self._opened.files.unpinned > unpinned
        return self

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name in ("cursor", "duplicate"):
            return WarehouseConnection(getattr(self._wrapped, name)(), self._opened, is_cursor=True)
        is_fetch = name.startswith("fetch") or name in (*_STREAMS, "df", "to_arrow_table", "torch", "tf")
        if not is_fetch:
            return super()._call(name, args, options)
        if self._rows is not None and name in _ROWS:
            return self._take_buffered(name, *args, **options)
        if self._is_unpinned and not self._is_fetched and self._executed is not None:
            if name in ("fetchone", "fetchmany"):
                self._rows = deque(self._call("fetchall", (), {}))
                return self._take_buffered(name, *args, **options)
            if name in _STREAMS:
                return self._materialize(name, args, options)

        def execute_again() -> None:
            if self._executed is None or self._is_fetched:
                raise duckdb.IOException("a file changed while rows were being fetched; run the query again")
            execute_args, execute_options = self._executed
            self.retry(lambda: self._wrapped.execute(*execute_args, **execute_options))

        result = self.retry(lambda: getattr(self._wrapped, name)(*args, **options), execute_again)
        self._is_fetched = True
        return self._own(result)

    def _take_buffered(self, name: str, size: int = 1) -> Any:
        """Return rows that were fetched all at once, as DuckDB would."""
        assert self._rows is not None
        if name == "fetchone":
            return self._rows.popleft() if self._rows else None
        count = len(self._rows) if name == "fetchall" else min(size, len(self._rows))
        return [self._rows.popleft() for _ in range(count)]

    def _materialize(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        (query, *parameters), execute_options = self._executed or ((), {})
        given = parameters[0] if parameters else execute_options.get("parameters")
        with contextlib.suppress(AttributeError):
            self._wrapped.abort()
        relation = self.sql(query, params=given) if given is not None else self.sql(query)
        self._is_fetched = True
        return getattr(relation.materialize(), name)(*args, **options)

    def _own(self, result: Any) -> Any:
        return self if result is self._wrapped else super()._own(result)


def is_of_the_statement(error: Exception) -> bool:
    """Return whether an error of DuckDB, or of Arrow on its stream, comes from the user's SQL and not from a file."""
    if isinstance(error, duckdb.Error) and not isinstance(error, _OF_EITHER):
        return isinstance(error, _OF_THE_STATEMENT)
    text = str(error)
    if not isinstance(error, duckdb.Error) and not text.startswith(_TEXTS_OF_EITHER):
        return False
    return _OF_A_FILE.search(text) is None


def _bare(value: Any) -> Any:
    """Return the DuckDB object that ours wraps; DuckDB's functions accept no other."""
    return value._wrapped if isinstance(value, _Planned) else value
