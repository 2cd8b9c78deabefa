"""Forecasts the labels of thousands of configs without tracing, with a table of features to learn from.

Start reading at `Forecaster.look`, which needs no torch. `Groups` chooses by forecasts which trials start together on
one device. It draws a pool of configs from the search spaces, forecasts them for the device, and
forms groups that evenly fill a grid over the members' SM activity.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from conf.errors import EnvironmentProblem, UsageError
from featurize.configs.space import NO_LIMITS, Limits, Space, sample_range
from featurize.configs.trial import TrialConfig, config_hash

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from warehouse.files.folder import DataFolder


TARGETS = ("memory", "smact", "smocc", "drama", "step_time")
WAYS = ("fast", "plan")  # methods that produce a config's figures, best first
_FAR, _RARE = 3.0, 0.01  # bound of the table's numbers; least share of configs that gives a word a column
_AT_ONCE = 512  # configs in one part
_WORTH_WORKERS = 8_000  # configs above which starting further processes saves time


@dataclass(frozen=True)
class Outlook:
    """Forecast of n configs, in order.

    figures  target -> (n,) in the target's unit
    table    (n, columns) float32: logarithms of the config's features, a 1 for each of its words; scaled to make
             distances comparable
    parameters  (n,) of the networks
    ways     (n,) of `WAYS`
    """

    figures: Mapping[str, np.ndarray]
    parameters: np.ndarray
    table: np.ndarray
    ways: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Forecaster:
    """Forecasts on one GPU model, by the cheapest method for each family.

    Fitted trees (`method=fast`), of the folder `data` or packaged, answer for families that they know, and guess from
    the plan's sizes for others. `workers`: processes for many configs (None: one a CPU; 0: none).
    """

    device: DeviceSpec
    data: DataFolder | str | os.PathLike[str] | None = None
    workers: int | None = None

    def look(
        self, configs: Sequence[TrialConfig], progress: Callable[[int, int], None] = lambda completed, total: None
    ) -> Outlook:
        """Return the outlook on one config or more; tables of two calls are not comparable."""
        families: dict[str, list[int]] = {}
        for place, config in enumerate(configs):
            families.setdefault(config.family, []).append(place)
        fast = {name for name in families if self._knows(configs[families[name][0]])}
        # Rows of one family each.
        parts = [rows[i : i + _AT_ONCE] for rows in families.values() for i in range(0, len(rows), _AT_ONCE)]
        n = len(configs)
        figures = {name: np.full(n, np.nan) for name in TARGETS}
        parameters = np.zeros(n)
        ways = np.array(["fast" if config.family in fast else "plan" for config in configs], dtype=object)
        features: list[tuple[list[int], Mapping[str, np.ndarray]]] = []
        completed = 0
        for places, (columns, of_part) in self._describe(parts, configs):
            for name, column in columns.items():
                figures[name][places] = column
            features.append((places, of_part))
            parameters[places] = of_part["parameters"]
            completed += len(places)
            progress(completed, n)
        return Outlook(figures, parameters, _table(*_columns(n, features)), ways)

    def _knows(self, config: TrialConfig) -> bool:
        from learn.estimation.fast_estimates import fast_problem

        return fast_problem(config, self.device, self.data) is None

    def _describe(
        self, parts: list[list[int]], configs: Sequence[TrialConfig]
    ) -> Iterator[tuple[list[int], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]]:
        jobs = [([configs[i] for i in places], self.device, self.data) for places in parts]
        if self.workers == 0 or len(configs) < _WORTH_WORKERS:
            yield from ((places, describe_configs(job)) for places, job in zip(parts, jobs, strict=True))
            return
        from learn.rows.processes import NoResult, in_processes

        workers = len(os.sched_getaffinity(0)) if self.workers is None else self.workers
        for index, known in in_processes(describe_configs, jobs, workers=workers):
            if isinstance(known, NoResult):
                raise EnvironmentProblem(f"configs cannot be described: {known.reason}")
            yield parts[index], known


def describe_configs(
    job: tuple[Sequence[TrialConfig], DeviceSpec, DataFolder | str | os.PathLike[str] | None],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the figures and the features of configs of one family, as a worker computes them."""
    from featurize.configs.features import feature_columns
    from learn.estimation.fast_estimates import config_models
    from learn.job.training_job import Case

    configs, device, data = job
    models = config_models(data, configs[0].family, device) or config_models(data, None, device)
    cases = [Case(config, device.name, described=device) for config in configs]
    return {} if models is None else models.predict(cases)[0], feature_columns(configs)


def _columns(n: int, features: Sequence[tuple[list[int], Mapping[str, np.ndarray]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, numbers), logarithms with 0 for what a family lacks, and (n, words), one-hot."""
    numbers: dict[str, np.ndarray] = {}
    words: dict[tuple[str, str], np.ndarray] = {}
    for places, columns in features:
        for name, column in columns.items():
            if column.dtype == object:
                for word in set(column.tolist()) - {None}:
                    words.setdefault((name, word), np.zeros(n, dtype=np.float32))[places] = column == word
            elif not name.startswith("log_"):  # its logarithm is taken below
                numbers.setdefault(name, np.zeros(n, dtype=np.float32))[places] = np.nan_to_num(column)
    logged = [np.sign(column) * np.log1p(np.abs(column)) for _, column in sorted(numbers.items())]
    return np.stack(logged, axis=1), np.stack([column for _, column in sorted(words.items())], axis=1)


def _table(standardized: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return (n, columns): standardized numbers, clipped at 3 so that outliers do not dominate, and the words.

    Words stay 0 or 1: a rare one is not farther away than a common one. Words of fewer than 1 % are left out.
    """
    centre, spread = standardized.mean(0, dtype=np.float64), standardized.std(0, dtype=np.float64)
    varied = spread > 1e-6
    standardized = np.clip((standardized[:, varied] - centre[varied]) / spread[varied], -_FAR, _FAR)
    share = words.mean(0, dtype=np.float64)
    common_words = words[:, (share >= _RARE) & (share <= 1 - _RARE)]
    both = np.hstack([standardized, common_words]).astype(np.float32)
    return both if both.shape[1] else np.zeros((len(both), 1), dtype=np.float32)


SIZES = {"pairs": 2, "triples": 3, "quads": 4}
POOL = 96  # configs that groups are made of, independent of n: a larger n continues with the same groups
BEYOND_MEMORY_EVERY = 20  # every n-th group ignores memory: running out of it is also a label
_CELLS = 5  # cells of each member's SM activity
_ROOM = 0.9  # share of the device's memory that the members' forecasts may fill
_TRIED = 200  # draws for one group

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PoolMember:
    """A config of the pool, with its forecast SM activity when alone, 0 to 1, and memory in MiB."""

    config: TrialConfig
    smact: float
    memory_mib: float


class Groups:
    """The groups of one submission: a pure function of the pool, the size and the seed.

    Args:
        pool: Configs to choose from.
        size: Members of a group.
        memory_mib: The device's memory; None: ignore memory, as on the CPU.
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
        """Return the drawn group in the emptiest cell; among several, the one with the least used members."""
        best: tuple[tuple[int, int], tuple[int, ...]] | None = None
        for _ in range(_TRIED):
            places = tuple(sorted(self._drawn.sample(range(len(self._pool)), self._size)))
            if not any_memory and not self._fits([self._pool[place].memory_mib for place in places]):
                continue
            rank = (self._cells[self._cell(places)], sum(self._used[place] for place in places))
            if best is None or rank < best[0]:
                best = rank, places
        if best is None:  # nearly all are too large together: take the smallest
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
    """Return the pool: equally many configs of each space, with forecasts for the device. Raises `UsageError`."""

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
