"""One flat row of numbers for a traced step on one GPU model: what a learner sees of a training job before it runs.

Start reading at `step_features`. Names beginning with `net_` say what the network is, whatever the batch size: they are
of one sample. `job_` is what the whole job takes and does, `gpu_` the device.
"""

from __future__ import annotations

import math
from collections import defaultdict

from conf.units import MIB
from featurize.configs.opgraph import product_dims
from featurize.device.device_spec import DeviceSpec, device_features
from featurize.job.trial_config import MATH_BITS, OPTIMIZERS
from featurize.memory.replay import MemoryProfile, outside_mib
from featurize.memory.workspace_scenarios import scenario_features
from featurize.operators.table import VOCABULARY, category
from featurize.recording.step_trace import BATCH, StepTrace
from featurize.timing.costs import features as priced_features
from featurize.timing.input_pipeline import python_loader_ms
from featurize.timing.step_time import time_step
from featurize.training.training_step import TrainingSettings

_CONVOLUTIONS = ("1x1", "3x3", "5x5", "wide", "depthwise", "grouped", "strided", "long")


def step_features(
    trace: StepTrace,
    memory: MemoryProfile,
    spec: DeviceSpec,
    settings: TrainingSettings,
    *,
    batch_size: int,
    training_loop: bool,
) -> dict[str, float]:
    """name -> number, every one finite; the same names for every job.

    `memory` is the trace's replay on `spec`. Sizes are in MiB, or logarithms of base 2 (`log_*`), `share_*` lie in
    [0, 1]. `job_priced_*` are those of `featurize.timing.costs.features`, with the input pipeline of a plain loop
    where the job runs in one.
    """
    return {
        **trace.remembered(("network", batch_size), lambda: _network(trace, batch_size)),
        "net_states": OPTIMIZERS[settings.optimizer].states,
        "net_math_bits": MATH_BITS.get(settings.precision, 32),
        "net_channels_last": float(settings.channels_last),
        "net_cudnn_benchmark": float(settings.cudnn_benchmark),
        "net_training_loop": float(training_loop),
        **_memory(trace, memory, spec, batch_size),
        **_utilization(trace, spec, settings, batch_size, training_loop),
        **device_features(spec),
    }


def _network(trace: StepTrace, batch: int) -> dict[str, float]:
    """Counts and sizes of the forward pass, of one sample: equal for equal networks at any batch size."""
    counts = dict.fromkeys(VOCABULARY, 0)
    elements: dict[str, float] = defaultdict(float)
    flops: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = dict.fromkeys(_CONVOLUTIONS, 0.0)
    convolution_elements: dict[str, float] = dict.fromkeys(_CONVOLUTIONS, 0.0)
    largest = widest_in = widest_out = widest_weight = pixels = tokens = head = 0.0
    readers: dict[int, int] = defaultdict(int)
    forward = 0
    of_batch = _reached_by_batch(trace)
    for index, op in enumerate(trace.operators):
        if op.phase != "forward":
            continue
        forward += 1
        for source in op.sources:
            if source >= 0:
                readers[source] += 1
        kind = category(op.name)
        # The first output: others are statistics and the like, which do not grow with the batch; nor does a loss.
        made = math.prod(op.output_shapes[0]) if op.output_shapes and kind != "loss" else 0
        work = op.flops if kind != "loss" else 0
        if of_batch[index]:
            made, work = (size // batch if size % batch == 0 else 0 for size in (made, work))
        counts[kind] += 1
        elements[kind] += made
        flops[kind] += work
        largest = max(largest, made)
        if kind == "convolution":
            groups, rows, n, k, kernel, stride = product_dims(op)
            inner = k / max(kernel, 1)
            widest_in, widest_out = max(widest_in, inner * groups), max(widest_out, n * groups)
            widest_weight = max(widest_weight, n * k * groups)
            pixels = max(pixels, rows / batch)
            for name, holds in (
                ("1x1", kernel == 1),
                ("3x3", kernel == 9 and groups == 1),
                ("5x5", kernel > 9 and kernel <= 25 and groups == 1),
                ("wide", kernel > 25 and groups == 1),
                ("depthwise", groups > 1 and inner <= 1),
                ("grouped", groups > 1 and inner > 1),
                ("strided", stride > 1),
                ("long", kernel > 1 and kernel not in (9, 25, 49)),
            ):
                if holds:
                    kinds[name] += 1
                    convolution_elements[name] += made
        elif kind == "attention":
            _, queries, _, size, _, _ = product_dims(op)
            tokens, head = max(tokens, queries), max(head, size)
        elif kind == "matmul":
            _, _, n, k, _, _ = product_dims(op)
            widest_weight = max(widest_weight, n * k)
    all_elements, all_flops = sum(elements.values()) or 1.0, sum(flops.values()) or 1.0
    tensors = [block.nbytes for block in trace.blocks if block.kind == "parameter"]
    return {
        "net_log_parameters": _log(trace.parameters),
        "net_parameter_tensors": float(len(tensors)),
        "net_log_largest_parameter": _log(max(tensors, default=0)),
        "net_share_largest_parameter": max(tensors, default=0) / max(sum(tensors), 1),
        "net_log_flops": _log(all_flops),
        "net_log_elements": _log(all_elements),
        "net_share_largest_output": largest / all_elements,
        "net_log_flops_per_element": math.log2(1 + all_flops / all_elements),
        "net_log_parameters_per_element": math.log2((1 + trace.parameters) / all_elements),
        "net_operators": float(forward),
        "net_joins": sum(n > 1 for n in readers.values()) / max(forward, 1),
        "net_log_widest_in": _log(widest_in),
        "net_log_widest_out": _log(widest_out),
        "net_log_widest_weight": _log(widest_weight),
        "net_log_pixels": _log(pixels),
        "net_log_tokens": _log(tokens),
        "net_head_size": head,
        **{f"net_count_{kind}": float(n) for kind, n in counts.items() if not kind.endswith("_backward")},
        **{
            f"net_share_elements_{kind}": elements[kind] / all_elements
            for kind in VOCABULARY
            if not kind.endswith("_backward") and kind != "optimizer"
        },
        **{f"net_share_flops_{kind}": flops[kind] / all_flops for kind in ("convolution", "matmul", "attention")},
        **{f"net_convolutions_{name}": n for name, n in kinds.items()},
        **{f"net_share_convolution_{name}": n / all_elements for name, n in convolution_elements.items()},
    }


def _reached_by_batch(trace: StepTrace) -> list[bool]:
    """Which operators work on samples: those that read the batch, and those that read what these made. The others
    (standardised weights, tables of positions) do the same work for any batch."""
    reached: list[bool] = []
    for op in trace.operators:
        reached.append(any(source == BATCH or (source >= 0 and reached[source]) for source in op.sources))
    return reached


def _memory(trace: StepTrace, memory: MemoryProfile, spec: DeviceSpec, batch: int) -> dict[str, float]:
    reserved, allocated = memory.peak_reserved / MIB, memory.peak_allocated / MIB
    parts = {kind: nbytes / MIB for kind, nbytes in memory.peak_parts.items()}
    outside = outside_mib(trace, spec)
    states = trace.parameter_bytes / MIB
    sizes = [block.nbytes for block in trace.blocks if block.call is None]
    calls = [block for block in trace.blocks if block.call is not None]
    return {
        "job_memory_mib": reserved + outside,
        "job_reserved_mib": reserved,
        "job_allocated_mib": allocated,
        "job_outside_mib": outside,
        "job_weights_mib": states,
        "job_fits": float(memory.fits),
        "job_log_batch": math.log2(batch),
        "job_log_memory": _log(reserved + outside),
        "job_share_fragmentation": 1 - sum(parts.values()) / max(reserved, 1e-9),
        "job_log_largest_block": _log(max(sizes, default=0)),
        "job_share_largest_block": max(sizes, default=0) / MIB / max(allocated, 1e-9),
        "job_workspaces": float(len(calls)),
        **{f"job_share_{kind}": mib / max(allocated, 1e-9) for kind, mib in parts.items()},
        **{
            f"job_scenario_{name}": ratio
            for name, ratio in scenario_features(trace, spec, outside, reserved + outside).items()
        },
        **{f"job_peak_in_{phase}": float(memory.peak_phase == phase) for phase in ("forward", "backward", "optimizer")},
    }


def _utilization(
    trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, batch: int, training_loop: bool
) -> dict[str, float]:
    nbytes = sum(block.nbytes for block in trace.blocks if block.kind == "batch")
    waits = python_loader_ms(batch, nbytes) if training_loop else 0.0
    step = time_step(trace, spec, settings, input_ms=waits)
    return {f"job_priced_{name}": float(value) for name, value in priced_features(step).items()} | {
        "job_input_share": waits / step.step_time_ms,
        "job_log_batch_bytes": _log(nbytes),
        "job_step_time_ms": step.step_time_ms,
    }


def _log(value: float) -> float:
    return math.log2(1 + value)
