"""Turns DuckDB's disk errors into `OSError`, which every command prints in one line.

Start reading at `disk_errors_named`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import duckdb

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def is_disk_error(error: duckdb.Error) -> bool:
    """Return whether DuckDB failed for lack of space or write permission."""
    return _code(error) is not None


@contextlib.contextmanager
def disk_errors_named() -> Iterator[None]:
    """Raise `OSError` where DuckDB fails for lack of space or write permission, as in its temporary files."""
    try:
        yield
    except duckdb.Error as error:
        code = _code(error)
        if code is None:
            raise
        raise OSError(code, os.strerror(code)) from error


def _code(error: duckdb.Error) -> int | None:
    return next((code for code in _CODES if os.strerror(code) in str(error)), None)
