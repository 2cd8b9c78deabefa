"""Readers of published steps of jobs on several GPUs: vTrain's, and NVIDIA's of DGX Cloud, NeMo and Megatron's tests.

Start reading at `read_parallel`. No trial config describes such a job; all cells stay in `origin`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from warehouse.gpumemnet import to_number
from warehouse.imported_rows import UNKNOWN_FAMILY, UNTRACEABLE

_COMMON = "model, gpu, gpus, tp, pp, micro_batch, global_batch, precision, what_was_measured, value, unit"
PARALLEL_COLUMNS = {  # source -> columns of its files
    "vtrain": f"{_COMMON}, num_layers, hidden, heads, dp, pipeline_schedule, micro_batches",
    "dgxc": f"{_COMMON}, cp, ep, framework, section, release",
    "nemo": f"{_COMMON}, cp, ep, container, task, ga",
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
    """Yield the run of one row: the time of a step, or of NeMo that of its tokens a second and GPU."""
    value, gpus = to_number(row["value"]), to_number(row["gpus"])
    step_ms = value * _MS[row["unit"]] if value and row["unit"] in _MS else None
    if row["unit"] == "tokens/s/GPU" and value and gpus:
        samples, length = to_number(row["global_batch"]), to_number(row.get("seq", ""))
        step_ms = samples * length / (value * gpus) * 1e3 if samples and length else None
    batch = to_number(row["micro_batch"])
    run: dict[str, Any] = {
        "family": UNKNOWN_FAMILY,
        "status": "ok",
        "error_type": UNTRACEABLE,
        "error": f"{row['model']} on {row['gpus']} GPUs, which no trial config describes",
        "device_name": _DEVICES.get(row["gpu"], row["gpu"]),
        "device_memory_mib": None,
        "batch_size": int(batch) if batch else None,
        "precision": row["precision"],
        "step_time_ms": step_ms,
    }
    if step_ms is None:
        run |= {"status": "invalid", "error_type": None, "error": f"no time of a step: {row['what_was_measured']}"}
    yield run
