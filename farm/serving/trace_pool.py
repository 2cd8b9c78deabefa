"""Child processes that answer questions with a trace, each ended when it is late or too large.

Start reading at `TracePool`, then at `answer_question`, which a child runs. Children are forked from a server that has
imported torch (`conf.children`); the pool's own process never imports it. Models are built without memory. Code names
are those that data may give, or of modules that the operator trusts.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any

from conf.children.keeper import MEMORY, TIME, Ended
from conf.children.running import ChildServer, ServerLost, local_server
from conf.cli.own_packages import search_working_folder
from conf.errors import CommandError, EnvironmentProblem
from farm.queue.leftovers import sweep_leftovers
from farm.queue.queue_file import QueueError
from farm.serving.gate import Scrubber
from farm.serving.trace_store import TraceStore

if TYPE_CHECKING:
    from torch import nn


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
                    "farm.serving.trace_pool:answer_question",
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
                self._server = local_server("farm.serving.trace_pool:prepare")
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
    from learn.estimation.notes import TARGETS
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
    from learn.estimation.estimating import devices_that_fit, estimate, largest_batch
    from learn.estimation.notes import INFO, Note
    from learn.job.inputs import model_inputs
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
