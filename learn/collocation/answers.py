"""The call `learn.slowdowns`: how much jobs slow each other down on one GPU.

Start reading at `slowdowns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from learn.cases import DEFAULT_DEVICE
from learn.collocation.contention import ContentionFormula
from learn.collocation.known_jobs import KnownJobs
from learn.collocation.learned import LearnedSlowdowns
from learn.collocation.profile import JobProfile
from learn.collocation.slowdown import Slowdown, SlowdownEstimator
from learn.collocation.stored import find_slowdowns
from learn.estimation.job_estimate import Estimate

if TYPE_CHECKING:
    from featurize.device_spec import DeviceSpec
    from featurize.trial import TrialConfig
    from learn.artifacts import DataPlace

    Job = JobProfile | Estimate | TrialConfig | Mapping[str, Any]

MOST_JOBS = 4


def slowdowns(
    jobs: Sequence[Job],
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
        data: Data folder whose newest fitted slowdowns answer; None: the default folder. Where nothing was fitted, the
            packaged figures answer.
        estimator: Another one, as `learn.collocation.slowdown.SharedTime()`.

    Returns:
        The median and the 90th percentile of each job's step time over its step time alone; 1 or more.

    Raises:
        UsageError: There is no job or there are more than four.

    Known limitations: the packaged figures come from pairs on one GPU model under time slicing. Groups of three and
    four are answered by the same sums; none was measured.

    Example:
        >>> slowdowns([JobProfile("a", gpu_util=0.9), JobProfile("b", gpu_util=0.1)])[1].median < 1.2
        True
    """
    if not 1 <= len(jobs) <= MOST_JOBS:
        raise UsageError(f"jobs must be 1 to {MOST_JOBS}, got {len(jobs)}")
    group = [profile_of(job, device) for job in jobs]
    chosen: SlowdownEstimator = estimator or find_slowdowns(data) or packaged_slowdowns()
    return chosen.slowdowns(group)


def profile_of(job: Job, device: str | DeviceSpec = DEFAULT_DEVICE) -> JobProfile:
    """Return the figures of a job alone; a trial config is estimated for `device` first."""
    if isinstance(job, JobProfile):
        return job
    if isinstance(job, Estimate):
        return _of_estimate(job, job.estimator)
    from learn.estimation.estimating import estimate

    family = job["family"] if isinstance(job, Mapping) and "family" in job else type(job).__name__
    return _of_estimate(estimate(job, device=device), str(family))


def _of_estimate(answer: Estimate, name: str) -> JobProfile:
    return JobProfile(
        name=name,
        memory_mib=answer.peak_memory_mib,
        memory_bound_mib=answer.upper_mib,
        step_ms=answer.step_time_ms,
        smact=answer.smact,
        smocc=answer.smocc,
        drama=answer.drama,
    )


@cache
def packaged_slowdowns() -> LearnedSlowdowns:
    """Return the estimator for data folders without a fitted one: fitted to Lucid's pairs of jobs on an RTX 3090."""
    return LearnedSlowdowns(
        contention=ContentionFormula(own=0.878, others=0.748, sharpness=8.16, bandwidth=0.237),
        known=KnownJobs(0.0, {}, {}, {}),
        typical=1.034,
        spread=0.671,
        spread_known=0.671,
    )
