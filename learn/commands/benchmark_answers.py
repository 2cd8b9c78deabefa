"""The answers behind a benchmark: what learns nothing is asked once a row, what learns is fitted part by part.

Start reading at `ask_learned`; `ask_free` spreads the others over processes.
"""

from __future__ import annotations

import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conf.errors import CommandError
from featurize.device.device_spec import DeviceSpec, describe_device
from learn.commands.benchmark_rows import BenchmarkSettings, RowSelection
from learn.estimators.protocol import Estimator, get_estimator, make_estimator
from learn.job.training_job import Case
from learn.judging.evaluate import Part
from learn.judging.scores import Asked, Given, given_of, median
from learn.peers.base import Answer, timed
from learn.rows.data import Rows
from learn.rows.step_store import StepStore, traced_column
from learn.rows.targets import Bins, Target, get_target
from warehouse.exchange.published import PublishedRow

SLOW = ("faketensor", "xmem")  # these take seconds a row, the others a tenth of a second
TIMED_CASES = 20  # a file's cases that are timed, after one that warms up


class Tally:
    """Count steps done and to do; a caller that begins something adds its steps first."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self.done = self.of = 0

    def add(self, steps: int) -> None:
        self.of += steps
        self._progress(self.done, self.of)

    def step(self, steps: int = 1) -> None:
        self.done += steps
        self._progress(self.done, self.of)

    def traced(self, done: int, of: int) -> None:
        """Count the steps of one part: called with 0 done first, then after each."""
        if done:
            self.step()
        else:
            self.add(of)


def ask_free(
    selection: RowSelection,
    index: np.ndarray,
    names: Sequence[str],
    settings: BenchmarkSettings,
    tally: Tally,
    steps: StepStore,
) -> Iterator[tuple[str, Asked]]:
    """Yield each estimator that learns nothing with its answers, when all its rows have one.

    The slow ones come last. Where `steps` has a row's record, `trace` answers from that and traces nothing again.
    """
    from learn.estimators.protocol import ESTIMATORS
    from learn.rows.processes import in_processes

    answers: dict[str, dict[int, Given]] = {name: {} for name in names}
    jobs: list[PoolJob] = []
    places: list[tuple[str, int]] = []  # each job's estimator and row
    for name in sorted(names, key=SLOW.__contains__):
        for i in index.tolist():
            case, subject = selection.rows.cases[i], selection.subjects[i]
            if name == "trace" and (given := _of_record(case, selection.rows.target, steps)) is not None:
                answers[name][i] = given
                continue
            spec = describe_device(case.device)
            if isinstance(subject, Case):
                subject = replace(subject, described=spec)  # anew: what a case remembers need not travel
            jobs.append(PoolJob(ESTIMATORS[name], subject, spec, settings.target))
            places.append((name, i))
    for name, given_rows in answers.items():
        tally.step(len(given_rows))
        if len(given_rows) == len(index):
            yield name, Asked(answers=given_rows)
    workers = settings.workers if settings.workers is not None else len(os.sched_getaffinity(0))
    how: dict[str, Any] = {"imports": ["torch"], "limit_s": settings.limit_s, "memory_gib": settings.memory_gib}
    for number, given in in_processes(answer, jobs, workers=workers, **how):
        name, i = places[number]
        estimate = given.mib if isinstance(given, Answer) else None
        answers[name][i] = Given(estimate=estimate, reason=given.reason, seconds=given.seconds)
        tally.step()
        if len(answers[name]) == len(index):
            yield name, Asked(answers=answers[name])


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
        from learn.fitting.published_jobs import workload_of

        estimator, case = pkgutil.resolve_name(job.where)(), job.subject
        if not isinstance(case, Case):
            case = Case(module=workload_of(case), described=job.device)
        if job.target == "memory":
            parts: Mapping[str, float] = estimator.parts_mib(case.job, job.device)
            return parts
        estimator.target = get_target(job.target)
        return {job.target: estimator.figure(case)}

    return timed(parts)


def _of_record(case: Case, target: Target, steps: StepStore) -> Given | None:
    """Return the trace's answer from the case's record; None where none is at hand, or it has another figure."""
    values = steps.features(case)
    if values is None or (case.training_loop and not target.is_memory):  # the record's times are with the input's
        return None
    estimate = values[traced_column(target)]
    return Given(estimate=estimate, seconds=steps.record(case).seconds)


def ask_learned(
    name: str,
    selection: RowSelection,
    parts: Sequence[Part],
    bins: Mapping[str, Mapping[str, Bins]],
    seed: int,
    tally: Tally,
    steps: StepStore,
) -> Asked:
    """Fit on the inside of each part and ask the rows outside. A part that it cannot be fitted to is refused whole."""
    answers: dict[int, Given] = {}
    warnings: dict[str, None] = {}
    seconds, latency = [], {}
    for part in parts:
        began = time.monotonic_ns()
        try:
            fitted = make_estimator(name, seed).fit(selection.rows.subset(part.inside), steps)
        except CommandError as error:
            refusal = Given(estimate=None, reason=f"cannot be fitted: {error}")
            answers |= dict.fromkeys(part.outside.tolist(), refusal)
            tally.step(1 + len(part.outside))
            continue
        seconds.append((time.monotonic_ns() - began) / 1e9)
        tally.step()
        for file in dict.fromkeys(selection.file[part.outside].tolist()):
            index = part.outside[selection.file[part.outside] == file]
            rows = selection.rows.subset(index)
            given, unfamiliar = _ask(fitted, rows, bins[file], steps)
            answers |= dict(zip(index.tolist(), given, strict=True))
            warnings |= dict.fromkeys(unfamiliar)
            tally.step(len(index))
            if file not in latency:
                timed = [case for case, answer in zip(rows.cases, given, strict=True) if answer.estimate is not None]
                latency[file] = _latency(fitted, timed[: TIMED_CASES + 1], get_estimator(name).needs_trace, steps)
    known = {file: value for file, value in latency.items() if value is not None}
    # The first fit of all also computes features that later ones, also of other estimators, find remembered.
    return Asked(
        answers=answers,
        learns=True,
        latency=known,
        fit_seconds=median(np.array(seconds)),
        fits=len(seconds),
        warnings=tuple(warnings),
    )


def _ask(
    fitted: Estimator, rows: Rows, bins: Mapping[str, Bins], steps: StepStore
) -> tuple[list[Given], tuple[str, ...]]:
    """Return answers and warnings. Where all rows together are refused, each is asked by itself."""
    try:
        prediction = fitted.predict(rows.cases, steps)
    except CommandError as error:
        if len(rows) == 1:
            return [Given(estimate=None, reason=str(error))], ()
        alone = [_ask(fitted, rows.subset([i]), bins, steps) for i in range(len(rows))]
        return [answer for given, _ in alone for answer in given], tuple(text for _, texts in alone for text in texts)
    return given_of(prediction, rows, bins), prediction.warnings


def _latency(fitted: Estimator, cases: Sequence[Case], traced: bool, steps: StepStore) -> float | None:
    """Median seconds of a single case's answer, its features not remembered (but of timm's models, the layers are); the
    first one warms up."""
    from learn.peers.gpumemnet import tokens_of

    seconds = []
    for case in cases:
        tokens_of.cache_clear()
        record = steps.record(case) if traced else None
        began = time.monotonic_ns()
        fitted.predict([case], steps)
        seconds.append((time.monotonic_ns() - began) / 1e9 + (record.seconds if record is not None else 0.0))
    return float(np.median(seconds[1:] or seconds)) if seconds else None
