"""Our own queries of the explorer, with limits of rows and time. Start reading at `ExplorerReader`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from conf.errors import UsageError
from conf.plain_text import first_line
from warehouse.reading.reader import WarehouseConnection


class TooLong(UsageError):
    """A query was ended at its limit of time."""


@dataclass(frozen=True)
class QueryRows:
    """Rows of a query. has_more: there are rows beyond the limit."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    has_more: bool = False


class ExplorerReader:
    """Reads one data folder for one page; a context manager. Raises `UsageError` for wrong SQL, and `TooLong`.

    `limited_query` runs what users type.

    Args:
        source: A connection that has a data folder's views; it is closed with the reader.
        seconds: That each query may take.
    """

    def __init__(self, source: WarehouseConnection | duckdb.DuckDBPyConnection, seconds: float) -> None:
        self._connection: Any = source
        self._seconds = seconds

    def __enter__(self) -> ExplorerReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def interrupt(self) -> None:
        """End the query that runs, from another thread; it raises `TooLong`."""
        self._connection.interrupt()

    def rows(self, sql: str, values: Sequence[Any] = (), most: int = 100_000) -> QueryRows:
        """Return the rows of our own query."""
        with self._in_time():
            self._connection.execute(sql, list(values))
            columns = tuple(column[0] for column in self._connection.description)
            rows = self._connection.fetchmany(most + 1)
        return QueryRows(columns, rows[:most], len(rows) > most)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        timer = threading.Timer(self._seconds, self._connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        except duckdb.InterruptException as error:
            raise TooLong(f"the query took longer than the limit of {self._seconds:g} s") from error
        except duckdb.Error as error:
            raise UsageError(first_line(error)) from error
        finally:
            timer.cancel()
