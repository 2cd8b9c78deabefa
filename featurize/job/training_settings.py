"""Training settings of a job: the trial config, which families extend, and those of models outside families.

Start reading at `TrialConfig`; `featurize.configs.trial` makes one from a mapping. `Training` holds the settings of any
library's model, and the rules by which they exclude each other. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeAlias, TypedDict, get_type_hints

from conf.errors import (
    BOOLEAN,
    COUNT,
    Allowed,
    UsageError,
    integer,
    is_finite,
    one_of,
    optional,
    problem_of_value,
    refuse,
    shown,
)
from featurize.job.layout import Parallel, parse_parallel

IMPLEMENTATIONS = ("foreach", "fused", "loop")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Properties of an optimizer that are known before `featurize.training.training_step` makes it.

    states: number of float32 tensors of its parameter's size that it keeps on the device.
    implementations: torch's implementations that it has.
    elementwise: its step treats every element alike, so that ranks that share a parameter update only their parts.
    shared: it runs on parameters that ranks share (DTensor).
    on_host: DeepSpeed-like offloading runs it on the CPU.
    package: package that it needs besides torch.
    cuda_only: it does not run on other devices.
    """

    states: float
    implementations: tuple[str, ...] = ("loop",)
    elementwise: bool = True
    shared: bool = True
    on_host: bool = False
    package: str | None = None
    cuda_only: bool = False


_BITSANDBYTES: dict[str, Any] = {"elementwise": False, "package": "bitsandbytes", "cuda_only": True}
OPTIMIZERS: Mapping[str, Optimizer] = {
    "adam": Optimizer(states=2, implementations=IMPLEMENTATIONS, on_host=True),
    "adamw": Optimizer(states=2, implementations=IMPLEMENTATIONS, on_host=True),
    "sgd": Optimizer(states=0, implementations=IMPLEMENTATIONS, on_host=True),
    "momentum": Optimizer(states=1, implementations=IMPLEMENTATIONS, on_host=True),
    "nesterov": Optimizer(states=1, implementations=IMPLEMENTATIONS, on_host=True),
    "rmsprop": Optimizer(states=1, implementations=("foreach", "loop")),
    "adagrad": Optimizer(states=1, implementations=IMPLEMENTATIONS, on_host=True),
    "adafactor": Optimizer(states=0, implementations=("foreach", "loop"), elementwise=False, shared=False),
    "transformers_adafactor": Optimizer(states=0, elementwise=False, shared=False, package="transformers"),
    "lion": Optimizer(states=1),
    "adamw_8bit": Optimizer(states=0.5, **_BITSANDBYTES),
    "paged_adamw_8bit": Optimizer(states=0, **_BITSANDBYTES),
    "paged_adamw": Optimizer(states=0, **_BITSANDBYTES),
}
FITTED_OPTIMIZERS = ("adam", "adamw", "sgd", "momentum")  # those that the published models were fitted on
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")  # bf16 and fp16 are autocast over fp32 weights
# Bits of a number as a product reads it: sign, exponent and mantissa.
MATH_BITS: Mapping[str, int] = MappingProxyType({"fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16})
ACTIVATIONS = (
    "relu",
    "leaky_relu",
    "prelu",
    "elu",
    "selu",
    "gelu",
    "tanh",
    "silu",
    "softplus",
    "mish",
    "identity",
)


Activation = Annotated[str, one_of(ACTIVATIONS)]
MOST_REPEATS = 10_000  # of a part of a model: more would fill the memory of a process that only reads the config
Repeats = Annotated[int, integer(1, MOST_REPEATS)]
Rate = Annotated[float, Allowed(lambda value: is_finite(value) and 0 <= value < 1, "a number in [0, 1)")]


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Base of every family's config. Raises `ValueError` that names the field, the rule and the value.

    A subclass adds its fields, and may have `problems`; its `family` is its module's name unless it has one. A field's
    annotation holds its allowed values, unless these are the integers from 1 on, or true and false. `parallel` is text
    such as `ddp=2`, in the canonical form of `Parallel.text`; None, also for `ddp=1`, is one GPU.
    """

    family: ClassVar[str]

    batch_size: int
    optimizer: Annotated[str, one_of(OPTIMIZERS)] = "adam"
    precision: Annotated[str, one_of(PRECISIONS)] = "fp32"
    activation_checkpointing: bool = False
    cudnn_benchmark: bool = False
    channels_last: bool = False
    parallel: str | None = None

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "family"):
            cls.family = cls.__module__.rpartition(".")[2]

    def __post_init__(self) -> None:
        problems = self.problems_of_values()
        try:
            layout = self.layout
            object.__setattr__(self, "parallel", None if layout is None else layout.text())
            if not problems and (problem := sharing_problem(self.optimizer, layout)):
                problems.append(problem)
        except UsageError as error:
            rule = str(error).removeprefix("parallel").lstrip(": ").replace("; ", ", ")
            problems.append(f"parallel cannot be {shown(self.parallel)}: {rule}")
        refuse(problems or self.problems(), f"{self.family}: ")

    def problems_of_values(self) -> list[str]:
        """Return the problem of each field whose value is not allowed. A subclass extends it for a field that its
        annotation cannot describe."""
        return problems_of_fields(self)

    def problems(self) -> Iterable[str]:
        """Return problems between fields, such as two values that exclude each other. Each alone is allowed."""
        return ()

    @property
    def layout(self) -> Parallel | None:
        """The layout of the trial over GPUs; None if it runs on one."""
        return parse_parallel(self.parallel)

    @property
    def ranks(self) -> int:
        """Number of GPUs of the trial, with a process each."""
        return 1 if self.layout is None else self.layout.ranks

    def to_mapping(self) -> dict[str, Any]:
        """Return `{"family": ..., field: value, ...}`, which `runs.config` holds as JSON. A trial on one GPU has no
        `parallel` entry, so that older configs keep their hashes."""
        values = asdict(self)
        if self.parallel is None:
            del values["parallel"]
        return {"family": self.family, **values}


def sharing_problem(optimizer: str, layout: Parallel | None) -> str | None:
    """Return why an optimizer does not run on a layout's parameters; None if it does."""
    if layout is None or not layout.shards or layout.flat or OPTIMIZERS[optimizer].shared:
        return None
    choices = ", ".join(name for name, known in OPTIMIZERS.items() if known.shared)
    return f"optimizer={optimizer} does not run on parameters that ranks share (DTensor); choose one of {choices}"


TRAINING_FIELDS = tuple(field.name for field in fields(TrialConfig))


_RULES_OF_TYPES: Mapping[Any, tuple[Allowed, ...]] = {int: (COUNT,), bool: (BOOLEAN,)}


@functools.cache
def rules_of(config: type) -> Mapping[str, tuple[Allowed, ...]]:
    """Return the allowed values of each field of a config: those of its annotation, or else of its type."""
    hints = get_type_hints(config, include_extras=True)
    return {
        field.name: _RULES_OF_TYPES.get(hints[field.name], getattr(hints[field.name], "__metadata__", ()))
        for field in fields(config)
    }


def problems_of_fields(settings: TrialConfig | Training) -> list[str]:
    """Return the problem of each field whose value is not allowed."""
    kind: type = type(settings)
    checked = [problem_of_value(name, getattr(settings, name), rules) for name, rules in rules_of(kind).items()]
    return [problem for problem in checked if problem is not None]


# Precisions with weights, gradients and optimizer state in that type, without autocast.
LOW_PRECISIONS = ("bf16-true", "fp16-true")
ALL_PRECISIONS = (*PRECISIONS, *LOW_PRECISIONS)
# `mode` of torch.compile, and the modes that run the model as CUDA graphs (torch/_inductor/__init__.py).
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPH_MODES = ("reduce-overhead", "max-autotune")
CHECKPOINTING = ("full", "selective")
_ON_HOST = tuple(name for name, optimizer in OPTIMIZERS.items() if optimizer.on_host)
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # torchao.float8.Float8LinearRecipeName
# How the host runs the job: PyTorch operator by operator, torch.compile's code, Megatron-LM and libraries built on it,
# or the whole step as CUDA graphs.
EAGER, COMPILED, MEGATRON, GRAPHS = FRAMEWORKS = ("eager", "compiled", "megatron", "graphs")
QUANTIZATIONS = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")
_POSITIVE = Allowed(lambda value: is_finite(value) and value > 0, "a number > 0")
_NOT_NEGATIVE = Allowed(lambda value: is_finite(value) and value >= 0, "a number >= 0")
_NAMES = Allowed(
    lambda value: isinstance(value, tuple | list) and all(isinstance(name, str) for name in value),
    "a list of modules' names",
)
_COMPILE = Allowed(
    lambda value: isinstance(value, bool) or value in COMPILE_MODES, f"true, false or one of {', '.join(COMPILE_MODES)}"
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training settings of a model that is not a family's.

    Args:
        optimizer: One of `OPTIMIZERS`.
        precision: `fp32`, `tf32`; `bf16` and `fp16`: autocast over the model's weights; `bf16-true` and `fp16-true`:
            weights, gradients and optimizer state in that type.
        cudnn_benchmark: Whether cuDNN searches for its fastest algorithms.
        channels_last: Whether model and inputs are in channels-last format.
        implementation: `foreach`, `fused` or `loop`; None is torch's own choice on a GPU.
        weight_decay: The optimizer's factor. None: its library's default, 0.01 for AdamW and 0 for the others.
        accumulation: Micro-steps, each of one batch, before the optimizer's step. Gradients live over all of them.
        clip_norm: Largest norm of all gradients together; None does not clip.
        clip_value: Largest absolute value of a gradient; None does not clip.
        set_to_none: Whether `zero_grad` frees the gradients; False fills them with zeros.
        zero_grad: `before_forward`; `after_forward`: between the loss and the backward pass, so that the last step's
            gradients live through the forward pass.
        holds_output: Whether output and loss live until the next step's, as variables of a loop do. False: the step is
            a function, which leaves no output behind. A resident loop never holds them.
        grad_scaler: Whether a `GradScaler` scales the loss. None: with precision=fp16 only.
        ema: Whether an exponential moving average of all weights and buffers is kept on the device.
        optimizer_in_backward: Whether each weight is updated, and its gradient freed, as soon as the gradient is
            complete.
        checkpointing: Recomputation of the repeated blocks' activations in the backward pass: `full`, or `selective`:
            all but the results of matrix products and attention.
        checkpoint_every: Every n-th block is checkpointed.
        checkpoint_reentrant: Whether to use the reentrant variant of `torch.utils.checkpoint`.
        offload_activations: Whether saved tensors lie in host memory until the backward pass (`save_on_cpu`).
        offload_optimizer: Whether state and step of the optimizer are on the host; weights are copied back.
        compile: Whether the model is compiled (`torch.compile`), with Inductor. The loss and the optimizer are not. A
            text from `COMPILE_MODES` is torch.compile's mode; True is `default`.
        framework: Framework that launches the kernels, one of `FRAMEWORKS`: it decides the host's time. None:
            `compiled` with `compile`, else `megatron` where modules or stages are split over ranks, else `eager`.
        float8: Recipe of 8-bit floats in linear layers, as torchao's `convert_to_float8_training` takes it. Layers with
            a size that is not a multiple of 16 are not converted.
        float8_skip: Names of the linear layers that are not converted. None: the output layer.
        float8_all_gather: Whether FSDP2 casts weights before it gathers them (`enable_fsdp_float8_all_gather` of
            torchao).
        quantize: Frozen weights of linear layers are stored in 4 or 8 bits; `-dq` quantizes the block constants too.
        quantize_skip: Names of the linear layers that are not quantized. None: the output layer, as in transformers.
        quantize_keeps_inputs: Whether 4-bit layers keep their inputs for the backward pass, as bitsandbytes before
            0.43.2.

    Raises:
        UsageError: A value is unknown, or two settings exclude each other.
    """

    optimizer: Annotated[str, one_of(OPTIMIZERS)] = "adam"
    precision: Annotated[str, one_of(ALL_PRECISIONS)] = "fp32"
    cudnn_benchmark: bool = False
    channels_last: bool = False
    implementation: Annotated[str | None, optional(one_of(IMPLEMENTATIONS))] = None
    weight_decay: Annotated[float | None, optional(_NOT_NEGATIVE)] = None
    accumulation: int = 1
    clip_norm: Annotated[float | None, optional(_POSITIVE)] = None
    clip_value: Annotated[float | None, optional(_POSITIVE)] = None
    set_to_none: bool = True
    zero_grad: Annotated[str, one_of(("before_forward", "after_forward"))] = "before_forward"
    holds_output: bool = True
    grad_scaler: Annotated[bool | None, optional(BOOLEAN)._replace(words="true, false or null")] = None
    ema: bool = False
    optimizer_in_backward: bool = False
    checkpointing: Annotated[str | None, optional(one_of(CHECKPOINTING))] = None
    checkpoint_every: int = 1
    checkpoint_reentrant: bool = False
    offload_activations: bool = False
    offload_optimizer: bool = False
    compile: Annotated[bool | str, _COMPILE] = False
    framework: Annotated[str | None, optional(one_of(FRAMEWORKS))] = None
    float8: Annotated[str | None, optional(one_of(FLOAT8_RECIPES))] = None
    float8_skip: Annotated[tuple[str, ...] | None, optional(_NAMES)] = None
    float8_all_gather: bool = False
    quantize: Annotated[str | None, optional(one_of(QUANTIZATIONS))] = None
    quantize_skip: Annotated[tuple[str, ...] | None, optional(_NAMES)] = None
    quantize_keeps_inputs: bool = False

    def __post_init__(self) -> None:
        refuse(problems_of_fields(self) or self._exclusions())
        for name in ("float8_skip", "quantize_skip"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    @property
    def scales_loss(self) -> bool:
        """Return whether a `GradScaler` is used."""
        return self.precision == "fp16" if self.grad_scaler is None else self.grad_scaler

    def beyond_trials(self) -> dict[str, Any]:
        """Return the settings that trial configs lack, and an optimizer that no model was fitted on. The framework is
        not among them, as it changes the host's time alone."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
            and not (field.name == "optimizer" and self.optimizer in FITTED_OPTIMIZERS)
            and not (field.name == "precision" and self.precision in PRECISIONS)
            and field.name not in ("cudnn_benchmark", "channels_last", "framework")
        }

    def beyond_fits(self) -> tuple[str, ...]:
        """Return the settings among `beyond_trials`, as `name=value`, that no fitted model covers.

        When gradients are freed, and weight decay, are not among them: tensors that live longer, or are copied, are in
        the traced peak, which fitted models scale.
        """
        beyond = self.beyond_trials().items()
        return tuple(f"{name}={value}" for name, value in beyond if name not in ("zero_grad", "weight_decay"))

    def _exclusions(self) -> list[str]:
        known = OPTIMIZERS[self.optimizer].implementations
        rules = (
            (
                self.implementation not in (None, *known),
                f"optimizer={self.optimizer} has no implementation={self.implementation}; it has {', '.join(known)}",
            ),
            (self.clip_norm is not None and self.clip_value is not None, "give either clip_norm or clip_value"),
            (self.checkpointing is None and self.checkpoint_every != 1, "checkpoint_every needs checkpointing"),
            (self.checkpointing is None and self.checkpoint_reentrant, "checkpoint_reentrant needs checkpointing"),
            (
                self.checkpointing == "selective" and self.checkpoint_reentrant,
                "checkpointing=selective is not reentrant: leave checkpoint_reentrant out",
            ),
            (self.quantize is None and self.quantize_skip is not None, "quantize_skip needs quantize"),
            (self.quantize is None and self.quantize_keeps_inputs, "quantize_keeps_inputs needs quantize"),
            (self.float8 is None and self.float8_skip is not None, "float8_skip needs float8"),
            (self.float8_all_gather and self.float8 != "tensorwise", "float8_all_gather needs float8=tensorwise"),
            (self.float8 is not None and self.quantize is not None, "give either float8 or quantize"),
            (
                self.grad_scaler is True and self.precision == "fp16-true",
                "grad_scaler refuses fp16 gradients: take precision=fp16 with it",
            ),
            (
                self.offload_optimizer and self.optimizer not in _ON_HOST,
                f"offload_optimizer runs {', '.join(_ON_HOST)} on the host, not {self.optimizer}",
            ),
            (self.offload_optimizer and self.scales_loss, "offload_optimizer has no GradScaler: take precision=bf16"),
            (self.offload_optimizer and self.implementation is not None, "offload_optimizer takes no implementation"),
        )
        problems = [problem for broken, problem in rules if broken]
        if self.optimizer_in_backward:
            others = {
                "accumulation": self.accumulation != 1,
                "clip_norm": self.clip_norm is not None,
                "clip_value": self.clip_value is not None,
                "grad_scaler": self.scales_loss,
                "offload_optimizer": self.offload_optimizer,
                "set_to_none=false": self.set_to_none is False,
                "zero_grad=after_forward": self.zero_grad == "after_forward",
            }
            if given := [name for name, value in others.items() if value]:
                problems.append(f"optimizer_in_backward frees each gradient at once: leave {', '.join(given)} out")
        return problems


TrainingSettings: TypeAlias = Training | TrialConfig  # a trial config has the first four fields only


class TrainingKeywords(TypedDict, total=False):
    """The fields of `Training` as keywords of a call; None stands for the default."""

    optimizer: str | None
    precision: str | None
    cudnn_benchmark: bool | None
    channels_last: bool | None
    implementation: str | None
    weight_decay: float | None
    accumulation: int | None
    clip_norm: float | None
    clip_value: float | None
    set_to_none: bool | None
    zero_grad: str | None
    holds_output: bool | None
    grad_scaler: bool | None
    ema: bool | None
    optimizer_in_backward: bool | None
    checkpointing: str | None
    checkpoint_every: int | None
    checkpoint_reentrant: bool | None
    offload_activations: bool | None
    offload_optimizer: bool | None
    compile: bool | str | None
    framework: str | None
    float8: str | None
    float8_skip: tuple[str, ...] | None
    float8_all_gather: bool | None
    quantize: str | None
    quantize_skip: tuple[str, ...] | None
    quantize_keeps_inputs: bool | None


def training_of(settings: TrainingSettings) -> Training:
    """Return the settings with every field; a trial config sets the first four, and its model decides the others."""
    if isinstance(settings, Training):
        return settings
    return _of_trial(settings.optimizer, settings.precision, settings.cudnn_benchmark, settings.channels_last)


@functools.cache
def _of_trial(optimizer: str, precision: str, cudnn_benchmark: bool, channels_last: bool) -> Training:
    return Training(
        optimizer=optimizer, precision=precision, cudnn_benchmark=cudnn_benchmark, channels_last=channels_last
    )


# Type of ZeRO's model -> precisions that mean the same, or leave it open
_APT = {"bf16": ("fp32", "bf16", "bf16-true"), "fp16": ("fp32", "fp16", "fp16-true"), "fp32": ("fp32", "tf32")}


def settings_of_ranks(layout: Parallel | None, settings: TrainingSettings) -> Training:
    """Return the settings with which the ranks of a job train. With ZeRO's `param_dtype`, the whole model is of that
    type, without autocast (DeepSpeed 0.19, deepspeed/runtime/engine.py: `_cast_module_mixed_precision`).

    Raises:
        UsageError: A setting that the job's wrapper does not support, or `param_dtype` contradicts the precision.
    """
    training = training_of(settings)
    if layout is not None and (stage := layout.zero.stage):
        others = {
            "clip_value": training.clip_value is not None,  # DeepSpeed clips the norm
            "ema": training.ema,
            "optimizer_in_backward": training.optimizer_in_backward,
            "compile": bool(training.compile),
            "float8": training.float8 is not None,
            "quantize": training.quantize is not None and stage == 3,  # packed weights are not parameters
            "offload_activations": training.offload_activations and stage == 3,  # moves gathered weights
            "grad_scaler": training.grad_scaler is True,  # DeepSpeed scales the loss itself
        }
        if given := [name for name, is_given in others.items() if is_given]:
            raise UsageError(f"parallel: zero={stage} does not go with {', '.join(given)}; leave either out")
        if (dtype := layout.zero.param_dtype) is not None and training.precision not in _APT[dtype]:
            raise UsageError(
                f"parallel: param_dtype={dtype} of zero contradicts precision={training.precision}; with it precision "
                f"is one of {', '.join(_APT[dtype])}, or left out"
            )
        if dtype in ("bf16", "fp16"):
            training = replace(training, precision=f"{dtype}-true")
    if training.float8_all_gather and (layout is None or layout.degrees.fsdp == 1 or layout.flat):
        raise UsageError("float8_all_gather is FSDP2's: it needs parallel=fsdp=N without fsdp_version=1")
    if layout is not None and (layout.fsdp.cpu_offload or layout.zero.cpu_offload):
        training = replace(training, offload_optimizer=True, implementation=None)
    return training


def uses_tf32(precision: str) -> dict[str, bool]:
    """Return which operators on fp32 tensors may run in TF32: the keywords of `featurize.timing.kernels`.

    `tf32` allows it everywhere; PyTorch's default, `fp32`, for convolutions and recurrent layers only.

    Args:
        precision: One of `ALL_PRECISIONS`.
    """
    return {"tf32_products": precision == "tf32", "tf32_convolutions": precision in ("fp32", "tf32")}
