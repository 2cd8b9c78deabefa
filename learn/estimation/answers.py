"""Answer what one training job takes before it runs: by the trace, a training-free method, fitted models.

Start reading at `Question.answered`; `ask_fitted` and its neighbours are the sources.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from conf.errors import CommandError, EnvironmentProblem, UsageError
from conf.extras import naming_the_extra
from conf.units import MIB
from featurize.allocator_settings import AllocatorSettings
from featurize.architecture import AMD
from featurize.device_spec import DeviceSpec, UnsuitableDevice
from featurize.disk_cache import keep, recall
from featurize.machine import MACHINES, MachineProfile
from featurize.model_flops import seconds_at_peak
from featurize.replacing import without_collection
from featurize.training_settings import TrainingSettings, training_of
from featurize.version import is_current
from learn.batch_sizes import batch_size_of, with_batch_size
from learn.cases import Case
from learn.estimation.job_estimate import Estimate, estimators_named
from learn.estimation.loops import PIPELINE, RESIDENT, loading_ms, loop_named, loops_of_sources
from learn.estimation.memory_causes import COVERAGES, HELD_OUT, uncertainty_of, widest
from learn.estimation.notes import AMD_GPU, INFO, MAY_RUN_OUT, OUT_OF_MEMORY, PROBLEM, TARGETS, WARNING, Note, times
from learn.estimation.on_machine import machine_for, placed, prepare_workspaces, workspace_notes
from learn.estimation.on_ranks import SEVERAL_GPUS, buffers_mib, require_batch_of_file, talk_of, values_of_ranks
from learn.estimators import LEVEL, TRAINING_FREE, get_estimator
from learn.job import TrainingJob, as_a_training_script, of_config, of_module
from learn.step_record import traced_column
from learn.step_store import StepStore
from learn.targets import get_target
from warehouse.folder import DataFolder

if TYPE_CHECKING:
    from featurize.simulate import SimulatedStep
    from featurize.step_trace import BatchMix, StepTrace
    from featurize.trace_cache import Traces
    from learn.artifacts import Artifact, Wanted
    from learn.estimation.known_runs import KnownRun, OwnRuns
    from learn.estimators import Prediction
    from learn.traced import TracedStep

    Data: TypeAlias = str | os.PathLike[str] | DataFolder

TOP_MODULES = 10
_OF_MODULES = ("hybrid", "gnn", "trace", "horus", "faketensor", "dnnmem", "xmem", "llmem", "deepspeed")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A job and how its estimate is made, whatever the device. The fields are as in `learn.estimate`, checked.

    own_runs          the data folder's measured runs of a trial config, where they may serve
    """

    job: TrainingJob
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
        return replace(self, job=_with_samples(self.job, size))

    def _in_loop(self, job: TrainingJob) -> TrainingJob:
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
    @without_collection()
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
                ask_fitted(
                    gathered, case, steps, plain, estimator, self.data, self.loop, self.coverage, traced is not None
                )
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
        self, gathered: Gathered, mixed: TracedStep, alone: TrainingJob, device: DeviceSpec, *, timeline: bool
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
        job: TrainingJob,
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
            job = self._in_loop(_with_samples(self.job, batch_size))
            step = step_of(job, device, allocator=self.allocator)
            return self._placed(step, job, device, on, workspaces=self.workspaces)

        return moved(done, runs, trace_of, self.coverage, uncertainty_of(traced, device, on))

    def _case(self, job: TrainingJob, device: DeviceSpec) -> Case:
        """Return what estimators are asked about. Raises `UsageError` for a module and an estimator of configs."""
        if job.config is not None:
            return Case(job.config, device.name, job.training_loop, described=device)
        named = self.estimator
        if named is not None and named not in TRAINING_FREE and not get_estimator(named).needs_trace:
            raise UsageError(f"estimator={named} reads trial configs; modules are answered by {', '.join(_OF_MODULES)}")
        return Case(device=device.name, training_loop=job.training_loop, module=job, described=device)


def _with_samples(job: TrainingJob, size: int) -> TrainingJob:
    """Return the job with so many samples in each batch. Raises `UsageError` for inputs that cannot be scaled."""
    if size == job.batch_size:
        return job
    if job.config is not None:
        resized = of_config(replace(job.config, batch_size=size))
    else:
        model, input_dtype, loss, pairs = job.given
        sizes = {batch_size_of(inputs): None for inputs, _ in pairs}
        if len(sizes) > 1:
            texts = ", ".join(map(str, sizes))
            raise UsageError(f"the batches have {texts} samples: largest_batch scales batches of one size")
        scaled = [
            [None if part is None else with_batch_size(part, size, from_size=job.batch_size) for part in pair]
            for pair in pairs
        ]
        resized = of_module(model, None, job.settings, input_dtype=input_dtype, loss=loss, batches=scaled)
    return replace(resized, name=job.name, parallel=job.parallel, training_loop=job.training_loop)


def is_of_job(error: CommandError) -> bool:
    """Return whether an error is of the job, whatever the GPU model: its step cannot be traced."""
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


def _priced(traced: TracedStep, job: TrainingJob, device: DeviceSpec, loop: str | None) -> SimulatedStep:
    """Return the traced step in the loop asked for: the trace itself prices the GPU's own work, without any input."""
    from featurize.simulate import simulate

    if loop != PIPELINE:
        return traced.step
    waits_ms = loading_ms(traced, job)
    timed = simulate(traced.trace, device, job.settings, memory=traced.memory, input_ms=waits_ms)
    return replace(timed, peak_memory_mib=traced.step.peak_memory_mib)  # on this machine


def _note_of_host(step: SimulatedStep, job: TrainingJob) -> Note:
    figures = f"{step.step_time_ms:,.2f} ms, up to {step.step_time_upper_ms:,.2f} on 9 of 10 machines"
    text = f"the host bounds the step: {figures}"
    if job.config is None:
        text += "; for a module, framework= says what launches the kernels"
    return Note("host-bound", INFO, text, ("step_time",))


def _assembled(
    gathered: Gathered,
    job: TrainingJob,
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
    notes = [*first, *notes, *of_memory]
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


def _parameters(job: TrainingJob) -> int | None:
    """Counted on a model that is built but not traced; None where it can't be built either."""
    from featurize.skeleton import build_on_meta

    try:
        return sum(p.numel() for p in build_on_meta(job.build).parameters())
    except Exception:  # a model may raise anything, and the trace's reason is told already
        return None


# Where the trace meets its own limits, these may still answer: what each of them does instead.
WITHOUT_TRACE = "estimator=xmem runs it for real on the CPU, estimator=deepspeed counts the model's states only"


@dataclass
class Gathered:
    """Gathers figures: `values` by their field of `Estimate`, `by` target -> who gave it, `loops` target -> of which
    loop."""

    values: dict[str, Any] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    beyond_fit: bool = False

    def bound(
        self,
        quantiles_mib: Mapping[float, float],
        coverage: float,
        causes_mib: Mapping[str, float],
        least_card_mib: float | None = None,
        held_out: Mapping[str, Any] = {},
    ) -> None:
        """Take a memory bound: its distribution, the causes' MiB at the coverage, the smallest card that has room,
        where that is less than the bound, and what share of left-out rows it held, where that was measured."""
        ascending = np.maximum.accumulate([quantiles_mib[p] for p in sorted(quantiles_mib)]).tolist()
        self.values["distribution"] = tuple(zip(sorted(quantiles_mib), ascending, strict=True))
        self.values |= {"upper_mib": quantiles_mib[coverage], "coverage": coverage, "uncertain": dict(causes_mib)}
        self.values["bound_held_out"] = dict(held_out)
        self.values["least_card_mib"] = self.values["upper_mib"] if least_card_mib is None else least_card_mib

    def move(self, mib: float) -> None:
        """Move memory that a model which comes along answered to another machine than its rows were measured on."""
        if self.by.get("memory", "").endswith("(default)"):
            for name in ("peak_memory_mib", "upper_mib", "least_card_mib"):
                if self.values.get(name) is not None:
                    self.values[name] += mib
            self.values["distribution"] = tuple((p, at + mib) for p, at in self.values.get("distribution", ()))


def ask_fitted(
    gathered: Gathered,
    case: Case,
    steps: StepStore,
    in_a_plain_loop: Callable[[], Case],
    estimator: str | None,
    data: Any,
    loop: str | None,
    coverage: float,
    is_traced: bool,
) -> None:
    """Add the figures of the newest fitted model of each target that knows the case's family and device: the data
    folder's, else the one that comes with the project.

    Other people measure plain loops, which wait for their input; the farm's trials keep one batch on the device. So
    each model is asked about the loop that it knows. Where a `loop` is asked for, only models that know that one
    answer; memory, which hardly depends on the loop, is answered by any.
    """
    from learn.artifacts import StaleArtifact, default_artifact, find_latest, load_latest

    folder = DataFolder.resolve(data)
    if data is not None:
        folder.open()
    module = case.config is None
    family = None if module else case.family
    wanted: Wanted = {"estimator": estimator, "family": family, "device": case.device, "for_modules": module}
    learnt: Wanted = {**wanted, "learnt": True}
    shipped = {target: default_artifact(target) for target in TARGETS}
    shipped = {t: a for t, a in shipped.items() if a is not None and estimator in (None, a.meta["estimator"])}
    if estimator is not None and "memory" not in shipped:
        load_latest(folder, "memory", **wanted)  # a named one must be there, at least for memory
    absent: list[str] = []
    notes: list[Note] = []
    for target in TARGETS:
        own = None
        try:
            own = find_latest(folder, target, **learnt)
        except StaleArtifact as error:
            if estimator is not None:
                raise
            notes.append(Note("stale-model", WARNING, str(error)))
        artifact, note = _of_loop(target, own, shipped.get(target), loop)
        notes += note
        if artifact is None:
            absent.append(target)
            continue
        default = artifact is not own
        sources = artifact.meta["rows"]["source"]
        asked = in_a_plain_loop() if loops_of_sources(sources) == {PIPELINE} else case
        prediction = artifact.estimator.predict([asked], steps)
        if prediction.refusals:
            if target == "memory" and estimator is not None:
                raise UsageError(f"estimator={estimator} has no answer: {prediction.refusals[0]}")
            absent.append(target)
            continue
        name = artifact.meta["estimator"]
        gathered.values[get_target(target).column] = float(prediction.point[0])
        gathered.by[target] = f"{name} (default)" if default else f"{name} {artifact.version}"
        gathered.loops[target] = loop_named(asked.training_loop)
        if target == "memory":
            quantiles_mib = _quantiles(prediction, coverage)
            if quantiles_mib:
                above_mib = quantiles_mib[coverage] - float(prediction.point[0])
                held_out = _held_out(prediction, artifact) if coverage == LEVEL else {}
                gathered.bound(quantiles_mib, coverage, {HELD_OUT: above_mib}, held_out=held_out)
            gathered.beyond_fit = default and 0 in prediction.outside
        of_target = (target,)
        notes += [Note("estimator", WARNING, text, of_target) for text in prediction.warnings]
        notes += [
            Note("unlike-fitted", WARNING, f"unlike what it was fitted on: {text}", of_target)
            for text in prediction.unfamiliar.get(0, ())
        ]
        of_loop = ", for a plain training loop with its input pipeline" if asked is not case else ""
        notes.append(Note("fitted-rows", INFO, f"fitted on {', '.join(sources)} rows{of_loop}", of_target))
        if default and not is_current(artifact.meta["feature_version"]):
            text = (
                "the model that comes with the project was fitted with features "
                f"{artifact.meta['feature_version']}, and this code computes others: it may be a little off"
            )
            notes.append(Note("stale-model", WARNING, text, of_target))
    gathered.notes += _merged(notes)
    if absent:
        text = (
            f"no fitted model for {family or 'modules'} on {case.device} in {folder.models} for {', '.join(absent)}"
            f"{': answered by the trace' if is_traced else ''} "
            f"(python -m learn.fit target={absent[0]} fits one)"
        )
        gathered.notes.insert(0, Note("not-fitted", INFO, text))


def _held_out(prediction: Prediction, artifact: Artifact) -> Mapping[str, Any]:
    """Return what the bound of one case held of left-out groups, or of held-out rows where its fit left out none."""
    held = prediction.held_of(0)
    return artifact.bound_held_out() if held is None else asdict(held)


def _quantiles(prediction: Prediction, coverage: float) -> dict[float, float]:
    """Return probability -> MiB of one case; above one half they are bounds. Empty without a calibrated bound."""
    quantiles = {}
    for level in sorted({*COVERAGES, coverage}):
        at = prediction.upper(level) if level > 0.5 else prediction.quantile(level)
        if at is None:
            return {}
        quantiles[level] = float(at[0])
    return quantiles


def _of_loop(
    target: str, own: Artifact | None, shipped: Artifact | None, loop: str | None
) -> tuple[Artifact | None, list[Note]]:
    """Return the first of the two models that knows the loop, and which model was passed over for that."""
    if loop is None or target == "memory":
        return own or shipped, []
    passed_over: list[Note] = []
    for artifact, words in ((own, "the newest model of the data folder"), (shipped, "the model that comes along")):
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


def in_a_plain_loop(case: Case, steps: StepStore, lent: contextlib.ExitStack, traces: Traces | None) -> Case:
    """The case in such a loop, its record at hand while `lent` is open."""
    from learn.traced import step_of

    if case.training_loop or case.spec is None:
        return case
    looped = replace(case, training_loop=True)
    if case.module is not None:
        looped = replace(looped, module=replace(case.module, training_loop=True))
    with contextlib.suppress(CommandError):  # then whoever asks for its record hears why
        lent.enter_context(steps.lent(looped, step_of(looped.job, case.spec, traces=traces)))
    return looped


def ask_method(gathered: Gathered, job: TrainingJob, device: DeviceSpec, estimator: str) -> None:
    """Memory by a training-free method. `UsageError` with the method's reason."""
    from learn.peers.base import Peer, analyse
    from learn.traced import wants_values

    if beyond := training_of(job.settings).beyond_trials():
        raise UsageError(f"estimator={estimator} has no answer: it does not know {', '.join(beyond)}")
    known = get_estimator(estimator)
    assert issubclass(known, Peer), estimator
    by_method = analyse(known(), job, device)
    if by_method.mib is None:
        stuck = wants_values(str(by_method.reason)) and f"estimator={estimator}" not in WITHOUT_TRACE
        advice = f"; {WITHOUT_TRACE}" if stuck else ""
        raise UsageError(f"estimator={estimator} has no answer: {by_method.reason}{advice}")
    gathered.values |= {"peak_memory_mib": by_method.mib, "breakdown": dict(by_method.parts)}
    gathered.by["memory"], gathered.loops["memory"] = estimator, loop_named(job.training_loop)
    gathered.notes.append(Note("estimator", WARNING, known.warning))


def ask_stored(gathered: Gathered, case: Case, steps: StepStore) -> None:
    """The trace's figures that were stored of a case that cannot be traced here, for targets without an answer."""

    if (features := steps.features(case)) is None:
        return
    for target in TARGETS:
        column = get_target(target).column
        if column not in gathered.values:
            gathered.values[column], gathered.by[target] = features[traced_column(get_target(target))], "trace"
            gathered.loops[target] = loop_named(case.training_loop)
    text = "figures of the trace are those stored in the data folder, since it cannot be repeated here"
    gathered.notes.append(Note("stored-trace", INFO, text))


def _merged(notes: list[Note]) -> list[Note]:
    """Return one note for those that say the same of several targets, whose names then begin its text."""
    targets: dict[Note, list[str]] = {}
    for note in notes:
        targets.setdefault(replace(note, targets=()), []).extend(note.targets)
    return [
        replace(note, text=f"{', '.join(names)}: {note.text}", targets=tuple(names)) if names else note
        for note, names in targets.items()
    ]


def notes_of_trace(
    gathered: Gathered,
    traced: TracedStep,
    job: TrainingJob,
    device: DeviceSpec,
    limit_mib: float,
    torch_version: str | None,
    on: MachineProfile,
) -> list[Note]:
    """Return whether the traced step fits, and what was assumed of it.

    Args:
        gathered: The figures, with the source of each.
        traced: The step, placed on its machine.
        job: What was traced; of a mix of batches, the longest alone.
        device: The GPU model.
        limit_mib: What the job may take of the card, in MiB.
        torch_version: The release of PyTorch that was asked for.
        on: The machine.
    """
    memory, by = traced.memory, gathered.by["memory"]
    notes: list[Note] = []
    whole = limit_mib >= device.memory_mib
    more = f"{device.name} has" if whole else f"the {limit_mib:,.0f} MiB {_room(device, limit_mib)}"
    if not memory.fits and by == "trace":
        notes.append(Note(OUT_OF_MEMORY, PROBLEM, f"out of memory: the step needs more than {more}"))
    elif not memory.fits:
        notes.append(Note("trace-out-of-memory", WARNING, f"the trace finds that the step needs more than {more}"))
    elif memory.retries:
        text = f"it only just fits: the allocator has to give cached memory back {times(memory.retries)}"
        notes.append(Note("near-limit", WARNING, text))
    notes += [Note("assumed", WARNING, f"assumed: {text}") for text in traced.trace.assumed]
    if (mix := traced.trace.mix) is not None:
        notes.append(Note("batch-mix", INFO, _of_mix(mix, job.shape_text(), traced)))
    notes += workspace_notes(memory.workspaces, torch_version)
    if device.architecture.vendor == AMD:
        notes.append(Note(AMD_GPU, WARNING, _of_amd(traced.trace, on)))
    if gathered.loops.get("step_time") == PIPELINE and loading_ms(traced, job) > traced.step.step_time_ms:
        text = (
            "the input bounds the step: a plain loop loads a batch longer than the GPU and the host work on it. Power "
            "and energy are of a GPU that waits; a loader with workers changes them"
        )
        notes.append(Note("input-bound", WARNING, text, ("step_time",)))
    if memory.workspaces and by != "trace" and not gathered.beyond_fit:
        text = f"workspaces= changes the trace's figures only; memory is answered by {by}"
        notes.append(Note("without-effect", WARNING, text))
    return notes


def notes_of_memory(
    gathered: Gathered, device: DeviceSpec, limit_mib: float, allocator: AllocatorSettings | None
) -> tuple[list[Note], list[Note]]:
    """Return the notes that come first, that the job does not fit, and those on what bounds its memory.

    Args:
        gathered: The figures, with the source of each.
        device: The GPU model.
        limit_mib: What the job may take of the card, in MiB.
        allocator: The settings that were asked for.
    """
    from learn.peers.trace import NO_BOUND

    peak_mib, upper_mib = gathered.values["peak_memory_mib"], gathered.values.get("upper_mib")
    by, room = gathered.by["memory"], _room(device, limit_mib)
    first: list[Note] = []
    notes: list[Note] = []
    if upper_mib is not None and peak_mib <= limit_mib < upper_mib:
        text = f"it may run out of memory: the bound is above the {limit_mib:,.0f} MiB {room}"
        notes.append(Note(MAY_RUN_OUT, PROBLEM, text))
    if upper_mib is None and by == "trace":
        notes.append(Note("no-bound", WARNING, NO_BOUND))
    elif by != "trace" and peak_mib > device.memory_mib:
        text = f"out of memory by {by}: {device.name} has {device.memory_mib:,.0f} MiB"
        first.append(Note(OUT_OF_MEMORY, PROBLEM, text))
    elif by != "trace" and peak_mib > limit_mib:
        text = f"out of memory by {by}: it may take {limit_mib:,.0f} MiB {room}"
        first.append(Note(OUT_OF_MEMORY, PROBLEM, text))
    if (note := widest(gathered.values.get("uncertain", {}), (upper_mib or 0.0) - peak_mib)) is not None:
        notes.append(note)
    if allocator is not None and by != "trace":
        limits = "" if limit_mib >= device.memory_mib else f" and the limit of {limit_mib:,.0f} MiB"
        text = f"allocator= changes the trace's figures{limits} only; memory is answered by {by}"
        notes.append(Note("without-effect", WARNING, text))
    return first, notes


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


def _of_amd(trace: StepTrace, on: MachineProfile) -> str:
    from featurize.replay import loads_cudnn

    of_context = ", its context is assumed" if on.name in MACHINES else ""
    of_layers = "; MIOpen's memory is not known, and assumed to be what cuDNN takes" if loads_cudnn(trace) else ""
    return (
        f"on an AMD GPU: no AMD GPU was measured: times rest on its data sheet and on kernels of NVIDIA GPUs"
        f"{of_context}{of_layers}"
    )


def _room(device: DeviceSpec, limit_mib: float) -> str:
    return f"of {device.name}" if limit_mib >= device.memory_mib else f"of its share of {device.name}"


def _of_mix(mix: BatchMix, longest: str, traced: TracedStep) -> str:
    memory = traced.memory
    return (
        f"{mix.given} steps on batches of {mix.shapes} shapes, replayed in order and then twice on the longest, "
        f"{longest}: allocated at the peak {memory.peak_allocated / MIB:,.1f} MiB, reserved by the mix "
        f"{memory.peak_reserved / MIB:,.1f} MiB, {traced.breakdown['fragmentation']:,.1f} MiB of it fragmentation; "
        "utilization and step time are of the longest"
    )


def throughput_of(
    traced: TracedStep, job: TrainingJob, device: DeviceSpec, *, step_time_ms: float | None, power_w: float
) -> dict[str, float | None]:
    """Return a job's samples and tokens a second, its model FLOPs utilization in [0, 1], and a step's energy in J.

    Args:
        traced: The job's traced step.
        job: With its batch and its settings. All micro-steps of an optimizer step and all replicas of the model count,
            but for utilization and energy, which are of one GPU.
        device: The GPU model.
        step_time_ms: Of one optimizer step, by any estimator. None or 0: unknown, and so is everything else.
        power_w: The board's mean power in the loop that the step time is of.
    """
    if not step_time_ms:
        return {}
    step_s = step_time_ms / 1e3
    micro_steps = training_of(job.settings).accumulation
    tokens = tokens_of(job, traced.trace)
    replicas = 1 if job.parallel is None else job.parallel.replicas
    at_peak_s = _at_peak_s(traced.trace, device, job.settings)
    return {
        "samples_per_s": replicas * micro_steps * job.batch_size / step_s,
        "tokens_per_s": None if tokens is None else replicas * micro_steps * tokens / step_s,
        "mfu": None if at_peak_s is None else at_peak_s / step_s,
        "energy_j": power_w * step_s,
    }


def _at_peak_s(trace: StepTrace, device: DeviceSpec, settings: TrainingSettings) -> float | None:
    """Seconds of a GPU's products at the peak rate; the mean over the ranks of a pipeline, which share the model."""
    groups = () if trace.pipeline is None else trace.pipeline.groups
    if not groups:
        return seconds_at_peak(trace, device, settings)
    seconds = [(seconds_at_peak(group.trace, device, settings), len(group.ranks)) for group in groups]
    known = [(one, count) for one, count in seconds if one is not None]
    return sum(one * count for one, count in known) / sum(count for _, count in known) if known else None


def tokens_of(job: TrainingJob, trace: StepTrace) -> int | None:
    """Return the tokens of one micro-step; None where the job has no sequences of them.

    Tokens are the elements of the first input of integers that has the shape [batch, length], padding included. A
    script's inputs are not kept: there, what the first embedding of that shape looks up counts.
    """
    if job.recorded is None:
        from featurize.batches import tensors_of

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


def answer(
    question: Question, device: DeviceSpec, traces: Traces | None = None, kept: dict[str, Any] | None = None
) -> Estimate:
    """Return the answer of `Question.answered`, made now where it was not given before. Raises as there.

    A new one is left in the user's cache, or with `kept`, among what the caller leaves there at once.
    """
    key, question = _key(question, device)
    if key is None:
        return question.answered(device, traces=traces)[0]
    known = _answers.get(key) or _from_disk(key)
    if known is None:
        known = question.answered(device, traces=traces)[0]
        fresh = {f"answer {key}": known.to_mapping()}
        keep(fresh) if kept is None else kept.update(fresh)
    return _remembered(key, known)


def cached_estimate(question: Question, device: DeviceSpec) -> Estimate | None:
    """Return the answer if it was given before; None: it is not yet known. Nothing is traced."""
    key, _question = _key(question, device)
    known = None if key is None else _answers.get(key) or _from_disk(key)
    return None if key is None or known is None else _remembered(key, known)


def _remembered(key: str, known: Estimate) -> Estimate:
    """Keep an answer in memory. Returns a copy whose mappings are the caller's to change."""
    _answers[key] = known
    if len(_answers) > MOST_ANSWERS:
        del _answers[next(iter(_answers))]
    own: dict[str, Any] = {name: dict(value) for name, value in vars(known).items() if isinstance(value, dict)}
    return replace(known, **own)


def with_key(question: Question) -> Question:
    """Return the question with its job's key, for which a factory is built once for all that is asked of it."""
    from learn.traced import key_of

    job_key, build = key_of(question.job)
    return replace(question, job=replace(question.job, build=build, key=job_key or ""))


def clear() -> None:
    """Forget all answers in memory."""
    _answers.clear()


def _from_disk(key: str) -> Estimate | None:
    try:
        return Estimate.from_mapping(recall(f"answer {key}"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _key(question: Question, device: DeviceSpec) -> tuple[str | None, Question]:
    """Return what tells the answer, and the question as it is then answered: its job is built once. No key with
    workspaces, which depend on this process's cuDNN."""

    if question.workspaces is not None:
        return None, question
    question = with_key(question)
    if not question.job.key:
        return None, question
    job, folder, own = question.job, DataFolder.resolve(question.data), question.own_runs
    identity = (
        job.key, job.name, job.training_loop, device, device.interconnect, question.allocator, question.estimator,
        question.loop, machine_for(question.machine, device, question.data), question.torch_version, question.coverage,
        question.known, own and (own.asked_for, own.changed_ns), str(folder.root), tuple(_models_of(folder)),
    )  # fmt: skip
    return hashlib.sha256(repr(identity).encode()).hexdigest(), question


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
