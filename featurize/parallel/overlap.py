"""What of a step's communication its computation hides, and what it waits for.

Start reading at `communication_of`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from conf.units import MIB
from featurize.device_spec import DeviceSpec
from featurize.kernel_model.step_time import overlapped, time_step
from featurize.parallel.collectives import collective_s, fabrics_of, sent_bytes
from featurize.parallel.delays import begin_moments_ms, exposed_ms
from featurize.parallel.layout import Parallel
from featurize.step_trace import StepTrace
from featurize.training_settings import TrainingSettings

if TYPE_CHECKING:
    from featurize.simulate import SimulatedStep


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What the ranks of a job tell each other in a step.

    busy_ms      of the collectives themselves, one after the other
    exposed_ms   by which they make the step longer
    bubble_ms    in which a rank of a pipeline waits for stages that compute, however quick its messages are
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
    """Return what a traced step's communication takes.

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
    fabrics = fabrics_of(spec, parallel, [one.axis for one in trace.collectives])
    lasts_ms = [collective_s(one.kind, one.nbytes, fabrics[one.axis]) * 1e3 for one in trace.collectives]
    sent_mib: dict[str, float] = defaultdict(float)
    for one in trace.collectives:
        sent_mib[one.kind] += sent_bytes(one.kind, one.nbytes, fabrics[one.axis].ranks) / MIB
    if trace.pipeline is not None and trace.pipeline.groups:
        from featurize.parallel.pipeline_step import waits_of  # its imports take a second

        waits = waits_of(trace.pipeline, spec, settings, parallel, step_ms)
        return Communication(busy_ms=sum(lasts_ms), sent_mib=dict(sent_mib), **waits)
    own = time_step(trace, spec, settings)
    late_ms = exposed_ms(trace.collectives, lasts_ms, begin_moments_ms(trace, spec, settings, own.busy_ms))
    waits_ms = overlapped(own.busy_ms + late_ms, own.host_ms) - overlapped(own.busy_ms, own.host_ms)
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
