"""The settings of `farm.replay`, its policies, and the replays: a trace under every policy, estimator and seed.

Start reading at `ReplaySettings` and `run_crossing`; `make_policy` makes the policies, which implement
`simulator.PlacementPolicy`. All policies take idle GPUs first and serve jobs in order of arrival. The policies of the
literature, their threshold of SM activity and their margin of free memory are those of CARMA (Yousefzadeh-Asl-Miandoab
et al., arXiv:2508.19073).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from conf.cli.settings import Checked, data_key, format_key, group, key
from farm.replaying.simulator import ClusterRules, Contention, GpuPool, PlacementPolicy, ReplayResult, replay
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
from workers.devices.simulated import SHARING
from workers.devices.steadiness import student_t

if TYPE_CHECKING:
    from numpy.typing import NDArray


POLICIES = ("exclusive", "round_robin", "magm", "lug", "ours")
SMACT_LIMIT = 0.8  # a GPU at this SM activity takes no further job
MARGIN_MIB = 2048.0  # memory that must stay free beyond an estimate
LEAST_GAIN = 0.1  # least gain from another job on a GPU, in jobs at full speed
LOOKAHEAD = 32  # waiting jobs that `ours` looks at
PATIENCE_S = 1800.0  # after which GPUs are emptied for the head of the queue
_LOOKED_AT = 32  # GPUs that `ours` compares: those with the least SM activity


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


_CARMA_GPUS, _OTHER_GPUS = 4, 64
MOST_SEEDS = 1000


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


NO_ESTIMATOR = "–"


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
