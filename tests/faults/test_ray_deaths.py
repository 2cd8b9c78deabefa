"""The processes that Ray stands on are killed: at its start, in the middle of a job, of a cluster that was joined.

The dispatcher says so in one line, gives back what ran without an attempt, ends with 75, and the same command goes on.
"""

import contextlib
import os

import psutil
import pytest
from farm_process import SUBMIT, Farm, check_jobs, kill, queue_rows

from farm.dispatch.ray_cluster import EXIT_CLUSTER_LOST, own_session_environment
from tests.surroundings import ENDS_WITHIN_S, await_

TASKS = 24
pytestmark = pytest.mark.slow


def start(tmp_path, *extra):
    data = tmp_path / "a'; echo foo"
    return Farm(data, *SUBMIT, f"n={TASKS}", "device=simulated", "device.count=1", *extra)


def head_of(farm, name):
    """The process of that name that the dispatcher has started."""

    def look():
        with contextlib.suppress(psutil.Error):
            return [child for child in psutil.Process(farm.process.pid).children() if child.name() == name]

    return await_(look, name)


def check_ending(farm, words):
    output = farm.ends_with(EXIT_CLUSTER_LOST)
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert words in line and "run the same command again to continue" in line
    assert queue_rows(
        farm.data, "SELECT count(*) FROM tasks WHERE state = 'leased' OR (state = 'queued' AND attempt > 0)"
    ) == [(0,)], "given back, and it has cost no attempt"
    await_(lambda: not farm.processes(), "the end of every process", ENDS_WITHIN_S)


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_one_that_dies_at_the_start_or_in_the_middle_of_a_job_is_told_in_a_line_and_the_job_goes_on(tmp_path, name):
    farm = start(tmp_path)
    kill(head_of(farm, name))
    check_ending(farm, f"Ray's {name}")
    farm = start(tmp_path)
    farm.await_runs(5)
    kill(head_of(farm, name))
    check_ending(farm, f"Ray's {name}")
    start(tmp_path).ends_with(0)
    assert check_jobs(farm.data, TASKS) == {"ok": TASKS}


def test_the_head_of_a_joined_cluster_that_dies_loses_nothing(tmp_path, monkeypatch):
    os.environ.update(own_session_environment())  # for good: a process cannot change its token
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_ip_address": "127.0.0.1"})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        farm = start(tmp_path, "cluster.address=auto")
        farm.await_runs(5)
        kill([psutil.Process(cluster.head_node.all_processes["gcs_server"][0].process.pid)])
        check_ending(farm, "the Ray cluster at 127.0.0.1")
    finally:
        cluster.shutdown()
