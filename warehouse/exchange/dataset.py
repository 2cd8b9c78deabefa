"""A data set: measured runs as Parquet files for others to load, for each family, device and day a file of
runs, one of telemetry, and one of kernels, ranks and collocations where some run has any.

Start reading at `DatasetPart`. `warehouse.export` writes such a folder, `warehouse.ingest source=dataset` loads one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem, UsageError, shown
from conf.files.json_file import parse_json
from conf.plain_text import first_line
from warehouse.files.writer import detail_table, run_problems
from warehouse.tables.details import DETAILS
from warehouse.tables.schema import DATASET_JOB_PREFIX, RUN_SCHEMA, SCHEMA_VERSION, TELEMETRY_SCHEMA

FORMAT = "gpufarm-dataset"
CARD = "README.md"
KINDS = {"runs": RUN_SCHEMA, "telemetry": TELEMETRY_SCHEMA, **{kind: one.schema for kind, one in DETAILS.items()}}
ALWAYS_THERE = ("runs", "telemetry")  # of these every part has a file

UNDATED = "undated"  # instead of the day, for runs without any time
_METADATA = b"gpufarm_dataset"
_FILE = re.compile(r"(?P<device>.+)-(?P<day>\d{4}-\d\d-\d\d|undated)-runs\.parquet")
# Columns that are there without a value.
_ALWAYS = (
    "run_id",
    "family",
    "status",
    "source",
    "t_ms",
    "sensor",
    "phase",
    "kernel_row",
    "operator",
    "duration_us",
    "rank_row",
    "member_row",
    "group_id",
    "member",
)
# A telemetry reading needs no more digits than a float of 32 bits has; a counter that grows for years does.
_WHOLE = ("t_ms", "energy_j")
_SPLIT = ("t_ms", "energy_j", "step_time_ms")  # hardly two values are equal: a dictionary would only cost


@dataclass(frozen=True, order=True)
class DatasetPart:
    """The runs of one family on one device on one day, with their telemetry and details.

    The day is of their end, in UTC; of their start where the end is not known; `undated` where neither is.
    """

    family: str
    device: str  # device name as a part of a file name
    day: str  # YYYY-MM-DD, or undated

    def path(self, kind: str) -> Path:
        """Return the path of the part's table, one of `KINDS`, relative to the data set's folder."""
        return Path(self.family) / f"{self.device}-{self.day}-{kind}.parquet"

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> DatasetPart:
        """Return the part of a row of `runs`. File names of rows that were not measured on the device say so."""
        device = re.sub(r"[^A-Za-z0-9.]+", "-", run["device_name"]).strip("-.")
        if run["source"] == "simulated":
            device = f"simulated-{device}"
        time = run["finished_at"] or run["started_at"]
        return cls(run["family"], device, UNDATED if time is None else f"{time:%Y-%m-%d}")


def repository_folder() -> Path:
    """Return the folder `datasets/` of this checkout, which an installed package may lack."""
    return Path(__file__).resolve().parents[2] / "datasets"


def find_parts(root: Path) -> list[DatasetPart]:
    """Return the parts of the data set at `root`, sorted; an empty list if the folder holds none."""
    parts = []
    for path in root.glob("*/*-runs.parquet"):
        name = _FILE.fullmatch(path.name)
        if name is not None and not path.parent.name.startswith("."):
            parts.append(DatasetPart(path.parent.name, name["device"], name["day"]))
    return sorted(parts)


def lies_in(root: Path, path: Path) -> bool:
    """Return whether the path leads to a plain file below `root`; a data set of others may hold any links."""
    return path.is_file() and path.resolve().is_relative_to(root.resolve())


def public_id(run_id: str, device_uuid: str | None, finished_at: datetime.datetime | None) -> str:
    """Return a run's id outside its data folder: its id and 8 hex digits of where and when it ran.

    A job's runs have the same ids on every machine and at every release of torch, so that a repeat lands once; in a
    data set each is a measurement of its own.
    """
    ended = "" if finished_at is None else finished_at.strftime("%Y-%m-%dT%H:%M:%S.%f")
    digest = hashlib.sha256(f"{run_id}\n{device_uuid or ''}\n{ended}".encode()).hexdigest()
    return f"{run_id}-{digest[:8]}"


def is_loaded(job_id: str | None) -> bool:
    """Return whether rows of this job came from a data set, and so have their public id already."""
    return job_id is not None and job_id.startswith(DATASET_JOB_PREFIX)


def to_bytes(part: DatasetPart, kind: str, table: pa.Table) -> bytes:
    """Return the content of a part's file: zstd, without empty columns. Equal rows give equal bytes."""
    columns = [name for name in table.column_names if name in _ALWAYS or table.column(name).null_count < table.num_rows]
    table = table.select(columns).combine_chunks()
    if kind == "telemetry":
        table = table.cast(narrow(table.schema))
    described = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "family": part.family,
        "device": part.device,
        "day": part.day,
    }
    table = table.replace_schema_metadata({_METADATA: json.dumps(described, sort_keys=True)})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, **writing(kind, table.schema))
    return bytes(buffer.getvalue())


def narrow(telemetry: pa.Schema) -> pa.Schema:
    """Return the schema with 32-bit floats where a reading needs no more digits."""
    return pa.schema(
        [
            field.with_type(pa.float32()) if pa.types.is_floating(field.type) and field.name not in _WHOLE else field
            for field in telemetry
        ]
    )


def writing(kind: str, schema: pa.Schema) -> dict[str, Any]:
    """Return pyarrow's options for writing a table, chosen for small files rather than speed."""
    split = [name for name in _SPLIT if kind == "telemetry" and name in schema.names]
    return {
        "compression": "zstd",
        "compression_level": 12,
        "use_dictionary": [name for name in schema.names if name not in split],
        "use_byte_stream_split": split,
    }


def read_part(root: Path, part: DatasetPart, kind: str, content: bytes | None = None) -> pa.Table:
    """Read one of a part's tables with every column of this schema version; no rows if there is no file.

    `kind` is one of `KINDS`; `content`, where given, is the file's content. Raises `UsageError`
    naming a file that is damaged, not of a data set, or of a newer schema version.
    """
    path = root / part.path(kind)
    schema = KINDS[kind]
    if content is None and not os.path.lexists(path):
        return schema.empty_table()
    if content is None and not lies_in(root, path):
        raise EnvironmentProblem(
            f"{path} is a link that leads out of the data set, or no plain file; nothing is read through it"
        )
    try:
        # Without a buffer, pyarrow would read the partition's name as a column.
        table = pq.ParquetFile(pa.BufferReader(path.read_bytes() if content is None else content)).read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(f"{path} cannot be read: {first_line(error)}") from error
    try:
        described = parse_json((table.schema.metadata or {}).get(_METADATA, b""))
        version, described_kind, family = described["schema_version"], described.get("kind"), described.get("family")
        if type(version) is not int:
            raise ValueError(f"its schema version is {shown(version)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not of a data set that `python -m warehouse.export` wrote") from error
    if version > SCHEMA_VERSION:
        raise EnvironmentProblem(
            f"{path} has schema version {version}, this code knows up to {SCHEMA_VERSION}; update the code"
        )
    if described_kind != kind or family != part.family:
        content_kind = f"{described_kind} of {family}"
        raise EnvironmentProblem(f"{path} holds {content_kind}: it has been moved or renamed")
    unknown = [name for name in table.column_names if name not in schema.names]
    if unknown:
        raise EnvironmentProblem(f"{path}: unknown column {', '.join(unknown)}")
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            columns.append(table.column(field.name).cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise EnvironmentProblem(f"{path}: {field.name}: {error}") from error
    return pa.Table.from_arrays(columns, schema=schema)


def checked_details(root: Path, part: DatasetPart, kind: str) -> pa.Table:
    """Return a part's rows of a table of `DETAILS`.

    Raises `EnvironmentProblem` for rows that break the schema or name no run of theirs.
    """
    rows, row_id = read_part(root, part, kind), DETAILS[kind].row_id
    try:
        rows = detail_table(kind, rows, {})
    except ValueError as error:
        raise EnvironmentProblem(f"{root / part.path(kind)}: {error}") from error
    ids = zip(rows.column("run_id").to_pylist(), rows.column(row_id).to_pylist(), strict=True)
    for number, (run_id, name) in enumerate(ids, start=1):
        if not name.startswith(run_id):
            problem = f"{row_id} must begin with the run's id {run_id!r}, got {name!r}"
            raise EnvironmentProblem(f"{root / part.path(kind)}, row {number}: {problem}")
    return rows


def checked_rows(root: Path, part: DatasetPart, runs: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a part's runs. Raises `EnvironmentProblem` naming the first bad row."""
    try:
        rows: list[dict[str, Any]] = runs.to_pylist()
    except (OverflowError, UnicodeDecodeError) as error:  # a date beyond all years, text that is none
        raise EnvironmentProblem(f"{root / part.path('runs')} cannot be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        problems = run_problems(row)
        if row["family"] != part.family:
            problems.append(f"family must be {part.family!r}, got {row['family']!r}")
        if problems:
            raise EnvironmentProblem(f"{root / part.path('runs')}, row {number}: {'; '.join(problems)}")
    return rows
