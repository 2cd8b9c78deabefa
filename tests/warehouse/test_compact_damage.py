"""Compaction and snapshots among damaged, lost and planted files: none is merged, hidden, believed or deleted."""

import json
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import ask, ask_plainly, compact_at, fill, flip, only_merged, run_row

from conf.errors import EnvironmentProblem
from tests.surroundings import run_command
from warehouse.files import counting
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.counting import (
    SOURCES,
    Listing,
    counting_files,
    land_batch,
    listing_file,
    new_merged_name,
    read_catalogue,
    read_listings,
)
from warehouse.files.folder import COMPRESSION, write_parquet, write_sealed
from warehouse.files.integrity import examine
from warehouse.files.snapshots import find_snapshot, take_snapshot
from warehouse.tables.schema import KINDS, RUN_SCHEMA


def names(folder, kind="runs"):
    return sorted(path.name for path in folder.partition(kind, "cnn").glob("*.parquet"))


def run_ids(folder):
    return [run_id for (run_id,) in ask(folder, "SELECT run_id FROM runs ORDER BY 1")]


def ids(indices):
    return [f"J-{index:06d}" for index in indices]


@pytest.mark.spread(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_a_flipped_bit_is_named_and_neither_merged_nor_deleted(folder, kind):
    fill(folder, range(4), has_details=True)
    damaged = folder.partition(kind, "cnn") / "J-000001.parquet"
    flip(damaged)
    before = damaged.read_bytes()
    for hours in (0, 30):
        report = compact_at(folder, hours)
        assert [line for line in report.problems if str(damaged) in line and "checksum" in line] == report.problems
        assert len(report.problems) == 1
    assert damaged.read_bytes() == before
    assert len(names(folder, kind)) == 2  # the three others are merged
    assert pq.read_table(only_merged(folder, kind), columns=["run_id"]).column(0).unique().to_pylist() == ids([0, 2, 3])


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
    compact_at(folder, 2)
    listing.file.write_bytes(b"")  # what it replaced is deleted
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
    assert any(str(listing.file) in line for line in compact_at(folder, 30).problems)
    assert {damaged.name, *(f"{run_id}.parquet" for run_id in ids(range(4)))} <= set(names(folder))


def test_a_merged_file_that_is_gone_is_named_its_listing_stays_and_no_snapshot_is_taken(folder):
    fill(folder, range(4))
    compact_at(folder, 0, 2)
    path = only_merged(folder)
    path.unlink()
    report = compact_at(folder, 4)
    assert [line for line in report.problems if str(path) in line and "4 rows are missing" in line] == report.problems
    (lost,) = read_catalogue(folder, "runs").gone
    assert lost.file.exists()
    only_merged(folder, "telemetry").unlink()
    with pytest.raises(EnvironmentProblem, match=r"is gone, though .* 4 rows are missing.*; .*/telemetry/.* is gone"):
        take_snapshot(folder)
    assert list(folder.snapshots.iterdir()) == []


def test_a_lost_merged_file_whose_sources_are_all_there_gives_them_back(folder):
    fill(folder, range(4))
    compact_at(folder, 0)
    only_merged(folder).unlink()
    report = compact_at(folder, 1 / 2)
    assert len(report.problems) == 1 and "count again" in report.problems[0]
    assert run_ids(folder) == ids(range(4))
    (kept,) = (folder.damaged / "compactions" / "runs").glob("merged-*.parquet")
    assert "is not there" in kept.with_name(kept.name + ".reason.txt").read_text()


def test_what_a_damaged_merged_file_replaced_is_not_merged_again(folder):
    fill(folder, range(3))
    compact_at(folder, 0)
    only_merged(folder).write_bytes(b"torn")
    assert compact_at(folder, 1 / 2).merged == {} and run_ids(folder) == ids(range(3))


def test_a_merged_file_that_is_merged_again_while_a_reader_looks_is_not_taken_for_lost(folder, monkeypatch):
    fill(folder, range(3))
    compact_at(folder, 0, 2)
    fill(folder, range(3, 6))

    def read_and_compact(*arguments, really=counting.read_listings):
        listings = really(*arguments)
        monkeypatch.undo()
        compact_at(folder, 4, 6)
        return listings

    monkeypatch.setattr(counting, "read_listings", read_and_compact)
    assert read_catalogue(folder, "runs").gone == () and run_ids(folder) == ids(range(6))


def planted_merge(folder, rows, sources, name=None, sealed=True):
    """A file that looks like a merge of `sources`, with the runs of `rows`."""
    path = folder.partition("runs", "cnn") / (name or new_merged_name())
    table = pa.Table.from_pylist([run_row(index) for index in rows], schema=RUN_SCHEMA)
    named = [f"family=cnn/{source}.parquet" for source in sources]
    table = table.replace_schema_metadata({SOURCES: json.dumps(dict.fromkeys(named)).encode()})
    if sealed:
        write_sealed(table, path, **COMPRESSION)
    else:
        pq.write_table(table, path)
    return path


@pytest.mark.spread(2)
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("name", [None, "merged-planted.parquet"])
def test_a_planted_merged_file_neither_hides_nor_deletes_runs(folder, name, sealed):
    fill(folder, range(3))
    path = planted_merge(folder, [77], ids(range(3)), name, sealed)
    for hours in (0, 30):
        assert any(str(path) in line for line in compact_at(folder, hours).problems)
        assert run_ids(folder) == ids(range(3))
    assert path.exists()


def test_an_unlisted_merged_file_without_a_checksum_is_kept_though_its_runs_are_elsewhere(folder):
    fill(folder, range(3))
    path = planted_merge(folder, [0], [], sealed=False)
    assert any(str(path) in line for line in compact_at(folder, 30).problems) and path.exists()


@pytest.mark.usefixtures("views_file")
def test_a_planted_listing_hides_runs_until_the_next_compaction_and_deletes_none(folder):
    fill(folder, range(3))
    fill(folder, [9], family="mlp")
    path = planted_merge(folder, [0], ids(range(3)))
    note = path.parent / "J-000000.txt"
    note.touch()
    elsewhere = (
        "family=mlp/J-000009.parquet",
        "family=../../x",
        "family=cnn/../family=mlp/J-000009.parquet",
        f"family=cnn/{note.name}",
    )
    hidden = (*(f"family=cnn/{run_id}.parquet" for run_id in ids(range(3))), *elsewhere)
    listing = Listing(listing_file(folder, "runs", path.name), f"family=cnn/{path.name}", hidden, 0.0)
    listing.write()
    assert run_ids(folder) == ids([0, 9]) and not examine(folder).is_well
    assert any("hides 6 files" in line for line in compact_at(folder, 0).problems)
    assert not set(elsewhere) & set(Listing.read(listing.file).hidden)
    plainly = [run_id for (run_id,) in ask_plainly(folder, "SELECT run_id FROM runs ORDER BY 1")]
    assert run_ids(folder) == plainly == ids([0, 1, 2, 9])
    compact_at(folder, 30, 60)
    assert run_ids(folder) == ids([0, 1, 2, 9]) and note.exists()


def test_a_listing_recovered_from_a_planted_merged_file_deletes_nothing_of_another_family(folder):
    fill(folder, [0])
    fill(folder, [9], family="mlp")
    path = planted_merge(folder, [9], ["../family=mlp/J-000009"])
    listing_file(folder, "runs", path.name).write_bytes(b"torn")
    compact_at(folder, 0, 30, 60)
    assert (folder.partition("runs", "mlp") / "J-000009.parquet").exists()


def test_a_listing_whose_merged_file_is_gone_deletes_no_run_though_another_one_names_that_file(folder):
    fill(folder, range(3))
    path = planted_merge(folder, [0], [])
    gone = f"family=cnn/{new_merged_name()}"
    hidden = tuple(f"family=cnn/{run_id}.parquet" for run_id in ids(range(3)))
    Listing(listing_file(folder, "runs", os.path.basename(gone)), gone, hidden, 0.0).write()
    Listing(listing_file(folder, "runs", path.name), f"family=cnn/{path.name}", (gone,), 0.0).write()
    for hours in (-1, 30, 60):
        compact_at(folder, hours)
        assert run_ids(folder) == ids(range(3))


def merge_twice(folder):
    """Merge three runs, then these and three more; return the first merged file and the second."""
    fill(folder, range(3))
    compact_at(folder, 0)
    older = only_merged(folder)
    fill(folder, range(3, 6))
    compact_at(folder, 1 / 2)
    (newer,) = set(older.parent.glob("merged-*.parquet")) - {older}
    return older, newer


def test_what_a_damaged_file_replaced_that_was_merged_again_does_not_count(folder):
    export = folder.partition("runs", "cnn") / "export.parquet"
    write_parquet(export, pa.Table.from_pylist([run_row(77)], schema=RUN_SCHEMA))
    older, _ = merge_twice(folder)
    older.write_bytes(b"torn")
    assert run_ids(folder) == ids([*range(6), 77])
    snapshot = take_snapshot(folder)
    assert (snapshot.rows["runs"], snapshot.rows["telemetry"], snapshot.left_out) == (7, 18, ())


def test_what_was_merged_twice_stays_where_the_first_file_is_gone_and_the_second_damaged(folder):
    older, newer = merge_twice(folder)
    older.unlink()
    flip(newer)
    compact_at(folder, 30, 60)
    assert set(names(folder)) == {newer.name, *(f"{run_id}.parquet" for run_id in ids(range(6)))}


def test_a_merged_file_whose_listing_is_lost_is_kept_and_named(folder):
    fill(folder, range(4))
    compact_at(folder, 0, 2)
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


@pytest.mark.spread(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_no_file_is_named_and_stops_no_compaction(folder, kind):
    fill(folder, range(4), has_details=True)
    partition = folder.partition(kind, "cnn")
    for name in ("J-000009.parquet", new_merged_name()):
        os.mkfifo(partition / name)
        os.utime(partition / name, (1.0, 1.0))
    fill_runs = folder.partition("runs", "cnn") / "J-000009.parquet"
    if not fill_runs.exists():
        write_sealed(RUN_SCHEMA.empty_table(), fill_runs)
    (partition / "J-000008.parquet").symlink_to("nowhere")
    for settings in (CompactionSettings(), CompactionSettings(min_files=2)):
        report = compact_at(folder, 0, settings=settings)
        assert any("J-000009.parquet" in line for line in report.problems)
    assert any("merged-" in line for line in report.problems)
    assert run_ids(folder) == ids(range(4))
    compact_at(folder, 30)
    assert run_ids(folder) == ids(range(4))


@pytest.mark.spread(3)
@pytest.mark.parametrize("damage", [b"", b"torn", None])
def test_a_damaged_run_costs_its_row_and_damaged_samples_no_run_and_both_are_named(folder, damage, capfd):
    fill(folder, range(3))
    path = folder.partition("runs", "cnn") / "J-000001.parquet"
    flip(path) if damage is None else path.write_bytes(damage)
    samples = folder.partition("telemetry", "cnn") / "J-000002.parquet"
    flip(samples)
    assert run_command("snapshot", "name=s", f"data={folder.root}") == 0
    out, err = capfd.readouterr()
    left_out = find_snapshot(folder, "s").left_out
    assert "2 damaged files left out" in out and len(left_out) == 2
    for damaged in (path, samples):
        assert len([line for line in err.splitlines() if str(damaged) in line]) == 1
        assert len([line for line in left_out if str(damaged) in line]) == 1
    counts = "SELECT (SELECT list(run_id ORDER BY run_id) FROM runs), (SELECT count(*) FROM telemetry)"
    assert ask(folder, counts, snapshot="s") == [(["J-000000", "J-000002"], 3)]
