"""One training step, as the real devices run it and as the trace records it, and the optimizers that it runs.

Start reading at `TrainingStep`; `preload` is for the process that forks trials. `convert_float8` makes linear layers
multiply 8-bit floats by torchao: its own layers and tensors run in the trace, so it has to be installed. A model that
is already converted needs no setting. `make_optimizer` makes optimizers by name: torch's, transformers', and stand-ins
for those whose package needs a GPU; `OptimizerInBackward` and `OptimizerOnHost` change when and where one runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import optimizer as torch_optimizer

from conf.errors import EnvironmentProblem, UsageError
from featurize.device.device_spec import DeviceSpec, UnsuitableDevice
from featurize.job.training_settings import OPTIMIZERS, Training, TrainingSettings, training_of
from featurize.nets.checkpointing import checkpoint_blocks
from featurize.nets.vision import import_library
from featurize.operators.own_operators import quantize, without_skipped
from featurize.operators.replacing import replaced
from featurize.operators.table import SCALED_PRODUCT
from featurize.operators.tensor_parts import is_shared, local_tensor, mesh_of, own_part
from featurize.operators.torch_releases import allow_tf32
from featurize.recording.step_trace import Operator
from featurize.recording.values import Inputs, arguments, call, mapped, own_loss

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
    kind = package.Float8LinearConfig
    config = kind(enable_fsdp_float8_all_gather=True) if all_gather else kind.from_recipe_name(recipe)
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


_T = TypeVar("_T")
LEARNING_RATE = 1e-3
# bitsandbytes' block-wise state: one byte an element, a float for each block; smaller tensors keep 32-bit state.
STATE_BLOCK = 256
SMALLEST_IN_8_BITS = 4096
SMALLEST_PAGED = 100_000  # elements below which state is not paged
_DECAY = 0.999  # of moving averages


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    implementation: str | None = None,
    weight_decay: float | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer with learning rate 1e-3 and otherwise its library's defaults.

    Args:
        name: One of `OPTIMIZERS`. `momentum` is SGD with 0.9, `nesterov` the same with Nesterov's step.
        parameters: Parameters to update.
        implementation: `foreach`, `fused` or `loop`. None: torch's choice, which is `foreach` on CUDA, also for meta
            tensors, and the loop on CPU. Adafactor's default is always the loop.
        weight_decay: None: the library's default. Unless the decay is part of the step itself, as in AdamW, torch adds
            the decayed weights to a copy of the gradients: all together with `foreach` (`_multi_tensor_sgd` and the
            like in torch/optim), one after another with `loop`, without a copy with `fused`.

    Raises:
        EnvironmentProblem: transformers is missing, for its Adafactor, or bitsandbytes is; or the parameters are on the
            CPU, where bitsandbytes cannot run.
    """
    parameters = list(parameters)
    # For-each kernels cannot mix meshes of ranks.
    groups = _group(parameters, mesh_of) if any(map(is_shared, parameters)) else []
    given: list[Any] = [{"params": group} for group in groups] if len(groups) > 1 else parameters
    known = OPTIMIZERS[name]
    more: dict[str, Any] = {} if weight_decay is None else {"weight_decay": weight_decay}
    on_meta = all(p.is_meta for p in parameters)
    if known.cuda_only:
        if on_meta:
            # The kernel decays weights in place.
            return BlockwiseAdamW(given, bits=32 if name == "paged_adamw" else 8, paged=name.startswith("paged"))
        if any(p.device.type != "cuda" for p in parameters):
            raise EnvironmentProblem(f"optimizer={name} runs on CUDA only; take adamw")
        return _of_bitsandbytes(name, given, more)
    if implementation is None and on_meta and name != "adafactor":
        implementation = "foreach"
    if known.implementations != ("loop",) and implementation is not None:
        more["foreach"] = implementation == "foreach"
        if "fused" in known.implementations and implementation == "fused":
            more["fused"] = True
    with _fused_on_meta(parameters):
        return _MAKERS[name](given, lr=LEARNING_RATE, **more)


def _adafactor_of_transformers(parameters: list[Any], lr: float, **more: Any) -> torch.optim.Optimizer:
    adafactor: Callable[..., torch.optim.Optimizer] = import_library("transformers.optimization").Adafactor
    return adafactor(parameters, lr=lr, relative_step=False, scale_parameter=False, **more)


def _of_bitsandbytes(name: str, parameters: list[Any], more: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise EnvironmentProblem(f"optimizer={name} needs bitsandbytes: pip install bitsandbytes") from error
    names = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit", "paged_adamw": "PagedAdamW"}
    optimizer: Callable[..., torch.optim.Optimizer] = getattr(optim, names[name])
    return optimizer(parameters, lr=LEARNING_RATE, **more)


class _TensorByTensor(torch.optim.Optimizer):
    """An optimizer that updates one parameter after another; a subclass sets `update`."""

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)


class Lion(_TensorByTensor):
    """The sign of an interpolation of momentum and gradient (arXiv 2302.06675).

    State: one tensor like each parameter. A step takes two temporaries of the parameter's size.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum, (short, long) = state["exp_avg"], group["betas"]
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        direction = momentum.clone().mul_(short).add(gradient, alpha=1 - short).sign_()
        parameter.add_(direction, alpha=-group["lr"])
        momentum.mul_(long).add_(gradient, alpha=1 - long)


# The optimizers of `OPTIMIZERS` that run on every device: name -> factory from parameters and `lr`.
_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "nesterov": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "transformers_adafactor": _adafactor_of_transformers,
    "lion": Lion,
}


class BlockwiseAdamW(_TensorByTensor):
    """The device memory of bitsandbytes' AdamW, for meta tensors: it updates nothing.

    Two states of one byte an element and a float for every 256 elements; tensors of fewer than 4096 elements keep
    32-bit states. All share two code books of 256 floats. The kernels work in place. Paged state lies in managed
    memory, outside the caching allocator, and the driver moves it to the host where room is short.
    """

    def __init__(self, parameters: Iterable[Any], *, bits: int, paged: bool) -> None:
        super().__init__(parameters, {"lr": LEARNING_RATE})
        self.bits, self.paged = bits, paged
        self._code_books: tuple[Tensor, ...] = ()

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        if parameter not in self.state:
            self._make_state(parameter)
        parameter.add_(gradient)  # in place of the kernel, which makes no temporary

    def _make_state(self, p: nn.Parameter) -> None:
        small = self.bits == 32 or p.numel() < SMALLEST_IN_8_BITS
        state = self.state[p]
        if not (self.paged and p.numel() >= SMALLEST_PAGED):
            dtype = torch.float32 if small else torch.uint8
            state |= {name: torch.zeros_like(p, dtype=dtype) for name in ("state1", "state2")}
        if small:
            return
        if not self._code_books:
            self._code_books = tuple(torch.empty(256, device=p.device) for _ in range(2))
        blocks = -(-p.numel() // STATE_BLOCK)
        state |= {f"qmap{i + 1}": book for i, book in enumerate(self._code_books)}
        state |= {name: torch.zeros(blocks, device=p.device) for name in ("absmax1", "absmax2")}


class OwnOptimizer:
    """An optimizer that is not torch's. `inner` are those of torch that have its state on the device, if it has any."""

    inner: Collection[torch.optim.Optimizer] = ()

    @property
    def state(self) -> dict[Tensor, Any]:
        """State by parameter, as torch's optimizers have it."""
        return {parameter: state for optimizer in self.inner for parameter, state in optimizer.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or fill them with zeros."""

    def step(self) -> None:
        """Update the parameters."""


class OptimizerInBackward(OwnOptimizer):
    """An optimizer for each parameter, which steps in the backward pass and then frees the gradient.

    `on_phase` is called with the name of each phase that begins: `optimizer` for a step, then `backward` again.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        on_phase: Callable[[str], None],
    ) -> None:
        self.optimizers: dict[Tensor, torch.optim.Optimizer] = {p: make([p]) for p in parameters if p.requires_grad}
        self.inner, self._on_phase = self.optimizers.values(), on_phase
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        optimizer = self.optimizers[parameter]
        self._on_phase("optimizer")
        run_step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        self._on_phase("backward")


class OptimizerOnHost(OwnOptimizer):
    """State and step in host memory, as in ZeRO-Offload: none of it is on the device, for which meta tensors stand.
    Gradients are copied to the host, and weights back, without an operator."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none=set_to_none)


class LocalOptimizer(OwnOptimizer):
    """Updates parts of parameters; reads and frees gradients where the wrapper leaves them.

    Args:
        parameters: Parameters of the wrapped model.
        make: Returns an elementwise optimizer for given parameters.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self._pairs = [(p, nn.Parameter(local_tensor(p.detach()), requires_grad=p.requires_grad)) for p in parameters]
        self.inner: list[torch.optim.Optimizer] = [make([own_copy for _, own_copy in self._pairs])]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or fill them with zeros."""
        for parameter, _ in self._pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                local_tensor(parameter.grad).zero_()

    def step(self) -> None:
        for parameter, own_copy in self._pairs:
            own_copy.grad = None if parameter.grad is None else own_part(parameter.grad, parameter)
        run_step(self.inner[0])
        for _, own_copy in self._pairs:
            own_copy.grad = None


def run_step(optimizer: torch.optim.Optimizer) -> None:
    """Run a step; on meta tensors also the fused implementation, which torch reserves for real devices.

    There, counters on the host, one for each parameter, are read directly: by PyTorch's dispatcher, the reads take as
    long as everything else. Both replace parts of PyTorch: no other thread may trace at the same time.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(p.is_meta for p in parameters):
        optimizer.step()
        return
    module, name = sys.modules.get(type(optimizer).__module__), "_get_value"
    read = getattr(module, name, None)  # each of PyTorch's optimizers imports its own
    reads = contextlib.nullcontext() if read is None else replaced(module, name, functools.partial(_host_value, read))
    with _fused_on_meta(parameters), reads:
        optimizer.step()


def _host_value(read: Callable[[Any], Any], value: Any) -> Any:
    counts = type(value) is Tensor and value.is_cpu and not value.requires_grad and value.dtype is torch.float32
    return ctypes.c_float.from_address(value.data_ptr()).value if counts else read(value)


def state_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield every tensor of the optimizer's state, as far as that is by parameter."""
    states = (state.values() for state in optimizer.state.values() if isinstance(state, dict))
    return (value for values in states for value in values if isinstance(value, Tensor))


@contextlib.contextmanager
def _fused_on_meta(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    name = "_get_fused_kernels_supported_devices"
    known = getattr(torch_optimizer, name, None)
    # Some releases do not check. Real training may continue in another thread: nothing that it uses is replaced.
    if known is None or not any(p.is_meta for p in parameters):
        yield
        return
    with replaced(torch_optimizer, name, lambda: [*known(), "meta"]):
        yield


@torch.no_grad()
def clip_norm(gradients: list[Tensor], largest: float) -> None:
    """Scale the gradients in place so that their joint norm is at most `largest`, as `clip_grad_norm_` does on CUDA:
    one norm a tensor, their norm, and one pass of for-each kernels."""
    groups = by_kind(gradients)
    norms = [norm for group in groups for norm in torch._foreach_norm(group)]
    if not norms:
        return
    # Gradients of one mesh are reduced together.
    totals = [
        torch.linalg.vector_norm(torch.stack([norm.float() for norm in of_mesh])) for of_mesh in _group(norms, mesh_of)
    ]
    total = totals[0]
    if len(totals) > 1:
        full_totals = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in totals]
        total = torch.linalg.vector_norm(torch.stack(full_totals))
    factor = torch.clamp(largest / (total + 1e-6), max=1.0)
    for group in groups:
        torch._foreach_mul_(group, factor)


@torch.no_grad()
def clip_value(gradients: list[Tensor], largest: float) -> None:
    """Clamp the gradients in place to [-largest, largest]."""
    for group in by_kind(gradients):
        torch._foreach_clamp_min_(group, -largest)
        torch._foreach_clamp_max_(group, largest)


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return tensors in groups that for-each kernels can process: of one type, and of one mesh of ranks."""
    return _group(tensors, _kind_of)


def _group(items: Iterable[_T], key: Callable[[_T], object]) -> list[list[_T]]:
    groups: dict[object, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _kind_of(tensor: Tensor) -> object:
    return tensor.dtype, mesh_of(tensor)


class MovingAverage:
    """Exponential moving averages of a model's parameters and buffers, on the same device."""

    def __init__(self, model: nn.Module) -> None:
        self._sources = [*model.parameters(), *model.buffers()]
        with torch.no_grad():
            self.tensors = [t.detach().clone() for t in self._sources]

    @torch.no_grad()
    def update(self) -> None:
        pairs = [(a, s.detach()) for a, s in zip(self.tensors, self._sources, strict=True) if a.is_floating_point()]
        for group in _group(pairs, lambda pair: _kind_of(pair[0])):
            torch._foreach_lerp_([ours for ours, _ in group], [theirs for _, theirs in group], 1 - _DECAY)
