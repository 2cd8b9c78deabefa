"""The views: any client sees them, nobody writes through them, files and folders of older schemas and moved ones stay
readable."""

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import struct
import sys

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
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
from warehouse.files import compaction, views
from warehouse.files import folder as folder_module
from warehouse.files import writer as writer_module
from warehouse.files.folder import DataFolder
from warehouse.files.views import refresh
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


def test_a_plain_client_that_opens_the_file_sees_the_rows(folder):
    RunWriter(folder).write(run_row(1), samples(3), kernels(), ranks(), collocations())
    with contextlib.closing(duckdb.connect(str(folder.warehouse), read_only=True)) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM telemetry").fetchone() == (3,)
        RunWriter(folder).write(run_row(2), samples(3), kernels(), ranks(), collocations())
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (2,)
        assert connection.execute("SELECT * FROM jobs").fetchall() == []


def test_types_are_those_of_the_schema_and_times_are_utc_without_zone(connection):
    types = dict(zip(*(lambda r: (r.columns, map(str, r.types)))(connection.sql("SELECT * FROM runs")), strict=True))
    assert (types["family"], types["task_index"], types["smact"]) == ("VARCHAR", "BIGINT", "DOUBLE")
    assert types["started_at"] == "TIMESTAMP"
    assert connection.execute("SELECT started_at::VARCHAR FROM runs").fetchone() == ("2025-01-02 03:04:05",)


def test_a_family_that_reads_like_a_number_stays_text(folder):
    RunWriter(folder).write(run_row(1, family="007"), samples(1))
    assert ask(folder, "SELECT family FROM runs UNION ALL SELECT family FROM telemetry") == [("007",)] * 2


def test_several_connections_are_open_at_once_while_a_run_lands_and_take_relations(folder, connection):
    with contextlib.closing(warehouse.connect(folder)) as second:
        RunWriter(folder).write(run_row(2), samples(), kernels(), ranks(), collocations())
        for opened in (connection, second):
            assert opened.execute("SELECT count(*) FROM runs").fetchall() == [(2,)]
            assert sorted(opened.sql("FROM runs").fetchall())[0][0] == "J-000001"
            assert opened.sql("SELECT count(*) AS n FROM runs").to_arrow_table().to_pylist() == [{"n": 2}]


def test_files_of_another_schema_are_read_with_nulls_and_without_columns_this_code_does_not_know(folder):
    partition = folder.partition("runs", "cnn")
    partition.mkdir()
    pq.write_table(
        pa.table({"run_id": ["old"], "status": ["ok"], "steps": pa.array([3], pa.int32()), "later": [1]}),
        partition / "old.parquet",
    )
    RunWriter(folder).write(run_row(1, steps=4), samples())
    with contextlib.closing(warehouse.connect(folder)) as connection:
        assert connection.execute("SELECT run_id, family, steps, smact FROM runs ORDER BY 1").fetchall() == [
            ("J-000001", "cnn", 4, None),
            ("old", "cnn", 3, None),
        ]
        assert "later" not in connection.sql("SELECT * FROM runs").columns


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
        assert connection.sql("FROM runs").columns == connection.sql("FROM attempts").columns


def test_a_moved_folder_is_found_again(folder, tmp_path):
    RunWriter(folder).write(run_row(1), samples())
    moved = DataFolder.resolve(folder.root.rename(tmp_path / "moved"))
    assert ask(moved, "SELECT count(*) FROM runs")[0] == (1,)


def test_a_damaged_warehouse_file_is_made_anew(folder):
    folder.warehouse.write_bytes(b"torn")
    assert ask(folder, "SELECT count(*) FROM runs")[0] == (0,)


def test_views_that_fit_are_left_alone(folder):
    before = folder.warehouse.stat().st_ino
    refresh(folder)
    assert folder.warehouse.stat().st_ino == before


IN_OPEN, IN_ISDIR = 0x20, 0x40000000


def folders_opened(folders, act):
    """The folders in the order in which `act` opened (listed) them, as the kernel saw it."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    try:
        watched = {libc.inotify_add_watch(descriptor, os.fsencode(path), IN_OPEN): path for path in folders}
        assert -1 not in watched
        act()
        events, opened = os.read(descriptor, 1 << 20), []
        while events:
            watch, mask, _cookie, length = struct.unpack_from("iIII", events)
            if mask & IN_ISDIR and length == 0:
                opened.append(watched[watch])
            events = events[16 + length :]
        return opened
    finally:
        os.close(descriptor)


QUERIES = (
    "SELECT count(*) FROM {kind}",
    "SELECT * FROM {kind} AS a JOIN {kind} AS b USING (run_id) WHERE a.family = 'cnn'",
    "WITH a AS (SELECT family, count(*) FROM {kind} GROUP BY ALL) SELECT * FROM a WHERE family LIKE 'c%'",
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="watches the file system with inotify")
def test_listings_are_expanded_before_the_data_files(folder, connection):
    """The safety of compaction: a query that finds a listing finds its merged file too. Then it looks again."""
    for kind, sql in itertools.product(KINDS, QUERIES):
        listings, data = folder.listings(kind), folder.partition(kind, "cnn")
        opened = folders_opened([listings, data], functools.partial(connection.execute, sql.format(kind=kind)))
        assert opened in ([listings, data], [listings, data] * 2), (kind, sql)


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


def test_an_older_folder_that_may_only_be_read_is_read(folder, newer_schema, monkeypatch):
    newer_schema()
    before = sorted(folder.root.rglob("*"))
    take_no_files(monkeypatch)
    check_old_rows(folder)
    assert sorted(folder.root.rglob("*")) == before


def test_an_older_folder_with_a_torn_file_is_read_and_keeps_its_views_file(folder, newer_schema):
    (folder.partition("runs", "cnn") / "torn.parquet").write_bytes(b"torn")
    before = folder.warehouse.read_bytes()
    newer_schema()
    check_old_rows(folder)
    assert folder.warehouse.read_bytes() == before


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


def test_older_files_alone_are_merged_in_an_older_folder(folder, newer_schema):
    newer_schema()
    for hours in (0, 2):
        compact_at(folder, hours)
        check_old_rows(folder)


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


def test_a_folder_from_before_there_were_tables_is_read_by_any_client(folder):
    RunWriter(folder).write(run_row(1), samples(1))
    for kind in LATER:
        shutil.rmtree(folder.root / kind)
    warehouse.connect(folder).close()
    assert ask_plainly(folder, COUNTS) == [(0, 0)] * 4
