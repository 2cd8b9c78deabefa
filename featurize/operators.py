"""Table of operators by name: what they compute and move, and which of them launch no kernel.

Start reading at `flops`. An operator's entry in one of these tables is all that adds it: a kernel of attention is one
entry of `ATTENTION`. A multiply-add counts as 2 FLOPs; what is not a matrix product counts one per element. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

SCALED_PRODUCT = "aten::_scaled_mm"  # of 8-bit floats, whatever type its result has


def _aten(names: str) -> tuple[str, ...]:
    return tuple(f"aten::{name}" for name in names.split())


PRODUCTS = frozenset(
    {
        *_aten("mm bmm addmm baddbmm _grouped_mm"),
        SCALED_PRODUCT,
        "gpufarm::liger_add_product_",
        "gpufarm::int8_product",
    }
)
CONVOLUTIONS = frozenset(_aten("convolution convolution_backward _cudnn_rnn _cudnn_rnn_backward"))


class AttentionKernel(NamedTuple):
    """How a fused kernel of attention is called.

    query          place of the query among its arguments; key and value follow
    causal         place of the flag that hides later keys
    backward       it computes gradients
    length_first   [N, L, heads, E], or all tokens of packed texts [tokens, heads, E]; else [N, heads, L, E]. The length
                   of the longest packed text stands two places before the flag
    """

    query: int
    causal: int
    backward: bool = False
    length_first: bool = False


ATTENTION = {
    "aten::_scaled_dot_product_efficient_attention": AttentionKernel(0, 6),
    "aten::_scaled_dot_product_efficient_attention_backward": AttentionKernel(1, 11, backward=True),
    "aten::_scaled_dot_product_flash_attention": AttentionKernel(0, 4),
    "aten::_scaled_dot_product_flash_attention_backward": AttentionKernel(1, 11, backward=True),
    "aten::_flash_attention_forward": AttentionKernel(0, 8, length_first=True),
    "aten::_flash_attention_backward": AttentionKernel(1, 11, backward=True, length_first=True),
}

# Allocate or re-describe; nothing runs on the GPU.
NO_KERNEL = frozenset(
    _aten(
        "empty empty_like empty_strided new_empty new_empty_strided lift_fresh resize_ set_ _unsafe_view "
        "_reshape_alias as_strided_ squeeze_ unsqueeze_ t_ transpose_ detach_"
    )
)
# Read as much of their first argument as they write, not all of it.
GATHERS = frozenset(_aten("embedding index_select gather index nll_loss_forward nll_loss2d_forward _embedding_bag"))
# Overwrite their first argument without reading it.
WRITE_ONLY = frozenset(_aten("zero_ fill_ copy_ normal_ uniform_ random_ _foreach_copy_ _foreach_zero_"))
# What these give, or the shape of it, depends on their arguments' values.
DECIDED_BY_VALUES = frozenset(
    _aten(
        "_local_scalar_dense _to_copy _unique _unique2 bincount equal is_nonzero masked_select nonzero "
        "repeat_interleave unique_consecutive unique_dim"
    )
)
INDEXED_BY_MASKS = frozenset(_aten("index _unsafe_index index_put index_put_ _index_put_impl_"))
# Operators on lists of tensors.
MULTI_TENSOR = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
# Of these, those whose last list holds step counts, which are no part of a launch's table of tensors
# (ATen/native/cuda/MultiTensorApply.cuh: FusedOptimizerTensorListMetadata).
WITH_STEPS = _aten("_fused_adam_ _fused_adamw_ _fused_adagrad_")
FOREACH_CHUNK = 65536  # elements of one block of a multi-tensor kernel (ATen/native/cuda/MultiTensorApply.cuh)
# Tensors per launch of the multi-tensor kernels by number of lists (ATen/native/cuda/MultiTensorApply.cuh).
_FOREACH_TENSORS = (110, 64, 48, 36, 30)
_FOREACH_BLOCKS = 320  # of one launch

_KINDS = {
    "product": "mm bmm addmm baddbmm _grouped_mm _scaled_mm liger_add_product_",
    "reduction": "sum mean amax nll_loss_forward linalg_vector_norm var var_mean std",
    "gather": "embedding gather index index_select _embedding_bag",
    "scatter": "embedding_dense_backward index_put index_put_ _index_put_impl_ scatter scatter_add index_add "
    "index_add_ nll_loss_backward",
    "cast": "_to_copy copy_",
    "copy": "clone stack cat contiguous",
    "pad": "slice_backward select_backward constant_pad_nd roll reflection_pad2d reflection_pad2d_backward",
}
_KIND_OF_NAME = {name: kind for kind, names in _KINDS.items() for name in names.split()}
# Word of a name -> kind; a `backward` in the name makes it the kind's backward pass.
_KIND_OF_WORD = {
    **{word: word for word in ("attention", "batch_norm", "group_norm", "layer_norm")},
    "rms_norm": "layer_norm",
    "softmax": "softmax",
    "pool": "pool",
    "upsample": "pool",
}


def kernel_kind(name: str) -> str | None:
    """Return the kind of an operator's kernel by its name without a namespace; None where its shapes say it."""
    if name in _KIND_OF_NAME:
        return _KIND_OF_NAME[name]
    backward = "_backward" in name
    kind = next((kind for word, kind in _KIND_OF_WORD.items() if word in name), None)
    if kind is None:
        return "elementwise_backward" if backward else None
    return f"{kind}_backward" if backward else kind


def flops(name: str, args: Sequence, outputs: Sequence[Tensor], elements: int) -> int:
    """Return the FLOPs of operator `name` (`aten::mm`); `elements` is the count for anything without a formula."""
    if name in ATTENTION:
        return _attention(ATTENTION[name], args)
    formula = _FORMULAS.get(name)
    return formula(args, outputs) if formula is not None else elements


def gathered_bytes(name: str, args: Sequence, written: int) -> int:
    """Return the bytes that an operator of `GATHERS` reads of its first argument.

    That is what it writes, or the rows that it sums up.
    """
    if name == "aten::_embedding_bag":
        weight, indices = args[:2]
        return indices.numel() * weight.shape[1] * weight.element_size()
    return written


def foreach_launches(lists: int, sizes: Sequence[int]) -> int:
    """Count the kernels that one for-each operator launches over tensors of `sizes` elements, `lists` lists deep."""
    limit = _FOREACH_TENSORS[min(lists, len(_FOREACH_TENSORS)) - 1]
    blocks = sum(-(-size // FOREACH_CHUNK) for size in sizes)
    return max(1, -(-len(sizes) // limit), -(-blocks // _FOREACH_BLOCKS))


def matrix_elements(weights: Sequence[Tensor]) -> int:
    """Count the elements of a recurrent layer's weight matrices, biases left out."""
    return sum(weight.numel() for weight in weights if weight.dim() == 2)


def time_steps(x: Tensor) -> int:
    """Count the time steps of all samples that a recurrent layer is given."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def _grouped_mm(args: Sequence, outputs: Sequence[Tensor]) -> int:
    first, second = args[:2]
    if first.dim() == second.dim() == 2:  # the groups share the inner dimension
        return 2 * first.numel() * second.shape[-1]
    return _product(args, outputs)


def _product(args: Sequence, outputs: Sequence[Tensor]) -> int:
    return 2 * outputs[0].numel() * args[0].shape[-1]


def _added_product(args: Sequence, outputs: Sequence[Tensor]) -> int:
    return 2 * outputs[0].numel() * args[1].shape[-1]


def _convolution_flops(x: Tensor, weight: Tensor, y: Tensor, transposed: bool) -> int:
    return 2 * (x if transposed else y).numel() * math.prod(weight.shape[1:])


def _convolution_backward(args: Sequence, outputs: Sequence[Tensor]) -> int:
    mask = args[10]
    return (bool(mask[0]) + bool(mask[1])) * _convolution_flops(args[1], args[2], args[0], args[7])


def _attention(kernel: AttentionKernel, args: Sequence) -> int:
    query, key, value = args[kernel.query : kernel.query + 3]
    masked = len(args) > kernel.causal and args[kernel.causal]
    keys = key.shape[1 if kernel.length_first else -2]
    if kernel.length_first and query.dim() == 3:
        keys = args[kernel.causal - 2]
    pairs = (1 if masked else 2) * math.prod(query.shape[:-1]) * keys  # half of the pairs are masked
    scores, values = pairs * query.shape[-1], pairs * value.shape[-1]
    # Backward the scores again, then the gradients of scores, values, queries and keys.
    return 3 * scores + 2 * values if kernel.backward else scores + values


def _recurrent(args: Sequence) -> int:
    return 2 * time_steps(args[0]) * matrix_elements(args[1])


_FORMULAS: dict[str, Callable[[Sequence, Sequence[Tensor]], int]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", SCALED_PRODUCT), _product),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), _added_product),
    "gpufarm::liger_add_product_": lambda args, outputs: 2 * args[0].numel() * args[1].shape[-1],
    "aten::_grouped_mm": _grouped_mm,
    "aten::convolution": lambda args, outputs: _convolution_flops(args[0], args[1], outputs[0], args[6]),
    "aten::convolution_backward": _convolution_backward,
    "aten::_embedding_bag": lambda args, outputs: args[1].numel() * args[0].shape[1],
    "aten::_cudnn_rnn": lambda args, outputs: _recurrent(args),
    "aten::_cudnn_rnn_backward": lambda args, outputs: 2 * _recurrent(args),
}
