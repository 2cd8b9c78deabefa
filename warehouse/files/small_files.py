"""Reads many small Parquet files at once, through DuckDB, which takes a fraction of pyarrow's time.

Start reading at `read_files`; `warehouse.files.compaction` merges what is read here.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.files.folder import checksum_problem, content_problem
from warehouse.files.plain_file import NoPlainFile, open_binary
from warehouse.tables.duckdb_access import scratch_cursor
from warehouse.tables.sql_text import escaped_glob, sql_text

_BATCH_FILES = 500  # DuckDB holds their footers while it reads them, some 50 KiB each
_BATCH_BYTES = 8 * 2**20  # compressed bytes, which may be a million rows
_FEW_FILES = 8  # which pyarrow reads in less time than DuckDB takes to start
_MOST_READERS = 2  # threads, each of which holds a batch
_WHOLE_BYTES = 2**20  # a file up to this size is read at once to verify its checksum
# Arrow's schema among a footer's key-value pairs, in base64, as Thrift's compact protocol has it.
_SCHEMA_KEY = b"ARROW:schema"
_STORED_SCHEMA = re.compile(_SCHEMA_KEY + rb"\x18[\x80-\xff]*[\x00-\x7f]([A-Za-z0-9+/=]+)")


class DamagedContent(ValueError):
    """The content of a file does not match its checksum."""


def read_files(
    paths: Sequence[Path], schema: pa.Schema, most_rows: int, unreadable: Callable[[Path, Exception], None]
) -> Iterator[tuple[list[Path], pa.Table]]:
    """Yield (files, their rows) in the files' order, about `most_rows` rows at once.

    Tables have the schema's columns and unknown ones; columns that a file lacks are NULL. Files that cannot be read or
    have a wrong checksum are left out and passed to `unreadable`. Rows of a file keep their order, and so do files of
    one schema.
    """
    files: list[Path] = []
    tables: list[pa.Table] = []
    rows = 0
    for batch_files, batch in _read_batches(paths, most_rows, unreadable):
        batch_rows = sum(table.num_rows for table in batch)
        if files and rows + batch_rows > most_rows:
            yield files, _unite(schema, tables)
            files, rows = [], 0
        files += batch_files
        tables += batch
        rows += batch_rows
        del batch
    if files:
        yield files, _unite(schema, tables)


def _unite(schema: pa.Schema, tables: list[pa.Table]) -> pa.Table:
    """Return the concatenated table and empty `tables`, so that the rows are in memory once."""
    united = pa.concat_tables([schema.empty_table(), *tables], promote_options="permissive")
    tables.clear()
    return united


@dataclass
class _Batch:
    """Result of reading some files: the intact ones, their rows, and the others with the reason."""

    files: list[Path]
    tables: list[pa.Table]
    damaged: list[tuple[Path, Exception]]


def _read_batches(
    paths: Sequence[Path], most_rows: int, unreadable: Callable[[Path, Exception], None]
) -> Iterator[tuple[list[Path], list[pa.Table]]]:
    if len(paths) <= _FEW_FILES:
        yield from _read_singly(paths, unreadable)
        return
    for files, reading in _read_ahead(paths):
        try:
            batch = reading.result()
        except (duckdb.Error, OSError):  # one by one, to name the file
            yield from _read_singly(files, unreadable)
            continue
        del reading
        for path, error in batch.damaged:
            unreadable(path, error)
        if len(batch.files) > 1 and sum(table.num_rows for table in batch.tables) > most_rows:
            batch.tables.clear()
            yield from _read_singly(batch.files, unreadable)
        elif batch.files:
            yield batch.files, batch.tables
        del batch


def _read_singly(
    paths: Sequence[Path], unreadable: Callable[[Path, Exception], None]
) -> Iterator[tuple[list[Path], list[pa.Table]]]:
    for path in paths:
        try:
            problem = checksum_problem(path)
            if problem is not None:
                raise DamagedContent(problem)
            yield [path], [pq.ParquetFile(path).read()]
        except (pa.ArrowException, OSError, ValueError) as error:
            unreadable(path, error)


def _read_ahead(paths: Sequence[Path]) -> Iterator[tuple[list[Path], Future[_Batch]]]:
    """Yield batches and their tables in order, while the next ones are read."""
    readers = min(_MOST_READERS, len(os.sched_getaffinity(0)))
    waiting: deque[tuple[list[Path], Future[_Batch]]] = deque()
    with scratch_cursor() as connection, ThreadPoolExecutor(readers) as pool:
        for batch in _batches(paths):
            waiting.append((batch, pool.submit(_read_batch, connection, batch)))
            if len(waiting) > readers:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()


def _read_batch(connection: duckdb.DuckDBPyConnection, paths: Sequence[Path]) -> _Batch:
    """Return a table for each set of columns; DuckDB takes half the time when it need not unite them.

    Files with a wrong checksum are left out. Those without one are read unverified.
    """
    alike: dict[Hashable, list[Path]] = {}
    batch = _Batch([], [], [])
    for path in paths:
        try:
            key = _verify_schema(path) or path
        except (DamagedContent, NoPlainFile, FileNotFoundError) as error:
            batch.damaged.append((path, error))
            continue
        batch.files.append(path)
        alike.setdefault(key, []).append(path)
    with connection.cursor() as cursor:
        batch.tables = [
            cursor.sql(f"SELECT * FROM read_parquet({_list(group)}, hive_partitioning=false)").to_arrow_table()
            for group in alike.values()
        ]
    return batch


def _verify_schema(path: Path) -> bytes | None:
    """Return the schema as Arrow stores it in a file, None where it is not known. Raises `DamagedContent`."""
    if path.stat().st_size > _WHOLE_BYTES:
        problem, content = checksum_problem(path), b""
    else:  # opened once, for both
        with open_binary(path) as file:
            content = file.read()
        problem = content_problem(content)
    if problem is not None:
        raise DamagedContent(problem)
    # The last one: texts of runs stand before it.
    stored = _STORED_SCHEMA.match(content, max(0, content.rfind(_SCHEMA_KEY)))
    return None if stored is None else stored[1]


def _list(paths: Sequence[Path]) -> str:
    return f"[{', '.join(sql_text(escaped_glob(path)) for path in paths)}]"


def _batches(paths: Sequence[Path]) -> Iterator[list[Path]]:
    batch: list[Path] = []
    size = 0
    for path in paths:
        batch.append(path)
        with contextlib.suppress(FileNotFoundError):  # the reader reports it
            size += path.stat().st_size
        if len(batch) >= _BATCH_FILES or size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
