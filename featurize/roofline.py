"""What one traced training step costs on one GPU model: time per operator, and from it utilization and power.

Start reading at `price`; `featurize.kernels` says how an operator becomes kernels and what they do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from featurize.device_spec import DeviceSpec
from featurize.kernel_constants import HOST_PER_LISTED_TENSOR, KERNEL_GAP_US, KERNEL_LATENCY_US
from featurize.kernels import KINDS, Pricer, kind_of
from featurize.step_trace import StepTrace
from featurize.training import TrainingSettings

LAUNCH, COMPUTE, MEMORY = BOUNDS = ("launch", "compute", "memory")


class OperatorCost(NamedTuple):
    """One operator. `seconds` on the GPU; `occupancy` of the SMs that are active, `sm_share` of all SMs that are.

    `seconds` is its kernels' latency plus the longer of arithmetic and memory traffic; `bound` names the largest of the
    three. `waves`: blocks over what the GPU holds at once, below 1 where it does not fill the GPU.
    """

    seconds: float
    bound: str
    occupancy: float
    sm_share: float
    waves: float
    kind: str  # one of KINDS


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One step. ms, W; ratios in [0, 1], over the whole step, as NVIDIA's DCGM defines them.

    busy_ms   the GPU's own time: kernels and the gaps between them
    host_ms   the host's time to launch them, which overlaps busy_ms
    input_ms  the input pipeline's time, which overlaps neither (given by the caller; 0 for data that is there)
    smact     SMs with a warp resident, averaged; smocc  resident warps over the most possible
    drama     DRAM traffic over the data sheet's bandwidth; fp32a  FP32 pipe, tensor cores do not count
    gpu_util  time with kernels queued on the GPU
    """

    step_time_ms: float
    busy_ms: float
    host_ms: float
    input_ms: float
    smact: float
    smocc: float
    drama: float
    fp32a: float
    gpu_util: float
    power_w: float
    kernels: int
    flops: int
    bytes_moved: int
    _records: list[tuple] = field(repr=False, compare=False)

    @cached_property
    def operators(self) -> tuple[OperatorCost, ...]:
        """In the order of the trace."""
        return tuple(map(OperatorCost._make, self._records))


def price(
    trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings | None = None, *, input_ms: float = 0.0
) -> StepCost:
    """Price a traced step on one GPU model. `settings` are the trace's own; fp32 without.

    Precision `fp32` is PyTorch's default: convolutions in TF32 where the GPU has it, other products in fp32.
    A step takes `input_ms` plus the longer of the GPU's time and the host's: the host launches eagerly and ahead
    of the GPU, and waits for the step's end before it makes the next batch. `python_loader_ms` gives the `input_ms`
    of a plain loop.

    Calibrated on MLPs and CNNs in fp32 on an A100: SM activity, occupancy and FP32 pipe. `drama`, absolute times,
    attention and other precisions follow from the same scheme, but nothing measured stood behind them; power rises
    from idle to the limit with SM activity, arithmetic rate and DRAM activity, unmeasured too.
    Source of the scheme: Williams et al., Roofline, CACM 2009.
    """
    pricer = Pricer(spec, settings)
    methods = {kind: getattr(pricer, kind) for kind in KINDS}
    records: list[tuple] = []
    add = records.append
    latency_s = KERNEL_LATENCY_US * 1e-6
    seconds_sum = active = warps = dram_s = math_s = fp32_s = launches = 0.0
    kernels = flops = moved = 0
    for op in trace.operators:
        kind = kind_of(op.name)
        nbytes = op.bytes_read + op.bytes_written
        work, compute, share, occupancy, dram, peak, fp32, waves, extra = methods[kind](op, nbytes)
        number = op.launches + extra
        floor = number * latency_s
        seconds = work + floor
        bound = LAUNCH if floor >= work else COMPUTE if compute else MEMORY
        add((seconds, bound, occupancy, share, waves, kind))
        seconds_sum += seconds
        active += seconds * share
        warps += seconds * share * occupancy
        dram_s += dram
        math_s += peak
        fp32_s += fp32
        launches += op.launches
        if kind == "optimizer":
            launches += HOST_PER_LISTED_TENSOR * len(op.input_shapes)
        kernels += number
        flops += op.flops
        moved += nbytes
    busy_s = seconds_sum + kernels * KERNEL_GAP_US * 1e-6
    host_s = launches * spec.launch_overhead_us * 1e-6
    total_s = input_ms * 1e-3 + max(busy_s, host_s) or spec.launch_overhead_us * 1e-6
    smact, drama, math_share = (_ratio(x / total_s) for x in (active, dram_s, math_s))
    load = min(1.0, 0.25 * smact + 0.45 * math_share + 0.4 * drama)
    return StepCost(
        step_time_ms=total_s * 1e3,
        busy_ms=busy_s * 1e3,
        host_ms=host_s * 1e3,
        input_ms=input_ms,
        smact=smact,
        smocc=_ratio(warps / total_s),
        drama=drama,
        fp32a=_ratio(fp32_s / total_s),
        gpu_util=_ratio(busy_s / total_s),
        power_w=spec.idle_power_w + load * (spec.power_limit_w - spec.idle_power_w),
        kernels=kernels,
        flops=flops,
        bytes_moved=moved,
        _records=records,
    )


def python_loader_ms(samples: int, nbytes: int) -> float:
    """What a plain training loop adds to each step, in ms; as `price` takes it.

    A `DataLoader` without workers collates `samples`, the pageable batch of `nbytes` is copied, Python runs between the
    steps. Fitted together with the constants of `featurize.kernel_constants`, on one machine: elsewhere a first guess.
    """
    return 1.45 + 1.0e-3 * samples + 0.36e-6 * nbytes


def features(cost: StepCost) -> dict[str, float]:
    """What a learner may use of a priced step; every value finite.

    `time_KIND` and `bound_BOUND` are shares of the operators' time, `fill` and `waves` its weighted means (`waves` as
    its logarithm, base 2), `intensity` is FLOPs per byte (log2), times are in ms or µs (log2 as named).
    """
    by_kind = dict.fromkeys(KINDS, 0.0)
    by_bound = dict.fromkeys(BOUNDS, 0.0)
    total = fill = waves = 0.0
    for seconds, bound, _, share, wave, kind in cost._records:
        by_kind[kind] += seconds
        by_bound[bound] += seconds
        total += seconds
        fill += seconds * share
        waves += seconds * math.log2(max(wave, 2**-10))
    whole = total or 1.0
    return {
        "step_time_log2_ms": math.log2(cost.step_time_ms),
        "busy_log2_ms": math.log2(max(cost.busy_ms, 2**-20)),
        "host_over_step": cost.host_ms / cost.step_time_ms,
        "smact": cost.smact,
        "smocc": cost.smocc,
        "drama": cost.drama,
        "fp32a": cost.fp32a,
        "gpu_util": cost.gpu_util,
        "power_w": cost.power_w,
        "intensity_log2": math.log2((cost.flops + 1) / (cost.bytes_moved + 1)),
        "kernels_log2": math.log2(cost.kernels + 1),
        "mean_kernel_us": total / max(cost.kernels, 1) * 1e6,
        "fill": fill / whole,
        "waves_log2": waves / whole,
        "longest_operator": max((r[0] for r in cost._records), default=0.0) / whole,
        **{f"time_{kind}": seconds / whole for kind, seconds in by_kind.items()},
        **{f"bound_{bound}": seconds / whole for bound, seconds in by_bound.items()},
    }


def _ratio(value: float) -> float:
    return min(1.0, max(0.0, value))
