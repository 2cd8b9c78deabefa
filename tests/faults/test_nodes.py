"""A cluster of several Ray nodes on one machine: one dies in the middle of a job, another joins."""

import os
import signal

import psutil
import pytest
from farm_process import SUBMIT, Farm, check_complete, kill, queue_rows

from farm.dispatch.ray_cluster import own_session_environment
from tests.surroundings import ENDS_WITHIN_S, await_

TASKS = 120
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


def start(tmp_path, *extra):
    data = tmp_path / "a'; echo foo"
    where = ("cluster.address=auto", "device=simulated", "device.count=1", *extra)
    return Farm(data, *SUBMIT, f"n={TASKS}", *where).remember()


def workers_seen(data):
    """Who landed runs."""
    return {name for (name,) in queue_rows(data, "SELECT DISTINCT worker FROM tasks WHERE state = 'done'")}


def states(data, state):
    return queue_rows(data, "SELECT count(*) FROM tasks WHERE state = ?", state)[0][0]


def test_a_node_that_dies_in_the_middle_of_a_job_loses_nothing_and_the_job_ends(tmp_path, cluster):
    second = cluster.add_node(**NODE)
    farm = start(tmp_path)
    farm.await_runs(1)
    await_(lambda: len(workers_seen(farm.data)) == 2, "runs of both nodes")
    raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
    kill([*raylet.children(recursive=True), raylet])
    output = farm.ends_with(0)
    assert "left the cluster with 1 workers" in output, output
    assert check_complete(farm.data, TASKS) == {"ok": TASKS}
    await_(lambda: not farm.servers(), "the end of every trial server", ENDS_WITHIN_S)


def test_a_node_that_joins_gets_work(tmp_path, cluster):
    farm = start(tmp_path)
    farm.await_runs(5)
    cluster.add_node(**NODE)
    output = farm.ends_with(0)
    assert "joined; 1 workers start there" in output
    assert len(workers_seen(farm.data)) == 2
    assert check_complete(farm.data, TASKS) == {"ok": TASKS}


def test_sigterm_leaves_the_cluster_as_it_was_and_the_same_command_goes_on(tmp_path, cluster):
    farm = start(tmp_path)
    farm.await_runs(5)
    farm.process.send_signal(signal.SIGTERM)
    farm.ends_with(130)
    assert states(farm.data, "leased") == 0
    start(tmp_path).ends_with(0)
    assert check_complete(farm.data, TASKS) == {"ok": TASKS}
