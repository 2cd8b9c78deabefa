"""A tape of the blocks that a training step takes and gives back: tensors with a count of what refers to them.

Start reading at `Tape.new`; `learn.fastpath.fast_cnn` writes one.
"""

from __future__ import annotations

from learn.fastpath.fast_blocks import EMPTY, KEPT, PROBE, SMALL_REQUEST, units

NONE = -1  # no tensor


class Tape:
    """A tensor is a slot. Its last release gives the block back. Large blocks are events; of small ones, the most bytes
    alive at once are known.

    sizes, references  slot -> units, and how often it is referred to
    events             as `learn.fastpath.fast_blocks.Program` has them
    small_units, most_small_units   alive in small blocks
    """

    def __init__(self, *, empties_cache: bool) -> None:
        self.sizes: list[int] = []
        self.references: list[int] = []
        self.events: list[int] = []
        self.small_units = self.most_small_units = 0
        self._tried: set[tuple] | None = set() if empties_cache else None

    def new(self, nbytes: int) -> int:
        """Take a block of so many bytes; return its slot, referred to once."""
        size = (nbytes + 511) >> 9
        slot = len(self.sizes)
        self.sizes.append(size)
        self.references.append(1)
        if size > SMALL_REQUEST:
            self.events.append(slot)
        else:
            self.small_units += size
            if self.small_units > self.most_small_units:
                self.most_small_units = self.small_units
        return slot

    def absent(self, size: int) -> int:
        """Return a slot of so many units that nothing takes here."""
        self.sizes.append(size)
        self.references.append(0)
        return len(self.sizes) - 1

    def keep(self, slot: int) -> int:
        """Refer to a slot once more; return it."""
        self.references[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Refer to a slot once less."""
        count = self.references[slot] - 1
        self.references[slot] = count
        if count == 0:
            size = self.sizes[slot]
            if size > SMALL_REQUEST:
                self.events.append(~slot)
            else:
                self.small_units -= size

    def workspace(self, nbytes: int) -> None:
        """A kernel takes so many bytes for its own run."""
        size = units(nbytes)
        if size > SMALL_REQUEST:
            self.events.append(PROBE + self.absent(size))

    def handle(self, nbytes: int) -> None:
        """A thread makes its cuBLAS handle and keeps its workspace of so many bytes."""
        self.events.append(KEPT + self.absent(units(nbytes)))

    def tries(self, *call: object) -> None:
        """A convolution was called. With `cudnn.benchmark`, PyTorch empties its cache after the first one of a kind."""
        if self._tried is not None and call not in self._tried:
            self._tried.add(call)
            self.events.append(EMPTY)
