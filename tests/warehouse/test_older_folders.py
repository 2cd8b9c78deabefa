"""Folders of an older schema: rows written before a column was added stay readable, also where nothing may be written.

Start reading at `newer_schema`.
"""

import contextlib
import os
import shutil

import duckdb
import pyarrow as pa
import pytest
from warehouse_rows import ask, collocations, kernels, ranks, run_row, samples

import warehouse
from warehouse.files import compaction, views
from warehouse.files import folder as folder_module
from warehouse.files import writer as writer_module
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.layout import KINDS
from warehouse.files.writer import RunWriter
from warehouse.tables import schema

NOW_S = 4_000_000_000.0  # after the files were written, by whatever clock
HOUR_S = 3600.0


@pytest.fixture
def newer_schema(folder, monkeypatch):
    """Two runs, two samples each and a job are written; then one column more in each schema, and the next version."""
    writer = RunWriter(folder)
    for index in range(2):
        writer.write(run_row(index, smact=0.5), samples(2), kernels(), ranks(), collocations())
    writer.write_job({"job_id": "J", "family": "cnn", "n": 2})

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
    assert ask(folder, "SELECT count(*), count(smact), count(fan_rpm) FROM runs") == [(2, 2, 0)]
    assert ask(folder, "SELECT count(*), count(smact), count(fan_rpm) FROM telemetry") == [(4, 4, 0)]
    assert ask(folder, "SELECT job_id, runs, ok, due_at FROM jobs") == [("J", 2, 2, None)]
    assert ask(folder, "SELECT DISTINCT typeof(fan_rpm) FROM runs") == [("DOUBLE",)]


def test_older_rows_are_read_and_a_new_column_is_null(folder, newer_schema):
    newer_schema()
    check_old_rows(folder)


def test_a_plain_client_reads_older_rows_once_the_views_are_new(folder, newer_schema):
    newer_schema()
    warehouse.connect(folder).close()
    with contextlib.closing(duckdb.connect(str(folder.warehouse), read_only=True)) as connection:
        assert connection.execute("SELECT run_id, fan_rpm FROM runs ORDER BY 1").fetchall() == [
            ("J-000000", None),
            ("J-000001", None),
        ]


def test_an_older_folder_that_may_only_be_read_is_read(folder, newer_schema, monkeypatch):
    def refuse(*_arguments):
        raise OSError(30, "Read-only file system")

    newer_schema()
    before = sorted(folder.root.rglob("*"))
    monkeypatch.setattr("warehouse.files.views.write_bytes", refuse)
    check_old_rows(folder)
    assert sorted(folder.root.rglob("*")) == before


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_older_folder_without_write_permission_is_read(folder, newer_schema):
    newer_schema()
    folder.root.chmod(0o500)
    try:
        check_old_rows(folder)
    finally:
        folder.root.chmod(0o700)


def test_a_connection_that_was_open_before_reads_on_after_newer_runs_land(folder, newer_schema):
    with contextlib.closing(warehouse.connect(folder)) as connection:
        newer_schema()
        RunWriter(folder).write(
            run_row(2, fan_rpm=900.0), samples(2, fan_rpm=[900.0, 901.0]), kernels(), ranks(), collocations()
        )
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (3,)
    assert ask(folder, "SELECT run_id, fan_rpm FROM runs ORDER BY 1")[1:] == [("J-000001", None), ("J-000002", 900.0)]


def test_older_and_newer_files_are_merged_with_nulls(folder, newer_schema):
    newer_schema()
    RunWriter(folder).write(
        run_row(2, fan_rpm=900.0), samples(2, fan_rpm=[900.0, 901.0]), kernels(), ranks(), collocations()
    )
    runs = [("J-000000", None), ("J-000001", None), ("J-000002", 900.0)]
    for hours in (0, 2):  # merges, then deletes what was merged
        report = compact(folder, now_s=NOW_S + hours * HOUR_S, settings=CompactionSettings(min_files=2))
        assert report.problems == []
        assert ask(folder, "SELECT run_id, fan_rpm FROM runs ORDER BY 1") == runs
        assert ask(folder, "SELECT count(*), sum(fan_rpm) FROM telemetry") == [(6, 1801.0)]
    assert [len(list(folder.partition(kind, "cnn").glob("*.parquet"))) for kind in KINDS] == [1, 1, 1, 1, 1]


def test_older_files_alone_are_merged_in_an_older_folder(folder, newer_schema):
    newer_schema()
    for hours in (0, 2):
        compact(folder, now_s=NOW_S + hours * HOUR_S, settings=CompactionSettings(min_files=2))
        check_old_rows(folder)


@pytest.mark.parametrize(
    ("kind", "column"), [("kernels", "kernel_row"), ("ranks", "rank"), ("collocations", "member"), ("stale", "label")]
)
@pytest.mark.parametrize("views_left", [True, False])
def test_a_folder_from_before_there_was_a_table_is_read_on_a_disk_that_takes_no_files(
    folder, monkeypatch, kind, column, views_left
):
    def refuse(*_arguments):
        raise OSError(30, "Read-only file system")

    RunWriter(folder).write(run_row(1), samples(3))
    shutil.rmtree(folder.root / kind)
    if not views_left:
        folder.warehouse.unlink()
    monkeypatch.setattr("warehouse.files.views.write_bytes", refuse)
    assert ask(folder, f"SELECT count(*), count({column}) FROM {kind}") == [(0, 0)]
    assert ask(folder, "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM telemetry)") == [(1, 3)]
    assert not (folder.root / kind).exists() and folder.warehouse.exists() == views_left


@pytest.mark.parametrize(
    ("kind", "column"), [("kernels", "kernel_row"), ("ranks", "rank"), ("collocations", "member"), ("stale", "label")]
)
def test_a_folder_from_before_there_was_a_table_is_read_by_any_client(folder, kind, column):
    RunWriter(folder).write(run_row(1), samples(1))
    shutil.rmtree(folder.root / kind)
    count = f"SELECT count(*), count({column}) FROM {kind}"
    assert ask(folder, count) == [(0, 0)]
    with contextlib.closing(duckdb.connect(str(folder.warehouse), read_only=True)) as connection:
        assert connection.execute(count).fetchall() == [(0, 0)]
