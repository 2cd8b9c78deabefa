"""DuckDB access: an in-memory instance for a process, settings, and disk errors.

Start reading at `scratch_cursor`. A process has one instance, since starting one for each task would take longer than
the task. `disk_errors_named` turns disk errors into `OSError`, which every command prints in one line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb

from conf.plain_text import sql_text

_ATTACHING = threading.Lock()
_INSTANCES: dict[int, duckdb.DuckDBPyConnection] = {}  # by process: a child must not close its parent's
_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def scratch_cursor() -> duckdb.DuckDBPyConnection:
    """Return a new cursor; close it when done. Timestamps are UTC, and queries run in the caller's thread."""
    process = os.getpid()
    try:
        cursor = _INSTANCES[process].cursor()
        cursor.execute("SELECT 1").fetchall()
        return cursor
    except (KeyError, duckdb.Error):  # after an internal error, as from a torn file, DuckDB needs a new instance
        _INSTANCES[process] = _new_instance()
        return _INSTANCES[process].cursor()


@contextlib.contextmanager
def new_database(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Make and close a database file; the block's statements are one transaction."""
    with _attach(path, "") as cursor:
        cursor.execute("BEGIN")
        yield cursor
        cursor.execute("COMMIT")


@contextlib.contextmanager
def existing_database(path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database file for reading. Raises `duckdb.Error` if it is not one."""
    with _attach(path, " (READ_ONLY)") as cursor:
        yield cursor


@contextlib.contextmanager
def _attach(path: Path, mode: str) -> Iterator[duckdb.DuckDBPyConnection]:
    name = f'"{path.stem}"'  # the name that a client sees when it opens the file
    with _ATTACHING, scratch_cursor() as cursor:
        cursor.execute(f"ATTACH {sql_text(str(path))} AS {name}{mode}")
        try:
            cursor.execute(f"USE {name}")
            yield cursor
        except BaseException:
            with contextlib.suppress(duckdb.Error):  # no transaction was begun
                cursor.execute("ROLLBACK")
            raise
        finally:
            with contextlib.suppress(duckdb.Error):  # after an internal error
                cursor.execute("USE memory")
                cursor.execute(f"DETACH {name}")


def _new_instance() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET GLOBAL TimeZone = 'UTC'")  # time zone of timestamps exported to Arrow
    # DuckDB's threads cost a fifth on small files and gain nothing; without them, no thread is lost in a fork.
    connection.execute("SET threads = 1")
    connection.execute("SET async_threads = 0")
    return connection


@contextlib.contextmanager
def disk_errors_named() -> Iterator[None]:
    """Raise `OSError` where DuckDB fails for lack of space or write permission, as in its temporary files."""
    try:
        yield
    except duckdb.Error as error:
        code = disk_error_code(error)
        if code is None:
            raise
        raise OSError(code, os.strerror(code)) from error


def disk_error_code(error: duckdb.Error) -> int | None:
    """Return the number of the error if DuckDB failed for lack of space or write permission."""
    return next((code for code in _CODES if os.strerror(code) in str(error)), None)
