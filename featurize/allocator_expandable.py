"""Expandable segments of the allocator simulator: address space reserved once, and pages mapped into it as it grows.

Start reading at `ExpandableSegments.expand`. After ExpandableSegment in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

from featurize.allocator_blocks import AddressSpace, Piece, Pool


class ExpandableSegments:
    """Maps and unmaps pages for pools. Pages are 2 MiB in small pools and one large segment, 20 MiB, in large ones.

    address_bytes   what a new segment reserves of the address space, at least
    fits, book      ask for and note memory: bytes, and (`segment_map` or `segment_unmap`, address, signed bytes, pool)
    """

    def __init__(
        self,
        *,
        small_page: int,
        large_page: int,
        address_bytes: int,
        addresses: AddressSpace,
        fits: Callable[[int], bool],
        book: Callable[[str, int, int, Pool], None],
    ) -> None:
        self._small_page, self._large_page, self._address_bytes = small_page, large_page, address_bytes
        self._addresses, self._fits, self._book = addresses, fits, book

    def expand(self, pool: Pool, size: int) -> Piece | None:
        """Map pages at the lowest address where free and unmapped space together hold the request. The piece is in no
        pool. None: the pages don't fit; those that did stay mapped, as cached memory."""
        piece = self._find_space(pool, size) or self._new_segment(pool, size)
        if piece is None or (piece.free is None and not self._map(piece, min(piece.size, size))):
            return None
        while piece.size < size:
            behind = piece.behind
            if behind is None:  # `_find_space` and `_new_segment` give enough room in a row
                raise AssertionError("a segment ends before the room that was found in it")
            if not self._map(behind, min(size - piece.size, behind.size)):
                return None
            piece = behind  # which has swallowed the free piece before it
        pool.take(piece)
        return piece

    def unmap(self, piece: Piece) -> None:
        """Give back the pages that lie wholly inside a free piece; what sticks out of them stays free."""
        pool, page = piece.pool, self._page(piece.pool)
        base = pool.base_of(piece.address)
        begin = base + -(-(piece.address - base) // page) * page
        end = base + (piece.address + piece.size - base) // page * page
        if begin >= end:
            return
        pool.take(piece)
        if piece.address < begin:
            head = Piece(piece.address, begin - piece.address, 0, True, pool, piece.before, piece)
            if piece.before is not None:
                piece.before.behind = head
            piece.before = head
            pool.put(head)
        if end < piece.address + piece.size:
            tail = Piece(end, piece.address + piece.size - end, 0, True, pool, piece, piece.behind)
            if piece.behind is not None:
                piece.behind.before = tail
            piece.behind = tail
            pool.put(tail)
        piece.address, piece.size, piece.free = begin, end - begin, None
        _merge_neighbours(piece)
        pool.unmapped[piece.address] = piece
        self._book("segment_unmap", begin, begin - end, pool)
        if not piece.is_split():
            del pool.unmapped[piece.address]
            self._addresses.give(piece.address, pool.ranges.pop(piece.address))

    def missing_bytes(self, pool: Pool, size: int) -> int:
        """What `expand` would map, all in all. Changes nothing."""
        page = self._page(pool)
        piece = self._find_space(pool, size)
        if piece is None:
            return -(-size // page) * page
        missing = 0
        while size > 0 and piece is not None:
            if piece.free is None:
                taken = min(piece.size, -(-size // page) * page)
                missing, size = missing + taken, size - taken
            else:
                size -= piece.size
            piece = piece.behind
        return missing

    def _page(self, pool: Pool) -> int:
        return self._small_page if pool.small else self._large_page

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
        if not self._fits(-(-size // page) * page):
            return None
        reserved = -(-max(self._address_bytes, size) // page) * page
        base = self._addresses.take(reserved, "segment_map")
        pool.ranges[base] = reserved
        pool.unmapped[base] = piece = Piece(base, reserved, 0, None, pool, None, None)
        return piece

    def _map(self, piece: Piece, size: int) -> bool:
        """Back the front of an unmapped piece with pages, merged with free neighbours. False: they don't fit."""
        pool, page = piece.pool, self._page(piece.pool)
        size = -(-size // page) * page
        if not self._fits(size):
            return False
        address = piece.address
        del pool.unmapped[address]
        if size < piece.size:
            behind = Piece(address + size, piece.size - size, 0, None, pool, piece, piece.behind)
            if piece.behind is not None:
                piece.behind.before = behind
            piece.behind, piece.size = behind, size
            pool.unmapped[behind.address] = behind
        piece.free = True
        _merge_neighbours(piece)
        pool.put(piece)
        self._book("segment_map", address, size, pool)
        return True


def _merge_neighbours(piece: Piece) -> None:
    """Swallow the neighbours in the same state, free or unmapped, which leave their pool. `piece` is in none."""
    pool = piece.pool
    before, behind = piece.before, piece.behind
    if before is not None and before.free is piece.free:
        _forget(pool, before)
        piece.address, piece.before = before.address, before.before
        piece.size += before.size
        if piece.before is not None:
            piece.before.behind = piece
    if behind is not None and behind.free is piece.free:
        _forget(pool, behind)
        piece.behind = behind.behind
        piece.size += behind.size
        if piece.behind is not None:
            piece.behind.before = piece


def _forget(pool: Pool, piece: Piece) -> None:
    if piece.free:
        pool.take(piece)
    else:
        del pool.unmapped[piece.address]
