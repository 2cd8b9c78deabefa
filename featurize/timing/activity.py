"""Activity and power of a step's kernels: SMs, resident warps, DRAM, the FP32 pipe, the tensor cores, watts.

Start reading at `kernel_activity` and `kernel_power`; `under_limit` returns the slowdown of kernels where a limit
lowers the clock. Like the times, all of it computes on NumPy arrays for estimates and on torch tensors for the fits of
`learn.fitting`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from featurize.device.device_spec import DeviceSpec
from featurize.operators.table import FOREACH_CHUNK
from featurize.timing.kernels import (
    ATTENTION,
    CHANNELS,
    CORNER,
    DEPTHWISE,
    GROUPS,
    PRODUCT,
    ROWS,
    STREAM,
    Calls,
    Kernels,
    packaged_parameters,
    places_of,
    rates_of,
)

INSTRUCTIONS_PER_ELEMENT = 15  # FP32 pipe slots of a pointwise kernel: its own, conversions, index arithmetic
_IDLE_CLOCK = 0.1  # share of the full clock: about the clock of idle GPUs
_LEAST_CLOCK = 0.02  # so low that memory-bound kernels stay below every limit that can be set
_ITERATIONS = 8  # until a clock below the limit converges
_HALVINGS = 20  # steps of the search over the range of clocks


@dataclass(frozen=True, kw_only=True)
class PowerParameters:
    """Learned parameters of power.

    Args:
        sm, fp32, tensor, dram: Shares of the watts between a GPU's idle power and its own limit. `sm`: drawn at full
            clock while all SMs are active. `fp32`, `tensor`: additional power of the FP32 pipe and the tensor cores at
            the data sheet's rate. `dram`: the same of the memory. Their sum may exceed 1: the limit then lowers the
            clock.
        exponent: Exponent of the clock in the power of the SMs: the voltage falls with it.
        feed: Share of a memory-bound kernel's time that the SMs at full clock need to move its bytes.
    """

    sm: Any
    fp32: Any
    tensor: Any
    dram: Any
    exponent: Any
    feed: Any


@dataclass(frozen=True, kw_only=True)
class KernelLoad:
    """Shares that each kernel uses while it runs at the board's own limit; an entry a kernel.

    Args:
        sm: SMs active.
        fp32, tensor, dram: Shares of the data sheet's rates.
        arithmetic: Degree to which arithmetic, not memory, bounds the kernel's time.
        work: Share of the kernel's time that is not latency.
    """

    sm: Any
    fp32: Any
    tensor: Any
    dram: Any
    arithmetic: Any
    work: Any


def kernel_load(
    calls: Calls,
    kernels: Kernels,
    spec: DeviceSpec | tuple[DeviceSpec, ...],
    *,
    seconds: np.ndarray,
    memory_s: np.ndarray,
    latency_s: float,
    sm_share: np.ndarray,
) -> KernelLoad:
    """Return the load of each kernel.

    Args:
        calls, kernels: The kernels, and the same at the GPU model's rates.
        spec: The GPU model.
        seconds: Time of each kernel.
        memory_s: Time of each kernel's traffic alone.
        latency_s: Part of `seconds` that is not work.
        sm_share: Share of the SMs that each keeps active while it works.
    """
    tensor = kernels.units == 1
    work = 1 - np.minimum(latency_s / seconds, 1.0)
    bound_by_memory = memory_s / np.maximum(seconds - latency_s, 1e-12)
    return KernelLoad(
        sm=sm_share * work,
        fp32=(np.where(tensor, 0.0, kernels.math_s) + pointwise_s(calls, spec)) / seconds,
        tensor=np.where(tensor, kernels.math_s, 0.0) / seconds,
        dram=kernels.memory_s * (1 - kernels.cached) / seconds,
        arithmetic=1 - np.clip(bound_by_memory, 0.0, 1.0) ** CORNER,
        work=work,
    )


def pointwise_s(calls: Calls, spec: DeviceSpec | tuple[DeviceSpec, ...]) -> Any:
    """Return the time in s that each kernel's elementwise arithmetic keeps the FP32 pipe busy; 0 except for streams."""
    pointwise = np.where(calls.group == GROUPS.index(STREAM), calls.flops, 0.0)
    return 2 * INSTRUCTIONS_PER_ELEMENT * pointwise / (rates_of(spec).vector_tflops * 1e12)


def kernel_power(
    load: KernelLoad, idle_w: Any, own_limit_w: Any, limit_w: Any, learned: PowerParameters, xp: Any = np
) -> tuple[Any, Any]:
    """Return the power of each kernel in W, and the factor of its time relative to full clock.

    A kernel that would draw more than the limit runs at the highest clock that keeps below it. Arithmetic then takes
    longer in proportion; memory traffic hardly does, until the SMs are too slow to request it.

    Args:
        load: The kernels' load, as arrays of the library `xp`.
        idle_w, own_limit_w: Idle power and power limit of the GPU model, in W.
        limit_w: The limit in effect, in W.
        learned: Parameters as numbers, or scalars of `xp`.
        xp: numpy or torch.
    """
    of_sms, of_dram, longer = _demand(load, own_limit_w - idle_w, learned)
    clock = xp.ones_like(of_sms)
    for _ in range(_ITERATIONS):
        left_w = (limit_w - idle_w - of_dram / longer(clock)).clip(min=1e-3)
        allowed = (left_w / of_sms.clip(min=1e-3)) ** (1 / learned.exponent)
        before, clock = clock, (clock * allowed.clip(min=_IDLE_CLOCK, max=1.0)) ** 0.5
        if xp is np and np.array_equal(before, clock):  # as where all kernels are below the limit
            break
    factor = longer(clock)
    return idle_w + of_dram / factor + of_sms * clock**learned.exponent, factor


def _demand(load: KernelLoad, span_w: Any, learned: PowerParameters) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return the watts above idle of SMs and DRAM at full clock, and a function from a clock to the kernels'
    slowdown."""

    def longer(clock: Any) -> Any:
        fed = (1 + (learned.feed / clock) ** CORNER) / (1 + learned.feed**CORNER)
        slower = (load.arithmetic * clock**-CORNER + (1 - load.arithmetic) * fed) ** (1 / CORNER)
        return load.work * slower + 1 - load.work

    of_sms = span_w * (learned.sm * load.sm + learned.fp32 * load.fp32 + learned.tensor * load.tensor)
    return of_sms, span_w * learned.dram * load.dram, longer


def under_limit(
    load: KernelLoad, spec: DeviceSpec | tuple[DeviceSpec, ...], learned: PowerParameters
) -> tuple[np.ndarray, np.ndarray]:
    """Return the power of each kernel in W under the limit that is set on a GPU, and the factor of its time relative to
    the board's own limit."""
    device = rates_of(spec)
    idle_w, own_w, cap_w = device.idle_w, device.own_limit_w, device.limit_w
    watts, own_clock_factor = kernel_power(load, idle_w, own_w, own_w, learned)
    is_lower = cap_w != own_w
    if not np.any(is_lower):
        return watts, np.ones_like(watts)
    of_sms, of_dram, longer = _demand(load, own_w - idle_w, learned)

    def drawn_w(clock: np.ndarray) -> np.ndarray:
        return np.asarray(idle_w + of_dram / longer(clock) + of_sms * clock**learned.exponent)

    # By bisection: near the least limit, the iteration above does not converge for memory-bound kernels.
    clock, too_high = np.full_like(watts, _LEAST_CLOCK), np.ones_like(watts)
    for _ in range(_HALVINGS):
        middle = np.sqrt(clock * too_high)
        fits = drawn_w(middle) <= cap_w
        clock, too_high = np.where(fits, middle, clock), np.where(fits, too_high, middle)
    slower = np.maximum(longer(clock) / own_clock_factor, 1.0)
    return np.where(is_lower, drawn_w(clock), watts), np.where(is_lower, slower, 1.0)


@functools.cache
def load_power() -> PowerParameters:
    """Return the packaged parameters."""
    return PowerParameters(**packaged_parameters()["power"])


# Assumptions about kernels, independent of model and GPU. Fitted once, together, to run means of SM activity, occupancy
# and FP32 pipe of MLPs and CNNs (fp32, A100), rounded, and kept within a range judged plausible. Block shapes are those
# of the usual kernels of cuBLAS, cuDNN and PyTorch, not looked up per call.
# Output tiles of one thread block: side, side, warps; and the share of the peak that a full wave of them reaches. Small
# tiles reread their operands more often and hide less latency. fp32 products run on the FP32 pipe.
TILES = ((128, 128, 8), (128, 64, 4), (64, 64, 4), (64, 32, 4))
FP32_EFFICIENCY = (0.92, 0.92, 0.80, 0.45)
TENSOR_EFFICIENCY = (0.70, 0.70, 0.50, 0.50)
_TILE_COLUMNS = np.array([*zip(*TILES, strict=True), FP32_EFFICIENCY, TENSOR_EFFICIENCY])
TENSOR_WARPS = 4  # warps of one block on the tensor cores
FP32_WARPS_LIMIT, TENSOR_WARPS_LIMIT = 20, 10  # warps of such blocks for which an SM has registers
SPLIT_DEPTH = 256  # a product's inner dimension is split over idle SMs down to this
SPLIT_US = 1.0  # time to add up the parts
ATTENTION_ROWS = 64  # queries of one head that one block takes

_REGISTERS_HOLD = 64  # most warps of an SM on the GPUs for which the warps of streams were counted


class _Blocks(NamedTuple):
    """A class of kernels.

    units          elements, rows or channels of a stream that one block handles; 0 for tiles of a product
    block_warps    warps of one block; 0 where the tile decides
    most_warps     most warps of an SM: registers bound it for products (absolute), threads for streams (of 64)
    """

    units: float
    block_warps: float
    most_warps: float


# Start of the fit, and values without measurements: the block shapes of the usual kernels of PyTorch, cuBLAS and
# cuDNN.
CLASSES: Mapping[str, _Blocks] = {
    "product": _Blocks(0, 0, FP32_WARPS_LIMIT),
    "product_tensor": _Blocks(0, TENSOR_WARPS, TENSOR_WARPS_LIMIT),
    "convolution": _Blocks(0, TENSOR_WARPS, TENSOR_WARPS_LIMIT),
    "convolution_data": _Blocks(0, TENSOR_WARPS, TENSOR_WARPS_LIMIT),
    "convolution_weight": _Blocks(0, TENSOR_WARPS, TENSOR_WARPS_LIMIT),
    "convolution_fp32": _Blocks(0, 0, FP32_WARPS_LIMIT),
    "attention": _Blocks(0, TENSOR_WARPS, TENSOR_WARPS_LIMIT),
    "depthwise": _Blocks(512, 4, 45),
    "elementwise": _Blocks(512, 4, 45),
    "reduction": _Blocks(4096, 8, 58),
    "rows": _Blocks(1, 4, 58),  # a softmax or layer norm
    "normalization": _Blocks(1, 16, 58),  # channels of a batch norm
    "optimizer": _Blocks(FOREACH_CHUNK, 16, 45),
}
_SHAPES = np.array([*CLASSES.values()], dtype=float)
CLASS_VALUES = ("most_warps", "block_warps")
STEP_VALUES = ("wave", "stream_wave", "stream_blocks", "gap")


@dataclass(frozen=True, kw_only=True)
class ActivityParameters:
    """Learned parameters of activity.

    Args:
        by_class: `most_warps`: most warps of an SM, for each of `CLASSES`; `block_warps`: factor on a block's warps.
            Both as logarithms.
        single: `wave`, `stream_wave`: exponents on the share of the SMs that a kernel's blocks fill. `stream_blocks`:
            logarithm of a factor on a stream's blocks. `gap`: share of a kernel's latency in which the SMs are empty.
    """

    by_class: Mapping[str, Any]
    single: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Occupied:
    """The kernels of a step on one GPU model, an entry a kernel: all that does not depend on learned parameters.

    Args:
        place: Index into `CLASSES`.
        tiled: 1 for products, convolutions and attention; 0 for streams.
        filled: Share of the SMs that have a block; for tiled kernels.
        per_sm: Blocks over SMs.
        warps: Warps of one block.
        warps_per_sm: Warps that the SM can hold.
        scale: Factor of `most_warps`: an SM's number of streams depends on its number of warps.
    """

    place: Any
    tiled: Any
    filled: Any
    per_sm: Any
    warps: Any
    warps_per_sm: Any
    scale: Any

    def map_columns(self, convert: Callable[[Any], Any]) -> Occupied:
        """Return the same data as arrays of another library."""
        return Occupied(**{name: convert(column) for name, column in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class TimedKernels:
    """The distinct kernels of a step on several GPU models; arrays have a row for each GPU model and a column for each
    kernel.

    Args:
        calls: The kernels, and the number of runs of each.
        specs: The GPU models.
        on_device: The kernels at the GPU models' rates.
        per_sm: Blocks over SMs.
        seconds: Time of each kernel in s.
        latency_s: Part of each kernel's time that is not work.
        sm_share: Share of the SMs that each keeps active.
        occupancy: Share of the possible warps that is resident on those.
        load: Load of each kernel, at the board's own limit.
        watts: The board's power in W while each kernel runs.
    """

    calls: Calls
    specs: tuple[DeviceSpec, ...]
    on_device: Kernels
    per_sm: np.ndarray
    seconds: np.ndarray
    latency_s: float
    sm_share: np.ndarray
    occupancy: np.ndarray
    load: KernelLoad
    watts: np.ndarray

    @functools.cached_property
    def features(self) -> list[dict[str, float]]:
        """The features of the kernels for a learner, a mapping for each GPU model; see
        `featurize.timing.simulation.time_features`."""
        calls, kernels = self.calls, self.on_device
        total = (calls.count * self.seconds).sum(axis=-1, keepdims=True)
        share = calls.count * self.seconds / np.where(total, total, 1.0)
        places = map(_kind_place, calls.kind, calls.group.tolist())
        kinds = np.fromiter(places, dtype=int, count=len(calls.kind))
        by_kind = [np.bincount(kinds, of_device, len(KINDS)) for of_device in share]
        launch = np.maximum(kernels.math_s, kernels.memory_s) < self.latency_s
        compute = ~launch & (kernels.math_s > kernels.memory_s)
        by_bound = {"launch": launch, "compute": compute, "memory": ~launch & ~compute}
        number, flops, nbytes = (float((calls.count * column).sum()) for column in (1.0, calls.flops, calls.nbytes))
        waves = np.log2(np.maximum(self.per_sm, 2**-10))
        shared = {
            "intensity_log2": math.log2((flops + 1) / (nbytes + 1)),
            "kernels_log2": math.log2(number + 1),
        }
        columns = {
            "mean_kernel_us": total[:, 0] / max(number, 1.0) * 1e6,
            "fill": (share * self.sm_share).sum(axis=-1),
            "waves_log2": (share * waves).sum(axis=-1),
            "longest_kernel": np.max(self.seconds, axis=-1, initial=0.0) / np.where(total, total, 1.0)[:, 0],
            **{f"time_{kind}": part for kind, part in zip(KINDS, np.transpose(by_kind), strict=True)},
            **{f"bound_{bound}": np.where(holds, share, 0.0).sum(axis=-1) for bound, holds in by_bound.items()},
        }
        rows = np.stack(list(columns.values()), axis=-1).tolist()
        return [shared | dict(zip(columns, row, strict=True)) for row in rows]


KINDS = ("matmul", "convolution", "attention", "elementwise", "reduction", "row", "normalization", "optimizer")
_KIND_OF_GROUP = {PRODUCT: "matmul", ATTENTION: "attention"}
_BEGINNINGS = {
    "batch_norm": "normalization",
    "group_norm": "normalization",
    "layer_norm": "row",
    "softmax": "row",
    "reduction": "reduction",
    "optimizer": "optimizer",
}


@functools.cache
def _kind_place(kind: str, group: int) -> int:
    """Return the index in `KINDS` of what a kernel belongs to."""
    if GROUPS[group] != STREAM:
        return KINDS.index(_KIND_OF_GROUP.get(GROUPS[group], "convolution"))
    return KINDS.index(next((name for begin, name in _BEGINNINGS.items() if kind.startswith(begin)), "elementwise"))


@dataclass(frozen=True, kw_only=True)
class StepActivity:
    """Ratios in [0, 1] over one step, as NVIDIA's DCGM defines them; W.

    Args:
        smact: SMs with a warp resident.
        smocc: Resident warps over the most possible.
        drama: DRAM traffic over the data sheet's bandwidth.
        fp32a: FP32 pipe.
        tensor: Tensor cores.
        gpu_util: Time with a kernel on the GPU or queued.
        power_w: The board's power in W: that of its kernels, and idle power where none runs.
    """

    smact: float
    smocc: float
    drama: float
    fp32a: float
    tensor: float
    gpu_util: float
    power_w: float


def occupied_on(calls: Calls, kernels: Kernels, spec: DeviceSpec | tuple[DeviceSpec, ...]) -> Occupied:
    """Return the occupancy data of a step's kernels on a GPU model.

    Args:
        calls: The kernels.
        kernels: The same, on this GPU model, or on several.
        spec: The GPU model, or several.
    """
    device, tensor = rates_of(spec), kernels.units == 1
    sms, warps_per_sm = device.sms, device.warps_per_sm
    kinds = list(zip(calls.kind, calls.group.tolist(), strict=True))
    place = places_of(_class_place, kinds, [(False,), (True,)], tensor.astype(int))
    shapes = _SHAPES[place]
    in_group = {name: calls.group == GROUPS.index(name) for name in (STREAM, DEPTHWISE, ATTENTION)}
    stream, attention = in_group[STREAM] | in_group[DEPTHWISE], in_group[ATTENTION]
    filled, blocks, tile_warps = _tiles(calls, kernels, sms, tensor)
    blocks = np.where(attention, calls.batch * np.ceil(calls.rows / ATTENTION_ROWS), blocks)
    waves = np.maximum(np.ceil(blocks / sms), 1.0)
    filled = np.where(attention, blocks / (waves * sms), filled)
    work = np.where(stream, calls.rows * np.where(in_group[DEPTHWISE], calls.batch, 1.0), 1.0)
    of_stream = np.maximum(work / np.maximum(shapes[..., 0], 1.0), 1.0)
    return Occupied(
        place=place,
        tiled=(~stream).astype(float),
        filled=np.clip(filled, 1 / 1024, 1.0),
        per_sm=np.where(stream, of_stream, blocks) / sms,
        warps=np.where(shapes[..., 1] > 0, shapes[..., 1], tile_warps),
        warps_per_sm=np.full(place.shape, warps_per_sm),
        scale=np.where(stream, warps_per_sm / _REGISTERS_HOLD, 1.0),
    )


def kernel_activity(occupied: Occupied, learned: ActivityParameters, xp: Any = np) -> tuple[Any, Any]:
    """Return the share of the SMs that each kernel keeps active, and the share of resident warps on those.

    Args:
        occupied: The kernels on a GPU model, as arrays of the library `xp`.
        learned: The parameters, as arrays of `xp`.
        xp: numpy or torch.
    """
    single = learned.single
    stream = 1 - occupied.tiled
    per_sm = occupied.per_sm * (occupied.tiled + stream * xp.exp(single["stream_blocks"]))
    share = occupied.tiled * occupied.filled ** single["wave"] + stream * per_sm.clip(max=1.0) ** single["stream_wave"]
    block = occupied.warps * xp.exp(learned.by_class["block_warps"][occupied.place])
    most = xp.exp(learned.by_class["most_warps"][occupied.place]) * occupied.scale
    resident = xp.minimum(xp.minimum(block * per_sm.clip(min=1.0), most), occupied.warps_per_sm)
    return share, resident / occupied.warps_per_sm


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a step's kernels on one GPU model, however long the step takes.

    Args:
        active_s: Ratio of `StepActivity` -> time in s that counts for it.
        above_idle_j: Energy in J beyond idle power.
        idle_w: Idle power in W.
    """

    active_s: Mapping[str, float]
    above_idle_j: float
    idle_w: float


def step_work(timed: TimedKernels, learned: ActivityParameters) -> list[StepWork]:
    """Return the work of a step's kernels on each GPU model."""
    calls, kernels, idle_w = timed.calls, timed.on_device, rates_of(timed.specs).idle_w
    active = calls.count * (timed.seconds - learned.single["gap"] * timed.latency_s) * timed.sm_share
    math_s = kernels.math_s * calls.count
    tensor = kernels.units == 1
    busy_s = calls.count * timed.seconds
    of_devices = {
        "smact": active.sum(axis=-1),
        "smocc": (active * timed.occupancy).sum(axis=-1),
        "drama": (calls.count * kernels.memory_s * (1 - kernels.cached)).sum(axis=-1),
        "fp32a": (math_s * ~tensor).sum(axis=-1) + (calls.count * pointwise_s(calls, timed.specs)).sum(axis=-1),
        "tensor": (math_s * tensor).sum(axis=-1),
        "gpu_util": busy_s.sum(axis=-1),
    }
    above_idle_j = (busy_s * (timed.watts - idle_w)).sum(axis=-1)
    return [
        StepWork(
            active_s={name: float(seconds[row]) for name, seconds in of_devices.items()},
            above_idle_j=float(above_idle_j[row]),
            idle_w=float(idle_w[row, 0]),
        )
        for row in range(len(timed.specs))
    ]


def _tiles(calls: Calls, kernels: Kernels, sms: Any, tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each product, the share of the SMs that its tiles fill, its blocks, and a block's warps. The tile is
    the one that ends soonest, with the depth split over idle SMs."""
    tall, wide = np.maximum(calls.rows, calls.columns), np.minimum(calls.rows, calls.columns)
    peak = np.where(kernels.math_s > 0, np.maximum(calls.flops, 1.0) / np.maximum(kernels.math_s, 1e-30), 1e13)
    # The tiles are the first dimension.
    height, width, of_block, fp32, half = _TILE_COLUMNS.reshape(-1, len(TILES), *(1 for _ in peak.shape))
    slice_s = 2 * height * width * sms / (peak * np.where(tensor, half, fp32))
    tiles = np.maximum(np.ceil(tall / height) * np.ceil(wide / width) * calls.batch, 1.0)
    waves = np.ceil(tiles / sms)
    part = np.maximum(calls.depth / np.maximum(sms // tiles, 1.0), SPLIT_DEPTH)
    parts = tiles * calls.depth / part
    splits = (2 * tiles <= sms) & (calls.depth > SPLIT_DEPTH)
    split_s = np.where(splits, slice_s * part + SPLIT_US * 1e-6, np.inf)
    whole_s = waves * slice_s * calls.depth
    seconds = np.minimum(whole_s, split_s)
    split = split_s < whole_s
    best = seconds.argmin(axis=0)[None]
    blocks = np.where(split, parts, tiles)
    filled = np.where(split, np.minimum(parts / sms, 1.0), tiles / (waves * sms))
    warps = np.broadcast_to(of_block, blocks.shape)
    filled, blocks, warps = (np.take_along_axis(column, best, axis=0)[0] for column in (filled, blocks, warps))
    return filled, blocks, warps


@functools.cache
def _class_place(kind: str, group: int, tensor: bool) -> int:
    return list(CLASSES).index(_class_of(kind, GROUPS[group], tensor))


def _class_of(kind: str, group: str, tensor: bool) -> str:
    if group in (ATTENTION, DEPTHWISE):
        return group
    if group == PRODUCT:
        return "product_tensor" if tensor else "product"
    if group != STREAM:
        direction = kind.removeprefix("grouped_general_").removeprefix("grouped_")
        return direction if tensor else "convolution_fp32"
    if kind.startswith(CHANNELS):
        return "normalization"
    if kind.startswith(ROWS):
        return "rows"
    return kind if kind in ("reduction", "optimizer") else "elementwise"
