"""The model FLOPs of a traced step, and how long a GPU model takes for them at its peak rate.

Start reading at `seconds_at_peak`. Torch-free.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from featurize.job.training_settings import uses_tf32
from featurize.operators.table import ATTENTION, CONVOLUTIONS, INT8_PRODUCT, PRODUCTS, SCALED_PRODUCT

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from featurize.job.training_settings import TrainingSettings
    from featurize.recording.step_trace import Operator, StepTrace

_TYPES = {INT8_PRODUCT: "int8", SCALED_PRODUCT: "float8"}  # types of operands, where the result has another
_RATES = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}


def model_flops(op: Operator) -> int:
    """Return an operator's share of the step's model FLOPs: 0 for anything but a matrix product, convolution or
    attention.

    A multiply-add counts as 2. Nothing counts of the optimizer, of what a checkpoint computes again, and of the scores
    that fused attention computes again in its backward pass. Attention counts all pairs of query and key, also where
    its kernel leaves out those that a causal mask hides. Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.

    Known limitations: for texts packed one after the other, attention counts what its kernel computes.
    """
    if op.recomputed or op.phase == "optimizer":
        return 0
    if op.name in PRODUCTS or op.name in CONVOLUTIONS:
        return op.flops
    return _attention_flops(op) if op.name in ATTENTION else 0


def _attention_flops(op: Operator) -> int:
    kernel = ATTENTION[op.name]
    query, key, value = op.input_shapes[kernel.query : kernel.query + 3]
    if len(query) == 3:  # packed: five products in the backward pass, of which one gives the scores again
        return op.flops * 4 // 5 if kernel.backward else op.flops
    return (4 if kernel.backward else 2) * math.prod(kernel.sizes(query, key)) * (query[-1] + value[-1])


def seconds_at_peak(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings) -> float | None:
    """Return how long the step's model FLOPs take at the GPU model's peak rates, in seconds.

    Each operator counts at the dense rate of its own type: half precision at that of the tensor cores, fp32 at that of
    TF32 where `precision` allows it (`featurize.job.training_settings.uses_tf32`) and the GPU's libraries have it: on
    AMD's GPUs, convolutions and recurrent layers never take it.

    Args:
        trace: One step.
        spec: The GPU model.
        settings: The trace's own.

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
    """Return the precision of a step as a reader needs it: where weights are in fp32 and most products in half
    precision, as FSDP's mixed precision has it, the type of the products first.

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
    """Return the step's model FLOPs by type, convolutions apart."""
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
