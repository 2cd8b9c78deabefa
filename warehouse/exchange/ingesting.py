"""Imports third-party measurements and data sets as rows of `runs`, `kernels` and `collocations`.

Start reading at `ingest`, the body of `warehouse.ingest`. All files are read before anything is written; each file's
new rows then land together, so a kill leaves complete files, and a repeat adds the missing ones. A data set
(source=dataset) also has telemetry.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from conf.cli.settings import Checked, data_key, key
from conf.errors import CommandError, EnvironmentProblem, UsageError
from warehouse.exchange.dataset import (
    DatasetPart,
    check_details,
    check_rows,
    find_parts,
    known_public_ids,
    read_part,
    repository_folder,
)
from warehouse.exchange.imported_rows import (
    DOUBT,
    UNKNOWN_FAMILY,
    CsvMapping,
    ImportedFile,
    ImportedRow,
    NotOfThisSource,
    read_mapping,
    read_table,
    run_ids,
)
from warehouse.exchange.published import read_published_runs
from warehouse.exchange.published_tables import (
    KERNEL_TABLES,
    NEUSIGHT,
    NO_SPEED,
    TABLES,
    group_members,
    read_kernel_table,
    read_kernel_times,
)
from warehouse.files.counting import land_batch
from warehouse.files.folder import DataFolder
from warehouse.files.plain_file import locked
from warehouse.files.writer import RunWriter, detail_table
from warehouse.reading.connection import WarehouseConnection, connect
from warehouse.tables.schema import DATASET_JOB_PREFIX, DETAILS

DATASET, CSV = "dataset", "csv"
# Takes a file and the GPU model that was measured (replaces the file's); raises `NotOfThisSource` for a file to leave
# out.
Reader = Callable[[Path, str | None], ImportedFile]
READERS: Mapping[str, Reader] = {
    **{source: partial(read_published_runs, source=source) for source in ("gpumemnet", "timm")},
    **{source: partial(read_table, source=source, table=table) for source, table in TABLES.items()},
    NEUSIGHT: read_kernel_times,
    **{source: partial(read_kernel_table, source=source) for source in KERNEL_TABLES},
}
SOURCES = (DATASET, *READERS, CSV)

Progress = Callable[[str, int, int], None]  # (activity, files done, all files)


@dataclass(frozen=True, kw_only=True)
class IngestSettings(Checked):
    r"""The source to read. Raises `UsageError` for an unknown source, and for keys of another source.

    source=dataset loads the runs that came with the project, with their telemetry and kernels; they stay
    `measured`.

      python -m warehouse.ingest source=dataset
      python -m warehouse.ingest source=gpumemnet path=GPUMemNet/Datasets
      python -m warehouse.ingest source=timm path=timm_a100.csv data=/srv/farm
      python -m warehouse.ingest source=timm_benchmark path=timm_train_step_time.csv
      python -m warehouse.ingest source=csv path=mine.csv family=timm device_name=NVIDIA-L4 \
        columns='{peak_memory_mib: mem, batch_size: bs, config.model: net}' constants='{optimizer: sgd}'

    A folder is searched recursively; files of other kinds are listed and left out. Impossible rows land as
    `invalid`, doubtful ones with error_type = 'doubt', and those that no trial config describes with
    error_type = 'untraceable'.
    """

    source: str = key(
        help="dataset (what warehouse.export wrote), gpumemnet (GPUMemNet's CSV files), timm (model, module, "
        "batch_size, max_gpu_memory_mib), neusight, sailor, liger and allreduce (times of operators, layers and "
        "all-reduces, which land in `kernels`), csv, or a published table: " + ", ".join(TABLES),
        kind="text",
        choices=tuple(SOURCES),
    )
    path: str | None = key(
        None, "a file, or a folder; for source=dataset the default is datasets/ of this checkout", "path"
    )
    data: str | None = data_key()
    device_name: str | None = key(
        None,
        "GPU model that was measured; default: the file's, or A100-SXM4-40GB where it names none (not for source=csv)",
    )
    family: str | None = key(None, "source=csv: the family of the rows' configurations")
    columns: str | None = key(
        None,
        "source=csv: '{peak_memory_mib: COLUMN, config.FIELD: COLUMN, ...}', columns of `runs` and config fields",
        "any text",
    )
    constants: str | None = key(None, "source=csv: the same keys with one value for every row", "any text")

    def problems(self) -> Iterator[str]:
        if self.path is None and self.source != DATASET:
            yield "missing path=... (a file, or a folder)"
        if self.source != CSV:
            keys = ("family", "columns", "constants", *(("device_name",) if self.source == DATASET else ()))
            foreign_keys = [key for key in keys if getattr(self, key) is not None]
            if foreign_keys:
                yield f"{', '.join(foreign_keys)}: for source=csv only; source={self.source} knows its columns"
        elif self.family is None:
            yield "family=... is missing: source=csv needs the family that its rows are configurations of"

    def mapping(self) -> CsvMapping:
        """Return the checked mapping of source=csv."""
        assert self.family is not None
        constants = read_mapping("constants", self.constants)
        if self.device_name is not None:
            constants["device_name"] = self.device_name
        return CsvMapping(family=self.family, columns=read_mapping("columns", self.columns), constants=constants)


@dataclass
class FileReport:
    """Counts of one file's rows. `invalid` and `doubts`: reason -> places in the file, 1 for the first row."""

    path: Path
    rows: int = 0
    new: int = 0
    left_out: int = 0  # invalid rows of a table that keeps none
    name: str = ""  # that the report shows
    statuses: Counter[str] = field(default_factory=Counter)
    invalid: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    doubts: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, path: Path, rows: Sequence[ImportedRow], new: int, name: str = "", left_out: int = 0) -> FileReport:
        """Return the report of rows; `new` of them have landed."""
        report = cls(path, len(rows), new, left_out, name or path.name)
        for place, columns in rows:
            status, error = columns.get("status", "ok"), columns.get("error")
            report.statuses[status] += 1
            doubt = error if columns.get("error_type") == DOUBT else columns.get("doubt")
            if status == "invalid":
                report.invalid[error or NO_SPEED].append(place)
            elif doubt is not None:
                report.doubts[doubt].append(place)
        return report

    @property
    def already_there(self) -> int:
        return self.rows - self.new - self.left_out


@dataclass
class IngestReport:
    """Reports of the files that were read, and the reason for each file that was not."""

    files: list[FileReport] = field(default_factory=list)
    left: dict[Path, str] = field(default_factory=dict)


def ingest(settings: IngestSettings, progress: Progress | None = None) -> IngestReport:
    """Land the rows of the files at `settings.path` that the data folder lacks.

    Raises `UsageError` if the path does not exist or holds no file of this source, the mapping does not fit, the data
    folder cannot be written, or another ingest is running on it.
    """
    progress = progress or (lambda label, completed, total: None)
    report = IngestReport()
    if settings.source == DATASET:
        return _ingest_dataset(settings, report, progress)
    # Among files with the same measurements, the one with the most measured columns lands first.
    files = sorted(_read(settings, report, progress), key=lambda file: -file.measured_columns)
    if not files:
        left = "".join(f"; {path.name}: {why}" for path, why in report.left.items())
        raise UsageError(f"path={settings.path} holds no file of source={settings.source}{left}")
    folder = DataFolder.resolve(settings.data).create()
    with _lock(folder), connect(folder) as connection:
        known = _known_ids(connection, files[0].kind)
        for completed, file in enumerate(files):
            progress("landing", completed, len(files))
            if file.rows or not file.pairs:
                land = _land_runs if file.kind == "runs" else partial(_land_details, kind=file.kind)
                new = land(folder, settings.source, file.rows, known)
                rows = (*file.rows, *file.left_out)
                report.files.append(FileReport.of(file.path, rows, new, left_out=len(file.left_out)))
        report.files += _land_pairs(folder, connection, settings, [file for file in files if file.pairs])
        progress("landing", len(files), len(files))
    return report


def _read(settings: IngestSettings, report: IngestReport, progress: Progress) -> Iterator[ImportedFile]:
    read = settings.mapping().read if settings.source == CSV else READERS[settings.source]
    root, paths = _paths(settings, ".parquet" if settings.source == NEUSIGHT else ".csv")
    for completed, path in enumerate(paths):
        progress("reading", completed, len(paths))
        try:
            yield read(path, settings.device_name)
        except NotOfThisSource as error:
            report.left[path] = str(error)
        except CommandError as error:
            if root.is_file():
                raise
            report.left[path] = str(error).removeprefix(f"path={path}").lstrip(": ")


def _known_ids(connection: WarehouseConnection, kind: str) -> set[str]:
    """Return the ids of the imported rows of a table."""
    column = "run_id" if kind == "runs" else DETAILS[kind].row_id
    ids = connection.execute(f"SELECT {column} FROM {kind} WHERE source = 'imported'").fetchall()
    return {row_id for (row_id,) in ids}


def _land_runs(folder: DataFolder, _source: str, rows: Sequence[ImportedRow], known: set[str]) -> int:
    """Land the runs that the folder lacks; return their number."""
    new: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _, columns in rows:
        if columns["run_id"] not in known:
            known.add(columns["run_id"])
            new[columns["family"]].append(columns)
    writer = RunWriter(folder)
    for family in sorted(new):
        writer.write_batch(new[family])
    return sum(map(len, new.values()))


def _land_details(folder: DataFolder, source: str, rows: Sequence[ImportedRow], known: set[str], *, kind: str) -> int:
    """Land the rows of a table of `DETAILS` that the folder lacks, in one batch; return their number."""
    detail = DETAILS[kind]
    new = {columns[detail.row_id]: columns for _, columns in rows if columns[detail.row_id] not in known}
    known |= new.keys()
    if new:
        (batch,) = run_ids(source, ["\n".join(new)])
        fields = [field for field in detail.schema if field.name != "run_id"]
        table = pa.Table.from_pylist(list(new.values()), schema=pa.schema(fields))
        land_batch(folder, kind, UNKNOWN_FAMILY, detail_table(kind, table, {"run_id": batch}))
    return len(new)


def _land_pairs(
    folder: DataFolder, connection: WarehouseConnection, settings: IngestSettings, files: Sequence[ImportedFile]
) -> Iterator[FileReport]:
    """Land the files' pairs in `collocations`, once the runs have landed.

    Raises `UsageError` for pairs whose jobs all lack solo figures.
    """
    if not files:
        return
    alone = connection.sql(
        "SELECT run_id, status, origin, peak_memory_mib, gpu_util, step_time_ms FROM runs "
        f"WHERE source = 'imported' AND job_id = 'import-{settings.source}' AND origin IS NOT NULL ORDER BY run_id"
    ).to_arrow_table()
    known = _known_ids(connection, "collocations")
    for file in files:
        members = group_members(settings.source, file.pairs, alone.to_pylist(), settings.device_name)
        if not any(columns.get("solo_run_id") for _, columns in members):
            raise UsageError(
                f"path={file.path}: figures of these jobs alone are in no file of the path, nor in data={folder.root}; "
                f"ingest the file of jobs alone first, or name the folder with both"
            )
        new = _land_details(folder, settings.source, members, known, kind="collocations")
        yield FileReport.of(file.path, members, new, name=f"{file.path.name}: members of pairs")


def _paths(settings: IngestSettings, suffix: str) -> tuple[Path, list[Path]]:
    """Return the given path, and the files to read: itself, or those with `suffix` below it."""
    assert settings.path is not None
    root = Path(settings.path).expanduser()
    if root.is_file():
        return root, [root]
    if not root.is_dir():
        raise UsageError(f"path={settings.path}: there is no such file or folder")
    return root, sorted(path for path in root.rglob("*") if path.suffix.lower() == suffix and path.is_file())


def _ingest_dataset(settings: IngestSettings, report: IngestReport, progress: Progress) -> IngestReport:
    root = repository_folder() if settings.path is None else Path(settings.path).expanduser()
    if not root.is_dir():
        why = "no such folder" if settings.path is not None else "this is not a checkout with datasets/: give path="
        raise UsageError(f"path={root}: {why}")
    parts = find_parts(root)
    if not parts:
        raise UsageError(f"path={root} holds no runs yet: no GPU has measured anything for it so far")
    read = []
    for completed, part in enumerate(parts):
        progress("reading", completed, len(parts))
        runs = read_part(root, part, "runs")
        details = {kind: check_details(root, part, kind) for kind in DETAILS}
        samples = {"telemetry": read_part(root, part, "telemetry"), **details}
        read.append((part, runs, check_rows(root, part, runs), samples))
    folder = DataFolder.resolve(settings.data).create()
    with _lock(folder), connect(folder) as connection:
        known = known_public_ids(connection)
        for completed, (part, runs, rows, samples) in enumerate(read):
            progress("landing", completed, len(parts))
            file = FileReport(root / part.path("runs"), len(rows), name=str(part.path("runs")))
            file.statuses.update(row["status"] for row in rows)
            new = pa.array([row["run_id"] not in known for row in rows], pa.bool_())
            known |= {row["run_id"] for row in rows}
            file.new = _land_part(folder, connection, part, runs.filter(new), samples)
            report.files.append(file)
        progress("landing", len(parts), len(parts))
    return report


def _land_part(
    folder: DataFolder,
    connection: WarehouseConnection,
    part: DatasetPart,
    runs: pa.Table,
    samples: Mapping[str, pa.Table],
) -> int:
    """Land the telemetry, kernels and ranks, then the runs, each in one batch; return how many runs landed.

    A kill before the runs leaves rows without runs, which the next ingest finds."""
    if not runs.num_rows:
        return 0
    for kind, table in samples.items():
        landed = connection.execute(f"SELECT DISTINCT run_id FROM {kind} WHERE family = ?", [part.family]).fetchall()
        wanted = set(runs.column("run_id").to_pylist()) - {run_id for (run_id,) in landed}
        rows = table.filter(pc.is_in(table.column("run_id"), pa.array(sorted(wanted), pa.string())))
        if rows.num_rows:
            land_batch(folder, kind, part.family, rows)
    column = runs.schema.get_field_index("job_id")
    jobs = pc.binary_join_element_wise(DATASET_JOB_PREFIX, runs.column("job_id"), "")
    land_batch(folder, "runs", part.family, runs.set_column(column, "job_id", jobs))
    return int(runs.num_rows)


def _lock(folder: DataFolder) -> contextlib.AbstractContextManager[object]:
    """Hold the folder's ingest lock: two ingests in parallel would land rows twice. The kernel drops it at exit."""
    problem = f"another ingest is at work on data={folder.root}; run this one when it is done"
    return locked(folder.ingest_lock, lambda: EnvironmentProblem(problem))
