"""How a job is spread over several GPUs, as its user says it. Torch-free.

Start reading at `Parallel`; `featurize.parallel.layout_text` reads a text or a mapping.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from conf.errors import UsageError, shown

MODES = ("ddp", "fsdp", "cp", "tp")  # the outermost first: ranks of the last one are neighbours
EXPERTS = "ep"  # which divides the ranks of fsdp, cp and tp, and does not multiply them
EXPERT_SHARDS = "efsdp"  # the axis over which FSDP2 spreads the experts of a rank
OWN = "own"  # the model's own code spreads it
HYBRID = "hsdp"  # a name for both: shards within each node, replicas across nodes
PLANNED = ("zero", "pp")  # that are known by name, and refused
ROTATIONS = ("allgather", "alltoall")  # torch.distributed.tensor.experimental.set_rotate_method; its default first
DTYPES = ("fp32", "bf16", "fp16")
_MOST = 65_536  # ranks
EXAMPLE = "parallel=ddp=8"
_EXPERTS = "as in fsdp=8,ep=4"
EXAMPLE_PLAN = "tp_plan={'layers.*.up': colwise, 'layers.*.down': rowwise}"


class _OfMode(NamedTuple):
    """Settings that a layout has only where `applies(degrees)`, which `words` say."""

    names: tuple[str, ...]
    words: str
    applies: Callable[[Mapping[str, Any]], bool]


_OF_MODES = (
    _OfMode(
        ("reshard_after_forward", "param_dtype", "reduce_dtype", "cpu_offload", "wrap"),
        "fsdp or cp", lambda degrees: _takes_part(degrees, "fsdp", "cp"),
    ),
    _OfMode(
        ("gradient_as_bucket_view", "bucket_cap_mb", "static_graph", "find_unused_parameters"),
        "ddp without fsdp, cp and tp", lambda degrees: not _takes_part(degrees, "fsdp", "cp", "tp"),
    ),
    _OfMode(("cp_rotate", "cp_load_balance"), "cp", lambda degrees: _takes_part(degrees, "cp")),
    _OfMode(("tp_plan",), "tp", lambda degrees: _takes_part(degrees, "tp")),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A job's ranks, one GPU each. A mode is a field that holds its degree; the degrees multiply.

    Args:
        ddp: Replicas of the model, each with a batch of its own: under DistributedDataParallel, or of all shards of
            `fsdp` (HSDP).
        fsdp: Ranks over which FSDP2 (`fully_shard`) spreads each replica, each with a batch of its own.
        cp: Ranks that share a batch, each with its part of the sequence (context parallelism): attention gathers or
            rotates keys and values among them. FSDP2 spreads over `fsdp` and `cp` together.
        tp: Ranks that share each module of a plan (tensor parallelism), and a batch.
        ep: Neighbours among the ranks of `fsdp`, `cp` and `tp` that divide the experts of each mixture among them and
            exchange tokens (expert parallelism). It adds no ranks: FSDP2 spreads each expert over the other ranks.
        own: Ranks over which the model's own code spreads it: the factory calls `init_device_mesh`, `fully_shard`,
            `parallelize_module` or `distribute_tensor`, and is taken as it is. Each rank counts with its own batch.
        gpus_per_node: GPUs of a node; more ranks than that take several nodes, all of them full.
        network_gb_s: What each GPU gets of the network between nodes, in GB/s per direction. The default is one adapter
            of 200 Gb/s a GPU.
        gradient_as_bucket_view: Gradients are views of the buckets in which they are reduced, not copies.
        bucket_cap_mb: Size at which a bucket of gradients is full, in MiB. None is torch's own: 25, the first one 1.
        static_graph: Every step runs the same operators.
        find_unused_parameters: Parameters may go without a gradient. Buckets then keep the order of the parameters.
        broadcast_buffers: Buffers of the first rank are sent to all others before each step.
        reshard_after_forward: Gathered parameters are freed after the forward pass and gathered again for the backward
            pass; a number: they are spread over so many ranks meanwhile. None is FSDP2's choice: all but the root's.
        param_dtype: Type in which FSDP2 gathers parameters and computes, of `DTYPES`. None: their own.
        reduce_dtype: Type in which it reduces gradients. None: `param_dtype`.
        cpu_offload: Shards, their gradients and the optimizer are in host memory.
        wrap: Classes of the modules whose parameters are gathered together. None: the repeated blocks.
        cp_rotate: How keys and values go around, of `ROTATIONS`. None is PyTorch's choice, allgather.
        cp_load_balance: Each rank has a part of the sequence's head and one of its tail, so that all have as much of a
            causal mask. None is PyTorch's choice, true; false is for attention without a causal mask.
        tp_plan: Path of a module, with `*` for any part of it -> how it is split, as in plans of transformers' models:
            `colwise`, `rowwise` and others. None: the model's own plan.

    Raises:
        UsageError: A value out of range; all of them are named.
    """

    ddp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    own: int = 1
    gpus_per_node: int = 8
    network_gb_s: float = 25.0
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | None = None
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    reshard_after_forward: bool | int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    cpu_offload: bool = False
    wrap: tuple[str, ...] | None = None
    cp_rotate: str | None = None
    cp_load_balance: bool | None = None
    tp_plan: Mapping[str, str] | None = dataclasses.field(default=None, hash=False)  # a mapping has no hash

    def __post_init__(self) -> None:
        if bad := list(self._problems()):
            raise UsageError(f"parallel: {'; '.join(bad)}")

    def _problems(self) -> Iterator[str]:
        for name in (*MODES, EXPERTS, OWN, "gpus_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
                yield f"{name} must be a whole number from 1 to {_MOST}, got {shown(value)}"
        for name in ("network_gb_s", "bucket_cap_mb"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9
            if not number and not (value is None and name == "bucket_cap_mb"):
                yield f"{name} must be a number > 0, got {shown(value)}"
        for field in dataclasses.fields(self):
            if field.type == "bool" and not isinstance(value := getattr(self, field.name), bool):
                yield f"{field.name} must be true or false, got {shown(value)}"
        yield from self._problems_of_shards()
        yield from self._problems_of_parts()
        if self.own != 1 and any(getattr(self, name) != 1 for name in (*MODES, EXPERTS)):
            others = ", ".join((*MODES, EXPERTS))
            yield f"own goes with no other mode ({others}): the model's own code says how it is spread"
        if self.fsdp == self.cp == 1 and all(type(one) is int and one > 1 for one in (self.ddp, self.tp)):
            yield (
                "ddp with tp needs fsdp: DistributedDataParallel does not reduce tensors that tp splits; use fsdp in "
                "place of ddp, or replicas of shards, as in ddp=2,fsdp=4,tp=2"
            )
        counts = *self.degrees.values(), self.gpus_per_node
        if all(type(one) is int and one > 0 for one in counts) and self.ranks > counts[-1] and self.ranks % counts[-1]:
            yield f"{self.ranks} ranks do not fill nodes of {counts[-1]}; change gpus_per_node"

    def _problems_of_shards(self) -> Iterator[str]:
        for name in ("param_dtype", "reduce_dtype"):
            if (value := getattr(self, name)) is not None and value not in DTYPES:
                yield f"{name} must be one of {', '.join(DTYPES)}, got {shown(value)}"
        kept = self.reshard_after_forward
        whole = isinstance(kept, int) and isinstance(self.fsdp, int) and isinstance(self.cp, int)
        if not (
            kept is None or isinstance(kept, bool) or (whole and 1 < kept < self.sharded and not self.sharded % kept)
        ):
            yield f"reshard_after_forward must be true, false or a divisor of fsdp times cp, got {shown(kept)}"
        if self.wrap is not None and not (
            isinstance(self.wrap, tuple) and self.wrap and all(isinstance(one, str) and one for one in self.wrap)
        ):
            yield f"wrap must be names of classes, as in wrap=[LlamaDecoderLayer], got {shown(self.wrap)}"
        for one in _OF_MODES:
            set_too = [name for name in one.names if getattr(self, name) not in (None, False)]
            if set_too and not one.applies(self.degrees):
                yield f"{', '.join(set_too)}: of {one.words} only"
        if (plan := self.tp_plan) is not None and not _is_plan(plan):
            yield f"tp_plan must be module path -> style, as in {EXAMPLE_PLAN}, got {shown(plan)}"

    def _problems_of_parts(self) -> Iterator[str]:
        if self.cp_rotate not in (None, *ROTATIONS):
            yield f"cp_rotate must be one of {', '.join(ROTATIONS)}, got {shown(self.cp_rotate)}"
        if not isinstance(self.cp_load_balance, bool | None):
            yield f"cp_load_balance must be true or false, got {shown(self.cp_load_balance)}"
        if not all(type(one) is int and one > 0 for one in (self.fsdp, self.cp, self.tp, self.ep)) or self.ep == 1:
            return
        among = self.sharded * self.tp
        if among % self.ep:
            yield f"ep divides the ranks of fsdp, cp and tp, of which there are {among}: {self.ep} does not; {_EXPERTS}"
        elif self.ep % self.tp:
            yield f"ep must be a multiple of tp, which shares tokens: {self.ep} of {self.tp}; as in fsdp=4,tp=2,ep=4"

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each mode whose degrees multiply, the outermost first."""
        return {name: getattr(self, name) for name in (*MODES, OWN)}

    @property
    def sharded(self) -> int:
        """Ranks over which FSDP2 spreads each replica."""
        return self.fsdp * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks over which FSDP2 spreads the same experts."""
        return self.sharded * self.tp // self.ep

    @property
    def axes(self) -> dict[str, int]:
        """The dimensions of the mesh of wrappers, the outermost first: `fsdp` is all that FSDP2 spreads over."""
        sizes = {"ddp": self.ddp, "fsdp": self.sharded, "tp": self.tp, OWN: self.own}
        return {name: degree for name, degree in sizes.items() if degree > 1}

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Ranks that talk to each other, by the axis of what they send: how many, and how far they are apart."""
        groups, stride = {}, self.ranks
        for name, degree in self.axes.items():
            stride //= degree
            groups[name] = degree, stride
        if self.cp > 1:
            groups["cp"] = self.cp, self.tp
        if self.ep > 1:
            groups[EXPERTS] = self.ep, 1
            groups[EXPERT_SHARDS] = self.expert_shards, self.ep
        # A dimension that is the whole mesh talks within the default group (torch/distributed/device_mesh.py).
        whole = [name for name, (degree, _) in groups.items() if degree == self.ranks]
        return {name: one for name, one in groups.items() if one[0] > 1 and name not in whole[1:]}

    @property
    def ranks(self) -> int:
        """All GPUs of the job."""
        return math.prod(self.degrees.values())

    @property
    def replicas(self) -> int:
        """How many batches a step takes: one for each rank that has its own."""
        return self.ddp * self.fsdp * self.own

    @property
    def shards(self) -> bool:
        """Whether PyTorch's own wrappers spread tensors over ranks."""
        return self.fsdp > 1 or self.cp > 1 or self.tp > 1 or self.own > 1

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.ranks // self.gpus_per_node)

    def text(self) -> str:
        """Return the settings that differ from their defaults, as `ddp=8, static_graph=true`."""
        return ", ".join(
            f"{field.name}={_written(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        )


def apt_settings(given: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return those of several settings that are not of a mode that these degrees leave out."""
    left_out = {name for one in _OF_MODES if not one.applies(degrees) for name in one.names}
    return {name: value for name, value in given.items() if name not in left_out}


def _takes_part(degrees: Mapping[str, Any], *modes: str) -> bool:
    return any(degrees.get(mode, 1) != 1 for mode in modes)


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{path}: {style}" for path, style in value.items()) + "}"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


def _is_plan(plan: object) -> bool:
    return (
        isinstance(plan, Mapping) and bool(plan) and all(isinstance(one, str) for pair in plan.items() for one in pair)
    )
