"""Answers to requests for an estimate, from the cache or computed.

Start reading at `make_estimate`; a `Draft` gathers the figures. Each source in turn answers the targets that it knows:
a training-free method or fitted models (`learn.estimation.fitted_models`), then the traced step. The key of an answer
covers all of its inputs (`_key`). Answers are kept in this process and in the user's cache (`conf.files.disk_cache`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from conf.cli.commands import naming_the_extra
from conf.errors import CommandError, EnvironmentProblem, UsageError
from conf.files.disk_cache import keep, kept_at_once, recall
from conf.units import MIB
from featurize.device.device_spec import AMD, MACHINES, DeviceSpec, UnsuitableDevice
from featurize.job.training_settings import TrainingSettings, training_of
from featurize.memory.replay import loads_cudnn
from featurize.operators.replacing import without_collection
from featurize.recording.step_trace import BatchMix, StepTrace
from featurize.recording.values import tensors_of
from featurize.timing.collectives import communicators_mib
from featurize.timing.kernels import seconds_at_peak
from featurize.timing.simulation import SimulatedStep, time_step
from learn.estimation.bounds import move_by_runs, uncertainty_of, widest
from learn.estimation.estimate_view import AMD_GPU, INFO, MAY_RUN_OUT, OUT_OF_MEMORY, PROBLEM, TARGETS, WARNING, Note
from learn.estimation.fitted_models import FittedModels, ModelQuestion
from learn.estimation.job_estimate import Estimate, Memory, estimators_named
from learn.estimation.requests import SEVERAL_GPUS, Request, StepFiles, ranks_of, workspace_notes
from learn.estimators.protocol import TRAINING_FREE, get_estimator
from learn.job.traced import CannotTrace, key_of, step_of, steps_of, wants_values
from learn.job.training_job import PIPELINE, RESIDENT, Case, TrainingJob, as_a_training_script, loop_named
from learn.peers.base import TRACE_HAS_NO_BOUND, CannotEstimate, Peer, analyse
from learn.rows.data import get_target
from learn.rows.step_store import StepRecord, StepStore, traced_column
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from featurize.trace.trace_cache import Traces
    from learn.estimation.requests import Platform


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
    for draft in drafts:
        draft.attempt(Draft.prepare)
    ready = [draft for draft in drafts if draft.error is None]
    devices = [draft.device for draft in ready]
    allocator = request.platform.allocator
    traced_steps = steps_of(request.job, devices, allocator=allocator, timeline=timeline, traces=traces)
    for draft, step in zip(ready, traced_steps, strict=True):
        draft.attempt(Draft.take_step, step)
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
        new = {name: estimates[name] for name in missing if name in estimates}
        # The entry of the first new answer holds all of them, and the others' entries name it.
        home = next(iter(new), None)
        keep({f"answer {name}": new if name == home else home for name in new})
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
    estimate = estimate.with_values(notes=(*notes, *estimate.notes), seconds=(time.monotonic_ns() - began_ns) / 1e9)
    if any(files):
        files.write(request, estimate, traced)
    return estimate


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


TOP_MODULES = 10
_OF_MODULES = ("hybrid", "gnn", "trace", "horus", "faketensor", "dnnmem", "xmem", "llmem", "deepspeed")
# What these estimators do instead of tracing, so that they may answer where the trace meets its limits.
WITHOUT_TRACE = "estimator=xmem runs it for real on the CPU, estimator=deepspeed counts the model's states only"


class Draft:
    """An estimate in the making.

    traced      the step; None where it cannot be traced, and `failure` is the reason
    alone       the job with the longest of its batches in every step
    case        the estimators' input
    questions   questions to fitted models, asked between `choose_sources` and `finish`, and the case's index in each
    memory      the figure and its bound; None: not answered yet
    figures     column of each further target -> the figure
    by, loops   target -> its estimator, and its loop
    beyond_fit  whether the model that answers memory was not fitted on such jobs: then the trace bounds it
    error       the reason that there is no estimate
    """

    def __init__(self, request: Request, steps: StepStore, *, timeline: bool) -> None:
        self.request, self.platform, self.device = request, request.platform, request.platform.device
        self._steps, self.timeline = steps, timeline
        self.job = request.job
        self.alone = self.job.alone(self.job.longest) if self.job.batches else self.job
        self.case = self._case()
        self.traced: SimulatedStep | None = None
        self.failure: CommandError | None = None
        self.questions: list[tuple[ModelQuestion, int]] = []
        self.memory: Memory | None = None
        self.figures: dict[str, float] = {}
        self.by: dict[str, str] = {}
        self.loops: dict[str, str] = {}
        self.notes: list[Note] = []
        self.beyond_fit = False
        self.error: CommandError | None = None

    def _case(self) -> Case:
        """Return the estimators' input. Raises `UsageError` for a module and an estimator of configs."""
        job, device, named = self.alone, self.device, self.request.options.estimator
        if job.config is not None:
            return Case(job.config, device.name, job.training_loop, described=device)
        if named is not None and named not in TRAINING_FREE and not get_estimator(named).needs_trace:
            raise UsageError(f"estimator={named} reads trial configs; modules are answered by {', '.join(_OF_MODULES)}")
        return Case(device=device.name, training_loop=job.training_loop, module=job, described=device)

    def attempt(self, stage: Callable[..., None], *arguments: object) -> None:
        """Run a stage, unless an earlier one failed, and keep its error."""
        if self.error is None:
            try:
                stage(self, *arguments)
            except CommandError as error:
                self.error = error

    def prepare(self) -> None:
        """Prepare the platform for the trace. Raises `UsageError` for a GPU model that the job cannot run on."""
        if self.job.parallel is not None:
            communicators_mib(self.device, self.job.parallel)  # refuses a GPU model before anything is traced
        self.platform.prepare_workspaces(self.job)

    def take_step(self, step: SimulatedStep | CommandError) -> None:
        """Take the traced step, or the reason why it cannot be traced."""
        if isinstance(step, CommandError):
            self.failure = step
            if self.case.config is not None:  # it may name code that may not run here: a stored trace may answer
                self._steps.recall([self.case, replace(self.case, training_loop=True)])
            of_case = not self.job.batches and self.platform.allocator is None  # else another job failed
            if of_case and self._steps.features(self.case) is None:
                self._steps.keep(self.case, StepRecord(error=str(step)))
            return
        self.traced = step
        if (mix := step.trace.mix) is not None:
            self.alone = self.job.alone(mix.longest)
            self.case = self._case()
            self.traced = self._with_longest(step, mix)

    def _with_longest(self, mixed: SimulatedStep, mix: BatchMix) -> SimulatedStep:
        """Return the traced mix, or its longest batch alone where that takes more: the caches of the other batches may
        fit its allocations better than its own caches do."""
        longest = step_of(self.alone, self.device, allocator=self.platform.allocator, timeline=self.timeline)
        if longest.peak_memory_mib <= mixed.peak_memory_mib:
            return mixed
        text = (
            f"memory is of the longest batch alone, {self.alone.shape_text()}: the {mix.given} steps on batches of "
            f"{mix.shapes} shapes reserve {mixed.peak_reserved_mib:,.1f} MiB in their order, the longest alone "
            f"{longest.peak_reserved_mib:,.1f} MiB; utilization and step time are of the longest"
        )
        self.notes.append(Note("batch-mix", INFO, text, ("memory",)))
        self.notes += [Note("trace", WARNING, note) for note in mixed.trace.notes if note not in longest.trace.notes]
        return longest

    def choose_sources(self, models: FittedModels, beyond: str) -> None:
        """Ask the estimator that was named, else choose the fitted models to ask.

        Args:
            models: The fitted models.
            beyond: What the job has that no model was fitted on, as `beyond_fits`.

        Raises:
            UsageError: The named estimator has no answer, or is not fitted.
        """
        estimator, job = self.request.options.estimator, self.job
        if job.batches and estimator not in (None, "trace"):
            text = f"estimator={estimator} does not follow a mix of batches: it takes the longest alone"
            self.notes.append(Note("beyond-fit", WARNING, text))
        if estimator in TRAINING_FREE and estimator != "trace":
            self._ask_method(estimator)
        elif estimator is None and beyond:
            text = f"no model was fitted on {beyond}: the trace answers"
            self.notes.append(Note("beyond-fit", INFO, text))
        elif estimator != "trace":
            if beyond:
                text = f"no model was fitted on {beyond}: estimator={estimator} leaves that out"
                self.notes.append(Note("beyond-fit", WARNING, text))
            at_hand = self.traced if self.platform.allocator is None and not job.batches else None
            self.questions = models.choose(self.case, at_hand)

    def _ask_method(self, estimator: str) -> None:
        """Take memory from a training-free method. Raises `UsageError` with the method's reason."""
        if beyond := training_of(self.alone.settings).beyond_trials():
            unknown = ", ".join(f"{name}={value}" for name, value in beyond.items())
            raise UsageError(f"estimator={estimator} has no answer: it does not know {unknown}")
        known = get_estimator(estimator)
        assert issubclass(known, Peer), estimator
        try:
            breakdown = analyse(known(), self.alone, self.device)
        except CannotEstimate as refusal:
            stuck = wants_values(str(refusal)) and f"estimator={estimator}" not in WITHOUT_TRACE
            advice = f"; {WITHOUT_TRACE}" if stuck else ""
            raise UsageError(f"estimator={estimator} has no answer: {refusal}{advice}") from refusal
        peak_mib = sum(breakdown.values())
        self._set("memory", peak_mib, estimator, loop_named(self.alone.training_loop))
        self.memory = Memory(peak_memory_mib=peak_mib, breakdown=breakdown)
        self.notes.append(Note("estimator", WARNING, known.warning))

    def finish(self) -> Estimate:
        """Return the estimate, after the fitted models have answered. Raises `error`."""
        if self.error is not None:
            raise self.error
        self._take_model_answers()
        if self.failure is not None:
            self._answer_without_trace(self.failure)
        if self.traced is not None:
            self._place(self.traced)
        return self._moved_by_runs(self._gather())

    def _set(self, target: str, figure: float, by: str, loop: str) -> None:
        """Set a target's figure, with its source and its loop."""
        self.by[target], self.loops[target] = by, loop
        if target == "memory":
            self.memory = Memory(peak_memory_mib=figure)
        else:
            self.figures[get_target(target).column] = figure

    def _take_model_answers(self) -> None:
        """Take the figures of fitted models, and note the targets without one."""
        targets: dict[tuple[str, str, str], list[str]] = {}  # code, severity and text of a note -> its targets
        absent: list[str] = []
        for question, index in self.questions:
            target, answer = question.target, question.answers.get(index)
            if isinstance(answer, CommandError):
                raise answer
            for text in question.passed_over:
                targets.setdefault(("stale-model", WARNING, text), [])
            if answer is None:
                absent.append(target)
                continue
            for remark in answer.remarks:
                targets.setdefault(remark, []).append(target)
            self._set(target, answer.figure, question.model, loop_named(question.looped or self.case.training_loop))
            if target == "memory":
                self.beyond_fit = question.packaged and answer.outside
                self.memory = answer.memory or self.memory
        for (code, severity, text), names in targets.items():
            self.notes.append(Note(code, severity, f"{', '.join(names)}: {text}" if names else text, tuple(names)))
        if absent:
            home = DataFolder.resolve(self.request.options.data).models
            text = (
                f"no fitted model for {self.case.family if self.case.config else 'modules'} on {self.case.device} in "
                f"{home} for {', '.join(absent)}"
                f"{': answered by the trace' if self.traced is not None else ''} "
                f"(python -m learn.fit target={absent[0]} fits one)"
            )
            self.notes.insert(0, Note("not-fitted", INFO, text))

    def _answer_without_trace(self, failure: CommandError) -> None:
        """Take the figures of the job's stored trace. Raises `failure`, the reason why it cannot be traced, where there
        is none."""
        features = None
        if self.request.options.estimator in (None, "trace") and self.job.parallel is None:
            features = self._steps.features(self.case)
        if features is not None:
            loop = loop_named(self.case.training_loop)
            for target in [target for target in TARGETS if target not in self.by]:
                self._set(target, features[traced_column(get_target(target))], "trace", loop)
            text = "figures of the trace are those stored in the data folder, since it cannot be repeated here"
            self.notes.append(Note("stored-trace", INFO, text))
        if self.memory is None:
            advice = f"; {WITHOUT_TRACE}" if isinstance(failure, CannotTrace) and failure.limit else ""
            kind = UsageError if isinstance(failure, UsageError) else EnvironmentProblem
            raise kind(f"{failure}{advice}") from failure

    def _place(self, traced: SimulatedStep) -> None:
        """Place the traced step on the machine, and bound memory by its causes where no fitted model bounds it."""
        described_mib = traced.peak_memory_mib
        traced = guessed = self.platform.place(traced, self.job, timeline=self.timeline)
        if self.platform.workspaces is not None:  # after the fitted models have read: they know guessed workspaces only
            traced = self.platform.place(guessed, self.job, timeline=self.timeline, workspaces=True)
        self.traced = traced
        if self.memory is None:
            self._set("memory", traced.peak_memory_mib, "trace", loop_named(self.alone.training_loop))
        elif self.by["memory"].endswith("(default)"):  # its rows were measured on another machine
            placed = traced if self.beyond_fit else guessed  # beyond the fit, the trace's own figure stands
            self.memory = self.memory.shift(placed.peak_memory_mib - described_mib)
        if self.beyond_fit or self.by["memory"] == "trace":
            assert self.memory is not None
            uncertainty = uncertainty_of(traced, self.device, self.platform.machine)
            centre_mib = max(self.memory.peak_memory_mib, traced.peak_memory_mib)
            self.memory = uncertainty.bound(
                self.memory, centre_mib, self.request.options.coverage, self.platform.limit_mib(traced)
            )

    def _gather(self) -> Estimate:
        """Return the estimate: the gathered figures, and the trace's for the others."""
        traced, limit_mib = self.traced, self.platform.limit_mib(self.traced)
        if traced is None:
            missing = [target for target in TARGETS if target not in self.by]
            unknown = f"{', '.join(missing)}: not known" if missing else "not traced"
            notes = [Note("not-traced", WARNING, f"{unknown}, since {self.failure}", tuple(missing))]
            of_trace: dict[str, Any] = {"parameters": None}
        else:
            of_trace, notes = self._fill_from_trace(traced)
            notes += self._notes_on_trace(traced, limit_mib)
        assert self.memory is not None, "it is answered"
        first, of_memory = self._notes_on_memory(self.memory, limit_mib)
        memory = self.memory.with_values(device_memory_mib=self.device.memory_mib, limit_mib=limit_mib)
        return Estimate(
            **{**vars(memory), **self.figures, **of_trace},
            device=self.device.name,
            notes=(*first, *notes, *of_memory, *self.notes, *_note_on_two_loops(self.loops)),
            estimator=estimators_named(self.by),
            answered_by=self.by,
            loops=self.loops,
            machine=self.platform.machine.name,
            seconds=0.0,
        )

    def _fill_from_trace(self, traced: SimulatedStep) -> tuple[dict[str, Any], list[Note]]:
        """Fill in the trace's figures of the unanswered targets. Returns the fields of `Estimate` that only the trace
        knows, and notes."""
        job, device, loop = self.alone, self.device, self.request.options.loop or RESIDENT
        step = self._time_in_loop(traced, loop)
        fields, assumed = ({}, []) if job.parallel is None else ranks_of(traced, job, device)
        notes: list[Note] = []
        for target in TARGETS:
            if target not in self.by:
                self._set(target, step.figure(get_target(target).column), "trace", loop)
                if target == "step_time":
                    fields |= {"step_time_upper_ms": step.step_time_upper_ms, "bound_by": step.bound_by}
                    if step.bound_by == "host":
                        upper_ms = f"{step.step_time_upper_ms:,.2f} on 9 of 10 machines"
                        text = f"the host bounds the step: {step.step_time_ms:,.2f} ms, up to {upper_ms}"
                        if job.config is None:
                            text += "; for a module, framework= says what launches the kernels"
                        notes.append(Note("host-bound", INFO, text, (target,)))
        notes += [*assumed, *(Note("trace", WARNING, text) for text in traced.trace.notes)]
        memory, largest = traced.memory, list(traced.memory.peak_modules.items())[:TOP_MODULES]
        fields |= {
            "parameters": traced.trace.parameters,
            "breakdown": dict(traced.breakdown),
            "trace_memory_mib": step.peak_memory_mib,
            "allocated_mib": step.peak_allocated_mib,
            "reserved_mib": step.peak_reserved_mib,
            "process_mib": step.peak_memory_mib - self.platform.machine.other_mib,
            "card_mib": step.peak_memory_mib,
            "peak_operator": memory.peak_operator,
            "peak_module": memory.peak_module,
            "peak_phase": memory.peak_phase,
            "activations": {name: nbytes / MIB for name, nbytes in largest},
        }
        if step_s := self.figures["step_time_ms"] / 1e3:
            timed = step if self.loops["step_time"] == loop else self._time_in_loop(traced, PIPELINE)
            tokens = traced.trace.remembered(("tokens", job.batch_size), lambda: _tokens(job, traced.trace))
            # Throughput counts all micro-steps and all replicas; utilization and energy are one GPU's.
            passes = training_of(job.settings).accumulation * (1 if job.parallel is None else job.parallel.replicas)
            at_peak_s = _seconds_at_peak(traced.trace, device, job.settings)
            fields |= {
                "samples_per_s": passes * job.batch_size / step_s,
                "tokens_per_s": None if tokens is None else passes * tokens / step_s,
                "mfu": None if at_peak_s is None else at_peak_s / step_s,
                "energy_j": timed.activity.power_w * step_s,
            }
        return fields, notes

    def _time_in_loop(self, traced: SimulatedStep, loop: str) -> SimulatedStep:
        """Return the traced step in a loop: the trace alone prices the GPU's work without any input."""
        if loop != PIPELINE:
            return traced
        waits_ms = self.alone.loading_ms(traced.trace)
        return replace(traced, timed=time_step(traced.trace, self.device, self.alone.settings, input_ms=waits_ms))

    def _notes_on_trace(self, traced: SimulatedStep, limit_mib: float) -> list[Note]:
        """Return notes: whether the traced step fits into `limit_mib`, and the assumptions of the trace."""
        memory, by, device, job = traced.memory, self.by["memory"], self.device, self.alone
        notes: list[Note] = []
        if not memory.fits:
            share = f"the {limit_mib:,.0f} MiB of its share of {device.name}"
            text = f"the step needs more than {f'{device.name} has' if limit_mib >= device.memory_mib else share}"
            if by == "trace":
                notes.append(Note(OUT_OF_MEMORY, PROBLEM, f"out of memory: {text}"))
            else:
                notes.append(Note("trace-out-of-memory", WARNING, f"the trace finds that {text}"))
        notes += [Note("assumed", WARNING, f"assumed: {text}") for text in traced.trace.assumed]
        if (mix := traced.trace.mix) is not None:
            text = (
                f"{mix.given} steps on batches of {mix.shapes} shapes, replayed in order and then twice on the "
                f"longest, {job.shape_text()}: allocated at the peak {memory.peak_allocated / MIB:,.1f} MiB, reserved "
                f"by the mix {memory.peak_reserved / MIB:,.1f} MiB, {traced.breakdown['fragmentation']:,.1f} MiB of "
                "it fragmentation; utilization and step time are of the longest"
            )
            notes.append(Note("batch-mix", INFO, text))
        notes += workspace_notes(memory.workspaces, self.platform.torch_version)
        if device.architecture.vendor == AMD:
            of_context = ", its context is assumed" if self.platform.machine.name in MACHINES else ""
            of_layers = "; MIOpen's memory is not known, and assumed to be what cuDNN takes"
            text = (
                "on an AMD GPU: no AMD GPU was measured: times rest on its data sheet and on kernels of NVIDIA GPUs"
                f"{of_context}{of_layers if loads_cudnn(traced.trace) else ''}"
            )
            notes.append(Note(AMD_GPU, WARNING, text))
        works_ms = traced.step_time_ms - traced.communication.waits_ms
        if self.loops.get("step_time") == PIPELINE and job.loading_ms(traced.trace) > works_ms:
            text = (
                "the input bounds the step: a plain loop loads a batch longer than the GPU and the host work on it. "
                "Power and energy are of a GPU that waits; a loader with workers changes them"
            )
            notes.append(Note("input-bound", WARNING, text, ("step_time",)))
        if memory.workspaces and by != "trace" and not self.beyond_fit:
            text = f"workspaces= changes the trace's figures only; memory is answered by {by}"
            notes.append(Note("without-effect", WARNING, text))
        return notes

    def _notes_on_memory(self, memory: Memory, limit_mib: float) -> tuple[list[Note], list[Note]]:
        """Return the notes to put first, that the job does not fit, and those about its memory's bound."""
        device, by = self.device, self.by["memory"]
        peak_mib, upper_mib = memory.peak_memory_mib, memory.upper_mib
        room = f"of {device.name}" if limit_mib >= device.memory_mib else f"of its share of {device.name}"
        first: list[Note] = []
        notes: list[Note] = []
        if upper_mib is not None and peak_mib <= limit_mib < upper_mib:
            text = f"it may run out of memory: the bound is above the {limit_mib:,.0f} MiB {room}"
            notes.append(Note(MAY_RUN_OUT, PROBLEM, text))
        if upper_mib is None and by == "trace":
            notes.append(Note("no-bound", WARNING, TRACE_HAS_NO_BOUND))
        elif by != "trace" and peak_mib > limit_mib:
            why = f"it may take {limit_mib:,.0f} MiB {room}"
            if peak_mib > device.memory_mib:
                why = f"{device.name} has {device.memory_mib:,.0f} MiB"
            first.append(Note(OUT_OF_MEMORY, PROBLEM, f"out of memory by {by}: {why}"))
        if (note := widest(memory.uncertain, (upper_mib or 0.0) - peak_mib)) is not None:
            notes.append(note)
        if self.platform.allocator is not None and by != "trace":
            limits = "" if limit_mib >= device.memory_mib else f" and the limit of {limit_mib:,.0f} MiB"
            text = f"allocator= changes the trace's figures{limits} only; memory is answered by {by}"
            notes.append(Note("without-effect", WARNING, text))
        return first, notes

    def _moved_by_runs(self, estimate: Estimate) -> Estimate:
        """Return the estimate adjusted to measured runs: those of `known`, by default the data folder's.

        Raises:
            UsageError: There are runs, and the job is not traced.
        """
        own_runs, known, traced = self.request.own_runs, self.request.options.known, self.traced
        if own_runs is None:
            runs = tuple(run for run in known if run.is_of(self.device))
            missing = f"known: no run was measured on {self.device.name}"
            notes = [Note("no-known-run", WARNING, missing)] if known and not runs else []
        elif traced is None and not own_runs.asked_for:
            return estimate
        else:
            runs, notes = own_runs.of(self.job.batch_size, self.device)
        if not runs:
            return estimate.with_values(notes=(*estimate.notes, *notes)) if notes else estimate
        if traced is None:
            raise UsageError("known= takes a job that can be traced, and this one cannot")

        def trace_at(batch_size: int) -> SimulatedStep:
            if batch_size == self.job.batch_size:
                return traced
            job = self.job.with_samples(batch_size)
            return self.platform.place(
                step_of(job, self.device, allocator=self.platform.allocator),
                job,
                workspaces=self.platform.workspaces is not None,
            )

        without = uncertainty_of(traced, self.device, self.platform.machine)
        try:
            by_runs = move_by_runs(estimate, runs, trace_at, self.request.options.coverage, without)
        except CommandError as error:
            if own_runs is None or own_runs.asked_for:
                raise
            return estimate.with_values(notes=(*estimate.notes, own_runs.left_out(error)))
        if own_runs is None or by_runs.answered_by == estimate.answered_by:
            return by_runs
        return by_runs.with_values(notes=(own_runs.note(runs), *by_runs.notes))


def beyond_fits(job: TrainingJob) -> str:
    """Return what a job has that no model was fitted on, as `name=value` or in words; empty where there is nothing."""
    beyond = training_of(job.settings).beyond_fits()
    beyond += () if job.parallel is None else (SEVERAL_GPUS,)
    return ", ".join((*beyond, "batches of several shapes") if job.batches else beyond)


def _note_on_two_loops(loops: Mapping[str, str]) -> list[Note]:
    """Return a note where utilization and step time are of different loops, and so do not belong together."""
    of_loop = {loop: [t for t in TARGETS if t != "memory" and loops.get(t) == loop] for loop in (PIPELINE, RESIDENT)}
    if not all(of_loop.values()):
        return []
    parts = " and ".join(
        f"{', '.join(targets)} {'is' if len(targets) == 1 else 'are'} for the {loop} loop"
        for loop, targets in of_loop.items()
    )
    return [Note("two-loops", WARNING, f"{parts}; pass loop={PIPELINE} or loop={RESIDENT} to get all for one")]


def _seconds_at_peak(trace: StepTrace, device: DeviceSpec, settings: TrainingSettings) -> float | None:
    """Return the seconds of a GPU's products at the peak rate; of a pipeline, the mean over its ranks."""
    groups = () if trace.pipeline is None else trace.pipeline.groups
    if not groups:
        return seconds_at_peak(trace, device, settings)
    seconds = [(seconds_at_peak(group.trace, device, settings), len(group.ranks)) for group in groups]
    known = [(figure, count) for figure, count in seconds if figure is not None]
    return sum(figure * count for figure, count in known) / sum(count for _, count in known) if known else None


def _tokens(job: TrainingJob, trace: StepTrace) -> int | None:
    """Return the tokens of one micro-step; None where the job has no sequences of them.

    Tokens are the elements of the first integer input of shape [batch, length], padding included. A script's inputs are
    not kept: there, the indices of the first embedding of that shape count.
    """
    if job.recorded is None:
        inputs, _targets = job.batch("meta")
        shapes = [
            tuple(x.shape)
            for x in tensors_of(inputs)
            if not (x.is_floating_point() or x.is_complex() or x.dtype.itemsize == 1)
        ]
    else:
        shapes = [op.input_shapes[1] for op in trace.operators if op.name == "aten::embedding"]
    return next((batch * size[0] for batch, *size in shapes if batch == job.batch_size and len(size) == 1), None)
