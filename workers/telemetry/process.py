"""The `process` sensor: CPU time and host memory of a trial's process tree, through psutil and /proc."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil

from conf.children.containment import TreeMemory, descendants_of, lists_children
from workers.telemetry.sensors import Sample, Sensor, SensorUnavailable, WatchTarget

_BYTES_PER_MIB = 1024**2
_ROUNDING_S = 0.05  # CPU times are counted in ticks of 10 ms, and sums of floats are slightly off
_MIN_CPU_INTERVAL_NS = 50_000_000  # the kernel counts CPU time in ticks of 10 ms: shorter spans say little
_SCAN_PERIOD_NS = 1_000_000_000  # between readings of the whole process table, if the kernel lists no children


class ProcessSensor(Sensor):
    """CPU cores used since the last reading, and resident memory, of the trial's process tree.

    `rss_mib` of a single process is its resident set. For several it counts pages that they share only once
    (`conf.children.containment.TreeMemory`). A tree that has ended has no readings.
    """

    name = "process"
    metrics = ("cpu_cores", "rss_mib")
    period_s = 0.1

    def __init__(self, target: WatchTarget, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._memory = TreeMemory()
        self._root = target.pid
        try:
            self._processes = {target.pid: psutil.Process(target.pid)}
        except psutil.Error as error:
            raise SensorUnavailable(f"process {target.pid} cannot be watched: {error}") from error
        self._scanned_ns = -_SCAN_PERIOD_NS
        self._cpu_ns = clock_ns()  # when the CPU times below were read
        # (pid, start time) -> CPU seconds, reaped children included
        self._cpu_s = self._read(self._cpu_ns)[0]

    def sample(self) -> list[Sample]:
        t_ns = self._clock_ns()
        cpu_s, resident = self._read(t_ns)
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

        When a parent in the tree reaps a child, the child's time moves to the parent, so the tree's sum is right. When
        nobody in the tree reaps it, its time is lost; then only the remaining processes count.
        """
        used = sum(cpu_s.values()) - sum(self._cpu_s.values())
        if used > -_ROUNDING_S:
            return max(used, 0.0)
        return sum(max(0.0, now - self._cpu_s.get(key, 0.0)) for key, now in cpu_s.items())

    def _read(self, now_ns: int) -> tuple[dict[tuple[int, float], float], dict[int, int]]:
        """Return the CPU seconds by process, zombies included, and the resident bytes by id of living processes.

        Both are empty once the root has ended.
        """
        known, self._processes = self._processes, {}
        pids = list(known)
        if lists_children() or now_ns - self._scanned_ns >= _SCAN_PERIOD_NS:
            pids, self._scanned_ns = [self._root, *descendants_of(self._root)], now_ns
        cpu_s, resident = {}, {}
        for pid in pids:
            with contextlib.suppress(psutil.Error):  # the process has ended since the tree was read
                process = self._processes[pid] = known.get(pid) or psutil.Process(pid)
                with process.oneshot():
                    times = process.cpu_times()
                    memory = process.memory_info().rss
                    key = (pid, process.create_time())
                cpu_s[key] = times.user + times.system + times.children_user + times.children_system
                if memory:
                    resident[pid] = memory
        return (cpu_s, resident) if self._root in resident else ({}, {})
