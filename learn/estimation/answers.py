"""What is known of one training job before it runs, and who says so: the trace, a training-free method, fitted models.

Start reading at `answer`; `learn.estimate` is the call that users make.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.errors import CommandError, EnvironmentProblem, UsageError
from conf.units import MIB
from featurize.allocator_settings import AllocatorSettings
from featurize.device_spec import DeviceSpec
from featurize.machine import MachineProfile
from featurize.training_settings import training_of
from featurize.version import is_current
from learn.cases import Case
from learn.estimation.loops import PIPELINE, RESIDENT, loop_named, loops_of_sources
from learn.estimation.memory_causes import COVERAGES, HELD_OUT, uncertainty_of, widest
from learn.estimation.on_machine import placed
from learn.estimators import LEVEL
from learn.workload import Workload

if TYPE_CHECKING:
    from featurize.simulate import SimulatedStep
    from learn.artifacts import Artifact, Wanted
    from learn.estimators import Prediction
    from learn.step_store import StepStore
    from learn.traced import TracedStep, Traces

TARGETS = ("memory", "smact", "smocc", "drama", "step_time")  # what an Estimate gives
# Target -> the stored feature of a step that is the trace's own figure.
_STORED = {"memory": "job_memory_mib", "step_time": "job_step_time_ms"} | {
    name: f"job_roofline_{name}" for name in ("smact", "smocc", "drama")
}
TOP_MODULES = 10
_OF_MODULES = ("hybrid", "gnn", "trace", "horus", "faketensor", "dnnmem", "xmem", "llmem", "deepspeed")
# Where the trace meets its own limits, these may still answer: what each of them does instead.
WITHOUT_TRACE = "estimator=xmem runs it for real on the CPU, estimator=deepspeed counts the model's states only"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One training job on one GPU model. MiB, ms; ratios lie in [0, 1]. None: nobody who was asked knows.

    peak_memory_mib   of the whole card, by the estimator that `answered_by` names
    allocated_mib, reserved_mib, process_mib, card_mib   the same peak by the trace, as the four instruments show it:
                  `torch.cuda.max_memory_allocated`, `max_memory_reserved`, the process in nvidia-smi, the card there
    machine       the profile that says what lies outside the allocator; see `featurize.machine`
    upper_mib     what a share `coverage` of jobs stay below, 99 of 100 by default; None where no bound is calibrated
                  (estimator=trace has none)
    uncertain     cause -> MiB by which the bound lies above `peak_memory_mib` for it; empty without a bound. Where the
                  sum is less than the causes' own, a card of that size is all that the job can take
    distribution  (probability, MiB that memory stays below with it), ascending; see `quantile_mib`
    breakdown     part -> MiB at the peak of the traced step. It sums to the trace's own peak, `trace_memory_mib`,
                  which is not `peak_memory_mib` where another estimator gave that. Without a trace: the parts that the
                  estimator itself tells apart
    peak_operator, peak_module, peak_phase   what took memory when the most was allocated, in the traced step
    activations   module -> MiB that the operators of its forward pass keep alive at that moment: the largest ones
    answered_by   target -> estimator and version that gave the figure
    loops         target -> the loop that the figure speaks of, a name of `learn.estimation.loops.LOOPS`
    seconds       what the estimate itself took
    device_memory_mib   what a job can use of the card
    held_out_errors     of the fast path: target -> `median` and `p90` of how far it is off the full path, on
                        configurations held out; shares of memory and step time, absolute for ratios
    """

    peak_memory_mib: float
    upper_mib: float | None
    smact: float | None
    smocc: float | None
    drama: float | None
    step_time_ms: float | None
    parameters: int | None
    breakdown: Mapping[str, float]
    peak_operator: str | None
    peak_module: str | None
    peak_phase: str | None
    activations: Mapping[str, float]
    trace_memory_mib: float | None
    device: str
    warnings: tuple[str, ...]
    estimator: str
    answered_by: Mapping[str, str]
    seconds: float
    device_memory_mib: float | None = None
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    process_mib: float | None = None
    card_mib: float | None = None
    machine: str | None = None
    held_out_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    loops: Mapping[str, str] = field(default_factory=dict)
    coverage: float = LEVEL
    uncertain: Mapping[str, float] = field(default_factory=dict)
    distribution: tuple[tuple[float, float], ...] = ()

    def quantile_mib(self, p: float) -> float | None:
        """Return the MiB that the job's memory stays below with probability p; None where no bound is calibrated.

        Args:
            p: From 0.01 to 0.99; between the probabilities of `distribution`, a straight line.

        Raises:
            UsageError: Another p.
        """
        if not COVERAGES[0] <= p <= COVERAGES[-1]:
            raise UsageError(f"a probability from {COVERAGES[0]} to {COVERAGES[-1]} is wanted, got {p!r}")
        if not self.distribution:
            return None
        probabilities, mib = zip(*self.distribution, strict=True)
        return float(np.interp(p, probabilities, mib))

    def fits(self, mib: float) -> bool:
        """Whether the job fits into that much free memory: by the bound where there is one, else by the point."""
        return (self.peak_memory_mib if self.upper_mib is None else self.upper_mib) <= mib

    @property
    def fits_device(self) -> bool | None:
        """Whether the job fits into the empty card; None where its memory is not known."""
        return None if self.device_memory_mib is None else self.fits(self.device_memory_mib)

    def to_mapping(self) -> dict[str, Any]:
        """The fields, and `fits`: into the empty card."""
        return {**asdict(self), "fits": self.fits_device}


@dataclass
class _Gathered:
    """Gathers figures: `values` by their field of `Estimate`, `by` target -> who gave it, `loops` target -> of which
    loop. `absent`: targets without a fitted model, in the folder `searched`."""

    values: dict[str, Any] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    searched: str = ""
    beyond_fit: bool = False

    def bound(self, quantiles_mib: Mapping[float, float], coverage: float, causes_mib: Mapping[str, float]) -> None:
        """Take a memory bound: its distribution, and the causes' MiB at the coverage."""
        ascending = np.maximum.accumulate([quantiles_mib[p] for p in sorted(quantiles_mib)]).tolist()
        self.values["distribution"] = tuple(zip(sorted(quantiles_mib), ascending, strict=True))
        self.values |= {"upper_mib": quantiles_mib[coverage], "coverage": coverage, "uncertain": dict(causes_mib)}

    def move(self, mib: float) -> None:
        """Move memory that a model which comes along answered to another machine than its rows were measured on."""
        if self.by.get("memory", "").endswith("(default)"):
            for name in ("peak_memory_mib", "upper_mib"):
                if self.values.get(name) is not None:
                    self.values[name] += mib
            self.values["distribution"] = tuple((p, at + mib) for p, at in self.values.get("distribution", ()))


def answer(
    job: Workload,
    device: DeviceSpec,
    *,
    estimator: str | None = None,
    data=None,
    allocator: AllocatorSettings | None = None,
    timeline: bool = False,
    loop: str | None = None,
    on: MachineProfile,
    traces: Traces | None = None,
    coverage: float = LEVEL,
) -> tuple[Estimate, TracedStep | None]:
    """The estimate of one job, and its trace where there is one (`timeline`: with its allocator's every move).

    `estimator`, `loop` and `coverage` as in `learn.estimate.estimate`, but checked; `traces` as in
    `learn.traced.step_of`. `Estimate.seconds` is left at 0. Raises
    `UsageError` for what has no answer: for peak memory that is, other figures may be missing.
    """
    from learn.estimators import TRAINING_FREE, get_estimator
    from learn.step_store import StepStore
    from learn.traced import CannotTrace, step_of

    gathered, steps = _Gathered(), StepStore(data)
    if loop is not None:
        job = replace(job, training_loop=loop == PIPELINE)
    case = _case(job, device)
    if (
        estimator is not None
        and estimator not in TRAINING_FREE
        and job.config is None
        and not get_estimator(estimator).needs_trace
    ):
        raise UsageError(f"estimator={estimator} reads trial configs; modules are answered by {', '.join(_OF_MODULES)}")
    traced = failure = None
    try:
        traced = step_of(job, device, allocator=allocator, timeline=timeline, traces=traces)
    except CommandError as error:
        failure = error
        _recall(case, steps)
    beyond = training_of(job.settings).beyond_trials()
    if estimator in TRAINING_FREE and estimator != "trace":
        _ask(gathered, job, device, estimator)
    elif estimator is None and beyond:
        gathered.notes.append(f"no model was fitted on {', '.join(beyond)}: the trace answers")
    elif estimator != "trace":
        if beyond:
            gathered.notes.append(f"no model was fitted on {', '.join(beyond)}: estimator={estimator} leaves that out")
        with steps.lent(case, traced if allocator is None else None), contextlib.ExitStack() as lent:
            in_a_plain_loop = functools.cache(functools.partial(_in_a_plain_loop, case, steps, lent, traces))
            _ask_fitted(gathered, case, steps, in_a_plain_loop, estimator, data, loop, coverage)
    if failure is not None and estimator in (None, "trace"):
        _ask_stored(gathered, case, steps)
    if failure is not None and "peak_memory_mib" not in gathered.values:
        advice = f"; {WITHOUT_TRACE}" if isinstance(failure, CannotTrace) and failure.limit else ""
        kind = UsageError if isinstance(failure, UsageError) else EnvironmentProblem
        raise kind(f"{failure}{advice}") from failure
    if traced is not None:
        described_mib = traced.step.peak_memory_mib
        traced = placed(
            traced, device, on, cudnn_benchmark=job.settings.cudnn_benchmark, allocator=allocator, timeline=timeline
        )
        gathered.move(traced.step.peak_memory_mib - described_mib)
        if gathered.beyond_fit or (estimator is None and "memory" not in gathered.by):
            _bound_by_causes(gathered, traced, device, on, coverage)
    return _assembled(gathered, job, device, traced, failure, allocator, loop, on), traced


def _bound_by_causes(
    gathered: _Gathered, traced: TracedStep, device: DeviceSpec, on: MachineProfile, coverage: float
) -> None:
    """Bound memory that no fit can speak of by what is uncertain of the traced step."""
    uncertainty = uncertainty_of(traced, device, on)
    centre_mib = max(gathered.values.get("peak_memory_mib", 0.0), traced.step.peak_memory_mib)
    levels = sorted({*COVERAGES, coverage})
    bounds = {level: uncertainty.bound_mib(centre_mib, level, device.memory_mib) for level in levels}
    gathered.bound(bounds, coverage, uncertainty.at(coverage))


def _recall(case: Case, steps: StepStore) -> None:
    """What was stored of a case that cannot be traced here: its config may name code that nobody allowed to run."""
    if case.config is not None:
        steps.recall([case, replace(case, training_loop=True)])


def _ask_stored(gathered: _Gathered, case: Case, steps: StepStore) -> None:
    """The trace's figures that were stored of a case that cannot be traced here, for targets without an answer."""
    from learn.targets import get_target

    if (features := steps.features(case)) is None:
        return
    for target in TARGETS:
        column = get_target(target).column
        if column not in gathered.values:
            gathered.values[column], gathered.by[target] = features[_STORED[target]], "trace"
            gathered.loops[target] = loop_named(case.training_loop)
    gathered.notes.append("figures of the trace are those stored in the data folder, since it cannot be repeated here")


def _case(job: Workload, device: DeviceSpec) -> Case:
    if job.config is not None:
        return Case(job.config, device.name, job.training_loop, described=device)
    return Case(device=device.name, training_loop=job.training_loop, module=job, described=device)


def _ask(gathered: _Gathered, job: Workload, device: DeviceSpec, estimator: str) -> None:
    """Memory by a training-free method. `UsageError` with the method's reason."""
    from learn.analytical.base import AnalyticalEstimator, analyse
    from learn.estimators import get_estimator
    from learn.traced import wants_values

    if beyond := training_of(job.settings).beyond_trials():
        raise UsageError(f"estimator={estimator} has no answer: it does not know {', '.join(beyond)}")
    known = get_estimator(estimator)
    assert issubclass(known, AnalyticalEstimator), estimator
    by_method = analyse(known.method(), job, device)
    if by_method.mib is None:
        stuck = wants_values(str(by_method.reason)) and f"estimator={estimator}" not in WITHOUT_TRACE
        advice = f"; {WITHOUT_TRACE}" if stuck else ""
        raise UsageError(f"estimator={estimator} has no answer: {by_method.reason}{advice}")
    gathered.values |= {"peak_memory_mib": by_method.mib, "breakdown": dict(by_method.parts)}
    gathered.by["memory"], gathered.loops["memory"] = estimator, loop_named(job.training_loop)
    gathered.notes.append(known.warning)


def _ask_fitted(
    gathered: _Gathered,
    case: Case,
    steps: StepStore,
    in_a_plain_loop: Callable[[], Case],
    estimator: str | None,
    data: Any,
    loop: str | None,
    coverage: float,
) -> None:
    """Add the figures of the newest fitted model of each target that knows the case's family and device: the data
    folder's, else the one that comes with the project.

    Other people measure plain loops, which wait for their input; the farm's trials keep one batch on the device. So
    each model is asked about the loop that it knows. Where a `loop` is asked for, only models that know that one
    answer; memory, which hardly depends on the loop, is answered by any.
    """
    from learn.artifacts import StaleArtifact, default_artifact, find_latest, load_latest
    from learn.learned.scaled_prediction import ScaledPrediction
    from learn.targets import get_target
    from warehouse.folder import DataFolder

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
    gathered.searched = str(folder.models)
    notes = []
    for target in TARGETS:
        own = None
        try:
            own = find_latest(folder, target, **learnt)
        except StaleArtifact as error:
            if estimator is not None:
                raise
            notes.append(str(error))
        artifact, note = _of_loop(target, own, shipped.get(target), loop)
        notes += note
        if artifact is None:
            gathered.absent.append(target)
            continue
        default = artifact is not own
        sources = artifact.meta["rows"]["source"]
        asked = in_a_plain_loop() if loops_of_sources(sources) == {PIPELINE} else case
        prediction = artifact.estimator.predict([asked], steps)
        if prediction.refusals:
            if target == "memory" and estimator is not None:
                raise UsageError(f"estimator={estimator} has no answer: {prediction.refusals[0]}")
            gathered.absent.append(target)
            continue
        name = artifact.meta["estimator"]
        gathered.values[get_target(target).column] = float(prediction.point[0])
        gathered.by[target] = f"{name} (default)" if default else f"{name} {artifact.version}"
        gathered.loops[target] = loop_named(asked.training_loop)
        if target == "memory":
            quantiles_mib = _quantiles(prediction, coverage)
            if quantiles_mib:
                above_mib = quantiles_mib[coverage] - float(prediction.point[0])
                gathered.bound(quantiles_mib, coverage, {HELD_OUT: above_mib})
            gathered.beyond_fit = default and isinstance(prediction, ScaledPrediction) and 0 in prediction.outside
        notes += [f"{target}: {text}" for text in prediction.warnings]
        notes += [f"{target}: unlike what it was fitted on: {text}" for text in prediction.unfamiliar.get(0, ())]
        of_loop = ", for a plain training loop with its input pipeline" if asked is not case else ""
        notes.append(f"{target}: fitted on {', '.join(sources)} rows{of_loop}")
        if default and not is_current(artifact.meta["feature_version"]):
            notes.append(
                f"{target}: the model that comes with the project was fitted with features "
                f"{artifact.meta['feature_version']}, and this code computes others: it may be a little off"
            )
    gathered.notes += _merged(notes)


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
) -> tuple[Artifact | None, list[str]]:
    """Return the first of the two models that knows the loop, and which model was passed over for that."""
    if loop is None or target == "memory":
        return own or shipped, []
    passed_over: list[str] = []
    for artifact, words in ((own, "the newest model of the data folder"), (shipped, "the model that comes along")):
        if artifact is None:
            continue
        known = loops_of_sources(artifact.meta["rows"]["source"])
        if loop in known:
            return artifact, passed_over
        passed_over += [
            f"{target}: {words} was fitted on the {name} loop only; pass loop={name} to use it" for name in known
        ]
    return None, passed_over


def _in_a_plain_loop(case: Case, steps: StepStore, lent: contextlib.ExitStack, traces: Traces | None) -> Case:
    """The case in such a loop, its record at hand while `lent` is open."""
    from learn.traced import step_of

    if case.training_loop or case.spec is None:
        return case
    looped = replace(case, training_loop=True)
    if case.module is not None:
        looped = replace(looped, module=replace(case.module, training_loop=True))
    with contextlib.suppress(CommandError):  # then whoever asks for its record hears why
        lent.enter_context(steps.lent(looped, step_of(looped.workload, case.spec, traces=traces)))
    return looped


def _priced(traced: TracedStep, job: Workload, device: DeviceSpec, loop: str | None) -> SimulatedStep:
    """Return the traced step in the loop asked for: the trace itself prices the GPU's own work, without any input."""
    from featurize.simulate import input_ms, simulate

    if loop != PIPELINE:
        return traced.step
    waits = input_ms(traced.trace, job.batch_size, training_of(job.settings).accumulation)
    return simulate(traced.trace, device, job.settings, memory=traced.memory, input_ms=waits)


def _assembled(
    gathered: _Gathered,
    job: Workload,
    device: DeviceSpec,
    traced: TracedStep | None,
    failure: CommandError | None,
    allocator: AllocatorSettings | None,
    loop: str | None,
    on: MachineProfile,
) -> Estimate:
    """Return what was gathered, and the trace's figures for the rest."""
    from learn.analytical.trace import NO_BOUND
    from learn.targets import get_target

    values, by = gathered.values, gathered.by
    notes: list[str] = []
    if traced is not None:
        step = _priced(traced, job, device, loop)
        for target in TARGETS:
            column = get_target(target).column
            if column not in values:
                values[column], by[target] = getattr(step, column), "trace"
                gathered.loops[target] = loop_named(job.training_loop) if target == "memory" else loop or RESIDENT
        notes += traced.trace.notes
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
        if not memory.fits and by["memory"] == "trace":
            notes.append(f"out of memory: the step needs more than {device.name} has")
        elif not memory.fits:
            notes.append(f"the trace finds that the step needs more than {device.name} has")
        elif memory.retries:
            notes.append(f"it only just fits: the allocator has to give cached memory back {times(memory.retries)}")
        notes += [f"assumed: {text}" for text in traced.trace.assumed]
    else:
        missing = [target for target in TARGETS if target not in by]
        unknown = f"{', '.join(missing)}: not known" if missing else "not traced"
        notes.append(f"{unknown}, since {failure}")
        values["parameters"] = _parameters(job)
    by_trace = by["memory"] == "trace"
    upper = values.get("upper_mib")
    if upper is not None and values["peak_memory_mib"] <= device.memory_mib < upper:
        notes.append(f"it may run out of memory: the bound is above the {device.memory_mib:,.0f} MiB of {device.name}")
    if upper is None and by_trace:
        notes.append(NO_BOUND)
    elif not by_trace and values["peak_memory_mib"] > device.memory_mib:
        notes.insert(0, f"out of memory by {by['memory']}: {device.name} has {device.memory_mib:,.0f} MiB")
    if (note := widest(values.get("uncertain", {}))) is not None:
        notes.append(note)
    if allocator is not None and not by_trace:
        notes.append(f"allocator= changes the trace's figures only; memory is answered by {by['memory']}")
    if gathered.absent:
        instead = ": answered by the trace" if traced is not None else ""
        family = "modules" if job.config is None else job.config.family
        notes.append(
            f"no fitted model for {family} on {device.name} in {gathered.searched} for "
            f"{', '.join(gathered.absent)}{instead} (python -m learn.fit target={gathered.absent[0]} fits one)"
        )
    notes += _of_two_loops(gathered.loops)
    known = dict.fromkeys(
        ("upper_mib", *(get_target(target).column for target in TARGETS), "peak_operator", "peak_module", "peak_phase",
         "trace_memory_mib")
    )  # fmt: skip
    return Estimate(
        device_memory_mib=device.memory_mib,
        **{**known, "breakdown": {}, "activations": {}, **values},
        device=device.name,
        warnings=tuple([*notes, *gathered.notes]),
        estimator=estimators_named(by),
        answered_by=by,
        loops=gathered.loops,
        machine=on.name,
        seconds=0.0,
    )


def estimators_named(by: Mapping[str, str]) -> str:
    """Return the estimators that gave an answer's figures, the trace last; `by` is its `answered_by`."""
    named = sorted({text.partition(" ")[0] for text in by.values()}, key=lambda name: (name == "trace", name))
    return " + ".join(named)


def _of_two_loops(loops: Mapping[str, str]) -> list[str]:
    """Return a note where utilization and step time are not all of one loop, so that they do not belong together."""
    of_loop = {loop: [t for t in TARGETS if t != "memory" and loops.get(t) == loop] for loop in (PIPELINE, RESIDENT)}
    if not all(of_loop.values()):
        return []
    parts = " and ".join(
        f"{', '.join(targets)} {'is' if len(targets) == 1 else 'are'} for the {loop} loop"
        for loop, targets in of_loop.items()
    )
    return [f"{parts}; pass loop={PIPELINE} or loop={RESIDENT} to get all for one"]


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _parameters(job: Workload) -> int | None:
    """Counted on a model that is built but not traced; None where it can't be built either."""
    from featurize.skeleton import build_on_meta

    try:
        return sum(p.numel() for p in build_on_meta(job.build).parameters())
    except Exception:  # a model may raise anything, and the trace's reason is told already
        return None


def _merged(notes: list[str]) -> list[str]:
    """`smact: x`, `drama: x` as one `smact, drama: x`."""
    by_text: dict[str, list[str]] = {}
    for note in notes:
        head, colon, text = note.partition(": ")
        by_text.setdefault(text if colon and head in TARGETS else note, []).append(head if head in TARGETS else "")
    return [f"{', '.join(heads)}: {text}" if all(heads) else text for text, heads in by_text.items()]
