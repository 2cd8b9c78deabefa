"""Questions that wait for a trace, their answers, and the child processes that trace them.

Start reading at `TraceStore`, a `QueueFile` that all processes of the service share. A question is kept until its
answer is stored, so none is lost with a process. Clients take turns, and each has a share of the waiting places. Old
answers and questions that no client asks for are deleted. On Ray Serve, the answering processes use `RemoteQuestions`.

`TracePool` passes each question to a child, which runs `answer_question` and is ended when it is late or too large.
Children are forked from a server that has imported torch (`conf.children`); the pool's own process never imports it.
Models are built without memory. Code names are those that data may give, or of modules that the operator trusts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from conf.children.running import MEMORY, TIME, ChildServer, Ended, ServerLost, local_server
from conf.cli.own_packages import search_working_folder
from conf.errors import CommandError, EnvironmentProblem
from farm.queue.leftovers import sweep_leftovers
from farm.queue.queue_file import QueueError, QueueFile
from farm.serving.gate import Scrubber, is_within_share
from farm.serving.settings import ServeSettings

if TYPE_CHECKING:
    from torch import nn

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


_LOOK_EVERY_S = 0.05
_BEAT_EVERY_S = 1.0
_STARTS, _START_AGAIN_S = 40, 0.25
_UNUSABLE = (EnvironmentProblem, QueueError)  # errors of the file of questions, as on a full disk


class TracePool:
    """Threads that lease questions and pass each to a child process; a context manager.

    Args:
        store: The questions. Those that ran when the service last ended are queued again.
        limits: Limits of one trace.
        size: Children at the same time. If there are several, one client has at most all but one.
        log: Is called with an event's name and fields.
    """

    def __init__(
        self, store: TraceStore, limits: TraceLimits, size: int, log: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        self._store, self._limits, self._log = store, limits, log
        self._ended = threading.Event()
        self._starting = threading.Lock()
        self._server: ChildServer | None = None
        self._most_of_client = max(1, size - 1)
        self._threads = [threading.Thread(target=self._work, name=f"trace {place}") for place in range(size)]
        self._threads.append(threading.Thread(target=self._beat, name="pulse"))

    def __enter__(self) -> TracePool:
        sweep_leftovers()  # left by children that were killed together with the service
        self._store.recover()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with self._starting:
            if self._server is not None:
                self._server.close()  # with the children, for which threads wait
        for thread in self._threads:
            thread.join()

    def _beat(self) -> None:
        """Keep a server of children, so that no question waits for its imports, and record that there is one."""
        while not self._ended.is_set():
            try:
                self._living_server()
                self._store.beat()
            except _UNUSABLE as error:  # `/readyz` then reports an old pulse
                if not self._ended.is_set():
                    self._log("trace_pool", problem=str(error))
            self._ended.wait(_BEAT_EVERY_S)

    def _work(self) -> None:
        while not self._ended.is_set():
            try:
                leased = self._store.lease(self._most_of_client)
            except _UNUSABLE as error:
                self._log("trace_store", problem=str(error))
                leased = None
            if leased is None:
                self._ended.wait(_LOOK_EVERY_S)
                continue
            key, question = leased
            began = time.monotonic_ns()
            try:
                outcome = self._run_question(key, question)
            except _UNUSABLE as error:
                self._log("trace_store", problem=str(error))
                outcome = "its answer could not be stored"
                with contextlib.suppress(*_UNUSABLE):
                    self._store.interrupted(key, outcome)
            self._log("trace", key=key, outcome=outcome, seconds=round((time.monotonic_ns() - began) / 1e9, 3))

    def _run_question(self, key: str, question: str) -> str:
        """Run one question in a child and store the outcome. Returns the outcome in a word or two, for the log."""
        asked = self._ask_child(question)
        if asked is None and not self._ended.is_set():
            self._store.interrupted(key, "the process that traces are forked from does not start")
            return "not started"
        reply, ended = asked or (b"", None)
        if reply.endswith(b"\n"):
            content = json.loads(reply)
            if "answer" in content:
                self._store.answered(key, content["answer"])
                return "answered"
            self._store.failed(key, content["problem"])
            return "refused"
        if ended is not None and ended.limit is not None:
            limits = {
                TIME: f"longer than the limit of {self._limits.seconds:g} s",
                MEMORY: f"more memory than the limit of {self._limits.memory_bytes / 2**30:g} GiB",
            }
            problem = f"the trace took {limits[ended.limit]}"
            self._store.failed(key, problem)
            return problem
        if self._ended.is_set():
            self._store.interrupted(key, "the service ended while it was traced")
            return "given back"
        self._store.interrupted(key, "its process was killed")
        return "killed"

    def _ask_child(self, question: str) -> tuple[bytes, Ended | None] | None:
        """Return a child's answer and how it ended; None if no child starts, even from another server."""
        for _ in range(_STARTS):
            try:
                return self._living_server().ask(
                    "farm.serving.traces:answer_question",
                    asdict(self._limits),
                    question.encode() + b"\n",
                    time_limit_s=self._limits.seconds,
                    memory_limit_bytes=self._limits.memory_bytes,
                    has_folder="script" in json.loads(question)["job"],
                )
            except ServerLost:
                if self._ended.wait(_START_AGAIN_S):
                    break
        return None

    def _living_server(self) -> ChildServer:
        with self._starting:
            if self._ended.is_set():
                raise ServerLost("the service ends")
            if self._server is not None and not self._server.lives():
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = local_server("farm.serving.traces:prepare")
            server = self._server
        server.hello()  # outside of the lock: the end of the service does not wait for imports
        return server


_SCRIPT = "train.py"
_LARGEST_ANSWER = 4 * 2**20  # characters of JSON: answers are stored


@dataclass(frozen=True)
class TraceLimits:
    """Limits of one trace, and names that it may use. seconds, memory_bytes: of the child, with its own children."""

    data: str
    trust: tuple[str, ...]
    seconds: float
    memory_bytes: int


def prepare() -> None:
    """Import what traces need and load the packaged models, in the process that traces are forked from.

    Runs no operator and leaves no thread. Traces look for measured runs of their job, for which DuckDB's file of views
    is made here: importing and making that would take each of them longer than the trace.
    """
    search_working_folder()
    from featurize.trace import import_tracer

    import_tracer()
    import duckdb

    import learn.estimation.estimating
    import learn.planning.plans  # noqa: F401
    from learn.estimation.estimate_view import TARGETS
    from learn.fitting.artifacts import default_artifact
    from warehouse.reading.connection import make_views_file

    with contextlib.suppress(OSError, duckdb.Error):  # a full disk: each trace tries again
        make_views_file()
    for target in TARGETS:
        default_artifact(target)


def answer_question(limits: dict[str, Any], channel: int) -> None:
    """Read a question from the socket and answer it with `{"answer": ...}` or `{"problem": text}`, as lines of JSON.

    The function of a child process; `limits` has the fields of `TraceLimits`.
    """
    with socket.socket(fileno=channel) as ours, ours.makefile("rwb") as stream:
        trace_limits = TraceLimits(**{**limits, "trust": tuple(limits["trust"])})
        reply = json.dumps(_reply(json.loads(stream.readline()), trace_limits))
        if len(reply) > _LARGEST_ANSWER:
            reply = json.dumps({"problem": f"the answer is larger than {_LARGEST_ANSWER // 2**20} MiB"})
        stream.write(reply.encode() + b"\n")


def _reply(question: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    scrubber = Scrubber(Path(limits.data))
    try:
        return {"answer": scrubber.values(_answer(question["kind"], question["job"], question["options"], limits))}
    except ServerLost:  # not the job's fault: without an answer it is queued again
        raise
    except CommandError as error:
        return {"problem": scrubber.text(str(error))}
    except MemoryError:
        return {"problem": "the job's trace takes more memory than there is"}
    except RecursionError:
        return {"problem": "the job's model is nested too deeply"}
    except Exception as error:  # a library's model may raise anything while it is built or traced
        return {"problem": scrubber.text(f"the job cannot be traced: {type(error).__name__}: {error}"[:2000])}


def _answer(kind: str, job: Mapping[str, Any], options: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    """Return the answer of `learn` to the fields of a `farm.serving.bodies.ClientQuestion`."""
    from learn.estimation.estimate_view import INFO, Note
    from learn.estimation.estimating import devices_that_fit, estimate, largest_batch
    from learn.job.training_job import model_inputs
    from learn.planning.plans import plan

    options = {**options, "data": limits.data}
    if "script" in job:
        return _estimate_script(job, options, limits)
    model, inputs = _model(job, limits.trust), model_inputs(job.get("inputs"), job.get("batch_size"))
    if kind == "plan":
        return plan(model, inputs, **options).to_mapping()
    if kind == "fit" and "devices" in options:
        fits = devices_that_fit(model, inputs, **options)
        return {"find": "devices", "devices": [device_fit.to_mapping() for device_fit in fits]}
    if kind == "fit":
        return {"find": "largest_batch", **largest_batch(model, inputs, **options).to_mapping()}
    estimated = estimate(model, inputs, **options)
    notes = (Note("hf-config", INFO, text) for text in job.get("notes", ()))
    return replace(estimated, notes=(*estimated.notes, *notes)).to_mapping()


def _estimate_script(job: Mapping[str, Any], options: Mapping[str, Any], limits: TraceLimits) -> dict[str, Any]:
    from learn.script.estimating import estimate_script

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _SCRIPT).write_text(job["script"], encoding="utf-8")
        os.chdir(folder)
        estimated = estimate_script(
            ["python", _SCRIPT, *job["script_arguments"]],
            time_limit_s=limits.seconds,
            memory_limit_gib=limits.memory_bytes / 2**30,
            **options,
        )
    os.chdir("/")
    return estimated.to_mapping()


def _model(job: Mapping[str, Any], trust: Sequence[str]) -> Any:
    """Return the trial config, or a factory of the model; nothing is imported before it is called."""
    if "config" in job:
        from featurize.configs.trial import config_of_row

        return config_of_row(json.dumps(job["config"]), trust)
    from featurize.configs.hf_config import with_lora
    from featurize.families import zoo
    from featurize.job.code_names import granted_model

    model, arguments = granted_model(job["model"], trust), json.dumps(job["arguments"])

    def factory() -> nn.Module:
        made = zoo.create(model, arguments)
        return with_lora(made, job["lora"]) if "lora" in job else made

    return factory
