"""A question to cuDNN about one convolution, and its answer: plain values, without torch.

Start reading at `ConvolutionSignature`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from conf.errors import UsageError, require_one_of

OPERATIONS = ("forward", "data_gradient", "weight_gradient")
DTYPES = ("float32", "float16", "bfloat16", "float64")
NO_ENGINE = "cuDNN has no engine for it"


class ConvolutionSignature(NamedTuple):
    """One operation of cuDNN. Shapes have a batch and a channel dimension, and 2 or 3 spatial ones.

    `image`, `kernel` and `response` are those of the convolution, whichever of them the operation computes: for a
    transposed convolution, `image` is the output. Groups follow from the channels of image and kernel.
    """

    operation: str  # one of OPERATIONS
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    response: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: str  # one of DTYPES, for all three tensors
    channels_last: bool

    @property
    def pointwise(self) -> bool:
        """Return whether the kernel has a single element."""
        return set(self.kernel[2:]) == {1}

    @property
    def layout(self) -> str:
        """The layout of the tensors, as cuDNN names it."""
        spatial = "dhw"[-(len(self.image) - 2) :]
        return f"n{spatial}c" if self.channels_last else f"nc{spatial}"

    def strides_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the strides, in elements, of a tensor of that shape in the signature's layout."""
        order = [0, *range(2, len(shape)), 1] if self.channels_last else list(range(len(shape)))
        strides = [0] * len(shape)
        step = 1
        for dimension in reversed(order):
            strides[dimension] = step
            step *= shape[dimension]
        return tuple(strides)

    def to_text(self) -> str:
        """Return the signature as one line, its key on disk."""
        return json.dumps(self, separators=(",", ":"))


def signature_of(content: Sequence[Any]) -> ConvolutionSignature:
    """Return a signature from its lists in JSON."""
    operation, *sizes, dtype, channels_last = content
    image, kernel, response, stride, padding, dilation = map(tuple, sizes)
    return ConvolutionSignature(operation, image, kernel, response, stride, padding, dilation, dtype, channels_last)


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """PyTorch's settings for the search of an engine (ATen/native/cudnn/Conv_v8.cpp).

    Args:
        heuristics: `A` (cuDNN's INSTANT, PyTorch's default) or `B` (`TORCH_CUDNN_USE_HEURISTIC_MODE_B=1`).
        allow_tf32: `torch.backends.cudnn.allow_tf32`, True by default.
        deterministic: `torch.backends.cudnn.deterministic`, or deterministic algorithms, False by default.
        benchmark: `torch.backends.cudnn.benchmark`: several engines are tried, with the fallbacks.
    """

    heuristics: str = "A"
    allow_tf32: bool = True
    deterministic: bool = False
    benchmark: bool = False

    def to_text(self) -> str:
        """Return the settings as one line, a part of an answer's key on disk."""
        chosen = [name for name in ("allow_tf32", "deterministic", "benchmark") if getattr(self, name)]
        return " ".join((self.heuristics, *chosen))


class EnginePlan(NamedTuple):
    """One engine configuration that builds for a device, and the bytes of its workspace."""

    engine: str
    workspace_bytes: int


@dataclass(frozen=True, kw_only=True)
class OracleAnswer:
    """cuDNN's answer about one signature.

    plans     the configurations that build, in the order in which PyTorch tries them: the first alone, or with
              `benchmark` as many as PyTorch measures
    problem   why there are no plans: cuDNN has no engine, or the query ended its process; empty otherwise
    """

    plans: tuple[EnginePlan, ...] = ()
    problem: str = ""


def answer_of(content: Any) -> OracleAnswer:
    """Return an answer from a result of `json.loads`. Raises `ValueError` for other values."""
    try:
        plans = tuple(EnginePlan(engine, int(nbytes)) for engine, nbytes in content["plans"])
        problem = content["problem"]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError("no answer about a convolution") from error
    return OracleAnswer(plans=plans, problem=problem)


def require_signature(signature: ConvolutionSignature) -> ConvolutionSignature:
    """Return the signature. Raises `UsageError` for an impossible one."""
    dimensions = len(signature.image)
    shapes = (signature.image, signature.kernel, signature.response)
    require_one_of("operation", signature.operation, OPERATIONS)
    require_one_of("dtype", signature.dtype, DTYPES)
    lengths = {len(values) for values in (signature.stride, signature.padding, signature.dilation)}
    if dimensions not in (4, 5) or any(len(shape) != dimensions for shape in shapes) or lengths != {dimensions - 2}:
        raise UsageError("a convolution has shapes of 4 or 5 dimensions, and a stride for each spatial one")
    if min(map(min, shapes)) < 1 or signature.image[1] % signature.kernel[1]:
        raise UsageError("a convolution has sizes >= 1, and channels that its groups divide")
    return signature
