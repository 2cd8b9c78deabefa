"""How stage 3 of DeepSpeed's ZeRO hears of modules: hooks around their forward and backward passes.

Start reading at `hook_modules` (DeepSpeed 0.19, deepspeed/runtime/zero/parameter_offload.py and linear.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from featurize.replacing import replaced

Heard = Callable[[nn.Module, bool], None]


def hook_modules(model: nn.Module, entered: Heard, left: Heard) -> None:
    """Let `entered(module, forward)` and `left(module, forward)` be called around each module's passes.

    A module's backward pass begins with the gradient of its output; it is over when those of all inputs are there
    that it was given by place.
    """
    for module in list(model.modules()):
        _hook(module, entered, left)


def _hook(module: nn.Module, entered: Heard, left: Heard) -> None:
    waiting = [0]  # inputs without a gradient so far
    begun = [0]  # passes whose backward pass is to come

    def begin(_gradient: object) -> None:
        if begun[0]:
            entered(module, False)
            begun[0] -= 1

    def end(_gradient: object) -> None:
        waiting[0] -= 1
        if not waiting[0]:
            left(module, False)

    def before(_module: nn.Module, _inputs: object) -> None:
        entered(module, True)

    def after(_module: nn.Module, _inputs: object, _output: object) -> None:
        left(module, True)

    def mark_inputs(_module: nn.Module, inputs: Any) -> Any:
        waiting[0] = 0

        def mark(tensor: Tensor) -> Tensor:
            waiting[0] += tensor.requires_grad
            return _Mark.apply(tensor, end)

        return _over_tensors(inputs, mark)

    def mark_output(_module: nn.Module, _inputs: object, output: Any) -> Any:
        def mark(tensor: Tensor) -> Tensor:
            begun[0] += 1
            return _Mark.apply(tensor, begin)

        return _over_tensors(output, mark)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    module.register_forward_hook(mark_output)
    module.register_forward_pre_hook(mark_inputs)


class _Mark(torch.autograd.Function):
    """Calls a function when a tensor's gradient comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: Callable[[object], None]) -> Tensor:
        ctx.function = function
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function(gradient)
        return gradient, None


def _over_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A value with its tensors replaced, in tuples, lists and mappings; objects of other classes as they are."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_over_tensors(one, function) for one in value)
    if type(value) in (tuple, list):
        return type(value)(_over_tensors(one, function) for one in value)
    if isinstance(value, dict):
        for key, one in list(value.items()):
            value[key] = _over_tensors(one, function)
    return value


class LentParameters(dict):
    """A module's parameters, of which other modules may take one.

    Args:
        own: Name -> parameter.
        taken: Called with a parameter that is taken.
    """

    def __init__(self, own: dict[str, nn.Parameter | None], taken: Callable[[nn.Parameter], None]) -> None:
        super().__init__(own)
        self._taken = taken

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._taken(parameter)
        return parameter


@contextlib.contextmanager
def frugal_linear() -> Iterator[None]:
    """While entered, `nn.functional.linear` keeps the weight itself for the backward pass: a view of it would keep the
    gathered weight alive."""
    with replaced(nn.functional, "linear", _linear):
        yield


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # torch's names
    return _Linear.apply(input, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        y = x.matmul(weight.t())
        if bias is not None:
            y += bias
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_x = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias
