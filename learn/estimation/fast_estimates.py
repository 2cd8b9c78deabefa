"""Estimates from configuration features alone (`method=fast`): fitted trees; no model is built, nothing is traced.

Start reading at `fast_estimates`. The models are those that `learn.fit estimator=lightgbm` left in the data folder,
else those that come with the project. `fit_config_models` fits the latter to full estimates of sampled
configurations, for `learn.build_defaults`.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.errors import CommandError, EnvironmentProblem, UsageError, unknown_name
from featurize.configs.features import is_current
from featurize.configs.trial import FITTED_OPTIMIZERS, PRECISIONS, TrialConfig
from featurize.device.device_spec import (
    DEFAULT_DEVICE,
    DESCRIBED,
    NVIDIA,
    DeviceSpec,
    MachineProfile,
    machine,
    plain_device,
)
from featurize.families import get_family, layers_of
from featurize.job.layers import rough_memory_mib
from learn.estimation.job_estimate import Estimate
from learn.estimation.notes import (
    MAY_RUN_OUT,
    OUT_OF_MEMORY,
    PIPELINE,
    PROBLEM,
    RESIDENT,
    WARNING,
    Note,
    loop_of_source,
)
from learn.estimators.protocol import LEVEL, OF_CONFIGS, conformal_score
from learn.estimators.tabular import FeatureTable, TabularEstimator, case_columns
from learn.estimators.trees import Trees
from learn.fitting.artifacts import DEFAULT_MODELS, Artifact, models_folder, newest, open_artifact
from learn.job.training_job import Case
from learn.rows.data import get_target

if TYPE_CHECKING:
    from learn.estimators.protocol import Estimator
    from learn.rows.data import Rows
    from learn.rows.step_store import StepStore


STALE = "the models of method=fast were fitted with features of other code than this: they may be a little off"
_WITH_CUDNN = ("cnn",)  # families of the packaged models whose processes load cuDNN


@dataclass(frozen=True)
class ConfigModels:
    """Artifact of each target, and of the memory bound, for configurations of one family on one GPU model. ours: names
    of those that come with the project."""

    artifacts: Mapping[str, Artifact]
    ours: frozenset[str]

    def predict(self, cases: Sequence[Case]) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Return (n,) points by target, and memory's bound in MiB, of one family's configs on one GPU model. Raises
        `UsageError` where features are lacking."""
        try:
            ((_, columns),) = case_columns(cases)
        except CommandError as error:
            raise UsageError(f"method=fast has no answer: {error}") from error
        family, spec = cases[0].family, cases[0].spec
        assert spec is not None
        figures: dict[str, np.ndarray] = {}
        bound = None
        for table, names, trees in self._tables:
            for name, sums in zip(names, trees.members(table.encoded(columns, len(cases))), strict=True):
                artifact = self.artifacts[name]
                estimator = _tabular(artifact)
                prediction = estimator.prediction_of(estimator.trees.start + sums, {})
                rough = artifact.meta.get("times_rough")
                times = 1.0 if rough is None else rough_figures(rough, columns, spec.launch_overhead_us)
                if name == BOUND:
                    above = artifact.meta["above"]
                    bound = prediction.point * times * above.get(family, max(above.values()))
                    continue
                figures[name] = prediction.point * times
                if name == "memory" and BOUND not in self.artifacts:
                    upper = prediction.upper(LEVEL)
                    bound = None if upper is None else upper * times
        return {name: figures[name] for name in self.artifacts if name in figures}, bound

    @cached_property
    def _tables(self) -> list[tuple[FeatureTable, list[str], Trees]]:
        """Artifacts that read the same columns, as the packaged ones do, and the trees of all of them."""
        names_of: dict[int, list[str]] = {}
        tables: list[FeatureTable] = []
        for name, artifact in self.artifacts.items():
            if (table := _tabular(artifact).table) not in tables:
                tables.append(table)
            names_of.setdefault(tables.index(table), []).append(name)
        return [
            (tables[place], names, Trees.joined([_tabular(self.artifacts[name]).trees for name in names]))
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
        """Return `median` and `p90` of the error on held-out rows; empty where they are not known."""
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
    """Return one estimate a config, in order, without a breakdown; `seconds` is each one's share of the time.

    Raises:
        UsageError: A family that no model was fitted on, a config on several GPUs, an AMD GPU.
        EnvironmentProblem: There is no model of memory.
    """
    began = time.perf_counter_ns()
    places: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        places.setdefault(config.family, []).append(place)
    estimates: dict[int, Estimate] = {}
    for family, of_family in places.items():
        models = config_models(data, family, device)
        asked = [configs[place] for place in of_family]
        if problem := next(filter(None, (_problem(models, config, device) for config in asked)), None):
            raise UsageError(f"{problem}; use method=full")
        assert models is not None
        estimates |= zip(of_family, _of_family(models, asked, device, on), strict=True)
    seconds = (time.perf_counter_ns() - began) / 1e9 / max(len(configs), 1)
    for estimate in estimates.values():
        object.__setattr__(estimate, "seconds", seconds)  # nobody else has it yet
    return [estimates[place] for place in range(len(configs))]


def fast_problem(config: TrialConfig, device: DeviceSpec, data: Any = None) -> str | None:
    """Return why there is no estimate from a config's features alone on a GPU model, or None."""
    return _problem(config_models(data, config.family, device), config, device)


def config_models(data: Any, family: str | None, device: DeviceSpec) -> ConfigModels | None:
    """Return the models for a family (None: any) on a GPU model: the data folder's newest of each target, else those
    that are packaged; None where they have no memory."""
    home = models_folder(data)
    written = tuple(_changed_ns(home / target) for target in FAST_LOOPS)
    return _config_models(home, written, DEFAULT_MODELS / "fast", family, device.name)


@lru_cache(maxsize=64)
def _config_models(
    home: Path, written: tuple[Any, ...], shipped: Path, family: str | None, device: str
) -> ConfigModels | None:
    from warehouse.files.folder import DataFolder

    artifacts: dict[str, Artifact] = {}
    if any(written):
        data = DataFolder(home.parent)
        for target in FAST_LOOPS:
            kept = newest(data, target, estimator=OF_CONFIGS, family=family, device=device)
            if kept is not None and is_current(kept.meta["feature_version"]):
                artifacts[target] = kept
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
            raise EnvironmentProblem("no models of method=fast are here: learn.estimation.fast_estimates makes them")
        advice = f"python -m learn.fit estimator={OF_CONFIGS} fits one"
        return f"method=fast has no model of the family {config.family}: {advice}"
    if config.optimizer not in FITTED_OPTIMIZERS:
        return f"method=fast knows the optimizers {', '.join(FITTED_OPTIMIZERS)}, not {config.optimizer}"
    if "memory" in models.ours and device.architecture.vendor != NVIDIA:
        return f"method=fast was fitted on NVIDIA GPUs, and {device.name} is an AMD GPU"
    return None


def _of_family(
    models: ConfigModels, configs: Sequence[TrialConfig], device: DeviceSpec, on: MachineProfile
) -> list[Estimate]:
    family = configs[0].family
    figures, bound = models.predict([Case(config, device.name, described=device) for config in configs])
    targets = list(figures)
    columns: dict[str, list[Any]] = {get_target(target).column: points.tolist() for target, points in figures.items()}
    unknown = [None] * len(configs)
    moved_mib = _moved_mib(family, device, on) if "memory" in models.ours else 0.0
    memory = [mib + moved_mib for mib in columns["peak_memory_mib"]]
    upper: list[Any] = unknown
    if bound is not None:
        upper = [max(mib + moved_mib, point) for mib, point in zip(bound.tolist(), memory, strict=True)]
    shared: dict[str, Any] = {
        "parameters": None,
        "device": device.name,
        "device_memory_mib": device.memory_mib,
        "estimator": "fast",
        "answered_by": {target: models.named(target) for target in targets},
        "loops": {target: models.loop(target) for target in targets},
        "machine": on.name,
        "seconds": 0.0,
        "held_out_errors": {target: errors for target in targets if (errors := models.errors(target, family))},
    }
    of_all = _notes_of_models(models, device)
    reasons = unlike(configs, models.artifacts["memory"].meta.get("known", {}).get(family, {}))
    return [
        Estimate(
            peak_memory_mib=memory[place],
            upper_mib=upper[place],
            least_card_mib=upper[place],
            smact=columns.get("smact", unknown)[place],
            smocc=columns.get("smocc", unknown)[place],
            drama=columns.get("drama", unknown)[place],
            step_time_ms=columns.get("step_time_ms", unknown)[place],
            notes=(*_notes(reasons[place], memory[place], upper[place], device), *of_all),
            **shared,
        )
        for place in range(len(configs))
    ]


def _moved_mib(family: str, device: DeviceSpec, on: MachineProfile) -> float:
    """Return how much more the card holds on this machine than on the one that the models were fitted for."""
    loads_cudnn = family in _WITH_CUDNN
    return on.outside_mib(loads_cudnn) + on.other_mib - machine(DESCRIBED, device).outside_mib(loads_cudnn)


def _notes(unlike_fitted: Sequence[str], mib: float, upper: float | None, device: DeviceSpec) -> list[Note]:
    notes = [Note("unlike-fitted", WARNING, f"unlike what method=fast was fitted on: {why}") for why in unlike_fitted]
    if mib > device.memory_mib:
        notes.append(Note(OUT_OF_MEMORY, PROBLEM, f"out of memory: {device.name} has {device.memory_mib:,.0f} MiB"))
    elif upper is not None and upper > device.memory_mib:
        text = f"it may run out of memory: the bound is above the {device.memory_mib:,.0f} MiB of {device.name}"
        notes.append(Note(MAY_RUN_OUT, PROBLEM, text))
    return notes


def _notes_of_models(models: ConfigModels, device: DeviceSpec) -> list[Note]:
    meta = models.artifacts["memory"].meta
    notes = []
    fitted = sorted(meta["rows"]["device"])
    if plain_device(device.name) not in map(plain_device, fitted):
        text = f"unlike what method=fast was fitted on: device {device.name}: fitted on {', '.join(fitted)}"
        notes.append(Note("unlike-fitted", WARNING, text))
    if any(not is_current(artifact.meta["feature_version"]) for artifact in models.artifacts.values()):
        notes.append(Note("stale-model", WARNING, STALE))
    return notes


FAMILIES = ("cnn", "mlp", "transformer")
# GPU models of the cases: more would spread them thinner.
DEVICES = (
    "A100-SXM4-40GB",
    "B200-SXM-180GB",
    "H100-SXM5-80GB",
    "H200-SXM-141GB",
    "RTX-3090",
    "RTX-4090",
    "RTX-5090",
    "T4",
    "V100-SXM2-32GB",
)
BOUND = "memory_bound"  # beside the targets: the 99 % bound of memory
# Target -> the loop that a full estimate answers for: the fitted models' figures, and the trace's.
FAST_LOOPS = {"memory": PIPELINE, "smact": PIPELINE, "smocc": PIPELINE, "drama": RESIDENT, "step_time": RESIDENT}
ROUNDS = 120  # trees of a model; all packaged ones take less than 1.5 MB
CASES = 3360
LIMIT_MIB = 120 * 1024  # limit of `featurize.job.layers.rough_memory_mib`
MAX_ATTEMPTS = 1000
_SLACK = 0.05  # share of a range's width, beyond which a value is outside
# Instead of what conf/arch says: a scheduler's jobs differ more in how they are trained than a published sweep does. A
# value listed twice is drawn twice as often.
_WIDER: Mapping[str, Any] = {
    "batch_size": {"low": 1, "high": 1024},
    "optimizer": ("adam", *FITTED_OPTIMIZERS),
    "precision": ("fp32", "fp32", *PRECISIONS),
    "activation_checkpointing": (False, False, False, True),
    "cudnn_benchmark": (False, False, False, True),
    "channels_last": (False, False, False, True),
    "softmax": (False, True),
    "use_dropout": (False, True),
    "growth_rate": {"low": 12, "high": 64},
}


def fit_config_models(
    folder: Path,
    models: Mapping[str, Estimator],
    *,
    cases: int = CASES,
    seed: int = 0,
    data: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Callable[[str, int, int], None] = lambda _step, _done, _of: None,
) -> None:
    """Write one artifact a target, and one of the memory bound, into `folder`.

    Labels are the full estimates of sampled configurations: by a target's model, and by the trace where there is none.
    Each artifact's `meta.json` has the errors on 30 % of the configurations, which their fit had not
    seen.

    Args:
        folder: Where a folder is made for each artifact.
        models: Target -> the fitted estimator, as `learn.build_defaults` makes them; memory's has a bound.
        cases: Sampled configurations; each is traced once, in 0.1 to 0.3 s.
        seed: Seed of the configurations, splits and fits.
        data: Data folder that keeps the traced steps; None: the default one.
        workers: As in `StepStore.prepare`.
        progress: Is called with a step's name, what is done and the total.
    """
    from learn.rows.step_store import StepStore

    steps = StepStore(data)
    sampled = sampled_cases(cases, seed)
    steps.prepare(sampled, workers=workers, progress=lambda completed, total: progress("tracing", completed, total))
    for name, rows in rows_of(sampled, steps, models).items():
        progress(f"fitting {name} of configurations", 0, 1)
        _write_model(folder / name, name, rows, seed)


def rows_of(cases: Sequence[Case], steps: StepStore, models: Mapping[str, Estimator]) -> dict[str, Rows]:
    """Return target -> rows, labelled with the figures of the models and of the trace. Cases that cannot be traced are
    left out."""
    from featurize.configs.features import group_key
    from learn.rows.data import LabelledRow, Rows, get_target, module_of

    described = [
        (case, case.config, case.spec)
        for case in cases
        if case.config is not None and case.spec is not None and steps.record(case).error is None
    ]
    traced = [case for case, _, _ in described]
    labels: dict[str, np.ndarray] = _without_input([steps.record(case).values for case in traced])
    for target, model in models.items():
        prediction = model.predict(traced, steps)
        labels[target] = prediction.point
        if target == "memory" and (upper := prediction.upper(LEVEL)) is not None:
            labels[BOUND] = upper
    return {
        name: Rows(
            get_target("memory" if name == BOUND else name),
            tuple(
                LabelledRow(
                    run_id=f"row-{place:06d}",
                    case=case,
                    label=float(label),
                    family=case.family,
                    source="simulated",
                    device=case.device,
                    device_memory_mib=spec.memory_mib,
                    card_mib=spec.memory_mib,
                    group=group_key(config),
                    module=module_of(config),
                )
                for place, ((case, config, spec), label) in enumerate(zip(described, labels[name], strict=True))
                if np.isfinite(label)
            ),
        )
        for name in (*FAST_LOOPS, BOUND)
    }


def _without_input(records: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """target -> the trace's DRAM activity and step time in ms, as in the farm's own trials: a step of the usual loop
    runs the same kernels, and waits for its input before."""
    names = ("job_step_time_ms", "job_input_share", "job_priced_drama")
    step_ms, input_share, drama = np.array([[values[name] for name in names] for values in records]).T
    return {"drama": np.minimum(drama / (1 - input_share), 1.0), "step_time": step_ms * (1 - input_share)}


def rough_figures(name: str, columns: Mapping[str, np.ndarray], launch_us: np.ndarray | float) -> np.ndarray | float:
    """Return (n,) rough figures from the features of cases, by whose multiple trees learn memory (MiB) and step time
    (ms): they are flat beyond what they were fitted on, and this is not. 1 for ratios. launch_us: of the host."""
    if name in _ROUGH_MEMORY:
        return np.asarray(columns["rough_memory_mib"] + columns["gpu_context_mib"])
    if name != "step_time":
        return 1.0
    of_type = [columns[f"gpu_{rate}_tflops"] for rate in ("fp32", "tf32", "half")]
    tflops = np.select([columns["precision"] == "fp32", columns["precision"] == "tf32"], of_type[:2], of_type[2])
    compute_us = 3 * columns["batch_flops"] / (1e6 * tflops)
    moved = 24 * columns["batch_output_elements"] + 28 * columns["parameters"]  # bytes
    launches_us = _LAUNCHES * columns["layers"] * launch_us
    return np.asarray((compute_us + moved / (1e3 * columns["gpu_bandwidth_gb_s"]) + launches_us) / 1e3)


_ROUGH_MEMORY = ("memory", BOUND)
_LAUNCHES = 5  # launches of a layer in a step


def _write_model(folder: Path, name: str, rows: Rows, seed: int) -> None:
    """Fit, judge on held-out groups, fit on all rows, and write the artifact."""
    from featurize.configs.features import FEATURES_STAMP
    from learn.estimators.tabular import case_columns
    from learn.fitting.artifacts import FORMAT, environment, stamped
    from learn.judging.evaluate import hold_out

    launch_us = np.array([case.spec.launch_overhead_us for case in rows.cases if case.spec is not None])
    rough = np.empty(len(rows))
    for places, columns in case_columns(rows.cases):
        rough[places] = rough_figures(name, columns, launch_us[places])
    records = zip(rows.records, rows.label / rough, strict=True)
    multiples = replace(rows, records=tuple(replace(row, label=float(label)) for row, label in records))
    train, test = hold_out(rows, np.unique(rows.family, return_inverse=True)[1], seed)
    judged = _fit(multiples.subset(train), seed).predict([rows.cases[place] for place in test])
    point = judged.point * rough[test]
    meta = {
        "format": FORMAT,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": rows.target.name,
        "unit": rows.target.unit,
        "estimator": OF_CONFIGS,
        "feature_version": FEATURES_STAMP,
        "data_fingerprint": rows.fingerprint(),
        "environment": environment(),
        "rows": {"fitted": len(rows), "test": len(test)} | {of: rows.count(of) for of in _COUNTED},
        "seed": seed,
        "loop": PIPELINE if name == BOUND else FAST_LOOPS[name],
        "times_rough": name,
        "errors": _errors(point, rows.subset(test)),
        "known": {family: _known(rows.subset(rows.family == family).cases) for family in FAMILIES},
    }
    if name == BOUND:
        times, family_of = rows.label[test] / point, rows.family[test]
        above = {family: conformal_score(np.sort(times[family_of == family]), LEVEL) for family in FAMILIES}
        meta["above"] = {family: round(factor, 4) for family, factor in above.items()}
    (folder / "model").mkdir(parents=True)
    _fit(multiples, seed).save(folder / "model")
    (folder / "meta.json").write_text(json.dumps(stamped(folder, meta, "meta.json"), indent=1, sort_keys=True))


def _fit(rows: Rows, seed: int) -> Estimator:
    from learn.estimators.tabular import LightGBMEstimator

    estimator = LightGBMEstimator(seed)
    estimator.rounds = ROUNDS
    return estimator.fit(rows)


def _errors(point: np.ndarray, rows: Rows) -> dict[str, dict[str, float]]:
    """Return family -> `median` and `p90` of the error: relative, or absolute for ratios."""
    off = np.abs(point - rows.label) / (1.0 if rows.target.space == "ratio" else rows.label)
    families = sorted(set(rows.family))
    return {
        family: {name: round(float(np.quantile(off[rows.family == family], q)), 4) for name, q in _QUANTILES.items()}
        for family in families
    }


_COUNTED = ("family", "source", "device")
_QUANTILES = {"median": 0.5, "p90": 0.9}


def _known(cases: Sequence[Case]) -> dict[str, list[Any]]:
    """Return field -> the least and the greatest number, or all words, of one family's configurations."""
    configs = [case.config for case in cases if case.config is not None]
    known: dict[str, list[Any]] = {}
    for name in sorted(configs[0].to_mapping().keys() - {"family"}):
        values = [getattr(config, name) for config in configs]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        known[name] = [min(values), max(values)] if numbers else sorted(set(values), key=str)
    return known


def unlike(configs: Sequence[TrialConfig], known: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """Return why each configuration is unlike those of its family that were fitted on, as `meta.json` has them."""
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


# ---- what is fitted on


def sampled_cases(n: int, seed: int = 0) -> tuple[Case, ...]:
    """Return `sampled_configs(n, seed)` in the usual training loop, on `DEVICES`.

    Rounds over the families alternate in fours: four on the measured GPU model, then four on one of the others, in
    turn.
    """
    others = [name for name in DEVICES if name != DEFAULT_DEVICE]
    cases = []
    for place, config in enumerate(sampled_configs(n, seed)):
        turn = place // len(FAMILIES) // 4
        device = others[turn // 2 % len(others)] if turn % 2 else DEFAULT_DEVICE
        cases.append(Case(config, device, training_loop=True))
    return tuple(cases)


def sampled_configs(n: int, seed: int = 0, families: tuple[str, ...] = FAMILIES) -> tuple[TrialConfig, ...]:
    """Return `n` configs, the families in turn; each depends on `seed` and its own place alone.

    Every other round of the families draws from the search space of `conf/arch`, as `farm.submit` does by default. The
    rest draw from a wider one, evenly or on a logarithmic scale in turn; a config whose rough need is above `LIMIT_MIB`
    is drawn again there. Raises `UsageError` for n < 1 and unknown families.
    """
    if n < 1:
        raise UsageError(f"n must be >= 1, got {n}")
    for family in families:
        if family not in FAMILIES:
            raise unknown_name("family", family, FAMILIES)
    return tuple(_config(families[i % len(families)], i // len(families), seed) for i in range(n))


def _config(family: str, index: int, seed: int) -> TrialConfig:
    module = get_family(family)
    for attempt in range(MAX_ATTEMPTS):

        def draw(name: str, attempt: int = attempt) -> float:
            return random.Random(f"{seed} {family} {index} {attempt} {name}").random()

        wider = index % 2 == 1
        values = {
            name: _value(spec, draw(name), log=index % 4 == 1 if wider else _drawn_on_log_scale(spec))
            for name, spec in _space(family, wider=wider).items()
        }
        try:
            config: TrialConfig = module.Config(**module.repair(values, draw))
        except UsageError:  # a batch of 1 with batch norm
            continue
        if not wider or rough_memory_mib(layers_of(config), config.batch_size, config.optimizer) <= LIMIT_MIB:
            return config
    raise AssertionError(f"{family}: no config below {LIMIT_MIB} MiB in {MAX_ATTEMPTS} attempts")


@cache
def _space(family: str, *, wider: bool) -> Mapping[str, Any]:
    """name -> a constant, a sequence of choices, or {low, high, step, scale}."""
    import yaml

    text = (importlib.resources.files("conf") / "arch" / f"{family}.yaml").read_text(encoding="utf-8")
    space = yaml.safe_load(text)["space"]
    return {name: _WIDER.get(name, spec) if wider else spec for name, spec in space.items()}


def _drawn_on_log_scale(spec: Any) -> bool:
    """Return whether the farm draws a range of `conf/arch` on a logarithmic scale, as the files' own comments say."""
    if not isinstance(spec, Mapping):
        return False
    scale = spec.get("scale", "auto")
    return bool(scale == "log" or (scale == "auto" and spec["low"] > 0 and spec["high"] / spec["low"] >= 100))


def _value(spec: Any, u: float, *, log: bool) -> Any:
    if isinstance(spec, list | tuple):
        return spec[int(u * len(spec))]
    if not isinstance(spec, Mapping):
        return spec
    low, high = spec["low"], spec["high"]
    whole = isinstance(low, int) and isinstance(high, int)
    top = high + 1 if whole else high
    value = low * (top / low) ** u if log else low + (top - low) * u
    if step := spec.get("step"):
        value = low + (value - low) // step * step
    return min(int(value), high) if whole else value
