"""A training job traced, placed in a GPU's memory and priced there, without the model's memory ever being taken.

Start reading at `step_of`. torch is imported on use.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import UsageError
from conf.units import MIB
from featurize.allocator_settings import AllocatorSettings
from featurize.device_spec import DeviceSpec, describe_device
from featurize.step_trace import BUCKET, COMMUNICATION, GATHERED, MASTER, UNREDUCED
from learn.workload import Workload

if TYPE_CHECKING:
    from featurize.replay import MemoryProfile
    from featurize.simulate import SimulatedStep
    from featurize.step_trace import StepTrace
    from featurize.trace import TraceError
    from featurize.trace_cache import Traces


class CannotTrace(UsageError):
    """The job cannot be traced: the message names the operator and the module where they are known.

    limit   the trace's own limit (it computes no values, and knows an operator only by its fake kernel): a method that
            runs the model for real may have an answer
    """

    def __init__(self, message: str, *, limit: bool) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True)
class TracedStep:
    """One traced step on one GPU model.

    breakdown   part -> MiB at the peak, which sum to `step.peak_memory_mib`. `fragmentation` is what the allocator
                reserves at its peak beyond the live tensors' own bytes, their rounding included
    communication_mib   what communication libraries keep outside the allocator
    of_ranks    number of a rank of a pipeline -> its memory; of the first one of each kind
    """

    trace: StepTrace
    memory: MemoryProfile
    step: SimulatedStep
    breakdown: Mapping[str, float]
    communication_mib: float = 0.0
    of_ranks: Mapping[int, MemoryProfile] = field(default_factory=dict)


def step_of(
    job: Workload,
    device: str | DeviceSpec,
    *,
    allocator: AllocatorSettings | None = None,
    timeline: bool = False,
    traces: Traces | None = None,
) -> TracedStep:
    """Trace a job's training step, replay its memory and price it on `device`.

    `timeline` keeps the allocator's state after every event in `memory.timeline`. `traces` are those of the job that
    the caller has at hand, and keeps. Raises `CannotTrace`, and
    `UsageError` for what is no job: an unknown device, a factory that gives no module, an output without logits.
    """
    from featurize.parallel.overlap import ranks_of_stages
    from featurize.replay import outside_mib, replay
    from featurize.simulate import simulate

    spec = describe_device(device)
    benchmark = job.settings.cudnn_benchmark

    def replayed(trace: StepTrace, timeline: bool) -> MemoryProfile:
        return replay(trace, spec, cudnn_benchmark=benchmark, allocator=allocator, timeline=timeline)

    trace = trace_of(job, spec, traces)
    groups = () if trace.pipeline is None else trace.pipeline.groups
    of_ranks = {group.ranks[0]: replayed(group.trace, False) for group in groups}
    if groups:
        worst = max(of_ranks, key=lambda rank: (of_ranks[rank].peak_reserved, of_ranks[rank].peak_allocated))
        trace = ranks_of_stages(trace)[worst]
    memory = replayed(trace, timeline) if timeline or not groups else of_ranks[worst]
    step = simulate(trace, spec, job.settings, memory=memory)
    return TracedStep(trace, memory, step, breakdown(memory, outside_mib(trace, spec)), of_ranks=of_ranks)


def trace_of(job: Workload, spec: DeviceSpec, traces: Traces | None = None) -> StepTrace:
    """Return the trace of a job's training step: its own, the cache's, or one that is made now.

    Args:
        job: The job.
        spec: The GPU model.
        traces: Traces of the job that the caller has at hand, and keeps.

    Raises:
        UsageError: As `step_of`.
        featurize.trace_cache.NotTraced: The job is not known, and nothing may be traced.
    """
    from featurize import trace_cache
    from featurize.float8 import multiplies_8_bits, require_8_bits
    from featurize.trace import TraceError, trace_step
    from learn.estimation.job_key import key_of

    trace = job.recorded
    if trace is None:
        key, build = key_of(job)

        def made() -> StepTrace:
            return trace_step(
                build, None if job.batches else job.batch, loss=job.loss, device=spec, settings=job.settings,
                training_loop=job.training_loop, batches=job.batches, parallel=job.parallel,
            )  # fmt: skip

        try:
            trace = trace_cache.traced(key, spec, job.training_loop, made, traces)
        except TraceError as error:
            raise _explained(error) from error
    if multiplies_8_bits(trace.operators):
        require_8_bits(spec)
    return trace


_OF_RANKS = {
    "gathered parameters": GATHERED, "unreduced gradients": UNREDUCED, "communication buffers": COMMUNICATION,
    "gradient buckets": BUCKET, "master weights": MASTER,
}  # fmt: skip


def breakdown(
    memory: MemoryProfile, outside_mib: float, others_mib: float = 0.0, communication_mib: float = 0.0
) -> dict[str, float]:
    """Return part -> MiB at the peak. `outside_mib`: the process's memory outside the allocator. `others_mib`, what
    others hold on the card, `communication_mib`, what communication libraries hold, and what wrappers of several ranks
    keep are parts only where they are more than nothing."""
    live = {kind: nbytes / MIB for kind, nbytes in memory.peak_parts.items()}
    return {
        "parameters": live["parameter"],
        "gradients": live["gradient"],
        **{name: live[kind] for name, kind in _OF_RANKS.items() if kind in live},
        "optimizer state": live["optimizer_state"],
        "activations": live["activation"],
        "temporaries": live["temporary"],
        "buffers and batch": live["buffer"] + live["batch"],
        "workspace": live["workspace"],
        "fragmentation": memory.peak_reserved / MIB - sum(live.values()),
        "context": outside_mib,
        **({"communication": communication_mib} if communication_mib else {}),
        **({"other users": others_mib} if others_mib else {}),
    }


def _explained(error: TraceError) -> CannotTrace:
    """With the line of the user's code, and with what may help."""
    cause = error.__cause__ or error
    message = str(cause).lower()
    frames = traceback.extract_tb(cause.__traceback__)
    root = Path(__file__).parent.parent
    ours = tuple(str(root / room) for room in ("conf", "featurize", "learn"))
    own = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(ours)]
    where = f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""
    tokens = error.operator == "aten::embedding" and "long" in message
    hint = "; token ids are given with input_dtype=int64, or as an integer tensor" if tokens else ""
    return CannotTrace(f"{error}{where}{hint}", limit=isinstance(cause, NotImplementedError) or wants_values(message))


def wants_values(message: str) -> bool:
    """Whether an error's text is about tensors without values, rather than about what the model does."""
    return any(word in message.lower() for word in ("meta", "fake", "datadependent", "data-dependent"))
