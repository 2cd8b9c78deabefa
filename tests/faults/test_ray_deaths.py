"""Kills what Ray stands on: a process of its own, at its start, in the middle of a job or of a joined cluster.

Also a node of several on one machine, while another joins.

Without its Ray, the dispatcher says so in one line, gives back what ran without an attempt, ends with 75, and the same
command goes on.
"""

import contextlib
import os
import signal

import psutil
import pytest
from farm_process import SUBMIT, Farm, check_jobs, kill, queue_rows

from conf.cli.command_line import EXIT_TEMPORARY
from farm.dispatch.ray_cluster import own_session_environment
from tests.surroundings import ENDS_WITHIN_S, await_

TASKS, OWN_TASKS = 100, 24
JOINED = "cluster.address=auto"
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
# The head calls a node dead after two seconds without a heartbeat, not after some ten.
SOON_DEAD = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(monkeypatch):
    """A head on loopback only, with a token, as a session of our own has; `cluster.address=auto` finds it."""
    os.environ.update(own_session_environment())  # for good: a process cannot change its token
    for name, value in SOON_DEAD.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=NODE)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


def start(tmp_path, tasks, *extra):
    return Farm(tmp_path / "a'; echo foo", *SUBMIT, f"n={tasks}", "device=simulated", "device.count=1", *extra)


def head_of(farm, name):
    """The process of that name that the dispatcher has started."""

    def look():
        with contextlib.suppress(psutil.Error):
            return [child for child in psutil.Process(farm.process.pid).children() if child.name() == name]

    return await_(look, name)


def check_ending(farm, words):
    output = farm.ends_with(EXIT_TEMPORARY)
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert words in line and "run the same command again to continue" in line
    assert queue_rows(
        farm.data, "SELECT count(*) FROM tasks WHERE state = 'leased' OR (state = 'queued' AND attempt > 0)"
    ) == [(0,)], "given back, and it has cost no attempt"
    await_(lambda: not farm.processes(), "the end of every process", ENDS_WITHIN_S)


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_one_that_dies_at_the_start_or_in_the_middle_of_a_job_is_told_in_a_line_and_the_job_goes_on(tmp_path, name):
    farm = start(tmp_path, OWN_TASKS)
    kill(head_of(farm, name))
    check_ending(farm, f"Ray's {name}")
    farm = start(tmp_path, OWN_TASKS)
    farm.await_runs(5)
    kill(head_of(farm, name))
    check_ending(farm, f"Ray's {name}")
    start(tmp_path, OWN_TASKS).ends_with(0)
    assert check_jobs(farm.data, OWN_TASKS) == {"ok": OWN_TASKS}


def test_the_head_of_a_joined_cluster_that_dies_loses_nothing(tmp_path, cluster):
    farm = start(tmp_path, OWN_TASKS, JOINED)
    farm.await_runs(5)
    kill([psutil.Process(cluster.head_node.all_processes["gcs_server"][0].process.pid)])
    check_ending(farm, "the Ray cluster at 127.0.0.1")


def workers_seen(data):
    """Who landed runs."""
    return {name for (name,) in queue_rows(data, "SELECT DISTINCT worker FROM tasks WHERE state = 'done'")}


def test_sigterm_leaves_the_cluster_as_it_was_a_node_that_joins_gets_work_and_one_that_dies_loses_nothing(
    tmp_path, cluster
):
    farm = start(tmp_path, TASKS, JOINED)
    farm.await_runs(5)
    farm.process.send_signal(signal.SIGTERM)
    farm.ends_with(130)
    assert queue_rows(farm.data, "SELECT count(*) FROM tasks WHERE state = 'leased'") == [(0,)]
    farm = start(tmp_path, TASKS, JOINED)
    farm.await_runs(10)
    before = len(workers_seen(farm.data))
    second = cluster.add_node(**NODE)
    await_(lambda: len(workers_seen(farm.data)) > before, "runs of the second node")
    raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
    kill([*raylet.children(recursive=True), raylet])
    output = farm.ends_with(0)
    assert "joined; 1 workers start there" in output and "left the cluster with 1 workers" in output, output
    assert check_jobs(farm.data, TASKS) == {"ok": TASKS}
    await_(lambda: not farm.servers(), "the end of every trial server", ENDS_WITHIN_S)
