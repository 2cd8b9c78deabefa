"""The layout of a job over several GPUs, as its user writes it: modes, settings, and their rules. Torch-free.

Start reading at `Parallel`, whose parts hold the settings of one mode each, and at `parse_parallel`, which parses a
text or a mapping.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple, Self

from conf.errors import BOOLEAN, Allowed, UsageError, integer, is_finite, one_of, shown
from featurize.job.deepspeed_config import ZERO_STAGES, DeepSpeedFile, read_deepspeed

MODES = ("pp", "ddp", "fsdp", "cp", "tp")  # the outermost first: ranks of the last one are neighbours
WRAPPED = ("ddp", "fsdp", "tp")  # modes in which real ranks can run
EXPERTS = "ep"  # divides the ranks of fsdp, cp and tp, and does not multiply them
EXPERT_SHARDS = "efsdp"  # the axis over which FSDP2 spreads a rank's experts
EXPERT_REPLICAS = "eddp"  # the axis of these shards' replicas: ddp's ranks, in separate groups
OWN = "own"  # the model's own code spreads it
HYBRID = "hsdp"  # fsdp within each node, ddp across nodes
GPIPE, ONE_F_ONE_B, INTERLEAVED = SCHEDULES = ("gpipe", "1f1b", "interleaved")  # schedules of pipelines
ROTATIONS = ("allgather", "alltoall")  # torch.distributed.tensor.experimental.set_rotate_method; its default first
DTYPES = ("fp32", "bf16", "fp16")
FULLY_SHARD, FLAT = FSDP_VERSIONS = (2, 1)  # fully_shard, and FullyShardedDataParallel with its flat parameters
PREFETCHES = ("pre", "post", "none")  # torch.distributed.fsdp.BackwardPrefetch; its default first
MOST_RANKS = 65_536
DEEPSPEED = "deepspeed"
_WITHIN = re.compile(r"[\[{][^\]}]*")  # brackets
_COMMA = "\0"  # replaces a comma within brackets
_QUOTED = " '\""
EXAMPLE = "parallel=ddp=8"
EXAMPLE_STARTS = "stage_starts=[layers.8,layers.16]"
EXAMPLE_PLAN = "tp_plan={'layers.*.up': colwise, 'layers.*.down': rowwise}"


class Where(NamedTuple):
    """Layouts that have a setting, in words, and as a test of the given degrees, `zero` and `fsdp_version`."""

    words: str
    holds: Callable[[Mapping[str, Any]], bool]


def _takes_part(given: Mapping[str, Any], *modes: str) -> bool:
    return any(given.get(mode, 1) != 1 for mode in modes)


def _has_stage(given: Mapping[str, Any]) -> bool:
    return given.get("zero") is not None


def _with(*modes: str) -> Where:
    return Where(" or ".join(modes), lambda given: _takes_part(given, *modes))


_EVERYWHERE = Where("all", lambda _: True)
_REPLICATED = Where(
    "ddp without fsdp, cp, tp and zero",
    lambda given: (
        not (_takes_part(given, "fsdp", "cp", "tp") or _has_stage(given))
        and (_takes_part(given, "ddp") or not _takes_part(given, "pp", OWN))
    ),
)
_SHARDED = Where("fsdp, cp or zero", lambda given: _takes_part(given, "fsdp", "cp") or _has_stage(given))
_FSDP1 = Where("fsdp_version=1", lambda given: given.get("fsdp_version") == FLAT)
_STAGE_3 = Where("zero=3", lambda given: given.get("zero") == 3)


def _whole(least: int, most: float, words: str) -> Allowed:
    return integer(least, most)._replace(words=f"a whole number {words}")


def _elements(least: int) -> Allowed:
    return _whole(least, math.inf, f"of elements, at least {least}")._replace(
        read=lambda value: int(value) if isinstance(value, float) and value.is_integer() else value  # 5e8
    )


def _tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _paths(value: Any) -> Any:
    several = _tuple(value)  # YAML reads the members of an nn.Sequential as numbers
    return tuple(str(p) if type(p) is int else p for p in several) if isinstance(several, tuple) else several


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)


_ANY = Allowed(lambda _: True, "anything")
_RANKS = _whole(1, MOST_RANKS, f"from 1 to {MOST_RANKS}")
_POSITIVE = Allowed(lambda value: is_finite(value) and 0 < value < 1e9, "a number > 0")


# The annotation of a part's field holds its allowed values, if these are not true and false, and the layouts that have
# the field, if not all with the part do. A text is the name that users write, if it differs from the field's.
# `_iterate_settings` reads the annotations, so this module evaluates them as it is imported.


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Number of ranks of each mode.

    pp    ranks of a pipeline, each with a part of the model (one stage or several). The batch is that of a whole step
          of the pipeline, which `schedule.step` of torch.distributed.pipelining divides into micro-batches
    ddp   replicas of the model, each with its own batch: under DistributedDataParallel, or of all shards of `fsdp`
          (HSDP)
    fsdp  ranks over which FSDP2 (`fully_shard`) spreads each replica, each with its own batch
    cp    ranks that share a batch, each with its part of the sequence (context parallelism): attention gathers or
          rotates keys and values among them. FSDP2 spreads over `fsdp` and `cp` together
    tp    ranks that share a batch and each module of a plan (tensor parallelism)
    ep    neighbours among the ranks of `fsdp`, `cp` and `tp` that divide the experts of each mixture among them and
          exchange tokens (expert parallelism). It adds no ranks: FSDP2 spreads each expert over the other ranks
    own   ranks over which the model's own code spreads it: the factory calls `init_device_mesh`, `fully_shard`,
          `parallelize_module` or `distribute_tensor`, and is used unchanged. Each rank counts with its own batch
    """

    pp: Annotated[int, _RANKS] = 1
    ddp: Annotated[int, _RANKS] = 1
    fsdp: Annotated[int, _RANKS] = 1
    cp: Annotated[int, _RANKS] = 1
    tp: Annotated[int, _RANKS] = 1
    ep: Annotated[int, _RANKS] = 1
    own: Annotated[int, _RANKS] = 1


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes of the ranks.

    gpus_per_node  GPUs of a node. More ranks than that take several nodes, all of them full
    network_gb_s   each GPU's share of the network between nodes, in GB/s per direction. None: one adapter a GPU, as
                   fast as its PCIe: 100 Gb/s on PCIe 3.0, 200 on 4.0, 400 on 5.0
    """

    gpus_per_node: Annotated[int, _RANKS] = 8
    network_gb_s: Annotated[float | None, _POSITIVE] = None


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Arguments of DistributedDataParallel (`ddp`).

    gradient_as_bucket_view  whether gradients are views of the buckets in which they are reduced, not copies
    bucket_cap_mb            size at which a bucket of gradients is full, in MiB. None: torch's own, 25 (the first
                             bucket 1)
    static_graph             whether every step runs the same operators
    find_unused_parameters   whether parameters may lack a gradient. Buckets then keep the order of the parameters
    broadcast_buffers        whether the first rank's buffers are sent to all others before each step
    """

    gradient_as_bucket_view: bool = False
    bucket_cap_mb: Annotated[float | None, _POSITIVE] = None
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: Annotated[bool, _EVERYWHERE] = True


@dataclass(frozen=True, kw_only=True)
class FullyShard:
    """Arguments of FSDP2 (`fsdp`, and `cp`, over whose ranks it spreads too), and of FSDP1.

    reshard_after_forward  whether gathered parameters are freed after the forward pass and gathered again for the
                           backward pass; a number: they are spread over this many ranks in between. None: FSDP2's
                           choice, all units except the root
    param_dtype            type in which FSDP2 gathers parameters and computes, one of `DTYPES`. None: their own
    reduce_dtype           type in which it reduces gradients. None: `param_dtype`
    cpu_offload            whether shards, their gradients and the optimizer are in host memory
    wrap                   classes of the modules whose parameters are gathered together. None: the repeated blocks
    fsdp_version           2: `fully_shard`. 1: `FullyShardedDataParallel`, with flat parameters: FULL_SHARD or
                           SHARD_GRAD_OP for `reshard_after_forward` true or false, and HYBRID_SHARD and its variant
                           with `ddp`

    FSDP1 alone (`fsdp_version=1`):

    backward_prefetch      when it gathers the next unit of the backward pass, one of `PREFETCHES`: before this unit's
                           gradients are computed, after that, or without prefetching
    limit_all_gathers      whether the host waits before it gathers more than two units ahead of the kernels
    use_orig_params        whether the original parameters are kept. False: the optimizer gets flat ones, and each
                           unit's parameters all train or are all frozen. Lightning, Composer and accelerate set true;
                           torch's default is false
    no_sync                whether all micro-steps except the last run under `no_sync`: ranks keep full gradients until
    then
    """

    reshard_after_forward: Annotated[bool | int | None, _ANY] = None  # its allowed values depend on the degrees
    param_dtype: Annotated[str | None, one_of(DTYPES), _SHARDED] = None
    reduce_dtype: Annotated[str | None, one_of(DTYPES)] = None
    cpu_offload: Annotated[bool, _SHARDED] = False
    wrap: Annotated[
        tuple[str, ...] | None,
        Allowed(
            lambda value: value != () and _are_names(value), "names of classes, as in wrap=[LlamaDecoderLayer]", _tuple
        ),
    ] = None
    fsdp_version: Annotated[
        int,
        Allowed(
            lambda value: type(value) is int and value in FSDP_VERSIONS,
            "2 (fully_shard) or 1 (FullyShardedDataParallel)",
        ),
        _with("fsdp"),
    ] = FULLY_SHARD
    backward_prefetch: Annotated[
        str,
        one_of(PREFETCHES)._replace(read=lambda value: "none" if value is None else value),  # as YAML reads it
        _FSDP1,
    ] = "pre"
    limit_all_gathers: Annotated[bool, _FSDP1] = True
    use_orig_params: Annotated[bool, _FSDP1] = True
    no_sync: Annotated[bool, _FSDP1] = False


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Ring attention of context parallelism (`cp`).

    cp_rotate        rotation of keys and values, one of `ROTATIONS`. None: PyTorch's choice, allgather
    cp_load_balance  whether each rank has a part of the sequence's head and one of its tail, which balances the work
                     under a causal mask. None: PyTorch's choice, true. False is for attention without a causal mask
    """

    cp_rotate: Annotated[str | None, one_of(ROTATIONS)] = None
    cp_load_balance: bool | None = None


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Division of modules (`tp`).

    tp_plan  path of a module, with `*` for any part of it -> style of its division, as in plans of transformers'
             models: `colwise`, `rowwise` and others. None: the model's own plan
    """

    tp_plan: Annotated[
        Mapping[str, str] | None,
        Allowed(
            lambda value: isinstance(value, Mapping) and bool(value) and _are_names((*value.keys(), *value.values())),
            f"module path -> style, as in {EXAMPLE_PLAN}",
        ),
    ] = field(default=None, hash=False)  # a mapping is not hashable


@dataclass(frozen=True, kw_only=True)
class Zero:
    """DeepSpeed's ZeRO (`zero`), with defaults of release 0.19 (deepspeed/runtime/zero/config.py).

    stage                  `zero`, in place of DistributedDataParallel: 1 spreads the optimizer over the ranks of `ddp`,
                           2 also gradients, 3 also parameters. None: no ZeRO
    param_dtype            type of the model itself, whose master weights are in fp32. None: its own
    cpu_offload            DeepSpeed's `offload_optimizer`
    reduce_bucket_size     elements of the buffer in which gradients are reduced
    overlap_comm           whether gradients are reduced on their own stream, in two alternating buffers. None:
                           DeepSpeed's choice, only in stage 3
    contiguous_gradients   whether gradients are copied into that buffer as they are computed
    deepspeed              DeepSpeed's own file, from which `parse_parallel` made the layout

    Stage 3 alone:

    offload_param          whether partitions of parameters are in host memory
    sub_group_size         elements of a partition that are updated at a time
    stage3_prefetch_bucket_size         elements that are gathered ahead of use
    stage3_max_live_parameters          gathered elements beyond which parameters are freed, and no more are gathered
                                        ahead
    stage3_max_reuse_distance           elements within which gathered parameters that are used again are kept
    stage3_param_persistence_threshold  smaller parameters stay gathered
    """

    stage: Annotated[
        int | None,
        "zero",
        Allowed(
            lambda value: type(value) is int and value in ZERO_STAGES,
            "a stage of DeepSpeed's ZeRO, 1, 2 or 3, as in ddp=8,zero=2",
        ),
        Where("ddp without fsdp, cp, tp and own", lambda given: not _takes_part(given, "fsdp", "cp", "tp", OWN)),
    ] = None
    param_dtype: Annotated[str | None, one_of(DTYPES), _SHARDED] = None
    cpu_offload: Annotated[bool, _SHARDED] = False
    reduce_bucket_size: Annotated[int, _elements(1)] = 500_000_000
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    offload_param: Annotated[bool, _STAGE_3] = False
    sub_group_size: Annotated[int, _elements(1), _STAGE_3] = 1_000_000_000
    stage3_prefetch_bucket_size: Annotated[int, _elements(0), _STAGE_3] = 50_000_000
    stage3_max_live_parameters: Annotated[int, _elements(0), _STAGE_3] = 1_000_000_000
    stage3_max_reuse_distance: Annotated[int, _elements(0), _STAGE_3] = 1_000_000_000
    stage3_param_persistence_threshold: Annotated[int, _elements(0), _STAGE_3] = 100_000
    deepspeed: Annotated[DeepSpeedFile | None, _ANY] = field(default=None, hash=False, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages and schedule of a pipeline (`pp`).

    schedule         order in which a rank runs its micro-batches, one of `SCHEDULES`. None: 1f1b
    micro_batches    number of micro-batches that the batch is divided into, along the first dimension. None: two for
                     each rank of `pp`
    stages_per_rank  stages of each rank, for `interleaved` only. None: 2 there
    stage_starts     paths of the modules at which all stages except the first begin, in order. None: blocks are spread
                     evenly, where the parts before and after them count as a block each
    drop_outputs     whether the last stage drops the outputs of its micro-batches instead of returning them joined
                     (`return_outputs=False` of `schedule.step`)
    """

    schedule: Annotated[str | None, one_of(SCHEDULES)] = None
    micro_batches: Annotated[int | None, _RANKS] = None
    stages_per_rank: Annotated[int | None, _whole(2, MOST_RANKS, f"from 2 to {MOST_RANKS}")] = None
    stage_starts: Annotated[
        tuple[str, ...] | None, Allowed(_are_names, f"paths of modules, as in {EXAMPLE_STARTS}", _paths)
    ] = None
    drop_outputs: bool = False


@dataclass(frozen=True, init=False, repr=False)
class Parallel:
    """A job's ranks, one GPU each, and their layout. The degrees of modes multiply, except that of `ep`.

    It is built from settings by the names that users write, as `Parallel(fsdp=8, cpu_offload=True)`, and holds them by
    mode, as in `layout.fsdp.cpu_offload`. A part's annotation tells which layouts have it. A setting that several modes
    share is in the parts of all of them.

    Raises:
        UsageError: An unknown setting, with the known ones; a value out of range; or a setting of a mode that the
            layout does not have. All of them are named.
    """

    degrees: Annotated[Degrees, _EVERYWHERE]
    cluster: Annotated[Cluster, _EVERYWHERE]
    ddp: Annotated[DataParallel, _REPLICATED]
    fsdp: Annotated[FullyShard, _with("fsdp", "cp")]
    context: Annotated[ContextParallel, _with("cp")]
    tensor: Annotated[TensorParallel, _with("tp")]
    zero: Annotated[Zero, Where("zero", _has_stage)]
    pipeline: Annotated[Pipeline, _with("pp")]

    def __init__(self, **settings: Any) -> None:
        _require_known(settings)
        for part, kind in _PARTS.items():
            given = {
                declared.field: declared.allowed.read(settings[name])
                for name, declared in _DECLARED
                if declared.part == part and name in settings
            }
            object.__setattr__(self, part, kind(**given))
        if bad := list(_problems_of(self)):
            raise UsageError(f"parallel: {'; '.join(bad)}")

    def settings(self) -> dict[str, Any]:
        """Return the value of every setting, by the name that users write."""
        return {name: getattr(getattr(self, declared.part), declared.field) for name, declared in _DECLARED}

    def chosen(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return {name: value for name, value in self.settings().items() if value != _SETTINGS[name].default}

    def changed(self, **settings: Any) -> Self:
        """Return the layout with other values of some settings. Raises `UsageError` as the class does."""
        return type(self)(**{**self.settings(), **settings})

    def __repr__(self) -> str:
        return f"Parallel({self.text()})"

    @property
    def modes(self) -> dict[str, int]:
        """The degrees above 1."""
        return {mode: degree for mode, degree in vars(self.degrees).items() if degree > 1}

    @property
    def order(self) -> str:
        """The schedule of a pipeline, one of `SCHEDULES`."""
        return self.pipeline.schedule or ONE_F_ONE_B

    @property
    def chunks(self) -> int:
        """Number of micro-batches of a pipeline's batch; 1 without a pipeline."""
        return 1 if self.degrees.pp == 1 else self.pipeline.micro_batches or 2 * self.degrees.pp

    @property
    def parts(self) -> int:
        """Number of stages of each rank of a pipeline."""
        return (self.pipeline.stages_per_rank or 2) if self.order == INTERLEAVED else 1

    @property
    def stages(self) -> int:
        """Number of stages of a pipeline: those of rank 0 are 0, `pp`, and so on."""
        return self.degrees.pp * self.parts

    @property
    def of_stage(self) -> int:
        """Number of ranks that have the same stages."""
        return self.ranks // self.degrees.pp

    @property
    def sharded(self) -> int:
        """Number of ranks over which FSDP2 spreads each replica."""
        return self.degrees.fsdp * self.degrees.cp

    @property
    def replicates(self) -> bool:
        """True where each replica holds all of its gradients, which are reduced in buckets."""
        return self.degrees.ddp > 1 and self.sharded == 1

    @property
    def flat(self) -> bool:
        """True where FullyShardedDataParallel spreads flat parameters."""
        return self.degrees.fsdp > 1 and self.fsdp.fsdp_version == FLAT

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which FSDP2 spreads the same experts."""
        return self.sharded * self.degrees.tp // self.degrees.ep

    @property
    def axes(self) -> dict[str, int]:
        """The dimensions of the wrappers' mesh, the outermost first: `fsdp` covers all ranks that FSDP2 spreads
        over."""
        sizes = {**vars(self.degrees), "fsdp": self.sharded}
        return {name: sizes[name] for name in ("pp", "ddp", "fsdp", "tp", OWN) if sizes[name] > 1}

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Groups of ranks that communicate, by axis: (number of ranks, distance between them)."""
        groups, stride = {}, self.ranks
        for name, degree in self.axes.items():
            stride //= degree
            groups[name] = degree, stride
        if self.degrees.cp > 1:
            groups["cp"] = self.degrees.cp, self.degrees.tp
        if self.degrees.ep > 1:
            if self.degrees.ddp > 1:
                groups[EXPERT_REPLICAS] = groups["ddp"]
            groups[EXPERTS] = self.degrees.ep, 1
            groups[EXPERT_SHARDS] = self.expert_shards, self.degrees.ep
        # A dimension that spans the mesh communicates in the default group (torch/distributed/device_mesh.py).
        whole = [name for name, (degree, _) in groups.items() if degree == self.ranks]
        return {name: group for name, group in groups.items() if group[0] > 1 and name not in whole[1:]}

    @property
    def ranks(self) -> int:
        """Number of all ranks, one GPU each."""
        return math.prod(degree for mode, degree in self.modes.items() if mode != EXPERTS)

    @property
    def replicas(self) -> int:
        """Number of batches of a step: one for each rank with its own batch."""
        return self.degrees.ddp * self.degrees.fsdp * self.degrees.own

    @property
    def shards(self) -> bool:
        """True where PyTorch's own wrappers spread tensors over ranks, pipelines aside."""
        return self.sharded > 1 or self.degrees.tp > 1 or self.degrees.own > 1

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.ranks // self.cluster.gpus_per_node)

    def text(self) -> str:
        """Return the settings that differ from their defaults, as `ddp=8, static_graph=true`."""
        return ", ".join(f"{name}={_write(value)}" for name, value in self.chosen().items() if name != DEEPSPEED)


def _write(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{path}: {style}" for path, style in value.items()) + "}"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


class _Declared(NamedTuple):
    """A setting, as a part of a layout declares it."""

    part: str
    field: str
    default: Any
    allowed: Allowed
    where: Where


_PARTS = {part: annotation.__origin__ for part, annotation in Parallel.__annotations__.items()}


def _iterate_settings() -> Iterator[tuple[str, _Declared]]:
    """Yield the settings of all parts, by the names that users write."""
    for part, annotation in Parallel.__annotations__.items():
        for setting in fields(annotation.__origin__):
            given: dict[type, Any] = {type(about): about for about in getattr(setting.type, "__metadata__", ())}
            allowed, where = given.get(Allowed, BOOLEAN), given.get(Where, annotation.__metadata__[0])
            yield given.get(str, setting.name), _Declared(part, setting.name, setting.default, allowed, where)


_DECLARED = list(_iterate_settings())
_SETTINGS = dict(_DECLARED)  # for a setting that parts share, one of its declarations


def apt_settings(given: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return the given settings that a layout with these degrees has."""
    apt = dict(given)
    for name in ("zero", "fsdp_version", *given):  # the first two decide which others apply
        if name in apt and name in _SETTINGS and not _SETTINGS[name].where.holds({**apt, **degrees}):
            del apt[name]
    return apt


def _problems_of(layout: Parallel) -> Iterator[str]:
    """Yield each problem of a layout as text; consequences of a wrong value are left out."""
    wrong = set()
    for name, value in layout.settings().items():
        known = _SETTINGS[name]
        if not (value is None and known.default is None) and not known.allowed.fit(value):
            wrong.add(name)
            yield f"{name} must be {known.allowed.words}, got {shown(value)}"
    if not wrong.isdisjoint((*vars(layout.degrees), "gpus_per_node")):
        return
    chosen = layout.chosen()
    misplaced = {name: where.words for name in chosen if not (where := _SETTINGS[name].where).holds(chosen)}
    for words in dict.fromkeys(misplaced.values()):
        yield f"{', '.join(name for name in misplaced if misplaced[name] == words)}: of {words} only"
    rules = _rules_of_modes(layout)
    if layout.degrees.pp > 1 and wrong.isdisjoint({"schedule", "micro_batches", "stages_per_rank", "stage_starts"}):
        rules = (*rules, *_rules_of_pipelines(layout))
    yield from (problem for broken, problem in rules if broken)


def _rules_of_modes(layout: Parallel) -> tuple[tuple[bool, str], ...]:
    """Return each rule's text, with whether it is broken."""
    degrees, stage, kept = layout.degrees, layout.zero.stage, layout.fsdp.reshard_after_forward
    among, is_flat = layout.sharded * degrees.tp, layout.fsdp.fsdp_version == FLAT
    of_node = layout.cluster.gpus_per_node
    divides = type(kept) is int and 1 < kept < layout.sharded and not layout.sharded % kept
    others = [mode for mode in layout.modes if mode != OWN]
    beside_flat = [name for name in others if name not in ("ddp", "fsdp")]
    return (
        (
            not (kept is None or isinstance(kept, bool) or divides),
            f"reshard_after_forward must be true, false or a divisor of fsdp times cp, got {shown(kept)}",
        ),
        (
            is_flat and layout.fsdp.cpu_offload,
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
            stage is not None and layout.ranks == 1,
            f"zero={stage} is a stage, not a number of GPUs: give these as ddp, as in ddp=8,zero={stage}",
        ),
        (
            degrees.ep > 1 and among % degrees.ep > 0,
            f"ep divides the ranks of fsdp, cp and tp, of which there are {among}: {degrees.ep} does not; "
            "as in fsdp=8,ep=4",
        ),
        (
            degrees.ep > 1 and among % degrees.ep == 0 and degrees.ep % degrees.tp > 0,
            f"ep must be a multiple of tp, which shares tokens: {degrees.ep} of {degrees.tp}; as in fsdp=4,tp=2,ep=4",
        ),
        (
            degrees.own != 1 and bool(others),
            f"own goes with no other mode ({', '.join((*MODES, EXPERTS))}): the model's own code says how it is spread",
        ),
        (
            layout.ranks > of_node and layout.ranks % of_node > 0,
            f"{layout.ranks} ranks do not fill nodes of {of_node}; change gpus_per_node",
        ),
    )


def _rules_of_pipelines(layout: Parallel) -> tuple[tuple[bool, str], ...]:
    """Return the rules of torch's schedules and of the number of stages, in the same form."""
    pp, starts, chunks = layout.degrees.pp, layout.pipeline.stage_starts, layout.chunks
    return (
        (layout.zero.stage is not None, "pp with zero: DeepSpeed's own pipelines are not estimated; leave either out"),
        (
            layout.pipeline.stages_per_rank is not None and layout.pipeline.schedule != INTERLEAVED,
            "stages_per_rank: of schedule=interleaved only",
        ),
        (
            layout.order == ONE_F_ONE_B and chunks < pp,
            f"micro_batches must be at least pp ({pp}) with schedule={layout.order}, got {chunks}",
        ),
        (
            layout.order == INTERLEAVED and chunks % max(chunks // pp, 1) > 0,
            f"micro_batches of schedule=interleaved must divide into rounds of pp ({pp}) or more, all of a "
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
    """Return the layout of a job over GPUs; None for a job on one GPU, which no wrapper changes.

    Args:
        given: A `Parallel`, a mapping of settings, or text such as `ddp=8` and `ddp=8,gradient_as_bucket_view=true`.
        files: Whether `deepspeed=FILE` may name DeepSpeed's own settings; a job's config may not name files.
        hidden_size: Returns the model's width, where such a file leaves sizes to it.

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
    """Return whether a text or a mapping sets the network between nodes alone, as `network_gb_s=50` does."""
    return isinstance(given, str | Mapping) and set(named_settings(given)) == {"network_gb_s"}


def named_settings(given: str | Mapping[Any, Any]) -> dict[Any, Any]:
    """Return settings by name, from a text or a mapping. Raises `UsageError` for a text that is not a list of
    settings."""
    return dict(_pairs(given) if isinstance(given, str) else given)


def _with_file(given: dict[Any, Any], hidden_size: Callable[[], int | None] | None, *, files: bool) -> dict[Any, Any]:
    """Return settings merged with DeepSpeed's file. Raises `UsageError` where a given setting contradicts the file."""
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


def _require_known(settings: Mapping[Any, Any]) -> None:
    if unknown := [shown(name) for name in settings if name not in _SETTINGS]:
        raise UsageError(f"parallel: unknown {', '.join(unknown)}; known: {', '.join(_SETTINGS)}")


def _of_mapping(given: Mapping[Any, Any]) -> Parallel:
    if HYBRID in given:
        given = {name: value for name, value in {**given, **_hybrid(given)}.items() if name != HYBRID}
    _require_known(given)
    if not any(name in (*MODES, EXPERTS, OWN, "zero") for name in given):
        raise UsageError(f"parallel names no mode; give one of {', '.join((*MODES, OWN, HYBRID))}, as in {EXAMPLE}")
    return Parallel(**given)


def _hybrid(given: Mapping[Any, Any]) -> dict[str, int]:
    """Return the degrees of shards within nodes and of replicas across nodes."""
    ranks, of_node = given[HYBRID], given.get("gpus_per_node", Cluster.gpus_per_node)
    if excluded := [name for name in ("ddp", "fsdp") if name in given]:
        raise UsageError(f"parallel: {HYBRID} is ddp and fsdp in one: leave {' and '.join(excluded)} out, or {HYBRID}")
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
