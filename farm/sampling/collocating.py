"""Chooses which trials start together on one device: groups that cover the plane of their utilizations.

Start reading at `Groups`. A pool of configs is drawn from the search spaces and forecast for the device; groups are
made of it so that the cells of a grid over the members' SM activity fill evenly.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.errors import UsageError
from farm.sampling.dimensions import Space
from farm.sampling.draws import NO_LIMITS, Limits, sample_range
from featurize.configs.trial import TrialConfig, config_hash

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec

SIZES = {"pairs": 2, "triples": 3, "quads": 4}
POOL = 96  # configs that groups are made of; whatever n is, so that a larger n continues with the same groups
BEYOND_MEMORY_EVERY = 20  # every n-th group ignores memory: running out of it is a label, too
_CELLS = 5  # cells of each member's SM activity
_ROOM = 0.9  # share of the device's memory that the members' forecasts may fill
_TRIED = 200  # draws for one group, of which the one with the least used members is taken

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PoolMember:
    """A config of the pool: its forecast SM activity alone, 0 to 1, and its memory in MiB."""

    config: TrialConfig
    smact: float
    memory_mib: float


class Groups:
    """The groups of one submission: a pure function of the pool, the size and the seed.

    Args:
        pool: Configs to choose from.
        size: Members of a group.
        memory_mib: What the device has; None: memory is not looked at, as where it is the host's.
        seed: Seed of the draws.

    Raises:
        UsageError: No group of the pool fits the device.
    """

    def __init__(self, pool: Sequence[PoolMember], size: int, memory_mib: float | None, seed: int) -> None:
        self._pool, self._size = pool, size
        self._room_mib = None if memory_mib is None else _ROOM * memory_mib
        self._drawn = random.Random(f"groups of {size}, seed {seed}")
        self._used: Counter[int] = Counter()
        self._cells: Counter[tuple[int, ...]] = Counter()
        smallest = sorted(member.memory_mib for member in pool)[:size]
        if len(smallest) < size or not self._fits(smallest):
            raise UsageError(
                f"no {size} sampled configurations fit on the device together: the smallest take "
                f"{', '.join(f'{mib:,.0f}' for mib in smallest)} MiB; set limits.max_memory_mib or another space"
            )

    def __iter__(self) -> Iterator[tuple[TrialConfig, ...]]:
        for number in itertools.count(1):
            yield self._next(any_memory=number % BEYOND_MEMORY_EVERY == 0)

    def _next(self, any_memory: bool) -> tuple[TrialConfig, ...]:
        """Return the group of the emptiest cell, of those drawn; of several the one whose members are used least."""
        best: tuple[tuple[int, int], tuple[int, ...]] | None = None
        for _ in range(_TRIED):
            places = tuple(sorted(self._drawn.sample(range(len(self._pool)), self._size)))
            if not any_memory and not self._fits([self._pool[place].memory_mib for place in places]):
                continue
            rank = (self._cells[self._cell(places)], sum(self._used[place] for place in places))
            if best is None or rank < best[0]:
                best = rank, places
        if best is None:  # nearly all are too large together: those that are smallest
            order = sorted(range(len(self._pool)), key=lambda place: self._pool[place].memory_mib)
            best = (0, 0), tuple(order[: self._size])
        places = best[1]
        self._cells[self._cell(places)] += 1
        self._used.update(places)
        return tuple(self._pool[place].config for place in places)

    def _cell(self, places: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(min(_CELLS - 1, int(_CELLS * self._pool[place].smact)) for place in places))

    def _fits(self, memory_mib: Sequence[float]) -> bool:
        return self._room_mib is None or sum(memory_mib) <= self._room_mib


def pool_of(
    spaces: Sequence[Space],
    device: DeviceSpec,
    *,
    seed: int,
    policy: str,
    limits: Limits = NO_LIMITS,
    progress: Progress = lambda completed, total: None,
) -> list[PoolMember]:
    """Return the pool: as many configs of each space, with forecasts for the device. Raises `UsageError`."""
    from farm.sampling.forecast import Forecaster

    each = -(-POOL // len(spaces))
    drawn = [list(sample_range(space, seed, 0, each, policy, limits)) for space in spaces]
    configs = list({config_hash(config): config for configs in drawn for config in configs}.values())
    several = next((config for config in configs if config.ranks > 1), None)
    if several is not None:
        raise UsageError(f"a trial of several GPUs cannot share one with others: parallel={several.parallel}")
    outlook = Forecaster(device=device, workers=0).look(configs, progress)
    return [
        PoolMember(config, min(1.0, max(0.0, float(smact))), float(memory_mib))
        for config, smact, memory_mib in zip(configs, outlook.figures["smact"], outlook.figures["memory"], strict=True)
    ]
