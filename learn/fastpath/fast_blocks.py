"""Places the large blocks of a training step as PyTorch's caching allocator does, with nothing besides.

Start reading at `reserved_bytes`. `featurize.allocator` has all of the rules; a test compares the two.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from conf.units import MIB as BYTES_PER_MIB

UNIT = 512  # bytes: sizes and addresses count these, so that a piece is a small integer
MIB = BYTES_PER_MIB // UNIT
SMALL_REQUEST = MIB  # and below: the small pool, which is not replayed
MIDDLE_REQUEST = 10 * MIB  # below: a segment of `MIDDLE_SEGMENT`
MIDDLE_SEGMENT = 20 * MIB
SEGMENT_STEP = 2 * MIB
LEAST_REST = MIB  # what is left over of a piece is split off where it is larger than this
# Events beside slots to take (slot) and to give back (~slot): a block taken and given back at once (PROBE + slot), one
# taken in the first step and kept (KEPT + slot), and cached segments given back, in the first step only (EMPTY).
PROBE, KEPT, EMPTY = 1 << 30, 1 << 31, 1 << 32
_SHIFT = 36  # a free piece is one integer, its size first and then its address, below 32 TiB
_ADDRESS = (1 << _SHIFT) - 1
# A second step needs more than the first where the optimizer's state took up pieces in between: above this share of it.
_LEAST_STATE = 0.005


def units(nbytes: int) -> int:
    """Return a request's size as the allocator rounds it."""
    return (nbytes + UNIT - 1) // UNIT


@dataclass(frozen=True)
class Program:
    """The large blocks that a job takes, in order.

    sizes    slot -> units
    setup    slots taken before the first step
    start    events as a step begins: its batch; a slot that is not held is not given back
    zeroed   events of the second step thereafter: the gradients
    step     events of every step
    state    slots taken after the first step, where the optimizer makes its state
    end      events after every step
    renamed  pairs (slot, older slot): after a step, the older slot names what the other held
    """

    sizes: Sequence[int]
    setup: Sequence[int]
    start: Sequence[int]
    zeroed: Sequence[int]
    step: Sequence[int]
    state: Sequence[int]
    end: Sequence[int]
    renamed: Sequence[tuple[int, int]]

    @property
    def most_live(self) -> int:
        """The most units alive at once, without what is taken and given back at once."""
        sizes = self.sizes
        changes = [
            sizes[event] if 0 <= event < PROBE else -sizes[~event] if event < 0 else 0
            for event in (*self.setup, *self.state, *self.start[:1], *self.step)
        ]
        return max(accumulate(changes), default=0)


def reserved_bytes(program: Program, capacity_bytes: int) -> int:
    """Return the most bytes that the allocator reserves for large blocks.

    Where that is more than `capacity_bytes`, cached segments are given back first, and what is taken and given back at
    once is done without: the most bytes then. Where that does not suffice either, those of a device without limit, as
    in `featurize.replay.replay`.
    """
    unlimited = _place(program, _NO_LIMIT)
    assert unlimited is not None, "without a limit everything has a place"
    capacity = capacity_bytes // UNIT
    if unlimited <= capacity or program.most_live > capacity:
        return unlimited * UNIT
    limited = _place(program, capacity)
    return (unlimited if limited is None else limited) * UNIT


_NO_LIMIT = 1 << 60


def _place(program: Program, capacity: int) -> int | None:
    """Return the most units reserved; None where `capacity` does not suffice."""
    sizes = program.sizes
    held: list[int | None] = [None] * len(sizes)  # slot -> address of its piece
    held_size = [0] * len(sizes)
    keys: list[int] = []  # free pieces, smallest first
    free_size: dict[int, int] = {}  # address -> size of the free piece that begins there
    free_begin: dict[int, int] = {}  # address -> where the free piece that ends there begins
    segments: dict[int, int] = {}  # address -> size
    reserved = peak = 0
    next_address = 1

    def give_back() -> int:
        """Give back every segment in which nothing lives; their units."""
        whole = {address: size for address, size in free_size.items() if segments.get(address) == size}
        for address, size in whole.items():
            del free_size[address], free_begin[address + size], segments[address]
        keys[:] = [key for key in keys if key & _ADDRESS in free_size]
        return sum(whole.values())

    def segment(size: int) -> int:
        """The size of the segment that is reserved for a request; 0 where it does not fit."""
        nonlocal reserved, peak, next_address
        whole = MIDDLE_SEGMENT if size < MIDDLE_REQUEST else -(-size // SEGMENT_STEP) * SEGMENT_STEP
        if reserved + whole > capacity:
            reserved -= give_back()
            if reserved + whole > capacity:
                return 0
        reserved += whole
        peak = max(peak, reserved)
        segments[next_address] = whole
        next_address += whole + 1  # segments never touch
        return whole

    def play(events: Sequence[int], first: bool) -> bool:
        nonlocal reserved
        for event in events:
            if event < 0:
                slot = ~event
                address = held[slot]
                if address is None:
                    continue
                held[slot] = None
                size = held_size[slot]
                end = address + size
                if end in free_size:
                    behind = free_size.pop(end)
                    del keys[bisect_left(keys, behind << _SHIFT | end)]
                    size += behind
                    end += behind
                if address in free_begin:
                    begin = free_begin.pop(address)
                    del keys[bisect_left(keys, (address - begin) << _SHIFT | begin)]
                    size += address - begin
                    address = begin
                insort(keys, size << _SHIFT | address)
                free_size[address] = size
                free_begin[end] = address
                continue
            if event >= PROBE:
                if event >= KEPT:
                    if first and event == EMPTY:
                        reserved -= give_back()
                        continue
                    if not first:
                        continue
                    slot = event - KEPT
                else:
                    size = sizes[event - PROBE]
                    if keys and keys[-1] >= size << _SHIFT:
                        continue
                    if whole := segment(size):
                        address = next_address - whole - 1
                        insort(keys, whole << _SHIFT | address)
                        free_size[address] = whole
                        free_begin[address + whole] = address
                    continue
            else:
                slot = event
            size = sizes[slot]
            at = bisect_left(keys, size << _SHIFT)
            if at < len(keys):
                address = keys.pop(at) & _ADDRESS
                whole = free_size.pop(address)
                del free_begin[address + whole]
            elif whole := segment(size):
                address = next_address - whole - 1
            else:
                return False
            rest = whole - size
            if rest > LEAST_REST:
                behind = address + size
                insort(keys, rest << _SHIFT | behind)
                free_size[behind] = rest
                free_begin[address + whole] = behind
                held_size[slot] = size
            else:
                held_size[slot] = whole
            held[slot] = address
        return True

    state = program.state
    if not all(play(events, True) for events in (program.setup, program.start, program.step, state, program.end)):
        return None
    if sum(map(sizes.__getitem__, state)) > _LEAST_STATE * peak:
        for slot, older in program.renamed:
            held[older], held[slot] = held[slot], None
            held_size[older] = held_size[slot]
        if not all(play(events, False) for events in (program.start, program.zeroed, program.step, program.end)):
            return None
    return peak
