"""Places a traced step's memory as PyTorch would on one GPU model: its peaks, whether it fits, and the peak's parts.

Start reading at `replay`. The allocator is `featurize.memory.allocator`; workspaces are in
`featurize.operators.library_calls`. `RecordingAllocator` records a replay in the format of PyTorch's memory viewer
(torch/csrc/cuda/Module.cpp, `THCPModule_memorySnapshot`, and torch/cuda/memory.py, of PyTorch 2.13).
`replay_history` replays a history that `workers.probes.children` recorded from a real allocator.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from conf.units import MIB
from featurize.device.device_spec import CUDNN_MIB, DeviceSpec
from featurize.memory.allocator import (
    AddressSpace,
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    Pool,
    SegmentEvent,
)
from featurize.operators.library_calls import CUBLAS, ConvolutionWorkspace, LibraryCall
from featurize.recording.step_trace import BLOCK_KINDS, Block, StepTrace


class Moment(NamedTuple):
    """The allocator after one event of the trace, in bytes. For a workspace, it is the state while it is allocated."""

    step: int
    phase: str
    block: int  # index of the trace's block
    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Result of a replay, in bytes of the allocator; the context lies outside it.

    fits            False: the step needs more than the capacity even after cached memory was freed, and the
                    peaks are those of a device without limit
    peak_parts      block kind -> bytes at the peak of allocated memory, workspaces included; they sum to
                    `peak_allocated`, except for rounding: to 512 bytes, or up to a cached block that is at most
                    1 MiB larger and is not split
    peak_modules    module -> bytes of the activations alive then that its operators made
    peak_operator, peak_module   source of the last allocation before that peak
    retries         number of times that cached memory had to be freed
    timeline        every moment, in order; empty unless requested
    snapshot        the allocator's history and its state at the end, in the format of PyTorch's memory snapshots; None
                    without a timeline. For a step that does not fit, it ends where memory runs out.
    workspaces      workspace and source for each distinct convolution; empty where all are guessed
    """

    fits: bool
    peak_allocated: int
    peak_reserved: int
    retries: int
    peak_step: int
    peak_phase: str
    peak_operator: str
    peak_module: str
    peak_parts: Mapping[str, int]
    peak_modules: Mapping[str, int]
    timeline: tuple[Moment, ...] = field(default=(), repr=False)
    snapshot: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    workspaces: Mapping[LibraryCall, ConvolutionWorkspace] = field(default_factory=dict, repr=False)


def loads_cudnn(trace: StepTrace) -> bool:
    """Return whether a step runs cuDNN's layers."""
    calls = (block.call for block in trace.blocks)
    return trace.remembered("cuDNN", lambda: any(call is not None and call.loads_cudnn for call in calls))


def outside_mib(trace: StepTrace, spec: DeviceSpec) -> float:
    """Return the MiB outside the allocator on the machine of the device's description: the context, and cuDNN where its
    layers run. `featurize.device.device_spec` has other machines."""
    return spec.context_mib + (CUDNN_MIB if loads_cudnn(trace) else 0)


def replay(
    trace: StepTrace,
    spec: DeviceSpec,
    *,
    cudnn_benchmark: bool = False,
    allocator: AllocatorSettings | None = None,
    timeline: bool = False,
    taken_mib: float | None = None,
    workspaces: Mapping[LibraryCall, ConvolutionWorkspace] | None = None,
) -> MemoryProfile:
    """Replay a trace's set-up and both steps through the caching allocator of one GPU model.

    The capacity is the device's memory without the memory outside the allocator: `taken_mib`, by default `outside_mib`.
    Where it does not suffice, cached segments are freed first, then convolutions do without their workspace, as in
    PyTorch. Assumes one stream, and a fresh process. With `cudnn_benchmark`, PyTorch empties its cache after it has
    tried a convolution's algorithms for the first time; the tried algorithms are assumed to need as much as the chosen
    one. `workspaces` holds workspaces of convolutions (`featurize.memory.cudnn_workspaces`), else they are guessed; of
    several sizes, the largest that fits is used.
    """
    on_card = partial(TraceReplay, trace, spec, cudnn_benchmark, allocator, workspaces, timeline)
    if timeline or workspaces:
        profile = on_card(capacity=None).play()
    else:
        key = ("replay", *trace.guessed_sizes(spec).values(), cudnn_benchmark, allocator)
        profile = trace.remembered(key, lambda: on_card(capacity=None).play())
    taken_mib = outside_mib(trace, spec) if taken_mib is None else taken_mib
    capacity = int((spec.memory_mib - taken_mib) * MIB)
    # Below the card's limit, a limit matters only to settings that depend on it.
    limits = allocator is not None and allocator.per_process_memory_fraction is not None
    if profile.peak_reserved <= capacity and not limits:
        return profile
    limited = on_card(capacity=capacity)
    try:
        return limited.play()
    except OutOfMemory:
        return replace(profile, fits=False, snapshot=limited.snapshot())


class _Live(NamedTuple):
    """Memory that is alive after one of a trace's events: bytes by kind of block, and of activations by module, the
    most first; and the calls of cuBLAS so far, which keep their workspaces."""

    parts: dict[str, int]
    modules: dict[str, int]
    kept: list[LibraryCall]


def _live_at(trace: StepTrace, index: int) -> _Live:
    parts, kept = dict.fromkeys(BLOCK_KINDS, 0), []
    modules: Counter[str] = Counter()
    for event in trace.events[: index + 1]:
        block = trace.blocks[event.block]
        parts[block.kind] = parts.get(block.kind, 0) + event.nbytes
        if block.call is not None and block.call.kind == CUBLAS:
            kept.append(block.call)
        if block.kind == "activation":
            modules[block.module] += event.nbytes
    return _Live(parts, {name: nbytes for name, nbytes in modules.most_common() if nbytes}, kept)


class TraceReplay:
    """One pass over the events."""

    def __init__(
        self,
        trace: StepTrace,
        spec: DeviceSpec,
        cudnn_benchmark: bool,
        settings: AllocatorSettings | None,
        workspaces: Mapping[LibraryCall, ConvolutionWorkspace] | None,
        timeline: bool,
        capacity: int | None,
    ) -> None:
        self.trace, self.cudnn_benchmark, self.timeline = trace, cudnn_benchmark, timeline
        self.workspaces = workspaces or {}
        self._sizes: dict[LibraryCall, Sequence[int]] = {
            call: (size,) for call, size in trace.guessed_sizes(spec).items()
        }
        self._sizes |= {call: answer.sizes for call, answer in self.workspaces.items()}
        total = None if capacity is None else int(spec.memory_mib * MIB)
        self.moments: list[Moment] = []
        self.allocator = (
            RecordingAllocator(trace, self.moments, settings, capacity, total)
            if timeline
            else CachingAllocator(capacity, settings, total_bytes=total)
        )
        self.peak, self.peak_at, self.peak_workspace = 0, -1, 0
        self._tried: set[LibraryCall] = set()

    def play(self) -> MemoryProfile:
        """Replay the events, and return what they need. Raises `OutOfMemory`."""
        allocator, blocks, timeline = self.allocator, self.trace.blocks, self.timeline
        allocate, free = allocator.allocate, allocator.free
        placed: dict[int, int | None] = {}
        retired: dict[int, list[int | None]] = {}  # index of an event -> blocks whose memory is available before it
        for index, (block, nbytes, step, phase) in enumerate(self.trace.events):
            if retired:
                for handle in retired.pop(index, ()):
                    allocator.settle(handle)
            call, workspace = None, 0
            if nbytes > 0:
                placed[block] = allocate(nbytes, blocks[block].stream)
            elif nbytes < 0:
                if (until := blocks[block].kept_until) > index:
                    allocator.retire(placed[block])
                    retired.setdefault(until, []).append(placed.pop(block))
                else:
                    free(placed.pop(block))
            else:
                call = blocks[block].call
            if call is None:
                allocated = allocator.allocated_bytes
            else:
                allocated, workspace = self._take(call)
            if allocated > self.peak:
                self.peak, self.peak_at = allocated, index
                self.peak_workspace = 0 if call is not None and call.kind == CUBLAS else workspace
            if timeline:
                self.moments.append(Moment(step, phase, block, allocated, allocator.reserved_bytes))
            if call is not None and self.cudnn_benchmark and call.spare:
                tried = call if self.workspaces else call._replace(convolution=None)
                if tried not in self._tried:
                    self._tried.add(tried)
                    allocator.empty_cache()
        return self._profile()

    def _profile(self) -> MemoryProfile:
        trace = self.trace
        live = trace.remembered(("live", self.peak_at), lambda: _live_at(trace, self.peak_at))
        kept = sum(self._sizes[call][0] for call in live.kept)
        peak = trace.events[self.peak_at] if trace.events else None
        peak_block = trace.blocks[peak.block] if peak is not None else None
        return MemoryProfile(
            fits=True,
            peak_allocated=self.allocator.peak_allocated_bytes,
            peak_reserved=self.allocator.peak_reserved_bytes,
            retries=self.allocator.retries,
            peak_step=peak.step if peak is not None else 0,
            peak_phase=peak.phase if peak is not None else "setup",
            peak_operator=peak_block.operator if peak_block is not None else "",
            peak_module=peak_block.module if peak_block is not None else "",
            peak_parts=live.parts | {"workspace": live.parts["workspace"] + self.peak_workspace + kept},
            peak_modules=live.modules,
            timeline=tuple(self.moments),
            snapshot=self.snapshot(),
            workspaces=self.workspaces,
        )

    def snapshot(self) -> dict[str, Any] | None:
        """Return the allocator's history and state, if the timeline was requested."""
        return self.allocator.memory_snapshot() if isinstance(self.allocator, RecordingAllocator) else None

    def _take(self, call: LibraryCall) -> tuple[int, int]:
        """Allocate a workspace: its largest size that fits, or none. Return the bytes that are then allocated, and
        those of the workspace."""
        for size in self._sizes[call]:
            try:
                if call.kind != CUBLAS:
                    return self.allocator.touch(size), size
                self.allocator.allocate(size)  # kept by its handle
                return self.allocator.allocated_bytes, size
            except OutOfMemory:
                if not call.spare:
                    raise
        return self.allocator.allocated_bytes, 0


_POOL = (0, 0)  # the default memory pool, which holds everything except CUDA graphs
# The viewer fails if entries have categories and none of them is this one (torch/utils/viz/MemoryViz.js, at the end of
# `annotate_snapshot`).
_OF_SEGMENTS = "unknown"
_LINE = 0  # frames are operators and modules, without line numbers


class _Taken(NamedTuple):
    """A live block of memory: its address, the requested bytes, and the fields that all of its entries share."""

    address: int
    requested_bytes: int
    shared: dict[str, Any]


class RecordingAllocator(CachingAllocator):
    """A caching allocator that records the history of a trace's replay, as `_record_memory_history` does.

    Args:
        trace: Trace whose events are replayed, in their order.
        events_so_far: The events so far; its length is the index of the current event.
        settings, capacity_bytes, total_bytes: As in `CachingAllocator`.
    """

    def __init__(
        self,
        trace: StepTrace,
        events_so_far: Sequence[object],
        settings: AllocatorSettings | None,
        capacity_bytes: int | None,
        total_bytes: int | None,
    ) -> None:
        super().__init__(capacity_bytes, settings, total_bytes=total_bytes)
        self._picky = True  # without the shortcut of `touch`: its block is part of the history
        self._trace, self._at = trace, events_so_far
        self._entries: list[dict[str, Any]] = []
        self._taken: dict[int, _Taken] = {}
        self._segments_seen = 0

    def allocate(self, nbytes: int, stream: int = 0) -> int | None:
        """Allocate a block, as `CachingAllocator.allocate`."""
        shared = self._common_fields(stream)
        try:
            handle = super().allocate(nbytes, stream)
        finally:
            self._see_segments(shared)
        if handle is not None:
            block = self._taken[handle] = _Taken(self.address_of(handle), nbytes, shared)
            self._enter("alloc", block)
        return handle

    def free(self, handle: int | None) -> None:
        """Free a block, as `CachingAllocator.free`."""
        retired = handle in self._retired
        super().free(handle)
        if handle is None:
            return
        block = self._taken.pop(handle)
        if not retired:
            self._enter("free_requested", block)
        self._enter("free_completed", block)

    def retire(self, handle: int | None) -> None:
        """Count a block as freed, as `CachingAllocator.retire`."""
        super().retire(handle)
        if handle is not None:
            self._enter("free_requested", self._taken[handle])

    def memory_snapshot(self) -> dict[str, Any]:
        """Return the current segments and the history, like `torch.cuda.memory._snapshot()`."""
        self._see_segments(self._common_fields(0))
        by_address = {live_block.address: live_block for live_block in self._taken.values()}
        retired = {self._taken[handle].address for handle in self._retired}
        segments = []
        for segment in self.snapshot():
            blocks = []
            for piece in segment.blocks:
                live_block = by_address.get(piece.address) if piece.state != "inactive" else None
                blocks.append(
                    {
                        "address": piece.address,
                        "size": piece.size,
                        "requested_size": piece.requested,
                        "state": "active_pending_free" if piece.address in retired and live_block else piece.state,
                        "frames": live_block.shared["frames"] if live_block is not None else [],
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

    def _common_fields(self, stream: int) -> dict[str, Any]:
        """Return the fields that every entry of the current event has."""
        number = len(self._at)
        if number >= len(self._trace.events):
            return {"stream": stream, "frames": [], "category": _OF_SEGMENTS, "user_metadata": ""}
        event = self._trace.events[number]
        block = self._trace.blocks[event.block]
        return {
            "stream": stream,
            "frames": _frames(block, event.step, event.phase),
            "category": block.kind,
            "user_metadata": block.call.kind if block.call is not None else "",
        }

    def _see_segments(self, shared: dict[str, Any]) -> None:
        """Record the segments that the driver gave, took back or refused since the last call."""
        for event in self.segment_events[self._segments_seen :]:
            place = {"addr": event.address}
            if event.action == "oom":
                place = {"device_free": max(0, (self.capacity_bytes or 0) - self.reserved_bytes)}
            self._entries.append(
                {
                    **shared,
                    "action": event.action,
                    "size": event.size,
                    "stream": event.stream,
                    **place,
                    **self._clock(),
                    "category": _OF_SEGMENTS,
                }
            )
        self._segments_seen = len(self.segment_events)

    def _enter(self, action: str, block: _Taken) -> None:
        place = {"addr": block.address, "size": block.requested_bytes}
        self._entries.append({**block.shared, "action": action, **place, **self._clock()})

    def _clock(self) -> dict[str, Any]:
        """Return an entry's time: its index in µs, as a replay has an order and no clock."""
        return {"time_us": len(self._entries), "pool_id": _POOL}


def _frames(block: Block, step: int, phase: str) -> list[dict[str, Any]]:
    """Return a block's stack, the innermost frame first: its operator, the modules around it, the phase of its step."""
    names = [block.operator or (block.call.kind if block.call is not None else block.kind)]
    parts = block.module.split(".") if block.module else []
    modules = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    frames = [{"name": names[0], "filename": block.module or "model", "line": _LINE}]
    frames += [{"name": module, "filename": "module", "line": _LINE} for module in modules]
    return [*frames, {"name": phase, "filename": f"step {step}" if step else "set-up", "line": _LINE}]


TAKEN = ("segment_alloc", "segment_map")
BEYOND = 1 << 50  # past all addresses of real drivers: segments go there once simulation and record differ
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
    """simulated, recorded   segments allocated and freed, and out-of-memory errors, in order
    allocator               the simulator after the history
    unmatched_frees         freed blocks whose allocation was not recorded; above 0, nothing is proven
    """

    simulated: tuple[SegmentEvent, ...]
    recorded: tuple[SegmentEvent, ...]
    allocator: CachingAllocator
    unmatched_frees: int

    def first_difference(self) -> str | None:
        """Return None where both agree in every event; otherwise a description of the first difference."""
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
    """Replay one device's entries of `torch.cuda.memory._snapshot()["device_traces"]`, with the settings of the
    recorded process.

    The history must begin before the device's first allocation (`torch.cuda.memory._record_memory_history()`, with
    `max_entries` large enough). Segments are put at the recorded addresses, since those are the driver's choice and
    decide between free blocks of equal size. A block is free from `free_completed` on. `torch.cuda.empty_cache()`
    leaves no entry: segments that are freed before any is allocated are attributed to it, also where the next request
    frees the same ones, so that `allocator.retries` may count too few.

    Raises `ValueError` for an unknown action.
    """
    entries = list(entries)
    driver = _RecordedAddresses(entries)
    allocator = _ReplayedAllocator(capacity_bytes, settings, total_bytes=total_bytes, address_space=driver)
    driver.events = allocator.segment_events
    live: dict[int, int | None] = {}
    recorded = []
    unmatched = 0
    changes: list[SegmentEvent] = []  # of segments, since the last request or free
    for entry in entries:
        action, size = str(entry["action"]), int(entry.get("size", 0))
        stream, address = int(entry.get("stream", 0)), int(entry.get("addr", 0))
        if action in TAKEN or action in GIVEN_BACK:
            changes.append(SegmentEvent(action, size, stream, address))
            recorded.append(changes[-1])
            continue
        if action in ("free_requested", "snapshot", "user_defined"):
            continue
        emptied = _is_emptied(allocator, changes, action)
        if emptied:
            allocator.empty_cache()
        allocator.grows = emptied and any(event.action == "segment_map" for event in changes)
        changes = []
        match action:
            case "alloc":
                with contextlib.suppress(OutOfMemory):
                    live[address] = allocator.allocate(size, stream)
            case "oom":
                recorded.append(SegmentEvent(action, size, stream))
                with contextlib.suppress(OutOfMemory):
                    allocator.free(allocator.allocate(size, stream))
            case "free_completed" if address in live:
                allocator.free(live.pop(address))
            case "free_completed":
                unmatched += 1
            case _:
                raise ValueError(f"unknown action {action!r} in a memory history")
    if _is_emptied(allocator, changes, "snapshot"):
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


def _is_emptied(allocator: CachingAllocator, changes: Sequence[SegmentEvent], action: str) -> bool:
    """Return whether the cache was emptied before an action, rather than by its request. Where both explain the freed
    segments, it was emptied before."""
    freed = [event.address for event in itertools.takewhile(lambda event: event.action in GIVEN_BACK, changes)]
    settings = allocator.settings
    if not freed:
        return False
    if settings.expandable_segments:  # a request without room maps pages, and frees them with the rest of the cache
        return action != "oom" or any(event.action in GIVEN_BACK for event in changes[len(freed) :])
    if settings.garbage_collection_threshold is None and settings.max_split_size_mb is None:
        return True
    # These two free a part of the cache, or free it in another order than `empty_cache`.
    cached = [s for s in allocator.snapshot() if [block.state for block in s.blocks] == ["inactive"]]
    cached.sort(key=lambda s: (s.pool == "small", s.stream, s.size, s.address))
    return [s.address for s in cached] == freed


class _ReplayedAllocator(CachingAllocator):
    """An allocator whose requests take nothing from the cache while `grows`: a request that itself freed pages maps new
    ones, even if a piece that is left in the cache would do."""

    grows = False

    def _pick(self, pool: Pool, position: int, size: int) -> int:
        picked = super()._pick(pool, position, size)
        return len(pool.keys) if self.grows else picked


class _RecordedAddresses(AddressSpace):
    """Puts a segment where the recorded driver put its counterpart, while both allocate the same ones in order."""

    def __init__(self, entries: list[Mapping[str, Any]]) -> None:
        self._end = BEYOND
        self._taken = [
            SegmentEvent(str(e["action"]), int(e["size"]), int(e.get("stream", 0)), int(e["addr"]))
            for e in entries
            if e["action"] in TAKEN
        ]
        self.events: list[SegmentEvent] = []  # the simulator's events, which grow
        self._seen = self._count = 0

    def take(self, size: int, action: str) -> int:
        self._count += sum(event.action in TAKEN for event in self.events[self._seen :])
        self._seen = len(self.events)
        expected = self._taken[self._count] if self._count < len(self._taken) else None
        # An expandable segment reserves its whole address range at its first mapping.
        if expected is not None and expected.action == action and (action == "segment_map" or expected.size == size):
            return expected.address
        return super().take(size, action)
