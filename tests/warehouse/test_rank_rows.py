"""The table `ranks`: one row a rank of a run on several devices, through landing, checks, data sets and publication."""

import contextlib

import duckdb
import pyarrow as pa
from warehouse_rows import ask, ranks, run_row, samples

from warehouse.exchange.exporting import ExportSettings, export
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.exchange.publishing import PublishSettings, publish
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import RunWriter
from warehouse.reading.checks import check

NOW_S = 4_000_000_000.0
UUIDS = ["GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-000000000000"]


def of_two(index, **changes):
    """A measured run of two ranks."""
    given = {"source": "measured", "device_name": "NVIDIA T4", "device_uuid": UUIDS[0], "node": "machine-of-ours"}
    return run_row(index, **given, parallel="ddp=2", worst_rank=1, **changes)


def test_ranks_land_with_their_runs_device_and_count(folder):
    RunWriter(folder).write(of_two(1), samples(1), None, ranks(device_uuid=UUIDS))
    assert ask(folder, "SELECT parallel, ranks, worst_rank, kernel_rows FROM runs") == [("ddp=2", 2, 1, None)]
    assert ask(folder, "SELECT rank_row, rank, source, device_uuid, node, peak_memory_mib FROM ranks ORDER BY 1") == [
        ("J-000001-r00000", 0, "measured", UUIDS[0], "machine-of-ours", 100.0),
        ("J-000001-r00001", 1, "measured", UUIDS[1], "machine-of-ours", 101.0),
    ]


def test_samples_of_two_ranks_at_one_time_are_no_duplicates(folder):
    RunWriter(folder).write(
        of_two(1), samples(2, rank=[0, 1]).set_column(0, "t_ms", pa.array([5.0, 5.0])), None, ranks()
    )
    RunWriter(folder).write(run_row(2), samples(2).set_column(0, "t_ms", pa.array([5.0, 5.0])))
    findings = {finding.rule: finding.examples for finding in check(folder)}
    assert [example[:8] for example in findings["duplicate.sample"]] == ["J-000002"]


def test_checks_name_ranks_that_are_lost_or_cannot_be(folder):
    writer = RunWriter(folder)
    for index in range(2):
        writer.write(of_two(index), samples(1), None, ranks(rank=[0, 1 + index]))
    writer.write(of_two(2), samples(1), None, ranks())
    (folder.partition("ranks", "cnn") / "J-000002.parquet").unlink()
    findings = {finding.rule: finding.examples for finding in check(folder)}
    assert findings["ranks.rows"] == ("J-000002: 0 ranks, ranks=2",)
    assert findings["impossible.ranks.number"] == ("J-000001-r00001 rank=2",)


def test_ranks_survive_compaction_and_snapshots(folder):
    writer = RunWriter(folder)
    for index in range(3):
        writer.write(of_two(index), samples(1), None, ranks())
    before = ask(folder, "SELECT * FROM ranks ORDER BY rank_row")
    for hours in (0, 2):
        compact(folder, now_s=NOW_S + hours * 3600, settings=CompactionSettings(min_files=2))
    assert len(list(folder.partition("ranks", "cnn").glob("*.parquet"))) == 1
    assert ask(folder, "SELECT * FROM ranks ORDER BY rank_row") == before and len(before) == 6
    assert take_snapshot(folder, "s").rows["ranks"] == 6


def test_ranks_leave_in_data_sets_without_names_of_machines_and_come_back(folder, tmp_path):
    RunWriter(folder).write(of_two(1), samples(2, sensor=["process"] * 2, rank=[0, 1]), None, ranks(device_uuid=UUIDS))
    export(ExportSettings(data=str(folder.root), out=str(tmp_path / "set")))
    assert "2 ranks of 1 runs" in (tmp_path / "set" / "README.md").read_text()
    other = DataFolder(tmp_path / "other").create()
    ingest(IngestSettings(source="dataset", path=str(tmp_path / "set"), data=str(other.root)))
    assert ask(other, "SELECT parallel, ranks, worst_rank FROM runs") == [("ddp=2", 2, 1)]
    columns = "starts_with(rank_row, run_id), rank, node, starts_with(device_uuid, 'gpu-'), peak_memory_mib"
    rows = [(True, 0, None, True, 100.0), (True, 1, None, True, 101.0)]
    assert ask(other, f"SELECT {columns} FROM ranks ORDER BY rank") == rows
    assert ask(other, "SELECT list(rank ORDER BY rank) FROM telemetry") == [([0, 1],)]
    assert ask(other, "SELECT count(*) FROM ranks JOIN runs USING (run_id, device_uuid)") == [(1,)]
    publish(PublishSettings(data=str(folder.root), out=str(tmp_path / "public"), licence="CC-BY-4.0"))
    with contextlib.closing(duckdb.connect()) as connection:
        files = [str(path) for path in (tmp_path / "public" / "ranks").glob("*.parquet")]
        connection.read_parquet(files).create_view("ranks")
        assert connection.execute("SELECT count(*), count(DISTINCT device_uuid) FROM ranks").fetchall() == [(2, 2)]
