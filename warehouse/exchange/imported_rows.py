"""Shared parts of all importers: rows of files, their identity and columns, and mappings of CSV columns.

Start reading at `ImportedFile`. `read_table` is the engine of published tables; `warehouse.exchange.published_tables`
has their mappings. `CsvMapping.read` reads any other CSV file by the user's mapping. A row that no trial
config describes is kept as `untraceable`, with its reason. All cells of a file stay in the column `origin`.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from conf.cli.settings import group_options
from conf.errors import UsageError, refuse, require_one_of, shown
from conf.files.identity import canonical_json, mapping_hash
from warehouse.files.writer import run_problems
from warehouse.tables.schema import LABELS, RUN_SCHEMA, STATUSES

DOUBT = "doubt"  # `runs.error_type` of a row whose label may be wrong
UNTRACEABLE = "untraceable"  # `runs.error_type` of a row that no trial config describes: queried, never fitted
UNKNOWN_FAMILY = "unknown"  # the family of a row that does not name its model

# Errors that a reader of published cells raises for a row of another form.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_REASON_CHARACTERS = 200
_NO_CARD_MIB = 2**20  # for a device of unknown memory: more than any has
_CELL_CHARACTERS = 2**27  # a cell lists all layers of a network; csv's own limit is 128 Ki

Cells = Mapping[str, str]  # the cells of a file's row
Columns = dict[str, Any]  # the columns of an imported row
Value = Callable[[Cells], Any]
Condition = Callable[[Cells, Columns], object]
Change = Callable[[Cells], Columns]  # changes the columns of a row
Rule = tuple[Condition, Change]
ImportedRow = tuple[int, Columns]  # its number in the file, 1 for the first below the header, and its table's columns
FIELD = "config."  # prefix of the trial config's fields
_DOUBLED = ("batch_size", "precision", "optimizer")  # in `runs` and in the config: a value given once is set in both
# Training settings of published runs whose files do not name them. They make a config complete, so its hash is the one
# that the farm computes.
TRAINING: Mapping[str, object] = {
    "optimizer": "adam",
    "precision": "fp32",
    "activation_checkpointing": False,
    "cudnn_benchmark": False,
    "channels_last": False,
}
_EMPTY = ("", "nan", "na", "n/a", "null", "none")  # empty cells of spreadsheets and data frames
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
STATUS = {"SUCCESSFUL": "ok", "OOM_CRASH": "oom"}
_STATUS_OF = {**{name: name for name in STATUSES}, **{name.lower(): status for name, status in STATUS.items()}}


class NotOfThisSource(UsageError):
    """A file without rows of the source; the message says why."""


@dataclass(frozen=True)
class ImportedFile:
    """One file's rows, in file order.

    rows              rows of `kind`: `runs` or `kernels`, the latter without invalid rows, see `left_out`
    measured_columns  number of its columns that describe the run beside its memory
    pairs             numbers and cells of its rows of two jobs on one GPU
    left_out          rows that no table keeps
    """

    path: Path
    rows: tuple[ImportedRow, ...]
    kind: str = "runs"
    measured_columns: int = 0
    pairs: tuple[tuple[int, Cells], ...] = ()
    left_out: tuple[ImportedRow, ...] = ()


def read_csv(path: Path) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return the header and the rows of a CSV file. Raises `UsageError` if it is not one.

    Cells beyond the header are a list under the key None; missing cells are None.
    """
    before = csv.field_size_limit(_CELL_CHARACTERS)  # of the whole process
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            return tuple(reader.fieldnames or ()), list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"path={path} is not a CSV file: {error}") from error
    finally:
        csv.field_size_limit(before)


def read_with_columns(path: Path, *accepted: str) -> list[dict[str, Any]]:
    """Return the rows of a CSV file with all columns of one of the `accepted` lists, else raise `NotOfThisSource`."""
    with contextlib.suppress(UsageError):
        header, rows = read_csv(path)
        if any(set(columns.split(", ")) <= set(header) for columns in accepted):
            return rows
    raise NotOfThisSource(f"not of this source, whose files have {', or of pairs: '.join(accepted)}")


def untraceable(reason: str, **columns: Any) -> Columns:
    """Return the columns of a run that no trial config describes."""
    return {"family": UNKNOWN_FAMILY, "status": "ok", "error_type": UNTRACEABLE, "error": reason, **columns}


def to_number(text: str | None) -> float | None:
    """Return a cell as a number; None if it holds no finite number."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def above_zero(text: str | None) -> float | None:
    """Return a cell's number; None unless it is a number above 0."""
    number = to_number(text)
    return number if number is not None and number > 0 else None


def whole_above_zero(text: str | None) -> int | None:
    """Return a cell's whole number; None unless it is above 0 and within 64 bits."""
    number = above_zero(text)
    return int(number) if number is not None and number == int(number) and number < 2**63 else None


def imported_runs(source: str, runs: Iterable[tuple[int, Columns]], contents: Iterable[str]) -> tuple[ImportedRow, ...]:
    """Return rows of `runs` with their identity; one with impossible memory is invalid.

    Args:
        source: Name of the source.
        runs: Places in the file, and columns without identity.
        contents: The text that identifies each run.
    """
    rows = []
    for (place, run), run_id in zip(runs, run_ids(source, contents), strict=True):
        if run["status"] == "ok" and (problem := beyond_the_card(run)):
            run = {**run, "status": "invalid", "error_type": None, "error": problem, "peak_memory_mib": None}
        rows.append((place, {**identity(source, run_id), **run}))
    return tuple(rows)


def identity(source: str, run_id: str) -> Columns:
    """Return the columns that identify an imported run."""
    return {"run_id": run_id, "job_id": f"import-{source}", "source": "imported"}


def beyond_the_card(run: Mapping[str, Any]) -> str | None:
    """Return why a memory peak is impossible (0, or clearly above the device's memory); None if it is possible."""
    peak, card = run.get("peak_memory_mib"), run.get("device_memory_mib") or _NO_CARD_MIB
    if peak is None or 0 < peak <= 1.1 * card:
        return None
    where = f", on a device of {card:,.0f} MiB" if peak > 0 else " is not a need"
    return f"peak_memory_mib: {peak:,.6g} MiB{where}"


def run_ids(source: str, contents: Iterable[str]) -> list[str]:
    """Return `SOURCE-` and 20 hex digits for each row of a file, from its content and its rank among equal rows.

    The same rows in another file, or among other rows, have the same ids."""
    counts: Counter[str] = Counter()
    ids = []
    for content in contents:
        counts[content] += 1
        digest = hashlib.sha256(f"{content}\n{counts[content]}".encode()).hexdigest()
        ids.append(f"{source}-{digest[:20]}")
    return ids


def config_columns(config: Mapping[str, Any]) -> Columns:
    """Return the columns of `runs` for a trial config in mapping form; an empty mapping for an empty one."""
    if not config:
        return {}
    return {
        "config": canonical_json(config),
        "config_hash": mapping_hash(config),
        **{name: config.get(name) for name in ("batch_size", "precision", "optimizer")},
    }


def imported_kernels(
    source: str,
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    read: Callable[[Any], Columns],
    content: Callable[[Mapping[str, Any]], str],
) -> ImportedFile:
    """Return a file's rows of `kernels`.

    Args:
        source: Name of the source.
        path: The file.
        rows: Its cells.
        read: Returns the columns for a row's cells; an error in `MALFORMED` is the reason to leave a row out.
        content: Returns the text that identifies a row.
    """
    numbered_rows: list[tuple[int, Columns]] = []
    left_out, contents = [], []
    for place, cells in enumerate(rows, 1):
        try:
            numbered_rows.append((place, {"source": "imported", "count": 1, **read(cells)}))
        except MALFORMED as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            left_out.append((place, {"status": "invalid", "error": reason[:_REASON_CHARACTERS]}))
            continue
        contents.append(content(cells))
    ids = run_ids(source, contents)
    landed = ((number, {**row, "kernel_row": name}) for (number, row), name in zip(numbered_rows, ids, strict=True))
    return ImportedFile(path, tuple(landed), "kernels", left_out=tuple(left_out))


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """One published table with one run a row.

    names    columns of its files, separated by commas
    why      returns why no trial config describes a row's job
    device   GPU model of a row, and the card's memory if the table has memory
    columns  column of `runs` -> function that returns its value in a row
    rules    conditions on a row and its columns, each with a change; the first that holds applies
    read     replaces `why` to `rules` if a row yields any other number of runs
    is_pair  whether a row has two jobs that shared a GPU
    pairs    columns of the source's files that have only pairs
    """

    names: str
    why: Callable[[Cells], str] = lambda row: ""
    device: Callable[[Cells], Columns] = lambda row: {}
    columns: Mapping[str, Value] = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    read: Callable[[Cells], Iterator[Columns]] | None = None
    is_pair: Callable[[Cells], bool] = lambda row: False
    pairs: str | None = None

    def runs(self, row: Cells) -> Iterator[Columns]:
        """Yield the columns of a row's runs."""
        if self.read is not None:
            yield from self.read(row)
        elif not self.is_pair(row):
            values = {name: value(row) for name, value in self.columns.items()}
            run = untraceable(self.why(row), **self.device(row), **values)
            change = next((change for holds, change in self.rules if holds(row, run)), None)
            yield run if change is None else run | change(row)


def read_table(path: Path, device_name: str | None, *, source: str, table: PublishedTable) -> ImportedFile:
    """Return the runs of one published table, and the rows of pairs. Raises `NotOfThisSource`."""
    raw = read_with_columns(path, table.names, *([] if table.pairs is None else [table.pairs]))
    lines = [{str(name): _text(value) for name, value in row.items()} for row in raw]
    places = tuple(enumerate(lines, 1))
    if lines and table.pairs is not None and set(table.pairs.split(", ")) <= lines[0].keys():
        return ImportedFile(path, (), pairs=places)
    other = {} if device_name is None else {"device_name": device_name, "device_memory_mib": None}
    runs = [
        (number, part, {**run, **other, "origin": canonical_json(row)})
        for number, row in places
        for part, run in enumerate(table.runs(row))
    ]
    contents = [canonical_json({"part": part, "cells": run["origin"], **other}) for _, part, run in runs]
    rows = imported_runs(source, [(number, run) for number, _, run in runs], contents)
    return ImportedFile(path, rows, pairs=tuple(place for place in places if table.is_pair(place[1])))


def _text(value: str | list[str] | None) -> str:
    """Return a cell's text; cells beyond the header come as a list, missing ones as None."""
    return (",".join(value) if isinstance(value, list) else value or "").strip()


# ---- values of a row


def lower(name: str) -> Value:
    """Return a reader of a cell's text, in lower case."""
    return lambda row: row[name].lower()


def whole(name: str) -> Value:
    """Return a reader of a whole number > 0."""
    return lambda row: whole_above_zero(row[name])


def scaled(name: str, times: float = 1, over: float = 1) -> Value:
    """Return a reader of a number > 0, converted to the column's unit."""

    def value(row: Cells) -> float | None:
        number = above_zero(row[name])
        return None if number is None else number * times / over

    return value


# ---- changes of a row


def invalid(words: str | Callable[[Cells], str], *emptied: str) -> Change:
    """Return the change that makes a row invalid and empties the columns `emptied`, whose figures are impossible."""

    def change(row: Cells) -> Columns:
        error = words if isinstance(words, str) else words(row)
        return {"status": "invalid", "error_type": None, "error": error, **dict.fromkeys(emptied)}

    return change


def doubted(words: str) -> Change:
    """Return the change that marks a row's figures as doubtful."""
    return lambda row: {"error_type": DOUBT, "error": words}


def unnamed_instrument(column: str) -> Change:
    """Return the change that empties `column`, because no column fits the figure's instrument."""

    def change(row: Cells) -> Columns:
        words = f"the file's instrument is {row['memory_kind'] or 'not named'}: the figure is in origin alone"
        return {column: None, "quality_reasons": json.dumps({column: words})}

    return change


def is_empty(column: str) -> Condition:
    """Return the condition that a row's column of `runs` has no value."""
    return lambda row, run: run[column] is None


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
        require_one_of("family", self.family, group_options("arch"))
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
        refuse(problems)

    def read(self, path: Path, _device_name: str | None) -> ImportedFile:
        """Return the rows of one file. Raises `UsageError` if it lacks a column or is not a CSV file."""
        header, cells = read_csv(path)
        if missing := [name for name in self.columns.values() if name not in header]:
            shown = ", ".join(header) or "nothing"
            raise UsageError(f"path={path}: no column {', '.join(missing)}; the file has {shown}")
        about = {"family": self.family, "constants": {str(k): v for k, v in self.constants.items()}}
        contents = [canonical_json({**about, "cells": {str(k): v for k, v in row.items()}}) for row in cells]
        rows = zip(cells, run_ids("csv", contents), strict=True)
        return ImportedFile(path, tuple((number, self._run(row, id_)) for number, (row, id_) in enumerate(rows, 1)))

    def _run(self, cells: Mapping[str, str | None], run_id: str) -> dict[str, Any]:
        values, problems = {}, []
        for name, value in {**self.constants, **{n: cells[column] for n, column in self.columns.items()}}.items():
            try:
                values[name] = _convert(name, value)
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
        # A value that breaks a rule cannot be stored; the reason quotes it.
        valid_values = {name: value for name, value in run.items() if not any(p.startswith(name) for p in problems)}
        return {**valid_values, "status": "invalid", "oom_kind": None, "error": "; ".join(problems)}

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


def _convert(name: str, value: Any) -> Any:
    """Return a cell or constant as the column's type; None if it is empty, or -1 for a number not measured."""
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
        str(text).encode()  # raises `ValueError` for a lone surrogate, which YAML can write as an escape
        return str(text)
    if pa.types.is_boolean(kind):
        if str(text).lower() not in _BOOLEANS:
            raise ValueError(f"must be true or false, got {text!r}")
        return _BOOLEANS[str(text).lower()]
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
    """Return `32`, `0.1` and `true` as numbers and booleans, any other text unchanged."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            return number if math.isfinite(number) else text
    return text
