"""Replays traces on GPUs that jobs share, under every policy, estimator and seed.

Start reading at `ReplaySettings` and `run_crossing`. `replay` simulates arrivals, placements, progress, out-of-memory
crashes and re-runs: events are in a heap; an outdated one is dropped when its turn comes. `GpuPool` is the state that a
policy sees; `Contention` has the jobs' real slowdowns, which no policy sees. `make_policy` makes the policies: all take
idle GPUs first and serve jobs in order of arrival. The policies of the literature, their threshold of SM activity and
their margin of free memory are those of CARMA (Yousefzadeh-Asl-Miandoab et al., arXiv:2508.19073).
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import zlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conf.cli.settings import Checked, data_key, format_key, group, key
from farm.replaying.traces import (
    ESTIMATORS,
    GENERATORS,
    ClusterTrace,
    JobType,
    estimated_mib,
    generate_trace,
    read_trace,
)
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, load_device
from learn.commands.estimate import described_device
from learn.sharing.slowdowns import NoUtilization, SlowdownEstimator, default_slowdowns, packaged_slowdowns
from workers.devices.simulated import SHARING, GpuLoad, shared_speeds, stalled_share
from workers.devices.steadiness import student_t

_NOISE = 0.10  # relative standard deviation of a group's slowdown around the model (assumed)
_FINISH, _WARM, _READY = range(3)
POLICIES = ("exclusive", "round_robin", "magm", "lug", "ours")
SMACT_LIMIT = 0.8  # a GPU at this SM activity takes no further job
MARGIN_MIB = 2048.0  # memory that must stay free beyond an estimate
LEAST_GAIN = 0.1  # least gain from another job on a GPU, in jobs at full speed
LOOKAHEAD = 32  # waiting jobs that `ours` looks at
PATIENCE_S = 1800.0  # after which GPUs are emptied for the head of the queue
_LOOKED_AT = 32  # GPUs that `ours` compares: those with the least SM activity
_CARMA_GPUS, _OTHER_GPUS = 4, 64
MOST_SEEDS = 1000
NO_ESTIMATOR = "–"


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


class _FittingPolicy(PlacementPolicy):
    """Takes GPUs with enough measured free memory for the estimate."""

    shares = True

    def __init__(self, needs_mib: Sequence[float]) -> None:
        self.needs_mib = needs_mib

    def fitting(self, kind: int, pool: GpuPool, now_s: float, among: Sequence[int] | None) -> NDArray[np.intp]:
        """Return the GPUs with enough free memory for the job, ascending."""
        room = pool.memory_mib - self.needs_mib[kind]
        if room < 0:
            return np.empty(0, dtype=int)
        if among is None:
            return np.flatnonzero(pool.open & (pool.ready_s <= now_s) & (pool.used_mib <= room))
        few = [gpu for gpu in among if pool.open[gpu] and pool.ready_s[gpu] <= now_s and pool.used_mib[gpu] <= room]
        return np.array(few, dtype=int)

    def may_join(self, kind: int) -> bool:
        return self.needs_mib[kind] < math.inf


class QuietGpuPolicy(_FittingPolicy):
    """Takes the GPU that a rule picks among the fitting ones below `SMACT_LIMIT`.

    Args:
        needs_mib: memory that each job type needs.
        rule: `round_robin`, the next GPU in turn; `magm`, the one with the most available memory; `lug`,
            the least utilized one.
    """

    def __init__(self, needs_mib: Sequence[float], rule: str) -> None:
        super().__init__(needs_mib)
        self.rule, self._last = rule, -1

    def gpu_for(self, kind: int, pool: GpuPool, now_s: float, among: Sequence[int] | None = None) -> int | None:
        fitting = self.fitting(kind, pool, now_s, among)
        quiet = fitting[pool.activity[fitting] < SMACT_LIMIT]
        if not len(quiet):
            return None
        if self.rule == "round_robin":
            place = np.searchsorted(quiet, self._last, side="right") % len(quiet)
        else:
            place = np.argmin((pool.used_mib if self.rule == "magm" else pool.activity)[quiet])
        self._last = int(quiet[place])
        return self._last


class ExpectedSpeedPolicy(_FittingPolicy):
    """Takes the GPU whose jobs, with the newcomer, are expected to gain the most speed in total.

    Durations are unknown, so the shortest expected makespan is that of the placement with the most work done a second.
    A job waits if no GPU would gain `LEAST_GAIN`, or if a job's expected slowdown would exceed `most_slowdown`.

    Args:
        needs_mib: memory that each job type needs at the accepted risk.
        types: job types; `estimated` is read, and `truth` for an oracle.
        estimator: estimates slowdowns.
    """

    def __init__(
        self,
        needs_mib: Sequence[float],
        types: Sequence[JobType],
        *,
        oracle: bool,
        estimator: SlowdownEstimator,
        most_slowdown: float,
        lookahead: int,
    ) -> None:
        super().__init__(needs_mib)
        self.profiles = [job.truth if oracle else job.estimated for job in types]
        self.estimator, self.most_slowdown = estimator, most_slowdown
        self.lookahead, self.patience_s = lookahead, PATIENCE_S
        self._speed: dict[tuple[int, ...], float] = {(): 0.0}

    def gpu_for(self, kind: int, pool: GpuPool, now_s: float, among: Sequence[int] | None = None) -> int | None:
        fitting = self.fitting(kind, pool, now_s, among)
        if len(fitting) > _LOOKED_AT:
            fitting = fitting[np.argsort(pool.activity[fitting], kind="stable")[:_LOOKED_AT]]
        best, most = None, LEAST_GAIN
        for gpu in fitting.tolist():
            kinds = pool.kinds[gpu]
            gain = self._total(tuple(sorted((*kinds, kind)))) - max(0.0, self._total(kinds))
            if gain > most:
                best, most = gpu, gain
        return best

    def _total(self, kinds: tuple[int, ...]) -> float:
        """Return the sum of a group's expected speeds; -infinity for a forbidden group."""
        total = self._speed.get(kinds)
        if total is None:
            try:
                slowdowns = self.estimator.slowdowns([self.profiles[kind] for kind in kinds])
            except NoUtilization:
                slowdowns = []
            slow = not slowdowns or max(slowdown.median for slowdown in slowdowns) > self.most_slowdown
            total = self._speed[kinds] = -math.inf if slow else sum(1.0 / slowdown.median for slowdown in slowdowns)
        return total


def make_policy(
    name: str,
    estimator: str,
    types: Sequence[JobType],
    *,
    risk: float = 0.01,
    most_slowdown: float = math.inf,
    lookahead: int = LOOKAHEAD,
    slowdowns: SlowdownEstimator | None = None,
) -> PlacementPolicy:
    """Return a policy with an estimator of memory.

    Args:
        name: one of `POLICIES`.
        estimator: one of `farm.replaying.traces.ESTIMATORS`; `exclusive` asks none.
        types: the job types of the trace.
        risk: risk of running out of memory that `ours` accepts for a placement, where the estimator has a distribution:
            `ours_bound`. With other estimators the margin must stay free.
        most_slowdown: largest slowdown that `ours` expects of any job.
        lookahead: waiting jobs that `ours` looks at.
        slowdowns: estimator of slowdowns for `ours`; by default the packaged one, learned from measured pairs.
    """
    if name == "exclusive":
        return PlacementPolicy()
    margins = [estimated_mib(job, estimator) + MARGIN_MIB for job in types]
    if name != "ours":
        return QuietGpuPolicy(margins, name)
    if estimator == "ours_bound":
        margins = [math.inf if job.need is None else job.need.mib(1.0 - risk) for job in types]
    return ExpectedSpeedPolicy(
        margins,
        types,
        oracle=estimator == "oracle",
        estimator=slowdowns or packaged_slowdowns(),
        most_slowdown=most_slowdown,
        lookahead=lookahead,
    )


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Checked):
    """Which trace to replay, and under which policies. Raises `UsageError` that names every bad key together.

      python -m farm.replay
      python -m farm.replay trace=philly n=2000 gpus=128 policy=[exclusive,magm,ours] estimator=ours_bound seeds=[0,1]
      python -m farm.replay trace=cluster_job_log.json n=20000 gpus=1000 policy=ours report=replay.html

    A trace is `carma`, `philly` or `alibaba`, drawn from published statistics, or a file: Philly's
    cluster_job_log (.json), Alibaba's pai_task_table (.csv), CARMA's submission script (.sh). Policies: `exclusive`,
    `round_robin`, `magm` (most available memory), `lug` (least utilized GPU) and `ours` (most expected speed under a
    risk limit). Estimators of memory: `none`, `oracle`, `horus`, `faketensor`, `gpumemnet`, `ours` (the point) and
    `ours_bound`. Each policy is crossed with each estimator; `exclusive` asks none. No GPU takes part: slowdowns come
    from a contention model that no policy sees. docs/admission.md describes it. With data=, the page and its JSON are
    written to DATA/replays as well.
    """

    device: DeviceSpec | None = group(
        None, "GPU model, for its memory and power; default A100-SXM4-40GB", described_device
    )
    trace: str = key("carma", "carma, philly or alibaba, or the file of a trace")
    policy: tuple[str, ...] = key(POLICIES, f"which of {', '.join(POLICIES)}", "text | list of text", POLICIES)
    estimator: tuple[str, ...] = key(
        tuple(name for name in ESTIMATORS if name != "none"),
        f"which of {', '.join(ESTIMATORS)}",
        "text | list of text",
        tuple(ESTIMATORS),
    )
    seeds: tuple[int, ...] = key(tuple(range(10)), "seeds of the trace, its job types and the noise of slowdowns")
    n: int | None = key(
        None, "jobs; default 90 for carma, 1000 for other generators, all of a file", "int 1 to 1000000"
    )
    gpus: int | None = key(None, "GPUs of the cluster; default 4 for carma, else 64", "int 1 to 100000")
    load: float = key(
        1.0, "arrival rate of generated jobs: arriving GPU time over available GPU time", "number > 0 to 1000"
    )
    sharing: str = key("mps", "how jobs share a GPU", choices=SHARING)
    risk: float = key(0.01, "risk of running out of memory that ours accepts with ours_bound", "number 0.01 to 0.5")
    max_slowdown: float | None = key(None, "expected slowdown above which ours lets no job join", "number >= 1")
    lookahead: int = key(
        LOOKAHEAD, "waiting jobs that ours looks at; 1: jobs start in the order of arrival", "int 1 to 1000"
    )
    max_jobs: int = key(4, "most jobs on one GPU", "int 1 to 16")
    window_s: float = key(
        30.0, "seconds between two placements on one GPU, in which the monitor sees the newcomer", "number 0 to 86400"
    )
    warmup_s: float = key(20.0, "seconds until a job has allocated its memory; at most window_s", "number >= 0")
    report: str | None = key(None, "write an HTML page with makespans and distributions", "new path")
    format: str = format_key()
    data: str | None = data_key()

    def problems(self) -> Iterator[str]:
        for name in ("policy", "estimator", "seeds"):
            if not getattr(self, name):
                yield f"{name} must not be empty"
        if len(self.seeds) > MOST_SEEDS or not all(0 <= seed < 2**31 for seed in self.seeds):
            yield f"seeds must be at most {MOST_SEEDS}, each from 0 to 2147483647, got {self.seeds!r}"
        if len(set(self.seeds)) != len(self.seeds):
            yield "seeds must differ"
        if self.warmup_s > self.window_s:
            yield f"warmup_s must be from 0 to window_s, got {self.warmup_s!r}"

    @property
    def spec(self) -> DeviceSpec:
        return self.device or load_device(DEFAULT_DEVICE)

    @property
    def gpu_count(self) -> int:
        return self.gpus or (_CARMA_GPUS if self.trace == GENERATORS[0] else _OTHER_GPUS)


@dataclass(frozen=True)
class Interval:
    """A mean over the seeds, and the half-width of its 95 % confidence interval; None for one seed."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        known = [value for value in values if value == value]
        if len(known) < 2:
            return cls(known[0] if known else math.nan, None)
        spread = statistics.stdev(known) / math.sqrt(len(known))
        return cls(statistics.fmean(known), student_t(len(known) - 1) * spread)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One policy with one estimator; `results`, and makespans relative to `exclusive`, by seed."""

    policy: str
    estimator: str
    results: tuple[ReplayResult, ...]
    over_exclusive: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.policy if self.estimator == NO_ESTIMATOR else f"{self.policy} · {self.estimator}"

    @property
    def crashes(self) -> int:
        """Return the crashes for lack of memory, over all seeds."""
        return sum(result.crashes for result in self.results)

    def interval(self, figure: Callable[[ReplayResult], float]) -> Interval:
        return Interval.of([figure(result) for result in self.results])


@dataclass(frozen=True, kw_only=True)
class CrossedReplays:
    """All replays of a command. `jobs`, `left_out`: of the first seed's trace."""

    settings: ReplaySettings
    trace_name: str
    jobs: int
    left_out: int
    standings: tuple[Standing, ...]


def run_crossing(
    settings: ReplaySettings, progress: Callable[[str, int, int], None] = lambda step, completed, total: None
) -> CrossedReplays:
    """Replay every combination; call `progress(step, done, total)` before each. Raises `UsageError` as the reader."""
    spec = settings.spec
    rules = ClusterRules(
        gpus=settings.gpu_count,
        memory_mib=spec.memory_mib,
        idle_w=spec.idle_power_w,
        limit_w=spec.power_limit_w,
        warmup_s=settings.warmup_s,
        window_s=settings.window_s,
        most_jobs=settings.max_jobs,
    )
    results: dict[tuple[str, str], list[ReplayResult]] = {
        (policy, NO_ESTIMATOR if policy == "exclusive" else estimator): []
        for policy in settings.policy
        for estimator in settings.estimator
    }
    baselines: list[float] = []
    first: ClusterTrace | None = None
    for place, seed in enumerate(settings.seeds):
        trace = _trace(settings, seed)
        first = first or trace
        for nth, (policy, estimator) in enumerate(results):
            total = len(results) * len(settings.seeds)
            progress(f"{policy} {estimator}, seed {seed}", place * len(results) + nth, total)
            results[policy, estimator].append(_replay(settings, rules, trace, policy, estimator, seed))
        if ("exclusive", NO_ESTIMATOR) in results:
            baselines.append(results["exclusive", NO_ESTIMATOR][-1].makespan_s)
        else:
            baselines.append(_replay(settings, rules, trace, "exclusive", NO_ESTIMATOR, seed).makespan_s)
    assert first is not None
    standings = tuple(
        Standing(
            policy=policy,
            estimator=estimator,
            results=tuple(pair_results),
            over_exclusive=tuple(
                result.makespan_s / base if base else math.nan
                for result, base in zip(pair_results, baselines, strict=True)
            ),
        )
        for (policy, estimator), pair_results in results.items()
    )
    return CrossedReplays(
        settings=settings, trace_name=first.name, jobs=len(first), left_out=first.left_out, standings=standings
    )


def _trace(settings: ReplaySettings, seed: int) -> ClusterTrace:
    if settings.trace in GENERATORS:
        return generate_trace(settings.trace, n=settings.n, gpus=settings.gpu_count, load=settings.load, seed=seed)
    return read_trace(settings.trace, settings.n, seed)


def _replay(
    settings: ReplaySettings, rules: ClusterRules, trace: ClusterTrace, policy: str, estimator: str, seed: int
) -> ReplayResult:
    placed = make_policy(
        policy,
        estimator,
        trace.types,
        risk=settings.risk,
        most_slowdown=settings.max_slowdown or math.inf,
        lookahead=settings.lookahead,
        slowdowns=None if settings.data is None else default_slowdowns(settings.data),
    )
    return replay(trace, placed, rules, Contention(trace.types, settings.sharing, seed))
