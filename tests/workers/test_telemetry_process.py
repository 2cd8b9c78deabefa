"""The process sensor on real processes: CPU time, children that vanish, memory that a fork shares."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from recorded_nvml import Clock

from conf.children.containment import TreeMemory, descendants_of, resident_bytes, tree_memory_bytes
from workers.telemetry.base import WatchTarget
from workers.telemetry.process import ProcessSensor

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
SPAWNS = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WAITS!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("up", flush=True)
sys.stdin.readline()
child.communicate()
print("child gone", flush=True)
sys.stdin.read()
"""
BURNS_IN_A_CHILD = """
import subprocess, sys
print("up", flush=True)
sys.stdin.readline()
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"])
print("burnt", flush=True)
sys.stdin.read()
"""


class Program:
    """A child Python process that talks in lines."""

    def __init__(self, source: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        self.expect("up")

    def expect(self, line: str) -> None:
        assert self._process.stdout.readline().strip() == line

    def tell(self) -> None:
        self._process.stdin.write("go\n")

    def __enter__(self) -> Program:
        return self

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def __exit__(self, *_exception) -> None:
        if self._process.poll() is None:
            self.end()
        self._process.stdout.close()


def watched(pid: int) -> tuple[ProcessSensor, Clock]:
    clock = Clock()
    return ProcessSensor(WatchTarget(None, pid), clock_ns=clock), clock


def test_cpu_time_of_reaped_children_counts_once():
    with Program(BURNS_IN_A_CHILD) as program:
        sensor, clock = watched(program.pid)
        program.tell()
        program.expect("burnt")
        clock.pass_s(1)
        (sample,) = sensor.sample()
        assert 0.25 <= sample.values["cpu_cores"] < 0.9  # of one second: the child's 0.3 s and interpreters' starts
        clock.pass_s(1)
        assert sensor.sample()[0].values["cpu_cores"] < 0.1


def test_memory_is_the_trees_and_survives_a_vanishing_child():
    with Program(SPAWNS) as program:
        assert len(descendants_of(program.pid)) == 1
        sensor, _ = watched(program.pid)
        with_child = sensor.sample()[0].values["rss_mib"]
        program.tell()
        program.expect("child gone")
        alone = sensor.sample()[0].values["rss_mib"]
        assert 2 < alone < with_child - 2
        assert descendants_of(program.pid) == []


def test_ended_process_gives_no_readings():
    with Program(WAITS) as program:
        sensor, clock = watched(program.pid)
        program.end()
        clock.pass_s(0.1)
        assert sensor.sample() == []


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
def test_what_children_have_of_their_own_counts_in_full(tree):
    assert tree_memory_bytes(resident_bytes(processes(tree))) > 3 * SIZE
    assert TreeMemory().beyond(processes(tree), 2.5 * SIZE) is not None
