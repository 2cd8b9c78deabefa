"""One training step, as the real devices run it and as the trace records it.

Start reading at `TrainingStep`; `preload` is for the process that forks trials.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from conf.errors import UsageError, unknown_name
from featurize.batches import Inputs, arguments, call, mapped, own_loss
from featurize.trial_config import OPTIMIZERS, PRECISIONS

LEARNING_RATE = 1e-3
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# What a first step imports lazily. The optimizer's first call imports torch._dynamo (about a second). The
# rest of the list comes with it or with a checkpointed backward; names that a release does not have are skipped.
_LAZY_MODULES = (
    "torch._dynamo",
    "torch.amp.grad_scaler",
    "torch.autograd.graph",
    "torch.optim.adam",
    "torch.profiler._cupti_monitor",
    "torch.utils.checkpoint",
)


class TrainingSettings(Protocol):
    """What a step needs to know besides the model; every `featurize.trial.TrialConfig` has it."""

    @property
    def optimizer(self) -> str: ...  # one of featurize.trial.OPTIMIZERS
    @property
    def precision(self) -> str: ...  # one of featurize.trial.PRECISIONS
    @property
    def cudnn_benchmark(self) -> bool: ...
    @property
    def channels_last(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training settings by themselves, for a model that is no family's. Unknown names raise `UsageError`."""

    optimizer: str = "adam"
    precision: str = "fp32"
    cudnn_benchmark: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)


class TrainingStep:
    """`step(inputs, targets)` runs zero_grad, forward, cross entropy, backward and the optimizer once.

    `model` must lie on `device` already. Precisions: `fp32` is PyTorch's default (matrix products in fp32; on Ampere
    and later cuDNN's convolutions may use TF32), `tf32` allows TF32 in both, `bf16` and `fp16` are autocast over fp32
    weights; fp16 on CUDA scales the loss. Sets torch's global TF32 and cuDNN flags (not for the meta device), so one
    process should train one model. `loss(output, targets)` is cross entropy by default. With `holds_output`, output and
    loss live until the next step assigns its own, as the variables of a usual loop do. `on_phase(name)` is called as
    `forward`, `backward` and `optimizer` begin.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings,
        device: torch.device | str,
        *,
        on_phase: Callable[[str], None] | None = None,
        loss: Callable[..., Tensor] | None = None,
        holds_output: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.settings = settings
        self.on_phase = on_phase or (lambda name: None)
        self.loss = loss or cross_entropy
        self.holds_output = holds_output
        self._held: tuple = ()
        if settings.channels_last:
            layout: dict[str, Any] = {"memory_format": torch.channels_last}  # which the stubs of torch leave out
            model = model.to(**layout)
        self.model = model.train()
        self.optimizer = make_optimizer(
            settings.optimizer, self.model.parameters(), foreach=True if self.device.type == "meta" else None
        )
        self._autocast_dtype = AUTOCAST_DTYPES.get(settings.precision)
        self._scaler = None
        if settings.precision == "fp16" and self.device.type == "cuda":
            self._scaler = torch.amp.GradScaler("cuda")
        if self.device.type != "meta":
            torch.backends.cuda.matmul.allow_tf32 = settings.precision == "tf32"
            torch.backends.cudnn.allow_tf32 = settings.precision in ("fp32", "tf32")
            torch.backends.cudnn.benchmark = settings.cudnn_benchmark

    def __call__(self, inputs: Inputs, targets: Tensor | None) -> Tensor:
        """One step; returns the loss, detached and still on the device (no synchronisation).

        `inputs` go to the model as positional arguments, a mapping as keyword arguments; `targets` hold class indices,
        as `cross_entropy` takes them. None: the loss is the one in the model's output.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.on_phase("forward")
        if self.settings.channels_last:
            inputs = arguments(mapped(inputs, _channels_last))
        with self._autocast():
            output = call(self.model, inputs)
            if self.holds_output:
                self._held = output, None
            loss = self.loss(output, targets)
            if self.holds_output:
                self._held = output, loss
            del output
        self.on_phase("backward")
        if self._scaler is not None:
            self._scaler.scale(loss).backward()
            self.on_phase("optimizer")
            self._scaler.step(self.optimizer)
            self._scaler.update()
            return loss.detach()
        loss.backward()
        self.on_phase("optimizer")
        if self.device.type == "meta" and self.settings.precision == "fp16":
            # The scaler reads a value back, which meta can't; its unscaling is one in-place pass over the gradients.
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_([g._values() if g.is_sparse else g for g in gradients], 1.0)
        self.optimizer.step()
        return loss.detach()

    def _autocast(self) -> contextlib.AbstractContextManager:
        # Autocast does nothing to meta tensors; the trace brings its own (featurize.cuda_policy).
        if self._autocast_dtype is None or self.device.type == "meta":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], *, foreach: bool | None) -> torch.optim.Optimizer:
    """`adam`, `adamw`, `sgd` or `momentum` (0.9) at learning rate 1e-3, torch's defaults otherwise.

    `foreach=None` leaves the choice to torch, which takes the for-each implementation on CUDA and the loop on CPU.
    """
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    if name in ("adam", "adamw"):
        cls = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        return cls(parameters, lr=LEARNING_RATE, foreach=foreach)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9 if name == "momentum" else 0.0, foreach=foreach)


def cross_entropy(output, targets: Tensor | None) -> Tensor:
    """Cross entropy of a model's output: logits [N, C] or [N, C, ...], or [N, T, C] with targets [N, T].

    An output object with `logits` (as many published models return) or a tuple's first tensor counts as the logits.
    Without targets it is the loss that the output holds (`featurize.batches.own_loss`).
    """
    if targets is None:
        loss = own_loss(output)
        if loss is None:
            raise UsageError(
                f"the model's output ({type(output).__name__}) has no loss of its own; give a target, or a loss"
            )
        return loss
    if not isinstance(output, Tensor):
        output = output.logits if hasattr(output, "logits") else output[0]
    if output.dim() > 2 and output.shape[:-1] == targets.shape:
        output, targets = output.flatten(0, -2), targets.flatten()
    return nn.functional.cross_entropy(output, targets)


def targets_for(output, loss: Callable | None = None) -> Tensor:
    """Class indices, all 0, of the shape that `cross_entropy` wants for this output, on its device.

    The classes are in the last dimension of [N, C] and [N, T, C] and in the second of [N, C, H, W]. An output without
    logits is an `UsageError`, but where there is a `loss` of its own: that gets a single 0.
    """
    logits = output
    if not isinstance(logits, Tensor):
        logits = getattr(output, "logits", None)
        if logits is None and isinstance(output, list | tuple) and output:
            logits = output[0]
    if not isinstance(logits, Tensor) or logits.dim() == 0 or not logits.is_floating_point():
        if loss is not None:
            return torch.zeros((), dtype=torch.long)
        said = f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(
            f"the model's output ({said}) has no logits to take cross entropy of; "
            "wrap the model in one that returns a tensor [N, classes] or [N, T, classes], or give a loss"
        )
    if logits.dim() == 1:  # one figure a sample: class probabilities of the same shape cost the same
        return torch.zeros_like(logits)
    shape = logits.shape[:-1] if logits.dim() in (2, 3) else (logits.shape[0], *logits.shape[2:])
    return torch.zeros(shape, dtype=torch.long, device=logits.device)


def preload() -> None:
    """Import what a first training step would import, so that forked trials need not.

    Runs no operator and touches no CUDA, so that a fork afterwards is safe: only imports.
    """
    for name in _LAZY_MODULES:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and x.is_floating_point() else x
