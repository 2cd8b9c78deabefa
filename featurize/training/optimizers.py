"""Optimizers by name: torch's, transformers', and stand-ins for those whose package needs a GPU.

Start reading at `make_optimizer`; `OptimizerInBackward` and `OptimizerOnHost` change when and where one runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from conf.errors import EnvironmentProblem
from featurize.job.training_settings import OPTIMIZERS
from featurize.nets.vision import import_library
from featurize.operators.replacing import replaced
from featurize.operators.tensor_parts import is_shared, mesh_of

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

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def step(self) -> None: ...


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
