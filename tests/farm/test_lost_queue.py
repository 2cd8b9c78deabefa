"""A queue that was lost, or restored from an older copy: no run lands twice, none runs again, and status says so."""

import json
import shutil

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
        assert (reconcile(folder, fresh), reconcile(folder, fresh)) == (6, 0)
        assert work(folder, fresh)[0].indexes() == [6, 7] and fresh.counts().by_status == {"ok": 8}
    assert rows(folder) == (8, 8)


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
        monkeypatch.setattr(working, "make_executor", None)
        assert working.work(folder, fresh, ClusterSettings(kind="inline")) == 0
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
    assert gone_and_unknown(folder, capsys) == ({}, {JOB: 6})


def gone_and_unknown(folder, capsys):
    """The runs that status counts as gone, and as unknown to the queue."""
    assert run("status", status.entry, [f'data="{folder.root}"', "format=json"]) == 0
    report = json.loads(capsys.readouterr().out)
    return report["runs_gone"], report["runs_unknown"]
