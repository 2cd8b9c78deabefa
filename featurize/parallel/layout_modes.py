"""The modes in which a job is spread over several GPUs, and which settings belong to which. Torch-free.

Start reading at `MODES`; `featurize.parallel.layout` has the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MODES = ("pp", "ddp", "fsdp", "cp", "tp")  # the outermost first: ranks of the last one are neighbours
WRAPPED = ("ddp", "fsdp", "tp")  # of these, those that real ranks run in
EXPERTS = "ep"  # which divides the ranks of fsdp, cp and tp, and does not multiply them
EXPERT_SHARDS = "efsdp"  # the axis over which FSDP2 spreads the experts of a rank
EXPERT_REPLICAS = "eddp"  # that of the replicas of these shards, the same ranks as ddp's in groups of their own
OWN = "own"  # the model's own code spreads it
HYBRID = "hsdp"  # a name for both: shards within each node, replicas across nodes
GPIPE, ONE_F_ONE_B, INTERLEAVED = SCHEDULES = ("gpipe", "1f1b", "interleaved")  # of pipelines
ROTATIONS = ("allgather", "alltoall")  # torch.distributed.tensor.experimental.set_rotate_method; its default first
DTYPES = ("fp32", "bf16", "fp16")
ZERO_STAGES = (1, 2, 3)
FULLY_SHARD, FLAT = FSDP_VERSIONS = (2, 1)  # fully_shard, and FullyShardedDataParallel with its flat parameters
PREFETCHES = ("pre", "post", "none")  # torch.distributed.fsdp.BackwardPrefetch; its default first
MOST_RANKS = 65_536
EXAMPLE = "parallel=ddp=8"
EXAMPLE_EXPERTS = "as in fsdp=8,ep=4"
EXAMPLE_STARTS = "stage_starts=[layers.8,layers.16]"
EXAMPLE_PLAN = "tp_plan={'layers.*.up': colwise, 'layers.*.down': rowwise}"


class OfMode(NamedTuple):
    """Settings that a layout has only where `applies(degrees, stage and version)`, which `words` say."""

    names: tuple[str, ...]
    words: str
    applies: Callable[[Mapping[str, Any]], bool]


OF_MODES = (
    OfMode(
        ("reshard_after_forward", "reduce_dtype", "wrap"), "fsdp or cp",
        lambda degrees: _takes_part(degrees, "fsdp", "cp"),
    ),
    OfMode(
        ("gradient_as_bucket_view", "bucket_cap_mb", "static_graph", "find_unused_parameters"),
        "ddp without fsdp, cp, tp and zero",
        lambda degrees: not (_takes_part(degrees, "fsdp", "cp", "tp") or _stage(degrees) or _without_replicas(degrees)),
    ),
    OfMode(("fsdp_version",), "fsdp", lambda degrees: _takes_part(degrees, "fsdp")),
    OfMode(
        ("backward_prefetch", "limit_all_gathers", "use_orig_params", "no_sync"), "fsdp_version=1",
        lambda degrees: degrees.get("fsdp_version") == FLAT,
    ),
    OfMode(("cp_rotate", "cp_load_balance"), "cp", lambda degrees: _takes_part(degrees, "cp")),
    OfMode(("tp_plan",), "tp", lambda degrees: _takes_part(degrees, "tp")),
    OfMode(
        ("schedule", "micro_batches", "stages_per_rank", "stage_starts", "drop_outputs"),
        "pp", lambda degrees: _takes_part(degrees, "pp"),
    ),
    OfMode(("zero",), "ddp without fsdp, cp, tp and own",
            lambda degrees: not _takes_part(degrees, "fsdp", "cp", "tp", OWN)),
    OfMode(
        ("param_dtype", "cpu_offload"), "fsdp, cp or zero",
        lambda degrees: _takes_part(degrees, "fsdp", "cp") or _stage(degrees),
    ),
    OfMode(("reduce_bucket_size", "overlap_comm", "contiguous_gradients"), "zero", lambda degrees: _stage(degrees)),
    OfMode(
        ("offload_param", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
         "stage3_max_reuse_distance", "stage3_param_persistence_threshold"),
        "zero=3", lambda degrees: _stage(degrees) and degrees["zero"] == 3,
    ),
)  # fmt: skip
COUNTS = (
    "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_param_persistence_threshold",
)  # fmt: skip


def apt_settings(given: Mapping[str, Any], degrees: Mapping[str, int]) -> dict[str, Any]:
    """Return those of several settings that are not of a mode that these degrees leave out."""
    kept = dict(given)
    for _ in range(2):  # settings of a stage and of a version go with it
        chosen = {**degrees, "zero": kept.get("zero"), "fsdp_version": kept.get("fsdp_version")}
        left_out = {name for one in OF_MODES if not one.applies(chosen) for name in one.names}
        kept = {name: value for name, value in kept.items() if name not in left_out}
    return kept


def _takes_part(degrees: Mapping[str, Any], *modes: str) -> bool:
    return any(degrees.get(mode, 1) != 1 for mode in modes)


def _without_replicas(degrees: Mapping[str, Any]) -> bool:
    return _takes_part(degrees, "pp", OWN) and not _takes_part(degrees, "ddp")


def _stage(degrees: Mapping[str, Any]) -> bool:
    return degrees.get("zero") is not None
