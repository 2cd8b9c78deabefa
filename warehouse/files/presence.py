"""Compares the runs in the queue with those in the warehouse: which are missing, and which the queue does not know.

Start reading at `compare`. Both sides are read cheaply: small files by their names, merged ones by three columns, and
the queue's file as any SQLite client would, since its commands are in a package that this one does not import.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from warehouse.files.counting import counting_files
from warehouse.files.folder import DataFolder
from warehouse.files.merged import is_merged_name
from warehouse.files.plain_file import is_passing, patiently, plain, queue_copy

_TASK_RUN = re.compile(r"(?P<job>.+)-(?P<index>\d{6,})")  # JOB-000042; attempts that were repeated end in -a1
_FOREIGN = ("import-", "dataset-")  # prefixes of the job_id of rows that no queue has run
_IN_FLIGHT = ("leased", "exhausted")
_BUSY_S = 10.0  # waits for who holds the file
_MOST_LOOKS = 5  # at a partition that a compaction is changing

Tasks = Mapping[str, np.ndarray]  # job_id -> task indexes, sorted


@dataclass(frozen=True, kw_only=True)
class Presence:
    """Done tasks without a run in the warehouse, and runs without a done task in the queue."""

    gone: Tasks = field(default_factory=dict)  # done in the queue, in no file
    unknown: Tasks = field(default_factory=dict)  # in a file, and the queue does not have the task as done

    def gone_line(self, root: Path) -> str | None:
        """Return a line that counts the missing runs, None if there are none."""
        if not self.gone:
            return None
        return (
            f"{_count(self.gone)} marked done in the queue have no file in {root}; "
            "`python -m farm.doctor repair=true` queues them again"
        )

    def unknown_line(self, root: Path) -> str | None:
        """Return a line that counts the runs that the queue does not know, None if there are none."""
        if not self.unknown:
            return None
        return (
            f"{_count(self.unknown)} in {root} are not in its queue. The queue was lost or restored from an older "
            "copy; submit the jobs again to run only the missing tasks."
        )

    def lines(self, root: Path) -> list[str]:
        """Return a line for each side that lacks runs."""
        return [line for line in (self.gone_line(root), self.unknown_line(root)) if line is not None]


def compare(folder: DataFolder) -> Presence:
    """Compare the queue with the files that count. A missing queue knows no tasks.

    While a dispatcher runs, tasks in flight are on neither side. Raises `sqlite3.Error` for a damaged queue, `OSError`
    where a merged file cannot be read now.
    """
    # Before the files: a task is done only after its run is durable.
    finished = queue_tasks(folder, "= 'done'")
    landed = landed_tasks(folder)
    gone = _minus(finished, landed)
    unknown = _minus(landed, finished)
    if unknown:  # what landed since the queue was read
        unknown = _minus(_minus(unknown, queue_tasks(folder, "= 'done'")), queue_tasks(folder, f"IN {_IN_FLIGHT}"))
    return Presence(gone=gone, unknown=unknown)


def landed_tasks(folder: DataFolder, families: set[str] | None = None) -> dict[str, np.ndarray]:
    """Return the tasks whose runs are in files that count, by job; only those of `families` if given.

    File names decide, so damaged files count; damaged merged files hold no runs. Raises `OSError` where a merged file
    cannot be read now.
    """
    indexes: dict[str, list[np.ndarray]] = {}
    for family in folder.families("runs"):
        if families is None or family in families:
            for job_id, tasks in _landed_of(folder, family).items():
                indexes.setdefault(job_id, []).append(tasks)
    return {job_id: np.unique(np.concatenate(tasks)) for job_id, tasks in sorted(indexes.items())}


def queue_tasks(folder: DataFolder, states: str) -> dict[str, np.ndarray]:
    """Return the queue's tasks whose state meets the SQL condition `states`, by job; none without a queue."""
    with _queue(folder) as connection:
        if connection is None:
            return {}
        # One text a job: a row a task would take five times as long.
        jobs = connection.execute(
            f"SELECT job_id, group_concat(task_index) FROM tasks JOIN jobs ON seq = job_seq WHERE state {states} "
            "GROUP BY job_seq ORDER BY job_id"
        )
        return {job_id: np.unique(np.array(json.loads(f"[{tasks}]"), np.int64)) for job_id, tasks in jobs}


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


def _landed_of(folder: DataFolder, family: str) -> dict[str, np.ndarray]:
    for _ in range(_MOST_LOOKS):
        try:
            return _landed_now(folder, family)
        except FileNotFoundError:  # a compaction deleted a merged file that was merged once more
            continue
    return _landed_now(folder, family)


def _landed_now(folder: DataFolder, family: str) -> dict[str, np.ndarray]:
    small: dict[str, list[int]] = {}
    merged: dict[str, list[np.ndarray]] = {}
    for path in counting_files(folder, "runs", family):
        if is_merged_name(path.name):
            for job_id, indexes in _tasks_in(path).items():
                merged.setdefault(job_id, []).append(indexes)
        elif (task := _TASK_RUN.fullmatch(path.stem)) is not None:
            small.setdefault(task["job"], []).append(int(task["index"]))
    for job_id, numbers in small.items():
        merged.setdefault(job_id, []).append(np.array(numbers, np.int64))
    return {job_id: np.concatenate(parts) for job_id, parts in merged.items()}


def _tasks_in(path: Path) -> dict[str, np.ndarray]:
    """Return the tasks of a merged file's runs; none of a damaged one.

    Raises `FileNotFoundError` where it is gone, another `OSError` that names it where it cannot be read now.
    """
    try:
        return patiently(lambda: _tasks_read_from(path))
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and is_passing(error):
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        return {}


def _tasks_read_from(path: Path) -> dict[str, np.ndarray]:
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
    return {job_id: indexes.values.to_numpy() for job_id, indexes in tasks if not job_id.startswith(_FOREIGN)}


@contextlib.contextmanager
def _queue(folder: DataFolder, *, any_tables: bool = False) -> Iterator[sqlite3.Connection | None]:
    """Open the queue's file for reading, also in a read-only folder; None if there is no queue.

    With `any_tables` also a file that has not a queue's tables.
    """
    path = folder.queue
    if not path.is_file() or not path.stat().st_size:
        yield None
        return
    with contextlib.ExitStack() as held:
        try:
            connection = held.enter_context(_open_database(path))
        except sqlite3.OperationalError as error:
            # Without write permission, SQLite cannot share the log of changes; other errors cannot be handled here.
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            try:
                copy = held.enter_context(queue_copy(path))
            except OSError:
                raise error from None
            connection = held.enter_context(_open_database(copy, mode="rw"))
        has_tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('jobs', 'tasks')")
        yield connection if has_tables.fetchone() == (2,) or any_tables else None


@contextlib.contextmanager
def _open_database(path: Path, mode: str = "ro") -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, timeout=_BUSY_S)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # nothing is read before
        yield connection
    finally:
        connection.close()


def _minus(tasks: Tasks, others: Tasks) -> dict[str, np.ndarray]:
    left = {
        job_id: np.setdiff1d(indexes, others[job_id]) if job_id in others else indexes
        for job_id, indexes in tasks.items()
    }
    return {job_id: indexes for job_id, indexes in left.items() if len(indexes)}


def _count(tasks: Tasks) -> str:
    runs = sum(map(len, tasks.values()))
    return f"{runs:,} run{'s' if runs != 1 else ''} of {len(tasks):,} job{'s' if len(tasks) != 1 else ''}"
