"""How much jobs on one GPU really slow each other down in a replay: simulated, and seen by no policy.

Start reading at `Contention.speeds`; the model is that of simulated devices, `featurize.timing.shared_gpu`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from farm.replaying.catalogue import JobType
from featurize.timing.shared_gpu import GpuLoad, shared_speeds, stalled_share

_NOISE = 0.10  # standard deviation of what a group's slowdown has beyond the model, as a share. Chosen


class Contention:
    """Speeds of the jobs of a group, each as a share of its speed alone.

    A group has noise of its own, drawn from the seed: two replays with the same seed see the same GPU.
    """

    def __init__(self, types: Sequence[JobType], sharing: str = "mps", seed: int = 0) -> None:
        self.seed, self.sharing = seed, sharing
        self._busy = [job.busy for job in types]
        self._smact = [job.smact for job in types]
        loads = [GpuLoad(job.busy, job.smact, job.drama) for job in types]
        self._stalled = [[stalled_share(a, b, sharing) for b in loads] for a in loads]
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}

    def speeds(self, group: tuple[int, ...]) -> tuple[float, ...]:
        """Return the speed of each job of a group of types, which is sorted; 1 for a job alone."""
        known = self._known.get(group)
        if known is None:
            known = self._known[group] = self._solved(group) if len(group) > 1 else (1.0,) * len(group)
        return known

    def _solved(self, group: tuple[int, ...]) -> tuple[float, ...]:
        stalled = [[self._stalled[job][partner] for partner in group] for job in group]
        speeds = shared_speeds([self._busy[job] for job in group], stalled)
        return tuple(min(1.0, speed / self._noise(group, kind)) for speed, kind in zip(speeds, group, strict=True))

    def _noise(self, group: tuple[int, ...], kind: int) -> float:
        drawn = random.Random(zlib.crc32(repr((self.seed, group, kind)).encode()))
        return max(0.5, drawn.gauss(1.0, _NOISE))

    def activity(self, group: tuple[int, ...]) -> float:
        """Return the SM activity of the GPU with this group, from 0 to 1."""
        return min(1.0, sum(self._smact[job] * speed for job, speed in zip(group, self.speeds(group), strict=True)))
