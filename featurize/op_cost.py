"""FLOPs of one dispatched ATen operator, and which operators launch no kernel.

Start reading at `flops`. A multiply-add counts as 2; everything that is not a matrix product counts one per element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from featurize import cudnn_rnn
from featurize.kernel_model.calls import FOREACH_CHUNK

# Allocate or re-describe; nothing runs on the GPU.
NO_KERNEL = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::lift_fresh",
        "aten::resize_",
        "aten::set_",
        "aten::_unsafe_view",
        "aten::_reshape_alias",
        "aten::as_strided_",
        "aten::squeeze_",
        "aten::unsqueeze_",
        "aten::t_",
        "aten::transpose_",
        "aten::detach_",
    }
)
# Read as much of their first argument as they write, not all of it.
GATHERS = frozenset(
    {
        "aten::embedding",
        "aten::index_select",
        "aten::gather",
        "aten::index",
        "aten::nll_loss_forward",
        "aten::nll_loss2d_forward",
        "aten::_embedding_bag",
    }
)
# Overwrite their first argument without reading it.
WRITE_ONLY = frozenset(
    {
        "aten::zero_",
        "aten::fill_",
        "aten::copy_",
        "aten::normal_",
        "aten::uniform_",
        "aten::random_",
        "aten::_foreach_copy_",
        "aten::_foreach_zero_",
    }
)
# Operators on lists of tensors.
MULTI_TENSOR = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
# Of these, those whose last list holds step counts, which are no part of a launch's table of tensors
# (ATen/native/cuda/MultiTensorApply.cuh: FusedOptimizerTensorListMetadata).
WITH_STEPS = ("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_adagrad_")
# Tensors per launch of the multi-tensor kernels by number of lists (ATen/native/cuda/MultiTensorApply.cuh).
_FOREACH_TENSORS = (110, 64, 48, 36, 30)
_FOREACH_BLOCKS = 320  # of one launch


def flops(name: str, args: Sequence, outputs: Sequence[Tensor], elements: int) -> int:
    """FLOPs of operator `name` (`aten::mm`); `elements` is the count for anything without a formula."""
    formula = _FORMULAS.get(name)
    return formula(args, outputs) if formula is not None else elements


def gathered_bytes(name: str, args: Sequence, written: int) -> int:
    """Bytes that an operator of `GATHERS` reads of its first argument: what it writes, or the rows that it sums up."""
    if name == "aten::_embedding_bag":
        weight, indices = args[:2]
        return indices.numel() * weight.shape[1] * weight.element_size()
    return written


def foreach_launches(lists: int, sizes: Sequence[int]) -> int:
    """Kernels that one for-each operator launches over tensors of `sizes` elements, `lists` lists deep."""
    limit = _FOREACH_TENSORS[min(lists, len(_FOREACH_TENSORS)) - 1]
    blocks = sum(-(-size // FOREACH_CHUNK) for size in sizes)
    return max(1, -(-len(sizes) // limit), -(-blocks // _FOREACH_BLOCKS))


def _mm(args: Sequence, outputs: Sequence[Tensor]) -> int:
    return 2 * outputs[0].numel() * args[0].shape[-1]


def _addmm(args: Sequence, outputs: Sequence[Tensor]) -> int:
    return 2 * outputs[0].numel() * args[1].shape[-1]


def _grouped_mm(args: Sequence, outputs: Sequence[Tensor]) -> int:
    first, second = args[:2]
    if first.dim() == second.dim() == 2:  # the groups share the inner dimension
        return 2 * first.numel() * second.shape[-1]
    return 2 * outputs[0].numel() * first.shape[-1]


def _conv_flops(x: Tensor, weight: Tensor, y: Tensor, transposed: bool) -> int:
    return 2 * (x if transposed else y).numel() * math.prod(weight.shape[1:])


def _convolution(args: Sequence, outputs: Sequence[Tensor]) -> int:
    return _conv_flops(args[0], args[1], outputs[0], args[6])


def _convolution_backward(args: Sequence, outputs: Sequence[Tensor]) -> int:
    mask = args[10]
    return (bool(mask[0]) + bool(mask[1])) * _conv_flops(args[1], args[2], args[0], args[7])


def _attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[int, int]:
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    each = 1 if causal else 2  # half of the pairs are masked
    return each * pairs * query.shape[-1], each * pairs * value.shape[-1]


def _attention_forward(causal_at: int) -> Callable[[Sequence, Sequence[Tensor]], int]:
    def formula(args: Sequence, outputs: Sequence[Tensor]) -> int:
        query, key, value = args[:3]
        return sum(_attention(query, key, value, len(args) > causal_at and args[causal_at]))

    return formula


def _attention_backward(causal_at: int) -> Callable[[Sequence, Sequence[Tensor]], int]:
    def formula(args: Sequence, outputs: Sequence[Tensor]) -> int:
        # The scores again, then the gradients of scores, values, queries and keys.
        query, key, value = args[1:4]
        scores, values = _attention(query, key, value, len(args) > causal_at and args[causal_at])
        return 3 * scores + 2 * values

    return formula


def _package_attention(first: int, causal_at: int, backward: bool) -> Callable[[Sequence, Sequence[Tensor]], int]:
    """Of [N, L, heads, E], or of texts one behind the other, each as long as the longest."""

    def formula(args: Sequence, outputs: Sequence[Tensor]) -> int:
        query, width = args[first], args[first].shape[-1]
        keys = args[causal_at - 2] if query.dim() == 3 else args[first + 1].shape[1]
        product = (1 if args[causal_at] else 2) * math.prod(query.shape[:-1]) * keys * width
        return (5 if backward else 2) * product

    return formula


_FORMULAS: dict[str, Callable[[Sequence, Sequence[Tensor]], int]] = {
    "aten::mm": _mm,
    "aten::_scaled_mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "gpufarm::liger_add_product_": lambda args, outputs: 2 * args[0].numel() * args[1].shape[-1],
    "aten::_grouped_mm": _grouped_mm,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_efficient_attention": _attention_forward(6),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward(11),
    "aten::_scaled_dot_product_flash_attention": _attention_forward(4),
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward(11),
    "aten::_flash_attention_forward": _package_attention(0, 8, False),
    "aten::_flash_attention_backward": _package_attention(1, 11, True),
    "aten::_embedding_bag": lambda args, outputs: args[1].numel() * args[0].shape[1],
    "aten::_cudnn_rnn": lambda args, outputs: cudnn_rnn.flops(args),
    "aten::_cudnn_rnn_backward": lambda args, outputs: 2 * cudnn_rnn.flops(args),
}
