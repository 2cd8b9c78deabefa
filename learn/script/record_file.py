"""The file in which the process that runs a script leaves what it recorded: JSON, checked value by value when read.

Start reading at `ScriptRecord`. The script could have written anything there, so nothing in it is trusted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.plain_text import one_line
from featurize.cudnn.signature import ConvolutionSignature, require_signature
from featurize.library_calls import LibraryCall
from featurize.parallel.collectives import KINDS
from featurize.parallel.layout import Parallel
from featurize.parallel.layout_text import parse_parallel
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

LARGEST_FILE_BYTES = 2**30
_LARGEST_INT = 2**62
_LONGEST_TEXT = 2000
_STEPS = 3
_KINDS_OF_BLOCKS = (*BLOCK_KINDS, BUCKET, GATHERED, UNREDUCED, COMMUNICATION, MASTER)
_AXIS = re.compile(r"([1-9]\d{0,5}x[1-9]\d{0,5})?")  # ranks, and how far they are apart; empty: all
# What a script is seen to choose, as `learn.script.estimating.ScriptSettings` has it.
SETTINGS: Mapping[str, type] = {
    "optimizer": str, "precision": str, "cudnn_benchmark": bool, "cudnn_allow_tf32": bool,
    "cudnn_deterministic": bool, "channels_last": bool, "implementation": str,
    "accumulation": int, "clip_norm": float, "clip_value": float, "zero_grad": str, "checkpointing": str,
    "checkpoint_reentrant": bool,
}  # fmt: skip


class BadRecord(ValueError):
    """The file is no record of a step."""


@dataclass(frozen=True, kw_only=True)
class ScriptRecord:
    """What one run of a script left.

    trace      of its first two optimizer steps; None where it did not get there
    problem    why there is no trace, with the script's file and line where they are known
    settings   what the script chose: names of `SETTINGS`
    batch_size samples in a forward pass
    backwards  backward passes in a step: more than one accumulate gradients
    steps      optimizer steps that were done
    notes      what was kept from happening or done differently
    parallel   how its processes share the job; None: it is one
    """

    trace: StepTrace | None
    problem: str | None
    settings: Mapping[str, str | bool | int | float]
    batch_size: int
    backwards: int
    steps: int
    notes: tuple[str, ...]
    parallel: Parallel | None = None


def write_record(path: Path, record: ScriptRecord) -> None:
    """Write the record in one step."""
    content = {
        "trace": None if record.trace is None else _trace_to_json(record.trace),
        "problem": record.problem,
        "settings": dict(record.settings),
        "batch_size": record.batch_size,
        "backwards": record.backwards,
        "steps": record.steps,
        "notes": list(record.notes),
        "parallel": None if record.parallel is None else record.parallel.text(),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def read_record(path: Path) -> ScriptRecord:
    """Read a record. Raises `BadRecord` for what is none."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST_FILE_BYTES:
            raise BadRecord("not a plain file of a reasonable size")
        content = json.loads(path.read_text(encoding="utf-8"))
        trace = _fields(content, dict)["trace"]
        parallel = parse_parallel(content["parallel"])
        problem = content["problem"]
        settings = {_text(key): _setting(key, value) for key, value in _fields(content["settings"], dict).items()}
        return ScriptRecord(
            trace=None if trace is None else _trace_of_json(_fields(trace, dict)),
            problem=None if problem is None else _text(problem),
            settings=settings,
            batch_size=_count(content["batch_size"]),
            backwards=_count(content["backwards"]),
            steps=_count(content["steps"]),
            notes=tuple(_text(note) for note in _fields(content["notes"], list)[:100]),
            parallel=parallel,
        )
    except BadRecord:
        raise
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise BadRecord(f"{type(error).__name__}: {error}") from error


def _trace_to_json(trace: StepTrace) -> dict[str, Any]:
    return {
        "operators": trace.operators,
        "events": trace.events,
        "blocks": trace.blocks,
        "parameters": trace.parameters,
        "parameter_bytes": trace.parameter_bytes,
        "compute_capability": trace.compute_capability,
        "assumed": trace.assumed,
        "notes": trace.notes,
        "graph_input_bytes": trace.graph_input_bytes,
        "collectives": trace.collectives,
    }


def _trace_of_json(content: Mapping[str, Any]) -> StepTrace:
    blocks = tuple(_block(row) for row in _fields(content["blocks"], list))
    operators = tuple(_operator(row) for row in _fields(content["operators"], list))
    for place, operator in enumerate(operators):
        if not all(-2 <= source < place for source in operator.sources):
            raise BadRecord("an operator reads what a later one makes")
    capability = content["compute_capability"]
    graph_input_bytes = content["graph_input_bytes"]
    return StepTrace(
        operators=operators,
        events=_events(_fields(content["events"], list), blocks),
        blocks=blocks,
        parameters=_count(content["parameters"]),
        parameter_bytes=_count(content["parameter_bytes"]),
        compute_capability=None if capability is None else _capability(_fields(capability, list)),
        assumed=tuple(map(_text, _fields(content["assumed"], list))),
        notes=tuple(map(_text, _fields(content["notes"], list))),
        graph_input_bytes=None if graph_input_bytes is None else _count(graph_input_bytes),
        collectives=tuple(_collective(row, len(operators)) for row in _fields(content["collectives"], list)),
    )


def _capability(pair: list) -> tuple[int, int]:
    major, minor = pair
    return _count(major), _count(minor)


def _events(rows: list, blocks: tuple[Block, ...]) -> tuple[Event, ...]:
    """Each block is taken once and given back at most once, after that."""
    events = []
    live: set[int] = set()
    seen: set[int] = set()
    for row in rows:
        block, nbytes, step, phase = row
        event = Event(_count(block), _integer(nbytes), _count(step), _one_of(phase, PHASES))
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
        _count(nbytes), _one_of(kind, _KINDS_OF_BLOCKS), _text(operator), _text(module), _call(call), bool(pooled),
        _count(stream), _count(kept_until),
    )  # fmt: skip


def _call(row: Any) -> LibraryCall | None:
    if row is None:
        return None
    kind, shapes, element_bytes, channels_last, groups, nbytes, convolution = row
    return LibraryCall(
        _text(kind), _shapes(shapes), _count(element_bytes), bool(channels_last), _count(groups), _count(nbytes),
        None if convolution is None else _convolution(convolution),
    )  # fmt: skip


def _convolution(row: Any) -> ConvolutionSignature:
    operation, *sizes, dtype, channels_last = row
    image, kernel, response, stride, padding, dilation = _shapes(sizes)
    return require_signature(
        ConvolutionSignature(
            _text(operation), image, kernel, response, stride, padding, dilation, _text(dtype), bool(channels_last)
        )
    )


def _operator(row: Any) -> Operator:
    name, phase, dtype, inputs, outputs, flops, read, written, launches, module, sources, *flags = row
    recomputed, graphed = flags
    return Operator(
        _text(name), _one_of(phase, PHASES), _text(dtype), _shapes(inputs), _shapes(outputs), _count(flops),
        _integer(read), _integer(written), _count(launches), _text(module), tuple(map(_integer, sources)),
        bool(recomputed), bool(graphed),
    )  # fmt: skip


def _collective(row: Any, operators: int) -> Collective:
    kind, nbytes, after, before, axis = row
    collective = Collective(_one_of(kind, tuple(KINDS)), _count(nbytes), _count(after), _count(before), _text(axis))
    if not collective.after <= collective.before <= operators or not _AXIS.fullmatch(collective.axis):
        raise BadRecord("a collective of no step or of no ranks")
    return collective


def _shapes(rows: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(_count, row)) for row in rows)


def _fields(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise BadRecord(f"{type(value).__name__} instead of {kind}")
    return value


def _setting(name: str, value: Any) -> str | bool | int | float:
    given = type(value)
    if given is not SETTINGS.get(name):
        raise BadRecord("a setting of an unknown name or type")
    if isinstance(value, str):
        return _text(value)
    if not (math.isfinite(value) and 0 <= value <= _LARGEST_INT):
        raise BadRecord("a setting of no reasonable size")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > _LARGEST_INT:
        raise BadRecord("no whole number of a reasonable size")
    return value


def _count(value: Any) -> int:
    if _integer(value) < 0:
        raise BadRecord("a negative count")
    return value


def _text(value: Any) -> str:
    return one_line(_fields(value, str)[:_LONGEST_TEXT])


def _one_of(value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise BadRecord("an unknown name")
    return value
