"""Places a traced step's memory as PyTorch would on one GPU model: its peaks, whether it fits, what the peak holds.

Start reading at `replay`. The allocator is `featurize.memory.allocator`; what libraries take,
`featurize.operators.library_calls`. `RecordingAllocator` keeps a replay in the format that PyTorch's memory viewer
opens (torch/csrc/cuda/Module.cpp, `THCPModule_memorySnapshot`, and torch/cuda/memory.py, of PyTorch 2.13).
`replay_history` replays a history that `workers.probes.children` recorded of a real allocator.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.units import MIB
from featurize.device.device_spec import CUDNN_MIB, DeviceSpec
from featurize.memory.allocator import AddressSpace, CachingAllocator, OutOfMemory, SegmentEvent
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.operators.library_calls import CUBLAS, LibraryCall
from featurize.recording.step_trace import BLOCK_KINDS, Block, StepTrace

if TYPE_CHECKING:
    from featurize.memory.cudnn_workspaces import ConvolutionWorkspace


class Moment(NamedTuple):
    """The allocator after one event of the trace, in bytes. A workspace's moment is the one while it is taken."""

    step: int
    phase: str
    block: int  # index of the trace's block
    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Result of a replay. Bytes, of the allocator; the context lies outside it.

    fits            False: the step needs more than the capacity even after cached memory was given back, and the
                    peaks are those of a device without limit
    peak_parts      block kind -> bytes at the moment of the most allocated bytes, workspaces included; they sum to
                    `peak_allocated`, except for rounding: to 512 bytes, or up to a whole cached block where it is at
                    most 1 MiB larger and is not split
    peak_modules    module -> bytes of the activations alive then that its operators made
    peak_operator, peak_module   what took memory at that moment
    retries         times that cached memory had to be given back
    timeline        every moment, in order; empty unless asked for
    snapshot        the allocator's history and its state at the end, in the format of PyTorch's memory snapshots; None
                    unless the timeline was asked for. Of a step that does not fit it ends where memory runs out.
    workspaces      what each distinct convolution takes and how that is known; empty where all are guessed
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
    """Return the MiB outside the allocator where the device's description was measured: the context, and cuDNN where
    its layers run. `featurize.device.device_spec` has other machines."""
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

    The capacity is the device's memory without what lies outside the allocator: `taken_mib`, by default `outside_mib`.
    Where it does not suffice, cached segments are given back first, then convolutions do without their workspace, as in
    PyTorch. Assumes one stream, and a process that did nothing before. With `cudnn_benchmark`, PyTorch empties its
    cache after it has tried a convolution's algorithms for the first time; what the tried ones take is assumed to be
    what the chosen one takes. `workspaces` has what convolutions take (`featurize.memory.cudnn_workspaces`), else it is
    guessed; of several sizes, the largest that fits is taken.
    """

    def unlimited() -> MemoryProfile:
        run = _Run(trace, spec, cudnn_benchmark, allocator, None, workspaces, timeline)
        run.play()
        return run.profile(fits=True)

    if timeline or workspaces:
        profile = unlimited()
    else:
        key = ("replay", *trace.guessed_sizes(spec).values(), cudnn_benchmark, allocator)
        profile = trace.remembered(key, unlimited)
    taken_mib = outside_mib(trace, spec) if taken_mib is None else taken_mib
    capacity = int((spec.memory_mib - taken_mib) * MIB)
    # Below the card's limit, only what the settings make of a limit differs.
    limits = allocator is not None and allocator.per_process_memory_fraction is not None
    if profile.peak_reserved <= capacity and not limits:
        return profile
    limited = _Run(trace, spec, cudnn_benchmark, allocator, capacity, workspaces, timeline)
    try:
        limited.play()
    except OutOfMemory:
        return replace(profile, fits=False, snapshot=limited.snapshot())
    return limited.profile(fits=True)


class _Run:
    """One pass over the events."""

    def __init__(
        self,
        trace: StepTrace,
        spec: DeviceSpec,
        cudnn_benchmark: bool,
        settings: AllocatorSettings | None,
        capacity: int | None,
        workspaces: Mapping[LibraryCall, ConvolutionWorkspace] | None,
        timeline: bool,
    ) -> None:
        self.trace, self.cudnn_benchmark, self.timeline = trace, cudnn_benchmark, timeline
        self.workspaces = workspaces or {}
        self._sizes = trace.guessed_sizes(spec) | {call: answer.sizes[0] for call, answer in self.workspaces.items()}
        total = None if capacity is None else int(spec.memory_mib * MIB)
        self.moments: list[Moment] = []
        self.allocator = (
            RecordingAllocator(trace, self.moments, settings, capacity, total)
            if timeline
            else CachingAllocator(capacity, settings, total_bytes=total)
        )
        self.peak, self.peak_at, self.peak_workspace = 0, -1, 0
        self._tried: set[LibraryCall] = set()

    def play(self) -> None:
        allocator, blocks, timeline = self.allocator, self.trace.blocks, self.timeline
        allocate, free = allocator.allocate, allocator.free
        placed: dict[int, int | None] = {}
        retired: dict[int, list[int | None]] = {}  # number of an event -> what can be used again before it
        for index, event in enumerate(self.trace.events):
            block, nbytes, step, phase = event
            for handle in retired.pop(index, ()) if retired else ():
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

    def profile(self, fits: bool) -> MemoryProfile:
        """Return the result, after `play`."""
        trace = self.trace
        parts = dict.fromkeys(BLOCK_KINDS, 0)
        parts["workspace"] = self.peak_workspace
        modules: Counter[str] = Counter()
        for event in trace.events[: self.peak_at + 1]:
            block = trace.blocks[event.block]
            parts[block.kind] = parts.get(block.kind, 0) + event.nbytes
            if block.call is not None and block.call.kind == CUBLAS:
                parts["workspace"] += self._sizes[block.call]
            if block.kind == "activation":
                modules[block.module] += event.nbytes
        peak = trace.events[self.peak_at] if trace.events else None
        made = trace.blocks[peak.block] if peak is not None else None
        return MemoryProfile(
            fits=fits,
            peak_allocated=self.allocator.peak_allocated_bytes,
            peak_reserved=self.allocator.peak_reserved_bytes,
            retries=self.allocator.retries,
            peak_step=peak.step if peak is not None else 0,
            peak_phase=peak.phase if peak is not None else "setup",
            peak_operator=made.operator if made is not None else "",
            peak_module=made.module if made is not None else "",
            peak_parts=parts,
            peak_modules={name: nbytes for name, nbytes in modules.most_common() if nbytes},
            timeline=tuple(self.moments),
            snapshot=self.snapshot(),
            workspaces=self.workspaces,
        )

    def snapshot(self) -> dict[str, Any] | None:
        """Return the allocator's history and state, where the timeline was asked for."""
        return self.allocator.memory_snapshot() if isinstance(self.allocator, RecordingAllocator) else None

    def _take(self, call: LibraryCall) -> tuple[int, int]:
        """Take a workspace: the size that is tried first, where it does not fit the next, then none. Return the bytes
        that are then allocated, and those of the workspace."""
        answer = self.workspaces.get(call)
        for size in (self._sizes[call], *(answer.sizes[1:] if answer is not None else ())):
            try:
                if call.kind != CUBLAS:
                    return self.allocator.touch(size), size
                self.allocator.allocate(size)  # which its handle keeps
                return self.allocator.allocated_bytes, size
            except OutOfMemory:
                if not call.spare:
                    raise
        return self.allocator.allocated_bytes, 0


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
        trace: Trace whose events are replayed, in their order.
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
        """Record what the driver gave, took back or refused since the last time."""
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
        """Return None where both agree in every event; otherwise the first one that differs, in words."""
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
    pending: list[int] = []  # addresses given back since the last entry that was not a segment's
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
