"""A run as a typed value, from the worker that made it to the writer that lands it. Start reading at `Run`.

`warehouse.tables.schema.RUN_SCHEMA` says what each column holds; this module is where a run becomes a row of it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.files.identity import canonical_json

# Columns that hold a JSON object; `config` is written in the canonical form by which a trial config is identified.
JSON_COLUMNS = (
    "config",
    "telemetry_missing",
    "quality_reasons",
    "quality_summary",
    "half_widths",
    "origin",
    "convolutions",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished execution of a task. Fields are the columns of `RUN_SCHEMA`; None was not measured and becomes NULL.

    Nothing is checked here: a worker may send anything, and the writer refuses what breaks the schema.
    """

    run_id: str
    family: str
    status: str
    source: str
    job_id: str | None = None
    task_index: int | None = None
    attempt: int | None = None
    config: Mapping[str, Any] | None = None
    config_hash: str | None = None
    oom_kind: str | None = None
    error_type: str | None = None
    error: str | None = None
    device_name: str | None = None
    device_uuid: str | None = None
    device_memory_mib: float | None = None
    node: str | None = None
    worker: str | None = None
    torch_version: str | None = None
    cuda_version: str | None = None
    cudnn_version: str | None = None
    driver_version: str | None = None
    python_version: str | None = None
    allocator_settings: str | None = None
    farm_version: str | None = None
    schema_version: int | None = None
    batch_size: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    parameters: int | None = None
    peak_memory_mib: float | None = None
    peak_reserved_mib: float | None = None
    peak_allocated_mib: float | None = None
    peak_rss_mib: float | None = None
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    gpu_util: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    step_time_ms: float | None = None
    steps: int | None = None
    window_kind: str | None = None
    window_ended: str | None = None
    warmup_s: float | None = None
    window_s: float | None = None
    window_start_ms: float | None = None
    window_end_ms: float | None = None
    wall_s: float | None = None
    started_at: datetime.datetime | None = None
    finished_at: datetime.datetime | None = None
    telemetry_rows: int | None = None
    telemetry_missing: Mapping[str, str] | None = None
    quality: str | None = None
    quality_reasons: Mapping[str, str] | None = None
    quality_summary: Mapping[str, Any] | None = None
    samples_measured: int | None = None
    samples_repeated: int | None = None
    samples_unavailable: int | None = None
    samples_suspect: int | None = None
    half_widths: Mapping[str, float] | None = None
    final: bool | None = None
    memory_fraction: float | None = None
    mig_profile: str | None = None
    mps: bool | None = None
    startup_s: float | None = None
    prepared: bool | None = None
    origin: Mapping[str, str] | None = None
    convolutions: Mapping[str, Any] | None = None
    kernel_rows: int | None = None
    parallel: str | None = None
    ranks: int | None = None
    worst_rank: int | None = None
    collocation_rows: int | None = None
    group_id: str | None = None

    def columns(self) -> dict[str, Any]:
        """Return the row's columns, JSON objects as text; those that are None are left out.

        Raises `TypeError` or `ValueError` for what JSON cannot hold.
        """
        values = {name: getattr(self, name) for name in _FIELDS}
        return {name: _store(name, value) for name, value in values.items() if value is not None}


_FIELDS = tuple(field.name for field in dataclasses.fields(Run))


def _store(name: str, value: Any) -> Any:
    if name == "config":
        return canonical_json(value)
    return json.dumps(value, sort_keys=True) if name in JSON_COLUMNS else value


def reasons_of(text: str | None) -> dict[str, str]:
    """Return the reasons of a stored run by name, from its column `quality_reasons` or `telemetry_missing`.

    Empty for NULL and for a text that is not a JSON object: anybody may have written the file.
    """
    try:
        reasons = json.loads(text or "null")
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(words) for name, words in reasons.items()} if isinstance(reasons, dict) else {}
