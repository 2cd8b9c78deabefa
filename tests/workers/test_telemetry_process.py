"""The process sensor on real processes: CPU time, and memory that a fork shares."""

import subprocess
import sys

import psutil
import pytest
from recorded_nvml import Clock

from conf.children.containment import TreeMemory, resident_bytes, tree_memory_bytes
from workers.telemetry.process import ProcessSensor
from workers.telemetry.sensors import WatchTarget

BURNS_IN_A_CHILD = """
import subprocess, sys
print("up", flush=True)
sys.stdin.readline()
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"])
print("burnt", flush=True)
sys.stdin.read()
"""


def test_cpu_time_of_reaped_children_counts_once():
    with subprocess.Popen(
        [sys.executable, "-c", BURNS_IN_A_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as program:
        assert program.stdout.readline() == "up\n"
        clock = Clock()
        sensor = ProcessSensor(WatchTarget(None, program.pid), clock_ns=clock)
        program.stdin.write("go\n")
        assert program.stdout.readline() == "burnt\n"
        clock.pass_s(1)
        (sample,) = sensor.sample()
        assert 0.25 <= sample.values["cpu_cores"] < 0.9  # of one second: the child's 0.3 s and interpreters' starts
        clock.pass_s(1)
        assert sensor.sample()[0].values["cpu_cores"] < 0.1


MIB = 2**20
SIZE = 60 * MIB
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
    """A process with 60 MiB and its forked children, each with so many bytes of its own."""
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
    sensor = ProcessSensor(WatchTarget(None, tree.pid))
    for _ in range(3):
        (sample,) = sensor.sample()
        assert SIZE / MIB < sample.values["rss_mib"] < 1.5 * SIZE / MIB


@pytest.mark.parametrize("tree", [(2, SIZE)], indirect=True)
def test_what_children_have_of_their_own_counts_in_full_until_the_tree_ends(tree):
    assert tree_memory_bytes(resident_bytes(processes(tree))) > 3 * SIZE
    assert TreeMemory().beyond(processes(tree), 2.5 * SIZE) is not None
    sensor = ProcessSensor(WatchTarget(None, tree.pid))
    assert sensor.sample()[0].values["rss_mib"] > 3 * SIZE / MIB
    tree.kill()
    tree.wait()
    assert sensor.sample() == []
