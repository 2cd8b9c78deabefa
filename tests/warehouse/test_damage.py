"""Torn files: what is damaged is found and named, whatever was done to the file."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import run_row, samples

from warehouse.files.damage import DamagedFile, damage_of, find_damaged, parquet_files, report
from warehouse.files.writer import RunWriter


def torn(path, how):
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "short": content[:9],
            "cut": content[: len(content) // 2],
            "garbage": os.urandom(len(content)),
            "text": b"PAR1 torn",
            "footer": content[:8] + bytes(len(content) - 16) + content[-8:],
            "long footer": content[:-8] + b"\xff\xff\xff\x7fPAR1",
        }[how]
    )


@pytest.mark.spread(2)
@pytest.mark.parametrize("how", ["empty", "short", "cut", "garbage", "text", "footer", "long footer"])
@pytest.mark.parametrize("kind", ["runs", "telemetry", "jobs", "compactions"])
def test_a_torn_file_is_found_and_named(folder, how, kind):
    writer = RunWriter(folder)
    writer.write(run_row(0), samples())
    writer.write(run_row(1), samples())
    writer.write_job({"job_id": "J"})
    writer.write_batch([run_row(2)])
    assert find_damaged(parquet_files(folder)) == []
    path = next(
        p for p in sorted((folder.root / kind).rglob("*.parquet")) if not p.name.strip("_").startswith("anchor")
    )
    torn(path, how)
    (damaged,) = find_damaged(parquet_files(folder))
    assert damaged.path == path and damaged.reason
    assert str(path) in damaged.line() and "\n" not in damaged.line()


def test_a_page_that_cannot_be_decoded_is_found_when_pages_are_read(folder):
    RunWriter(folder).write(run_row(0, error="e" * 5000), samples())
    path = folder.partition("runs", "cnn") / "J-000000.parquet"
    content = bytearray(path.read_bytes())
    content[40:90] = bytes(50)
    path.write_bytes(content)
    assert damage_of(path) is None
    assert damage_of(path, pages=True)


def test_a_file_without_ids_or_of_other_types_is_damaged(folder):
    partition = folder.partition("runs", "cnn")
    partition.mkdir()
    pq.write_table(pa.table({"x": [1]}), partition / "x.parquet")
    pq.write_table(pa.table({"run_id": ["a"], "smact": ["high"]}), partition / "y.parquet")
    pq.write_table(
        pa.table({"run_id": ["a"], "steps": pa.array([1], pa.int32()), "later": [1]}), partition / "older.parquet"
    )
    assert [(d.path.name, d.reason) for d in find_damaged(parquet_files(folder))] == [
        ("x.parquet", "it has no column run_id"),
        ("y.parquet", "smact is string, not double"),
    ]


def test_a_missing_file_is_not_a_damaged_one(folder):
    with pytest.raises(FileNotFoundError):
        damage_of(folder.partition("runs", "cnn") / "none.parquet")


def test_a_file_is_named_once_in_one_line_on_stderr(tmp_path, capsys):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"")
    report([DamagedFile(path, "it is empty")])
    report([DamagedFile(path, "it is empty")])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"warning: {path} cannot be read (it is empty): its rows are left out\n"
