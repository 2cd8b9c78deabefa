"""Simulated figures of one traced training step on a device: memory, time, utilization, power.

Start reading at `simulate`. Memory is `featurize.memory.replay`'s, the rest `featurize.timing`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import Training, TrainingSettings
from featurize.memory.replay import MemoryProfile, outside_mib, replay
from featurize.recording.step_trace import StepTrace
from featurize.timing.step_time import time_step


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
) -> SimulatedStep:
    """Price a traced step on one GPU model. `settings` are the trace's own, fp32 by default: operators on fp32 tensors
    run in TF32 where the precision allows it.

    Memory: live blocks rounded to 512 bytes (`peak_allocated_mib`), in the caching allocator's segments
    (`peak_reserved_mib`), plus context and libraries (`peak_memory_mib`); `memory` is a replay that is at hand already.
    Time, utilization and power: `featurize.timing`, with `input_ms` a step for the input pipeline.
    """
    if memory is None:
        memory = replay(trace, spec, cudnn_benchmark=settings is not None and settings.cudnn_benchmark)
    settings = settings or Training()
    timed = time_step(trace, spec, settings, input_ms=input_ms)
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
