"""Which kernels of a compiled graph Inductor writes as one: the rules of its scheduler, on sizes alone.

Start reading at `fused_groups`. Source: torch/_inductor/scheduler.py (`fuse_nodes`, `can_fuse`) and
torch/_inductor/codegen/simd.py (`SIMDScheduling.can_fuse`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_FUSED = 64  # torch/_inductor/config.py: max_fusion_size
# A reduction of more elements to one value is two kernels (torch/_inductor/ir.py: Reduction.num_splits).
_SPLIT_FROM = 8192
Buffer = TypeVar("Buffer", bound=Hashable)


@dataclass(frozen=True)
class Work(Generic[Buffer]):
    """One kernel, in the order in which the graph computes its values.

    places    elements of its result, or rows that it reduces
    depth     elements that each of them is reduced from; 1 of what reduces nothing
    trailing  the reduced dimensions are the last ones, so that pointwise work on the same rows can join
    fusible   False: a product, convolution, attention or a call of a library
    reads     buffers that it reads
    makes     buffers that it makes or changes
    """

    places: int
    depth: int = 1
    trailing: bool = True
    fusible: bool = True
    reads: tuple[Buffer, ...] = ()
    makes: tuple[Buffer, ...] = ()


@dataclass
class _Group(Generic[Buffer]):
    """Kernels that run as one."""

    members: list[int] = field(default_factory=list)
    work: list[Work[Buffer]] = field(default_factory=list)
    after: int = 0  # bits of the groups that have to run before, directly or not

    @property
    def fusible(self) -> bool:
        return self.work[0].fusible


def fused_groups(kernels: Sequence[Work[Buffer]]) -> list[tuple[int, ...]]:
    """Return which of the kernels run as one, each group in order.

    A kernel joins the group with which it shares a buffer, if they iterate over the same places and no other kernel
    has to run between them. Of several groups it joins the one that shares most.
    """
    groups: list[_Group[Buffer]] = []
    made_by: dict[Buffer, int] = {}
    of_buffer: dict[Buffer, dict[int, None]] = {}  # groups that read or make it
    for index, kernel in enumerate(kernels):
        waits_for = [made_by[buffer] for buffer in kernel.reads if buffer in made_by]
        waits_for += [group for buffer in kernel.makes for group in of_buffer.get(buffer, ())]  # what it changes
        before = _bits(waits_for)
        shared: Counter[int] = Counter()
        for buffer in dict.fromkeys((*kernel.reads, *kernel.makes)):
            shared.update(group for group in of_buffer.get(buffer, ()) if kernel.fusible and groups[group].fusible)
        ranked = sorted(shared, key=lambda group: (-shared[group], -group))
        place = next((group for group in ranked if _joins(kernel, group, groups, before)), len(groups))
        if place == len(groups):
            groups.append(_Group())
        _add(groups, place, index, kernel, before)
        made_by |= dict.fromkeys(kernel.makes, place)
        for buffer in (*kernel.reads, *kernel.makes):
            of_buffer.setdefault(buffer, {})[place] = None
    return [tuple(group.members) for group in groups]


def _joins(kernel: Work, place: int, groups: Sequence[_Group], before: int) -> bool:
    """Return whether a kernel can run within a group: nothing that it waits for waits for the group."""
    group, here = groups[place], 1 << place
    # What the group iterates over is its reduction's rows and depth, where it has one.
    leader = next((one for one in group.work if one.depth != 1), group.work[0])
    if len(group.members) >= MAX_FUSED or not _same_places(kernel, leader) or _waits_for_whole(kernel, group):
        return False
    return not any(groups[one].after & here for one in _places(before & ~here))


def _waits_for_whole(kernel: Work, group: _Group) -> bool:
    """Return whether a kernel of many elements needs the one value that a group reduces many to."""
    if kernel.places * kernel.depth == 1 or not any(one.places == 1 and one.depth > _SPLIT_FROM for one in group.work):
        return False
    return any(buffer in kernel.reads for one in group.work if one.places == 1 for buffer in one.makes)


def _same_places(one: Work, other: Work) -> bool:
    if one.depth == other.depth:
        return one.places == other.places and (one.depth == 1 or one.trailing == other.trailing)
    if one.depth != 1 and other.depth != 1:
        return False
    pointwise, reduction = (one, other) if one.depth == 1 else (other, one)
    whole = reduction.places * reduction.depth
    return pointwise.places == reduction.places or (reduction.trailing and pointwise.places == whole)


def _add(groups: list[_Group], place: int, index: int, kernel: Work, before: int) -> None:
    group, here = groups[place], 1 << place
    group.members.append(index)
    group.work.append(kernel)
    for one in _places(before & ~here):
        group.after |= 1 << one | groups[one].after
    for other in groups:
        if other.after & here:
            other.after |= group.after


def _bits(places: Iterable[int]) -> int:
    bits = 0
    for place in places:
        bits |= 1 << place
    return bits


def _places(bits: int) -> list[int]:
    return [place for place in range(bits.bit_length()) if bits >> place & 1]
