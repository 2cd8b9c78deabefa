"""The slowdown of a job beside others, from what each keeps busy alone: a formula with four fitted figures.

Start reading at `ContentionFormula.slowdown`. With u the share of time in which a job alone has a kernel on the GPU,
and m the share in which it reads or writes memory, a step takes the time alone times

    1 + softplus(own * u + others * sum(u of partners) - 1) + bandwidth * m * sum(m of partners)

The first term is time sharing: nothing is lost while both fit into the time, softened by `sharpness` as kernels of two
jobs meet by chance before. The second is what memory traffic costs. Both are sums over partners, so the order of
partners changes nothing, and groups of three and four are answered as pairs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learn.sharing.profile import JobProfile, utilization

FORMS = ("time", "time_and_bandwidth")


@dataclass(frozen=True, slots=True)
class ContentionFormula:
    """Figures of the formula; `sharpness` of the softened step, the others without unit."""

    own: float
    others: float
    sharpness: float
    bandwidth: float

    def slowdown(self, loads: np.ndarray) -> np.ndarray:
        """Return the expected slowdown of each job, (n,), at least 1, by its loads, (n, 4)."""
        own, others, own_memory, others_memory = loads.T
        beyond = self.own * own + self.others * others - 1.0
        waits = np.logaddexp(0.0, self.sharpness * beyond) / self.sharpness
        slowdown: np.ndarray = 1.0 + waits + self.bandwidth * own_memory * others_memory
        return slowdown


def loads_of(groups: Sequence[Sequence[JobProfile]], places: Sequence[int]) -> np.ndarray:
    """Return the loads of one job of each group, `places[i]` of `groups[i]`, all of whose jobs have a `utilization`.

    Returns:
        (n, 4): the job's share of time on the GPU, the sum of its partners', and the same of memory traffic.
    """
    rows = []
    for group, place in zip(groups, places, strict=True):
        busy = [utilization(job) or 0.0 for job in group]
        memory = [_traffic(job) for job in group]
        rows.append((busy[place], sum(busy) - busy[place], memory[place], sum(memory) - memory[place]))
    return np.asarray(rows, dtype=float).reshape(len(rows), 4)


def _traffic(job: JobProfile) -> float:
    known = job.memory_util if job.memory_util is not None else job.drama
    return 0.0 if known is None else known
