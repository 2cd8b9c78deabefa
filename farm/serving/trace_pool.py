"""Child processes that trace questions, each ended when it is late or too large, with all that it started.

Start reading at `TracePool`. Children are forked from a server that has imported torch (`conf.children`); the pool's
own process never imports it. `farm.serving.tracing` has what they do.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import wait  # as `select.select`, for any number of descriptors

from conf.children.keeper import MEMORY, TIME
from conf.children.running import Child, ChildServer, ServerLost, local_server
from conf.errors import EnvironmentProblem
from farm.queue.leftovers import sweep_leftovers
from farm.serving.trace_store import TraceStore
from farm.serving.tracing import TraceLimits

_LOOK_EVERY_S = 0.05
_END_S = 15.0  # for a child to end its own children, which takes milliseconds
_BEAT_EVERY_S = 1.0
_STARTS, _START_AGAIN_S = 40, 0.25
_RECEIVE_BYTES = 1 << 18


class TracePool:
    """Threads that lease questions and give each to a child process; a context manager.

    Args:
        store: The questions. What ran when the service last ended is asked again.
        limits: Of one trace.
        size: Children at the same time. One of several is kept from a client that has all the others.
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
        sweep_leftovers()  # of children that were killed together with the service
        self._store.recover()
        self._store.beat()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self._server is not None:
            self._server.close()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_EVERY_S):
            with contextlib.suppress(EnvironmentProblem):  # a full disk: `/readyz` says that the pulse is old
                self._store.beat()

    def _work(self) -> None:
        while not self._ended.is_set():
            try:
                leased = self._store.lease(self._most_of_client)
            except EnvironmentProblem as error:
                self._log("trace_store", problem=str(error))
                leased = None
            if leased is None:
                self._ended.wait(_LOOK_EVERY_S)
                continue
            key, question = leased
            began = time.monotonic_ns()
            try:
                outcome = self._traced(key, question)
            except EnvironmentProblem as error:  # the answer cannot be stored
                outcome = str(error)
                with contextlib.suppress(EnvironmentProblem):
                    self._store.interrupted(key, outcome)
            self._log("trace", key=key, outcome=outcome, seconds=round((time.monotonic_ns() - began) / 1e9, 3))

    def _traced(self, key: str, question: str) -> str:
        """Run one question in a child and store what came of it. Returns that in a word or two, for the log."""
        started = self._started(question)
        if started is None:
            self._store.interrupted(key, "the process that traces are forked from does not start")
            return "not started"
        child, channel = started
        with channel, child.line:
            reply, limit_reached = self._reply(child, channel)
        if reply.endswith(b"\n"):
            content = json.loads(reply)
            if "answer" in content:
                self._store.answered(key, content["answer"])
                return "answered"
            self._store.failed(key, content["problem"])
            return "refused"
        if (limit := self._in_words(limit_reached)) is not None:
            self._store.failed(key, limit)
            return limit
        if self._ended.is_set():
            self._store.interrupted(key, "the service ended while it was traced")
            return "given back"
        self._store.interrupted(key, "its process was killed")
        return "killed"

    def _started(self, question: str) -> tuple[Child, socket.socket] | None:
        """Start a child. Where the process that children are forked from was killed, another one takes its place."""
        for _ in range(_STARTS):
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    child = self._living_server().start(
                        "farm.serving.tracing:answer_question",
                        asdict(self._limits),
                        theirs,
                        time_limit_s=self._limits.seconds,
                        memory_limit_bytes=self._limits.memory_bytes,
                        has_folder="script" in json.loads(question),
                    )
                except ServerLost:
                    ours.close()
                    if self._ended.wait(_START_AGAIN_S):
                        break
                    continue
            with contextlib.suppress(OSError):  # it has ended: its line says how
                ours.sendall(question.encode() + b"\n")
            return child, ours
        return None

    def _living_server(self) -> ChildServer:
        with self._starting:
            if self._server is not None and not self._server.lives():
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = local_server("farm.serving.tracing:prepare")
            self._server.hello()
            return self._server

    def _reply(self, child: Child, channel: socket.socket) -> tuple[bytes, str | None]:
        """Return what the child has replied once it has ended, with all that it started, and the limit it reached."""
        reply = b""
        while not reply.endswith(b"\n") and not self._ended.is_set():
            if wait([channel], _LOOK_EVERY_S):
                data = _received(channel)
                if not data:
                    break
                reply += data
        child.end()
        try:
            return reply, child.wait(_END_S).limit
        except ServerLost:
            return reply, None

    def _in_words(self, limit: str | None) -> str | None:
        """Return the sentence for a limit that a child has reached."""
        limits = {
            TIME: f"longer than the limit of {self._limits.seconds:g} s",
            MEMORY: f"more memory than the limit of {self._limits.memory_bytes / 2**30:g} GiB",
        }
        return None if limit is None else f"the trace took {limits[limit]}"


def _received(channel: socket.socket) -> bytes:
    try:
        return channel.recv(_RECEIVE_BYTES)
    except ConnectionResetError:
        return b""
