"""Who may join whom: the policies of a replay. All of them take idle GPUs first and serve jobs in order of arrival.

Start reading at `make_policy`; `simulator.PlacementPolicy` is what a policy keeps.

The policies of the literature, their threshold of SM activity and their margin of free memory are those of CARMA
(Yousefzadeh-Asl-Miandoab et al., arXiv:2508.19073).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from farm.replaying.simulator import GpuPool, PlacementPolicy
from farm.replaying.traces import JobType, estimated_mib
from learn.sharing.learned import packaged_slowdowns
from learn.sharing.profile import NoUtilization, SlowdownEstimator

if TYPE_CHECKING:
    from numpy.typing import NDArray

POLICIES = ("exclusive", "round_robin", "magm", "lug", "ours")
SMACT_LIMIT = 0.8  # a GPU at this SM activity takes no further job
MARGIN_MIB = 2048.0  # that must stay free beyond an estimate
LEAST_GAIN = 0.1  # in jobs at full speed, that another job must add to a GPU
LOOKAHEAD = 32  # waiting jobs that `ours` looks at
PATIENCE_S = 1800.0  # after which GPUs run empty for the head of the queue
_LOOKED_AT = 32  # GPUs that `ours` compares: those whose jobs have the least estimated SM activity


class ExclusivePolicy:
    """A GPU for each job."""

    name, shares, lookahead, patience_s = "exclusive", False, 1, math.inf

    def gpu_for(self, kind: int, pool: GpuPool, now_s: float, among: Sequence[int] | None = None) -> int | None:
        return None

    def may_join(self, kind: int) -> bool:
        return False


class _FittingPolicy:
    """Takes GPUs with enough measured free memory for the estimate."""

    name = ""
    shares, lookahead, patience_s = True, 1, math.inf

    def __init__(self, needs_mib: Sequence[float]) -> None:
        self.needs_mib = needs_mib

    def fitting(self, kind: int, pool: GpuPool, now_s: float, among: Sequence[int] | None) -> NDArray[np.intp]:
        """Return the GPUs that may take the job by their memory, ascending."""
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
    """Of the fitting GPUs below `SMACT_LIMIT`, the one that a rule picks.

    Args:
        needs_mib: what each job type needs.
        name: of the rule: `round_robin`, the next GPU in turn; `magm`, the one with the most available memory; `lug`,
            the least utilized one.
    """

    def __init__(self, needs_mib: Sequence[float], name: str) -> None:
        super().__init__(needs_mib)
        self.name, self._last = name, -1

    def gpu_for(self, kind: int, pool: GpuPool, now_s: float, among: Sequence[int] | None = None) -> int | None:
        fitting = self.fitting(kind, pool, now_s, among)
        quiet = fitting[pool.activity[fitting] < SMACT_LIMIT]
        if not len(quiet):
            return None
        if self.name == "round_robin":
            place = np.searchsorted(quiet, self._last, side="right") % len(quiet)
        else:
            place = np.argmin((pool.used_mib if self.name == "magm" else pool.activity)[quiet])
        self._last = int(quiet[place])
        return self._last


class ExpectedSpeedPolicy(_FittingPolicy):
    """The GPU whose jobs, with the newcomer, are expected to gain the most speed together.

    How long jobs run is not known, so the makespan that is expected to be the shortest is that of the placement with
    the most work done a second. A job waits where no GPU would gain `LEAST_GAIN`, or where a job is expected to become
    slower than `most_slowdown`.

    Args:
        needs_mib: what each job type needs at the accepted risk.
        types: job types; `estimated` is read, and `truth` for an oracle.
        estimator: estimates slowdowns.
    """

    name = "ours"

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
            gain = self._gain(pool.kinds[gpu], kind)
            if gain > most:
                best, most = gpu, gain
        return best

    def _gain(self, kinds: tuple[int, ...], kind: int) -> float:
        return self._total(tuple(sorted((*kinds, kind)))) - max(0.0, self._total(kinds))

    def _total(self, kinds: tuple[int, ...]) -> float:
        """Return the expected speeds of a group, summed up; -infinity for a group that must not be."""
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
        lookahead: how many waiting jobs `ours` looks at.
        slowdowns: estimator of slowdowns that `ours` asks; by default the packaged one, learned from measured pairs.
    """
    if name == "exclusive":
        return ExclusivePolicy()
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
