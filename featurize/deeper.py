"""The trace of a deep model from those of two shallow ones, which differ in one period of its repeated blocks.

Start reading at `deeper`; `with_blocks` makes the shallow models, where `alike_blocks` says that there are some.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from featurize import attention
from featurize.checkpointing import CONTAINERS, repeated_blocks
from featurize.operators import MULTI_TENSOR, foreach_launches
from featurize.skeleton import build_on_meta, on_meta
from featurize.step_trace import Block, Collective, Event, Operator, StepTrace
from featurize.wrappers import compiled_modules, remarks

_NUMBER = re.compile(r"\d+")


class CannotDeepen(Exception):
    """The two traces do not differ by a period that repeats."""


class _Item(NamedTuple):
    """One record of a trace.

    exact    what is equal in records that stand for each other
    loose    the same, without what may grow with depth
    numbers  counts and places, which grow evenly with depth
    """

    exact: Hashable
    loose: Hashable
    numbers: tuple[int, ...]


def deeper(shallow: StepTrace, longer: StepTrace, times: int) -> StepTrace:
    """Return the trace of a model with `times` periods of blocks more than the shallow one.

    What the longer trace has beyond the shallow one repeats what stands before it: that part is repeated, with new
    blocks of memory, and each place of something else moves by as much as it did from the first trace to the second.
    The sources of operators are left out.

    Args:
        shallow: Of a few blocks.
        longer: Of one period of blocks more.
        times: Periods beyond the shallow one; 1 gives the longer trace.

    Raises:
        CannotDeepen: What was added does not repeat, or memory would be given back that nobody took.
    """
    names: dict[str, str] = {}

    def module(path: str) -> str:
        if path not in names:
            names[path] = _NUMBER.sub("*", path)
        return names[path]

    blocks = [
        longer.blocks[at]._replace(nbytes=nbytes)
        for at, (nbytes,) in _extended(
            [_of_block(one, module) for one in shallow.blocks],
            [_of_block(one, module) for one in longer.blocks],
            times,
        )
    ]
    events = [
        longer.events[at]._replace(block=block, nbytes=nbytes)
        for at, (block, nbytes) in _extended(_of_events(shallow, module), _of_events(longer, module), times)
    ]
    _require_sound(events, blocks)
    return replace(
        longer,
        events=tuple(events),
        blocks=tuple(blocks),
        operators=tuple(_operators(shallow, longer, module, times)),
        collectives=tuple(_collectives(shallow, longer, module, times)),
        parameters=_moved(shallow.parameters, longer.parameters, times),
        parameter_bytes=_moved(shallow.parameter_bytes, longer.parameter_bytes, times),
    )


def _moved(first: int, second: int, times: int) -> int:
    return first + times * (second - first)


def _of_block(block: Block, module: Callable[[str], str]) -> _Item:
    loose = (block.kind, block.operator, module(block.module), block.call, block.pooled, block.stream)
    return _Item((block.nbytes, loose), loose, (block.nbytes,))


def _of_events(trace: StepTrace, module: Callable[[str], str]) -> list[_Item]:
    blocks = [_of_block(one, module) for one in trace.blocks]
    items = []
    for event in trace.events:
        block, about = blocks[event.block], (event.nbytes > 0, event.nbytes < 0, event.step, event.phase)
        items.append(_Item((event.nbytes, about, block.exact), (about, block.loose), (event.block, event.nbytes)))
    return items


def _operators(shallow: StepTrace, longer: StepTrace, module: Callable[[str], str], times: int) -> list[Operator]:
    def item(one: Operator) -> _Item:
        loose = (one.name, one.phase, one.dtype, module(one.module), one.recomputed, one.graphed)
        numbers = (one.flops, one.bytes_read, one.bytes_written, one.launches)
        return _Item((loose, one.input_shapes, one.output_shapes), loose, numbers)

    firsts, seconds = [item(one) for one in shallow.operators], [item(one) for one in longer.operators]
    twins: dict[int, int] = {}
    made = []
    for at, (flops, read, written, launches) in _extended(firsts, seconds, times, twins):
        one = longer.operators[at]._replace(
            flops=flops, bytes_read=read, bytes_written=written, launches=launches, sources=()
        )
        if at in twins and firsts[twins[at]].exact != seconds[at].exact:  # of all parameters at once
            before = shallow.operators[twins[at]]
            one = one._replace(
                input_shapes=_shapes(before.input_shapes, one.input_shapes, times),
                output_shapes=_shapes(before.output_shapes, one.output_shapes, times),
            )
            one = one._replace(launches=_launches(before, longer.operators[at], one))
        made.append(one)
    return made


def _launches(first: Operator, second: Operator, deep: Operator) -> int:
    """Return the kernels of a for-each operator, which grow in jumps: by its own rule where that gives those of both
    shallow ones."""

    def by_rule(one: Operator) -> int:
        shapes = one.input_shapes
        for lists in range(5, 0, -1):  # parameters, gradients, state, ...: all of the same shapes
            count, rest = divmod(len(shapes), lists)
            if not rest and shapes == shapes[:count] * lists:
                return foreach_launches(lists, [math.prod(shape) for shape in shapes[:count]])
        return 0

    if deep.name.startswith(MULTI_TENSOR) and all(by_rule(one) == one.launches for one in (first, second)):
        return by_rule(deep)
    return deep.launches


def _shapes(
    firsts: tuple[tuple[int, ...], ...], seconds: tuple[tuple[int, ...], ...], times: int
) -> tuple[tuple[int, ...], ...]:
    items = [[_Item(shape, len(shape), shape) for shape in shapes] for shapes in (firsts, seconds)]
    return tuple(shape for _, shape in _extended(items[0], items[1], times))


def _collectives(shallow: StepTrace, longer: StepTrace, module: Callable[[str], str], times: int) -> list[Collective]:
    def items(trace: StepTrace) -> list[_Item]:
        # What runs next tells gathers of the forward pass from those of the backward pass.
        names = [(one.name, one.phase, module(one.module), one.recomputed) for one in trace.operators]
        names.append(("", "", "", False))
        made = []
        for one in trace.collectives:
            exact = (one.kind, one.axis, one.nbytes, names[one.after], names[one.before])
            made.append(_Item(exact, exact, (one.after, one.before)))
        return made

    return [
        longer.collectives[at]._replace(after=after, before=before)
        for at, (after, before) in _extended(items(shallow), items(longer), times)
    ]


def _extended(
    firsts: Sequence[_Item], seconds: Sequence[_Item], times: int, twins: dict[int, int] | None = None
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the items of the deep trace: the place of each one's like in the longer trace, and its own numbers.

    Args:
        firsts: Of the shallow trace.
        seconds: Of the longer one.
        times: As in `deeper`.
        twins: Is filled: place in the longer trace -> that of the same item in the shallow one.
    """
    made: list[tuple[int, tuple[int, ...]]] = []
    numbers: dict[int, tuple[int, ...]] = {}  # place in the longer trace -> of the first one made of it
    place = other = alike = 0
    while other < len(seconds):
        if place < len(firsts) and firsts[place].exact == seconds[other].exact:
            alike, added = alike + 1, 0
        else:
            added = _period(firsts, seconds, place, other)
            if not added and not (place < len(firsts) and firsts[place].loose == seconds[other].loose):
                raise CannotDeepen(f"{seconds[other].exact} does not repeat")
        if not added:
            numbers[other] = tuple(map(_moved, firsts[place].numbers, seconds[other].numbers, itertools.repeat(times)))
            made.append((other, numbers[other]))
            if twins is not None:
                twins[other] = place
            place, other = place + 1, other + 1
            continue
        back = _away_from_the_end(seconds, other, added, min(alike, added))
        place, other = place - back, other - back
        del made[len(made) - back :]
        for time in range(1, times + 1):
            for at in range(other, other + added):
                before, now, base = seconds[at - added].numbers, seconds[at].numbers, numbers[at - added]
                moved = tuple(b + time * (n - o) for b, n, o in zip(base, now, before, strict=True))
                if time == 1:
                    numbers[at] = moved
                made.append((at, moved))
        other, alike = other + added, 0
        if twins is not None:
            for at in range(other - added, other):
                twins.pop(at, None)
    if place < len(firsts):
        raise CannotDeepen("the deeper model lacks what the shallow one has")
    return made


def _away_from_the_end(seconds: Sequence[_Item], other: int, size: int, most: int) -> int:
    """Return by how many items a repeated part can begin earlier, and go on alike. The last block's numbers, such as
    when a collective is waited for, are its own: what is repeated is the block before."""
    back = 0
    while back < most and other - back - 1 >= size:
        if seconds[other - back - 1].exact != seconds[other - back - 1 - size].exact:
            break
        back += 1
    return back


def _period(firsts: Sequence[_Item], seconds: Sequence[_Item], place: int, other: int) -> int:
    """Return how many items of the longer trace repeat those before them, so that the two go on alike for the longest
    time; 0: there is no such number."""
    best, longest = 0, 0
    for size in range(1, len(seconds) - other - (len(firsts) - place) + 1):
        if size > other:
            break
        if seconds[other].exact != seconds[other - size].exact:
            continue
        if any(seconds[at].exact != seconds[at - size].exact for at in range(other + 1, other + size)):
            continue
        alike = 1  # the end of both, too
        while (
            place + alike <= len(firsts)
            and other + size + alike <= len(seconds)
            and firsts[place + alike - 1].exact == seconds[other + size + alike - 1].exact
        ):
            alike += 1
        ended = place + alike > len(firsts) and other + size + alike > len(seconds)
        if (alike > 1 or ended) and alike > longest:
            best, longest = size, alike
    return best


def _require_sound(events: Sequence[Event], blocks: Sequence[Block]) -> None:
    live: dict[int, int] = {}
    for event in events:
        if not 0 <= event.block < len(blocks):
            raise CannotDeepen(f"there is no block {event.block}")
        if event.nbytes > 0:
            if event.block in live:
                raise CannotDeepen(f"block {event.block} is taken twice")
            live[event.block] = event.nbytes
        elif event.nbytes < 0 and live.pop(event.block, 0) != -event.nbytes:
            raise CannotDeepen(f"block {event.block} is given back, and was not taken")


def built_to_shorten(factory: Callable[[], nn.Module]) -> nn.Module | None:
    """Return a model on the meta device, which nobody else holds. None where its copy would lose what a trace notes."""
    model = attention.building(lambda: build_on_meta(factory))
    return None if remarks(model) or compiled_modules(model) else on_meta(model)


def alike_blocks(model: nn.Module) -> int:
    """Return the number of repeated blocks; 0 where they are not all alike, or not in one container.

    Blocks are alike that are printed alike, and whose parameters and buffers have the same names, shapes, types and
    need of gradients. No two share a parameter.
    """
    blocks = repeated_blocks(model)
    if not blocks or container_of(model, blocks) is None:
        return 0
    if any(_described(block) != _described(blocks[0]) for block in blocks[1:]):
        return 0
    own = [id(one) for block in blocks for _name, one in block.named_parameters(remove_duplicate=False)]
    mine = set(own)
    held = [id(one) for _name, one in model.named_parameters(remove_duplicate=False)]
    shared = len(mine) < len(own) or len([one for one in held if one in mine]) > len(own)
    return 0 if shared else len(blocks)


def with_blocks(model: nn.Module, count: int) -> nn.Module:
    """Return a copy with the first `count` repeated blocks. The original is left as it is.

    Args:
        model: One of which `alike_blocks` returns a number.
        count: At most that number.
    """
    short = on_meta(model)
    blocks = repeated_blocks(short)
    container = container_of(short, blocks)
    assert container is not None, "blocks are in one container"
    left_out = {id(block) for block in blocks[count:]}
    kept = {name: one for name, one in container._modules.items() if id(one) not in left_out}
    if not isinstance(container, nn.ModuleDict):
        kept = {str(place): one for place, one in enumerate(kept.values())}
    container._modules = kept
    return short


def container_of(model: nn.Module, blocks: list[nn.Module]) -> nn.Module | None:
    wanted = {id(block) for block in blocks}
    for module in model.modules():
        if isinstance(module, CONTAINERS) and wanted <= {id(member) for member in module.children()}:
            return module
    return None


def _described(block: nn.Module) -> tuple[Any, ...]:
    tensors = (*block.named_parameters(), *block.named_buffers())
    return repr(block), [(name, one.shape, one.dtype, one.requires_grad) for name, one in tensors]
