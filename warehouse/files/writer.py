"""Lands runs in the warehouse: checks them, then writes telemetry and details, and last the run, atomically.

Start reading at `RunWriter.write`. Each landing first checks whether a merged file already holds the run
(`warehouse.files.counting.merged_file_with`).

`write_marks` marks labels that no longer hold in an environment of their device. The view `stale` shows them, and
`learn.rows.data.load_rows` leaves such rows out while the device is in that environment. No row is deleted: in the old
environment the rows count again.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from warehouse.files.counting import is_merged_name, land_batch, merged_file_with
from warehouse.files.folder import DataFolder, check_name, write_parquet
from warehouse.tables.schema import (
    DETAILS,
    ENVIRONMENT,
    JOB_SCHEMA,
    METRICS,
    OOM_KINDS,
    QUALITIES,
    RUN_SCHEMA,
    SAMPLE_QUALITIES,
    SCHEMA_VERSION,
    SOURCES,
    STALE_SCHEMA,
    STATUSES,
    TELEMETRY_SCHEMA,
    Run,
)

if TYPE_CHECKING:
    import duckdb

    from warehouse.reading.connection import WarehouseConnection


REQUIRED = ("run_id", "family", "status", "source")
RUN_RATIOS = ("smact", "smocc", "drama", "gpu_util")
TELEMETRY_RATIOS = tuple(name for name, (unit, _) in METRICS.items() if unit == "ratio")
WORDS = {"phase": ("warmup", "window"), "quality": SAMPLE_QUALITIES}  # possible values of telemetry's text columns


class RunWriter:
    """Writes runs and job snapshots into a data folder, which it creates if missing. A process may have several."""

    def __init__(self, folder: DataFolder):
        self._folder = folder.create()

    def write(
        self,
        run: Run | Mapping[str, Any],
        telemetry: pa.Table,
        kernels: pa.Table | None = None,
        ranks: pa.Table | None = None,
        collocations: pa.Table | None = None,
    ) -> Path:
        """Make a run durable; return the path of the file that holds its row.

        Args:
            run: a `Run`, or its columns by name; absent ones are NULL.
            telemetry: columns of `TELEMETRY_SCHEMA`; `run_id` may be absent.
            kernels: columns of `KERNEL_SCHEMA` without those of the run; None if they were not requested.
            ranks: columns of `RANK_SCHEMA`, likewise; None for a run on one device.
            collocations: columns of `COLLOCATION_SCHEMA`, likewise; None for a run that did not share its device.

        A repeat of a run_id replaces the run, or has no effect once compaction has merged it, so its row never exists
        twice. Raises `ValueError` naming every column that breaks the schema's rules, and `OSError` (full disk), which
        leaves only complete files behind.
        """
        given = run.columns() if isinstance(run, Run) else run
        columns = {"telemetry_rows": telemetry.num_rows, "schema_version": SCHEMA_VERSION, **given}
        given_rows = {"kernels": kernels, "ranks": ranks, "collocations": collocations}
        columns |= {DETAILS[kind].count: rows.num_rows for kind, rows in given_rows.items() if rows is not None}
        run_row = run_table(columns)
        run_id, family = columns["run_id"], columns["family"]
        samples = telemetry_table(run_id, telemetry)
        details = {
            kind: None if rows is None else rows_of_run(kind, columns, rows) for kind, rows in given_rows.items()
        }
        runs = self._folder.partition("runs", family)
        # Also on first attempts: the queue may have been lost, or restored from an older copy.
        if (landed := merged_file_with(self._folder, family, run_id)) is not None:
            return landed
        name = f"{run_id}.parquet"
        # Telemetry and details first, so readers of the run see them.
        write_parquet(self._folder.partition("telemetry", family) / name, samples)
        for kind, own_rows in details.items():
            path = self._folder.partition(kind, family) / name
            if own_rows is not None and own_rows.num_rows:
                write_parquet(path, own_rows)
            else:  # left by an earlier attempt that was killed before its run landed
                path.unlink(missing_ok=True)
        write_parquet(runs / name, run_row)
        return runs / name

    def has_landed(self, family: str, run_id: str) -> bool:
        """Return whether a run is durable, in its own file or a merged one."""
        if (self._folder.partition("runs", family) / f"{run_id}.parquet").exists():
            return True
        return merged_file_with(self._folder, family, run_id) is not None

    def write_batch(self, runs: Sequence[Mapping[str, Any]]) -> Path:
        """Make runs of one family durable in one file, all or none, without telemetry; return its path.

        Does not check whether some have landed before. Raises as `write` does, and then writes nothing.
        """
        rows = [run_table({"telemetry_rows": 0, "schema_version": SCHEMA_VERSION, **run}) for run in runs]
        table = pa.concat_tables(rows).combine_chunks().sort_by("run_id")
        return land_batch(self._folder, "runs", runs[0]["family"], table)

    def write_job(self, job: Mapping[str, Any]) -> Path:
        """Write or replace a job's snapshot; `submitted_at` is a datetime or seconds since the epoch."""
        job = dict(job)
        if isinstance(job.get("submitted_at"), int | float):
            job["submitted_at"] = datetime.datetime.fromtimestamp(job["submitted_at"], datetime.UTC)
        path = self._folder.jobs / f"{check_name('job_id', job.get('job_id'))}.parquet"
        write_parquet(path, _one_row(job, JOB_SCHEMA, "job", []))
        return path


def run_table(run: Mapping[str, Any]) -> pa.Table:
    """Return the run as one row of `RUN_SCHEMA`. Raises `ValueError` listing every broken rule."""
    return _one_row(run, RUN_SCHEMA, "run", run_problems(run))


def run_problems(run: Mapping[str, Any]) -> list[str]:
    """Return the rules that the values of `run` break, each beginning with its column; types are not checked."""
    problems = [f"{name} is required" for name in REQUIRED if run.get(name) is None]
    for name, known in (
        ("status", STATUSES),
        ("source", SOURCES),
        ("oom_kind", OOM_KINDS),
        ("quality", QUALITIES),
    ):
        if run.get(name) is not None and run[name] not in known:
            problems.append(f"{name} must be one of {', '.join(known)}, got {run[name]!r}")
    for name, value in run.items():
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name} must be a finite number or None, got {value!r}")
        elif name in RUN_RATIOS and isinstance(value, int | float) and not 0 <= value <= 1:
            problems.append(f"{name} must be in [0, 1], got {value!r}")
    for name in ("run_id", "family"):
        if run.get(name) is not None:
            try:
                check_name(name, run[name])
            except ValueError as error:
                problems.append(str(error))
    if is_merged_name(f"{run.get('run_id')}.parquet"):
        problems.append(f"run_id must not look like a merged file, got {run['run_id']!r}")
    return problems


def telemetry_table(run_id: str, telemetry: pa.Table) -> pa.Table:
    """Return the samples with every column of `TELEMETRY_SCHEMA`, absent ones NULL. Raises as `run_table`."""
    problems: list[str] = []
    samples = conform(telemetry, "telemetry", TELEMETRY_SCHEMA, {"run_id": run_id}, WORDS, problems)
    if telemetry.num_rows and "t_ms" not in telemetry.column_names:
        problems.append("t_ms is required")
    return _accept(samples, "telemetry", problems)


def rows_of_run(kind: str, run: Mapping[str, Any], rows: pa.Table) -> pa.Table:
    """Return a run's rows of a table of `DETAILS` with every column, ids and the run's columns. Raises `ValueError`."""
    detail = DETAILS[kind]
    if not isinstance(rows, pa.Table):
        raise ValueError(f"{kind} must be a pyarrow.Table, got {type(rows).__name__}")
    run_id = run["run_id"]
    of_run = (detail.row_id, "run_id", *detail.of_run)
    detail_rows = rows.drop_columns([name for name in of_run if name in rows.column_names])
    names = pa.array([f"{run_id}-{detail.letter}{index:05d}" for index in range(detail_rows.num_rows)], pa.string())
    same = {"run_id": run_id, **{name: run.get(name) for name in detail.of_run}}
    return detail_table(kind, detail_rows.append_column(detail.row_id, names), same)


def detail_table(kind: str, rows: pa.Table, same: Mapping[str, Any]) -> pa.Table:
    """Return rows of a table of `DETAILS` with every column; `same` fills absent ones. Raises `ValueError`."""
    detail = DETAILS[kind]
    problems: list[str] = []
    table = conform(rows, kind, detail.schema, same, detail.words, problems)
    if not problems:
        problems += [f"{name} is required" for name in ("run_id", *detail.required) if table.column(name).null_count]
    return _accept(table, kind, problems)


def _accept(table: pa.Table, table_name: str, problems: Sequence[str]) -> pa.Table:
    if problems:
        raise ValueError(f"{table_name} breaks the schema: " + "; ".join(problems))
    return table


def conform(
    table: pa.Table,
    table_name: str,
    schema: pa.Schema,
    same: Mapping[str, Any],
    words: Mapping[str, Sequence[str]],
    problems: list[str],
) -> pa.Table:
    """Return the rows with every column of `schema`, absent ones from `same` or NULL; append broken rules."""
    if not isinstance(table, pa.Table):
        raise ValueError(f"{table_name} must be a pyarrow.Table, got {type(table).__name__}")
    problems += _unknown(table.column_names, schema)
    rows, columns = table.num_rows, []
    for field in schema:
        if field.name not in table.column_names:
            value = same.get(field.name)
            columns.append(pa.nulls(rows, field.type) if value is None else pa.array([value] * rows, field.type))
            continue
        column = table.column(field.name)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                problems.append(f"{field.name}: {error}")
                columns.append(pa.nulls(rows, field.type))
                continue
        columns.append(column)
        if column.null_count == rows:
            continue
        run_id = same.get(field.name) if field.name == "run_id" else None
        if run_id is not None and (column.null_count or pc.any(pc.not_equal(column, run_id)).as_py()):
            problems.append(f"run_id must be {run_id!r} in every row")
        elif field.name in words and not pc.all(pc.is_in(column.drop_null(), pa.array(words[field.name]))).as_py():
            problems.append(f"{field.name} must be one of {', '.join(words[field.name])} or NULL")
        elif pa.types.is_floating(field.type) and not pc.all(pc.is_finite(column)).as_py():
            problems.append(f"{field.name} must be finite or NULL")
        elif table_name == "telemetry" and field.name in TELEMETRY_RATIOS:
            low, high = pc.min_max(column).as_py().values()
            if low < 0 or high > 1:
                problems.append(f"{field.name} must be in [0, 1], got {low!r} to {high!r}")
    return pa.Table.from_arrays(columns, schema=schema)


def _one_row(values: Mapping[str, Any], schema: pa.Schema, table_name: str, problems: list[str]) -> pa.Table:
    problems = problems + _unknown(values, schema)
    arrays = []
    for field in schema:
        try:
            arrays.append(pa.array([values.get(field.name)], field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
            problems.append(f"{field.name} must be {field.type}, got {values[field.name]!r} ({error})")
    if problems:
        raise ValueError(f"{table_name} breaks the schema: " + "; ".join(problems))
    return pa.Table.from_arrays(arrays, schema=schema)


def _unknown(names: Iterable[str], schema: pa.Schema) -> list[str]:
    unknown = [name for name in names if name not in schema.names]
    return [f"unknown column {', '.join(unknown)}; known: {', '.join(schema.names)}"] if unknown else []


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A stale label of one run.

    environment  columns of `warehouse.tables.schema.ENVIRONMENT` in which it is stale
    operators    operator families of the run that moved
    shift        median shift of the canaries that moved: relative, for ratios the difference; `said`: in words
    """

    run_id: str
    label: str
    operators: tuple[str, ...]
    device_name: str
    source: str
    environment: Mapping[str, str | None]
    shift: float | None
    said: str


def write_marks(folder: DataFolder, cycle: str, marks: Sequence[Mark], *, marked_at: datetime.datetime) -> Path:
    """Write the marks of one growth cycle durably, all or none, in place of its earlier ones.

    Equal calls write equal files. Raises `ValueError` if the cycle's name is not a valid file name.
    """
    folder.create()
    ordered = sorted(marks, key=lambda mark: (mark.run_id, mark.label))
    of_all = {"marked_at": marked_at, "cycle": cycle}
    rows = [{**vars(mark), **mark.environment, "operators": ", ".join(mark.operators), **of_all} for mark in ordered]
    path = folder.stale / f"{check_name('cycle', cycle)}.parquet"
    write_parquet(path, pa.Table.from_pylist(rows, schema=STALE_SCHEMA))
    return path


def stale_now(connection: duckdb.DuckDBPyConnection | WarehouseConnection, label: str) -> set[str]:
    """Return the run_ids of the rows whose `label` (a column of `runs`) is stale now.

    The current environment is that of the newest `ok` run on the same device with the same source; other runs may have
    ended before reporting theirs.
    """
    marks = connection.execute(
        f"SELECT run_id, device_name, source, {', '.join(ENVIRONMENT)} FROM stale WHERE label = ?", [label]
    ).fetchall()
    if not marks:
        return set()
    newest = connection.execute(
        f"""SELECT device_name, source, {", ".join(ENVIRONMENT)} FROM runs WHERE status = 'ok'
        QUALIFY row_number() OVER (
            PARTITION BY device_name, source ORDER BY coalesce(finished_at, started_at) DESC NULLS LAST, run_id DESC
        ) = 1"""
    ).fetchall()
    now = {tuple(row) for row in newest}
    return {run_id for run_id, *where in marks if tuple(where) in now}
