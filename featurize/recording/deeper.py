"""The trace of a deep model from those of two shallow ones, which differ in one period of its repeated blocks.

Start reading at `deeper`; `with_blocks` makes the shallow models, if `alike_blocks` finds repeated blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from featurize.nets.checkpointing import CONTAINERS, repeated_blocks
from featurize.operators import attention
from featurize.operators.table import MULTI_TENSOR, foreach_launches
from featurize.recording.skeleton import build_on_meta, empty_copy, survey
from featurize.recording.step_trace import Block, Collective, Event, Operator, StepTrace

_NUMBER = re.compile(r"\d+")


class CannotDeepen(Exception):
    """The two traces do not differ by a period that repeats."""


class _Item(NamedTuple):
    """One record of a trace.

    exact    the properties that interchangeable records share
    loose    the same, without those that may grow with depth
    numbers  counts and indices, which grow evenly with depth
    """

    exact: Hashable
    loose: Hashable
    numbers: tuple[int, ...]


class _Made(NamedTuple):
    """One record of the deep trace.

    counterpart  index of the corresponding record in the longer trace
    twin         index of the same record in the shallow trace; None for a repeated one
    numbers      its own counts and indices
    """

    counterpart: int
    twin: int | None
    numbers: tuple[int, ...]


def deeper(shallow: StepTrace, longer: StepTrace, times: int) -> StepTrace:
    """Return the trace of a model with `times` more periods of layer blocks than the shallow one.

    The part that only the longer trace has repeats the part before it: it is repeated further, with new memory
    blocks, and each other index moves by as much as it did from the first trace to the second.
    The sources of operators are left out.

    Args:
        shallow: Trace of a few blocks.
        longer: Trace of the model with one more period of blocks.
        times: Periods beyond the shallow one; 1 returns the longer trace.

    Raises:
        CannotDeepen: The added part does not repeat, or memory would be freed that was not allocated.
    """
    module = functools.cache(functools.partial(_NUMBER.sub, "*"))
    events, blocks = _memory(shallow, longer, module, times)
    return replace(
        longer,
        events=tuple(events),
        blocks=tuple(blocks),
        operators=tuple(_operators(shallow, longer, module, times)),
        collectives=tuple(_collectives(shallow, longer, module, times)),
        parameters=_move(shallow.parameters, longer.parameters, times),
        parameter_bytes=_move(shallow.parameter_bytes, longer.parameter_bytes, times),
    )


def _move(first: int, second: int, times: int) -> int:
    return first + times * (second - first)


def _memory(
    shallow: StepTrace, longer: StepTrace, module: Callable[[str], str], times: int
) -> tuple[list[Event], list[Block]]:
    """Return the deep trace's events, and its blocks, numbered in the order of allocation."""

    def items(trace: StepTrace) -> list[_Item]:
        made = []
        for event in trace.events:
            block = trace.blocks[event.block]
            about = event.nbytes > 0, event.nbytes < 0, event.step, event.phase, block.kind, block.operator
            loose = *about, module(block.module), block.call, block.pooled, block.stream
            made.append(_Item((event.nbytes, block.nbytes, loose), loose, (event.block, event.nbytes)))
        return made

    events: list[Event] = []
    blocks: list[Block] = []
    alive: set[int] = set()
    for counterpart, _twin, (number, nbytes) in _extend(items(shallow), items(longer), times):
        event = longer.events[counterpart]._replace(block=number, nbytes=nbytes)
        events.append(event)
        if number == len(blocks) and nbytes >= 0:
            alive.add(number)
            blocks.append(longer.blocks[longer.events[counterpart].block]._replace(nbytes=nbytes))
        elif number in alive and blocks[number].nbytes == -nbytes:
            alive.remove(number)
        else:
            raise CannotDeepen(f"block {number} is not taken once, and then given back")
    return events, blocks


def _operators(shallow: StepTrace, longer: StepTrace, module: Callable[[str], str], times: int) -> list[Operator]:
    def items(trace: StepTrace) -> list[_Item]:
        made = []
        for operator in trace.operators:
            loose = (
                operator.name,
                operator.phase,
                operator.dtype,
                module(operator.module),
                operator.recomputed,
                operator.graphed,
            )
            numbers = (operator.flops, operator.bytes_read, operator.bytes_written, operator.launches)
            made.append(_Item((loose, operator.input_shapes, operator.output_shapes), loose, numbers))
        return made

    operators = []
    for counterpart, twin, (flops, read, written, launches) in _extend(items(shallow), items(longer), times):
        second = longer.operators[counterpart]
        deep = second._replace(flops=flops, bytes_read=read, bytes_written=written, launches=launches, sources=())
        first = second if twin is None else shallow.operators[twin]
        if (first.input_shapes, first.output_shapes) != (second.input_shapes, second.output_shapes):
            deep = deep._replace(  # an operator on all parameters at once
                input_shapes=_shapes(first.input_shapes, second.input_shapes, times),
                output_shapes=_shapes(first.output_shapes, second.output_shapes, times),
            )
            if first.name.startswith(MULTI_TENSOR) and all(
                _launches(operator) == operator.launches for operator in (first, second)
            ):
                deep = deep._replace(launches=_launches(deep))
        operators.append(deep)
    return operators


def _launches(operator: Operator) -> int:
    """Return the number of kernels of a for-each operator, which grows in jumps, by its own rule; 0 where its tensors
    are not in lists of the same shapes."""
    shapes = operator.input_shapes
    for lists in range(5, 0, -1):  # parameters, gradients, state, ...
        count, rest = divmod(len(shapes), lists)
        if not rest and shapes == shapes[:count] * lists:
            return foreach_launches(lists, [math.prod(shape) for shape in shapes[:count]])
    return 0


def _shapes(
    firsts: tuple[tuple[int, ...], ...], seconds: tuple[tuple[int, ...], ...], times: int
) -> tuple[tuple[int, ...], ...]:
    items = [[_Item(shape, len(shape), shape) for shape in shapes] for shapes in (firsts, seconds)]
    return tuple(made.numbers for made in _extend(items[0], items[1], times))


def _collectives(shallow: StepTrace, longer: StepTrace, module: Callable[[str], str], times: int) -> list[Collective]:
    def items(trace: StepTrace) -> list[_Item]:
        # The next operator distinguishes gathers of the forward pass from those of the backward pass.
        names = [
            (operator.name, operator.phase, module(operator.module), operator.recomputed)
            for operator in trace.operators
        ]
        names.append(("", "", "", False))
        made = []
        for collective in trace.collectives:
            exact = (
                collective.kind,
                collective.axis,
                collective.nbytes,
                names[collective.after],
                names[collective.before],
            )
            made.append(_Item(exact, exact, (collective.after, collective.before)))
        return made

    return [
        longer.collectives[counterpart]._replace(after=after, before=before)
        for counterpart, _twin, (after, before) in _extend(items(shallow), items(longer), times)
    ]


def _extend(firsts: Sequence[_Item], seconds: Sequence[_Item], times: int) -> list[_Made]:
    """Return the records of the deep trace.

    Args:
        firsts: Items of the shallow trace.
        seconds: Items of the longer one.
        times: As in `deeper`.
    """
    first, second = ([*(item.exact for item in items), None] for items in (firsts, seconds))
    made: list[_Made] = []
    numbers: dict[int, tuple[int, ...]] = {}  # index in the longer trace -> numbers of its first copy
    place = other = alike = 0
    while other < len(seconds):
        is_same = first[place] == second[other]
        added = 0 if is_same else _period(first, second, place, other)
        if not added:
            if place == len(firsts) or firsts[place].loose != seconds[other].loose:
                raise CannotDeepen(f"{second[other]} does not repeat")
            numbers[other] = tuple(map(_move, firsts[place].numbers, seconds[other].numbers, itertools.repeat(times)))
            made.append(_Made(other, place, numbers[other]))
            place, other, alike = place + 1, other + 1, alike + is_same
            continue
        # The last block's numbers, such as when a collective is waited for, are its own: the block before it is
        # repeated, as far as it continues alike.
        back = 0
        while back < min(alike, added, other - added) and second[other - back - 1] == second[other - back - 1 - added]:
            back += 1
        place, other = place - back, other - back
        del made[len(made) - back :]
        for time in range(1, times + 1):
            for position in range(other, other + added):
                before, now, base = (
                    seconds[position - added].numbers,
                    seconds[position].numbers,
                    numbers[position - added],
                )
                moved = tuple(b + time * (n - o) for b, n, o in zip(base, now, before, strict=True))
                if time == 1:
                    numbers[position] = moved
                made.append(_Made(position, None, moved))
        other, alike = other + added, 0
    if place < len(firsts):
        raise CannotDeepen("the deeper model lacks what the shallow one has")
    return made


def _period(first: Sequence[Hashable], second: Sequence[Hashable], place: int, other: int) -> int:
    """Return how many items of the longer trace repeat those before them, so that the two, whose ends are items too,
    continue alike for as long as possible; 0: there is no such number."""

    def alike(size: int) -> int:
        pairs = zip(first[place:], second[other + size :], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    most = min(other, len(second) - other - (len(first) - place))
    sizes = {
        size: alike(size)
        for size in range(1, most + 1)
        if second[other] == second[other - size] and second[other - size : other] == second[other : other + size]
    }
    best = max(sizes, key=lambda size: sizes[size], default=0)
    return best if sizes.get(best) else 0


def built_to_shorten(factory: Callable[[], nn.Module]) -> nn.Module | None:
    """Return a new model on the meta device. None where its copy would lose what a trace notes."""
    model = attention.building(lambda: build_on_meta(factory))
    wrappers = survey(model)
    return None if wrappers.notes or wrappers.compiled else empty_copy(model)


def alike_blocks(model: nn.Module) -> int:
    """Return the number of repeated blocks; 0 where they are not all alike, or not in one container.

    Blocks are alike if they print alike, and their parameters and buffers have the same names, shapes, types and
    need of gradients. No two share a parameter.
    """
    blocks = repeated_blocks(model)
    if not blocks or container_of(model, blocks) is None:
        return 0
    first = describe(blocks[0])
    if any(describe(block) != first for block in blocks[1:]):
        return 0
    places = Counter(id(parameter) for _name, parameter in model.named_parameters(remove_duplicate=False))
    shared = any(places[id(parameter)] > 1 for block in blocks for parameter in block.parameters())
    return 0 if shared else len(blocks)


def with_blocks(model: nn.Module, count: int) -> nn.Module:
    """Return a copy with the first `count` repeated blocks. The original is not changed.

    Args:
        model: One for which `alike_blocks` returns a number.
        count: Largest number of blocks.
    """
    short = empty_copy(model)
    blocks = repeated_blocks(short)
    container = container_of(short, blocks)
    assert container is not None, "blocks are in one container"
    left_out = {id(block) for block in blocks[count:]}
    children = {name: child for name, child in container._modules.items() if id(child) not in left_out}
    if not isinstance(container, nn.ModuleDict):
        children = {str(place): child for place, child in enumerate(children.values())}
    container._modules = children
    return short


def container_of(model: nn.Module, blocks: list[nn.Module]) -> nn.Module | None:
    wanted = {id(block) for block in blocks}
    for module in model.modules():
        if isinstance(module, CONTAINERS) and wanted <= {id(member) for member in module.children()}:
            return module
    return None


def describe(module: nn.Module) -> tuple[str, list[tuple[object, ...]]]:
    """Return how a module prints, and its parameters and buffers: equal for modules that take the same memory."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return repr(module), [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]
