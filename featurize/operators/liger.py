"""Liger's fused kernels on meta tensors: what each keeps for the backward pass, and what it overwrites.

Start reading at `as_on_gpu`. The package's kernels are Triton's and need a GPU. Its autograd functions are replaced,
while a step is traced, by ones that take the same memory (arXiv 2410.10989; liger_kernel/ops, 0.8). Works for every way
to apply the package: its modules, its functions, and `apply_liger_kernel_to_...` of published models.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from featurize.operators.own_operators import OPS
from featurize.operators.replacing import replaced_if_imported

# Rows of partial sums of a norm's weight gradient: one for each multiprocessor, 108 on an A100 and 132 on an H100.
MULTIPROCESSORS = 128


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within, Liger's autograd functions run on meta tensors, if the package is imported."""
    with contextlib.ExitStack() as stack:
        for (module, name), (instead, arguments) in _FUNCTIONS.items():
            applied = functools.partial(_applied, instead=instead, arguments=arguments)
            stack.enter_context(replaced_if_imported(f"liger_kernel.ops.{module}", f"{name}.apply", applied))
        yield


def _applied(
    apply: Callable[..., Any], *, instead: type[Function], arguments: Callable[[dict[str, Any]], tuple[Any, ...]]
) -> Callable[..., Any]:
    """Return the `apply` of one of the package's classes on meta tensors. Results of a loss beside itself are None."""
    function: Any = getattr(apply, "__self__")  # noqa: B009 -- a bound method of the class
    signature = inspect.signature(function.forward)
    results = len(inspect.signature(function.backward).parameters) - 1

    def applied(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, Tensor) and value.is_meta for value in args):
            return apply(*args, **kwargs)
        bound = signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        made = instead.apply(*arguments(bound.arguments))
        return (made, *[None] * (results - 1)) if results > 1 and isinstance(made, Tensor) else made

    return applied


class _Norm(Function):
    """RMS and layer norm: keep the input, the weight and the rows' statistics. RMS norm writes the input's gradient
    over the output's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, wide: bool, in_place: bool) -> Tensor:
        x = x.contiguous()
        out, statistics = OPS.liger_norm(x, weight, torch.float32 if wide else x.dtype)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.in_place = in_place
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        written = gradient if ctx.in_place else torch.empty_like(gradient)
        OPS.liger_write_(written, [gradient, x, statistics])
        return written, _summed(weight), _summed(bias), None, None


def _summed(weight: Tensor | None) -> Tensor | None:
    if weight is None or not weight.requires_grad:
        return None
    partial = torch.empty((MULTIPROCESSORS, weight.numel()), dtype=torch.float32, device=weight.device)
    return partial.sum(0).to(weight.dtype).view_as(weight)


class _Gated(Function):
    """SwiGLU and GeGLU: keep both inputs, and write their gradients over them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return OPS.liger_gated(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        OPS.liger_write_both_(a, b, [gradients[0].contiguous()])
        return a, b


class _Rotated(Function):
    """Rotary positions: written over queries and keys, and over their gradients; keeps the angles."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotate(*gradients, *ctx.saved_tensors), None, None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (x.transpose(1, 2).contiguous() for x in (q, k))  # the kernel's layout, which projections have already
    OPS.liger_write_both_(q, k, [cos, sin])
    return q.transpose(1, 2), k.transpose(1, 2)


class _CrossEntropy(Function):
    """The gradient is written over the logits in the forward pass, and is all that is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        logits = logits.detach().contiguous()
        losses = torch.zeros(logits.shape[0], dtype=logits.dtype, device=logits.device)
        OPS.liger_write_both_(logits, losses, [target])
        ctx.save_for_backward(logits)
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0], None, None


class _LinearCrossEntropy(Function):
    """Output layer and loss, some rows at a time: no more logits than the input has elements, rounded up to a power
    of two rows. The gradients of input and weight are made in the forward pass and are all that is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        reduction: str,
        sums: torch.dtype | None,
        budget: int,
    ) -> Tensor:
        rows, width = x.shape
        classes = weight.shape[0]
        parts = -(-classes // (budget * width))
        step = min(1 << (-(-rows // parts) - 1).bit_length(), rows)
        trained = [_sums(weight, sums), _sums(bias, sums)]
        of_x = torch.zeros_like(x)
        losses = torch.zeros(rows, dtype=torch.float32, device=x.device)
        dtype = torch.get_autocast_dtype("meta") if torch.is_autocast_enabled("meta") else x.dtype
        product = weight.to(dtype)  # autocast keeps it, and casts the transposed weight anew for each part
        aten = torch.ops.aten  # which autocast leaves alone
        for start in range(0, rows, step):
            part = x[start : start + step].to(dtype)
            logits = aten.mm(part, weight.t().to(dtype))
            if bias is not None:
                logits.add_(bias)
            OPS.liger_write_both_(logits, losses, [target])
            if of_x.dtype == dtype:
                aten.mm.out(logits, product, out=of_x[start : start + step])
            else:
                of_x[start : start + step].copy_(aten.mm(logits, product))
            if trained[0] is not None:
                if trained[0].dtype == logits.dtype:
                    aten.addmm.out(trained[0], logits.t(), part, out=trained[0])
                else:
                    OPS.liger_add_product_(trained[0], logits.t(), part)
            if trained[1] is not None:
                trained[1].add_(logits.sum(0))
            del logits
        made = [g if g is None or w is None else g.to(w.dtype) for g, w in zip(trained, (weight, bias), strict=True)]
        ctx.save_for_backward(of_x, *made)
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = ctx.saved_tensors
        return of_x, of_weight, None, of_bias, None, None, None


def _sums(weight: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if weight is None or not weight.requires_grad else torch.zeros_like(weight, dtype=dtype)


def _given_norm(given: dict[str, Any]) -> tuple[Any, ...]:
    wide = given.get("casting_mode", "llama") not in ("none", -1)
    return given["X"], given["W"], None, wide, given.get("in_place", True)


def _given_linear(given: dict[str, Any]) -> tuple[Any, ...]:
    optional = given.get("bias"), given.get("reduction", "mean"), given.get("accum_dtype")
    return given["_input"], given["weight"], given["target"], *optional, given.get("chunk_mem_const", 1)


# Module and class of the package -> what stands in its place, and with which of its arguments, by their names there.
_FUNCTIONS: dict[tuple[str, str], tuple[type[Function], Callable[[dict[str, Any]], tuple[Any, ...]]]] = {
    ("rms_norm", "LigerRMSNormFunction"): (_Norm, _given_norm),
    ("layer_norm", "LigerLayerNormFunction"): (_Norm, lambda given: (given["X"], given["W"], given["B"], True, False)),
    ("swiglu", "LigerSiLUMulFunction"): (_Gated, operator.itemgetter("a", "b")),
    ("geglu", "LigerGELUMulFunction"): (_Gated, operator.itemgetter("a", "b")),
    ("rope", "LigerRopeFunction"): (_Rotated, operator.itemgetter("q", "k", "cos", "sin")),
    ("cross_entropy", "LigerCrossEntropyFunction"): (
        _CrossEntropy,
        lambda given: (given["_input"], given["target"], given.get("reduction", "mean")),
    ),
    ("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"): (_LinearCrossEntropy, _given_linear),
}
