"""A data set: measured runs as Parquet files that others can load, without private names; later exports add runs.

Start reading at `DatasetPart`: each family, device and day has a file of runs, one of telemetry, and files of kernels,
ranks and collocations if runs have any. `public_tables` makes the rows: public ids, no names of machines, users and
paths, thinned telemetry. `export`, the body of `warehouse.export`, writes such a folder,
`warehouse.ingest source=dataset` loads one. `warehouse.exchange.dataset_card` has the card.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import getpass
import json
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.cli.settings import Checked, key
from conf.errors import EnvironmentProblem, UsageError, first_line, require_one_of, shown
from conf.files.outputs import folder_problems, parse_json, write_file
from conf.plain_text import sql_text
from warehouse.exchange.dataset_card import card
from warehouse.files.folder import DataFolder
from warehouse.files.writer import conform, detail_table, run_problems
from warehouse.reading.connection import WarehouseConnection, connect
from warehouse.tables.duckdb_access import disk_errors_named, scratch_cursor
from warehouse.tables.schema import DATASET_JOB_PREFIX, DETAILS, METRICS, RUN_SCHEMA, SCHEMA_VERSION, TELEMETRY_SCHEMA

FORMAT = "gpufarm-dataset"
CARD = "README.md"
KINDS = {"runs": RUN_SCHEMA, "telemetry": TELEMETRY_SCHEMA, **{kind: detail.schema for kind, detail in DETAILS.items()}}
ALWAYS_THERE = ("runs", "telemetry")  # every part has a file of these

UNDATED = "undated"  # instead of the day, for runs without any time
_METADATA = b"gpufarm_dataset"
_FILE = re.compile(r"(?P<device>.+)-(?P<day>\d{4}-\d\d-\d\d|undated)-runs\.parquet")
# Columns that are kept even without values.
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
# Telemetry columns that need 64 bits, because a counter grows for years; others are stored as 32-bit floats.
_WHOLE = ("t_ms", "energy_j")
_SPLIT = ("t_ms", "energy_j", "step_time_ms")  # nearly all values are distinct, so a dictionary would only add size
_IS_LOADED = f"coalesce(starts_with(runs.job_id, {sql_text(DATASET_JOB_PREFIX)}), false)"
# Columns of exported runs: ids of run and device in the data folder, the public id, and whether the run came from a
# data set, in which its row was public already.
_EXPORTED = pa.schema(
    [("own_id", pa.string()), ("own_uuid", pa.string()), ("run_id", pa.string()), ("is_loaded", pa.bool_())]
)
_TEXTS = ("error", "telemetry_missing", "quality_reasons", "quality_summary", "allocator_settings")
_ERROR_CHARACTERS = 2000  # the end of an error has its message
# Decimals of telemetry by unit: more than any sensor resolves, and a third of the bytes.
_DECIMALS = {"ratio": 4, "MiB": 2, "MiB/s": 2, "W": 2, "J": 2, "cores": 3, "ms": 4}


@dataclass(frozen=True, order=True)
class DatasetPart:
    """The runs of one family on one device on one day, with their telemetry and details.

    The day is that of their end in UTC, else of their start, else `undated`.
    """

    family: str
    device: str  # device name as a part of a file name
    day: str  # YYYY-MM-DD, or undated

    def path(self, kind: str) -> Path:
        """Return the path of the part's table, one of `KINDS`, relative to the data set's folder."""
        return Path(self.family) / f"{self.device}-{self.day}-{kind}.parquet"

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> DatasetPart:
        """Return the part of a row of `runs`. File names of simulated rows begin with `simulated`."""
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


def to_bytes(part: DatasetPart, kind: str, table: pa.Table) -> bytes:
    """Return the content of a part's file: zstd, without empty columns. Equal rows yield equal bytes."""
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
    """Return the schema with 32-bit floats for readings that need no more digits."""
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

    `kind` is one of `KINDS`; `content` replaces reading the file. Raises `UsageError` naming a file that is not of a
    data set, `EnvironmentProblem` for one that is damaged or of a newer schema version.
    """
    path = root / part.path(kind)
    schema = KINDS[kind]
    if content is None and not os.path.lexists(path):
        return schema.empty_table()
    # A foreign data set may hold any links.
    if content is None and not (path.is_file() and path.resolve().is_relative_to(root.resolve())):
        raise EnvironmentProblem(
            f"{path} is a link that leads out of the data set, or no plain file; nothing is read through it"
        )
    try:
        # From a buffer: given a path, pyarrow would read the partition's name as a column.
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
        raise EnvironmentProblem(f"{path} holds {described_kind} of {family}: it has been moved or renamed")
    problems: list[str] = []
    rows = conform(table, kind, schema, {}, {}, problems)
    if problems:
        raise EnvironmentProblem(f"{path}: {'; '.join(problems)}")
    return rows


def check_details(root: Path, part: DatasetPart, kind: str) -> pa.Table:
    """Return a part's rows of a table of `DETAILS`. Raises `EnvironmentProblem` for rows that break the schema."""
    try:
        return detail_table(kind, read_part(root, part, kind), {})
    except ValueError as error:
        raise EnvironmentProblem(f"{root / part.path(kind)}: {error}") from error


def check_rows(root: Path, part: DatasetPart, runs: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a part's runs. Raises `EnvironmentProblem` naming the first bad row."""
    try:
        rows: list[dict[str, Any]] = runs.to_pylist()
    except (OverflowError, UnicodeDecodeError) as error:  # an impossible date, or invalid UTF-8
        raise EnvironmentProblem(f"{root / part.path('runs')} cannot be read: {error}") from error
    for number, row in enumerate(rows, start=1):
        problems = run_problems(row)
        if row["family"] != part.family:
            problems.append(f"family must be {part.family!r}, got {row['family']!r}")
        if problems:
            raise EnvironmentProblem(f"{root / part.path('runs')}, row {number}: {'; '.join(problems)}")
    return rows


def public_runs(connection: WarehouseConnection, where: str) -> list[dict[str, Any]]:
    """Return rows of `runs` under public ids, without names of machines, users and folders.

    `where` is the query's end after WHERE. Each row also has the further columns of `_EXPORTED`.
    """
    public = {
        "run_id": _public("runs.run_id", _distinct_run_id("runs")),
        "job_id": f"CASE WHEN is_loaded THEN substr(runs.job_id, {len(DATASET_JOB_PREFIX) + 1}) ELSE runs.job_id END",
        "device_uuid": _public("runs.device_uuid", _anonymous_uuid("runs")),
        "group_id": _public("runs.group_id", _distinct_group_id("runs", "runs.device_uuid")),
    }
    columns = ", ".join(f"{public.get(name, f'runs.{name}')} AS {name}" for name in RUN_SCHEMA.names)
    own = f"{_IS_LOADED} AS is_loaded, run_id AS own_id, device_uuid AS own_uuid"
    rows = connection.sql(f"SELECT {own}, {columns} FROM runs WHERE {where}").to_arrow_table().to_pylist()
    return [_without_names(row) for row in rows]


def known_public_ids(connection: WarehouseConnection) -> set[str]:
    """Return the public ids of the folder's runs, both measured here and loaded."""
    public_id = _public("runs.run_id", _distinct_run_id("runs"))
    ids = f"SELECT {_IS_LOADED} AS is_loaded, {public_id} FROM runs WHERE source != 'imported'"
    return {run_id for _, run_id in connection.execute(ids).fetchall()}


def _public(column: str, form: str) -> str:
    """Return SQL of a column in its public form, which rows of loaded data sets have already (`is_loaded`)."""
    return f"CASE WHEN is_loaded THEN {column} ELSE {form} END"


def _distinct_run_id(run: str) -> str:
    """Return SQL of a run's id and 8 hex digits that identify where and when it ran.

    A job's runs have the same ids on every machine and at every release of torch, so a repeat lands once. In a data
    set each measurement needs a different id.
    """
    ended = f"strftime({run}.finished_at, '%Y-%m-%dT%H:%M:%S.%f')"
    where_and_when = f"concat({run}.run_id, chr(10), {run}.device_uuid, chr(10), {ended})"
    return f"{run}.run_id || '-' || left(sha256({where_and_when}), 8)"


def _distinct_group_id(table: str, device_uuid: str) -> str:
    """Return SQL of a group's id, made distinct by its device: two machines may run the same job."""
    return f"{table}.group_id || '-' || left(sha256(concat({table}.group_id, chr(10), {device_uuid})), 8)"


def _anonymous_uuid(table: str) -> str:
    """Return SQL of a device's id that only distinguishes cards."""
    uuid = f"{table}.device_uuid"
    return f"CASE WHEN {table}.source = 'measured' THEN 'gpu-' || left(sha256({uuid}), 12) ELSE {uuid} END"


def _without_names(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row without names of machines, users and folders in its texts."""
    row = {**run, "node": None, "worker": None}
    names = _names(run["node"])
    for name in _TEXTS:
        if row[name] is not None:
            row[name] = scrub(row[name], names)
    if row["config"] is not None:  # a user's model may be named by its file
        row["config"] = scrub(row["config"])
    if row["error"] is not None:
        row["error"] = row["error"][-_ERROR_CHARACTERS:]
    return row


def scrub(text: str, names: Iterable[str] = ()) -> str:
    """Return `text` with folders removed from paths, addresses as ADDRESS, and the given names as NAME."""
    text = re.sub(r"/(?:home|Users)/[\w.@+=~-]+", "/NAME", text)  # also at the end of a path
    text = re.sub(r'File "[^"\n]*/([^"/\n]+)"', r'File "\1"', text)
    text = re.sub(r"(?<!\w)(\w+://)[^\s/\"')\]]+", r"\1ADDRESS", text)
    text = re.sub(r"(?<![\w:/.])~?(?:/[\w.@+=~-]+)*/([\w.@+=~-]+)/?", r"\1", text)
    text = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", "ADDRESS", text)
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "NAME", text)
    return text


@functools.lru_cache
def _names(node: str | None) -> Set[str]:
    """Return the names of the run's machine, of this machine and of the user, except common ones such as `root`."""
    names = {node or "", platform.node()}
    names |= {name.partition(".")[0] for name in names}
    with contextlib.suppress(OSError, KeyError):
        names.add(getpass.getuser())
    return {name for name in names if len(name) > 2} - {"root", "user", "localhost"}


def _public_telemetry(connection: WarehouseConnection, hz: float | None, where: str) -> pa.Table:
    """Return the samples of the runs of `exported`, thinned to `hz` unless that is None."""
    columns = ", ".join(_round(name) for name in TELEMETRY_SCHEMA.names if name not in ("run_id", "t_ms"))
    # Rounded before thinning: a data set that is loaded and exported again stays the same.
    samples = connection.sql(
        f"SELECT exported.run_id, round(t_ms, 1) AS t_ms, {columns} FROM telemetry "
        f"JOIN exported ON telemetry.run_id = own_id WHERE {where} ORDER BY ALL"
    )
    table = samples.to_arrow_table().cast(TELEMETRY_SCHEMA)
    return table if hz is None else thin(table, hz)


def _public_details(connection: WarehouseConnection, kind: str, where: str) -> pa.Table:
    """Return the rows of a table of `DETAILS` of the runs of `exported`; imported ones belong to no run."""
    detail = DETAILS[kind]
    public = {
        "run_id": "exported.run_id",
        # A row's id begins with its run's id.
        detail.row_id: f"exported.run_id || substr({kind}.{detail.row_id}, length(own_id) + 1)",
        "node": "NULL",
        "device_uuid": _public(f"{kind}.device_uuid", _anonymous_uuid(kind)),
        "group_id": _public(f"{kind}.group_id", _distinct_group_id(kind, "own_uuid")),
        "solo_run_id": _public(f"{kind}.solo_run_id", _distinct_run_id("solo")),
    }
    columns = ", ".join(f"{public.get(name, f'{kind}.{name}')} AS {name}" for name in detail.schema.names)
    solo = "LEFT JOIN attempts AS solo ON solo.run_id = solo_run_id" if "solo_run_id" in detail.schema.names else ""
    rows = connection.sql(
        f"SELECT {columns} FROM {kind} JOIN exported ON {kind}.run_id = own_id {solo} WHERE {where} "
        f"ORDER BY {detail.row_id}"
    )
    table = rows.to_arrow_table().cast(detail.schema)
    if kind != "collocations":
        return table
    members = table.to_pylist()
    for row in members:
        for name in ("config", "name", "model"):
            row[name] = None if row[name] is None else scrub(row[name])
    return pa.Table.from_pylist(members, schema=detail.schema)


def public_tables(
    connection: WarehouseConnection,
    runs: Sequence[dict[str, Any]],
    hz: float | None,
    where: str = "true",
    kernels: bool = True,
) -> dict[str, pa.Table]:
    """Return some runs with their telemetry and details, by table; `runs` comes last, to be written last.

    Args:
        connection: Connection to the runs' warehouse.
        runs: Rows of `public_runs`.
        hz: Readings a second of each sensor to which telemetry is thinned; None keeps all.
        where: Limits the rows to read: a condition on `{0}`, one of the tables, that holds for all of these runs.
        kernels: False leaves kernels out, as if they had not been requested.
    """
    connection.register("exported", pa.Table.from_pylist(runs, schema=_EXPORTED))
    tables = {"telemetry": _public_telemetry(connection, hz, where.format("telemetry"))}
    for kind in DETAILS:
        of_runs = where.format(kind) if kernels or kind != "kernels" else "false"
        tables[kind] = _public_details(connection, kind, of_runs)
    connection.unregister("exported")
    rows_of = {kind: Counter(table.column("run_id").to_pylist()) for kind, table in tables.items()}
    for run in runs:
        run["telemetry_rows"] = rows_of["telemetry"][run["run_id"]]
        if not kernels:
            run["kernel_rows"] = None
        for kind, detail in DETAILS.items():
            if run[detail.count] is not None:  # NULL: not requested
                run[detail.count] = rows_of[kind][run["run_id"]]
    return {**tables, "runs": pa.Table.from_pylist(runs, schema=RUN_SCHEMA)}


def _round(name: str) -> str:
    digits = _DECIMALS.get(METRICS[name][0]) if name in METRICS else None
    return f"telemetry.{name}" if digits is None else f"round(telemetry.{name}, {digits}) AS {name}"


def thin(samples: pa.Table, hz: float) -> pa.Table:
    """Keep at most `hz` readings a second of each sensor of each run or rank, and the first and last of each window.

    `samples` is sorted by run and time. Of the samples in one bin of 1/hz seconds, the last one stays; new readings
    are preferred to repeated ones, and those to unavailable ones.
    """
    sensor = "run_id, sensor, rank"  # each rank has separate sensors
    with scratch_cursor() as cursor:
        cursor.register("samples", samples)
        kept = cursor.sql(
            f"""SELECT place FROM (SELECT *, row_number() OVER () - 1 AS place FROM samples)
            QUALIFY row_number() OVER (
                PARTITION BY {sensor}, floor(t_ms * {hz!r} / 1000)
                ORDER BY CASE quality WHEN 'repeated' THEN 1 WHEN 'unavailable' THEN 2 ELSE 0 END, place DESC
            ) = 1 OR (phase = 'window' AND (
                place = min(place) OVER (PARTITION BY {sensor}, phase)
                OR place = max(place) OVER (PARTITION BY {sensor}, phase)
            )) ORDER BY place"""
        ).to_arrow_table()
    return samples.take(kept.column("place"))


# ---- the export

# Runs that lost their worker have no device, and are not exported.
SOURCES = {
    "measured": "source = 'measured' AND device_uuid IS NOT NULL",
    "cpu": "source = 'measured' AND device_uuid IS NULL AND device_name IS NOT NULL",
    "simulated": "source = 'simulated' AND device_name IS NOT NULL",
}


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Checked):
    """The rows to export, and the folder for them. Raises `UsageError` that names every bad key together.

      python -m warehouse.export data=data/collect
      python -m warehouse.export out=/srv/set data=/srv/farm source=simulated families=[cnn,gpt] max_mb=100

    Runs that the folder already has stay; names of machines, users and paths are removed. README.md in the folder is
    the card: how the runs were made, and their numbers by kind. `warehouse.ingest source=dataset` loads it.
    """

    out: str | None = key(None, "the data set's folder; default datasets/ of this checkout", "new path")
    data: str | None = key(None, "data folder to export from; default $GPUFARM_DATA, else ./data", "new path")
    source: str = key("measured", "cpu: measured on CPUs", choices=tuple(SOURCES))
    families: tuple[str, ...] | None = key(
        None, "as in [cnn,gpt]; default all that have such runs", "text | list of text | null"
    )
    hz: float = key(10, "telemetry is thinned to this many readings a second of each sensor", "number > 0")
    kernels: bool = key(True, "export the kernels of runs that were profiled; false: leave them out")
    max_mb: float = key(20, "refuse a data set that would be larger, in 10^6 bytes", "number > 0")

    def problems(self) -> Iterator[str]:
        if self.out is not None:
            if Path(self.out).expanduser().is_file():
                yield f"out={self.out} is a file, not a folder"
            yield from folder_problems(self.out)
        elif not repository_folder().parent.joinpath("pyproject.toml").is_file():
            yield "out=... is missing: this is not a checkout with a datasets/ folder of its own"

    @property
    def root(self) -> Path:
        return repository_folder() if self.out is None else Path(self.out).expanduser().absolute()


@dataclass
class ExportReport:
    """The result of an export. Sizes in bytes."""

    root: Path
    added: Counter[DatasetPart] = field(default_factory=Counter)  # runs that the data set lacked
    there: int = 0  # runs that it had already
    without_device: int = 0
    total_bytes: int = 0

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        text_lines = [f"{part.path('runs')}: {count} runs added" for part, count in sorted(self.added.items())]
        if self.without_device:
            text_lines.append(f"{self.without_device} runs lost their worker, have no device and are left out")
        text_lines.append(
            f"{self.root}: {self.added.total()} runs added, {self.there} were there already; "
            f"{self.total_bytes / 1e6:.1f} MB in all"
        )
        return text_lines


def export(settings: ExportSettings) -> ExportReport:
    """Add the runs of the data folder that the data set lacks, and rewrite its card.

    Equal runs give equal bytes. Raises `UsageError`, and writes nothing, if the result would be larger than `max_mb`
    or the data folder has no such runs.
    """
    report = ExportReport(settings.root)
    with (
        disk_errors_named(),
        _lock(report.root),
        connect(DataFolder.resolve(settings.data)) as connection,
    ):
        runs = _runs(connection, settings, report)
        contents: dict[Path, bytes] = {}
        for part, rows in sorted(runs.items()):
            known = set(read_part(report.root, part, "runs").column("run_id").to_pylist())
            new = [row for row in rows if row["run_id"] not in known]
            report.there += len(rows) - len(new)
            if not new:
                continue
            report.added[part] = len(new)
            tables = public_tables(connection, new, settings.hz, kernels=settings.kernels)
            # Runs last, so readers of the runs see their samples, kernels and ranks.
            for kind, added in tables.items():
                before = read_part(report.root, part, kind)
                # Without rows of an export that was killed before writing its runs.
                of_runs = before.filter(pc.is_in(before.column("run_id"), pa.array(sorted(known), pa.string())))
                table = pa.concat_tables([of_runs, added])
                if table.num_rows or kind in ALWAYS_THERE or (report.root / part.path(kind)).exists():
                    contents[part.path(kind)] = to_bytes(part, kind, _sort(table))
    _write(report, contents, settings.max_mb)
    return report


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    """Lock the folder, or its nearest existing parent: two exports at once would mix their runs and telemetry.

    No lock file is made, because it has no place in a data set.
    """
    descriptor = os.open(next(path for path in (root, *root.parents) if path.is_dir()), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise EnvironmentProblem(f"another export is at work on out={root}; run this one when it is done") from None
    finally:
        os.close(descriptor)


def _runs(
    connection: WarehouseConnection, settings: ExportSettings, report: ExportReport
) -> dict[DatasetPart, list[dict[str, Any]]]:
    """Return part -> public rows of its runs."""
    chosen = SOURCES[settings.source]
    if settings.families is not None:
        families = {
            name for (name,) in connection.execute(f"SELECT DISTINCT family FROM runs WHERE {chosen}").fetchall()
        }
        for name in settings.families:
            require_one_of(f"family with {settings.source} runs", name, families)
    lost = f"source = '{'simulated' if settings.source == 'simulated' else 'measured'}' AND device_name IS NULL"
    ((report.without_device,),) = connection.execute(f"SELECT count(*) FROM runs WHERE {lost}").fetchall()
    runs: dict[DatasetPart, list[dict[str, Any]]] = defaultdict(list)
    for run in public_runs(connection, f"{chosen} ORDER BY runs.run_id"):
        if settings.families is None or run["family"] in settings.families:
            runs[DatasetPart.of(run)].append(run)
    if not runs:
        raise UsageError(f"data holds no runs for source={settings.source}; known: {', '.join(SOURCES)}")
    return runs


def _sort(table: pa.Table) -> pa.Table:
    keys = ("run_id", "t_ms", "sensor", *(detail.row_id for detail in DETAILS.values()))
    return table.sort_by([(name, "ascending") for name in keys if name in table.column_names])


def _write(report: ExportReport, contents: dict[Path, bytes], max_mb: float) -> None:
    root = report.root
    parts = sorted({*find_parts(root), *report.added})
    tables = {kind: [read_part(root, part, kind, contents.get(part.path(kind))) for part in parts] for kind in KINDS}
    contents = {**contents, Path(CARD): card(tables).encode()}
    sizes = {path.relative_to(root): path.stat().st_size for path in root.rglob("*.parquet")}
    sizes |= {path: len(content) for path, content in contents.items()}
    report.total_bytes = sum(sizes.values())
    if report.total_bytes > max_mb * 1e6:
        raise UsageError(
            f"the data set would take {report.total_bytes / 1e6:.2f} MB, more than max_mb={max_mb:g}, and nothing is "
            "written. Choose families=, thin the telemetry with hz=, leave kernels out with kernels=false, or raise "
            "max_mb"
        )
    paths = [root / name for name in contents]
    new_files = [path for path in paths if not path.exists()]
    new_folders = {folder for path in paths for folder in path.parents if not folder.exists()}
    try:
        for path, content in zip(paths, contents.values(), strict=True):
            if not path.exists() or path.read_bytes() != content:
                write_file(path, content)
    except OSError:  # the disk is full: leave no new files; replaced files are complete, old or new
        for path in new_files:
            path.unlink(missing_ok=True)
        for folder in sorted(new_folders, reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
