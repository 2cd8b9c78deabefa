"""Replays a trace under every policy, estimator and seed, and sums up. Start reading at `run_crossing`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farm.replaying.contention import Contention
from farm.replaying.generators import GENERATORS, generate_trace
from farm.replaying.policies import make_policy
from farm.replaying.settings import ReplaySettings
from farm.replaying.simulator import ClusterRules, ReplayResult, replay
from farm.replaying.traces import ClusterTrace, read_trace
from learn.sharing.learned import default_slowdowns
from workers.devices.steadiness import student_t

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
    """One policy with one estimator; `results`, and makespans over those of `exclusive`, are by seed."""

    policy: str
    estimator: str
    results: tuple[ReplayResult, ...]
    over_exclusive: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.policy if self.estimator == NO_ESTIMATOR else f"{self.policy} · {self.estimator}"

    @property
    def crashes(self) -> int:
        """Crashes for want of memory, of all seeds."""
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
    settings: ReplaySettings, progress: Callable[[str, int, int], None] = lambda step, done, of: None
) -> CrossedReplays:
    """Replay everything. `progress(step, done, of)` is called before each replay. Raises `UsageError` as the reader."""
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
    combinations = _combinations(settings)
    results: dict[tuple[str, str], list[ReplayResult]] = {pair: [] for pair in combinations}
    baselines: list[float] = []
    first: ClusterTrace | None = None
    for place, seed in enumerate(settings.seeds):
        trace = _trace(settings, seed)
        first = first or trace
        for nth, (policy, estimator) in enumerate(combinations):
            total = len(combinations) * len(settings.seeds)
            progress(f"{policy} {estimator}, seed {seed}", place * len(combinations) + nth, total)
            results[policy, estimator].append(_replayed(settings, rules, trace, policy, estimator, seed))
        if ("exclusive", NO_ESTIMATOR) in results:
            baselines.append(results["exclusive", NO_ESTIMATOR][-1].makespan_s)
        else:
            baselines.append(_replayed(settings, rules, trace, "exclusive", NO_ESTIMATOR, seed).makespan_s)
    assert first is not None
    standings = tuple(
        Standing(
            policy=policy,
            estimator=estimator,
            results=tuple(of_pair),
            over_exclusive=tuple(
                one.makespan_s / base if base else math.nan for one, base in zip(of_pair, baselines, strict=True)
            ),
        )
        for (policy, estimator), of_pair in results.items()
    )
    return CrossedReplays(
        settings=settings, trace_name=first.name, jobs=len(first), left_out=first.left_out, standings=standings
    )


def _combinations(settings: ReplaySettings) -> list[tuple[str, str]]:
    pairs = [
        (policy, NO_ESTIMATOR if policy == "exclusive" else estimator)
        for policy in settings.policies
        for estimator in settings.estimators
    ]
    return list(dict.fromkeys(pairs))


def _trace(settings: ReplaySettings, seed: int) -> ClusterTrace:
    if settings.trace in GENERATORS:
        return generate_trace(settings.trace, n=settings.n, gpus=settings.gpu_count, load=settings.load, seed=seed)
    return read_trace(settings.trace, settings.n, seed)


def _replayed(
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
