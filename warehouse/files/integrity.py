"""Verifies a data folder: its files byte by byte, and its runs beside the tasks of the queue.

Start reading at `examine`. Nothing is changed; `python -m warehouse.check` prints the report. `compare` finds missing
runs, and runs that the queue does not know. It reads both sides cheaply: small files by their names, merged ones by
three columns, and the queue's file as any SQLite client would, since this package does not import the queue's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.errors import CommandError, first_line, print_lines
from conf.files.identity import OWN_SHA256, own_sha256, sha256_of
from warehouse.files.counting import (
    REDUNDANT,
    Listing,
    Unreadable,
    counting_files,
    is_merged_name,
    lost_line,
    read_catalogue,
    read_intact,
    read_listings,
    unlisted_files,
    unproven_sources,
)
from warehouse.files.folder import DamagedFile, DataFolder, file_problem, parquet_files, recorded_checksum
from warehouse.files.plain_file import is_out_of_descriptors, patiently, plain, queue_copy
from warehouse.tables.schema import KINDS

Progress = Callable[[int, int], None]  # (files verified, files in all)

_CHUNK_FILES = 64  # files per task of a thread
_UNLISTED_AFTER_S = 3600.0  # a merged file this old will not get a listing any more
_TASK_RUN = re.compile(r"(?P<job>.+)-(?P<index>\d{6,})")  # JOB-000042; repeated attempts end in -a1 and so on
_FOREIGN = ("import-", "dataset-")  # prefixes of the job_id of imported and loaded rows
_IN_FLIGHT = ("leased", "exhausted")
_BUSY_S = 10.0  # for another process that holds the file
_MOST_LOOKS = 5  # attempts at a partition that a compaction is changing

Tasks = Mapping[str, set[int]]  # job_id -> task indexes


@dataclass(frozen=True, kw_only=True)
class Presence:
    """Done tasks without a run in the warehouse, and runs without a done task in the queue."""

    gone: Tasks = field(default_factory=dict)  # done in the queue, but in no file
    unknown: Tasks = field(default_factory=dict)  # in a file, but not done in the queue

    def gone_line(self, root: Path) -> str | None:
        """Return a line that counts the missing runs, None if there are none."""
        if not self.gone:
            return None
        return (
            f"{_in_words(self.gone)} marked done in the queue have no file in {root}; "
            "`python -m farm.doctor repair=true` queues them again"
        )

    def unknown_line(self, root: Path) -> str | None:
        """Return a line that counts the runs that the queue does not know, None if there are none."""
        if not self.unknown:
            return None
        return (
            f"{_in_words(self.unknown)} in {root} are not in its queue. The queue was lost or restored from an older "
            "copy; submit the jobs again to run only the missing tasks."
        )

    def lines(self, root: Path) -> list[str]:
        """Return a line for each side that lacks runs."""
        return [line for line in (self.gone_line(root), self.unknown_line(root)) if line is not None]


@dataclass
class IntegrityReport:
    """Result of a verification: counts and problems."""

    files: int = 0
    without_checksum: int = 0  # files of older versions, which are read in full instead
    damaged: list[DamagedFile] = field(default_factory=list)
    lost: list[Listing] = field(default_factory=list)  # of merged files that are gone
    presence: Presence = field(default_factory=Presence)

    @property
    def is_well(self) -> bool:
        """Return whether nothing is damaged or missing."""
        return not (self.damaged or self.lost or self.presence.gone)

    def lines(self, root: Path) -> list[str]:
        """Return a line for each damaged or missing file, then the counts."""
        lines = [f"damaged: {file.path}: {file.reason}" for file in self.damaged]
        lines += [f"missing: {lost_line(listing)}" for listing in self.lost]
        lines += [f"missing: {line}" for line in [self.presence.gone_line(root)] if line]
        lines += [line for line in [self.presence.unknown_line(root)] if line]
        older = f", {self.without_checksum:,} of them of older versions without a checksum" * bool(
            self.without_checksum
        )
        lines.append(
            f"{root}: {self.files:,} files verified{older}; {len(self.damaged) + len(self.lost):,} damaged or missing"
        )
        return lines

    def as_json(self, root: Path) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "data": str(root),
            "files": self.files,
            "without_checksum": self.without_checksum,
            "damaged": [{"path": str(file.path), "reason": file.reason} for file in self.damaged],
            "missing": [
                {"path": str(listing.path), "listing": str(listing.file), "rows": listing.rows} for listing in self.lost
            ],
            "runs_gone": {job_id: sorted(indexes) for job_id, indexes in self.presence.gone.items()},
            "runs_unknown": {job_id: len(indexes) for job_id, indexes in self.presence.unknown.items()},
        }


def examine(folder: DataFolder, *, progress: Progress | None = None) -> IntegrityReport:
    """Verify every file of the folder in a thread for each CPU that this process may use.

    Files that a compaction deletes in the meantime are left out. Raises `UsageError` if there is no such data folder.
    """
    from warehouse.files.snapshots import MANIFEST

    folder.open()
    report = IntegrityReport()
    paths = list(parquet_files(folder))
    chunks = [paths[start : start + _CHUNK_FILES] for start in range(0, len(paths), _CHUNK_FILES)]
    jobs: list[Callable[[], list[_Verified]]] = [partial(_verify_parquet, chunk) for chunk in chunks]
    jobs += [partial(_verify_snapshot, path) for path in sorted(folder.snapshots.glob(f"[!.]*/{MANIFEST}"))]
    jobs += [partial(_verify_artifact, path) for path in sorted(folder.models.glob("*/*/*.json"))]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting = [pool.submit(job) for job in jobs]
        try:
            for future in as_completed(waiting):
                for check in future.result():
                    report.files += check.files
                    report.without_checksum += not check.has_checksum and check.problem is None
                    if check.problem is not None:
                        report.damaged.append(DamagedFile(check.path, check.problem))
                if progress is not None:
                    progress(report.files, max(report.files, len(paths)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    _examine_listings(folder, report)
    if (problem := queue_problem(folder)) is not None:
        report.damaged.append(DamagedFile(folder.queue, problem))
    report.files += folder.queue.is_file()
    try:
        report.presence = compare(folder)
    except sqlite3.Error:
        pass  # the queue is damaged, as reported above
    except OSError as error:
        if not report.damaged:
            raise
        print_lines([f"warning: the queue is not compared with the runs: {error}"], sys.stderr)
    report.damaged.sort(key=lambda file: file.path)
    return report


@dataclass(frozen=True)
class _Verified:
    path: Path
    has_checksum: bool
    problem: str | None
    files: int = 1


def _verify_parquet(paths: Sequence[Path]) -> list[_Verified]:
    """Verify files; a disk error counts only if it persists over several looks."""
    verified: list[_Verified] = []
    for path in paths:
        try:
            verified.append(_Verified(path, *patiently(partial(file_problem, path))))
        except FileNotFoundError:
            continue
        except OSError as error:
            if is_out_of_descriptors(error):
                raise
            verified.append(_Verified(path, False, error.strerror or str(error)))
    return verified


def _verify_snapshot(manifest: Path) -> list[_Verified]:
    from warehouse.files.snapshots import read_manifest  # DuckDB comes with it, which `compare` does not need

    try:
        snapshot = read_manifest(manifest)
    except (CommandError, OSError) as error:
        return [_Verified(manifest, True, str(error))]
    problems = snapshot.problems()
    verified = [_Verified(manifest.parent, True, f"snapshot {snapshot.name}: {problem}", 0) for problem in problems]
    return [*verified, _Verified(manifest, True, None, 1 + len(snapshot.files))]


def _verify_artifact(path: Path) -> list[_Verified]:
    """Verify an artifact. Its JSON has its files under `files`, as `{path: {"sha256": hex, "bytes": n}}`, and its own
    SHA-256, computed without that key, as `own_sha256`. Older artifacts have neither."""
    try:
        described = json.loads(path.read_bytes())
        if not isinstance(described, dict) or not isinstance(described.get("files"), dict):
            return []  # a file of an older version, or one of an artifact's other files
        if OWN_SHA256 in described and described[OWN_SHA256] != own_sha256(described):
            return [_Verified(path, True, "it is not what was written: its SHA-256 is another")]
        verified = [_Verified(path, True, None)]
        for name, about in described["files"].items():
            named = path.parent / name
            problem = None
            if not named.resolve().is_relative_to(path.parent.resolve()) or not isinstance(about, dict):
                problem = f"it names {name!r}, which is not a file of it"
            elif not named.is_file():
                problem = "it is not there"
            elif named.stat().st_size != about.get("bytes") or sha256_of(named) != about.get("sha256"):
                problem = "it is not what was written: its size or SHA-256 is another"
            verified.append(_Verified(named, True, problem))
        return verified
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        return [_Verified(path, True, f"it cannot be read: {first_line(error)}")]


def _examine_listings(folder: DataFolder, report: IntegrityReport) -> None:
    """Report listings whose files contradict them."""
    known = {file.path for file in report.damaged}

    def add(path: Path, reason: str) -> None:
        if path not in known:
            known.add(path)
            report.damaged.append(DamagedFile(path, reason))

    for kind in KINDS:
        listings = read_listings(folder, kind, lambda file: add(file.path, file.reason))
        with contextlib.suppress(OSError):  # a listing and its merged file cannot be read, as reported above
            report.lost += read_catalogue(folder, kind).gone
        for listing in listings:
            try:
                if listing.checksum is not None and recorded_checksum(listing.path) != listing.checksum:
                    add(listing.path, f"it is another file than {listing.file} names")
                unproven = unproven_sources(folder, kind, listing, listings)
            except (OSError, Unreadable, ValueError):
                continue  # damaged or lost, as reported above
            if unproven.unheld:
                name, why = next(iter(unproven.unheld.items()))
                add(
                    listing.file,
                    f"it hides {len(unproven.unheld):,} files without holding their runs, as {name} ({why})",
                )
        for family in folder.families(kind):
            for path, problem in unlisted_files(folder, kind, family, _UNLISTED_AFTER_S, time.time()):
                if problem != REDUNDANT:
                    add(path, problem)


def compare(folder: DataFolder) -> Presence:
    """Compare the queue with the files that count. A missing queue knows no tasks.

    While a dispatcher runs, tasks in flight are on neither side. Raises `sqlite3.Error` for a damaged queue, `OSError`
    if a merged file cannot be read now.
    """
    # The queue before the files: a task is done only after its run is durable.
    finished = queue_tasks(folder, "= 'done'")
    landed = landed_tasks(folder)
    gone = _minus(finished, landed)
    unknown = _minus(landed, finished)
    if unknown:  # without runs that landed since the queue was read
        unknown = _minus(_minus(unknown, queue_tasks(folder, "= 'done'")), queue_tasks(folder, f"IN {_IN_FLIGHT}"))
    return Presence(gone=gone, unknown=unknown)


def landed_tasks(folder: DataFolder) -> dict[str, set[int]]:
    """Return the tasks whose runs are in files that count, by job.

    File names decide, so damaged files count; damaged merged files hold no runs. Raises `OSError` where a merged file
    cannot be read now.
    """
    tasks: dict[str, set[int]] = defaultdict(set)
    for family in folder.families("runs"):
        for job_id, indexes in _landed_of(folder, family).items():
            tasks[job_id] |= indexes
    return dict(sorted(tasks.items()))


def queue_tasks(folder: DataFolder, states: str) -> dict[str, set[int]]:
    """Return the queue's tasks whose state meets the SQL condition `states`, by job; none without a queue."""
    with _queue(folder) as connection:
        if connection is None:
            return {}
        # One text per job: a row per task would take five times as long.
        jobs = connection.execute(
            f"SELECT job_id, group_concat(task_index) FROM tasks JOIN jobs ON seq = job_seq WHERE state {states} "
            "GROUP BY job_seq ORDER BY job_id"
        )
        return {job_id: set(json.loads(f"[{indexes}]")) for job_id, indexes in jobs}


def queue_problem(folder: DataFolder) -> str | None:
    """Return the problem that SQLite finds in the queue's file, read in full; None if intact or missing."""
    try:
        with _queue(folder, any_tables=True) as connection:
            if connection is None:
                return None
            rows = [text for (text,) in connection.execute("PRAGMA integrity_check(3)")]
    except sqlite3.Error as error:
        return str(error)
    return None if rows == ["ok"] else "; ".join(rows).replace("\n", " ")


def _landed_of(folder: DataFolder, family: str) -> dict[str, set[int]]:
    for _ in range(_MOST_LOOKS):
        try:
            return _landed_now(folder, family)
        except FileNotFoundError:  # a compaction has merged and deleted the file
            continue
    return _landed_now(folder, family)


def _landed_now(folder: DataFolder, family: str) -> dict[str, set[int]]:
    tasks: dict[str, set[int]] = defaultdict(set)
    for path in counting_files(folder, "runs", family):
        if is_merged_name(path.name):
            for job_id, indexes in _tasks_in(path).items():
                tasks[job_id] |= indexes
        elif (task := _TASK_RUN.fullmatch(path.stem)) is not None:
            tasks[task["job"]].add(int(task["index"]))
    return tasks


def _tasks_in(path: Path) -> dict[str, set[int]]:
    """Return the tasks of a merged file's runs; empty for a damaged file.

    Raises `FileNotFoundError` where it is gone, another `OSError` where it cannot be read now.
    """

    def read() -> dict[str, set[int]]:
        file = pq.ParquetFile(plain(path))
        names = [name for name in ("job_id", "task_index", "final") if name in file.schema_arrow.names]
        if not {"job_id", "task_index"} <= set(names):
            return {}
        rows = file.read(columns=names)
        known = pc.and_(pc.is_valid(rows.column("job_id")), pc.is_valid(rows.column("task_index")))
        if "final" in names:
            known = pc.and_(known, pc.fill_null(rows.column("final"), True))
        jobs = rows.filter(known).group_by("job_id").aggregate([("task_index", "list")])
        tasks = zip(jobs.column("job_id").to_pylist(), jobs.column("task_index_list"), strict=True)
        return {job_id: set(indexes.as_py()) for job_id, indexes in tasks if not job_id.startswith(_FOREIGN)}

    return read_intact(path, lambda: patiently(read), {})


@contextlib.contextmanager
def _queue(folder: DataFolder, *, any_tables: bool = False) -> Iterator[sqlite3.Connection | None]:
    """Open the queue's file for reading, also in a read-only folder; None if there is no queue.

    With `any_tables`, also a file without a queue's tables.
    """
    path = folder.queue
    if not path.is_file() or not path.stat().st_size:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(_open_database(path))
        except sqlite3.OperationalError as error:
            # Without write permission, SQLite cannot share the write-ahead log; other errors cannot be handled here.
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            try:
                copy = stack.enter_context(queue_copy(path))
            except OSError:
                raise error from None
            connection = stack.enter_context(_open_database(copy, mode="rw"))
        has_tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('jobs', 'tasks')")
        yield connection if has_tables.fetchone() == (2,) or any_tables else None


@contextlib.contextmanager
def _open_database(path: Path, mode: str = "ro") -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, timeout=_BUSY_S)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # SQLite reads the file only now
        yield connection
    finally:
        connection.close()


def _minus(tasks: Tasks, others: Tasks) -> dict[str, set[int]]:
    remaining = {job_id: indexes - others.get(job_id, set()) for job_id, indexes in tasks.items()}
    return {job_id: indexes for job_id, indexes in remaining.items() if indexes}


def _in_words(tasks: Tasks) -> str:
    runs = sum(map(len, tasks.values()))
    return f"{runs:,} run{'s' if runs != 1 else ''} of {len(tasks):,} job{'s' if len(tasks) != 1 else ''}"
