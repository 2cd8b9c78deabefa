"""Estimates from configuration features alone (`method=fast`), by fitted trees: nothing is built or traced.

Start reading at `fast_estimates`. The models are those that `learn.fit estimator=lightgbm` left in the data folder,
else the packaged ones, which `learn.build_defaults` fits to full estimates of sampled configurations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.errors import CommandError, EnvironmentProblem, UsageError
from featurize.configs.features import is_current
from featurize.device.device_spec import (
    DESCRIBED,
    NVIDIA,
    DeviceSpec,
    MachineProfile,
    machine,
    plain_device,
)
from featurize.job.training_settings import FITTED_OPTIMIZERS, TrialConfig
from learn.estimation.estimate_view import MAY_RUN_OUT, OUT_OF_MEMORY, PROBLEM, WARNING, Note
from learn.estimation.job_estimate import Estimate
from learn.estimators.protocol import LEVEL, OF_CONFIGS
from learn.estimators.trees import FeatureTable, TabularEstimator, Trees, case_columns
from learn.fitting.artifacts import BOUND, DEFAULT_MODELS, Artifact, newest, open_artifact
from learn.job.training_job import PIPELINE, RESIDENT, Case, loop_of_source
from learn.rows.data import get_target
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from learn.estimators.protocol import ResidualPrediction


_WITH_CUDNN = ("cnn",)  # families of the packaged models whose processes load cuDNN


@dataclass(frozen=True)
class ConfigModels:
    """Artifacts of the targets and of the memory bound, for one family on one GPU model. `ours` names the targets whose
    artifacts are packaged."""

    artifacts: Mapping[str, Artifact]
    ours: frozenset[str]

    def predict(self, cases: Sequence[Case]) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Return (n,) points by target, and (n,) bounds of memory in MiB, of one family's configs on one GPU model.
        Raises `UsageError` where features are missing."""
        try:
            ((_, columns),) = case_columns(cases)
        except CommandError as error:
            raise UsageError(f"method=fast has no answer: {error}") from error
        predictions: dict[str, ResidualPrediction] = {}
        for table, names, trees in self._tables:
            for name, sums in zip(names, trees.members(table.encode(columns, len(cases))), strict=True):
                estimator = _tabular(self.artifacts[name])
                predictions[name] = estimator.prediction_of(
                    estimator.trees.start + sums, estimator.rough_figures(cases, columns)
                )
        if BOUND in predictions:
            above = self.artifacts[BOUND].meta["above"]
            bound = predictions[BOUND].point * above.get(cases[0].family, max(above.values()))
        else:
            bound = predictions["memory"].upper(LEVEL)
        return {name: predictions[name].point for name in self.artifacts if name != BOUND}, bound

    @cached_property
    def _tables(self) -> list[tuple[FeatureTable, list[str], Trees]]:
        """Group the artifacts that read the same columns, as the packaged ones do, and join their trees."""
        names_of: dict[int, list[str]] = {}
        tables: list[FeatureTable] = []
        for name, artifact in self.artifacts.items():
            if (table := _tabular(artifact).table) not in tables:
                tables.append(table)
            names_of.setdefault(tables.index(table), []).append(name)
        return [
            (tables[place], names, Trees.join([_tabular(self.artifacts[name]).trees for name in names]))
            for place, names in names_of.items()
        ]

    def named(self, target: str) -> str:
        """Return the entry of `answered_by` for a target."""
        return f"{OF_CONFIGS} (default)" if target in self.ours else f"{OF_CONFIGS} {self.artifacts[target].version}"

    def loop(self, target: str) -> str:
        """Return the loop that a target's figure is about."""
        meta = self.artifacts[target].meta
        return str(meta.get("loop") or loop_of_source(next(iter(meta["rows"]["source"]))))

    def errors(self, target: str, family: str) -> dict[str, float]:
        """Return `median` and `p90` of the error on held-out rows; empty where they are not recorded."""
        meta = self.artifacts[target].meta
        if "errors" in meta:
            return dict(meta["errors"].get(family, {}))
        kind = "absolute" if get_target(target).space == "ratio" else "relative"
        first = "mean" if kind == "absolute" else "median"
        metrics = {"median": f"{first}_{kind}_error", "p90": f"p90_{kind}_error"}
        values = {name: meta.get("metrics", {}).get(metric, {}).get("test") for name, metric in metrics.items()}
        return {} if None in values.values() else values


def _tabular(artifact: Artifact) -> TabularEstimator:
    assert isinstance(artifact.estimator, TabularEstimator)
    return artifact.estimator


def fast_estimates(
    configs: Sequence[TrialConfig], device: DeviceSpec, on: MachineProfile, data: Any = None
) -> list[Estimate]:
    """Return one estimate a config, in order, without a breakdown; `seconds` is the config's share of the time.

    Raises:
        UsageError: A family without a model, a config on several GPUs, or an AMD GPU.
        EnvironmentProblem: No model of memory is installed.
    """
    began = time.perf_counter_ns()
    places: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        places.setdefault(config.family, []).append(place)
    estimates: dict[int, Estimate] = {}
    for family, of_family in places.items():
        models = config_models(data, family, device)
        family_configs = [configs[place] for place in of_family]
        if problem := next(filter(None, (_problem(models, config, device) for config in family_configs)), None):
            raise UsageError(f"{problem}; use method=full")
        assert models is not None
        estimates |= zip(of_family, _of_family(models, family_configs, device, on), strict=True)
    seconds = (time.perf_counter_ns() - began) / 1e9 / max(len(configs), 1)
    for estimate in estimates.values():
        object.__setattr__(estimate, "seconds", seconds)  # frozen, but not shared yet
    return [estimates[place] for place in range(len(configs))]


def fast_problem(config: TrialConfig, device: DeviceSpec, data: Any = None) -> str | None:
    """Return why a config cannot be estimated from its features alone on a GPU model; None if it can."""
    return _problem(config_models(data, config.family, device), config, device)


def config_models(data: Any, family: str | None, device: DeviceSpec) -> ConfigModels | None:
    """Return the models for a family (None: any) on a GPU model: the data folder's newest of each target, else the
    packaged ones; None without a model of memory."""
    home = DataFolder.resolve(data).models
    written = tuple(_changed_ns(home / target) for target in FAST_LOOPS)
    return _config_models(home, written, DEFAULT_MODELS / "fast", family, device.name)


@lru_cache(maxsize=64)
def _config_models(
    home: Path, written: tuple[Any, ...], shipped: Path, family: str | None, device: str
) -> ConfigModels | None:
    artifacts: dict[str, Artifact] = {}
    if any(written):
        data = DataFolder(home.parent)
        for target in FAST_LOOPS:
            stored = newest(data, target, estimator=OF_CONFIGS, family=family, device=device, stale=True)
            if stored is not None and is_current(stored.meta["feature_version"]):
                artifacts[target] = stored
    ours = []
    for name in (*FAST_LOOPS, BOUND):
        needless = "memory" not in ours if name == BOUND else name in artifacts
        if needless or not (shipped / name / "meta.json").is_file():
            continue
        artifact = open_artifact(shipped / name).require()
        if family is None or family in artifact.meta["rows"]["family"]:
            artifacts[name] = artifact
            ours.append(name)
    return ConfigModels(artifacts, frozenset(ours)) if "memory" in artifacts else None


def _changed_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _problem(models: ConfigModels | None, config: TrialConfig, device: DeviceSpec) -> str | None:
    if config.parallel is not None:
        return f"method=fast knows one GPU, and the config has parallel={config.parallel}"
    if models is None:
        if not (DEFAULT_MODELS / "fast").is_dir():
            raise EnvironmentProblem("no models of method=fast are here: python -m learn.build_defaults makes them")
        return (
            f"method=fast has no model of the family {config.family}: python -m learn.fit "
            f"estimator={OF_CONFIGS} fits one"
        )
    if config.optimizer not in FITTED_OPTIMIZERS:
        return f"method=fast knows the optimizers {', '.join(FITTED_OPTIMIZERS)}, not {config.optimizer}"
    if "memory" in models.ours and device.architecture.vendor != NVIDIA:
        return f"method=fast was fitted on NVIDIA GPUs, and {device.name} is an AMD GPU"
    return None


def _of_family(
    models: ConfigModels, configs: Sequence[TrialConfig], device: DeviceSpec, on: MachineProfile
) -> list[Estimate]:
    family = configs[0].family
    points, bound = models.predict([Case(config, device.name, described=device) for config in configs])
    columns: dict[str, list[float]] = {
        get_target(target).column: of_target.tolist() for target, of_target in points.items()
    }
    moved_mib = 0.0
    if "memory" in models.ours:  # the packaged models were fitted for another machine
        loads_cudnn = family in _WITH_CUDNN
        moved_mib = on.outside_mib(loads_cudnn) + on.other_mib - machine(DESCRIBED, device).outside_mib(loads_cudnn)
    memory = columns["peak_memory_mib"] = [mib + moved_mib for mib in columns["peak_memory_mib"]]
    if bound is not None:
        upper = [max(mib + moved_mib, point) for mib, point in zip(bound.tolist(), memory, strict=True)]
        columns |= {"upper_mib": upper, "least_card_mib": upper}
    shared: dict[str, Any] = {
        "parameters": None,
        "device": device.name,
        "device_memory_mib": device.memory_mib,
        "estimator": "fast",
        "answered_by": {target: models.named(target) for target in points},
        "loops": {target: models.loop(target) for target in points},
        "machine": on.name,
        "seconds": 0.0,
        "held_out_errors": {target: errors for target in points if (errors := models.errors(target, family))},
    }
    of_all = _notes_of_models(models, device)
    reasons = unlike(configs, models.artifacts["memory"].meta.get("known", {}).get(family, {}))
    rows = (dict(zip(columns, figures, strict=True)) for figures in zip(*columns.values(), strict=True))
    return [
        Estimate(**row, notes=(*_notes(unlike_fitted, row, device), *of_all), **shared)
        for row, unlike_fitted in zip(rows, reasons, strict=True)
    ]


def _notes(unlike_fitted: Sequence[str], figures: Mapping[str, float], device: DeviceSpec) -> list[Note]:
    notes = [Note("unlike-fitted", WARNING, f"unlike what method=fast was fitted on: {why}") for why in unlike_fitted]
    if figures["peak_memory_mib"] > device.memory_mib:
        notes.append(Note(OUT_OF_MEMORY, PROBLEM, f"out of memory: {device.name} has {device.memory_mib:,.0f} MiB"))
    elif figures.get("upper_mib", 0.0) > device.memory_mib:
        text = f"it may run out of memory: the bound is above the {device.memory_mib:,.0f} MiB of {device.name}"
        notes.append(Note(MAY_RUN_OUT, PROBLEM, text))
    return notes


def _notes_of_models(models: ConfigModels, device: DeviceSpec) -> list[Note]:
    fitted = sorted(models.artifacts["memory"].meta["rows"]["device"])
    if plain_device(device.name) in map(plain_device, fitted):
        return []
    text = f"unlike what method=fast was fitted on: device {device.name}: fitted on {', '.join(fitted)}"
    return [Note("unlike-fitted", WARNING, text)]


# Target -> the loop of a full estimate: that of the packaged models, or of the trace.
FAST_LOOPS = {"memory": PIPELINE, "smact": PIPELINE, "smocc": PIPELINE, "drama": RESIDENT, "step_time": RESIDENT}
_SLACK = 0.05  # share of a range's width, beyond which a value is outside


def unlike(configs: Sequence[TrialConfig], known: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """Return, for each configuration, how it differs from the fitted ones of its family, as `meta.json` describes
    them."""
    reasons: list[list[str]] = [[] for _ in configs]
    for name, values in known.items():
        column = [getattr(config, name) for config in configs]
        if isinstance(values[0], int | float) and not isinstance(values[0], bool):
            low, high = values
            slack = _SLACK * (high - low)
            numbers = np.array(column, dtype=float)
            places = np.flatnonzero(~((numbers >= low - slack) & (numbers <= high + slack))).tolist()
            fitted_on = f"{_plain(low)} to {_plain(high)}"
        else:
            words = set(values)
            places = [place for place, word in enumerate(column) if word not in words]
            fitted_on = ", ".join(map(_plain, values))
        for place in places:
            reasons[place].append(f"{name} {_plain(column[place])}: fitted on {fitted_on}")
    return reasons


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
