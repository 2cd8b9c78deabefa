"""Typed bodies of requests and answers, and questions: requests in canonical form, whose key equal ones share.

Start reading at `JobFields`, `EstimateAnswer` and `estimate_question`. Whatever can be checked without building the
model is checked here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from conf.errors import CommandError, UsageError
from farm.serving.gate import Problem, invalid
from featurize.configs.trial import TrialConfig, config_of_row, refusal
from featurize.device.device_spec import DEFAULT_DEVICE, DeviceSpec, describe_device, device_names

Text = Annotated[str, StringConstraints(max_length=512)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Mib = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
JobName = Literal["config", "model", "hf_config", "script"]
JOBS: tuple[JobName, ...] = ("config", "model", "hf_config", "script")
_JOBS_WITH: Mapping[str, tuple[JobName, ...]] = {  # field -> kinds of job that take it
    "inputs": ("model", "hf_config"),
    "batch_size": ("model", "hf_config"),
    "sequence_length": ("hf_config",),
    "training": ("model", "hf_config"),
    "adapter_config": ("hf_config",),
    "arguments": ("model",),
    "script_arguments": ("script",),
}
MLP_EXAMPLE = {"family": "mlp", "batch_size": 256, "input_size": 4096, "classes": 10, "depth": 4}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class JobFields(_Body):
    """A training job: exactly one of `config`, `model`, `hf_config` and `script`."""

    config: dict[str, Any] | None = Field(
        None, description="a trial config, as `runs.config` holds it", examples=[MLP_EXAMPLE]
    )
    model: Text | None = Field(
        None,
        description="`MODULE:FACTORY` of torchvision, timm or transformers",
        examples=["torchvision.models:resnet50"],
    )
    hf_config: dict[str, Any] | None = Field(
        None,
        description="a Hugging Face config.json; `architectures` names the model class, and bitsandbytes' "
        "`quantization_config` how its weights are stored",
    )
    adapter_config: dict[str, Any] | None = Field(
        None,
        description="of `hf_config`: a LoRA adapter, as peft's adapter_config.json holds it",
        examples=[{"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj"]}],
    )
    script: Annotated[str, StringConstraints(min_length=1, max_length=262_144)] | None = Field(
        None, description="a training script's text, where the service takes scripts"
    )
    script_arguments: list[Text] = Field(default_factory=list, max_length=200)
    arguments: dict[str, Any] | None = Field(None, description="of `model`: the factory's keyword arguments")
    inputs: list[Any] | dict[str, Any] | None = Field(
        None,
        description="of `model` and `hf_config`: shapes, by position or by name; see learn.estimate",
        examples=[[64, 3, 224, 224]],
    )
    input_dtype: Text = Field("float32", description="of inputs that name no type")
    batch_size: Count | None = Field(None, description="of `model`: scales the inputs; of `hf_config`: samples")
    sequence_length: Count | None = Field(None, description="of `hf_config`: tokens of a sample")
    training: dict[str, Any] = Field(
        default_factory=dict, description="training settings of `model` and `hf_config`: optimizer, precision, ..."
    )
    parallel: dict[str, Any] | Text | None = Field(None, description="several GPUs, as in `ddp=8`; see learn.estimate")

    @model_validator(mode="after")
    def _one_job(self) -> JobFields:
        given = [name for name in JOBS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(JOBS)}; got {' and '.join(given) or 'none'}")
        job = given[0]
        mappings = {name for name in ("adapter_config", "arguments") if getattr(self, name) is not None}
        wrong = [
            name for name, jobs in _JOBS_WITH.items() if (getattr(self, name) or name in mappings) and job not in jobs
        ]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: not of a job that is given by {job}")
        if job == "model" and self.inputs is None:
            raise ValueError("model needs inputs, as in [64, 3, 224, 224]")
        return self

    @property
    def kind(self) -> JobName:
        """Return the kind of the job: which of the four fields is given."""
        return next(name for name in JOBS if getattr(self, name) is not None)


class HowFields(_Body):
    """How a job is estimated, as `learn.estimate` takes it."""

    coverage: Annotated[float, Field(gt=0.5, le=0.99)] = Field(
        0.99, description="share of jobs that stay below the bound"
    )
    machine: Literal["current", "eager", "described"] | None = None
    loop: Literal["resident", "pipeline"] | None = None
    allocator: Text | None = Field(None, description="the caching allocator's settings, as PYTORCH_ALLOC_CONF has them")
    workspaces: Literal["guessed"] | None = None


class EstimateRequest(JobFields, HowFields):
    """One job on one GPU model."""

    device: Text = Field(DEFAULT_DEVICE, description="a GPU model that /v1/devices lists")
    method: Literal["full", "fast"] = Field(
        "full", description="full: traced; fast: a trial config's features and fitted trees, less exact, in about 1 ms"
    )


class BatchRequest(_Body):
    """Many jobs, each answered as a single one is."""

    jobs: list[dict[str, Any]] = Field(min_length=1, description="bodies of /v1/estimate")


class FitRequest(JobFields, HowFields):
    """Which GPU models a job fits, or the largest batch that fits one."""

    find: Literal["devices", "largest_batch"] = "devices"
    devices: list[Text] | None = Field(None, max_length=200, description="of find=devices; default all")
    device: Text | None = Field(None, description="of find=largest_batch")
    by: Literal["bound", "point"] = Field("bound", description="what has to fit")

    @model_validator(mode="after")
    def _fitting(self) -> FitRequest:
        if self.find == "devices" and self.device is not None:
            raise ValueError("device is of find=largest_batch; find=devices takes devices")
        if self.find == "largest_batch" and self.devices is not None:
            raise ValueError("devices is of find=devices; find=largest_batch takes device")
        return self


class KnownFigures(_Body):
    """A job whose figures are known already."""

    name: Text = "job"
    memory_mib: Mib | None = None
    memory_bound_mib: Mib = Field(description="what 99 of 100 such jobs stay below, or the measured peak")
    step_ms: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    smact: Share | None = None
    smocc: Share | None = None
    drama: Share | None = None


class AdmitJob(_Body):
    """A job of an admission: a trial config, or its figures."""

    config: dict[str, Any] | None = None
    figures: KnownFigures | None = None

    @model_validator(mode="after")
    def _one(self) -> AdmitJob:
        if (self.config is None) == (self.figures is None):
            raise ValueError("give config or figures, and not both")
        return self


class AdmitGpu(_Body):
    """The GPU that a job would join."""

    device: Text = DEFAULT_DEVICE
    memory_mib: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        None, description="what jobs can use; default that of the GPU model"
    )
    used_mib: Mib | None = Field(None, description="as measured now")
    jobs: list[AdmitJob] = Field(default_factory=list, max_length=16)


class AdmitRequest(_Body):
    """The question whether a job may join the jobs of a GPU."""

    job: AdmitJob
    gpu: AdmitGpu
    risk: Annotated[float, Field(ge=0, lt=1)] = 0.01
    max_slowdown: Annotated[float, Field(ge=1, le=1e6)] | None = 2.0


class PlanRequest(JobFields):
    """A job's layouts on several GPUs."""

    gpus: Annotated[int, Field(ge=1, le=16_384)]
    device: Text = DEFAULT_DEVICE
    global_batch: Count | None = None
    checkpointing: list[Literal["none", "selective", "full"]] | None = None
    modes: list[Literal["pp", "ddp", "fsdp", "cp", "tp", "ep"]] | None = None
    coverage: Annotated[float, Field(gt=0.5, le=0.99)] = 0.99

    @model_validator(mode="after")
    def _of_model(self) -> PlanRequest:
        if self.kind not in ("model", "hf_config"):
            raise ValueError("a plan is of a job given by model or hf_config")
        return self


class NoteFields(BaseModel):
    """A remark on an estimate. `code` stays the same where `text` is reworded."""

    code: str
    severity: Literal["problem", "warning", "info"]
    text: str
    targets: list[str] = Field(description="the targets of the figures that it is on; empty: of the whole estimate")


class EstimateFields(BaseModel):
    """The figures of one job on one GPU model; `learn.Estimate` describes them all. null: not known."""

    model_config = {"extra": "allow"}

    peak_memory_mib: float
    upper_mib: float | None = Field(description="what a share `coverage` of jobs stay below")
    bound_held_out: dict[str, float | str] = Field(
        description="the `share` of left-out rows that the bound held, how many `rows` there were, and in how many "
        "`groups` of which `kind`; empty: unchecked"
    )
    fits: bool | None = Field(description="whether the job fits into the empty card, by the bound where there is one")
    smact: float | None
    smocc: float | None
    drama: float | None
    step_time_ms: float | None
    device: str
    device_memory_mib: float | None
    warnings: list[str] = Field(description="the texts of `notes`")
    notes: list[NoteFields]
    answered_by: dict[str, str]


class DoneAnswer(BaseModel):
    """Fields of every answer to a question."""

    id: str
    status: Literal["done"]
    method: Literal["fast", "full"]


class EstimateAnswer(DoneAnswer):
    """An estimate."""

    estimate: EstimateFields


class Pending(BaseModel):
    """A question that waits for its trace; GET its `url` for the answer."""

    id: str
    status: Literal["queued", "running"]
    url: str
    retry_after_s: float


class ProblemDocument(BaseModel):
    """A problem (RFC 9457); `errors` names the fields."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    errors: list[FieldError] | None = None


class FieldError(BaseModel):
    """pointer: JSON Pointer of the field in the request's body."""

    pointer: str
    detail: str


class FitAnswer(DoneAnswer):
    """Devices or batches that fit, as `learn.devices_that_fit` and `learn.largest_batch` have it."""

    fit: dict[str, Any]


class PlanAnswer(DoneAnswer):
    """Layouts on several GPUs, the quickest first, as `learn.plan` has them."""

    plan: dict[str, Any]


class SlowdownFields(BaseModel):
    """Slowdowns of one job; null: a utilization is not known."""

    name: str
    median: float | None
    p90: float | None


class AdmitAnswer(BaseModel):
    """The answer to whether a job may join, and why; `learn.admit` describes the figures."""

    admitted: bool
    why: str
    slowdowns: list[SlowdownFields]
    risk: float
    coverage: float
    bound_mib: float
    memory_mib: float


class BatchAnswer(BaseModel):
    """One result for each job, in order."""

    results: list[EstimateAnswer | Pending | ProblemDocument]


class DeviceFields(BaseModel):
    """A GPU model."""

    name: str
    memory_mib: float
    vendor: str


class DevicesAnswer(BaseModel):
    """The GPU models that are described."""

    devices: list[DeviceFields]


class Health(BaseModel):
    """The health of one process of the service."""

    ready: bool
    trace_pool_age_s: float | None


_KEY_CHARACTERS = 32
_MODELS_TAKEN = "name a model of torchvision, timm or transformers, or of a module that the service's operator trusts"
_TRACED_ONLY = ("loop", "allocator", "workspaces")
_DEEPEST_AT_ONCE = 128  # depth that takes some 3 ms, which blocks other answers of the process


@dataclass(frozen=True)
class Policy:
    """The operator's permissions. trust: modules whose models clients may name; scripts: whether scripts may run."""

    trust: tuple[str, ...] = ()
    scripts: bool = False


@dataclass(frozen=True)
class ClientQuestion:
    """One question in canonical form.

    kind      estimate, fit or plan
    job       JSON from which a child process makes the model and its inputs
    options   keywords of the function of `learn` that answers, as JSON
    config    the trial config, if the job is one
    fast      whether fitted trees answer it, from the config's features alone
    """

    kind: str
    job: Mapping[str, Any]
    options: Mapping[str, Any]
    config: TrialConfig | None
    fast: bool = False

    @property
    def text(self) -> str:
        """Return the question as JSON, the same for equal questions."""
        return json.dumps({"kind": self.kind, "job": self.job, "options": self.options}, sort_keys=True)

    def key(self, state: str) -> str:
        """Return the question's id. `state` names the code and the models that answer."""
        return hashlib.sha256(f"{state}\n{self.text}".encode()).hexdigest()[:_KEY_CHARACTERS]


def request_at(body: Mapping[str, Any], pointer: str) -> EstimateRequest:
    """Return the request of one job. Raises `Problem`, whose pointers begin with `pointer`, where the body stands."""
    try:
        return EstimateRequest.model_validate(body)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False), pointer) from error


def invalid_body(errors: Any, prefix: str) -> Problem:
    """Return the problem of a body that the schema refuses, each field by its JSON Pointer."""
    fields = []
    for error in errors:
        if error["type"] == "json_invalid":
            return Problem(HTTPStatus.BAD_REQUEST, "invalid-request", "The body is not valid JSON.")
        path = [str(part).replace("~", "~0").replace("/", "~1") for part in error["loc"] if part != "body"]
        fields.append((f"{prefix}{''.join(f'/{part}' for part in path)}", error["msg"].removeprefix("Value error, ")))
    detail = "; ".join(f"{pointer or 'the body'}: {text}" for pointer, text in fields[:5])
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", detail, tuple(fields))


def estimate_question(request: EstimateRequest, policy: Policy) -> ClientQuestion:
    """Return the question of `/v1/estimate`. Raises `Problem`."""
    device = device_at(request.device, "/device")
    job, options, config = _job(request, policy)
    fast = request.method == "fast"
    if fast and (problem := _fast_problem(request, config, device)):
        raise invalid(problem, "/method")
    return ClientQuestion("estimate", job, {**options, **_how(request), "device": device.name}, config, fast)


def fit_question(request: FitRequest, policy: Policy) -> ClientQuestion:
    """Return the question of `/v1/fit`. Raises `Problem`."""
    job, options, config = _job(request, policy)
    if request.kind == "script":
        raise invalid("find is of a job given by config, model or hf_config", "/script")
    options = {**options, **_how(request), "by": request.by}
    if request.find == "devices":
        names = device_names() if request.devices is None else request.devices
        devices = [device_at(name, f"/devices/{place}") for place, name in enumerate(names)]
        if not devices:
            raise invalid("devices must name a GPU model", "/devices")
        options["devices"] = sorted({device.name for device in devices})
    else:
        options["device"] = device_at(request.device or DEFAULT_DEVICE, "/device").name
    return ClientQuestion("fit", job, options, config)


def plan_question(request: PlanRequest, policy: Policy) -> ClientQuestion:
    """Return the question of `/v1/plan`. Raises `Problem`."""
    job, options, _ = _job(request, policy)
    given = {name: getattr(request, name) for name in ("gpus", "global_batch", "checkpointing", "modes", "coverage")}
    return ClientQuestion("plan", job, {**options, **given, "device": device_at(request.device, "/device").name}, None)


def config_at(mapping: Mapping[str, Any], pointer: str, trust: Sequence[str] = ()) -> TrialConfig:
    """Return the trial config of a mapping that a client sent, read as data. Raises `Problem`."""
    with _as_problem(pointer):
        return config_of_row(json.dumps(mapping), trust)


def device_at(name: str, pointer: str) -> DeviceSpec:
    """Return the described GPU model. Raises `Problem` that lists the known ones."""
    with _as_problem(pointer):
        return describe_device(name)


def _job(request: JobFields, policy: Policy) -> tuple[dict[str, Any], dict[str, Any], TrialConfig | None]:
    """Return the job and its options as canonical JSON, and the trial config if it is one."""
    parallel = _parallel(request)
    options: dict[str, Any] = {} if parallel is None else {"parallel": parallel}
    if request.script is not None:
        if not policy.scripts:
            detail = "This service takes no scripts; its operator can start it with scripts=true."
            raise Problem(403, "scripts-not-allowed", detail, (("/script", "not allowed here"),))
        return {"script": request.script, "script_arguments": request.script_arguments}, options, None
    if request.config is None:
        job: dict[str, Any] = {"inputs": request.inputs, "batch_size": request.batch_size}
        implied: dict[str, Any] = {}
        if request.model is not None:
            job |= _named_model(request.model, request.arguments or {}, policy)
        else:
            model, implied = _hf_model(request)
            job |= model
        return job, {**options, "input_dtype": request.input_dtype, **_training(request, implied)}, None
    config = config_at(request.config, "/config", policy.trust)
    if problem := refusal(config):
        raise invalid(problem, "/config")
    if parallel is not None and config.parallel is not None:
        raise invalid("the trial config has parallel already; leave this one out", "/parallel")
    return {"config": config.to_mapping()}, options, config


def _named_model(name: str, arguments: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    """Return the model and its arguments."""
    from featurize.job.code_names import granted_model, library_problem

    with _as_problem("/model"):
        model = granted_model(name, policy.trust)
        if problem := library_problem(model, json.dumps(arguments), advice=_MODELS_TAKEN):
            raise invalid(problem, "/model")
    return {"model": name, "arguments": arguments}


def _hf_model(request: JobFields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model of a Hugging Face config, its inputs if none are given, and the training settings implied."""
    from featurize.configs.hf_config import hf_inputs, hf_model, lora_of, quantization_of

    assert request.hf_config is not None
    with _as_problem("/hf_config"):
        model, arguments, notes = hf_model(request.hf_config)
    job: dict[str, Any] = {"model": model, "arguments": arguments, "notes": notes}
    implied: dict[str, Any] = {}
    if quantization := request.hf_config.get("quantization_config"):
        with _as_problem("/hf_config/quantization_config"):
            implied = quantization_of(quantization)
    if request.adapter_config is not None:
        with _as_problem("/adapter_config"):
            job["lora"] = lora_of(request.adapter_config)
    if request.inputs is None:
        with _as_problem("/batch_size" if request.batch_size is None else "/sequence_length"):
            inputs = hf_inputs(request.hf_config, request.batch_size, request.sequence_length)
        job |= {"inputs": inputs, "batch_size": None}
    return job, implied


def _training(request: JobFields, implied: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training settings, checked, with those that follow from the job."""
    from featurize.job.training_settings import Training
    from learn.estimation.requests import training_settings

    with _as_problem("/training"):
        if repeated := sorted(implied.keys() & request.training.keys()):
            raise UsageError(f"{', '.join(repeated)}: quantization_config says it already; leave either out")
        training = training_settings({**request.training, **implied})
        Training(**training)
    return training


def _parallel(request: JobFields) -> str | None:
    """Return the layout as text. DeepSpeed's own files are the server's, and are not read."""
    from featurize.job.layout import parse_parallel

    if request.kind == "script" and request.parallel is not None:
        raise invalid("a script's launcher says how it is spread", "/parallel")
    with _as_problem("/parallel"):
        layout = parse_parallel(request.parallel)
    return None if layout is None else layout.text()


def _how(request: HowFields) -> dict[str, Any]:
    from featurize.memory.allocator import AllocatorSettings

    if request.allocator is not None:
        with _as_problem("/allocator"):
            AllocatorSettings.parse(request.allocator)
    return request.model_dump(include=set(HowFields.model_fields), exclude_none=True)


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
    """Turn the packages' errors about wrong input into a problem document of the field."""
    try:
        yield
    except CommandError as error:
        raise invalid(str(error), pointer) from error
    except (TypeError, ValueError, OverflowError, RecursionError, AttributeError, LookupError) as error:
        raise invalid(f"not understood: {type(error).__name__}", pointer) from error
