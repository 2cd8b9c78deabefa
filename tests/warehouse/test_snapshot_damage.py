"""Snapshots among damaged files: one costs its rows and is named, and nothing that is lost is silently missing."""

import pytest
from warehouse_rows import ask, flip, run_row, samples

from conf.cli.command_line import run
from conf.errors import EnvironmentProblem
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.merged import Listing, listing_file
from warehouse.files.snapshots import find_snapshot, take_snapshot
from warehouse.files.writer import RunWriter
from warehouse.snapshot import entry

NOW_S = 4_000_000_000.0


def fill(folder, indices):
    for index in indices:
        RunWriter(folder).write(run_row(index), samples())


def rows(folder, name):
    return ask(
        folder,
        "SELECT (SELECT list(run_id ORDER BY run_id) FROM runs), (SELECT count(*) FROM telemetry)",
        snapshot=name,
    )[0]


@pytest.mark.parametrize("damage", [b"", b"torn", None])
def test_a_damaged_run_costs_its_row_and_is_named(folder, damage, monkeypatch, capfd):
    monkeypatch.setenv("GPUFARM_DATA", str(folder.root))
    fill(folder, range(3))
    path = folder.partition("runs", "cnn") / "J-000001.parquet"
    flip(path) if damage is None else path.write_bytes(damage)
    assert run("snapshot", entry, ["name=s"]) == 0
    out, err = capfd.readouterr()
    assert "1 damaged files left out" in out and len([line for line in err.splitlines() if str(path) in line]) == 1
    assert rows(folder, "s") == (["J-000000", "J-000002"], 6)
    assert [str(path) in line for line in find_snapshot(folder, "s").left_out] == [True]


def test_damaged_samples_cost_no_run(folder):
    fill(folder, range(3))
    flip(folder.partition("telemetry", "cnn") / "J-000001.parquet")
    assert rows(folder, take_snapshot(folder).name) == (["J-000000", "J-000001", "J-000002"], 6)


def test_a_merged_file_that_is_gone_is_an_error(folder):
    fill(folder, range(3))
    for hours in (0, 2):
        compact(folder, now_s=NOW_S + hours * 3600, settings=CompactionSettings(min_files=2))
    (path,) = folder.partition("runs", "cnn").glob("*.parquet")
    path.unlink()
    with pytest.raises(EnvironmentProblem, match=r"is gone, though .* 3 rows are missing"):
        take_snapshot(folder)
    assert list(folder.snapshots.iterdir()) == []


def test_a_planted_listing_hides_nothing_from_a_snapshot(folder):
    fill(folder, range(3))
    compact(folder, now_s=NOW_S, settings=CompactionSettings(min_files=2))
    fill(folder, range(3, 5))
    (merged,) = folder.partition("runs", "cnn").glob("merged-*")
    hidden = tuple(f"family=cnn/J-{index:06d}.parquet" for index in range(5))
    Listing(listing_file(folder, "runs", merged.name), f"family=cnn/{merged.name}", hidden, 0.0).write()
    assert len(rows(folder, take_snapshot(folder).name)[0]) == 5
