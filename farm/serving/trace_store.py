"""Questions that wait for a trace, and their answers: SQLite, shared by all processes of the service.

Start reading at `TraceStore`, whose file is a `QueueFile`, as the farm's queue is. A question is kept until its answer
is stored, so none is lost with a process. Clients take turns, and each has a share of the waiting places. Old answers
and questions that no client asks for are deleted. On Ray Serve, the answering processes use `RemoteQuestions`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from farm.queue.queue_file import QueueFile
from farm.serving.gate import is_within_share
from farm.serving.settings import ServeSettings

QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"
MOST_ATTEMPTS = 3  # attempts at a question whose child process, or whose service, was killed
_BUSY_S = 10.0
_LEAST_KEPT_S = 600.0  # an answer is kept at least this long for its client
_WANTED_EVERY_S = 30.0  # between updates of a question's last use
_WAL_BYTES = 4 * 2**20
_FREE_PAGES = 256  # free pages to keep in the file for the next questions
_GIVEN_BACK_PAGES = 4096  # pages to free at a time, while others wait
_VERSION = 3  # version of the file; questions of another version are deleted
_SCHEMA = """
CREATE TABLE IF NOT EXISTS questions (
    key TEXT PRIMARY KEY, client TEXT NOT NULL, question TEXT NOT NULL, state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, asked_at REAL NOT NULL, wanted_at REAL NOT NULL, started_at REAL,
    ended_at REAL, answer TEXT, problem TEXT, bytes INTEGER AS
    (500 + length(question) + ifnull(length(answer), 0) + ifnull(length(problem), 0)) STORED
);
CREATE INDEX IF NOT EXISTS waiting ON questions (state, client, asked_at, bytes);
CREATE INDEX IF NOT EXISTS ended ON questions (state, ended_at, bytes);
CREATE INDEX IF NOT EXISTS turns ON questions (client, started_at);
CREATE TABLE IF NOT EXISTS pulse (place INTEGER PRIMARY KEY CHECK (place = 0), at REAL NOT NULL);
"""


@dataclass(frozen=True)
class QuestionRow:
    """A question's row. answer: of state `done`; problem: of `failed`, in words; times are seconds since 1970.

    wanted_at   when a client last asked for it, to within half a minute
    """

    key: str
    state: str
    wanted_at: float
    ended_at: float | None
    answer: dict[str, Any] | None
    problem: str | None

    @property
    def is_finished(self) -> bool:
        """Return whether there is an answer or a reason for its absence."""
        return self.state in (DONE, FAILED)


def _prepare(file: QueueFile) -> None:
    """Make the tables in a file that frees space; delete the contents of another version."""
    if file.only("PRAGMA user_version") != (_VERSION,):
        file.change("PRAGMA auto_vacuum = INCREMENTAL")
        file.change("PRAGMA journal_mode = WAL")
        file.change("DROP TABLE IF EXISTS questions")
        file.change("VACUUM")
        file.change(f"PRAGMA user_version = {_VERSION}")
    file.change("PRAGMA synchronous = NORMAL")
    file.change(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    file.script(_SCHEMA)


class TraceStore:
    """The file of questions. Threads share one connection; processes open their own.

    Args:
        path: The file, made on first use.
        settings: Limits of the waiting and the stored questions, and how long an answer is reused.
        clock: Seconds since 1970.

    Raises:
        EnvironmentProblem: The file is not a database, or is held by another process for too long.
        QueueError: The file cannot be opened or written.
    """

    def __init__(self, path: Path, settings: ServeSettings, clock: Callable[[], float] = time.time) -> None:
        self._waiting = settings.limits.queued
        self._stored_bytes = 2**20 * settings.limits.stored_mib
        self._fresh_s = settings.cache_s
        self._clock = clock
        self._file = QueueFile(path, _BUSY_S, _prepare)

    async def ask(self, key: str, question: str, client: str) -> QuestionRow | None:
        """Return the question's row; add it if it is new or its answer is too old.

        Returns None if the client's share of the waiting places is used up.
        """
        now = self._clock()
        with self._file.transaction():
            row = self._row(key)
            if row is not None and not (row.is_finished and now - (row.ended_at or 0.0) > self._fresh_s):
                self._want(row, now)
                self._take_over(row, client)
                return row
            if not self._has_share(client, len(question)):
                return None
            self._file.change(
                "INSERT OR REPLACE INTO questions (key, client, question, state, asked_at, wanted_at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (key, client, question, QUEUED, now, now),
            )
            return self._row(key)

    async def get(self, key: str) -> QuestionRow | None:
        """Return the question's row, or None."""
        row = self._row(key)
        if row is not None:
            self._want(row, self._clock())
        return row

    def lease(self, most_of_client: int) -> tuple[str, str] | None:
        """Take the oldest question of the client whose last turn is longest ago. Returns its key and text, or None.

        A client with `most_of_client` questions in progress is skipped.
        """
        row = self._file.one(
            "UPDATE questions SET state = :running, started_at = :now, attempts = attempts + 1 WHERE key = ("
            "  SELECT key FROM questions WHERE state = :queued AND client = ("
            "    SELECT client FROM questions AS waiting WHERE state = :queued AND client NOT IN ("
            "      SELECT client FROM questions WHERE state = :running GROUP BY client HAVING count(*) >= :most"
            "    ) GROUP BY client ORDER BY"
            "      (SELECT max(started_at) FROM questions AS led WHERE led.client = waiting.client),"
            "      min(asked_at), client LIMIT 1"
            "  ) ORDER BY asked_at, key LIMIT 1"
            ") RETURNING key, question",
            {"running": RUNNING, "queued": QUEUED, "now": self._clock(), "most": most_of_client},
        )
        return None if row is None else (row[0], row[1])

    async def forget(self) -> None:
        """Delete old answers, and questions that no client asks for. Gives their space back to the disk.

        Beyond `limits.stored_mib`, the oldest answers go first, however young.
        """
        await asyncio.to_thread(self._forget)

    def _forget(self) -> None:
        ends = self._clock() - max(self._fresh_s, _LEAST_KEPT_S)
        with self._file.transaction():
            self._file.change(
                "DELETE FROM questions WHERE state IN (?, ?) AND ended_at < ? AND wanted_at < ?",
                (DONE, FAILED, ends, ends),
            )
            self._file.change("DELETE FROM questions WHERE state = ? AND wanted_at < ?", (QUEUED, ends))
            (stored,) = self._file.only("SELECT ifnull(sum(bytes), 0) FROM questions")
            if stored > self._stored_bytes:
                self._file.change(
                    "DELETE FROM questions WHERE key IN (SELECT key FROM (SELECT key, sum(bytes) OVER"
                    " (ORDER BY ended_at, key) - bytes AS older_bytes FROM questions WHERE state IN (?, ?))"
                    " WHERE older_bytes < ?)",
                    (DONE, FAILED, stored - self._stored_bytes),
                )
        if self._file.only("PRAGMA freelist_count")[0] > _FREE_PAGES:
            # A statement by itself would stop after the first page.
            self._file.script(f"PRAGMA incremental_vacuum({_GIVEN_BACK_PAGES}); PRAGMA wal_checkpoint;")

    def answered(self, key: str, answer: dict[str, Any]) -> None:
        """Store an answer."""
        self._end(key, DONE, json.dumps(answer), None)

    def failed(self, key: str, problem: str) -> None:
        """Store the reason why there is no answer."""
        self._end(key, FAILED, None, problem)

    def interrupted(self, key: str, problem: str) -> None:
        """Queue a killed process's question again, or fail it after `MOST_ATTEMPTS`."""
        with self._file.transaction():
            self._give_back("key = ?", (key,), problem)

    def recover(self) -> None:
        """Queue the questions again that ran when the service ended."""
        with self._file.transaction():
            self._file.change("DELETE FROM pulse")  # the last service's
            self._give_back("state = ?", (RUNNING,), "the service ended while it was traced")

    def beat(self) -> None:
        """Record that the pool of traces is alive."""
        self._file.change("INSERT OR REPLACE INTO pulse VALUES (0, ?)", (self._clock(),))

    async def pulse_age_s(self) -> float | None:
        """Return the seconds since the pool's last sign of life; None if it never had one."""
        row = self._file.one("SELECT at FROM pulse")
        return None if row is None else max(0.0, self._clock() - row[0])

    async def counts(self) -> dict[str, int]:
        """Return how many questions are in each state."""
        rows = self._file.all("SELECT state, count(*) FROM questions GROUP BY state")
        return {**dict.fromkeys((QUEUED, RUNNING, DONE, FAILED), 0), **dict(rows)}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _end(self, key: str, state: str, answer: str | None, problem: str | None) -> None:
        self._file.change(
            "UPDATE questions SET state = ?, ended_at = ?, answer = ?, problem = ?, question = '' WHERE key = ?",
            (state, self._clock(), answer, problem, key),
        )

    def _give_back(self, where: str, values: tuple[Any, ...], problem: str) -> None:
        self._file.change(
            f"UPDATE questions SET state = ?, ended_at = ?, problem = ?, question = '' WHERE {where} AND attempts >= ?",
            (FAILED, self._clock(), f"{problem}, {MOST_ATTEMPTS} times", *values, MOST_ATTEMPTS),
        )
        self._file.change(
            f"UPDATE questions SET state = ?, started_at = NULL WHERE {where} AND state = ?",
            (QUEUED, *values, RUNNING),
        )

    def _has_share(self, client: str, size: int) -> bool:
        rows = self._file.all(
            "SELECT client, count(*), sum(bytes) FROM questions WHERE state IN (?, ?) GROUP BY client",
            (QUEUED, RUNNING),
        )
        waiting, own_bytes = next((row[1:] for row in rows if row[0] == client), (0, 0))
        n, n_bytes = sum(row[1] for row in rows), sum(row[2] for row in rows)
        has_place = is_within_share(waiting, 1, n, self._waiting)
        return has_place and is_within_share(own_bytes, size, n_bytes, self._stored_bytes)

    def _want(self, row: QuestionRow, now: float) -> None:
        """Note that a client asks for the row."""
        if now - row.wanted_at > _WANTED_EVERY_S:
            self._file.change("UPDATE questions SET wanted_at = ? WHERE key = ?", (now, row.key))

    def _take_over(self, row: QuestionRow, client: str) -> None:
        """Give a waiting question to a client with fewer questions than its own: its turn comes sooner."""
        if row.state == QUEUED:
            of_client = "(SELECT count(*) FROM questions AS o WHERE o.state = :queued AND o.client = {})"
            self._file.change(
                "UPDATE questions SET client = :client WHERE key = :key AND client != :client AND "
                f"{of_client.format(':client')} < {of_client.format('questions.client')} - 1",
                {"queued": QUEUED, "client": client, "key": row.key},
            )

    def _row(self, key: str) -> QuestionRow | None:
        query = "SELECT key, state, wanted_at, ended_at, answer, problem FROM questions WHERE key = ?"
        row = self._file.one(query, (key,))
        if row is None:
            return None
        key, state, wanted_at, ended_at, answer, problem = row
        return QuestionRow(key, state, wanted_at, ended_at, None if answer is None else json.loads(answer), problem)


class RemoteQuestions:
    """The questions of a service on Ray Serve, with `TraceStore`'s methods. handle: of the deployment `Traces`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def ask(self, key: str, question: str, client: str) -> QuestionRow | None:
        return cast("QuestionRow | None", await self._handle.ask.remote(key, question, client))

    async def get(self, key: str) -> QuestionRow | None:
        return cast("QuestionRow | None", await self._handle.get.remote(key))

    async def forget(self) -> None:
        await self._handle.forget.remote()

    async def counts(self) -> dict[str, int]:
        return cast("dict[str, int]", await self._handle.counts.remote())

    async def pulse_age_s(self) -> float | None:
        return cast("float | None", await self._handle.pulse_age_s.remote())

    def close(self) -> None:
        """Do nothing: other replicas use the deployment."""
