"""What a convolution's workspace is made of: copies of its tensors, and the figures that decide which copies.

Start reading at `described`. cuDNN's kernels want tensors in layouts of their own, so most workspaces are copies of
input, weight and output, with channels padded to 16 bytes, and a few KiB. Numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from featurize.cudnn.signature import ConvolutionSignature

# Channels as they are; padded to 16 bytes, in all or in each group; those of each group padded to 32.
PADDINGS = ("exact", "padded", "by group", "by group of 32")
SMALL_BYTES = 2**16  # below it, a workspace holds no copy but tables and counters
_ALIGNED_BYTES = 16  # to which kernels for the tensor cores want channels padded
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


class WorkspaceFormula(NamedTuple):
    """How often a workspace holds each tensor. A Winograd kernel holds a transformed weight, which is larger. With
    `partials`, sums of several parts of a product come on top: a number of fp32 weights that follows from no shape."""

    padding: str  # one of PADDINGS
    inputs: float
    weights: float
    outputs: float
    partials: bool = False


_COPIES = (
    (1, 0, 1), (1, 1, 1), (1, 1, 0), (0, 1, 1), (1, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 2), (2, 0, 0), (0, 1, 2),
    (2, 1, 0), (2, 1, 1), (1, 1, 2), (2, 0, 1), (1, 0, 2), (0, 2, 0), (2, 1, 2), (2, 2, 2), (1, 2, 1), (2, 2, 1),
    (1, 2, 2), (0, 2, 1), (2, 0, 2), (0, 25 / 9, 0), (0, 16 / 9, 0), (0, 4, 0),
)  # fmt: skip
_COPIES_BESIDE_PARTIALS = ((0, 0, 0), (1, 0, 1), (1, 1, 1), (1, 0, 0), (0, 0, 1), (1, 2, 1))
FORMULAS = tuple(WorkspaceFormula(padding, *copies) for copies in _COPIES for padding in PADDINGS)
PARTIAL_FORMULAS = tuple(
    WorkspaceFormula(padding, *copies, partials=True) for copies in _COPIES_BESIDE_PARTIALS for padding in PADDINGS
)
FEATURES = (
    "element_bytes", "bfloat16", "tf32", "channels_last", "spatial", "sms", "batch", "groups", "channels", "filters",
    "group_channels", "group_filters", "image_depth", "image_height", "image_width", "out_height", "out_width",
    "kernel_depth", "kernel_height", "kernel_width", "stride", "padding", "dilation", "image_places", "out_places",
    "kernel_places", "channels_mod_8", "filters_mod_8", "channels_mod_4", "filters_mod_4", "channels_mod_32",
    "filters_mod_32", "group_channels_mod_8", "group_filters_mod_8", "product_rows", "product_depth",
    "product_elements", "weight_elements", "multiplications", "input_elements", "input_rows", "output_elements",
    "channels_by_filters", "tiles", "tiles_by_sm", "shrinking", "uneven_stride",
)  # fmt: skip


@dataclass(frozen=True)
class DescribedConvolutions:
    """What decides and makes up n workspaces.

    features       (n, len(FEATURES))
    tensor_bytes   padding -> (n, 3) bytes of input, weight and output
    partial_bytes  padding -> (n,) bytes of the weight in fp32
    """

    features: np.ndarray
    tensor_bytes: dict[str, np.ndarray]
    partial_bytes: dict[str, np.ndarray]

    def bytes_of(self, formula: WorkspaceFormula) -> np.ndarray:
        """Return (n,) bytes of the copies that a formula names, without partial sums."""
        copies = np.array([formula.inputs, formula.weights, formula.outputs])
        return self.tensor_bytes[formula.padding] @ copies


def winograd_bytes(channels: int, response: Sequence[int]) -> int:
    """Return the bytes that cuDNN takes for a 3x3 convolution of stride and dilation 1 without tensor cores for fp32.

    It multiplies by Winograd's F(4x4, 3x3) (Lavin and Gray, arXiv 1509.09308), not fused: input, weight and output lie
    transformed in the workspace, 36 values for each tile of 4 x 4 places and for each kernel.

    Args:
        channels: Of the input.
        response: Shape of the output.
    """
    batch, filters, height, width = response
    tiles = batch * math.ceil(height / 4) * math.ceil(width / 4)
    return 4 * 36 * (tiles * (channels + filters) + channels * filters)


def described(
    signatures: Sequence[ConvolutionSignature], *, allow_tf32: bool | np.ndarray, sm_count: int | np.ndarray
) -> DescribedConvolutions:
    """Return what decides and makes up the workspaces of convolutions.

    Args:
        signatures: The convolutions.
        allow_tf32: Whether fp32 convolutions may run in TF32: of all, or (n,).
        sm_count: Multiprocessors of the GPU model: of all, or (n,).
    """
    raw = np.array([_raw(signature) for signature in signatures], dtype=np.float64).reshape(len(signatures), -1)
    (element, bfloat16, last, spatial, batch, channels, filters, group_channels, depth, height, width, out_depth,
     out_height, out_width, kernel_depth, kernel_height, kernel_width, stride, pad, dilation,
     uneven) = raw.T  # fmt: skip
    groups = channels / group_channels
    group_filters = filters / groups
    places, out_places = depth * height * width, out_depth * out_height * out_width
    kernel_places = kernel_depth * kernel_height * kernel_width
    rows, product_depth = batch * out_places, group_channels * kernel_places
    tiles = np.ceil(rows / 128) * np.ceil(group_filters / 128) * groups
    features = (
        element, bfloat16, np.full_like(element, allow_tf32) * (element == 4), last, spatial,
        np.full_like(element, sm_count), batch, groups, channels, filters, group_channels, group_filters,
        depth, height, width, out_height, out_width,
        kernel_depth, kernel_height, kernel_width, stride, pad, dilation, places, out_places, kernel_places,
        channels % 8, filters % 8, channels % 4, filters % 4, channels % 32, filters % 32, group_channels % 8,
        group_filters % 8, rows, product_depth, rows * filters, product_depth * filters, rows * product_depth * filters,
        batch * places * channels, batch * places, rows * filters, channels / filters, tiles, tiles / sm_count,
        kernel_width - 2 * pad, uneven,
    )  # fmt: skip
    aligned = _ALIGNED_BYTES / element
    padded_channels, padded_filters = _up(channels, aligned), _up(filters, aligned)
    padded_group, padded_group_filters = _up(group_channels, aligned), _up(group_filters, aligned)
    depthwise = (group_channels == 1) & (groups > 1)  # never padded that far
    wide_group = np.where(depthwise, padded_group, _up(group_channels, 32))
    wide_group_filters = np.where(depthwise, padded_group_filters, _up(group_filters, 32))
    widths = {
        "exact": (channels, filters * group_channels, filters),
        "padded": (padded_channels, padded_filters * padded_group, padded_filters),
        "by group": (
            groups * padded_group,
            groups * padded_group_filters * padded_group,
            groups * padded_group_filters,
        ),
        "by group of 32": (groups * wide_group, groups * wide_group_filters * wide_group, groups * wide_group_filters),
    }
    sizes = (batch * places, kernel_places, rows)
    tensor_bytes = {
        padding: np.stack([element * size * count for size, count in zip(sizes, counts, strict=True)], axis=1)
        for padding, counts in widths.items()
    }
    partial_bytes = {padding: 4 * sizes_of[:, 1] / element for padding, sizes_of in tensor_bytes.items()}
    return DescribedConvolutions(np.stack(features, axis=1), tensor_bytes, partial_bytes)


def workspace_class(nbytes: np.ndarray) -> np.ndarray:
    """Return the class of workspaces: 0 for none, 1 below 1 MiB, 2 below 2 MiB, and so on by powers of two."""
    mib = np.asarray(nbytes, dtype=np.float64) / 2**20
    return np.where(mib <= 0, 0, np.where(mib < 1, 1, 2 + np.floor(np.log2(np.maximum(mib, 1))))).astype(int)


def _up(values: np.ndarray, step: np.ndarray | int) -> np.ndarray:
    return np.ceil(values / step) * step


def _raw(signature: ConvolutionSignature) -> tuple[float, ...]:
    image, kernel, response = (_three(shape) for shape in (signature.image, signature.kernel, signature.response))
    stride = signature.stride
    return (
        ELEMENT_BYTES[signature.dtype], signature.dtype == "bfloat16", signature.channels_last,
        len(signature.image) - 2, signature.image[0], signature.image[1], signature.kernel[0], signature.kernel[1],
        *image, *response, *kernel,
        stride[-1], signature.padding[-1], signature.dilation[-1], stride[-1] != stride[0],
    )  # fmt: skip


def _three(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return depth, height and width."""
    return (1,) * (5 - len(shape)) + shape[2:]
