"""Simulated figures of a traced training step on a device: memory, time, utilization, power, and communication.

Start reading at `simulate`, for one GPU or a rank that waits for others: `communication_of` returns the part of its
communication that computation does not hide, `waits_of` that of a rank of a pipeline. `time_step` returns the time
alone, with its error on held-out steps. `operator_costs` sums kernels by operator, `time_features` for a learner;
`delays_ms` returns the delay of kernels by collectives, `input_ms` the time of the input pipeline of a plain training
loop. Memory is `featurize.memory.replay`'s.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel
from featurize.job.training_settings import GRAPHS, MEGATRON, Training, TrainingSettings, training_of, uses_tf32
from featurize.memory.replay import MemoryProfile, outside_mib, replay
from featurize.recording.step_trace import (
    BUCKET,
    COMMUNICATION,
    GATHERED,
    MASTER,
    UNREDUCED,
    Collective,
    PipelinePart,
    StepTrace,
)
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
from featurize.timing.collectives import (
    PIPELINE,
    SEND,
    collective_s,
    communicators_mib,
    fabric_of,
    fabrics_of,
    sent_bytes,
)
from featurize.timing.kernels import (
    GROUP_VALUES,
    SINGLE_VALUES,
    UNIT_VALUES,
    Calls,
    KernelCall,
    Parameters,
    as_calls,
    call_seconds,
    framework_of,
    host_ms,
    kernel_calls,
    kernels_on,
    operator_kernels,
    packaged_hosts,
    packaged_parameters,
    traffic_s,
)

if TYPE_CHECKING:
    from featurize.timing.pipeline_orders import Compute, Message


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Communication between the ranks of a job in a step; zero for a job on one GPU.

    busy_ms      time of the collectives themselves, one after another
    exposed_ms   time by which they lengthen the step
    bubble_ms    time in which a rank of a pipeline waits for stages that compute, even if messages took no time
    sent_mib     kind of collective -> MiB that a rank sends
    buffers_mib  memory of communication libraries outside the allocator
    """

    busy_ms: float = 0.0
    exposed_ms: float = 0.0
    bubble_ms: float = 0.0
    sent_mib: Mapping[str, float] = field(default_factory=dict)
    buffers_mib: float = 0.0

    @property
    def waits_ms(self) -> float:
        """Time that a rank waits for others, in ms."""
        return self.exposed_ms + self.bubble_ms


_OF_RANKS = {
    "gathered parameters": GATHERED,
    "unreduced gradients": UNREDUCED,
    "communication buffers": COMMUNICATION,
    "gradient buckets": BUCKET,
    "master weights": MASTER,
}


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A traced step on one GPU model: its replay, its time, and a rank's waiting time. MiB, ms, W; ratios in [0, 1].
    Memory is the need, even where it does not fit.

    process_mib  the process's memory outside the allocator; others_mib: memory of other processes on the card
    of_ranks     number of a rank of a pipeline -> its memory; for the first one of each kind
    """

    trace: StepTrace
    spec: DeviceSpec
    memory: MemoryProfile
    timed: TimedStep
    process_mib: float
    others_mib: float = 0.0
    communication: Communication = field(default_factory=Communication)
    of_ranks: Mapping[int, MemoryProfile] = field(default_factory=dict)

    @property
    def peak_allocated_mib(self) -> float:
        """Memory of live blocks, rounded to 512 bytes."""
        return self.memory.peak_allocated / MIB

    @property
    def peak_reserved_mib(self) -> float:
        """Memory of the caching allocator's segments."""
        return self.memory.peak_reserved / MIB

    @property
    def peak_memory_mib(self) -> float:
        """The whole card's memory."""
        return self.peak_reserved_mib + (self.process_mib + self.others_mib + self.communication.buffers_mib)

    @property
    def fits(self) -> bool:
        """Return whether the step fits; if not, it ends as `oom`."""
        return self.memory.fits and (not self.communication.buffers_mib or self.peak_memory_mib <= self.spec.memory_mib)

    @functools.cached_property
    def breakdown(self) -> dict[str, float]:
        """Part -> MiB at the peak; the parts sum to `peak_memory_mib`. `fragmentation` is the allocator's reserved
        memory at its peak without the live tensors' own bytes, with their rounding. Memory of other processes, of
        communication libraries and of wrappers of several ranks are parts only where they are not zero."""
        live = {kind: nbytes / MIB for kind, nbytes in self.memory.peak_parts.items()}
        outside = {"communication": self.communication.buffers_mib, "other users": self.others_mib}
        return {
            "parameters": live["parameter"],
            "gradients": live["gradient"],
            **{name: live[kind] for name, kind in _OF_RANKS.items() if kind in live},
            "optimizer state": live["optimizer_state"],
            "activations": live["activation"],
            "temporaries": live["temporary"],
            "buffers and batch": live["buffer"] + live["batch"],
            "workspace": live["workspace"],
            "fragmentation": self.peak_reserved_mib - sum(live.values()),
            "context": self.process_mib,
            **{name: mib for name, mib in outside.items() if mib},
        }

    @property
    def step_time_ms(self) -> float:
        """The step's time in ms, with waits for other ranks."""
        return self.timed.step_time_ms + self.communication.waits_ms

    @property
    def step_time_upper_ms(self) -> float:
        """Bound in ms that 90 of 100 measured steps stay below."""
        return self.timed.upper_ms() + self.communication.waits_ms

    @property
    def bound_by(self) -> str:
        """Return the longest part of the step: `gpu`, `host`, `input` or `communication`."""
        return "communication" if self.communication.exposed_ms > self.timed.step_time_ms else self.timed.bound_by

    @property
    def activity(self) -> StepActivity:
        """Return the step's activity. Its units are assumed to be idle while a rank waits for others."""
        if not self.communication.waits_ms:
            return self.timed.activity
        share = self.timed.step_time_ms / self.step_time_ms
        ratios = {name: ratio * share for name, ratio in vars(self.timed.activity).items()}
        idle_w = self.spec.idle_power_w
        return StepActivity(**{**ratios, "power_w": idle_w + (self.timed.activity.power_w - idle_w) * share})

    def figure(self, column: str) -> float:
        """Return the figure of a column of `runs`: the activity's, else the step's own."""
        return float(getattr(self.activity if hasattr(self.activity, column) else self, column))


def simulate(
    trace: StepTrace,
    spec: DeviceSpec,
    settings: TrainingSettings | None = None,
    *,
    layout: Parallel | None = None,
    memory: MemoryProfile | None = None,
) -> SimulatedStep:
    """Price a traced step on one GPU model, on the machine of its description. `settings` are the trace's own, fp32 by
    default: operators on fp32 tensors run in TF32 where the precision allows it. With the `layout` of a job on several
    GPUs, the step is a rank's. `memory` is an existing replay.

    Raises:
        UsageError: The GPU model's description lacks the interconnect that the layout needs.
    """
    settings = settings or Training()
    return SimulatedStep(
        trace=trace,
        spec=spec,
        memory=memory or replay(trace, spec, cudnn_benchmark=settings.cudnn_benchmark),
        timed=time_step(trace, spec, settings),
        process_mib=outside_mib(trace, spec),
        communication=Communication() if layout is None else communication_of(trace, spec, settings, layout),
    )


def communication_of(
    trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, parallel: Parallel
) -> Communication:
    """Return a traced step's communication, which is the same in any loop.

    A collective runs beside the kernels on its own stream, from the moment its tensor is complete, and slows no kernel.
    Contention for the GPU and its memory is ignored. The host launches on while kernels wait: in a step that it bounds,
    they wait within its time.

    Args:
        trace: A job's step on several GPUs.
        spec: The GPU model.
        settings: The trace's training settings.
        parallel: The job's layout.
    """
    axes = [collective.axis for collective in trace.collectives]
    fabrics = fabrics_of(spec, parallel, axes)
    lasts_ms = [
        collective_s(collective.kind, collective.nbytes, fabrics[collective.axis]) * 1e3
        for collective in trace.collectives
    ]
    sent_mib: dict[str, float] = defaultdict(float)
    for collective in trace.collectives:
        sent_mib[collective.kind] += (
            sent_bytes(collective.kind, collective.nbytes, fabrics[collective.axis].ranks) / MIB
        )
    communication = Communication(
        busy_ms=sum(lasts_ms), sent_mib=dict(sent_mib), buffers_mib=communicators_mib(spec, parallel, axes)
    )
    of_rank = time_step(trace, spec, settings)
    if trace.pipeline is not None and trace.pipeline.groups:
        exposed_ms, bubble_ms = waits_of(trace.pipeline, spec, settings, parallel, of_rank.step_time_ms)
        return replace(communication, exposed_ms=exposed_ms, bubble_ms=bubble_ms)
    delays = delays_ms(trace.collectives, lasts_ms, begin_moments_ms(trace, spec, settings, of_rank.busy_ms))
    late_ms = delays[-1][1] if delays else 0.0
    waits_ms = overlap_times(of_rank.busy_ms + late_ms, of_rank.host_ms) - overlap_times(
        of_rank.busy_ms, of_rank.host_ms
    )
    return replace(communication, exposed_ms=waits_ms)


def ranks_of_stages(trace: StepTrace) -> Mapping[int, StepTrace]:
    """Return the trace of each rank of `pp`, by its number; without a pipeline, that of rank 0 alone."""
    if trace.pipeline is None:
        return {0: trace}
    groups = trace.pipeline.groups
    traces = {
        rank: replace(group.trace, pipeline=replace(group.trace.pipeline, groups=groups))
        for group in groups
        if group.trace.pipeline is not None
        for rank in group.ranks
    }
    return dict(sorted(traces.items()))


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
        step_s = self.step_time_ms * 1e-3
        ratios = {name: min(1.0, max(0.0, seconds / step_s)) for name, seconds in self.work.active_s.items()}
        return StepActivity(**ratios, power_w=self.work.idle_w + self.work.above_idle_j / step_s)

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
    machines = 1.0 if framework == GRAPHS else packaged_hosts()[framework].machines
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
    of_classes = {name: [float(of_activity[name][class_name]) for class_name in CLASSES] for name in CLASS_VALUES}
    return LearnedEfficiencies(
        parameters=parameters,
        activity=ActivityParameters(
            by_class={name: np.array(values) for name, values in of_classes.items()},
            single={name: float(of_activity[name]) for name in STEP_VALUES},
        ),
        error_quantiles={float(coverage): float(factor) for coverage, factor in content["error_quantiles"].items()},
        fitted_on={str(source): int(rows) for source, rows in content["fitted_on"].items()},
        sharded=float(content["sharded"]),
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


def _round(values: Any) -> Any:
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


def time_features(step: TimedStep) -> dict[str, float]:
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


_BEFORE, _AFTER = ("before", 0, 0, 0), ("after", 0, 0, 0)  # the parts before and after the schedule's passes


# Milliseconds of each part of a rank's step: by phase, number of the stage on its rank, micro-batch, and run of the
# schedule.
_Lasting: TypeAlias = dict[tuple[str, int, int, int], float]


def waits_of(
    part: PipelinePart, spec: DeviceSpec, settings: TrainingSettings, parallel: Parallel, step_ms: float
) -> tuple[float, float]:
    """Return `exposed_ms` and `bubble_ms` of one rank.

    All passes of the schedule are put into their order on all ranks. The bubble is the waiting time if messages and
    collectives took no time.

    Args:
        part: The rank's part, with the traces of all ranks.
        spec: The GPU model.
        settings: The traces' training settings.
        parallel: The job's layout.
        step_ms: The rank's own step, without any waiting.
    """
    from featurize.timing.pipeline_orders import finished_ms, orders_of  # its imports take a second

    alone: dict[int, _Lasting] = {}  # each rank's durations
    waiting: dict[int, _Lasting] = {}  # each rank's durations with waits for collectives
    for group in part.groups:
        timed = _time_passes(group.trace, spec, settings, parallel)
        for of_rank, lasting in zip((alone, waiting), timed, strict=True):
            of_rank.update(dict.fromkeys(group.ranks, lasting))
    moves_ms = _moves_ms(part.sent, spec, parallel)

    def pass_ms(of_rank: Mapping[int, _Lasting], run: int, computed: Compute) -> float:
        number, rank = divmod(computed.stage, parallel.degrees.pp)
        return of_rank[rank][computed.phase, number, computed.micro_batch, run]

    def message_ms(message: Message) -> float:
        return moves_ms[message.stage - 1 if message.phase == "forward" else message.stage]

    def end_ms(of_rank: Mapping[int, _Lasting], message_ms: Callable[[Message], float]) -> float:
        ends = [of_rank[rank][_BEFORE] for rank in range(parallel.degrees.pp)]
        for run in range(training_of(settings).accumulation):
            ends = finished_ms(orders_of(parallel), functools.partial(pass_ms, of_rank, run), message_ms, ends)
        return max(end + of_rank[rank][_AFTER] for rank, end in enumerate(ends))

    computed_ms = end_ms(alone, lambda _: 0.0)
    return max(end_ms(waiting, message_ms) - computed_ms, 0.0), max(computed_ms - step_ms, 0.0)


def _time_passes(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, parallel: Parallel) -> list[_Lasting]:
    part = trace.pipeline
    assert part is not None and part.passes, "a rank of a pipeline"
    step = time_step(trace, spec, settings)
    begins = begin_moments_ms(trace, spec, settings, step.busy_ms)
    collectives = [collective for collective in trace.collectives if collective.axis != PIPELINE]
    fabrics = fabrics_of(spec, parallel, [collective.axis for collective in collectives])
    lasts = [
        collective_s(collective.kind, collective.nbytes, fabrics[collective.axis]) * 1e3 for collective in collectives
    ]
    delays = delays_ms(collectives, lasts, begins)
    moments = [moment for moment, _ in delays]

    def late(moment: int) -> float:
        place = bisect.bisect_right(moments, moment)
        return delays[place - 1][1] if place else 0.0

    # A rank's pass continues until its next one begins.
    runs: Counter[tuple[str, int, int]] = Counter()
    keys = [_BEFORE]
    for part_pass in part.passes:
        key = part_pass.phase, part_pass.stage // parallel.degrees.pp, part_pass.micro_batch
        keys.append((*key, runs[key]))
        runs[key] += 1
    keys.append(_AFTER)
    edges = [0, *(part_pass.begin for part_pass in part.passes), part.end, len(begins) - 1]
    waiting = [0.0, *(begins[edge] + late(edge) for edge in edges[1:])]
    lasting = []
    for ends_ms in ([begins[edge] for edge in edges], waiting):
        # The host launches at the same time: moments of the GPU's own time are scaled to the step's.
        slower = overlap_times(ends_ms[-1], step.host_ms) / ends_ms[-1] if ends_ms[-1] else 1.0
        lasts_ms = np.diff([end * slower for end in ends_ms]).tolist()
        lasting.append(dict(zip(keys, lasts_ms, strict=True)))
    return lasting


def _moves_ms(sent: Sequence[int], spec: DeviceSpec, parallel: Parallel) -> list[float]:
    """Return the duration in ms of a message from each stage to the next one, and back."""
    fabric, times = replace(fabric_of(spec, parallel), ranks=2), []
    for stage, nbytes in enumerate(sent):
        firsts = [number % parallel.degrees.pp * parallel.of_stage for number in (stage, stage + 1)]
        ends = [(first, first + parallel.of_stage - 1) for first in firsts]
        nodes = [{rank // parallel.cluster.gpus_per_node for rank in pair} for pair in zip(*ends, strict=True)]
        times.append(collective_s(SEND, nbytes, replace(fabric, nodes=max(map(len, nodes)))) * 1e3)
    return times
