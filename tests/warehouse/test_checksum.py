"""Checksums: each file carries its own, no flipped bit goes unnoticed, and files of older versions pass without one."""

import datetime
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import collocations, kernels, ranks, run_row, samples

from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.layout import (
    CHECKSUM_KEY,
    COMPRESSION,
    checksum_problem,
    content_problem,
    recorded_checksum,
    verify,
    write_sealed,
)
from warehouse.files.merged import Listing, read_listings
from warehouse.files.stale import Mark, write_marks
from warehouse.files.writer import RunWriter, run_table

NOW_S = 4_000_000_000.0


def written(tmp_path, table=None):
    path = tmp_path / "a'; echo foo.parquet"
    write_sealed(run_table(run_row(1)) if table is None else table, path, **COMPRESSION)
    return path


def test_every_file_that_the_project_writes_carries_its_checksum(folder):
    writer = RunWriter(folder)
    writer.write_job({"job_id": "J", "family": "cnn", "submitted_at": 0.0})
    for index in range(4):
        writer.write(run_row(index), samples(), kernels(), ranks(), collocations())
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
    compact(folder, now_s=NOW_S, settings=CompactionSettings(min_files=2))
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


def test_listings_name_the_checksum_of_their_merged_file(folder):
    for index in range(3):
        RunWriter(folder).write(run_row(index), samples())
    compact(folder, now_s=NOW_S, settings=CompactionSettings(min_files=2))
    (listing,) = read_listings(folder, "runs")
    assert listing.checksum == recorded_checksum(folder.runs / listing.merged)
    assert listing.rows == 3
    assert Listing.read(listing.file) == listing


def test_every_flipped_bit_is_noticed(tmp_path):
    content = bytearray(written(tmp_path).read_bytes())
    generator = random.Random(0)
    ending = range((len(content) - 700) * 8, len(content) * 8)  # the entry, the footer's length, the magic
    for bit in [*generator.sample(range(len(content) * 8), 3000), *ending]:
        content[bit // 8] ^= 1 << bit % 8
        assert content_problem(bytes(content)) is not None, bit
        content[bit // 8] ^= 1 << bit % 8
    assert content_problem(bytes(content)) is None


@pytest.mark.parametrize("content", [b"", b"x", b"PAR1", b"PAR1PAR1", b"\xff" * 4000, b"PAR1\0\0\0\0PAR1"])
def test_what_is_no_parquet_file_has_a_problem(tmp_path, content):
    path = tmp_path / "torn.parquet"
    path.write_bytes(content)
    carries, problem = verify(path)
    assert (carries, problem is None) == (False, content == b"PAR1\0\0\0\0PAR1")


def test_a_file_that_was_cut_or_grew_has_a_problem(tmp_path):
    path = written(tmp_path)
    content = path.read_bytes()
    for changed in (content[:-1], content[: len(content) // 2], content[:100], content + b"\0", content + content):
        path.write_bytes(changed)
        assert checksum_problem(path) is not None


def test_a_large_file_is_verified_in_parts(tmp_path):
    rows = 400_000
    table = pa.table({"run_id": [f"J-{i:06d}" for i in range(rows)], "number": range(rows)})
    path = tmp_path / "large.parquet"
    digest = write_sealed(table, path, row_group_size=5_000, compression="none")
    assert path.stat().st_size > 3 * 2**20
    assert verify(path) == (True, None) and recorded_checksum(path) == digest
    content = bytearray(path.read_bytes())
    assert content_problem(bytes(content)) is None
    for place in (5, len(content) // 2, len(content) - 300, len(content) - 12):
        content[place] ^= 4
        path.write_bytes(content)
        assert checksum_problem(path) is not None, place
        content[place] ^= 4


def test_texts_of_runs_that_look_like_the_entry_do_no_harm(tmp_path):
    forged = f"{CHECKSUM_KEY}\x18\x47sha256:{'0' * 64}"
    table = run_table(run_row(1, error=forged, config=forged))
    path = written(tmp_path, table)
    assert verify(path) == (True, None)
    assert pq.read_table(path).column("error").to_pylist() == [forged]
    content = bytearray(path.read_bytes())
    content[content.index(forged.encode()) + 30] ^= 1
    assert content_problem(bytes(content)) is not None
