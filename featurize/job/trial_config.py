"""The trial config, which every family extends: hyper-parameters plus the training settings that all share.

Start reading at `TrialConfig`; `featurize.configs.trial` makes one of a mapping. Torch-free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from conf.errors import UsageError, shown
from featurize.job.layout import Parallel, parse_parallel

_ANY = ("foreach", "fused", "loop")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Properties of an optimizer that are known before `featurize.training.optimizers` makes it.

    states: tensors of its parameter's size, in float32, that it keeps on the device.
    implementations: torch's, of which it has these.
    elementwise: its step does the same to every element, so that ranks that share a parameter update their parts alone.
    shared: it runs on parameters that ranks share (DTensor).
    on_host: DeepSpeed-like offloading runs it on the CPU.
    package: what it takes beside torch.
    cuda_only: no other device runs it for real.
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
    "adam": Optimizer(states=2, implementations=_ANY, on_host=True),
    "adamw": Optimizer(states=2, implementations=_ANY, on_host=True),
    "sgd": Optimizer(states=0, implementations=_ANY, on_host=True),
    "momentum": Optimizer(states=1, implementations=_ANY, on_host=True),
    "nesterov": Optimizer(states=1, implementations=_ANY, on_host=True),
    "rmsprop": Optimizer(states=1, implementations=("foreach", "loop")),
    "adagrad": Optimizer(states=1, implementations=_ANY, on_host=True),
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


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Base of every family's config. Raises `ValueError` naming the field, the rule and the value.

    A subclass sets `family`, adds its fields, and extends `problems`. `parallel` is text such as `ddp=2`, kept in the
    one form that `Parallel.text` gives it; None, also for `ddp=1`, is one GPU.
    """

    family: ClassVar[str]

    batch_size: int
    optimizer: str = "adam"
    precision: str = "fp32"
    activation_checkpointing: bool = False
    cudnn_benchmark: bool = False
    channels_last: bool = False
    parallel: str | None = None

    def __post_init__(self) -> None:
        with contextlib.suppress(UsageError):  # `problems` says what is wrong with it
            layout = parse_parallel(self.parallel)
            object.__setattr__(self, "parallel", None if layout is None else layout.text())
        if problems := self.problems():
            raise UsageError(f"{self.family}: " + "; ".join(problems))

    def problems(self) -> list[str]:
        """Every rule this config breaks, in words; empty when it can be built."""
        problems = [
            *at_least(self, batch_size=1),
            *one_of(self, optimizer=OPTIMIZERS, precision=PRECISIONS),
        ]
        for name in ("activation_checkpointing", "cudnn_benchmark", "channels_last"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be true or false, got {getattr(self, name)!r}")
        try:
            layout = parse_parallel(self.parallel)
            if self.optimizer in tuple(OPTIMIZERS) and (problem := sharing_problem(self.optimizer, layout)):
                problems.append(problem)
        except UsageError as error:
            rule = str(error).removeprefix("parallel").lstrip(": ").replace("; ", ", ")
            problems.append(f"parallel cannot be {shown(self.parallel)}: {rule}")
        return problems

    @property
    def layout(self) -> Parallel | None:
        """How the trial is spread over GPUs; None: it runs on one."""
        return parse_parallel(self.parallel)

    @property
    def ranks(self) -> int:
        """GPUs that the trial runs on, a process each."""
        return 1 if self.layout is None else self.layout.ranks

    def to_mapping(self) -> dict[str, Any]:
        """`{"family": ..., field: value, ...}`: what `runs.config` holds as JSON. A trial on one GPU has no `parallel`
        in it, so that configs keep the hashes that they had before there were others."""
        values = dataclasses.asdict(self)
        if self.parallel is None:
            del values["parallel"]
        return {"family": self.family, **values}


def sharing_problem(optimizer: str, layout: Parallel | None) -> str | None:
    """Return why an optimizer does not run on a layout's parameters; None if it does."""
    if layout is None or not layout.shards or layout.flat or OPTIMIZERS[optimizer].shared:
        return None
    choices = ", ".join(name for name, known in OPTIMIZERS.items() if known.shared)
    return f"optimizer={optimizer} does not run on parameters that ranks share (DTensor); choose one of {choices}"


def weight_decay_problems(value: Any) -> list[str]:
    """Return what is wrong with an optimizer's weight decay; None is its library's default."""
    if value is None or (is_finite(value) and value >= 0):
        return []
    return [f"weight_decay must be a number >= 0, got {shown(value)}"]


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


TRAINING_FIELDS = tuple(field.name for field in dataclasses.fields(TrialConfig))


def at_least(config: TrialConfig, **floors: int) -> list[str]:
    """`batch_size must be an integer >= 1, got 0` for each integer field below its floor."""
    problems = []
    for name, floor in floors.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < floor:
            problems.append(f"{name} must be an integer >= {floor}, got {value!r}")
    return problems


def one_of(config: TrialConfig, **choices: Collection[Any]) -> list[str]:
    """`optimizer must be one of adam, ..., got 'lion'` for each field outside its choices."""
    return [
        f"{name} must be one of {', '.join(map(str, known))}, got {getattr(config, name)!r}"
        for name, known in choices.items()
        if getattr(config, name) not in tuple(known)  # the value may be of any type, also an unhashable one
    ]
