"""`python -m warehouse.export out=datasets data=DIR`: measured runs as a data set that others can load.

Start reading at `export`. `warehouse.dataset` has the files, `warehouse.dataset_card` the card.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import getpass
import hashlib
import math
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.cli import command
from conf.errors import EnvironmentProblem, UsageError, unknown_name
from conf.outputs import folder_problems
from conf.settings import key
from warehouse.connection import connect
from warehouse.dataset import (
    CARD,
    JOB_PREFIX,
    DatasetPart,
    find_parts,
    is_loaded,
    public_id,
    read_part,
    repository_folder,
    to_bytes,
)
from warehouse.dataset_card import card
from warehouse.disk_errors import disk_errors_named
from warehouse.folder import DataFolder
from warehouse.layout import sync, write_bytes
from warehouse.reader import WarehouseConnection
from warehouse.schema import METRICS, RUN_SCHEMA, TELEMETRY_SCHEMA

# Runs that lost their worker know of no device, and belong to no data set of one.
SOURCES = {
    "measured": "source = 'measured' AND device_uuid IS NOT NULL",
    "cpu": "source = 'measured' AND device_uuid IS NULL AND device_name IS NOT NULL",
    "simulated": "source = 'simulated' AND device_name IS NOT NULL",
}
_TEXTS = ("error", "telemetry_missing", "quality_reasons", "quality_summary", "allocator_settings")
_ERROR_CHARACTERS = 2000  # of an error's end, where its message is
_LARGEST = 5  # files named where the data set is too large
# Decimals that telemetry keeps, by its unit: more than any sensor resolves, and a third of the bytes.
_DECIMALS = {"ratio": 4, "MiB": 2, "MiB/s": 2, "W": 2, "J": 2, "cores": 3, "ms": 4}
_PREFERENCE = {"repeated": 1, "unavailable": 2}  # of the readings in one bin, the least of these stays


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What to export, and where to. Raises `UsageError` that names every bad key together.

      python -m warehouse.export data=data/collect
      python -m warehouse.export out=/srv/set data=/srv/farm source=simulated families=[cnn,gpt] max_mb=100

    Runs that the folder holds already stay; names of machines, users and paths are taken out. README.md in the
    folder is the card: how the runs were made, and how many there are of each kind. `warehouse.ingest
    source=dataset` loads it.
    """

    out: str | None = key(None, "the data set's folder; default datasets/ of this checkout", "new path")
    data: str | None = key(None, "data folder to export from; default $GPUFARM_DATA, else ./data", "new path")
    source: str = key("measured", "measured (on GPUs), cpu (measured on CPUs) or simulated")
    families: Sequence[str] | None = key(
        None, "as in [cnn,gpt]; default all that have such runs", "text | list of text | null"
    )
    hz: float = key(10, "telemetry is thinned to this many readings a second of each sensor")
    max_mb: float = key(20, "refuse a data set that would be larger, in 10^6 bytes")

    def __post_init__(self) -> None:
        problems = []
        if self.source not in SOURCES:
            problems.append(str(unknown_name("source", self.source, SOURCES)))
        if isinstance(self.families, str):
            object.__setattr__(self, "families", (self.families,))
        for name in ("hz", "max_mb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                problems.append(f"{name} must be a number > 0, got {value!r}")
        if self.out is not None and Path(self.out).expanduser().is_file():
            problems.append(f"out={self.out} is a file, not a folder")
        if self.out is not None:
            problems += folder_problems(self.out)
        if self.out is None and not repository_folder().parent.joinpath("pyproject.toml").is_file():
            problems.append("out=... is missing: this is no checkout with a datasets/ folder of its own")
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def root(self) -> Path:
        return repository_folder() if self.out is None else Path(self.out).expanduser().absolute()


@dataclass
class ExportReport:
    """The result of an export. Sizes in bytes."""

    root: Path
    added: Counter[DatasetPart] = field(default_factory=Counter)  # runs that the data set did not have
    there: int = 0  # runs that it had
    without_device: int = 0
    total_bytes: int = 0

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        text_lines = [f"{part.path('runs')}: {count} runs added" for part, count in sorted(self.added.items())]
        if self.without_device:
            text_lines.append(f"{self.without_device} runs lost their worker, have no device and are left out")
        known = f", {self.there} were there already" if self.there else ""
        text_lines.append(
            f"{self.root}: {self.added.total()} runs added{known}; {self.total_bytes / 1e6:.1f} MB in all"
        )
        return text_lines


def export(settings: ExportSettings) -> ExportReport:
    """Add the runs of the data folder that the data set lacks, and write its card anew.

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
            new = [(own, row) for own, row in rows if row["run_id"] not in known]
            report.there += len(rows) - len(new)
            if not new:
                continue
            report.added[part] = len(new)
            samples = public_telemetry(connection, {own: row["run_id"] for own, row in new}, settings.hz)
            counts = Counter(samples.column("run_id").to_pylist())
            for _, row in new:
                row["telemetry_rows"] = counts[row["run_id"]]
            added = pa.Table.from_pylist([row for _, row in new], schema=RUN_SCHEMA)
            # Telemetry first, so readers of the runs see their samples. Those of an export that was killed before it
            # came to the runs are not kept.
            of_known = read_part(report.root, part, "telemetry")
            of_known = of_known.filter(pc.is_in(of_known.column("run_id"), before.column("run_id").combine_chunks()))
            whole = {
                "telemetry": pa.concat_tables([of_known, samples]),
                "runs": pa.concat_tables([before, added]),
            }
            contents |= {part.path(kind): to_bytes(part, kind, _sorted(table)) for kind, table in whole.items()}
    _write(report, contents, settings.max_mb)
    return report


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    """Two at a time would each write what they have read before, without the other's runs. The folder itself is locked,
    or where it will be: a file of ours has no place in a data set."""
    there = next(path for path in (root, *root.parents) if path.is_dir())
    descriptor = os.open(there, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise EnvironmentProblem(f"another export is at work on out={root}; run this one when it is done") from None
    finally:
        os.close(descriptor)


def _runs(
    connection: WarehouseConnection, settings: ExportSettings, report: ExportReport
) -> dict[DatasetPart, list[tuple[str, dict[str, Any]]]]:
    """Return (run_id in the data folder, public row) of the runs of each part."""
    columns = ", ".join(RUN_SCHEMA.names)
    chosen = SOURCES[settings.source]
    if settings.families is not None:
        there = {name for (name,) in connection.execute(f"SELECT DISTINCT family FROM runs WHERE {chosen}").fetchall()}
        for name in settings.families:
            if name not in there:
                raise unknown_name(f"family with {settings.source} runs", name, there)
    table = connection.sql(f"SELECT {columns} FROM runs WHERE {chosen} ORDER BY run_id").to_arrow_table()
    lost = f"source = '{'simulated' if settings.source == 'simulated' else 'measured'}' AND device_name IS NULL"
    ((report.without_device,),) = connection.execute(f"SELECT count(*) FROM runs WHERE {lost}").fetchall()
    runs: dict[DatasetPart, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for run in table.cast(naive(RUN_SCHEMA)).to_pylist():
        if settings.families is None or run["family"] in settings.families:
            runs[DatasetPart.of(run)].append((run["run_id"], public_row(run)))
    if not runs:
        counts = {name: connection.execute(f"SELECT count(*) FROM runs WHERE {which}").fetchone()[0]
                  for name, which in SOURCES.items()}  # fmt: skip
        other_sources = ", ".join(f"source={name} has {count}" for name, count in counts.items() if count)
        raise UsageError(
            f"data holds no runs for source={settings.source}{' (on GPUs)' if settings.source == 'measured' else ''}; "
            f"{other_sources or 'it holds none of any other source either'}"
        )
    return runs


def public_row(run: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `runs` under its public id, without names of machines, users and folders."""
    row = dict(run)
    for name in ("started_at", "finished_at"):
        if row[name] is not None:
            row[name] = row[name].replace(tzinfo=datetime.UTC)
    names = _names(run["node"])
    for name in _TEXTS:
        if row[name] is not None:
            row[name] = scrubbed(row[name], names)
    if row["config"] is not None:  # a model of one's own may be named by its file
        row["config"] = scrubbed(row["config"])
    if row["error"] is not None:
        row["error"] = row["error"][-_ERROR_CHARACTERS:]
    row["node"] = row["worker"] = row["kernel_rows"] = None
    if is_loaded(run["job_id"]):
        row["job_id"] = run["job_id"].removeprefix(JOB_PREFIX)
        return row
    row["run_id"] = public_id(run["run_id"], run["device_uuid"], run["finished_at"])
    if run["device_uuid"] is not None and run["source"] == "measured":  # distinguishes cards, and serves nothing else
        row["device_uuid"] = f"gpu-{hashlib.sha256(run['device_uuid'].encode()).hexdigest()[:12]}"
    return row


def scrubbed(text: str, names: Iterable[str] = ()) -> str:
    """Return `text` with folders removed from paths, addresses as ADDRESS, and the given names as NAME."""
    text = re.sub(r"/(?:home|Users)/[\w.@+=~-]+", "/NAME", text)  # also where nothing comes behind it
    text = re.sub(r'File "[^"\n]*/([^"/\n]+)"', r'File "\1"', text)
    text = re.sub(r"(\w+://)[^\s/\"')\]]+", r"\1ADDRESS", text)
    text = re.sub(r"(?<![\w:/.])~?(?:/[\w.@+=~-]+)*/([\w.@+=~-]+)/?", r"\1", text)
    text = re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", "ADDRESS", text)
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "NAME", text)
    return text


def _names(node: str | None) -> set[str]:
    """Return the names of the run's machine, of this machine and of the user; not `root` and other common ones."""
    names = {node or "", platform.node()}
    names |= {name.partition(".")[0] for name in names}
    with contextlib.suppress(OSError, KeyError):
        names.add(getpass.getuser())
    return {name for name in names if len(name) > 2} - {"root", "user", "localhost"}


def public_telemetry(
    connection: WarehouseConnection, ids: dict[str, str], hz: float | None, where: str = "true"
) -> pa.Table:
    """Return the samples of some runs under their public ids, thinned to `hz` unless that is None.

    `where` narrows what is read: a condition on `telemetry` that holds for all of these runs.
    """
    wanted = pa.table({"own_id": list(ids), "public_id": list(ids.values())})
    connection.register("exported", wanted)
    columns = ", ".join(_rounded(name) for name in TELEMETRY_SCHEMA.names if name not in ("run_id", "t_ms"))
    # Rounded before anything is chosen: a data set that is loaded and exported again is the same.
    samples = connection.sql(
        f"SELECT public_id AS run_id, round(t_ms, 1) AS t_ms, {columns} FROM telemetry "
        f"JOIN exported ON telemetry.run_id = exported.own_id WHERE {where} ORDER BY ALL"
    ).to_arrow_table()
    connection.unregister("exported")
    samples = samples.cast(TELEMETRY_SCHEMA)
    return samples if hz is None else thin(samples, hz)


def _rounded(name: str) -> str:
    digits = _DECIMALS.get(METRICS[name][0]) if name in METRICS else None
    return f"telemetry.{name}" if digits is None else f"round(telemetry.{name}, {digits}) AS {name}"


def thin(samples: pa.Table, hz: float) -> pa.Table:
    """Keep at most `hz` readings a second of each sensor of each run, and the first and last of each window.

    `samples` is sorted by run and time. Of the samples in one bin of 1/hz seconds, the last one stays; a fresh reading
    is preferred to a repeated one, and that to none.
    """
    if not samples.num_rows:
        return samples
    run, sensor = (_codes(samples.column(name)) for name in ("run_id", "sensor"))
    window = np.array([phase == "window" for phase in samples.column("phase").to_pylist()])
    rank = np.array([_PREFERENCE.get(quality, 0) for quality in samples.column("quality").to_pylist()])
    at = np.floor(samples.column("t_ms").to_numpy() * hz / 1000).astype(np.int64)
    position = np.arange(samples.num_rows)
    keep = np.zeros(samples.num_rows, dtype=bool)
    order = np.lexsort((position, -rank, at, sensor, run))
    keep[order[_ends(run[order], sensor[order], at[order])]] = True
    inside = np.flatnonzero(window)
    order = inside[np.lexsort((inside, sensor[inside], run[inside]))]
    last = _ends(run[order], sensor[order])
    keep[order[last]] = True
    keep[order[np.roll(last, 1)]] = True
    return samples.filter(pa.array(keep))


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    encoded = column.combine_chunks().dictionary_encode()
    codes: np.ndarray = encoded.indices.fill_null(-1).to_numpy()
    return codes


def _ends(*keys: np.ndarray) -> np.ndarray:
    """Return, for rows sorted by the keys, whether each is the last with its keys."""
    ends = np.ones(len(keys[0]), dtype=bool)
    if len(ends):
        ends[:-1] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return ends


def _sorted(table: pa.Table) -> pa.Table:
    keys = ["run_id", "t_ms", "sensor"] if "t_ms" in table.column_names else ["run_id"]
    return table.sort_by([(name, "ascending") for name in keys])


def naive(schema: pa.Schema) -> pa.Schema:
    """Return the schema with timestamps without zone, as the views have them."""
    return pa.schema([(f.name, pa.timestamp("us") if pa.types.is_timestamp(f.type) else f.type) for f in schema])


def _write(report: ExportReport, contents: dict[Path, bytes], max_mb: float) -> None:
    root = report.root
    parts = sorted({*find_parts(root), *report.added})
    runs = [read_part(root, part, "runs", contents.get(part.path("runs"))) for part in parts]
    samples = [read_part(root, part, "telemetry", contents.get(part.path("telemetry"))) for part in parts]
    contents = {**contents, Path(CARD): card(runs, samples).encode()}
    sizes = {path.relative_to(root): path.stat().st_size for path in root.rglob("*.parquet")}
    sizes |= {path: len(content) for path, content in contents.items()}
    report.total_bytes = sum(sizes.values())
    if report.total_bytes > max_mb * 1e6:
        largest = sorted(sizes.items(), key=lambda entry: -entry[1])[:_LARGEST]
        largest_files = ", ".join(f"{path} {size / 1e6:.2f} MB" for path, size in largest)
        raise UsageError(
            f"the data set would take {report.total_bytes / 1e6:.2f} MB, more than max_mb={max_mb:g}, and nothing is "
            f"written; the largest files: {largest_files}. "
            "Choose families=, thin the telemetry with hz=, or raise max_mb"
        )
    new_files: list[Path] = []
    new_folders: list[Path] = []
    try:
        for name, content in contents.items():
            path = root / name
            if path.exists() and path.read_bytes() == content:
                continue
            missing = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
            for parent in reversed(missing):
                parent.mkdir()
                new_folders.append(parent)
                sync(parent.parent)
            if not path.exists():
                new_files.append(path)
            write_bytes(path, content)
    except OSError:  # the disk is full: nothing half-done stays; files that were replaced are whole, old or new
        for path in new_files:
            path.unlink(missing_ok=True)
        for parent in reversed(new_folders):
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def entry(settings: ExportSettings) -> int:
    """Export the runs and print how many were added."""
    report = export(settings)
    print("\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    command("export", entry)
