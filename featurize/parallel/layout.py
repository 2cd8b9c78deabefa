"""How a job is spread over several GPUs, as its user says it. Torch-free.

Start reading at `Parallel`; `featurize.parallel.layout_text` reads a text or a mapping.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.errors import UsageError
from featurize.parallel.layout_modes import (
    EXPERT_REPLICAS,
    EXPERT_SHARDS,
    EXPERTS,
    FLAT,
    INTERLEAVED,
    MODES,
    ONE_F_ONE_B,
    OWN,
)
from featurize.parallel.layout_problems import problems_of

if TYPE_CHECKING:
    from featurize.parallel.deepspeed_config import DeepSpeedFile


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
        network_gb_s: What each GPU gets of the network between nodes, in GB/s per direction. None: one adapter a GPU,
            as its PCIe carries them: 100 Gb/s on PCIe 3.0, 200 on 4.0, 400 on 5.0.
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
        fsdp_version: 2: `fully_shard`; 1: `FullyShardedDataParallel`, with flat parameters, its older kin. Its
            strategies are FULL_SHARD and SHARD_GRAD_OP, as `reshard_after_forward` is true or false, and HYBRID_SHARD
            and its kin with `ddp`.
        backward_prefetch: When FSDP1 gathers the next unit of the backward pass, of `PREFETCHES`: before this one's
            gradients are computed, after that, or not ahead at all.
        limit_all_gathers: The host waits before it gathers more than two units ahead of FSDP1's kernels.
        use_orig_params: FSDP1 keeps the original parameters; false: the optimizer gets flat ones, and each unit's
            parameters all train or are all frozen. Lightning, Composer and accelerate set true, torch's own is false.
        no_sync: Micro-steps but the last run under FSDP1's `no_sync`: each rank keeps whole gradients meanwhile.
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
        if bad := list(problems_of(self)):
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
        """Whether each replica holds all of its gradients, which are reduced in buckets."""
        return self.ddp > 1 and self.sharded == 1

    @property
    def flat(self) -> bool:
        """Whether FullyShardedDataParallel spreads flat parameters."""
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


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{path}: {style}" for path, style in value.items()) + "}"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
