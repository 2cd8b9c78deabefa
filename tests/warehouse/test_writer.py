"""Landing runs: what is refused, what a crash or a full disk leaves behind."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import ask, collocations, compact_at, failing, fill, kernels, ranks, run_row, samples, unreadable

import warehouse
from warehouse.files.counting import Listing, listing_file, new_merged_name
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import RUN_SCHEMA, TELEMETRY_SCHEMA


def test_a_run_lands_with_its_telemetry_and_absent_columns_are_null(tmp_path):
    folder = DataFolder.resolve(tmp_path / "new")  # which the writer makes
    path = RunWriter(folder).write(run_row(7), samples(3))
    assert pq.read_schema(path).equals(RUN_SCHEMA)
    assert pq.read_schema(str(path).replace("/runs/", "/telemetry/")).equals(TELEMETRY_SCHEMA)
    path.with_name(".J-000002.parquet.1-abc.tmp").write_bytes(b"PAR1 torn")  # nobody sees it
    with contextlib.closing(warehouse.connect(folder)) as connection:
        assert connection.execute(
            "SELECT run_id, family, peak_memory_mib, smact, telemetry_rows FROM runs"
        ).fetchall() == [("J-000007", "cnn", 7.0, None, 3)]
        sample = connection.execute(
            "SELECT run_id, family, t_ms, smact, drama FROM telemetry ORDER BY t_ms OFFSET 1"
        ).fetchone()
    assert sample == ("J-000007", "cnn", 100.0, 0.5, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": run_row(1, peak_memory_gib=1.0)}, "unknown column peak_memory_gib; known: run_id"),
        ({"run": run_row(1, status="successful")}, "status must be one of ok, oom"),
        ({"run": run_row(1, source="guessed")}, "source must be one of"),
        ({"run": run_row(1, oom_kind="disk")}, "oom_kind must be one of"),
        ({"run": run_row(1, quality="fine")}, "quality must be one of trusted, suspect, untrusted"),
        ({"run": run_row(1, smact=55.0)}, r"smact must be in \[0, 1\], got 55.0"),
        ({"run": run_row(1, drama=-0.1)}, r"drama must be in \[0, 1\]"),
        ({"run": run_row(1, power_w=float("nan"))}, "power_w must be a finite number or None"),
        ({"run": run_row(1, steps="many")}, "steps must be int64, got 'many'"),
        ({"run": run_row(1, run_id="../../x")}, "run_id must be of letters"),
        ({"run": run_row(1, run_id="merged-1")}, "must not look like a merged file"),
        ({"run": run_row(1, family=None)}, "family is required"),
        ({"run": run_row(1, status="fine", smact=2.0, nonsense=1)}, r"status.*smact.*unknown column"),  # all together
        ({"telemetry": samples(3, sm_active=[0.1] * 3)}, "unknown column sm_active"),
        ({"telemetry": samples(3, gpu_util=[0.1, 99.0, None])}, r"gpu_util must be in \[0, 1\]"),
        ({"telemetry": samples(3, run_id=["J-000001", "J-000001", "other"])}, "run_id must be 'J-000001' in every row"),
        ({"telemetry": samples(3, phase=["warmup", None, "later"])}, "phase must be one of"),
        (
            {"telemetry": samples(3, quality=["measured", None, "odd"])},
            "quality must be one of measured, repeated, unavailable, suspect",
        ),
        ({"telemetry": samples(3, power_w=[1.0, float("inf"), None])}, "power_w must be finite"),
        ({"kernels": kernels(timing=["stopwatch"] * 2)}, "timing must be one of"),
        ({"kernels": kernels(operator=["aten::mm", None])}, "operator is required"),
        ({"kernels": kernels(duration_us=[1.0, float("nan")])}, "duration_us must be finite"),
        ({"kernels": kernels(colour=["red"] * 2)}, "unknown column colour"),
        ({"ranks": ranks(status=["ok", "lost"])}, "status must be one of"),
        ({"ranks": ranks(rank=[0, None])}, "rank is required"),
        ({"collocations": collocations(sharing=["hope"])}, "sharing must be one of"),
        ({"collocations": collocations(group_id=[None])}, "group_id is required"),
    ],
)
def test_rows_that_break_the_schema_are_refused_and_nothing_is_written(folder, given, message):
    before = sorted(folder.root.rglob("*"))
    with pytest.raises(ValueError, match=message):
        RunWriter(folder).write(**{"run": run_row(1), "telemetry": samples(3)} | given)
    assert sorted(folder.root.rglob("*")) == before


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4])
def test_a_full_disk_leaves_whole_files_only_and_never_a_run_without_its_telemetry(folder, monkeypatch, failing_call):
    writer = RunWriter(folder)
    writer.write(run_row(0), samples())  # the partitions exist
    calls, fsync = [], os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == failing_call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        writer.write(run_row(1), samples())
    monkeypatch.undo()
    assert not list(folder.root.rglob("*.tmp"))
    assert ask(folder, "SELECT run_id FROM runs ANTI JOIN telemetry USING (run_id)") == []
    writer.write(run_row(1), samples())
    assert ask(folder, "SELECT count(*) FROM runs") == [(2,)]


WRITE_FOREVER = """
import itertools, sys
sys.path.insert(0, sys.argv[2])
from warehouse_rows import run_row, samples
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
writer = RunWriter(DataFolder.resolve(sys.argv[1]))
for index in itertools.count():
    writer.write(run_row(index % 50), samples(500))
    print(index, flush=True)
"""


@pytest.mark.spread(3)
@pytest.mark.parametrize("rounds", [3, 8, 17])
def test_a_killed_writer_leaves_readable_files_only(folder, rounds):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, str(folder.root), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(rounds):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    for path in folder.root.rglob("*.parquet"):
        pq.read_table(path)
    acknowledged = min(rounds, 50)
    ((runs, missing),) = ask(
        folder,
        """SELECT count(*), count(*) FILTER (samples IS DISTINCT FROM 500) FROM runs
           LEFT JOIN (SELECT run_id, count(*) AS samples FROM telemetry GROUP BY 1) USING (run_id)""",
    )
    assert runs >= acknowledged
    assert missing == 0


def test_a_job_snapshot_is_replaced_and_counted(folder):
    writer = RunWriter(folder)
    job = {"job_id": "J", "family": "cnn", "n": 2, "seed": 0, "space": "{}", "submitted_at": 0.0}
    writer.write_job(job)
    writer.write_job({**job, "n": 5})
    writer.write(run_row(0), samples())
    writer.write(run_row(1, status="oom", oom_kind="device"), samples())
    assert ask(folder, "SELECT job_id, n, runs, ok, oom, timeout, submitted_at::VARCHAR FROM jobs") == [
        ("J", 5, 2, 1, 1, 0, "1970-01-01 00:00:00")
    ]
    with pytest.raises(ValueError, match="unknown column who"):
        writer.write_job({**job, "who": "me"})


def plant(folder, name, run_id="J-000003"):
    path = folder.partition("runs", "cnn") / name
    pq.write_table(pa.Table.from_pylist([run_row(3, run_id=run_id)], schema=RUN_SCHEMA), path)
    Listing(listing_file(folder, "runs", name), f"family=cnn/{name}", (), 1.0).write()
    return path


@pytest.mark.parametrize("how", ["other name", "listing of another", "odd columns"])
def test_a_run_lands_though_a_file_that_does_not_count_claims_to_hold_it(folder, how):
    writer = RunWriter(folder)
    writer.write(run_row(0), samples())
    name = "merged-evil.parquet" if how == "other name" else new_merged_name()
    path = plant(folder, name)
    if how == "listing of another":
        Listing(listing_file(folder, "runs", name), f"family=cnn/{new_merged_name()}", (), 1.0).write()
    elif how == "odd columns":
        pq.write_table(pa.table({"run_id": [3]}), path)
    assert not writer.has_landed("cnn", "J-000003")
    assert writer.write(run_row(3), samples()).name == "J-000003.parquet"
    assert ask(folder, "SELECT run_id FROM runs ORDER BY 1") == [("J-000000",), ("J-000003",)]


@pytest.mark.spread(2)
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize(
    "reader",
    ["pyarrow.parquet.read_metadata", "pyarrow.parquet.ParquetFile", "warehouse.files.counting.Listing.read"],
)
def test_a_run_does_not_land_while_a_merged_file_that_may_hold_it_or_its_listing_cannot_be_read(
    folder, monkeypatch, code, reader
):
    writer = RunWriter(folder)
    writer.write(run_row(0), samples())
    path = plant(folder, new_merged_name())
    with monkeypatch.context() as refusing:
        refusing.setattr(reader, failing(code))
        for land in (writer.write, lambda run, _: writer.has_landed("cnn", run["run_id"])):
            with pytest.raises(OSError, match=os.strerror(code)):
                land(run_row(3), samples())
    assert writer.write(run_row(3), samples()) == path
    assert ask(folder, "SELECT run_id FROM runs ORDER BY 1") == [("J-000000",), ("J-000003",)]


@pytest.mark.parametrize("how", ["listing", "merged", "listing may not be read", "merged may not be read"])
def test_a_damaged_merge_keeps_no_run_from_landing_nor_others_from_being_merged(folder, monkeypatch, how, capsys):
    writer = fill(folder, range(4))
    target = plant(folder, new_merged_name(), "J-000009")
    path = target if how.startswith("merged") else listing_file(folder, "runs", target.name)
    may_be_read = not how.endswith("read")
    if may_be_read:
        path.unlink()
        path.symlink_to(path.name)  # to itself
    refused = unreadable(monkeypatch, lambda opened: opened == path, errno.EACCES)
    with contextlib.nullcontext() if may_be_read else refused:
        assert writer.write(run_row(5), samples()).name == "J-000005.parquet"
        report = compact_at(folder, 0)
    assert len(report.merged) == 2 and sum(report.merged.values()) == 10
    assert len(capsys.readouterr().err.splitlines()) <= 2


@pytest.mark.parametrize("part", ["runs", "compactions"])
def test_a_disk_that_does_not_give_one_family_s_file_leaves_the_others_to_be_merged(folder, monkeypatch, part):
    for family in ("cnn", "mlp"):
        fill(folder, range(4), family=family)
    target = plant(folder, new_merged_name(), "J-000009")
    refused = target if part == "runs" else listing_file(folder, "runs", target.name)
    with unreadable(monkeypatch, lambda opened: opened == refused):
        report = compact_at(folder, 0)
    assert {place.split("/")[1] for place in report.merged if place.startswith("runs")} == {"family=mlp"}
    assert any("of cnn: not compacted now" in problem for problem in report.problems)
