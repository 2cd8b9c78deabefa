"""SIGKILL and Ctrl-C in the middle of a job: of a trial, a worker, the dispatcher, everything. Then resume.

Every task ends with exactly one visible run, no Parquet file is unreadable, no process is left over.
"""

import signal

import psutil
import pytest
from farm_process import SUBMIT, Farm, check_jobs, kill, landed

from tests.surroundings import ENDS_WITHIN_S, await_

TASKS = 50
pytestmark = pytest.mark.slow


def start(tmp_path, *extra):
    return Farm(tmp_path / "a'; echo foo", *SUBMIT, f"n={TASKS}", "device=cpu", *extra)


def get_on(farm):
    """Wait for some more runs."""
    farm.await_runs(landed(farm.data) + 4)


@pytest.mark.parametrize("cluster", ["local", "inline"])
def test_whatever_is_killed_the_same_command_goes_on_and_nothing_is_lost(tmp_path, cluster):
    workers = ["device.count=2"] if cluster == "local" else []
    job = (f"cluster={cluster}", "trial.prepare_ahead=always", *workers)
    farm = start(tmp_path, *job)
    farm.await_runs(5)
    kill(await_(farm.trials, "a running trial"))  # of two under a server, one runs and one waits
    get_on(farm)
    if workers:
        kill(await_(farm.actors, "an actor")[:1])
        get_on(farm)
    kill([farm.process])
    farm.wait()
    resumed = start(tmp_path, *job)
    get_on(resumed)
    kill([*resumed.processes(), psutil.Process(resumed.process.pid)])
    resumed.wait()
    interrupted = start(tmp_path, *job)
    get_on(interrupted)
    interrupted.process.send_signal(signal.SIGINT)
    assert "run the same command again to continue" in interrupted.ends_with(130)
    assert not interrupted.processes()
    last = start(tmp_path, *job)
    last.ends_with(0)
    assert check_jobs(last.data, TASKS)["ok"] >= TASKS - 2, "three of its attempts may have been killed"
    everybody = (farm, resumed, last)
    await_(lambda: not any(one.processes() for one in everybody), "the end of every process", ENDS_WITHIN_S)


def test_another_dispatcher_does_not_work_meanwhile_and_ctrl_c_twice_stops_at_once(tmp_path):
    farm = start(tmp_path, "window.seconds=600")
    await_(farm.trials, "a running trial")
    second = start(tmp_path, "window.seconds=600").ends_with(0)
    assert f"process {farm.process.pid}" in second and "already works on" in second
    farm.process.send_signal(signal.SIGINT)
    farm.process.send_signal(signal.SIGTERM)
    farm.ends_with(130)
    await_(lambda: not farm.processes(), "the end of every process", ENDS_WITHIN_S)
