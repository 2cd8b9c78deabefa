"""How much trials on one GPU slow each other down, modelled from what each keeps busy alone. Simulated, not measured.

Start reading at `shared_speeds`. Simulated devices and the replay of a cluster ask it; no estimator does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

SHARING = ("mps", "time_slicing")
_SWITCH = 0.05  # share of a kernel's time lost to a partner's: context switches or a shared L2. Chosen


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """Load of a job that runs alone: shares of time with a kernel on the GPU, of SMs and of DRAM bandwidth, 0 to 1."""

    busy: float
    smact: float
    drama: float


def stalled_share(job: GpuLoad, partner: GpuLoad, sharing: str) -> float:
    """Return the share of a partner's kernel time in which the job's kernels stand still.

    Under time slicing kernels of two jobs take turns. Under MPS they run side by side as far as SMs and DRAM bandwidth
    suffice for both.
    """
    if sharing == "time_slicing" or not job.busy or not partner.busy:
        return 1.0
    sms = job.smact / job.busy + partner.smact / partner.busy - 1.0
    dram = job.drama / job.busy + partner.drama / partner.busy - 1.0
    return min(1.0, _SWITCH + max(0.0, sms, dram))


def shared_speeds(busy: Sequence[float], stalled: Sequence[Sequence[float]]) -> list[float]:
    """Return the speed of each job of a group as a share of its speed alone.

    A closed queueing network: each job is for 1 - `busy` of its time alone elsewhere, on the host, and for `busy` at
    the GPU, which serves those that are there in turns. Mean value analysis solves it (Reiser and Lavenberg, J. ACM 27,
    1980): what a job finds at the GPU is what would be there without it. With shared processors that is exact whatever
    the lengths of kernels and pauses (Baskett et al., J. ACM 22, 1975). Where partners do not stall each other fully,
    only that share of what it finds counts, which is an approximation.

    Args:
        busy: (n,) share of time with a kernel on the GPU, of each job alone.
        stalled: (n, n) share of the kernel time of job j in which job i stands still; the diagonal is not read.
    """
    everyone = tuple(range(len(busy)))
    at_gpu: dict[tuple[int, ...], dict[int, float]] = {(): {}}  # group -> mean number of each member at the GPU
    speeds: dict[int, float] = {}
    for size in everyone:
        for group in itertools.combinations(everyone, size + 1):
            speeds = {}
            queued = {}
            for job in group:
                others = at_gpu[tuple(other for other in group if other != job)]
                stay = busy[job] * (1.0 + sum(stalled[job][other] * mean for other, mean in others.items()))
                speeds[job] = 1.0 / (1.0 - busy[job] + stay)
                queued[job] = speeds[job] * stay
            at_gpu[group] = queued
    return [speeds[job] for job in everyone]


def speeds_of_loads(loads: Sequence[GpuLoad], sharing: str) -> list[float]:
    """Return the speed of each job of a group as a share of its speed alone; 1 for a job alone."""
    if len(loads) < 2:
        return [1.0] * len(loads)
    stalled = [[stalled_share(job, partner, sharing) for partner in loads] for job in loads]
    return shared_speeds([load.busy for load in loads], stalled)
