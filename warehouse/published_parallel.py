"""Readers of published steps of jobs on several GPUs: vTrain's, and NVIDIA's of DGX Cloud, NeMo and Megatron's tests.

Start reading at `read_parallel`. No trial config describes such a job; all cells stay in `origin`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from warehouse.imported_rows import above_zero, untraceable

_COMMON = "model, gpu, gpus, tp, pp, micro_batch, global_batch, precision, what_was_measured, value, unit"
PARALLEL_COLUMNS = {  # source -> columns of its files
    "vtrain": f"{_COMMON}, num_layers, hidden, heads, dp, pipeline_schedule, micro_batches",
    "dgxc": f"{_COMMON}, cp, ep, framework, section, release",
    "nemo": f"{_COMMON}, seq, cp, ep, container, task, ga",
    "megatron": f"{_COMMON}, num_layers, hidden, test_case, environment",
}
_MS = {"ms": 1.0, "s": 1e3}
_DEVICES = {  # the files' names -> names in conf/device
    "H100": "H100-SXM5-80GB",
    "DGX-H100": "H100-SXM5-80GB",
    "B200": "B200-SXM-180GB",
    "DGX-B200": "B200-SXM-180GB",
}


def read_parallel(row: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the run of one row: the time of a step, or of NeMo that of its tokens a second and GPU.

    `batch_size` stays empty: the time is of all micro-batches on all GPUs, and `origin` has their sizes."""
    value, kind, unit = above_zero(row["value"]), row["what_was_measured"], row["unit"]
    step_ms = value * _MS[unit] if value and unit in _MS and "time" in kind else None
    if unit == "tokens/s/GPU" and value:
        samples, length, gpus = (above_zero(row[name]) for name in ("global_batch", "seq", "gpus"))
        step_ms = samples * length / (value * gpus) * 1e3 if samples and length and gpus else None
    run = untraceable(
        f"{row['model']} on {row['gpus']} GPUs, which no trial config describes",
        device_name=_DEVICES.get(row["gpu"], row["gpu"]),
        device_memory_mib=None,
        precision=row["precision"],
        step_time_ms=step_ms,
    )
    problem = None if step_ms else f"no time of a step: {kind}"
    if row["micro_batch"] and not (above_zero(row["micro_batch"]) or 0.5).is_integer():
        problem = "micro_batch is no whole number > 0"
    if problem is not None:
        run |= {"status": "invalid", "error_type": None, "error": problem, "step_time_ms": None}
    yield run
