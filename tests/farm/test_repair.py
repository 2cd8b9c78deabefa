"""Damaged and lost data: a repair puts files aside with the reason, has lost runs run again, and deletes nothing.

After the queue was lost, or restored from an older copy, no run lands twice and none runs again.
"""

import errno
import itertools
import os
import shutil
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_dispatch import submit, submit_texts, text_of_mlp, work

from farm.dispatch import dispatcher
from farm.dispatch.dispatcher import reconcile
from farm.dispatch.ray_cluster import ClusterSettings
from farm.queue.jobs import MIXED_FAMILY, Queue
from farm.queue.leftovers import DispatcherBusy, hold_dispatcher_lock
from farm.queue.repair import repair
from farm.status import presence_of
from tests.warehouse.warehouse_rows import ask, compact_at, copy_into, flip, kernels, killed_children, unreadable
from warehouse.files.compaction import compaction_lock
from warehouse.files.counting import Listing, listing_file
from warehouse.files.folder import DataFolder, write_sealed
from warehouse.files.integrity import compare, examine
from warehouse.files.snapshots import take_snapshot
from warehouse.files.views import view_statements
from warehouse.files.writer import RunWriter
from warehouse.tables.duckdb_access import scratch_cursor
from warehouse.tables.schema import RUN_SCHEMA

JOB = "mlp-00000001"
N = 4


@pytest.fixture(scope="module")
def four_runs(tmp_path_factory):
    """A folder with four runs of one job, each with two samples, that are done."""
    folder = DataFolder(tmp_path_factory.mktemp("four") / "data").create()
    with Queue.open(folder.queue) as queue:
        submit(queue, N)
        work(folder, queue)
    with_samples(folder, range(N))
    return folder


@pytest.fixture
def ran(folder, four_runs):
    """Such a folder of the test's own, whose queue is opened after this."""
    return copy_into(folder, four_runs)


def run_file(folder, index, kind="runs"):
    return folder.partition(kind, "mlp") / f"{JOB}-{index:06d}.parquet"


def with_samples(folder, indexes, *details):
    for index in indexes:
        (row,) = pq.ParquetFile(run_file(folder, index)).read().to_pylist()
        RunWriter(folder).write({**row, "telemetry_rows": 2}, pa.table({"t_ms": [0.0, 1.0]}), *details)


def counts(folder):
    """(runs, distinct runs, samples, distinct samples)."""
    return ask(
        folder,
        "SELECT (SELECT (count(*), count(DISTINCT run_id)) FROM runs), "
        "(SELECT (count(*), count(DISTINCT (run_id, t_ms))) FROM telemetry)",
    )[0]


def again(folder, queue):
    """Work off what is queued, and return the indexes that ran."""
    executor, _ = work(folder, queue)
    indexes = [index for _, index, attempt in executor.handed_out if attempt == 1]
    with_samples(folder, indexes)
    return indexes


def one(folder, kind, pattern="merged-*.parquet"):
    (path,) = folder.partition(kind, "mlp").glob(pattern)
    return path


def is_well(folder, queue):
    assert repair(folder).lines(folder.root) == [f"{folder.root}: 0 files moved aside, 0 tasks queued again"]
    return counts(folder) == ((N, N), (2 * N, 2 * N)) and queue.counts().done == N


def is_well_after(folder, queue, indexes):
    """Work off what is queued, which are runs of these indexes, and return whether all is well then."""
    assert again(folder, queue) == list(indexes)
    return is_well(folder, queue)


def flip_a_job_file(folder):
    RunWriter(folder).write_job({"job_id": JOB, "family": "mlp", "submitted_at": 0.0})
    flip(folder.jobs / f"{JOB}.parquet")


def tear_the_listing(folder, kind):
    listing_file(folder, kind, one(folder, kind).name).write_bytes(b"torn")


def ruin(folder):
    tear_the_listing(folder, "runs")
    flip(one(folder, "runs"))


def plant(folder):
    """A merged file without rows whose listing hides every run."""
    planted = folder.partition("runs", "mlp") / "merged-planted.parquet"
    write_sealed(RUN_SCHEMA.empty_table(), planted)
    os.utime(planted, (0, 0))
    hidden = [path.name for path in planted.parent.iterdir() if path != planted]
    names = [f"family=mlp/{name}" for name in (planted.name, *hidden)]
    Listing(listing_file(folder, "runs", planted.name), names[0], tuple(names[1:]), 1.0).write()


def lose_the_listing(folder):
    listing_file(folder, "runs", one(folder, "runs").name).unlink()
    os.utime(one(folder, "runs"), (0, 0))  # long ago, so it is not being landed


def lose_the_listing_and_the_checksum(folder):
    merged = one(folder, "runs")
    pq.write_table(pq.ParquetFile(merged).read(), merged)
    lose_the_listing(folder)


# what happened -> (hours of the compactions before it, what it does, files that go aside, lines, runs that run again)
DAMAGES = {
    "a run is torn": ((), lambda folder: run_file(folder, 3).write_bytes(b"garbage"), 1, [], [3]),
    "a run has a flipped bit": ((), lambda folder: flip(run_file(folder, 3)), 1, [], [3]),
    "a run is deleted": ((), lambda folder: run_file(folder, 3).unlink(), 0, [], [3]),
    "a merged file whose sources are there": ((0,), lambda folder: flip(one(folder, "runs")), 2, [], []),
    "a merged file alone: samples go, too": ((0, 2), lambda folder: flip(one(folder, "runs")), 4, [], range(N)),
    "a merged file is gone": ((0, 2), lambda folder: one(folder, "runs").unlink(), 3, [], range(N)),
    "a listing of runs": ((0, 2), lambda folder: tear_the_listing(folder, "runs"), 0, ["rewritten"], []),
    "a listing of samples": ((0, 2), lambda folder: tear_the_listing(folder, "telemetry"), 0, ["rewritten"], []),
    "a listing and its merged file": ((0, 2), ruin, 4, [], range(N)),
    "a planted listing": ((0,), plant, 2, [], []),
    "no listing of runs": ((0, 2), lose_the_listing, 0, ["listed again"], []),
    "no listing of a file without a checksum": ((0, 2), lose_the_listing_and_the_checksum, 3, [], range(N)),
    "a job's file": ((), flip_a_job_file, 1, [], []),
}


MORE_OF_A_KIND = ("a run is torn", "a listing of samples")


@pytest.mark.parametrize(
    ("hours", "damage", "moved", "lines", "lost"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.wide] * (name in MORE_OF_A_KIND))
        for name, case in DAMAGES.items()
    ],
)
def test_what_is_damaged_goes_aside_and_what_is_lost_runs_again(ran, queue, hours, damage, moved, lines, lost):
    for after in hours:
        compact_at(ran, after)
    damage(ran)
    before = {path: path.read_bytes() for path in ran.root.rglob("*.parquet")}
    report = repair(ran)
    for path, (new, _) in report.moved.items():
        assert new == ran.damaged / path.relative_to(ran.root) and new.read_bytes() == before[path]
        assert new.with_name(new.name + ".reason.txt").read_text().strip()
    assert len(report.moved) == moved and report.queued == ({JOB: len(lost)} if lost else {})
    assert len(report.mended) == len(lines) and all(map(str.__contains__, report.mended, lines))
    assert again(ran, queue) == list(lost)
    assert counts(ran) == ((N, N), (2 * N, 2 * N))
    compact_at(ran, 20, 22)
    assert is_well(ran, queue)


def plain_samples(folder):
    """(samples, distinct samples, runs that have some) as any DuckDB client counts them."""
    (view,) = (text for text in view_statements(folder) if text.startswith("CREATE VIEW telemetry "))
    with scratch_cursor() as client:
        client.execute("SET enable_external_file_cache = false")  # as in a process that starts now
        client.execute(view.replace("CREATE", "CREATE TEMP", 1))
        counts = "SELECT count(*), count(DISTINCT (run_id, t_ms)), count(DISTINCT run_id) FROM telemetry"
        return client.execute(counts).fetchone()


def merge_samples_twice(folder, later=(3,), at=(0, 0.5)):
    """Merge the samples of all runs but `later`, then all; the files that the merges replaced are still there."""
    paths = [run_file(folder, index, "telemetry") for index in later]
    for path in paths:
        path.rename(path.with_suffix(".later"))
    compact_at(folder, at[0])
    for path in paths:
        path.with_suffix(".later").rename(path)
    compact_at(folder, at[1])


def is_well_after_compactions(folder, queue):
    """Return whether all is well two compactions later, also for a plain client."""
    compact_at(folder, 6, 9)
    return is_well(folder, queue) and plain_samples(folder) == (2 * N, 2 * N, N)


REPAIR = """
from farm.queue.repair import repair
from warehouse.files.folder import DataFolder
def act(root):
    repair(DataFolder.resolve(root))
"""


@pytest.fixture(scope="module")
def kill_at():
    """Kill a repair of a folder before its `step`-th visible change."""
    with killed_children(REPAIR) as kill:
        yield lambda folder, step: kill(["replace"], step, str(folder.root))


@pytest.mark.parametrize(
    "step",
    # before the other samples' file is listed, and before the listing of one that goes aside
    [2, 6, *(pytest.param(step, marks=pytest.mark.wide) for step in (1, 3, 4, 5, 7, 8, 9, 10))],
)
def test_a_repair_that_was_killed_continues_and_no_sample_is_lost_or_doubled(ran, queue, kill_at, step):
    merge_samples_twice(ran)
    merged = ran.partition("runs", "mlp").glob("merged-*"), ran.listings("runs").glob("merged-*")
    for path in (*itertools.chain(*merged), run_file(ran, 2)):
        path.unlink()
    kill_at(ran, step)
    repair(ran)
    samples, distinct, runs = plain_samples(ran)
    assert samples == distinct and runs >= N - 1 and again(ran, queue) == [2]
    assert is_well_after_compactions(ran, queue)


@pytest.mark.spread(2)
@pytest.mark.parametrize("at", [(0, 0.5), (0.5, 0)], ids=["", "clock set back"])
@pytest.mark.parametrize("mend", [repair, lambda folder: compact_at(folder, 1, 2, 4)], ids=["repair", "compaction"])
def test_a_damaged_file_that_was_merged_again_doubles_nothing(ran, queue, mend, at):
    merge_samples_twice(ran, (2, 3), at)
    flip(min(ran.partition("telemetry", "mlp").glob("merged-*"), key=lambda path: path.stat().st_mtime_ns))
    mend(ran)
    assert plain_samples(ran) == (2 * N, 2 * N, N) and is_well_after_compactions(ran, queue)
    assert len(list(ran.partition("telemetry", "mlp").iterdir())) == 1


def test_old_samples_and_kernels_of_a_job_of_several_families_go_with_their_lost_runs(folder, queue):
    submit_mixed(queue, N)
    work(folder, queue)
    with_samples(folder, range(N), kernels())
    compact_at(folder, 0, 2)
    flip(one(folder, "runs"))
    assert repair(folder).queued == {JOB: N}
    assert not [path for kind in ("telemetry", "kernels") for path in folder.partition(kind, "mlp").glob("merged-*")]
    assert is_well_after(folder, queue, range(N))


def test_lost_runs_of_a_cancelled_job_run_when_it_is_submitted_again(ran, queue):
    queue.cancel(JOB, 0.0)
    run_file(ran, 3).unlink()
    assert any("is cancelled: submit it again" in line for line in repair(ran).mended)
    assert again(ran, queue) == []
    submit(queue, N)
    assert is_well_after(ran, queue, [3])


@pytest.mark.spread(2)
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("part", ["runs", "compactions"])
def test_what_cannot_be_opened_for_a_moment_is_neither_moved_nor_measured_again(ran, queue, monkeypatch, code, part):
    compact_at(ran, 0, 2)
    failures = []

    def is_the_first(opened):
        is_chosen = part in opened.parts and not failures
        failures.extend([opened] * is_chosen)
        return is_chosen

    with unreadable(monkeypatch, is_the_first, code):
        try:
            report = repair(ran)
        except OSError as error:
            assert error.errno == code
        else:
            assert report.moved == {} and report.queued == {}
    assert failures and is_well(ran, queue)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_runs_of_a_merged_file_that_cannot_be_read_now_are_not_taken_for_missing(ran, queue, code, capsys):
    compact_at(ran, 0, 2)
    path = one(ran, "runs")

    def fail(source, *arguments, really=pq.ParquetFile, **options):
        if source == path:
            raise OSError(code, os.strerror(code))
        return really(source, *arguments, **options)

    with mock.patch.object(pq, "ParquetFile", fail):
        with pytest.raises(OSError, match=os.strerror(code)) as raised:
            compare(ran)
        assert raised.value.filename == str(path) and presence_of(ran).gone == {}
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and str(path) in line
        if code == errno.EIO:  # which `examine` takes for damage
            examine(ran)
            line = capsys.readouterr().err
            assert "the queue is not compared" in line and str(path) in line
    assert is_well(ran, queue)


def test_a_torn_listing_goes_aside_with_its_merged_file_where_the_disk_does_not_give_that(ran, queue, monkeypatch):
    compact_at(ran, 0, 2)
    merged = one(ran, "runs")
    listing = listing_file(ran, "runs", merged.name)
    listing.write_bytes(b"torn")
    with unreadable(monkeypatch, lambda opened: opened == merged):
        report = repair(ran)
    assert {merged, listing} <= report.moved.keys() and report.queued == {JOB: N}
    assert is_well_after(ran, queue, range(N))


def no_file(path, how):
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere" if how == "link to nothing" else path)


@pytest.mark.spread(3)
@pytest.mark.parametrize("how", ["pipe", "folder", "link to nothing"])
def test_a_listed_merged_name_that_is_no_file_blocks_nothing_and_goes_aside(ran, queue, how, capfd):
    compact_at(ran, 0, 2)
    path = one(ran, "runs")
    no_file(path, how)
    assert counts(ran)[0] == (0, 0) and str(path) in capfd.readouterr().err
    assert list(compare(ran).gone.values()) == [set(range(N))]
    assert any(str(path) in line for line in examine(ran).lines(ran.root))
    assert any(str(path) in file for file in take_snapshot(ran).left_out)
    compact_at(ran, 20)
    assert repair(ran).queued == {JOB: N} and not os.path.lexists(path) and is_well_after(ran, queue, range(N))


@pytest.mark.spread(3)
@pytest.mark.parametrize("how", ["pipe", "folder", "link to nothing", "link to itself"])
def test_a_listing_that_is_no_file_is_written_anew(ran, queue, how):
    compact_at(ran, 0, 2)
    listing = listing_file(ran, "runs", one(ran, "runs").name)
    no_file(listing, how)
    assert counts(ran) == ((N, N), (2 * N, 2 * N))
    repair(ran)
    assert Listing.read(listing).merged.endswith(listing.name) and is_well(ran, queue)


def test_what_it_cannot_mend_is_left_and_said(ran, queue, outcome):
    (ran.snapshots / "s").mkdir(parents=True)
    (ran.snapshots / "s" / "manifest.json").write_text("{")
    code, out, _ = outcome("doctor", f'data="{ran.root}"', "repair=true")
    assert code == 1 and "left as it is" in out


def test_it_refuses_beside_a_dispatcher_or_a_compaction_and_changes_nothing(ran, queue, refused):
    flip(run_file(ran, 3))
    with hold_dispatcher_lock(ran.dispatcher_lock), pytest.raises(DispatcherBusy, match="already works on"):
        repair(ran)
    with compaction_lock(ran):
        assert "a compaction is at work" in refused("doctor", f'data="{ran.root}"', "repair=true")
    assert not ran.damaged.exists()


def test_names_of_files_are_text_in_one_line_each(ran, outcome):
    for name in ("evil\x1b[31m\nname.parquet", "merged-\x1b[31m\nname.parquet"):
        (ran.partition("runs", "mlp") / name).write_bytes(b"torn")
        (ran.listings("runs") / name).write_bytes(b"torn")
    for name, *keys in (("check",), ("compact", "min_files=2"), ("status",), ("doctor", "repair=true")):
        code, out, err = outcome(name, f'data="{ran.root}"', *keys)
        printed = out + err
        assert code in (0, 1)
        assert "\x1b" not in printed and "\nname" not in printed, name
        assert "\\x1b[31m\\nname.parquet" in printed or name == "status"


def test_the_command_says_what_it_did_as_json(ran, queue, answer, shown, refused):
    flip(run_file(ran, 3))
    data = f'data="{ran.root}"'
    report = answer("doctor", data, "repair=true")
    assert report["queued"] == {JOB: 1} and len(report["moved"]) == 1
    assert shown("check", data).endswith("0 damaged or missing\n")
    refused("doctor", data, "repair=3")


# A queue that was lost, or restored from an older copy


def lose(folder, queue):
    queue.close()
    for path in folder.root.glob("queue.sqlite*"):
        path.unlink()
    return Queue.open(folder.queue)


def submit_mixed(queue, n):
    """A job as growth cycles submit it: its own family is no task's."""
    submit_texts(queue, [text_of_mlp()] * n, family=MIXED_FAMILY)


@pytest.mark.parametrize(("submit_job", "merged"), [(submit, True), (submit, False), (submit_mixed, True)])
def test_after_the_queue_was_lost_the_same_job_is_done_without_running_again(folder, queue, submit_job, merged):
    submit_job(queue, 6)
    work(folder, queue)
    if merged:
        compact_at(folder, 0, 2)
    with lose(folder, queue) as fresh:
        submit_job(fresh, 8)
        assert (reconcile(folder, fresh), reconcile(folder, fresh)) == (6, 0)
        assert work(folder, fresh)[0].indexes() == [6, 7] and fresh.counts().by_status == {"ok": 8}
    assert counts(folder)[0] == (8, 8)


def test_a_job_that_landed_before_the_queue_was_lost_and_arrives_beside_a_dispatcher_runs_no_more(
    folder, queue, monkeypatch
):
    submit(queue, 6)
    work(folder, queue)
    asked = []
    with lose(folder, queue) as fresh:
        submit(fresh, 1, job_id="mlp-00000002")

        def next_device(job_id):
            asked.append(job_id)
            if len(asked) == 2:  # the other job has been reconciled
                fresh.cancel("mlp-00000002", 0.0)
                submit(fresh, 6)
            return Queue.next_device(fresh, job_id)

        monkeypatch.setattr(fresh, "next_device", next_device)
        monkeypatch.setattr(dispatcher, "make_executor", None)
        assert dispatcher.work(folder, fresh, ClusterSettings(kind="inline")) == 0
        assert fresh.counts().by_status == {"ok": 6}


def test_a_queue_restored_from_an_older_copy_repeats_nothing(folder, queue, tmp_path):
    submit(queue, 6)
    queue.lease("w", 2, now=0.0, lease_s=1.0)
    queue.close()
    shutil.copy(folder.queue, tmp_path / "older")
    with Queue.open(folder.queue) as current:
        work(folder, current)
    compact_at(folder, 0, 2)
    lose(folder, current).close()
    shutil.copy(tmp_path / "older", folder.queue)
    with Queue.open(folder.queue) as older:
        assert reconcile(folder, older) == 6 and work(folder, older)[0].handed_out == []
    assert counts(folder)[0] == (6, 6)


def test_status_counts_runs_that_the_queue_does_not_know(folder, queue, shown, answer):
    submit(queue, 6)
    work(folder, queue)
    compact_at(folder, 0, 2)
    with lose(folder, queue) as fresh:
        submit(fresh, 6)
        fresh.cancel(JOB, 0.0)
    assert "6 runs of 1 job in" in shown("status", f'data="{folder.root}"')
    folder.queue.unlink()
    report = answer("status", f'data="{folder.root}"')
    assert (report["runs_gone"], report["runs_unknown"]) == ({}, {JOB: 6})
