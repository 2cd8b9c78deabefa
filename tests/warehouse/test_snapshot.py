"""Snapshots, what changed between them, and the checks: the same rows for ever, and every oddity named."""

import contextlib
import datetime
import errno
import json
import os
import shutil

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import (
    ask,
    compact_at,
    copy_into,
    failing,
    fill,
    findings_of,
    flip,
    killed_children,
    only_merged,
    run_row,
    samples,
)

import warehouse
from conf.errors import EnvironmentProblem, UsageError
from warehouse.diff import named_arguments
from warehouse.files import counting
from warehouse.files.compaction import compaction_lock
from warehouse.files.folder import LISTING_SCHEMA, DataFolder, write_parquet
from warehouse.files.integrity import examine
from warehouse.files.snapshots import MANIFEST, find_snapshot, snapshot_names, take_snapshot
from warehouse.files.views import VIEWS
from warehouse.files.writer import RunWriter
from warehouse.reading.checks import SEVERITIES
from warehouse.reading.pairing import diff
from warehouse.tables.schema import TELEMETRY_SCHEMA


def rows(data, view="runs", snapshot=None):
    return ask(data, f"SELECT * FROM {view} ORDER BY ALL", snapshot=snapshot)


def everything(data, snapshot=None):
    with contextlib.closing(warehouse.connect(data, snapshot=snapshot)) as connection:
        return {view: connection.execute(f"SELECT * FROM {view} ORDER BY ALL").fetchall() for view in VIEWS}


@pytest.fixture(scope="module")
def filled_once(tmp_path_factory):
    """Merged files, replaced ones that are still there, single ones, an attempt, a job."""
    folder = DataFolder(tmp_path_factory.mktemp("filled") / "data").create()
    fill(folder, range(4))
    compact_at(folder, 0)
    fill(folder, range(10, 12))
    writer = fill(folder, range(20, 22), family="mlp", config='{"family":"mlp"}')
    writer.write(run_row(30) | {"run_id": "J-000030-a1", "final": False}, samples())
    writer.write_job({"job_id": "J", "family": "cnn", "n": 9, "submitted_at": 1e9})
    return folder


@pytest.fixture
def full(folder, filled_once):
    """A folder of the test's own with files of all these kinds."""
    return copy_into(folder, filled_once)


@pytest.fixture
def copy(full, tmp_path):
    """A snapshot of such a folder, copied to be a data folder of its own."""
    return DataFolder(shutil.copytree(take_snapshot(full).folder.root, tmp_path / "copy")).create()


def test_a_snapshot_shows_what_the_views_showed_whatever_compaction_does_later(full):
    before = everything(full)
    taken = take_snapshot(full, "before")
    assert everything(full, "before") == before
    assert dict(taken.rows) == {view: len(view_rows) for view, view_rows in before.items()}
    fill(full, range(100, 110))
    assert compact_at(full, 48, 96).deleted_files
    assert everything(full, "before") == before
    assert len(rows(full)) == len(before["runs"]) + 10
    assert find_snapshot(full, "before").problems() == []


def test_a_copied_snapshot_is_a_data_folder_that_loses_and_doubles_nothing(full, copy, monkeypatch):
    monkeypatch.setattr("warehouse.files.integrity._UNLISTED_AFTER_S", -1.0)
    before = everything(full)
    assert everything(copy) == before and examine(copy).is_well
    assert RunWriter(copy).write(run_row(1), samples()).name.startswith("merged-")
    assert dict(take_snapshot(copy, "again").rows) == {view: len(view_rows) for view, view_rows in before.items()}
    for hours in (0, 2, 4):
        compact_at(copy, hours)
        assert everything(copy) == before and examine(copy).is_well
    assert [len(list((copy.root / kind / "family=cnn").iterdir())) for kind in ("runs", "telemetry")] == [1, 1]


def naming_a_folder(path):
    write_parquet(path, pa.table([["family=cnn/"], [False]], schema=LISTING_SCHEMA))


@pytest.mark.parametrize(
    "harm", [lambda path: path.write_bytes(b"torn"), naming_a_folder, pytest.param(flip, marks=pytest.mark.wide)]
)
def test_a_copied_snapshot_whose_listing_is_damaged_is_an_error(copy, harm):
    path = copy.listings("runs") / "snapshot.parquet"
    harm(path)
    with pytest.raises(EnvironmentProblem, match=r"snapshot.parquet is damaged"):
        rows(copy)
    assert any(str(path) in line for line in compact_at(copy, 0).problems)
    assert any(str(path) in line for line in examine(copy).lines(copy.root)) and path.exists()


def test_a_copied_snapshot_that_has_lost_a_merged_file_says_so_also_after_compaction(copy):
    only_merged(copy).unlink()
    for _ in range(2):
        assert any("is gone, though" in line for line in compact_at(copy, 0).problems)
        with pytest.raises(EnvironmentProblem, match="is gone, though"):
            rows(copy)


def test_a_reader_beside_the_first_compaction_of_a_copied_snapshot_finds_all_rows(full, copy, monkeypatch):
    before = rows(full)

    def list_and_compact(path, really=counting.names_in):
        names = really(path)
        if path == copy.listings("runs"):
            monkeypatch.undo()
            compact_at(copy, 0)
        return names

    monkeypatch.setattr(counting, "names_in", list_and_compact)
    assert rows(copy) == before


def test_nothing_is_stored_twice_and_links_that_cannot_be_are_copies(folder, monkeypatch):
    fill(folder, range(2))
    linked = take_snapshot(folder)
    path = folder.partition("runs", "cnn") / "J-000000.parquet"
    assert os.path.samefile(path, linked.folder.root / "runs" / "family=cnn" / path.name)
    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    copied = take_snapshot(folder)
    assert not os.path.samefile(path, copied.folder.root / "runs" / "family=cnn" / path.name)
    assert rows(folder, snapshot=copied.name) == rows(folder)


def test_names_are_days_and_one_that_is_taken_is_told(folder):
    first, second, third = (take_snapshot(folder).name for _ in range(3))
    assert (second, third) == (f"{first}.2", f"{first}.3") and len(first) == len("2026-11-20")
    assert snapshot_names(folder) == [first, second, third]
    with pytest.raises(UsageError, match="there is a snapshot of that name"):
        take_snapshot(folder, first)
    for bad in ("now", "../x", ""):
        with pytest.raises(UsageError, match="name"):
            take_snapshot(folder, bad)


def test_a_damaged_file_is_named(folder):
    fill(folder, [0, 1])
    compact_at(folder, 0)
    root = take_snapshot(folder, "s").folder.root
    (path,) = (root / "telemetry" / "family=cnn").glob("*.parquet")
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    for damaged in (content, content[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(
            EnvironmentProblem, match=rf"snapshot s .* is damaged: telemetry/family=cnn/{path.name} has"
        ):
            warehouse.connect(folder, snapshot="s")
    path.unlink()
    (root / "runs" / "family=cnn" / "extra.parquet").write_bytes(b"")
    with pytest.raises(EnvironmentProblem, match=r"is gone; .*extra\.parquet is not a file of the snapshot"):
        warehouse.connect(folder, snapshot="s")


def test_content_that_changed_under_its_old_time_is_found_by_verify(folder, shown, outcome):
    fill(folder, [0])
    root = take_snapshot(folder, "s").folder.root
    shown("snapshot", "verify=all", f"data={folder.root}")
    path = root / "runs" / "family=cnn" / "J-000000.parquet"
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    code, out, _ = outcome("snapshot", "verify=s", f"data={folder.root}")
    assert code == 1 and "s: runs/family=cnn/J-000000.parquet has other content" in out


def test_a_damaged_manifest_is_named(folder):
    path = take_snapshot(folder, "s").folder.root / MANIFEST
    whole = json.loads(path.read_text())
    for text, expected_text in (
        ("{", "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"format": "x"}', "damaged"),
        (json.dumps(whole | {"schema_version": 999}), "update the code"),
    ):
        path.write_text(text)
        with pytest.raises(EnvironmentProblem, match=expected_text):
            warehouse.connect(folder, snapshot="s")


TAKE = """
from warehouse.files.folder import DataFolder
from warehouse.snapshot import take_snapshot
def act(root):
    take_snapshot(DataFolder.resolve(root), "s")
"""


@pytest.mark.slow
def test_a_kill_leaves_no_snapshot_and_the_next_one_cleans_up(full):
    before = everything(full)
    with killed_children(TAKE) as kill:
        for name, step in (("replace", 2), ("link", 5), ("rename", 1)):
            kill([name], step, str(full.root))
            assert snapshot_names(full) == [] and everything(full) == before
    assert everything(full, take_snapshot(full, "s").name) == before
    assert not list(full.snapshots.glob(".*"))


def test_a_snapshot_waits_for_a_compaction(folder):
    fill(folder, [0])
    messages = []
    with contextlib.ExitStack() as compaction:
        compaction.enter_context(compaction_lock(folder))

        def tell(text):
            messages.append(text)
            compaction.close()

        assert take_snapshot(folder, tell=tell).rows["runs"] == 1
    assert messages == ["waiting for a compaction that is at work on this folder"]


def test_the_command_takes_and_lists(folder, shown):
    fill(folder, range(3))
    data = f"data={folder.root}"
    assert "no snapshots yet" in shown("snapshot", "list=true", data)
    taken = shown("snapshot", "name=2026-11-20", data)
    assert taken == shown("snapshot", "list=true", data) and taken.startswith(
        "2026-11-20: 3 runs, 3 attempts, 9 telemetry, 0 kernels, 0 ranks, 0 collocations, 0 jobs, 0 stale; "
    )


ENVIRONMENT = {"device_name": "A100-SXM4-40GB", "torch_version": "2.13", "config_hash": "c0ffee"}


def test_a_difference_tells_runs_labels_and_columns(folder, shown):
    fill(folder, range(4), **ENVIRONMENT, smact=0.5)
    take_snapshot(folder, "a")
    fill(folder, [0], **ENVIRONMENT, smact=0.5, optimizer="adam")  # changed, its labels as they were
    fill(folder, [4], **ENVIRONMENT | {"peak_memory_mib": 3.0, "smact": 0.4})
    fill(folder, [5], **ENVIRONMENT | {"torch_version": "2.14", "peak_memory_mib": 99.0})
    fill(folder, [6], family="mlp", status="oom", peak_memory_mib=None)
    (folder.partition("runs", "cnn") / "J-000003.parquet").unlink()
    take_snapshot(folder, "b")
    difference = diff(folder, "a", "b")
    assert [(count.family, count.status, count.runs) for count in difference.added] == [
        ("cnn", "ok", 2),
        ("mlp", "oom", 1),
    ]
    assert [count.runs for count in difference.removed] == [1]
    assert [count.runs for count in difference.changed] == [1] and dict(difference.changed_columns) == {"optimizer": 1}
    memory, smact = difference.shifts
    # run 4 and the changed run 0 have a median of 1.5 MiB, the four runs before too; 0.45 against 0.5
    assert (memory.label, memory.pairs, memory.median, memory.beyond) == ("peak_memory_mib", 1, 0.0, 0)
    assert (smact.label, round(smact.median, 6), smact.examples) == ("smact", -0.05, ("c0ffee",))
    assert json.loads(difference.as_json())["rows_before"]["runs"] == 4
    output = shown("diff", *named_arguments(["a", "b"]), f"data={folder.root}")
    assert "Changed in: optimizer (1 run)." in output and "-0.050" in output
    with pytest.raises(UsageError, match="a third name 'c'"):
        named_arguments(["a", "b", "c"])


def test_a_snapshot_in_order_has_no_findings(full):
    take_snapshot(full, "s")
    assert findings_of(full, snapshot="s") == []


WRONG = {
    "impossible.ok_without_labels": {"peak_memory_mib": None},
    "impossible.ok_without_memory": {"peak_memory_mib": None, "smact": 0.1},
    "impossible.ok_without_steps": {"steps": 0},
    "impossible.oom_with_full_window": {"status": "oom", "window_s": 1.0, "window_ended": "steady"},
    "impossible.oom_without_kind": {"status": "oom"},
    "impossible.oom_kind": {"oom_kind": "host"},
    "impossible.allocated_over_reserved": {"peak_allocated_mib": 9.0, "peak_reserved_mib": 2.0},
    "impossible.reserved_over_memory": {"peak_reserved_mib": 9.0, "peak_memory_mib": 2.0},
    "impossible.smocc_over_smact": {"smact": 0.1, "smocc": 0.9},
    "impossible.window_over_wall": {"source": "measured", "window_s": 9.0, "wall_s": 2.0},
    "impossible.window_backwards": {"window_start_ms": 9.0, "window_end_ms": 2.0},
    "impossible.finished_before_started": {"finished_at": datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)},
    "impossible.samples_over_rows": {
        "samples_measured": 99,
        "samples_repeated": 0,
        "samples_unavailable": 0,
        "samples_suspect": 0,
    },
    "range.energy_j": {"energy_j": -1.0},
    "range.batch_size": {"batch_size": 0},
    "range.over_the_card": {
        "source": "measured",
        "device_uuid": "GPU-1",
        "device_memory_mib": 5.0,
        "peak_memory_mib": 7.0,
    },
    "schema.config": {"config": "{"},
    "schema.config_family": {"config": '{"family":"mlp"}'},
    "duplicate.task": {"run_id": "J-copy", "task_index": 0},
    "identity.config_hash": {"config_hash": "x", "config": '{"family":"cnn","depth":1}'},
    "telemetry.rows": {"telemetry_rows": 7},
}


def test_what_cannot_be_is_found_and_kept(folder):
    wrong = [run_row(index, **changes) for index, changes in enumerate(WRONG.values(), 1)]
    RunWriter(folder).write_batch([run_row(0, config_hash="x"), *wrong])
    problems = list(findings_of(folder))
    findings = {finding.rule: finding for finding in problems}
    assert len(findings) == len(problems)
    assert {rule: finding.count for rule, finding in findings.items()} == {
        **dict.fromkeys(WRONG, 1),
        "impossible.ok_without_memory": 2,  # also the run without labels
        "impossible.oom_without_kind": 2,  # also the run with a full window
    }
    beginnings = {rule: f"J-{index:06d}" for index, rule in enumerate(WRONG, 1)}
    beginnings |= {"duplicate.task": "J task 0", "identity.config_hash": "x: 2"}
    for rule, beginning in beginnings.items():
        assert findings[rule].examples[-1].startswith(beginning), rule
        assert findings[rule].severity in SEVERITIES, rule
    assert len(rows(folder)) == 1 + len(WRONG)


def test_a_query_leaves_out_a_file_whose_values_are_not_of_their_columns_type(folder, capsys):
    fill(folder, range(2))
    path = folder.partition("runs", "cnn") / "J-000000.parquet"
    table = pq.ParquetFile(path).read().drop_columns(["wall_s"])
    pq.write_table(table.append_column("wall_s", [["long"]]), path)
    assert ask(folder, "SELECT count(wall_s) FROM runs") == [(0,)]
    assert ask(folder, "SELECT run_id, wall_s FROM runs") == [("J-000001", None)]
    assert capsys.readouterr().err.count(str(path)) == 1
    with pytest.raises(duckdb.ConversionException, match="long"):
        ask(folder, "SELECT 'long'::INT FROM runs")


def test_rows_that_no_writer_would_land_are_found(folder):
    """Another program put these there: words, ratios and samples that the writer refuses."""
    fill(folder, range(3))
    runs = pq.ParquetFile(folder.partition("runs", "cnn") / "J-000001.parquet").read()
    twice = pa.concat_tables([runs, runs]).to_pylist()
    twice[0] |= {"status": "fine", "smact": 1.5}
    copy = folder.partition("runs", "cnn") / "other.parquet"
    pq.write_table(pa.Table.from_pylist(twice, schema=runs.schema), copy)
    telemetry = pq.ParquetFile(folder.partition("telemetry", "cnn") / "J-000002.parquet").read().to_pylist()
    telemetry[0] |= {"run_id": "lost", "smact": -0.5, "power_w": float("nan"), "phase": "later"}
    telemetry.append(telemetry[1])
    pq.write_table(
        pa.Table.from_pylist(telemetry, schema=TELEMETRY_SCHEMA),
        folder.partition("telemetry", "cnn") / "J-000002.parquet",
    )
    by_rule = {finding.rule: finding for finding in findings_of(folder)}
    assert set(by_rule) == {
        "schema.status",
        "range.smact",
        "duplicate.run_id",
        "duplicate.task",
        "range.telemetry.smact",
        "range.telemetry.power_w",
        "schema.telemetry.phase",
        "duplicate.sample",
        "telemetry.no_run",
    }
    assert by_rule["duplicate.run_id"].examples == ("J-000001 3 times",)
    assert by_rule["telemetry.no_run"].examples == ("lost: 1 samples",)
    assert list(by_rule.values())[-1].severity == "warning"


def test_a_manifest_that_names_what_is_no_file_of_the_snapshot_is_told(folder):
    fill(folder, range(2))
    root = take_snapshot(folder, "s").folder.root
    (folder.root / "secret").write_bytes(b"secret")
    os.symlink(folder.root / "secret", root / "runs/family=cnn/link.parquet")
    os.mkfifo(root / "runs/family=cnn/pipe")
    paths = ("../../secret", "/etc/passwd", "runs/family=cnn/link.parquet", "runs/family=cnn/pipe")
    manifest = json.loads((root / MANIFEST).read_text())
    for path in paths:
        manifest["files"].append({"path": path, "bytes": 6, "rows": 1, "sha256": "0" * 64, "modified_ns": 0})
    (root / MANIFEST).write_text(json.dumps(manifest))
    problems = find_snapshot(folder, "s").problems()
    for path in paths:
        (problem,) = [line for line in problems if path in line]
        assert "is not a plain file of the snapshot" in problem
