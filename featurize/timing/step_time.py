"""The time of one training step on one GPU model, by kind of kernel, with its error on held-out steps.

Start reading at `time_step`. `operator_costs` sums its kernels by operator, `features` for a learner; `delays_ms`
returns the delay of kernels by collectives, `input_ms` the time of the input pipeline of a plain training loop.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import MEGATRON, TrainingSettings, uses_tf32
from featurize.recording.step_trace import GATHERED, Collective, StepTrace
from featurize.timing.activity import (
    CLASS_VALUES,
    CLASSES,
    STEP_VALUES,
    ActivityParameters,
    StepActivity,
    StepWork,
    TimedKernels,
    kernel_activity,
    kernel_load,
    load_power,
    occupied_on,
    step_work,
    under_limit,
)
from featurize.timing.calls import (
    Calls,
    KernelCall,
    as_calls,
    kernel_calls,
    operator_kernels,
)
from featurize.timing.packaged import packaged_parameters
from featurize.timing.times import (
    GROUP_VALUES,
    SINGLE_VALUES,
    UNIT_VALUES,
    Parameters,
    call_seconds,
    framework_of,
    host_ms,
    kernels_on,
    machines_of,
    traffic_s,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

VERSION = 2
OVERLAP = 6  # sharpness of the maximum of GPU and host time


@dataclass(frozen=True, kw_only=True)
class LearnedEfficiencies:
    """The content of the file of parameters.

    Args:
        parameters: The efficiencies.
        activity: The parameters of activity.
        error_quantiles: Coverage -> factor by which measured steps are at most longer, for held-out jobs.
        fitted_on: Source -> number of its rows.
        sharded: Factor by which kernels take longer while FSDP gathers weights and scatters gradients than alone.
    """

    parameters: Parameters
    activity: ActivityParameters
    error_quantiles: Mapping[float, float]
    fitted_on: Mapping[str, int]
    sharded: float

    @functools.cached_property
    def latency_s(self) -> float:
        """The part of each kernel's time that is not work, in seconds."""
        return float(np.exp(self.parameters.single["latency_us"])) * 1e-6


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One step, in milliseconds.

    Args:
        step_time_ms: From one step's start to the next one's.
        busy_ms: The GPU's own time.
        host_ms: The host's time to launch the kernels, which overlaps `busy_ms`.
        machines: Factor by which the host of 9 of 10 machines takes at most longer.
        input_ms: The input pipeline's time, which overlaps nothing.
        work: What the step's kernels do.
        kernels: The kernels of the step, on all GPU models that they were timed on together.
        row: Row of the GPU model in `kernels`.
        error_quantiles: Coverage -> factor on `step_time_ms` that a step stays below.
    """

    step_time_ms: float
    busy_ms: float
    host_ms: float
    machines: float
    input_ms: float
    work: StepWork
    kernels: TimedKernels = field(repr=False, compare=False)
    row: int = field(repr=False, compare=False)
    error_quantiles: Mapping[float, float]

    @functools.cached_property
    def activity(self) -> StepActivity:
        """The step's activity."""
        return self.work.activity_in(self.step_time_ms * 1e-3)

    @property
    def by_kind_ms(self) -> dict[str, float]:
        """Kind of kernel -> its time, the longest first."""
        calls, by_kind = self.kernels.calls, defaultdict[str, float](float)
        total_ms = calls.count * self.kernels.seconds[self.row] * 1e3
        for kind, of_kind_ms in zip(calls.kind, total_ms.tolist(), strict=True):
            by_kind[kind] += of_kind_ms
        return dict(sorted(by_kind.items(), key=lambda item: -item[1]))

    @property
    def bound_by(self) -> str:
        """Name the longest part: `input`, `host` or `gpu`."""
        if self.input_ms > max(self.busy_ms, self.host_ms):
            return "input"
        return "host" if self.host_ms > self.busy_ms else "gpu"

    def upper_ms(self) -> float:
        """Return the time in ms that 9 of 10 steps stay below, given the kernels' error or slower hosts."""
        slow_ms = self.input_ms + overlap_times(self.busy_ms, self.host_ms * self.machines)
        return max(self.step_time_ms * self.error_quantiles[0.9], slow_ms)

    def with_input(self, input_ms: float) -> TimedStep:
        """Return the step where an input pipeline takes `input_ms`, which overlap nothing."""
        if not input_ms:
            return self
        return replace(self, step_time_ms=input_ms + overlap_times(self.busy_ms, self.host_ms), input_ms=input_ms)


def time_step(
    trace: StepTrace,
    spec: DeviceSpec,
    settings: TrainingSettings,
    *,
    input_ms: float = 0.0,
    learned: LearnedEfficiencies | None = None,
) -> TimedStep:
    """Return the time of a traced step on one GPU model: see `time_steps` and `TimedStep.with_input`."""
    return time_steps(trace, [spec], settings, learned=learned)[0].with_input(input_ms)


def time_steps(
    trace: StepTrace,
    specs: Iterable[DeviceSpec],
    settings: TrainingSettings,
    *,
    learned: LearnedEfficiencies | None = None,
) -> list[TimedStep]:
    """Return the time of a traced step on each GPU model, without any input.

    The GPU's time and the host's overlap; the longer decides. Kernels run one after another.

    Args:
        trace: One step.
        specs: The GPU models: the kernels are timed on all of them in one pass.
        settings: The trace's training settings, which decide the framework that launches the kernels.
        learned: The efficiencies; None: the packaged ones.
    """
    framework = framework_of(trace, settings)
    gathers = trace.remembered("gathers", lambda: any(block.kind == GATHERED for block in trace.blocks))
    steps: dict[DeviceSpec, TimedStep] = {}
    if learned is None:  # cached: an estimate reads it again for fitted models, and for the same step in a loop
        choices = settings.precision, settings.channels_last, settings.cudnn_benchmark, framework, gathers
        steps = _keeper(trace).remembered(("timed steps", *choices), dict[DeviceSpec, TimedStep])
    specs = tuple(specs)
    if missing := tuple(spec for spec in dict.fromkeys(specs) if spec not in steps):
        efficiencies = learned or load_efficiencies()
        steps |= zip(missing, _time_on(missing, trace, settings, efficiencies, framework, gathers), strict=True)
    return [steps[spec] for spec in specs]


def _keeper(trace: StepTrace) -> StepTrace:
    """Return the trace whose cache is used: that of the same steps in a loop, if it is known, else this one."""
    looped = trace.in_a_loop
    return looped if looped is not None and looped.operators is trace.operators else trace


def _time_on(
    specs: tuple[DeviceSpec, ...],
    trace: StepTrace,
    settings: TrainingSettings,
    learned: LearnedEfficiencies,
    framework: str,
    gathers: bool,
) -> Iterator[TimedStep]:
    """Yield the time of a step on each GPU model."""
    flags = uses_tf32(settings.precision)
    calls = _keeper(trace).remembered(("kernels", *flags.values()), lambda: kernel_calls(trace.operators, **flags))
    timed = timed_kernels(calls, specs, settings, learned)
    if gathers and framework != MEGATRON:
        timed = replace(timed, seconds=timed.seconds * learned.sharded)
    all_busy_ms = (calls.count * timed.seconds * 1e3).sum(axis=-1).tolist()
    machines = machines_of(framework)
    works = step_work(timed, learned.activity)
    for row, (spec, work, busy_ms) in enumerate(zip(specs, works, all_busy_ms, strict=True)):
        launching_ms = host_ms(calls, spec, framework)
        yield TimedStep(
            step_time_ms=overlap_times(busy_ms, launching_ms) or spec.launch_overhead_us * 1e-3,
            busy_ms=busy_ms,
            host_ms=launching_ms,
            machines=machines,
            input_ms=0.0,
            work=work,
            kernels=timed,
            row=row,
            error_quantiles=learned.error_quantiles,
        )


def timed_kernels(
    calls: Calls, specs: tuple[DeviceSpec, ...], settings: TrainingSettings, learned: LearnedEfficiencies
) -> TimedKernels:
    """Return each kernel's time and its activity on each GPU model. Args as in `time_steps`."""
    kernels = kernels_on(
        calls,
        specs,
        learned.parameters.names,
        channels_last=settings.channels_last,
        searched=settings.cudnn_benchmark,
        half="bf16" if "bf16" in settings.precision else "fp16",
    )
    occupied = occupied_on(calls, kernels, specs)
    sm_share, occupancy = kernel_activity(occupied, learned.activity)
    seconds = call_seconds(kernels, learned.parameters)
    load = kernel_load(
        calls,
        kernels,
        specs,
        seconds=seconds,
        latency_s=learned.latency_s,
        sm_share=sm_share,
        memory_s=traffic_s(kernels, learned.parameters),
    )
    watts, longer = under_limit(load, specs, load_power())
    return TimedKernels(
        calls=calls,
        specs=specs,
        on_device=kernels,
        per_sm=occupied.per_sm,
        seconds=seconds * longer,
        latency_s=learned.latency_s,
        sm_share=sm_share,
        occupancy=occupancy,
        load=load,
        watts=watts,
    )


def overlap_times(busy_ms: float, host_ms: float) -> float:
    """Return the time of a step whose GPU and host work in parallel: a little more than the longer of the two."""
    longer = max(busy_ms, host_ms)
    return longer * (1 + (min(busy_ms, host_ms) / longer) ** OVERLAP) ** (1 / OVERLAP) if longer else 0.0


@functools.cache
def load_efficiencies() -> LearnedEfficiencies:
    """Return the packaged efficiencies."""
    return read_efficiencies(packaged_parameters())


def read_efficiencies(content: Mapping[str, Any]) -> LearnedEfficiencies:
    """Return the efficiencies in the content of a file that `efficiencies_text` wrote."""
    compute, bandwidth = content["compute"], content["bandwidth"]
    parameters = Parameters(
        names=(tuple(compute), tuple(bandwidth)),
        compute=np.array(list(compute.values())),
        bandwidth=np.array(list(bandwidth.values())),
        by_group={name: np.array(content["by_group"][name]) for name in GROUP_VALUES},
        by_units={name: np.array(content["by_units"][name]) for name in UNIT_VALUES},
        single={name: float(content["single"][name]) for name in SINGLE_VALUES},
    )
    of_activity = content["activity"]
    activity = ActivityParameters(
        by_class={
            name: np.array([float(of_activity[name][class_name]) for class_name in CLASSES]) for name in CLASS_VALUES
        },
        single={name: float(of_activity[name]) for name in STEP_VALUES},
    )
    quantiles = {float(coverage): float(factor) for coverage, factor in content["error_quantiles"].items()}
    sharded = float(content["sharded"])
    fitted_on = {str(source): int(rows) for source, rows in content["fitted_on"].items()}
    return LearnedEfficiencies(
        parameters=parameters, activity=activity, error_quantiles=quantiles, fitted_on=fitted_on, sharded=sharded
    )


def efficiencies_text(learned: LearnedEfficiencies, **sections: Mapping[str, object]) -> str:
    """Return the file of efficiencies for `read_efficiencies`, with the sections that other modules read."""
    parameters = learned.parameters
    content = {
        "version": VERSION,
        "fitted_on": dict(learned.fitted_on),
        "error_quantiles": {f"{coverage:g}": round(factor, 4) for coverage, factor in learned.error_quantiles.items()},
        "sharded": round(learned.sharded, 4),
        "single": {name: _round(value) for name, value in parameters.single.items()},
        "by_units": {name: _round(values) for name, values in parameters.by_units.items()},
        "by_group": {name: _round(values) for name, values in parameters.by_group.items()},
        "activity": {
            **{name: _round(value) for name, value in learned.activity.single.items()},
            **{
                name: dict(zip(CLASSES, _round(values), strict=True))
                for name, values in learned.activity.by_class.items()
            },
        },
        "compute": dict(zip(parameters.names[0], _round(parameters.compute), strict=True)),
        "bandwidth": dict(zip(parameters.names[1], _round(parameters.bandwidth), strict=True)),
        **sections,
    }
    return json.dumps(content, indent=1) + "\n"


def _round(values: ArrayLike) -> Any:
    return np.round(np.asarray(values, dtype=float), 4).tolist()


class OperatorCost(NamedTuple):
    """One operator, all its kernels.

    seconds     on the GPU
    occupancy   share of the possible warps that is resident on active SMs
    sm_share    share of all SMs that are active
    """

    seconds: float
    occupancy: float
    sm_share: float


def operator_costs(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings) -> list[OperatorCost]:
    """Return the cost of each operator, in the order of the trace.

    Args:
        trace: One step.
        spec: The GPU model.
        settings: The trace's training settings.
    """
    counts: Counter[KernelCall] = Counter()
    of_operators = []
    for op in trace.operators:
        run, _ = operator_kernels(op, **uses_tf32(settings.precision))
        for call, times in run:
            counts[call] += times
        of_operators.append(run)
    timed = timed_kernels(as_calls(counts, 0.0), (spec,), settings, load_efficiencies())
    active = timed.seconds * timed.sm_share
    columns = zip(timed.seconds[0].tolist(), active[0].tolist(), (active * timed.occupancy)[0].tolist(), strict=True)
    priced = dict(zip(counts, columns, strict=True))
    costs = []
    for run in of_operators:
        seconds = active_s = resident_s = 0.0
        for call, times in run:
            call_seconds, of_active, of_resident = priced[call]
            seconds += times * call_seconds
            active_s += times * of_active
            resident_s += times * of_resident
        costs.append(OperatorCost(seconds, resident_s / active_s, active_s / seconds))
    return costs


def features(step: TimedStep) -> dict[str, float]:
    """Return the features of a timed step for a learner; every value finite.

    `time_KIND` and `bound_BOUND` are shares of the kernels' time, `fill` and `waves` their weighted means (`waves`:
    blocks over SMs, as a logarithm of base 2), `intensity` is FLOPs per byte (log2), times are in ms or µs (log2 where
    named so).
    """
    return {
        "step_time_log2_ms": math.log2(step.step_time_ms),
        "busy_log2_ms": math.log2(max(step.busy_ms, 2**-20)),
        "host_over_step": step.host_ms / step.step_time_ms,
        **vars(step.activity),
        **step.kernels.features[step.row],
    }


_BEGINS, _WAITS = 0, 1


def delays_ms(
    collectives: Sequence[Collective], lasts_ms: Sequence[float], begins_ms: Sequence[float]
) -> list[tuple[int, float]]:
    """Return the moments at which the kernels wait for collectives, in order, with the kernels' delay from then on.
    Collectives of one dimension of the mesh run one after another.

    Args:
        collectives: Collectives in the order of their starts.
        lasts_ms: Duration of each collective.
        begins_ms: Start of each operator without any communication, and the end of the step.
    """
    moments = sorted(
        (moment, kind, number)
        for number, collective in enumerate(collectives)
        for moment, kind in ((collective.after, _BEGINS), (collective.before, _WAITS))
    )
    late_ms = 0.0  # delay of the kernels
    delays: list[tuple[int, float]] = []
    free_ms: dict[str, float] = defaultdict(float)  # when a communicator has completed its earlier collectives
    ends_ms: dict[int, float] = {}
    for moment, kind, number in moments:
        now_ms = begins_ms[moment] + late_ms
        if kind == _BEGINS:
            axis = collectives[number].axis
            free_ms[axis] = ends_ms[number] = max(now_ms, free_ms[axis]) + lasts_ms[number]
        else:
            late_ms += max(ends_ms[number] - now_ms, 0.0)
            delays.append((moment, late_ms))
    return delays


def begin_moments_ms(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, step_ms: float) -> list[float]:
    """Return the start of each operator, and the end of the step, in proportion to the GPU's own time."""
    ends = np.cumsum([0.0, *(cost.seconds for cost in operator_costs(trace, spec, settings))])
    moments: list[float] = (ends * (step_ms / ends[-1]) if ends[-1] else ends).tolist()
    return moments


def input_ms(trace: StepTrace, batch_size: int, micro_steps: int = 1) -> float:
    """Return the time that a plain training loop adds to each traced step, in ms: see `python_loader_ms`.

    `batch_size` is of one micro-step; each loads a batch.
    """
    return micro_steps * python_loader_ms(batch_size, trace.batch_bytes // micro_steps)


def python_loader_ms(samples: int, nbytes: int) -> float:
    """Return the time that a plain training loop adds to each step, in ms.

    A `DataLoader` without workers collates `samples`, the pageable batch of `nbytes` is copied, and Python runs between
    the steps. Fitted on one machine: a first guess for others.
    """
    return 1.45 + 1.0e-3 * samples + 0.36e-6 * nbytes
