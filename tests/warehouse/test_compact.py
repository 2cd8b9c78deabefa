"""Compaction: the same rows at every step, whatever reads, writes or kills meanwhile."""

import datetime
import fcntl
import os
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import (
    EAGER,
    HOUR_S,
    NOW_S,
    Steps,
    ask,
    ask_plainly,
    collocations,
    compact_at,
    fill as fill_any,
    kernels,
    killed_children,
    ranks,
    run_row,
    samples,
)

from warehouse.files import compaction
from warehouse.files.compaction import CompactionSettings, compact, is_open_somewhere, read_files
from warehouse.files.folder import write_parquet
from warehouse.files.views import view_statements
from warehouse.files.writer import RunWriter, run_table
from warehouse.tables.schema import KINDS, OF_RUNS, RUN_SCHEMA

SAMPLES = 4
HALVES = CompactionSettings(min_files=2, target_rows=2 * SAMPLES)


CENSUS = (
    "SELECT (SELECT (count(*), count(DISTINCT run_id)) FROM runs), "
    "(SELECT (count(*), count(DISTINCT (run_id, t_ms))) FROM telemetry)"
)


def fill(folder, indices, family="cnn", has_details=True):
    fill_any(folder, indices, SAMPLES, has_details, family=family)


def census(folder):
    """((runs, distinct runs), (samples, distinct samples)) through a client that opens the file as any would."""
    return ask_plainly(folder, CENSUS)[0]


def expected(runs):
    return (runs, runs), (runs * SAMPLES, runs * SAMPLES)


def files(folder, kind, family="cnn"):
    return sorted(path.name for path in folder.partition(kind, family).glob("*.parquet"))


def test_small_files_become_one_sorted_file_and_are_deleted_by_a_later_compaction(folder):
    fill(folder, [3, 1, 2])
    report = compact_at(folder, 0)
    assert sorted(report.merged.values()) == [3, 3, 3, 3, 3] and report.rows == 3 + 3 * SAMPLES + 2 * 3 * 2 + 3
    assert len(files(folder, "runs")) == 4
    assert compact(folder, now_s=NOW_S + HOUR_S - 1, settings=EAGER).deleted_files == 0
    later = compact(folder, now_s=NOW_S + HOUR_S + 1, settings=EAGER)
    assert (later.deleted_files, later.merged) == (15, {})
    for kind in KINDS:
        (name,) = files(folder, kind)
        merged = pq.ParquetFile(folder.partition(kind, "cnn") / name)
        ids = merged.read(columns=["run_id"]).column(0).to_pylist()
        assert ids == sorted(ids)
        assert merged.metadata.row_group(0).column(0).compression == "ZSTD"
    assert census(folder) == expected(3)
    assert compact_at(folder, 9).lines() == ["0 files with 0 rows merged into 0; 0 replaced files deleted"]


def test_families_are_kept_apart_and_few_files_left_alone(folder):
    fill(folder, range(8), "cnn", has_details=False)
    fill(folder, range(100, 107), "mlp", has_details=False)
    report = compact(folder, now_s=NOW_S)
    assert [Path(name).parts[1] for name in report.merged] == ["family=cnn"] * 2
    assert len(files(folder, "runs", "mlp")) == 7
    assert census(folder) == expected(15)


def test_merged_files_are_merged_again_and_sorted_until_they_are_large(folder):
    for start in range(0, 10, 2):
        fill(folder, range(start, start + 2), has_details=False)
        compact_at(folder, start)
        assert census(folder) == expected(start + 2)
    compact_at(folder, 100)
    before = files(folder, "runs")
    assert len(before) <= 3
    for name in before:
        ids = pq.ParquetFile(folder.partition("runs", "cnn") / name).read(columns=["run_id"]).column(0).to_pylist()
        assert ids == sorted(ids)
    assert census(folder) == expected(10)
    fill(folder, range(100, 103), has_details=False)
    compact_at(folder, 200, settings=CompactionSettings(target_mib=0.001, min_files=2))
    assert set(before) <= set(files(folder, "runs"))
    assert census(folder) == expected(13)


def test_target_rows_bounds_a_merged_file(folder):
    fill(folder, range(12), has_details=False)
    report = compact(folder, now_s=NOW_S, settings=CompactionSettings(min_files=2, target_rows=8))
    runs = [path for path in report.merged if path.startswith("runs")]
    assert [pq.read_metadata(folder.root / path).num_rows for path in sorted(runs)] in ([8, 4], [4, 8])
    assert census(folder) == expected(12)


def test_samples_that_come_back_after_their_run_was_merged_and_deleted_are_merged(folder, tmp_path):
    fill(folder, range(3))
    path = folder.partition("telemetry", "cnn") / "J-000001.parquet"
    path.rename(tmp_path / path.name)
    compact_at(folder, 0, 2)
    assert len(files(folder, "runs")) == 1
    (tmp_path / path.name).rename(path)
    settle(folder, 3)


def test_files_without_rows_or_of_other_names_than_their_run_are_merged_once_and_count_once(folder):
    fill(folder, range(3), has_details=False)
    partition = folder.partition("runs", "cnn")
    write_parquet(partition / "export.parquet", run_table(run_row(77)))
    write_parquet(partition / "nothing.parquet", RUN_SCHEMA.empty_table())
    for hours, sources in ((0, [3, 5]), (2, []), (4, [])):
        assert sorted(compact_at(folder, hours).merged.values()) == sources
        for asked in (ask, ask_plainly):
            assert asked(folder, "SELECT run_id FROM runs ORDER BY 1")[2:] == [("J-000002",), ("J-000077",)]
    assert len(files(folder, "runs")) == 1


def test_readers_see_the_same_rows_at_every_step(folder, monkeypatch):
    fill(folder, range(4), has_details=False)
    seen = []
    with duckdb.connect() as connection:  # which keeps no file from deletion
        for statement in view_statements(folder):
            connection.execute(statement)
        steps = Steps(monkeypatch, lambda: seen.append(connection.execute(CENSUS).fetchone()))
        compact_at(folder, 0, settings=HALVES)
        compact_at(folder, 2, 4)  # deletes, and merges the merged
    assert set(seen) == {expected(4)}
    assert steps.count > 20 and len(files(folder, "runs")) == 1


def test_replaced_files_outlive_an_open_warehouse_up_to_a_day(folder):
    fill(folder, range(3))
    compact_at(folder, 0)
    with duckdb.connect(str(folder.warehouse), read_only=True) as connection:
        assert is_open_somewhere(folder)
        report = compact_at(folder, 2)
        assert (report.deleted_files, report.kept_files) == (0, 3 * len(KINDS))
        assert "kept, because the warehouse is open" in report.lines()[-1]
        assert compact_at(folder, 25).deleted_files == 3 * len(KINDS)
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (3,)
    assert not is_open_somewhere(folder)


COMPACT = """
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.folder import DataFolder
def act(root, now_s):
    compact(DataFolder.resolve(root), now_s=now_s, settings=CompactionSettings(min_files=2))
"""


@pytest.fixture(scope="module")
def kill_at():
    """Kill a compaction of a folder, `hours` after its files were written, before its `step`-th visible change."""
    with killed_children(COMPACT) as kill:
        yield lambda folder, hours, step: kill(["replace", "unlink"], step, str(folder.root), NOW_S + hours * HOUR_S)


def settle(folder, runs, families=("cnn",)):
    """Two compactions after any interruption, all is merged, once, and nothing is left over."""
    assert census(folder) == expected(runs)
    for hours in (10, 20, 30):
        compact_at(folder, hours)
        assert census(folder) == expected(runs)
    assert {len(files(folder, kind, family)) for kind in KINDS for family in families} == {1}


CNN, BOTH = ("cnn",), ("cnn", "mlp")


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("families", "runs", "compactions", "step"),
    [
        *((CNN, 3, (), step) for step in (1, 2, 3, 4)),  # while it merges
        *((BOTH, 3, (), step) for step in (3, 6, 8)),
        *((CNN, 3, (EAGER,), step) for step in (1, 2, 3, 4, 5, 8)),  # while it deletes what was merged
        *((CNN, 4, (HALVES, EAGER), step) for step in (1, 2, 3, 4, 5)),  # which was merged twice
    ],
)
def test_killed_at_a_step_then_compacted_again(kill_at, folder, families, runs, compactions, step):
    for number, family in enumerate(families):
        fill(folder, range(10 * number, 10 * number + runs), family)
    for number, settings in enumerate(compactions):
        compact_at(folder, 2 * number, settings=settings)
    kill_at(folder, 2 * len(compactions), step)
    settle(folder, runs * len(families), families)


def test_a_merge_that_was_interrupted_is_dropped_if_a_run_landed_again(kill_at, folder):
    fill(folder, range(3))
    kill_at(folder, 0, 4)  # the merged file of runs is there, not its listing
    fill_any(folder, [1], SAMPLES, True, attempt=2, status="timeout")
    settle(folder, 3)
    assert ask(folder, "SELECT status FROM runs WHERE run_id = 'J-000001'") == [("timeout",)]


@pytest.mark.parametrize("hours", [0, 2])
def test_a_run_that_lands_again_after_it_was_merged_is_there_once(folder, hours):
    fill(folder, range(3))
    compact_at(folder, 0, hours)
    landed = RunWriter(folder).write(run_row(1, attempt=2), samples(SAMPLES), kernels(), ranks(), collocations())
    assert landed.name.startswith("merged-")
    settle(folder, 3)


def test_a_run_that_lands_again_between_merging_and_listing_is_there_once(folder, monkeypatch):
    fill(folder, range(3))
    done = []

    def land_again():
        if not done and any(name.startswith("merged-") for name in files(folder, "runs")):
            done.append(True)
            RunWriter(folder).write(run_row(1, attempt=2), samples(SAMPLES), kernels(), ranks(), collocations())

    Steps(monkeypatch, land_again)
    compact_at(folder, 0)
    assert done
    settle(folder, 3)


def test_samples_of_a_run_that_has_not_landed_wait(folder):
    fill(folder, range(3))
    (folder.partition("runs", "cnn") / "J-000001.parquet").unlink()  # as after a kill between the two files
    assert sorted(compact_at(folder, 0).merged.values()) == [2] * len(KINDS)
    assert all("J-000001.parquet" in files(folder, kind) for kind in OF_RUNS)
    RunWriter(folder).write(run_row(1, attempt=2), samples(SAMPLES), kernels(), ranks(), collocations())
    assert census(folder) == expected(3)


def test_a_second_compaction_at_the_same_time_does_nothing(folder):
    fill(folder, range(3))
    with open(folder.compaction_lock, "a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        report = compact_at(folder, 0)
    assert report.busy and report.merged == {} and "another compaction" in report.lines()[0]


def test_old_temporary_files_are_removed_and_young_ones_left(folder):
    fill(folder, range(1))
    torn = folder.partition("runs", "cnn") / ".J-000009.parquet.1-abc.tmp"
    torn.write_bytes(b"torn")
    os.utime(torn, (NOW_S, NOW_S))
    compact(folder, now_s=NOW_S + HOUR_S)
    assert torn.exists()
    compact(folder, now_s=NOW_S + 25 * HOUR_S)
    assert not torn.exists()


def test_the_command_prints_what_it_merged(folder, shown, refused):
    fill(folder, range(3))
    data = f"data={folder.root}"
    merged = shown("compact", "min_files=2", data)
    assert "15 files with 30 rows merged into 5; 0 replaced files deleted" in merged
    problem = "grace_s must be a number >= 0, got -1; min_files must be an integer >= 2, got 1"
    assert problem in refused("compact", "min_files=1", "grace_s=-1", data)


SCHEMA = pa.schema([("run_id", pa.string()), ("x", pa.float64()), ("at", pa.timestamp("us", tz="UTC"))])
AT = datetime.datetime(2026, 3, 4, 5, 6, 7, 891011, tzinfo=datetime.UTC)


def small_file(folder, name, rows, **columns):
    path = folder / name
    pq.write_table(pa.table({"run_id": [f"{name}-{i}" for i in range(rows)], **columns}), path)
    return path


def read(paths, most_rows):
    damaged = []
    return list(read_files(paths, SCHEMA, most_rows, lambda path, error: damaged.append(path))), damaged


def test_files_of_several_schemas_become_one_table_with_every_column(tmp_path):
    folder = tmp_path / "a'; echo foo [b]*? family=x"
    folder.mkdir()
    times = pa.array([AT, None], pa.timestamp("us", tz="UTC"))
    paths = [
        small_file(folder, "full.parquet", 2, x=[1.5, None], at=times),
        small_file(folder, "older.parquet", 1),
        small_file(folder, "other.parquet", 1, colour=["red"]),
        small_file(folder, "empty.parquet", 1, x=pa.nulls(1)),
    ]
    ((files, table),), damaged = read(paths, most_rows=1000)
    assert files == paths and not damaged
    assert table.schema.names == [*SCHEMA.names, "colour"]
    assert [table.schema.field(field.name).type for field in SCHEMA] == SCHEMA.types
    rows = {row["run_id"]: row for row in table.to_pylist()}
    assert len(rows) == 5
    assert rows["full.parquet-0"] == {"run_id": "full.parquet-0", "x": 1.5, "at": AT, "colour": None}
    assert rows["other.parquet-0"]["colour"] == "red" and rows["older.parquet-0"]["x"] is None


def test_files_that_are_read_at_the_same_time_keep_their_order(tmp_path, monkeypatch):
    paths = [small_file(tmp_path, f"{i:02d}.parquet", 1 + i % 5) for i in range(40)]
    paths[20].write_bytes(b"torn")
    paths[30].unlink()
    monkeypatch.setattr(compaction, "_batches", lambda paths: (paths[i : i + 3] for i in range(0, len(paths), 3)))
    parts, damaged = read(paths, most_rows=10)
    assert damaged == [paths[20], paths[30]]
    assert [path for files, _ in parts for path in files] == [path for path in paths if path not in damaged]
    ids = [run_id for _, table in parts for run_id in table.column("run_id").to_pylist()]
    assert ids == [f"{i:02d}.parquet-{row}" for i in range(40) if i not in (20, 30) for row in range(1 + i % 5)]
    assert all(table.num_rows <= 10 for _, table in parts)
