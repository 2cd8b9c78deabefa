"""A queue that was lost, or restored from an older copy: no run lands twice, none runs again, and status says so."""

import contextlib
import json
import shutil
import sqlite3

import pytest
from test_dispatch import submit, submit_texts, text_of_mlp, work

from conf.cli.command_line import run
from farm import status
from farm.dispatch import working
from farm.dispatch.ray_cluster import ClusterSettings
from farm.dispatch.working import reconcile
from farm.queue.jobs import Queue
from farm.queue.queue_values import MIXED_FAMILY
from tests.warehouse.warehouse_rows import ask, compact_at
from warehouse.files.integrity import compare, landed_tasks

JOB = "mlp-00000001"


def rows(folder):
    return ask(folder, "SELECT count(*), count(DISTINCT run_id) FROM runs")[0]


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
        assert reconcile(folder, fresh) == 6
        assert reconcile(folder, fresh) == 0
        executor, _ = work(folder, fresh)
        assert [index for _, index, _ in executor.handed_out] == [6, 7]
        assert fresh.counts().by_status == {"ok": 8}
    assert rows(folder) == (8, 8)


def test_a_job_that_landed_before_the_queue_was_lost_and_arrives_beside_a_dispatcher_runs_no_more(
    folder, queue, monkeypatch
):
    submit(queue, 6)
    work(folder, queue)
    with lose(folder, queue) as fresh:

        def next_device(job_id):
            submit(fresh, 6)
            return Queue.next_device(fresh, job_id)

        monkeypatch.setattr(fresh, "next_device", next_device)
        assert working.work(folder, fresh, ClusterSettings(kind="inline")) == 0
        assert fresh.counts().by_status == {"ok": 6}
    assert rows(folder) == (6, 6)


def test_a_first_attempt_of_a_run_that_was_merged_lands_without_effect(folder, queue):
    submit(queue, 6)
    work(folder, queue)
    compact_at(folder, 0, 2)
    with lose(folder, queue) as fresh:
        submit(fresh, 6)
        executor, _ = work(folder, fresh)  # without reconciling
        assert len(executor.handed_out) == 6
    assert rows(folder) == (6, 6)
    assert [path.name[:6] for path in folder.partition("runs", "mlp").glob("*.parquet")] == ["merged"]


def test_a_queue_restored_from_an_older_copy_repeats_nothing(folder, queue, tmp_path):
    submit(queue, 6)
    queue.lease("w", 2, now=0.0, lease_s=1.0)
    queue.close()
    shutil.copy(folder.queue, tmp_path / "older")
    with Queue.open(folder.queue) as current:
        work(folder, current)
    compact_at(folder, 0, 2)
    with lose(folder, current):
        pass
    for path in folder.root.glob("queue.sqlite*"):
        path.unlink()
    shutil.copy(tmp_path / "older", folder.queue)
    with Queue.open(folder.queue) as older:
        assert reconcile(folder, older) == 6
        executor, _ = work(folder, older)
        assert executor.handed_out == []
    assert rows(folder) == (6, 6)


def test_status_counts_runs_that_the_queue_does_not_know(folder, queue, capsys):
    submit(queue, 6)
    work(folder, queue)
    compact_at(folder, 0, 2)
    with lose(folder, queue) as fresh:
        submit(fresh, 6)
        fresh.cancel(JOB, 0.0)
    assert run("status", status.entry, [f'data="{folder.root}"']) == 0
    assert "6 runs of 1 job in" in capsys.readouterr().out
    folder.queue.unlink()
    assert run("status", status.entry, [f'data="{folder.root}"', "format=json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["runs_unknown"] == {JOB: 6} and report["runs_gone"] == {}


def test_a_folder_where_all_is_well_says_nothing(folder, queue, capsys):
    submit(queue, 6)
    work(folder, queue)
    compact_at(folder, 0, 2)
    submit(queue, 9)
    work(folder, queue, {7: ["lost"]})
    assert run("status", status.entry, [f'data="{folder.root}"']) == 0
    assert "the queue" not in capsys.readouterr().out
    presence = compare(folder)
    assert presence.lines(folder.root) == []
    assert {job: len(indexes) for job, indexes in landed_tasks(folder).items()} == {JOB: 9}


def test_as_many_runs_gone_as_unknown_are_both_counted(folder, queue, capsys):
    submit(queue, 6)
    work(folder, queue)
    queue.requeue(JOB, [1, 4])
    for index in (2, 3):  # also their sum is the same
        (folder.partition("runs", "mlp") / f"{JOB}-{index:06d}.parquet").unlink()
    assert run("status", status.entry, [f'data="{folder.root}"', "format=json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["runs_gone"], report["runs_unknown"]) == ({JOB: 2}, {JOB: 2})
    assert run("status", status.entry, [f'data="{folder.root}"']) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "marked done" in line]
    assert line.startswith("2 runs of 1 job marked done in the queue have no file in")


def test_a_queue_that_somebody_holds_is_no_queue_to_copy(folder, queue, monkeypatch):
    submit(queue, 1)
    queue.close()
    monkeypatch.setattr("warehouse.files.integrity._BUSY_S", 0.0)
    with contextlib.closing(sqlite3.connect(folder.queue, isolation_level=None)) as holder:
        holder.execute("PRAGMA journal_mode = DELETE")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            compare(folder)


def test_rows_that_nobody_can_read_land_once_and_a_lost_queue_knows_them(folder, queue):
    texts = ["no json", "{}", '{"family": 3}', '{"family": "mlp", "batch_size": 0}', '{"family": "../up"}']
    submit_texts(queue, texts, family=MIXED_FAMILY)
    work(folder, queue)
    assert queue.counts().by_status == {"invalid": 5}
    families = ask(folder, "SELECT family FROM runs ORDER BY task_index")
    assert [family for (family,) in families] == ["mixed", "mixed", "mixed", "mlp", "mixed"]
    with lose(folder, queue) as fresh:
        submit_texts(fresh, texts, family=MIXED_FAMILY)
        assert reconcile(folder, fresh) == 5


def test_done_tasks_are_queued_again_with_all_their_attempts(folder, queue):
    submit(queue, 4)
    work(folder, queue)
    assert queue.requeue(JOB, [1, 3, 99]) == 2
    assert queue.requeue(JOB, [1, 3]) == 0
    assert (queue.counts().queued, queue.counts().done) == (2, 2)
    executor, _ = work(folder, queue)
    assert executor.handed_out == [(JOB, 1, 1), (JOB, 3, 1)]


def test_done_tasks_of_a_cancelled_job_wait_for_the_job_to_be_submitted_again(folder, queue):
    submit(queue, 3)
    work(folder, queue)
    queue.cancel(JOB, 0.0)
    assert queue.requeue(JOB, [1]) == 1
    assert (queue.counts().cancelled, queue.counts().queued) == (1, 0)
    submit(queue, 3)
    assert queue.counts().queued == 1
