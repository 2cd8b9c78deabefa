"""Figures of a job alone, measured or estimated; the memory that several take together, and their slowdowns.

Slowdowns and admissions are computed from `JobProfile`. A slowdown is the time of a step beside partners over the
time of a step alone: 1 or more. Its inverse is the normalised speed (Hu et al., Lucid, ASPLOS 2023).
`SlowdownEstimator` returns one; `PointSlowdowns` are formulas to hold learned ones against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from conf.errors import UsageError


@dataclass(frozen=True, slots=True)
class JobProfile:
    """Figures of one job that has a GPU to itself; None where a figure is not known. Shares lie between 0 and 1."""

    name: str
    memory_mib: float | None = None  # peak that a driver counts: reserved memory and the context
    memory_bound_mib: float | None = None  # an estimate does not expect more
    step_ms: float | None = None
    gpu_util: float | None = None  # nvidia-smi's share of time with a kernel on the GPU
    memory_util: float | None = None  # nvidia-smi's share of time with the memory being read or written
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    tensor: float | None = None  # share of cycles in which a tensor pipe is active
    launches_per_s: float | None = None
    power_w: float | None = None


def utilization(job: JobProfile) -> float | None:
    """Return the share of time with a kernel on the GPU: nvidia-smi's, SMACT where that is unknown; None: neither."""
    return job.gpu_util if job.gpu_util is not None else job.smact


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Device memory of a group at the moment when all members are at their peaks.

    Args:
        expected_mib: Sum of the members' peaks alone, a context each.
        bound_mib: Sum of the members' bounds; None where one has none.
    """

    expected_mib: float
    bound_mib: float | None

    def fits(self, memory_mib: float) -> bool:
        """Return whether the bound, or without one the expected memory, is at most `memory_mib`."""
        return (self.expected_mib if self.bound_mib is None else self.bound_mib) <= memory_mib


def group_memory(group: Sequence[JobProfile]) -> GroupMemory:
    """Return the memory of jobs that share a GPU in processes of their own.

    Peaks are those that a driver counts for each process, its context included. The bounds add as well: if each holds
    for 99 of 100 jobs, their sum holds for at least 98 of 100 pairs, and in practice for more, as errors of two jobs
    rarely coincide. Nothing is taken off for that: no measurement of groups with bounds says how much.

    Raises:
        UsageError: The memory of a job is not known.
    """
    unknown = [job.name for job in group if job.memory_mib is None]
    if unknown:
        raise UsageError(f"the memory of {', '.join(unknown)} is not known; pass memory_mib")
    bounds = [job.memory_bound_mib for job in group]
    whole = None if None in bounds else sum(bound or 0.0 for bound in bounds)
    return GroupMemory(sum(job.memory_mib or 0.0 for job in group), whole)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One job's slowdown in a group: the median and the 90th percentile of what is expected."""

    median: float
    p90: float


class SlowdownEstimator(Protocol):
    """Slowdowns of each job of a group on one GPU, in the group's order; the order of partners changes nothing."""

    @property
    def name(self) -> str: ...

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]: ...


class NoUtilization(ValueError):
    """A job's utilization is not known, so a formula has no answer."""


@dataclass(frozen=True, slots=True)
class PointSlowdowns:
    """Slowdowns by a formula that knows no spread.

    Args:
        name: Name in tables.
        slowdown_of: The formula: of a group and the place of one job in it, that job's slowdown.
    """

    name: str
    slowdown_of: Callable[[Sequence[JobProfile], int], float]

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]:
        expected = [self.slowdown_of(group, place) for place in range(len(group))]
        return [Slowdown(each, each) for each in expected]


def constant_slowdown(slowdown: float) -> PointSlowdowns:
    """Return the same slowdown for every job that has a partner."""
    return PointSlowdowns("constant", lambda group, _: slowdown if len(group) > 1 else 1.0)


def shared_time() -> PointSlowdowns:
    """Return time shared by utilization: max(1, u1 + u2 + ...); u is nvidia-smi's utilization, else SMACT."""
    return PointSlowdowns(
        "shared_time", lambda group, _: max(1.0, sum(utilizations(group, 0))) if len(group) > 1 else 1.0
    )


def utilizations(group: Sequence[JobProfile], place: int) -> tuple[float, float]:
    """Return the utilization of one job, and the sum of its partners'. Raises `NoUtilization`."""
    busy = [utilization(job) for job in group]
    if unknown := [job.name for job, share in zip(group, busy, strict=True) if share is None]:
        raise NoUtilization(f"{', '.join(unknown)}: neither GPU utilization nor SMACT is known")
    return busy[place] or 0.0, sum(share or 0.0 for other, share in enumerate(busy) if other != place)
