"""Run a function over items in child processes: a child that dies, hangs or runs out of memory costs its item alone.

Start reading at `in_processes`. Each free child gets the next item, so that slow ones hold up nothing. Children are
forked from a server (`conf.children`) that has imported their modules.
"""

from __future__ import annotations

import os
import pkgutil
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from conf.children.running import ChildServer, local_server
from featurize.trace import import_tracer

_NOTHING_KEPT = 64  # items after which a child is replaced: memory that models and libraries leave adds up
WITHOUT_TORCH = "featurize.trace.light_imports:without_compiler"
WITH_TORCH = "learn.rows.processes:import_tracing"


def import_tracing() -> None:
    """Import the tracer and what reads its traces, in the process that children are forked from."""
    import_tracer()
    import learn.job.traced  # noqa: F401


@dataclass(frozen=True)
class NoResult:
    """The reason why an item has no result, and the seconds that it took."""

    reason: str
    seconds: float


def in_processes(
    function: Callable[[Any], Any],
    items: Sequence[Any],
    *,
    workers: int,
    prepare: str = WITHOUT_TORCH,
    limit_s: float | None = None,
    memory_gib: float | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield (index of the item, the function's result or `NoResult`) as items end. Raises the function's exception.

    Args:
        function: A module-level function. Each child has one thread.
        items: Arguments, sent to children by pickle.
        workers: Children at the same time; 0: this process does the work, without limits.
        prepare: Function that imports the children's modules, as `module:function`.
        limit_s: The longest time for an item, in seconds.
        memory_gib: Memory that each child may allocate; beyond it, allocations fail.

    Raises:
        EnvironmentProblem: No child can be started.
    """
    if not workers or not items:
        yield from enumerate(map(function, items))
        return
    server = local_server(prepare, {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"})
    arguments = [f"{function.__module__}:{function.__qualname__}", sys.path, memory_gib]
    of_thread = threading.local()

    def begin() -> None:
        of_thread.worker = _Worker(server, arguments, limit_s)

    threads = ThreadPoolExecutor(min(workers, len(items)), initializer=begin)
    try:
        server.hello()
        places = {threads.submit(lambda item: of_thread.worker.ask(item), item): i for i, item in enumerate(items)}
        for future in as_completed(places):
            given = future.result()
            if isinstance(given, Exception):
                raise given
            yield places[future], given
    finally:
        server.close()
        threads.shutdown(cancel_futures=True)


class _Worker:
    """A child that takes one item after another. It is replaced when it has died or hung, or after many items."""

    def __init__(self, server: ChildServer, arguments: Sequence[Any], limit_s: float | None) -> None:
        self._server, self._arguments, self._limit_s = server, arguments, limit_s
        self._asked = _NOTHING_KEPT

    def ask(self, item: Any) -> Any:
        if self._asked >= _NOTHING_KEPT:
            self._start()
        self._asked += 1
        began = time.monotonic()
        with suppress(EOFError, OSError):
            self._pipe.send(item)
            if self._pipe.poll(self._limit_s):
                return self._pipe.recv()
            self._child.end()
        self._asked = _NOTHING_KEPT
        code = self._child.wait().code
        reason = f"took longer than limit_s={self._limit_s:g}" if code is None else _death(code)
        return NoResult(reason, time.monotonic() - began)

    def _start(self) -> None:
        """Start a child; a predecessor ends as its pipe is closed."""
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        with theirs:
            self._child = self._server.start(f"{__name__}:serve", self._arguments, theirs, keeps_output=False)
        self._asked = 0


def _death(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}, perhaps for lack of memory"
    return f"its process ended with code {code}"


def serve(arguments: Sequence[Any], channel: int) -> None:
    """Take items and send the function's results, until the pipe closes; runs in a child."""
    warnings.simplefilter("ignore")
    name, sys.path[:], memory_gib = arguments
    function = pkgutil.resolve_name(name)
    if memory_gib is not None:
        bound = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    with Connection(channel) as pipe, suppress(EOFError, OSError):  # the parent has left, or needs no more
        while True:
            pipe.send(_call(function, pipe.recv()))


def _call(function: Callable[..., Any], item: Any) -> Any:
    """Return the function's result, or the exception that it raised, which the parent raises."""
    try:
        return function(item)
    except Exception as error:
        return error
