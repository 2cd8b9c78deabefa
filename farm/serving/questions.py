"""A question to the service: a request, checked and in one form, so that equal questions have one key.

Start reading at `estimate_question`. What can be refused without building the model is refused here.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from conf.errors import CommandError, UsageError
from conf.files.identity import version_of
from farm.serving.problems import Problem, invalid
from featurize.configs.features import FEATURES_STAMP
from featurize.configs.trial import TrialConfig, config_of_row
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, describe_device
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from farm.serving.bodies import EstimateRequest, FitRequest, HowFields, JobFields, PlanRequest

_KEY_CHARACTERS = 32
_HOW = ("coverage", "machine", "loop", "allocator", "workspaces")
_MODELS_TAKEN = "name a model of torchvision, timm or transformers, or of a module that the service's operator trusts"
_TRACED_ONLY = ("loop", "allocator", "workspaces")
_LOOK_EVERY_S = 10.0  # for models that were fitted anew
_DEEPEST_AT_ONCE = 128  # some 3 ms, in which the process answers nobody else by this method


@dataclass(frozen=True)
class Policy:
    """The operator's permissions. trust: modules whose models clients may name; scripts: whether scripts may run."""

    trust: tuple[str, ...] = ()
    scripts: bool = False


@dataclass(frozen=True)
class ClientQuestion:
    """One question in its one form.

    kind      estimate, fit or plan
    values    what a child process needs to answer, JSON
    config    the trial config, where the job is one
    fast      whether fitted trees answer it, from the config's features alone
    """

    kind: str
    values: Mapping[str, Any]
    config: TrialConfig | None
    fast: bool = False

    @property
    def text(self) -> str:
        """Return the question as JSON, the same for equal questions."""
        return json.dumps({"kind": self.kind, **self.values}, sort_keys=True)

    def key(self, state: str) -> str:
        """Return the question's id. `state` names the code and the models that answer."""
        return hashlib.sha256(f"{state}\n{self.text}".encode()).hexdigest()[:_KEY_CHARACTERS]


def estimate_question(request: EstimateRequest, policy: Policy) -> ClientQuestion:
    """Return the question of `/v1/estimate`. Raises `Problem`."""
    device = device_at(request.device, "/device")
    job, config = _job(request, policy)
    fast = request.method == "fast"
    if fast and (problem := _fast_problem(request, config, device)):
        raise invalid(problem, "/method")
    return ClientQuestion("estimate", {**job, **_how(request), "device": device.name}, config, fast)


def fit_question(request: FitRequest, policy: Policy) -> ClientQuestion:
    """Return the question of `/v1/fit`. Raises `Problem`."""
    job, config = _job(request, policy)
    if request.kind == "script":
        raise invalid("find is of a job given by config, model or hf_config", "/script")
    values: dict[str, Any] = {**job, **_how(request), "find": request.find, "by": request.by}
    if request.find == "devices":
        from featurize.device.device_spec import device_names

        names = device_names() if request.devices is None else request.devices
        devices = [device_at(name, f"/devices/{place}") for place, name in enumerate(names)]
        if not devices:
            raise invalid("devices must name a GPU model", "/devices")
        values["devices"] = sorted({device.name for device in devices})
    else:
        values["device"] = device_at(request.device or DEFAULT_DEVICE, "/device").name
    return ClientQuestion("fit", values, config)


def plan_question(request: PlanRequest, policy: Policy) -> ClientQuestion:
    """Return the question of `/v1/plan`. Raises `Problem`."""
    job, _ = _job(request, policy)
    values = {name: getattr(request, name) for name in ("gpus", "global_batch", "checkpointing", "modes", "coverage")}
    return ClientQuestion("plan", {**job, **values, "device": device_at(request.device, "/device").name}, None)


def config_at(mapping: Mapping[str, Any], pointer: str, trust: Sequence[str] = ()) -> TrialConfig:
    """Return the trial config of a mapping that a client sent, read as data. Raises `Problem`."""
    with _as_problem(pointer):
        return config_of_row(json.dumps(mapping), trust)


def device_at(name: str, pointer: str) -> DeviceSpec:
    """Return the described GPU model. Raises `Problem` that lists the known ones."""
    with _as_problem(pointer):
        return describe_device(name)


def _job(request: JobFields, policy: Policy) -> tuple[dict[str, Any], TrialConfig | None]:
    """Return the job as JSON in its one form, and the trial config where it is one."""
    parallel = _parallel(request)
    readers: dict[str, Callable[[], tuple[dict[str, Any], TrialConfig | None]]] = {
        "config": lambda: _of_config(request, policy, parallel),
        "model": lambda: (_of_model(request, policy), None),
        "hf_config": lambda: (_of_hf_config(request), None),
        "script": lambda: (_of_script(request, policy), None),
    }
    job, config = readers[request.kind]()
    return {**job, "parallel": parallel}, config


def _of_config(request: JobFields, policy: Policy, parallel: str | None) -> tuple[dict[str, Any], TrialConfig | None]:
    from featurize.configs.trial import refusal

    assert request.config is not None
    config = config_at(request.config, "/config", policy.trust)
    if problem := refusal(config):
        raise invalid(problem, "/config")
    if parallel is not None and config.parallel is not None:
        raise invalid("the trial config has parallel already; leave this one out", "/parallel")
    return {"config": config.to_mapping()}, config


def _of_model(request: JobFields, policy: Policy) -> dict[str, Any]:
    from featurize.job.code_names import granted_model, library_problem

    arguments = request.arguments or {}
    assert request.model is not None
    with _as_problem("/model"):
        model = granted_model(request.model, policy.trust)
        if problem := library_problem(model, json.dumps(arguments), advice=_MODELS_TAKEN):
            raise invalid(problem, "/model")
    return {"model": request.model, "arguments": arguments, **_module_fields(request)}


def _of_hf_config(request: JobFields) -> dict[str, Any]:
    from featurize.configs.hf_config import hf_inputs, hf_model, lora_of, quantization_of

    assert request.hf_config is not None
    with _as_problem("/hf_config"):
        model, arguments, notes = hf_model(request.hf_config)
    quantized: dict[str, Any] = {}
    if quantization := request.hf_config.get("quantization_config"):
        with _as_problem("/hf_config/quantization_config"):
            quantized = quantization_of(quantization)
    lora: dict[str, Any] = {}
    if request.adapter_config is not None:
        with _as_problem("/adapter_config"):
            lora = {"lora": lora_of(request.adapter_config)}
    fields = _module_fields(request, quantized)
    if fields["inputs"] is None:
        with _as_problem("/batch_size" if request.batch_size is None else "/sequence_length"):
            fields["inputs"] = hf_inputs(request.hf_config, request.batch_size, request.sequence_length)
        fields["batch_size"] = None
    return {"model": model, "arguments": arguments, "notes": list(notes), **lora, **fields}


def _of_script(request: JobFields, policy: Policy) -> dict[str, Any]:
    if not policy.scripts:
        raise Problem(
            403,
            "scripts-not-allowed",
            "This service takes no scripts; its operator can start it with scripts=true.",
            (("/script", "not allowed here"),),
        )
    return {"script": request.script, "script_arguments": request.script_arguments}


def _module_fields(request: JobFields, quantized: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return what else a job of a module has; `quantized` are training settings that its configuration means."""
    from featurize.job.training_settings import Training
    from learn.estimation.requests import training_settings

    with _as_problem("/training"):
        if twice := sorted(quantized.keys() & request.training.keys()):
            raise UsageError(f"{', '.join(twice)}: quantization_config says it already; leave either out")
        training = training_settings({**request.training, **quantized})
        Training(**training)
    return {
        "inputs": request.inputs,
        "input_dtype": request.input_dtype,
        "batch_size": request.batch_size,
        "training": training,
    }


def _parallel(request: JobFields) -> str | None:
    """Return the layout as text. DeepSpeed's own files are the server's, and are not read."""
    from featurize.job.layout import parse_parallel

    if request.kind == "script" and request.parallel is not None:
        raise invalid("a script's launcher says how it is spread", "/parallel")
    with _as_problem("/parallel"):
        layout = parse_parallel(request.parallel)
    return None if layout is None else layout.text()


def _how(request: HowFields) -> dict[str, Any]:
    from featurize.memory.allocator_settings import AllocatorSettings

    if request.allocator is not None:
        with _as_problem("/allocator"):
            AllocatorSettings.parse(request.allocator)
    return {name: getattr(request, name) for name in _HOW}


def _fast_problem(request: EstimateRequest, config: TrialConfig | None, device: DeviceSpec) -> str | None:
    """Return why a job cannot be answered from its config's features alone, or None."""
    from learn.estimation.fast_estimates import fast_problem

    if config is None:
        return "method fast is for trial configs"
    given = [name for name in (*_TRACED_ONLY, "parallel") if getattr(request, name) is not None]
    given += ["coverage"] if request.coverage != 0.99 else []
    if given:
        return f"method fast has no {', '.join(given)}"
    if (depth := getattr(config, "depth", 0)) > _DEEPEST_AT_ONCE:
        return f"method fast takes a depth of at most {_DEEPEST_AT_ONCE}, and the config has {depth:,}; use method full"
    return fast_problem(config, device)


@contextmanager
def _as_problem(pointer: str) -> Iterator[None]:
    """Turn what the packages say of wrong input into a problem document of the field."""
    try:
        yield
    except CommandError as error:
        raise invalid(str(error), pointer) from error
    except (TypeError, ValueError, OverflowError, RecursionError, AttributeError, LookupError) as error:
        raise invalid(f"not understood: {type(error).__name__}", pointer) from error


class ServiceState:
    """The state besides the question that answers depend on: the code, and the models in the data folder.

    The names of the fitted models are read anew every few seconds.
    """

    def __init__(self, folder: DataFolder) -> None:
        self._models = folder.models
        self._looked_at = float("-inf")
        self._text = ""

    @property
    def text(self) -> str:
        """Return a text that changes where answers may."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            self._text = "\n".join([version_of("gpufarm") or "unknown", FEATURES_STAMP, *self._fitted()])
        return self._text

    def _fitted(self) -> list[str]:
        try:
            targets = sorted(entry.path for entry in os.scandir(self._models) if entry.is_dir())
            return [f"{os.path.basename(folder)}/{name}" for folder in targets for name in sorted(os.listdir(folder))]
        except OSError:
            return []
