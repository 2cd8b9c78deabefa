"""Child processes that trace questions, each killed when it is late or too large.

Start reading at `TracePool`. Children are forked from a small process that has imported torch; the pool's own process
never imports it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from conf.errors import EnvironmentProblem
from farm.serving.trace_store import TraceStore
from farm.serving.tracing import PRELOADED, TraceLimits, run_question
from learn.script.limits import resident_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_LOOK_EVERY_S = 0.05
_MEMORY_EVERY_S = 0.2
_BEAT_EVERY_S = 1.0
_STARTS, _START_AGAIN_S = 40, 0.25


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
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._most_of_client = max(1, size - 1)
        self._threads = [threading.Thread(target=self._work, name=f"trace {place}") for place in range(size)]
        self._threads.append(threading.Thread(target=self._beat, name="pulse"))

    def __enter__(self) -> TracePool:
        self._store.recover()
        self._store.beat()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

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
        child, receiver = started
        try:
            reply, limit = self._watched(child, receiver)
        finally:
            receiver.close()
            _end(child)
        if reply is not None:
            content = json.loads(reply)
            if "answer" in content:
                self._store.answered(key, content["answer"])
                return "answered"
            self._store.failed(key, content["problem"])
            return "refused"
        if limit is not None:
            self._store.failed(key, limit)
            return limit
        if self._ended.is_set():
            self._store.interrupted(key, "the service ended while it was traced")
            return "given back"
        self._store.interrupted(key, "its process was killed")
        return "killed"

    def _started(self, question: str) -> tuple[BaseProcess, Connection] | None:
        """Start a child. Where the process that children are forked from was killed, another one takes its place."""
        for _ in range(_STARTS):
            receiver, sender = self._context.Pipe(duplex=False)
            child = self._context.Process(target=run_question, args=(question, self._limits, sender))
            with contextlib.closing(sender):
                try:
                    child.start()
                except (OSError, EOFError):
                    receiver.close()
                    if self._ended.wait(_START_AGAIN_S):
                        break
                    continue
            return child, receiver
        return None

    def _watched(self, child: BaseProcess, receiver: Connection) -> tuple[bytes | None, str | None]:
        """Wait until the child has replied or ended. Returns its reply, or which limit it broke."""
        ends = time.monotonic() + self._limits.seconds
        while not receiver.poll(max(0.0, min(_MEMORY_EVERY_S, ends - time.monotonic()))):
            if self._ended.is_set():
                return None, None
            if time.monotonic() >= ends:
                return None, f"the trace took longer than the limit of {self._limits.seconds:g} s"
            if child.pid is not None and resident_bytes(child.pid) > self._limits.memory_bytes:
                return None, f"the trace took more memory than the limit of {self._limits.memory_bytes / 2**30:g} GiB"
        try:
            return receiver.recv_bytes(), None
        except (EOFError, OSError):  # it ended without a word
            return None, None


def _end(child: BaseProcess) -> None:
    """Kill the child's session, in which its own children are, unless it has ended by itself."""
    child.join(_MEMORY_EVERY_S)
    if child.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.join()
