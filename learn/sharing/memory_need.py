"""How much memory a job takes, as a distribution, and the probability that several do not fit together.

Start reading at `overflow_probability`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

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
        """The probability of the highest quantile."""
        return self.quantiles[-1][0]

    @property
    def bound_mib(self) -> float:
        return self.quantiles[-1][1]

    def mib(self, probability: float) -> float:
        """Return the MiB that the job stays below with that probability; the bound above its coverage."""
        import numpy as np

        probabilities, sizes_mib = zip(*self.quantiles, strict=True)
        return float(np.interp(probability, probabilities, sizes_mib))

    def exceeds(self, mib: float | np.ndarray) -> np.ndarray:
        """Return the probability that the job needs more than that many MiB, of each; 0 from the bound on."""
        import numpy as np

        probabilities, sizes_mib = zip(*self.quantiles, strict=True)
        below = np.interp(mib, sizes_mib, probabilities, left=0.0)
        return np.where(np.asarray(mib) >= self.bound_mib, 0.0, 1.0 - below)


def overflow_probability(
    needs: Sequence[MemoryNeed], memory_mib: float, *, present: Sequence[MemoryNeed] = (), used_mib: float = 0.0
) -> float:
    """Return the probability that jobs need more than there is, their errors taken as independent.

    It is 0 where all bounds add up to no more than that, and 1 where the lowest quantiles do not fit.

    Args:
        needs: of the jobs that come.
        memory_mib: what all jobs together can use.
        present: of the jobs that are there.
        used_mib: measured now; the jobs that are there take that much at least.
    """
    import numpy as np

    if max(used_mib, _sum_of_bounds(present)) + _sum_of_bounds(needs) <= memory_mib:
        return 0.0
    least = sum(need.quantiles[0][1] for need in needs)
    if max(used_mib, sum(need.quantiles[0][1] for need in present)) + least > memory_mib:
        return 1.0
    if len(needs) == 1 and _sum_of_bounds(present) <= used_mib:
        return float(needs[0].exceeds(memory_mib - used_mib))
    cell = memory_mib / _CELLS
    total = np.ones(1)
    for need in present:
        total = _added(total, need, cell)
    floor = math.ceil(used_mib / cell)
    if floor:
        raised = np.zeros(max(floor + 1, len(total)))
        raised[floor : len(total)] = total[floor:]
        raised[floor] += total[:floor].sum()
        total = raised[: _CELLS + 1]
    for need in needs:
        total = _added(total, need, cell)
    return float(min(1.0, max(0.0, 1.0 - total.sum())))


def _sum_of_bounds(needs: Sequence[MemoryNeed]) -> float:
    return sum(need.bound_mib for need in needs)


def _added(total: np.ndarray, need: MemoryNeed, cell: float) -> np.ndarray:
    """Return the distribution of a sum, in cells of the memory; each job is rounded up, to the safe side."""
    import numpy as np

    below = 1.0 - need.exceeds(cell * np.arange(_CELLS + 1))
    return np.convolve(total, np.diff(below, prepend=0.0))[: _CELLS + 1]
