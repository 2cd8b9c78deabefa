"""Memory that was given back while another stream may still use it: when the allocator has it again.

Start reading at `WaitingBlocks`. PyTorch's allocator records an event on each stream that used a block, and gives the
block to nobody before these are over (c10/cuda/CUDACachingAllocator.cpp: `recordStream`, `process_events`).
"""

from __future__ import annotations


class WaitingBlocks:
    """Blocks that other streams use. Moments are numbers of a trace's events.

    The host is taken to run ahead of the GPU as far as it may: it knows that work is over where it waited for what came
    after that, whatever the stream.
    """

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._waiting: dict[int, int] = {}  # block -> when it was given back
        self._until: dict[int, int] = {}

    def use(self, block: int) -> None:
        """Hear that a stream which is not the block's own uses it."""
        self._used.add(block)

    def give_back(self, block: int, moment: int) -> None:
        """Hear that a block is given back."""
        if block in self._used:
            self._waiting[block] = moment

    def settle(self, until: int, moment: int) -> None:
        """Hear that the host has waited for all that came before `until`."""
        for block in [block for block, given_back in self._waiting.items() if given_back < until]:
            del self._waiting[block]
            self._until[block] = moment

    def until(self, block: int, end: int) -> int:
        """Return the moment from which the allocator has a block's memory again, `end` where it never has; 0 where it
        has it at once."""
        return end if block in self._waiting else self._until.get(block, 0)
