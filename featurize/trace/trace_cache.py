"""Traces of steps that were traced before: in this process, and on disk for all processes of this user.

Start reading at `traced`. A stale trace is worse than a slow one, so a key holds everything that a trace depends on:
`config_key` for trial configs, `learn.job.traced` for modules. A job that no text can identify has no key; its traces
live only as long as their owner. On disk a trace is JSON, checked value by value when read (`trace_of_json`), since its
writer could have written anything; traces of pipelines and of batches of several shapes have no such form.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, get_args, get_type_hints

from conf.files.disk_cache import keep, recall
from conf.files.identity import canonical_json
from conf.plain_text import one_line
from featurize.configs.trial import code_fields, data_refusal
from featurize.cudnn.signature import require_signature
from featurize.device.device_spec import DeviceSpec
from featurize.recording.step_trace import (
    BLOCK_KINDS,
    BUCKET,
    COMMUNICATION,
    GATHERED,
    MASTER,
    PHASES,
    UNREDUCED,
    StepTrace,
)
from featurize.timing.collectives import KINDS

if TYPE_CHECKING:
    from featurize.device.device_spec import AttentionKernels
    from featurize.job.training_settings import TrialConfig
    from featurize.recording.step_trace import StepTrace

    Traces: TypeAlias = dict[tuple[AttentionKernels, bool], StepTrace]


MOST_EVENTS = 500_000  # events of all traces in memory: some 150 MB
_jobs: OrderedDict[str, Traces] = OrderedDict()  # the one asked for last comes last
_held_events = 0  # of these traces


def config_key(config: TrialConfig, parallel: object = None) -> str | None:
    """Return the text that identifies a trial config's step; None where it names somebody's own code, which
    may change."""
    state = torch_state()
    if state is None or (code_fields(config.family) and data_refusal(config) is not None):
        return None
    return f"{canonical_json(config.to_mapping())} {parallel!r} {state}"


def torch_state() -> str | None:
    """Return the settings of torch and timm in this process that a trace may depend on, as text. None if hooks for all
    modules are installed, since their code cannot be fingerprinted."""
    import torch
    from torch.nn.modules import module

    if module._has_any_global_hook():
        return None
    of_timm = sys.modules.get("timm.layers.config")
    fused = os.environ.get("TIMM_FUSED_ATTN", 1) if of_timm is None else of_timm._USE_FUSED_ATTN
    cuda = torch.backends.cuda
    sdp = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    flags = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )
    return f"{torch.get_default_dtype()} {torch.get_float32_matmul_precision()} {sdp} {flags} {fused}"


def traced(
    key: str | None, spec: DeviceSpec, training_loop: bool, trace: Callable[[], StepTrace], kept: Traces | None = None
) -> StepTrace:
    """Return a job's trace: from memory, from disk, or as `trace` makes it now.

    Args:
        key: The job's key; None: only `kept` is searched.
        spec: The GPU model. Models whose attention kernels are alike for the job share a trace.
        training_loop: As in `featurize.trace.tracer.trace_step`.
        trace: Traces the job.
        kept: Traces of the job that the caller has at hand, and keeps.
    """
    kind = (spec.architecture.attention, training_loop)
    traces: Traces = {} if key is None else _jobs.setdefault(key, {})
    if key is not None:
        _jobs.move_to_end(key)
    kept = {} if kept is None else kept
    known = _serving(kind, kept) or _serving(kind, traces)
    if known is None and key is not None:
        _hold(key, traces, _from_disk(key, training_loop))
        known = _serving(kind, traces)
    if known is None:
        known = trace()
        made = {kind: known}
        if known.in_a_loop is not None:
            made[kind[0], True] = known.in_a_loop
        kept |= made
        if key is not None:
            _to_disk(key, made)
            _hold(key, traces, made)
    kept.setdefault(kind, known)
    return known


def clear() -> None:
    """Forget all traces in memory."""
    global _held_events
    _jobs.clear()
    _held_events = 0


def _hold(key: str, traces: Traces, made: Traces) -> None:
    """Keep further traces among those of a job in memory, and forget the jobs that were not asked for the longest."""
    global _held_events
    if _jobs.get(key) is traces:  # others may have pushed it out while it was traced
        _held_events += _events_of(traces | made) - _events_of(traces)
    traces |= made
    while _held_events > MOST_EVENTS and len(_jobs) > 1:
        _held_events -= _events_of(_jobs.popitem(last=False)[1])


def _events_of(traces: Traces) -> int:
    return sum(len(trace.events) for trace in traces.values())


def _serving(kind: tuple[AttentionKernels, bool], traces: Traces) -> StepTrace | None:
    """Return a trace of the same loop in which these kernels of attention differ nowhere; None if there is none."""
    if kind in traces:
        return traces[kind]
    for (kernels, loop), trace in traces.items():
        if loop == kind[1] and _are_alike(trace, kernels, kind[0]):
            return trace
    return None


def _are_alike(trace: StepTrace, first: AttentionKernels, other: AttentionKernels) -> bool:
    """Return whether both take the same of the trace's heads. Flash attention computes in half precision only."""
    widest = trace.widest_head
    if widest is None:
        return False
    halves = any(op.dtype in ("float16", "bfloat16") for op in trace.operators)
    flash = not halves or min(first.flash, widest) == min(other.flash, widest)
    return flash and min(first.efficient, widest) == min(other.efficient, widest)


def _from_disk(key: str, training_loop: bool) -> Traces:
    """Return the job's trace on disk; none where there is none that can be read."""
    from featurize.device.device_spec import AttentionKernels

    try:
        (stored,) = recall(f"trace {training_loop} {key}")
        return {(AttentionKernels(**stored["kernels"]), training_loop): trace_of_json(stored["trace"])}
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return {}


def _to_disk(key: str, made: Traces) -> None:

    if all(trace.pipeline is None and trace.mix is None for trace in made.values()):
        keep(
            {
                f"trace {loop} {key}": {"kernels": kernels._asdict(), "trace": trace_to_json(trace)}
                for (kernels, loop), trace in made.items()
            }
        )


LARGEST_INT = 2**62
_LONGEST_TEXT = 2000
_STEPS = 3
_KINDS_OF_BLOCKS = (*BLOCK_KINDS, BUCKET, GATHERED, UNREDUCED, COMMUNICATION, MASTER)
_AXIS = re.compile(r"([1-9]\d{0,5}x[1-9]\d{0,5})?")  # ranks, and how far they are apart; empty: all
_STORED = (
    "operators",
    "events",
    "blocks",
    "parameters",
    "parameter_bytes",
    "compute_capability",
    "assumed",
    "notes",
    "widest_head",
    "graph_input_bytes",
    "collectives",
)
_SIGNED = ("Event.nbytes", "Operator.bytes_read", "Operator.bytes_written", "Operator.sources")


class BadRecord(ValueError):
    """The content is not the record of a step."""


def trace_to_json(trace: StepTrace) -> dict[str, Any]:
    """Return a trace in a form that `json.dumps` writes."""
    return {name: getattr(trace, name) for name in _STORED}


def trace_of_json(content: Mapping[str, Any]) -> StepTrace:
    """Return the trace of which `trace_to_json` made this. Raises `ValueError`, `TypeError`, `KeyError` or `IndexError`
    for anything else."""
    hints = get_type_hints(StepTrace)
    trace = StepTrace(**{name: _reader(hints[name])(content[name]) for name in _STORED})
    phases = {entry.phase for entry in trace.operators} | {entry.phase for entry in trace.events}
    _require(phases <= {*PHASES} and all(block.kind in _KINDS_OF_BLOCKS for block in trace.blocks), "a known name")
    for place, operator in enumerate(trace.operators):
        _require(all(-2 <= source < place for source in operator.sources), "an operator after its sources")
    for signature in trace.cudnn_convolutions:
        require_signature(signature)
    for sent in trace.collectives:
        of_step = sent.after <= sent.before <= len(trace.operators)
        _require(of_step and sent.kind in KINDS and _AXIS.fullmatch(sent.axis) is not None, "a collective of the step")
    _require_events(trace)
    return trace


def _require_events(trace: StepTrace) -> None:
    """Raise unless each block is taken once and given back at most once, after that."""
    live: set[int] = set()
    seen: set[int] = set()
    for block, nbytes, step, _phase in trace.events:
        size = trace.blocks[block].nbytes
        _require(step < _STEPS and abs(nbytes) == size, "an event of two steps, of a whole block")
        if nbytes < 0:
            _require(block in live, "memory that was taken")
            live.discard(block)
        else:
            _require(block not in seen or not size, "memory that is taken once")
            seen.add(block)
            live |= {block} if size else set()


def _require(holds: bool, expected: str) -> None:
    if not holds:
        raise BadRecord(f"not {expected}")


@functools.cache
def _reader(kind: Any, signed: bool = False) -> Callable[[Any], Any]:
    """Return a function that reads a JSON value as this annotation has it."""
    plain: dict[Any, Callable[[Any], Any]] = {int: _integer if signed else count_of, str: text_of, bool: bool}
    if kind in plain:
        return plain[kind]
    kinds = get_args(kind)
    if type(None) in kinds:
        some = _reader(kinds[0])
        return lambda value: None if value is None else some(value)
    if Ellipsis in kinds:
        read_value = _reader(kinds[0], signed)
        return lambda values: tuple([read_value(value) for value in fields_of(values, list)])
    if kinds:
        parts = [_reader(inner) for inner in kinds]
    else:
        parts = [_reader(hint, f"{kind.__name__}.{name}" in _SIGNED) for name, hint in get_type_hints(kind).items()]
    make = tuple if kinds else kind._make
    return lambda row: make([part(value) for part, value in zip(parts, fields_of(row, list), strict=True)])


def fields_of(value: Any, kind: Any) -> Any:
    """Return a value of this type. Raises `BadRecord` for another."""
    if not isinstance(value, kind):
        raise BadRecord(f"{type(value).__name__} instead of {kind}")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > LARGEST_INT:
        raise BadRecord("not a whole number of a reasonable size")
    return int(value)


def count_of(value: Any) -> int:
    """Return a whole number from 0 on. Raises `BadRecord` for anything else."""
    count = _integer(value)
    if count < 0:
        raise BadRecord("a negative count")
    return count


def text_of(value: Any) -> str:
    """Return a text as one line, shortened. Raises `BadRecord` for anything else."""
    return one_line(fields_of(value, str)[:_LONGEST_TEXT])
