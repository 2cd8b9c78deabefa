"""What a device would show of one traced training step: memory, time, utilization, power. A model, not a measurement.

Start reading at `simulate`. Memory replays the trace through a small caching allocator; time is a roofline.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from featurize import op_cost
from featurize.device_spec import DeviceSpec
from featurize.trace import Operator, StepTrace
from featurize.training import TrainingSettings

MIB = 2**20

# Shares of the data sheet's peak that good kernels reach, and how full they keep an SM. First-order figures: products
# of large matrices reach 70 to 80 %, streaming kernels 80 to 90 % of the bandwidth.
MATMUL_EFFICIENCY = 0.70
VECTOR_EFFICIENCY = 0.25  # of the fp32 peak, in operations per element: transcendental functions take many
BANDWIDTH_EFFICIENCY = 0.85
MATMUL_OCCUPANCY = 0.20  # register-hungry blocks: 8 to 16 warps an SM
VECTOR_OCCUPANCY = 0.70
# The least work that is given an SM of its own.
MATMUL_FLOPS_PER_SM = 2 * 64 * 64 * 64
ELEMENTS_PER_SM = 2048
BYTES_PER_SM = 32 * 1024
KERNEL_FLOOR_US = 2.0  # no kernel is shorter
CACHED_SHARE = 0.35  # of the traffic still reaches DRAM where an operator's tensors fit in half the L2 cache


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """MiB, ms, W; ratios in [0, 1]. Memory is the need, also where it does not fit; `fits` False means `oom`."""

    parameters: int
    peak_allocated_mib: float
    peak_reserved_mib: float
    peak_memory_mib: float
    fits: bool
    step_time_ms: float
    smact: float
    smocc: float
    drama: float
    gpu_util: float
    power_w: float


def simulate(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings | None = None) -> SimulatedStep:
    """Price a traced step on one GPU model. `settings` are the trace's own, fp32 by default: operators on fp32 tensors
    run in TF32 where the precision allows it.

    Memory: live blocks rounded to 512 bytes (`peak_allocated_mib`), placed in segments by best fit with splitting and
    coalescing as PyTorch's caching allocator does by default (`peak_reserved_mib`), plus the context
    (`peak_memory_mib`). Where that exceeds the card, cached segments are given back first and convolutions do without
    their workspace, as in PyTorch. Assumes one
    stream, default allocator settings, cuBLAS's default workspaces, and the trace's guess of cuDNN's.

    Time: an operator takes the longest of its arithmetic, its DRAM traffic and a floor, at fixed shares of the
    data sheet's peaks, less where it is too small to fill the GPU; the host launches eagerly and asynchronously, so
    a step takes the longer of both sums. Assumes data that is on the device already.

    Ratios: `smact` weighs an operator's time by the share of SMs it can fill, `smocc` further by the warps such kernels
    keep resident, `drama` is DRAM traffic over peak bandwidth, `gpu_util` the share of time with a kernel running.
    Power rises from idle to the limit with SM activity, arithmetic rate and DRAM activity.
    """
    precision = settings.precision if settings is not None else "fp32"
    limit = int((spec.memory_mib - spec.context_mib) * MIB)
    multiplies = any(op_cost.is_matmul(op.name) for op in trace.operators)
    workspace = cublas_workspace_bytes(spec) if multiplies else 0
    memory = _replay(trace, workspace, None)
    fits = memory.peak_reserved <= limit
    if not fits:
        try:
            memory = _replay(trace, workspace, limit)
            fits = True
        except _OutOfMemory:
            pass
    busy_s = host_s = sm_s = warp_s = dram_s = math_s = 0.0
    for op in trace.operators:
        cost = _price(op, precision, spec)
        busy_s += cost.seconds
        host_s += op.launches * spec.launch_overhead_us * 1e-6
        sm_s += cost.seconds * cost.sm_share
        warp_s += cost.seconds * cost.sm_share * cost.occupancy
        dram_s += cost.dram_seconds
        math_s += cost.math_seconds
    total_s = max(busy_s, host_s) or spec.launch_overhead_us * 1e-6
    smact, drama, math_share = (_ratio(x / total_s) for x in (sm_s, dram_s, math_s))
    load = min(1.0, 0.25 * smact + 0.45 * math_share + 0.4 * drama)
    return SimulatedStep(
        parameters=trace.parameters,
        peak_allocated_mib=memory.peak_allocated / MIB,
        peak_reserved_mib=memory.peak_reserved / MIB,
        peak_memory_mib=memory.peak_reserved / MIB + spec.context_mib,
        fits=fits,
        step_time_ms=total_s * 1e3,
        smact=smact,
        smocc=_ratio(warp_s / total_s),
        drama=drama,
        gpu_util=_ratio(busy_s / total_s),
        power_w=spec.idle_power_w + load * (spec.power_limit_w - spec.idle_power_w),
    )


def cublas_workspace_bytes(spec: DeviceSpec) -> int:
    """Of one cuBLAS handle: 4096 KiB x 2 + 16 KiB x 8, on Hopper 4096 KiB x 8 (ATen/cuda/CublasHandlePool.cpp)."""
    return 32 * MIB if spec.compute_capability[0] == 9 else 8 * MIB + 128 * 1024


@dataclass(frozen=True, slots=True)
class _Cost:
    seconds: float
    dram_seconds: float  # at the data sheet's bandwidth
    math_seconds: float  # at the data sheet's rate
    sm_share: float
    occupancy: float


def _price(op: Operator, precision: str, spec: DeviceSpec) -> _Cost:
    moved = op.bytes_read + op.bytes_written
    traffic = moved if moved > spec.l2_mib * MIB / 2 else moved * CACHED_SHARE
    dram_s = traffic / (spec.bandwidth_gb_s * 1e9)
    matmul = op_cost.is_matmul(op.name)
    if matmul:
        work = op.flops / MATMUL_FLOPS_PER_SM
        rate, efficiency, occupancy = spec.tflops(_math(op, precision)), MATMUL_EFFICIENCY, MATMUL_OCCUPANCY
    else:
        work = op.flops / ELEMENTS_PER_SM
        rate, efficiency, occupancy = spec.peak_tflops.fp32, VECTOR_EFFICIENCY, VECTOR_OCCUPANCY
    share = min(1.0, max(1.0, work, moved / BYTES_PER_SM) / spec.sm_count)
    math_s = op.flops / (rate * 1e12)
    seconds = max(
        math_s / (efficiency * share),
        dram_s / (BANDWIDTH_EFFICIENCY * share),
        op.launches * KERNEL_FLOOR_US * 1e-6,
    )
    return _Cost(seconds, dram_s, math_s if matmul else 0.0, share, occupancy)


def _math(op: Operator, precision: str) -> str:
    if op.dtype in ("bfloat16", "float16"):
        return {"bfloat16": "bf16", "float16": "fp16"}[op.dtype]
    # `fp32` is PyTorch's default, which lets cuDNN use TF32.
    convolution = op.name.startswith("aten::convolution")
    return "tf32" if precision == "tf32" or (precision == "fp32" and convolution) else "fp32"


def _ratio(value: float) -> float:
    return min(1.0, max(0.0, value))


@dataclass(frozen=True, slots=True)
class _Peaks:
    peak_allocated: int
    peak_reserved: int


class _OutOfMemory(Exception):
    """The next segment does not fit, even after every cached one was given back."""


def _replay(trace: StepTrace, workspace: int, limit: int | None) -> _Peaks:
    allocator = _CachingAllocator(limit)
    placed: dict[int, _Piece] = {}
    # cuBLAS's handles belong to threads, and autograd runs the backward pass in its own: two workspaces, kept.
    awaiting = {"forward", "backward"} if workspace else set()
    for event in trace.events:
        if event.phase in awaiting:
            awaiting.discard(event.phase)
            allocator.allocate(workspace)
        if event.nbytes > 0:
            try:
                placed[event.block] = allocator.allocate(event.nbytes)
            except _OutOfMemory:
                if trace.blocks[event.block].kind != "spare_workspace":
                    raise
        elif event.block in placed:
            allocator.free(placed.pop(event.block))
    return _Peaks(allocator.peak_allocated, allocator.peak_reserved)


class _Piece:
    """A run of bytes of a segment, with its neighbours there."""

    __slots__ = ("before", "behind", "free", "serial", "size", "small")

    def __init__(self, size: int, small: bool, serial: int, before: _Piece | None, behind: _Piece | None) -> None:
        self.size, self.small, self.serial = size, small, serial
        self.before, self.behind, self.free = before, behind, False


class _CachingAllocator:
    """The rules of c10/cuda/CUDACachingAllocator.cpp with default settings and one stream; addresses are serials."""

    SMALL, SMALL_SEGMENT, MIDDLE, MIDDLE_SEGMENT, ROUND = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._serial = 0
        self._free: dict[bool, list[tuple[int, int, _Piece]]] = {True: [], False: []}

    def allocate(self, nbytes: int) -> _Piece:
        size = -(-nbytes // 512) * 512
        small = size <= self.SMALL
        free = self._free[small]
        at = bisect.bisect_left(free, (size,))
        piece = free.pop(at)[2] if at < len(free) else self._new_segment(size, small)
        piece.free = False
        rest = piece.size - size
        if rest >= 512 if small else rest > self.SMALL:
            self._serial += 1
            tail = _Piece(rest, small, self._serial, piece, piece.behind)
            if piece.behind is not None:
                piece.behind.before = tail
            piece.behind, piece.size = tail, size
            self._put(tail)
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return piece

    def free(self, piece: _Piece) -> None:
        self.allocated -= piece.size
        if (before := piece.before) is not None and before.free:
            self._take(before)
            before.size += piece.size
            before.behind = piece.behind
            if piece.behind is not None:
                piece.behind.before = before
            piece = before
        if (behind := piece.behind) is not None and behind.free:
            self._take(behind)
            piece.size += behind.size
            piece.behind = behind.behind
            if behind.behind is not None:
                behind.behind.before = piece
        self._put(piece)

    def _new_segment(self, size: int, small: bool) -> _Piece:
        if small:
            segment = self.SMALL_SEGMENT
        elif size < self.MIDDLE:
            segment = self.MIDDLE_SEGMENT
        else:
            segment = -(-size // self.ROUND) * self.ROUND
        if self.limit is not None and self.reserved + segment > self.limit:
            self._give_back()
            if self.reserved + segment > self.limit:
                raise _OutOfMemory
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._serial += 1
        return _Piece(segment, small, self._serial, None, None)

    def _give_back(self) -> None:
        for small, free in self._free.items():
            kept = [entry for entry in free if entry[2].before or entry[2].behind]
            self.reserved -= sum(size for size, _, _ in free) - sum(size for size, _, _ in kept)
            self._free[small] = kept

    def _put(self, piece: _Piece) -> None:
        piece.free = True
        bisect.insort(self._free[piece.small], (piece.size, piece.serial, piece))

    def _take(self, piece: _Piece) -> None:
        free = self._free[piece.small]
        del free[bisect.bisect_left(free, (piece.size, piece.serial))]
