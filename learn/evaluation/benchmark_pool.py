"""Estimates spread over processes: one that dies, hangs or runs out of memory costs its row and nothing else.

Start reading at `run_all`. Jobs go one at a time to whoever is free, so that slow models hold nobody up.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from conf.plain_text import exception_line
from featurize.device_spec import DeviceSpec
from learn.cases import Case
from learn.peers.base import Answer, CannotEstimate, analyse
from warehouse.published import PublishedRow

_NOTHING_KEPT = 64  # jobs after which a process is replaced: what models and libraries leave behind adds up


@dataclass(frozen=True)
class PoolJob:
    """One estimator's answer for one training job. `where` is the estimator as `module:attribute`."""

    index: int
    where: str
    subject: PublishedRow | Case
    device: DeviceSpec
    target: str


def answer(job: PoolJob) -> Answer:
    """Whatever goes wrong with this one job is its reason: an odd model must not end a benchmark."""
    began = time.monotonic_ns()
    try:
        return _answer(job)
    except CannotEstimate as refusal:
        reason = str(refusal)
    except Exception as error:
        reason = exception_line(error)[:300]
    return Answer(mib=None, reason=reason, seconds=(time.monotonic_ns() - began) / 1e9)


def _answer(job: PoolJob) -> Answer:
    import importlib

    from learn.published import workload_of
    from learn.targets import get_target

    module, _, attribute = job.where.partition(":")
    estimator = getattr(importlib.import_module(module), attribute)
    case = job.subject
    if not isinstance(case, Case):
        case = Case(module=workload_of(case), described=job.device)
    if job.target == "memory":
        return analyse(estimator(), case.workload, job.device)
    asked = estimator()
    asked.target = get_target(job.target)
    began = time.monotonic_ns()
    figure = float(asked.figure(case))
    return Answer(mib=figure, seconds=(time.monotonic_ns() - began) / 1e9)


def run_all(
    jobs: Sequence[PoolJob], *, workers: int, limit_s: float, memory_gib: float | None = None
) -> Iterator[tuple[int, Answer]]:
    """Yield (job index, answer) as jobs end. `workers` processes; 0 answers in this one, where nothing can be limited.

    A job that takes longer than `limit_s`, or whose process dies, has that as its reason. `memory_gib` bounds what a
    process may allocate beyond which its allocations fail.
    """
    return _in_turn(jobs) if workers == 0 else _spread(jobs, workers, limit_s, memory_gib)


def _in_turn(jobs: Sequence[PoolJob]) -> Iterator[tuple[int, Answer]]:
    for job in jobs:
        yield job.index, answer(job)


class _Worker:
    def __init__(self, memory_gib: float | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, memory_gib), daemon=True)
        self.process.start()
        theirs.close()
        self.job: PoolJob | None = None
        self.ready = False  # importing torch is no job's time
        self.began = 0.0
        self.done = 0

    def give(self, job: PoolJob) -> None:
        self.job, self.began = job, time.monotonic()
        try:
            self.pipe.send(job)
        except OSError:
            pass  # it has died; reading from it says so

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _spread(
    jobs: Sequence[PoolJob], workers: int, limit_s: float, memory_gib: float | None
) -> Iterator[tuple[int, Answer]]:
    waiting = list(reversed(jobs))
    crew = [_Worker(memory_gib) for _ in range(min(workers, len(jobs)))]
    try:
        for worker in crew:
            worker.give(waiting.pop())
        while busy := [worker for worker in crew if worker.job is not None]:
            ready = set(wait([worker.pipe for worker in busy], timeout=1.0))
            for worker in busy:
                job, taken = worker.job, time.monotonic() - worker.began
                assert job is not None  # the worker is busy
                if worker.pipe in ready:
                    try:
                        answer = worker.pipe.recv()
                    except (EOFError, OSError):
                        answer = None
                    if isinstance(answer, str):
                        worker.ready, worker.began = True, time.monotonic()
                        continue
                elif worker.ready and taken > limit_s:
                    answer = Answer(mib=None, reason=f"took longer than limit_s={limit_s:g}", seconds=taken)
                    worker.done = _NOTHING_KEPT
                else:
                    continue
                if answer is None:
                    worker.process.join()
                    answer = Answer(mib=None, reason=_death(worker.process.exitcode), seconds=taken)
                    worker.done = _NOTHING_KEPT
                worker.job = None
                worker.done += 1
                yield job.index, answer
                if waiting:
                    if worker.done >= _NOTHING_KEPT:
                        worker.end()
                        crew.remove(worker)
                        worker = _Worker(memory_gib)
                        crew.append(worker)
                    worker.give(waiting.pop())
    finally:
        for worker in crew:
            worker.end()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}, perhaps for want of memory"
    return f"its process ended with code {code}"


def _serve(pipe: Connection, memory_gib: float | None) -> None:
    """A worker's life: jobs in, answers out, until the pipe closes."""
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
    pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):  # reset, where the parent left with an answer unread
            return
        try:
            pipe.send(answer(job))
        except OSError:  # nobody waits for it any more
            return
