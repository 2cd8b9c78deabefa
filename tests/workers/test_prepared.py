"""The next trial made ready while one runs: it waits for its turn, and whatever happens to it meanwhile is its own."""

import dataclasses

import psutil
import pytest

from featurize.families import get_family
from tests.trials import mlp, task as trial
from workers.devices import DeviceChoice, WindowSettings
from workers.worker import Worker

SHORT = WindowSettings(kind="fixed", seconds=0.2, warmup_steps=1, warmup_max_seconds=0)


def task(index, prepare_ahead="always", **changes):
    return trial(mlp(**changes), SHORT, index, prepare_ahead=prepare_ahead)


def children(worker):
    return [trial for keeper in psutil.Process(worker._server.pid).children() for trial in keeper.children()]


def test_a_trial_that_was_made_ready_runs_when_it_is_its_turn(worker):
    first = worker.run(task(0), task(1)).run
    (waiting,) = children(worker)
    second = worker.run(task(1)).run
    assert (first.status, first.prepared) == ("ok", False)
    assert (second.status, second.prepared) == ("ok", True), second.error
    assert second.run_id == "mlp-00000000-000001"
    assert second.steps >= 1 and second.startup_s > 0
    assert not waiting.is_running() and not children(worker)


def test_one_that_is_not_wanted_after_all_is_ended(worker):
    worker.run(task(0), task(1))
    (waiting,) = children(worker)
    run = worker.run(task(2)).run
    assert (run.status, run.prepared, run.task_index) == ("ok", False, 2)
    assert not waiting.is_running() and not children(worker)


def test_one_that_was_killed_while_it_waited_is_tried_again(worker):
    worker.run(task(0), task(1))
    (waiting,) = children(worker)
    waiting.kill()
    result = worker.run(task(1))
    assert (result.run.status, result.run.error_type, result.retryable) == ("crashed", "SIGKILL", True)
    assert worker.run(task(1)).run.status == "ok"


def test_one_that_cannot_be_built_is_invalid_when_it_is_its_turn(worker):
    nobodys = get_family("zoo").Config(model="nobodys.nets:build", inputs="float32[4]", batch_size=2)
    assert worker.run(task(0), dataclasses.replace(task(1), config=nobodys)).run.status == "ok"
    result = worker.run(dataclasses.replace(task(1), config=nobodys))
    assert result.run.status == "invalid" and not result.retryable
    assert "nobodys.nets:build comes from stored data, so it is not imported" in result.run.error


def test_nothing_is_made_ready_where_the_device_is_what_the_host_computes_on(worker):
    worker.run(task(0, prepare_ahead="auto"), task(1, prepare_ahead="auto"))
    assert not children(worker)


@pytest.mark.slow
def test_closing_the_worker_ends_what_was_made_ready():
    doomed = Worker(DeviceChoice(backend="cpu"), "0", "doomed")
    doomed.run(task(0), task(1))
    (waiting,) = children(doomed)
    doomed.close()
    psutil.wait_procs([waiting], timeout=10)
    assert not waiting.is_running()
