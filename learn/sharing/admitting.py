"""The calls `learn.admit` and `learn.slowdowns`: whether a job may join the jobs of a GPU, and at what slowdown.

Start reading at `admit`; `GpuState` is the GPU that the job would join, `profile_of` and `need_of` return a job's
profile and memory distribution, `overflow_probability` the probability that several jobs do not fit together.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.errors import UsageError, refuse, shown
from featurize.configs.trial import TrialConfig
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec
from learn.estimation.job_estimate import Estimate
from learn.estimators.protocol import LEVEL
from learn.sharing.slowdowns import (
    JobProfile,
    LearnedSlowdowns,
    NoUtilization,
    Slowdown,
    SlowdownEstimator,
    default_slowdowns,
)

if TYPE_CHECKING:
    from learn.fitting.artifacts import DataPlace


_MEDIAN = 0.5
KnownJob = JobProfile | Estimate | TrialConfig | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A GPU and the jobs on it. Raises `UsageError`.

    memory_mib   memory that all jobs together can use, contexts included
    jobs         the present jobs: profiles, estimates or trial configs
    used_mib     memory measured on the GPU now; None if it is not known. Jobs are assumed to grow up to their own
                 figures
    device       GPU model, for jobs that have to be estimated
    """

    memory_mib: float
    jobs: tuple[KnownJob, ...] = ()
    used_mib: float | None = None
    device: str | DeviceSpec = DEFAULT_DEVICE

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.memory_mib < math.inf:
            problems.append(f"memory_mib must be > 0, got {self.memory_mib!r}")
        if self.used_mib is not None and not 0 <= self.used_mib < math.inf:
            problems.append(f"used_mib must be >= 0, got {self.used_mib!r}")
        refuse(problems)


def known(job: KnownJob, device: str | DeviceSpec, data: DataPlace = None) -> JobProfile | Estimate:
    """Return a profile or an estimate unchanged, and the estimate of a trial config.

    Args:
        job: A profile, an estimate, or a trial config.
        device: GPU model of the estimate.
        data: Data folder with fitted models, for the estimate.

    Raises:
        UsageError: Another object, or a config that cannot be estimated.
    """
    if isinstance(job, JobProfile | Estimate):
        return job
    if not isinstance(job, TrialConfig | Mapping):
        raise UsageError(f"a job is a JobProfile, an Estimate or a trial config, got {shown(type(job).__name__)}")
    from learn.estimation.estimating import estimate

    return estimate(job, device=device, data=data)


def profile_of(job: JobProfile | Estimate, name: str) -> JobProfile:
    """Return the figures of a job that runs alone; those of an estimate get the name `name`."""
    if isinstance(job, JobProfile):
        return job
    return JobProfile(
        name,
        memory_mib=job.peak_memory_mib,
        memory_bound_mib=job.upper_mib,
        step_ms=job.step_time_ms,
        smact=job.smact,
        smocc=job.smocc,
        drama=job.drama,
    )


def need_of(job: JobProfile | Estimate, name: str) -> MemoryNeed:
    """Return the distribution of a job's memory. For an estimate, it is the estimate's, from the median on. Else it has
    the point, if known, as the median, and the bound at the bound's coverage. Raises `UsageError` without a bound."""
    coverage = LEVEL
    if isinstance(job, Estimate):
        upper = tuple((p, mib) for p, mib in job.distribution if _MEDIAN <= p <= job.coverage)
        if upper and upper[-1][0] > _MEDIAN:
            return MemoryNeed(upper)
        coverage = job.coverage
    profile = profile_of(job, name)
    point, bound = profile.memory_mib, profile.memory_bound_mib
    if bound is None:
        raise UsageError(
            f"{shown(profile.name)}: memory_bound_mib is missing, and without it there is no risk to judge; give what "
            "99 of 100 such jobs stay below, or the peak of a job that was measured"
        )
    if point is None:
        return MemoryNeed(((coverage, bound),))
    if bound < point:
        raise UsageError(f"{shown(profile.name)}: memory_bound_mib {bound:,.0f} lies below memory_mib {point:,.0f}")
    return MemoryNeed(((_MEDIAN, point), (coverage, bound)))


_CELLS = 2048  # cells that divide the free memory to add up distributions


@dataclass(frozen=True)
class MemoryNeed:
    """Quantiles of one job's peak memory: (probability, MiB), both ascending.

    Below the lowest quantile, the job is assumed to need that much, and it never needs more than the highest. The
    probability beyond the highest quantile is the bound's own risk; see `coverage`.
    """

    quantiles: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        for (p, mib), (later_p, later_mib) in zip(self.quantiles, self.quantiles[1:], strict=False):
            if later_p <= p or later_mib < mib:
                raise UsageError(f"quantiles of memory must ascend, got {self.quantiles}")
        for p, mib in self.quantiles:
            if not 0 < p <= 1 or not 0 <= mib < math.inf:
                raise UsageError(f"a quantile is a probability up to 1 and MiB from 0, got {p!r}, {mib!r}")
        if not self.quantiles:
            raise UsageError("memory needs at least one quantile")

    @property
    def coverage(self) -> float:
        """The probability of the highest quantile."""
        return self.quantiles[-1][0]

    @property
    def bound_mib(self) -> float:
        return self.quantiles[-1][1]

    def mib(self, probability: float) -> float:
        """Return the MiB that the job stays below with that probability; above its coverage, the bound."""
        probabilities, sizes_mib = zip(*self.quantiles, strict=True)
        return float(np.interp(probability, probabilities, sizes_mib))

    def exceeds(self, mib: float | np.ndarray) -> np.ndarray:
        """Return the probability that the job needs more than `mib` MiB, elementwise; 0 from the bound on."""
        probabilities, sizes_mib = zip(*self.quantiles, strict=True)
        below = np.interp(mib, sizes_mib, probabilities, left=0.0)
        return np.where(np.asarray(mib) >= self.bound_mib, 0.0, 1.0 - below)


def overflow_probability(
    need: MemoryNeed, memory_mib: float, *, present: Sequence[MemoryNeed] = (), used_mib: float = 0.0
) -> float:
    """Return the probability that jobs need more than the memory, if their errors are independent.

    It is 0 where all bounds fit together, and 1 where the lowest quantiles do not.

    Args:
        need: Need of the new job.
        memory_mib: Memory that all jobs together can use.
        present: Needs of the present jobs.
        used_mib: Memory measured now; the present jobs take at least that much.
    """
    bounds_mib = sum(other.bound_mib for other in present)
    if max(used_mib, bounds_mib) + need.bound_mib <= memory_mib:
        return 0.0
    least_mib = sum(other.quantiles[0][1] for other in present)
    if max(used_mib, least_mib) + need.quantiles[0][1] > memory_mib:
        return 1.0
    if bounds_mib <= used_mib:
        return float(need.exceeds(memory_mib - used_mib))
    cell = memory_mib / _CELLS
    total = np.ones(1)
    for other in present:
        total = _add(total, other, cell)
    used = math.ceil(used_mib / cell)
    total = np.concatenate([np.zeros(used), [total[: used + 1].sum()], total[used + 1 :]])
    total = _add(total, need, cell)
    return float(min(1.0, max(0.0, 1.0 - total.sum())))


def _add(total: np.ndarray, need: MemoryNeed, cell: float) -> np.ndarray:
    """Return the distribution of a sum, in cells of the memory; each job is rounded up, which is the safe side."""
    below = 1.0 - need.exceeds(cell * np.arange(_CELLS + 1))
    return np.convolve(total, np.diff(below, prepend=0.0))[: _CELLS + 1]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The answer of `admit`.

    admitted    whether the job may join
    why         one or two sentences with the figures that decided
    slowdowns   (name, expected slowdown) of each job, the new one first; None where a utilization is not known
    risk        probability that memory runs out; 0 where the bounds fit together
    coverage    share of jobs that stay below their bound, the least of all jobs
    bound_mib   sum of all bounds; for the present jobs at least the measured memory
    memory_mib  memory of the GPU
    """

    admitted: bool
    why: str
    slowdowns: tuple[tuple[str, Slowdown | None], ...]
    risk: float
    coverage: float
    bound_mib: float
    memory_mib: float

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        slowdowns = [
            {"name": name, "median": slowdown and slowdown.median, "p90": slowdown and slowdown.p90}
            for name, slowdown in self.slowdowns
        ]
        return {**dataclasses.asdict(self), "slowdowns": slowdowns}


def admit(
    job: KnownJob,
    gpu_state: GpuState,
    *,
    risk: float = 0.01,
    max_slowdown: float | None = 2.0,
    estimator: SlowdownEstimator | None = None,
    data: str | os.PathLike[str] | None = None,
) -> Admission:
    """Decide whether a job may join the jobs of a GPU; return the decision, slowdowns, risk of out-of-memory, and
    reason.

    Args:
        job: A `JobProfile`, an `Estimate`, or a trial config, which is estimated for the GPU's model.
        gpu_state: The GPU and its jobs.
        risk: Probability of running out of memory up to which the job is admitted, from 0 to below 1.
        max_slowdown: Median slowdown of each job up to which the new one is admitted; None: slowdowns do not decide.
        data: Data folder with fitted models and slowdowns; None: the default folder.
        estimator: Estimator of slowdowns; None: the newest one fitted to groups of the data folder, else the packaged
            one.

    Raises:
        UsageError: A limit is out of range, or a job's memory has no bound.

    Example:
        >>> from learn.sharing.slowdowns import JobProfile
        >>> busy = JobProfile("busy", memory_mib=12_000, memory_bound_mib=13_000, smact=0.7)
        >>> new = JobProfile("new", memory_mib=9_000, memory_bound_mib=10_000, smact=0.4)
        >>> admit(new, GpuState(memory_mib=40_326, jobs=(busy,))).admitted
        True
    """
    if not 0 <= risk < 1:
        raise UsageError(f"risk must be from 0 to below 1, got {risk!r}")
    if max_slowdown is not None and not max_slowdown >= 1:
        raise UsageError(f"max_slowdown must be at least 1, got {max_slowdown!r}")
    names = ["new job", *(f"job {place}" for place, _ in enumerate(gpu_state.jobs, 1))]
    jobs = [known(each_job, gpu_state.device, data) for each_job in (job, *gpu_state.jobs)]
    need, *needs = map(need_of, jobs, names)
    used_mib, coverage = gpu_state.used_mib or 0.0, min(each_need.coverage for each_need in (need, *needs))
    overflow = overflow_probability(need, gpu_state.memory_mib, present=needs, used_mib=used_mib)
    bound_mib = max(used_mib, sum(each_need.bound_mib for each_need in needs)) + need.bound_mib
    slowdowns, unknown = _slowdowns(list(map(profile_of, jobs, names)), estimator or default_slowdowns(data))
    figures, level = f"{bound_mib:,.0f} of {gpu_state.memory_mib:,.0f} MiB", f"{100 * coverage:g} % level"
    fits = overflow <= risk
    reasons = [f"Memory fits at the {level}: {figures} by the bounds."]
    if overflow:
        reasons = [
            f"The risk of running out of memory is {_percent(overflow)}, {'within' if fits else 'above'} the limit of "
            f"{_percent(risk)}: {figures} are needed at the {level}."
        ]
    quick = True
    if needs and max_slowdown is not None:
        quick = (
            unknown is None
            and max(slowdown.median for _, slowdown in slowdowns if slowdown is not None) <= max_slowdown
        )
        reasons.append(_slowdown_reason(slowdowns, unknown, max_slowdown))
    return Admission(
        admitted=fits and quick,
        why=" ".join(reasons),
        slowdowns=slowdowns,
        risk=overflow,
        coverage=coverage,
        bound_mib=bound_mib,
        memory_mib=gpu_state.memory_mib,
    )


def _slowdowns(
    group: Sequence[JobProfile], estimator: SlowdownEstimator
) -> tuple[tuple[tuple[str, Slowdown | None], ...], str | None]:
    """Return each job's expected slowdown, and why one is missing."""
    try:
        if len(group) > 1 and isinstance(estimator, LearnedSlowdowns) and (unknown := estimator.unknown(group)):
            raise NoUtilization(f"{', '.join(unknown)}: neither GPU utilization nor SMACT is known")
        expected = estimator.slowdowns(group)
    except NoUtilization as error:
        return tuple((job.name, None) for job in group), str(error)
    return tuple((job.name, slowdown) for job, slowdown in zip(group, expected, strict=True)), None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _slowdown_reason(slowdowns: Sequence[tuple[str, Slowdown | None]], unknown: str | None, limit: float) -> str:
    if unknown is not None:
        return f"Slowdowns cannot be expected: {unknown}."
    name, worst = max(
        ((name, slowdown) for name, slowdown in slowdowns if slowdown is not None), key=lambda pair: pair[1].median
    )
    comparison = "within" if worst.median <= limit else "above"
    return (
        f"The largest expected slowdown is {worst.median:.2f} ({name}; 90 % of such jobs stay below {worst.p90:.2f}), "
        f"{comparison} the limit of {limit:g}."
    )


MOST_JOBS = 4


def slowdowns(
    jobs: Sequence[KnownJob],
    device: str | DeviceSpec = DEFAULT_DEVICE,
    *,
    data: DataPlace = None,
    estimator: SlowdownEstimator | None = None,
) -> list[Slowdown]:
    """Return the expected slowdown of each of several jobs that share a GPU, in the order of the jobs.

    Args:
        jobs: One to four: profiles of the jobs alone, estimates of `learn.estimate`, or trial configs (a dataclass, or
            the mapping that `runs.config` holds), which are estimated for `device`.
        device: GPU model, for trial configs.
        data: Data folder with fitted slowdowns, whose newest version is used; None: the default folder. Without one,
            the packaged figures are used.
        estimator: Another estimator, such as `learn.sharing.slowdowns.shared_time()`.

    Returns:
        The median and the 90th percentile of each job's step time over its step time alone; 1 or more.

    Raises:
        UsageError: There are no jobs or more than four.

    Known limitations: the packaged figures come from pairs on one GPU model under time slicing. Groups of three and
    four use the same sums; none was measured.

    Example:
        >>> slowdowns([JobProfile("a", gpu_util=0.9), JobProfile("b", gpu_util=0.1)])[1].median < 1.2
        True
    """
    if not 1 <= len(jobs) <= MOST_JOBS:
        raise UsageError(f"jobs must be 1 to {MOST_JOBS}, got {len(jobs)}")
    group = [profile_of(known(job, device), f"job {place}") for place, job in enumerate(jobs, 1)]
    return (estimator or default_slowdowns(data)).slowdowns(group)
