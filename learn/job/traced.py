"""The traced step of a training job, placed in a GPU's memory and priced there; the model never takes real memory.

Start reading at `step_of`; `key_of` identifies a job, to find its trace and its answers again.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from conf.errors import CommandError, UsageError, kept_from_exit
from featurize.device.device_spec import DeviceSpec, UnsuitableDevice, describe_device
from featurize.memory.allocator import AllocatorSettings
from featurize.operators.table import SCALED_PRODUCT
from featurize.trace import trace_cache
from featurize.trace.trace_cache import Fingerprint, is_installed
from learn.job.training_job import TrainingJob, as_a_training_script

if TYPE_CHECKING:
    from featurize.recording.step_trace import StepTrace
    from featurize.timing.simulation import SimulatedStep
    from featurize.trace.trace_cache import Traces
    from featurize.trace.tracer import TraceError

    Build = Callable[[], nn.Module]


class CannotTrace(UsageError):
    """The job cannot be traced: the message names the operator and the module where they are known.

    limit   whether the trace's own limit is the reason (it computes no values, and knows an operator only by its fake
            kernel): a method that runs the model may have an answer
    """

    def __init__(self, message: str, *, limit: bool) -> None:
        super().__init__(message)
        self.limit = limit


def step_of(
    job: TrainingJob,
    device: str | DeviceSpec,
    *,
    allocator: AllocatorSettings | None = None,
    timeline: bool = False,
    traces: Traces | None = None,
) -> SimulatedStep:
    """Trace a job's training step, replay its memory and price it on `device`. Args as in `steps_of`.

    Raises `CannotTrace`, and `UsageError` for an invalid job: an unknown device, a factory that does not return a
    module, an output without logits.
    """
    (step,) = steps_of(job, [describe_device(device)], allocator=allocator, timeline=timeline, traces=traces)
    if isinstance(step, CommandError):
        raise step
    return step


def steps_of(
    job: TrainingJob,
    specs: Sequence[DeviceSpec],
    *,
    allocator: AllocatorSettings | None = None,
    timeline: bool = False,
    traces: Traces | None = None,
) -> list[SimulatedStep | CommandError]:
    """Return a job's step on each GPU model: traced, its memory replayed, and priced; or the error of `step_of`.

    Args:
        job: The job.
        specs: The GPU models. Those that share a trace are priced together; a job that cannot be traced on the first
            one, for a reason that is not the GPU model's, is not traced again.
        allocator: Settings of the caching allocator.
        timeline: Whether to keep the allocator's state after every event in `memory.timeline`.
        traces: The job's traces that the caller keeps.
    """
    from featurize.timing.simulation import time_steps

    steps: dict[DeviceSpec, SimulatedStep | CommandError] = {}
    alike: dict[int, tuple[StepTrace, list[DeviceSpec]]] = {}
    for spec in specs:
        try:
            trace = trace_of(job, spec, traces)
        except CommandError as error:
            if spec is specs[0] and not isinstance(error, UnsuitableDevice):
                return [error for _ in specs]
            steps[spec] = error
        else:
            alike.setdefault(id(trace), (trace, []))[1].append(spec)
    for trace, on in alike.values():
        if trace.pipeline is None:
            time_steps(trace, on, job.settings)  # in one pass, which each step reads
        for spec in on:
            try:
                steps[spec] = _simulate(job, trace, spec, allocator, timeline)
            except CommandError as error:
                steps[spec] = error
    return [steps[spec] for spec in specs]


def _simulate(
    job: TrainingJob, trace: StepTrace, spec: DeviceSpec, allocator: AllocatorSettings | None, timeline: bool
) -> SimulatedStep:
    """Replay and price a traced step on one GPU model; of a pipeline, that of the rank that needs the most memory."""
    from featurize.memory.replay import replay
    from featurize.timing.simulation import ranks_of_stages, simulate

    on_card = partial(replay, spec=spec, cudnn_benchmark=job.settings.cudnn_benchmark, allocator=allocator)
    on_rank = partial(simulate, spec=spec, settings=job.settings, layout=job.parallel)
    groups = () if trace.pipeline is None else trace.pipeline.groups
    if not groups:
        return on_rank(trace, memory=on_card(trace, timeline=timeline))
    of_ranks = {group.ranks[0]: on_card(group.trace) for group in groups}
    worst = max(of_ranks, key=lambda rank: (of_ranks[rank].peak_reserved, of_ranks[rank].peak_allocated))
    trace = ranks_of_stages(trace)[worst]
    step = on_rank(trace, memory=on_card(trace, timeline=True) if timeline else of_ranks[worst])
    return replace(step, of_ranks=of_ranks)


def trace_of(job: TrainingJob, spec: DeviceSpec, traces: Traces | None = None) -> StepTrace:
    """Return the trace of a job's training step: the recorded one, the cache's, or a new one.

    Args:
        job: The job.
        spec: The GPU model.
        traces: Traces of the job that the caller keeps.

    Raises:
        UsageError: As `step_of`.
    """
    from featurize.trace.tracer import TraceError, trace_step
    from featurize.training.training_step import multiplies_8_bits, require_8_bits

    trace = None if job.recorded is None else job.recorded()
    if trace is None:
        key, build = key_of(job)
        given = job.given[0] if job.given and job.parallel is None else None
        model = given if isinstance(given, nn.Module) else build

        def make_trace() -> StepTrace:
            return trace_step(
                model,
                None if job.batches else job.batch,
                loss=job.loss,
                device=spec,
                settings=job.settings,
                training_loop=job.training_loop,
                batches=job.batches,
                parallel=job.parallel,
            )

        try:
            trace = trace_cache.traced(key, spec, job.training_loop, make_trace, traces)
        except TraceError as error:
            raise _explain(error) from error
    if trace.remembered("8-bit products", lambda: multiplies_8_bits(trace.operators)):
        require_8_bits(spec)
    return trace


def _explain(error: TraceError) -> CannotTrace:
    """Return the error with the line of the user's code, and with advice."""
    cause = error.__cause__ or error
    message = str(cause).lower()
    frames = traceback.extract_tb(cause.__traceback__)
    root = Path(__file__).parents[2]
    ours = tuple(str(root / room) for room in ("conf", "featurize", "learn"))
    own_frames = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(ours)]
    where = f" (at {own_frames[-1].filename}:{own_frames[-1].lineno})" if own_frames else ""
    hint = ""
    if error.operator == "aten::embedding" and "long" in message:
        hint = "; token ids are given with input_dtype=int64, or as an integer tensor"
    elif error.operator == SCALED_PRODUCT and "divisible" in message:
        hint = (
            "; products of 8-bit floats sum over multiples of 16 tokens (batch times length): choose another batch, "
            "length or number of micro-batches, or float8=rowwise_with_gw_hp"
        )
    return CannotTrace(f"{error}{where}{hint}", limit=isinstance(cause, NotImplementedError) or wants_values(message))


def wants_values(message: str) -> bool:
    """Return whether an error's text is about tensors without values, not about the model."""
    return any(word in message.lower() for word in ("meta", "fake", "datadependent", "data-dependent"))


def key_of(job: TrainingJob) -> tuple[str | None, Build]:
    """Return a job's key, and a builder of its model: a factory that was called for the key is not called again.

    A stale answer is worse than a slow one. A key therefore covers all that a trace depends on:

    - A trial config is keyed by its fields; one that names third-party code has no key.
    - A module is pickled into a hash: the classes of its parts with the bytecode of their functions and the globals
      that these name, the attributes of its parts, and the shapes of its parameters. Values of buffers, inputs and
      small parameters count, since models read them; no model is known to read a value of a large parameter.
    - A factory is called first, on meta, and its module pickled: whatever it reads (a file, a setting) shows there.
      Only a factory that an installed library holds under its own name is keyed by that name. A factory of a job on
      several GPUs has no key, unless it is a library's.
    - Code of installed libraries counts by its place, size and time of change; `forward` and the code that it names
      also by the place of its definition, so that a replaced function is noticed.

    Objects that pickle cannot write (an open file, a lock, a weak reference) have no key: such a job is always traced.
    """
    from featurize.operators.cuda_policy import build_with_flash_attn
    from featurize.recording.skeleton import BuiltOnMeta, build_on_meta

    if job.key is not None or job.recorded is not None:
        return job.key or None, job.build
    if job.config is not None:
        return trace_cache.config_key(job.config, job.parallel), job.build
    if not job.given:
        return None, job.build
    model, *inputs = job.given
    build = job.build
    if not isinstance(model, nn.Module) and not _is_of_library(model):
        if job.parallel is not None:  # a rank's factory builds in its rank's place
            return None, build
        try:
            with kept_from_exit(), as_a_training_script():
                model = build_with_flash_attn(lambda: build_on_meta(job.build))
        except Exception:  # a factory may raise anything; it raises it again where it is traced
            return None, build
        if not isinstance(model, nn.Module):
            return None, build
        build = BuiltOnMeta(model, build)
    if (of_torch := trace_cache.torch_state()) is None:
        return None, build
    try:
        identify = trace_cache.fingerprint_of if isinstance(model, nn.Module) else Fingerprint().of
        return identify(model, inputs, job.settings, repr(job.parallel), of_torch), build
    except Exception:  # third-party objects may raise anything while they are pickled
        return None, build


def _is_of_library(value: object) -> bool:
    """Return whether an installed library holds this function or class under its own name."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return is_installed(module) and vars(module).get(getattr(value, "__qualname__", "")) is value
