"""The call `learn.admit`: whether a job may join the jobs of a GPU, and what that costs.

Start reading at `admit`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conf.errors import UsageError
from learn.sharing.gpu_state import GpuState, KnownJob, known_job
from learn.sharing.learned import LearnedSlowdowns
from learn.sharing.memory_need import overflow_probability
from learn.sharing.profile import JobProfile
from learn.sharing.slowdown import NoUtilization, Slowdown, SlowdownEstimator
from learn.sharing.stored import default_slowdowns


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The answer to one question.

    admitted    yes or no
    why         one or two sentences with the figures that decided
    slowdowns   (name, expected slowdown) of each job, the new one first; None where a utilization is not known
    risk        probability that memory runs out, 0 where the bounds add up to no more than there is
    coverage    what share of jobs stay below their bound, the least of all jobs
    bound_mib   all bounds together, and of the present jobs no less than what is measured
    memory_mib  what there is
    """

    admitted: bool
    why: str
    slowdowns: tuple[tuple[str, Slowdown | None], ...]
    risk: float
    coverage: float
    bound_mib: float
    memory_mib: float

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields as JSON holds them."""
        slowdowns = [
            {"name": name, "median": one and one.median, "p90": one and one.p90} for name, one in self.slowdowns
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
    """Say whether a job may join the jobs of a GPU: yes or no, slowdowns of each, risk of out-of-memory, and why.

    Args:
        job: a `JobProfile`, an `Estimate`, or a trial config, which is estimated for the GPU's model.
        gpu_state: the GPU and its jobs.
        risk: probability of running out of memory up to which the job is admitted, from 0 to 1.
        max_slowdown: median slowdown up to which it is admitted, of each job; None: slowdowns decide nothing.
        data: data folder with fitted models and slowdowns; None: the default folder.
        estimator: of slowdowns; None: the newest that was fitted to groups of the data folder, else the packaged one.

    Raises:
        UsageError: for a limit out of range, or a job whose memory has no bound.

    Example:
        >>> from learn.sharing.profile import JobProfile
        >>> busy = JobProfile("busy", memory_mib=12_000, memory_bound_mib=13_000, smact=0.7)
        >>> new = JobProfile("new", memory_mib=9_000, memory_bound_mib=10_000, smact=0.4)
        >>> admit(new, GpuState(memory_mib=40_326, jobs=(busy,))).admitted
        True
    """
    if not 0 <= risk < 1:
        raise UsageError(f"risk must be from 0 to below 1, got {risk!r}")
    if max_slowdown is not None and not max_slowdown >= 1:
        raise UsageError(f"max_slowdown must be at least 1, got {max_slowdown!r}")
    profile, need = known_job(job, "new job", gpu_state.device, data)
    present = [known_job(one, f"job {place}", gpu_state.device, data) for place, one in enumerate(gpu_state.jobs, 1)]
    needs = [one for _, one in present]
    used_mib, coverage = gpu_state.used_mib or 0.0, min(one.coverage for one in (need, *needs))
    overflow = overflow_probability([need], gpu_state.memory_mib, present=needs, used_mib=used_mib)
    bound_mib = max(used_mib, sum(one.bound_mib for one in needs)) + need.bound_mib
    slowdowns, unknown = _slowdowns([profile, *(one for one, _ in present)], estimator or default_slowdowns(data))
    figures, level = f"{bound_mib:,.0f} of {gpu_state.memory_mib:,.0f} MiB", f"{100 * coverage:g} % level"
    fits = overflow <= risk
    reasons = [f"Memory fits at the {level}: {figures} by the bounds."]
    if overflow:
        reasons = [
            f"The risk of running out of memory is {_percent(overflow)}, {'within' if fits else 'above'} the limit of "
            f"{_percent(risk)}: {figures} are needed at the {level}."
        ]
    quick = True
    if present and max_slowdown is not None:
        quick = unknown is None and max(one.median for _, one in slowdowns if one is not None) <= max_slowdown
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
    """Return the expected slowdown of each, and where there is none, why."""
    try:
        if len(group) > 1 and isinstance(estimator, LearnedSlowdowns) and (unknown := estimator.unknown(group)):
            raise NoUtilization(f"{', '.join(unknown)}: neither GPU utilization nor SMACT is known")
        expected = estimator.slowdowns(group)
    except NoUtilization as error:
        return tuple((job.name, None) for job in group), str(error)
    return tuple((job.name, one) for job, one in zip(group, expected, strict=True)), None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _slowdown_reason(slowdowns: Sequence[tuple[str, Slowdown | None]], unknown: str | None, limit: float) -> str:
    if unknown is not None:
        return f"Slowdowns cannot be expected: {unknown}."
    name, worst = max(((name, one) for name, one in slowdowns if one is not None), key=lambda pair: pair[1].median)
    comparison = "within" if worst.median <= limit else "above"
    return (
        f"The largest expected slowdown is {worst.median:.2f} ({name}; 90 % of such jobs stay below {worst.p90:.2f}), "
        f"{comparison} the limit of {limit:g}."
    )
