"""One training step, as the real devices run it and as the trace records it.

Start reading at `TrainingStep`; `preload` is for the process that forks trials. `convert_float8` makes linear layers
multiply 8-bit floats by torchao: its own layers and tensors run in the trace, so it has to be installed. A model that
is already converted needs no setting.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from conf.errors import UsageError
from featurize.device.device_spec import DeviceSpec, UnsuitableDevice
from featurize.job.training_settings import (
    OPTIMIZERS,
    Training as Training,
    TrainingSettings as TrainingSettings,
    training_of,
)
from featurize.nets.checkpointing import checkpoint_blocks
from featurize.nets.vision import import_library
from featurize.operators.own_operators import quantize, without_skipped
from featurize.operators.table import SCALED_PRODUCT
from featurize.operators.tensor_parts import is_shared
from featurize.operators.torch_releases import allow_tf32
from featurize.recording.step_trace import Operator
from featurize.recording.values import Inputs, arguments, call, mapped, own_loss
from featurize.training.optimizers import (
    MovingAverage,
    OptimizerInBackward,
    OptimizerOnHost,
    OwnOptimizer,
    by_kind,
    clip_norm,
    clip_value,
    make_optimizer,
    run_step,
)

PRICED = (
    "products of 8-bit floats (torch._scaled_mm) are priced at the share of the peak rate that bf16 products reach: "
    "none was measured"
)
_MULTIPLE = 16  # divides both sizes of a weight, and the inner size of a product (ATen/native/cuda/ScaledBlas.cpp)


def convert_float8(
    model: nn.Module, recipe: str, skip: tuple[str, ...] | None = None, *, all_gather: bool = False
) -> None:
    """Replace the model's linear layers by torchao's for float8 training. Changes the model.

    Layers with a size that is not a multiple of 16 are not converted, as in torchtitan.

    Args:
        model: A model that is not converted yet.
        recipe: One of `featurize.job.training_settings.FLOAT8_RECIPES`.
        skip: Names of layers that stay, in full or their last part. None: the output layer, as in torchtitan's
            configurations.
        all_gather: Whether FSDP2 casts weights before it gathers them (`enable_fsdp_float8_all_gather`).

    Raises:
        EnvironmentProblem: torchao is not installed.
        UsageError: A name in `skip` is not a linear layer's, the model is converted already, or no layer is left to
            convert.
    """
    package: Any = import_library("torchao.float8")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if any(type(layer).__name__ == "Float8Linear" for layer in layers.values()):
        raise UsageError("float8: the model holds layers that torchao converted already: leave float8 out")
    chosen = {
        name
        for name, layer in without_skipped(model, layers, skip, "float8_skip").items()
        if name and layer.in_features % _MULTIPLE == layer.out_features % _MULTIPLE == 0
    }
    if not chosen:
        raise UsageError(
            f"float8={recipe}: the model has no linear layer to convert: both sizes are multiples of {_MULTIPLE}, and "
            "the output layer stays unless float8_skip=[] says otherwise"
        )
    config = package.Float8LinearConfig.from_recipe_name(recipe)
    if all_gather:
        config = package.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    package.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)


def multiplies_8_bits(operators: Iterable[Operator]) -> bool:
    """Return whether some of a step's operators are products of 8-bit floats."""
    return any(op.name == SCALED_PRODUCT for op in operators)


def require_8_bits(spec: DeviceSpec) -> None:
    """Raise `UnsuitableDevice` for a GPU model that does not multiply 8-bit floats."""
    if spec.peak_tflops.fp8 is None:
        raise UnsuitableDevice(
            f"float8 needs a GPU that multiplies 8-bit floats (compute capability 8.9 or later, AMD MI300), and "
            f"{spec.name} ({spec.architecture.title}) does not: choose another device, or leave float8 out"
        )


MakeOptimizer: TypeAlias = Callable[..., torch.optim.Optimizer]

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_DTYPES = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}

# Modules that a first step imports lazily. The optimizer's first call imports torch._dynamo (about a second). The
# others come with it or with a checkpointed backward; names that a release does not have are skipped.
_LAZY_MODULES = (
    "torch._dynamo",
    "torch.amp.grad_scaler",
    "torch.autograd.graph",
    "torch.optim.adam",
    "torch.profiler._cupti_monitor",
    "torch.utils.checkpoint",
)


class TrainingStep:
    """`step(inputs, targets)` runs zero_grad, forward, cross entropy, backward and the optimizer once.

    `model` must lie on `device` already. Precisions: `fp32` is PyTorch's default (matrix products in fp32; on Ampere
    and later cuDNN's convolutions may use TF32), `tf32` allows TF32 in both, `bf16` and `fp16` are autocast over fp32
    weights; fp16 on CUDA scales the loss; `bf16-true` and `fp16-true` convert the model. Sets torch's global TF32 and
    cuDNN flags (not for the meta device), so one process should train one model. `loss(output, targets)` is cross
    entropy by default. With `holds_output`, output and loss live until the next step assigns its own, as variables of a
    usual loop do. `on_moment("assigned", inputs, (output, loss))` is called where they are assigned, with `held` where
    those of the last step are released, and with `updated` at the step's end. `on_phase(name)` is called as `forward`,
    `backward` and `optimizer` begin, `on_batch()` before every further micro-step of an accumulated step. Settings of
    `Training` that concern the model (precision, checkpointing, quantization) change it; `wrap` gets the changed model,
    and returns the module to train. On a real device, trials choose optimizer, precision, `cudnn_benchmark` and
    `channels_last`: `compile` and offloading are only traced.
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
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.settings = training_of(settings)
        self.on_phase = on_phase or (lambda name: None)
        self.on_batch: Callable[[], None] = lambda: None
        self.loss = loss or cross_entropy
        self.holds_output = holds_output and self.settings.holds_output
        self.held: tuple[Any, ...] = ()
        self.on_moment: Callable[..., None] = lambda moment, *variables: None
        self.make_targets: Callable[[object], Tensor | None] = lambda output: None  # where no targets are given
        model = _prepare(model, self.settings)
        self.take((model if wrap is None else wrap(model)).train())
        self._autocast_dtype = AUTOCAST_DTYPES.get(settings.precision)
        self._weight_dtype = WEIGHT_DTYPES.get(settings.precision)
        scales = self.settings.scales_loss and self.device.type == "cuda"
        self._scaler = torch.amp.GradScaler("cuda") if scales else None
        if self.device.type != "meta":
            # Convolutions may use TF32, PyTorch's default. Forbidding it would exclude the tensor-core engines for half
            # precision, too (ATen/native/cudnn/Conv_v8.cpp, filterEngineConfigs).
            allow_tf32(matmul=settings.precision == "tf32", cudnn=True)
            torch.backends.cudnn.benchmark = settings.cudnn_benchmark

    def __call__(self, inputs: Inputs, targets: Tensor | None) -> Tensor:
        """Run one step; return the loss, detached and still on the device (no synchronisation).

        `inputs` are the model's positional arguments, or, as a mapping, its keyword arguments; `targets` are class
        indices, as `cross_entropy` takes them. None: the loss is in the model's output. An accumulated step trains on
        the same batch in each micro-step, and returns the last loss.
        """
        settings = self.settings
        late = settings.zero_grad == "after_forward"
        if not late:
            self.zero_grad()
        for number in range(settings.accumulation):
            if number:
                self.on_batch()
            last = number == settings.accumulation - 1
            between_updates = getattr(self.model, "between_updates", contextlib.nullcontext)  # of `FlatShards`
            with contextlib.nullcontext() if last else between_updates():
                self.on_phase("forward")
                given = self.convert(inputs)  # they live until the next ones, as a script's variables do
                loss = self._forward(given, targets)
                if settings.accumulation > 1:
                    loss = loss / settings.accumulation
                if late and not number:
                    self.zero_grad()
                self.on_phase("backward")
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        self.update()
        self.on_moment("updated")
        return loss.detach()

    def update(self) -> None:
        """Run the optimizer, unless the backward pass has done so, and the moving average."""
        if not self.settings.optimizer_in_backward:
            self.on_phase("optimizer")
            self._optimize()
        if self.average is not None:
            self.on_phase("optimizer")
            self.average.update()

    def take(self, model: nn.Module, update: Callable[[MakeOptimizer], OwnOptimizer] | None = None) -> None:
        """Train this wrapped model from now on. `update` makes the optimizer, if it is of other parameters."""
        settings = self.settings
        self.model, self._parameters = model, list(model.parameters())
        self.average = MovingAverage(model) if settings.ema else None
        make = functools.partial(
            make_optimizer,
            settings.optimizer,
            implementation=settings.implementation,
            weight_decay=settings.weight_decay,
        )
        self.optimizer: torch.optim.Optimizer | OwnOptimizer
        elementwise = self.device.type == "meta" and OPTIMIZERS[settings.optimizer].elementwise
        if update is not None:
            self.optimizer = update(make)
        elif settings.optimizer_in_backward:
            self.optimizer = OptimizerInBackward(self._parameters, make, lambda phase: self.on_phase(phase))
        elif settings.offload_optimizer:
            self.optimizer = OptimizerOnHost(model)
        elif elementwise and any(map(is_shared, self._parameters)):
            from featurize.training.sharding import LocalOptimizer  # its imports are slow

            self.optimizer = LocalOptimizer(self._parameters, make)
        else:
            self.optimizer = make(self._parameters)

    def zero_grad(self) -> None:
        """Free the gradients, or fill them with zeros, by the settings."""
        self.optimizer.zero_grad(set_to_none=self.settings.set_to_none)

    def convert(self, inputs: Inputs) -> Inputs:
        """Return the inputs in the format and type that the model takes."""
        if self.settings.channels_last:
            inputs = arguments(mapped(inputs, _channels_last))
        if (dtype := self._weight_dtype) is not None:
            inputs = arguments(mapped(inputs, lambda x: x.to(dtype) if x.is_floating_point() else x))
        return inputs

    def _forward(self, inputs: Inputs, targets: Tensor | None) -> Tensor:
        # Autocast does nothing to meta tensors; the trace has its own (featurize.operators.cuda_policy).
        casts = self._autocast_dtype is not None and self.device.type != "meta"
        autocast = torch.autocast(self.device.type, dtype=self._autocast_dtype) if casts else contextlib.nullcontext()
        # All tensors that autograd saves wait in host memory (`save_on_cpu`), weights included, and are copied to a new
        # tensor on the device when a backward operator reads them. For meta tensors, only their shape is kept.
        offloads = self.settings.offload_activations
        with autocast, saved_tensors_hooks(_to_host, _from_host) if offloads else contextlib.nullcontext():
            output = call(self.model, inputs)
            self.hold(output, None)
            self.on_moment("held")
            loss = self.loss(output, self.make_targets(output) if targets is None else targets)
            self.hold(output, loss)
            self.on_moment("assigned", inputs, (output, loss))
            del output
        return loss

    def hold(self, *variables: object) -> None:
        """Keep the values of a usual loop's variables until they are assigned again."""
        if self.holds_output:
            self.held = variables

    def _optimize(self) -> None:
        """Unscale, clip and step. A trial on a real GPU does not clip."""
        optimizer, scaler = self.optimizer, self._scaler
        if scaler is not None and isinstance(optimizer, torch.optim.Optimizer):
            scaler.step(optimizer)
            scaler.update()
            return
        if self.device.type == "meta" and self.settings.scales_loss:
            # The scaler reads a value back, which meta cannot; its unscaling is one in-place pass over the gradients.
            for gradients in by_kind(g._values() if g.is_sparse else g for g in self.gradients()):
                torch._foreach_mul_(gradients, 1.0)
        if self.settings.clip_norm is not None:
            # `FlatShards` clips over all ranks.
            clip = getattr(self.model, "clip_over_ranks", functools.partial(clip_norm, self.gradients()))
            clip(self.settings.clip_norm)
        elif self.settings.clip_value is not None:
            clip_value(self.gradients(), self.settings.clip_value)
        if isinstance(optimizer, torch.optim.Optimizer):
            run_step(optimizer)
        else:
            optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the trained parameters."""
        return [p.grad for p in self._parameters if p.grad is not None]


def _prepare(model: nn.Module, settings: Training) -> nn.Module:
    """Return the model in the types, formats and wrappers of the settings."""
    if settings.channels_last:
        layout: dict[str, Any] = {"memory_format": torch.channels_last}  # torch's type stubs lack it
        model = model.to(**layout)
    if (dtype := WEIGHT_DTYPES.get(settings.precision)) is not None:
        model = model.to(dtype)
    if settings.float8 is not None:
        convert_float8(model, settings.float8, settings.float8_skip, all_gather=settings.float8_all_gather)
    if settings.quantize is not None:
        quantize(model, settings.quantize, settings.quantize_skip, keeps_inputs=settings.quantize_keeps_inputs)
    if settings.checkpointing is not None:
        checkpoint_blocks(
            model, settings.checkpointing, every=settings.checkpoint_every, reentrant=settings.checkpoint_reentrant
        )
    return model


def cross_entropy(output: Any, targets: Tensor | None) -> Tensor:
    """Return the cross entropy of a model's output: logits [N, C] or [N, C, ...], or [N, T, C] with targets [N, T].

    The logits are `logits` of an output object (as many published models return), or a tuple's first tensor. Without
    targets, it is the loss in the output (`featurize.recording.values.own_loss`).
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


def logits_of(output: Any) -> Any:
    """Return the tensor in a model's output that its loss is computed from: the output itself, its `logits`, or the
    first of several tensors. None if there is none."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return output[0] if logits is None and isinstance(output, list | tuple) and output else logits


def targets_for(output: Any, loss: Callable[..., Any] | None = None) -> Tensor:
    """Return class indices, all 0, of the shape that `cross_entropy` needs for this output, on its device.

    The classes are in the last dimension of [N, C] and [N, T, C] and in the second of [N, C, H, W]. Raises `UsageError`
    for an output without logits, unless a `loss` is given: that gets a single 0.
    """
    logits = logits_of(output)
    if not isinstance(logits, Tensor) or logits.dim() == 0 or not logits.is_floating_point():
        if loss is not None:
            return torch.zeros((), dtype=torch.long)
        kind = f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(
            f"the model's output ({kind}) has no logits to take cross entropy of; "
            "wrap the model in one that returns a tensor [N, classes] or [N, T, classes], or give a loss"
        )
    if logits.dim() == 1:  # one figure a sample: class probabilities of the same shape cost the same
        return torch.zeros_like(logits)
    shape = logits.shape[:-1] if logits.dim() in (2, 3) else (logits.shape[0], *logits.shape[2:])
    return torch.zeros(shape, dtype=torch.long, device=logits.device)


def preload() -> None:
    """Import the modules of a first training step, so that forked trials need not.

    It runs no operator and touches no CUDA, so that a fork afterwards is safe.
    """
    for name in _LAZY_MODULES:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and x.is_floating_point() else x


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.Size, torch.dtype]:
    return (tensor.shape, tensor.dtype) if tensor.is_meta else tensor


def _from_host(saved: Tensor | tuple[torch.Size, torch.dtype]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    shape, dtype = saved
    return torch.empty(shape, dtype=dtype, device="meta")
