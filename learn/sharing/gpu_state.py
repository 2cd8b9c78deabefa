"""The GPU that a job would join, and the job itself, as an admission needs them.

Start reading at `GpuState`; `known_job` makes a profile and a memory distribution of whatever describes a job.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UsageError, shown
from featurize.configs.trial import TrialConfig
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec
from learn.estimation.job_estimate import Estimate
from learn.estimators.protocol import LEVEL
from learn.sharing.memory_need import MemoryNeed
from learn.sharing.profile import JobProfile, profile_of_estimate

_MEDIAN = 0.5
KnownJob = JobProfile | Estimate | TrialConfig | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A GPU and the jobs on it. Raises `UsageError`.

    memory_mib   what all jobs together can use, their contexts included
    jobs         that are there: profiles, estimates or trial configs
    used_mib     measured on the GPU now; None where it is not known. Jobs are taken to grow up to their own figures
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
        if problems:
            raise UsageError("; ".join(problems))


def known_job(
    job: KnownJob, name: str, device: str | DeviceSpec, data: str | os.PathLike[str] | None = None
) -> tuple[JobProfile, MemoryNeed]:
    """Return a job's figures and the distribution of its memory.

    Args:
        job: a profile, an estimate, or a trial config, which is estimated.
        name: for what has none.
        device: GPU model of the estimate.
        data: data folder with fitted models, for the estimate.

    Raises:
        UsageError: for another object, a config that cannot be estimated, or a job whose memory has no bound.
    """
    if isinstance(job, JobProfile):
        return job, _need_of(job)
    if not isinstance(job, Estimate):
        if not isinstance(job, TrialConfig | Mapping):
            raise UsageError(f"a job is a JobProfile, an Estimate or a trial config, got {shown(type(job).__name__)}")
        from learn.estimation.estimating import estimate

        job = estimate(job, device=device, data=data)
    profile = profile_of_estimate(job, name)
    upper = tuple((p, mib) for p, mib in job.distribution if _MEDIAN <= p <= job.coverage)
    return profile, MemoryNeed(upper) if upper and upper[-1][0] > _MEDIAN else _need_of(profile, job.coverage)


def _need_of(job: JobProfile, coverage: float = LEVEL) -> MemoryNeed:
    """Return the point, where there is one, as the median, and the bound as what the coverage names."""
    point, bound = job.memory_mib, job.memory_bound_mib
    if bound is None:
        raise UsageError(
            f"{shown(job.name)}: memory_bound_mib is missing, and without it there is no risk to judge; give what "
            "99 of 100 such jobs stay below, or the peak of a job that was measured"
        )
    if point is None:
        return MemoryNeed(((coverage, bound),))
    if bound < point:
        raise UsageError(f"{shown(job.name)}: memory_bound_mib {bound:,.0f} lies below memory_mib {point:,.0f}")
    return MemoryNeed(((_MEDIAN, point), (coverage, bound)))
