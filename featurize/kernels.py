"""How an operator becomes kernels on one GPU model: their time, the SMs they fill, the warps they keep resident.

Start reading at `Pricer`; `featurize.kernel_constants` says what is assumed of them.
`featurize.roofline` sums up a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from conf.units import MIB
from featurize.device_spec import DeviceSpec
from featurize.kernel_constants import (
    ATTENTION_EFFICIENCY,
    ATTENTION_ROWS,
    BANDWIDTH_EFFICIENCY,
    DEPTHWISE_WIDTH,
    DIRECT_EFFICIENCY,
    FAST_FP32_PRODUCTS,
    FOREACH_CHUNK,
    FP32_EFFICIENCY,
    FP32_WARPS_LIMIT,
    INSTRUCTIONS_PER_ELEMENT,
    KERNEL_LATENCY_US,
    L2_SPEEDUP,
    SM_BANDWIDTH_SHARES,
    SPLIT_DEPTH,
    SPLIT_US,
    TENSOR_EFFICIENCY,
    TENSOR_WARPS,
    TENSOR_WARPS_LIMIT,
    TILES,
)
from featurize.step_trace import Operator
from featurize.training import TrainingSettings

KINDS = ("matmul", "convolution", "attention", "elementwise", "reduction", "row", "normalization", "optimizer")


class _Stream(NamedTuple):
    """A memory-bound kind of kernel: elements a block handles, its warps, and how many warps an SM holds (of 64)."""

    per_block: float
    warps: int
    resident_warps: float


_STREAMS = {
    "elementwise": _Stream(512, 4, 45),  # 128 threads, 4 elements each
    "reduction": _Stream(4096, 8, 58),
    "row": _Stream(1, 4, 58),  # one row of a softmax or layer norm; counted in rows
    "normalization": _Stream(1, 16, 58),  # one channel of a batch norm; counted in channels
    "optimizer": _Stream(FOREACH_CHUNK, 16, 45),  # one chunk of a multi-tensor kernel
    "layout": _Stream(1024, 8, 45),  # a transpose through shared memory
}


_NAMED_KINDS = {
    "aten::_cudnn_rnn": "matmul", "aten::_cudnn_rnn_backward": "matmul",
    "aten::mm": "matmul", "aten::bmm": "matmul", "aten::addmm": "matmul", "aten::baddbmm": "matmul",
    "aten::_grouped_mm": "matmul",
    "aten::sum": "reduction", "aten::mean": "reduction", "aten::nll_loss_forward": "reduction",
    "aten::amax": "reduction", "aten::linalg_vector_norm": "reduction",
    "aten::convolution": "convolution", "aten::convolution_backward": "convolution",
}  # fmt: skip


_NOTHING = (0.0, False, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


@functools.cache
def kind_of(name: str) -> str:
    """Which of KINDS an operator is, by its name; what has no name of its own here is elementwise."""
    if name in _NAMED_KINDS:
        return _NAMED_KINDS[name]
    if name.startswith(("aten::_scaled_dot_product_", "aten::_flash_attention_")):
        return "attention"
    if name.startswith(("aten::_foreach_", "aten::_fused_")):
        return "optimizer"
    if "batch_norm" in name or "group_norm" in name:
        return "normalization"
    return "row" if "softmax" in name or "layer_norm" in name or "rms_norm" in name else "elementwise"


class Pricer:
    """One method per kind of operator. Each returns

        (work_s, compute-bound?, sm_share, occupancy, dram_s, math_s, fp32_s, waves, kernels beyond op.launches)

    where dram_s, math_s and fp32_s are at the data sheet's rates, so that their sums over time are utilizations.
    """

    def __init__(self, spec: DeviceSpec, settings: TrainingSettings | None) -> None:
        precision = settings.precision if settings is not None else "fp32"
        self.copies_layout = settings is None or not settings.channels_last
        self.sms = spec.sm_count
        self.warps_per_sm = spec.warps_per_sm
        self.bandwidth = spec.bandwidth_gb_s * 1e9
        self.l2_bytes = spec.l2_mib * MIB
        self.fp32 = spec.peak_tflops.fp32 * 1e12
        tensor = {math_: rate and rate * 1e12 for math_, rate in (
            ("tf32", spec.peak_tflops.tf32), ("bfloat16", spec.peak_tflops.bf16), ("float16", spec.peak_tflops.fp16),
        )}  # fmt: skip
        # dtype -> peak of the tensor cores, None where the FP32 pipe does it
        self.product_rates = {**tensor, "float32": tensor["tf32"] if precision == "tf32" else None}
        self.convolution_rates = {**tensor, "float32": tensor["tf32"] if precision in ("fp32", "tf32") else None}
        self.attention_rates = {**tensor, "float32": tensor["tf32"] and tensor["tf32"] / FAST_FP32_PRODUCTS}
        self._products: dict[tuple, tuple] = {}
        self._tables: dict[float | None, list[tuple]] = {}

    def elementwise(self, op: Operator, nbytes: int) -> tuple:
        return self._stream(op.flops, nbytes, op.launches, _STREAMS["elementwise"], op.flops)

    def reduction(self, op: Operator, nbytes: int) -> tuple:
        return self._stream(op.flops, nbytes, 1, _STREAMS["reduction"], op.flops)

    def optimizer(self, op: Operator, nbytes: int) -> tuple:
        return self._stream(op.flops, nbytes, op.launches, _STREAMS["optimizer"], op.flops)

    def row(self, op: Operator, nbytes: int) -> tuple:
        shape = op.input_shapes[0] if op.input_shapes else ()
        return self._stream(math.prod(shape[:-1]), nbytes, 1, _STREAMS["row"], op.flops)

    def normalization(self, op: Operator, nbytes: int) -> tuple:
        shape = op.input_shapes[0]
        return self._stream(shape[1] if len(shape) > 1 else 1, nbytes, 1, _STREAMS["normalization"], op.flops)

    def matmul(self, op: Operator, nbytes: int) -> tuple:
        shape = op.output_shapes[0] if op.output_shapes else op.input_shapes[0]
        rows, columns = shape[-2:]
        batch = math.prod(shape[:-2])
        depth = op.flops / (2 * batch * rows * columns) if batch * rows * columns else 0.0
        return self._product(rows, columns, depth, batch, self.product_rates.get(op.dtype), nbytes)

    def attention(self, op: Operator, nbytes: int) -> tuple:
        backward = "backward" in op.name
        query = op.input_shapes[1 if backward else 0]
        if op.name.startswith("aten::_flash_attention_"):  # heads come after the length
            blocks = -(-math.prod(query[:-1]) // ATTENTION_ROWS)
        else:
            blocks = math.prod(query[:-2]) * -(-query[-2] // ATTENTION_ROWS)
        waves = blocks / self.sms
        whole_waves = -(-blocks // self.sms) or 1
        rate = self.attention_rates.get(op.dtype)
        peak_s = op.flops / (rate or self.fp32)
        dram_s = self._dram_s(nbytes)
        share = blocks / (whole_waves * self.sms)
        compute_s = peak_s / (ATTENTION_EFFICIENCY * (share or 1.0))
        memory_s = dram_s / BANDWIDTH_EFFICIENCY
        occupancy = min(TENSOR_WARPS_LIMIT, TENSOR_WARPS * max(1.0, waves)) / self.warps_per_sm
        fp32_s = 0.0 if rate else peak_s
        return max(compute_s, memory_s), compute_s > memory_s, share, occupancy, dram_s, peak_s, fp32_s, waves, 0

    def convolution(self, op: Operator, nbytes: int) -> tuple:
        """An implicit matrix product each for output, input gradient and weight gradient.

        Besides, in NCHW layout, the tensor-core kernels' copies to and from NHWC; and the bias, which PyTorch adds, or
        sums up, in a kernel of its own."""
        backward = "backward" in op.name
        if backward:
            y, x, weight = op.input_shapes[:3]
        else:
            (x, weight), y = op.input_shapes[:2], op.output_shapes[0]
        x_elements, y_elements, weight_elements = math.prod(x), math.prod(y), math.prod(weight)
        groups = max(1, (x[1] // weight[1]) if weight[0] == y[1] else (y[1] // weight[1]))
        rate = self.convolution_rates.get(op.dtype)
        if groups > 1 and weight_elements // weight[0] and min(x[1], y[1]) // groups < DEPTHWISE_WIDTH:
            return self._depthwise(op, nbytes, y_elements)
        size = 2 if op.dtype in ("bfloat16", "float16") else 4
        tensors = size * (x_elements + y_elements + weight_elements)
        with_bias = len(op.input_shapes) > 2
        if backward:
            # Which of input, weight and bias gradient there are follows from the outputs' shapes.
            products = [weight] if weight in op.output_shapes else []
            if op.output_shapes and op.output_shapes[0] == x:
                products.append(x)
            with_bias = len(op.output_shapes) > len(products)
        else:
            products = [y]
        flops = op.flops / max(1, len(products))
        parts = []
        for result in products:
            if result is weight:
                rows, columns = weight[0] // groups, weight_elements // weight[0]
            else:
                elements = x_elements if result is x else y_elements
                columns = result[1] // groups
                rows = elements // result[1] if result[1] else 0
            depth = flops / (2 * groups * rows * columns) if rows * columns else 0.0
            parts.append(self._product(rows, columns, depth, groups, rate, tensors))
            if rate and self.copies_layout:
                parts.append(self._stream(tensors // size, 2 * tensors, 1, _STREAMS["layout"], 0))
        if with_bias:
            traffic = size * y_elements * (1 if backward else 2)
            stream = _STREAMS["reduction" if backward else "elementwise"]
            parts.append(self._stream(y_elements, traffic, 1, stream, y_elements))
        return _together(parts, op.launches)

    def _depthwise(self, op: Operator, nbytes: int, elements: int) -> tuple:
        stream = self._stream(elements, nbytes, op.launches, _STREAMS["elementwise"], 0)
        memory_s, _, share, occupancy, dram_s, _, _, waves, _ = stream
        peak_s = op.flops / self.fp32
        compute_s = peak_s / (DIRECT_EFFICIENCY * share)
        return max(memory_s, compute_s), compute_s > memory_s, share, occupancy, dram_s, peak_s, peak_s, waves, 0

    def _dram_s(self, nbytes: float) -> float:
        """Tensors that fit in half the L2 cache mostly stay there from one kernel to the next; all of it: hardly."""
        half = self.l2_bytes / 2
        if nbytes >= 2 * half:
            return nbytes / self.bandwidth
        kept = min(1.0, 2.0 - nbytes / half)
        return nbytes * (1.0 - kept * (1.0 - 1.0 / L2_SPEEDUP)) / self.bandwidth

    def _stream(self, units: float, nbytes: float, launches: int, stream: _Stream, elements: float) -> tuple:
        per_block, warps, resident = stream
        blocks = units / (per_block * launches)
        per_sm = (blocks if blocks > 1.0 else 1.0) / self.sms
        share = per_sm if per_sm < 1.0 else 1.0
        dram_s = self._dram_s(nbytes)
        drawn = share * SM_BANDWIDTH_SHARES
        work = dram_s / (BANDWIDTH_EFFICIENCY * (drawn if drawn < 1.0 else 1.0))
        held = per_sm * warps
        most = resident * self.warps_per_sm / 64
        occupancy = (warps if held < warps else held if held < most else most) / self.warps_per_sm
        fp32_s = 2 * INSTRUCTIONS_PER_ELEMENT * elements / self.fp32
        return work, False, share, occupancy, dram_s, 0.0, fp32_s, held / most, 0

    def _product(self, rows: int, columns: int, depth: float, batch: int, rate: float | None, nbytes: float) -> tuple:
        """rows x columns x depth, `batch` times, by the tile that ends soonest. `rate` None: on the FP32 pipe."""
        key = (rows, columns, depth, batch, rate, nbytes)
        known = self._products.get(key)
        if known is not None:
            return known
        if not rows * columns * batch:
            return _NOTHING
        if columns > rows:
            rows, columns = columns, rows
        sms = self.sms
        peak = rate or self.fp32
        table = self._tables.get(rate)
        if table is None:  # the last column: seconds of one SM, per step of depth
            table = self._tables[rate] = [
                (tall, wide, warps, 2 * tall * wide * sms / (peak * efficiency))
                for (tall, wide, warps), efficiency in zip(
                    TILES, TENSOR_EFFICIENCY if rate else FP32_EFFICIENCY, strict=True
                )
            ]
        best = math.inf
        share = blocks = held = 0.0
        for tall, wide, warps, slice_s in table:
            tiles = -(-rows // tall) * -(-columns // wide) * batch
            waves = -(-tiles // sms)
            seconds = waves * slice_s * depth
            if seconds < best:
                best, share, blocks, held = seconds, tiles / (waves * sms), tiles, warps
            if tiles > 8 * sms:  # smaller ones fill the last wave better, which no longer matters
                break
            if 2 * tiles <= sms and depth > SPLIT_DEPTH:
                part = max(depth / (sms // tiles), SPLIT_DEPTH)
                seconds = slice_s * part + SPLIT_US * 1e-6
                if seconds < best:
                    blocks = tiles * depth / part
                    best, share, held = seconds, min(1.0, blocks / sms), warps
        peak_s = 2.0 * rows * columns * depth * batch / peak
        dram_s = self._dram_s(nbytes)
        memory_s = dram_s / BANDWIDTH_EFFICIENCY
        limit = TENSOR_WARPS_LIMIT if rate else FP32_WARPS_LIMIT
        held = min(limit, (TENSOR_WARPS if rate else held) * max(1.0, blocks / sms))
        cost = (
            max(best, memory_s), best > memory_s, share, held / self.warps_per_sm, dram_s, peak_s,
            0.0 if rate else peak_s, blocks / sms, 0,
        )  # fmt: skip
        self._products[key] = cost
        return cost


def _together(parts: Iterable[tuple], launches: int) -> tuple:
    """Kernels that run one after the other, as one; the ratios weighted by time, latency included."""
    work = active = warps = dram_s = math_s = fp32_s = waves = time = math_time = 0.0
    number = 0
    for part_s, compute, share, occupancy, dram, peak, fp32, wave, _ in parts:
        seconds = part_s + KERNEL_LATENCY_US * 1e-6
        work += part_s
        math_time += part_s if compute else 0.0
        time += seconds
        active += seconds * share
        warps += seconds * share * occupancy
        waves += seconds * wave
        dram_s += dram
        math_s += peak
        fp32_s += fp32
        number += 1
    extra = max(0, number - launches)
    if not number or not active:
        return _NOTHING
    return work, 2 * math_time > work, active / time, warps / active, dram_s, math_s, fp32_s, waves / time, extra
