"""A trace of a step as JSON, checked value by value when read: who wrote it could have written anything.

Start reading at `trace_of_json`. Traces of pipelines and of batches of several shapes have no such form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from conf.plain_text import one_line
from featurize.cudnn.signature import ConvolutionSignature, require_signature
from featurize.library_calls import LibraryCall
from featurize.parallel.collectives import KINDS
from featurize.step_trace import (
    BLOCK_KINDS,
    BUCKET,
    COMMUNICATION,
    GATHERED,
    MASTER,
    PHASES,
    UNREDUCED,
    Block,
    Collective,
    Event,
    Operator,
    StepTrace,
)

LARGEST_INT = 2**62
_LONGEST_TEXT = 2000
_STEPS = 3
_KINDS_OF_BLOCKS = (*BLOCK_KINDS, BUCKET, GATHERED, UNREDUCED, COMMUNICATION, MASTER)
_AXIS = re.compile(r"([1-9]\d{0,5}x[1-9]\d{0,5})?")  # ranks, and how far they are apart; empty: all


class BadRecord(ValueError):
    """The content is no record of a step."""


def trace_to_json(trace: StepTrace) -> dict[str, Any]:
    """Return what `json.dumps` writes of a trace."""
    return {
        "operators": trace.operators,
        "events": trace.events,
        "blocks": trace.blocks,
        "parameters": trace.parameters,
        "parameter_bytes": trace.parameter_bytes,
        "compute_capability": trace.compute_capability,
        "assumed": trace.assumed,
        "notes": trace.notes,
        "widest_head": trace.widest_head,
        "graph_input_bytes": trace.graph_input_bytes,
        "collectives": trace.collectives,
    }


def trace_of_json(content: Mapping[str, Any]) -> StepTrace:
    """Return the trace of which `trace_to_json` made this. Raises `ValueError`, `TypeError`, `KeyError` or `IndexError`
    for anything else."""
    blocks = tuple(_block(row) for row in fields_of(content["blocks"], list))
    operators = tuple(_operator(row) for row in fields_of(content["operators"], list))
    for place, operator in enumerate(operators):
        if not all(-2 <= source < place for source in operator.sources):
            raise BadRecord("an operator reads what a later one makes")
    capability = content["compute_capability"]
    graph_input_bytes = content["graph_input_bytes"]
    return StepTrace(
        operators=operators,
        events=_events(fields_of(content["events"], list), blocks),
        blocks=blocks,
        parameters=count_of(content["parameters"]),
        parameter_bytes=count_of(content["parameter_bytes"]),
        compute_capability=None if capability is None else _capability(fields_of(capability, list)),
        assumed=tuple(map(text_of, fields_of(content["assumed"], list))),
        notes=tuple(map(text_of, fields_of(content["notes"], list))),
        widest_head=None if (head := content["widest_head"]) is None else count_of(head),
        graph_input_bytes=None if graph_input_bytes is None else count_of(graph_input_bytes),
        collectives=tuple(_collective(row, len(operators)) for row in fields_of(content["collectives"], list)),
    )


def _capability(pair: list) -> tuple[int, int]:
    major, minor = pair
    return count_of(major), count_of(minor)


def _events(rows: list, blocks: tuple[Block, ...]) -> tuple[Event, ...]:
    """Each block is taken once and given back at most once, after that."""
    events = []
    live: set[int] = set()
    seen: set[int] = set()
    for row in rows:
        block, nbytes, step, phase = row
        event = Event(count_of(block), _integer(nbytes), count_of(step), _one_of(phase, PHASES))
        if event.step >= _STEPS:
            raise BadRecord("an event after the last step")
        size = blocks[event.block].nbytes
        if event.nbytes < 0:
            if event.block not in live or event.nbytes != -size:
                raise BadRecord("memory is given back that was not taken")
            live.discard(event.block)
        else:
            if event.nbytes != size or (event.block in seen and size):
                raise BadRecord("memory is taken twice")
            seen.add(event.block)
            if size:
                live.add(event.block)
        events.append(event)
    return tuple(events)


def _block(row: Any) -> Block:
    nbytes, kind, operator, module, call, pooled, stream, kept_until = row
    return Block(
        count_of(nbytes),
        _one_of(kind, _KINDS_OF_BLOCKS),
        text_of(operator),
        text_of(module),
        _call(call),
        bool(pooled),
        count_of(stream),
        count_of(kept_until),
    )


def _call(row: Any) -> LibraryCall | None:
    if row is None:
        return None
    kind, shapes, element_bytes, channels_last, groups, nbytes, convolution = row
    return LibraryCall(
        text_of(kind),
        _shapes(shapes),
        count_of(element_bytes),
        bool(channels_last),
        count_of(groups),
        count_of(nbytes),
        None if convolution is None else _convolution(convolution),
    )


def _convolution(row: Any) -> ConvolutionSignature:
    operation, *sizes, dtype, channels_last = row
    image, kernel, response, stride, padding, dilation = _shapes(sizes)
    return require_signature(
        ConvolutionSignature(
            text_of(operation), image, kernel, response, stride, padding, dilation, text_of(dtype), bool(channels_last)
        )
    )


def _operator(row: Any) -> Operator:
    name, phase, dtype, inputs, outputs, flops, read, written, launches, module, sources, *flags = row
    recomputed, graphed = flags
    return Operator(
        text_of(name), _one_of(phase, PHASES), text_of(dtype), _shapes(inputs), _shapes(outputs), count_of(flops),
        _integer(read), _integer(written), count_of(launches), text_of(module), tuple(map(_integer, sources)),
        bool(recomputed), bool(graphed),
    )  # fmt: skip


def _collective(row: Any, operators: int) -> Collective:
    kind, nbytes, after, before, axis = row
    collective = Collective(
        _one_of(kind, tuple(KINDS)), count_of(nbytes), count_of(after), count_of(before), text_of(axis)
    )
    if not collective.after <= collective.before <= operators or not _AXIS.fullmatch(collective.axis):
        raise BadRecord("a collective of no step or of no ranks")
    return collective


def _shapes(rows: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(count_of, row)) for row in rows)


def fields_of(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise BadRecord(f"{type(value).__name__} instead of {kind}")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > LARGEST_INT:
        raise BadRecord("no whole number of a reasonable size")
    return value


def count_of(value: Any) -> int:
    if _integer(value) < 0:
        raise BadRecord("a negative count")
    return value


def text_of(value: Any) -> str:
    return one_line(fields_of(value, str)[:_LONGEST_TEXT])


def _one_of(value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise BadRecord("an unknown name")
    return value
