"""What is known of one training job before it runs, and who says so: the trace, a training-free method, fitted models.

Start reading at `Question.answered`; `learn.estimation.sources` has those who are asked.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from conf.errors import CommandError, EnvironmentProblem, UsageError
from conf.extras import naming_the_extra
from conf.units import MIB
from featurize.allocator_settings import AllocatorSettings
from featurize.device_spec import DeviceSpec, UnsuitableDevice
from featurize.machine import MachineProfile
from featurize.training_settings import training_of
from learn.cases import Case
from learn.estimation.answer_notes import loading_ms, note_of_absent, note_of_two_loops, notes_of_memory, notes_of_trace
from learn.estimation.job_estimate import Estimate, estimators_named
from learn.estimation.loops import PIPELINE, RESIDENT, loop_named
from learn.estimation.memory_causes import COVERAGES, uncertainty_of
from learn.estimation.notes import INFO, WARNING, Note
from learn.estimation.on_machine import machine_for, placed, prepare_workspaces
from learn.estimation.on_ranks import SEVERAL_GPUS, buffers_mib, require_batch_of_file, talk_of, values_of_ranks
from learn.estimation.sources import (
    TARGETS,
    WITHOUT_TRACE,
    Gathered,
    ask_fitted,
    ask_method,
    ask_stored,
    in_a_plain_loop,
)
from learn.estimation.throughput import throughput_of
from learn.estimators import LEVEL
from learn.workload import Workload, as_a_training_script

if TYPE_CHECKING:
    from featurize.simulate import SimulatedStep
    from featurize.trace_cache import Traces
    from learn.estimation.known_runs import KnownRun
    from learn.estimation.own_runs import OwnRuns
    from learn.traced import TracedStep
    from warehouse.folder import DataFolder

    Data: TypeAlias = str | os.PathLike[str] | DataFolder

TOP_MODULES = 10
_OF_MODULES = ("hybrid", "gnn", "trace", "horus", "faketensor", "dnnmem", "xmem", "llmem", "deepspeed")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A job and how its estimate is made, whatever the device. The fields are as in `learn.estimate`, checked.

    own_runs          the data folder's measured runs of a trial config, where they may serve
    """

    job: Workload
    allocator: AllocatorSettings | None = None
    estimator: str | None = None
    data: Data | None = None
    loop: str | None = None
    machine: str | MachineProfile | None = None
    workspaces: str | None = None
    torch_version: str | None = None
    coverage: float = LEVEL
    known: tuple[KnownRun, ...] = ()
    own_runs: OwnRuns | None = None

    def with_samples(self, size: int) -> Question:
        """Return what is asked of the job with another batch size. Raises `UsageError`."""
        if self.job.parallel is not None:
            require_batch_of_file(self.job.parallel, size)
        return replace(self, job=self.job.with_samples(size))

    def _in_loop(self, job: Workload) -> Workload:
        return job if self.loop is None else replace(job, training_loop=self.loop == PIPELINE)

    @as_a_training_script()
    def traced(self, device: DeviceSpec) -> Traces:
        """Return the job's trace alone, as `answered` takes it. Raises `UsageError` as `learn.traced.step_of`."""
        from learn.traced import trace_of

        traces: Traces = {}
        trace_of(self._in_loop(self.job), device, traces)
        return traces

    @naming_the_extra()
    @as_a_training_script()
    def answered(
        self, device: DeviceSpec, *, timeline: bool = False, traces: Traces | None = None
    ) -> tuple[Estimate, TracedStep | None]:
        """Return the estimate on one device, and the traced step where there is one.

        Args:
            device: The GPU model.
            timeline: Whether the traced step keeps the allocator's state after every event.
            traces: As in `learn.traced.step_of`.

        Raises:
            UsageError: There is no answer: for peak memory, that is. Other figures may be missing.
        """
        from learn.estimators import TRAINING_FREE
        from learn.step_store import StepStore
        from learn.traced import CannotTrace, step_of

        began = time.monotonic_ns()
        on = machine_for(self.machine, device, self.data)
        gathered, steps, estimator = Gathered(), StepStore(self.data), self.estimator
        job = self._in_loop(self.job)
        alone = job.alone(job.longest) if job.batches else job
        case = self._case(alone, device)
        buffers_mib(job, device)  # refuses a GPU model before anything is traced
        traced = failure = None
        prepare_workspaces(self.workspaces, device, cudnn_benchmark=job.settings.cudnn_benchmark, search=job.search)
        try:
            traced = step_of(job, device, allocator=self.allocator, timeline=timeline, traces=traces)
        except CommandError as error:
            failure = error
            if case.config is not None:  # it may name code that nobody allowed to run: what was stored of it may answer
                steps.recall([case, replace(case, training_loop=True)])
        beyond = training_of(job.settings).beyond_fits()
        if job.parallel is not None:
            beyond = (*beyond, SEVERAL_GPUS)
        if job.batches:
            beyond = (*beyond, "batches of several shapes")
            if traced is not None and traced.trace.mix is not None:
                alone = job.alone(traced.trace.mix.longest)
                case = self._case(alone, device)
                traced = self._with_longest(gathered, traced, alone, device, timeline=timeline)
            if estimator not in (None, "trace"):
                text = f"estimator={estimator} does not follow a mix of batches: it takes the longest alone"
                gathered.notes.append(Note("beyond-fit", WARNING, text))
        if estimator in TRAINING_FREE and estimator != "trace":
            ask_method(gathered, alone, device, estimator)
        elif estimator is None and beyond:
            text = f"no model was fitted on {', '.join(beyond)}: the trace answers"
            gathered.notes.append(Note("beyond-fit", INFO, text))
        elif estimator != "trace":
            if beyond:
                text = f"no model was fitted on {', '.join(beyond)}: estimator={estimator} leaves that out"
                gathered.notes.append(Note("beyond-fit", WARNING, text))
            at_hand = traced if self.allocator is None and not job.batches else None
            with steps.lent(case, at_hand), contextlib.ExitStack() as lent:
                plain = functools.cache(functools.partial(in_a_plain_loop, case, steps, lent, traces))
                ask_fitted(gathered, case, steps, plain, estimator, self.data, self.loop, self.coverage)
        if failure is not None and estimator in (None, "trace") and job.parallel is None:
            ask_stored(gathered, case, steps)
        if failure is not None and "peak_memory_mib" not in gathered.values:
            advice = f"; {WITHOUT_TRACE}" if isinstance(failure, CannotTrace) and failure.limit else ""
            kind = UsageError if isinstance(failure, UsageError) else EnvironmentProblem
            raise kind(f"{failure}{advice}") from failure
        if traced is not None:
            described_mib = traced.step.peak_memory_mib
            traced = self._placed(traced, job, device, on, timeline=timeline)
            gathered.move(traced.step.peak_memory_mib - described_mib)
            if self.workspaces is not None:  # after what fitted models read: they know guessed workspaces only
                guessed_mib = traced.step.peak_memory_mib
                traced = self._placed(traced, job, device, on, timeline=timeline, workspaces=self.workspaces)
                if gathered.beyond_fit:  # there the trace's own figure stands
                    gathered.move(traced.step.peak_memory_mib - guessed_mib)
            if gathered.beyond_fit or (estimator in (None, "trace") and "memory" not in gathered.by):
                limit_mib = _limit_mib(device, self.allocator, traced)
                _bound_by_causes(gathered, traced, device, on, self.coverage, limit_mib)
        done = _assembled(gathered, alone, device, traced, failure, self.allocator, self.loop, on, self.torch_version)
        done = self._moved(done, traced, device, on)
        return replace(done, seconds=(time.monotonic_ns() - began) / 1e9), traced

    def _with_longest(
        self, gathered: Gathered, mixed: TracedStep, alone: Workload, device: DeviceSpec, *, timeline: bool
    ) -> TracedStep:
        """Return the traced mix, or its longest batch alone where that takes more: the caches that the other batches
        leave can suit it better than its own, in the order that was given."""
        from learn.traced import step_of

        longest = step_of(alone, device, allocator=self.allocator, timeline=timeline)
        if longest.step.peak_memory_mib <= mixed.step.peak_memory_mib:
            return mixed
        mix = mixed.trace.mix
        assert mix is not None, "of several shapes"
        text = (
            f"memory is of the longest batch alone, {alone.shape_text()}: the {mix.given} steps on batches of "
            f"{mix.shapes} shapes reserve {mixed.step.peak_reserved_mib:,.1f} MiB in their order, the longest alone "
            f"{longest.step.peak_reserved_mib:,.1f} MiB; utilization and step time are of the longest"
        )
        gathered.notes.append(Note("batch-mix", INFO, text, ("memory",)))
        gathered.notes += [Note("trace", WARNING, one) for one in mixed.trace.notes if one not in longest.trace.notes]
        return longest

    def _placed(
        self,
        traced: TracedStep,
        job: Workload,
        device: DeviceSpec,
        on: MachineProfile,
        *,
        timeline: bool = False,
        workspaces: str | None = None,
    ) -> TracedStep:
        return placed(
            traced, device, on, cudnn_benchmark=job.settings.cudnn_benchmark, allocator=self.allocator,
            timeline=timeline, workspaces=workspaces, search=job.search, torch_version=self.torch_version,
            communication_mib=buffers_mib(job, device, traced.trace),
        )  # fmt: skip

    def _moved(self, done: Estimate, traced: TracedStep | None, device: DeviceSpec, on: MachineProfile) -> Estimate:
        """Return the estimate moved by the measured runs: the data folder's own, or else those of `known`.

        Raises:
            UsageError: There are runs, and the job is not traced.
        """
        own = self.own_runs
        if own is not None and (traced is not None or own.asked_for):
            runs, notes = own.of(self.job.batch_size, device)
        else:
            own, runs = None, tuple(run for run in self.known if run.is_of(device))
            notes = []
            if self.known and not runs:
                notes.append(Note("no-known-run", WARNING, f"known: no run was measured on {device.name}"))
        if not runs:
            return replace(done, notes=(*done.notes, *notes))
        if traced is None:
            raise UsageError("known= takes a job that can be traced, and this one cannot")
        try:
            by_runs = self._moved_by(runs, done, traced, device, on)
        except CommandError as error:
            if own is None or own.asked_for:
                raise
            return replace(done, notes=(*done.notes, own.left_out(error)))
        if own is None or by_runs.answered_by == done.answered_by:
            return by_runs
        return replace(by_runs, notes=(own.note(runs), *by_runs.notes))

    def _moved_by(
        self, runs: Sequence[KnownRun], done: Estimate, traced: TracedStep, device: DeviceSpec, on: MachineProfile
    ) -> Estimate:
        """Return the estimate moved by runs, each traced at its batch size."""
        from learn.estimation.known_runs import moved
        from learn.traced import step_of

        def trace_of(batch_size: int) -> TracedStep:
            if batch_size == self.job.batch_size:
                return traced
            job = self._in_loop(self.job.with_samples(batch_size))
            step = step_of(job, device, allocator=self.allocator)
            return self._placed(step, job, device, on, workspaces=self.workspaces)

        return moved(done, runs, trace_of, self.coverage, uncertainty_of(traced, device, on))

    def _case(self, job: Workload, device: DeviceSpec) -> Case:
        """Return what estimators are asked about. Raises `UsageError` for a module and an estimator of configs."""
        from learn.estimators import TRAINING_FREE, get_estimator

        if job.config is not None:
            return Case(job.config, device.name, job.training_loop, described=device)
        named = self.estimator
        if named is not None and named not in TRAINING_FREE and not get_estimator(named).needs_trace:
            raise UsageError(f"estimator={named} reads trial configs; modules are answered by {', '.join(_OF_MODULES)}")
        return Case(device=device.name, training_loop=job.training_loop, module=job, described=device)


def is_of_job(error: CommandError) -> bool:
    """Whether an error of `Question.answered` is of the job, whatever the GPU model: its step cannot be traced."""
    return isinstance(error.__cause__, CommandError) and not isinstance(error.__cause__, UnsuitableDevice)


def _bound_by_causes(
    gathered: Gathered,
    traced: TracedStep,
    device: DeviceSpec,
    on: MachineProfile,
    coverage: float,
    limit_mib: float,
) -> None:
    """Bound memory that no fit can speak of by what is uncertain of the traced step."""
    uncertainty = uncertainty_of(traced, device, on)
    centre_mib = max(gathered.values.get("peak_memory_mib", 0.0), traced.step.peak_memory_mib)
    levels = sorted({*COVERAGES, coverage})
    bounds = {level: uncertainty.bound_mib(centre_mib, level, limit_mib) for level in levels}
    held = asdict(uncertainty.held) if uncertainty.held is not None and coverage == LEVEL else {}
    least_card_mib = uncertainty.least_card_mib(centre_mib, coverage)
    gathered.bound(bounds, coverage, uncertainty.at(coverage), least_card_mib, held)


def _priced(traced: TracedStep, job: Workload, device: DeviceSpec, loop: str | None) -> SimulatedStep:
    """Return the traced step in the loop asked for: the trace itself prices the GPU's own work, without any input."""
    from featurize.simulate import simulate

    if loop != PIPELINE:
        return traced.step
    waits_ms = loading_ms(traced, job)
    timed = simulate(traced.trace, device, job.settings, memory=traced.memory, input_ms=waits_ms)
    return replace(timed, peak_memory_mib=traced.step.peak_memory_mib)  # on this machine


def _note_of_host(step: SimulatedStep, job: Workload) -> Note:
    figures = f"{step.step_time_ms:,.2f} ms, up to {step.step_time_upper_ms:,.2f} on 9 of 10 machines"
    text = f"the host bounds the step: {figures}"
    if job.config is None:
        text += "; for a module, framework= says what launches the kernels"
    return Note("host-bound", INFO, text, ("step_time",))


def _assembled(
    gathered: Gathered,
    job: Workload,
    device: DeviceSpec,
    traced: TracedStep | None,
    failure: CommandError | None,
    allocator: AllocatorSettings | None,
    loop: str | None,
    on: MachineProfile,
    torch_version: str | None,
) -> Estimate:
    """Return what was gathered, and the trace's figures for the rest."""
    from featurize.parallel.overlap import lengthened
    from learn.targets import get_target

    values, by = gathered.values, gathered.by
    notes: list[Note] = []
    limit_mib = _limit_mib(device, allocator, traced)
    if traced is not None:
        talk = talk_of(traced, job, device)
        step = lengthened(_priced(traced, job, device, loop), talk, device)
        for target in TARGETS:
            column = get_target(target).column
            if column not in values:
                values[column], by[target] = getattr(step, column), "trace"
                gathered.loops[target] = loop_named(job.training_loop) if target == "memory" else loop or RESIDENT
                if target == "step_time":
                    values |= {"step_time_upper_ms": step.step_time_upper_ms, "bound_by": step.bound_by}
                    if step.bound_by == "host":
                        notes.append(_note_of_host(step, job))
        timed = step if gathered.loops["step_time"] == (loop or RESIDENT) else _priced(traced, job, device, PIPELINE)
        of_ranks, assumed = values_of_ranks(traced, job, device, talk)
        values |= of_ranks
        notes += assumed
        values |= throughput_of(traced, job, device, step_time_ms=values["step_time_ms"], power_w=timed.power_w)
        notes += [Note("trace", WARNING, text) for text in traced.trace.notes]
        memory = traced.memory
        largest = list(memory.peak_modules.items())[:TOP_MODULES]
        values |= {
            "parameters": traced.step.parameters,
            "breakdown": dict(traced.breakdown),
            "trace_memory_mib": step.peak_memory_mib,
            "allocated_mib": step.peak_allocated_mib,
            "reserved_mib": step.peak_reserved_mib,
            "process_mib": step.peak_memory_mib - on.other_mib,
            "card_mib": step.peak_memory_mib,
            "peak_operator": memory.peak_operator,
            "peak_module": memory.peak_module,
            "peak_phase": memory.peak_phase,
            "activations": {name: nbytes / MIB for name, nbytes in largest},
        }
        notes += notes_of_trace(gathered, traced, job, device, limit_mib, torch_version, on)
    else:
        missing = [target for target in TARGETS if target not in by]
        unknown = f"{', '.join(missing)}: not known" if missing else "not traced"
        notes.append(Note("not-traced", WARNING, f"{unknown}, since {failure}", tuple(missing)))
        values["parameters"] = _parameters(job)
    first, of_memory = notes_of_memory(gathered, device, limit_mib, allocator)
    notes = [*first, *notes, *of_memory, *note_of_absent(gathered, job, device, is_traced=traced is not None)]
    known = dict.fromkeys(
        ("upper_mib", *(get_target(target).column for target in TARGETS), "peak_operator", "peak_module", "peak_phase",
         "trace_memory_mib")
    )  # fmt: skip
    return Estimate(
        device_memory_mib=device.memory_mib,
        limit_mib=limit_mib,
        **{**known, "breakdown": {}, "activations": {}, **values},
        device=device.name,
        notes=(*notes, *gathered.notes, *note_of_two_loops(gathered.loops)),
        estimator=estimators_named(by),
        answered_by=by,
        loops=gathered.loops,
        machine=on.name,
        seconds=0.0,
    )


def _limit_mib(device: DeviceSpec, allocator: AllocatorSettings | None, traced: TracedStep | None) -> float:
    """Return what the figure of the whole card may reach. A share limits what the allocator reserves, to which comes
    what lies outside of it."""
    share = None if allocator is None else allocator.per_process_memory_fraction
    if share is None:
        return device.memory_mib
    outside_mib = 0.0 if traced is None else traced.step.peak_memory_mib - traced.step.peak_reserved_mib
    return min(device.memory_mib, share * device.memory_mib + outside_mib)


def _parameters(job: Workload) -> int | None:
    """Counted on a model that is built but not traced; None where it can't be built either."""
    from featurize.skeleton import build_on_meta

    try:
        return sum(p.numel() for p in build_on_meta(job.build).parameters())
    except Exception:  # a model may raise anything, and the trace's reason is told already
        return None
