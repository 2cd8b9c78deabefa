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

MODES = ("pp", "ddp", "fsdp", "tp")  # the outermost first: ranks of the last one are neighbours
WRAPPED = ("ddp", "fsdp", "tp")  # of these, those that real ranks run in
OWN = "own"  # the model's own code spreads it
HYBRID = "hsdp"  # a name for both: shards within each node, replicas across nodes
PLANNED = ("zero", "cp", "ep")  # that are known by name, and refused
GPIPE, ONE_F_ONE_B, INTERLEAVED = SCHEDULES = ("gpipe", "1f1b", "interleaved")  # of pipelines
DTYPES = ("fp32", "bf16", "fp16")
_MOST = 65_536  # ranks
EXAMPLE = "parallel=ddp=8"
EXAMPLE_STARTS = "stage_starts=[layers.8,layers.16]"
EXAMPLE_PLAN = "tp_plan={'layers.*.up': colwise, 'layers.*.down': rowwise}"


class _OfMode(NamedTuple):
    """Settings that a layout has only where `applies(degrees)`, which `words` say."""

    names: tuple[str, ...]
    words: str
    applies: Callable[[Mapping[str, Any]], bool]


_OF_MODES = (
    _OfMode(
        ("reshard_after_forward", "param_dtype", "reduce_dtype", "cpu_offload", "wrap"),
        "fsdp", lambda degrees: _takes_part(degrees, "fsdp"),
    ),
    _OfMode(
        ("gradient_as_bucket_view", "bucket_cap_mb", "static_graph", "find_unused_parameters"),
        "ddp without fsdp and tp", lambda degrees: not _takes_part(degrees, "fsdp", "tp"),
    ),
    _OfMode(("tp_plan",), "tp", lambda degrees: _takes_part(degrees, "tp")),
    _OfMode(
        ("schedule", "micro_batches", "stages_per_rank", "stage_starts", "drop_outputs"),
        "pp", lambda degrees: _takes_part(degrees, "pp"),
    ),
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
        tp: Ranks that share each module of a plan (tensor parallelism), and a batch.
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
        tp_plan: Path of a module, with `*` for any part of it -> how it is split, as in plans of transformers' models:
            `colwise`, `rowwise` and others. None: the model's own plan.
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
    tp: int = 1
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
    tp_plan: Mapping[str, str] | None = dataclasses.field(default=None, hash=False)  # a mapping has no hash
    schedule: str | None = None
    micro_batches: int | None = None
    stages_per_rank: int | None = None
    stage_starts: tuple[str, ...] | None = None
    drop_outputs: bool = False

    def __post_init__(self) -> None:
        if bad := list(self._problems()):
            raise UsageError(f"parallel: {'; '.join(bad)}")

    def _problems(self) -> Iterator[str]:
        for name in (*MODES, OWN, "gpus_per_node"):
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
        yield from self._problems_of_pipelines()
        if self.own != 1 and any(getattr(self, name) != 1 for name in MODES):
            yield f"own goes with no other mode ({', '.join(MODES)}): the model's own code says how it is spread"
        if self.fsdp == 1 and all(type(one) is int and one > 1 for one in (self.ddp, self.tp)):
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
        whole = isinstance(kept, int) and isinstance(self.fsdp, int)
        if not (kept is None or isinstance(kept, bool) or (whole and 1 < kept < self.fsdp and not self.fsdp % kept)):
            yield f"reshard_after_forward must be true, false or a divisor of fsdp, got {shown(kept)}"
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
        """The degree of each mode, the outermost first."""
        return {name: getattr(self, name) for name in (*MODES, OWN)}

    @property
    def axes(self) -> dict[str, int]:
        """The dimensions of the mesh of ranks: the modes that take part, the outermost first."""
        return {name: degree for name, degree in self.degrees.items() if degree > 1}

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
        return self.fsdp > 1 or self.tp > 1 or self.own > 1

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
