"""A replay in the format of `torch.cuda.memory._dump_snapshot`, which PyTorch's memory viewer opens.

Start reading at `RecordingAllocator`. The format is that of torch/csrc/cuda/Module.cpp (`THCPModule_memorySnapshot`)
and of the `TypedDict`s in torch/cuda/memory.py, of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from featurize.memory.allocator import CachingAllocator
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.recording.step_trace import Block, StepTrace

_POOL = (0, 0)  # the default memory pool, in which everything lies but CUDA graphs
# The viewer fails where entries have categories and none is of this one (torch/utils/viz/MemoryViz.js, at the end of
# `annotate_snapshot`).
_OF_SEGMENTS = "unknown"
_LINE = 0  # frames are operators and modules, which have no line


class _Taken(NamedTuple):
    """A live block of memory: where it begins, the bytes that were requested, and the entries that all of it share."""

    address: int
    requested_bytes: int
    shared: dict[str, Any]


class RecordingAllocator(CachingAllocator):
    """A caching allocator that keeps the history of a trace's replay, as `_record_memory_history` does.

    Args:
        trace: Whose events are replayed, in their order.
        at: The events so far; its length is the number of the event under way.
        settings, capacity_bytes, total_bytes: As in `CachingAllocator`.
    """

    def __init__(
        self,
        trace: StepTrace,
        at: Sequence[object],
        settings: AllocatorSettings | None,
        capacity_bytes: int | None,
        total_bytes: int | None,
    ) -> None:
        super().__init__(capacity_bytes, settings, total_bytes=total_bytes)
        self._trace, self._at = trace, at
        self._entries: list[dict[str, Any]] = []
        self._taken: dict[int, _Taken] = {}
        self._segments_seen = 0

    def allocate(self, nbytes: int, stream: int = 0) -> int | None:
        """Take a block, as in `CachingAllocator.allocate`."""
        shared = self._shared(stream)
        try:
            handle = super().allocate(nbytes, stream)
        finally:
            self._see_segments(shared)
        if handle is not None:
            taken = self._taken[handle] = _Taken(self.address_of(handle), nbytes, shared)
            self._enter("alloc", taken)
        return handle

    def free(self, handle: int | None) -> None:
        """Give a block back, as in `CachingAllocator.free`."""
        retired = handle in self._retired
        super().free(handle)
        if handle is None:
            return
        taken = self._taken.pop(handle)
        if not retired:
            self._enter("free_requested", taken)
        self._enter("free_completed", taken)

    def touch(self, nbytes: int, stream: int = 0) -> int:
        """Take a block and give it back, as in `CachingAllocator.touch`."""
        handle = self.allocate(nbytes, stream)
        allocated = self.allocated_bytes
        self.free(handle)
        return allocated

    def retire(self, handle: int | None) -> None:
        """Count a block as given back, as in `CachingAllocator.retire`."""
        super().retire(handle)
        if handle is not None:
            self._enter("free_requested", self._taken[handle])

    def memory_snapshot(self) -> dict[str, Any]:
        """Return the segments as they are now, and the history, as `torch.cuda.memory._snapshot()` returns them."""
        self._see_segments(self._shared(0))
        by_address = {taken.address: taken for taken in self._taken.values()}
        retired = {self._taken[handle].address for handle in self._retired}
        segments = []
        for segment in self.snapshot():
            blocks = []
            for piece in segment.blocks:
                taken = by_address.get(piece.address) if piece.state != "inactive" else None
                blocks.append(
                    {
                        "address": piece.address,
                        "size": piece.size,
                        "requested_size": piece.requested,
                        "state": "active_pending_free" if piece.address in retired and taken else piece.state,
                        "frames": taken.shared["frames"] if taken is not None else [],
                    }
                )
            active = [block for block in blocks if block["state"] != "inactive"]
            segments.append(
                {
                    "device": 0,
                    "address": segment.address,
                    "total_size": segment.size,
                    "allocated_size": sum(b["size"] for b in active if b["state"] == "active_allocated"),
                    "active_size": sum(b["size"] for b in active),
                    "requested_size": sum(b["requested_size"] for b in active),
                    "stream": segment.stream,
                    "segment_type": segment.pool,
                    "segment_pool_id": _POOL,
                    "is_expandable": segment.expandable,
                    "frames": [],
                    "blocks": blocks,
                }
            )
        return {
            "segments": segments,
            "device_traces": [self._entries],
            "allocator_settings": {"expandable_segments": self.settings.expandable_segments},
            "external_annotations": [],
        }

    def _shared(self, stream: int) -> dict[str, Any]:
        """Return what every entry of the event under way has."""
        number = len(self._at)
        if number >= len(self._trace.events):
            return {"stream": stream, "frames": [], "category": _OF_SEGMENTS}
        event = self._trace.events[number]
        block = self._trace.blocks[event.block]
        return {"stream": stream, "frames": _frames(block, event.step, event.phase), "category": block.kind}

    def _see_segments(self, shared: dict[str, Any]) -> None:
        """Enter what the driver gave, took back or refused since the last time."""
        for seen in self.segment_events[self._segments_seen :]:
            place = {"device_free": self._free_bytes()} if seen.action == "oom" else {"addr": seen.address}
            self._entries.append(
                {
                    **shared,
                    "action": seen.action,
                    "size": seen.size,
                    "stream": seen.stream,
                    **place,
                    **self._clock(),
                    "category": _OF_SEGMENTS,
                }
            )
        self._segments_seen = len(self.segment_events)

    def _enter(self, action: str, taken: _Taken) -> None:
        place = {"addr": taken.address, "size": taken.requested_bytes}
        self._entries.append({**taken.shared, "action": action, **place, **self._clock()})

    def _clock(self) -> dict[str, Any]:
        """Return an entry's time: its number in µs, as a replay has an order and no clock."""
        return {"time_us": len(self._entries), "pool_id": _POOL}

    def _free_bytes(self) -> int:
        return 0 if self.capacity_bytes is None else max(0, self.capacity_bytes - self.reserved_bytes)


def _frames(block: Block, step: int, phase: str) -> list[dict[str, Any]]:
    """Return a block's stack, the innermost frame first: its operator, the modules around it, the phase of its step."""
    names = [block.operator or (block.call.kind if block.call is not None else block.kind)]
    parts = block.module.split(".") if block.module else []
    modules = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    frames = [{"name": names[0], "filename": block.module or "model", "line": _LINE}]
    frames += [{"name": module, "filename": "module", "line": _LINE} for module in modules]
    return [*frames, {"name": phase, "filename": f"step {step}" if step else "set-up", "line": _LINE}]
