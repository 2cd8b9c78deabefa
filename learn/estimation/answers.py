"""Answers to requests for an estimate, from the cache or computed.

Start reading at `make_estimate`; `learn.estimation.draft` gathers the figures. The key of an answer covers all of its
inputs (`_key`). Answers are kept in this process and in the user's cache (`conf.files.disk_cache`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from conf.cli.commands import naming_the_extra
from conf.errors import CommandError
from conf.files.disk_cache import keep, kept_at_once, recall
from featurize.device.device_spec import UnsuitableDevice
from featurize.operators.replacing import without_collection
from featurize.timing.overlap import SimulatedStep
from learn.estimation.draft import Draft, beyond_fits, trace_together
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
    ((outcome, traced),) = _make_estimates(request, [request.platform], timeline, traces)
    return _estimate_of(outcome), traced


@naming_the_extra()
@as_a_training_script()
@without_collection()
def _make_estimates(
    request: Request, platforms: Sequence[Platform], timeline: bool, traces: Traces | None
) -> list[tuple[Estimate | CommandError, SimulatedStep | None]]:
    """Return the job's estimate or error on each platform, and the traced step. Each fitted model is asked once for all
    platforms."""
    began = time.monotonic_ns()
    steps = StepStore(request.options.data)
    models = FittedModels(request.options, steps)
    drafts = [Draft(replace(request, platform=on), steps, timeline=timeline) for on in platforms]
    trace_together(drafts, traces)
    beyond = beyond_fits(request.job)
    for draft in drafts:
        draft.attempt(Draft.choose_sources, models, beyond)
    models.ask(traces)
    outcomes: list[tuple[Estimate | CommandError, SimulatedStep | None]] = []
    for draft in drafts:
        try:
            outcomes.append((draft.finish(), draft.traced))
        except CommandError as error:
            outcomes.append((error, draft.traced))
    seconds = (time.monotonic_ns() - began) / 1e9 / len(drafts)
    return [
        (outcome.with_values(seconds=seconds) if isinstance(outcome, Estimate) else outcome, traced)
        for outcome, traced in outcomes
    ]


def _estimate_of(outcome: Estimate | CommandError) -> Estimate:
    if isinstance(outcome, CommandError):
        raise outcome
    return outcome


def is_of_job(error: CommandError) -> bool:
    """Return whether the error is the job's on every GPU model: its step cannot be traced."""
    return isinstance(error.__cause__, CommandError) and not isinstance(error.__cause__, UnsuitableDevice)


def answer(request: Request) -> Estimate:
    """Return a request's estimate, from the cache or made now. Raises as `make_estimate`."""
    (outcome,) = answer_on(request, [request.platform])
    return _estimate_of(outcome)


def answer_on(
    request: Request, platforms: Sequence[Platform], traces: Traces | None = None
) -> list[Estimate | CommandError]:
    """Return a job's estimate, or its error, on each platform, from the cache or made now. The job is traced once, with
    `traces` as in `make_estimate`. New estimates are stored in the cache."""
    key, request = _key(request)
    traces = {} if traces is None else traces
    if key is None:
        return [outcome for outcome, _ in _make_estimates(request, platforms, False, traces)]
    keys = [_digest(key, platform) for platform in platforms]
    outcomes = _recall(keys)
    missing = {answer_key: on for answer_key, on in zip(keys, platforms, strict=True) if answer_key not in outcomes}
    with kept_at_once():
        if missing:
            made = _make_estimates(request, list(missing.values()), False, traces)
            outcomes |= zip(missing, (outcome for outcome, _ in made), strict=True)
        estimates = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Estimate)}
        keep(_entries({new: estimates[new] for new in missing if new in estimates}))
    _answers.update(estimates)
    while len(_answers) > MOST_ANSWERS:
        del _answers[next(iter(_answers))]
    return [_copy(estimates[answer_key]) if answer_key in estimates else outcomes[answer_key] for answer_key in keys]


def _copy(estimate: Estimate) -> Estimate:
    """Return a copy whose mappings are the caller's to change."""
    mappings = {name: dict(value) for name, value in vars(estimate).items() if isinstance(value, dict)}
    return estimate.with_values(**mappings)


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


def _entries(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return the cache's entries for new answers by key: the first one's holds all, and the others' name it."""
    if not estimates:
        return {}
    first, *others = estimates
    return {f"answer {first}": estimates, **{f"answer {key}": first for key in others}}


def _recall(keys: Sequence[str]) -> dict[str, Estimate | CommandError]:
    """Return the answers that are in memory or in the user's cache, by key."""
    known: dict[str, Estimate | CommandError] = {key: _answers[key] for key in keys if key in _answers}
    others = [key for key in keys if key not in known]
    entries = _stored(others)
    entries |= _stored({home for home in entries.values() if isinstance(home, str) and home not in entries})
    for key in others:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            home = entries[key]
            known[key] = Estimate.from_mapping((entries[home] if isinstance(home, str) else home)[key])
    return known


def _stored(keys: Collection[str]) -> dict[str, Any]:
    return dict(zip(keys, recall(*(f"answer {key}" for key in keys)), strict=True))


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
