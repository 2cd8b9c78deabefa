"""One DuckDB in memory for a process's own work: an instance for each task would take longer to start than the task.

Start reading at `scratch_cursor`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb

from warehouse.tables.duckdb_settings import has_setting
from warehouse.tables.sql_text import sql_text

_ATTACHING = threading.Lock()
_INSTANCES: dict[int, duckdb.DuckDBPyConnection] = {}  # by process: a child must not close its parent's


def scratch_cursor() -> duckdb.DuckDBPyConnection:
    """Return a new cursor; close it when done. Timestamps are UTC, and queries run in the caller's thread."""
    process = os.getpid()
    try:
        cursor = _INSTANCES[process].cursor()
        cursor.execute("SELECT 1")
        return cursor
    except (KeyError, duckdb.Error):  # after an internal error, as of a torn file, DuckDB wants to be started anew
        _INSTANCES[process] = _new_instance()
        return _INSTANCES[process].cursor()


@contextlib.contextmanager
def new_database(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Make a database file, into which the statements of the block go at once or not at all; it is closed then."""
    with _attached(path, "") as cursor:
        cursor.execute("BEGIN")
        yield cursor
        cursor.execute("COMMIT")


@contextlib.contextmanager
def existing_database(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database file to read it. Raises `duckdb.Error` where it is none."""
    with _attached(path, " (READ_ONLY)") as cursor:
        yield cursor


@contextlib.contextmanager
def _attached(path: Path, mode: str) -> Iterator[duckdb.DuckDBPyConnection]:
    name = f'"{path.stem}"'  # as a client that opens the file calls it
    with _ATTACHING, scratch_cursor() as cursor:
        cursor.execute(f"ATTACH {sql_text(str(path))} AS {name}{mode}")
        try:
            cursor.execute(f"USE {name}")
            yield cursor
        except BaseException:
            with contextlib.suppress(duckdb.Error):  # where none was begun
                cursor.execute("ROLLBACK")
            raise
        finally:
            with contextlib.suppress(duckdb.Error):  # after an internal error
                cursor.execute("USE memory")
                cursor.execute(f"DETACH {name}")


def _new_instance() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET GLOBAL TimeZone = 'UTC'")  # of the timestamps that Arrow gets
    # DuckDB's own threads cost a fifth on small files and gain nothing there; and no thread is lost in a fork.
    connection.execute("SET threads = 1")
    if has_setting("async_threads"):  # since DuckDB 2.0
        connection.execute("SET async_threads = 0")
    return connection
