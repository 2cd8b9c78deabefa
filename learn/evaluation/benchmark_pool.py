"""Estimates spread over processes: one that dies, hangs or runs out of memory costs its row and nothing else.

Start reading at `run_all`. Jobs go one at a time to whoever is free, so that slow models hold nobody up.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

from featurize.device_spec import DeviceSpec
from learn.cases import Case
from learn.peers.base import Answer, timed
from learn.targets import get_target
from warehouse.published import PublishedRow

_NOTHING_KEPT = 64  # jobs after which a process is replaced: what models and libraries leave behind adds up


@dataclass(frozen=True)
class PoolJob:
    """One estimator's answer for one training job. `where` is the estimator as `module:attribute`."""

    where: str
    subject: PublishedRow | Case
    device: DeviceSpec
    target: str


def answer(job: PoolJob) -> Answer:
    """Return the answer; whatever goes wrong with this one job is its reason: an odd model must not end a benchmark."""

    def parts() -> Mapping[str, float]:
        from learn.published import workload_of

        estimator, case = pkgutil.resolve_name(job.where)(), job.subject
        if not isinstance(case, Case):
            case = Case(module=workload_of(case), described=job.device)
        if job.target == "memory":
            return estimator.parts_mib(case.job, job.device)
        estimator.target = get_target(job.target)
        return {job.target: estimator.figure(case)}

    return timed(parts)


def run_all(
    jobs: Sequence[PoolJob], *, workers: int, limit_s: float, memory_gib: float | None = None
) -> Iterator[tuple[int, Answer]]:
    """Yield (place of the job, answer) as jobs end. `workers` processes; 0 answers in this one, without any limit.

    A job that takes longer than `limit_s`, or whose process dies, has that as its reason. Beyond `memory_gib`, a
    process's allocations fail.
    """
    if workers == 0:
        yield from enumerate(map(answer, jobs))
        return
    crew = [_Worker(limit_s, memory_gib) for _ in range(min(workers, len(jobs)))]
    free: SimpleQueue[_Worker] = SimpleQueue()
    for worker in crew:
        free.put(worker)

    def ask(job: PoolJob) -> Answer:
        worker = free.get()
        given = worker.ask(job)
        free.put(worker)
        return given

    threads = ThreadPoolExecutor(max(len(crew), 1))
    try:
        places = {threads.submit(ask, job): place for place, job in enumerate(jobs)}
        for done in as_completed(places):
            yield places[done], done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in crew:
            worker.end()


class _Worker:
    """A process that answers one job after another. It is replaced when it has died, hung or answered many."""

    def __init__(self, limit_s: float, memory_gib: float | None) -> None:
        self._limit_s, self._memory_gib = limit_s, memory_gib
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._memory_gib), daemon=True)
        self._process.start()
        theirs.close()
        self._asked = 0

    def ask(self, job: PoolJob) -> Answer:
        if self._asked >= _NOTHING_KEPT:
            self.end()
            self._start()
        began = time.monotonic()
        try:
            if not self._asked:
                self._pipe.recv()  # importing torch is not the job's time
                began = time.monotonic()
            self._asked += 1
            self._pipe.send(job)
            if self._pipe.poll(self._limit_s):
                return self._pipe.recv()
            reason = f"took longer than limit_s={self._limit_s:g}"
        except (EOFError, OSError):
            self._process.join()
            reason = _death(self._process.exitcode)
        self._asked = _NOTHING_KEPT
        return Answer(mib=None, reason=reason, seconds=time.monotonic() - began)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}, perhaps for want of memory"
    return f"its process ended with code {code}"


def _serve(pipe: Connection, memory_gib: float | None) -> None:
    """Take jobs and send answers until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import warnings

    warnings.simplefilter("ignore")
    if memory_gib is not None:
        import resource

        bound = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send("ready")
        while True:
            pipe.send(answer(pipe.recv()))
    except (EOFError, OSError):  # the parent has left, perhaps with an answer unread
        return
