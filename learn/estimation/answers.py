"""Answer what one training job takes before it runs: by the trace, a training-free method, fitted models.

Start reading at `answered`; `_Answer` asks the sources one after the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.cli.commands import naming_the_extra
from conf.errors import CommandError, EnvironmentProblem, UsageError
from conf.files.disk_cache import keep, recall
from conf.units import MIB
from featurize.configs.features import is_current
from featurize.device.device_spec import AMD, MACHINES, DeviceSpec, UnsuitableDevice
from featurize.job.training_settings import TrainingSettings, training_of
from featurize.memory.replay import loads_cudnn
from featurize.operators.replacing import without_collection
from featurize.recording.skeleton import build_on_meta
from featurize.recording.step_trace import BatchMix, StepTrace
from featurize.recording.values import tensors_of
from featurize.timing.overlap import SimulatedStep, lengthened, simulate
from featurize.timing.times import seconds_at_peak
from learn.estimation.job_estimate import (
    COVERAGES,
    HELD_OUT,
    Activity,
    Energy,
    Estimate,
    Memory,
    RankGroup,
    Timing,
    estimators_named,
    uncertainty_of,
    widest,
)
from learn.estimation.known_runs import KnownRun, moved
from learn.estimation.notes import (
    AMD_GPU,
    INFO,
    MAY_RUN_OUT,
    OUT_OF_MEMORY,
    PIPELINE,
    PROBLEM,
    RESIDENT,
    TARGETS,
    WARNING,
    Note,
    loading_ms,
    loop_named,
    loops_of_sources,
    times,
)
from learn.estimation.platforms import SEVERAL_GPUS, buffers_mib, communication_of_step, ranks_of, workspace_notes
from learn.estimation.requests import Request, StepFiles
from learn.estimators.protocol import LEVEL, TRAINING_FREE, MemoryBound, get_estimator
from learn.fitting.artifacts import Artifact, StaleArtifact, default_artifact, find_latest, load_latest
from learn.job.traced import CannotTrace, TracedStep, key_of, step_of, trace_of, wants_values
from learn.job.training_job import Case, TrainingJob, as_a_training_script
from learn.peers.base import TRACE_HAS_NO_BOUND, Peer, analyse
from learn.rows.data import get_target
from learn.rows.step_store import StepRecord, StepStore, traced_column
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    from featurize.trace.trace_cache import Traces
    from learn.estimation.platforms import Platform
    from learn.estimators.protocol import Prediction
    from learn.fitting.artifacts import Wanted

TOP_MODULES = 10
_OF_MODULES = ("hybrid", "gnn", "trace", "horus", "faketensor", "dnnmem", "xmem", "llmem", "deepspeed")
# Where the trace meets its own limits, these may still answer: what each of them does instead.
WITHOUT_TRACE = "estimator=xmem runs it for real on the CPU, estimator=deepspeed counts the model's states only"


def answered(
    request: Request, *, timeline: bool = False, traces: Traces | None = None
) -> tuple[Estimate, TracedStep | None]:
    """Return the estimate, and the traced step where there is one.

    Args:
        request: The job, what it runs on, and how the estimate is made.
        timeline: Whether the traced step keeps the allocator's state after every event.
        traces: As in `learn.job.traced.step_of`.

    Raises:
        UsageError: Peak memory cannot be estimated. Other figures may be None.
    """
    (asked,) = _ask_all([request], timeline, traces)
    if asked.error is not None:
        raise asked.error
    return asked.estimate, asked.traced


@naming_the_extra()
@as_a_training_script()
@without_collection()
def _ask_all(requests: Sequence[Request], timeline: bool, traces: Traces | None) -> list[_Answer]:
    """Return the answers to requests that differ in their platform alone: each fitted model is asked once for all."""
    began = time.monotonic_ns()
    steps = StepStore(requests[0].options.data)
    answers = [_Answer(request, timeline, traces, steps) for request in requests]
    with contextlib.ExitStack() as overrides:
        for answer in answers:
            answer.attempt(partial(answer.trace, answers[0].failure))
            answer.attempt(partial(answer.ask, overrides))
        of_model: dict[int, tuple[Artifact, list[tuple[_Answer, _Question]]]] = {}
        for answer in answers:
            for question in answer.questions:
                if answer.error is None and (artifact := question.artifact) is not None:
                    of_model.setdefault(id(artifact), (artifact, []))[1].append((answer, question))
        for artifact, asked in of_model.values():
            try:
                prediction = artifact.estimator.predict([question.case for _, question in asked], steps)
            except CommandError as error:
                for answer, _ in asked:
                    answer.error = answer.error or error
                continue
            for row, (_, question) in enumerate(asked):
                question.prediction, question.row = prediction, row
    for answer in answers:
        answer.attempt(answer.finish)
    seconds = (time.monotonic_ns() - began) / 1e9 / len(answers)
    for answer in answers:
        if answer.error is None:
            answer.estimate = replace(answer.estimate, seconds=seconds)
    return answers


@as_a_training_script()
def traces_of(request: Request) -> Traces:
    """Return the job's trace alone, as `answered` takes it. Raises `UsageError` as `learn.job.traced.step_of`."""
    traces: Traces = {}
    trace_of(_in_loop(request, request.job), request.platform.device, traces)
    return traces


def _in_loop(request: Request, job: TrainingJob) -> TrainingJob:
    return job if request.options.loop is None else replace(job, training_loop=request.options.loop == PIPELINE)


def is_of_job(error: CommandError) -> bool:
    """Return whether an error is of the job, whatever the GPU model: its step cannot be traced."""
    return isinstance(error.__cause__, CommandError) and not isinstance(error.__cause__, UnsuitableDevice)


@dataclass
class _Question:
    """A target whose figure a fitted model may know: what it is asked, and, once it was, the row of its prediction.

    artifact   the model; None: none knows the target
    default    it comes with the project
    notes      on models that were passed over
    """

    target: str
    artifact: Artifact | None
    default: bool
    case: Case
    notes: list[Note]
    prediction: Prediction | None = None
    row: int = 0


class _Answer:
    """Gathers the figures of one estimate.

    traced      the step, where it can be traced; else `failure` says why it cannot
    job         in the loop that is asked for; `alone`: with the longest of its batches in every step
    case        what estimators are asked about
    memory      the figure and its bound, by whoever is asked; None: nobody has answered
    figures     column of each further target -> the figure
    by, loops   target -> its estimator, and its loop
    beyond_fit  whether the model that answers memory says that it does not know such jobs: then the trace bounds it
    questions   questions to fitted models between `ask` and `finish`
    estimate, error   what is gathered, or why nothing is
    """

    def __init__(self, request: Request, timeline: bool, traces: Traces | None, steps: StepStore) -> None:
        self.request, self.platform, self._timeline, self._traces = request, request.platform, timeline, traces
        self.device, self._on = request.platform.device, request.platform.machine
        self._steps = steps
        self.questions: list[_Question] = []
        self.estimate: Estimate
        self.error: CommandError | None = None
        self.job = _in_loop(request, request.job)
        self.alone = self.job.alone(self.job.longest) if self.job.batches else self.job
        self.case = self._case()
        self.traced: TracedStep | None = None
        self.failure: CommandError | None = None
        self.memory: Memory | None = None
        self.figures: dict[str, float] = {}
        self.by: dict[str, str] = {}
        self.loops: dict[str, str] = {}
        self.notes: list[Note] = []
        self.beyond_fit = False

    def attempt(self, stage: Callable[[], None]) -> None:
        """Take a stage of the answer, unless one before it failed."""
        if self.error is None:
            try:
                stage()
            except CommandError as error:
                self.error = error

    def _case(self) -> Case:
        """Return what estimators are asked about. Raises `UsageError` for a module and an estimator of configs."""
        job, device, named = self.alone, self.device, self.request.options.estimator
        if job.config is not None:
            return Case(job.config, device.name, job.training_loop, described=device)
        if named is not None and named not in TRAINING_FREE and not get_estimator(named).needs_trace:
            raise UsageError(f"estimator={named} reads trial configs; modules are answered by {', '.join(_OF_MODULES)}")
        return Case(device=device.name, training_loop=job.training_loop, module=job, described=device)

    def _step_of(self, job: TrainingJob, **options: Any) -> TracedStep:
        return step_of(job, self.device, allocator=self.platform.allocator, **options)

    def trace(self, failure: CommandError | None) -> None:
        """Trace the step, or keep why it cannot be traced: `failure`, where it was tried on another GPU model."""
        buffers_mib(self.job, self.device)  # refuses a GPU model before anything is traced
        self.platform.prepare_workspaces(self.job)
        try:
            if failure is not None and not isinstance(failure, UnsuitableDevice):
                raise failure
            self.traced = self._step_of(self.job, timeline=self._timeline, traces=self._traces)
        except CommandError as error:
            self.failure = error
            if self.case.config is not None:  # it may name code that nobody allowed to run: what was stored may answer
                self._steps.recall([self.case, replace(self.case, training_loop=True)])
            of_case = not self.job.batches and self.platform.allocator is None  # else another job failed
            if of_case and self._steps.features(self.case) is None:
                self._steps.keep(self.case, StepRecord(error=str(error)))
        if self.traced is not None and self.traced.trace.mix is not None:
            self.alone = self.job.alone(self.traced.trace.mix.longest)
            self.case = self._case()
            self.traced = self._with_longest(self.traced, self.traced.trace.mix)

    def _with_longest(self, mixed: TracedStep, mix: BatchMix) -> TracedStep:
        """Return the traced mix, or its longest batch alone where that takes more: the caches that the other batches
        leave can suit it better than its own, in the order that was given."""
        longest = self._step_of(self.alone, timeline=self._timeline)
        if longest.step.peak_memory_mib <= mixed.step.peak_memory_mib:
            return mixed
        text = (
            f"memory is of the longest batch alone, {self.alone.shape_text()}: the {mix.given} steps on batches of "
            f"{mix.shapes} shapes reserve {mixed.step.peak_reserved_mib:,.1f} MiB in their order, the longest alone "
            f"{longest.step.peak_reserved_mib:,.1f} MiB; utilization and step time are of the longest"
        )
        self.notes.append(Note("batch-mix", INFO, text, ("memory",)))
        self.notes += [Note("trace", WARNING, note) for note in mixed.trace.notes if note not in longest.trace.notes]
        return longest

    def ask(self, overrides: contextlib.ExitStack) -> None:
        """Ask the method that was named, else choose the fitted models to ask, with records at hand for them."""
        estimator, job = self.request.options.estimator, self.job
        beyond = training_of(job.settings).beyond_fits()
        beyond += () if job.parallel is None else (SEVERAL_GPUS,)
        if job.batches:
            beyond += ("batches of several shapes",)
            if estimator not in (None, "trace"):
                text = f"estimator={estimator} does not follow a mix of batches: it takes the longest alone"
                self.notes.append(Note("beyond-fit", WARNING, text))
        if estimator in TRAINING_FREE and estimator != "trace":
            self._ask_method(estimator)
        elif estimator is None and beyond:
            text = f"no model was fitted on {', '.join(beyond)}: the trace answers"
            self.notes.append(Note("beyond-fit", INFO, text))
        elif estimator != "trace":
            if beyond:
                text = f"no model was fitted on {', '.join(beyond)}: estimator={estimator} leaves that out"
                self.notes.append(Note("beyond-fit", WARNING, text))
            at_hand = self.traced if self.platform.allocator is None and not job.batches else None
            overrides.enter_context(self._steps.override(self.case, at_hand))
            self._choose_models(overrides)

    def finish(self) -> None:
        """Take what fitted models answered, and gather the estimate. Raises why there is none."""
        if self.questions:
            self._take_fitted()
        if self.failure is not None:
            self._answer_without_trace(self.failure)
        self.place()
        self.estimate = self.moved(self.gathered())

    def _answer_without_trace(self, failure: CommandError) -> None:
        """Take what was stored of the job. Raises `failure`, why it cannot be traced, where nobody answers."""
        if self.request.options.estimator in (None, "trace") and self.job.parallel is None:
            self._ask_stored()
        if self.memory is None:
            advice = f"; {WITHOUT_TRACE}" if isinstance(failure, CannotTrace) and failure.limit else ""
            kind = UsageError if isinstance(failure, UsageError) else EnvironmentProblem
            raise kind(f"{failure}{advice}") from failure

    def _take(self, target: str, figure: float, by: str, loop: str) -> None:
        """Take a target's figure, with its source and its loop."""
        self.by[target], self.loops[target] = by, loop
        if target == "memory":
            self.memory = Memory(peak_memory_mib=figure)
        else:
            self.figures[get_target(target).column] = figure

    def _ask_method(self, estimator: str) -> None:
        """Memory by a training-free method. `UsageError` with the method's reason."""
        if beyond := training_of(self.alone.settings).beyond_trials():
            raise UsageError(f"estimator={estimator} has no answer: it does not know {', '.join(beyond)}")
        known = get_estimator(estimator)
        assert issubclass(known, Peer), estimator
        by_method = analyse(known(), self.alone, self.device)
        if by_method.mib is None:
            stuck = wants_values(str(by_method.reason)) and f"estimator={estimator}" not in WITHOUT_TRACE
            advice = f"; {WITHOUT_TRACE}" if stuck else ""
            raise UsageError(f"estimator={estimator} has no answer: {by_method.reason}{advice}")
        self._take("memory", by_method.mib, estimator, loop_named(self.alone.training_loop))
        self.memory = Memory(peak_memory_mib=by_method.mib, breakdown=dict(by_method.parts))
        self.notes.append(Note("estimator", WARNING, known.warning))

    def _ask_stored(self) -> None:
        """Fill missing figures from a stored trace of a case that cannot be traced here."""
        if (features := self._steps.features(self.case)) is None:
            return
        for target in TARGETS:
            if target not in self.by:
                figure = features[traced_column(get_target(target))]
                self._take(target, figure, "trace", loop_named(self.case.training_loop))
        text = "figures of the trace are those stored in the data folder, since it cannot be repeated here"
        self.notes.append(Note("stored-trace", INFO, text))

    def _case_in_a_plain_loop(self, overrides: contextlib.ExitStack) -> Case:
        """Return the case in such a loop, its record at hand while models are asked."""
        case = self.case
        if case.training_loop or case.spec is None:
            return case
        module = case.module and replace(case.module, training_loop=True)
        looped = replace(case, training_loop=True, module=module)
        with contextlib.suppress(CommandError):  # then whoever asks for its record hears why
            traced = step_of(looped.job, case.spec, traces=self._traces)
            overrides.enter_context(self._steps.override(looped, traced))
        return looped

    def _choose_models(self, overrides: contextlib.ExitStack) -> None:
        """Choose for each target the newest fitted model that knows the case's family and device: the data folder's,
        else the one that comes with the project.

        Other people measure plain loops, which wait for their input; the farm's trials keep one batch on the device. So
        each model is asked about the loop that it knows. Where a `loop` is asked for, only models that know that one
        answer; memory, which hardly depends on the loop, is answered by any.
        """
        case, estimator = self.case, self.request.options.estimator
        folder = DataFolder.resolve(self.request.options.data)
        if self.request.options.data is not None:
            folder.open()
        family = None if case.config is None else case.family
        wanted: Wanted = {
            "estimator": estimator,
            "family": family,
            "device": case.device,
            "for_modules": case.config is None,
        }
        learnt: Wanted = {**wanted, "learnt": True}
        shipped = {target: default_artifact(target) for target in TARGETS}
        shipped = {t: a for t, a in shipped.items() if a is not None and estimator in (None, a.meta["estimator"])}
        if estimator is not None and "memory" not in shipped:
            load_latest(folder, "memory", **wanted)  # a named one must be there, at least for memory
        in_a_loop = None
        for target in TARGETS:
            newest, notes = None, list[Note]()
            try:
                newest = find_latest(folder, target, **learnt)
            except StaleArtifact as error:
                if estimator is not None:
                    raise
                notes.append(Note("stale-model", WARNING, str(error)))
            artifact, passed_over = _of_loop(target, newest, shipped.get(target), self.request.options.loop)
            asked = case
            if artifact is not None and loops_of_sources(artifact.meta["rows"]["source"]) == {PIPELINE}:
                asked = in_a_loop = in_a_loop or self._case_in_a_plain_loop(overrides)
            self.questions.append(_Question(target, artifact, artifact is not newest, asked, [*notes, *passed_over]))

    def _take_fitted(self) -> None:
        """Take the figures of fitted models, and note what has none."""
        answers = [(question, self._take_model(question)) for question in self.questions]
        self.notes += _merge([note for question, notes in answers for note in (*question.notes, *(notes or ()))])
        if absent := [question.target for question, notes in answers if notes is None]:
            home = DataFolder.resolve(self.request.options.data).models
            text = (
                f"no fitted model for {self.case.family if self.case.config else 'modules'} on {self.case.device} in "
                f"{home} for {', '.join(absent)}{': answered by the trace' if self.traced is not None else ''} "
                f"(python -m learn.fit target={absent[0]} fits one)"
            )
            self.notes.insert(0, Note("not-fitted", INFO, text))

    def _take_model(self, question: _Question) -> list[Note] | None:
        """Take the figure of one fitted model. Returns the notes on it; None where it has no answer.

        Raises:
            UsageError: The estimator that was named has no answer for memory.
        """
        target, artifact, default = question.target, question.artifact, question.default
        prediction, row = question.prediction, question.row
        if artifact is None or prediction is None:
            return None
        if row in prediction.refusals:
            if target == "memory" and (named := self.request.options.estimator) is not None:
                raise UsageError(f"estimator={named} has no answer: {prediction.refusals[row]}")
            return None
        point, name = float(prediction.point[row]), artifact.meta["estimator"]
        by = f"{name} (default)" if default else f"{name} {artifact.version}"
        self._take(target, point, by, loop_named(question.case.training_loop))
        if target == "memory":
            assert self.memory is not None
            if (bound := _bound_of(prediction, row, artifact, self.request.options.coverage)) is not None:
                self.memory = self.memory.with_bound(bound)
            self.beyond_fit = default and row in prediction.outside
        of_target = (target,)
        notes = [Note("estimator", WARNING, text, of_target) for text in prediction.warnings]
        notes += [
            Note("unlike-fitted", WARNING, f"unlike what it was fitted on: {text}", of_target)
            for text in prediction.unfamiliar.get(row, ())
        ]
        of_loop = ", for a plain training loop with its input pipeline" if question.case is not self.case else ""
        sources = ", ".join(artifact.meta["rows"]["source"])
        notes.append(Note("fitted-rows", INFO, f"fitted on {sources} rows{of_loop}", of_target))
        if default and not is_current(artifact.meta["feature_version"]):
            text = (
                "the model that comes with the project was fitted with features "
                f"{artifact.meta['feature_version']}, and this code computes others: it may be a little off"
            )
            notes.append(Note("stale-model", WARNING, text, of_target))
        return notes

    def place(self) -> None:
        """Place the traced step on the machine, and bound memory that no fit covers by its causes."""
        if self.traced is None:
            return
        described_mib = self.traced.step.peak_memory_mib
        self.traced = self.platform.placed(self.traced, self.job, timeline=self._timeline)
        self._move(self.traced.step.peak_memory_mib - described_mib)
        if self.platform.workspaces is not None:  # after what fitted models read: they know guessed workspaces only
            guessed_mib = self.traced.step.peak_memory_mib
            self.traced = self.platform.placed(self.traced, self.job, timeline=self._timeline, workspaces=True)
            if self.beyond_fit:  # there the trace's own figure stands
                self._move(self.traced.step.peak_memory_mib - guessed_mib)
        step = self.traced.step
        if self.memory is None:
            self._take("memory", step.peak_memory_mib, "trace", loop_named(self.alone.training_loop))
        if self.beyond_fit or self.by["memory"] == "trace":
            assert self.memory is not None
            uncertainty = uncertainty_of(self.traced, self.device, self._on)
            centre_mib = max(self.memory.peak_memory_mib, step.peak_memory_mib)
            limit_mib = self.platform.limit_mib(self.traced)
            self.memory = self.memory.with_bound(
                uncertainty.bound(centre_mib, self.request.options.coverage, limit_mib)
            )

    def _move(self, mib: float) -> None:
        """Move a packaged model's memory to another machine than its rows were measured on."""
        if self.memory is not None and self.by["memory"].endswith("(default)"):
            self.memory = self.memory.moved(mib)

    def gathered(self) -> Estimate:
        """Return what was gathered, and the trace's figures for the rest."""
        traced, device = self.traced, self.device
        limit_mib, timing, energy = self.platform.limit_mib(traced), Timing(), Energy()
        ranks: tuple[RankGroup, ...] = ()
        if traced is None:
            missing = [target for target in TARGETS if target not in self.by]
            unknown = f"{', '.join(missing)}: not known" if missing else "not traced"
            notes = [Note("not-traced", WARNING, f"{unknown}, since {self.failure}", tuple(missing))]
            parameters = _parameters(self.alone)
        else:
            timing, energy, ranks, notes = self._by_trace(traced)
            notes += self._notes_of_trace(traced, limit_mib)
            parameters = traced.step.parameters
        assert self.memory is not None, "it is answered"
        first, of_memory = self._notes_of_memory(self.memory, limit_mib)
        memory = replace(self.memory, device_memory_mib=device.memory_mib, limit_mib=limit_mib)
        activity = Activity(**{name: self.figures.get(name) for name in vars(Activity())})
        timing = replace(timing, step_time_ms=self.figures.get("step_time_ms"))
        return Estimate(
            **vars(memory),
            **vars(activity),
            **vars(timing),
            **vars(energy),
            parameters=parameters,
            device=device.name,
            notes=(*first, *notes, *of_memory, *self.notes, *note_of_two_loops(self.loops)),
            estimator=estimators_named(self.by),
            answered_by=self.by,
            loops=self.loops,
            machine=self._on.name,
            ranks=ranks,
            seconds=0.0,
        )

    def _by_trace(self, traced: TracedStep) -> tuple[Timing, Energy, tuple[RankGroup, ...], list[Note]]:
        """Take the trace's figures of the targets without an answer. Returns what the trace alone says."""
        job, device, loop = self.alone, self.device, self.request.options.loop or RESIDENT
        talk = communication_of_step(traced, job, device)
        step = lengthened(self._priced(traced, loop), talk, device)
        of_step: dict[str, Any] = {}
        notes: list[Note] = []
        for target in TARGETS:
            if target not in self.by:
                self._take(target, getattr(step, get_target(target).column), "trace", loop)
                if target == "step_time":
                    of_step = {"step_time_upper_ms": step.step_time_upper_ms, "bound_by": step.bound_by}
                    if step.bound_by == "host":
                        upper_ms = f"{step.step_time_upper_ms:,.2f} on 9 of 10 machines"
                        text = f"the host bounds the step: {step.step_time_ms:,.2f} ms, up to {upper_ms}"
                        if job.config is None:
                            text += "; for a module, framework= says what launches the kernels"
                        notes.append(Note("host-bound", INFO, text, (target,)))
        timed = step if self.loops["step_time"] == loop else self._priced(traced, PIPELINE)
        ranks, sent, assumed = ranks_of(traced, job, device, talk)
        notes += [*assumed, *(Note("trace", WARNING, text) for text in traced.trace.notes)]
        memory, largest = traced.memory, list(traced.memory.peak_modules.items())[:TOP_MODULES]
        assert self.memory is not None, "it is answered"
        self.memory = replace(
            self.memory,
            breakdown=dict(traced.breakdown),
            trace_memory_mib=step.peak_memory_mib,
            allocated_mib=step.peak_allocated_mib,
            reserved_mib=step.peak_reserved_mib,
            process_mib=step.peak_memory_mib - self._on.other_mib,
            card_mib=step.peak_memory_mib,
            peak_operator=memory.peak_operator,
            peak_module=memory.peak_module,
            peak_phase=memory.peak_phase,
            activations={name: nbytes / MIB for name, nbytes in largest},
        )
        if not (step_time_ms := self.figures["step_time_ms"]):
            return Timing(**of_step, **sent), Energy(), ranks, notes
        step_s = step_time_ms / 1e3
        micro_steps, tokens = training_of(job.settings).accumulation, tokens_of(job, traced.trace)
        # All micro-steps and all replicas count, but for utilization and energy, which are of one GPU.
        passes = micro_steps * (1 if job.parallel is None else job.parallel.replicas)
        at_peak_s = _at_peak_s(traced.trace, device, job.settings)
        timing = Timing(
            **of_step,
            **sent,
            samples_per_s=passes * job.batch_size / step_s,
            tokens_per_s=None if tokens is None else passes * tokens / step_s,
            mfu=None if at_peak_s is None else at_peak_s / step_s,
        )
        return timing, Energy(energy_j=timed.power_w * step_s), ranks, notes

    def _priced(self, traced: TracedStep, loop: str) -> SimulatedStep:
        """Return the traced step in a loop: the trace itself prices the GPU's own work, without any input."""
        if loop != PIPELINE:
            return traced.step
        waits_ms, settings = loading_ms(traced, self.alone), self.alone.settings
        timed = simulate(traced.trace, self.device, settings, memory=traced.memory, input_ms=waits_ms)
        return replace(timed, peak_memory_mib=traced.step.peak_memory_mib)  # on this machine

    def _notes_of_trace(self, traced: TracedStep, limit_mib: float) -> list[Note]:
        """Return whether the traced step fits into `limit_mib`, and what was assumed of it."""
        memory, by, device, job = traced.memory, self.by["memory"], self.device, self.alone
        notes: list[Note] = []
        more = f"the {limit_mib:,.0f} MiB {_room(device, limit_mib)}"
        more = f"{device.name} has" if limit_mib >= device.memory_mib else more
        if not memory.fits and by == "trace":
            notes.append(Note(OUT_OF_MEMORY, PROBLEM, f"out of memory: the step needs more than {more}"))
        elif not memory.fits:
            notes.append(Note("trace-out-of-memory", WARNING, f"the trace finds that the step needs more than {more}"))
        elif memory.retries:
            text = f"it only just fits: the allocator has to give cached memory back {times(memory.retries)}"
            notes.append(Note("near-limit", WARNING, text))
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
            of_context = ", its context is assumed" if self._on.name in MACHINES else ""
            of_layers = "; MIOpen's memory is not known, and assumed to be what cuDNN takes"
            text = (
                "on an AMD GPU: no AMD GPU was measured: times rest on its data sheet and on kernels of NVIDIA GPUs"
                f"{of_context}{of_layers if loads_cudnn(traced.trace) else ''}"
            )
            notes.append(Note(AMD_GPU, WARNING, text))
        if self.loops.get("step_time") == PIPELINE and loading_ms(traced, job) > traced.step.step_time_ms:
            text = (
                "the input bounds the step: a plain loop loads a batch longer than the GPU and the host work on it. "
                "Power and energy are of a GPU that waits; a loader with workers changes them"
            )
            notes.append(Note("input-bound", WARNING, text, ("step_time",)))
        if memory.workspaces and by != "trace" and not self.beyond_fit:
            text = f"workspaces= changes the trace's figures only; memory is answered by {by}"
            notes.append(Note("without-effect", WARNING, text))
        return notes

    def _notes_of_memory(self, memory: Memory, limit_mib: float) -> tuple[list[Note], list[Note]]:
        """Return the notes that come first, that the job does not fit, and those on what bounds its memory."""
        device, by = self.device, self.by["memory"]
        peak_mib, upper_mib, room = memory.peak_memory_mib, memory.upper_mib, _room(self.device, limit_mib)
        first: list[Note] = []
        notes: list[Note] = []
        if upper_mib is not None and peak_mib <= limit_mib < upper_mib:
            text = f"it may run out of memory: the bound is above the {limit_mib:,.0f} MiB {room}"
            notes.append(Note(MAY_RUN_OUT, PROBLEM, text))
        if upper_mib is None and by == "trace":
            notes.append(Note("no-bound", WARNING, TRACE_HAS_NO_BOUND))
        elif by != "trace" and peak_mib > device.memory_mib:
            text = f"out of memory by {by}: {device.name} has {device.memory_mib:,.0f} MiB"
            first.append(Note(OUT_OF_MEMORY, PROBLEM, text))
        elif by != "trace" and peak_mib > limit_mib:
            text = f"out of memory by {by}: it may take {limit_mib:,.0f} MiB {room}"
            first.append(Note(OUT_OF_MEMORY, PROBLEM, text))
        if (note := widest(memory.uncertain, (upper_mib or 0.0) - peak_mib)) is not None:
            notes.append(note)
        if self.platform.allocator is not None and by != "trace":
            limits = "" if limit_mib >= device.memory_mib else f" and the limit of {limit_mib:,.0f} MiB"
            text = f"allocator= changes the trace's figures{limits} only; memory is answered by {by}"
            notes.append(Note("without-effect", WARNING, text))
        return first, notes

    def moved(self, done: Estimate) -> Estimate:
        """Return the estimate moved by the measured runs: the data folder's own, or else those of `known`.

        Raises:
            UsageError: There are runs, and the job is not traced.
        """
        own_runs, known, device = self.request.own_runs, self.request.options.known, self.device
        if own_runs is not None and (self.traced is not None or own_runs.asked_for):
            runs, notes = own_runs.of(self.job.batch_size, device)
        else:
            own_runs, runs, notes = None, tuple(run for run in known if run.is_of(device)), []
            if known and not runs:
                notes.append(Note("no-known-run", WARNING, f"known: no run was measured on {device.name}"))
        if not runs:
            return replace(done, notes=(*done.notes, *notes))
        if self.traced is None:
            raise UsageError("known= takes a job that can be traced, and this one cannot")
        try:
            by_runs = self._moved_by(runs, done, self.traced)
        except CommandError as error:
            if own_runs is None or own_runs.asked_for:
                raise
            return replace(done, notes=(*done.notes, own_runs.left_out(error)))
        if own_runs is None or by_runs.answered_by == done.answered_by:
            return by_runs
        return replace(by_runs, notes=(own_runs.note(runs), *by_runs.notes))

    def _moved_by(self, runs: Sequence[KnownRun], done: Estimate, traced: TracedStep) -> Estimate:
        """Return the estimate moved by runs, each traced at its batch size."""

        def trace_of(batch_size: int) -> TracedStep:
            if batch_size == self.job.batch_size:
                return traced
            job = _in_loop(self.request, self.job.with_samples(batch_size))
            workspaces = self.platform.workspaces is not None
            return self.platform.placed(self._step_of(job), job, workspaces=workspaces)

        without = uncertainty_of(traced, self.device, self._on)
        return moved(done, runs, trace_of, self.request.options.coverage, without)


def _parameters(job: TrainingJob) -> int | None:
    """Counted on a model that is built but not traced; None where it can't be built either."""
    try:
        return sum(p.numel() for p in build_on_meta(job.build).parameters())
    except Exception:  # a model may raise anything, and the trace's reason is noted already
        return None


def _bound_of(prediction: Prediction, row: int, artifact: Artifact, coverage: float) -> MemoryBound | None:
    """Return the bound of one case by a fitted model, of left-out groups, or of held-out rows where its fit left out
    none. None where it is not calibrated."""
    quantiles = {}
    for level in sorted({*COVERAGES, coverage}):
        values = prediction.upper(level) if level > 0.5 else prediction.quantile(level)
        if values is None:
            return None
        quantiles[level] = float(values[row])
    held_out: Mapping[str, Any] = {}
    if coverage == LEVEL:
        held = prediction.held_of(row)
        held_out = artifact.bound_held_out() if held is None else asdict(held)
    causes_mib = {HELD_OUT: quantiles[coverage] - float(prediction.point[row])}
    return MemoryBound(coverage=coverage, quantiles_mib=quantiles, causes_mib=causes_mib, held_out=held_out)


def _of_loop(
    target: str, newest: Artifact | None, shipped: Artifact | None, loop: str | None
) -> tuple[Artifact | None, list[Note]]:
    """Return the first of the two models that knows the loop, and which model was passed over for that."""
    if loop is None or target == "memory":
        return newest or shipped, []
    passed_over: list[Note] = []
    for artifact, words in ((newest, "the newest model of the data folder"), (shipped, "the packaged model")):
        if artifact is None:
            continue
        known = loops_of_sources(artifact.meta["rows"]["source"])
        if loop in known:
            return artifact, passed_over
        passed_over += [
            Note(
                "other-loop", INFO, f"{words} was fitted on the {name} loop only; pass loop={name} to use it", (target,)
            )
            for name in known
        ]
    return None, passed_over


def _merge(notes: list[Note]) -> list[Note]:
    """Return one note for those that say the same of several targets, whose names then begin its text."""
    targets: dict[Note, list[str]] = {}
    for note in notes:
        targets.setdefault(replace(note, targets=()), []).extend(note.targets)
    return [
        replace(note, text=f"{', '.join(names)}: {note.text}", targets=tuple(names)) if names else note
        for note, names in targets.items()
    ]


def note_of_two_loops(loops: Mapping[str, str]) -> list[Note]:
    """Return a note where utilization and step time are not all of one loop, so that they do not belong together."""
    of_loop = {loop: [t for t in TARGETS if t != "memory" and loops.get(t) == loop] for loop in (PIPELINE, RESIDENT)}
    if not all(of_loop.values()):
        return []
    parts = " and ".join(
        f"{', '.join(targets)} {'is' if len(targets) == 1 else 'are'} for the {loop} loop"
        for loop, targets in of_loop.items()
    )
    return [Note("two-loops", WARNING, f"{parts}; pass loop={PIPELINE} or loop={RESIDENT} to get all for one")]


def _room(device: DeviceSpec, limit_mib: float) -> str:
    return f"of {device.name}" if limit_mib >= device.memory_mib else f"of its share of {device.name}"


def _at_peak_s(trace: StepTrace, device: DeviceSpec, settings: TrainingSettings) -> float | None:
    """Return the seconds of a GPU's products at the peak rate; the mean over the ranks of a pipeline, which share the
    model."""
    groups = () if trace.pipeline is None else trace.pipeline.groups
    if not groups:
        return seconds_at_peak(trace, device, settings)
    seconds = [(seconds_at_peak(group.trace, device, settings), len(group.ranks)) for group in groups]
    known = [(figure, count) for figure, count in seconds if figure is not None]
    return sum(figure * count for figure, count in known) / sum(count for _, count in known) if known else None


def tokens_of(job: TrainingJob, trace: StepTrace) -> int | None:
    """Return the tokens of one micro-step; None where the job has no sequences of them.

    Tokens are the elements of the first input of integers that has the shape [batch, length], padding included. A
    script's inputs are not kept: there, what the first embedding of that shape looks up counts.
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


MOST_ANSWERS = 5000
_answers: dict[str, Estimate] = {}  # oldest first


def answer(request: Request) -> Estimate:
    """Return the answer of `answered`, made now where it was not given before. Raises as there."""
    (outcome,) = answers_on(request, [request.platform])
    if isinstance(outcome, CommandError):
        raise outcome
    return outcome


def answers_on(
    request: Request, platforms: Sequence[Platform], traces: Traces | None = None
) -> list[Estimate | CommandError]:
    """Return a job's estimate on each of the platforms, made now where it was not given before, or why there is none.
    The job is traced once, with `traces` as in `answered`. What is new is left in the user's cache."""
    key, request = _key(request)
    keys = [key and _digest(key, platform, platform.device.interconnect) for platform in platforms]
    known_answers = _find([answer_key for answer_key in keys if answer_key is not None])
    outcomes: dict[int, Estimate | CommandError] = {
        place: known_answers[answer_key] for place, answer_key in enumerate(keys) if answer_key in known_answers
    }
    traces = {} if traces is None else traces
    if missing := [place for place in range(len(platforms)) if place not in outcomes]:
        asked = _ask_all([replace(request, platform=platforms[place]) for place in missing], False, traces)
        made = {place: answer.error or answer.estimate for place, answer in zip(missing, asked, strict=True)}
        if key is not None:
            new = {keys[place]: estimate for place, estimate in made.items() if isinstance(estimate, Estimate)}
            keep({f"answer {answer_key}": estimate.to_mapping() for answer_key, estimate in new.items()})
        outcomes |= made
    return [
        _remember(keys[place], outcome) if isinstance(outcome, Estimate) else outcome
        for place, outcome in sorted(outcomes.items())
    ]


def answer_and_write(made: Callable[[], tuple[Request, Iterable[Note]]], files: StepFiles) -> Estimate:
    """Return the answer to a request, and write the files of its step that are wanted.

    Args:
        made: Makes the request, and what is noted besides its answer.
        files: Checked to be writable.
    """
    began = time.monotonic_ns()
    request, notes = made()
    estimate, traced = answered(request, timeline=True) if any(files) else (answer(request), None)
    estimate = replace(estimate, notes=(*notes, *estimate.notes), seconds=(time.monotonic_ns() - began) / 1e9)
    if any(files):
        files.write(request, estimate, traced)
    return estimate


def _find(keys: Sequence[str]) -> dict[str | None, Estimate]:
    """Return the answers that are in memory or in the user's cache, by key."""
    known_answers: dict[str | None, Estimate] = {key: _answers[key] for key in keys if key in _answers}
    others = [key for key in keys if key not in known_answers]
    for key, stored in zip(others, recall(*(f"answer {key}" for key in others)), strict=True):
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
    copies: dict[str, Any] = {name: dict(value) for name, value in vars(known).items() if isinstance(value, dict)}
    return replace(known, **copies)


def clear() -> None:
    """Forget all answers in memory."""
    _answers.clear()


def with_key(request: Request) -> Request:
    """Return the request with its job's key, for which a factory is built once for all that is asked of it."""
    job_key, build = key_of(request.job)
    return replace(request, job=replace(request.job, build=build, key=job_key or ""))


def _key(request: Request) -> tuple[str | None, Request]:
    """Return what identifies the answer apart from its platform, and the request as it is then answered: its job is
    built once. No key with workspaces, which depend on this process's cuDNN."""
    if request.platform.workspaces is not None:
        return None, request
    request = with_key(request)
    job, how, own_runs = request.job, request.options, request.own_runs
    folder = DataFolder.resolve(how.data)
    key = job.key and _digest(
        job.key,
        job.name,
        job.training_loop,
        job.parallel and job.parallel.deepspeed,
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
            status = Path(path).stat()
        except OSError:
            continue
        yield path, status.st_size, status.st_mtime_ns
