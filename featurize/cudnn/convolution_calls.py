"""Which operation of cuDNN an ATen convolution becomes, if any.

Start reading at `forward_operation` and `backward_operation`. The rules are those of ATen/native/Convolution.cpp and
ATen/native/cudnn/ConvShared.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featurize.cudnn.signature import DTYPES, ConvolutionSignature


def forward_operation(args: Sequence, output: Tensor) -> ConvolutionSignature | None:
    """Return what `aten::convolution` asks cuDNN for; None where PyTorch runs a kernel of its own."""
    x, weight, _bias, stride, padding, dilation, transposed = args[:7]
    operation = "data_gradient" if transposed else "forward"
    return _operation(operation, x, weight, output, stride, padding, dilation, transposed, args[8])


def backward_operation(args: Sequence, of_weight: bool) -> ConvolutionSignature | None:
    """Return what one gradient of `aten::convolution_backward` asks cuDNN for; None as `forward_operation`."""
    grad, x, weight, _sizes, stride, padding, dilation, transposed = args[:8]
    of_input = "forward" if transposed else "data_gradient"
    operation = "weight_gradient" if of_weight else of_input
    return _operation(operation, x, weight, grad, stride, padding, dilation, transposed, args[9])


def _operation(
    operation: str,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> ConvolutionSignature | None:
    spatial = weight.dim() - 2
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in DTYPES or spatial not in (1, 2, 3) or weight.dtype != x.dtype:
        return None
    shapes = [tuple(x.shape), tuple(weight.shape), tuple(y.shape)]
    geometry = [tuple(v) if len(v) == spatial else tuple(v) * spatial for v in (stride, padding, dilation)]
    if spatial == 1:  # a dimension of one element is put before the only one
        shapes = [(*shape[:2], 1, *shape[2:]) for shape in shapes]
        geometry = [(neutral, *values) for neutral, values in zip((1, 0, 1), geometry, strict=True)]
    last = dtype != "float64" and spatial > 1 and (_is_channels_last(x) or _is_channels_last(weight))
    if not all(map(all, shapes)):
        return None  # empty: nothing is run
    depthwise = not transposed and 1 < groups == shapes[0][1]
    if depthwise and not last and not _cudnn_takes_depthwise(dtype, shapes[0], shapes[1], geometry):
        return None
    image, kernel, response = shapes if not transposed else (shapes[2], shapes[1], shapes[0])
    strides, paddings, dilations = geometry
    return ConvolutionSignature(operation, image, kernel, response, strides, paddings, dilations, dtype, last)


def _is_channels_last(tensor: Tensor) -> bool:
    memory_format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=memory_format) and not tensor.is_contiguous()


def _cudnn_takes_depthwise(
    dtype: str, image: tuple[int, ...], kernel: tuple[int, ...], geometry: list[tuple[int, ...]]
) -> bool:
    """Whether a depthwise convolution that is not channels last is cuDNN's: some of fp16 are
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
