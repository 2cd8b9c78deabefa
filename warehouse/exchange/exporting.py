"""Exports measured runs as a data set that others can load; later exports add runs.

Start reading at `export`, the body of `warehouse.export`. `warehouse.exchange.dataset` has the files and the public
form of a row, `warehouse.exchange.dataset_card` the card.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from conf.cli.settings import Checked, key
from conf.errors import EnvironmentProblem, UsageError, require_one_of
from conf.files.outputs import folder_problems, write_file
from warehouse.exchange.dataset import (
    ALWAYS_THERE,
    CARD,
    KINDS,
    DatasetPart,
    find_parts,
    public_runs,
    public_tables,
    read_part,
    repository_folder,
    to_bytes,
)
from warehouse.exchange.dataset_card import card
from warehouse.files.folder import DataFolder
from warehouse.reading.connection import WarehouseConnection, connect
from warehouse.tables.duckdb_access import disk_errors_named
from warehouse.tables.schema import DETAILS

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
        contextlib.closing(connect(DataFolder.resolve(settings.data))) as connection,
    ):
        runs = _runs(connection, settings, report)
        contents: dict[Path, bytes] = {}
        for part, rows in sorted(runs.items()):
            before = read_part(report.root, part, "runs")
            known = set(before.column("run_id").to_pylist())
            new = [row for row in rows if row["run_id"] not in known]
            report.there += len(rows) - len(new)
            if not new:
                continue
            report.added[part] = len(new)
            tables = public_tables(connection, new, settings.hz, kernels=settings.kernels)
            # Runs last, so readers of the runs see their samples, kernels and ranks.
            for kind, added in tables.items():
                table = pa.concat_tables([_of_runs(read_part(report.root, part, kind), known), added])
                if table.num_rows or kind in ALWAYS_THERE or (report.root / part.path(kind)).exists():
                    contents[part.path(kind)] = to_bytes(part, kind, _sort(table))
    _write(report, contents, settings.max_mb)
    return report


def _of_runs(table: pa.Table, run_ids: set[str]) -> pa.Table:
    """Return the rows of some runs, without those of an export that was killed before writing its runs."""
    return table.filter(pc.is_in(table.column("run_id"), pa.array(sorted(run_ids), pa.string())))


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
