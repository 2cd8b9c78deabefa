"""Slowdowns of jobs that were measured in groups before, by their names, where nothing is known of them alone.

Start reading at `KnownJobs.fitted`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from learn.collocation.profile import JobProfile
from learn.collocation.rows import MeasuredGroup

_FIRMNESS = 1.0  # rows that a job's figure is held to 0 by
_ROUNDS = 30


@dataclass(frozen=True)
class KnownJobs:
    """How much each job suffers and how much it costs others, as logarithms that add up, and groups seen before.

    Args:
        middle: Logarithm of the typical slowdown.
        suffers, costs: Name -> beyond that.
        groups: (name, names of partners, sorted) -> logarithm of the slowdown.
    """

    middle: float
    suffers: Mapping[str, float]
    costs: Mapping[str, float]
    groups: Mapping[tuple[str, tuple[str, ...]], float]

    @classmethod
    def fitted(cls, groups: Sequence[MeasuredGroup]) -> KnownJobs:
        """Fit to measured groups, each figure by ridge regression in turns."""
        seen: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(list)
        for group in groups:
            for place, slowdown in enumerate(group.slowdowns):
                seen[_key(group.jobs, place)].append(float(np.log(max(1.0, slowdown))))
        medians = {key: float(np.median(values)) for key, values in sorted(seen.items())}
        middle = float(np.mean(list(medians.values())))
        suffers: dict[str, float] = {}
        costs: dict[str, float] = {}
        for _ in range(_ROUNDS):
            for own in (True, False):
                left: dict[str, list[float]] = defaultdict(list)
                for (name, partners), value in medians.items():
                    both = middle + suffers.get(name, 0.0) + sum(costs.get(partner, 0.0) for partner in partners)
                    table = suffers if own else costs
                    for job in (name,) if own else partners:
                        left[job].append(value - both + table.get(job, 0.0))
                fresh = {job: sum(values) / (len(values) + _FIRMNESS) for job, values in left.items()}
                suffers, costs = (fresh, costs) if own else (suffers, fresh)
        return cls(middle, suffers, costs, medians)

    def knows(self, group: Sequence[JobProfile]) -> bool:
        """Return whether every job of the group was measured beside others."""
        return all(job.name in self.suffers and job.name in self.costs for job in group)

    def slowdown(self, group: Sequence[JobProfile], place: int) -> float:
        """Return the expected slowdown of one job of a group that it `knows`."""
        key = _key(group, place)
        added = self.middle + self.suffers[key[0]] + sum(self.costs[partner] for partner in key[1])
        return float(np.exp(max(0.0, self.groups.get(key, added))))


def _key(jobs: Sequence[JobProfile], place: int) -> tuple[str, tuple[str, ...]]:
    return jobs[place].name, tuple(sorted(job.name for at, job in enumerate(jobs) if at != place))
