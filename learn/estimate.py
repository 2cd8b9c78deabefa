"""What a training job will take from a GPU, before it runs: `estimate(model, inputs)`, and the same as a command.

Start reading at `estimate`. The module itself can be called, since `from learn import estimate` gives the module.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.cli import command
from conf.errors import UsageError, unknown_name
from featurize.allocator_settings import AllocatorSettings
from featurize.own_code import config_of_user, parse_trust, trusting
from featurize.trial import TrialConfig, config_from_mapping
from learn.cases import DEFAULT_DEVICE
from learn.estimation.answers import Estimate, answer
from learn.estimation.loops import require_loop
from learn.estimation.past_run import known_to, load_run

if TYPE_CHECKING:
    from featurize.device_spec import DeviceSpec
    from learn.workload import Workload

FORMATS = ("table", "json")
METHODS = ("full", "fast")
SETTINGS = ("optimizer", "precision", "cudnn_benchmark", "channels_last")  # a trial config has its own
PATHS = ("configs", "report", "data")  # of the command's keys


def estimate(
    model,
    inputs=None,
    *,
    optimizer: str | None = None,
    precision: str | None = None,
    cudnn_benchmark: bool | None = None,
    channels_last: bool | None = None,
    allocator: str | AllocatorSettings | None = None,
    device: str | DeviceSpec = DEFAULT_DEVICE,
    estimator: str | None = None,
    method: str = "full",
    data=None,
    input_dtype: str = "float32",
    target=None,
    loss: Callable | None = None,
    report: str | Path | None = None,
    name: str | None = None,
    trust: Sequence[str] = (),
    loop: str | None = None,
) -> Estimate:
    """Estimate a training job. The model never takes real memory: it is built and traced on the meta device.

    model       a trial config (dataclass, or the mapping that `runs.config` holds), an `nn.Module`, or a zero-argument
                factory of one
    inputs      for modules: a tensor or shape, or a sequence of them; shapes are of `input_dtype`
    optimizer   adam (the default), adamw, sgd or momentum; precision: fp32 (default), tf32, bf16 or fp16;
                cudnn_benchmark and channels_last: False by default. A trial config has its own, and giving another is
                an error
    allocator   settings of the caching allocator, as PYTORCH_ALLOC_CONF spells them
    device      a GPU model of `conf/device`, by name or as its description
    estimator   a name of `learn.estimators.ESTIMATORS`. None takes, for each target, the newest model in the data
                folder that was fitted on the config's family and device (for modules: one that reads traced steps,
                fitted on real devices), else the model that comes with the project, else the trace. The training-free
                ones answer for memory, without having been fitted. xmem is the one exception to the above: it runs the
                model for real, on the CPU
    method      full, or fast: a trial config's figures without tracing it, by the distilled model that comes with the
                project; some hundred times quicker, a few per cent less exact, and without a breakdown
    data        data folder with the fitted models; None is the default folder
    target, loss  for modules: a tensor or shape of class indices, and `loss(output, target)`; None: cross entropy of
                the output, its `logits` or its first tensor, with targets to suit
    report      a file to write: one HTML page with the step's memory over time and what the peak consists of
    name        what the report calls the job
    trust       modules whose code may run where a trial config names it (family zoo): a config is data, whoever made
                it. Models of torchvision, timm and transformers need no trust
    loop        resident (one batch stays on the GPU, as in the farm's runs) or pipeline (a plain Python loop, whose
                steps wait for their input): utilization and step time are all of that loop. None: each figure is of the
                loop that its source knows, and `Estimate.loops` names it

    Raises `UsageError` for what cannot be estimated: unknown names, a model that can't be built or traced (naming the
    operator and the module), a named estimator that is not fitted or refuses, a report that can't be written.
    """
    began = time.monotonic_ns()
    device = _checked(estimator, method, device)
    loop = require_loop(loop)
    given = {
        "optimizer": optimizer,
        "precision": precision,
        "cudnn_benchmark": cudnn_benchmark,
        "channels_last": channels_last,
    }
    given = {key: value for key, value in given.items() if value is not None}
    of_modules = {"inputs": inputs, "target": target, "loss": loss}
    if method == "fast":
        traced_only = {"estimator": estimator, "allocator": allocator, "report": report, "loop": loop, **of_modules}
        return many([_config_for_fast(model, given, traced_only)], device=device, method="fast")[0]
    if isinstance(allocator, str):
        allocator = AllocatorSettings.parse(allocator)
    elif allocator is not None and not isinstance(allocator, AllocatorSettings):
        raise UsageError(f"allocator is text such as expandable_segments:True, got {allocator!r}")
    if report is not None:
        from learn.estimation.step_report import checked_path, write_step_report

        report = checked_path(report)
    if isinstance(model, Mapping):
        model = config_from_mapping(model)
    if isinstance(model, TrialConfig):
        model = trusting(model, parse_trust(trust))
        job = _job_of_config(model, of_modules, given, name)
    elif callable(model):
        job = _job_of_module(model, inputs, given, input_dtype=input_dtype, target=target, loss=loss, name=name)
    else:
        raise UsageError(
            f"model is an nn.Module, a factory of one, a trial config or its mapping, got {type(model).__name__}"
        )
    with _as_a_training_script():
        done, traced = answer(
            job, device, estimator=estimator, data=data, allocator=allocator, timeline=report is not None, loop=loop
        )
    done = replace(done, seconds=(time.monotonic_ns() - began) / 1e9)
    if report is not None:
        write_step_report(report, job, device, done, traced, allocator)
    return done


def many(
    configs: Sequence[TrialConfig | Mapping],
    *,
    device: str | DeviceSpec = DEFAULT_DEVICE,
    method: str = "full",
    estimator: str | None = None,
    data=None,
    trust: Sequence[str] = (),
    loop: str | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Estimate]:
    """An estimate of each trial config (or its mapping), in order; see `estimate`.

    `method="fast"` answers thousands a second; `full` traces one after the other. `progress(done, of)` hears of it.
    `UsageError` names what is no config by its place: `configs[3]: ...`.
    """
    device = _checked(estimator, method, device)
    configs = _configs(configs)
    if method == "fast":
        from learn.estimation.fast_estimates import fast_estimates

        if estimator is not None:
            raise UsageError("method=fast is an estimator of its own; leave estimator= out")
        if require_loop(loop) is not None:
            raise UsageError("each figure of method=fast is for a fixed loop; leave loop= out")
        return fast_estimates(configs, device)
    found = []
    for done, config in enumerate(configs):
        progress(done, len(configs))
        found.append(estimate(config, device=device, estimator=estimator, data=data, trust=trust, loop=loop))
    return found


def _checked(estimator, method, device) -> DeviceSpec:
    """The device's description. Unknown names of any of the three raise `UsageError` listing the known."""
    from featurize.device_spec import DeviceSpec, device_names
    from learn.estimators import ESTIMATORS
    from learn.traced import describe_device

    if estimator is not None and not (isinstance(estimator, str) and estimator in ESTIMATORS):
        raise unknown_name("estimator", estimator, ESTIMATORS)
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    if not isinstance(device, str | DeviceSpec):
        raise unknown_name("device", device, device_names())
    return describe_device(device)


def _configs(given) -> list[TrialConfig]:
    if isinstance(given, TrialConfig | Mapping | str | bytes) or not isinstance(given, Iterable):
        advice = "; estimate(config) answers one" if isinstance(given, TrialConfig | Mapping) else ""
        said = f"got {type(given).__name__}{advice}"
        raise UsageError(f"configs is a sequence of trial configs or their mappings, {said}")
    found = []
    for at, config in enumerate(given):
        if isinstance(config, Mapping):
            try:
                config = config_from_mapping(config)
            except UsageError as error:
                raise UsageError(f"configs[{at}]: {error}") from error
        if not isinstance(config, TrialConfig):
            raise UsageError(f"configs[{at}]: a trial config or its mapping is wanted, got {type(config).__name__}")
        found.append(config)
    return found


def _config_for_fast(model, given: Mapping[str, Any], traced_only: Mapping[str, Any]) -> TrialConfig:
    if found := [name for name, value in traced_only.items() if value is not None]:
        raise UsageError(f"method=fast answers from a trial config alone; leave {', '.join(found)} out")
    if isinstance(model, Mapping):
        model = config_from_mapping(model)
    if not isinstance(model, TrialConfig):
        raise UsageError("method=fast answers from a trial config alone; modules take method=full")
    _require_same(model, given)
    return model


def _require_same(config: TrialConfig, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if value != getattr(config, key):
            raise UsageError(f"the trial config has {key}={getattr(config, key)}; change it there, not by {key}=")


@contextlib.contextmanager
def _as_a_training_script() -> Iterator[None]:
    """With gradients, whatever mode the caller is in; the caller's random numbers go on as if nothing had been."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        yield


def _job_of_config(
    config: TrialConfig, of_modules: Mapping[str, Any], given: Mapping[str, Any], name: str | None
) -> Workload:
    from learn.workload import of_config

    _require_same(config, given)
    if found := [key for key, value in of_modules.items() if value is not None]:
        raise UsageError(f"a trial config has its own inputs, target and loss; leave {', '.join(found)} out")
    job = of_config(config)
    return job if name is None else replace(job, name=name)


def _job_of_module(model: Callable, inputs, given: Mapping[str, Any], **about) -> Workload:
    from featurize.training import Training
    from learn.workload import of_module

    for key in ("cudnn_benchmark", "channels_last"):
        if not isinstance(given.get(key, False), bool):
            raise UsageError(f"{key} is true or false, got {given[key]!r}")
    return of_module(model, inputs, Training(**given), **about)


def load_factory(text: str, arguments: Mapping[str, Any] | str | None = None) -> Callable:
    """`package.module:attribute` -> what is there. `UsageError` for no such module or attribute, or no callable.

    `arguments` are the factory's keyword arguments, or the fields of the configuration of a class that has a
    `config_class`, as the family `zoo` takes them; such a class needs none.
    torchvision is mended where it does not suit this torch (`featurize.vision`), also if the factory imports it itself.
    """
    import functools
    import importlib

    from featurize.vision import mending
    from learn.estimation.near_names import near_modules, near_names

    module_name, colon, attribute = str(text).partition(":")
    if not (module_name and colon and attribute):
        raise UsageError(f"model is MODULE:FACTORY, as in torchvision.models:resnet50, got {text!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    names = attribute.split(".")
    try:
        module = mending(lambda: importlib.import_module(module_name))
        found = mending(lambda: functools.reduce(lambda owner, part: getattr(owner, part, None), [module, *names]))
    except ImportError as error:
        near = near_modules(module_name, error.name if isinstance(error, ModuleNotFoundError) else None)
        raise UsageError(f"model={text}: cannot import {module_name}: {error}{near}") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise UsageError(f"model={text}: {module_name} fails on import: {type(error).__name__}: {error}") from error
    if found is None:
        near = near_names(attribute, dir(module))
        raise UsageError(f"model={text}: {module_name} has no attribute {attribute!r}{near}")
    if not callable(found):
        raise UsageError(f"model={text}: {attribute} is {type(found).__name__}, neither a module nor a factory")
    if hasattr(found, "parameters") and not isinstance(found, type):  # a module that is there already
        if arguments is not None:
            raise UsageError(f"model={text} is a module that is there already, and takes no arguments")
        return found
    if arguments is not None or getattr(found, "config_class", None) is not None:
        return _configured(str(text), arguments)
    return functools.wraps(found, updated=())(lambda: mending(found))


def _configured(text: str, arguments: Mapping[str, Any] | str | None) -> Callable:
    """A factory of the model as the family `zoo` makes it. `UsageError` for arguments that are none."""
    from featurize.families import zoo
    from featurize.own_code import CodeName

    given = {} if arguments is None else arguments
    config = zoo.Config(model=CodeName(text), inputs="float32[1]", arguments=given, batch_size=1)
    return lambda: zoo.build(config)


def entry(cfg) -> int:
    """The command: one of model=, config= and run= is estimated and printed."""
    from omegaconf import OmegaConf

    from featurize.device_spec import device_from_mapping, device_names
    from learn.cases import name_of
    from learn.estimation.estimate_view import print_json, print_table

    values: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)
    values |= {key: str(values[key]) for key in PATHS if values[key] is not None}  # a file may be called 5
    given = [key for key in ("model", "config", "run", "configs") if values[key] is not None]
    if len(given) != 1:
        said = f"got {' and '.join(given)}" if given else "got none"
        raise UsageError(f"give one of model=MODULE:FACTORY, config={{...}}, run=RUN_ID and configs=FILE; {said}")
    if values["format"] not in FORMATS:
        raise unknown_name("format", values["format"], FORMATS)
    if values["model"] is None and values["input"] is not None:
        raise UsageError("input is for model=; a trial config has its own inputs")
    if values["data"] is not None:
        from warehouse.folder import DataFolder

        DataFolder.resolve(values["data"]).open()
    settings = {key: values[key] for key in (*SETTINGS, "estimator", "method", "data", "allocator", "report", "loop")}
    settings["trust"] = parse_trust(values["trust"])
    chosen = values.get("device")
    if chosen is not None and "backend" in chosen:
        raise UsageError(
            f"device={chosen['backend']} runs trials; an estimate is for a GPU model: {', '.join(device_names())}"
        )
    settings["device"] = DEFAULT_DEVICE if chosen is None else device_from_mapping(chosen)

    if values["configs"] is not None:
        return _print_many(values["configs"], settings, values["format"])
    past = None
    if values["run"] is not None:
        past = load_run(values["data"], values["run"], settings["trust"])
        title, subject = f"run {past.run_id}", past.config
        if chosen is None and past.device is not None:
            settings["device"] = past.device
        if settings["method"] == "full":
            settings["loop"] = settings["loop"] or past.loop  # so that like is compared with like
    elif values["config"] is not None:
        subject = config_of_user(_mapping(values["config"]))
        title = f"{name_of(subject)}, batch {subject.batch_size}"
    else:
        title, subject = values["model"], None
        settings["input_dtype"] = values["input_dtype"]
    if values["arguments"] is not None and values["model"] is None:
        raise UsageError("arguments are for model=; a trial config of the family zoo has its own")
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints is none of the output
        if subject is None:
            subject = load_factory(values["model"], values["arguments"])
        done = estimate(subject, values["input"], name=title, **settings)
    if past is not None:
        done = replace(done, warnings=(*done.warnings, *known_to(past, done, values["data"])))
    (print_json if values["format"] == "json" else print_table)(title, done, past)
    if values["report"] is not None:
        print(f"report: {values['report']}", file=sys.stderr if values["format"] == "json" else sys.stdout)
    return 0


def _print_many(path: str, settings: Mapping[str, Any], form: str) -> int:
    """Estimates of a file's configs, one JSON object a line, in the lines' order."""
    if given := [key for key in (*SETTINGS, "allocator", "report") if settings[key] is not None]:
        raise UsageError(f"configs= has one job a line, each with its own settings; leave {', '.join(given)} out")
    if form != "json":
        raise UsageError("configs=FILE prints one JSON object a line: give format=json with it")
    configs = []
    for number, line in _lines(path):
        try:
            configs.append(config_from_mapping(_mapping(line)))
        except UsageError as error:
            raise UsageError(f"configs={path}, line {number}: {error}") from error
    chosen = {key: settings[key] for key in ("device", "method", "estimator", "data", "trust", "loop")}
    for done in many(configs, **chosen):
        print(json.dumps(done.to_mapping()))
    return 0


def _lines(path: str) -> list[tuple[int, str]]:
    """The lines that hold something, each with its number in the file; `-` is standard input."""
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"configs={path}: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"configs={path}, line {number}: this is no UTF-8 text") from error
    # Not splitlines(): a JSON string may hold what Unicode calls a line's end.
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _mapping(value: Any) -> Mapping[str, Any]:
    """A config as Hydra parsed it, or as the JSON text that `runs.config` holds."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:  # also for a number of thousands of digits, and endless brackets
            raise UsageError(f"config is neither a mapping nor JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise UsageError(f"config is a mapping, as in config='{{family: cnn, ...}}', got {value!r}")
    return value


class _CallableModule(types.ModuleType):
    def __call__(self, *args, **kwargs) -> Estimate:
        return self.estimate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule


def main() -> None:
    from featurize.light_imports import without_compiler

    without_compiler()
    command("estimate", entry)


if __name__ == "__main__":
    main()
