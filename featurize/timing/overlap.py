"""Simulated figures of a traced training step on a device: memory, time, utilization, power, and communication.

Start reading at `simulate`, for one GPU or a rank that waits for others: `communication_of` returns the part of its
communication that computation does not hide. Memory is `featurize.memory.replay`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training, TrainingSettings
from featurize.memory.replay import MemoryProfile, outside_mib, replay
from featurize.recording.step_trace import BUCKET, COMMUNICATION, GATHERED, MASTER, UNREDUCED, StepTrace
from featurize.timing.activity import StepActivity
from featurize.timing.collectives import collective_s, communicators_mib, fabrics_of, sent_bytes
from featurize.timing.step_time import TimedStep, begin_moments_ms, delays_ms, overlap_times, time_step


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

    @cached_property
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
        from featurize.timing.pipeline_time import waits_of  # its imports take a second

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
