"""Places a traced step's memory as PyTorch would on one GPU model: its peaks, whether it fits, what the peak holds.

Start reading at `replay`. The allocator is `featurize.memory.allocator`; what libraries take,
`featurize.operators.library_calls`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.device.machine import CUDNN_MIB
from featurize.memory.allocator import CachingAllocator, OutOfMemory
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.memory.memory_snapshot import RecordingAllocator
from featurize.operators.library_calls import CUBLAS, LibraryCall, guesses_of, workspace_bytes
from featurize.recording.step_trace import BLOCK_KINDS, StepTrace

if TYPE_CHECKING:
    from featurize.memory.cudnn_workspaces import ConvolutionWorkspace


class Moment(NamedTuple):
    """The allocator after one event of the trace, in bytes. A workspace's moment is the one while it is taken."""

    step: int
    phase: str
    block: int  # of the trace's blocks
    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Result of a replay. Bytes, of the allocator; the context lies outside it.

    fits            False: the step needs more than the capacity even after cached memory was given back, and the
                    peaks are those of a device without limit
    peak_parts      block kind -> bytes at the moment of the most allocated bytes, workspaces included; they sum to
                    `peak_allocated`, but for rounding: to 512 bytes, or up to a whole cached block where it is at
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
    its layers run. `featurize.device.machine` has other machines."""
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
        key = ("replay", guesses_of(spec), cudnn_benchmark, allocator)
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
        self.trace, self.spec, self.cudnn_benchmark, self.timeline = trace, spec, cudnn_benchmark, timeline
        self.workspaces = workspaces or {}
        total = None if capacity is None else int(spec.memory_mib * MIB)
        self.moments: list[Moment] = []
        self.allocator = (
            RecordingAllocator(trace, self.moments, settings, capacity, total)
            if timeline
            else CachingAllocator(capacity, settings, total_bytes=total)
        )
        self.peak, self.peak_at, self.peak_workspace = 0, -1, 0
        self._tried: set[LibraryCall] = set()
        self._sizes: dict[LibraryCall, int] = {}

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
                parts["workspace"] += self._size_of(block.call)
            if block.kind == "activation":
                modules[block.module] += event.nbytes
        at = trace.events[self.peak_at] if trace.events else None
        made = trace.blocks[at.block] if at is not None else None
        return MemoryProfile(
            fits=fits,
            peak_allocated=self.allocator.peak_allocated_bytes,
            peak_reserved=self.allocator.peak_reserved_bytes,
            retries=self.allocator.retries,
            peak_step=at.step if at is not None else 0,
            peak_phase=at.phase if at is not None else "setup",
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

    def _size_of(self, call: LibraryCall) -> int:
        nbytes = self._sizes.get(call)
        if nbytes is None:
            answer = self.workspaces.get(call)
            nbytes = workspace_bytes(call, self.spec) if answer is None else answer.sizes[0]
            self._sizes[call] = nbytes
        return nbytes

    def _take(self, call: LibraryCall) -> tuple[int, int]:
        """Take a workspace: the size that is tried first, where it does not fit the next, then none. Return the bytes
        that are then allocated, and those of the workspace."""
        answer = self.workspaces.get(call)
        for size in (self._size_of(call), *(answer.sizes[1:] if answer is not None else ())):
            try:
                if call.kind != CUBLAS:
                    return self.allocator.touch(size), size
                self.allocator.allocate(size)  # which its handle keeps
                return self.allocator.allocated_bytes, size
            except OutOfMemory:
                if not call.spare:
                    raise
        return self.allocator.allocated_bytes, 0
