"""Simulated figures of a traced training step on a device: memory, time, utilization, power, and communication.

Start reading at `simulate`, for one GPU or a rank that waits for others: `communication_of` says how much of its
communication computation hides. Memory is `featurize.memory.replay`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training, TrainingSettings
from featurize.memory.replay import MemoryProfile, outside_mib, replay
from featurize.recording.step_trace import StepTrace
from featurize.timing.collectives import collective_s, communicators_mib, fabrics_of, sent_bytes
from featurize.timing.step_time import begin_moments_ms, delays_ms, overlapped, time_step


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Communication between the ranks of a job in a step; nothing of a job on one GPU.

    busy_ms      time of the collectives themselves, one after the other
    exposed_ms   time by which they make the step longer
    bubble_ms    time in which a rank of a pipeline waits for stages that compute, however quick its messages are
    sent_mib     kind of collective -> MiB that a rank sends
    buffers_mib  what communication libraries keep outside the allocator
    """

    busy_ms: float = 0.0
    exposed_ms: float = 0.0
    bubble_ms: float = 0.0
    sent_mib: Mapping[str, float] = field(default_factory=dict)
    buffers_mib: float = 0.0

    @property
    def waits_ms(self) -> float:
        """All that a rank waits for others."""
        return self.exposed_ms + self.bubble_ms


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """MiB, ms, W; ratios in [0, 1]. Memory is the need, also where it does not fit; `fits` False means `oom`.

    A rank's step also waits for its `communication`, during which the GPU's units are taken to be idle.
    """

    parameters: int
    peak_allocated_mib: float
    peak_reserved_mib: float
    peak_memory_mib: float
    fits: bool
    step_time_ms: float
    step_time_upper_ms: float  # what 90 of 100 measured steps stay below
    smact: float
    smocc: float
    drama: float
    gpu_util: float
    power_w: float
    bound_by: str = "gpu"  # or the host, the input, communication: what takes the longest
    communication: Communication = field(default_factory=Communication)


def simulate(
    trace: StepTrace,
    spec: DeviceSpec,
    settings: TrainingSettings | None = None,
    *,
    layout: Parallel | None = None,
    memory: MemoryProfile | None = None,
    communication: Communication | None = None,
    input_ms: float = 0.0,
    beside: Iterable[DeviceSpec] = (),
) -> SimulatedStep:
    """Price a traced step on one GPU model. `settings` are the trace's own, fp32 by default: operators on fp32 tensors
    run in TF32 where the precision allows it. With the `layout` of a job on several GPUs, the step is a rank's.

    Memory: live blocks rounded to 512 bytes (`peak_allocated_mib`), in the caching allocator's segments
    (`peak_reserved_mib`), plus context and libraries (`peak_memory_mib`). `memory` is a replay that is at hand already,
    and `communication` that of the same step in another loop.
    Time, utilization and power: `featurize.timing`, with `input_ms` a step for the input pipeline, and
    `beside` as `time_step` has it.

    Raises:
        UsageError: The GPU model's description says nothing of what joins the GPUs of a layout.
    """
    if memory is None:
        memory = replay(trace, spec, cudnn_benchmark=settings is not None and settings.cudnn_benchmark)
    settings = settings or Training()
    timed = time_step(trace, spec, settings, input_ms=input_ms, beside=beside)
    step = SimulatedStep(
        parameters=trace.parameters,
        peak_allocated_mib=memory.peak_allocated / MIB,
        peak_reserved_mib=memory.peak_reserved / MIB,
        peak_memory_mib=memory.peak_reserved / MIB + outside_mib(trace, spec),
        fits=memory.fits,
        step_time_ms=timed.step_time_ms,
        step_time_upper_ms=timed.upper_ms(),
        smact=timed.activity.smact,
        smocc=timed.activity.smocc,
        drama=timed.activity.drama,
        gpu_util=timed.activity.gpu_util,
        power_w=timed.activity.power_w,
        bound_by=timed.bound_by,
    )
    if layout is None:
        return step
    communication = communication or communication_of(trace, spec, settings, layout)
    total_ms = step.step_time_ms + communication.waits_ms
    share = step.step_time_ms / total_ms
    peak_mib = step.peak_memory_mib + communication.buffers_mib
    return replace(
        step,
        peak_memory_mib=peak_mib,
        fits=step.fits and peak_mib <= spec.memory_mib,
        step_time_ms=total_ms,
        step_time_upper_ms=step.step_time_upper_ms + communication.waits_ms,
        smact=step.smact * share,
        smocc=step.smocc * share,
        drama=step.drama * share,
        gpu_util=step.gpu_util * share,
        power_w=spec.idle_power_w + (step.power_w - spec.idle_power_w) * share,
        bound_by="communication" if communication.exposed_ms > step.step_time_ms else step.bound_by,
        communication=communication,
    )


def communication_of(
    trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, parallel: Parallel
) -> Communication:
    """Return a traced step's communication, which is the same in any loop.

    A collective runs beside the kernels on a stream of its own, from the moment at which its tensor is complete, and
    slows no kernel. That the two share the GPU and its memory is left out. The host launches on while kernels wait:
    of a step that it bounds, they wait within its time.

    Args:
        trace: A job's step on several GPUs.
        spec: The GPU model.
        settings: The trace's own.
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
    waits_ms = overlapped(of_rank.busy_ms + late_ms, of_rank.host_ms) - overlapped(of_rank.busy_ms, of_rank.host_ms)
    return replace(communication, exposed_ms=waits_ms)


def ranks_of_stages(trace: StepTrace) -> Mapping[int, StepTrace]:
    """Return the trace of each rank of `pp`, by its number; of a job without a pipeline that of rank 0 alone."""
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
