"""Forecasts the labels of thousands of configs, mostly without tracing: rough figures, and a table to learn from.

Start reading at `Forecaster.look`. torch is never needed for it, except where steps are to be traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from conf.errors import CommandError, UsageError
from featurize.trial import TrialConfig

if TYPE_CHECKING:
    import os

    from featurize.device_spec import DeviceSpec
    from warehouse.folder import DataFolder

TARGETS = ("memory", "smact", "smocc", "drama", "step_time")
WAYS = ("fast", "trace", "plan")  # how a config's figures were found, the better ones first
_FAR, _RARE = 3.0, 0.01  # of the table: where numbers are cut off; the share from which on a word has a column
_AT_ONCE = 512  # configs worked on together
_WORTH_WORKERS = 8_000  # configs from which on other processes start sooner than one is done


@dataclass(frozen=True)
class Outlook:
    """Forecast of n configs, in order.

    figures  target -> (n,) in the target's unit
    table    (n, columns) float32: logarithms of what the step is made of and of the config's numbers, a 1 for each of
             the config's words; scaled so that distances mean something
    parameters  (n,) of the networks
    ways     (n,) of `WAYS`
    """

    figures: Mapping[str, np.ndarray]
    parameters: np.ndarray
    table: np.ndarray
    ways: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    def subset(self, places: np.ndarray) -> Outlook:
        """Return the outlook on the configs at these positions, in that order."""
        figures = {name: column[places] for name, column in self.figures.items()}
        return Outlook(figures, self.parameters[places], self.table[places], self.ways[places])


@dataclass(frozen=True, kw_only=True)
class Forecaster:
    """Figures on one GPU model, the cheap way for each family.

    The fast path answers for families that it knows; of any other, steps are traced where there are no more than
    `trace_at_most` configs of it (features go to the folder `data`, as those of `learn.fit`), else the plan's rough
    figures have to do. `training_loop`: the known runs are of the usual loop, as imported ones are. `workers`:
    processes of Ray (None: one a CPU; 0: none), for tracing and for many configs.
    """

    device: DeviceSpec
    data: DataFolder | str | os.PathLike[str] | None = None
    training_loop: bool = False
    trace_at_most: int = 0
    workers: int | None = None

    def look(
        self, configs: Sequence[TrialConfig], progress: Callable[[int, int], None] = lambda done, of: None
    ) -> Outlook:
        """An outlook on all configs together: tables of two calls do not compare. Raises `UsageError` where there is
        nothing to look at."""
        if not configs:
            raise UsageError("there are no configs to forecast")
        families: dict[str, list[int]] = {}
        for place, config in enumerate(configs):
            families.setdefault(config.family, []).append(place)
        traced = {
            name
            for name, places in families.items()
            if not _knows(name, self.device) and len({configs[i] for i in places}) <= self.trace_at_most
        }
        parts = [
            rows[i : i + _AT_ONCE] for rows in families.values() for i in range(0, len(rows), _AT_ONCE)
        ]  # of one family each
        n = len(configs)
        figures = {name: np.full(n, np.nan) for name in TARGETS}
        parameters, ways = np.zeros(n), np.full(n, "plan", dtype=object)
        values, done = np.zeros((n, 0), dtype=np.float32), 0
        for places, (columns, sketch, weights, way) in self._sketched(parts, configs):
            if not values.shape[1]:
                values = np.zeros((n, sketch.shape[1]), dtype=np.float32)
            values[places], parameters[places], ways[places] = sketch, weights, way
            for name, column in columns.items():
                figures[name][places] = column
            done += len(places)
            progress(done, n)
        for name in sorted(traced):
            self._trace([configs[i] for i in families[name]], np.array(families[name]), figures, ways)
        return Outlook(figures, parameters, _table(values, *_own_fields(configs)), ways)

    @property
    def capacity_mib(self) -> float:
        return self.device.memory_mib

    def _sketched(self, parts: list[list[int]], configs: Sequence[TrialConfig]):
        jobs = [([configs[i] for i in places], self.device) for places in parts]
        if self.workers == 0 or len(configs) < _WORTH_WORKERS:
            yield from ((places, sketch_of(job)) for places, job in zip(parts, jobs, strict=True))
            return
        import os

        from learn.parallel import ray_map

        workers = len(os.sched_getaffinity(0)) if self.workers is None else self.workers
        for index, sketches in ray_map(sketch_of, jobs, workers):
            yield parts[index], sketches

    def _trace(self, configs: list[TrialConfig], places: np.ndarray, figures, ways) -> None:
        from learn.cases import Case
        from learn.step_store import StepStore

        cases = [Case(config, self.device.name, self.training_loop, described=self.device) for config in configs]
        steps = StepStore(self.data)
        steps.prepare(cases, workers=self.workers)
        for place, case in zip(places, cases, strict=True):
            record = steps.record(case)
            if record.error is None:  # else the plan's figure remains
                ways[place] = "trace"
                figures["memory"][place] = record.values["job_memory_mib"]
                figures["step_time"][place] = record.values["job_step_time_ms"]
                for name in ("smact", "smocc", "drama"):
                    figures[name][place] = record.values[f"job_priced_{name}"]


def sketch_of(
    job: tuple[Sequence[TrialConfig], DeviceSpec],
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, str]:
    """Return (figures, values, parameters, way) of configs of one family, as a worker computes them."""
    from learn.fastpath.fast_features import step_sketch

    configs, device = job
    sketch = step_sketch(configs, device)
    figures, way = {name: sketch.base[name] for name in TARGETS}, "plan"
    if _knows(configs[0].family, device):
        answers = _fast_path().answer(configs, device)
        figures, way = (
            {**figures, **{name: answers.figures[name] for name in TARGETS if name in answers.figures}},
            "fast",
        )
    return figures, sketch.values.astype(np.float32), sketch.totals[:, 1], way


_loaded: list = []  # the fast path, or None where there is none of this code's features


def _fast_path():
    if not _loaded:
        from learn.artifacts import DEFAULT_MODELS
        from learn.fastpath.fast import FastPath

        try:
            _loaded.append(FastPath.load(DEFAULT_MODELS / "fast"))
        except (CommandError, FileNotFoundError):  # of other code's features, or never distilled: the plan has to do
            _loaded.append(None)
    return _loaded[0]


def _knows(family: str, device: DeviceSpec) -> bool:
    path = _fast_path()
    return path is not None and family in path.families and path.answers_for(device)


def _own_fields(configs: Sequence[TrialConfig]) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, numbers), logarithms with 0 for fields that a family lacks, and (n, words), one-hot."""
    numbers: dict[str, np.ndarray] = {}
    words: dict[tuple[str, str], np.ndarray] = {}
    names = {type(config): [field.name for field in dataclasses.fields(config)] for config in configs}
    n = len(configs)
    for row, config in enumerate(configs):
        for name in names[type(config)]:
            value = getattr(config, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                if name not in numbers:
                    numbers[name] = np.zeros(n, dtype=np.float32)
                numbers[name][row] = value
            else:
                key = (name, str(value))
                if key not in words:
                    words[key] = np.zeros(n, dtype=np.float32)
                words[key][row] = 1.0
    for family in {config.family for config in configs}:
        words["family", family] = np.array([config.family == family for config in configs], dtype=np.float32)
    logged = [np.sign(column) * np.log1p(np.abs(column)) for _, column in sorted(numbers.items())]
    return np.stack(logged, axis=1), np.stack([column for _, column in sorted(words.items())], axis=1)


def _table(values: np.ndarray, numbers: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Numbers around 0 with a spread of 1, cut off at 3: one odd config must not be all that is far away. Words as they
    are, so that a rare one is no farther off than a common one; those of fewer than 1 % of the configs tell nothing."""
    standardized = np.hstack([values, numbers])
    centre, spread = standardized.mean(0, dtype=np.float64), standardized.std(0, dtype=np.float64)
    varied = spread > 1e-6
    standardized = np.clip((standardized[:, varied] - centre[varied]) / spread[varied], -_FAR, _FAR)
    share = words.mean(0, dtype=np.float64)
    common_words = words[:, (share >= _RARE) & (share <= 1 - _RARE)]
    both = np.hstack([standardized, common_words]).astype(np.float32)
    return both if both.shape[1] else np.zeros((len(both), 1), dtype=np.float32)
