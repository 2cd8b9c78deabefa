"""SIGKILL in the middle of a 200-task job: of a trial, a worker, the dispatcher, everything. Then resume.

Every task ends with exactly one visible run, no Parquet file is unreadable, no process is left over.
"""

import signal

import psutil
import pytest
from farm_process import SUBMIT, Farm, check_complete, kill, landed

from tests.surroundings import ENDS_WITHIN_S, await_

TASKS = 200
pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path):
    return tmp_path / "a'; echo foo"


def start(data, *extra, device="device=cpu"):
    return Farm(data, *SUBMIT, f"n={TASKS}", device, *extra).remember()


def finish(data, farm, *extra):
    """The job again, to its end; then nothing of any of it may be left running."""
    before = farm.processes() if farm.process.poll() is not None else []
    again = start(data, *extra)
    again.ends_with(0)
    statuses = check_complete(data, TASKS)
    assert landed(str(data)) >= 1
    psutil.wait_procs(before, timeout=60)
    assert not [p for p in before if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    await_(lambda: not again.processes(), "the end of every process", ENDS_WITHIN_S)
    return statuses


@pytest.mark.parametrize("cluster", ["local", "inline"])
def test_killed_trials_are_tried_again(data, cluster):
    farm = start(data, f"cluster={cluster}")
    for runs in (20, 60, 100):
        farm.await_runs(runs)
        kill(await_(farm.trials, "a running trial"))
    farm.ends_with(0)
    statuses = check_complete(data, TASKS)
    assert statuses == {"ok": TASKS}
    assert not farm.processes()


def test_killed_workers_are_restarted_and_their_tasks_repeated(data):
    farm = start(data, "device.count=2")
    for runs in (20, 80):
        farm.await_runs(runs)
        kill(await_(farm.actors, "an actor")[:1])
    farm.ends_with(0)
    assert check_complete(data, TASKS) == {"ok": TASKS}
    assert not farm.processes()


@pytest.mark.parametrize("cluster", ["local", "inline"])
def test_a_killed_dispatcher_loses_nothing(data, cluster):
    farm = start(data, f"cluster={cluster}")
    farm.await_runs(50)
    farm.process.send_signal(signal.SIGKILL)
    farm.process.wait()
    assert finish(data, farm) == {"ok": TASKS}


@pytest.mark.parametrize("cluster", ["local", "inline"])
def test_trials_that_were_made_ready_ahead_lose_nothing_when_they_or_all_above_them_are_killed(data, cluster):
    ahead = (f"cluster={cluster}", "trial.prepare_ahead=always", *(["device.count=2"] if cluster == "local" else []))
    farm = start(data, *ahead)
    for runs in (20, 50):
        farm.await_runs(runs)
        kill(await_(farm.trials, "a running trial"))  # of two under a server, one runs and one waits
    if cluster == "local":
        farm.await_runs(80)
        kill(await_(farm.actors, "an actor")[:1])
    farm.await_runs(110)
    kill([*farm.processes(), psutil.Process(farm.process.pid)])
    farm.process.wait()
    assert sum(finish(data, farm, *ahead).values()) == TASKS


def test_everything_killed_at_once_loses_nothing(data):
    farm = start(data, device="device=simulated")
    farm.await_runs(50)
    kill([*farm.processes(), psutil.Process(farm.process.pid)])
    farm.process.wait()
    again = start(data, device="device=simulated")
    again.ends_with(0)
    assert sum(check_complete(data, TASKS).values()) == TASKS
    await_(lambda: not farm.processes() and not again.processes(), "the end of every process", ENDS_WITHIN_S)


def test_killed_again_and_again_it_still_ends(data):
    for runs in (20, 60, 100, 140):
        farm = start(data, "cluster=inline")
        farm.await_runs(runs)
        kill([*farm.processes(), psutil.Process(farm.process.pid)])
        farm.process.wait()
    assert sum(finish(data, farm).values()) == TASKS


def test_ctrl_c_once_finishes_what_runs_and_the_same_command_goes_on(data):
    farm = start(data)
    farm.await_runs(30)
    farm.process.send_signal(signal.SIGINT)
    output = farm.ends_with(130)
    assert "run the same command again to continue" in output
    assert not farm.processes()
    assert finish(data, farm) == {"ok": TASKS}


def test_ctrl_c_twice_stops_at_once_and_nothing_is_lost(data):
    farm = start(data, "window.seconds=600")
    await_(farm.trials, "a running trial")
    farm.process.send_signal(signal.SIGINT)
    farm.process.send_signal(signal.SIGTERM)
    farm.ends_with(130)
    await_(lambda: not farm.processes(), "the end of every process", ENDS_WITHIN_S)


def test_only_one_dispatcher_works_on_a_data_folder(data):
    farm = start(data)
    farm.await_runs(5)
    second = start(data)
    code, output = second.wait()
    assert code == 0
    assert f"process {farm.process.pid}" in output and "already works on" in output
    code, output = farm.wait()
    assert code == 0, output
    assert check_complete(data, TASKS) == {"ok": TASKS}
