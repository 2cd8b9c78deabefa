"""Costs of each operator of a step on a GPU model, and what a learner reads of the whole step.

Start reading at `operator_costs` and `features`. Both are sums over the kernels of `featurize.timing.calls`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import TrainingSettings, uses_tf32
from featurize.recording.step_trace import StepTrace
from featurize.timing.calls import (
    ATTENTION,
    GROUPS,
    PRODUCT,
    STREAM,
    KernelCall,
    as_calls,
    operator_kernels,
)
from featurize.timing.step_time import TimedStep, load_efficiencies, timed_kernels

KINDS = ("matmul", "convolution", "attention", "elementwise", "reduction", "row", "normalization", "optimizer")
LAUNCH, COMPUTE, MEMORY = ("launch", "compute", "memory")
_KIND_OF_GROUP = {PRODUCT: "matmul", ATTENTION: "attention"}
_BEGINNINGS = {
    "batch_norm": "normalization",
    "group_norm": "normalization",
    "layer_norm": "row",
    "softmax": "row",
    "reduction": "reduction",
    "optimizer": "optimizer",
}


class OperatorCost(NamedTuple):
    """One operator, all its kernels.

    seconds     on the GPU
    occupancy   share of the possible warps that is resident on SMs that are active
    sm_share    share of all SMs that are active
    """

    seconds: float
    occupancy: float
    sm_share: float


def operator_costs(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings) -> list[OperatorCost]:
    """Return the cost of each operator, in the order of the trace.

    Args:
        trace: One step.
        spec: The GPU model.
        settings: The trace's own.
    """
    counts: Counter[KernelCall] = Counter()
    of_operators = []
    for op in trace.operators:
        run, _ = operator_kernels(op, **uses_tf32(settings.precision))
        for call, times in run:
            counts[call] += times
        of_operators.append(run)
    timed = timed_kernels(as_calls(counts, 0.0), spec, settings, load_efficiencies())
    active = timed.seconds * timed.sm_share
    columns = zip(timed.seconds.tolist(), active.tolist(), (active * timed.occupancy).tolist(), strict=True)
    priced = dict(zip(counts, columns, strict=True))
    costs = []
    for run in of_operators:
        seconds = active_s = resident_s = 0.0
        for call, times in run:
            one, of_active, of_resident = priced[call]
            seconds += times * one
            active_s += times * of_active
            resident_s += times * of_resident
        costs.append(OperatorCost(seconds, resident_s / active_s, active_s / seconds))
    return costs


def features(step: TimedStep) -> dict[str, float]:
    """Return what a learner may use of a timed step; every value finite.

    `time_KIND` and `bound_BOUND` are shares of the kernels' time, `fill` and `waves` its weighted means (`waves`:
    blocks over SMs, as its logarithm of base 2), `intensity` is FLOPs per byte (log2), times are in ms or µs (log2 as
    named).
    """
    timed = step.kernels
    calls, kernels = timed.calls, timed.on_device
    total = float((calls.count * timed.seconds).sum())
    share = calls.count * timed.seconds / (total or 1.0)
    by_kind = dict.fromkeys(KINDS, 0.0)
    for kind, group, part in zip(calls.kind, calls.group.tolist(), share.tolist(), strict=True):
        by_kind[kind_of(kind, GROUPS[group])] += part
    launch = np.maximum(kernels.math_s, kernels.memory_s) < timed.latency_s
    compute = ~launch & (kernels.math_s > kernels.memory_s)
    by_bound = {LAUNCH: launch, COMPUTE: compute, MEMORY: ~launch & ~compute}
    number, flops, nbytes = (float((calls.count * column).sum()) for column in (1.0, calls.flops, calls.nbytes))
    waves = np.log2(np.maximum(timed.per_sm, 2**-10))
    ratios = step.activity
    return {
        "step_time_log2_ms": math.log2(step.step_time_ms),
        "busy_log2_ms": math.log2(max(step.busy_ms, 2**-20)),
        "host_over_step": step.host_ms / step.step_time_ms,
        "smact": ratios.smact,
        "smocc": ratios.smocc,
        "drama": ratios.drama,
        "fp32a": ratios.fp32a,
        "tensor": ratios.tensor,
        "gpu_util": ratios.gpu_util,
        "power_w": ratios.power_w,
        "intensity_log2": math.log2((flops + 1) / (nbytes + 1)),
        "kernels_log2": math.log2(number + 1),
        "mean_kernel_us": total / max(number, 1.0) * 1e6,
        "fill": float((share * timed.sm_share).sum()),
        "waves_log2": float((share * waves).sum()),
        "longest_kernel": float(np.max(timed.seconds, initial=0.0)) / (total or 1.0),
        **{f"time_{kind}": part for kind, part in by_kind.items()},
        **{f"bound_{bound}": float(share[holds].sum()) for bound, holds in by_bound.items()},
    }


def kind_of(kind: str, group: str) -> str:
    """Return which of `KINDS` a kernel is."""
    if group != STREAM:
        return _KIND_OF_GROUP.get(group, "convolution")
    return next((name for begin, name in _BEGINNINGS.items() if kind.startswith(begin)), "elementwise")
