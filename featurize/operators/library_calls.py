"""Memory that kernels and CUDA's libraries take for themselves while an operator runs.

Start reading at `LIBRARY_CALLS` (calls that a trace notes for an operator) and `workspace_bytes` (their sizes in a
replay).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featurize.cudnn.signature import DTYPES, ConvolutionSignature
from featurize.device.device_spec import AMD, DeviceSpec
from featurize.operators.table import ATTENTION, AttentionCall, matrix_elements

CUBLAS = "cublas"
# On ROCm: fp32 values that AOTriton's backward passes take for each row of queries (ATen/native/transformers:
# hip/flash_attn/aot/mha_all_aot.hip, mha_bwd_aot; cuda/attention_backward.cu).
_AOTRITON_VALUES = {"flash_backward": 2, "efficient_backward": 1}

# Assumptions about cuDNN's 2-d convolutions that are not channels last, where cuDNN itself is not asked
# (`featurize.cudnn`), the default. Kernels for the tensor cores read and write channels-last copies in the workspace.
# 1x1 kernels are plain products without a workspace; depthwise ones in fp32 are PyTorch's own. The number of copies was
# chosen, from some dozens of combinations, to explain the peaks of some 650 measured models (fp32, no
# `cudnn.benchmark`, A100, cuDNN 9.1), three quarters of them 3x3 CNNs.
_COPIES = {  # copies of input, weight, output
    "conv_forward": (1, 1, 1),
    "conv_backward_data": (1, 1, 1),
    "conv_backward_weight": (2, 1, 1),
}


# Mode of a recurrent layer (cudnnRNNMode_t) -> values a sample, layer and hidden unit in cuDNN's workspace, in addition
# to the weight matrices. Assumed: those of an LSTM (2) and a GRU (3) explain, to the byte, the workspaces that cuDNN 7
# asked for (github.com/pytorch/pytorch/issues/2895). The others were not measured.
_RECURRENT_WORK = {0: 4, 1: 4, 2: 11, 3: 8}


class LibraryCall(NamedTuple):
    """One call that may take a workspace. Shapes of convolutions: input, weight, output."""

    kind: str  # cublas, conv_forward, conv_backward_data, conv_backward_weight, flash_backward,
    # efficient_backward, recurrent; temporary: a tensor inside one of PyTorch's own kernels
    shapes: tuple[tuple[int, ...], ...] = ()
    element_bytes: int = 4
    channels_last: bool = False
    groups: int = 1
    nbytes: int = 0  # its size, where the trace already knows it
    convolution: ConvolutionSignature | None = None  # cuDNN's convolution; None also where PyTorch runs its own kernel

    @property
    def spare(self) -> bool:
        """Return whether the library has a slower algorithm without a workspace, to which PyTorch falls back."""
        return self.kind.startswith("conv_")

    @property
    def loads_cudnn(self) -> bool:
        """Return whether the call is cuDNN's."""
        return self.spare or self.kind == "recurrent"


@dataclass(frozen=True, kw_only=True)
class ConvolutionWorkspace:
    """The workspace of one convolution.

    source     `oracle`: cuDNN answered; `guessed`: copies of input, weight and output (`workspace_bytes`)
    sizes      bytes that PyTorch tries to allocate, the largest first
    engine     cuDNN's name of the configuration that the heuristics rank first; empty where cuDNN was not asked
    layout     layout of the tensors for cuDNN: nchw, nhwc, ...; empty where it is guessed
    cudnn      version of cuDNN; empty where it is guessed
    problem    why cuDNN did not answer; empty where it did, or was not asked
    """

    source: str
    sizes: tuple[int, ...]
    engine: str = ""
    layout: str = ""
    cudnn: str = ""
    problem: str = ""


def workspace_bytes(call: LibraryCall, spec: DeviceSpec) -> int:
    """Return the bytes that the call takes while it runs.

    cuBLAS keeps its workspaces, one for the forward and one for the backward thread. So does hipBLASLt, or hipBLAS
    where PyTorch prefers that. MIOpen is assumed to need what cuDNN does.
    """
    if call.kind == CUBLAS:
        return spec.architecture.blas_workspace_bytes
    if call.kind in _AOTRITON_VALUES and spec.architecture.vendor == AMD:
        return 4 * _AOTRITON_VALUES[call.kind] * math.prod(call.shapes[0][:-1])
    if not call.spare:
        return call.nbytes
    x, weight, _ = call.shapes
    depthwise = 1 < call.groups == x[1]
    if call.channels_last or len(weight) != 4 or weight[2] == weight[3] == 1 or depthwise:
        return 0
    if call.element_bytes > 4:
        return 0  # no tensor cores for this type
    if call.element_bytes == 4 and not spec.multiplies_fp32:
        return winograd_bytes(x[1], call.shapes[2]) if _takes_winograd(call) else 0
    copies = zip(_COPIES[call.kind], call.shapes, strict=True)
    return call.element_bytes * sum(times * math.prod(shape) for times, shape in copies)


def winograd_bytes(channels: int, response: Sequence[int]) -> int:
    """Return the bytes that cuDNN takes for a 3x3 convolution of stride and dilation 1 without tensor cores for fp32.

    It multiplies by Winograd's F(4x4, 3x3) (Lavin and Gray, arXiv 1509.09308), not fused: the workspace holds input,
    weight and output transformed, 36 values for each tile of 4 x 4 places and for each kernel.

    Args:
        channels: Channels of the input.
        response: Shape of the output.
    """
    batch, filters, height, width = response
    tiles = batch * math.ceil(height / 4) * math.ceil(width / 4)
    return 4 * 36 * (tiles * (channels + filters) + channels * filters)


def _takes_winograd(call: LibraryCall) -> bool:
    convolution = call.convolution
    if convolution is None or call.groups != 1 or convolution.kernel[2:] != (3, 3):
        return False
    return {*convolution.stride, *convolution.dilation} == {1}


@functools.lru_cache(maxsize=256)
def guesses_of(spec: DeviceSpec) -> tuple[bool, int, str]:
    """Return all properties of a GPU model that `workspace_bytes` depends on: equal ones have equal guesses."""
    return spec.multiplies_fp32, spec.architecture.blas_workspace_bytes, spec.architecture.vendor


def channels_last(x: Tensor, weight: Tensor) -> bool:
    """Return whether cuDNN runs this convolution in channels-last layout, as it does if either tensor has it."""
    return x.dim() == 4 and x.dtype is not torch.float64 and (_is_channels_last(x) or _is_channels_last(weight))


# cuDNN's operation for each convolution: ATen/native/Convolution.cpp, ATen/native/cudnn/ConvShared.cpp.


def _convolution(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[LibraryCall, ...]:
    x, weight, _bias, *geometry, transposed, _padding, groups = args[:9]
    operation = "data_gradient" if transposed else "forward"
    return (_conv("conv_forward", operation, (x, weight, outputs[0]), geometry, transposed, groups),)


def _convolution_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[LibraryCall, ...]:
    grad, x, weight, _sizes, *geometry, transposed, _padding, groups, wanted = args[:11]
    operations = {
        "conv_backward_data": "forward" if transposed else "data_gradient",
        "conv_backward_weight": "weight_gradient",
    }
    return tuple(
        _conv(kind, operation, (x, weight, grad), geometry, transposed, groups)
        for (kind, operation), needed in zip(operations.items(), wanted, strict=False)
        if needed
    )


def _conv(
    kind: str,
    operation: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    geometry: Sequence[Sequence[int]],
    transposed: bool,
    groups: int,
) -> LibraryCall:
    """Return one operation on input, weight and output or its gradient, with stride, padding and dilation."""
    x, weight, y = tensors
    shapes = tuple(x.shape), tuple(weight.shape), tuple(y.shape)
    signature = _signature(operation, x, weight, shapes, geometry, transposed, groups)
    return LibraryCall(kind, shapes, x.element_size(), channels_last(x, weight), groups, convolution=signature)


def _is_channels_last(tensor: Tensor) -> bool:
    memory_format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=memory_format) and not tensor.is_contiguous()


def _signature(
    operation: str,
    x: Tensor,
    weight: Tensor,
    shapes_given: Sequence[tuple[int, ...]],
    geometry_given: Sequence[Sequence[int]],
    transposed: bool,
    groups: int,
) -> ConvolutionSignature | None:
    """Return the operation as a question to cuDNN; None where PyTorch runs its own kernel."""
    spatial = weight.dim() - 2
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in DTYPES or spatial not in (1, 2, 3) or weight.dtype != x.dtype:
        return None
    shapes = list(shapes_given)
    geometry = [tuple(v) if len(v) == spatial else tuple(v) * spatial for v in geometry_given]
    if spatial == 1:  # a dimension of one element is inserted before the only one
        shapes = [(*shape[:2], 1, *shape[2:]) for shape in shapes]
        geometry = [(neutral, *values) for neutral, values in zip((1, 0, 1), geometry, strict=True)]
    last = dtype != "float64" and spatial > 1 and (_is_channels_last(x) or _is_channels_last(weight))
    if not all(map(all, shapes)):
        return None  # empty: no kernel runs
    depthwise = not transposed and 1 < groups == shapes[0][1]
    if depthwise and not last and not _cudnn_takes_depthwise(dtype, shapes[0], shapes[1], geometry):
        return None
    image, kernel, response = shapes if not transposed else (shapes[2], shapes[1], shapes[0])
    strides, paddings, dilations = geometry
    return ConvolutionSignature(operation, image, kernel, response, strides, paddings, dilations, dtype, last)


def _cudnn_takes_depthwise(
    dtype: str, image: tuple[int, ...], kernel: tuple[int, ...], geometry: list[tuple[int, ...]]
) -> bool:
    """Return whether cuDNN runs a depthwise convolution that is not channels last: it does some in fp16
    (`check_cudnn_depthwise_workload_with_filter`, as it was before it depended on the GPU)."""
    stride, _padding, dilation = geometry
    if dtype != "float16" or len(image) != 4 or set(dilation) != {1} or image[1] < 32:
        return False
    batch, channels, height, width = image
    if stride[0] != stride[1] and height != 1:
        return False
    if height == 1 and stride[1] == 1:
        return True
    size = kernel[3]
    if kernel[2] != size or size not in (1, 3, 5) or width < 7:
        return False
    if stride[1] == 1:
        return True
    if stride[1] != 2:
        return False
    if size == 1:
        return width <= 28 if batch == 1 else batch <= 16 and channels >= 128 and width <= 7
    return batch == 1 or channels >= 512 or (channels >= 256 and width >= 28)


def _attention(
    kernel: AttentionCall, kind: str, args: Sequence[Any], outputs: Sequence[Tensor]
) -> tuple[LibraryCall, ...]:
    query, nbytes = args[kernel.query], _ATTENTION_BYTES[kind](kernel, args)
    return (LibraryCall(kind, (tuple(query.shape),), query.element_size(), nbytes=nbytes),)


def _flash_backward_bytes(kernel: AttentionCall, args: Sequence[Any]) -> int:
    """Return the bytes of the fp32 query-gradient accumulator and row sums (csrc/flash_attn/flash_api.cpp, mha_bwd);
    packed texts are padded by 128 each (mha_varlen_bwd). Where several heads of the queries share keys and values,
    their gradients for every head are added, and summed up afterwards."""
    query, key = args[1:3]
    heads, length, _ = kernel.sizes(query.shape, key.shape)
    if query.dim() == 3:
        length += 128 * (args[6].numel() - 1)
    rows = heads * (-(-length // 128) * 128)
    nbytes = 4 * rows * (-(-query.shape[-1] // 32) * 32) + 4 * rows
    query_heads, shared = (tensor.shape[-2 if kernel.length_first else -3] for tensor in (query, key))
    return int(nbytes if query_heads == shared else nbytes + 2 * key.nbytes // shared * query_heads)


def _efficient_backward_bytes(kernel: AttentionCall, args: Sequence[Any]) -> int:
    """Return the bytes of the queries' gradient, which is summed up in fp32, in tiles (csrc
    .../mem_eff_attention/kernel_backward.h: kNeedsAccumGradQ). Tiles of 64 x 64 are assumed. Before that, unless the
    type is a half one, the gradient times the output is made (attention_backward.cu: kKernelComputesDelta)."""
    query, key = args[1:3]
    heads, length, _ = kernel.sizes(query.shape, key.shape)
    nbytes = heads * -(-length // 64) * -(-query.shape[-1] // 64) * (64 * 64 * 4 + 16)
    return int(max(nbytes, args[0].nbytes) if args[0].element_size() >= 4 else nbytes)


_ATTENTION_BYTES = {"flash_backward": _flash_backward_bytes, "efficient_backward": _efficient_backward_bytes}


def _recurrent(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[LibraryCall, ...]:
    """Return a recurrent layer's call, of either pass: its workspace holds weights and states, and the batch in time
    order."""
    x, weight, hx = args[0], args[1], args[4]
    sizes_and_flags = args[6:] if isinstance(args[6], int) else args[10:]  # of the forward pass, or of the backward
    mode, hidden_size, batch_first = sizes_and_flags[0], sizes_and_flags[1], sizes_and_flags[4]
    elements = matrix_elements(weight) + _RECURRENT_WORK[mode] * hx.shape[0] * hx.shape[1] * hidden_size
    elements += x.numel() if batch_first else 0
    return (LibraryCall("recurrent", (tuple(x.shape),), x.element_size(), nbytes=elements * x.element_size()),)


def _contiguous_copy(of: int, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[LibraryCall, ...]:
    """Return the temporary contiguous copy of an input (cuda/SoftMax.cu: host_softmax; cuda/layer_norm_kernel.cu)."""
    return _temporary(0 if args[of].is_contiguous() else args[of].nbytes)


def _embedding_bag_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[LibraryCall, ...]:
    """Return the temporaries of a dense gradient: the sorted indices, the starts of equal ones, and sums over up to ten
    gradients each in fp32 (cuda/EmbeddingBag.cu: embedding_bag_backward_cuda_sum_avg;
    cuda/EmbeddingBackwardKernel.cu)."""
    if args[9]:  # sparse: nothing is summed up
        return ()
    indices, (rows, width) = args[1].numel(), outputs[0].shape
    segments = min(indices, rows)
    sums = indices // 10 + segments
    return _temporary(8 * (3 * indices + 2 * segments + sums) + 4 * sums * width)


def _roll(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[LibraryCall, ...]:
    """Return the temporaries of rolling dimension by dimension, first a contiguous copy
    (cuda/TensorTransformations.cu)."""
    return _temporary(args[0].nbytes if len(args[1]) > 1 or not args[0].is_contiguous() else 0)


def _temporary(nbytes: int) -> tuple[LibraryCall, ...]:
    return (LibraryCall("temporary", nbytes=nbytes),) if nbytes else ()


# Name of an ATen operator -> a function from its arguments and outputs to its calls, in their order.
LIBRARY_CALLS: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], tuple[LibraryCall, ...]]] = {
    **{
        name: functools.partial(_attention, kernel, kernel.workspace)
        for name, kernel in ATTENTION.items()
        if kernel.workspace
    },
    **{
        f"aten::{name}": lambda args, outputs: (LibraryCall(CUBLAS),)  # noted once a thread
        for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
    },
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_softmax": functools.partial(_contiguous_copy, 0),
    "aten::_log_softmax": functools.partial(_contiguous_copy, 0),
    # The gradient times the output, made before the kernel (cuda/SoftMax.cu: softmax_backward_cuda_out).
    "aten::_softmax_backward_data": lambda args, outputs: _temporary(args[1].nbytes),
    "aten::native_layer_norm": functools.partial(_contiguous_copy, 0),
    "aten::native_layer_norm_backward": functools.partial(_contiguous_copy, 1),
    "aten::roll": _roll,
    "aten::_embedding_bag_backward": _embedding_bag_backward,
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent,
}
