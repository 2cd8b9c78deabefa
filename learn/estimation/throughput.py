"""What follows from a step's time: samples and tokens a second, model FLOPs utilization, energy.

Start reading at `throughput_of`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from featurize.device_spec import DeviceSpec
from featurize.model_flops import seconds_at_peak
from featurize.training_settings import TrainingSettings, training_of
from learn.workload import Workload

if TYPE_CHECKING:
    from featurize.step_trace import StepTrace
    from learn.traced import TracedStep


class Throughput(TypedDict):
    """The fields of `Estimate` that follow from a step's time."""

    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    energy_j: float | None


def throughput_of(
    traced: TracedStep, job: Workload, device: DeviceSpec, *, step_time_ms: float | None, power_w: float
) -> Throughput:
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
        return Throughput(samples_per_s=None, tokens_per_s=None, mfu=None, energy_j=None)
    step_s = step_time_ms / 1e3
    micro_steps = training_of(job.settings).accumulation
    tokens = tokens_of(job, traced.trace)
    replicas = 1 if job.parallel is None else job.parallel.replicas
    at_peak_s = _at_peak_s(traced.trace, device, job.settings)
    return Throughput(
        samples_per_s=replicas * micro_steps * job.batch_size / step_s,
        tokens_per_s=None if tokens is None else replicas * micro_steps * tokens / step_s,
        mfu=None if at_peak_s is None else at_peak_s / step_s,
        energy_j=power_w * step_s,
    )


def _at_peak_s(trace: StepTrace, device: DeviceSpec, settings: TrainingSettings) -> float | None:
    """Seconds of a GPU's products at the peak rate; the mean over the ranks of a pipeline, which share the model."""
    groups = () if trace.pipeline is None else trace.pipeline.groups
    if not groups:
        return seconds_at_peak(trace, device, settings)
    seconds = [(seconds_at_peak(group.trace, device, settings), len(group.ranks)) for group in groups]
    known = [(one, count) for one, count in seconds if one is not None]
    return sum(one * count for one, count in known) / sum(count for _, count in known) if known else None


def tokens_of(job: Workload, trace: StepTrace) -> int | None:
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
