"""PyTorch's CUDA caching allocator, simulated rule by rule: the block for each request, and the reserved segments.

Start reading at `CachingAllocator.allocate`. It follows c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.4 to 2.13.
`AllocatorSettings.parse` reads the settings in PYTORCH_ALLOC_CONF.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conf.errors import UsageError, refuse
from conf.units import MIB

SMALL_REQUEST = MIB  # requests up to this go to the small pool
SMALL_SEGMENT = 2 * MIB
MIDDLE_REQUEST = 10 * MIB  # requests below this get a segment of `large_segment_size_mb`
LARGE_STEP = 2 * MIB  # from there on, a segment is the request rounded up to this
LEAST_REST_SMALL = 512
LEAST_REST_LARGE = MIB + 512  # "more than 1 MiB", in steps of 512
UNLIMITED = 1 << 62
UNBOUNDED_ADDRESSES = 1 << 40  # address space of an expandable segment without a capacity

# A free piece's key in its pool is one integer, size first, then address: both are multiples of 512.
KEY_SHIFT = 48
ADDRESS_SHIFT = 9


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """A block; sizes in bytes. `requested` is 0 for a free block; `state` is PyTorch's `active_allocated` or
    `inactive`."""

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
    `size` in bytes; addresses are the driver's choice and are ignored in comparisons."""

    action: str
    size: int
    stream: int
    address: int = field(compare=False, default=0)


class Piece:
    """A run of bytes in a segment, linked to its neighbours.

    free   True: cached in `pool`; False: handed out; None: address space of an expandable segment without memory
    key    its key in `pool.keys`, and `born`, the count of large requests when it became free: both are only
           valid while `free`
    """

    __slots__ = ("address", "before", "behind", "born", "free", "key", "pool", "requested", "size")
    key: int
    born: int

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

    def split(self, size: int) -> Piece:
        """Shorten the piece to its first `size` bytes. Return the remainder, in the same state and in no pool."""
        behind = self.behind
        remainder = Piece(self.address + size, self.size - size, 0, self.free, self.pool, self, behind)
        if behind is not None:
            behind.before = remainder
        self.behind, self.size = remainder, size
        return remainder

    def merge_neighbours(self) -> None:
        """Merge with neighbours in the same state, free or unmapped, which leave their pool."""
        state, near = self.free, self.before
        if near is not None and near.free is state:
            self.pool.forget(near)
            self.address = near.address
            self.size += near.size
            self.before = near = near.before
            if near is not None:
                near.behind = self
        near = self.behind
        if near is not None and near.free is state:
            self.pool.forget(near)
            self.size += near.size
            self.behind = near = near.behind
            if near is not None:
                near.before = self


class Pool:
    """The free pieces of one stream's small or large pool, by size and then address.

    keys, by_key   the free pieces, sorted
    unmapped       address -> free address space of expandable segments
    ranges         those segments' address ranges, base -> size
    least_rest     least size of the remainder for which a piece is split
    """

    __slots__ = ("by_key", "keys", "least_rest", "ranges", "small", "stream", "unmapped")

    def __init__(self, *, small: bool, stream: int, least_rest: int) -> None:
        self.small, self.stream, self.least_rest = small, stream, least_rest
        self.keys: list[int] = []
        self.by_key: dict[int, Piece] = {}
        self.unmapped: dict[int, Piece] = {}
        self.ranges: dict[int, int] = {}

    def put(self, piece: Piece, large_requests: int = 0) -> None:
        piece.free, piece.born = True, large_requests
        piece.key = key = (piece.size << KEY_SHIFT) | (piece.address >> ADDRESS_SHIFT)
        insort(self.keys, key)
        self.by_key[key] = piece

    def forget(self, piece: Piece) -> None:
        """Remove a piece, free or unmapped."""
        if piece.free:
            del self.keys[bisect_left(self.keys, piece.key)]
            del self.by_key[piece.key]
        else:
            del self.unmapped[piece.address]

    def pieces(self) -> list[Piece]:
        """Return the free pieces, smallest first."""
        return [self.by_key[key] for key in self.keys]


class AddressSpace:
    """The driver's placement of segments: one behind the other, in steps of 2 MiB; no address is used twice.

    A real driver's placement is not documented and differs between versions. It matters only for the choice between
    free pieces of equal size in different segments.
    """

    STEP = 2 * MIB
    _end = 2048 * STEP  # no address is 0

    def take(self, size: int, action: str) -> int:
        """Return an address for `size` bytes. `action` is the requesting event, `segment_alloc` or `segment_map`."""
        address = self._end
        self._end += -(-size // self.STEP) * self.STEP
        return address


class OutOfMemory(Exception):
    """No cached block serves the request, and no segment for it fits, even after all cached segments were freed."""


class CachingAllocator:
    """One device's allocator. All sizes in bytes.

    capacity_bytes     memory that the driver can give this process; None: unlimited
    total_bytes        the device's memory as the driver reports it: `per_process_memory_fraction` is a share of it, and
                       expandable segments reserve 9/8 of it as address space; `capacity_bytes` by default
    allocated_bytes    bytes in live blocks, with rounding; `reserved_bytes` in segments
    retries            how often all cached segments were freed for a request
    segment_events     every segment allocated and freed, and every out-of-memory, in order

    Not modelled: private pools of CUDA graphs and `MemPool`, the backend `cudaMallocAsync`, and the driver's own
    fragmentation: a segment fits if its bytes do.
    Where PyTorch's rules changed, the newest apply; those of 2.4 differ only under unusual settings.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        *,
        total_bytes: int | None = None,
        address_space: AddressSpace | None = None,
    ) -> None:
        settings = settings if settings is not None else DEFAULT_SETTINGS
        self.settings = settings
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self.segment_events: list[SegmentEvent] = []
        total = total_bytes if total_bytes is not None else capacity_bytes
        fraction, share = settings.per_process_memory_fraction, settings.garbage_collection_threshold
        self._allowed: int | None = None
        self._collect_above: int | None = None
        if total is not None and fraction is not None and fraction < 1:
            self._allowed = int(fraction * total)
            self._collect_above = None if share is None else int(share * self._allowed)
        self._capacity = UNLIMITED if capacity_bytes is None else capacity_bytes
        self._round = settings.size_rounding() if settings.roundup_power2_divisions else None
        self._large_segment = settings.large_segment_size_mb * MIB
        self._max_split = UNLIMITED if settings.max_split_size_mb is None else settings.max_split_size_mb * MIB
        rounding = settings.max_non_split_rounding_mb
        self._non_split_rounding = self._large_segment if rounding is None else rounding * MIB
        self._expandable = settings.expandable_segments
        self._split_below = UNLIMITED if self._expandable else self._max_split
        self._least_rest = LEAST_REST_SMALL if self._expandable else LEAST_REST_LARGE
        # Whether the best fit may be rejected: False under the default settings, which then skip these rules.
        self._picky = self._expandable or self._max_split < UNLIMITED or self._collect_above is not None
        self._large_requests = 0
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # stream -> small, large
        self._live: dict[int, Piece] = {}
        self._handles = itertools.count(1)
        self._retired: set[int] = set()  # handles of retired blocks
        self._addresses = address_space if address_space is not None else AddressSpace()
        # Least address space that a new expandable segment reserves.
        self._address_bytes = UNBOUNDED_ADDRESSES if total is None else total + total // 8

    def allocate(self, nbytes: int, stream: int = 0) -> int | None:
        """Return a handle for `free` to a block of at least `nbytes`; None, without a block, for 0 bytes.

        Raises `OutOfMemory`, which leaves the allocator usable, with its cache freed.
        """
        if not nbytes:
            return None
        size = (nbytes + 511) & -512 if self._round is None else self._round(nbytes)
        pools = self._pools.get(stream)
        if pools is None:
            small = Pool(small=True, stream=stream, least_rest=LEAST_REST_SMALL)
            self._pools[stream] = pools = small, Pool(small=False, stream=stream, least_rest=self._least_rest)
        pool = pools[size > SMALL_REQUEST]
        keys = pool.keys
        position = bisect_left(keys, size << KEY_SHIFT)
        if self._picky:
            position = self._pick(pool, position, size)
        piece = pool.by_key.pop(keys.pop(position)) if position < len(keys) else self._acquire(pool, size)
        remainder = piece.size - size
        if remainder >= pool.least_rest and size < self._split_below:
            pool.put(piece.split(size), self._large_requests)  # the front is handed out
        else:
            size += remainder
        piece.free, piece.requested = False, nbytes
        self.allocated_bytes = allocated = self.allocated_bytes + size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        handle = next(self._handles)
        self._live[handle] = piece
        return handle

    def free(self, handle: int | None) -> None:
        """Return a block to its stream's pool, merged with free neighbours. None, the empty block, is ignored."""
        if handle is None:
            return
        piece = self._live.pop(handle)
        if handle in self._retired:
            self._retired.discard(handle)
        else:
            self.allocated_bytes -= piece.size
        piece.free = True
        piece.merge_neighbours()
        piece.pool.put(piece, self._large_requests)

    def touch(self, nbytes: int, stream: int = 0) -> int:
        """Allocate a block and free it immediately. Return `allocated_bytes` between the two.

        Raises `OutOfMemory`, as `allocate` does.
        """
        pools = self._pools.get(stream)
        if not self._picky and nbytes > 0 and pools is not None:
            size = (nbytes + 511) & -512 if self._round is None else self._round(nbytes)
            pool = pools[size > SMALL_REQUEST]
            position = bisect_left(pool.keys, size << KEY_SHIFT)
            if position < len(pool.keys):  # after a split and a merge, a cached piece is unchanged
                cached = pool.by_key[pool.keys[position]].size
                allocated = self.allocated_bytes + (size if cached - size >= pool.least_rest else cached)
                self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
                return allocated
        handle = self.allocate(nbytes, stream)
        allocated = self.allocated_bytes
        self.free(handle)
        return allocated

    def retire(self, handle: int | None) -> None:
        """Count a block as freed while another stream uses it (`record_stream`): `settle` makes its memory available.
        Out of memory, PyTorch waits for these streams."""
        if handle is None:
            return
        self.allocated_bytes -= self._live[handle].size
        self._retired.add(handle)

    def settle(self, handle: int | None) -> None:
        """Free a retired block, unless it was freed for lack of memory."""
        if handle in self._retired:
            self.free(handle)

    def empty_cache(self) -> None:
        """Free every segment, and every page of expandable segments, without live blocks."""
        for of_size in (1, 0):  # the large pools first
            pieces = [piece for stream in sorted(self._pools) for piece in self._pools[stream][of_size].pieces()]
            for piece in pieces:
                if self._expandable:
                    self._unmap(piece)
                elif not piece.is_split():
                    self._release(piece)

    def address_of(self, handle: int) -> int:
        """Return the address of a live block. Raises `KeyError` for any other handle."""
        return self._live[handle].address

    def snapshot(self) -> tuple[Segment, ...]:
        """Return every segment with its blocks, by address, like `torch.cuda.memory_snapshot()`."""
        free = (piece for pools in self._pools.values() for pool in pools for piece in pool.by_key.values())
        segments = []
        for head in itertools.chain(free, self._live.values()):
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
            segments.append(Segment(head.address, size, pool, head.pool.stream, self._expandable, tuple(blocks)))
        return tuple(sorted(segments, key=lambda segment: segment.address))

    # ---- the rules for requests that the default best fit does not decide

    def _pick(self, pool: Pool, position: int, size: int) -> int:
        """Return the index of the free piece for the request, from the best fit on; the number of pieces if there is
        none."""
        if not pool.small:
            self._large_requests += 1
        keys = pool.keys
        if position == len(keys):
            return position
        if self._expandable:
            # The last piece before unmapped space counts with the size that it can grow to, so that it is kept for
            # later.
            while position + 1 < len(keys) and self._reach(pool, position + 1) < self._reach(pool, position):
                position += 1
        cached = pool.by_key[keys[position]].size
        if size < self._max_split <= cached:
            return len(keys)
        if size >= self._max_split and cached >= size + self._non_split_rounding:
            return len(keys)
        return position

    @staticmethod
    def _reach(pool: Pool, position: int) -> int:
        piece = pool.by_key[pool.keys[position]]
        behind = piece.behind
        return piece.size + (behind.size if behind is not None and behind.free is None else 0)

    def _acquire(self, pool: Pool, size: int) -> Piece:
        """Return a free piece for the request from new memory. Frees cached segments if necessary."""
        if self._collect_above is not None:
            self._collect_garbage(self._collect_above)
        piece = self._grow(pool, size)
        if piece is None and not self._expandable and self._release_oversize(pool, size):
            piece = self._grow(pool, size)
        if piece is None:
            for handle in list(self._retired):
                self.free(handle)
            self.empty_cache()
            self.retries += 1
            piece = self._grow(pool, size)
        if piece is None:
            self.segment_events.append(SegmentEvent("oom", size, pool.stream))
            raise OutOfMemory(f"{self._segment_bytes(size)} bytes do not fit beside {self.reserved_bytes}")
        return piece

    def _segment_bytes(self, size: int) -> int:
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        return self._large_segment if size < MIDDLE_REQUEST else -(-size // LARGE_STEP) * LARGE_STEP

    def _grow(self, pool: Pool, size: int) -> Piece | None:
        segment = self._segment_bytes(size)
        if self._allowed is not None and self.reserved_bytes + segment > self._allowed:
            return None
        if self._expandable:
            return self._expand(pool, size)
        if self.reserved_bytes + segment > self._capacity:
            return None
        address = self._addresses.take(segment, "segment_alloc")
        self._reserve("segment_alloc", address, segment, pool)
        return Piece(address, segment, 0, False, pool, None, None)

    def _reserve(self, action: str, address: int, size: int, pool: Pool) -> None:
        """Count `size` more bytes as reserved, or fewer where it is negative."""
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.segment_events.append(SegmentEvent(action, abs(size), pool.stream, address))

    def _release(self, piece: Piece) -> None:
        piece.pool.forget(piece)
        self._reserve("segment_free", piece.address, -piece.size, piece.pool)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Free the smallest unsplittable segment that makes room, or several, the largest first."""
        wanted = max(size, self._max_split)
        position = bisect_left(pool.keys, wanted << KEY_SHIFT)
        if position < len(pool.keys):
            self._release(pool.by_key[pool.keys[position]])
            return True
        released = 0
        for piece in reversed(pool.pieces()):
            if released >= wanted or piece.size < self._max_split:
                break
            released += piece.size
            self._release(piece)
        return released >= wanted

    def _collect_garbage(self, threshold_bytes: int) -> None:
        """Free large segments that have been free for longer than the average, until below the threshold."""
        excess = self.reserved_bytes - threshold_bytes
        if excess <= 0:
            return
        pools = [self._pools[stream][1] for stream in sorted(self._pools)]
        candidates = [] if self._expandable else [p for pool in pools for p in pool.pieces() if not p.is_split()]
        ages = {piece.key: self._large_requests - piece.born for piece in candidates}
        total_age, freed_any = sum(ages.values()), True
        while excess > 0 and freed_any and candidates:
            threshold = total_age / len(candidates)
            old = [piece for piece in candidates if ages[piece.key] >= threshold]
            candidates = [piece for piece in candidates if ages[piece.key] < threshold]
            freed_any = bool(old)
            for piece in old:
                excess -= piece.size
                total_age -= ages[piece.key]
                self._release(piece)

    # ---- expandable segments, after ExpandableSegment in c10/cuda/CUDACachingAllocator.cpp: address space that is
    # reserved once, and pages of one segment's size that are mapped into it as it grows

    def _expand(self, pool: Pool, size: int) -> Piece | None:
        """Map pages at the lowest address where free and unmapped space together hold the request. The piece is in no
        pool. None if the pages do not fit; those that did stay mapped, as cached memory."""
        piece = self._find_space(pool, size) or self._new_segment(pool, size)
        if piece is None or (piece.free is None and not self._map(piece, min(piece.size, size))):
            return None
        while piece.size < size:
            behind = piece.behind
            assert behind is not None, "`_find_space` and `_new_segment` return enough contiguous room"
            if not self._map(behind, min(size - piece.size, behind.size)):
                return None
            piece = behind  # merged with the free piece before it
        pool.forget(piece)
        return piece

    def _unmap(self, piece: Piece) -> None:
        """Free the pages that lie entirely inside a free piece; the remainder stays free."""
        pool, page = piece.pool, self._page(piece.pool)
        base = max(base for base in pool.ranges if base <= piece.address)  # of the expandable segment
        begin = base + -(-(piece.address - base) // page) * page
        end = base + (piece.address + piece.size - base) // page * page
        if begin >= end:
            return
        pool.forget(piece)
        if piece.address < begin:
            head, piece = piece, piece.split(begin - piece.address)
            pool.put(head)
        if end < piece.address + piece.size:
            pool.put(piece.split(end - piece.address))
        piece.free = None
        piece.merge_neighbours()
        pool.unmapped[piece.address] = piece
        self._reserve("segment_unmap", begin, begin - end, pool)
        if not piece.is_split():
            del pool.unmapped[piece.address], pool.ranges[piece.address]

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.small else self._large_segment

    def _find_space(self, pool: Pool, size: int) -> Piece | None:
        for address in sorted(pool.unmapped):
            piece = pool.unmapped[address]
            if piece.before is not None and piece.before.free is not False:
                piece = piece.before
            room = 0
            last: Piece | None = piece
            while room < size and last is not None and last.free is not False:
                room += last.size
                last = last.behind
            if room >= size:
                return piece
        return None

    def _new_segment(self, pool: Pool, size: int) -> Piece | None:
        page = self._page(pool)
        if self.reserved_bytes + -(-size // page) * page > self._capacity:
            return None
        reserved = -(-max(self._address_bytes, size) // page) * page
        base = self._addresses.take(reserved, "segment_map")
        pool.ranges[base] = reserved
        pool.unmapped[base] = piece = Piece(base, reserved, 0, None, pool, None, None)
        return piece

    def _map(self, piece: Piece, size: int) -> bool:
        """Map pages to the front of an unmapped piece, merged with free neighbours. False if they do not fit."""
        pool, page = piece.pool, self._page(piece.pool)
        size = -(-size // page) * page
        if self.reserved_bytes + size > self._capacity:
            return False
        address = piece.address
        del pool.unmapped[address]
        if size < piece.size:
            behind = piece.split(size)
            pool.unmapped[behind.address] = behind
        piece.free = True
        piece.merge_neighbours()
        pool.put(piece)
        self._reserve("segment_map", address, size, pool)
        return True


_LONGEST = 4000  # characters of a settings text
MIN_BLOCK_BYTES = 512
# Rounding by divisions of a power of two has one entry for each of 1, 2, 4, ... 32768 MiB and above.
INTERVALS = 16

# Settings of pinned host memory and of locking: valid in PyTorch, without effect on the GPU's memory.
WITHOUT_EFFECT = frozenset(
    {
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_free_catch_all",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Names, units and limits are PyTorch's own (c10/core/AllocatorConfig.cpp, c10/cuda/CUDAAllocatorConfig.cpp, 2.13).

    max_split_size_mb             blocks of this size or more are never split; None: every block may be. At least
                                  `large_segment_size_mb` (up to PyTorch 2.8: more than it)
    max_non_split_rounding_mb     excess of a cached block that may serve such a request; None: that of a large segment
    large_segment_size_mb         size of the segment for requests between 1 and 10 MiB, more than 10
    roundup_power2_divisions      empty, or 16 divisions for sizes from 1, 2, 4, ... 32768 MiB: 0 (off) or a power of 2
    garbage_collection_threshold  share of the allowed memory above which old cached blocks are given back, in (0, 1).
                                  As in PyTorch it has an effect only beside a memory fraction below 1
    expandable_segments           segments that grow, instead of one segment per cudaMalloc
    per_process_memory_fraction   share of the device that this process may reserve, in (0, 1]; None or 1: no limit

    Raises `UsageError` that names every bad key.
    """

    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int | None = None
    large_segment_size_mb: int = 20
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float | None = None
    expandable_segments: bool = False
    per_process_memory_fraction: float | None = None

    def __post_init__(self) -> None:
        segment, divisions = self.large_segment_size_mb, self.roundup_power2_divisions
        split, rounding = self.max_split_size_mb, self.max_non_split_rounding_mb
        threshold, fraction = self.garbage_collection_threshold, self.per_process_memory_fraction
        at_least = f"must be >= large_segment_size_mb = {segment}"
        rules = (
            ("large_segment_size_mb", "must be > 10", segment > 10),
            ("max_split_size_mb", at_least, split is None or split >= segment),
            ("max_non_split_rounding_mb", at_least, rounding is None or rounding >= segment),
            ("roundup_power2_divisions", f"must have {INTERVALS} values", len(divisions) in (0, INTERVALS)),
            (
                "roundup_power2_divisions",
                "must be powers of 2, or 0",
                all(d == 0 or _is_power_of_2(d) for d in divisions),
            ),
            ("garbage_collection_threshold", "must lie in (0, 1)", threshold is None or 0 < threshold < 1),
            ("per_process_memory_fraction", "must lie in (0, 1]", fraction is None or 0 < fraction <= 1),
        )
        wrong = [f"{key} {rule}, got {getattr(self, key)}" for key, rule, holds in rules if not holds]
        refuse(wrong, "allocator settings: ")

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Return the settings from the value of PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF), such as
        `max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True`.

        The last of two equal keys counts; spaces are ignored. Raises `UsageError` for unknown keys, for values that
        PyTorch refuses and for some that it misreads (`12.5` or `-1` for a size), and for the backend
        `cudaMallocAsync`.
        """
        if len(text) > _LONGEST:
            raise UsageError(f"allocator settings: {len(text):,} characters, more than {_LONGEST:,}")
        values: dict[str, Any] = {}
        wrong = []
        for item in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
            if not item:
                continue
            key, colon, value = item.partition(":")
            if key not in _KNOWN:
                raise UsageError(f"allocator settings: unknown key {key!r}; known: {', '.join(sorted(_KNOWN))}")
            try:
                if key in _READERS:
                    values[key] = _READERS[key](value)
                elif key == "backend":
                    if value != "native":
                        raise ValueError("only the native backend is modelled")
                elif not colon or not value:
                    raise ValueError("needs a value")
            except ValueError as problem:
                wrong.append(f"{item!r}: {problem}")
        refuse(wrong, "allocator settings: ")
        return cls(**values)

    def size_rounding(self) -> Callable[[int], int]:
        """Return a function from requested bytes, at least 1, to the size of the block."""
        divisions = self.roundup_power2_divisions
        return round_to_512 if not any(d > 1 for d in divisions) else lambda nbytes: _round_by(divisions, nbytes)


DEFAULT_SETTINGS = AllocatorSettings()


def round_to_512(nbytes: int) -> int:
    """Return the block size without `roundup_power2_divisions`."""
    return (nbytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


def _round_by(divisions: tuple[int, ...], nbytes: int) -> int:
    exponent = nbytes.bit_length() - 1
    parts = divisions[min(max(exponent - 20, 0), INTERVALS - 1)]
    if parts <= 1 or nbytes <= MIN_BLOCK_BYTES * parts:
        return round_to_512(nbytes)
    # A division is at least 512 bytes here, so that the result keeps the alignment of every block.
    part = (1 << exponent) // parts
    return -(-nbytes // part) * part


def _is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _integer(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError("expected a whole number")
    return int(text)


def _boolean(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("expected True or False")
    return text == "True"


def _divisions(text: str) -> tuple[int, ...]:
    """Parse `4`, or `[256:1,512:2,>:8]`: boundaries in MiB. The first value also applies below the first boundary, `>`
    above the last; intervals that are not named stay off."""
    if not text.startswith("["):
        value = _integer(text)
        if not _is_power_of_2(value):
            raise ValueError("divisions must be a power of 2")
        return (value,) * INTERVALS
    if not text.endswith("]"):
        raise ValueError("expected a closing ]")
    divisions = [0] * INTERVALS
    last, named = 0, False
    for entry in filter(None, text[1:-1].split(",")):
        boundary, _, spelled = entry.partition(":")
        value = _integer(spelled)
        if boundary == ">":
            divisions[last + 1 :] = [value] * (INTERVALS - last - 1)
            continue
        if not _is_power_of_2(_integer(boundary)):
            raise ValueError("boundaries must be powers of 2")
        last = min(int(boundary).bit_length() - 1, INTERVALS - 1)
        if not named:
            divisions[:last] = [value] * last
            named = True
        divisions[last] = value
    return tuple(divisions)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number") from None


_READERS: dict[str, Callable[[str], object]] = {
    "max_split_size_mb": _integer,
    "max_non_split_rounding_mb": _integer,
    "large_segment_size_mb": _integer,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _share,
    "expandable_segments": _boolean,
    "per_process_memory_fraction": _share,
}
_KNOWN = {*_READERS, "backend", *WITHOUT_EFFECT}
