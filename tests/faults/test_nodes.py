"""A cluster of several Ray nodes on one machine: one dies in the middle of a job, another joins."""

import os
import signal

import psutil
import pytest
from farm_process import SUBMIT, Farm, check_jobs, kill, queue_rows

from farm.dispatch.ray_cluster import own_session_environment
from tests.surroundings import ENDS_WITHIN_S, await_

TASKS = 100
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
    return Farm(data, *SUBMIT, f"n={TASKS}", *where)


def workers_seen(data):
    """Who landed runs."""
    return {name for (name,) in queue_rows(data, "SELECT DISTINCT worker FROM tasks WHERE state = 'done'")}


def test_sigterm_leaves_the_cluster_as_it_was_a_node_that_joins_gets_work_and_one_that_dies_loses_nothing(
    tmp_path, cluster
):
    farm = start(tmp_path)
    farm.await_runs(5)
    farm.process.send_signal(signal.SIGTERM)
    farm.ends_with(130)
    assert queue_rows(farm.data, "SELECT count(*) FROM tasks WHERE state = 'leased'") == [(0,)]
    farm = start(tmp_path)
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
