"""A connection from `connect` cannot write: not by COPY in any nesting, not by settings, not through the Python API."""

import contextlib
import os
from pathlib import Path

import duckdb
import pytest
from warehouse_rows import fill

import warehouse
from conf.plain_text import sql_text
from warehouse.files.folder import DataFolder


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder for all tests that try to write to it, as none of them can."""
    folder = DataFolder.resolve(tmp_path_factory.mktemp("filled") / "a'; echo foo [b]*? family=x" / "data").create()
    fill(folder, range(3))
    return folder


@pytest.fixture(scope="module")
def connection(filled):
    with contextlib.closing(warehouse.connect(filled)) as opened:
        yield opened


def state_of(root):
    """Every file with its content; what DuckDB may not change."""
    return {path: path.read_bytes() for path in sorted(Path(root).rglob("*")) if path.is_file()}


def places(folder, connection):
    """Where somebody could want to write, each with the name that DuckDB would have to know it by."""
    (database,) = (row[2] for row in connection.execute("PRAGMA database_list").fetchall() if row[1] == "warehouse")
    return [
        str(folder.root / "runs" / "family=cnn" / "planted.parquet"),
        str(folder.root / "compactions" / "runs" / "merged-20250101T000000-0123456789ab.parquet"),
        str(folder.root / "runs" / "family=cnn" / "J-000000.parquet"),
        str(folder.warehouse),
        str(folder.warehouse) + ".wal",
        str(folder.queue),
        str(folder.root / "x"),
        str(folder.root.parent / "x"),
        database,
        f"{database}.wal",
        "gpufarm://runs/1/family=cnn/planted.parquet",
        "gpufarm://runs/1/family=cnn/J-000000.parquet",
        "gpufarm://runs/*.parquet",
        "/dev/stdout",
        "/proc/self/fd/1",
    ]


WRITES = (
    "COPY (SELECT 'x' AS run_id) TO {path}",
    "COPY (SELECT 'x' AS run_id) TO {path} (FORMAT parquet, USE_TMP_FILE false)",
    "COPY (SELECT 'x' AS run_id) TO {path} (FORMAT csv, PARTITION_BY (run_id), OVERWRITE_OR_IGNORE)",
    "EXPLAIN ANALYZE COPY (SELECT 'x' AS run_id) TO {path} (FORMAT parquet, USE_TMP_FILE false)",
    "EXPLAIN COPY (SELECT 'x' AS run_id) TO {path} (FORMAT parquet, USE_TMP_FILE false)",
    "PREPARE p AS COPY (SELECT 'x' AS run_id) TO {path} (USE_TMP_FILE false); EXECUTE p",
    "EXPLAIN ANALYZE COPY (SELECT 'x' AS run_id) TO {path} (FORMAT json)",
    "SELECT 1; EXPLAIN ANALYZE COPY (SELECT 1) TO {path} (USE_TMP_FILE false)",
    "EXPORT DATABASE {path}",
    "EXPLAIN ANALYZE EXPORT DATABASE {path}",
    "ATTACH {path} AS other; CREATE TABLE other.t AS SELECT 1",
    "CREATE TABLE t AS SELECT 1",
    "CALL enable_logging(storage = 'file', storage_config = {{'path': {path}}})",
    "CREATE PERSISTENT SECRET s (TYPE http, BEARER_TOKEN 'x')",
)


@pytest.mark.parametrize("sql", WRITES)
def test_no_statement_writes_a_file(connection, filled, sql):
    before = state_of(filled.root.parent)
    cursor = connection.cursor()
    for path in places(filled, connection):
        with contextlib.suppress(duckdb.Error):  # EXPLAIN without ANALYZE only plans
            connection.execute(sql.format(path=sql_text(path))).fetchall()
        with contextlib.suppress(duckdb.Error):
            cursor.sql(sql.format(path=sql_text(path)))
    assert state_of(filled.root.parent) == before
    assert connection.execute("SELECT count(*) FROM runs").fetchall() == [(3,)]


@pytest.mark.parametrize("method", ["write_parquet", "to_parquet", "write_csv", "to_csv"])
def test_a_relation_of_the_python_api_writes_no_file(connection, filled, method):
    before = state_of(filled.root.parent)
    relation = connection.sql("SELECT run_id FROM runs")
    for path in places(filled, connection):
        with pytest.raises((duckdb.Error, AttributeError)):
            getattr(relation, method)(path)
    assert state_of(filled.root.parent) == before


@pytest.mark.parametrize(
    "sql",
    [
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "SET threads = 1",
        "SET allowed_directories = ['/']",
        "SET temp_directory = '/tmp/elsewhere'",
        "SET disabled_filesystems = ''",
        "RESET enable_external_access",
        "RESET ALL",
        "EXPLAIN ANALYZE SET allowed_directories = ['/']",
        "PRAGMA enable_profiling",
        "PRAGMA profiling_output = '/tmp/x'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "LOAD '/tmp/x.duckdb_extension'",
        "ATTACH '/tmp/gpufarm-other.duckdb' AS other",
        "INSERT INTO runs SELECT * FROM runs",
        "CREATE OR REPLACE VIEW runs AS SELECT 1",
        "DROP VIEW runs",
        "DELETE FROM runs",
    ],
)
def test_no_setting_and_no_view_changes(connection, sql):
    shown = (
        "SELECT name, value FROM duckdb_settings() WHERE name <> 'current_transaction_invalidation_policy' ORDER BY 1"
    )
    before = connection.execute(shown).fetchall()
    with pytest.raises(duckdb.Error):
        connection.execute(sql).fetchall()
    assert connection.execute(shown).fetchall() == before


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_csv('/etc/passwd', sep=':')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_blob('gpufarm://runs/1/../../format.json')",
        "SELECT * FROM read_blob('gpufarm://models/1/x.parquet')",
        "SELECT * FROM read_text('gpufarm:///etc/hostname')",
    ],
)
def test_no_other_file_is_read(connection, sql):
    try:
        rows = connection.execute(sql).fetchall()
    except duckdb.Error:
        rows = []
    assert rows == []


def test_nobody_else_reads_what_a_query_spills(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with contextlib.closing(warehouse.connect(folder)):
        (spill,) = tmp_path.glob("gpufarm-spill-*")
        assert spill.stat().st_mode & 0o777 == 0o700
    assert not spill.exists()


@pytest.mark.parametrize(
    "sql",
    [
        "PREPARE p AS SELECT 1",
        "EXECUTE p",
        "CALL enable_logging()",
        "ATTACH ':memory:' AS m",
        "PRAGMA enable_profiling",
        "WITH t AS (SELECT 1) INSERT INTO runs SELECT * FROM t",
        "CREATE TEMP TABLE t AS SELECT 1",
        "SET VARIABLE a = 1",
    ],
)
def test_a_query_is_a_select_or_an_explanation_of_one(query, sql):
    code, out, err = query(sql)
    assert (code, out) == (2, "")
    assert err.startswith("error: the warehouse is read-only") and err.count("\n") == 1


@pytest.mark.parametrize(
    "sql",
    [
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '/tmp/gpufarm-planted'",
        "explain analyze  /* SELECT */ SET threads = 1",
        "EXPLAIN (ANALYZE) CREATE TABLE t AS SELECT 1",
        "EXPLAIN COPY runs TO '/tmp/gpufarm-planted'",
        "EXPLAIN PRAGMA enable_profiling",
    ],
)
def test_an_explained_statement_that_writes_is_refused_by_duckdb(query, sql):
    code, out, err = query(sql)
    assert (code, out) == (2, "") and err.startswith("error: ")
    assert not os.path.exists("/tmp/gpufarm-planted")


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "sql",
    [
        "EXPLAIN SELECT 1 AS a",
        "EXPLAIN ANALYZE SELECT count(*) FROM runs",
        "EXPLAIN (FORMAT json) SELECT 1 AS a",
        "explain analyze FROM runs",
        "VALUES (1), (2)",
        "FROM runs SELECT count(*)",
        "WITH a AS (SELECT 1 AS x) SELECT * FROM a",
        "EXPLAIN (SELECT 1 AS a)",
        "SHOW ALL TABLES",
        "SHOW TABLES",
        "SUMMARIZE runs",
        "DESCRIBE SELECT * FROM runs",
    ],
)
def test_every_way_to_look_is_taken(query, sql):
    code, _, err = query(sql)
    assert (code, err) == (0, "")
