"""What PyTorch does differently on CUDA than on meta tensors: autocast, attention, fused dropout, cuDNN's layers.

Start reading at `as_on_cuda`. Meta tensors take the generic code paths: autocast leaves them alone, attention
materialises its scores, dropout keeps a full-width mask, recurrent layers run step by step. Inside `as_on_cuda` the
names that modules call are replaced by versions that dispatch the operators CUDA would run. Code that holds its own
reference to one of these functions (`from torch.nn.functional import ...`), or calls TorchScript, is not reached.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import _VF, Tensor

from featurize import cudnn_rnn
from featurize.library_calls import channels_last

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
# These get `dtype=float32` instead, which CUDA's kernels convert to as they read: no copy is made.
_AS_FP32 = "sum prod cumsum cumprod"
# Likewise in fp16 only (ATen/native/cuda/SoftMax.cpp, half_to_float).
_HALF_TO_FLOAT = {"softmax": torch._softmax, "log_softmax": torch._log_softmax}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_lock = threading.RLock()  # the replacements are the process's: one trace at a time


class _Autocast:
    """Casts arguments as CUDA's autocast would. The forward's context caches the casts of weights; the contexts that
    a checkpointed backward opens for its recomputations are shorter, and count as having no cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._cache: dict[int, tuple[Tensor, Tensor]] | None = None

    def enter(self, phase: str) -> None:
        self._cache = {} if phase == "forward" else None

    def cast(self, value, dtype: torch.dtype):
        if isinstance(value, Tensor):
            if value.dtype is dtype or value.dtype not in _FLOATS or value.device.type != "meta":
                return value
            if self._cache is None or not (value.is_leaf and value.requires_grad and dtype is self.dtype):
                return value.to(dtype)
            key = id(value)
            if key not in self._cache:
                self._cache[key] = (value, value.to(dtype))  # holds the weight: its id stays its own
            return self._cache[key][1]
        if isinstance(value, list | tuple):
            return type(value)(self.cast(v, dtype) for v in value)
        return value

    def wrap_dtype(self, function: Callable) -> Callable:
        """Ask for the result in fp32, unless the caller asks for a type."""

        @functools.wraps(function)
        def call(x, *args, **kwargs):
            if isinstance(x, Tensor) and x.is_meta and x.dtype in _FLOATS[1:] and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            return function(x, *args, **kwargs)

        return call

    def wrap_softmax(self, function: Callable, kernel: Callable) -> Callable:
        """In fp16 the kernel that reads halves and gives floats; else a copy in fp32 first."""
        otherwise = self.wrap(function, torch.float32)

        @functools.wraps(function)
        def call(x, dim=None, *args, **kwargs):
            plain = isinstance(dim, int) and not args and not kwargs
            if plain and isinstance(x, Tensor) and x.is_meta and x.dtype is torch.float16:
                return kernel(x, dim, True)
            return otherwise(x, *(() if dim is None else (dim,)), *args, **kwargs)

        return call

    def wrap(self, function: Callable, dtype: torch.dtype) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            return function(*(self.cast(a, dtype) for a in args), **{k: self.cast(v, dtype) for k, v in kwargs.items()})

        return call


@contextlib.contextmanager
def as_on_cuda(
    autocast_dtype: torch.dtype | None, compute_capability: tuple[int, int]
) -> Iterator[Callable[[str], None]]:
    """Within, meta tensors take CUDA's paths. Yields a function to call with each phase that begins."""
    autocast = _Autocast(autocast_dtype) if autocast_dtype is not None else None
    with _lock, contextlib.ExitStack() as stack:
        if autocast is not None:
            for names, dtype in ((_LOWER, autocast_dtype), (_FP32, torch.float32)):
                for owner, listed in names.items():
                    for name in listed.split():
                        if function := getattr(owner, name, None):
                            wrapped = autocast.wrap(function, dtype)
                            if name in _HALF_TO_FLOAT:
                                wrapped = autocast.wrap_softmax(function, _HALF_TO_FLOAT[name])
                            stack.enter_context(_replaced(owner, name, wrapped))
            for owner in (torch, Tensor):
                for name in _AS_FP32.split():
                    stack.enter_context(_replaced(owner, name, autocast.wrap_dtype(getattr(owner, name))))
        attention = functools.partial(
            _attention, F.scaled_dot_product_attention, autocast, flash=compute_capability >= (8, 0)
        )
        stack.enter_context(_fused_kernels())
        stack.enter_context(_replaced(F, "scaled_dot_product_attention", attention))
        stack.enter_context(_replaced(F, "dropout", functools.partial(_dropout, F.dropout)))
        stack.enter_context(_replaced(torch, "dropout", functools.partial(_dropout, torch.dropout)))
        half = functools.partial(autocast.cast, dtype=torch.float16) if autocast is not None else None
        for name in cudnn_rnn.MODES:
            recurrent = functools.partial(cudnn_rnn.recurrent, name, getattr(_VF, name), half)
            stack.enter_context(_replaced(_VF, name, recurrent))
        yield autocast.enter if autocast is not None else lambda phase: None


@contextlib.contextmanager
def _fused_kernels() -> Iterator[None]:
    """Operators that CUDA runs as one kernel and meta tensors in pieces, in another layout or not at all. By
    native_functions.yaml some are composite with a kernel of the backend's own, and mish's backward is the only such
    one that training meets."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    try:
        # Not `library.impl`, which wants composite operators left composite.
        library.m.impl("mish_backward", "Meta", lambda grad, x: torch.empty_like(x), False)
        library.m.impl("convolution", "Meta", _convolution, False)
        library.m.impl("convolution_backward", "Meta", _convolution_backward, False)
        library.m.impl("_cudnn_rnn", "Meta", cudnn_rnn.forward, False)
        library.m.impl("_cudnn_rnn_backward", "Meta", cudnn_rnn.backward, False)
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def _replaced(owner, name: str, value) -> Iterator[None]:
    own = name in vars(owner)  # Tensor inherits most methods from its C base: what was set is deleted again
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """cuDNN's layout: channels last if the input's or the weight's is (ATen/native/ConvUtils.h). Meta: never."""
    out = torch.ops.aten._convolution(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, False, False, True, True
    )
    return torch.empty_like(out, memory_format=_layout(x, weight))


def _convolution_backward(
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, wanted
):
    layout = _layout(x, weight)
    x_grad, weight_grad = (
        torch.empty_like(t, memory_format=layout) if needed else None
        for t, needed in zip((x, weight), wanted, strict=False)
    )
    return x_grad, weight_grad, grad.new_empty(bias_sizes) if wanted[2] else None


def _layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    return torch.channels_last if channels_last(x, weight) else torch.contiguous_format


def _dropout(original, input, p=0.5, training=True, inplace=False, **kwargs):
    # ATen/native/Dropout.cpp, is_fused_kernel_acceptable: CUDA keeps a mask of one byte an element.
    if training and 0 < p < 1 and not inplace and not kwargs and input.device.type == "meta":
        return torch.native_dropout(input, p, True)[0]
    return original(input, p, training, inplace, **kwargs)


def _attention(
    original, autocast, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False, *, flash: bool,
):  # fmt: skip
    """The kernel that ATen/native/transformers/cuda/sdp_utils.cpp would choose: flash for half types without a mask
    (compute capability 8.0 and later), memory-efficient otherwise, the math path where neither applies. cuDNN's
    kernel, which newer releases may prefer on Hopper, keeps the same tensors as flash."""
    if autocast is not None:
        query, key, value, attn_mask = autocast.cast((query, key, value, attn_mask), autocast.dtype)
    half = query.dtype in (torch.float16, torch.bfloat16)
    aligned = query.shape[-1] % (8 if half else 4) == 0 and value.shape[-1] % (8 if half else 4) == 0
    fused = query.device.type == "meta" and query.dim() == key.dim() == value.dim() == 4
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if fused and flash and half and attn_mask is None and same_width and query.shape[-1] <= 256:
        width = query.shape[-1]
        if width % 8:  # flash pads the head to a multiple of 8
            scale = scale if scale is not None else width**-0.5
            query, key, value = (F.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        out = kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    if fused and aligned and not enable_gqa:
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                bias = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
            batch, heads, length = query.shape[:3]
            attn_mask = attn_mask.expand(batch, heads, length, key.shape[-2])
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        keep = query.requires_grad or key.requires_grad or value.requires_grad
        return kernel(query, key, value, attn_mask, keep, dropout_p, is_causal, scale=scale)[0]
    more = {"enable_gqa": True} if enable_gqa else {}
    return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)
