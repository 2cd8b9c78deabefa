"""Reads many small Parquet files at once: through DuckDB, which takes a fraction of pyarrow's time for each.

Start reading at `read_files`; `warehouse.compact` merges what is read here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.sql_text import escaped_glob, sql_text

_BATCH_FILES = 500  # DuckDB holds their footers meanwhile, some 50 KiB each
_BATCH_BYTES = 8 * 2**20  # of compressed data, which may be a million rows


def read_files(
    paths: Sequence[Path], schema: pa.Schema, most_rows: int, unreadable: Callable[[Path, Exception], None]
) -> Iterator[tuple[list[Path], pa.Table]]:
    """(files, their rows) by and by, in the files' order; of many files some `most_rows` rows at once.

    Tables have the schema's columns and those that it does not know; files that lack some get NULLs. `unreadable` is
    told of files that are none, which are left out.
    """
    files: list[Path] = []
    tables = [schema.empty_table()]
    for batch_files, batch in _read_batches(paths, most_rows, unreadable):
        rows = sum(table.num_rows for table in tables)
        if files and rows + sum(table.num_rows for table in batch) > most_rows:
            yield files, pa.concat_tables(tables, promote_options="permissive")
            files, tables = [], [schema.empty_table()]
        files = [*files, *batch_files]
        tables += batch
    if files:
        yield files, pa.concat_tables(tables, promote_options="permissive")


def _read_batches(
    paths: Sequence[Path], most_rows: int, unreadable: Callable[[Path, Exception], None]
) -> Iterator[tuple[list[Path], list[pa.Table]]]:
    for batch in _batches(paths):
        try:
            tables = _read_batch(batch)
        except duckdb.Error:  # one by one, to name the file
            yield from _read_singly(batch, unreadable)
            continue
        if len(batch) > 1 and sum(table.num_rows for table in tables) > most_rows:
            yield from _read_singly(batch, unreadable)
        else:
            yield batch, tables


def _read_singly(
    paths: Sequence[Path], unreadable: Callable[[Path, Exception], None]
) -> Iterator[tuple[list[Path], list[pa.Table]]]:
    for path in paths:
        try:
            yield [path], [pq.ParquetFile(path).read()]
        except (pa.ArrowInvalid, OSError) as error:
            unreadable(path, error)


def _read_batch(paths: Sequence[Path]) -> list[pa.Table]:
    """A table for each set of columns that files have. DuckDB takes half the time where it need not unite them."""
    with _connect() as connection:
        connection.execute("SET parquet_metadata_cache = true")
        columns = connection.execute(
            "SELECT file_name, list_sort(list(concat_ws(' ', name, type, converted_type)))::VARCHAR "
            f"FROM parquet_schema({_list(paths)}) GROUP BY file_name"
        ).fetchall()
        alike: dict[str, list[Path]] = defaultdict(list)
        for name, found in columns:
            alike[found].append(Path(name))
        assert sum(map(len, alike.values())) == len(paths)
        return [
            connection.sql(f"SELECT * FROM read_parquet({_list(group)}, hive_partitioning=false)").to_arrow_table()
            for group in alike.values()
        ]


def _connect() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")  # of the timestamps that Arrow gets
    return connection


def _list(paths: Sequence[Path]) -> str:
    return f"[{', '.join(sql_text(escaped_glob(path)) for path in paths)}]"


def _batches(paths: Sequence[Path]) -> Iterator[list[Path]]:
    batch: list[Path] = []
    size = 0
    for path in paths:
        batch.append(path)
        size += path.stat().st_size
        if len(batch) >= _BATCH_FILES or size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
