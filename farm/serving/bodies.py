"""Bodies of requests and answers, typed. Start reading at `JobFields` and `EstimateAnswer`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from featurize.device.device_spec import DEFAULT_DEVICE

Text = Annotated[str, StringConstraints(max_length=512)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Mib = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
JobName = Literal["config", "model", "hf_config", "script"]
JOBS: tuple[JobName, ...] = ("config", "model", "hf_config", "script")
_OF_MODELS = ("inputs", "batch_size", "sequence_length", "training")
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
        wrong = [] if job in ("model", "hf_config") else [name for name in _OF_MODELS if getattr(self, name)]
        wrong += ["adapter_config"] if self.adapter_config is not None and job != "hf_config" else []
        wrong += ["arguments"] if self.arguments is not None and job != "model" else []
        wrong += ["sequence_length"] if self.sequence_length is not None and job == "model" else []
        wrong += ["script_arguments"] if self.script_arguments and job != "script" else []
        if wrong:
            raise ValueError(f"{', '.join(dict.fromkeys(wrong))}: not of a job that is given by {job}")
        if job == "model" and self.inputs is None:
            raise ValueError("model needs inputs, as in [64, 3, 224, 224]")
        return self

    @property
    def kind(self) -> JobName:
        """Return which of the four names the job."""
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


class EstimateAnswer(BaseModel):
    """An estimate."""

    id: str
    status: Literal["done"]
    method: Literal["fast", "full"]
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


class FitAnswer(BaseModel):
    """Devices or batches that fit, as `learn.devices_that_fit` and `learn.largest_batch` have it."""

    id: str
    status: Literal["done"]
    method: Literal["full"]
    fit: dict[str, Any]


class PlanAnswer(BaseModel):
    """Layouts on several GPUs, the quickest first, as `learn.plan` has them."""

    id: str
    status: Literal["done"]
    method: Literal["full"]
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
