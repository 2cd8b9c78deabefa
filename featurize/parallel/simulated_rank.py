"""What one rank of a job would show of a traced step: `featurize.simulate`, with what the ranks add to it.

Start reading at `simulate_rank`; `ranks_of_stages` has the other ranks of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from featurize.device_spec import DeviceSpec
from featurize.parallel.collectives import communicators_mib
from featurize.parallel.layout import Parallel
from featurize.parallel.overlap import Communication, communication_of, lengthened
from featurize.replay import MemoryProfile
from featurize.simulate import SimulatedStep, simulate
from featurize.step_trace import StepTrace
from featurize.training_settings import TrainingSettings


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
        trace: Of a job on several GPUs.
        memory: A replay of the trace that is at hand already.

    Raises:
        UsageError: The GPU model's description says nothing of what joins the GPUs.
    """
    step = simulate(trace, spec, settings, memory=memory)
    talk = communication_of(trace, spec, settings, layout, step.step_time_ms)
    peak_mib = step.peak_memory_mib + communicators_mib(spec, layout, (one.axis for one in trace.collectives))
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
