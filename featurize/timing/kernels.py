"""The kernels of a traced step, the time of each on a GPU model, and of the host to launch it, by learned efficiencies.

Start reading at `kernel_calls`, which lists an operator's kernels as numbers that do not depend on the GPU model; then
at `call_seconds`, their rooflines, and `host_ms`. `seconds_at_peak` is the time of the model's FLOPs (`model_flops`) at
the peak rate. Kernels' times compute on NumPy arrays for estimates, and on torch tensors where `learn.fitting` fits the
efficiencies, so that both have one formula. Torch-free.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import COMPILED, EAGER, GRAPHS, MEGATRON, TrainingSettings, training_of, uses_tf32
from featurize.operators.table import (
    ATTENTION as FUSED_ATTENTION,
    CONVOLUTIONS,
    INT8_PRODUCT,
    PRODUCTS,
    SCALED_PRODUCT,
    attention_call,
    kernel_kind,
)

if TYPE_CHECKING:
    from featurize.recording.step_trace import Operator, StepTrace

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
    yield product(samples, gates, hidden, 1, pipe, size * (samples * (gates + hidden) + gates * hidden)), steps
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


# The logarithm of an efficiency is at most this: no kernel is faster than the roofline.
_MOST_LOG = math.log(0.98)
_FP32, _TF32, _TENSOR, _FP8 = range(len(PIPES))
_TILES = np.array([64.0, 128.0, 128.0, 128.0])  # for each of `PIPES`
_WARP = 32  # threads
_LEAST_WIDTH = 16.0
_SPLIT_DEPTH = 256.0  # least depth of a block, where a product has too few tiles and is split
_MOST_SPLITS = 8.0
_OF_PADDING = 0.3  # exponent
_LENGTH_HALF = 256.0  # queries at which attention reaches half its rate
_CACHED, _SOFTNESS = 0.6, 4.0  # share of the L2 cache up to which tensors stay there, and sharpness of that limit
CORNER = 4  # the roofline's corner: the larger it is, the sharper
_USUAL_SM_RATE = 1024.0  # FLOP of an SM a clock
OTHER = "other"  # efficiency of kinds that were not learned
UNITS = ("fp32", "tensor")
_PIPES_AND_UNITS = list(itertools.product(range(len(PIPES)), range(len(UNITS))))

GROUP_VALUES = ("half_depth", "half_width", "sm_rate", "wave")
UNIT_VALUES = ("power", "searched")
SINGLE_VALUES = ("half_head", "latency_us", "l2", "unaligned")


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Learned parameters, as natural logarithms; `sm_rate`, `wave` and `power` are exponents.

    Args:
        names: Names of the kernels in `compute` and `bandwidth`, which `Kernels` looks up.
        compute: Share of the units' rate that each kind reaches.
        bandwidth: Share of the memory's rate.
        by_group: Name -> an array of GROUPS x UNITS. `half_depth`, `half_width`: inner and smaller outer size at which
            half the rate is reached. `sm_rate`: decrease of the share with an SM's FLOP a clock, which its
            shared memory has to feed. `wave`: decrease with waves of blocks that are not full.
        by_units: Name -> an array over UNITS. `power`: decrease of the share where the power limit is below the chip's
            power. `searched`: gain of a convolution from a search by `cudnn.benchmark`.
        single: `half_head`: head size at which attention reaches half its rate. `latency_us`: of each kernel. `l2`:
            speed of the L2 cache relative to memory. `unaligned`: share of the rate that is left for sizes that do not
            fit tensor cores.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    compute: Any
    bandwidth: Any
    by_group: Mapping[str, Any]
    by_units: Mapping[str, Any]
    single: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels on a GPU model: all that does not depend on learned parameters, an entry a kernel. For several GPU
    models, fields that differ between them have a row for each.

    Args:
        compute, bandwidth: Index of the kernel's kind in `Parameters`.
        group, units: Index into GROUPS and UNITS.
        math_s, memory_s: Times at the data sheet's rates.
        known: Part of the rate's logarithm that is not learned: padding, and attention over short texts.
        log_filled: Logarithm of the share of the GPU that its waves of blocks fill.
        log_sm_rate: Logarithm of the units' FLOP of an SM a clock over the usual number.
        log_power: Logarithm of the power limit over the chip's power.
        depth, width, head: Sizes of products and of attention; infinite where they do not apply.
        cached: Share of the traffic that the L2 cache serves.
        unaligned, searched: 1 where it applies.
    """

    compute: Any
    bandwidth: Any
    group: Any
    units: Any
    math_s: Any
    memory_s: Any
    known: Any
    log_filled: Any
    log_sm_rate: Any
    log_power: Any
    depth: Any
    width: Any
    head: Any
    cached: Any
    unaligned: Any
    searched: Any

    def map_columns(self, convert: Callable[[Any], Any]) -> Kernels:
        """Return the same data as arrays of another library."""
        return Kernels(**{name: convert(column) for name, column in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Figures of a GPU model that its kernels depend on; of several, arrays that broadcast with arrays of kernels.

    Args:
        sms, warps_per_sm: SMs, and the warps of 32 threads that each holds. AMD's wavefronts of 64 count as two.
        sm_clocks_hz: Clocks of all SMs, in 1/s.
        bandwidth, l2_bytes: Memory's rate in bytes/s, and the size of the L2 cache.
        vector_tflops: fp32 rate without matrix units.
        pipe_tflops, has_pipe: An entry for each of `PIPES`: its rate, or fp32's, and whether matrix units have it.
        tf32_convolutions: Whether convolutions may use TF32.
        log_power: Logarithm of the power limit over the chip's power.
        idle_w, own_limit_w, limit_w: Idle power, the board's own limit, and the limit that is set.
    """

    sms: Any
    warps_per_sm: Any
    sm_clocks_hz: Any
    bandwidth: Any
    l2_bytes: Any
    vector_tflops: Any
    pipe_tflops: Any
    has_pipe: Any
    tf32_convolutions: Any
    log_power: Any
    idle_w: Any
    own_limit_w: Any
    limit_w: Any


@functools.lru_cache(maxsize=256)
def rates_of(spec: DeviceSpec | tuple[DeviceSpec, ...], half: str = "fp16") -> DeviceRates:
    """Return the figures of a GPU model, or of several: those are arrays (models, 1). `half` as in `kernels_on`."""
    if not isinstance(spec, DeviceSpec):
        of_each = [vars(rates_of(device, half)) for device in spec]
        return DeviceRates(**{name: np.stack([of[name] for of in of_each], axis=-1)[..., None] for name in of_each[0]})
    peak, architecture = spec.peak_tflops, spec.architecture
    halves = (peak.bf16, peak.fp16) if half == "bf16" else (peak.fp16, peak.bf16)
    # For each pipe, the first rate that is described counts.
    pipes = [peak.fp32_matrix, peak.tf32, halves[0] or halves[1], peak.fp8]
    chip_w = None if architecture.watts_per_tflop is None else peak.fp32 * architecture.watts_per_tflop
    return DeviceRates(
        sms=spec.sm_count,
        warps_per_sm=spec.threads_per_sm / _WARP,
        sm_clocks_hz=spec.sm_count * clock_ghz(spec) * 1e9,
        bandwidth=spec.bandwidth_gb_s * 1e9,
        l2_bytes=spec.l2_mib * MIB,
        vector_tflops=peak.fp32,
        pipe_tflops=np.array([rate or spec.tflops("fp32") for rate in pipes]),
        has_pipe=np.array([bool(rate) for rate in pipes]),
        tf32_convolutions=architecture.tf32_convolutions,
        log_power=0.0 if chip_w is None else math.log(min(1.0, spec.power_limit_w / chip_w)),
        idle_w=spec.idle_power_w,
        own_limit_w=spec.power_limit_w,
        limit_w=spec.power_limit_w if spec.power_cap_w is None else spec.power_cap_w,
    )


def places_of(
    find: Callable[..., int],
    kernels: Sequence[tuple[Any, ...]],
    choices: Sequence[tuple[Any, ...]],
    chosen: np.ndarray,
) -> np.ndarray:
    """Return what a cached function finds for each kernel, on one GPU model or on each of several.

    Args:
        find: The function of a kernel and a choice.
        kernels: Arguments of each kernel, which are the same on all GPU models.
        choices: Further arguments, all that there are.
        chosen: Index into `choices` for each kernel, or for each GPU model and kernel.
    """
    results = np.array([find(*kernel, *choice) for kernel in kernels for choice in choices], dtype=int)
    return np.asarray(results[len(choices) * np.arange(len(kernels)) + chosen])


@functools.lru_cache(maxsize=64)
def _finders(
    names: tuple[tuple[str, ...], tuple[str, ...]], channels_last: bool
) -> tuple[Callable[[str, int, int], int], Callable[[str], int]]:
    """Return functions from a kernel's kind, its pipe and units to its index in `Parameters.compute`, and from its kind
    to the one in `bandwidth`: of the first of its names that is known, else of `OTHER`."""
    layouts = ("/channels_last", "") if channels_last else ("",)
    of_compute, of_bandwidth = ({name: place for place, name in enumerate(known)} for known in names)

    @functools.cache
    def computing(kind: str, pipe: int, units: int) -> int:
        wanted = [f"{kind}{layout}/{of}" for of in units_names(pipe, units) for layout in layouts]
        return of_compute[next((name for name in wanted if name in of_compute), OTHER)]

    @functools.cache
    def moving(kind: str) -> int:
        wanted = [f"{kind}{layout}" for layout in layouts]
        return of_bandwidth[next((name for name in wanted if name in of_bandwidth), OTHER)]

    return computing, moving


def kernels_on(
    calls: Calls,
    spec: DeviceSpec | tuple[DeviceSpec, ...],
    names: tuple[tuple[str, ...], tuple[str, ...]],
    *,
    channels_last: bool = False,
    searched: bool = False,
    half: str = "fp16",
) -> Kernels:
    """Return a step's kernels on a GPU model, or on several.

    Args:
        calls: The kernels.
        spec: The GPU model, or several.
        names: Names as in `Parameters`.
        channels_last: Whether convolutions are in channels-last layout.
        searched: `cudnn.benchmark`.
        half: Type of half precision, `fp16` or `bf16`; some GPUs do not have both at one rate.
    """
    device = rates_of(spec, half)
    in_group = {name: calls.group == place for place, name in enumerate(GROUPS)}
    attention, convolution = in_group[ATTENTION], in_group[CONVOLUTION] | in_group[GROUPED]
    tiled = in_group[PRODUCT] | convolution
    computes = tiled | attention | in_group[DEPTHWISE]
    in_tf32 = device.has_pipe[_TF32] & (~convolution | device.tf32_convolutions)
    pipe = np.where((calls.pipe == _TF32) & ~in_tf32, _FP32, calls.pipe)
    pipe = np.where((pipe == _FP8) & ~device.has_pipe[_FP8], _TENSOR, pipe)
    vectors = ~(tiled | attention) & (pipe == _FP32)
    tensor = np.choose(pipe, device.has_pipe) & ~vectors
    peak = np.where(vectors, device.vector_tflops, np.choose(pipe, device.pipe_tflops)) * 1e12
    # Operands of 8 bits are half as wide as those of 16: at twice the rate, the units are fed as many bytes.
    fed = peak / np.where(pipe == _FP8, 2.0, 1.0)

    wide, narrow = np.maximum(calls.rows, calls.columns), np.minimum(calls.rows, calls.columns)
    tile = _TILES[np.where(tensor, pipe, _FP32)]
    narrow_tile = np.minimum(tile, 2.0 ** np.ceil(np.log2(np.maximum(narrow, _LEAST_WIDTH))))
    waves = np.ceil(wide / tile) * np.ceil(narrow / narrow_tile) * calls.batch / device.sms
    splits = np.clip(calls.depth / _SPLIT_DEPTH, 1.0, _MOST_SPLITS)
    filled = np.where(waves < 1, np.minimum(waves * splits, 1.0), waves / np.maximum(np.ceil(waves), 1.0))
    # Below one tile, `half_width` covers it, and a larger batch must not take less time.
    padded = np.where(
        narrow > _LEAST_WIDTH, narrow / np.maximum(np.ceil(narrow / _LEAST_WIDTH) * _LEAST_WIDTH, 1.0), 1.0
    )
    short = np.log1p(_LENGTH_HALF / np.maximum(calls.rows, 1.0))
    units, (computing, moving) = tensor.astype(int), _finders(names, channels_last)
    pipe_and_units = len(UNITS) * pipe + units  # index into `_PIPES_AND_UNITS`
    return Kernels(
        compute=places_of(computing, [(kind,) for kind in calls.kind], _PIPES_AND_UNITS, pipe_and_units),
        bandwidth=np.array(list(map(moving, calls.kind)), dtype=int),
        group=calls.group,
        units=units,
        math_s=np.where(computes, calls.flops / peak, 0.0),
        memory_s=calls.nbytes / device.bandwidth,
        known=np.where(tiled, _OF_PADDING * np.log(padded), 0.0) - np.where(attention, short, 0.0),
        log_filled=np.where(tiled, np.log(np.clip(filled, 1 / 256, 1.0)), 0.0),
        log_sm_rate=np.log(fed / device.sm_clocks_hz / _USUAL_SM_RATE),
        log_power=np.full(peak.shape, device.log_power),
        depth=np.where(tiled, np.maximum(calls.depth, 1.0), np.inf),
        width=np.where(tiled, np.maximum(narrow, 1.0), np.inf),
        head=np.where(attention, np.maximum(calls.columns, 1.0), np.inf),
        cached=1 / (1 + np.exp(np.clip(_SOFTNESS * (calls.nbytes / device.l2_bytes - _CACHED), -50, 50))),
        unaligned=(~calls.aligned & tensor & tiled & (pipe != _FP32)).astype(float),
        searched=convolution.astype(float) if searched else np.zeros(len(calls.kind)),
    )


def call_seconds(kernels: Kernels, learned: Parameters, xp: Any = np) -> Any:
    """Return the time of each kernel in seconds, never less than the roofline.

    Args:
        kernels: The kernels on a GPU model, as arrays of the library `xp`.
        learned: The efficiencies, as arrays of `xp`.
        xp: numpy or torch.
    """
    place = kernels.group, kernels.units
    group, units, single = learned.by_group, learned.by_units, learned.single
    share = (
        learned.compute[kernels.compute]
        + kernels.known
        - group["sm_rate"][place] * kernels.log_sm_rate
        + group["wave"][place] * kernels.log_filled
        - xp.log1p(xp.exp(group["half_depth"][place]) / kernels.depth)
        - xp.log1p(xp.exp(group["half_width"][place]) / kernels.width)
        - xp.log1p(xp.exp(single["half_head"]) / kernels.head)
        + units["power"][kernels.units] * kernels.log_power
        + units["searched"][kernels.units] * kernels.searched
        + single["unaligned"] * kernels.unaligned
    )
    math_s = kernels.math_s * xp.exp(-share.clip(max=_MOST_LOG))
    work_s = (math_s**CORNER + traffic_s(kernels, learned, xp) ** CORNER + 1e-40) ** (1 / CORNER)
    return work_s + xp.exp(single["latency_us"]) * 1e-6


def traffic_s(kernels: Kernels, learned: Parameters, xp: Any = np) -> Any:
    """Return the time of each kernel's traffic alone, in seconds, without arithmetic and latency. Args as above."""
    faster = 1 + (xp.exp(learned.single["l2"]) - 1) * kernels.cached
    return kernels.memory_s / faster * xp.exp(-learned.bandwidth[kernels.bandwidth].clip(max=_MOST_LOG))


def units_names(pipe: int, units: int) -> tuple[str, ...]:
    """Return the units of a kernel as in the names of `Parameters.compute`, the most specific one first.

    TF32 has its own share: kernels load twice the bytes of half precision for a multiply-add.
    """
    return (TF32, UNITS[units]) if pipe == _TF32 and UNITS[units] == "tensor" else (UNITS[units],)


def clock_ghz(spec: DeviceSpec) -> float:
    """Return the clock that the described fp32 rate implies, in GHz."""
    return spec.peak_tflops.fp32 * 1e3 / (2 * spec.architecture.fp32_lanes * spec.sm_count)


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """Constants of a framework's host.

    Args:
        factor: Time of a launch in forward and backward passes, with modules and autograd, over
            `launch_overhead_us` of the GPU's description. For Megatron, time of a pass of one of its layers.
        machines: Factor by which 9 of 10 machines take at most longer, and at least shorter.
    """

    factor: float
    machines: float


@functools.cache
def packaged_parameters() -> Mapping[str, Any]:
    """Return the packaged file of parameters: each part of the kernel model reads its own section."""
    text = resources.files("featurize.timing").joinpath("parameters.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@functools.cache
def packaged_hosts() -> Mapping[str, HostTime]:
    """Return framework -> the packaged constants."""
    return {name: HostTime(**constants) for name, constants in packaged_parameters()["host"].items()}


def framework_of(trace: StepTrace, settings: TrainingSettings) -> str:
    """Return the framework of a job, one of `FRAMEWORKS`: its settings', else the usual one for its layout.

    Tensor and pipeline parallelism are assumed to run under Megatron, unless the model is compiled. Each launch of
    Inductor is assumed to take `launch_overhead_us`: no measured row has it.
    """
    training = training_of(settings)
    if training.framework is not None:
        return training.framework
    if training.compile:
        return COMPILED
    split = trace.pipeline is not None or any(collective.axis == "tp" for collective in trace.collectives)
    return MEGATRON if split else EAGER


def host_ms(calls: Calls, spec: DeviceSpec, framework: str, hosts: Mapping[str, HostTime] | None = None) -> float:
    """Return the host's time to launch the kernels of a step, in ms.

    Megatron's host spends its time in the Python of its own linear layers and norms. Their number of launches, and the
    implementation of attention, add none: vTrain's steps of 2 to 12 launches a layer's pass wait for the host alike.

    Args:
        calls: The kernels of the step.
        spec: The GPU model; its `launch_overhead_us` is the time of a bare operator, as an optimizer's loop runs it.
        framework: One of `FRAMEWORKS`.
        hosts: Framework -> its constants; None: the packaged ones.
    """
    if framework == GRAPHS:
        return 0.0
    launches = _passes(calls) if framework == MEGATRON else calls.launches
    factor = (hosts or packaged_hosts())[framework].factor
    return (calls.updates + launches * factor) * spec.launch_overhead_us * 1e-3


def _passes(calls: Calls) -> float:
    """Return the number of runs of linear layers, convolutions and norms, forward and backward; not of attention."""
    normalized = [kind.startswith(("product", "convolution")) or "norm" in kind for kind in calls.kind]
    return float(calls.count[np.array(normalized) & (calls.batch == 1)].sum()) if normalized else 0.0


_TYPES = {INT8_PRODUCT: "int8", SCALED_PRODUCT: "float8"}  # types of operands that differ from the result's
_RATES = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}


def seconds_at_peak(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings) -> float | None:
    """Return the time of the step's model FLOPs at the GPU model's peak rates, in seconds.

    Each operator counts at the dense rate of its own type: half precision at the rate of the tensor cores, fp32 at that
    of TF32 where `precision` allows it (`featurize.job.training_settings.uses_tf32`) and the GPU's libraries support
    it: on AMD's GPUs, convolutions and recurrent layers never use it.

    Args:
        trace: One step.
        spec: The GPU model.
        settings: The trace's training settings.

    Returns:
        None where the description has no rate for a type that the step uses, as bf16 on GPUs without it.

    Known limitations:
        Convolutions count the multiplications of the direct algorithm; Winograd's does fewer.
    """
    flops = trace.remembered("model FLOPs", lambda: _flops_by_type(trace))
    seconds = []
    for (dtype, is_convolution), count in flops.items():
        rate_tflops = _rate_tflops(spec, settings.precision, dtype, is_convolution=is_convolution)
        if rate_tflops is None:
            return None
        seconds.append(count / (rate_tflops * 1e12))
    return math.fsum(seconds)


def precision_in_words(trace: StepTrace, precision: str) -> str:
    """Return the precision of a step for readers: where weights are in fp32 and most products in half precision, as in
    FSDP's mixed precision, the type of the products comes first.

    Args:
        trace: One step.
        precision: The setting that the step was traced with.
    """
    flops = trace.remembered("model FLOPs", lambda: _flops_by_type(trace))
    most = max(flops, key=lambda kind: flops[kind], default=("float32", False))[0]
    if precision not in ("fp32", "tf32") or most not in ("bfloat16", "float16"):
        return precision
    return f"{_RATES[most]} (weights in fp32)"


def _flops_by_type(trace: StepTrace) -> dict[tuple[str, bool], int]:
    """Return the step's model FLOPs by type, convolutions separately."""
    flops: dict[tuple[str, bool], int] = {}
    for op in trace.operators:
        if count := model_flops(op):
            kind = _TYPES.get(op.name, op.dtype), op.name in CONVOLUTIONS
            flops[kind] = flops.get(kind, 0) + count
    return flops


def _rate_tflops(spec: DeviceSpec, precision: str, dtype: str, *, is_convolution: bool) -> float | None:
    if dtype == "float32":
        allowed = uses_tf32(precision)["tf32_convolutions" if is_convolution else "tf32_products"]
        takes = allowed and (spec.architecture.tf32_convolutions or not is_convolution)
        return spec.tflops("tf32" if takes else "fp32")
    name = _RATES.get(dtype)
    return None if name is None else getattr(spec.peak_tflops, name)
