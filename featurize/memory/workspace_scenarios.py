"""Memory that a step reserves under other assumptions about cuDNN's workspaces, and over more steps than the replay.

Start reading at `scenario_features`. Nobody knows without a GPU, or without asking cuDNN, which workspaces its
convolutions take. How the peak answers to several assumptions is known, and a learner weighs them by what was measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.memory.allocator import SMALL_REQUEST, CachingAllocator
from featurize.operators.library_calls import CUBLAS, LibraryCall, guesses_of, workspace_bytes
from featurize.recording.step_trace import StepTrace

# Scenario -> operation, and whether the kernel is pointwise (of one element) -> copies of image, kernel and response in
# the workspace; none where it is not named. Engines for the tensor cores work on copies in channels-last layout; in
# `copies` each operation takes those that cuDNN 9.8 takes most often on compute capability 8.0.
_ALL = (1, 1, 1)
SCENARIOS: Mapping[str, Mapping[tuple[str, bool], tuple[int, int, int]]] = {
    "none": {},
    "forward": {("forward", False): _ALL},
    "data_gradient": {("data_gradient", False): _ALL},
    "weight_gradient": {("weight_gradient", False): _ALL},
    "pointwise": {("weight_gradient", True): _ALL},
    "copies": {
        ("forward", False): (1, 1, 0),
        ("forward", True): (1, 1, 0),
        ("data_gradient", False): _ALL,
        ("weight_gradient", False): _ALL,
        ("weight_gradient", True): _ALL,
    },
}
_FEW_CHANNELS = 4  # of the image: there cuDNN has forward kernels that take no copy
SETTLED = "settled"
_MOST_STEPS = 8  # more than the replay's: of 2,039 networks, none reserved more after five


def scenario_features(trace: StepTrace, spec: DeviceSpec, outside_mib: float, memory_mib: float) -> dict[str, float]:
    """Return scenario -> logarithm (base 2) of the job's memory under it, over its memory as replayed.

    Args:
        trace: The step.
        spec: The GPU model. Its capacity plays no part.
        outside_mib: What lies outside the allocator.
        memory_mib: The job's memory as replayed, `outside_mib` included.
    """
    reserved = reserved_by_scenario(trace, spec)
    return {name: math.log2((nbytes / MIB + outside_mib) / memory_mib) for name, nbytes in reserved.items()}


def reserved_by_scenario(trace: StepTrace, spec: DeviceSpec) -> dict[str, int]:
    """Return scenario -> the most bytes that are reserved.

    `settled` takes the guessed workspaces, as the replay does, and repeats the last step until reserved memory stays.
    The others take copies of image, kernel and response for some convolutions, over the replay's own steps.
    """
    return trace.remembered(("scenarios", guesses_of(spec)), lambda: _reserved_by_scenario(trace, spec))


def _reserved_by_scenario(trace: StepTrace, spec: DeviceSpec) -> dict[str, int]:
    calls, pools = trace.remembered("events", lambda: _by_pool(trace))
    guessed = [workspace_bytes(call, spec) for call in calls]
    reserved = {SETTLED: _settled(trace, pools, guessed)}
    for name, copies in SCENARIOS.items():
        sizes = [_workspace(call, copies) if call.spare else guess for call, guess in zip(calls, guessed, strict=True)]
        reserved[name] = sum(_reserved(trace, pool, sizes) for pool in pools)
    return reserved


def _settled(trace: StepTrace, pools: Sequence[_Pool], sizes: Sequence[int]) -> int:
    plays = [pool.play(sizes) for pool in pools]
    now = [next(play) for play in plays]
    for pool, nbytes in zip(pools, now, strict=True):
        trace.remembered(pool.key(sizes), partial(int, nbytes))
    if all(pool.repeats for pool in pools):
        for _ in range(_MOST_STEPS):
            before, now = now, [next(play) for play in plays]
            if now == before:
                break
    return sum(now)


def _reserved(trace: StepTrace, pool: _Pool, sizes: Sequence[int]) -> int:
    # GPU models differ in the guesses that a scenario replaces.
    return trace.remembered(pool.key(sizes), lambda: next(pool.play(sizes)))


def _workspace(call: LibraryCall, copies: Mapping[tuple[str, bool], tuple[int, int, int]]) -> int:
    signature = call.convolution
    if signature is None or (signature.operation == "forward" and signature.image[1] <= _FEW_CHANNELS):
        return 0
    shapes = signature.image, signature.kernel, signature.response
    numbers = copies.get((signature.operation, signature.pointwise), (0, 0, 0))
    return call.element_bytes * sum(n * math.prod(shape) for n, shape in zip(numbers, shapes, strict=True))


def _by_pool(trace: StepTrace) -> tuple[list[LibraryCall], tuple[_Pool, _Pool]]:
    """Return the distinct library calls, and the events of the allocator's small and large pool, which never meet."""
    calls = list(dict.fromkeys(block.call for block in trace.blocks if block.call is not None))
    numbers = {call: number for number, call in enumerate(calls)}
    pools = _Pool(calls, small=True), _Pool(calls, small=False)
    last = max((event.step for event in trace.events), default=0)
    for block, nbytes, step, _phase in trace.events:
        if nbytes:
            pools[abs(nbytes) > SMALL_REQUEST].add(block, nbytes, step == last)
        elif (call := trace.blocks[block].call) is not None:  # of a size that a scenario decides
            for pool in pools:
                pool.add(~numbers[call], 0, step == last)
    return calls, pools


class _Pool:
    """The events of one of the allocator's pools, split before the trace's last step, which can be repeated.

    Args:
        calls: The distinct library calls, whose workspaces may lie in either pool.
        small: Which pool: requests of up to `SMALL_REQUEST` bytes, or those above.
    """

    def __init__(self, calls: Sequence[LibraryCall], *, small: bool) -> None:
        self._calls, self._small = calls, small
        self._first: list[tuple[int, int]] = []  # block and bytes; of a workspace, ~ its call's number and 0
        self._last: list[tuple[int, int]] = []

    def add(self, block: int, nbytes: int, in_last: bool) -> None:
        """Add the next event."""
        (self._last if in_last else self._first).append((block, nbytes))

    def key(self, sizes: Sequence[int]) -> tuple:
        """Return what tells the bytes that are reserved with workspaces of these sizes, one for each call."""
        return "reserved", self._small, tuple(size if (size <= SMALL_REQUEST) == self._small else 0 for size in sizes)

    @cached_property
    def repeats(self) -> bool:
        """Return whether the last step leaves as many blocks of each size as it inherits: only then it can follow
        itself."""
        return self._successors is not None

    @cached_property
    def _successors(self) -> dict[int, int] | None:
        """Block that the last step inherits and frees -> the equally large one that it leaves to the next step."""
        sizes = {block: nbytes for block, nbytes in (*self._first, *self._last) if nbytes > 0}
        taken = [block for block, nbytes in self._last if nbytes > 0]
        freed = {block for block, nbytes in self._last if nbytes < 0}
        left: dict[int, list[int]] = defaultdict(list)
        for block in reversed(taken):
            if block not in freed:
                left[sizes[block]].append(block)
        pairs = {}
        for block in sorted(freed.difference(taken)):
            if not left[sizes[block]]:
                return None
            pairs[block] = left[sizes[block]].pop()
        return None if any(left.values()) else pairs

    def play(self, sizes: Sequence[int]) -> Iterator[int]:
        """Yield the bytes that are reserved after all steps, then after each repetition of the last one.

        Args:
            sizes: Of the calls' workspaces; those of the other pool are left out.
        """
        allocator = CachingAllocator()
        handles: dict[int, int | None] = {}
        taken = self.key(sizes)[-1]
        self._take(self._first, allocator, handles, taken)
        while True:
            self._take(self._last, allocator, handles, taken)
            yield allocator.reserved_bytes
            for inherited, successor in (self._successors or {}).items():
                handles[inherited] = handles.pop(successor)

    def _take(
        self,
        events: list[tuple[int, int]],
        allocator: CachingAllocator,
        handles: dict[int, int | None],
        sizes: Sequence[int],
    ) -> None:
        allocate, free, touch = allocator.allocate, allocator.free, allocator.touch
        for block, nbytes in events:
            if nbytes > 0:
                handles[block] = allocate(nbytes)
            elif nbytes < 0:
                free(handles.pop(block))
            elif taken := sizes[~block]:
                if self._calls[~block].kind == CUBLAS:  # which keeps what it took
                    allocate(taken)
                else:
                    touch(taken)
