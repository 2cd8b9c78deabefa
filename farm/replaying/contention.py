"""How much jobs on one GPU really slow each other down in a replay: simulated, and seen by no policy.

Start reading at `Contention.speeds`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from conf.errors import unknown_name
from farm.replaying.catalogue import JobType

SHARING = ("mps", "time_slicing")
_SWITCH = 0.05  # of a kernel's time, lost to a partner's: context switches or a shared L2. Chosen
_NOISE = 0.10  # standard deviation of what a group's slowdown has beyond the model, as a share. Chosen
_ROUNDS = 12


class Contention:
    """Speeds of the jobs of a group, each as a share of its speed alone.

    A job of which `busy` of the time has kernels on the GPU waits for a partner's kernels in that time only. Under time
    slicing kernels of two jobs take turns. Under MPS they run side by side as far as SMs and DRAM bandwidth suffice for
    both. Partners that are slowed down take less of the GPU, so speeds are the fixed point of both. A group has
    noise of its own, drawn from the seed: two replays with the same seed see the same GPU.
    """

    def __init__(self, types: Sequence[JobType], sharing: str = "mps", seed: int = 0) -> None:
        if sharing not in SHARING:
            raise unknown_name("sharing", sharing, SHARING)
        self.seed, self.sharing = seed, sharing
        self._busy = [job.busy for job in types]
        self._smact = [job.smact for job in types]
        self._overlap = [[self._stalled(a, b) for b in types] for a in types]
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}

    def _stalled(self, job: JobType, partner: JobType) -> float:
        """Return the share of a partner's kernel time in which the job's kernels stand still."""
        if self.sharing == "time_slicing" or not job.busy or not partner.busy:
            return 1.0
        sms = job.smact / job.busy + partner.smact / partner.busy - 1.0
        dram = job.drama / job.busy + partner.drama / partner.busy - 1.0
        return min(1.0, _SWITCH + max(0.0, sms, dram))

    def speeds(self, group: tuple[int, ...]) -> tuple[float, ...]:
        """Return the speed of each job of a group of types, which is sorted; 1 for a job alone."""
        known = self._known.get(group)
        if known is None:
            known = self._known[group] = self._solved(group) if len(group) > 1 else (1.0,) * len(group)
        return known

    def _solved(self, group: tuple[int, ...]) -> tuple[float, ...]:
        busy, count = [self._busy[job] for job in group], len(group)
        speeds = [1.0] * count
        for _ in range(_ROUNDS):
            waits = [
                busy[i] * sum(self._overlap[group[i]][group[j]] * busy[j] * speeds[j] for j in range(count) if j != i)
                for i in range(count)
            ]
            speeds = [0.5 * (speed + 1.0 / (1.0 + wait)) for speed, wait in zip(speeds, waits, strict=True)]
        return tuple(min(1.0, speed / self._noise(group, kind)) for speed, kind in zip(speeds, group, strict=True))

    def _noise(self, group: tuple[int, ...], kind: int) -> float:
        drawn = random.Random(zlib.crc32(repr((self.seed, group, kind)).encode()))
        return max(0.5, drawn.gauss(1.0, _NOISE))

    def activity(self, group: tuple[int, ...]) -> float:
        """Return the SM activity of the GPU with this group, from 0 to 1."""
        return min(1.0, sum(self._smact[job] * speed for job, speed in zip(group, self.speeds(group), strict=True)))
