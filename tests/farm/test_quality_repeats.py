"""Runs whose labels cannot be trusted are kept, marked and run again, within bounds: real queue, writer, dispatcher."""

import dataclasses
from random import Random

import pyarrow as pa
import pytest
from test_dispatch import DEVICE, Clock, Quiet, ScriptedExecutor, Stop, result_of, run_with, submit

from farm.dispatch.dispatcher import Dispatcher
from farm.dispatch.executors import Completion
from farm.dispatch.working import reconcile
from farm.queue.jobs import Queue
from tests.warehouse.warehouse_rows import ask, compact_at
from warehouse.files.writer import RunWriter
from workers.task import RunResult

REASONS = {"other_process": "up to 1 with 900 MiB, in 4 of 9 readings"}


def judged(task, quality):
    result = result_of(task, "ok")
    reasons = REASONS if quality != "trusted" else None
    telemetry = pa.table({"run_id": [task.run_id] * 2, "t_ms": [0.0, 100.0], "power_w": [200.0, 210.0]})
    run = dataclasses.replace(result.run, quality=quality, quality_reasons=reasons, power_w=205.0 + task.attempt)
    return RunResult(run=run, telemetry=telemetry, repeat=quality == "untrusted")


class Judging(ScriptedExecutor):
    """`outcomes`: task index -> the quality of each attempt's run, or "lost"; "trusted" after that."""

    def wait(self, timeout_s):
        index = self._task.task_index if self._task else None
        if index is None or self.outcomes.get(index, [""])[:1] == ["lost"]:
            return super().wait(timeout_s)
        self.clock.now += 1.0
        task, self._task = self._task, None
        script = self.outcomes.get(index, [])
        return [Completion(worker="w", task=task, result=judged(task, script.pop(0) if script else "trusted"))]


def dispatcher(folder, queue, outcomes=None):
    executor = Judging(Clock(), outcomes)
    return executor, Dispatcher(folder, queue, executor, DEVICE, Quiet(), clock=executor.clock, steady=executor.clock)


def work(folder, queue, outcomes=None):
    executor, dispatching = dispatcher(folder, queue, outcomes)
    assert dispatching.run(Stop())
    return executor


def landed(folder, view):
    return ask(folder, f"SELECT run_id, attempt, quality, final FROM {view} ORDER BY ALL")


def test_an_untrusted_run_is_kept_and_its_task_repeated_and_readers_see_it_once(folder, queue):
    submit(queue, 2)
    executor = work(folder, queue, {1: ["untrusted"]})
    assert [(index, attempt) for _, index, attempt in executor.handed_out] == [(0, 1), (1, 1), (1, 2)]
    kept = [("mlp-00000001-000000", 1, "trusted", True), ("mlp-00000001-000001", 2, "trusted", True)]
    assert landed(folder, "runs") == kept
    assert landed(folder, "attempts") == [*kept, ("mlp-00000001-000001-a1", 1, "untrusted", False)]
    assert queue.counts().by_status == {"ok": 2} and "other_process" in queue.errors("mlp-00000001")[0]["error"]
    samples = ask(folder, "SELECT run_id, count(*) FROM telemetry GROUP BY ALL ORDER BY ALL")
    assert samples == [(f"mlp-00000001-{index}", 2) for index in ("000000", "000001", "000001-a1")]


@pytest.mark.parametrize(
    ("settings", "repeats"),
    [({}, 1), ({"quality_repeats": 0}, 0), ({"quality_repeats": 2}, 2)],
)
def test_what_stays_untrusted_is_repeated_as_often_as_its_job_says_and_lands_as_it_is(folder, queue, settings, repeats):
    submit(queue, 1, **settings)
    executor = work(folder, queue, {0: ["untrusted"] * 9})
    assert len(executor.handed_out) == len(landed(folder, "attempts")) == 1 + repeats
    assert landed(folder, "runs") == [("mlp-00000001-000000", 1 + repeats, "untrusted", True)]


def test_lost_workers_and_repeats_share_a_tasks_attempts(folder, queue):
    submit(queue, 2, quality_repeats=2)
    work(folder, queue, {0: ["lost", "untrusted", "untrusted"], 1: ["untrusted", "lost", "lost"]})
    assert ask(folder, "SELECT task_index, attempt, status, quality FROM runs ORDER BY ALL") == [
        (0, 3, "ok", "untrusted"),
        (1, 3, "crashed", None),
    ]
    assert [row[0][-2:] for row in landed(folder, "attempts") if row[3] is False] == ["a2", "a1"]


OUTCOMES = ("trusted", "suspect", "untrusted", "untrusted", "lost")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_whatever_happens_each_task_has_one_run_and_no_attempt_is_lost(folder, queue, monkeypatch, seed):
    """Random outcomes, and a dispatcher that is killed at a random step of landing, again and again."""
    random = Random(seed)
    limit = random.randrange(3)
    submit(queue, 4, quality_repeats=limit)
    outcomes = {index: random.choices(OUTCOMES, k=9) for index in range(4)}
    steps = [(RunWriter, "write"), (Queue, "repeat"), (Queue, "finish"), (Queue, "retry")]
    executor, done = Judging(Clock(), outcomes), False
    while not done:
        with monkeypatch.context() as patch:
            owner, name = random.choice(steps)
            real, left, before = getattr(owner, name), [random.randrange(1, 4)], random.random() < 0.5

            def killed(*arguments, real=real, left=left, before=before, **named):
                left[0] -= 1
                if left[0] == 0 and before:
                    raise KeyboardInterrupt
                answer = real(*arguments, **named)
                if left[0] == 0:
                    raise KeyboardInterrupt
                return answer

            patch.setattr(owner, name, killed)
            patch.setattr(Queue, "release", lambda *_: 0)
            try:
                executor._task = None
                done = run_with(folder, queue, executor)
            except KeyboardInterrupt:
                pass
        reconcile(folder, queue)
    assert [index for (index,) in ask(folder, "SELECT task_index FROM runs ORDER BY 1")] == [0, 1, 2, 3]
    assert ask(folder, "SELECT count(*) - count(DISTINCT run_id) FROM attempts") == [(0,)]
    assert queue.counts().done == 4 and queue.pending() == 0
    repeated = ask(folder, "SELECT task_index, count(*) FROM attempts WHERE final = false GROUP BY ALL")
    assert all(count <= limit for _, count in repeated)


def test_attempts_are_merged_and_still_count(folder, queue):
    submit(queue, 2)
    (task, _) = queue.lease("w", 2, 1000.0, 60.0)
    _, dispatching = dispatcher(folder, queue)
    assert dispatching._land_for_repeat(task, judged(task, "untrusted"))
    queue.void_leases()
    work(folder, queue)
    before = landed(folder, "attempts")
    for hours in (0, 2):
        assert compact_at(folder, hours).problems == []
        assert landed(folder, "attempts") == before and len(landed(folder, "runs")) == 2
    assert RunWriter(folder).has_landed("mlp", "mlp-00000001-000000-a1")
