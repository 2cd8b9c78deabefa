"""Trace of a training step: its operators, its memory blocks, when these are allocated and freed.

Start reading at `StepTrace`; `featurize.trace.tracer` makes one, `featurize.recording.recorder` observes the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from featurize.cudnn.signature import ConvolutionSignature
from featurize.device.device_spec import DeviceSpec
from featurize.operators.library_calls import LibraryCall, guesses_of, workspace_bytes

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

    @cached_property
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

    @cached_property
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

    @cached_property
    def peak_live_bytes(self) -> int:
        """Maximum of the bytes alive at once, without an allocator's rounding and library's workspace."""
        return sum(self.breakdown.values())

    @cached_property
    def breakdown(self) -> dict[str, int]:
        """Bytes alive at the peak, by block kind."""
        live = list(accumulate([event.nbytes for event in self.events], initial=0))
        by_kind: Counter[str] = Counter()
        for event in self.events[: live.index(max(live))]:
            by_kind[self.blocks[event.block].kind] += event.nbytes
        return {kind: by_kind[kind] for kind in (*BLOCK_KINDS, *(by_kind.keys() - set(BLOCK_KINDS)))}
