"""How a job is spread over several GPUs, as its user says it. Torch-free.

Start reading at `Parallel`; `featurize.parallel.layout_text` reads a text or a mapping.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.errors import UsageError, shown

if TYPE_CHECKING:
    from featurize.parallel.deepspeed_config import DeepSpeedFile

MODES = ("pp", "ddp", "fsdp", "cp", "tp")  # the outermost first: ranks of the last one are neighbours
WRAPPED = ("ddp", "fsdp", "tp")  # of these, those that real ranks run in
EXPERTS = "ep"  # which divides the ranks of fsdp, cp and tp, and does not multiply them
EXPERT_SHARDS = "efsdp"  # the axis over which FSDP2 spreads the experts of a rank
OWN = "own"  # the model's own code spreads it
HYBRID = "hsdp"  # a name for both: shards within each node, replicas across nodes
GPIPE, ONE_F_ONE_B, INTERLEAVED = SCHEDULES = ("gpipe", "1f1b", "interleaved")  # of pipelines
ROTATIONS = ("allgather", "alltoall")  # torch.distributed.tensor.experimental.set_rotate_method; its default first
DTYPES = ("fp32", "bf16", "fp16")
ZERO_STAGES = (1, 2, 3)
_MOST = 65_536  # ranks
EXAMPLE = "parallel=ddp=8"
_EXPERTS = "as in fsdp=8,ep=4"
EXAMPLE_STARTS = "stage_starts=[layers.8,layers.16]"
EXAMPLE_PLAN = "tp_plan={'layers.*.up': colwise, 'layers.*.down': rowwise}"


class _OfMode(NamedTuple):
    """Settings that a layout has only where `applies(degrees and stage)`, which `words` say."""

    names: tuple[str, ...]
    words: str
    applies: Callable[[Mapping[str, Any]], bool]


_OF_MODES = (
    _OfMode(
        ("reshard_after_forward", "reduce_dtype", "wrap"), "fsdp or cp",
        lambda degrees: _takes_part(degrees, "fsdp", "cp"),
    ),
    _OfMode(
        ("gradient_as_bucket_view", "bucket_cap_mb", "static_graph", "find_unused_parameters"),
        "ddp without fsdp, cp, tp and zero",
        lambda degrees: not (_takes_part(degrees, "fsdp", "cp", "tp") or _stage(degrees)),
    ),
    _OfMode(("cp_rotate", "cp_load_balance"), "cp", lambda degrees: _takes_part(degrees, "cp")),
    _OfMode(("tp_plan",), "tp", lambda degrees: _takes_part(degrees, "tp")),
    _OfMode(
        ("schedule", "micro_batches", "stages_per_rank", "stage_starts", "drop_outputs"),
        "pp", lambda degrees: _takes_part(degrees, "pp"),
    ),
    _OfMode(("zero",), "ddp without fsdp, cp, tp and own",
            lambda degrees: not _takes_part(degrees, "fsdp", "cp", "tp", OWN)),
    _OfMode(
        ("param_dtype", "cpu_offload"), "fsdp, cp or zero",
        lambda degrees: _takes_part(degrees, "fsdp", "cp") or _stage(degrees),
    ),
    _OfMode(("reduce_bucket_size", "overlap_comm", "contiguous_gradients"), "zero", lambda degrees: _stage(degrees)),
    _OfMode(
        ("offload_param", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
         "stage3_max_reuse_distance", "stage3_param_persistence_threshold"),
        "zero=3", lambda degrees: _stage(degrees) and degrees["zero"] == 3,
    ),
)  # fmt: skip
COUNTS = (
    "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_param_persistence_threshold",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A job's ranks, one GPU each. A mode is a field that holds its degree; the degrees multiply.

    Args:
        pp: Ranks of a pipeline, each with a part of the model (a stage, or several). The batch is that of a whole
            step of the pipeline, which `schedule.step` of torch.distributed.pipelining divides into micro-batches.
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
        zero: Stage of DeepSpeed's ZeRO, in place of DistributedDataParallel: 1 spreads the optimizer over the ranks of
            `ddp`, 2 gradients, too, 3 parameters, too. None: no ZeRO. `param_dtype` is then the type of the model
            itself, whose master weights are in fp32; `cpu_offload` is DeepSpeed's `offload_optimizer`.
        reduce_bucket_size: Elements of the buffer in which ZeRO reduces gradients.
        overlap_comm: It reduces them on a stream of their own, in two buffers by turns. None is DeepSpeed's choice:
            only in stage 3.
        contiguous_gradients: Gradients are copied into that buffer as they come.
        offload_param: Stage 3 keeps the partitions of parameters in host memory.
        sub_group_size: Elements of a partition that stage 3 updates at a time.
        stage3_prefetch_bucket_size: Elements that stage 3 gathers ahead of use.
        stage3_max_live_parameters: Gathered elements beyond which it frees parameters and gathers no more ahead.
        stage3_max_reuse_distance: It keeps gathered parameters that are used again within so many elements.
        stage3_param_persistence_threshold: It keeps smaller parameters gathered.
        deepspeed: What DeepSpeed's own file says, of which `featurize.parallel.layout_text` made this layout.
        schedule: Order in which a rank of a pipeline runs its micro-batches, of `SCHEDULES`. None: 1f1b.
        micro_batches: Into how many the batch is divided, along the first dimension. None: two for each rank of `pp`.
        stages_per_rank: Stages of each rank, of `interleaved` only. None: 2 there.
        stage_starts: Paths of the modules at which all stages but the first begin, in their order. None: blocks are
            spread evenly, where what comes before them and what comes after them count as a block each.
        drop_outputs: The last stage does not keep the outputs of its micro-batches to return them as one
            (`return_outputs=False` of `schedule.step`).

    Raises:
        UsageError: A value out of range; all of them are named.
    """

    pp: int = 1
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
    # Defaults as of DeepSpeed 0.19 (deepspeed/runtime/zero/config.py)
    zero: int | None = None
    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    offload_param: bool = False
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    deepspeed: DeepSpeedFile | None = dataclasses.field(default=None, hash=False, compare=False, repr=False)
    schedule: str | None = None
    micro_batches: int | None = None
    stages_per_rank: int | None = None
    stage_starts: tuple[str, ...] | None = None
    drop_outputs: bool = False

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
        yield from self._problems_of_zero()
        yield from self._problems_of_parts()
        yield from self._problems_of_modes()
        yield from self._problems_of_pipelines()
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
        if (plan := self.tp_plan) is not None and not _is_plan(plan):
            yield f"tp_plan must be module path -> style, as in {EXAMPLE_PLAN}, got {shown(plan)}"

    def _problems_of_zero(self) -> Iterator[str]:
        if self.zero is not None and (type(self.zero) is not int or self.zero not in ZERO_STAGES):
            yield f"zero is a stage of DeepSpeed's ZeRO, 1, 2 or 3, as in ddp=8,zero=2, got {shown(self.zero)}"
        elif self.zero is not None and self.ranks == 1:
            yield f"zero={self.zero} is a stage, not a number of GPUs: give these as ddp, as in ddp=8,zero={self.zero}"
        if self.overlap_comm is not None and not isinstance(self.overlap_comm, bool):
            yield f"overlap_comm must be true or false, got {shown(self.overlap_comm)}"
        for name in COUNTS:
            least = 0 if name.startswith("stage3_") else 1
            if type(value := getattr(self, name)) is not int or value < least:
                yield f"{name} must be a whole number of elements, at least {least}, got {shown(value)}"

    def _problems_of_modes(self) -> Iterator[str]:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for one in _OF_MODES:
            set_too = [name for name in one.names if getattr(self, name) != defaults[name]]
            if set_too and not one.applies({**self.degrees, "zero": self.zero}):
                yield f"{', '.join(set_too)}: of {one.words} only"

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

    def _problems_of_pipelines(self) -> Iterator[str]:
        if self.schedule is not None and self.schedule not in SCHEDULES:
            yield f"schedule must be one of {', '.join(SCHEDULES)}, got {shown(self.schedule)}"
            return
        for name, least in (("micro_batches", 1), ("stages_per_rank", 2)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not least <= value <= _MOST):
                yield f"{name} must be a whole number from {least} to {_MOST}, got {shown(value)}"
                return
        if self.stage_starts is not None and not (
            isinstance(self.stage_starts, tuple) and all(isinstance(one, str) and one for one in self.stage_starts)
        ):
            yield f"stage_starts must be paths of modules, as in {EXAMPLE_STARTS}, got {shown(self.stage_starts)}"
            return
        if type(self.pp) is int and self.pp > 1:
            yield from self._problems_of_order()

    def _problems_of_order(self) -> Iterator[str]:
        """What torch's schedules refuse, and what does not fit the number of stages."""
        if others := [name for name in ("cp", EXPERTS) if getattr(self, name) != 1]:
            yield f"pp with {' and '.join(others)} is not estimated yet; leave either out"
        if self.zero is not None:
            yield "pp with zero: DeepSpeed's own pipelines are not estimated; leave either out"
        if self.stages_per_rank is not None and self.schedule != INTERLEAVED:
            yield "stages_per_rank: of schedule=interleaved only"
        if self.order == ONE_F_ONE_B and self.chunks < self.pp:
            yield f"micro_batches must be at least pp ({self.pp}) with schedule={self.order}, got {self.chunks}"
        elif self.order == INTERLEAVED and self.chunks % max(self.chunks // self.pp, 1):
            yield (
                f"micro_batches of schedule=interleaved must divide into rounds of pp ({self.pp}) or more, all of a "
                f"size, got {self.chunks}"
            )
        if self.stage_starts is not None and len(self.stage_starts) != self.stages - 1:
            count = len(self.stage_starts)
            yield f"stage_starts must name {self.stages - 1} modules for {self.stages} stages, got {count}"

    @property
    def order(self) -> str:
        """The schedule of a pipeline, of `SCHEDULES`."""
        return self.schedule or ONE_F_ONE_B

    @property
    def chunks(self) -> int:
        """Micro-batches into which a pipeline divides its batch; 1 where there is none."""
        return 1 if self.pp == 1 else self.micro_batches or 2 * self.pp

    @property
    def parts(self) -> int:
        """Stages of each rank of a pipeline."""
        return (self.stages_per_rank or 2) if self.order == INTERLEAVED else 1

    @property
    def stages(self) -> int:
        """Stages of a pipeline: those of rank 0 are 0, `pp`, and so on."""
        return self.pp * self.parts

    @property
    def of_stage(self) -> int:
        """Ranks that have the same stages."""
        return self.ranks // self.pp

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
        sizes = {"pp": self.pp, "ddp": self.ddp, "fsdp": self.sharded, "tp": self.tp, OWN: self.own}
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
        """Whether PyTorch's own wrappers spread tensors over ranks, but for what a pipeline does."""
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
            if (value := getattr(self, field.name)) != field.default and field.name != "deepspeed"
        )


def apt_settings(given: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return those of several settings that are not of a mode that these degrees leave out."""
    kept = dict(given)
    for _ in range(2):  # settings of a stage go with it
        left_out = {
            name for one in _OF_MODES if not one.applies({**degrees, "zero": kept.get("zero")}) for name in one.names
        }
        kept = {name: value for name, value in kept.items() if name not in left_out}
    return kept


def _takes_part(degrees: Mapping[str, Any], *modes: str) -> bool:
    return any(degrees.get(mode, 1) != 1 for mode in modes)


def _stage(degrees: Mapping[str, Any]) -> bool:
    return degrees.get("zero") is not None


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
