"""The process sensor on real processes: CPU time, memory, children that vanish."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from recorded_nvml import Clock

from conf.children import containment
from conf.children.containment import descendants_of
from workers.telemetry import process
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
LEAVES_A_ZOMBIE = """
import os, sys, time
if not os.fork():
    while time.process_time() < 0.3: pass
    os._exit(0)
os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
print("up", flush=True)
sys.stdin.readline()
os.wait()
print("reaped", flush=True)
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


def test_cpu_time_of_a_child_that_waits_to_be_reaped_is_not_counted_anew_when_it_is():
    with Program(LEAVES_A_ZOMBIE) as program:
        sensor, clock = watched(program.pid)
        for _ in range(2):
            clock.pass_s(1)
            assert sensor.sample()[0].values["cpu_cores"] < 0.1
        program.tell()
        program.expect("reaped")
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


@pytest.mark.skipif(not containment.lists_children(), reason="this kernel does not list a thread's children")
def test_tree_is_the_same_without_the_kernels_list_of_children(monkeypatch):
    with Program(SPAWNS) as program:
        listed = descendants_of(program.pid)
        monkeypatch.setattr(containment, "lists_children", lambda: False)
        assert descendants_of(program.pid) == listed == containment.children_of(program.pid)


def test_without_the_kernels_list_the_process_table_is_read_once_a_second(monkeypatch):
    looks = []
    monkeypatch.setattr(process, "lists_children", lambda: False)
    monkeypatch.setattr(process, "descendants_of", lambda pid: looks.append(pid) or [])
    with Program(WAITS) as program:
        sensor, clock = watched(program.pid)
        for _ in range(9):
            clock.pass_s(0.1)
            assert sensor.sample()
        assert len(looks) == 1
        clock.pass_s(0.2)
        assert sensor.sample() and len(looks) == 2


def test_calls_too_close_for_the_kernels_ticks_give_memory_only():
    with Program(WAITS) as program:
        sensor, clock = watched(program.pid)
        assert "cpu_cores" not in sensor.sample()[0].values
        clock.pass_s(0.1)
        assert "cpu_cores" in sensor.sample()[0].values


def test_ended_process_gives_no_readings():
    with Program(WAITS) as program:
        sensor, clock = watched(program.pid)
        program.end()
        clock.pass_s(0.1)
        assert sensor.sample() == []


def test_process_that_waits_to_be_reaped_gives_no_readings():
    pid = os.fork()
    if pid == 0:
        os.read(0, 0)
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        sensor, _ = watched(pid)
        assert sensor.sample() == []
    finally:
        os.waitpid(pid, 0)
