"""Every damaged or missing file is named, and no flipped bit goes unnoticed; a folder that is well has no finding."""

import datetime
import hashlib
import json
import random
import sqlite3

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import compact_at, copy_into, fill, flip, only_merged, run_row

from warehouse.files.folder import (
    CHECKSUM_KEY,
    COMPRESSION,
    DataFolder,
    checksum_problem,
    content_problem,
    damage_of,
    find_damaged,
    parquet_files,
    recorded_checksum,
    verify,
    write_sealed,
)
from warehouse.files.integrity import examine
from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import Mark, run_table, write_marks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with merged and small files, a job, a snapshot and an artifact."""
    folder = DataFolder(tmp_path_factory.mktemp("made") / "data").create()
    fill(folder, range(4)).write_job({"job_id": "J", "family": "cnn", "submitted_at": 0.0})
    compact_at(folder, 0, 2)
    fill(folder, range(4, 6))
    take_snapshot(folder, "s")
    artifact = folder.models / "memory" / "v1"
    (artifact / "model").mkdir(parents=True)
    (artifact / "model" / "model.txt").write_text("14150")
    meta = {"files": {"model/model.txt": {"sha256": hashlib.sha256(b"14150").hexdigest(), "bytes": 5}}}
    own = hashlib.sha256(json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (artifact / "meta.json").write_text(json.dumps({**meta, "own_sha256": own}))
    return folder


@pytest.fixture
def filled(folder, made):
    """Such a folder of the test's own."""
    return copy_into(folder, made)


def damaged(folder):
    return [str(file.path.relative_to(folder.root)) for file in examine(folder).damaged]


def test_a_folder_that_is_well(filled, shown):
    unknown, line = shown("check", f"data={filled.root}").splitlines()
    assert "6 runs of 1 job" in unknown and "are not in its queue. " in unknown
    assert line.endswith("files verified; 0 damaged or missing")


@pytest.mark.spread(3)
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
def test_a_flipped_bit_in_any_file_is_named_with_its_path(filled, outcome, pattern):
    (path,) = filled.root.glob(pattern)
    flip(path)
    code, out, _ = outcome("check", f"data={filled.root}")
    lines = [line for line in out.splitlines() if "in its queue" not in line]
    assert [line for line in lines if line.startswith(f"damaged: {path}: ")] == lines[:-1]
    assert (code, len(lines)) == (1, 2) and lines[-1].endswith("1 damaged or missing")


def test_a_changed_file_of_a_snapshot_is_named(filled):
    (path,) = filled.snapshots.glob("s/runs/family=cnn/J-000004.parquet")
    flip(path)
    (file,) = examine(filled).damaged
    assert "snapshot s: runs/family=cnn/J-000004.parquet has other content" in file.reason
    (filled.snapshots / "s" / "manifest.json").write_text("{")
    assert damaged(filled) == ["snapshots/s/manifest.json"]


def test_a_merged_file_that_is_gone_is_an_error_with_its_rows(filled, outcome):
    path = only_merged(filled)
    path.unlink()
    code, out, _ = outcome("check", f"data={filled.root}")
    assert code == 1 and f"missing: {path} is gone" in out and "4 rows are missing" in out
    code, out, _ = outcome("check", f"data={filled.root}", "format=json")
    (missing,) = json.loads(out)["missing"]
    assert (code, missing["path"], missing["rows"]) == (1, str(path), 4)


def test_another_whole_file_in_a_merged_files_place_is_named(filled):
    path = only_merged(filled)
    path.unlink()
    path.write_bytes((filled.partition("runs", "cnn") / "J-000004.parquet").read_bytes())
    (file,) = examine(filled).damaged
    assert file.path == path and "another file than" in file.reason


def test_files_of_older_versions_are_read_in_full_and_counted(filled, shown):
    path = filled.partition("runs", "cnn") / "J-000009.parquet"
    pq.write_table(run_table(run_row(9, config="x" * 5000)), path, compression="none")
    assert "1 of them of older versions without a checksum" in shown("check", f"data={filled.root}")
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


def test_a_file_without_ids_or_of_other_types_is_damaged(folder):
    partition = folder.partition("runs", "cnn")
    partition.mkdir()
    pq.write_table(pa.table({"x": [1]}), partition / "x.parquet")
    pq.write_table(pa.table({"run_id": ["a"], "smact": ["high"]}), partition / "y.parquet")
    pq.write_table(pa.table({"run_id": ["a"], "steps": [3.5]}), partition / "z.parquet")
    older = {"run_id": ["a"], "steps": pa.array([1], pa.int32()), "wall_s": [3], "later": [1]}
    pq.write_table(pa.table(older), partition / "older.parquet")
    assert [(d.path.name, d.reason) for d in find_damaged(parquet_files(folder))] == [
        ("x.parquet", "it has no column run_id"),
        ("y.parquet", "smact is string, not double"),
        ("z.parquet", "steps is double, not int64"),
    ]


def test_a_missing_file_is_not_a_damaged_one(folder):
    with pytest.raises(FileNotFoundError):
        damage_of(folder.partition("runs", "cnn") / "none.parquet")


def written(tmp_path, table=None):
    path = tmp_path / "a'; echo foo.parquet"
    write_sealed(run_table(run_row(1)) if table is None else table, path, **COMPRESSION)
    return path


def test_every_file_that_the_project_writes_carries_its_checksum(folder):
    writer = fill(folder, range(4), has_details=True)
    writer.write_job({"job_id": "J", "family": "cnn", "submitted_at": 0.0})
    writer.write_batch([run_row(9, family="mlp", source="imported")])
    mark = Mark(
        run_id="J-000001",
        label="drama",
        operators=(),
        device_name="A",
        source="measured",
        environment={},
        shift=None,
        said="moved",
    )
    write_marks(folder, "2026-01-02", [mark], marked_at=datetime.datetime.now(datetime.UTC))
    compact_at(folder, 0)
    paths = sorted(folder.root.rglob("*.parquet"))
    assert {path.relative_to(folder.root).parts[0] for path in paths} == {
        "runs",
        "telemetry",
        "kernels",
        "ranks",
        "collocations",
        "jobs",
        "stale",
        "compactions",
    }
    assert [path for path in paths if verify(path) != (True, None)] == []


def test_every_flipped_bit_is_noticed(tmp_path):
    content = bytearray(written(tmp_path).read_bytes())
    generator = random.Random(0)
    ending = range((len(content) - 700) * 8, len(content) * 8)  # the entry, the footer's length, the magic
    for bit in [*generator.sample(range(len(content) * 8), 3000), *ending]:
        content[bit // 8] ^= 1 << bit % 8
        assert content_problem(bytes(content)) is not None, bit
        content[bit // 8] ^= 1 << bit % 8
    assert content_problem(bytes(content)) is None


def test_a_file_that_was_cut_or_grew_or_is_none_has_a_problem(tmp_path):
    path = written(tmp_path)
    content = path.read_bytes()
    none = (b"", b"x", b"PAR1PAR1", b"\xff" * 4000)
    for changed in (*none, content[:-1], content[: len(content) // 2], content + b"\0", content + content):
        path.write_bytes(changed)
        assert checksum_problem(path) is not None


def test_a_large_file_is_verified_in_parts(tmp_path):
    rows = 200_000
    table = pa.table({"run_id": [f"J-{i:06d}" for i in range(rows)], "number": range(rows)})
    path = tmp_path / "large.parquet"
    digest = write_sealed(table, path, row_group_size=5_000, compression="none")
    assert path.stat().st_size > 3 * 2**20
    assert verify(path) == (True, None) and recorded_checksum(path) == digest
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    assert checksum_problem(path) is not None


def test_texts_of_runs_that_look_like_the_entry_do_no_harm(tmp_path):
    forged = f"{CHECKSUM_KEY}\x18\x47sha256:{'0' * 64}"
    path = written(tmp_path, run_table(run_row(1, error=forged, config=forged)))
    assert verify(path) == (True, None)
    assert pq.read_table(path).column("error").to_pylist() == [forged]
    content = bytearray(path.read_bytes())
    content[content.index(forged.encode()) + 30] ^= 1
    assert content_problem(bytes(content)) is not None
