"""The views: any client sees them, nobody writes through them, files and folders of older schemas and moved ones stay
readable."""

import contextlib
import os
import shutil

import pyarrow as pa
import pytest
from warehouse_rows import (
    ask,
    ask_plainly,
    collocations,
    compact_at,
    fill,
    kernels,
    ranks,
    run_row,
    samples,
    take_no_files,
)

import warehouse
from warehouse.files import compaction, folder as folder_module, views, writer as writer_module
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from warehouse.tables import schema
from warehouse.tables.schema import JOB_SCHEMA, KINDS, RUN_SCHEMA, TELEMETRY_SCHEMA


@pytest.fixture
def connection(folder):
    RunWriter(folder).write(run_row(1), samples(), kernels(), ranks(), collocations())
    with contextlib.closing(warehouse.connect(folder)) as opened:
        yield opened


def test_an_empty_warehouse_has_every_column_and_no_row(folder):
    with contextlib.closing(warehouse.connect(folder)) as connection:
        for view, schema in (
            ("runs", RUN_SCHEMA),
            ("attempts", RUN_SCHEMA),
            ("telemetry", TELEMETRY_SCHEMA),
            ("jobs", JOB_SCHEMA),
        ):
            relation = connection.sql(f"SELECT * FROM {view}")
            assert set(schema.names) <= set(relation.columns)
            assert relation.fetchall() == []


def test_a_folder_named_as_merged_files_are_shows_its_runs_to_any_client(tmp_path):
    folder = DataFolder(tmp_path / "merged-data").create()
    fill(folder, range(2))
    assert ask_plainly(folder, "SELECT count(*) FROM runs") == [(2,)]


def test_types_are_those_of_the_schema_and_times_are_utc_without_zone(connection):
    types = dict(zip(*(lambda r: (r.columns, map(str, r.types)))(connection.sql("SELECT * FROM runs")), strict=True))
    assert (types["family"], types["task_index"], types["smact"]) == ("VARCHAR", "BIGINT", "DOUBLE")
    assert types["started_at"] == "TIMESTAMP"
    assert connection.execute("SELECT started_at::VARCHAR FROM runs").fetchone() == ("2025-01-02 03:04:05",)


def test_several_connections_are_open_at_once_while_a_run_lands_and_take_relations(folder, connection):
    with contextlib.closing(warehouse.connect(folder)) as second:
        RunWriter(folder).write(run_row(2), samples(), kernels(), ranks(), collocations())
        for opened in (connection, second):
            assert opened.execute("SELECT count(*) FROM runs").fetchall() == [(2,)]
            assert sorted(opened.sql("FROM runs").fetchall())[0][0] == "J-000001"
            assert opened.sql("SELECT count(*) AS n FROM runs").to_arrow_table().to_pylist() == [{"n": 2}]


def test_runs_leave_out_attempts_that_were_repeated_and_attempts_show_all(folder):
    writer = RunWriter(folder)
    writer.write(run_row(1, final=True, attempt=2), samples())
    writer.write(run_row(1, run_id="J-000001-a1", final=False, quality="untrusted", status="ok"), samples())
    writer.write(run_row(2), samples())
    writer.write_job({"job_id": "J", "family": "cnn", "n": 2})
    with contextlib.closing(warehouse.connect(folder)) as connection:
        assert connection.execute("SELECT run_id FROM runs ORDER BY 1").fetchall() == [("J-000001",), ("J-000002",)]
        assert connection.execute("SELECT run_id, final FROM attempts ORDER BY 1").fetchall() == [
            ("J-000001", True),
            ("J-000001-a1", False),
            ("J-000002", None),
        ]
        assert connection.execute("SELECT runs, ok FROM jobs").fetchall() == [(2, 2)]


def test_a_moved_folder_is_found_again(folder, tmp_path):
    RunWriter(folder).write(run_row(1), samples())
    moved = DataFolder.resolve(folder.root.rename(tmp_path / "moved"))
    assert ask(moved, "SELECT count(*) FROM runs")[0] == (1,)


def test_a_damaged_warehouse_file_is_made_anew(folder):
    folder.warehouse.write_bytes(b"torn")
    assert ask(folder, "SELECT count(*) FROM runs")[0] == (0,)


def test_listings_are_read_before_the_data_files(folder, connection, monkeypatch):
    """The safety of compaction: a query that finds a listing finds its merged file too. Then it looks again."""
    listed, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    for kind in KINDS:
        listed.clear()
        connection.execute(f"SELECT * FROM {kind} AS a JOIN {kind} AS b USING (run_id) WHERE a.family = 'cnn'")
        both = folder.listings(kind), folder.partition(kind, "cnn")
        assert tuple(path for path in listed if path in both) in (both, both * 2), kind


@pytest.fixture
def newer_schema(folder, monkeypatch):
    """Two runs, two samples each and a job are written; then one column more in each schema, and the next version."""
    fill(folder, range(2), 2, smact=0.5).write_job({"job_id": "J", "family": "cnn", "n": 2})

    def grow():
        added = {
            "RUN_SCHEMA": schema.RUN_SCHEMA.append(pa.field("fan_rpm", pa.float64())),
            "TELEMETRY_SCHEMA": schema.TELEMETRY_SCHEMA.append(pa.field("fan_rpm", pa.float64())),
            "JOB_SCHEMA": schema.JOB_SCHEMA.append(pa.field("due_at", pa.timestamp("us", tz="UTC"))),
            "SCHEMA_VERSION": schema.SCHEMA_VERSION + 1,
        }
        renewed = {"runs": "RUN_SCHEMA", "telemetry": "TELEMETRY_SCHEMA", "jobs": "JOB_SCHEMA"}
        added["TABLES"] = schema.TABLES | {table: added[name] for table, name in renewed.items()}
        for module in (schema, folder_module, views, writer_module, compaction):
            for name, value in added.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)

    return grow


def check_old_rows(folder):
    with contextlib.closing(warehouse.connect(folder)) as connection:
        for table, rows in (("runs", 2), ("telemetry", 4)):
            counted = connection.execute(f"SELECT count(*), count(smact), count(fan_rpm) FROM {table}").fetchone()
            assert counted == (rows, rows, 0)
        assert connection.execute("SELECT job_id, runs, ok, due_at FROM jobs").fetchall() == [("J", 2, 2, None)]
        assert connection.execute("SELECT DISTINCT typeof(fan_rpm) FROM runs").fetchall() == [("DOUBLE",)]


def test_older_rows_are_read_with_a_new_column_of_nulls_and_then_also_by_a_plain_client(folder, newer_schema):
    newer_schema()
    check_old_rows(folder)
    rows = ask_plainly(folder, "SELECT run_id, fan_rpm FROM runs ORDER BY 1")
    assert rows == [("J-000000", None), ("J-000001", None)]


def test_a_connection_that_was_open_before_reads_on_after_newer_runs_land(folder, newer_schema):
    with contextlib.closing(warehouse.connect(folder)) as connection:
        newer_schema()
        RunWriter(folder).write(run_row(2, fan_rpm=900.0), samples(2, fan_rpm=[900.0, 901.0]))
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (3,)
    assert ask(folder, "SELECT run_id, fan_rpm FROM runs ORDER BY 1")[1:] == [("J-000001", None), ("J-000002", 900.0)]


def test_older_and_newer_files_are_merged_with_nulls(folder, newer_schema):
    newer_schema()
    RunWriter(folder).write(run_row(2, fan_rpm=900.0), samples(2, fan_rpm=[900.0, 901.0]))
    runs = [("J-000000", None), ("J-000001", None), ("J-000002", 900.0)]
    sql = (
        "SELECT (SELECT list((run_id, fan_rpm) ORDER BY run_id) FROM runs), "
        "(SELECT (count(*), sum(fan_rpm)) FROM telemetry)"
    )
    for hours in (0, 2):  # merges, then deletes what was merged
        assert compact_at(folder, hours).problems == []
        assert ask(folder, sql) == [(runs, (6, 1801.0))]
    assert [len(list(folder.partition(kind, "cnn").glob("*.parquet"))) for kind in ("runs", "telemetry")] == [1, 1]


LATER = {"kernels": "kernel_row", "ranks": "rank", "collocations": "member", "stale": "label"}
COUNTS = " UNION ALL ".join(f"SELECT count(*), count({column}) FROM {kind}" for kind, column in LATER.items())


@pytest.mark.parametrize("views_left", [True, False])
def test_a_folder_from_before_there_were_tables_is_read_on_a_disk_that_takes_no_files(folder, monkeypatch, views_left):
    RunWriter(folder).write(run_row(1), samples(3))
    for kind in LATER:
        shutil.rmtree(folder.root / kind)
    if not views_left:
        folder.warehouse.unlink()
    take_no_files(monkeypatch)
    with contextlib.closing(warehouse.connect(folder)) as connection:
        assert connection.execute(COUNTS).fetchall() == [(0, 0)] * 4
        assert connection.execute("SELECT count(*) FROM runs JOIN telemetry USING (run_id)").fetchall() == [(3,)]
    assert not any((folder.root / kind).exists() for kind in LATER) and folder.warehouse.exists() == views_left
