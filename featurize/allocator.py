"""PyTorch's CUDA caching allocator, simulated rule by rule: which block serves a request, and what stays reserved.

Start reading at `CachingAllocator.allocate`. It follows c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.4 to 2.13.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort

from conf.units import MIB
from featurize.allocator_blocks import (
    ADDRESS_SHIFT,
    KEY_SHIFT,
    AddressSpace,
    Piece,
    Pool,
    Segment,
    SegmentEvent,
    segments_of,
)
from featurize.allocator_expandable import ExpandableSegments
from featurize.allocator_settings import AllocatorSettings, round_to_512

SMALL_REQUEST = MIB  # and below: the small pool
SMALL_SEGMENT = 2 * MIB
MIDDLE_REQUEST = 10 * MIB  # below: a segment of `large_segment_size_mb`
LARGE_STEP = 2 * MIB  # from there on a segment is the request rounded up to this
LEAST_REST_SMALL = 512
LEAST_REST_LARGE = MIB + 512  # "more than 1 MiB", in steps of 512
UNLIMITED = 1 << 62
UNBOUNDED_ADDRESSES = 1 << 40  # of an expandable segment where no capacity is given

# Handles are never used twice, not even by two allocators: a stale or foreign one is always noticed.
_handles = itertools.count(1)


class OutOfMemory(Exception):
    """No cached block serves the request, and no segment for it fits, even after all cached segments were given back.

    requested_bytes   of the segment that did not fit; `capacity_bytes` is the limit it met: what the device gives,
    or the allowed fraction of it.
    """

    def __init__(self, *, requested_bytes: int, reserved_bytes: int, allocated_bytes: int, capacity_bytes: int) -> None:
        super().__init__(
            f"out of memory: tried to reserve {requested_bytes} bytes more than the {reserved_bytes} reserved "
            f"({allocated_bytes} allocated) of {capacity_bytes}"
        )
        self.requested_bytes, self.reserved_bytes = requested_bytes, reserved_bytes
        self.allocated_bytes, self.capacity_bytes = allocated_bytes, capacity_bytes


class CachingAllocator:
    """One device's allocator. All sizes in bytes.

    capacity_bytes     what the driver can give this process, None: all it asks for
    total_bytes        the device's memory as the driver states it, which `per_process_memory_fraction` is a share of
                       and expandable segments reserve 9/8 of as address space; `capacity_bytes` by default
    allocated_bytes    in blocks handed out, with rounding; `requested_bytes` without; `reserved_bytes` in segments
    retries, ooms      how often all cached segments were given back for a request, and how often that did not help
    segment_events     every segment taken and given back, and every out-of-memory, in order

    Not modelled: private pools of CUDA graphs and `MemPool`, the backend `cudaMallocAsync`, and the driver's own
    fragmentation: a segment fits where its bytes do.
    Where PyTorch's rules changed, the newest hold; they differ from those of 2.4 in settings out of the ordinary only.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        *,
        total_bytes: int | None = None,
        address_space: AddressSpace | None = None,
    ) -> None:
        settings = settings if settings is not None else AllocatorSettings()
        self.settings = settings
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = self.ooms = 0
        self.segment_events: list[SegmentEvent] = []
        total = total_bytes if total_bytes is not None else capacity_bytes
        fraction, share = settings.per_process_memory_fraction, settings.garbage_collection_threshold
        self._allowed: int | None = None
        self._collect_above: int | None = None
        if total is not None and fraction is not None and fraction < 1:
            self._allowed = int(fraction * total)
            self._collect_above = None if share is None else int(share * self._allowed)
        self._capacity = UNLIMITED if capacity_bytes is None else capacity_bytes
        self._round = None if settings.size_rounding() is round_to_512 else settings.size_rounding()
        self._large_segment = settings.large_segment_size_mb * MIB
        self._max_split = UNLIMITED if settings.max_split_size_mb is None else settings.max_split_size_mb * MIB
        rounding = settings.max_non_split_rounding_mb
        self._non_split_rounding = self._large_segment if rounding is None else rounding * MIB
        self._expandable = settings.expandable_segments
        self._split_below = UNLIMITED if self._expandable else self._max_split
        self._least_rest = LEAST_REST_SMALL if self._expandable else LEAST_REST_LARGE
        # Whether the best fit is not simply taken: kept out of the way of the default settings.
        self._picky = self._expandable or self._max_split < UNLIMITED or self._collect_above is not None
        self._large_requests = 0
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # stream -> small, large
        self._live: dict[int, Piece] = {}
        self._retired: set[int] = set()  # of these
        self._addresses = address_space if address_space is not None else AddressSpace()
        self._pages = ExpandableSegments(
            small_page=SMALL_SEGMENT,
            large_page=self._large_segment,
            address_bytes=UNBOUNDED_ADDRESSES if total is None else total + total // 8,
            addresses=self._addresses,
            fits=self._fits,
            book=self._reserve,
        )

    def allocate(self, nbytes: int, stream: int = 0) -> int | None:
        """A handle to a block of at least `nbytes`, for `free`; None, and no block, for 0 bytes.

        Raises `OutOfMemory`, which leaves the allocator usable, its cache given back.
        """
        if nbytes <= 0:
            if nbytes < 0:
                raise ValueError(f"nbytes must be >= 0, got {nbytes}")
            return None
        size = (nbytes + 511) & -512 if self._round is None else self._round(nbytes)
        pools = self._pools.get(stream)
        pool = (pools if pools is not None else self._new_pools(stream))[size > SMALL_REQUEST]
        keys = pool.keys
        at = bisect_left(keys, size << KEY_SHIFT)
        if self._picky:
            at = self._pick(pool, at, size)
        piece = pool.by_key.pop(keys.pop(at)) if at < len(keys) else self._acquire(pool, size)
        rest = piece.size - size
        if rest >= pool.least_rest and size < self._split_below:
            # The front is handed out, the rest stays where it is in the chain of neighbours.
            address = piece.address
            before = piece.before
            front = Piece(address, size, nbytes, False, pool, before, piece)
            if before is not None:
                before.behind = front
            piece.before = front
            piece.size = rest
            piece.address = address = address + size
            piece.free = True
            piece.key = key = (rest << KEY_SHIFT) | (address >> ADDRESS_SHIFT)
            insort(keys, key)
            pool.by_key[key] = piece
            if self._picky:
                pool.born[key] = self._large_requests
        else:
            size += rest
            front = piece
            piece.free = False
            piece.requested = nbytes
        self.requested_bytes += nbytes
        self.allocated_bytes = allocated = self.allocated_bytes + size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        handle = next(_handles)
        self._live[handle] = front
        return handle

    def free(self, handle: int | None) -> None:
        """Give a block back to its stream's pool, merged with free neighbours. None, the empty block, is nothing.

        Raises `ValueError` for a handle that is not this allocator's, or was freed.
        """
        if handle is None:
            return
        piece = self._live.pop(handle, None)
        if piece is None:
            raise ValueError(f"{handle!r} is no live block of this allocator: freed twice, or another allocator's")
        size = piece.size
        if handle in self._retired:
            self._retired.discard(handle)
        else:
            self.allocated_bytes -= size
            self.requested_bytes -= piece.requested
        pool = piece.pool
        keys, by_key = pool.keys, pool.by_key
        near = piece.before
        if near is not None and near.free:
            key = near.key
            del keys[bisect_left(keys, key)]
            del by_key[key]
            size += near.size
            piece.address = near.address
            piece.before = near = near.before
            if near is not None:
                near.behind = piece
        near = piece.behind
        if near is not None and near.free:
            key = near.key
            del keys[bisect_left(keys, key)]
            del by_key[key]
            size += near.size
            piece.behind = near = near.behind
            if near is not None:
                near.before = piece
        piece.size = size
        piece.free = True
        piece.key = key = (size << KEY_SHIFT) | (piece.address >> ADDRESS_SHIFT)
        insort(keys, key)
        by_key[key] = piece
        if self._picky:
            pool.born[key] = self._large_requests

    def retire(self, handle: int | None) -> None:
        """Count a block as given back, while another stream uses it (`record_stream`): `settle` gives its memory to
        others. Out of memory, PyTorch waits for these streams."""
        if handle is None:
            return
        piece = self._live[handle]
        self.allocated_bytes -= piece.size
        self.requested_bytes -= piece.requested
        self._retired.add(handle)

    def settle(self, handle: int | None) -> None:
        """Give back a retired block, unless it was given back for lack of memory."""
        if handle in self._retired:
            self.free(handle)

    def empty_cache(self) -> None:
        """Give back every segment, and every page of expandable segments, in which nothing lives."""
        for of_size in (1, 0):  # the large pools first
            pieces = [piece for stream in sorted(self._pools) for piece in self._pools[stream][of_size].pieces()]
            for piece in pieces:
                if self._expandable:
                    self._pages.unmap(piece)
                elif not piece.is_split():
                    self._release(piece)

    def address_of(self, handle: int) -> int:
        """Where a live block begins. Raises `KeyError` for any other handle."""
        return self._live[handle].address

    def snapshot(self) -> tuple[Segment, ...]:
        """Every segment with its blocks, by address: what `torch.cuda.memory_snapshot()` shows."""
        free = (piece for pools in self._pools.values() for pool in pools for piece in pool.by_key.values())
        return segments_of(itertools.chain(free, self._live.values()), expandable=self._expandable)

    def gives_back_for(self, nbytes: int, stream: int = 0) -> bool:
        """Return whether a request would make the allocator give cached segments back, or try to. Changes no block."""
        size = self.settings.size_rounding()(nbytes)
        pool = (self._pools.get(stream) or self._new_pools(stream))[size > SMALL_REQUEST]
        counted = self._large_requests
        at = bisect_left(pool.keys, size << KEY_SHIFT)
        fits = (self._pick(pool, at, size) if self._picky else at) < len(pool.keys)
        self._large_requests = counted
        if fits:
            return False
        if not self._expandable and self._collect_above is not None and self.reserved_bytes > self._collect_above:
            return True
        segment = self._segment_bytes(size)
        missing = self._pages.missing_bytes(pool, size) if self._expandable else segment
        return not (self._is_allowed(segment) and self._fits(missing))

    # ---- the rules of a request that the default best fit does not settle

    def _new_pools(self, stream: int) -> tuple[Pool, Pool]:
        self._pools[stream] = pools = (
            Pool(small=True, stream=stream, least_rest=LEAST_REST_SMALL),
            Pool(small=False, stream=stream, least_rest=self._least_rest),
        )
        return pools

    def _pick(self, pool: Pool, at: int, size: int) -> int:
        """Which free piece serves the request, from the best fit on; the number of pieces for none of them."""
        if not pool.small:
            self._large_requests += 1
        keys = pool.keys
        if at == len(keys):
            return at
        if self._expandable:
            # The last piece before unmapped space counts as large as it can become, so that it is kept for later.
            while at + 1 < len(keys) and self._reach(pool, at + 1) < self._reach(pool, at):
                at += 1
        cached = pool.by_key[keys[at]].size
        if size < self._max_split <= cached:
            return len(keys)
        if size >= self._max_split and cached >= size + self._non_split_rounding:
            return len(keys)
        return at

    @staticmethod
    def _reach(pool: Pool, at: int) -> int:
        piece = pool.by_key[pool.keys[at]]
        behind = piece.behind
        return piece.size + (behind.size if behind is not None and behind.free is None else 0)

    def _acquire(self, pool: Pool, size: int) -> Piece:
        """A free piece for the request from new memory. Gives cached segments back where it must."""
        if self._collect_above is not None:
            self._collect_garbage(self._collect_above)
        piece = self._grow(pool, size)
        if piece is None and self._max_split < UNLIMITED and self._release_oversize(pool, size):
            piece = self._grow(pool, size)
        if piece is None:
            for handle in list(self._retired):
                self.free(handle)
            self.empty_cache()
            self.retries += 1
            piece = self._grow(pool, size)
        if piece is None:
            self.ooms += 1
            self.segment_events.append(SegmentEvent("oom", size, pool.stream))
            segment = self._segment_bytes(size)
            raise OutOfMemory(
                requested_bytes=segment,
                reserved_bytes=self.reserved_bytes,
                allocated_bytes=self.allocated_bytes,
                capacity_bytes=self._capacity if self._allowed is None or self._is_allowed(segment) else self._allowed,
            )
        return piece

    def _segment_bytes(self, size: int) -> int:
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        return self._large_segment if size < MIDDLE_REQUEST else -(-size // LARGE_STEP) * LARGE_STEP

    def _is_allowed(self, segment: int) -> bool:
        return self._allowed is None or self.reserved_bytes + segment <= self._allowed

    def _fits(self, nbytes: int) -> bool:
        return self.reserved_bytes + nbytes <= self._capacity

    def _grow(self, pool: Pool, size: int) -> Piece | None:
        segment = self._segment_bytes(size)
        if not self._is_allowed(segment):
            return None
        if self._expandable:
            return self._pages.expand(pool, size)
        if not self._fits(segment):
            return None
        address = self._addresses.take(segment, "segment_alloc")
        self._reserve("segment_alloc", address, segment, pool)
        return Piece(address, segment, 0, False, pool, None, None)

    def _reserve(self, action: str, address: int, size: int, pool: Pool) -> None:
        """Book `size` more bytes as reserved, or fewer where it is negative."""
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.segment_events.append(SegmentEvent(action, abs(size), pool.stream, address))

    def _release(self, piece: Piece) -> None:
        piece.pool.take(piece)
        self._reserve("segment_free", piece.address, -piece.size, piece.pool)
        self._addresses.give(piece.address, piece.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back the smallest unsplittable segment that makes room, or several, the largest first."""
        wanted = max(size, self._max_split)
        at = bisect_left(pool.keys, wanted << KEY_SHIFT)
        if at < len(pool.keys) and not self._expandable:
            self._release(pool.by_key[pool.keys[at]])
            return True
        released = 0
        for piece in reversed(pool.pieces()[:at]):
            if released >= wanted or piece.size < self._max_split:
                break
            if not self._expandable:
                released += piece.size
                self._release(piece)
        return released >= wanted

    def _collect_garbage(self, threshold_bytes: int) -> None:
        """Give back large segments that have been free for longer than the average, until below the threshold."""
        excess = self.reserved_bytes - threshold_bytes
        if excess <= 0:
            return
        pools = [self._pools[stream][1] for stream in sorted(self._pools)]
        whole = [] if self._expandable else [p for pool in pools for p in pool.pieces() if not p.is_split()]
        ages = {piece.key: self._large_requests - piece.pool.born[piece.key] for piece in whole}
        total_age, freed_any = sum(ages.values()), True
        while excess > 0 and freed_any and whole:
            threshold = total_age / len(whole)
            old = [piece for piece in whole if ages[piece.key] >= threshold]
            whole = [piece for piece in whole if ages[piece.key] < threshold]
            freed_any = bool(old)
            for piece in old:
                excess -= piece.size
                total_age -= ages[piece.key]
                self._release(piece)
