"""Child processes that trace questions, each ended when it is late or too large, with all that it started.

Start reading at `TracePool`. Children are forked from a small process that has imported torch; the pool's own process
never imports it. `farm.serving.tracing` has what they do.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from conf.children.keeper import MEMORY, TIME
from conf.errors import EnvironmentProblem
from farm.leftovers import sweep_folders
from farm.serving.trace_store import TraceStore
from farm.serving.tracing import EXIT_CODES, PRELOADED, TraceLimits, run_question

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_LOOK_EVERY_S = 0.05
_END_S = 15.0  # for a child to end its own children, which takes milliseconds
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
        sweep_folders()  # of children that were killed together with the service
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
            reply = self._reply(child, receiver)
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
        if (limit := self._limit_reached(child)) is not None:
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
            receiver, sender = self._context.Pipe()
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

    def _reply(self, child: BaseProcess, receiver: Connection) -> bytes | None:
        """Wait until the child has replied or ended. Returns its reply."""
        while not wait([receiver, child.sentinel], _LOOK_EVERY_S):
            if self._ended.is_set():
                return None
        try:
            return receiver.recv_bytes() if receiver.poll() else None
        except (EOFError, OSError):  # it ended without a word
            return None

    def _limit_reached(self, child: BaseProcess) -> str | None:
        """Return which limit an ended child had reached, in words."""
        limits: dict[int | None, str] = {
            EXIT_CODES[TIME]: f"longer than the limit of {self._limits.seconds:g} s",
            EXIT_CODES[MEMORY]: f"more memory than the limit of {self._limits.memory_bytes / 2**30:g} GiB",
        }
        limit = limits.get(child.exitcode)
        return None if limit is None else f"the trace took {limit}"


def _end(child: BaseProcess) -> None:
    """Wait until the child has ended, with all that it started: it sees that its connection was closed."""
    child.join(_END_S)
    child.kill()
    child.join()
