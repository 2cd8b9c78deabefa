"""What a training job will take from a GPU, before it runs: `estimate(model, inputs)`, and the same as a command.

Start reading at `estimate`. The module itself can be called, since `from learn import estimate` gives the module.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from conf.cli import command
from conf.errors import UsageError, unknown_name
from featurize.trial import TrialConfig, config_from_mapping

if TYPE_CHECKING:
    from featurize.device_spec import DeviceSpec
    from learn.traced import TracedStep

DEFAULT_DEVICE = "A100-SXM4-40GB"
TARGETS = ("memory", "smact", "smocc", "drama", "step_time")  # what an Estimate gives
LEVEL = 0.99
FORMATS = ("table", "json")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One training job on one GPU model. MiB, ms; ratios lie in [0, 1].

    upper_mib     99 of 100 jobs stay below it; None where no bound is calibrated (the trace alone has none)
    breakdown     part -> MiB at the peak of the traced step. It sums to the trace's own peak, `trace_memory_mib`,
                  which is not `peak_memory_mib` where a fitted model gave that
    answered_by   target -> estimator and version that gave the figure
    seconds       what the estimate itself took
    """

    peak_memory_mib: float
    upper_mib: float | None
    smact: float
    smocc: float
    drama: float
    step_time_ms: float
    parameters: int
    breakdown: Mapping[str, float]
    trace_memory_mib: float
    device: str
    warnings: tuple[str, ...]
    estimator: str
    answered_by: Mapping[str, str]
    seconds: float

    def fits(self, mib: float) -> bool:
        """Whether the job fits into that much free memory: by the bound where there is one, else by the point."""
        return (self.peak_memory_mib if self.upper_mib is None else self.upper_mib) <= mib

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def estimate(
    model,
    inputs=None,
    *,
    optimizer: str | None = None,
    precision: str | None = None,
    device: str | DeviceSpec = DEFAULT_DEVICE,
    estimator: str | None = None,
    data=None,
    input_dtype: str = "float32",
) -> Estimate:
    """Estimate a training job. The model never takes real memory: it is built and traced on the meta device.

    model       a trial config (dataclass, or the mapping that `runs.config` holds), an `nn.Module`, or a zero-argument
                factory of one
    inputs      for modules: a tensor or shape, or a sequence of them; shapes are of `input_dtype`
    optimizer   adam (the default), adamw, sgd or momentum; precision: fp32 (default), tf32, bf16 or fp16. A trial
                config has its own, and giving another is an error
    device      a GPU model of `conf/device`, by name or as its description
    estimator   a name of `learn.estimators.ESTIMATORS`. None takes, for trial configs, the newest fitted model of each
                target in the data folder, and the trace where there is none; for modules, the trace
    data        data folder with the fitted models; None is the default folder

    Raises `UsageError` for what cannot be estimated: unknown names, a model that can't be built or traced (naming the
    operator), a named estimator that is not fitted.
    """
    from learn.estimators import ESTIMATORS
    from learn.traced import describe_device

    began = time.monotonic_ns()
    if estimator is not None and estimator not in ESTIMATORS:
        raise unknown_name("estimator", estimator, ESTIMATORS)
    device = describe_device(device)
    if isinstance(model, Mapping):
        model = config_from_mapping(model)
    if isinstance(model, TrialConfig):
        found = _of_config(model, inputs, optimizer, precision, device, estimator, data)
    elif callable(model):
        found = _of_module(model, inputs, input_dtype, optimizer, precision, device, estimator)
    else:
        raise UsageError(
            f"model is an nn.Module, a factory of one, a trial config or its mapping, got {type(model).__name__}"
        )
    return replace(found, seconds=(time.monotonic_ns() - began) / 1e9)


def _of_module(model, inputs, input_dtype, optimizer, precision, device: DeviceSpec, estimator) -> Estimate:
    from featurize.training import Training
    from learn.traced import meta_inputs, step_of_module

    if estimator not in (None, "trace"):
        raise UsageError(
            f"estimator={estimator} reads trial configs; modules are answered by estimator=trace, the default"
        )
    settings = Training(optimizer=optimizer or "adam", precision=precision or "fp32")
    traced = step_of_module(model, meta_inputs(inputs, input_dtype), settings, device)
    return _from_trace(traced, device)


def _of_config(config: TrialConfig, inputs, optimizer, precision, device: DeviceSpec, estimator, data) -> Estimate:
    from learn.traced import step_of_config

    for key, given in (("optimizer", optimizer), ("precision", precision)):
        if given is not None and given != getattr(config, key):
            raise UsageError(f"the trial config has {key}={getattr(config, key)}; change it there, not by {key}=")
    if inputs is not None:
        raise UsageError("a trial config has its own inputs; leave inputs out")
    answer = _from_trace(step_of_config(config, device), device)
    if estimator == "trace":
        return answer
    return _with_fitted(answer, config, device, estimator, data)


def _from_trace(traced: TracedStep, device: DeviceSpec) -> Estimate:
    from learn.trace_estimator import NO_BOUND

    step = traced.step
    notes = [NO_BOUND]
    if not step.fits:
        notes.insert(0, f"out of memory: the step needs more than {device.name} has")
    return Estimate(
        peak_memory_mib=step.peak_memory_mib,
        upper_mib=None,
        smact=step.smact,
        smocc=step.smocc,
        drama=step.drama,
        step_time_ms=step.step_time_ms,
        parameters=step.parameters,
        breakdown=dict(traced.breakdown),
        trace_memory_mib=step.peak_memory_mib,
        device=device.name,
        warnings=tuple(notes),
        estimator="trace",
        answered_by=dict.fromkeys(TARGETS, "trace"),
        seconds=0.0,
    )


def _with_fitted(answer: Estimate, config: TrialConfig, device: DeviceSpec, estimator: str | None, data) -> Estimate:
    """The trace's answer with the figures of fitted models put in where there are any."""
    from learn.artifacts import StaleArtifact, find_latest, load_latest
    from learn.targets import get_target
    from learn.trace_estimator import NO_BOUND
    from warehouse.folder import DataFolder

    folder = DataFolder.resolve(data)
    if data is not None:
        folder.open()
    wanted = {"estimator": estimator, "family": config.family, "device": device.name}
    if estimator is not None:
        load_latest(folder, "memory", **wanted)  # a named one must be there, at least for memory
    figures, by, notes, absent = {}, dict(answer.answered_by), [], []
    for target in TARGETS:
        try:
            artifact = find_latest(folder, target, learnt=True, **wanted)
        except StaleArtifact as error:
            if estimator is not None:
                raise
            notes.append(str(error))
            absent.append(target)
            continue
        if artifact is None:
            absent.append(target)
            continue
        prediction = artifact.estimator.predict([config])
        figures[get_target(target).column] = float(prediction.point[0])
        by[target] = f"{artifact.meta['estimator']} {artifact.version}"
        if target == "memory":
            upper = prediction.upper(LEVEL)
            figures["upper_mib"] = None if upper is None else float(upper[0])
        notes += [f"{target}: {text}" for text in prediction.warnings]
        notes += [f"{target}: fitted on {source} rows" for source in artifact.meta["rows"]["source"]]
    kept = [text for text in answer.warnings if text != NO_BOUND or "peak_memory_mib" not in figures]
    if absent:
        kept.append(
            f"no fitted model for {config.family} on {device.name} in {folder.models} for {', '.join(absent)}: "
            f"answered by the trace (python -m learn.fit target={absent[0]} fits one)"
        )
    named = sorted({text.partition(" ")[0] for text in by.values()})
    return replace(
        answer,
        **figures,
        answered_by=by,
        estimator=" + ".join(named),
        warnings=tuple([*kept, *_merged(notes)]),
    )


def _merged(notes: list[str]) -> list[str]:
    """`smact: x`, `drama: x` as one `smact, drama: x`."""
    by_text: dict[str, list[str]] = {}
    for note in notes:
        head, colon, text = note.partition(": ")
        by_text.setdefault(text if colon and head in TARGETS else note, []).append(head if head in TARGETS else "")
    return [f"{', '.join(heads)}: {text}" if all(heads) else text for text, heads in by_text.items()]


def load_factory(text: str) -> Callable:
    """`package.module:attribute` -> what is there. `UsageError` for no such module or attribute, or no callable."""
    import importlib

    module_name, colon, attribute = str(text).partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"model is MODULE:FACTORY, as in torchvision.models:resnet50, got {text!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"model={text}: cannot import {module_name}: {error}") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise UsageError(f"model={text}: {module_name} fails on import: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"model={text}: {module_name} has no attribute {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"model={text}: {attribute} is {type(found).__name__}, neither a module nor a factory")
    return found


@dataclass(frozen=True)
class PastRun:
    """A run of the warehouse: its config and what was found then (column -> figure, missing ones None)."""

    run_id: str
    config: TrialConfig
    status: str
    source: str
    device: str | None
    found: Mapping[str, float | None]


def load_run(data, run_id: str) -> PastRun:
    """One run by its id. An unknown one raises `UsageError`."""
    import warehouse

    columns = ["peak_memory_mib", "smact", "smocc", "drama", "step_time_ms"]
    connection = warehouse.connect(data)
    try:
        row = connection.execute(
            f"SELECT config, status, source, device_name, {', '.join(columns)} FROM runs WHERE run_id = ?",
            [str(run_id)],
        ).fetchone()
    finally:
        connection.close()
    if row is None:
        raise UsageError(f"no run {run_id!r} in the warehouse; python -m warehouse.query lists them")
    config = config_from_mapping(json.loads(row[0] or "{}"))
    return PastRun(str(run_id), config, row[1], row[2], row[3], dict(zip(columns, row[4:], strict=True)))


def _seen(past: PastRun, done: Estimate, data) -> list[str]:
    """That fitted models knew the run's own label, so that agreeing with it proves little."""
    from learn.artifacts import versions

    knew = []
    for target, by in done.answered_by.items():
        version = by.partition(" ")[2]
        for artifact in versions(data, target) if version else ():
            report = json.loads((artifact.path / "report.json").read_text())
            if artifact.version == version and past.run_id in report["test_run_ids"] + report["train_run_ids"]:
                knew.append(target)
    return [f"{', '.join(knew)}: the model has been fitted on this very run"] if knew else []


def entry(cfg) -> int:
    """The command: one of model=, config= and run= is estimated and printed."""
    from omegaconf import OmegaConf

    from featurize.device_spec import device_from_mapping, device_names
    from learn.estimate_view import print_json, print_table

    values: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)
    given = [key for key in ("model", "config", "run") if values[key] is not None]
    if len(given) != 1:
        said = f"got {' and '.join(given)}" if given else "got none"
        raise UsageError(f"give one of model=MODULE:FACTORY, config={{...}} and run=RUN_ID; {said}")
    if values["format"] not in FORMATS:
        raise unknown_name("format", values["format"], FORMATS)
    if values["model"] is None and values["input"] is not None:
        raise UsageError("input is for model=; a trial config has its own inputs")
    settings = {key: values[key] for key in ("optimizer", "precision", "estimator", "data")}
    chosen = values.get("device")
    if chosen is not None and "backend" in chosen:
        raise UsageError(
            f"device={chosen['backend']} runs trials; an estimate is for a GPU model: {', '.join(device_names())}"
        )
    settings["device"] = DEFAULT_DEVICE if chosen is None else device_from_mapping(chosen)

    past = None
    if values["run"] is not None:
        past = load_run(values["data"], values["run"])
        title, subject = f"run {past.run_id}", past.config
        if chosen is None and past.device is not None:
            settings["device"] = past.device
    elif values["config"] is not None:
        subject = config_from_mapping(_mapping(values["config"]))
        title = f"{subject.family}, batch {subject.batch_size}"
    else:
        title, subject = values["model"], load_factory(values["model"])
    if values["model"] is not None:
        settings["input_dtype"] = values["input_dtype"]
    done = estimate(subject, values["input"], **settings)
    if past is not None:
        done = replace(done, warnings=(*done.warnings, *_seen(past, done, values["data"])))
    (print_json if values["format"] == "json" else print_table)(title, done, past)
    return 0


def _mapping(value: Any) -> Mapping[str, Any]:
    """A config as Hydra parsed it, or as the JSON text that `runs.config` holds."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UsageError(f"config is neither a mapping nor JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"config is a mapping, as in config='{{family: cnn, ...}}', got {value!r}")
    return value


class _CallableModule(types.ModuleType):
    def __call__(self, *args, **kwargs) -> Estimate:
        return self.estimate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule


def main() -> None:
    command("estimate", entry)


if __name__ == "__main__":
    main()
