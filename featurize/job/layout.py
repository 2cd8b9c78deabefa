"""How a job is spread over several GPUs, as its user says it: modes, settings, and which go together. Torch-free.

Start reading at `Parallel`, and at `parse_parallel`, which reads a text or a mapping.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from conf.errors import UsageError, shown
from featurize.job.deepspeed_config import COUNTS, ZERO_STAGES, DeepSpeedFile, is_finite, read_deepspeed

MODES = ("pp", "ddp", "fsdp", "cp", "tp")  # the outermost first: ranks of the last one are neighbours
WRAPPED = ("ddp", "fsdp", "tp")  # those among them that real ranks run in
EXPERTS = "ep"  # which divides the ranks of fsdp, cp and tp, and does not multiply them
EXPERT_SHARDS = "efsdp"  # the axis over which FSDP2 spreads the experts of a rank
EXPERT_REPLICAS = "eddp"  # the axis of the replicas of these shards, the same ranks as ddp's in groups of their own
OWN = "own"  # the model's own code spreads it
HYBRID = "hsdp"  # a name for both: shards within each node, replicas across nodes
GPIPE, ONE_F_ONE_B, INTERLEAVED = SCHEDULES = ("gpipe", "1f1b", "interleaved")  # schedules of pipelines
ROTATIONS = ("allgather", "alltoall")  # torch.distributed.tensor.experimental.set_rotate_method; its default first
DTYPES = ("fp32", "bf16", "fp16")
FULLY_SHARD, FLAT = FSDP_VERSIONS = (2, 1)  # fully_shard, and FullyShardedDataParallel with its flat parameters
PREFETCHES = ("pre", "post", "none")  # torch.distributed.fsdp.BackwardPrefetch; its default first
MOST_RANKS = 65_536
DEEPSPEED = "deepspeed"
_WITHIN = re.compile(r"[\[{][^\]}]*")  # brackets
_COMMA = "\0"  # stands for one within brackets
_QUOTED = " '\""
EXAMPLE = "parallel=ddp=8"
EXAMPLE_STARTS = "stage_starts=[layers.8,layers.16]"
EXAMPLE_PLAN = "tp_plan={'layers.*.up': colwise, 'layers.*.down': rowwise}"


class OfMode(NamedTuple):
    """Settings that a layout has only where `applies(degrees, stage and version)`, which `words` say."""

    names: tuple[str, ...]
    words: str
    applies: Callable[[Mapping[str, Any]], bool]


OF_MODES = (
    OfMode(
        ("reshard_after_forward", "reduce_dtype", "wrap"),
        "fsdp or cp",
        lambda degrees: _takes_part(degrees, "fsdp", "cp"),
    ),
    OfMode(
        ("gradient_as_bucket_view", "bucket_cap_mb", "static_graph", "find_unused_parameters"),
        "ddp without fsdp, cp, tp and zero",
        lambda degrees: (
            not (_takes_part(degrees, "fsdp", "cp", "tp") or _stage(degrees))
            and (_takes_part(degrees, "ddp") or not _takes_part(degrees, "pp", OWN))
        ),
    ),
    OfMode(("fsdp_version",), "fsdp", lambda degrees: _takes_part(degrees, "fsdp")),
    OfMode(
        ("backward_prefetch", "limit_all_gathers", "use_orig_params", "no_sync"),
        "fsdp_version=1",
        lambda degrees: degrees.get("fsdp_version") == FLAT,
    ),
    OfMode(("cp_rotate", "cp_load_balance"), "cp", lambda degrees: _takes_part(degrees, "cp")),
    OfMode(("tp_plan",), "tp", lambda degrees: _takes_part(degrees, "tp")),
    OfMode(
        ("schedule", "micro_batches", "stages_per_rank", "stage_starts", "drop_outputs"),
        "pp",
        lambda degrees: _takes_part(degrees, "pp"),
    ),
    OfMode(
        ("zero",), "ddp without fsdp, cp, tp and own", lambda degrees: not _takes_part(degrees, "fsdp", "cp", "tp", OWN)
    ),
    OfMode(
        ("param_dtype", "cpu_offload"),
        "fsdp, cp or zero",
        lambda degrees: _takes_part(degrees, "fsdp", "cp") or _stage(degrees),
    ),
    OfMode(("reduce_bucket_size", "overlap_comm", "contiguous_gradients"), "zero", lambda degrees: _stage(degrees)),
    OfMode(
        (
            "offload_param",
            "sub_group_size",
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_param_persistence_threshold",
        ),
        "zero=3",
        lambda degrees: _stage(degrees) and degrees["zero"] == 3,
    ),
)


def apt_settings(given: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return those of several settings that are not of a mode that these degrees leave out."""
    kept = dict(given)
    for _ in range(2):  # settings of a stage and of a version go with it
        chosen = {**degrees, "zero": kept.get("zero"), "fsdp_version": kept.get("fsdp_version")}
        left_out = {
            name for mode_setting in OF_MODES if not mode_setting.applies(chosen) for name in mode_setting.names
        }
        kept = {name: value for name, value in kept.items() if name not in left_out}
    return kept


def _takes_part(degrees: Mapping[str, Any], *modes: str) -> bool:
    return any(degrees.get(mode, 1) != 1 for mode in modes)


def _stage(degrees: Mapping[str, Any]) -> bool:
    return degrees.get("zero") is not None


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A job's ranks, one GPU each. A mode is a field that holds its degree; the degrees multiply.

    Degrees:
        pp: Ranks of a pipeline, each with a part of the model (one stage or several). The batch is that of a whole
            step of the pipeline, which `schedule.step` of torch.distributed.pipelining divides into micro-batches.
        ddp: Replicas of the model, each with its own batch: under DistributedDataParallel, or of all shards of `fsdp`
            (HSDP).
        fsdp: Ranks over which FSDP2 (`fully_shard`) spreads each replica, each with its own batch.
        cp: Ranks that share a batch, each with its part of the sequence (context parallelism): attention gathers or
            rotates keys and values among them. FSDP2 spreads over `fsdp` and `cp` together.
        tp: Ranks that share a batch and each module of a plan (tensor parallelism).
        ep: Neighbours among the ranks of `fsdp`, `cp` and `tp` that divide the experts of each mixture among them and
            exchange tokens (expert parallelism). It adds no ranks: FSDP2 spreads each expert over the other ranks.
        own: Ranks over which the model's own code spreads it: the factory calls `init_device_mesh`, `fully_shard`,
            `parallelize_module` or `distribute_tensor`, and is used unchanged. Each rank counts with its own batch.

    Nodes:
        gpus_per_node: GPUs of a node. More ranks than that take several nodes, all of them full.
        network_gb_s: Each GPU's share of the network between nodes, in GB/s per direction. None: one adapter a GPU,
            as fast as its PCIe: 100 Gb/s on PCIe 3.0, 200 on 4.0, 400 on 5.0.

    Pipelines (`pp`):
        schedule: Order in which a rank runs its micro-batches, one of `SCHEDULES`. None: 1f1b.
        micro_batches: Number of micro-batches that the batch is divided into, along the first dimension. None: two for
            each rank of `pp`.
        stages_per_rank: Stages of each rank, for `interleaved` only. None: 2 there.
        stage_starts: Paths of the modules at which all stages but the first begin, in order. None: blocks are spread
            evenly, where the parts before and after them count as a block each.
        drop_outputs: The last stage does not keep the outputs of its micro-batches to return them as one
            (`return_outputs=False` of `schedule.step`).

    DistributedDataParallel (`ddp`):
        gradient_as_bucket_view: Gradients are views of the buckets in which they are reduced, not copies.
        bucket_cap_mb: Size at which a bucket of gradients is full, in MiB. None: torch's own, 25 (the first bucket 1).
        static_graph: Every step runs the same operators.
        find_unused_parameters: Parameters may go without a gradient. Buckets then keep the order of the parameters.
        broadcast_buffers: The first rank's buffers are sent to all others before each step.

    FSDP2, and FSDP1 (`fsdp`):
        reshard_after_forward: Gathered parameters are freed after the forward pass and gathered again for the backward
            pass; a number: they are spread over this many ranks in between. None: FSDP2's choice, all but the root's.
        param_dtype: Type in which FSDP2 gathers parameters and computes, one of `DTYPES`. None: their own.
        reduce_dtype: Type in which it reduces gradients. None: `param_dtype`.
        cpu_offload: Shards, their gradients and the optimizer are in host memory.
        wrap: Classes of the modules whose parameters are gathered together. None: the repeated blocks.
        fsdp_version: 2: `fully_shard`. 1: `FullyShardedDataParallel`, with flat parameters: FULL_SHARD or
            SHARD_GRAD_OP, as `reshard_after_forward` is true or false, and HYBRID_SHARD and its variant with `ddp`.
        backward_prefetch: When FSDP1 gathers the next unit of the backward pass, one of `PREFETCHES`: before this
            one's gradients are computed, after that, or not ahead at all.
        limit_all_gathers: The host waits before it gathers more than two units ahead of FSDP1's kernels.
        use_orig_params: FSDP1 keeps the original parameters. False: the optimizer gets flat ones, and each unit's
            parameters all train or are all frozen. Lightning, Composer and accelerate set true; torch's own is false.
        no_sync: All micro-steps but the last run under FSDP1's `no_sync`: each rank keeps whole gradients during them.

    Context and tensor parallelism (`cp`, `tp`):
        cp_rotate: How keys and values go around, one of `ROTATIONS`. None: PyTorch's choice, allgather.
        cp_load_balance: Each rank has a part of the sequence's head and one of its tail, so that a causal mask leaves
            all ranks the same work. None: PyTorch's choice, true. False is for attention without a causal mask.
        tp_plan: Path of a module, with `*` for any part of it -> how it is split, as in plans of transformers' models:
            `colwise`, `rowwise` and others. None: the model's own plan.

    DeepSpeed's ZeRO (`zero`):
        zero: Stage, in place of DistributedDataParallel: 1 spreads the optimizer over the ranks of `ddp`, 2 also
            gradients, 3 also parameters. None: no ZeRO. `param_dtype` is then the type of the model itself, whose
            master weights are in fp32; `cpu_offload` is DeepSpeed's `offload_optimizer`.
        reduce_bucket_size: Elements of the buffer in which gradients are reduced.
        overlap_comm: Gradients are reduced on their own stream, in two alternating buffers. None: DeepSpeed's choice,
            only in stage 3.
        contiguous_gradients: Gradients are copied into that buffer as they come.
        offload_param: Stage 3 keeps the partitions of parameters in host memory.
        sub_group_size: Elements of a partition that stage 3 updates at a time.
        stage3_prefetch_bucket_size: Elements that stage 3 gathers ahead of use.
        stage3_max_live_parameters: Gathered elements beyond which stage 3 frees parameters and gathers no more ahead.
        stage3_max_reuse_distance: Stage 3 keeps gathered parameters that are used again within this many elements.
        stage3_param_persistence_threshold: Stage 3 keeps smaller parameters gathered.
        deepspeed: DeepSpeed's own file, from which `parse_parallel` made this layout.

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
    network_gb_s: float | None = None
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
    fsdp_version: int = 2
    backward_prefetch: str = "pre"
    limit_all_gathers: bool = True
    use_orig_params: bool = True
    no_sync: bool = False
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
        if bad := list(_problems_of(self)):
            raise UsageError(f"parallel: {'; '.join(bad)}")

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
    def replicates(self) -> bool:
        """Each replica holds all of its gradients, which are reduced in buckets."""
        return self.ddp > 1 and self.sharded == 1

    @property
    def flat(self) -> bool:
        """FullyShardedDataParallel spreads flat parameters."""
        return self.fsdp > 1 and self.fsdp_version == FLAT

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
            if self.ddp > 1:
                groups[EXPERT_REPLICAS] = groups["ddp"]
            groups[EXPERTS] = self.ep, 1
            groups[EXPERT_SHARDS] = self.expert_shards, self.ep
        # A dimension that is the whole mesh talks within the default group (torch/distributed/device_mesh.py).
        whole = [name for name, (degree, _) in groups.items() if degree == self.ranks]
        return {name: group for name, group in groups.items() if group[0] > 1 and name not in whole[1:]}

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
        """PyTorch's own wrappers spread tensors over ranks, except what a pipeline does."""
        return self.fsdp > 1 or self.cp > 1 or self.tp > 1 or self.own > 1

    @property
    def nodes(self) -> int:
        """Nodes that the ranks fill."""
        return -(-self.ranks // self.gpus_per_node)

    def text(self) -> str:
        """Return the settings that differ from their defaults, as `ddp=8, static_graph=true`."""
        return ", ".join(
            f"{field.name}={_write(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default and field.name != "deepspeed"
        )


def _write(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{path}: {style}" for path, style in value.items()) + "}"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


class _Value(NamedTuple):
    """Values that a setting may have, in words."""

    fits: Callable[[Any], bool]
    words: str


def _whole(least: int, most: float, words: str) -> _Value:
    return _Value(lambda value: type(value) is int and least <= value <= most, f"a whole number {words}")


def _one_of(choices: tuple[str, ...]) -> _Value:
    return _Value(lambda value: value in choices, f"one of {', '.join(choices)}")


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)


_DEGREES = (*MODES, EXPERTS, OWN, "gpus_per_node")
_VALUES: Mapping[str, _Value] = {
    **dict.fromkeys((*_DEGREES, "micro_batches"), _whole(1, MOST_RANKS, f"from 1 to {MOST_RANKS}")),
    "stages_per_rank": _whole(2, MOST_RANKS, f"from 2 to {MOST_RANKS}"),
    **dict.fromkeys(
        ("network_gb_s", "bucket_cap_mb"),
        _Value(lambda value: is_finite(value) and 0 < value < 1e9, "a number > 0"),
    ),
    **{
        field.name: _Value(lambda value: isinstance(value, bool), "true or false")
        for field in dataclasses.fields(Parallel)
        if field.type in ("bool", "bool | None")
    },
    **dict.fromkeys(("param_dtype", "reduce_dtype"), _one_of(DTYPES)),
    "backward_prefetch": _one_of(PREFETCHES),
    "cp_rotate": _one_of(ROTATIONS),
    "schedule": _one_of(SCHEDULES),
    "wrap": _Value(lambda value: bool(value) and _are_names(value), "names of classes, as in wrap=[LlamaDecoderLayer]"),
    "tp_plan": _Value(
        lambda value: isinstance(value, Mapping) and bool(value) and _are_names((*value.keys(), *value.values())),
        f"module path -> style, as in {EXAMPLE_PLAN}",
    ),
    "stage_starts": _Value(_are_names, f"paths of modules, as in {EXAMPLE_STARTS}"),
    "fsdp_version": _Value(
        lambda value: type(value) is int and value in FSDP_VERSIONS,
        "2 (fully_shard) or 1 (FullyShardedDataParallel)",
    ),
    "zero": _Value(
        lambda value: type(value) is int and value in ZERO_STAGES,
        "a stage of DeepSpeed's ZeRO, 1, 2 or 3, as in ddp=8,zero=2",
    ),
    **{
        name: _whole(least, math.inf, f"of elements, at least {least}")
        for name in COUNTS
        for least in [0 if name.startswith("stage3_") else 1]
    },
}


def _problems_of(layout: Parallel) -> Iterator[str]:
    """Yield each thing that is wrong with a layout, in words; what follows from a wrong value is left out."""
    fields = {field.name: field for field in dataclasses.fields(layout)}
    wrong = set()
    for name, known in _VALUES.items():
        value = getattr(layout, name)
        if not (value is None and fields[name].default is None) and not known.fits(value):
            wrong.add(name)
            yield f"{name} must be {known.words}, got {shown(value)}"
    if not wrong.isdisjoint(_DEGREES):
        return
    chosen = {**layout.degrees, "zero": layout.zero, "fsdp_version": layout.fsdp_version}
    for mode_setting in OF_MODES:
        set_too = [name for name in mode_setting.names if getattr(layout, name) != fields[name].default]
        if set_too and not mode_setting.applies(chosen):
            yield f"{', '.join(set_too)}: of {mode_setting.words} only"
    rules = _rules_of_modes(layout)
    if layout.pp > 1 and wrong.isdisjoint({"schedule", "micro_batches", "stages_per_rank", "stage_starts"}):
        rules = (*rules, *_rules_of_pipelines(layout))
    yield from (problem for broken, problem in rules if broken)
    if layout.ranks > layout.gpus_per_node and layout.ranks % layout.gpus_per_node:
        yield f"{layout.ranks} ranks do not fill nodes of {layout.gpus_per_node}; change gpus_per_node"


def _rules_of_modes(layout: Parallel) -> tuple[tuple[bool, str], ...]:
    """Return whether each rule is broken, and the rule in words."""
    kept, among, is_flat = layout.reshard_after_forward, layout.sharded * layout.tp, layout.fsdp_version == FLAT
    divides = type(kept) is int and 1 < kept < layout.sharded and not layout.sharded % kept
    others = [name for name in (*MODES, EXPERTS) if getattr(layout, name) != 1]
    beside_flat = [name for name in others if name not in ("ddp", "fsdp")]
    return (
        (
            not (kept is None or isinstance(kept, bool) or divides),
            f"reshard_after_forward must be true, false or a divisor of fsdp times cp, got {shown(kept)}",
        ),
        (
            is_flat and layout.cpu_offload,
            "cpu_offload with fsdp_version=1 is not estimated yet; leave it out, or use fsdp_version=2",
        ),
        (
            is_flat and bool(beside_flat),
            f"fsdp_version=1 goes with ddp alone, not with {', '.join(beside_flat)}; leave either out",
        ),
        (
            is_flat and type(kept) is int,
            "reshard_after_forward of fsdp_version=1 is true (FULL_SHARD) or false (SHARD_GRAD_OP), not a number",
        ),
        (
            layout.zero is not None and layout.ranks == 1,
            f"zero={layout.zero} is a stage, not a number of GPUs: give these as ddp, as in ddp=8,zero={layout.zero}",
        ),
        (
            layout.ep > 1 and among % layout.ep > 0,
            f"ep divides the ranks of fsdp, cp and tp, of which there are {among}: {layout.ep} does not; "
            "as in fsdp=8,ep=4",
        ),
        (
            layout.ep > 1 and among % layout.ep == 0 and layout.ep % layout.tp > 0,
            f"ep must be a multiple of tp, which shares tokens: {layout.ep} of {layout.tp}; as in fsdp=4,tp=2,ep=4",
        ),
        (
            layout.own != 1 and bool(others),
            f"own goes with no other mode ({', '.join((*MODES, EXPERTS))}): the model's own code says how it is spread",
        ),
    )


def _rules_of_pipelines(layout: Parallel) -> tuple[tuple[bool, str], ...]:
    """Return the rules of torch's schedules, and of the number of stages, in the same form."""
    starts, chunks = layout.stage_starts, layout.chunks
    return (
        (layout.zero is not None, "pp with zero: DeepSpeed's own pipelines are not estimated; leave either out"),
        (
            layout.stages_per_rank is not None and layout.schedule != INTERLEAVED,
            "stages_per_rank: of schedule=interleaved only",
        ),
        (
            layout.order == ONE_F_ONE_B and chunks < layout.pp,
            f"micro_batches must be at least pp ({layout.pp}) with schedule={layout.order}, got {chunks}",
        ),
        (
            layout.order == INTERLEAVED and chunks % max(chunks // layout.pp, 1) > 0,
            f"micro_batches of schedule=interleaved must divide into rounds of pp ({layout.pp}) or more, all of a "
            f"size, got {chunks}",
        ),
        (
            starts is not None and len(starts) != layout.stages - 1,
            f"stage_starts must name {layout.stages - 1} modules for {layout.stages} stages, got {len(starts or ())}",
        ),
    )


def parse_parallel(
    given: object, *, files: bool = False, hidden_size: Callable[[], int | None] | None = None
) -> Parallel | None:
    """Return how a job is spread over GPUs; None for a job on one GPU, which no wrapper changes.

    Args:
        given: A `Parallel`, a mapping of its fields, or text such as `ddp=8` and `ddp=8,gradient_as_bucket_view=true`.
        files: `deepspeed=FILE` may name DeepSpeed's own settings: where they are, as a job's config holds no files.
        hidden_size: Returns the model's, where such a file leaves sizes to it.

    Raises:
        UsageError: An unknown mode or setting, with the known ones; a value out of range; a file that cannot be read.
    """
    if given is None:
        return None
    if isinstance(given, str | Mapping):
        settings = named_settings(given)
        given = _of_mapping(_with_file(settings, hidden_size, files=files) if DEEPSPEED in settings else settings)
    if not isinstance(given, Parallel):
        raise UsageError(f"parallel is text, a mapping or a Parallel, as in {EXAMPLE}, got {type(given).__name__}")
    return given if given.ranks > 1 else None


def names_network_only(given: object) -> bool:
    """Return whether a text or a mapping says no more than what joins the nodes, as `network_gb_s=50` does."""
    return isinstance(given, str | Mapping) and set(named_settings(given)) == {"network_gb_s"}


def named_settings(given: str | Mapping[Any, Any]) -> dict[Any, Any]:
    """Return settings by name, as a text or a mapping has them. Raises `UsageError` for text that is not such a
    list."""
    return dict(_pairs(given) if isinstance(given, str) else given)


def _with_file(given: dict[Any, Any], hidden_size: Callable[[], int | None] | None, *, files: bool) -> dict[Any, Any]:
    """Settings with what DeepSpeed's file says; those that are given beside it say the same, or what it does not."""
    if not files:
        raise UsageError(
            "parallel: deepspeed: a file is read where one job is estimated; give its settings, as in ddp=8,zero=2"
        )
    ranks = given.get("ddp")
    if type(ranks) is not int or ranks < 1:
        raise UsageError(
            "parallel: deepspeed needs the number of GPUs as ddp, as in parallel='deepspeed=ds_config.json,ddp=8'"
        )
    file = read_deepspeed(given[DEEPSPEED], ranks=ranks, hidden_size=hidden_size)
    if others := [name for name, value in file.zero.items() if given.get(name, value) != value]:
        raise UsageError(
            f"parallel: {', '.join(f'{name}={shown(given[name])}' for name in others)} contradicts the DeepSpeed file, "
            f"which has {', '.join(f'{name}={file.zero[name]}' for name in others)}; change it there"
        )
    return {**given, **file.zero, DEEPSPEED: file}


def _of_mapping(given: Mapping[Any, Any]) -> Parallel:
    known = [field.name for field in dataclasses.fields(Parallel)]
    given = dict(given)
    if HYBRID in given:
        given = {**given, **_hybrid(given)}
        del given[HYBRID]
    for name in ("wrap", "stage_starts"):
        if isinstance(given.get(name), list | str):
            given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
    if isinstance(starts := given.get("stage_starts"), tuple):
        # Members of an nn.Sequential are numbers, as YAML reads them.
        given["stage_starts"] = tuple(str(start) if type(start) is int else start for start in starts)
    if given.get("backward_prefetch", "") is None:
        given["backward_prefetch"] = "none"  # as YAML reads it
    if unknown := [shown(name) for name in given if name not in known]:
        raise UsageError(f"parallel: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    for name in COUNTS:
        if isinstance(number := given.get(name), float) and number.is_integer():
            given[name] = int(number)  # 5e8, as DeepSpeed's files have it
    if not any(name in (*MODES, EXPERTS, OWN, "zero") for name in given):
        raise UsageError(f"parallel names no mode; give one of {', '.join((*MODES, OWN, HYBRID))}, as in {EXAMPLE}")
    return Parallel(**given)


def _hybrid(given: Mapping[Any, Any]) -> dict[str, int]:
    """Return the degrees of shards within nodes and replicas across them."""
    ranks, of_node = given[HYBRID], given.get("gpus_per_node", Parallel.gpus_per_node)
    if both := [name for name in ("ddp", "fsdp") if name in given]:
        raise UsageError(f"parallel: {HYBRID} is ddp and fsdp in one: leave {' and '.join(both)} out, or {HYBRID}")
    if not all(type(size) is int and size > 0 for size in (ranks, of_node)) or ranks % of_node or ranks == of_node:
        raise UsageError(
            f"parallel: {HYBRID} must be GPUs of several full nodes of {shown(of_node)}, got {shown(ranks)}"
        )
    return {"fsdp": of_node, "ddp": ranks // of_node}


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    for masked in _WITHIN.sub(lambda inside: inside[0].replace(",", _COMMA), text).split(","):
        part = masked.replace(_COMMA, ",")
        name, equals, value = (side.strip() for side in part.partition("="))
        if name in (*MODES, EXPERTS, OWN, HYBRID) and not equals:
            raise UsageError(f"parallel: {name} needs a number of GPUs, as in {name}=8")
        if not name or not equals:
            raise UsageError(f"parallel: {shown(part)} is not a setting; write {EXAMPLE}")
        yield name, _value(value)


def _value(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return [item.strip(_QUOTED) for item in text[1:-1].split(",")]
    if text.startswith("{") and text.endswith("}"):
        pairs = (item.partition(":") for item in text[1:-1].split(","))
        return {path.strip(_QUOTED): style.strip(_QUOTED) for path, _, style in pairs}
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
