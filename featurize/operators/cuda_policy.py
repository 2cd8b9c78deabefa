"""Differences of PyTorch on CUDA from meta tensors: autocast, attention, fused dropout, cuDNN's layers, detection.

Start reading at `as_on_cuda`. Meta tensors take the generic code paths: autocast ignores them, attention
materialises its scores, dropout keeps a full-width mask, recurrent layers run step by step. Inside `as_on_cuda` the
functions that modules call are replaced by versions that dispatch the operators CUDA would run. Code with its own
reference to one of these functions (`from torch.nn.functional import ...`), or in TorchScript, is not reached.

Fused attention (`scaled_dot_product`) is PyTorch's own, the flash-attn package's or xFormers'; neither a package nor a
GPU is needed. The packages' functions become PyTorch's operators of the same kernels, which keep the same tensors:
query, key, value, output, the fp32 row sums and the random state. `featurize.operators.table.ATTENTION` prices them.

PyTorch's own autocast has no effect on meta tensors. Inside `casting`, functions that Python code calls cast their
arguments as CUDA would, and a model's own `torch.autocast("cuda")` in its forward pass (also for `x.device.type`, which
is meta here) switches that on or off.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import _VF, Tensor
from torch.autograd.profiler import record_function

from conf.errors import UsageError
from featurize.device.device_spec import AttentionKernels
from featurize.operators.library_calls import channels_last
from featurize.operators.own_operators import detection_as_trained, liger_on_gpu
from featurize.operators.replacing import Change, all_replaced, if_imported
from featurize.operators.table import time_steps
from featurize.operators.tensor_parts import is_shared


@contextlib.contextmanager
def as_on_cuda(
    autocast_dtype: torch.dtype | None,
    kernels: AttentionKernels,
    assume: Callable[[str], None] = lambda text: None,
    attends: Callable[[int], None] = lambda width: None,
) -> Iterator[Autocast]:
    """Make meta tensors take CUDA's paths inside, which are ROCm's too, except for attention. Yields the casts, whose
    `enter` is to be called with each phase that begins. `kernels` are the widest heads of PyTorch's fused attention.
    `assume` is called with each assumption about values that only a real step computes, `attends` with the width of a
    head for each call of attention."""
    with casting(autocast_dtype) as autocast, fused_kernels():  # `casting` holds a lock: one trace at a time
        attend = functools.partial(scaled_dot_product, F.scaled_dot_product_attention, autocast, kernels, attends)
        changes = (
            *detection_as_trained(autocast.cast, assume),
            *as_installed(),
            *if_imported("xformers.ops.fmha", _XFORMERS_RUN, functools.partial(functools.partial, _attend_xformers)),
            (F, "scaled_dot_product_attention", attend),
            *liger_on_gpu(),
            (torch.autograd.profiler, "record_function", functools.partial(_unmarked, threading.get_ident())),
            *((owner, "dropout", functools.partial(_dropout, owner.dropout)) for owner in (F, torch)),
            *((_VF, name, functools.partial(_recurrent, name, getattr(_VF, name), autocast)) for name in _MODES),
        )
        with all_replaced(changes):
            yield autocast


def _unmarked(thread: int, name: str, args: str | None = None) -> contextlib.AbstractContextManager[object]:
    """Mark a part of the program for PyTorch's profiler, but no optimizer's calls in this thread: under a dispatch
    mode, the marks take a twentieth of a small model's trace."""
    if threading.get_ident() == thread and name.startswith("Optimizer."):
        return contextlib.nullcontext()
    return record_function(name, args)


@contextlib.contextmanager
def fused_kernels() -> Iterator[None]:
    """Install operators that CUDA runs as one kernel, and meta tensors in pieces, in another layout or not at all. By
    native_functions.yaml, some are composite operators with a backend kernel; of these, training meets only mish's
    backward."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    try:
        implementations = library.m
        assert implementations is not None, "a new library has them"
        has_rms_norm = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
        for name, kernel in _META.items():
            if has_rms_norm or "rms_norm" not in name:
                # Not `library.impl`, which wants composite operators left composite.
                implementations.impl(name, "Meta", kernel, False)
        yield
    finally:
        library._destroy()


def _added_product(bias: Tensor, first: Tensor, second: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Tensor:
    """Return `addmm`; PyTorch's own meta kernel lets a bias of another shape pass, which its kernels refuse."""
    if not bias.dtype == first.dtype == second.dtype:
        return torch._decomp.decompositions.addmm(bias, first, second, beta, alpha)
    product = torch.ops.aten.mm(first, second)
    bias.expand(product.shape)  # raises if the shapes do not fit
    return product


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """Convolve in cuDNN's layout: channels last if the input's or the weight's is (ATen/native/ConvUtils.h). Meta:
    never."""
    out = torch.ops.aten._convolution(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, False, False, True, True
    )
    return torch.empty_like(out, memory_format=_layout(x, weight))


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    layout = _layout(x, weight)
    x_grad, weight_grad = (
        torch.empty_like(t, memory_format=layout) if needed else None
        for t, needed in zip((x, weight), wanted, strict=False)
    )
    return x_grad, weight_grad, grad.new_empty(bias_sizes) if wanted[2] else None


def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows as on CUDA, with indices of two types (cuda/Embedding.cu); meta accepts any type before 2.13."""
    if indices.dtype not in (torch.long, torch.int):
        raise RuntimeError(f"indices of an embedding are of type long or int, got {indices.dtype}")
    return weight.new_empty((*indices.shape, *weight.shape[1:]))


def _grouped_product(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply in any floating-point type, as CUDA does; the meta kernel supports bf16 alone. Rows of the result begin
    at multiples of 16 bytes (ATen/native/GroupedMMUtils.h: create_grouped_gemm_output_tensor)."""
    if mat_a.dtype != mat_b.dtype:
        raise RuntimeError(f"expected two matrices of one type, got {mat_a.dtype} and {mat_b.dtype}")
    if (mat_a.dim() == 3 or mat_b.dim() == 3) and mat_a.shape[-1] != mat_b.shape[-2]:
        raise RuntimeError(f"matrices of shapes {list(mat_a.shape)} and {list(mat_b.shape)} have no product")
    rows, columns = mat_a.shape[-2], mat_b.shape[-1]
    size: tuple[int, ...]
    if mat_a.dim() == mat_b.dim() == 2:
        if offs is None:
            raise RuntimeError("two matrices of two dimensions need offsets")
        size = (offs.shape[0], rows, columns)
    else:
        size = (rows, columns) if mat_a.dim() != mat_b.dim() else (mat_a.shape[0], rows, columns)
    dtype = out_dtype or mat_a.dtype
    step = 16 // dtype.itemsize
    width = -(-columns // step) * step
    return torch.empty_strided(size, (rows * width, width, 1)[-len(size) :], dtype=dtype, device="meta")


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Run one kernel, which keeps a float for each row (cuda/layer_norm_kernel.cu: _fused_rms_norm_cuda)."""
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    of_input = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
    return of_input, torch.empty_like(weight) if wanted[1] and weight is not None else None


# Recurrent layers as CUDA runs them: one cuDNN call for all time steps and layers. Only memory is modelled: the
# allocations of ATen/native/cudnn/RNN.cpp.
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t

# Without a GPU, cuDNN does not report the size of its reserve for the backward pass. Assumed, in values a time step,
# sample, layer, direction and hidden unit, on top of the outputs between layers: LSTM 5 (its gates and the cell state),
# GRU 6, plain ones 1. The first two explain, to the byte, the reserves that cuDNN 7 asked for in
# github.com/pytorch/pytorch/issues/2895. The sizes of that model, 4 layers of 320 units on 123 inputs, 250 steps and
# 100 samples, follow from its parameter counts and these figures. Plain layers, two directions and newer cuDNN were not
# measured. Masks of dropout between layers are left out.
_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}


def _recurrent(name: str, original: Callable[..., Any], autocast: Autocast, *args: Any) -> Any:
    """Run `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` by cuDNN's operator; both of their overloads, padded and
    packed.

    CUDA's autocast supports only fp16 here. Inputs that cuDNN does not support (bfloat16 layers, batch sizes without
    values) go to `original`.
    """
    half = None if autocast.dtype is None else functools.partial(autocast.cast, dtype=torch.float16)
    packed = isinstance(args[3], list | tuple)
    x, state, weights = (args[0], args[2], args[3]) if packed else args[:3]
    batch_sizes: Tensor | None = args[1] if packed else None
    has_biases, layers, dropout, train, bidirectional = args[4:9] if packed else args[3:8]
    batch_first = False if packed else args[8]
    takes = x.is_meta and (half is not None or x.dtype in (torch.float32, torch.float16, torch.float64))
    if not takes or (batch_sizes is not None and batch_sizes.is_meta):
        return original(*args)
    if half is not None:
        x, state, weights = half(x), half(state), half(list(weights))
    hx, cx = state if name == "lstm" else (state, None)
    hidden = (hx if cx is None else cx).shape[2]
    projection = hx.shape[2] if hx.shape[2] != hidden else 0
    stride = (4 if has_biases else 2) + bool(projection)
    output, hy, cy, _, _ = torch.ops.aten._cudnn_rnn(
        x,
        list(weights),
        stride,
        None,
        hx,
        cx,
        _MODES[name],
        hidden,
        projection,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        [] if batch_sizes is None else batch_sizes.tolist(),
        None,
    )
    return (output, hy, cy) if name == "lstm" else (output, hy)


def _recurrent_forward(
    x: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the outputs of `aten::_cudnn_rnn` on meta. The weights count as parts of one buffer, as on a GPU."""
    directions = 2 if bidirectional else 1
    width = (proj_size or hidden_size) * directions
    if batch_sizes:
        output = x.new_empty(x.shape[0], width)
    else:
        steps, samples = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
        output = x.new_empty(steps, samples, width)
        output = output.transpose(0, 1) if batch_first else output
    reserve_elements = time_steps(x) * hidden_size * directions * (_KEPT[mode] * num_layers + num_layers - 1)
    reserve = torch.empty(reserve_elements * x.element_size() if train else 0, dtype=torch.uint8, device="meta")
    cell = torch.empty_like(cx) if cx is not None else x.new_empty(0)
    return output, torch.empty_like(hx), cell, reserve, x.new_empty(0)


def _recurrent_backward(
    x: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: Tensor | None,
    reserve: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor | list[Tensor] | None, ...]:
    """Return the gradients of `aten::_cudnn_rnn_backward` on meta: those of the weights are parts of one buffer."""
    gradients = [
        torch.empty_like(t) if t is not None and needed else None
        for t, needed in zip((x, hx, cx), output_mask, strict=False)
    ]
    if not output_mask[3]:
        return *gradients, []
    flat = weight[0].new_empty(sum(w.numel() for w in weight))
    parts = flat.split([w.numel() for w in weight])
    return *gradients, [part.view(w.shape) for part, w in zip(parts, weight, strict=True)]


_META: dict[str, Callable[..., Any]] = {
    "addmm": _added_product,
    "mish_backward": lambda grad, x: torch.empty_like(x),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding": _embedding,
    "_grouped_mm": _grouped_product,
    "_cudnn_rnn": _recurrent_forward,
    "_cudnn_rnn_backward": _recurrent_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
}


def _layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    return torch.channels_last if channels_last(x, weight) else torch.contiguous_format


def _dropout(
    original: Callable[..., Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **kwargs: Any,
) -> Tensor:
    # ATen/native/Dropout.cpp, is_fused_kernel_acceptable: CUDA keeps a mask of one byte an element.
    if training and 0 < p < 1 and not inplace and not kwargs and input.device.type == "meta":
        return torch.native_dropout(input, p, True)[0]
    return original(input, p, training, inplace, **kwargs)


_IMPLEMENTATION = "flash_attention_2"
_ROWS = 32  # rows for which memory-efficient attention keeps sums (aten/src/ATen/native/transformers: kAlignLSE)
_HALF = (torch.float16, torch.bfloat16)
_XFORMERS_RUN = "_memory_efficient_attention"  # called by each of xFormers' public functions
_LIBRARY, _MODELS = "transformers.modeling_flash_attention_utils", "transformers.modeling_utils"
# Attributes in which transformers caches the imported package.
_STATE = (
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)
T = TypeVar("T")


def build_with_flash_attn(build: Callable[[], T]) -> T:
    """Call `build()` as if flash-attn were installed, even if that call is the first to import transformers."""
    known = _transformers() is not None
    try:
        with all_replaced(as_installed()):
            return build()
    except ImportError:
        if known or _transformers() is None:
            raise
    with all_replaced(as_installed()):
        return build()


def as_installed() -> Iterator[Change]:
    """Yield the changes that make transformers find flash-attn, if transformers is imported and has the names known
    here."""
    library = _transformers()
    matrix = getattr(library, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    imports = getattr(library, "_lazy_imports", None)
    if library is None or imports is None or not isinstance(matrix, dict) or 2 not in matrix:
        return

    def lazy_imports(implementation: str | None, *args: object, **kwargs: object) -> Any:
        if implementation != _IMPLEMENTATION:
            return imports(implementation, *args, **kwargs)
        return flash_attn_func, flash_attn_varlen_func, None, vars(library)["_pad_input"], vars(library)["_unpad_input"]

    described = {**matrix, 2: {**matrix[2], "general_availability_check": lambda *_, **__: True}}
    instead: list[tuple[str, str, object]] = [
        *((module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", described) for module in (_LIBRARY, _MODELS)),
        (_LIBRARY, "_lazy_imports", lazy_imports),
        *((_LIBRARY, name, None) for name in _STATE),
    ]
    for module, name, value in instead:
        yield from if_imported(module, name, functools.partial(lambda given, _: given, value))


# transformers reads from these two signatures which options the package supports.
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Attend [N, L, heads, E] as `flash_attn.flash_attn_func` does."""
    longest = q.shape[1], k.shape[1]
    return flash_attn_varlen_func(q, k, v, None, None, *longest, dropout_p, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attend packed texts of any lengths, [all tokens, heads, E]; without their starts, as `flash_attn_func`."""
    if q.dtype not in _HALF:
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    sides = {}
    if window_size != (-1, -1):
        sides = {"window_size_left": window_size[0], "window_size_right": window_size[1]}
    more = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), dropout_p, causal, False
    return _flash(torch.ops.aten._flash_attention_forward, (q, k, v), *more, scale=softmax_scale, **sides)


def _flash(
    kernel: Callable[..., tuple[Tensor, ...]],
    heads: tuple[Tensor, Tensor, Tensor],
    *more: Any,
    scale: float | None,
    **sides: int,
) -> Tensor:
    """Run flash attention, which pads the head of query, key and value to a multiple of 8."""
    width = heads[0].shape[-1]
    scale = scale if scale is not None else width**-0.5
    out = kernel(*(F.pad(t, (0, -width % 8)) if width % 8 else t for t in heads), *more, scale=scale, **sides)[0]
    return out[..., :width] if width % 8 else out


def _transformers() -> ModuleType | None:
    library = sys.modules.get(_LIBRARY)
    return library if library is not None and inspect.isfunction(getattr(library, "_lazy_imports", None)) else None


def _attend_xformers(run: Callable[..., Tensor], inp: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Attend [N, L, E], [N, L, heads, E] or [N, L, groups, heads of each, E] on meta, as `run` does on a GPU.

    In half precision xFormers runs FlashAttention, else its CUTLASS kernel.
    """
    if not inp.query.is_meta:
        return run(inp, *args, **kwargs)
    query, key, value, bias = inp.query, inp.key, inp.value, inp.attn_bias
    shape = (*query.shape[:-1], value.shape[-1])
    query, key, value = (_four_dimensions(x) for x in (query, key, value))
    causal = type(bias).__name__.startswith("LowerTriangular")
    if query.dtype in _HALF and not isinstance(bias, Tensor):
        return flash_attn_func(query, key, value, inp.p, inp.scale, causal).reshape(shape)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mask = bias.expand(*query.shape[:3], key.shape[2]) if isinstance(bias, Tensor) else None
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, query.requires_grad, inp.p, causal, scale=inp.scale
    )[0]
    return out.transpose(1, 2).reshape(shape)


def _four_dimensions(x: Tensor) -> Tensor:
    return x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x


def scaled_dot_product(
    original: Callable[..., Tensor],
    autocast: Autocast,
    kernels: AttentionKernels,
    attends: Callable[[int], None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run the kernel that ATen/native/transformers/cuda/sdp_utils.cpp would choose: flash for half types without a mask
    (compute capability 8.0 and later), memory-efficient otherwise, the math path where neither applies. cuDNN's kernel,
    which newer releases may prefer on Hopper, keeps the same tensors as flash; so do AOTriton's on ROCm."""
    width = query.shape[-1]
    attends(width)
    query, key, value, attn_mask = autocast.cast((query, key, value, attn_mask), autocast.dtype)
    half = query.dtype in _HALF
    aligned = query.shape[-1] % (8 if half else 4) == 0 and value.shape[-1] % (8 if half else 4) == 0
    fused = query.device.type == "meta" and query.dim() == key.dim() == value.dim() == 4
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    square = not is_causal or query.shape[-2] == key.shape[-2]  # flash aligns the causal mask differently
    if fused and half and attn_mask is None and same_width and square and width <= kernels.flash:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return _flash(kernel, (query, key, value), dropout_p, is_causal, scale=scale)
    grouped = fused and query.shape[1] != key.shape[1]
    if fused and aligned and not grouped and width <= kernels.efficient:
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                bias = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
            attn_mask = _align(attn_mask)
            batch, heads, length = query.shape[:3]
            attn_mask = attn_mask.expand(batch, heads, length, key.shape[-2])
        if is_shared(query):
            _require_whole_rows(query)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        keep = query.requires_grad or key.requires_grad or value.requires_grad
        return kernel(query, key, value, attn_mask, keep, dropout_p, is_causal, scale=scale)[0]
    if is_shared(query):
        raise UsageError(
            "parallel: cp: PyTorch runs fused attention over several ranks, and this call has no fused kernel (heads "
            f"of {width} elements in {str(query.dtype).removeprefix('torch.')}, {query.shape[1]} of queries and "
            f"{key.shape[1]} of keys); bf16 has more of them"
        )
    more = {"enable_gqa": True} if enable_gqa else {}
    return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)


def _require_whole_rows(query: Tensor) -> None:
    """Raise `UsageError` where memory-efficient attention over several ranks has more row sums than queries, which the
    ring does not merge.

    Args:
        query: [N, heads, L, E], spread over ranks, within `featurize.training.sharded_rank`.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    assert isinstance(query, DTensor)
    parts = 2 if ring._cp_options.enable_load_balance else 1
    if (rows := query.to_local().shape[2] // parts) % _ROWS:
        multiple = _ROWS * parts * query.device_mesh.size()
        raise UsageError(
            f"parallel: cp: memory-efficient attention keeps row sums of {_ROWS} queries or a multiple, and a part of "
            f"the sequence has {rows}; give a sequence of a multiple of {multiple} tokens, or bf16 on a GPU with flash "
            "attention"
        )


def _align(mask: Tensor) -> Tensor:
    """Return the bias as the memory-efficient kernel reads it, with rows that begin at multiples of 8 elements; else a
    view of a padded copy (ATen/native/transformers/attention.cpp: preprocess_mask)."""
    if mask.stride(-1) == 1 and not any(step % 8 for step in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return F.pad(mask, (0, 8 - columns % 8))[..., :columns]


# The lists of ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE) under
# the names that Python code calls. Operators outside both lists run in their inputs' type, as with real autocast.
_LOWER = {
    F: "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linear prelu",
    torch: "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv addr "
    "matmul einsum mm mv addbmm baddbmm bmm chain_matmul",
    Tensor: "matmul __matmul__ __rmatmul__ mm mv bmm addmm addmv addr addbmm baddbmm",
}
_FP32 = {
    F: "layer_norm rms_norm group_norm softplus cross_entropy nll_loss kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss poisson_nll_loss binary_cross_entropy_with_logits cosine_similarity interpolate",
    torch: "layer_norm rms_norm group_norm softmax log_softmax exp expm1 log log2 log10 log1p pow reciprocal rsqrt "
    "norm logsumexp cdist",
    Tensor: "softmax log_softmax exp expm1 log log2 log10 log1p pow __pow__ __rpow__ reciprocal rsqrt norm logsumexp",
}
# These get `dtype=float32` instead: CUDA's kernels convert as they read, without a copy.
_AS_FP32 = "sum prod cumsum cumprod"
# Likewise in fp16 only (ATen/native/cuda/SoftMax.cpp, half_to_float).
_HALF_TO_FLOAT = {"softmax": torch._softmax, "log_softmax": torch._log_softmax}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_lock = threading.RLock()  # the replacements are per process: one trace at a time


class Autocast:
    """The casts in effect: lower-precision operators cast to `dtype`; None: no casts. The forward pass's context caches
    the casts of weights; the contexts that a checkpointed backward opens for its recomputations are shorter, and are
    treated as having no cache."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._installed = False  # whether the functions that it covers are replaced
        self._cache: dict[int, tuple[Tensor, Tensor]] | None = None

    def enter(self, phase: str) -> None:
        """Begin a phase of the step."""
        self._cache = {} if phase == "forward" else None

    def cast(self, value: Any, dtype: torch.dtype | None) -> Any:
        """Return floating-point tensors, also those in lists, in that type; unchanged without autocast."""
        if self.dtype is None:
            return value
        if isinstance(value, Tensor):
            if value.dtype is dtype or value.dtype not in _FLOATS or value.device.type != "meta":
                return value
            if self._cache is None or not (value.is_leaf and value.requires_grad and dtype is self.dtype):
                return value.to(dtype)
            key = id(value)
            if key not in self._cache:
                self._cache[key] = (value, value.to(dtype))  # holds the weight, so that its id is not reused
            return self._cache[key][1]
        if isinstance(value, list | tuple):
            return type(value)(self.cast(v, dtype) for v in value)
        return value

    @contextlib.contextmanager
    def switched(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Behave as inside a `torch.autocast` of that type; None is a disabled one."""
        before = self.dtype, self._cache, self._installed
        installs = dtype is not None and not self._installed
        if dtype is not None and dtype is not self.dtype:
            self._cache = {}
        self.dtype = dtype
        self._installed = self._installed or installs
        try:
            with all_replaced(self._changes() if installs else ()):
                yield
        finally:
            self.dtype, self._cache, self._installed = before

    def _changes(self) -> Iterator[Change]:
        """Yield the changes of the functions that autocast covers to ones that cast as this object requires."""
        for names, wide in ((_LOWER, None), (_FP32, torch.float32)):
            for owner, listed in names.items():
                for name in listed.split():
                    if function := getattr(owner, name, None):
                        halves = _HALF_TO_FLOAT.get(name)
                        instead = self._wrap_softmax(function, halves) if halves else self._wrap(function, wide)
                        yield owner, name, instead
        for owner in (torch, Tensor):
            for name in _AS_FP32.split():
                yield owner, name, self._wrap_dtype(getattr(owner, name))

    def _wrap(self, function: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
        """Return the function with arguments cast to a type; None: to autocast's."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            into = dtype or self.dtype
            return function(*(self.cast(a, into) for a in args), **{k: self.cast(v, into) for k, v in kwargs.items()})

        return call

    def _wrap_dtype(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a result in fp32, unless the caller passes a type."""

        @functools.wraps(function)
        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            narrow = isinstance(x, Tensor) and x.is_meta and x.dtype in _FLOATS[1:]
            if self.dtype is not None and narrow and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            return function(x, *args, **kwargs)

        return call

    def _wrap_softmax(self, function: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return softmax that, in fp16, calls the kernel that reads halves and returns floats; else it copies to fp32
        first."""
        otherwise = self._wrap(function, torch.float32)

        @functools.wraps(function)
        def call(x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
            plain = self.dtype is not None and isinstance(dim, int) and not args and not kwargs
            if plain and isinstance(x, Tensor) and x.is_meta and x.dtype is torch.float16:
                return kernel(x, dim, True)
            return otherwise(x, *(() if dim is None else (dim,)), *args, **kwargs)

        return call


@contextlib.contextmanager
def casting(dtype: torch.dtype | None) -> Iterator[Autocast]:
    """Cast meta tensors inside as CUDA's autocast of that type would (None: not at all), and as the model's own calls
    of `torch.autocast` or `torch.cuda.amp.autocast` in its forward pass require."""
    autocast = Autocast(dtype)

    class ModelAutocast(torch.autocast):
        """The context that the model enters. It accepts meta for CUDA, which PyTorch's own refuses."""

        def __init__(
            self,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            self._of_gpu = device_type in ("cuda", "meta")
            self._asked = (dtype or torch.get_autocast_dtype("cuda")) if enabled else None
            arguments = {"enabled": False} if self._of_gpu else {"enabled": enabled}
            super().__init__("cuda" if self._of_gpu else device_type, dtype, cache_enabled=cache_enabled, **arguments)

        def __enter__(self) -> Any:
            self._inside = contextlib.ExitStack()
            if self._of_gpu:
                self._inside.enter_context(autocast.switched(self._asked))
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            self._inside.close()
            return super().__exit__(*error)

    def of_cuda(enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> ModelAutocast:
        return ModelAutocast("cuda", dtype, enabled, cache_enabled)

    with _lock:
        # Called for the type of a tensor's device; PyTorch has no autocast for meta.
        enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

        def is_enabled(device_type: str | None = None) -> bool:
            if device_type in (None, "meta"):  # without a type, it means CUDA
                return autocast.dtype is not None
            return enabled(device_type)

        def autocast_dtype(device_type: str) -> torch.dtype:
            return autocast.dtype or torch.float16 if device_type == "meta" else dtype_of(device_type)

        changes = (
            *((owner, "autocast", ModelAutocast) for owner in (torch, torch.amp, torch.amp.autocast_mode)),
            (torch, "is_autocast_enabled", is_enabled),
            (torch, "get_autocast_dtype", autocast_dtype),
            (torch, "get_autocast_gpu_dtype", lambda: autocast_dtype("meta")),
            *((owner, "autocast", of_cuda) for owner in (torch.cuda.amp, torch.cuda.amp.autocast_mode)),
        )
        with all_replaced(changes), autocast.switched(dtype):
            yield autocast
