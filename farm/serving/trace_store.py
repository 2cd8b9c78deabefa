"""Questions that wait for a trace, and their answers: SQLite, shared by all processes of the service.

Start reading at `TraceStore`. A question is kept until its answer is stored, so that none is lost with a process.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import EnvironmentProblem

QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"
MOST_ATTEMPTS = 3  # of a question whose child process, or whose service, was killed
_KEPT = 10_000  # answers
_BUSY_S = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS questions (
    key TEXT PRIMARY KEY, question TEXT NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    asked_at REAL NOT NULL, started_at REAL, ended_at REAL, answer TEXT, problem TEXT
);
CREATE INDEX IF NOT EXISTS waiting ON questions (state, asked_at);
CREATE TABLE IF NOT EXISTS pulse (place INTEGER PRIMARY KEY CHECK (place = 0), at REAL NOT NULL);
"""


@dataclass(frozen=True)
class Traced:
    """A question's row. answer: of state `done`; problem: of `failed`, in words; times are seconds since 1970."""

    key: str
    state: str
    asked_at: float
    started_at: float | None
    ended_at: float | None
    answer: dict[str, Any] | None
    problem: str | None

    @property
    def is_over(self) -> bool:
        """Return whether there is an answer, or a reason why there is none."""
        return self.state in (DONE, FAILED)


class TraceStore:
    """The file of questions. Threads share one connection; processes open their own.

    Args:
        path: The file, made on first use.
        clock: Seconds since 1970.

    Raises:
        EnvironmentProblem: The file cannot be opened or written, or is no database.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._guard = threading.Lock()
        with self._explained():
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)

    def ask(self, key: str, question: str, most_waiting: int, fresh_s: float) -> Traced | None:
        """Return the question's row, added where it is new, or where its answer is older than `fresh_s`.

        Returns None where `most_waiting` questions wait already.
        """
        now = self._clock()
        with self._transaction():
            row = self._row(key)
            if row is not None and not (row.is_over and now - (row.ended_at or 0.0) > fresh_s):
                return row
            (waiting,) = self._db.execute(
                "SELECT count(*) FROM questions WHERE state IN (?, ?)", (QUEUED, RUNNING)
            ).fetchone()
            if waiting >= most_waiting:
                return None
            self._db.execute(
                "INSERT OR REPLACE INTO questions (key, question, state, asked_at) VALUES (?, ?, ?, ?)",
                (key, question, QUEUED, now),
            )
            self._forget_old()
            return self._row(key)

    def get(self, key: str) -> Traced | None:
        """Return the question's row, or None."""
        with self._guard, self._explained():
            return self._row(key)

    def lease(self) -> tuple[str, str] | None:
        """Take the question that has waited longest. Returns its key and its text, or None."""
        with self._guard, self._explained():
            row = self._db.execute(
                "UPDATE questions SET state = ?, started_at = ?, attempts = attempts + 1 WHERE key = "
                "(SELECT key FROM questions WHERE state = ? ORDER BY asked_at, key LIMIT 1) RETURNING key, question",
                (RUNNING, self._clock(), QUEUED),
            ).fetchone()
            return None if row is None else (row[0], row[1])

    def answered(self, key: str, answer: dict[str, Any]) -> None:
        """Store an answer."""
        self._end(key, DONE, json.dumps(answer), None)

    def failed(self, key: str, problem: str) -> None:
        """Store why there is no answer."""
        self._end(key, FAILED, None, problem)

    def interrupted(self, key: str, problem: str) -> None:
        """Ask again what a killed process left, or give it up after `MOST_ATTEMPTS`."""
        with self._transaction():
            self._give_back("key = ?", (key,), problem)

    def recover(self) -> int:
        """Ask again what ran when the service ended. Returns how many questions that are."""
        with self._transaction():
            return self._give_back("state = ?", (RUNNING,), "the service ended while it was traced")

    def beat(self) -> None:
        """Record that the pool of traces is alive."""
        with self._guard, self._explained():
            self._db.execute("INSERT OR REPLACE INTO pulse VALUES (0, ?)", (self._clock(),))

    def pulse_age_s(self) -> float | None:
        """Return the seconds since the pool's last sign of life; None where there was none."""
        with self._guard, self._explained():
            row = self._db.execute("SELECT at FROM pulse").fetchone()
        return None if row is None else max(0.0, self._clock() - row[0])

    def counts(self) -> dict[str, int]:
        """Return how many questions are in each state."""
        with self._guard, self._explained():
            rows = self._db.execute("SELECT state, count(*) FROM questions GROUP BY state").fetchall()
        return {**dict.fromkeys((QUEUED, RUNNING, DONE, FAILED), 0), **dict(rows)}

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _end(self, key: str, state: str, answer: str | None, problem: str | None) -> None:
        with self._guard, self._explained():
            self._db.execute(
                "UPDATE questions SET state = ?, ended_at = ?, answer = ?, problem = ? WHERE key = ?",
                (state, self._clock(), answer, problem, key),
            )

    def _give_back(self, where: str, values: tuple[Any, ...], problem: str) -> int:
        self._db.execute(
            f"UPDATE questions SET state = ?, ended_at = ?, problem = ? WHERE {where} AND attempts >= ?",
            (FAILED, self._clock(), f"{problem}, {MOST_ATTEMPTS} times", *values, MOST_ATTEMPTS),
        )
        return self._db.execute(
            f"UPDATE questions SET state = ?, started_at = NULL WHERE {where} AND state = ?",
            (QUEUED, *values, RUNNING),
        ).rowcount

    def _forget_old(self) -> None:
        self._db.execute(
            "DELETE FROM questions WHERE state IN (?, ?) AND ended_at <= (SELECT ended_at FROM questions "
            "WHERE state IN (?, ?) ORDER BY ended_at DESC LIMIT 1 OFFSET ?)",
            (DONE, FAILED, DONE, FAILED, _KEPT),
        )

    def _row(self, key: str) -> Traced | None:
        row = self._db.execute(
            "SELECT key, state, asked_at, started_at, ended_at, answer, problem FROM questions WHERE key = ?", (key,)
        ).fetchone()
        if row is None:
            return None
        key, state, asked_at, started_at, ended_at, answer, problem = row
        parsed = None if answer is None else json.loads(answer)
        return Traced(key, state, asked_at, started_at, ended_at, parsed, problem)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guard, self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise EnvironmentProblem(f"{self._path.name} cannot be used: {error}") from error
