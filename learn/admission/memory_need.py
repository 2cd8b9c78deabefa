"""How much memory a job takes, as a distribution, and the probability that several do not fit together.

Start reading at `overflow_probability`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conf.errors import UsageError

_CELLS = 2048  # of the free memory, in which sums of jobs are counted


@dataclass(frozen=True)
class MemoryNeed:
    """Quantiles of one job's peak memory: (probability, MiB), both ascending.

    Below the lowest quantile the job is taken to need that much, and never more than the highest: what the highest
    probability leaves open is the bound's own, which `coverage` names.
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
        """The probability of the highest quantile; 0.5 or less where there is no bound above the point."""
        return self.quantiles[-1][0]

    @property
    def bound_mib(self) -> float:
        return self.quantiles[-1][1]

    def mib(self, probability: float) -> float:
        """Return the MiB that the job stays below with that probability; the bound above its coverage."""
        below = self.quantiles[0]
        for p, mib in self.quantiles:
            if probability <= p:
                if p == below[0]:
                    return mib
                return below[1] + (mib - below[1]) * (probability - below[0]) / (p - below[0])
            below = (p, mib)
        return self.bound_mib

    def exceeds(self, mib: float) -> float:
        """Return the probability that the job needs more than that many MiB; 0 from the bound on."""
        if mib >= self.bound_mib:
            return 0.0
        if mib < self.quantiles[0][1]:
            return 1.0
        below = self.quantiles[0]
        for p, top in self.quantiles[1:]:
            if mib < top:
                return 1.0 - (below[0] + (p - below[0]) * (mib - below[1]) / (top - below[1]))
            below = (p, top)
        raise AssertionError("between the quantiles")


def overflow_probability(needs: Sequence[MemoryNeed], free_mib: float) -> float:
    """Return the probability that the jobs together need more than `free_mib`, their errors taken as independent.

    It is 0 where their bounds add up to no more than that, and 1 where their lowest quantiles do not fit.
    """
    import numpy as np

    if sum(need.bound_mib for need in needs) <= free_mib:
        return 0.0
    if free_mib < 0 or sum(need.quantiles[0][1] for need in needs) > free_mib:
        return 1.0
    if len(needs) == 1:
        return needs[0].exceeds(free_mib)
    cell = free_mib / _CELLS
    edges = cell * np.arange(_CELLS + 1)
    total = np.ones(1)
    for need in needs:
        # Memory is rounded up to whole cells, so that the sum errs to the safe side.
        reached = 1.0 - np.array([need.exceeds(float(edge)) for edge in edges])
        total = np.convolve(total, np.diff(reached, prepend=0.0))[: _CELLS + 1]
    return float(min(1.0, max(0.0, 1.0 - total.sum())))
