"""The `process` sensor: CPU time and host memory of a trial's process tree, through psutil and /proc.

Start reading at `ProcessSensor`; `ProcessTree` finds the processes without walking all of /proc.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from conf.children.containment import TreeMemory, descendants_of, lists_children
from workers.telemetry.base import Sample, Sensor, SensorUnavailable, WatchTarget

_BYTES_PER_MIB = 1024**2
_MIN_CPU_INTERVAL_NS = 50_000_000  # the kernel counts CPU time in ticks of 10 ms: shorter spans say little
_SCAN_PERIOD_NS = 1_000_000_000  # without /proc/*/task/*/children every look at the tree reads all processes


class ProcessTree:
    """The living processes of the tree below (and with) `root`. Raises `psutil.NoSuchProcess` for a dead root.

    Linux lists each thread's children in /proc (CONFIG_PROC_CHILDREN), which costs microseconds; psutil reads the whole
    process table, so without that list the tree is looked at once a second.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self._root = psutil.Process(root)
        self._known: dict[int, psutil.Process] = {root: self._root}
        self._listed = lists_children()
        self._scanned_ns: int | None = None

    def processes(self) -> list[psutil.Process]:
        if self._listed:
            pids = [self.root, *descendants_of(self.root)]
        elif self._scanned_ns is None or time.monotonic_ns() - self._scanned_ns >= _SCAN_PERIOD_NS:
            self._scanned_ns = time.monotonic_ns()
            pids = [self.root, *(child.pid for child in self._root.children(recursive=True))]
        else:
            pids = list(self._known)
        known = {}
        for pid in pids:
            try:
                known[pid] = self._known.get(pid) or psutil.Process(pid)
            except psutil.Error:
                continue  # vanished between the list and the look
        self._known = known
        return list(known.values())


class ProcessSensor(Sensor):
    """CPU cores used since the last reading, and resident memory, of the trial's process tree.

    `rss_mib` of one process is its resident set; of several it is what they use together, pages that they share counted
    once (`conf.children.containment.TreeMemory`). A tree that has ended has no readings.
    """

    name = "process"
    metrics = ("cpu_cores", "rss_mib")
    period_s = 0.1
    lag_s = 0.0

    def __init__(self, target: WatchTarget, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._memory = TreeMemory()
        try:
            self._tree: ProcessTree | None = ProcessTree(target.pid)
            self._cpu_ns = clock_ns()  # when the CPU times below were read
            self._cpu_s = self._read(self._tree)[0]  # (pid, start time) -> CPU seconds, reaped children included
        except psutil.Error as error:
            raise SensorUnavailable(f"process {target.pid} cannot be watched: {error}") from error

    def sample(self) -> list[Sample]:
        if self._tree is None:
            raise SensorUnavailable("the process sensor was closed")
        t_ns = self._clock_ns()
        try:
            cpu_s, resident = self._read(self._tree)
        except psutil.Error:
            return []
        if not resident:
            return []
        values = {"rss_mib": self._memory.bytes(resident, t_ns) / _BYTES_PER_MIB}
        elapsed_ns = t_ns - self._cpu_ns
        if elapsed_ns >= _MIN_CPU_INTERVAL_NS:
            values["cpu_cores"] = self._used_since(cpu_s) / (elapsed_ns / 1e9)
            self._cpu_ns, self._cpu_s = t_ns, cpu_s
        return [Sample(t_ns, values)]

    def _used_since(self, cpu_s: dict[tuple[int, float], float]) -> float:
        """Return the CPU seconds since the last reading.

        A child that ended moves its time to the parent that reaped it, so the tree's sum is what counts; a child that
        nobody of the tree reaped takes its time along, and then only the processes that are left count.
        """
        used = sum(cpu_s.values()) - sum(self._cpu_s.values())
        if used >= 0:
            return used
        return sum(max(0.0, now - self._cpu_s.get(key, 0.0)) for key, now in cpu_s.items())

    def _read(self, tree: ProcessTree) -> tuple[dict[tuple[int, float], float], dict[int, int]]:
        """Return the CPU seconds by process and the resident bytes by process id."""
        cpu_s, resident = {}, {}
        for process in tree.processes():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    memory = process.memory_info().rss
                    key = (process.pid, process.create_time())
            except psutil.Error:
                continue  # vanished since the tree was read
            if memory == 0 and process.pid == tree.root:
                return {}, {}  # ended, waiting to be reaped
            cpu_s[key] = times.user + times.system + times.children_user + times.children_system
            resident[process.pid] = memory
        return cpu_s, resident

    def close(self) -> None:
        self._tree = None
