"""A DuckDB connection and its relations that survive damaged files and compaction: a failed query is planned again.

Start reading at `WarehouseConnection`; `warehouse.connect` makes one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import duckdb

if TYPE_CHECKING:
    from warehouse.files.folder_files import FolderFiles

T = TypeVar("T")
_ATTEMPTS = 100  # at a query that loses its files each time
# Of the user's statement, whatever the files hold.
_OF_THE_STATEMENT = (
    duckdb.ParserException,
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.PermissionException,
    duckdb.ConversionException,
    duckdb.ConnectionException,
    duckdb.TransactionException,
    duckdb.InterruptException,
    duckdb.OutOfMemoryException,
)
# Of the statement unless they name what the files are made of.
_OF_EITHER = (duckdb.InvalidInputException, duckdb.OutOfRangeException)
_OF_A_FILE = re.compile(
    r"gpufarm://|parquet|thrift|TProtocol|TTransport|snappy|zstd|gzip|lz4|brotli|decompress|"
    r"dictionary|bit.?pack|\brle\b|out of buffer|unicode|utf-?8",
    re.IGNORECASE,
)
# Some damage ends in an error after which DuckDB refuses every further query of the database.
_GIVES_UP = (duckdb.InternalException, duckdb.FatalException)
_ROWS = ("fetchone", "fetchmany", "fetchall")
# Their rows are read after the call has returned, when nothing can be planned again.
_STREAMS = (
    "to_arrow_reader",
    "fetch_arrow_reader",
    "fetch_record_batch",
    "arrow",
    "iter_rows",
    "pl",
    "__arrow_c_stream__",
)
_DERIVED = tuple(
    kind
    for kind in (duckdb.DuckDBPyRelation, getattr(getattr(duckdb, "_relation", None), "GroupedRelation", None))
    if kind is not None
)


class _Opened:
    """State shared by a connection and its cursors: the folder's files, and the lock against deletion by compaction."""

    def __init__(
        self, files: FolderFiles, lock: int | None, spill: Path | None, renew: Callable[[], duckdb.DuckDBPyConnection]
    ) -> None:
        self.files = files
        self.renew = renew
        self._lock = lock
        self._remove_spill = weakref.finalize(self, _removed, spill, os.getpid())

    def close(self) -> None:
        self.files.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._remove_spill()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


def _removed(spill: Path | None, pid: int) -> None:
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
        value = self._again(lambda: getattr(self._wrapped, name))
        if not callable(value) or isinstance(value, _DERIVED):
            return self._own(value)

        def call(*args: Any, **options: Any) -> Any:
            return self._call(name, args, options)

        call.__name__, call.__doc__ = name, getattr(value, "__doc__", None)
        return call

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self._wrapped) if not name.startswith("_"))})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._wrapped!r}>"

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        args = tuple(_bare(value) for value in args)
        options = {key: _bare(value) for key, value in options.items()}
        return self._own(self._again(lambda: getattr(self._wrapped, name)(*args, **options)))

    def _again(self, act: Callable[[], T], before_retry: Callable[[], None] | None = None) -> T:
        """Return the result of `act`, repeated while it fails because files vanished or are damaged."""
        files = self._opened.files
        for _ in range(_ATTEMPTS):
            failures, lost = files.failures, files.lost
            try:
                return act()
            except duckdb.Error as error:
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
        """Open a new database in place of one that DuckDB has given up; a relation is of its connection, and cannot."""

    def _own(self, result: Any) -> Any:
        if isinstance(result, _DERIVED):
            return WarehouseRelation(result, self._opened)
        return result


class WarehouseRelation(_Planned):
    """A DuckDB relation over the warehouse: a query that has not run, with all of DuckDB's methods."""

    def __len__(self) -> int:
        return self._again(lambda: len(self._wrapped))

    def __contains__(self, name: object) -> bool:
        return name in self._wrapped

    def __getitem__(self, name: str) -> Any:
        return self._own(self._wrapped[name])

    def __str__(self) -> str:
        return self._again(lambda: str(self._wrapped))

    def __repr__(self) -> str:
        return self._again(lambda: repr(self._wrapped))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> Any:
        return self._call("__arrow_c_stream__", (requested_schema,), {})

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        unpinned = self._opened.files.unpinned
        result = super()._call(name, args, options)
        if name in _STREAMS and self._opened.files.unpinned > unpinned and hasattr(self._wrapped, "materialize"):
            # Files that are opened later, by name, may be gone by then: all rows now.
            if hasattr(result, "close"):
                result.close()
            del result
            rows = self._again(self._wrapped.materialize)
            return getattr(rows, name)(*args, **options)
        return result


class WarehouseConnection(_Planned):
    """A read-only DuckDB connection to a data folder, with all of DuckDB's methods; a context manager.

    It differs from DuckDB's own in this: a query that loses a file to compaction is planned again, and so is one that
    meets a damaged file, which is named on stderr and left out from then on. Rows are never there twice or missing:
    where some have been handed out already, the error is raised, and says that the query has to run again.
    """

    def __init__(self, wrapped: duckdb.DuckDBPyConnection, opened: _Opened, *, is_cursor: bool = False) -> None:
        super().__init__(wrapped, opened)
        self._is_cursor = is_cursor
        self._executed: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the arguments of `execute`
        self._is_fetched = False  # some rows of it have been handed out
        self._is_unpinned = False  # it may open files by name that are gone by then
        self._rows: deque[tuple[Any, ...]] | None = None

    @classmethod
    def opened(
        cls, renew: Callable[[], duckdb.DuckDBPyConnection], files: FolderFiles, lock: int | None, spill: Path | None
    ) -> Self:
        """Open a connection that reads `files`; the descriptor `lock` and the folder `spill` go with it.

        `renew` opens it, and opens it anew where a damaged file has made DuckDB give up its database. Tables that were
        registered are gone then.
        """
        return cls(renew(), _Opened(files, lock, spill, renew))

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
        """The damaged files that queries have met and left out."""
        return self._opened.files.damaged

    def leave_out_damaged(self) -> bool:
        """Leave out damaged files among those that queries have read; return whether there are new ones.

        For callers whose stream of rows failed; each file is reported on stderr.
        """
        return bool(self._opened.files.leave_out_damaged())

    def execute(self, *args: Any, **options: Any) -> Self:
        """Run a query; its rows are fetched from this connection."""
        self._executed, self._is_fetched, self._rows = (args, options), False, None
        args = tuple(_bare(value) for value in args)
        unpinned = self._opened.files.unpinned
        self._again(lambda: self._wrapped.execute(*args, **options))
        self._is_unpinned = self._opened.files.unpinned > unpinned
        return self

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name in ("cursor", "duplicate"):
            return WarehouseConnection(getattr(self._wrapped, name)(), self._opened, is_cursor=True)
        is_fetch = name.startswith("fetch") or name in (*_STREAMS, "df", "to_arrow_table", "torch", "tf")
        if not is_fetch:
            return super()._call(name, args, options)
        if self._rows is not None and name in _ROWS:
            return self._buffered(name, *args, **options)
        if self._is_unpinned and not self._is_fetched and self._executed is not None:
            if name in ("fetchone", "fetchmany"):
                self._rows = deque(self._call("fetchall", (), {}))
                return self._buffered(name, *args, **options)
            if name in _STREAMS:
                return self._materialized(name, args, options)

        def execute_again() -> None:
            if self._executed is None or self._is_fetched:
                raise duckdb.IOException("a file changed while rows were being fetched; run the query again")
            execute_args, execute_options = self._executed
            self._again(lambda: self._wrapped.execute(*execute_args, **execute_options))

        result = self._again(lambda: getattr(self._wrapped, name)(*args, **options), execute_again)
        self._is_fetched = True
        return self._own(result)

    def _buffered(self, name: str, size: int = 1) -> Any:
        """Rows that were fetched all at once, handed out as DuckDB would."""
        assert self._rows is not None
        if name == "fetchone":
            return self._rows.popleft() if self._rows else None
        count = len(self._rows) if name == "fetchall" else min(size, len(self._rows))
        return [self._rows.popleft() for _ in range(count)]

    def _materialized(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
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
    """Return whether an error of DuckDB, or of Arrow on its stream, is due to the user's SQL and not to a file."""
    if isinstance(error, duckdb.Error) and not isinstance(error, _OF_EITHER):
        return isinstance(error, _OF_THE_STATEMENT)
    text = str(error)
    if not isinstance(error, duckdb.Error) and not text.startswith(("Invalid Input Error", "Out of Range Error")):
        return False
    return _OF_A_FILE.search(text) is None


def _bare(value: Any) -> Any:
    """Return the DuckDB object that one of ours wraps, as DuckDB's functions take no other."""
    return value._wrapped if isinstance(value, _Planned) else value
