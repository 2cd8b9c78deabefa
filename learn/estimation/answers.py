"""Answers to requests for an estimate, from the cache or computed.

Start reading at `make_estimate`; `learn.estimation.draft` gathers the figures. The key of an answer covers all of its
inputs (`_key`). Answers are kept in this process and in the user's cache (`conf.files.disk_cache`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from conf.cli.commands import naming_the_extra
from conf.errors import CommandError
from conf.files.disk_cache import keep, recall
from featurize.device.device_spec import UnsuitableDevice
from featurize.operators.replacing import without_collection
from featurize.timing.overlap import SimulatedStep
from learn.estimation.draft import Draft
from learn.estimation.fitted_models import FittedModels
from learn.estimation.job_estimate import Estimate
from learn.estimation.notes import Note
from learn.estimation.requests import Request, StepFiles
from learn.job.traced import key_of
from learn.job.training_job import as_a_training_script
from learn.rows.step_store import StepStore
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from featurize.trace.trace_cache import Traces
    from learn.estimation.platforms import Platform

MOST_ANSWERS = 5000
_answers: dict[str, Estimate] = {}  # oldest first


def make_estimate(
    request: Request, *, timeline: bool = False, traces: Traces | None = None
) -> tuple[Estimate, SimulatedStep | None]:
    """Make an estimate without looking into the cache. Return it, and the traced step if it was traced.

    Args:
        request: The job, its platform, and the options of its estimate.
        timeline: Whether the traced step keeps the allocator's state after every event.
        traces: As in `learn.job.traced.step_of`.

    Raises:
        UsageError: Peak memory cannot be estimated. Other figures may be None.
    """
    ((outcome, traced),) = _make_estimates([request], timeline, traces)
    if isinstance(outcome, CommandError):
        raise outcome
    return outcome, traced


@naming_the_extra()
@as_a_training_script()
@without_collection()
def _make_estimates(
    requests: Sequence[Request], timeline: bool, traces: Traces | None
) -> list[tuple[Estimate | CommandError, SimulatedStep | None]]:
    """Return, for requests that differ in their platform alone, the estimate or the error, and the traced step. Each
    fitted model is asked once for all requests."""
    began = time.monotonic_ns()
    steps = StepStore(requests[0].options.data)
    models = FittedModels(requests[0].options, steps)
    drafts = [Draft(request, steps, timeline=timeline, traces=traces) for request in requests]
    devices = [draft.device for draft in drafts]
    for draft in drafts:
        try:
            draft.trace(drafts[0].failure, devices)
            draft.choose_sources(models)
        except CommandError as error:
            draft.error = error
    models.ask(question for draft in drafts if draft.error is None for question in draft.questions)
    outcomes: list[Estimate | CommandError] = []
    for draft in drafts:
        try:
            outcomes.append(draft.error or draft.finish())
        except CommandError as error:
            outcomes.append(error)
    seconds = (time.monotonic_ns() - began) / 1e9 / len(drafts)
    return [
        (outcome if isinstance(outcome, CommandError) else outcome.with_values(seconds=seconds), draft.traced)
        for outcome, draft in zip(outcomes, drafts, strict=True)
    ]


def is_of_job(error: CommandError) -> bool:
    """Return whether the error is the job's on every GPU model: its step cannot be traced."""
    return isinstance(error.__cause__, CommandError) and not isinstance(error.__cause__, UnsuitableDevice)


def answer(request: Request) -> Estimate:
    """Return a request's estimate, from the cache or made now. Raises as `make_estimate`."""
    (outcome,) = answer_on(request, [request.platform])
    if isinstance(outcome, CommandError):
        raise outcome
    return outcome


def answer_on(
    request: Request, platforms: Sequence[Platform], traces: Traces | None = None
) -> list[Estimate | CommandError]:
    """Return a job's estimate, or its error, on each platform, from the cache or made now. The job is traced once, with
    `traces` as in `make_estimate`. New estimates are stored in the cache."""
    key, request = _key(request)
    keys = [key and _digest(key, platform, platform.device.interconnect) for platform in platforms]
    known_answers = _find([answer_key for answer_key in keys if answer_key is not None])
    missing = [place for place, answer_key in enumerate(keys) if answer_key not in known_answers]
    traces = {} if traces is None else traces
    outcomes_by_place: dict[int, Estimate | CommandError] = {}
    if missing:
        requests = [replace(request, platform=platforms[place]) for place in missing]
        outcomes = [outcome for outcome, _ in _make_estimates(requests, False, traces)]
        outcomes_by_place = dict(zip(missing, outcomes, strict=True))
        new = {keys[place]: estimate for place, estimate in outcomes_by_place.items() if isinstance(estimate, Estimate)}
        if key is not None:
            keep({f"answer {answer_key}": estimate.to_mapping() for answer_key, estimate in new.items()})
    answers = [outcomes_by_place.get(place) or known_answers[answer_key] for place, answer_key in enumerate(keys)]
    return [
        _remember(answer_key, outcome) if isinstance(outcome, Estimate) else outcome
        for answer_key, outcome in zip(keys, answers, strict=True)
    ]


def answer_and_write(request: Request, files: StepFiles, began_ns: int, notes: Iterable[Note] = ()) -> Estimate:
    """Return the answer to a request, and write the requested files of its step.

    Args:
        request: The request.
        files: Checked to be writable.
        began_ns: Start of the work on the request, by `time.monotonic_ns`.
        notes: Further notes, which precede those of the answer.
    """
    estimate, traced = make_estimate(request, timeline=True) if any(files) else (answer(request), None)
    seconds = (time.monotonic_ns() - began_ns) / 1e9
    estimate = estimate.with_values(notes=(*notes, *estimate.notes), seconds=seconds)
    if any(files):
        files.write(request, estimate, traced)
    return estimate


def _find(keys: Sequence[str]) -> dict[str | None, Estimate]:
    """Return the answers that are in memory or in the user's cache, by key."""
    known_answers: dict[str | None, Estimate] = {key: _answers[key] for key in keys if key in _answers}
    others = [key for key in keys if key not in known_answers]
    for key, stored in zip(others, recall(*(f"answer {key}" for key in others)), strict=True):
        if stored is not None:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                known_answers[key] = Estimate.from_mapping(stored)
    return known_answers


def _remember(key: str | None, known: Estimate) -> Estimate:
    """Keep an answer in memory. Returns a copy whose mappings are the caller's to change."""
    if key is None:
        return known
    _answers[key] = known
    if len(_answers) > MOST_ANSWERS:
        del _answers[next(iter(_answers))]
    return known.with_values(**{name: dict(value) for name, value in vars(known).items() if isinstance(value, dict)})


def clear() -> None:
    """Forget all answers in memory."""
    _answers.clear()


def with_key(request: Request) -> Request:
    """Return the request with its job's key, so that a factory runs once for all questions about the job."""
    job_key, build = key_of(request.job)
    return replace(request, job=replace(request.job, build=build, key=job_key or ""))


def _key(request: Request) -> tuple[str | None, Request]:
    """Return the key of the answer without its platform, and the request with a job that is built once. The key is None
    with `workspaces`, which depend on this process's cuDNN."""
    if request.platform.workspaces is not None:
        return None, request
    request = with_key(request)
    job, how, own_runs = request.job, request.options, request.own_runs
    folder = DataFolder.resolve(how.data)
    key = job.key and _digest(
        job.key,
        job.name,
        job.training_loop,
        job.parallel and job.parallel.zero.deepspeed,
        how.estimator,
        how.loop,
        how.coverage,
        how.known,
        own_runs and (own_runs.asked_for, own_runs.changed_ns),
        str(folder.root),
        tuple(_models_of(folder)),
    )
    return key or None, request


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _models_of(folder: DataFolder) -> Iterator[tuple[str, int, int]]:
    """Yield the files of the folder's fitted models, and its marker."""
    paths = [str(folder.format_marker)]
    for home, _, names in os.walk(folder.models):
        paths += [os.path.join(home, name) for name in names]
    for path in sorted(paths):
        try:
            status = os.stat(path)
        except OSError:
            continue
        yield path, status.st_size, status.st_mtime_ns
