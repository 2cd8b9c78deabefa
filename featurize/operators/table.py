"""Table of operators by name: their FLOPs and bytes, and which of them launch no kernel.

Start reading at `flops`. An entry in one of these tables is all that an operator needs: a kernel of attention is one
entry of `ATTENTION`. A multiply-add counts as 2 FLOPs; operators other than matrix products count one per element.
Torch-free.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

SCALED_PRODUCT = "aten::_scaled_mm"  # product of 8-bit floats, whatever the type of its result
INT8_PRODUCT = "gpufarm::int8_product"  # product of 8-bit integers, with a result of 32 bits


def _aten(names: str) -> tuple[str, ...]:
    return tuple(f"aten::{name}" for name in names.split())


PRODUCTS = frozenset(
    {
        *_aten("mm bmm addmm baddbmm _grouped_mm"),
        SCALED_PRODUCT,
        "gpufarm::liger_add_product_",
        INT8_PRODUCT,
    }
)
CONVOLUTIONS = frozenset(_aten("convolution convolution_backward _cudnn_rnn _cudnn_rnn_backward"))


class AttentionCall(NamedTuple):
    """The arguments of a fused kernel of attention.

    query          index of the query among its arguments; key and value follow
    causal         index of the flag that hides later keys
    backward       whether it computes gradients
    length_first   whether shapes are [N, L, heads, E], or [tokens, heads, E] of packed texts; else [N, heads, L, E].
                   The length of the longest packed text is two places before the flag
    workspace      kind of its `featurize.operators.library_calls.LibraryCall`; None: it takes no workspace
    """

    query: int
    causal: int
    backward: bool = False
    length_first: bool = False
    workspace: str | None = None

    def sizes(self, query: Sequence[int], key: Sequence[int]) -> tuple[int, int, int]:
        """Return the heads of all samples, and the number of queries and of keys of each, from the shapes of both."""
        length_at, heads_at = (-3, -2) if self.length_first else (-2, -3)
        heads = query[heads_at] if len(query) > 2 else 1
        return math.prod(query[:-3]) * heads, query[length_at], key[length_at]


ATTENTION = {
    "aten::_scaled_dot_product_efficient_attention": AttentionCall(0, 6),
    "aten::_scaled_dot_product_efficient_attention_backward": AttentionCall(
        1, 11, backward=True, workspace="efficient_backward"
    ),
    "aten::_scaled_dot_product_flash_attention": AttentionCall(0, 4),
    "aten::_scaled_dot_product_flash_attention_backward": AttentionCall(
        1, 11, backward=True, workspace="flash_backward"
    ),
    "aten::_flash_attention_forward": AttentionCall(0, 8, length_first=True),
    "aten::_flash_attention_backward": AttentionCall(
        1, 11, backward=True, length_first=True, workspace="flash_backward"
    ),
}


def attention_call(name: str) -> AttentionCall:
    """Return the arguments of a kernel of attention; a kernel that `ATTENTION` lacks is assumed to be called as most
    are."""
    backward = "backward" in name
    return ATTENTION.get(name) or AttentionCall(query=int(backward), causal=-1, backward=backward)


# Allocate or re-describe; nothing runs on the GPU.
NO_KERNEL = frozenset(
    _aten(
        "empty empty_like empty_strided new_empty new_empty_strided lift_fresh resize_ set_ _unsafe_view "
        "_reshape_alias as_strided_ squeeze_ unsqueeze_ t_ transpose_ detach_"
    )
)
# Read only as much of their first argument as they write.
GATHERS = frozenset(_aten("embedding index_select gather index nll_loss_forward nll_loss2d_forward _embedding_bag"))
# Overwrite their first argument without reading it.
WRITE_ONLY = frozenset(_aten("zero_ fill_ copy_ normal_ uniform_ random_ _foreach_copy_ _foreach_zero_"))
# Their results, or the shapes of these, depend on their arguments' values.
DECIDED_BY_VALUES = frozenset(
    _aten(
        "_local_scalar_dense _to_copy _unique _unique2 bincount equal is_nonzero masked_select nonzero "
        "repeat_interleave unique_consecutive unique_dim"
    )
)
INDEXED_BY_MASKS = frozenset(_aten("index _unsafe_index index_put index_put_ _index_put_impl_"))
# Operators on lists of tensors.
MULTI_TENSOR = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
# Of these, those whose last list holds step counts, which are not part of a launch's table of tensors
# (ATen/native/cuda/MultiTensorApply.cuh: FusedOptimizerTensorListMetadata).
WITH_STEPS = _aten("_fused_adam_ _fused_adamw_ _fused_adagrad_")
FOREACH_CHUNK = 65536  # elements of one block of a multi-tensor kernel (ATen/native/cuda/MultiTensorApply.cuh)
# Tensors per launch of the multi-tensor kernels by number of lists (ATen/native/cuda/MultiTensorApply.cuh).
_FOREACH_TENSORS = (110, 64, 48, 36, 30)
_FOREACH_BLOCKS = 320  # blocks of one launch


# Categories of operators, at fixed places: only ever append. 0 is for operators without a row below.
VOCABULARY = (
    "other",
    "matmul",
    "convolution",
    "convolution_backward",
    "attention",
    "attention_backward",
    "recurrent",
    "recurrent_backward",
    "normalization",
    "normalization_backward",
    "softmax",
    "softmax_backward",
    "activation",
    "activation_backward",
    "arithmetic",
    "reduction",
    "pooling",
    "pooling_backward",
    "embedding",
    "embedding_backward",
    "dropout",
    "dropout_backward",
    "loss",
    "loss_backward",
    "copy",
    "fill",
    "join",
    "index",
    "index_backward",
    "resample",
    "resample_backward",
    "optimizer",
)


class OperatorRow(NamedTuple):
    """One operator, or one word of operators' names. None: decided by words of its name, or by its shapes.

    category   one of `VOCABULARY`
    kernel     kind of its kernel, of `featurize.timing.kernels`
    fused      its part in a graph that Inductor compiles, one of those below; None also for operators tagged pointwise
    """

    category: str | None = None
    kernel: str | None = None
    fused: str | None = None


# INDEXING makes a new result, as a reduction does, and reduces nothing; SCATTER adds into places that others also add
# into, in a separate kernel.
POINTWISE, REDUCTION, INDEXING, SCATTER, VIEW = "pointwise", "reduction", "indexing", "scatter", "view"

_ROWS = {
    "mm bmm addmm baddbmm": OperatorRow("matmul", "product"),
    "mv addmv addbmm dot linalg_matmul": OperatorRow("matmul"),
    "_grouped_mm _scaled_mm liger_add_product_ int8_product": OperatorRow(kernel="product"),
    "add sub rsub mul div pow neg exp log sqrt rsqrt abs reciprocal clamp clamp_min clamp_max sin cos maximum minimum "
    "addcmul addcdiv lerp square sign erf floor ceil round remainder fmod bitwise_not bitwise_and bitwise_or "
    "logical_not logical_and logical_or eq ne lt le gt ge expm1 log1p": OperatorRow("arithmetic"),
    "sum mean amax var var_mean": OperatorRow("reduction", "reduction", REDUCTION),
    "linalg_vector_norm std": OperatorRow("reduction", "reduction"),
    "amin max min prod any all argmax argmin": OperatorRow("reduction", fused=REDUCTION),
    "norm std_mean cumsum cumprod logsumexp": OperatorRow("reduction"),
    "prepare_softmax_online": OperatorRow(fused=REDUCTION),
    "nll_loss_forward": OperatorRow(kernel="reduction"),
    "embedding gather index index_select": OperatorRow(kernel="gather", fused=INDEXING),
    "_embedding_bag": OperatorRow(kernel="gather"),
    "index_put scatter scatter_add": OperatorRow(kernel="scatter", fused=SCATTER),
    "scatter_reduce": OperatorRow(fused=SCATTER),
    "embedding_dense_backward index_put_ _index_put_impl_ index_add index_add_ nll_loss_backward": OperatorRow(
        kernel="scatter"
    ),
    "_to_copy": OperatorRow("copy", "cast", POINTWISE),
    "copy_": OperatorRow("copy", "cast", INDEXING),
    "copy": OperatorRow("copy", fused=INDEXING),
    "clone": OperatorRow("copy", "copy", POINTWISE),
    "contiguous": OperatorRow("copy", "copy"),
    "cat": OperatorRow("join", "copy", INDEXING),
    "stack": OperatorRow("join", "copy"),
    "constant_pad_nd": OperatorRow("copy", "pad", POINTWISE),
    "roll reflection_pad2d": OperatorRow("copy", "pad"),
    "slice_backward select_backward reflection_pad2d_backward": OperatorRow(kernel="pad"),
    "flip repeat im2col col2im pixel_shuffle pixel_unshuffle": OperatorRow("copy"),
    "zeros ones full fill zeros_like ones_like full_like new_zeros new_ones new_full arange scalar_tensor tril "
    "triu": OperatorRow("fill", fused=POINTWISE),
    "rand randn rand_like randn_like": OperatorRow("fill", fused=INDEXING),
    "zero eye uniform normal": OperatorRow("fill"),
    "empty empty_like empty_strided lift_fresh_copy masked_fill where _inductor_bucketize convert_element_type "
    "iota": OperatorRow(fused=POINTWISE),
    "select_scatter slice_scatter inductor_random": OperatorRow(fused=INDEXING),
    "_unsafe_view lift_fresh _reshape_alias broadcast_in_dim": OperatorRow(fused=VIEW),
}
_ROW_OF = {name: row for names, row in _ROWS.items() for name in names.split()}
# Words of operators' names: the first match decides. A `backward` in the name makes it the backward pass.
_WORDS = {
    "_foreach_ _fused_": OperatorRow("optimizer"),
    "scaled_dot_product": OperatorRow("attention", "attention"),
    # A package's own operator: its category is `other` until the features get another version.
    "attention": OperatorRow(kernel="attention"),
    "_rnn lstm gru": OperatorRow("recurrent"),
    "conv": OperatorRow("convolution"),
    "batch_norm": OperatorRow("normalization", "batch_norm"),
    "group_norm": OperatorRow("normalization", "group_norm"),
    "layer_norm rms_norm": OperatorRow("normalization", "layer_norm"),
    "instance_norm": OperatorRow("normalization"),
    "softmax": OperatorRow("softmax", "softmax"),
    "_loss cross_entropy kl_div": OperatorRow("loss"),
    "dropout bernoulli": OperatorRow("dropout"),
    "pool": OperatorRow("pooling", "pool"),
    "embedding": OperatorRow("embedding"),
    "upsample": OperatorRow("resample", "pool"),
    "interpolate grid_sampler": OperatorRow("resample"),
    "relu gelu silu elu sigmoid tanh threshold hardswish hardtanh mish softplus hardsigmoid glu swish": OperatorRow(
        "activation"
    ),
    "index gather scatter select_backward slice_backward masked_ where topk sort": OperatorRow("index"),
}
_WORD_ROWS = [(names.split(), row) for names, row in _WORDS.items()]


@functools.cache
def category(name: str) -> str:
    """Return the category of an operator by its name (`aten::mm`), one of `VOCABULARY`."""
    name = name.split("::")[-1].split(".")[0]
    row = _ROW_OF.get(name) or _ROW_OF.get(name.rstrip("_"))  # in place or not
    if row is not None and row.category is not None:
        return row.category
    kind = _by_words(name, "category") or "other"
    return f"{kind}_backward" if "backward" in name and f"{kind}_backward" in VOCABULARY else kind


@functools.cache
def kernel_kind(name: str) -> str | None:
    """Return the kind of an operator's kernel by its name without a namespace; None where its shapes decide."""
    if name in _ROW_OF and (kind := _ROW_OF[name].kernel) is not None:
        return kind
    kind = _by_words(name, "kernel")
    if "_backward" in name:
        return f"{kind or 'elementwise'}_backward"
    return kind


def fused_part(name: str) -> str | None:
    """Return an operator's part in a graph that Inductor compiles, by its full name; None where no row has it."""
    namespace, _, bare = name.partition("::")
    return _ROW_OF[bare].fused if namespace in ("aten", "prims") and bare in _ROW_OF else None


def _by_words(name: str, column: str) -> str | None:
    rows = (row for words, row in _WORD_ROWS if any(word in name for word in words))
    return next((value for row in rows if (value := getattr(row, column)) is not None), None)


def flops(name: str, args: Sequence[Any], outputs: Sequence[Tensor], elements: int) -> int:
    """Return the FLOPs of operator `name` (`aten::mm`); `elements` is the count for operators without a formula."""
    if name in ATTENTION:
        return _attention(ATTENTION[name], args)
    formula = _FORMULAS.get(name)
    return formula(args, outputs) if formula is not None else elements


def gathered_bytes(name: str, args: Sequence[Any], written: int) -> int:
    """Return the bytes that an operator of `GATHERS` reads of its first argument.

    They are as many as it writes, or those of the rows that it sums up.
    """
    if name == "aten::_embedding_bag":
        weight, indices = args[:2]
        return int(indices.numel() * weight.shape[1] * weight.element_size())
    return written


def foreach_launches(lists: int, sizes: Sequence[int]) -> int:
    """Return the number of kernels of one for-each operator over tensors of `sizes` elements in `lists` lists."""
    limit = _FOREACH_TENSORS[min(lists, len(_FOREACH_TENSORS)) - 1]
    blocks = sum(-(-size // FOREACH_CHUNK) for size in sizes)
    return max(1, -(-len(sizes) // limit), -(-blocks // _FOREACH_BLOCKS))


def matrix_elements(weights: Sequence[Tensor]) -> int:
    """Return the number of elements of a recurrent layer's weight matrices, without biases."""
    return sum(weight.numel() for weight in weights if weight.dim() == 2)


def time_steps(x: Tensor) -> int:
    """Return the number of time steps of all samples in a recurrent layer's input."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def _grouped_mm(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    first, second = args[:2]
    if first.dim() == second.dim() == 2:  # the groups share the inner dimension
        return int(2 * first.numel() * second.shape[-1])
    return _product(args, outputs)


def _product(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    return int(2 * outputs[0].numel() * args[0].shape[-1])


def _added_product(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    return int(2 * outputs[0].numel() * args[1].shape[-1])


def _convolution_flops(x: Tensor, weight: Tensor, y: Tensor, transposed: bool) -> int:
    return 2 * (x if transposed else y).numel() * math.prod(weight.shape[1:])


def _convolution_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    mask = args[10]
    return (bool(mask[0]) + bool(mask[1])) * _convolution_flops(args[1], args[2], args[0], args[7])


def _attention(kernel: AttentionCall, args: Sequence[Any]) -> int:
    query, key, value = (tensor.shape for tensor in args[kernel.query : kernel.query + 3])
    masked = len(args) > kernel.causal and args[kernel.causal]
    heads, queries, keys = kernel.sizes(query, key)
    if kernel.length_first and len(query) == 3:
        keys = args[kernel.causal - 2]
    pairs = (1 if masked else 2) * heads * queries * keys  # half of the pairs are masked
    scores, values = pairs * query[-1], pairs * value[-1]
    # Backward: the scores again, then the gradients of scores, values, queries and keys.
    return int(3 * scores + 2 * values if kernel.backward else scores + values)


def _recurrent(args: Sequence[Any]) -> int:
    return 2 * time_steps(args[0]) * matrix_elements(args[1])


_FORMULAS: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], int]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", SCALED_PRODUCT, INT8_PRODUCT), _product),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), _added_product),
    "gpufarm::liger_add_product_": lambda args, outputs: 2 * args[0].numel() * args[1].shape[-1],
    "aten::_grouped_mm": _grouped_mm,
    "aten::convolution": lambda args, outputs: _convolution_flops(args[0], args[1], outputs[0], args[6]),
    "aten::convolution_backward": _convolution_backward,
    "aten::_embedding_bag": lambda args, outputs: args[1].numel() * args[0].shape[1],
    "aten::_cudnn_rnn": lambda args, outputs: _recurrent(args),
    "aten::_cudnn_rnn_backward": lambda args, outputs: 2 * _recurrent(args),
}
