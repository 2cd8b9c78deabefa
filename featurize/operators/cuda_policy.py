"""Differences of PyTorch on CUDA from meta tensors: autocast, attention, fused dropout, cuDNN's layers, detection.

Start reading at `as_on_cuda`. Meta tensors take the generic code paths: autocast ignores them, attention
materialises its scores, dropout keeps a full-width mask, recurrent layers run step by step. Inside `as_on_cuda` the
functions that modules call are replaced by versions that dispatch the operators CUDA would run. Code with its own
reference to one of these functions (`from torch.nn.functional import ...`), or in TorchScript, is not reached.

The number of torchvision's proposals that survive depends on computed values (`detection_as_trained`). The configured
limits are assumed, since a step that reaches them takes the most memory.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor
from torch.autograd.profiler import record_function
from torch.nn.modules.utils import _pair

from featurize.device.device_spec import AttentionKernels
from featurize.operators import attention
from featurize.operators.autocast import Autocast, casting
from featurize.operators.library_calls import channels_last
from featurize.operators.own_operators import liger_on_gpu
from featurize.operators.replacing import Change, all_replaced, if_imported
from featurize.operators.table import time_steps

PROPOSALS = "a detector keeps as many proposals as its limits allow"
MATCHES = "every other box that a detector proposes matches an object, so that its samples reach their limits"
# Every n-th candidate matches an object: more than the limit on positive samples, so that the limit is reached.
_EVERY = 2


def detection_as_trained(autocast: Autocast, assume: Callable[[str], None]) -> Iterator[Change]:
    """Yield the changes that make torchvision's detectors run on meta tensors, if torchvision's operators are imported.
    `assume` is called with each assumption."""
    instead: list[tuple[str, str, Callable[[Any], Any]]] = [
        *((where, "nms", lambda original: functools.partial(_nms, original, assume)) for where in ("ops.boxes", "ops")),
        *(
            (where, "roi_align", lambda original: functools.partial(_roi_align, original, autocast))
            for where in ("ops.poolers", "ops", "models.detection.roi_heads")
        ),
        ("models.detection.transform", "paste_masks_in_image", lambda original: functools.partial(_paste, original)),
        ("ops.poolers", "LevelMapper.__call__", lambda original: functools.partialmethod(_levels, original)),
        (
            "models.detection._utils",
            "Matcher.__call__",
            lambda original: functools.partialmethod(_matches, original, assume),
        ),
    ]
    for module, path, make in instead:
        yield from if_imported(f"torchvision.{module}", path, make)


def _nms(
    original: Callable[..., Any], assume: Callable[[str], None], boxes: Tensor, scores: Tensor, iou_threshold: float
) -> Tensor:
    """Keep all boxes; the callers cut them down to their limits. The mask has 64 boxes a word, as in the CUDA
    kernel."""
    if not boxes.is_meta:
        return original(boxes, scores, iou_threshold)
    assume(PROPOSALS)
    count = boxes.shape[0]
    order = scores.sort(dim=0, descending=True)[1]
    ordered = boxes.index_select(0, order)
    mask = boxes.new_empty(count * -(-count // 64), dtype=torch.int64)
    indices = torch.arange(count, device=boxes.device)
    del ordered, mask
    return indices


def _roi_align(
    original: Callable[..., Tensor],
    autocast: Autocast,
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | tuple[int, int],
    *args: object,
    **kwargs: object,
) -> Tensor:
    """Align regions in fp32 under autocast, as torchvision registers it."""
    if not input.is_meta:
        return original(input, boxes, output_size, *args, **kwargs)
    rois = boxes
    if not isinstance(rois, Tensor):
        numbers = [torch.full_like(b[:, :1], i) for i, b in enumerate(boxes)]
        rois = torch.cat([torch.cat(numbers), torch.cat(list(boxes))], dim=1)
    wide = autocast.cast(input, torch.float32)
    return _RoiAlign.apply(wide, autocast.cast(rois, torch.float32), tuple(_pair(output_size))).to(input.dtype)


class _RoiAlign(torch.autograd.Function):
    """An operator that keeps the regions and the input's shape for the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, rois: Tensor, size: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(rois)
        ctx.shape = input.shape
        return input.new_zeros(rois.shape[0], input.shape[1], *size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].new_zeros(ctx.shape), None, None


def _paste(
    original: Callable[..., Any], masks: Tensor, boxes: Tensor, img_shape: tuple[int, int], padding: int = 1
) -> Tensor:
    """Paste each mask into an image, as in an evaluation, wherever its box lies."""
    if not masks.is_meta or not len(masks):
        return original(masks, boxes, img_shape, padding)
    height, width = (int(size) for size in img_shape)
    return torch.stack([masks.new_zeros(height, width) for _ in range(len(masks))])[:, None]


def _levels(mapper: Any, original: Callable[..., Any], boxlists: list[Tensor]) -> Tensor:
    """Spread the regions evenly over the pyramid's levels."""
    levels = original(mapper, boxlists)
    if not levels.is_meta:
        return levels
    return torch.arange(levels.shape[0], device=levels.device) % (mapper.k_max - mapper.k_min + 1)


def _matches(
    matcher: Any, original: Callable[..., Any], assume: Callable[[str], None], match_quality_matrix: Tensor
) -> Tensor:
    """Match every other candidate, with the objects in turn; the others are background."""
    if not match_quality_matrix.is_meta or not match_quality_matrix.numel():
        return original(matcher, match_quality_matrix)
    assume(MATCHES)
    objects, candidates = match_quality_matrix.shape
    best, _ = match_quality_matrix.max(dim=0)
    below = best < matcher.low_threshold
    number = torch.arange(candidates, device=best.device)
    del below
    return torch.where(number % _EVERY == 0, number // _EVERY % objects, matcher.BELOW_LOW_THRESHOLD)


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
        attention_now = F.scaled_dot_product_attention
        attend = functools.partial(attention.scaled_dot_product, attention_now, autocast, kernels, attends)
        changes = (
            *detection_as_trained(autocast, assume),
            *attention.packages_on_gpu(),
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
    strides = (rows * width, width, 1)[-len(size) :]
    return torch.empty_strided(size, strides, dtype=dtype, device="meta")


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
