"""A function over items, in processes of this machine: one that dies, hangs or runs out of memory costs its item alone.

Start reading at `in_processes`. Items go one at a time to the next free process, so that slow ones hold nothing up. As
a program, this file is such a process. It is started by its path, so that a caller's own script is not run again.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

_NOTHING_KEPT = 64  # items after which a process is replaced: what models and libraries leave behind adds up


@dataclass(frozen=True)
class NoResult:
    """Why an item has no result, and the seconds until that was known."""

    reason: str
    seconds: float


def in_processes(
    function: Callable[[Any], Any],
    items: Sequence[Any],
    *,
    workers: int,
    imports: Sequence[str] = (),
    limit_s: float | None = None,
    memory_gib: float | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yield (place of the item, what the function returns of it or `NoResult`) as items end. Raises what it raises.

    Args:
        function: A module's function. Each process has one thread.
        items: What is sent to processes, by pickle.
        workers: Processes; 0: this one, without any limit.
        imports: Modules that each process imports before it takes items.
        limit_s: The longest time that an item may take, in seconds.
        memory_gib: What each process may allocate; beyond it, allocations fail.
    """
    if workers == 0:
        yield from enumerate(map(function, items))
        return
    crew = [_Worker((function, tuple(imports), memory_gib), limit_s) for _ in range(min(workers, len(items)))]
    free: SimpleQueue[_Worker] = SimpleQueue()
    for worker in crew:
        free.put(worker)

    def ask(item: Any) -> Any:
        worker = free.get()
        given = worker.ask(item)
        free.put(worker)
        if isinstance(given, Exception):
            raise given
        return given

    threads = ThreadPoolExecutor(max(len(crew), 1))
    try:
        places = {threads.submit(ask, item): place for place, item in enumerate(items)}
        for future in as_completed(places):
            yield places[future], future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in crew:
            worker.end()


class _Worker:
    """A process that takes one item after another. It is replaced when it has died, hung or taken many."""

    def __init__(self, work: tuple[Callable[..., Any], tuple[str, ...], float | None], limit_s: float | None) -> None:
        self._work, self._limit_s = work, limit_s
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        program = [sys.executable, "-P", __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            program, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        theirs.close()
        self._asked = 0

    def ask(self, item: Any) -> Any:
        if self._asked >= _NOTHING_KEPT:
            self.end()
            self._start()
        began = time.monotonic()
        try:
            if not self._asked:
                self._pipe.send(sys.path)
                self._pipe.send(self._work)
                self._pipe.recv()  # what it imports is not the item's time
                began = time.monotonic()
            self._asked += 1
            self._pipe.send(item)
            if self._pipe.poll(self._limit_s):
                return self._pipe.recv()
            reason = f"took longer than limit_s={self._limit_s:g}"
        except (EOFError, OSError):
            reason = _death(self._process.wait())
        self._asked = _NOTHING_KEPT
        return NoResult(reason, time.monotonic() - began)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def _death(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}, perhaps for lack of memory"
    return f"its process ended with code {code}"


def _serve(pipe: Connection) -> None:
    """Take items and send what the function returns of them, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    try:
        sys.path[:] = pipe.recv()
        from featurize.trace.light_imports import without_compiler

        without_compiler()
        function, imports, memory_gib = pipe.recv()
        if memory_gib is not None:
            bound = int(memory_gib * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
        for name in imports:
            importlib.import_module(name)
        pipe.send("ready")
        while True:
            pipe.send(_call(function, pipe.recv()))
    except (EOFError, OSError):  # the parent has left, perhaps with a result unread
        return


def _call(function: Callable[..., Any], item: Any) -> Any:
    """Return the function's result, or the exception that it raises, which the parent raises."""
    try:
        return function(item)
    except Exception as error:
        return error


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
