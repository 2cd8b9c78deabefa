"""Which elements of a model's parameters each rank of ZeRO updates: equal parts of one flat buffer. Torch-free.

Start reading at `FlatPartition` (DeepSpeed 0.19, deepspeed/runtime/zero/stage_1_and_2.py: `get_partition_info`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_ALIGNMENT = 2  # elements, of each rank's part: nccl_start_alignment_factor


class OwnPart(NamedTuple):
    """Elements of one parameter, which is the `place`-th of the buffer: `elements` from `first` on."""

    place: int
    first: int
    elements: int


class FlatPartition:
    """Parameters one after the other, padded so that all ranks have an even number of elements.

    Args:
        sizes: Elements of each parameter.
        ranks: That share them.
    """

    def __init__(self, sizes: Sequence[int], ranks: int) -> None:
        self.sizes, self.ranks = tuple(sizes), ranks
        unit = _ALIGNMENT * ranks
        self.padded = math.ceil(sum(sizes) / unit) * unit  # elements of the buffer
        self.size = self.padded // ranks  # elements of each rank's part
        self.starts: list[int] = []
        start = 0
        for size in sizes:
            self.starts.append(start)
            start += size

    def of_rank(self, rank: int) -> list[OwnPart]:
        """Return what a rank updates, in the order of the parameters; the rest of its part is padding."""
        ends = self.size * rank, self.size * (rank + 1)
        parts = []
        for place, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            first, last = max(start, ends[0]), min(start + size, ends[1])
            if first < last:
                parts.append(OwnPart(place, first - start, last - first))
        return parts

    def slices(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the rank and the number of elements of each piece of parameters that lie one after the other;
        neighbours of the same rank are one piece."""
        pieces: list[tuple[int, int]] = []
        for place in places:
            at, left = self.starts[place], self.sizes[place]
            while left:
                rank = at // self.size
                count = min(left, self.size * (rank + 1) - at)
                if pieces and pieces[-1][0] == rank:
                    pieces[-1] = rank, pieces[-1][1] + count
                else:
                    pieces.append((rank, count))
                at, left = at + count, left - count
        return pieces
