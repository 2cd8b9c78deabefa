"""A recorded history of PyTorch's allocator replayed through the allocator simulator, segment by segment.

Start reading at `replay_history`; `workers.probes.gpu` records one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from conf.units import MIB
from featurize.memory.allocator import AddressSpace, CachingAllocator, OutOfMemory, SegmentEvent
from featurize.memory.allocator_settings import AllocatorSettings

TAKEN = ("segment_alloc", "segment_map")
BEYOND = 1 << 50  # past all addresses that a driver gives: where segments go once the two have parted
GIVEN_BACK = ("segment_free", "segment_unmap")
_IN_WORDS = {
    "segment_alloc": "takes a segment of",
    "segment_map": "maps",
    "segment_free": "gives back a segment of",
    "segment_unmap": "unmaps",
    "oom": "runs out of memory for",
}


@dataclass(frozen=True, kw_only=True)
class HistoryReplay:
    """simulated, recorded   segments taken and given back, and out-of-memory errors, in order
    allocator               the simulator as the history left it
    unmatched_frees         freed blocks whose allocation was not recorded; above 0, nothing is proven
    """

    simulated: tuple[SegmentEvent, ...]
    recorded: tuple[SegmentEvent, ...]
    allocator: CachingAllocator
    unmatched_frees: int

    def first_difference(self) -> str | None:
        """None where both agree in every event; otherwise the first one that differs, in words."""
        pairs = itertools.zip_longest(self.simulated, self.recorded)
        for i, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                return (
                    f"at segment event {i} the simulator {_in_words(ours)}, the recorded allocator {_in_words(theirs)}"
                )
        return None


def replay_history(
    entries: Iterable[Mapping[str, Any]],
    settings: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
    total_bytes: int | None = None,
) -> HistoryReplay:
    """Replay one device's entries of `torch.cuda.memory._snapshot()["device_traces"]` with the settings that the
    recorded process had.

    The history must begin before the device's first allocation (`torch.cuda.memory._record_memory_history()`, with
    `max_entries` large enough). Segments are put at the recorded addresses, since those are the driver's choice and
    decide between free blocks of equal size. A block is free from `free_completed` on. `torch.cuda.empty_cache()`
    leaves no entry of its own: segments that were given back where the simulator would not do so for the next
    request were given back by it (where both would explain them, `allocator.retries` may count too few).

    Raises `ValueError` for an unknown action.
    """
    entries = list(entries)
    driver = _RecordedAddresses(entries)
    allocator = CachingAllocator(capacity_bytes, settings, total_bytes=total_bytes, address_space=driver)
    driver.events = allocator.segment_events
    live: dict[int, int | None] = {}
    recorded = []
    unmatched = 0
    pending: list[int] = []  # addresses given back since the last entry that was none of a segment
    for entry in entries:
        action, size = str(entry["action"]), int(entry.get("size", 0))
        stream, address = int(entry.get("stream", 0)), int(entry.get("addr", 0))
        if action in TAKEN or action in GIVEN_BACK:
            recorded.append(SegmentEvent(action, size, stream, address))
            if action in GIVEN_BACK:
                pending.append(address)
        elif action in ("alloc", "oom"):
            if action == "oom":
                recorded.append(SegmentEvent(action, size, stream))
            if pending and not _explains(allocator, size, stream, pending):
                allocator.empty_cache()
            pending = []
            try:
                handle = allocator.allocate(size, stream)
            except OutOfMemory:
                continue
            if action == "alloc":
                live[address] = handle
            else:
                allocator.free(handle)
        elif action == "free_completed":
            if pending:
                allocator.empty_cache()
                pending = []
            if address in live:
                allocator.free(live.pop(address))
            else:
                unmatched += 1
        elif action not in ("free_requested", "snapshot", "user_defined"):
            raise ValueError(f"unknown action {action!r} in a memory history")
    if pending:
        allocator.empty_cache()
    return HistoryReplay(
        simulated=tuple(allocator.segment_events),
        recorded=tuple(recorded),
        allocator=allocator,
        unmatched_frees=unmatched,
    )


def _in_words(event: SegmentEvent | None) -> str:
    if event is None:
        return "does nothing more"
    stream = f" on stream {event.stream}" if event.stream else ""
    return f"{_IN_WORDS[event.action]} {event.size / MIB:,.10g} MiB{stream}"


def _explains(allocator: CachingAllocator, nbytes: int, stream: int, given_back: list[int]) -> bool:
    """Return whether the request itself may have given these segments back, rather than `empty_cache` before it."""
    if not allocator.gives_back_for(nbytes, stream):
        return False
    settings = allocator.settings
    if settings.garbage_collection_threshold is None and settings.max_split_size_mb is None:
        return True
    # Those two give back a part, or in another order, than emptying the cache does.
    whole = [s for s in allocator.snapshot() if [block.state for block in s.blocks] == ["inactive"]]
    whole.sort(key=lambda s: (s.pool == "small", s.stream, s.size, s.address))
    return [s.address for s in whole] != given_back


class _RecordedAddresses(AddressSpace):
    """Puts a segment where the recorded driver put its counterpart, as long as both take the same ones in order."""

    def __init__(self, entries: list[Mapping[str, Any]]) -> None:
        super().__init__()
        self._end = BEYOND
        self._taken = [
            SegmentEvent(str(e["action"]), int(e["size"]), int(e.get("stream", 0)), int(e["addr"]))
            for e in entries
            if e["action"] in TAKEN
        ]
        self.events: list[SegmentEvent] = []  # the simulator's own, which grow
        self._seen = self._count = 0

    def take(self, size: int, action: str) -> int:
        self._count += sum(event.action in TAKEN for event in self.events[self._seen :])
        self._seen = len(self.events)
        expected = self._taken[self._count] if self._count < len(self._taken) else None
        # An expandable segment takes its whole address range at its first mapping.
        if expected is not None and expected.action == action and (action == "segment_map" or expected.size == size):
            return expected.address
        return super().take(size, action)

    def give(self, address: int, size: int) -> None:
        if address >= BEYOND:
            super().give(address, size)
