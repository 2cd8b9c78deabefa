"""Replays a trace on GPUs that jobs share: arrivals, placements, progress, out-of-memory crashes and re-runs.

Start reading at `replay`. Events are in a heap; an outdated one is dropped when its turn comes. `GpuPool` is the state
that a policy sees; `Contention` has the jobs' real slowdowns, which no policy sees.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farm.replaying.traces import ClusterTrace, JobType
from workers.devices.simulated import GpuLoad, shared_speeds, stalled_share

_NOISE = 0.10  # relative standard deviation of a group's slowdown around the model (assumed)


class Contention:
    """Speeds of the jobs of a group, each as a share of its speed alone.

    Each group has a noise drawn from the seed: two replays with the same seed see the same GPU.
    """

    def __init__(self, types: Sequence[JobType], sharing: str = "mps", seed: int = 0) -> None:
        self.seed, self.sharing = seed, sharing
        self._busy = [job.busy for job in types]
        self._smact = [job.smact for job in types]
        loads = [GpuLoad(job.busy, job.smact, job.drama) for job in types]
        self._stalled = [[stalled_share(a, b, sharing) for b in loads] for a in loads]
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}

    def speeds(self, group: tuple[int, ...]) -> tuple[float, ...]:
        """Return the speed of each job of a sorted group of types; 1 for a job alone."""
        known = self._known.get(group)
        if known is None:
            known = self._known[group] = self._solve(group) if len(group) > 1 else (1.0,) * len(group)
        return known

    def _solve(self, group: tuple[int, ...]) -> tuple[float, ...]:
        stalled = [[self._stalled[job][partner] for partner in group] for job in group]
        speeds = shared_speeds([self._busy[job] for job in group], stalled)
        return tuple(min(1.0, speed / self._noise(group, kind)) for speed, kind in zip(speeds, group, strict=True))

    def _noise(self, group: tuple[int, ...], kind: int) -> float:
        drawn = random.Random(zlib.crc32(repr((self.seed, group, kind)).encode()))
        return max(0.5, drawn.gauss(1.0, _NOISE))

    def activity(self, group: tuple[int, ...]) -> float:
        """Return the SM activity of the GPU with this group, from 0 to 1."""
        return min(1.0, sum(self._smact[job] * speed for job, speed in zip(group, self.speeds(group), strict=True)))


class GpuPool:
    """GPUs of one model.

    Policies see the arrays, with one entry a GPU: `used_mib`, its jobs' allocated memory; `activity`, its SM activity
    from 0 to 1; `ready_s`, the time when another job may join; `open`, whether it holds jobs and takes one more.
    `kinds[g]` are the job types on GPU g, ascending, `jobs[g]` the jobs in the same order; `idle` has the GPUs without
    any, ascending.
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
        self.idle = list(range(count))

    def idle_gpus(self, count: int) -> list[int] | None:
        """Return the first `count` idle GPUs, None if there are fewer. They stay idle until a job is added."""
        return self.idle[:count] if count <= len(self.idle) else None

    def add(self, gpu: int, job: int, kind: int, *, alone: bool) -> tuple[float, ...]:
        """Put a job on a GPU, closed to others if `alone`; return the speeds of its jobs, in their order."""
        kinds = self.kinds[gpu]
        if not kinds:
            self.idle.remove(gpu)
        place = bisect_left(kinds, kind)
        self.jobs[gpu].insert(place, job)
        self._closed[gpu] = alone
        return self._set_kinds(gpu, (*kinds[:place], kind, *kinds[place:]))

    def remove(self, gpu: int, job: int, used_mib: float) -> tuple[float, ...]:
        """Take a job off a GPU, with its allocated memory; return the speeds of the remaining jobs."""
        place = self.jobs[gpu].index(job)
        kinds = self.kinds[gpu]
        del self.jobs[gpu][place]
        self._closed[gpu] = False
        remaining = (*kinds[:place], *kinds[place + 1 :])
        self.used_mib[gpu] = self.used_mib[gpu] - used_mib if remaining else 0.0
        if not remaining:
            insort(self.idle, gpu)
            self.ready_s[gpu] = 0.0
        return self._set_kinds(gpu, remaining)

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

    def _set_kinds(self, gpu: int, kinds: tuple[int, ...]) -> tuple[float, ...]:
        self.kinds[gpu] = kinds
        active = self.contention.activity(kinds)
        self.total_activity += active - float(self.activity[gpu])
        self.activity[gpu] = active
        self._set_open(gpu)
        return self.contention.speeds(kinds)


_FINISH, _WARM, _READY = range(3)


class PlacementPolicy:
    """Chooses a GPU for a job of one GPU when none is idle. This one never lets a job join others.

    shares      whether it ever lets a job join others
    lookahead   waiting jobs that it looks at, from the head of the queue; 1: a waiting head holds up all
    patience_s  how long jobs behind a waiting head may start earlier, before GPUs are emptied for the head
    """

    shares = False
    lookahead = 1
    patience_s = math.inf

    def gpu_for(self, kind: int, pool: GpuPool, now_s: float, among: Sequence[int] | None = None) -> int | None:
        """Return the GPU that a job of this type joins now, only of `among` if given; None if it has to wait."""
        return None

    def may_join(self, kind: int) -> bool:
        """Return True if a job of this type can ever join others."""
        return False


@dataclass(frozen=True, kw_only=True)
class ClusterRules:
    """How the cluster works, whatever the policy.

    gpus, memory_mib   number of GPUs, and usable memory of each
    idle_w, limit_w    power of a GPU without a job, and at an SM activity of 1; linear in between
    warmup_s           from a job's start until it has allocated its memory, or crashes for lack of it
    window_s           between placements on one GPU, because the monitor needs figures of the newcomer
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
    """The outcome of a trace. Sequences have one entry a job, NaN for jobs that never finished.

    makespan_s      from the first arrival until the last job's end
    waiting_s       each job's time from its arrival until the start of its finished run
    completion_s    each job's time from its arrival until its end
    slowdown        duration of each job's finished run over its time alone
    crashes         crashes for lack of memory; failed: jobs that fit on no GPU alone, or need more GPUs than there are
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
        self.ends = [math.inf] * count  # expected end if nothing changes
        self.began = [math.nan] * count
        self.finished = [math.nan] * count
        self.places: list[list[int]] = [[] for _ in range(count)]
        self.allocated = [False] * count
        self.crashed = [False] * count
        self.crashes = self.failed = self.collocated = 0
        self.now = self.active_s = self.used_s = 0.0
        self.refused: set[int] = set()  # job types refused at the last look
        self.changed: set[int] = set()  # GPUs that changed since the last look
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
        self.used_s += passed * (self.pool.count - len(self.pool.idle))
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
        """Return the job's GPUs: idle ones if there are enough, else the one that the policy picks; or None."""
        idle = self.pool.idle_gpus(self.trace.gpus[job])
        if idle is not None or not self._may_join(job):
            return idle
        gpu = self._find_joint(self.trace.kinds[job], tried)
        return None if gpu is None else [gpu]

    def _may_join(self, job: int) -> bool:
        return self.policy.shares and not self.crashed[job] and self.trace.gpus[job] == 1

    def _find_joint(self, kind: int, tried: set[int]) -> int | None:
        """Return the shared GPU that the policy picks. For a type refused before, only changed GPUs are examined."""
        if kind in tried:
            return None
        among = sorted(self.changed) if kind in self.refused else None
        gpu = self.policy.gpu_for(kind, self.pool, self.now, among)
        if gpu is None:
            tried.add(kind)
        else:  # the other refused types have not been tried on all changed GPUs
            tried.clear()
        return gpu

    def _start_one_behind(self, tried: set[int], first: int) -> bool:
        """Start the first job behind the head that may join a GPU; return whether one started."""
        for place in range(first, min(self.policy.lookahead, len(self.queue))):
            job = self.queue[place]
            if self._may_join(job) and (gpu := self._find_joint(self.trace.kinds[job], tried)) is not None:
                del self.queue[place]
                self._start(job, [gpu])
                return True
        return False

    def _reserve(self, head: int) -> None:
        """Reserve GPUs for a head of the queue that cannot share, or has waited for long."""
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
            self._set_speeds(gpu, self.pool.add(gpu, job, self.trace.kinds[job], alone=alone))
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
        """Allocate the job's memory; if one of its GPUs has too little, it crashes and is queued for an idle one."""
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
                began - came if end == end else math.nan
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
