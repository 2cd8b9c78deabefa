"""Slowdowns of jobs that share a GPU: what an estimator of them gives, and formulas to hold learned ones against.

A slowdown is the time of a step beside partners over the time of a step alone: 1 or more. Its inverse is the normalised
speed (Hu et al., Lucid, ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from learn.sharing.profile import JobProfile, utilization


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
class ConstantSlowdown:
    """The same slowdown for every job that has a partner."""

    slowdown: float
    name: str = "constant"

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]:
        each = self.slowdown if len(group) > 1 else 1.0
        return [Slowdown(each, each) for _ in group]


@dataclass(frozen=True, slots=True)
class SharedTime:
    """Time shared by utilization: max(1, u1 + u2 + ...); u is nvidia-smi's utilization, SMACT where that is unknown."""

    name: str = "shared_time"

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]:
        each = max(1.0, sum(_known_utilization(job) for job in group)) if len(group) > 1 else 1.0
        return [Slowdown(each, each) for _ in group]


def _known_utilization(job: JobProfile) -> float:
    known = utilization(job)
    if known is None:
        raise NoUtilization(f"{job.name}: neither its GPU utilization nor its SMACT is known")
    return known
