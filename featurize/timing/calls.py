"""The kernels of each operator of a traced step, as numbers that do not depend on the GPU model.

Start reading at `kernel_calls`; `model_flops` counts an operator's FLOPs that are the model's. Torch-free.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from featurize.operators.table import (
    ATTENTION as FUSED_ATTENTION,
    CONVOLUTIONS,
    INT8_PRODUCT,
    PRODUCTS,
    SCALED_PRODUCT,
    attention_call,
    kernel_kind,
)
from featurize.recording.step_trace import Operator

HALF = ("float16", "bfloat16")
FP32, TF32, TENSOR, FP8 = PIPES = ("fp32", "tf32", "tensor", "fp8")
# Arrangement of a kernel's work in tiles: each group has its own constants.
PRODUCT, CONVOLUTION, ATTENTION, GROUPED, DEPTHWISE, STREAM = GROUPS = (
    "product",
    "convolution",
    "attention",
    "grouped",
    "depthwise",
    "stream",
)
_MOST_PLACES = 49  # elements of the largest depthwise kernel with a fast implementation
_USUAL_WIDTHS = (4, 8, 16, 32)
_WINOGRAD = 2.25  # factor by which F(2x2, 3x3) multiplies less (Lavin and Gray, CVPR 2016)
_NARROW_GROUP = 2  # most channels of a group for which PyTorch and cuDNN run depthwise kernels

ROWS, CHANNELS = ("layer_norm", "softmax"), ("batch_norm", "group_norm")


class KernelCall(NamedTuple):
    """One kernel, or the few that run as one.

    kind      kind of kernel: `product`, `convolution_weight`, `batch_norm_backward`, ...
    group     one of `GROUPS`: the arrangement of its work on the GPU
    pipe      one of `PIPES`: the arithmetic units. `tensor`: half precision; `fp8`: 8-bit floats
    flops     FLOPs of its arithmetic, a multiply-add counted as 2, after the algorithm's own savings
    nbytes    bytes of distinct tensors, read and written
    rows, columns, depth, batch
              the product's output sizes, inner size, and number of products. For attention: queries, head size, 0,
              heads. For a stream: units of its blocks (elements, rows or channels), 1, 0, 1
    aligned   whether tensor cores take the sizes without padding
    """

    kind: str
    group: str
    pipe: str
    flops: float
    nbytes: float
    rows: float
    columns: float
    depth: float
    batch: float
    aligned: bool


@dataclass(frozen=True)
class Calls:
    """The distinct kernels of a step, as columns of equal length, and the number of runs of each."""

    count: np.ndarray
    kind: tuple[str, ...]
    group: np.ndarray  # index into GROUPS
    pipe: np.ndarray  # index into PIPES
    flops: np.ndarray
    nbytes: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    depth: np.ndarray
    batch: np.ndarray
    aligned: np.ndarray
    launches: float  # by the host, in forward and backward passes
    updates: float = 0.0  # by the host, in the optimizer's step: bare operators, without modules and autograd

    def within(self, *groups: str) -> np.ndarray:
        """Return a mask of the kernels that are in these groups."""
        return np.isin(self.group, [GROUPS.index(group) for group in groups])


def kernel_calls(
    operators: Iterable[Operator], *, tf32_products: bool = False, tf32_convolutions: bool = True, listed: bool = True
) -> Calls:
    """Return the kernels of a step's operators.

    Args:
        operators: The operators of one step, as `StepTrace.operators` has them.
        tf32_products: `torch.backends.cuda.matmul.allow_tf32`.
        tf32_convolutions: `torch.backends.cudnn.allow_tf32`.
        listed: Whether the optimizer runs for-each kernels over lists of tensors; False: one kernel a tensor, as
            PyTorch before 2.0 does.
    """
    counts: Counter[KernelCall] = Counter()
    launches = updates = 0.0
    for op in operators:
        kernels, number = operator_kernels(
            op, tf32_products=tf32_products, tf32_convolutions=tf32_convolutions, listed=listed
        )
        for call, times in kernels:
            counts[call] += times
        if op.phase == "optimizer":
            updates += number
        else:
            launches += number
    return as_calls(counts, launches, updates)


def operator_kernels(
    op: Operator, *, tf32_products: bool = False, tf32_convolutions: bool = True, listed: bool = True
) -> tuple[tuple[tuple[KernelCall, int], ...], int]:
    """Return an operator's kernels with their numbers of runs, and the host's launches. Args as in `kernel_calls`."""
    # Without fields that differ from layer to layer and do not affect the kernels.
    plain = op._replace(module="", sources=(), phase="backward" if op.phase == "backward" else "", recomputed=False)
    return _of_operator(plain, tf32_products, tf32_convolutions, listed)


def as_calls(counts: Counter[KernelCall], launches: float, updates: float = 0.0) -> Calls:
    """Return kernels, and the number of runs of each, as columns."""
    kind, group, pipe, *sizes, aligned = zip(*counts, strict=True) if counts else [()] * len(KernelCall._fields)
    flops, nbytes, rows, columns, depth, batch = (np.array(column, dtype=float) for column in sizes)
    return Calls(
        count=np.array(list(counts.values()), dtype=float),
        kind=kind,
        group=np.array(list(map(GROUPS.index, group)), dtype=int),
        pipe=np.array(list(map(PIPES.index, pipe)), dtype=int),
        flops=flops,
        nbytes=nbytes,
        rows=rows,
        columns=columns,
        depth=depth,
        batch=batch,
        aligned=np.array(aligned, dtype=bool),
        launches=launches,
        updates=updates,
    )


def stream(kind: str, nbytes: float, units: float, flops: float = 0.0) -> KernelCall:
    """Return a kernel that only moves its tensors; `units` are its elements, rows or channels."""
    return KernelCall(kind, STREAM, FP32, flops, nbytes, units, 1, 0, 1, True)


def product(rows: float, columns: float, depth: float, batch: float, pipe: str, nbytes: float) -> KernelCall:
    """Return the kernel of `batch` matrix products."""
    return KernelCall(
        "product",
        PRODUCT,
        pipe,
        2 * rows * columns * depth * batch,
        nbytes,
        rows,
        columns,
        depth,
        batch,
        columns % 8 == 0 and depth % 8 == 0,
    )


def convolution(
    kind: str,
    flops: float,
    nbytes: float,
    rows: float,
    columns: float,
    groups: int,
    pipe: str,
    *,
    widths: tuple[int, int],
    places: int,
    same_size: bool,
) -> KernelCall:
    """Return the kernel of one direction of a convolution, treated as an implicit matrix product.

    Args:
        kind: `convolution`, `convolution_data` or `convolution_weight`.
        flops: FLOPs of the direct algorithm.
        nbytes: Bytes of its three tensors.
        rows, columns: Sizes of the product's output, within one group.
        groups: Groups of channels.
        pipe: The arithmetic units.
        widths: Input and output channels of a group.
        places: Elements of the kernel.
        same_size: Whether the output is as large as the input: stride 1 and padded.
    """
    depth = flops / (2 * groups * rows * columns) if rows * columns else 0.0
    aligned = columns % 8 == 0 and depth % 8 == 0
    if groups > 1 and min(widths) <= _NARROW_GROUP and places > 1:
        kind = f"depthwise_large_{kind}" if places > _MOST_PLACES else f"depthwise_{kind}"
        return KernelCall(kind, DEPTHWISE, FP32, flops, nbytes, rows, columns, depth, groups, True)
    if groups > 1:
        # Groups of these widths have their own kernels in channels last; others run as if they were dense.
        usual = widths[0] == widths[1] and widths[0] in _USUAL_WIDTHS
        kind = f"grouped_{kind}" if usual else f"grouped_general_{kind}"
        return KernelCall(kind, GROUPED, pipe, flops, nbytes, rows, columns, depth, groups, aligned)
    if pipe == FP32 and places == 9 and same_size and kind != "convolution_weight":
        flops /= _WINOGRAD
    return KernelCall(kind, CONVOLUTION, pipe, flops, nbytes, rows, columns, depth, 1, aligned)


_EMPTY = stream("launch", 0.0, 1.0)


@functools.lru_cache(maxsize=20_000)
def _of_operator(
    op: Operator, tf32_products: bool, tf32_convolutions: bool, listed: bool
) -> tuple[tuple[tuple[KernelCall, int], ...], int]:
    """Return an operator's kernels with their numbers of runs, and the number of the host's launches."""
    kernels, number, listed_tensors = _distinct(op, tf32_products, tf32_convolutions)
    if listed_tensors and not listed:
        number = max(number, listed_tensors)
    return (*kernels, (_EMPTY, number - 1)) if number > 1 else kernels, 0 if op.graphed else number


def _distinct(
    op: Operator, tf32_products: bool, tf32_convolutions: bool
) -> tuple[tuple[tuple[KernelCall, int], ...], int, int]:
    """Return an operator's non-empty kernels, the number of the host's launches, and the number of tensors."""
    name = op.name.rpartition("::")[2]
    nbytes = op.bytes_read + op.bytes_written
    # Integers of 8 bits are priced at the rate of half precision: none was measured.
    pipe = FP8 if op.name == SCALED_PRODUCT else TENSOR if op.dtype in HALF or op.name == INT8_PRODUCT else FP32
    if name in ("convolution", "convolution_backward"):
        if pipe == FP32 and tf32_convolutions and op.dtype == "float32":
            pipe = TF32
        kernels = tuple((call, 1) for call in _convolutions(op, pipe))
        return kernels, max(op.launches, len(kernels)), 0
    if pipe == FP32 and tf32_products and op.dtype == "float32":
        pipe = TF32
    if name in ("_cudnn_rnn", "_cudnn_rnn_backward"):
        return tuple(_recurrent(op, pipe)), op.launches, 0
    if name.startswith(("_foreach_", "_fused_")):
        elements = sum(map(math.prod, op.output_shapes)) / max(op.launches, 1)
        return ((stream("optimizer", nbytes, elements, op.flops), 1),), op.launches, len(op.output_shapes)
    return ((_simple(op, name, nbytes, pipe), 1),), op.launches, 0


def _simple(op: Operator, name: str, nbytes: int, pipe: str) -> KernelCall:
    kind = _kind(op, name)
    if kind == "product":
        shape = op.output_shapes[0] if op.output_shapes else op.input_shapes[0]
        (rows, columns), batch = (1, *shape)[-2:], math.prod(shape[:-2])
        depth = op.flops / (2 * batch * rows * columns) if batch * rows * columns else 0.0
        return product(rows, columns, depth, batch, pipe, nbytes)
    if kind.startswith("attention"):
        kernel = attention_call(op.name)
        query = op.input_shapes[kernel.query]
        heads, length, _ = kernel.sizes(query, query)
        return KernelCall(kind, ATTENTION, pipe, op.flops, nbytes, length, query[-1], 0, heads, True)
    if kind.startswith(ROWS):
        shape = op.input_shapes[0] if op.input_shapes else ()
        return stream(kind, nbytes, math.prod(shape[:-1]), op.flops)
    if kind.startswith(CHANNELS):
        shape = op.input_shapes[0]
        return stream(kind, nbytes, shape[1] if len(shape) > 1 else 1, op.flops)
    return stream(kind, nbytes, max(map(math.prod, (*op.input_shapes, *op.output_shapes)), default=1), op.flops)


def _kind(op: Operator, name: str) -> str:
    if (kind := kernel_kind(name)) is not None:
        return kind
    sizes = [math.prod(shape) for shape in op.input_shapes]
    largest = max(sizes, default=1)
    if name == "add_" and op.phase == "backward":
        return "accumulate"
    if any(1 < size < largest for size in sizes):
        return "broadcast"
    return "binary" if sizes.count(largest) > 1 else "elementwise"


def _convolutions(op: Operator, pipe: str) -> Iterator[KernelCall]:
    """Yield the products for output, or input and weight gradient, and the kernel for the bias."""
    backward = "backward" in op.name
    if backward:
        y, x, weight = op.input_shapes[:3]
        results = [("convolution_weight", weight)] if weight in op.output_shapes else []
        if op.output_shapes and op.output_shapes[0] == x:
            results.append(("convolution_data", x))
        with_bias = len(op.output_shapes) > len(results)
    else:
        (x, weight), y = op.input_shapes[:2], op.output_shapes[0]
        results, with_bias = [("convolution", y)], len(op.input_shapes) > 2
    elements = {shape: math.prod(shape) for shape in (x, y, weight)}
    size = 2 if op.dtype in HALF else 4
    groups = max(1, x[1] // weight[1] if weight[0] == y[1] else y[1] // weight[1])
    for kind, result in results:
        if kind == "convolution_weight":
            rows, columns = weight[0] / groups, elements[weight] / weight[0]
        else:
            rows, columns = elements[result] / result[1] if result[1] else 0.0, result[1] / groups
        yield convolution(
            kind,
            op.flops / len(results),
            size * (elements[x] + elements[y] + elements[weight]),
            rows,
            columns,
            groups,
            pipe,
            widths=(x[1] // groups, y[1] // groups),
            places=math.prod(weight[2:]),
            same_size=x[2:] == y[2:],
        )
    if with_bias:
        yield stream(
            "reduction" if backward else "elementwise",
            size * elements[y] * (1 if backward else 2),
            elements[y],
            elements[y],
        )


def _recurrent(op: Operator, pipe: str) -> Iterator[tuple[KernelCall, int]]:
    """Yield a recurrent layer's products: one for all inputs, then one a time step, each with a pointwise kernel.

    Backward, a step's product is the state's gradient; inputs' and weights' gradients are products over all steps.
    """
    x, *others = op.input_shapes
    states = next(shape for shape in others if len(shape) == 3)  # layers and directions, samples, hidden units
    weights = next(shape for shape in others if len(shape) == 2)
    layers, samples, hidden = states
    gates = weights[0]
    rows = math.prod(x[:-1])
    steps = max(1, rows // max(1, samples)) * layers
    size = 2 if op.dtype in HALF else 4
    nbytes = size * (rows * (gates + hidden) + gates * hidden)
    step = product(samples, gates, hidden, 1, pipe, size * (samples * (gates + hidden) + gates * hidden))
    yield step, steps
    yield stream("elementwise", size * samples * (gates + 3 * hidden), samples * gates), steps
    yield product(rows, gates, hidden, 1, pipe, nbytes), layers
    if "backward" in op.name:
        yield product(gates, hidden, rows, 1, pipe, nbytes), 2 * layers


def model_flops(op: Operator) -> int:
    """Return an operator's share of the step's model FLOPs: 0 unless it is a matrix product, convolution or
    attention.

    A multiply-add counts as 2. The optimizer, recomputation by checkpoints, and scores that fused attention recomputes
    in its backward pass do not count. Attention counts all pairs of query and key, even those that a causal mask hides
    and its kernel skips. Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.

    Known limitations: for packed texts, attention counts what its kernel computes.
    """
    if op.recomputed or op.phase == "optimizer":
        return 0
    if op.name in PRODUCTS or op.name in CONVOLUTIONS:
        return op.flops
    return _attention_flops(op) if op.name in FUSED_ATTENTION else 0


def _attention_flops(op: Operator) -> int:
    kernel = attention_call(op.name)
    query, key, value = op.input_shapes[kernel.query : kernel.query + 3]
    if len(query) == 3:  # packed: five products in the backward pass; one of them recomputes the scores
        return op.flops * 4 // 5 if kernel.backward else op.flops
    return (4 if kernel.backward else 2) * math.prod(kernel.sizes(query, key)) * (query[-1] + value[-1])
