"""A training job traced, placed in a GPU's memory and priced there, without the model's memory ever being taken.

Start reading at `step_of`; `key_of` identifies a job, so that its trace and its answers are found again.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import os
import sys
import traceback
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import Pickler, PicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from conf.errors import UsageError, kept_from_exit
from conf.units import MIB
from featurize.device.device_spec import DeviceSpec, describe_device
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.recording.step_trace import BUCKET, COMMUNICATION, GATHERED, MASTER, UNREDUCED
from featurize.trace import trace_cache
from featurize.trace.later_steps import is_installed, names_in
from learn.job.training_job import TrainingJob, as_a_training_script

if TYPE_CHECKING:
    from featurize.memory.replay import MemoryProfile
    from featurize.recording.step_trace import StepTrace
    from featurize.timing.overlap import SimulatedStep
    from featurize.trace.trace_cache import Traces
    from featurize.trace.tracer import TraceError

    Build = Callable[[], nn.Module]


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
    job: TrainingJob,
    device: str | DeviceSpec,
    *,
    allocator: AllocatorSettings | None = None,
    timeline: bool = False,
    traces: Traces | None = None,
) -> TracedStep:
    """Trace a job's training step, replay its memory and price it on `device`.

    `timeline` keeps the allocator's state after every event in `memory.timeline`. `traces` are those of the job that
    the caller has at hand, and keeps. Raises `CannotTrace`, and
    `UsageError` for an invalid job: an unknown device, a factory that returns no module, an output without logits.
    """
    from featurize.memory.replay import outside_mib, replay
    from featurize.timing.overlap import ranks_of_stages, simulate

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


def trace_of(job: TrainingJob, spec: DeviceSpec, traces: Traces | None = None) -> StepTrace:
    """Return the trace of a job's training step: its own, the cache's, or one that is made now.

    Args:
        job: The job.
        spec: The GPU model.
        traces: Traces of the job that the caller has at hand, and keeps.

    Raises:
        UsageError: As `step_of`.
    """
    from featurize.trace import trace_cache
    from featurize.trace.tracer import TraceError, trace_step
    from featurize.training.training_step import multiplies_8_bits, require_8_bits

    trace = None if job.recorded is None else job.recorded()
    if trace is None:
        key, build = key_of(job)

        def made() -> StepTrace:
            return trace_step(
                build,
                None if job.batches else job.batch,
                loss=job.loss,
                device=spec,
                settings=job.settings,
                training_loop=job.training_loop,
                batches=job.batches,
                parallel=job.parallel,
            )

        try:
            trace = trace_cache.traced(key, spec, job.training_loop, made, traces)
        except TraceError as error:
            raise _explain(error) from error
    if multiplies_8_bits(trace.operators):
        require_8_bits(spec)
    return trace


_OF_RANKS = {
    "gathered parameters": GATHERED,
    "unreduced gradients": UNREDUCED,
    "communication buffers": COMMUNICATION,
    "gradient buckets": BUCKET,
    "master weights": MASTER,
}


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


def _explain(error: TraceError) -> CannotTrace:
    """With the line of the user's code, and with what may help."""
    cause = error.__cause__ or error
    message = str(cause).lower()
    frames = traceback.extract_tb(cause.__traceback__)
    root = Path(__file__).parents[2]
    ours = tuple(str(root / room) for room in ("conf", "featurize", "learn"))
    own_frames = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(ours)]
    where = f" (at {own_frames[-1].filename}:{own_frames[-1].lineno})" if own_frames else ""
    tokens = error.operator == "aten::embedding" and "long" in message
    hint = "; token ids are given with input_dtype=int64, or as an integer tensor" if tokens else ""
    return CannotTrace(f"{error}{where}{hint}", limit=isinstance(cause, NotImplementedError) or wants_values(message))


def wants_values(message: str) -> bool:
    """Return whether an error's text is about tensors without values, rather than about what the model does."""
    return any(word in message.lower() for word in ("meta", "fake", "datadependent", "data-dependent"))


_LARGEST_PARAMETER = 64  # elements, up to which a parameter's values count
_LARGEST_TENSOR = 2**20  # elements of other tensors, as `featurize.recording.values` keeps them
_MAPPINGS, _SETS = (dict, OrderedDict), (set, frozenset)
_NOT_OF_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_OF_PYTHON = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__", "_abc_impl")
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def key_of(job: TrainingJob) -> tuple[str | None, Build]:
    """Return a job's key, and what builds its model: a factory that was built for its key is not built again.

    A stale answer is worse than a slow one. So a key holds all that a trace follows from:

    - A trial config is its fields; one that names somebody's own code has no key.
    - A module is pickled into a hash: the classes of its parts with the bytecode of their functions and the globals
      that these name, what its parts hold, and the shapes of its parameters. Values of buffers, inputs and small
      parameters count, since models read them; no model is known to read a value of a large parameter.
    - A factory is built first, on meta, and then pickled: what it reads on the way (a file, a setting) shows in what it
      makes. Only one that an installed library holds under its own name is known by that name. A factory of a job on
      several GPUs has no key, unless it is a library's.
    - Code of installed libraries counts by its place, size and time of change; `forward` and what it names also by
      where it is defined, so that a replaced one is noticed.

    What pickle cannot write (an open file, a lock, a weak reference) has no key: such a job is traced each time.
    """
    from featurize.operators import attention
    from featurize.recording.skeleton import BuiltOnMeta, build_on_meta

    if job.key is not None or job.recorded is not None:
        return job.key or None, job.build
    if job.config is not None:
        return trace_cache.config_key(job.config, job.parallel), job.build
    if not job.given:
        return None, job.build
    model, *rest = job.given
    build = job.build
    if not isinstance(model, nn.Module) and not _is_of_library(model):
        if job.parallel is not None:  # a rank's factory builds in its rank's place
            return None, build
        try:
            with kept_from_exit(), as_a_training_script():
                model = attention.building(lambda: build_on_meta(job.build))
        except Exception:  # a factory may raise anything, and raises it again where it is traced
            return None, build
        if not isinstance(model, nn.Module):
            return None, build
        build = BuiltOnMeta(model, build)
    if (of_torch := trace_cache.torch_state()) is None:
        return None, build
    digest = hashlib.sha256()
    known = (model, rest, job.settings, repr(job.parallel), of_torch)
    try:
        _FingerprintPickler(types.SimpleNamespace(write=digest.update), protocol=5).dump(known)
    except Exception:  # somebody's object may raise anything as it is pickled
        return None, build
    return digest.hexdigest(), build


def _is_of_library(value: object) -> bool:
    """Return whether an installed library holds this function or class under its own name."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return is_installed(module) and vars(module).get(getattr(value, "__qualname__", "")) is value


@functools.cache
def _stamp(path: str) -> tuple[str, int, int]:
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def _rebuild_marker(*_: object) -> None:
    """Marker that is pickled in place of an object's constructor."""


class _FingerprintPickler(Pickler):
    """Pickler for fingerprints: tensors, functions and classes are reduced to what affects a trace."""

    def reducer_override(self, value: Any) -> Any:
        """Return what is written of an object, as `object.__reduce__` does."""
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, nn.Module):
            return copyreg.__newobj__, (type(value),), _order(vars(value))  # type: ignore[attr-defined]
        if isinstance(value, type):
            return _class(value)
        if isinstance(value, types.FunctionType):
            return NotImplemented if value is _rebuild_marker else _function(value)
        if isinstance(value, types.ModuleType):
            return _rebuild_marker, ("module", value.__name__)
        if isinstance(value, _BUILTINS):
            return _rebuild_marker, ("builtin", getattr(value, "__module__", None), value.__qualname__)
        if isinstance(value, types.MethodType):
            return _rebuild_marker, ("method",), (value.__func__, value.__self__)
        if isinstance(value, property):
            return _rebuild_marker, ("property",), (value.fget, value.fset)
        if isinstance(value, staticmethod | classmethod):
            return _rebuild_marker, ("method",), value.__func__
        if isinstance(value, types.MappingProxyType):
            return _rebuild_marker, ("mapping",), dict(value)
        return NotImplemented


def _tensor(value: Tensor) -> Any:
    if is_lazy(value) or value.layout is not torch.strided:
        raise PicklingError
    content = None
    largest = _LARGEST_PARAMETER if isinstance(value, nn.Parameter) else _LARGEST_TENSOR
    if value.numel() <= largest and not value.is_meta:
        held = value.detach().cpu()
        content = (held.float() if held.dtype in _NOT_OF_NUMPY else held).numpy().tobytes()
    shape = tuple(value.shape), value.stride(), value.dtype, value.device.type, value.requires_grad
    state = {name: attribute for name, attribute in value.__dict__.items() if not name.startswith("_backward")}
    # Their numbers are the process's: they count in their order.
    hooks = [
        list(registered.values())
        for registered in (value._backward_hooks, value._post_accumulate_grad_hooks)
        if registered
    ]
    return _rebuild_marker, (type(value).__qualname__, shape, content), (state, hooks) if state or hooks else None


def _class(kind: type) -> Any:
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    if not is_installed(module):
        state = {
            name: part
            for name, part in vars(kind).items()
            if name not in _OF_PYTHON and not isinstance(part, _DESCRIPTORS)
        }
        return _rebuild_marker, (kind.__module__, kind.__qualname__), (kind.__bases__, _order(state))
    forward = getattr(kind, "forward", None)
    own_forward = forward if isinstance(forward, types.FunctionType) else None
    return _rebuild_marker, (kind.__module__, kind.__qualname__, _stamp(path) if path else None), own_forward


def _function(function: types.FunctionType) -> Any:
    code = function.__code__
    named = {name: function.__globals__[name] for name in sorted(names_in(code)) if name in function.__globals__}
    if is_installed(sys.modules.get(function.__module__)):
        places = [(name, _place(value)) for name, value in named.items()]
        return _rebuild_marker, (code.co_filename, code.co_firstlineno, len(code.co_code), places)
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    of_modules = [
        (name, attribute, vars(value)[attribute])
        for name, value in named.items()
        if isinstance(value, types.ModuleType) and not is_installed(value)
        for attribute in sorted(names_in(code) & vars(value).keys())
    ]
    defaults = function.__defaults__, function.__kwdefaults__, vars(function)
    return _rebuild_marker, (_text_of(code),), (defaults, cells, _order(named), of_modules)


def _place(value: object) -> tuple[object, ...]:
    line = getattr(getattr(value, "__code__", None), "co_firstlineno", None)
    return getattr(value, "__module__", None), getattr(value, "__qualname__", None), line


def _order(values: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, Any]]]:
    """Return the names of empty mappings, which most of a module's values are, and the other values by name, sets as
    sorted lists."""
    empty, ordered = [], []
    for name, value in values.items():
        kind = type(value)
        if kind in _MAPPINGS and not value:
            empty.append(name)
        else:
            ordered.append((name, sorted(value, key=repr) if kind in _SETS else value))
    return _same(tuple(empty)), ordered


@functools.cache
def _same(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return equal names as one object, which is written once."""
    return names


@functools.cache
def _text_of(code: types.CodeType) -> str:
    constants = [
        _text_of(constant)
        if isinstance(constant, types.CodeType)
        else sorted(map(repr, constant))
        if isinstance(constant, frozenset)
        else repr(constant)
        for constant in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants))
