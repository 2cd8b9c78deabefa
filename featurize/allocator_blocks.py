"""What the allocator simulator is made of: pieces of segments, pools of free pieces, addresses, and its snapshots.

Start reading at `Pool`; `Segment` and `PoolBlock` are what a snapshot shows.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from conf.units import MIB

# A free piece's place in its pool is one integer, size first, then address: both are multiples of 512.
KEY_SHIFT = 48
ADDRESS_SHIFT = 9


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """Bytes. `requested` is 0 where nothing lives; `state` is `active_allocated` or `inactive`, PyTorch's names."""

    address: int
    size: int
    requested: int
    state: str


@dataclass(frozen=True, slots=True)
class Segment:
    """One cudaMalloc, or one contiguous mapped range of an expandable segment. `pool` is `small` or `large`."""

    address: int
    size: int
    pool: str
    stream: int
    expandable: bool
    blocks: tuple[PoolBlock, ...]


@dataclass(frozen=True, slots=True)
class SegmentEvent:
    """`segment_alloc`, `segment_free`, `segment_map`, `segment_unmap` or `oom`, as PyTorch's memory history names them.
    `size` in bytes; addresses are the driver's choice and don't take part in comparisons."""

    action: str
    size: int
    stream: int
    address: int = field(compare=False, default=0)


class Piece:
    """A run of bytes of a segment, with its neighbours there.

    free   True: cached in `pool`; False: handed out; None: address space of an expandable segment without memory
    key    where it stands in `pool.keys`; only valid while `free`
    """

    __slots__ = ("address", "before", "behind", "free", "key", "pool", "requested", "size")
    key: int

    def __init__(
        self,
        address: int,
        size: int,
        requested: int,
        free: bool | None,
        pool: Pool,
        before: Piece | None,
        behind: Piece | None,
    ) -> None:
        self.address, self.size, self.requested, self.free = address, size, requested, free
        self.pool, self.before, self.behind = pool, before, behind

    def is_split(self) -> bool:
        return self.before is not None or self.behind is not None


class Pool:
    """The free pieces of one stream's small or large pool, by size and then address.

    keys, by_key   the free pieces, sorted
    unmapped       address -> free address space of expandable segments
    ranges         those segments' address ranges, base -> size
    born           key -> count of large requests when the piece became free; only kept for garbage collection
    least_rest     what must be left over, at least, for a piece to be split
    """

    __slots__ = ("born", "by_key", "keys", "least_rest", "ranges", "small", "stream", "unmapped")

    def __init__(self, *, small: bool, stream: int, least_rest: int) -> None:
        self.small, self.stream, self.least_rest = small, stream, least_rest
        self.keys: list[int] = []
        self.by_key: dict[int, Piece] = {}
        self.unmapped: dict[int, Piece] = {}
        self.ranges: dict[int, int] = {}
        self.born: dict[int, int] = {}

    def put(self, piece: Piece) -> None:
        piece.free = True
        piece.key = key = (piece.size << KEY_SHIFT) | (piece.address >> ADDRESS_SHIFT)
        bisect.insort(self.keys, key)
        self.by_key[key] = piece

    def take(self, piece: Piece) -> None:
        del self.keys[bisect.bisect_left(self.keys, piece.key)]
        del self.by_key[piece.key]

    def pieces(self) -> list[Piece]:
        """The free ones, smallest first."""
        return [self.by_key[key] for key in self.keys]

    def base_of(self, address: int) -> int:
        """Where the expandable segment that holds this address begins."""
        return max(base for base in self.ranges if base <= address)


class AddressSpace:
    """Where the driver puts segments: the lowest free range that is large enough, in steps of 2 MiB.

    What a driver really does is not documented and differs between versions; it decides only between free pieces of
    equal size in different segments.
    """

    STEP = 2 * MIB

    def __init__(self) -> None:
        self._end = 2048 * self.STEP  # no address is 0
        self._holes: list[tuple[int, int]] = []  # address, size; sorted, never adjacent

    def take(self, size: int, action: str) -> int:
        """An address for `size` bytes. `action` is the event that asks, `segment_alloc` or `segment_map`."""
        size = -(-size // self.STEP) * self.STEP
        for i, (address, room) in enumerate(self._holes):
            if room >= size:
                self._holes[i : i + 1] = [(address + size, room - size)] if room > size else []
                return address
        address, self._end = self._end, self._end + size
        return address

    def give(self, address: int, size: int) -> None:
        size = -(-size // self.STEP) * self.STEP
        at = bisect.bisect_left(self._holes, (address, 0))
        if at < len(self._holes) and self._holes[at][0] == address + size:
            size += self._holes.pop(at)[1]
        if at > 0 and sum(self._holes[at - 1]) == address:
            at -= 1
            address, room = self._holes.pop(at)
            size += room
        if address + size == self._end:
            self._end = address
        else:
            self._holes.insert(at, (address, size))


def segments_of(pieces: Iterable[Piece], *, expandable: bool) -> tuple[Segment, ...]:
    """The segments that hold these pieces, which are all mapped, by address."""
    segments = []
    for head in pieces:
        if head.before is not None and head.before.free is not None:
            continue
        blocks: list[PoolBlock] = []
        piece: Piece | None = head
        while piece is not None and piece.free is not None:
            live = piece.free is False
            state = "active_allocated" if live else "inactive"
            blocks.append(PoolBlock(piece.address, piece.size, piece.requested if live else 0, state))
            piece = piece.behind
        size = sum(block.size for block in blocks)
        pool = "small" if head.pool.small else "large"
        segments.append(Segment(head.address, size, pool, head.pool.stream, expandable, tuple(blocks)))
    return tuple(sorted(segments, key=lambda segment: segment.address))
