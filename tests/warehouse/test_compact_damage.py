"""Compaction among damaged, lost and planted files: nothing of them is merged, hidden, believed or deleted."""

import json
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import ask, collocations, kernels, ranks, run_row, samples

from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.counting import counting_files, lost_merged_files
from warehouse.files.layout import COMPRESSION, KINDS, write_sealed
from warehouse.files.merged import SOURCES, Listing, land_batch, listing_file, new_merged_name, read_listings
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import RUN_SCHEMA

NOW_S = 4_000_000_000.0
HOUR_S = 3600.0
EAGER = CompactionSettings(min_files=2)


def fill(folder, indices):
    writer = RunWriter(folder)
    for index in indices:
        writer.write(run_row(index), samples(), kernels(), ranks(), collocations())


def names(folder, kind="runs"):
    return sorted(path.name for path in folder.partition(kind, "cnn").glob("*.parquet"))


def run_ids(folder):
    return [run_id for (run_id,) in ask(folder, "SELECT run_id FROM runs ORDER BY 1")]


def ids(indices):
    return [f"J-{index:06d}" for index in indices]


def flip(path, place=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 3 if place is None else place] ^= 1
    path.write_bytes(content)


def only_merged(folder, kind="runs"):
    (path,) = folder.partition(kind, "cnn").glob("merged-*.parquet")
    return path


def compact_at(folder, hours, settings=EAGER):
    return compact(folder, now_s=NOW_S + hours * HOUR_S, settings=settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_a_flipped_bit_is_named_and_neither_merged_nor_deleted(folder, kind):
    fill(folder, range(4))
    damaged = folder.partition(kind, "cnn") / "J-000001.parquet"
    flip(damaged)
    before = damaged.read_bytes()
    for hours in (0, 30, 60):
        report = compact_at(folder, hours)
        assert [line for line in report.problems if str(damaged) in line and "checksum" in line] == report.problems
        assert len(report.problems) == 1
    assert damaged.read_bytes() == before
    assert len(names(folder, kind)) == 2  # the three others are merged
    assert pq.read_table(only_merged(folder, kind), columns=["run_id"]).column(0).unique().to_pylist() == ids([0, 2, 3])


def test_a_damaged_merged_file_is_not_merged_on_and_its_sources_stay(folder):
    fill(folder, range(4))
    compact_at(folder, 0)
    flip(only_merged(folder))
    report = compact_at(folder, 30)
    assert len([line for line in report.problems if "merged-" in line and "checksum" in line]) == 1
    assert set(names(folder)) >= {f"{run_id}.parquet" for run_id in ids(range(4))}


def test_a_damaged_source_that_is_hidden_already_goes_as_it_would_have(folder):
    fill(folder, range(4))
    compact_at(folder, 0)
    flip(folder.partition("runs", "cnn") / "J-000002.parquet")
    assert compact_at(folder, 2).problems == []
    assert len(names(folder)) == 1 and run_ids(folder) == ids(range(4))


def test_a_torn_listing_is_read_off_its_merged_file_and_written_anew(folder, capfd):
    fill(folder, range(4))
    compact_at(folder, 0)
    (listing,) = read_listings(folder, "runs")
    for torn in (b"", listing.file.read_bytes()[:-30], b"garbage" * 100):
        listing.file.write_bytes(torn)
        (read_listing,) = read_listings(folder, "runs")
        assert (read_listing.merged, set(read_listing.hidden), read_listing.checksum) == (
            listing.merged,
            set(listing.hidden),
            listing.checksum,
        )
        assert [path.name for path in counting_files(folder, "runs", "cnn")] == [only_merged(folder).name]
    assert compact_at(folder, 1 / 2).problems == []
    assert Listing.read(listing.file).merged == listing.merged
    assert run_ids(folder) == ids(range(4))


def test_a_torn_listing_whose_replaced_files_are_deleted_costs_no_row(folder):
    fill(folder, range(4))
    compact_at(folder, 0)
    compact_at(folder, 2)
    (listing,) = read_listings(folder, "runs")
    listing.file.write_bytes(b"")
    assert compact_at(folder, 4).problems == []
    assert run_ids(folder) == ids(range(4))


def test_a_torn_listing_of_a_damaged_merged_file_is_named(folder, capfd):
    fill(folder, range(4))
    compact_at(folder, 0)
    (listing,) = read_listings(folder, "runs")
    listing.file.write_bytes(b"torn")
    damaged = only_merged(folder)
    flip(damaged)
    assert read_listings(folder, "runs") == []
    assert str(listing.file) in capfd.readouterr().err
    report = compact_at(folder, 30)
    assert any(str(listing.file) in line for line in report.problems)
    assert {damaged.name, *(f"{run_id}.parquet" for run_id in ids(range(4)))} <= set(names(folder))


def test_a_merged_file_that_is_gone_is_named_and_its_listing_stays(folder):
    fill(folder, range(4))
    compact_at(folder, 0)
    compact_at(folder, 2)
    path = only_merged(folder)
    path.unlink()
    report = compact_at(folder, 4)
    assert [line for line in report.problems if str(path) in line and "4 rows are missing" in line] == report.problems
    (lost,) = lost_merged_files(folder, "runs")
    assert lost.file.exists()


def test_a_lost_merged_file_whose_sources_are_all_there_gives_them_back(folder):
    fill(folder, range(4))
    compact_at(folder, 0)
    only_merged(folder).unlink()
    report = compact_at(folder, 1 / 2)
    assert len(report.problems) == 1 and "count again" in report.problems[0]
    assert run_ids(folder) == ids(range(4))
    (kept,) = (folder.damaged / "compactions" / "runs").glob("merged-*.parquet")
    assert "is not there" in kept.with_name(kept.name + ".reason.txt").read_text()


def test_no_file_is_taken_for_lost_between_the_steps_of_a_deletion(folder, monkeypatch):
    for start in (0, 4):
        fill(folder, range(start, start + 4))
        compact_at(folder, start)
    looks = []
    for name in ("replace", "unlink"):
        call = getattr(os, name)

        def looking(*arguments, call=call, **keywords):
            result = call(*arguments, **keywords)
            looks.append([listing.merged for kind in KINDS for listing in lost_merged_files(folder, kind)])
            return result

        monkeypatch.setattr(os, name, looking)
    for hours in (20, 40, 60):
        compact_at(folder, hours)
    assert len(looks) > 10 and not any(looks)


def planted_merge(folder, rows, sources, name=None, sealed=True):
    """A file that looks like a merge of `sources`, with the runs of `rows`."""
    path = folder.partition("runs", "cnn") / (name or new_merged_name())
    table = pa.Table.from_pylist([run_row(index) for index in rows], schema=RUN_SCHEMA)
    identities = {
        f"family=cnn/{s}.parquet": list(_identity(folder.partition("runs", "cnn") / f"{s}.parquet")) for s in sources
    }
    table = table.replace_schema_metadata({SOURCES: json.dumps(identities).encode()})
    if sealed:
        write_sealed(table, path, **COMPRESSION)
    else:
        pq.write_table(table, path)
    return path


def _identity(path):
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("name", [None, "merged-planted.parquet"])
def test_a_planted_merged_file_neither_hides_nor_deletes_runs(folder, name, sealed):
    fill(folder, range(6))
    path = planted_merge(folder, [77], ids(range(6)), name, sealed)
    for hours in (0, 30, 60):
        report = compact_at(folder, hours)
        assert any(str(path) in line for line in report.problems)
        assert run_ids(folder) == ids(range(6))
    assert path.exists()


def test_a_planted_listing_neither_hides_nor_deletes_runs_for_good(folder):
    fill(folder, range(6))
    path = planted_merge(folder, [0], ids(range(6)))
    hidden = (*(f"family=cnn/{run_id}.parquet" for run_id in ids(range(6))), "family=../../x", "family=cnn/../../x")
    Listing(listing_file(folder, "runs", path.name), f"family=cnn/{path.name}", hidden, 0.0).write()
    report = compact_at(folder, 0)
    assert any("hides 7 files" in line for line in report.problems)
    assert run_ids(folder) == ids(range(6))
    for hours in (30, 60):
        compact_at(folder, hours)
    assert run_ids(folder) == ids(range(6))


def test_a_merged_file_whose_listing_is_lost_is_kept_and_named(folder):
    fill(folder, range(4))
    compact_at(folder, 0)
    compact_at(folder, 2)
    path = only_merged(folder)
    listing_file(folder, "runs", path.name).unlink()
    report = compact_at(folder, 50)
    assert [line for line in report.problems if str(path) in line and "4 of its runs" in line] == report.problems
    assert path.exists()


def test_a_batch_that_was_killed_before_its_listing_goes_once_its_rows_landed_again(folder):
    table = pa.Table.from_pylist([run_row(index) for index in range(3)], schema=RUN_SCHEMA)
    left = land_batch(folder, "runs", "cnn", table)
    listing_file(folder, "runs", left.name).unlink()
    assert compact(folder, now_s=time.time()).problems == []  # it may be landing right now
    assert left.exists()
    land_batch(folder, "runs", "cnn", table)
    assert compact_at(folder, 0).problems == []
    assert not left.exists() and run_ids(folder) == ids(range(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_no_file_is_named_and_stops_no_compaction(folder, kind):
    fill(folder, range(4))
    partition = folder.partition(kind, "cnn")
    for name in ("J-000009.parquet", new_merged_name()):
        os.mkfifo(partition / name)
        os.utime(partition / name, (1.0, 1.0))
    fill_runs = folder.partition("runs", "cnn") / "J-000009.parquet"
    if not fill_runs.exists():
        write_sealed(RUN_SCHEMA.empty_table(), fill_runs)
    (partition / "J-000008.parquet").symlink_to("nowhere")
    report = compact_at(folder, 0)
    assert any("J-000009.parquet" in line for line in report.problems)
    assert any("merged-" in line for line in report.problems)
    assert run_ids(folder) == ids(range(4))
    compact_at(folder, 30)
    assert run_ids(folder) == ids(range(4))
