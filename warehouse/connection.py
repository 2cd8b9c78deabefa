"""The warehouse opened for reading: a DuckDB connection that sees its views, or a snapshot's, and nothing else.

Start reading at `connect`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import duckdb

from conf.errors import UsageError
from warehouse import views
from warehouse.folder import KINDS, DataFolder
from warehouse.sql_text import escaped_glob, sql_text


def connect(
    data: str | os.PathLike | DataFolder | None = None, *, snapshot: str | None = None
) -> duckdb.DuckDBPyConnection:
    """Open the warehouse's views read-only; several may, also while the farm writes.

    `snapshot` names one of the folder's snapshots (`warehouse.snapshot`), whose rows never change; `UsageError` names
    each of its files that did.

    The connection reads the folder's Parquet and nothing else: INSERT, CREATE and ATTACH fail, and so does COPY to
    anywhere but a path inside `runs/`, `telemetry/`, `jobs/`, `stale/` or `compactions/`, which DuckDB cannot refuse
    alone.
    pandas and Arrow tables are joined after `connection.register("name", table)`. A query sees each run exactly
    once, also while files are merged; timestamps are UTC. Close it when done: what compaction has replaced is kept
    for up to a day while somebody has the warehouse open.
    """
    folder = DataFolder.resolve(data).open()
    if snapshot is not None:
        from warehouse.snapshot import checked_snapshot

        folder = checked_snapshot(folder, snapshot).folder
    with contextlib.ExitStack() as stack:
        try:
            views.refresh(folder)
            path = folder.warehouse
        except OSError:  # a folder that may only be read, with views that do not fit: as they should be, elsewhere
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpufarm-"))) / "warehouse.duckdb"
            views.build(folder, path)
        connection = duckdb.connect(str(path), read_only=True)
        try:
            _confine(connection, folder)
        except BaseException:
            connection.close()
            raise
        return connection


def _confine(connection: duckdb.DuckDBPyConnection, folder: DataFolder) -> None:
    """Let the connection read the data folder only. Connections of one process to one file share their settings."""
    # All of it is fetched: a result that is left unfinished makes the connection refuse relations.
    ((open_to_all,),) = connection.execute("SELECT current_setting('enable_external_access')").fetchall()
    if not open_to_all:
        return
    if not os.access(folder.root, os.W_OK):
        spill = Path(tempfile.gettempdir()) / f"gpufarm-spill-{os.getuid()}"
        connection.execute(f"SET temp_directory = {sql_text(str(spill))}")
    readable = [folder.root / name for name in (*KINDS, "jobs", "stale", "compactions")]
    allowed = {str(path) + "/" for path in readable} | {escaped_glob(path) + "/" for path in readable}
    connection.execute(f"SET allowed_directories = [{', '.join(map(sql_text, sorted(allowed)))}]")
    connection.execute("SET enable_external_access = false")


def check_readable(error: duckdb.Error, folder: DataFolder) -> UsageError | None:
    """A `UsageError` naming the damaged file, if that is what `error` is about."""
    if isinstance(error, duckdb.InvalidInputException | duckdb.IOException) and ".parquet" in str(error):
        return UsageError(f"a file of data={folder.root} cannot be read: {str(error).splitlines()[0]}")
    return None
