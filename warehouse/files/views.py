"""The views of `warehouse.duckdb`: `runs`, `attempts` and one for each other table, which `connect` opens.

Start reading at `view_statements`; `_partitioned_view` decides which files count.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from conf.files.outputs import write_file
from conf.plain_text import escaped_glob, sql_text
from warehouse.files.plain_file import remember
from warehouse.tables.duckdb_access import existing_database, new_database
from warehouse.tables.schema import (
    DETAILS,
    ENVIRONMENT,
    JOB_SCHEMA,
    KINDS,
    MERGED_PREFIX,
    OF_RUNS,
    SCHEMA_VERSION,
    STALE_SCHEMA,
    STATUSES,
    TABLES,
)

if TYPE_CHECKING:
    from warehouse.files.folder import DataFolder

VIEWS = ("runs", "attempts", "telemetry", "kernels", "ranks", "collocations", "jobs", "stale")
ROW_COUNTS = "SELECT " + ", ".join(f"(SELECT count(*) FROM {view}) AS {view}" for view in VIEWS)  # one row

SCHEME = "gpufarm"  # scheme of the paths that `warehouse.files.folder_files` serves
_FIRST_KINDS = ("runs", "telemetry")  # every data folder has a file of these
_SQL_TYPES = {
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.timestamp("us", tz="UTC"): "TIMESTAMPTZ",
}
_COLUMNS_TYPE = "MAP(VARCHAR, STRUCT(name VARCHAR, type VARCHAR, default_value VARCHAR))"


def refresh(folder: DataFolder) -> None:
    """Rewrite `warehouse.duckdb` if it is outdated, as after the folder moved or the schema grew.

    Raises `OSError` if the folder cannot be written. Clients that have the old file open keep it.
    """
    statements = view_statements(folder)
    fingerprint = _fingerprint(statements)
    with contextlib.suppress(FileNotFoundError):
        if remember(folder.warehouse, lambda: _read_fingerprint(folder.warehouse), "views") == fingerprint:
            return
    with tempfile.TemporaryDirectory(prefix="gpufarm-") as building:
        built = Path(building) / folder.warehouse.name
        try:
            build(folder, built)
        except duckdb.Error:  # a torn data file, on which other clients fail as well
            return
        write_file(folder.warehouse, built.read_bytes())
    # Opening a database takes longer than a query of a small folder.
    remember(folder.warehouse, lambda: fingerprint, "views")


def view_statements(folder: DataFolder) -> list[str]:
    """Return the SQL that creates a folder's views for any DuckDB client; they read the files by their paths."""
    snapshots = f"read_parquet({sql_text(escaped_glob(folder.jobs) + '/*.parquet')}, union_by_name=true)"
    # A folder older than marks has no file of them.
    marks = f"SELECT {', '.join(typed_nulls(STALE_SCHEMA))} WHERE false"
    if next(folder.stale.glob("*.parquet"), None) is not None:
        files = f"read_parquet({sql_text(escaped_glob(folder.stale) + '/*.parquet')}, union_by_name=true)"
        marks = with_every_column(STALE_SCHEMA, files)
    partitioned = {kind: _partitioned_view(folder, kind, TABLES[kind]) for kind in KINDS}
    return _statements(partitioned, with_every_column(JOB_SCHEMA, snapshots), marks)


def files_of(kind: str) -> str:
    """Return the glob for the files of `kind` that count."""
    return f"{SCHEME}://{kind}/*.parquet"


def reading_statements() -> list[str]:
    """Return the SQL that creates the same views for `warehouse.connect`, whose file system serves files that count."""

    def read(kind: str) -> str:
        # With explicit columns, no file is opened before its rows are needed. A column that a file lacks is NULL.
        columns = ", ".join(
            f"{field.name}={{name: {field.name}, type: {_SQL_TYPES[field.type]}, default_value: NULL}}"
            for field in TABLES[kind]
            if kind not in KINDS or field.name != "family"
        )
        # As one text with a cast: DuckDB needs longer for a MAP of so many literals than for the rest of the plan.
        schema = f"{sql_text(f'{{{columns}}}')}::{_COLUMNS_TYPE}"
        source = f"read_parquet('{files_of(kind)}', schema={schema}, hive_partitioning=false, filename=true)"
        # From the path: DuckDB evaluates this once per file, and prunes files by it.
        family = ", regexp_extract(filename, '/family=([^/]*)/', 1) AS family" if kind in KINDS else ""
        return f"SELECT * EXCLUDE (filename){family} FROM {source}"

    partitioned = {
        kind: f"SELECT {_partitioned_columns(TABLES[kind])} FROM ({read(kind)}) AS file WHERE true" for kind in KINDS
    }
    return _statements(partitioned, read("jobs"), read("stale"))


def _statements(partitioned: Mapping[str, str], job_rows: str, marks: str) -> list[str]:
    attempts = partitioned["runs"]
    counts = ", ".join(f"coalesce({status}, 0) AS {status}" for status in STATUSES)
    counted = ", ".join(f"count(*) FILTER (status = '{status}') AS {status}" for status in STATUSES)
    return [
        # `runs` has each task once; `attempts` also has untrusted measurements of tasks that ran again.
        f"CREATE VIEW runs AS {attempts} AND file.final IS NOT FALSE",
        f"CREATE VIEW attempts AS {attempts}",
        *(f"CREATE VIEW {kind} AS {partitioned[kind]}" for kind in OF_RUNS),
        f"""CREATE VIEW jobs AS
            SELECT {schema_columns(JOB_SCHEMA, "snapshot")}, coalesce(runs, 0) AS runs, {counts}
            FROM ({job_rows}) AS snapshot
            LEFT JOIN (SELECT job_id, count(*) AS runs, {counted} FROM runs GROUP BY job_id) AS done
            ON snapshot.job_id = done.job_id""",
        f"CREATE VIEW stale AS {_stale_view(marks)}",
    ]


def _stale_view(marks: str) -> str:
    """Return the SQL of the view `stale`: each mark once, from the first cycle that made it."""
    same = ", ".join(("run_id", "label", *ENVIRONMENT))
    return f"""SELECT {schema_columns(STALE_SCHEMA, "mark")} FROM ({marks}) AS mark
            QUALIFY row_number() OVER (PARTITION BY {same} ORDER BY mark.marked_at, mark.cycle) = 1"""


def _partitioned_view(folder: DataFolder, kind: str, schema: pa.Schema) -> str:
    """Return every row of the files that count: merged files that are listed, others that no listing hides.

    DuckDB expands globs from left to right, once per query: the listings' before the data's. So a merged file that
    this query finds listed is among its data files too, because it existed before its listing. A query thus sees
    either the replaced files or the merged file. So the order of the join matters: the listings are left of a RIGHT
    JOIN, not in a CTE or a subquery of WHERE, whose globs DuckDB expands last.
    """
    root = folder.root / kind
    if kind not in _FIRST_KINDS and next(root.glob("family=*/*.parquet"), None) is None:
        # A folder older than this kind has no file of it.
        nothing = ", ".join([*typed_nulls(schema), "NULL::VARCHAR AS family"])
        return f"SELECT * FROM (SELECT {nothing}) AS file WHERE false"
    columns = _partitioned_columns(schema)
    files = f"""read_parquet(
            {sql_text(escaped_glob(root) + "/family=*/*.parquet")},
            union_by_name=true, filename=true, hive_partitioning=true, hive_types={{'family': VARCHAR}})"""
    return f"""
        SELECT {columns}
        FROM (
            SELECT {sql_text(str(root) + "/")} || path AS path, bool_or(hidden) AS hidden
            FROM read_parquet({sql_text(escaped_glob(folder.listings(kind)) + "/*.parquet")}, union_by_name=true)
            GROUP BY ALL
        ) AS listed
        RIGHT JOIN ({with_every_column(schema, files)}) AS file ON listed.path = file.filename
        WHERE CASE WHEN listed.path IS NULL THEN NOT starts_with(parse_filename(file.filename), '{MERGED_PREFIX}')
                   ELSE NOT listed.hidden END"""


def _partitioned_columns(schema: pa.Schema) -> str:
    columns = schema_columns(schema, "file") + ("" if "family" in schema.names else ", file.family")
    if not any(detail.imported and detail.row_id in schema.names for detail in DETAILS.values()):
        return columns
    # Compaction needs an id of every row; for an imported batch it is not a run's.
    return columns.replace("file.run_id", "CASE WHEN file.source <> 'imported' THEN file.run_id END AS run_id", 1)


def with_every_column(schema: pa.Schema, files: str) -> str:
    """Return the rows of `files`, with the schema's columns that none of them has as NULL.

    No file of an older folder has a new column, and the folder may be read-only. DuckDB drops
    the side without rows when it plans a query, so this costs nothing.
    """
    return f"SELECT {', '.join(typed_nulls(schema))} WHERE false UNION ALL BY NAME SELECT * FROM {files}"


def typed_nulls(schema: pa.Schema) -> list[str]:
    """Return a NULL for each column, with the column's type and name."""
    return [f"NULL::{_SQL_TYPES[field.type]} AS {field.name}" for field in schema]


def schema_columns(schema: pa.Schema, table: str) -> str:
    # Timestamps without time zone: otherwise DuckDB prints local time, and its Python client needs another package.
    return ", ".join(
        f"{table}.{field.name} AT TIME ZONE 'UTC' AS {field.name}"
        if pa.types.is_timestamp(field.type)
        else f"{table}.{field.name}"
        for field in schema
    )


def build(folder: DataFolder, path: Path) -> None:
    """Make the DuckDB file. `path` ends in the file's final name, and is outside the data folder: DuckDB can read
    from a path with a question mark, but not write to it."""
    with new_database(path) as connection:
        create_views(connection, view_statements(folder))


def create_views(connection: duckdb.DuckDBPyConnection, statements: Sequence[str]) -> None:
    """Create the views, and a view with their version."""
    for statement in statements:
        connection.execute(statement)
    connection.execute(
        f"CREATE VIEW warehouse_format AS SELECT {SCHEMA_VERSION} AS schema_version, "
        f"{sql_text(_fingerprint(statements))} AS fingerprint"
    )


def _fingerprint(statements: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(statements).encode()).hexdigest()[:16]


def _read_fingerprint(path: Path) -> str | None:
    try:
        with existing_database(path) as connection:
            row = connection.execute("SELECT fingerprint FROM warehouse_format").fetchone()
            return None if row is None else str(row[0])
    except duckdb.Error:  # foreign, torn, or of another DuckDB: it has only views, so it is rewritten
        return None
