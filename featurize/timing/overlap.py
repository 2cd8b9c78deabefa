"""Simulated figures of a traced training step on a device: memory, time, utilization, power, and communication.

Start reading at `simulate` for one GPU, and at `simulate_rank` for a rank that waits for others: `communication_of`
says how much of its communication computation hides. Memory is `featurize.memory.replay`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training, TrainingSettings
from featurize.memory.replay import MemoryProfile, outside_mib, replay
from featurize.recording.step_trace import StepTrace
from featurize.timing.collectives import collective_s, communicators_mib, fabrics_of, sent_bytes
from featurize.timing.step_time import begin_moments_ms, delays_ms, overlapped, time_step


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """MiB, ms, W; ratios in [0, 1]. Memory is the need, also where it does not fit; `fits` False means `oom`."""

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


def simulate(
    trace: StepTrace,
    spec: DeviceSpec,
    settings: TrainingSettings | None = None,
    *,
    memory: MemoryProfile | None = None,
    input_ms: float = 0.0,
    beside: Iterable[DeviceSpec] = (),
) -> SimulatedStep:
    """Price a traced step on one GPU model. `settings` are the trace's own, fp32 by default: operators on fp32 tensors
    run in TF32 where the precision allows it.

    Memory: live blocks rounded to 512 bytes (`peak_allocated_mib`), in the caching allocator's segments
    (`peak_reserved_mib`), plus context and libraries (`peak_memory_mib`); `memory` is a replay that is at hand already.
    Time, utilization and power: `featurize.timing`, with `input_ms` a step for the input pipeline, and
    `beside` as `time_step` has it.
    """
    if memory is None:
        memory = replay(trace, spec, cudnn_benchmark=settings is not None and settings.cudnn_benchmark)
    settings = settings or Training()
    timed = time_step(trace, spec, settings, input_ms=input_ms, beside=beside)
    return SimulatedStep(
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


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Communication between the ranks of a job in a step.

    busy_ms      time of the collectives themselves, one after the other
    exposed_ms   time by which they make the step longer
    bubble_ms    time in which a rank of a pipeline waits for stages that compute, however quick its messages are
    sent_mib     kind of collective -> MiB that a rank sends
    """

    busy_ms: float
    exposed_ms: float
    sent_mib: Mapping[str, float]
    bubble_ms: float = 0.0

    @property
    def waits_ms(self) -> float:
        """All that a rank waits for others."""
        return self.exposed_ms + self.bubble_ms


def communication_of(
    trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, parallel: Parallel, step_ms: float
) -> Communication:
    """Return a traced step's communication.

    A collective runs beside the kernels on a stream of its own, from the moment at which its tensor is complete, and
    slows no kernel. That the two share the GPU and its memory is left out. The host launches on while kernels wait:
    of a step that it bounds, they wait within its time.

    Args:
        trace: A job's step on several GPUs.
        spec: The GPU model.
        settings: The trace's own.
        parallel: The job's layout.
        step_ms: The step's time without communication.
    """
    fabrics = fabrics_of(spec, parallel, [collective.axis for collective in trace.collectives])
    lasts_ms = [
        collective_s(collective.kind, collective.nbytes, fabrics[collective.axis]) * 1e3
        for collective in trace.collectives
    ]
    sent_mib: dict[str, float] = defaultdict(float)
    for collective in trace.collectives:
        sent_mib[collective.kind] += (
            sent_bytes(collective.kind, collective.nbytes, fabrics[collective.axis].ranks) / MIB
        )
    if trace.pipeline is not None and trace.pipeline.groups:
        from featurize.timing.pipeline_time import waits_of  # its imports take a second

        waits = waits_of(trace.pipeline, spec, settings, parallel, step_ms)
        return Communication(busy_ms=sum(lasts_ms), sent_mib=dict(sent_mib), **waits)
    of_rank = time_step(trace, spec, settings)
    delays = delays_ms(trace.collectives, lasts_ms, begin_moments_ms(trace, spec, settings, of_rank.busy_ms))
    late_ms = delays[-1][1] if delays else 0.0
    waits_ms = overlapped(of_rank.busy_ms + late_ms, of_rank.host_ms) - overlapped(of_rank.busy_ms, of_rank.host_ms)
    return Communication(busy_ms=sum(lasts_ms), exposed_ms=waits_ms, sent_mib=dict(sent_mib))


def lengthened(step: SimulatedStep, talk: Communication | None, device: DeviceSpec) -> SimulatedStep:
    """Return a step that also waits for its communication, during which the GPU's units are taken to be idle."""
    if talk is None or not step.step_time_ms:
        return step
    total_ms = step.step_time_ms + talk.waits_ms
    share = step.step_time_ms / total_ms
    return replace(
        step,
        step_time_ms=total_ms,
        step_time_upper_ms=step.step_time_upper_ms + talk.waits_ms,
        smact=step.smact * share,
        smocc=step.smocc * share,
        drama=step.drama * share,
        gpu_util=step.gpu_util * share,
        power_w=device.idle_power_w + (step.power_w - device.idle_power_w) * share,
        bound_by="communication" if talk.exposed_ms > step.step_time_ms else step.bound_by,
    )


@dataclass(frozen=True)
class RankStep:
    """A rank's step with its waiting for others, and its memory with what the communication library keeps."""

    step: SimulatedStep
    talk: Communication


def simulate_rank(
    trace: StepTrace,
    spec: DeviceSpec,
    settings: TrainingSettings,
    layout: Parallel,
    *,
    memory: MemoryProfile | None = None,
) -> RankStep:
    """Price the traced step of a rank.

    Args:
        trace: Trace of a job on several GPUs.
        memory: A replay of the trace that is at hand already.

    Raises:
        UsageError: The GPU model's description says nothing of what joins the GPUs.
    """
    step = simulate(trace, spec, settings, memory=memory)
    talk = communication_of(trace, spec, settings, layout, step.step_time_ms)
    peak_mib = step.peak_memory_mib + communicators_mib(
        spec, layout, (collective.axis for collective in trace.collectives)
    )
    fits = step.fits and peak_mib <= spec.memory_mib
    return RankStep(replace(lengthened(step, talk, spec), peak_memory_mib=peak_mib, fits=fits), talk)


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
