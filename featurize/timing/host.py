"""The host's time to launch the kernels of a step, by the framework that runs the job, and how far machines differ.

Start reading at `host_ms`; `learn.fitting.host_and_link_fit` fits the constants.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import COMPILED, EAGER, GRAPHS, MEGATRON, TrainingSettings, training_of
from featurize.recording.step_trace import StepTrace
from featurize.timing.calls import Calls
from featurize.timing.packaged import packaged_section


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """How long a framework's host takes.

    Args:
        factor: Time of a launch in forward and backward passes, modules and autograd included, over
            `launch_overhead_us` of the GPU's description. Of Megatron, time of a pass of one of its layers.
        machines: Factor by which 9 of 10 machines take at most longer, and at least shorter.
    """

    factor: float
    machines: float


@functools.cache
def packaged_hosts() -> Mapping[str, HostTime]:
    """Return framework -> the packaged constants. Raises `EnvironmentProblem` for a damaged file."""
    return packaged_section(
        "host", lambda hosts: {name: HostTime(**hosts[name]) for name in (EAGER, COMPILED, MEGATRON)}
    )


def framework_of(trace: StepTrace, settings: TrainingSettings) -> str:
    """Return what runs a job, one of `FRAMEWORKS`: what its settings say, else what such a layout usually runs under.

    Tensor and pipeline parallelism are taken to run under Megatron, unless the model is compiled. What Inductor
    launches is assumed to take `launch_overhead_us` each: no measured row has it.
    """
    training = training_of(settings)
    if training.framework is not None:
        return training.framework
    if training.compile:
        return COMPILED
    split = trace.pipeline is not None or any(one.axis == "tp" for one in trace.collectives)
    return MEGATRON if split else EAGER


def host_ms(calls: Calls, spec: DeviceSpec, framework: str, hosts: Mapping[str, HostTime] | None = None) -> float:
    """Return how long the host takes to launch the kernels of a step, in ms.

    Megatron's host takes its time in the Python of its own linear layers and norms. What these launch beside, and how
    attention is written, adds none: vTrain's steps of 2 to 12 launches a layer's pass wait for the host alike.

    Args:
        calls: The kernels of the step.
        spec: The GPU model; its `launch_overhead_us` is the time of a bare operator, as an optimizer's loop runs it.
        framework: One of `FRAMEWORKS`.
        hosts: Framework -> its constants; None: the packaged ones.
    """
    if framework == GRAPHS:
        return 0.0
    launches = _passes(calls) if framework == MEGATRON else calls.launches
    factor = (hosts or packaged_hosts())[framework].factor
    return (calls.updates + launches * factor) * spec.launch_overhead_us * 1e-3


def _passes(calls: Calls) -> float:
    """Return how often linear layers, convolutions and norms run, forward and backward; no attention's products."""
    own = [kind.startswith(("product", "convolution")) or "norm" in kind for kind in calls.kind]
    return float(calls.count[np.array(own) & (calls.batch == 1)].sum()) if own else 0.0


def machines_of(framework: str) -> float:
    """Return the factor by which 9 of 10 machines' host takes at most longer."""
    return 1.0 if framework == GRAPHS else packaged_hosts()[framework].machines
