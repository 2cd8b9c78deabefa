"""The dispatcher with a scripted executor and a clock of its own: what it leases, lands, repeats and gives back."""

import dataclasses
import errno
import os
import sys

import pytest

from conf.errors import EnvironmentProblem
from farm.dispatch.dispatcher import (
    LEASE_S,
    Clocks,
    Dispatcher,
    StopRequest,
    lost_run,
    make_executor,
    reconcile,
    run_job,
)
from farm.dispatch.executors import Completion
from farm.dispatch.monitoring import Service
from farm.dispatch.ray_cluster import ClusterSettings
from farm.queue.jobs import Job, text_of_settings
from farm.queue.leftovers import hold_dispatcher_lock
from featurize.configs.trial import canonical_json
from tests.trials import mlp
from tests.warehouse.warehouse_rows import ask
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import TELEMETRY_SCHEMA, Run
from workers.devices import DeviceChoice, TrialSettings, WindowSettings
from workers.task import RunResult

DEVICE = '{"backend":"simulated","count":1,"memory_limit_mib":null,"spec":null}'


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class ScriptedExecutor:
    """`outcomes`: task index -> how each attempt ends ("ok", "lost", "killed"), "ok" after that; `answer`: what a task
    that ends like that sends, if not a run of this status."""

    def __init__(self, clock, outcomes=None, answer=None):
        self.clock = clock
        self._answer = answer or result_of
        self.outcomes = {index: list(script) for index, script in (outcomes or {}).items()}
        self.handed_out = []
        self.announced = []  # with each task, the index of the one that comes next
        self._task = None
        self.closed = False
        self.restarted = []

    def start(self):
        pass

    def idle(self):
        return [] if self._task else ["w"]

    def waiting(self):
        return ()

    def most_gpus(self):
        return None

    def submit(self, worker, task, upcoming=None):
        self._task = task
        self.announced.append(None if upcoming is None else upcoming.task_index)
        self.handed_out.append((task.job_id, task.task_index, task.attempt))

    def wait(self, timeout_s):
        self.clock.now += 1.0
        if self._task is None:
            return []
        if self.outcomes.get(self._task.task_index) == ["hangs"]:
            if not self.restarted:
                return []
            self.outcomes[self._task.task_index] = ["lost"]
        task, self._task = self._task, None
        script = self.outcomes.get(task.task_index, [])
        how = script.pop(0) if script else "ok"
        if how == "lost":
            return [Completion(worker="w", task=task, lost="worker lost: killed")]
        return [Completion(worker="w", task=task, result=self._answer(task, how))]

    def running(self):
        return {"w": self._task} if self._task else {}

    def restart(self, worker):
        self.restarted.append(worker)

    def notices(self):
        return []

    def close(self):
        self.closed = True

    def indexes(self):
        return [index for _, index, _ in self.handed_out]


def result_of(task, how):
    run = Run(
        run_id=task.run_id,
        job_id=task.job_id,
        task_index=task.task_index,
        attempt=task.attempt,
        family=task.config.family,
        config=task.config.to_mapping(),
        status="crashed" if how == "killed" else how,
        source="simulated",
        error="killed from outside" if how == "killed" else None,
    )
    return RunResult(run=run, telemetry=TELEMETRY_SCHEMA.empty_table(), retryable=how == "killed")


class Stop:
    requested = False

    def install(self):
        pass

    disarm = install


class Quiet:
    def ignore(self, *_):
        pass

    say = landed = update = ignore


def text_of_mlp(**values):
    return canonical_json(mlp(**values).to_mapping())


def submit_texts(queue, texts, job_id="mlp-00000001", family="mlp", **settings):
    """Submit a job of these configs as the queue holds them; `settings`: of its trials, if not the defaults."""
    job = Job(
        job_id=job_id,
        family=family,
        space_json="{}",
        n=len(texts),
        seed=0,
        policy="uniform",
        device=DEVICE,
        settings_json=text_of_settings(TrialSettings(window=WindowSettings(kind="fixed", seconds=1.0), **settings)),
        submitted_at=0.0,
    )
    queue.submit(job, enumerate(texts))


def submit(queue, n, job_id="mlp-00000001", parallel=None, **settings):
    submit_texts(queue, [text_of_mlp(parallel=parallel)] * n, job_id, **settings)


def run_with(folder, queue, executor, stop=None, **options):
    """Work the queue off with this executor and by its clock; return whether all is done."""
    clock = executor.clock
    dispatcher = Dispatcher(folder, queue, executor, DEVICE, Quiet(), Clocks(clock, clock), **options)
    return dispatcher.run(stop or Stop())


def work(folder, queue, outcomes=None):
    executor = ScriptedExecutor(Clock(), outcomes)
    done = run_with(folder, queue, executor)
    assert executor.closed
    return executor, done


def runs(folder):
    return ask(folder, "SELECT task_index, attempt, status FROM runs ORDER BY ALL")


ENDINGS = {
    "a trial that is killed every time does not block the job": (
        3,
        ["killed"] * 9,
        [(0, 3, "crashed"), (1, 1, "ok"), (2, 1, "ok")],
    ),
    "a lost worker costs an attempt": (2, ["lost"], [(0, 2, "ok"), (1, 1, "ok")]),
    "a worker that is lost every time": (1, ["lost"] * 9, [(0, 3, "crashed")]),
    "a run that the warehouse refuses": (2, ["no such status"], [(0, 1, "crashed"), (1, 1, "ok")]),
    "out of memory is a result and is not tried again": (1, ["oom"], [(0, 1, "oom")]),
}


@pytest.mark.parametrize(("n", "outcomes", "landed"), ENDINGS.values(), ids=ENDINGS)
def test_a_task_ends_as_its_attempts_did(folder, queue, n, outcomes, landed):
    submit(queue, n)
    work(folder, queue, {0: outcomes})
    assert runs(folder) == landed


@pytest.mark.parametrize(("gpus", "status"), [(None, "ok"), (2, "ok"), (1, "invalid")])
def test_a_trial_that_needs_more_gpus_than_a_node_has_lands_with_one_line_that_says_so(
    folder, queue, monkeypatch, gpus, status
):
    monkeypatch.setattr(ScriptedExecutor, "most_gpus", lambda self: gpus)
    submit(queue, 1, parallel="ddp=2")
    submit(queue, 1, job_id="mlp-00000002")
    work(folder, queue)
    line = "parallel=ddp=2 needs 2 GPUs of one node, and the largest node has 1"
    rows = ask(folder, "SELECT status, error FROM runs ORDER BY job_id")
    assert rows == [(status, line if gpus == 1 else None), ("ok", None)]


def test_a_trial_that_waits_for_gpus_is_not_stuck(folder, queue):
    class Waits(ScriptedExecutor):
        rounds = 0

        def waiting(self):
            return ("w",) if self.rounds < 5 else ()

        def wait(self, timeout_s):
            self.rounds += 1
            self.clock.now += 400.0  # longer than any trial may take
            return super().wait(timeout_s) if self.rounds >= 6 else []

    submit(queue, 1, parallel="ddp=2")
    executor = Waits(Clock())
    run_with(folder, queue, executor)
    assert executor.restarted == [] and runs(folder) == [(0, 1, "ok")]


@pytest.mark.parametrize(("prepare_ahead", "announced"), [("always", [1, 2, None]), ("auto", [None] * 3)])
def test_a_worker_is_told_what_comes_next_so_that_it_can_make_it_ready(folder, queue, prepare_ahead, announced):
    """On a simulated device only where it is asked for."""
    submit(queue, 3, prepare_ahead=prepare_ahead)
    executor, done = work(folder, queue)
    assert done and (executor.indexes(), executor.announced) == ([0, 1, 2], announced)
    assert runs(folder) == [(0, 1, "ok"), (1, 1, "ok"), (2, 1, "ok")]


def test_what_was_announced_and_never_started_is_given_back_without_an_attempt(folder, queue):
    submit(queue, 3, prepare_ahead="always")
    stop = Stop()

    class StopsAfterOne(ScriptedExecutor):
        def wait(self, timeout_s):
            stop.requested = True
            return super().wait(timeout_s)

    executor = StopsAfterOne(Clock())
    assert not run_with(folder, queue, executor, stop)
    assert (executor.indexes(), executor.announced) == ([0], [1])
    assert work(folder, queue)[0].handed_out == [("mlp-00000001", 1, 1), ("mlp-00000001", 2, 1)]


@pytest.mark.parametrize(
    ("code", "failures", "lands"), [(errno.EIO, 3, True), (errno.EIO, 1000, False), (errno.ENOSPC, 1, False)]
)
def test_a_run_that_cannot_land_for_a_moment_is_kept_and_else_given_back_without_an_attempt(
    folder, queue, monkeypatch, code, failures, lands
):
    submit(queue, 2)
    left = [OSError(code, os.strerror(code))] * failures

    def write(self, *arguments, really=RunWriter.write):
        if left:
            raise left.pop()
        return really(self, *arguments)

    monkeypatch.setattr(RunWriter, "write", write)
    if not lands:
        with pytest.raises(OSError, match=os.strerror(code)):
            work(folder, queue)
        assert queue.pending() == 2 and runs(folder) == []
        left.clear()
    assert sorted(work(folder, queue)[0].handed_out) == [("mlp-00000001", 0, 1), ("mlp-00000001", 1, 1)]
    assert runs(folder) == [(0, 1, "ok"), (1, 1, "ok")]


def test_a_run_that_landed_before_its_dispatcher_died_is_done_and_not_repeated(folder, queue):
    submit(queue, 3)
    task, _ = queue.lease("w", 2, now=10.0, lease_s=1e9)
    landed = dataclasses.replace(lost_run(task, "for the test").run, status="ok")
    RunWriter(folder).write(landed, TELEMETRY_SCHEMA.empty_table())
    assert reconcile(folder, queue) == 1
    handed_out = work(folder, queue)[0].handed_out
    assert handed_out == [("mlp-00000001", 1, 2), ("mlp-00000001", 2, 1)], "its other lease is void at once"


def test_a_job_that_another_dispatcher_runs_is_waited_for(folder, queue, monkeypatch):
    submit(queue, 1)

    def let_the_other_work(_seconds):
        (task,) = queue.lease("another", 1, 0.0, 60.0)
        queue.finish(task, "ok", 1.0)

    monkeypatch.setattr("farm.dispatch.dispatcher.time.sleep", let_the_other_work)
    with hold_dispatcher_lock(folder.dispatcher_lock):
        assert run_job(folder, queue, ClusterSettings(kind="inline"), "mlp-00000001", StopRequest(), Service())


def test_without_ray_the_message_names_the_way_without_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    executor = make_executor(DeviceChoice(backend="simulated"), ClusterSettings(kind="ray"))
    with pytest.raises(EnvironmentProblem, match="cluster=inline runs one worker without it"):
        executor.start()
    executor.close()


# The system's clock is set while a dispatcher works: no lease ends, no good trial is called stuck


class Jumping(ScriptedExecutor):
    """Each wait takes a second by the steady clock; the wall clock jumps to and fro meanwhile."""

    def __init__(self, jump_s, outcomes=None):
        super().__init__(Clock(), outcomes)
        self.wall = Clock()
        self.jump_s = jump_s
        self.turns = 0

    def wait(self, timeout_s):
        self.turns += 1
        self.wall.now += self.jump_s if self.turns % 3 else -self.jump_s / 2
        return super().wait(timeout_s)


def work_by_two_clocks(folder, queue, executor):
    return Dispatcher(folder, queue, executor, DEVICE, Quiet(), Clocks(executor.wall, executor.clock)).run(Stop())


JUMPS = pytest.mark.parametrize("jump_s", [400 * 24 * 3600.0, -400 * 24 * 3600.0])


@JUMPS
def test_every_task_is_handed_out_once_and_lands_as_what_it_is(folder, queue, jump_s):
    submit(queue, 8, prepare_ahead="always")
    executor = Jumping(jump_s)
    assert work_by_two_clocks(folder, queue, executor) and not executor.restarted
    assert executor.handed_out == [("mlp-00000001", index, 1) for index in range(8)]
    assert runs(folder) == [(index, 1, "ok") for index in range(8)]


@JUMPS
def test_a_worker_that_hangs_is_found_by_the_steady_clock_and_its_task_repeated(folder, queue, jump_s):
    submit(queue, 1)
    executor = Jumping(jump_s, {0: ["hangs"]})
    assert work_by_two_clocks(folder, queue, executor)
    assert executor.restarted == ["w"] and executor.turns > 200 and runs(folder) == [(0, 2, "ok")]


def test_what_waits_since_before_the_clock_was_put_back_is_tried_at_once(folder, queue):
    submit(queue, 1)
    (task,) = queue.lease("a", 1, 1e9, LEASE_S)
    queue.retry(task, 1e9, "lost")
    executor = Jumping(0.0)
    assert reconcile(folder, queue) == 0 and work_by_two_clocks(folder, queue, executor)
    assert executor.turns < 10 and runs(folder) == [(0, 2, "ok")]
