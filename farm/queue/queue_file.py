"""The queue's SQLite file: its tables, version, transactions, translated errors, and an undo.

Start reading at `SCHEMA`; `farm.queue.jobs` has the operations on the tables. `Submission` removes the tasks that a
submission added before Ctrl-C interrupted it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import EnvironmentProblem, UsageError

QUEUE_VERSION = 1
Result = TypeVar("Result")
_FULL_BYTES = 1 << 20  # SQLite treats a disk with less room as full

# The life of a task:
#
#     queued -> leased -> done          cancel: queued and waiting tasks become `cancelled`; leased ones finish
#       ^         |  \
#       |  retry  |   expired with its attempts exhausted -> exhausted -> (landed as `crashed`) -> done
#       +- waiting+
#
# `tasks` rows are small, which makes updates quick; the configs are in another table. The partial indexes hold only
# what `lease` looks for: a job's queued tasks, and tasks that fall due. Triggers keep `tallies`, so counting reads no
# tasks. Statements are separated by blank lines.
SCHEMA = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY,              -- follows from job_id; 1, 2, ... in older files
    job_id TEXT NOT NULL UNIQUE,
    family TEXT NOT NULL,
    space_json TEXT NOT NULL,
    n INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    policy TEXT NOT NULL,
    priority INTEGER NOT NULL,
    settings_json TEXT NOT NULL,
    device TEXT NOT NULL,
    submitted_at REAL NOT NULL,
    complete INTEGER NOT NULL DEFAULT 0,  -- 1 once all n tasks are in; 0 means: submit again
    ready INTEGER NOT NULL DEFAULT 0,     -- 1 exactly while the job may have queued tasks
    cancelled_at REAL
);

CREATE INDEX jobs_ready ON jobs (priority DESC, submitted_at, seq) WHERE ready = 1;

CREATE TABLE tasks (
    job_seq INTEGER NOT NULL REFERENCES jobs (seq),
    task_index INTEGER NOT NULL,
    state TEXT NOT NULL,                  -- queued | waiting | leased | exhausted | done | cancelled
    attempt INTEGER NOT NULL DEFAULT 0,   -- the current or last one; 0 before the first lease
    due REAL,                             -- waiting: when it is queued again; leased: when the lease ends
    worker TEXT,
    status TEXT,                          -- of the run, once done
    finished_at REAL,
    error TEXT,                           -- of the last failed attempt
    error_at REAL,
    PRIMARY KEY (job_seq, task_index)
) WITHOUT ROWID;

CREATE TABLE configs (
    job_seq INTEGER NOT NULL,
    task_index INTEGER NOT NULL,
    config_json TEXT NOT NULL,
    PRIMARY KEY (job_seq, task_index)
) WITHOUT ROWID;

CREATE INDEX tasks_queued ON tasks (job_seq, task_index) WHERE state = 'queued';

CREATE INDEX tasks_due ON tasks (due) WHERE state IN ('waiting', 'leased');

CREATE INDEX tasks_exhausted ON tasks (job_seq, task_index) WHERE state = 'exhausted';

CREATE INDEX tasks_finished ON tasks (job_seq, finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE tallies (
    job_seq INTEGER NOT NULL,
    state TEXT NOT NULL,
    status TEXT NOT NULL,                 -- empty where the task has none
    count INTEGER NOT NULL,
    PRIMARY KEY (job_seq, state, status)
) WITHOUT ROWID;

CREATE TRIGGER tasks_added AFTER INSERT ON tasks BEGIN
    INSERT INTO tallies VALUES (new.job_seq, new.state, coalesce(new.status, ''), 1)
    ON CONFLICT DO UPDATE SET count = count + 1;
END;

CREATE TRIGGER tasks_moved AFTER UPDATE OF state, status ON tasks BEGIN
    UPDATE tallies SET count = count - 1
    WHERE job_seq = old.job_seq AND state = old.state AND status = coalesce(old.status, '');
    INSERT INTO tallies VALUES (new.job_seq, new.state, coalesce(new.status, ''), 1)
    ON CONFLICT DO UPDATE SET count = count + 1;
END;
"""


class QueueError(OSError):
    """SQLite failed under the queue: disk full, file read-only or damaged, locked for too long."""


class QueueFile:
    """One connection, which threads may share. Reads and single statements are atomic by themselves.

    Args:
        path: The file, which is created in an existing folder.
        busy_timeout_s: Longest time that another process may hold the file.
        prepare: Makes missing tables.

    Raises:
        UsageError: The file is not a queue.
        EnvironmentProblem: The file is damaged, held for too long, or was written by a newer version.
        QueueError: The file cannot be used for another reason, which its errno names.
    """

    def __init__(self, path: Path, busy_timeout_s: float, prepare: Callable[[QueueFile], None]) -> None:
        if not path.parent.is_dir():
            raise UsageError(f"the queue's folder {path.parent} does not exist")
        self.path = path
        self._guard = threading.RLock()
        self._db = self._run(
            lambda: sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
        )
        try:
            prepare(self)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with self._guard:
            self._db.close()

    @contextlib.contextmanager
    def transaction(self, durable: bool = False) -> Iterator[None]:
        """Run an exclusive transaction; `durable` waits until it is synced to the disk."""
        with self._guard:
            if durable:
                self.change("PRAGMA synchronous = FULL")
            self.change("BEGIN IMMEDIATE")
            try:
                yield
                self.change("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self.change("ROLLBACK")
                raise
            finally:
                if durable:
                    self.change("PRAGMA synchronous = NORMAL")

    def all(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Return every row."""
        return self._run(lambda: self._db.execute(sql, values).fetchall())

    def one(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row, None if there is none."""
        rows = self.all(sql, values)
        return rows[0] if rows else None

    def only(self, sql: str, values: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return the row of a statement that always returns one."""
        return self.all(sql, values)[0]

    def change(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> int:
        """Run a statement; return how many rows it changed."""
        return self._run(lambda: self._db.execute(sql, values).rowcount)

    def many(self, sql: str, rows: list[tuple[Any, ...]]) -> int:
        """Run a statement for each of `rows`; return how many rows changed in total."""
        return self._run(lambda: self._db.executemany(sql, rows).rowcount) if rows else 0

    def script(self, sql: str) -> None:
        """Run statements to their end, outside of transactions."""
        self._run(lambda: self._db.executescript(sql))

    def _run(self, question: Callable[[], Result]) -> Result:
        try:
            with self._guard:
                return question()
        except sqlite3.Error as error:
            raise queue_error(error, self.path) from error


def prepare_queue(file: QueueFile) -> None:
    """Make the queue's tables in a new file; check the version of an existing one."""
    file.change("PRAGMA synchronous = NORMAL")
    (version,) = file.only("PRAGMA user_version")
    if version == 0:
        file.change("PRAGMA journal_mode = WAL")
        with file.transaction():
            (version,) = file.only("PRAGMA user_version")  # another process may have made them
            if version == 0:
                if file.one("SELECT 1 FROM sqlite_master"):
                    raise UsageError(f"{file.path} is an SQLite file, but not a queue of this project")
                for statement in SCHEMA.split("\n\n"):
                    file.change(statement)
                file.change(f"PRAGMA user_version = {QUEUE_VERSION}")
        version = version or QUEUE_VERSION
    if version > QUEUE_VERSION:
        raise EnvironmentProblem(
            f"{file.path} was written by a newer version (queue schema {version}, this one reads {QUEUE_VERSION}); "
            "upgrade"
        )


def queue_error(error: sqlite3.Error, path: Path) -> Exception:
    """Translate SQLite's error into an `EnvironmentProblem`, or an `OSError` with the matching errno."""
    text = str(error)
    if any(words in text for words in ("not a database", "malformed", "no such table", "no such column")):
        return EnvironmentProblem(f"{path} is damaged or not a queue: {text}")
    if "locked" in text:
        return EnvironmentProblem(f"{path} is held by another process for too long; end that one or try again")
    code = errno.EIO
    for words, known in (("full", errno.ENOSPC), ("readonly", errno.EROFS), ("unable to open", errno.EACCES)):
        if words in text:
            code = known
    if code == errno.EIO and _is_full(path):  # without room for its shared memory SQLite says "disk I/O error"
        code = errno.ENOSPC
    return QueueError(code, os.strerror(code) if code == errno.ENOSPC else text, str(path))


def _is_full(path: Path) -> bool:
    try:
        return shutil.disk_usage(path.parent).free < _FULL_BYTES
    except OSError:
        return False


_TASKS_AT_ONCE = 20_000  # tasks in one transaction, for which other processes have to wait
_NOT_STARTED = ("queued", "cancelled")  # states of tasks that were added and never leased
_JOB = "n, priority, complete, cancelled_at"


class Submission:
    """A submission in progress: the tasks that it adds, and the job's earlier state."""

    def __init__(self, file: QueueFile, job_id: str) -> None:
        """Record the job's state. Call in the transaction that changes it."""
        self._file = file
        self._job_id = job_id
        self._job_before = file.one(f"SELECT {_JOB} FROM jobs WHERE job_id = ?", (job_id,))
        self._ranges: list[tuple[int, int]] = []  # first and last index

    def note(self, indices: Iterable[int]) -> None:
        """Record the tasks that were added."""
        for index in sorted(indices):
            first = index
            if self._ranges and self._ranges[-1][1] + 1 == index:
                first = self._ranges.pop()[0]
            self._ranges.append((first, index))

    def undo(self) -> None:
        """Remove the added tasks, restore the job and shrink the file. Started tasks, and so their job, stay."""
        (seq,) = self._file.only("SELECT seq FROM jobs WHERE job_id = ?", (self._job_id,))
        for first, last in self._ranges:
            for low in range(first, last + 1, _TASKS_AT_ONCE):
                with self._file.transaction():
                    self._remove(seq, low, min(low + _TASKS_AT_ONCE - 1, last))
        with self._file.transaction(durable=True):
            self._restore(seq)
        (free,), (pages,) = (self._file.only(f"PRAGMA {name}") for name in ("freelist_count", "page_count"))
        if 2 * free > pages:  # otherwise later tasks reuse the space
            with contextlib.suppress(QueueError, ValueError):  # another process is reading
                self._file.all("VACUUM")
                self._file.all("PRAGMA wal_checkpoint(TRUNCATE)")

    def _remove(self, seq: int, low: int, high: int) -> None:
        here = "job_seq = ? AND task_index BETWEEN ? AND ?"
        for state in _NOT_STARTED:
            removed = self._file.change(
                f"DELETE FROM tasks WHERE {here} AND state = ? AND attempt = 0", (seq, low, high, state)
            )
            self._file.change(
                "UPDATE tallies SET count = count - ? WHERE job_seq = ? AND state = ? AND status = ''",
                (removed, seq, state),
            )
        self._file.change(
            f"DELETE FROM configs WHERE {here} AND NOT EXISTS (SELECT 1 FROM tasks "
            "WHERE tasks.job_seq = configs.job_seq AND tasks.task_index = configs.task_index)",
            (seq, low, high),
        )

    def _restore(self, seq: int) -> None:
        if self._job_before is None:
            if self._file.one("SELECT 1 FROM tasks WHERE job_seq = ?", (seq,)) is None:
                self._file.change("DELETE FROM tallies WHERE job_seq = ?", (seq,))
                self._file.change("DELETE FROM jobs WHERE seq = ?", (seq,))
            return
        self._file.change(
            f"UPDATE jobs SET ({_JOB}) = (?, ?, ?, coalesce(cancelled_at, ?)) WHERE seq = ?", (*self._job_before, seq)
        )
        self._file.change(
            "UPDATE tasks SET state = 'cancelled', due = NULL WHERE job_seq = ? AND state IN ('queued', 'waiting') "
            "AND (SELECT cancelled_at FROM jobs WHERE seq = job_seq) IS NOT NULL",
            (seq,),
        )
