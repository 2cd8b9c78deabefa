"""`python -m warehouse.ingest source=gpumemnet path=...`: other people's measurements, as rows.

They land in `runs`, `kernels` and `collocations`.

Start reading at `ingest`. All files are read before anything is written; each file's new rows then land at once, so a
kill leaves whole files' rows, and a repeat adds what is missing. A data set (source=dataset) brings its telemetry too.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from conf.bars import terminal_bar
from conf.cli import command
from conf.errors import EnvironmentProblem, UsageError
from conf.settings import Checked, data_key, key
from warehouse import neusight, published_links
from warehouse.connection import connect
from warehouse.csv_columns import CsvMapping, read_mapping
from warehouse.dataset import (
    JOB_PREFIX,
    DatasetPart,
    checked_details,
    checked_rows,
    find_parts,
    is_loaded,
    lies_in,
    public_id,
    read_part,
    repository_folder,
)
from warehouse.details import DETAILS
from warehouse.disk_errors import disk_errors_named
from warehouse.folder import DataFolder
from warehouse.imported_rows import DOUBT, UNKNOWN_FAMILY, ImportedFile, published_file, run_ids
from warehouse.ingest_groups import land_groups
from warehouse.lock_file import open_lock
from warehouse.merged import land_batch
from warehouse.published import known_headers, read_recognised
from warehouse.published_groups import Member
from warehouse.published_layers import SOURCES as LAYER_SOURCES
from warehouse.published_layers import layer_columns, read_layer_times
from warehouse.published_tables import TABLES, read_table, table_columns
from warehouse.writer import RunWriter

PUBLISHED = ("gpumemnet", "timm")
DATASET = "dataset"
# Source -> suffix of its files, their columns, and their reader: of rows that land in `kernels`.
_OF_KERNELS: Mapping[str, tuple[str, str, Callable[..., neusight.KernelFile | None]]] = {
    neusight.SOURCE: (".parquet", ", ".join(neusight.COLUMNS), neusight.read_kernel_times),
    published_links.SOURCE: (".csv", ", ".join(published_links.COLUMNS), published_links.read_all_reduces),
    **{source: (".csv", layer_columns(source), partial(read_layer_times, source=source)) for source in LAYER_SOURCES},
}
SOURCES = (DATASET, *PUBLISHED, *TABLES, *_OF_KERNELS, "csv")
_SHOWN_ROWS = 5  # places named for each reason
_WIDTH_ELSEWHERE = 140  # columns of a table that goes into a file or pipe

Progress = Callable[[str, int, int], None]  # (what is done, files done, files in all)


@dataclass(frozen=True, kw_only=True)
class IngestSettings(Checked):
    r"""What to read. Raises `UsageError` for an unknown source, and for keys of another source.

    source=dataset loads the runs that came with the project, with their telemetry and kernels; they stay
    `measured`.

      python -m warehouse.ingest source=dataset
      python -m warehouse.ingest source=gpumemnet path=GPUMemNet/Datasets
      python -m warehouse.ingest source=timm path=timm_a100.csv data=/srv/farm
      python -m warehouse.ingest source=timm_benchmark path=timm_train_step_time.csv
      python -m warehouse.ingest source=csv path=mine.csv family=timm device_name=NVIDIA-L4 \
        columns='{peak_memory_mib: mem, batch_size: bs, config.model: net}' constants='{optimizer: sgd}'

    A folder is searched with all that is below it; files of other kinds are named and left. Rows that make no sense
    land as `invalid`, those in doubt with error_type = 'doubt', and those that no
    trial config describes with error_type = 'untraceable'.
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
    family: str | None = key(None, "source=csv: the family that the rows are configurations of")
    columns: str | None = key(
        None,
        "source=csv: '{peak_memory_mib: COLUMN, config.FIELD: COLUMN, ...}', columns of `runs` and config fields",
        "any text",
    )
    constants: str | None = key(None, "source=csv: the same keys with one value for every row", "any text")

    def problems(self) -> Iterator[str]:
        if self.path is None and self.source != DATASET:
            yield "missing path=... (a file, or a folder)"
        if self.source != "csv":
            keys = ("family", "columns", "constants", *(("device_name",) if self.source == DATASET else ()))
            odd = [key for key in keys if getattr(self, key) is not None]
            if odd:
                yield f"{', '.join(odd)}: for source=csv only; source={self.source} knows its columns"
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
    left_out: int = 0  # rows that make no sense, of a table that keeps none of those
    label: str = ""  # what it is called in the report; default the file's name
    statuses: Counter[str] = field(default_factory=Counter)
    invalid: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    doubts: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def already_there(self) -> int:
        return self.rows - self.new - self.left_out

    @property
    def in_doubt(self) -> int:
        return sum(map(len, self.doubts.values()))


@dataclass
class IngestReport:
    """Reports of the files that were read, and the reason for each file that was not."""

    files: list[FileReport] = field(default_factory=list)
    left: dict[Path, str] = field(default_factory=dict)


def ingest(settings: IngestSettings, progress: Progress | None = None) -> IngestReport:
    """Land those rows of the files at `settings.path` that the data folder lacks.

    Raises `UsageError` if the path does not exist or holds no file of this source, the mapping does not fit, the data
    folder cannot be written, or another ingest is running on it.
    """
    progress = progress or (lambda label, done, of: None)
    report = IngestReport()
    if settings.source == DATASET:
        return _ingest_dataset(settings, report, progress)
    if settings.source in _OF_KERNELS:
        return _ingest_kernels(settings, report, progress)
    # Of files with the same measurements, the one with most measured columns lands first.
    files = sorted(_read(settings, report, progress), key=lambda file: -file.measured_columns)
    if not files:
        raise _no_file(settings, report)
    folder = DataFolder.resolve(settings.data).create()
    with _lock(folder):
        known = _known_ids(folder)
        writer = RunWriter(folder)
        for done, file in enumerate(files):
            progress("landing", done, len(files))
            if file.rows or not file.pairs:
                report.files.append(_land(file, writer, known))
        for file, members, new_count in land_groups(folder, settings.source, files, settings.device_name):
            report.files.append(_groups_report(file, members, new_count))
        progress("landing", len(files), len(files))
    return report


def _groups_report(file: ImportedFile, members: Sequence[Member], new_count: int) -> FileReport:
    report = FileReport(file.path, rows=len(members), new=new_count, label=f"{file.path.name}: members of pairs")
    for member in members:
        columns = member.columns
        report.statuses[columns["status"]] += 1
        if columns["status"] == "invalid":
            report.invalid["no speed beside the other, or alone"].append(member.row)
        elif columns.get("doubt"):
            report.doubts[columns["doubt"]].append(member.row)
    return report


def _read(settings: IngestSettings, report: IngestReport, progress: Progress) -> Iterator[ImportedFile]:
    mapping = settings.mapping() if settings.source == "csv" else None
    root, paths = _paths(settings, ".csv", report)
    for done, path in enumerate(paths):
        progress("reading", done, len(paths))
        if mapping is not None:
            try:
                yield mapping.file(path)
            except UsageError as error:
                if root.is_file():
                    raise
                report.left[path] = str(error).removeprefix(f"path={path}").lstrip(": ")
            continue
        if settings.source in TABLES:
            table = read_table(path, settings.source, settings.device_name)
            if table is not None:
                yield table
            else:
                report.left[path] = f"not of this source, whose files have {table_columns(settings.source)}"
            continue
        file = read_recognised(path)
        if file is not None and file.form == settings.source:
            yield published_file(file, settings.source, settings.device_name)
        elif file is None:
            report.left[path] = f"unknown header; known: {known_headers()}"
        elif file.form in PUBLISHED:
            report.left[path] = f"its rows are of source={file.form}"
        else:
            report.left[path] = "well-known models by name: no configurations of a family that could be rebuilt"


def _paths(settings: IngestSettings, suffix: str, report: IngestReport) -> tuple[Path, list[Path]]:
    """Return the path that was given, and the files to read: itself, or those of `suffix` below it."""
    assert settings.path is not None
    root = Path(settings.path).expanduser()
    if root.is_file():
        return root, [root]
    if not root.is_dir():
        raise UsageError(f"path={settings.path}: there is no such file or folder")
    paths = []
    for path in sorted(path for path in root.rglob("*") if path.suffix.lower() == suffix and path.is_file()):
        if lies_in(root, path):
            paths.append(path)
        else:
            report.left[path] = "a link that leads out of the folder"
    return root, paths


def _ingest_kernels(settings: IngestSettings, report: IngestReport, progress: Progress) -> IngestReport:
    """Land the kernels of each file that the data folder lacks, in one batch a file."""
    suffix, columns, read = _OF_KERNELS[settings.source]
    root, paths = _paths(settings, suffix, report)
    files = []
    for path in paths:
        try:
            file = read(path, settings.device_name, partial(progress, "reading"))
        except EnvironmentProblem as error:
            if root.is_file():
                raise
            report.left[path] = str(error).removeprefix(f"path={path} ")
            continue
        if file is None:
            report.left[path] = f"not of this source, whose files have {columns}"
        else:
            files.append(file)
    if not files:
        raise _no_file(settings, report)
    folder = DataFolder.resolve(settings.data).create()
    with _lock(folder):
        known = _known_kernels(folder)
        for done, file in enumerate(files):
            progress("landing", done, len(files))
            new = [row for row in file.rows if row["kernel_row"] not in known]
            known |= {row["kernel_row"] for row in new}
            if new:
                (batch,) = run_ids(settings.source, ["\n".join(row["kernel_row"] for row in new)])
                land_batch(folder, "kernels", UNKNOWN_FAMILY, file.table(batch, new))
            invalid = sum(map(len, file.invalid.values()))
            landed = FileReport(file.path, rows=len(file.rows) + invalid, new=len(new))
            landed.statuses.update({"ok": len(file.rows), "invalid": invalid})
            landed.invalid.update(file.invalid)
            landed.left_out = invalid
            report.files.append(landed)
        progress("landing", len(files), len(files))
    return report


def _known_kernels(folder: DataFolder) -> set[str]:
    with contextlib.closing(connect(folder)) as connection:
        table = connection.sql("SELECT kernel_row FROM kernels WHERE source = 'imported'").to_arrow_table()
    return set(table.column("kernel_row").to_pylist())


def _no_file(settings: IngestSettings, report: IngestReport) -> UsageError:
    left = "".join(f"; {path.name}: {why}" for path, why in report.left.items())
    return UsageError(f"path={settings.path} holds no file of source={settings.source}{left}")


def _land(file: ImportedFile, writer: RunWriter, known: set[str]) -> FileReport:
    report = FileReport(file.path)
    new: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in file.rows:
        run = entry.run
        report.rows += 1
        report.statuses[run["status"]] += 1
        if run["status"] == "invalid":
            report.invalid[run["error"]].append(entry.row)
        if run.get("error_type") == DOUBT:
            report.doubts[run["error"]].append(entry.row)
        if run["run_id"] not in known:
            known.add(run["run_id"])
            new[run["family"]].append(dict(run))
    for family in sorted(new):
        writer.write_batch(new[family])
        report.new += len(new[family])
    return report


def _ingest_dataset(settings: IngestSettings, report: IngestReport, progress: Progress) -> IngestReport:
    root = repository_folder() if settings.path is None else Path(settings.path).expanduser()
    if not root.is_dir():
        why = (
            "no such folder" if settings.path is not None else "this is no checkout with a datasets/ folder: give path="
        )
        raise UsageError(f"path={root}: {why}")
    parts = find_parts(root)
    if not parts:
        raise UsageError(f"path={root} holds no runs yet: no GPU has measured anything for it so far")
    read = []
    for done, part in enumerate(parts):
        progress("reading", done, len(parts))
        runs = read_part(root, part, "runs")
        details = {kind: checked_details(root, part, kind) for kind in DETAILS}
        samples = {"telemetry": read_part(root, part, "telemetry"), **details}
        read.append((part, runs, checked_rows(root, part, runs), samples))
    folder = DataFolder.resolve(settings.data).create()
    with _lock(folder):
        known = _known_public_ids(folder)
        for done, (part, runs, rows, samples) in enumerate(read):
            progress("landing", done, len(parts))
            file = FileReport(root / part.path("runs"), len(rows), label=str(part.path("runs")))
            file.statuses.update(row["status"] for row in rows)
            new = pa.array([row["run_id"] not in known for row in rows], pa.bool_())
            known |= {row["run_id"] for row in rows}
            file.new = _land_part(folder, part, runs.filter(new), samples)
            report.files.append(file)
        progress("landing", len(parts), len(parts))
    return report


def _land_part(folder: DataFolder, part: DatasetPart, runs: pa.Table, samples: Mapping[str, pa.Table]) -> int:
    """Land the telemetry, kernels and ranks, then the runs, each in one batch; return how many runs landed.

    A kill before the runs leaves rows without runs, which the next ingest finds."""
    if not runs.num_rows:
        return 0
    for kind, table in samples.items():
        with contextlib.closing(connect(folder)) as connection:
            there = connection.execute(f"SELECT DISTINCT run_id FROM {kind} WHERE family = ?", [part.family]).fetchall()
        wanted = set(runs.column("run_id").to_pylist()) - {run_id for (run_id,) in there}
        rows = table.filter(pc.is_in(table.column("run_id"), pa.array(sorted(wanted), pa.string())))
        if rows.num_rows:
            land_batch(folder, kind, part.family, rows)
    at = runs.schema.get_field_index("job_id")
    jobs = pc.binary_join_element_wise(JOB_PREFIX, runs.column("job_id"), "")
    land_batch(folder, "runs", part.family, runs.set_column(at, "job_id", jobs))
    return int(runs.num_rows)


def _known_public_ids(folder: DataFolder) -> set[str]:
    """Return the public ids of the folder's runs, both measured here and loaded."""
    with contextlib.closing(connect(folder)) as connection:
        rows = connection.execute(
            "SELECT run_id, job_id, device_uuid, finished_at FROM runs WHERE source != 'imported'"
        ).fetchall()
    return {
        run_id if is_loaded(job_id) else public_id(run_id, uuid, finished_at)
        for run_id, job_id, uuid, finished_at in rows
    }


def _known_ids(folder: DataFolder) -> set[str]:
    with contextlib.closing(connect(folder)) as connection:
        rows = connection.execute("SELECT run_id FROM runs WHERE source = 'imported'").fetchall()
    return {run_id for (run_id,) in rows}


@contextlib.contextmanager
def _lock(folder: DataFolder) -> Iterator[None]:
    """Hold the folder's ingest lock, since two ingests at once would land rows twice. The kernel drops it at exit."""
    with open_lock(folder.ingest_lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentProblem(
                f"another ingest is at work on data={folder.root}; run this one when it is done"
            ) from None
        yield


def print_report(report: IngestReport) -> None:
    """Print the table of files, then the rows left out, in doubt or invalid, by reason, with the first places."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen = Console(highlight=False, width=_WIDTH_ELSEWHERE)
    table = Table(box=box.SQUARE)
    table.add_column("file")
    for name in ("rows", "new", "already there", "ok", "oom", "invalid", "in doubt"):
        table.add_column(name, justify="right")
    for file in report.files:
        counts = (file.rows, file.new, file.already_there, *(file.statuses[s] for s in ("ok", "oom", "invalid")))
        table.add_row(_name(file), *(f"{count:,}" for count in (*counts, file.in_doubt)))
    screen.print(table)
    for path, why in report.left.items():
        screen.print(f"left out: {path.name}: {why}", markup=False, soft_wrap=True)
    places = {"invalid": [file.invalid for file in report.files], "in doubt": [file.doubts for file in report.files]}
    for kind, by_file in places.items():
        for file, rows_by_reason in zip(report.files, by_file, strict=True):
            for reason, rows in sorted(rows_by_reason.items(), key=lambda entry: -len(entry[1])):
                line = f"{kind}: {reason}: {len(rows):,} ({_places(_name(file), rows)})"
                screen.print(line, markup=False, soft_wrap=True)


def _name(file: FileReport) -> str:
    return file.label or file.path.name


def _places(name: str, rows: Sequence[int]) -> str:
    more = ", ..." if len(rows) > _SHOWN_ROWS else ""
    return f"{name}:{', '.join(map(str, rows[:_SHOWN_ROWS]))}{more}"


def entry(settings: IngestSettings) -> int:
    """Ingest the files and print the report."""
    with terminal_bar("reading") as update, disk_errors_named():

        def progress(label: str, done: int, of: int) -> None:
            assert update is not None
            update(description=label, completed=done, total=of)

        report = ingest(settings, None if update is None else progress)
    print_report(report)
    return 0


if __name__ == "__main__":
    command("ingest", entry)
