"""Memory that a step reserves under other assumptions about cuDNN's workspaces, and over more steps than the replay.

Start reading at `scenario_features`. Nobody knows without a GPU, or without asking cuDNN, which workspaces its
convolutions take. How the peak answers to several assumptions is known, and a learner weighs them by what was measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from conf.units import MIB
from featurize.allocator import SMALL_REQUEST, CachingAllocator
from featurize.device_spec import DeviceSpec
from featurize.library_calls import CUBLAS, LibraryCall, guesses_of, workspace_bytes
from featurize.step_trace import StepTrace

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
    # Small and large requests never meet, and most scenarios differ in large workspaces alone.
    every, *pools = trace.remembered("events", lambda: [_Events(trace, pool) for pool in (None, "small", "large")])
    guessed = [workspace_bytes(call, spec) for call in every.calls]
    reserved = {SETTLED: every.reserved_bytes(guessed, most_steps=_MOST_STEPS)}
    for name, copies in SCENARIOS.items():
        sizes = [
            _workspace(call, copies) if call.spare else guess for call, guess in zip(every.calls, guessed, strict=True)
        ]
        # GPU models differ in the guesses that a scenario replaces.
        reserved[name] = 0
        for pool in pools:
            taken = tuple(size if pool.holds(size) else 0 for size in sizes)
            key = "reserved", pool.pool, taken
            reserved[name] += trace.remembered(key, partial(pool.reserved_bytes, taken))
    return reserved


def _workspace(call: LibraryCall, copies: Mapping[tuple[str, bool], tuple[int, int, int]]) -> int:
    signature = call.convolution
    if signature is None or (signature.operation == "forward" and signature.image[1] <= _FEW_CHANNELS):
        return 0
    shapes = signature.image, signature.kernel, signature.response
    numbers = copies.get((signature.operation, signature.pointwise), (0, 0, 0))
    return call.element_bytes * sum(n * math.prod(shape) for n, shape in zip(numbers, shapes, strict=True))


class _Events:
    """A trace's events, split before its last step, which can be repeated.

    Args:
        trace: The step.
        pool: Which requests are kept: those of the allocator's `small` or `large` pool. None: all of them.
    """

    def __init__(self, trace: StepTrace, pool: str | None) -> None:
        self.pool = pool
        self.calls = list(dict.fromkeys(block.call for block in trace.blocks if block.call is not None))
        numbers = {call: number for number, call in enumerate(self.calls)}
        self._calls = [None if block.call is None else numbers[block.call] for block in trace.blocks]
        events = [event for event in trace.events if not event.nbytes or self.holds(abs(event.nbytes))]
        last = max((event.step for event in events), default=0)
        self._first = [(event.block, event.nbytes) for event in events if event.step < last]
        self._last = [(event.block, event.nbytes) for event in events if event.step == last]
        self._successors = self._paired({event.block: event.nbytes for event in events if event.nbytes > 0})

    def holds(self, nbytes: int) -> bool:
        """Return whether a request is among the kept ones."""
        return self.pool is None or (nbytes <= SMALL_REQUEST) == (self.pool == "small")

    def _paired(self, sizes: Mapping[int, int]) -> dict[int, int] | None:
        """Block that the last step inherits and frees -> the equally large one that it leaves to the next step.

        None where the two do not match: such a step cannot be repeated."""
        taken = [block for block, nbytes in self._last if nbytes > 0]
        freed = {block for block, nbytes in self._last if nbytes < 0}
        left: dict[int, list[int]] = defaultdict(list)
        for block in reversed(taken):
            if block not in freed:
                left[sizes[block]].append(block)
        pairs = {}
        for block in freed.difference(taken):
            if not left[sizes[block]]:
                return None
            pairs[block] = left[sizes[block]].pop()
        return None if any(left.values()) else pairs

    def reserved_bytes(self, sizes: Sequence[int], most_steps: int = 0) -> int:
        """Return the most bytes that are reserved, with so many steps more at most. `sizes` are those of `calls`."""
        allocator = CachingAllocator()
        handles: dict[int, int | None] = {}
        for events in (self._first, self._last):
            self._play(events, allocator, handles, sizes)
        for _ in range(most_steps if self._successors is not None else 0):
            reserved = allocator.peak_reserved_bytes
            for inherited, successor in (self._successors or {}).items():
                handles[inherited] = handles.pop(successor)
            self._play(self._last, allocator, handles, sizes)
            if allocator.peak_reserved_bytes == reserved:
                break
        return allocator.peak_reserved_bytes

    def _play(
        self,
        events: list[tuple[int, int]],
        allocator: CachingAllocator,
        handles: dict[int, int | None],
        sizes: Sequence[int],
    ) -> None:
        allocate, free, calls = allocator.allocate, allocator.free, self._calls
        for block, nbytes in events:
            if nbytes > 0:
                handles[block] = allocate(nbytes)
            elif nbytes < 0:
                free(handles.pop(block))
            elif (call := calls[block]) is not None and (taken := sizes[call]):
                handle = allocate(taken)
                if self.calls[call].kind != CUBLAS:
                    free(handle)
