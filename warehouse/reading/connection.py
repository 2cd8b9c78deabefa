"""Opens the warehouse read-only: a DuckDB connection that sees its views, or a snapshot's, and nothing else.

Start reading at `connect`. `warehouse.reading.reader` is what it returns, `warehouse.files.folder_files` what DuckDB
reads through.

Why nothing is written, by DuckDB's own means: `enable_external_access` is off and `lock_configuration` on, so no
statement reaches a path that was not allowed before. Two are: `gpufarm://`, whose file system has no operation that
writes, and DuckDB's directory for spilling, which is private to the connection and lies outside the data folder.
DuckDB also allows the database file that it opened and its log; so it opens a copy, whose folder is gone by then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb

from conf.errors import EnvironmentProblem
from conf.plain_text import first_line
from warehouse.files import views
from warehouse.files.folder import DataFolder
from warehouse.files.lock_file import hold_shared
from warehouse.reading.reader import WarehouseConnection
from warehouse.tables.duckdb_settings import has_setting
from warehouse.tables.sql_text import sql_text

if TYPE_CHECKING:
    from warehouse.files.folder_files import FolderFiles

_NOWHERE = Path("/nonexistent")
_MEMORY = Path("/dev/shm")  # where the copy of the views goes if the temporary folder is full


@dataclass(frozen=True)
class ReadingLimits:
    """Limits of a connection on a machine that others use as well; it spills nothing to disk."""

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
    naming each snapshot file that has changed. `share` bounds what queries take; without it they take the machine.
    `views_file` is what `make_views_file()` returned in another process, for one that has no time to make it.

    The result behaves as a DuckDB connection. It reads the folder's Parquet files that count and nothing else: INSERT,
    CREATE, ATTACH of a file, SET and COPY to anywhere fail in DuckDB itself, and so does `relation.write_parquet`. (A
    Python caller can write what it has fetched.) pandas and Arrow tables are joined after
    `connection.register("name", table)`. A query sees each run exactly once, also while files are merged and deleted.
    A damaged file is named on stderr and costs its own rows; a listed merged file that is missing raises
    `UsageError`. Timestamps are UTC. Close the connection when done: compaction keeps what it has replaced for up to a
    day while somebody has the warehouse open.
    """
    from warehouse.files.folder_files import FolderFiles

    folder = DataFolder.resolve(data).open()
    if snapshot is not None:
        from warehouse.files.snapshots import checked_snapshot

        folder = checked_snapshot(folder, snapshot).folder
    with contextlib.suppress(OSError):  # of a folder that may only be read: the file is for other DuckDB clients
        views.refresh(folder)
    lock = _reader_lock(folder)
    try:
        files, spill = FolderFiles(folder), None if share else _spill_folder()
        content = views_file or make_views_file()
        return WarehouseConnection.opened(lambda: _opened_views(content, files, spill, share), files, lock, spill)
    except BaseException:
        if lock is not None:
            os.close(lock)
        raise


def make_views_file() -> bytes:
    """Return a DuckDB file of the views over `gpufarm://`, which is the same for every folder."""
    return _views_file(tuple(views.reading_statements()))


def _opened_views(
    content: bytes, files: FolderFiles, spill: Path | None, share: ReadingLimits | None
) -> duckdb.DuckDBPyConnection:
    """Open the views over `files` and nothing else."""
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
    """Yield a folder with free space for short-lived files."""
    wanted_bytes = 4 * 2**20
    for candidate in (Path(tempfile.gettempdir()), _MEMORY):
        with contextlib.suppress(OSError):
            if os.access(candidate, os.W_OK) and shutil.disk_usage(candidate).free > wanted_bytes:
                return str(candidate)
    return tempfile.gettempdir()


def _spill_folder() -> Path:
    """Make a folder where queries spill rows; no other user may read it."""
    spill = Path(tempfile.gettempdir()) / f"gpufarm-spill-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with contextlib.suppress(OSError):  # of a full disk, where no query that has to spill succeeds anyway
        spill.mkdir(mode=0o700)
    return spill


def _confine(connection: duckdb.DuckDBPyConnection, spill: Path | None) -> None:
    """Close the connection's access to all files but `gpufarm://`, and lock this configuration."""
    from warehouse.files.folder_files import SCHEME

    connection.execute(f"SET temp_directory = {sql_text(str(spill or ''))}")
    connection.execute("SET secret_directory = ''")
    # A name is one of the warehouse or a registered one, never a variable of whatever Python code calls; and what a
    # query has read of a file is not kept for the next, which may find another file of that name.
    for name in ("python_enable_replacements", "enable_external_file_cache", "autoload_known_extensions"):
        if has_setting(name):
            connection.execute(f"SET {name} = false")
    connection.execute(f"SET allowed_directories = [{sql_text(SCHEME + '://')}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _reader_lock(folder: DataFolder) -> int | None:
    """Return a descriptor with a read lock on `warehouse.duckdb`, which announces a reader; None if there is no file.

    DuckDB locks a copy only.
    """
    try:
        descriptor = os.open(folder.warehouse, os.O_RDONLY)
    except OSError:
        return None
    if hold_shared(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def check_readable(error: duckdb.Error, folder: DataFolder) -> EnvironmentProblem | None:
    """Return an `EnvironmentProblem` that names the damaged file, if `error` is about one."""
    if isinstance(error, duckdb.InvalidInputException | duckdb.IOException) and ".parquet" in str(error):
        return EnvironmentProblem(f"a file of data={folder.root} cannot be read: {first_line(error)}")
    return None
