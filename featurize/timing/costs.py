"""Costs of each operator of a step on a GPU model, what a learner reads of the step, and what the step waits for.

Start reading at `operator_costs` and `features`: sums over the kernels of `featurize.timing.calls`. `delays_ms` says
how late collectives make kernels, `input_ms` what the input pipeline of a plain training loop adds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import TrainingSettings, uses_tf32
from featurize.recording.step_trace import Collective, StepTrace
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


_BEGINS, _WAITS = 0, 1


def delays_ms(
    collectives: Sequence[Collective], lasts_ms: Sequence[float], begins_ms: Sequence[float]
) -> list[tuple[int, float]]:
    """Return at which moments the kernels wait for collectives, in their order, and by how much they are late from then
    on. Those of one dimension of the mesh run one after the other.

    Args:
        collectives: In the order in which they begin.
        lasts_ms: How long each one runs.
        begins_ms: When each operator would begin without any communication, and the end of the step.
    """
    moments = sorted(
        (moment, kind, number)
        for number, one in enumerate(collectives)
        for moment, kind in ((one.after, _BEGINS), (one.before, _WAITS))
    )
    late_ms = 0.0  # by which kernels are late
    delays: list[tuple[int, float]] = []
    free_ms: dict[str, float] = defaultdict(float)  # when a communicator is done with all that came before
    ends_ms: dict[int, float] = {}
    for moment, kind, number in moments:
        now_ms = begins_ms[moment] + late_ms
        if kind == _BEGINS:
            axis = collectives[number].axis
            free_ms[axis] = ends_ms[number] = max(now_ms, free_ms[axis]) + lasts_ms[number]
        else:
            late_ms += max(ends_ms[number] - now_ms, 0.0)
            delays.append((moment, late_ms))
    return delays


def begin_moments_ms(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, step_ms: float) -> list[float]:
    """Return when each operator begins, and the end of the step: in proportion to the GPU's own time."""
    ends = np.cumsum([0.0, *(cost.seconds for cost in operator_costs(trace, spec, settings))])
    return (ends * (step_ms / ends[-1]) if ends[-1] else ends).tolist()


def input_ms(trace: StepTrace, batch_size: int, micro_steps: int = 1) -> float:
    """Return what a plain training loop adds to each traced step, in ms: see `python_loader_ms`.

    `batch_size` is of one micro-step; each loads a batch.
    """
    nbytes = trace.batch_bytes
    return micro_steps * python_loader_ms(batch_size, nbytes // micro_steps)


def python_loader_ms(samples: int, nbytes: int) -> float:
    """Return what a plain training loop adds to each step, in ms.

    A `DataLoader` without workers collates `samples`, the pageable batch of `nbytes` is copied, Python runs between the
    steps. Fitted on one machine: elsewhere a first guess.
    """
    return 1.45 + 1.0e-3 * samples + 0.36e-6 * nbytes
