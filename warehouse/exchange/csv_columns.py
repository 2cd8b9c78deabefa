"""Reads any CSV file of measurements as rows of `runs`, by a column mapping that the user gives.

Start reading at `CsvMapping.read`.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from conf.cli.command_line import group_options
from conf.errors import UsageError, shown, unknown_name
from conf.files.identity import canonical_json
from warehouse.exchange.gpumemnet import STATUS, TRAINING
from warehouse.exchange.imported_rows import (
    ImportedFile,
    beyond_the_card,
    config_columns,
    identity,
    read_csv,
    run_ids,
    run_row,
)
from warehouse.files.writer import run_problems
from warehouse.tables.schema import LABELS, RUN_SCHEMA, STATUSES

FIELD = "config."  # of the trial config
_OURS = {
    "run_id",
    "job_id",
    "task_index",
    "attempt",
    "family",
    "config",
    "config_hash",
    "source",
    "schema_version",
    "telemetry_rows",
    "telemetry_missing",
    "convolutions",
    "kernel_rows",
    "ranks",
    "worst_rank",
    "collocation_rows",
}
TARGETS = tuple(name for name in RUN_SCHEMA.names if name not in _OURS)
_DOUBLED = ("batch_size", "precision", "optimizer")  # in `runs` and in the config: given once, they are set in both
_EMPTY = ("", "nan", "na", "n/a", "null", "none")  # as spreadsheets and data frames write it
_STATUS_OF = {**{name: name for name in STATUSES}, **{name.lower(): status for name, status in STATUS.items()}}


@dataclass(frozen=True, kw_only=True)
class CsvMapping:
    """Mapping of a CSV file's columns. Raises `UsageError` naming every key that is neither a column of `runs` nor
    `config.FIELD`, and an unknown family.

    columns    column of `runs` or `config.FIELD` -> the file's column
    constants  the same keys -> one value for every row
    """

    family: str
    columns: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.family not in group_options("arch"):
            raise unknown_name("family", self.family, group_options("arch"))
        problems = []
        for key, given_names in (("columns", self.columns), ("constants", self.constants)):
            unknown = [
                name for name in given_names if name not in TARGETS and not (name.startswith(FIELD) and name != FIELD)
            ]
            if unknown:
                problems.append(f"{key}: unknown {', '.join(unknown)}; known: {', '.join(TARGETS)} and config.FIELD")
        if both := sorted(set(self.columns) & set(self.constants)):
            problems.append(f"{', '.join(both)}: in columns and in constants")
        if not self.columns:
            problems.append("columns='{peak_memory_mib: COLUMN, ...}' is missing: source=csv reads what it names")
        if "device_name" not in self.columns and "device_name" not in self.constants:
            problems.append("device_name=... is missing: the GPU model that was measured")
        if problems:
            raise UsageError("; ".join(problems))

    def read(self, path: Path, _device_name: str | None) -> ImportedFile:
        """Return the rows of one file. Raises `UsageError` if it lacks a column or is no CSV file."""
        header, cells = read_csv(path)
        if missing := [name for name in self.columns.values() if name not in header]:
            shown = ", ".join(header) or "nothing"
            raise UsageError(f"path={path}: no column {', '.join(missing)}; the file has {shown}")
        about = {"family": self.family, "constants": {str(k): v for k, v in self.constants.items()}}
        contents = [canonical_json({**about, "cells": {str(k): v for k, v in row.items()}}) for row in cells]
        rows = zip(cells, run_ids("csv", contents), strict=True)
        return ImportedFile(path, tuple(run_row(at, self._run(row, id_)) for at, (row, id_) in enumerate(rows, 1)))

    def _run(self, cells: Mapping[str, str | None], run_id: str) -> dict[str, Any]:
        values, problems = {}, []
        for name, value in {**self.constants, **{n: cells[column] for n, column in self.columns.items()}}.items():
            try:
                values[name] = _converted(name, value)
            except ValueError as error:
                problems.append(f"{name}: {error}")
        run = {name: value for name, value in values.items() if not name.startswith(FIELD) and value is not None}
        config = {name.removeprefix(FIELD): v for name, v in values.items() if name.startswith(FIELD) and v is not None}
        settings = {name: run[name] for name in _DOUBLED if name in run}
        config = {**TRAINING, **settings, **config, "family": self.family}
        run = {**run, **identity("csv", run_id), "family": self.family, **config_columns(config)}
        run.setdefault("status", "ok")
        if run["status"] == "oom":
            run.setdefault("oom_kind", "device")
        problems += self._missing(run, config)
        problems += run_problems(run)
        if run["status"] == "ok" and (problem := beyond_the_card(run)):
            problems.append(problem)
        if not problems:
            return run
        # A value that breaks a rule cannot be stored in its column; the reason quotes it.
        kept = {name: value for name, value in run.items() if not any(p.startswith(name) for p in problems)}
        return {**kept, "status": "invalid", "oom_kind": None, "error": "; ".join(problems)}

    def _missing(self, run: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
        batch, card = config.get("batch_size"), run.get("device_memory_mib")
        missing = [] if batch is not None else ["no batch size"]
        if isinstance(batch, int | float) and batch < 1:
            missing.append(f"batch_size: {batch}")
        if card is not None and card <= 0:
            missing.append(f"device_memory_mib: {card:g}")
        if run["status"] == "ok" and all(run.get(name) is None for name in LABELS):
            missing.append("no figure")
        return missing


def read_mapping(key: str, text: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Parse `{peak_memory_mib: mem, config.model: net}`, with or without braces. Raises `UsageError` for other text."""
    if text is None:
        return {}
    try:
        written = str(text).strip()
        mapping = yaml.safe_load(written if written.startswith("{") else f"{{{written}}}")
    except (yaml.YAMLError, ValueError, RecursionError):  # a day such as 2026-99-99 is a ValueError
        mapping = None
    if not isinstance(mapping, dict) or any(value is None for value in mapping.values()):
        raise UsageError(f"{key} must be written as '{{NAME: VALUE, NAME: VALUE}}', got {shown(text)}")
    return {str(name): str(value) if key == "columns" else value for name, value in mapping.items()}


def _converted(name: str, value: Any) -> Any:
    """Return a cell or constant as the column's type; None if it is empty, or -1 where that means not measured."""
    text = value.strip() if isinstance(value, str) else value
    if text is None or str(text).lower() in _EMPTY:
        return None
    if name.startswith(FIELD):
        return _scalar(text) if isinstance(text, str) else text
    if name == "status":
        if str(text).lower() not in _STATUS_OF:
            raise ValueError(f"unknown status {text!r}; known: {', '.join(_STATUS_OF)}")
        return _STATUS_OF[str(text).lower()]
    kind = RUN_SCHEMA.field(name).type
    if pa.types.is_timestamp(kind):
        when = datetime.datetime.fromisoformat(str(text))
        return when if when.tzinfo else when.replace(tzinfo=datetime.UTC)
    if pa.types.is_string(kind):
        return str(text)
    number = float(text)
    if number == -1:
        return None
    if not math.isfinite(number):
        raise ValueError(f"must be a number, got {text!r}")
    if pa.types.is_integer(kind):
        if not number.is_integer() or abs(number) >= 2**63:
            raise ValueError(f"must be an integer, got {text!r}")
        return int(number)
    return number


def _scalar(text: str) -> bool | int | float | str:
    """Return `32`, `0.1` and `true` as the values that they spell, anything else as text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text
