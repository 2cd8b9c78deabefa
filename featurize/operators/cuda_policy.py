"""Differences of PyTorch on CUDA from meta tensors: autocast, attention, fused dropout, cuDNN's layers.

Start reading at `as_on_cuda`. Meta tensors take the generic code paths: autocast leaves them alone, attention
materialises its scores, dropout keeps a full-width mask, recurrent layers run step by step. Inside `as_on_cuda` the
names that modules call are replaced by versions that dispatch the operators CUDA would run. Code that holds its own
reference to one of these functions (`from torch.nn.functional import ...`), or calls TorchScript, is not reached.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import _VF, Tensor

from featurize.device.architecture import AttentionKernels
from featurize.operators import attention, cudnn_rnn, detection, liger
from featurize.operators.autocast import Autocast, casting
from featurize.operators.library_calls import channels_last
from featurize.operators.replacing import replaced


@contextlib.contextmanager
def as_on_cuda(
    autocast_dtype: torch.dtype | None,
    kernels: AttentionKernels,
    assume: Callable[[str], None] = lambda text: None,
    attends: Callable[[int], None] = lambda width: None,
) -> Iterator[Callable[[str], None]]:
    """Within, meta tensors take CUDA's paths, which are ROCm's but for attention. Yields a function to call with each
    phase that begins. `kernels` are PyTorch's for fused attention. `assume` hears what is taken for granted of values
    that only computing the step would give, `attends` the width of a head of each call of attention."""
    with (
        casting(autocast_dtype) as autocast,  # holds a lock: one trace at a time
        fused_kernels(),
        detection.as_trained(autocast, assume),
        attention.as_on_gpu(autocast, kernels, attends),
        liger.as_on_gpu(),
        replaced(F, "dropout", functools.partial(_dropout, F.dropout)),
        replaced(torch, "dropout", functools.partial(_dropout, torch.dropout)),
        contextlib.ExitStack() as stack,
    ):
        for name in cudnn_rnn.MODES:
            recurrent = functools.partial(_recurrent, name, getattr(_VF, name), autocast)
            stack.enter_context(replaced(_VF, name, recurrent))
        yield autocast.enter


@contextlib.contextmanager
def fused_kernels() -> Iterator[None]:
    """Operators that CUDA runs as one kernel and meta tensors in pieces, in another layout or not at all. By
    native_functions.yaml some are composite with a kernel of the backend's own, and mish's backward is the only such
    one that training meets."""
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


def _embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """As on CUDA, which takes indices of two types (cuda/Embedding.cu); Meta takes any in releases before 2.13."""
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
    """In any floating type, as CUDA has it; the meta kernel knows bf16 alone. Rows of the result begin at multiples of
    16 bytes (ATen/native/GroupedMMUtils.h: create_grouped_gemm_output_tensor)."""
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
    strides = (rows * width, width, 1)[-len(size) :]
    return torch.empty_strided(size, strides, dtype=dtype, device="meta")


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """One kernel, which keeps a float for each row (cuda/layer_norm_kernel.cu: _fused_rms_norm_cuda)."""
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(rows, dtype=torch.float32)


def _rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    of_input = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
    return of_input, torch.empty_like(weight) if wanted[1] and weight is not None else None


_META: dict[str, Callable] = {
    "mish_backward": lambda grad, x: torch.empty_like(x),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding": _embedding,
    "_grouped_mm": _grouped_product,
    "_cudnn_rnn": cudnn_rnn.forward,
    "_cudnn_rnn_backward": cudnn_rnn.backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
}


def _layout(x: Tensor, weight: Tensor) -> torch.memory_format:
    return torch.channels_last if channels_last(x, weight) else torch.contiguous_format


def _recurrent(name: str, original, autocast: Autocast, *args):
    half = functools.partial(autocast.cast, dtype=torch.float16) if autocast.dtype is not None else None
    return cudnn_rnn.recurrent(name, original, half, *args)


def _dropout(original, input, p=0.5, training=True, inplace=False, **kwargs):
    # ATen/native/Dropout.cpp, is_fused_kernel_acceptable: CUDA keeps a mask of one byte an element.
    if training and 0 < p < 1 and not inplace and not kwargs and input.device.type == "meta":
        return torch.native_dropout(input, p, True)[0]
    return original(input, p, training, inplace, **kwargs)
