"""A trace of a step as JSON, checked value by value when read: who wrote it could have written anything.

Start reading at `trace_of_json`. Traces of pipelines and of batches of several shapes have no such form.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from conf.plain_text import one_line
from featurize.cudnn.signature import require_signature
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
    """Return what `json.dumps` writes of a trace."""
    return {name: getattr(trace, name) for name in _STORED}


def trace_of_json(content: Mapping[str, Any]) -> StepTrace:
    """Return the trace of which `trace_to_json` made this. Raises `ValueError`, `TypeError`, `KeyError` or `IndexError`
    for anything else."""
    hints = get_type_hints(StepTrace)
    trace = StepTrace(**{name: _reader(hints[name])(content[name]) for name in _STORED})
    phases = {one.phase for one in trace.operators} | {one.phase for one in trace.events}
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
    """Return what reads a value of JSON as this annotation has it."""
    plain: dict[Any, Callable[[Any], Any]] = {int: _integer if signed else count_of, str: text_of, bool: bool}
    if kind in plain:
        return plain[kind]
    kinds = get_args(kind)
    if type(None) in kinds:
        some = _reader(kinds[0])
        return lambda value: None if value is None else some(value)
    if Ellipsis in kinds:
        one = _reader(kinds[0], signed)
        return lambda values: tuple([one(value) for value in fields_of(values, list)])
    if kinds:
        parts = [_reader(one) for one in kinds]
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
    return value


def count_of(value: Any) -> int:
    """Return a whole number from 0 on. Raises `BadRecord` for anything else."""
    if _integer(value) < 0:
        raise BadRecord("a negative count")
    return value


def text_of(value: Any) -> str:
    """Return a text as one line, shortened. Raises `BadRecord` for anything else."""
    return one_line(fields_of(value, str)[:_LONGEST_TEXT])
