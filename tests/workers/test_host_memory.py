"""The memory of a tree of processes: what a fork shares with its parent is there once."""

import os
import subprocess
import sys

import psutil
import pytest

from conf.children.containment import TreeMemory, resident_bytes, shares_bytes, tree_memory_bytes
from workers.labels.run_labels import label_run
from workers.telemetry.base import Sample, WatchTarget
from workers.telemetry.process import ProcessSensor
from workers.trial.reports import Observed

MIB = 2**20
SIZE = 200 * MIB
FORKS = f"""
import os, sys
block = b"x" * {SIZE}
children = []
for _ in range(int(sys.argv[1])):
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(theirs)
        own = b"y" * int(sys.argv[2])
        os.write(1, b".")
        os.read(ours, 1)
        os._exit(0)
    children.append(theirs)
os.write(1, b".")
sys.stdin.read()
"""


@pytest.fixture
def tree(request):
    """A process with 200 MiB and its forked children, each with so many bytes of its own."""
    children, own = request.param
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, str(children), str(own)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as root:
        for _ in range(children + 1):
            assert root.stdout.read(1) == b"."
        yield psutil.Process(root.pid)


def processes(root):
    return [process.pid for process in (root, *root.children(recursive=True))]


@pytest.mark.parametrize("tree", [(4, 0)], indirect=True)
def test_what_forked_children_share_counts_once(tree):
    resident = resident_bytes(processes(tree))
    assert sum(resident.values()) > 5 * SIZE
    assert SIZE < tree_memory_bytes(resident) < 1.5 * SIZE
    assert TreeMemory().beyond(processes(tree), 2 * SIZE) is None
    assert TreeMemory().beyond(processes(tree), 0.5 * SIZE) > SIZE


@pytest.mark.parametrize("tree", [(2, SIZE)], indirect=True)
def test_what_children_have_of_their_own_counts_in_full(tree):
    assert tree_memory_bytes(resident_bytes(processes(tree))) > 3 * SIZE
    assert TreeMemory().beyond(processes(tree), 2.5 * SIZE) is not None


@pytest.mark.parametrize("tree", [(4, 0)], indirect=True)
def test_the_process_sensor_counts_shared_pages_once(tree):
    sensor = ProcessSensor(WatchTarget(None, tree.pid))
    for _ in range(3):
        (sample,) = sensor.sample()
        assert SIZE / MIB < sample.values["rss_mib"] < 1.5 * SIZE / MIB
    sensor.close()


@pytest.mark.parametrize("tree", [(0, 0)], indirect=True)
def test_of_a_single_process_the_resident_set_counts(tree):
    resident = tree.memory_info().rss
    assert tree_memory_bytes({tree.pid: resident}) == resident
    sensor = ProcessSensor(WatchTarget(None, tree.pid))
    assert sensor.sample()[0].values["rss_mib"] == pytest.approx(resident / MIB, rel=0.01)


def test_where_the_kernel_does_not_tell_the_resident_sets_count(monkeypatch):
    gone = 2**22 + 1
    assert shares_bytes(gone) is None
    assert tree_memory_bytes({gone: 5, gone + 1: 7}) == 0  # they have ended since
    monkeypatch.setattr("conf.children.containment.shares_bytes", lambda pid: None)
    resident = resident_bytes([os.getpid(), os.getppid()])
    assert tree_memory_bytes(resident) == pytest.approx(sum(resident.values()), rel=0.1)


@pytest.mark.parametrize(("reported", "sampled", "expected"), [(100.0, 250.0, 250.0), (100.0, 90.0, 100.0)])
def test_the_cpu_peak_holds_what_the_trial_started(reported, sampled, expected):
    columns, _ = label_run(course(reported, sampled))
    assert columns["peak_memory_mib"] == expected


def test_a_cpu_trial_that_reported_no_peak_has_none():
    assert label_run(course(None, 90.0))[0]["peak_memory_mib"] is None


def course(reported, sampled):
    return Observed(
        samples=[("process", Sample(5, {"rss_mib": sampled}))],
        values={"peak_memory_mib": reported},
        status="ok",
        oom_kind=None,
        backend="cpu",
        t0_ns=0,
        warmup_ns=None,
        window_ns=None,
        window_end_ns=None,
        period_s=0.1,
    )
