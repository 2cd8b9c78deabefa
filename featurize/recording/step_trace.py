"""Trace of a training step: its operators, its memory blocks, when these are allocated and freed.

Start reading at `StepTrace`; `featurize.trace.tracer` makes one, `featurize.recording.recorder` observes the step.
`deeper` makes the trace of a deep model from those of two shallow ones, which differ in one period of its repeated
blocks; `featurize.recording.skeleton` shortens the model.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from featurize.cudnn.signature import ConvolutionSignature
from featurize.device.device_spec import DeviceSpec
from featurize.operators.library_calls import LibraryCall, guesses_of, workspace_bytes
from featurize.operators.table import MULTI_TENSOR, foreach_launches

Value = TypeVar("Value")

PHASES = ("setup", "forward", "backward", "optimizer")
BLOCK_KINDS = (
    "parameter",
    "buffer",
    "batch",
    "gradient",
    "optimizer_state",
    "activation",  # allocated in a forward pass and needed by the backward pass
    "temporary",
    "workspace",  # allocated by a kernel for its own run
)
# Further kinds, for jobs on several GPUs only.
BUCKET = "bucket"  # gradients are reduced in it
GATHERED = "gathered_parameter"  # gathered from all ranks' shards
UNREDUCED = "unreduced_gradient"  # from a rank's own batch, for whole parameters
COMMUNICATION = "communication_buffer"  # data to send, or received data
MASTER = "master_weight"  # a rank's part of the parameters in fp32, which ZeRO's optimizer updates

_LOOKUP = "aten::embedding"
BATCH = -2  # the source of an input that is the step's batch


class Operator(NamedTuple):
    """One operator of the steady step that runs on the GPU. Bytes are of distinct tensors, not of cache misses."""

    name: str  # aten::mm
    phase: str
    dtype: str  # type of its arithmetic: float32, bfloat16, ...
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    flops: int
    bytes_read: int
    bytes_written: int
    launches: int  # kernels
    module: str = ""  # path of the module that called it; in the backward pass, of the one whose gradient it computes
    sources: tuple[int, ...] = ()  # indices of the operators that made its inputs; BATCH; -1: it existed before
    recomputed: bool = False  # a checkpoint recomputes it in the backward pass
    graphed: bool = False  # in a CUDA graph that an earlier operator launches: the host launches nothing for it


def joined(kernel: Operator, other: Operator, place: int, leads: bool) -> Operator:
    """Return two operators that run as one kernel.

    Args:
        kernel: The operator so far, with index `place`.
        other: An operator that its kernel computes, too; `bytes_read` excludes what the kernel has already read.
        place: Index of the operator.
        leads: The kernel is named after `other`, unless it looks up rows, which tells how many there are.
    """
    looks_up = _LOOKUP in (kernel.name, other.name)
    first, second = (other, kernel) if other.name == _LOOKUP != kernel.name else (kernel, other)
    return kernel._replace(
        name=_LOOKUP if looks_up else other.name if leads else kernel.name,
        input_shapes=first.input_shapes + second.input_shapes,
        output_shapes=kernel.output_shapes + other.output_shapes,
        flops=kernel.flops + other.flops,
        bytes_read=kernel.bytes_read + other.bytes_read,
        bytes_written=kernel.bytes_written + other.bytes_written,
        # Later operators' results are left out: an operator comes after all of its sources.
        sources=kernel.sources + tuple(source for source in other.sources if source < place),
        recomputed=kernel.recomputed and other.recomputed,
        graphed=kernel.graphed and other.graphed,
    )


class Event(NamedTuple):
    """Memory allocated (`nbytes` > 0) or freed (< 0), in order. `block` indexes `StepTrace.blocks`.

    A workspace is one event of 0 bytes: `Block.call` tells how much the library allocates at that moment."""

    block: int
    nbytes: int
    step: int  # 0 for what exists before the first step
    phase: str


class Block(NamedTuple):
    """One storage, with any number of views, or one library call's workspace."""

    nbytes: int
    kind: str
    operator: str = ""  # operator that made it; empty for blocks that exist before the step
    module: str = ""  # path of the module that ran it
    call: LibraryCall | None = None  # a workspace's
    pooled: bool = False  # it is in the memory pool of CUDA graphs
    stream: int = 0  # stream on which it is allocated; one stream's memory is not reused on another
    kept_until: int = 0  # number of the event before which its memory is not reused, as another stream may use it

    def named(self, kind: str) -> Block:
        """Return the block as one of a kind, in half the time of `_replace`."""
        return Block(self.nbytes, kind, *self[2:])


class Collective(NamedTuple):
    """Data that the ranks of a job send each other at one moment of the steady step."""

    kind: str  # a name of featurize.timing.collectives.KINDS
    nbytes: int  # a rank's larger tensor: what is gathered, what is scattered
    after: int  # number of the step's operators before it: then it can begin
    before: int  # number of the operators that do not wait for it
    axis: str = ""  # the dimension of the mesh whose ranks take part; empty: all ranks


class StagePass(NamedTuple):
    """One pass of a pipeline's stage over a micro-batch; it continues until the next one begins."""

    phase: str  # forward or backward, of `PHASES`
    stage: int
    micro_batch: int
    begin: int  # number of the step's operators before it


@dataclass(frozen=True)
class PipelinePart:
    """One rank's part of a pipeline's step.

    kinds    the kinds of all the pipeline's stages: stages of the same kind hold modules that are alike
    starts   paths of the modules at which all stages but the first begin
    sent     bytes of a micro-batch that each stage but the last sends to the next, and receives back
    passes   passes of the rank's own stages, in their order
    end      number of the step's operators before the end of the last pass
    groups   all ranks of the pipeline in groups; empty where one rank was requested
    """

    kinds: tuple[str, ...]
    starts: tuple[str, ...]
    sent: tuple[int, ...]
    passes: tuple[StagePass, ...]
    end: int
    groups: tuple[RanksAlike, ...] = ()


@dataclass(frozen=True)
class RanksAlike:
    """Ranks of a pipeline whose stages are of the same kinds; those after the first one need no more memory.

    ranks   their numbers among the ranks of `pp`
    trace   trace of the first of them
    """

    ranks: tuple[int, ...]
    trace: StepTrace


@dataclass(frozen=True)
class BatchMix:
    """The steps of a trace whose batches have several shapes.

    given     requested steps
    shapes    number of different batch shapes
    longest   index of the longest batch among the given ones: the one whose step needs the most memory
    order     index, among the given ones, of a batch of each step's shape
    """

    given: int
    shapes: int
    longest: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class StepTrace:
    """`operators` of the last step; `events` of the set-up and all steps; `notes`: what the trace leaves out.
    `collectives` of the last step, in the order in which they begin; empty for a job on one GPU.

    There are two steps on one batch, or the steps of `mix`, of which the last two are on the longest batch.
    """

    operators: tuple[Operator, ...]
    events: tuple[Event, ...]
    blocks: tuple[Block, ...]
    parameters: int  # elements
    parameter_bytes: int
    compute_capability: tuple[int, int] | None  # an NVIDIA GPU's
    assumed: tuple[str, ...] = ()  # assumptions about values that the model reads and only computing would give
    notes: tuple[str, ...] = ()  # on parts of the model that the trace approximates
    mix: BatchMix | None = None
    # Calls of PyTorch's attention, whose kernels differ by GPU; 0: there is none; None: unknown.
    widest_head: int | None = None
    graph_input_bytes: int | None = None  # inputs that are copied into CUDA graphs; None: none run
    collectives: tuple[Collective, ...] = ()
    pipeline: PipelinePart | None = None  # the part of a rank that has only a part of the model
    # For steps without a loop's variables: the order of events in a usual loop, where the trace shows it.
    in_a_loop: StepTrace | None = field(default=None, compare=False, repr=False)
    _computed: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def remembered(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the result of `compute` for this key, which is remembered.

        Args:
            key: Everything besides the trace on which the value depends; a tuple that begins with the value's name.
            compute: Returns the value, which must not be changed afterwards; further keys may be added to a dict.
        """
        if key not in self._computed:
            self._computed[key] = compute()
        value: Value = self._computed[key]
        return value

    @property
    def flops(self) -> int:
        """FLOPs of one steady step."""
        return sum(op.flops for op in self.operators)

    @functools.cached_property
    def graph_pool_bytes(self) -> int:
        """Bytes that CUDA graphs may take beyond one memory pool for all: each of two keeps its own peak, and copied
        inputs exist twice. 0 without graphs."""
        if self.graph_input_bytes is None:
            return 0
        live, peaks, together = [0, 0], [0, 0], 0
        for event in self.events:
            pool = self.blocks[event.block].pooled
            live[pool] += event.nbytes
            peaks[pool] = max(peaks[pool], live[pool])
            together = max(together, sum(live))
        return sum(peaks) - together + self.graph_input_bytes

    @functools.cached_property
    def batch_bytes(self) -> int:
        """Bytes of the batches that the trace copies to the device; of a mix, in its last two steps."""
        if self.mix is None:
            return sum(block.nbytes for block in self.blocks if block.kind == "batch")
        taken = (event for event in self.events if event.nbytes > 0 and event.step > len(self.mix.order) - 2)
        return sum(event.nbytes for event in taken if self.blocks[event.block].kind == "batch")

    @property
    def convolution_calls(self) -> tuple[LibraryCall, ...]:
        """The distinct convolutions, in their order: those of PyTorch's own kernels have no signature of cuDNN's."""
        return tuple(dict.fromkeys(b.call for b in self.blocks if b.call is not None and b.call.spare))

    @property
    def cudnn_convolutions(self) -> tuple[ConvolutionSignature, ...]:
        """Return the distinct operations that cuDNN runs, in their order."""
        signatures = (call.convolution for call in self.convolution_calls)
        return tuple(dict.fromkeys(signature for signature in signatures if signature is not None))

    def guessed_sizes(self, spec: DeviceSpec) -> dict[LibraryCall, int]:
        """Return each distinct library call, and the bytes that it is estimated to take on a GPU model. Models for
        which these are equal differ in a replay by their capacity alone."""
        calls = (block.call for block in self.blocks if block.call is not None)
        return self.remembered(
            ("guessed sizes", guesses_of(spec)),
            lambda: {call: workspace_bytes(call, spec) for call in dict.fromkeys(calls)},
        )

    @functools.cached_property
    def peak_live_bytes(self) -> int:
        """Maximum of the bytes alive at once, without an allocator's rounding and library's workspace."""
        return sum(self.breakdown.values())

    @functools.cached_property
    def breakdown(self) -> dict[str, int]:
        """Bytes alive at the peak, by block kind."""
        live = list(itertools.accumulate([event.nbytes for event in self.events], initial=0))
        by_kind: Counter[str] = Counter()
        for event in self.events[: live.index(max(live))]:
            by_kind[self.blocks[event.block].kind] += event.nbytes
        return {kind: by_kind[kind] for kind in (*BLOCK_KINDS, *(by_kind.keys() - set(BLOCK_KINDS)))}


_NUMBER = re.compile(r"\d+")


class CannotDeepen(Exception):
    """The two traces do not differ by a period that repeats."""


class _Item(NamedTuple):
    """One record of a trace.

    exact    the properties that interchangeable records share
    loose    the same, without those that may grow with depth
    numbers  counts and indices, which grow evenly with depth
    """

    exact: Hashable
    loose: Hashable
    numbers: tuple[int, ...]


class _Made(NamedTuple):
    """One record of the deep trace.

    counterpart  index of the corresponding record in the longer trace
    twin         index of the same record in the shallow trace; None for a repeated one
    numbers      its own counts and indices
    """

    counterpart: int
    twin: int | None
    numbers: tuple[int, ...]


def deeper(shallow: StepTrace, longer: StepTrace, times: int) -> StepTrace:
    """Return the trace of a model with `times` more periods of layer blocks than the shallow one.

    The part that only the longer trace has repeats the part before it: it is repeated further, with new memory
    blocks, and each other index moves by as much as it did from the first trace to the second.
    The sources of operators are left out.

    Args:
        shallow: Trace of a few blocks.
        longer: Trace of the model with one more period of blocks.
        times: Periods beyond the shallow one; 1 returns the longer trace.

    Raises:
        CannotDeepen: The added part does not repeat, or memory would be freed that was not allocated.
    """
    module = functools.cache(functools.partial(_NUMBER.sub, "*"))
    events, blocks = _memory(shallow, longer, module, times)
    return replace(
        longer,
        events=tuple(events),
        blocks=tuple(blocks),
        operators=tuple(_operators(shallow, longer, module, times)),
        collectives=tuple(_collectives(shallow, longer, module, times)),
        parameters=_move(shallow.parameters, longer.parameters, times),
        parameter_bytes=_move(shallow.parameter_bytes, longer.parameter_bytes, times),
    )


def _move(first: int, second: int, times: int) -> int:
    return first + times * (second - first)


def _memory(
    shallow: StepTrace, longer: StepTrace, module: Callable[[str], str], times: int
) -> tuple[list[Event], list[Block]]:
    """Return the deep trace's events, and its blocks, numbered in the order of allocation."""

    def items(trace: StepTrace) -> list[_Item]:
        made = []
        for event in trace.events:
            block = trace.blocks[event.block]
            about = event.nbytes > 0, event.nbytes < 0, event.step, event.phase, block.kind, block.operator
            loose = *about, module(block.module), block.call, block.pooled, block.stream
            made.append(_Item((event.nbytes, block.nbytes, loose), loose, (event.block, event.nbytes)))
        return made

    events: list[Event] = []
    blocks: list[Block] = []
    alive: set[int] = set()
    for counterpart, _twin, (number, nbytes) in _extend(items(shallow), items(longer), times):
        event = longer.events[counterpart]._replace(block=number, nbytes=nbytes)
        events.append(event)
        if number == len(blocks) and nbytes >= 0:
            alive.add(number)
            blocks.append(longer.blocks[longer.events[counterpart].block]._replace(nbytes=nbytes))
        elif number in alive and blocks[number].nbytes == -nbytes:
            alive.remove(number)
        else:
            raise CannotDeepen(f"block {number} is not taken once, and then given back")
    return events, blocks


def _operators(shallow: StepTrace, longer: StepTrace, module: Callable[[str], str], times: int) -> list[Operator]:
    def items(trace: StepTrace) -> list[_Item]:
        made = []
        for operator in trace.operators:
            loose = (
                operator.name,
                operator.phase,
                operator.dtype,
                module(operator.module),
                operator.recomputed,
                operator.graphed,
            )
            numbers = (operator.flops, operator.bytes_read, operator.bytes_written, operator.launches)
            made.append(_Item((loose, operator.input_shapes, operator.output_shapes), loose, numbers))
        return made

    operators = []
    for counterpart, twin, (flops, read, written, launches) in _extend(items(shallow), items(longer), times):
        second = longer.operators[counterpart]
        deep = second._replace(flops=flops, bytes_read=read, bytes_written=written, launches=launches, sources=())
        first = second if twin is None else shallow.operators[twin]
        if (first.input_shapes, first.output_shapes) != (second.input_shapes, second.output_shapes):
            deep = deep._replace(  # an operator on all parameters at once
                input_shapes=_shapes(first.input_shapes, second.input_shapes, times),
                output_shapes=_shapes(first.output_shapes, second.output_shapes, times),
            )
            if first.name.startswith(MULTI_TENSOR) and all(
                _launches(operator) == operator.launches for operator in (first, second)
            ):
                deep = deep._replace(launches=_launches(deep))
        operators.append(deep)
    return operators


def _launches(operator: Operator) -> int:
    """Return the number of kernels of a for-each operator, which grows in jumps, by its own rule; 0 where its tensors
    are not in lists of the same shapes."""
    shapes = operator.input_shapes
    for lists in range(5, 0, -1):  # parameters, gradients, state, ...
        count, rest = divmod(len(shapes), lists)
        if not rest and shapes == shapes[:count] * lists:
            return foreach_launches(lists, [math.prod(shape) for shape in shapes[:count]])
    return 0


def _shapes(
    firsts: tuple[tuple[int, ...], ...], seconds: tuple[tuple[int, ...], ...], times: int
) -> tuple[tuple[int, ...], ...]:
    items = [[_Item(shape, len(shape), shape) for shape in shapes] for shapes in (firsts, seconds)]
    return tuple(made.numbers for made in _extend(items[0], items[1], times))


def _collectives(shallow: StepTrace, longer: StepTrace, module: Callable[[str], str], times: int) -> list[Collective]:
    def items(trace: StepTrace) -> list[_Item]:
        # The next operator distinguishes gathers of the forward pass from those of the backward pass.
        names = [
            (operator.name, operator.phase, module(operator.module), operator.recomputed)
            for operator in trace.operators
        ]
        names.append(("", "", "", False))
        made = []
        for collective in trace.collectives:
            exact = (
                collective.kind,
                collective.axis,
                collective.nbytes,
                names[collective.after],
                names[collective.before],
            )
            made.append(_Item(exact, exact, (collective.after, collective.before)))
        return made

    return [
        longer.collectives[counterpart]._replace(after=after, before=before)
        for counterpart, _twin, (after, before) in _extend(items(shallow), items(longer), times)
    ]


def _extend(firsts: Sequence[_Item], seconds: Sequence[_Item], times: int) -> list[_Made]:
    """Return the records of the deep trace.

    Args:
        firsts: Items of the shallow trace.
        seconds: Items of the longer one.
        times: As in `deeper`.
    """
    first, second = ([*(item.exact for item in items), None] for items in (firsts, seconds))
    made: list[_Made] = []
    numbers: dict[int, tuple[int, ...]] = {}  # index in the longer trace -> numbers of its first copy
    place = other = alike = 0
    while other < len(seconds):
        is_same = first[place] == second[other]
        added = 0 if is_same else _period(first, second, place, other)
        if not added:
            if place == len(firsts) or firsts[place].loose != seconds[other].loose:
                raise CannotDeepen(f"{second[other]} does not repeat")
            numbers[other] = tuple(map(_move, firsts[place].numbers, seconds[other].numbers, itertools.repeat(times)))
            made.append(_Made(other, place, numbers[other]))
            place, other, alike = place + 1, other + 1, alike + is_same
            continue
        # The last block's numbers, such as when a collective is waited for, are its own: the block before it is
        # repeated, as far as it continues alike.
        back = 0
        while back < min(alike, added, other - added) and second[other - back - 1] == second[other - back - 1 - added]:
            back += 1
        place, other = place - back, other - back
        del made[len(made) - back :]
        for time in range(1, times + 1):
            for position in range(other, other + added):
                before, now, base = (
                    seconds[position - added].numbers,
                    seconds[position].numbers,
                    numbers[position - added],
                )
                moved = tuple(b + time * (n - o) for b, n, o in zip(base, now, before, strict=True))
                if time == 1:
                    numbers[position] = moved
                made.append(_Made(position, None, moved))
        other, alike = other + added, 0
    if place < len(firsts):
        raise CannotDeepen("the deeper model lacks what the shallow one has")
    return made


def _period(first: Sequence[Hashable], second: Sequence[Hashable], place: int, other: int) -> int:
    """Return how many items of the longer trace repeat those before them, so that the two, whose ends are items too,
    continue alike for as long as possible; 0: there is no such number."""

    def alike(size: int) -> int:
        pairs = zip(first[place:], second[other + size :], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    most = min(other, len(second) - other - (len(first) - place))
    sizes = {
        size: alike(size)
        for size in range(1, most + 1)
        if second[other] == second[other - size] and second[other - size : other] == second[other : other + size]
    }
    best = max(sizes, key=lambda size: sizes[size], default=0)
    return best if sizes.get(best) else 0
