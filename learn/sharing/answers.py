"""The call `learn.slowdowns`: how much jobs slow each other down on one GPU.

Start reading at `slowdowns`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from learn.estimation.job_estimate import Estimate
from learn.rows.cases import DEFAULT_DEVICE
from learn.sharing.profile import JobProfile, profile_of_estimate
from learn.sharing.slowdown import Slowdown, SlowdownEstimator
from learn.sharing.stored import default_slowdowns

if TYPE_CHECKING:
    from featurize.configs.trial import TrialConfig
    from featurize.device.device_spec import DeviceSpec
    from learn.fitting.artifacts import DataPlace

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
        estimator: Another one, as `learn.sharing.slowdown.SharedTime()`.

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
    chosen: SlowdownEstimator = estimator or default_slowdowns(data)
    return chosen.slowdowns(group)


def profile_of(job: Job, device: str | DeviceSpec = DEFAULT_DEVICE) -> JobProfile:
    """Return the figures of a job alone; a trial config is estimated for `device` first."""
    if isinstance(job, JobProfile):
        return job
    if isinstance(job, Estimate):
        return profile_of_estimate(job, job.estimator)
    from learn.estimation.estimating import estimate

    family = job["family"] if isinstance(job, Mapping) and "family" in job else type(job).__name__
    return profile_of_estimate(estimate(job, device=device), str(family))
