"""The GPUs of a replayed cluster: which jobs each holds, what a monitor would read of it, which are idle.

Start reading at `GpuPool`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left

import numpy as np

from farm.replaying.contention import Contention


class GpuPool:
    """GPUs of one model.

    Arrays have one entry a GPU, and are what policies may look at: `used_mib`, what its jobs have allocated;
    `activity`, its SM activity from 0 to 1; `ready_s`, the time from which on another job may join; `open`, whether it
    holds jobs and takes one more. `kinds[g]` are the job types on GPU g, ascending, `jobs[g]` the jobs in the same
    order.
    """

    def __init__(self, count: int, memory_mib: float, contention: Contention, most_jobs: int) -> None:
        self.count, self.memory_mib, self.contention, self.most_jobs = count, memory_mib, contention, most_jobs
        self.jobs: list[list[int]] = [[] for _ in range(count)]
        self.kinds: list[tuple[int, ...]] = [()] * count
        self.used_mib = np.zeros(count)
        self.activity = np.zeros(count)
        self.ready_s = np.zeros(count)
        self.open = np.zeros(count, dtype=bool)
        self.total_activity = 0.0
        self._closed = [False] * count
        self._reserved: list[int] = []
        self._idle = list(range(count))
        self._is_idle = [True] * count
        self.idle_count = count

    def idle_gpus(self, count: int) -> list[int] | None:
        """Return the first so many idle GPUs, None where there are fewer. They stay idle until a job is added."""
        if self.idle_count < count:
            return None
        taken: list[int] = []
        while len(taken) < count:
            gpu = heapq.heappop(self._idle)
            if self._is_idle[gpu] and gpu not in taken:
                taken.append(gpu)
        for gpu in taken:
            heapq.heappush(self._idle, gpu)
        return taken

    def add(self, gpu: int, job: int, kind: int, *, alone: bool) -> tuple[float, ...]:
        """Put a job on a GPU, for itself where `alone`; return the speeds of all its jobs, in their order."""
        kinds = self.kinds[gpu]
        if self._is_idle[gpu]:
            self._is_idle[gpu] = False
            self.idle_count -= 1
        place = bisect_left(kinds, kind)
        self.jobs[gpu].insert(place, job)
        self._closed[gpu] = alone
        return self._changed(gpu, (*kinds[:place], kind, *kinds[place:]))

    def remove(self, gpu: int, job: int, used_mib: float) -> tuple[float, ...]:
        """Take a job off a GPU, with what it had allocated; return the speeds of those that stay."""
        place = self.jobs[gpu].index(job)
        kinds = self.kinds[gpu]
        del self.jobs[gpu][place]
        self._closed[gpu] = False
        rest = (*kinds[:place], *kinds[place + 1 :])
        self.used_mib[gpu] = self.used_mib[gpu] - used_mib if rest else 0.0
        if not rest:
            self._is_idle[gpu] = True
            self.idle_count += 1
            heapq.heappush(self._idle, gpu)
            self.ready_s[gpu] = 0.0
        return self._changed(gpu, rest)

    def reserve(self, count: int) -> None:
        """Keep further jobs off `count` GPUs, those with the fewest jobs, until `release`."""
        fewest = heapq.nsmallest(count, range(self.count), key=lambda gpu: (len(self.kinds[gpu]), self.activity[gpu]))
        self._reserved = fewest
        for gpu in fewest:
            self.open[gpu] = False

    def release(self) -> list[int]:
        """Undo `reserve`; return the GPUs that were reserved."""
        released, self._reserved = self._reserved, []
        for gpu in released:
            self._set_open(gpu)
        return released

    def _set_open(self, gpu: int) -> None:
        free = not self._closed[gpu] and gpu not in self._reserved
        self.open[gpu] = free and 0 < len(self.kinds[gpu]) < self.most_jobs

    def _changed(self, gpu: int, kinds: tuple[int, ...]) -> tuple[float, ...]:
        self.kinds[gpu] = kinds
        active = self.contention.activity(kinds)
        self.total_activity += active - float(self.activity[gpu])
        self.activity[gpu] = active
        self._set_open(gpu)
        return self.contention.speeds(kinds)
