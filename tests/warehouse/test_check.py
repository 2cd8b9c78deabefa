"""`warehouse.check`: every damaged or missing file is named, whatever it is; a folder that is well has none."""

import hashlib
import json
import sqlite3

import pyarrow.parquet as pq
import pytest
from warehouse_rows import run_row, samples

from conf.cli.command_line import run
from warehouse.check import entry
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.integrity import examine
from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import RunWriter, run_table

NOW_S = 4_000_000_000.0


@pytest.fixture
def filled(folder, monkeypatch):
    """A folder with merged and small files, a job, a snapshot and an artifact."""
    monkeypatch.setenv("GPUFARM_DATA", str(folder.root))
    writer = RunWriter(folder)
    writer.write_job({"job_id": "J", "family": "cnn", "submitted_at": 0.0})
    for index in range(4):
        writer.write(run_row(index), samples())
    for hours in (0, 2):
        compact(folder, now_s=NOW_S + hours * 3600, settings=CompactionSettings(min_files=2))
    for index in range(4, 6):
        writer.write(run_row(index), samples())
    take_snapshot(folder, "s")
    artifact = folder.models / "memory" / "v1"
    (artifact / "model").mkdir(parents=True)
    (artifact / "model" / "model.txt").write_text("14150")
    meta = {"files": {"model/model.txt": {"sha256": hashlib.sha256(b"14150").hexdigest(), "bytes": 5}}}
    own = hashlib.sha256(json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (artifact / "meta.json").write_text(json.dumps({**meta, "own_sha256": own}))
    return folder


def flip(path):
    """Into a file of its own: others are linked to it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.unlink()
    path.write_bytes(content)


def damaged(folder):
    return [str(file.path.relative_to(folder.root)) for file in examine(folder).damaged]


def test_a_folder_that_is_well(filled, capsys):
    assert run("check", entry, []) == 0
    unknown, line = capsys.readouterr().out.splitlines()
    assert "6 runs of 1 job" in unknown and "are not in its queue. " in unknown
    assert line.endswith("files verified; 0 damaged or missing")


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "pattern",
    [
        "runs/family=cnn/J-000004.parquet",
        "telemetry/family=cnn/J-000005.parquet",
        "runs/family=cnn/merged-*.parquet",
        "telemetry/family=cnn/merged-*.parquet",
        "jobs/J.parquet",
        "compactions/runs/merged-*.parquet",
        "runs/family=_schema/*.parquet",
        "models/memory/v1/model/model.txt",
        "models/memory/v1/meta.json",
    ],
)
def test_a_flipped_bit_in_any_file_is_named_with_its_path(filled, capsys, pattern):
    (path,) = filled.root.glob(pattern)
    flip(path)
    assert run("check", entry, []) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "in its queue" not in line]
    assert [line for line in lines if line.startswith(f"damaged: {path}: ")] == lines[:-1]
    assert len(lines) == 2 and lines[-1].endswith("1 damaged or missing")


def test_a_changed_file_of_a_snapshot_is_named(filled):
    (path,) = filled.snapshots.glob("s/runs/family=cnn/J-000004.parquet")
    flip(path)
    (file,) = examine(filled).damaged
    assert "snapshot s: runs/family=cnn/J-000004.parquet has other content" in file.reason
    (filled.snapshots / "s" / "manifest.json").write_text("{")
    assert damaged(filled) == ["snapshots/s/manifest.json"]


def test_a_merged_file_that_is_gone_is_an_error_with_its_rows(filled, capsys):
    (path,) = filled.partition("runs", "cnn").glob("merged-*.parquet")
    path.unlink()
    assert run("check", entry, []) == 1
    assert f"missing: {path} is gone" in (out := capsys.readouterr().out) and "4 rows are missing" in out
    assert run("check", entry, ["format=json"]) == 1
    (missing,) = json.loads(capsys.readouterr().out)["missing"]
    assert (missing["path"], missing["rows"]) == (str(path), 4)


def test_another_whole_file_in_a_merged_files_place_is_named(filled):
    (path,) = filled.partition("runs", "cnn").glob("merged-*.parquet")
    path.unlink()
    path.write_bytes((filled.partition("runs", "cnn") / "J-000004.parquet").read_bytes())
    (file,) = examine(filled).damaged
    assert file.path == path and "another file than" in file.reason


def test_files_of_older_versions_are_read_in_full_and_counted(filled, capsys):
    path = filled.partition("runs", "cnn") / "J-000009.parquet"
    pq.write_table(run_table(run_row(9, config="x" * 5000)), path, compression="none")
    assert run("check", entry, []) == 0
    assert "1 of them of older versions without a checksum" in capsys.readouterr().out
    path.write_bytes(b"PAR1" + bytes(100) + path.read_bytes()[104:])
    assert damaged(filled) == ["runs/family=cnn/J-000009.parquet"]


def test_a_damaged_queue_is_named(filled):
    with sqlite3.connect(filled.queue) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [("x" * 500,)] * 100)
    connection.close()
    content = bytearray(filled.queue.read_bytes())
    content[8192:12288] = b"\xa5" * 4096
    filled.queue.write_bytes(content)
    assert damaged(filled) == ["queue.sqlite"]
    filled.queue.write_bytes(b"no database" * 500)
    assert damaged(filled) == ["queue.sqlite"]
