"""Memory of several jobs on one GPU: each brings its own context, cache and blocks, so figures alone add up.

Start reading at `group_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.errors import UsageError
from learn.collocation.profile import JobProfile


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
