"""Snapshots: the warehouse's rows frozen under a name, as links to the files that count, with a manifest.

Start reading at `take_snapshot`; `warehouse.connect(snapshot=NAME)` reads one.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import CommandError, EnvironmentProblem, UsageError, first_line, unknown_name
from conf.files.identity import sha256_of
from conf.files.outputs import TEMPORARY_SUFFIX, new_folder, read_json, sync, write_file
from warehouse.files.compaction import CompactionReport, compaction_lock
from warehouse.files.counting import (
    SNAPSHOT_LISTING,
    Catalogue,
    counting_files,
    is_merged_name,
    read_catalogue,
    refuse_losses,
    run_ids_of,
    settle_listings,
)
from warehouse.files.folder import (
    LISTING_SCHEMA,
    DamagedFile,
    DataFolder,
    check_name,
    file_problem,
    report_damage,
    write_parquet,
)
from warehouse.files.views import ROW_COUNTS, VIEWS, view_statements
from warehouse.tables.duckdb_access import disk_error_code, disk_errors_named
from warehouse.tables.schema import KINDS, OF_RUNS, SCHEMA_VERSION, TABLES

FORMAT = "gpufarm-snapshot"
MANIFEST = "manifest.json"
NOW = "now"  # in a diff: the folder as it is
ALL = "all"  # in verify=
_FOLDERS = (*TABLES, "compactions")
# Hard links fail across file systems, without support, for another user's file, and beyond their maximum.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


@dataclass(frozen=True)
class SnapshotFile:
    """A file of a snapshot: size, time and hash when the snapshot was taken."""

    path: str  # below the snapshot's folder
    bytes: int
    rows: int
    sha256: str
    modified_ns: int  # since the epoch; changes when the file is rewritten


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The warehouse at one moment: unchanging files and their manifest."""

    folder: DataFolder  # laid out like a data folder, but read-only
    name: str
    taken_at: datetime.datetime  # UTC
    schema_version: int
    rows: Mapping[str, int]  # view -> rows
    columns: Mapping[str, Mapping[str, str]]  # table -> column -> Arrow type
    files: tuple[SnapshotFile, ...]
    left_out: tuple[str, ...] = ()  # files of the folder that were damaged, with the reasons

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def line(self) -> str:
        """Return the snapshot as one line of text."""
        rows = ", ".join(f"{count:,} {view}" for view, count in self.rows.items())
        taken = f"{self.taken_at:%Y-%m-%d %H:%M:%S} UTC"
        left_out = f"; {len(self.left_out):,} damaged files left out" if self.left_out else ""
        return f"{self.name}: {rows}; {len(self.files):,} files, {self.bytes / 2**20:.1f} MiB; taken {taken}{left_out}"

    def problems(self, *, hashes: bool = True) -> list[str]:
        """Return a line for each file that is missing, changed or added.

        Without `hashes`, content is read only if a file's time has changed.
        """
        problems, root = [], self.folder.root
        for file in self.files:
            try:
                status = (root / file.path).lstat()
            except (FileNotFoundError, NotADirectoryError):
                problems.append(f"{file.path} is gone")
                continue
            if not stat.S_ISREG(status.st_mode) or not _is_below(root, file.path):  # the manifest may be forged
                problems.append(f"{file.path} is not a plain file of the snapshot")
                continue
            if status.st_size != file.bytes:
                problems.append(f"{file.path} has {status.st_size:,} bytes, had {file.bytes:,}")
            elif (hashes or status.st_mtime_ns != file.modified_ns) and sha256_of(root / file.path) != file.sha256:
                problems.append(f"{file.path} has other content: its SHA-256 is not {file.sha256}")
        known = {file.path for file in self.files}
        for path in _parquet_files(root):
            if str(path.relative_to(root)) not in known:
                problems.append(f"{path.relative_to(root)} is not a file of the snapshot")
        return problems


def _is_below(root: Path, path: str) -> bool:
    """Return whether the path leads to a file below the folder without links and `..`."""
    real_root = os.path.realpath(root)
    return not os.path.isabs(path) and os.path.realpath(root / path) == f"{real_root}/{os.path.normpath(path)}"


def take_snapshot(
    folder: DataFolder, name: str | None = None, *, tell: Callable[[str], None] = lambda line: None
) -> Snapshot:
    """Freeze the rows that the views show now under `name`, or the UTC day (`2026-11-20`, then `2026-11-20.2`).

    Files are linked, not copied, so they take no disk space until compaction has replaced them; a compaction before the
    snapshot makes them few. Waits for a running compaction (`tell` says so) and blocks further ones; runs may land. May
    be killed at any point: the snapshot exists complete or not at all. A damaged file is left out and named, on stderr
    and in the manifest. Raises `UsageError` for a name that is taken or invalid, and if a merged file is gone.
    """
    folder.open()
    with compaction_lock(folder, tell), disk_errors_named():
        if name is not None:
            _check_new_name(folder, name)
        folder.snapshots.mkdir(exist_ok=True)
        for abandoned in folder.snapshots.glob(f".*{TEMPORARY_SUFFIX}"):  # left by a killed process
            shutil.rmtree(abandoned)
        taken_at = datetime.datetime.now(datetime.UTC)
        chosen = name or next(name for name in day_names(taken_at) if not (folder.snapshots / name).exists())
        target = folder.snapshots / chosen
        with new_folder(target, of_links=True) as root:
            building = DataFolder(root)
            left_out = _link_files(folder, building)
            report_damage(left_out)
            _write_manifest(building, chosen, taken_at, [f"{file.path}: {file.reason}" for file in left_out])
    return find_snapshot(folder, chosen)


def snapshot_names(folder: DataFolder) -> list[str]:
    """Return the names of a folder's snapshots, oldest first."""
    return [snapshot.name for snapshot in snapshots(folder)]


def snapshots(folder: DataFolder) -> list[Snapshot]:
    """Return a folder's snapshots, oldest first. Raises `EnvironmentProblem` for a damaged manifest."""
    read = [read_manifest(path) for path in folder.snapshots.glob(f"[!.]*/{MANIFEST}")]
    return sorted(read, key=lambda snapshot: (snapshot.taken_at, snapshot.name))


def find_snapshot(folder: DataFolder, name: str) -> Snapshot:
    """Return the snapshot of that name without checking its files. Raises `UsageError` that lists existing ones."""
    folder.open()
    with contextlib.suppress(ValueError):
        path = folder.snapshots / check_name("snapshot", str(name)) / MANIFEST
        if path.exists():
            return read_manifest(path)
    raise unknown_name("snapshot", name, snapshot_names(folder) or ["none yet, see python -m warehouse.snapshot"])


def check_snapshot(folder: DataFolder, name: str) -> Snapshot:
    """Return the snapshot after checking its files without hashes. Raises `EnvironmentProblem` naming damaged ones."""
    snapshot = find_snapshot(folder, name)
    if problems := snapshot.problems(hashes=False):
        raise EnvironmentProblem(f"snapshot {name} of data={folder.root} is damaged: {'; '.join(problems)}")
    return snapshot


def day_names(moment: datetime.datetime) -> Iterator[str]:
    """Yield the names of a day, `2026-11-20`, `2026-11-20.2` and so on."""
    yield f"{moment:%Y-%m-%d}"
    yield from (f"{moment:%Y-%m-%d}.{number}" for number in itertools.count(2))


def _check_new_name(folder: DataFolder, name: str) -> None:
    try:
        check_name("name", name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if name in (NOW, ALL):
        raise UsageError(f"name={name} stands for something else; choose another")
    if (folder.snapshots / name).exists():
        raise UsageError(f"name={name}: there is a snapshot of that name")


def _link_files(folder: DataFolder, building: DataFolder) -> list[DamagedFile]:
    """Link the files that count into `building`; return the damaged ones, which are left out.

    Runs are linked first: their samples and kernels landed before them, so every linked run has them. Samples without
    a run belong to a run that is landing or was lost, and are left out.
    """
    refuse_losses(read_catalogue(folder, kind) for kind in KINDS)
    mended = CompactionReport()  # with the lock held; a listing stops hiding runs that its merged file lacks
    settled = {kind: settle_listings(folder, kind, mended) for kind in KINDS}
    damaged: list[DamagedFile] = []

    def is_whole(path: Path) -> bool:
        problem = file_problem(path)[1]
        if problem is not None:
            damaged.append(DamagedFile(path, problem))
        return problem is None

    building.write_anchors()
    linked_runs: set[str] = set()
    for kind in KINDS:
        catalogue = Catalogue.of(settled[kind], settled[kind])
        counting = [counting_files(folder, kind, family, catalogue) for family in folder.families(kind)]
        merged = []
        for path in itertools.chain(*counting):
            is_merged = is_merged_name(path.name)
            if (kind in OF_RUNS and not is_merged and path.stem not in linked_runs) or not is_whole(path):
                continue
            _link(path, building.root / path.relative_to(folder.root))
            if is_merged:
                merged.append(f"{path.parent.name}/{path.name}")
            if kind == "runs":
                linked_runs |= run_ids_of(path) if is_merged else {path.stem}
        if merged:
            listing = pa.table([merged, [False] * len(merged)], schema=LISTING_SCHEMA)
            write_parquet(building.listings(kind) / SNAPSHOT_LISTING, listing)
    for source, target in ((folder.jobs, building.jobs), (folder.stale, building.stale)):
        for path in sorted(source.glob("*.parquet")):
            if not (target / path.name).exists() and is_whole(path):
                _link(path, target / path.name)
    return damaged


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copy2(source, target)
        sync(target)


def _write_manifest(building: DataFolder, name: str, taken_at: datetime.datetime, left_out: list[str]) -> None:
    files = []
    for path in _parquet_files(building.root):
        try:
            rows = pq.read_metadata(path).num_rows
        except pa.ArrowException as error:
            raise EnvironmentProblem(f"{path} cannot be read: {first_line(error)}") from error
        status = path.stat()
        file = SnapshotFile(
            str(path.relative_to(building.root)), status.st_size, rows, sha256_of(path), status.st_mtime_ns
        )
        files.append(asdict(file))
    manifest = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "taken_at": taken_at.isoformat(),
        "rows": _view_rows(building),
        "columns": {kind: {field.name: str(field.type) for field in schema} for kind, schema in TABLES.items()},
        "files": files,
        "left_out": left_out,
    }
    write_file(building.root / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def _view_rows(building: DataFolder) -> dict[str, int]:
    """Return the row count of each view, which proves that the linked files can be read."""
    with duckdb.connect() as connection:
        try:
            for statement in view_statements(building):
                connection.execute(statement)
            (counts,) = connection.execute(ROW_COUNTS).fetchall()
            return dict(zip(VIEWS, counts, strict=True))
        except duckdb.Error as error:
            if disk_error_code(error) is not None:
                raise
            raise EnvironmentProblem(f"the folder's files cannot be read: {first_line(error)}") from error


def _parquet_files(root: Path) -> list[Path]:
    return sorted(path for table in _FOLDERS for path in (root / table).rglob("*.parquet"))


def read_manifest(path: Path) -> Snapshot:
    """Return the snapshot that a manifest describes. Raises `EnvironmentProblem` if it is damaged or too new."""
    try:
        manifest = read_json(path)
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}")
        if manifest["schema_version"] > SCHEMA_VERSION:
            raise EnvironmentProblem(
                f"{path} has schema version {manifest['schema_version']}, this code knows up to {SCHEMA_VERSION}; "
                "update the code"
            )
        return Snapshot(
            folder=DataFolder(path.parent),
            name=manifest["name"],
            taken_at=datetime.datetime.fromisoformat(manifest["taken_at"]),
            schema_version=manifest["schema_version"],
            rows=manifest["rows"],
            columns=manifest["columns"],
            files=tuple(SnapshotFile(**file) for file in manifest["files"]),
            left_out=tuple(manifest.get("left_out", ())),
        )
    except CommandError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentProblem(f"{path} is damaged: {error}") from error
