"""A queue that was lost, or restored from an older copy: no run lands twice, none runs again, and status says so."""

import json
import shutil

import pytest
from test_dispatch import submit, submit_texts, text_of_mlp, work

from conf.cli.command_line import run
from farm import status
from farm.dispatch.working import reconcile
from farm.queue.jobs import Queue
from farm.queue.queue_values import MIXED_FAMILY
from tests.warehouse.warehouse_rows import ask, compact_at

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
    lose(folder, current).close()
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


def test_as_many_runs_gone_as_unknown_are_both_counted(folder, queue, capsys):
    submit(queue, 6)
    work(folder, queue)
    queue.requeue(JOB, [1, 4])
    for index in (2, 3):  # also their sum is the same
        (folder.partition("runs", "mlp") / f"{JOB}-{index:06d}.parquet").unlink()
    assert run("status", status.entry, [f'data="{folder.root}"', "format=json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["runs_gone"], report["runs_unknown"]) == ({JOB: 2}, {JOB: 2})
