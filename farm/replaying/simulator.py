"""Replays a trace on GPUs that jobs share: arrivals, placements, progress, out-of-memory crashes and re-runs.

Start reading at `replay`. Events lie in a heap; one whose time no longer holds is dropped when its turn comes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from farm.replaying.contention import Contention
from farm.replaying.gpu_pool import GpuPool
from farm.replaying.policies import PlacementPolicy
from farm.replaying.traces import ClusterTrace

_FINISH, _WARM, _READY = range(3)


@dataclass(frozen=True, kw_only=True)
class ClusterRules:
    """How the cluster works, whatever the policy.

    gpus, memory_mib   GPUs, and what a job can use of each
    idle_w, limit_w    power of a GPU without a job, and at an SM activity of 1; between the two it rises evenly
    warmup_s           from a job's start until it has allocated its memory, or crashes for want of it
    window_s           from a placement on a GPU until the next one there, as the monitor needs figures of the newcomer
    most_jobs          on one GPU
    """

    gpus: int
    memory_mib: float
    idle_w: float
    limit_w: float
    warmup_s: float = 20.0
    window_s: float = 30.0
    most_jobs: int = 4


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The outcome of a trace. Sequences have one entry a job, NaN for jobs that never ran to their end.

    makespan_s      from the first arrival until the last job's end
    waiting_s       of each job, from its arrival until the start of the run that it finished
    completion_s    of each job, from its arrival until its end
    slowdown        of each job: time of that run over its time alone
    crashes         for want of memory; failed: jobs that fit on no GPU of their own, or need more GPUs than there are
    smact           mean SM activity of all GPUs over the makespan; used: mean share of GPUs with a job
    """

    makespan_s: float
    waiting_s: Sequence[float]
    completion_s: Sequence[float]
    slowdown: Sequence[float]
    crashes: int
    failed: int
    smact: float
    used: float
    energy_j: float
    collocated: int


def replay(trace: ClusterTrace, policy: PlacementPolicy, rules: ClusterRules, contention: Contention) -> ReplayResult:
    """Run the trace to its end. The same arguments give the same result."""
    return _Simulation(trace, policy, rules, contention).run()


class _Simulation:
    def __init__(
        self, trace: ClusterTrace, policy: PlacementPolicy, rules: ClusterRules, contention: Contention
    ) -> None:
        count = len(trace)
        self.trace, self.policy, self.rules = trace, policy, rules
        self.pool = GpuPool(rules.gpus, rules.memory_mib, contention, rules.most_jobs if policy.shares else 1)
        self.memory = [job.memory_mib for job in trace.types]
        self.queue: deque[int] = deque()
        self.recovery: deque[int] = deque()
        self.events: list[tuple[float, int, int]] = []
        self.left = list(trace.durations_s)  # seconds of work, alone
        self.speed = [0.0] * count
        self.updated = [0.0] * count
        self.ends = [math.inf] * count  # when it ends if nothing changes
        self.began = [math.nan] * count
        self.finished = [math.nan] * count
        self.places: list[list[int]] = [[] for _ in range(count)]
        self.allocated = [False] * count
        self.crashed = [False] * count
        self.crashes = self.failed = self.collocated = 0
        self.now = self.active_s = self.used_s = 0.0
        self.refused: set[int] = set()  # types that no GPU took
        self.changed: set[int] = set()  # GPUs that changed since
        self.reserved_for = -1

    def run(self) -> ReplayResult:
        arrivals, place, count = self.trace.arrivals_s, 0, len(self.trace)
        while place < count or self.events:
            now = arrivals[place] if place < count else math.inf
            now = min(now, self.events[0][0]) if self.events else now
            self._pass_time(now)
            while self.events and self.events[0][0] <= now:
                self._happen(*heapq.heappop(self.events))
            while place < count and arrivals[place] <= now:
                self._arrive(place)
                place += 1
            self._dispatch()
        return self._result()

    def _pass_time(self, now: float) -> None:
        passed = now - self.now
        self.active_s += passed * self.pool.total_activity
        self.used_s += passed * (self.pool.count - self.pool.idle_count)
        self.now = now

    def _arrive(self, job: int) -> None:
        if self.trace.gpus[job] > self.pool.count:
            self.failed += 1
        else:
            self.queue.append(job)

    def _happen(self, time: float, kind: int, subject: int) -> None:
        if kind == _FINISH and self.ends[subject] == time:
            self.finished[subject] = time
            self._leave(subject)
        elif kind == _WARM and self.places[subject] and self.began[subject] + self.rules.warmup_s == time:
            self._allocate(subject)
        elif kind == _READY:
            self.changed.add(subject)

    def _dispatch(self) -> None:
        tried: set[int] = set()
        while self.recovery or self.queue:
            waiting = self.recovery or self.queue
            head = waiting[0]
            gpus = self._gpus_for(head, tried)
            if gpus is not None:
                waiting.popleft()
                self._release(head)
                self._start(head, gpus)
                continue
            if self.policy.lookahead < 2:
                break
            self._reserve(head)
            if not self._start_one_behind(tried, 0 if waiting is self.recovery else 1):
                break
        self.refused, self.changed = tried, set()

    def _gpus_for(self, job: int, tried: set[int]) -> list[int] | None:
        """Return where the job goes: to idle GPUs if there are enough, else where the policy lets it in."""
        idle = self.pool.idle_gpus(self.trace.gpus[job])
        if idle is not None or not self._may_join(job):
            return idle
        gpu = self._joined(self.trace.kinds[job], tried)
        return None if gpu is None else [gpu]

    def _may_join(self, job: int) -> bool:
        return self.policy.shares and not self.crashed[job] and self.trace.gpus[job] == 1

    def _joined(self, kind: int, tried: set[int]) -> int | None:
        """Return the GPU with jobs that the policy picks. Where it refused this type, only GPUs that changed count."""
        if kind in tried:
            return None
        among = sorted(self.changed) if kind in self.refused else None
        gpu = self.policy.gpu_for(kind, self.pool, self.now, among)
        if gpu is None:
            tried.add(kind)
        else:  # of the types that were refused before, this one alone has been asked about all that changed
            tried.clear()
        return gpu

    def _start_one_behind(self, tried: set[int], first: int) -> bool:
        """Start the first job behind the head that may join a GPU; return whether there is one."""
        for place in range(first, min(self.policy.lookahead, len(self.queue))):
            job = self.queue[place]
            if self._may_join(job) and (gpu := self._joined(self.trace.kinds[job], tried)) is not None:
                del self.queue[place]
                self._start(job, [gpu])
                return True
        return False

    def _reserve(self, head: int) -> None:
        """Empty GPUs for a head of the queue that has to have its own, or has waited for long."""
        if self.reserved_for == head:
            return
        patient = self.now - self.trace.arrivals_s[head] < self.policy.patience_s
        if self._may_join(head) and self.policy.may_join(self.trace.kinds[head]) and patient:
            return
        self._release(self.reserved_for)
        self.reserved_for = head
        self.pool.reserve(self.trace.gpus[head])

    def _release(self, head: int) -> None:
        if self.reserved_for == head:
            self.reserved_for = -1
            self.changed.update(self.pool.release())

    def _start(self, job: int, gpus: list[int]) -> None:
        self.places[job], self.began[job], self.allocated[job] = gpus, self.now, False
        self.left[job], self.updated[job] = self.trace.durations_s[job], self.now
        alone = self.crashed[job] or len(gpus) > 1
        for gpu in gpus:
            self.collocated += bool(self.pool.jobs[gpu])
            speeds = self.pool.add(gpu, job, self.trace.kinds[job], alone=alone)
            self._set_speeds(gpu, speeds)
            if self.policy.shares and not alone:
                self.pool.ready_s[gpu] = self.now + self.rules.window_s
                heapq.heappush(self.events, (self.now + self.rules.window_s, _READY, gpu))
        if self.policy.shares or self.memory[self.trace.kinds[job]] > self.rules.memory_mib:
            heapq.heappush(self.events, (self.now + self.rules.warmup_s, _WARM, job))

    def _set_speeds(self, gpu: int, speeds: tuple[float, ...]) -> None:
        now = self.now
        self.changed.add(gpu)
        for job, speed in zip(self.pool.jobs[gpu], speeds, strict=True):
            if self.ends[job] < math.inf and speed == self.speed[job]:
                continue
            self.left[job] -= (now - self.updated[job]) * self.speed[job]
            self.updated[job], self.speed[job] = now, speed
            self.ends[job] = now + self.left[job] / speed
            heapq.heappush(self.events, (self.ends[job], _FINISH, job))

    def _allocate(self, job: int) -> None:
        """Give the job its memory; where a GPU of its has too little left, it crashes and is queued for an idle one."""
        need = self.memory[self.trace.kinds[job]]
        if all(self.pool.used_mib[gpu] + need <= self.rules.memory_mib for gpu in self.places[job]):
            for gpu in self.places[job]:
                self.pool.used_mib[gpu] += need
                self.changed.add(gpu)
            self.allocated[job] = True
            return
        alone = all(len(self.pool.jobs[gpu]) == 1 for gpu in self.places[job])
        self.crashes += 1
        self._leave(job)
        if alone and need > self.rules.memory_mib:
            self.failed += 1
        else:
            self.crashed[job] = True
            self.recovery.append(job)

    def _leave(self, job: int) -> None:
        used = self.memory[self.trace.kinds[job]] if self.allocated[job] else 0.0
        gpus, self.places[job] = self.places[job], []
        self.ends[job], self.speed[job] = math.inf, 0.0
        for gpu in gpus:
            self._set_speeds(gpu, self.pool.remove(gpu, job, used))

    def _result(self) -> ReplayResult:
        trace, ends = self.trace, [end for end in self.finished if end == end]
        makespan = max(ends, default=0.0)
        over = makespan * self.rules.gpus
        return ReplayResult(
            makespan_s=makespan,
            waiting_s=[
                _or_nan(end, began - came)
                for end, began, came in zip(self.finished, self.began, trace.arrivals_s, strict=True)
            ],
            completion_s=[end - came for end, came in zip(self.finished, trace.arrivals_s, strict=True)],
            slowdown=[
                (end - began) / alone
                for end, began, alone in zip(self.finished, self.began, trace.durations_s, strict=True)
            ],
            crashes=self.crashes,
            failed=self.failed,
            collocated=self.collocated,
            smact=self.active_s / over if over else 0.0,
            used=self.used_s / over if over else 0.0,
            energy_j=self.rules.idle_w * over + (self.rules.limit_w - self.rules.idle_w) * self.active_s,
        )


def _or_nan(end: float, value: float) -> float:
    return value if end == end else math.nan
