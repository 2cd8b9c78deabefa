"""Turns rows of published files into rows of `runs`: their identity and their columns.

Start reading at `published_file`; `warehouse.csv_columns` does the same for any CSV file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.identity import canonical_json, mapping_hash
from warehouse.gpumemnet import to_number
from warehouse.published import (
    CARD_MIB,
    CUDA_VERSION,
    DEVICE_NAME,
    TORCH_VERSION,
    PublishedFile,
    PublishedRow,
    timm_config,
)
from warehouse.schema import RUN_SCHEMA

DOUBT = "doubt"  # `runs.error_type` of a row whose label may be wrong
UNTRACEABLE = "untraceable"  # `runs.error_type` of a row that no trial config describes: queried, never fitted
UNKNOWN_FAMILY = "unknown"  # of a row that does not tell what ran


_NO_CARD_MIB = 2**20  # more than any device has, for a device of unknown memory


def untraceable(reason: str, **columns: Any) -> dict[str, Any]:
    """Return the columns of a run that no trial config describes."""
    return {"family": UNKNOWN_FAMILY, "status": "ok", "error_type": UNTRACEABLE, "error": reason, **columns}


def above_zero(text: str | None) -> float | None:
    """Return the number of a cell; None for none, or none above 0."""
    number = to_number(text)
    return number if number is not None and number > 0 else None


def whole_above_zero(text: str | None) -> int | None:
    """Return the whole number of a cell; None for none, none above 0, or one beyond 64 bits."""
    number = above_zero(text)
    return int(number) if number is not None and number == int(number) and number < 2**63 else None


@dataclass(frozen=True)
class ImportedRow:
    """A row of `runs`, and where it is from. row: its place in the file, 1 for the first below the header."""

    row: int
    run: Mapping[str, Any]


@dataclass(frozen=True)
class ImportedFile:
    """One file's rows, in its order. measured_columns: how many of its columns describe the run besides its memory."""

    path: Path
    rows: tuple[ImportedRow, ...]
    measured_columns: int = 0
    pairs: tuple[tuple[int, Mapping[str, str]], ...] = ()  # places and cells of its rows that are two jobs on one GPU


def published_file(file: PublishedFile, source: str, device_name: str | None) -> ImportedFile:
    """Return the rows of a file of GPUMemNet or timm models; `device_name` None stands for the card of these files.

    A run's identity is its configuration, card and memory. So measurements that are published again, with other
    columns or in another file, are the same runs.
    """
    other = {} if device_name in (None, DEVICE_NAME) else {"device_name": device_name}
    contents = [
        canonical_json({"label": row.label, "batch_size": row.batch_size, "memory_mib": row.memory_mib, **other})
        for row in file.rows
    ]
    device: dict[str, object] = {"device_name": device_name or DEVICE_NAME}
    if device_name in (None, DEVICE_NAME):
        device["device_memory_mib"] = CARD_MIB
    rows = []
    for row, run_id in zip(file.rows, run_ids(source, contents), strict=True):
        rows.append(imported_row(row.row, source, run_id, {**device, **_columns(row)}))
    measured_columns = sum(column == "Status" or column.startswith("Avg ") for column in file.columns)
    return ImportedFile(file.path, tuple(rows), measured_columns)


def imported_row(row: int, source: str, run_id: str, run: Mapping[str, Any]) -> ImportedRow:
    """Return a row with its identity; one whose memory cannot be is invalid."""
    problem = beyond_the_card(run) if run["status"] == "ok" else None
    invalid = {"status": "invalid", "error_type": None, "error": problem, "peak_memory_mib": None} if problem else {}
    return ImportedRow(row, {**identity(source, run_id), **run, **invalid})


def beyond_the_card(run: Mapping[str, Any]) -> str | None:
    """Return why a memory peak is impossible (0, or clearly more than the device has); None if it is possible."""
    peak, card = run.get("peak_memory_mib"), run.get("device_memory_mib") or _NO_CARD_MIB
    if peak is None or 0 < peak <= 1.1 * card:
        return None
    return f"peak_memory_mib: {peak:,.6g} MiB, on a device of {card:,.0f} MiB" if peak > 0 else (
        f"peak_memory_mib: {peak:,.6g} MiB is no need"
    )  # fmt: skip


def identity(source: str, run_id: str) -> dict[str, Any]:
    """Return the columns that identify an imported run."""
    return {"run_id": run_id, "job_id": f"import-{source}", "source": "imported"}


def run_ids(source: str, contents: Iterable[str]) -> list[str]:
    """Return `SOURCE-` and 20 hex digits for each row of a file, from its content and its rank among equal rows.

    The same rows in another file, or beside further rows, have the same ids."""
    seen: Counter[str] = Counter()
    ids = []
    for content in contents:
        seen[content] += 1
        digest = hashlib.sha256(f"{content}\n{seen[content]}".encode()).hexdigest()
        ids.append(f"{source}-{digest[:20]}")
    return ids


def config_columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of `runs` for a trial config in mapping form; an empty mapping for an empty one."""
    if not config:
        return {}
    return {
        "config": canonical_json(config),
        "config_hash": mapping_hash(config),
        **{name: config.get(name) for name in ("batch_size", "precision", "optimizer")},
    }


def _columns(row: PublishedRow) -> dict[str, Any]:
    config = row.config
    if row.family is None and row.group is not None and row.status != "invalid":
        config = timm_config(row)
    family = row.family or ("timm" if row.group is not None else UNKNOWN_FAMILY)
    utilization = {name: value for name, value in row.utilization.items() if name in RUN_SCHEMA.names}
    return {
        "family": family,
        "status": row.status,
        "oom_kind": "device" if row.status == "oom" else None,
        "error_type": DOUBT if row.doubt else None,
        "error": row.doubt or row.reason,
        "torch_version": TORCH_VERSION,
        "cuda_version": CUDA_VERSION,
        "batch_size": row.batch_size,
        **config_columns(config),
        # the transformers' counts lack the attention's input projections
        "parameters": None if family == "transformer" else row.parameters,
        "peak_memory_mib": row.memory_mib,
        **utilization,
    }
