"""Forecasts the labels of thousands of configs, mostly without tracing, with a table of features to learn from.

Start reading at `Forecaster.look`. torch is never needed for it, except where steps are to be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from conf.errors import EnvironmentProblem, UsageError
from featurize.configs.trial import TrialConfig

if TYPE_CHECKING:
    import os

    from featurize.device.device_spec import DeviceSpec
    from warehouse.files.folder import DataFolder

TARGETS = ("memory", "smact", "smocc", "drama", "step_time")
WAYS = ("fast", "trace", "plan")  # how a config's figures were found, the better ones first
_FAR, _RARE = 3.0, 0.01  # where the table cuts numbers off; the share from which on a word has a column
_AT_ONCE = 512  # configs worked on together
_WORTH_WORKERS = 8_000  # configs from which on other processes start sooner than one is done


@dataclass(frozen=True)
class Outlook:
    """Forecast of n configs, in order.

    figures  target -> (n,) in the target's unit
    table    (n, columns) float32: logarithms of the config's features, a 1 for each of its words; scaled so that
             distances mean something
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

    Fitted trees (`method=fast`) answer for families that they know; of any other, steps are traced where there are no
    more than `trace_at_most` configs of it (features go to the folder `data`, as those of `learn.fit`), else the trees'
    guess from the plan's sizes has to do. `training_loop`: the known runs are of the usual loop, as imported ones are.
    `workers`: processes (None: one a CPU; 0: none), for tracing and for many configs.
    """

    device: DeviceSpec
    data: DataFolder | str | os.PathLike[str] | None = None
    training_loop: bool = False
    trace_at_most: int = 0
    workers: int | None = None

    def look(
        self, configs: Sequence[TrialConfig], progress: Callable[[int, int], None] = lambda completed, total: None
    ) -> Outlook:
        """Return an outlook on all configs together: tables of two calls do not compare. Raises `UsageError` where
        there is nothing to look at."""
        if not configs:
            raise UsageError("there are no configs to forecast")
        families: dict[str, list[int]] = {}
        for place, config in enumerate(configs):
            families.setdefault(config.family, []).append(place)
        fast = {name for name in families if self._knows(configs[families[name][0]])}
        traced = {
            name
            for name, places in families.items()
            if name not in fast and len({configs[i] for i in places}) <= self.trace_at_most
        }
        parts = [
            rows[i : i + _AT_ONCE] for rows in families.values() for i in range(0, len(rows), _AT_ONCE)
        ]  # rows of one family each
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
        for name in sorted(traced):
            self._trace([configs[i] for i in families[name]], np.array(families[name]), figures, ways)
        return Outlook(figures, parameters, _table(*_columns(n, features)), ways)

    @property
    def capacity_mib(self) -> float:
        return self.device.memory_mib

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
        import os

        from learn.rows.processes import NoResult, in_processes

        workers = len(os.sched_getaffinity(0)) if self.workers is None else self.workers
        for index, known in in_processes(describe_configs, jobs, workers=workers):
            if isinstance(known, NoResult):
                raise EnvironmentProblem(f"configs cannot be described: {known.reason}")
            yield parts[index], known

    def _trace(
        self, configs: list[TrialConfig], places: np.ndarray, figures: Mapping[str, np.ndarray], ways: np.ndarray
    ) -> None:
        from learn.job.training_job import Case
        from learn.rows.step_store import StepStore

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
            elif not name.startswith("log_"):  # a number that has a column of its own
                numbers.setdefault(name, np.zeros(n, dtype=np.float32))[places] = np.nan_to_num(column)
    logged = [np.sign(column) * np.log1p(np.abs(column)) for _, column in sorted(numbers.items())]
    return np.stack(logged, axis=1), np.stack([column for _, column in sorted(words.items())], axis=1)


def _table(standardized: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Numbers around 0 with a spread of 1, cut off at 3: one odd config must not be all that is far away. Words as they
    are, so that a rare one is no farther off than a common one; those of fewer than 1 % of the configs mean nothing."""
    centre, spread = standardized.mean(0, dtype=np.float64), standardized.std(0, dtype=np.float64)
    varied = spread > 1e-6
    standardized = np.clip((standardized[:, varied] - centre[varied]) / spread[varied], -_FAR, _FAR)
    share = words.mean(0, dtype=np.float64)
    common_words = words[:, (share >= _RARE) & (share <= 1 - _RARE)]
    both = np.hstack([standardized, common_words]).astype(np.float32)
    return both if both.shape[1] else np.zeros((len(both), 1), dtype=np.float32)
