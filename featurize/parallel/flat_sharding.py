"""A model whose parameters FSDP1 spreads over ranks, as its user wraps it in `FullyShardedDataParallel`.

Start reading at `shard_flat`. The same for a trace and for real ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from conf.errors import UsageError
from featurize.parallel.layout import Parallel

_PREFETCHES = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
_STRATEGIES = {  # whether parameters are freed after the forward pass, whether there are replicas
    (True, False): ShardingStrategy.FULL_SHARD,
    (False, False): ShardingStrategy.SHARD_GRAD_OP,
    (True, True): ShardingStrategy.HYBRID_SHARD,
    (False, True): ShardingStrategy._HYBRID_SHARD_ZERO2,
}


class FlatShards(FullyShardedDataParallel):
    """The outermost wrapper of a model. `accumulates` says that micro-steps but the last leave gradients whole."""

    accumulates = False

    def between_updates(self) -> contextlib.AbstractContextManager[object]:
        """Return what micro-steps but the last of a step run in."""
        return self.no_sync() if self.accumulates else contextlib.nullcontext()


def shard_flat(
    model: nn.Module, parallel: Parallel, mesh: DeviceMesh, chosen: Sequence[nn.Module], types: MixedPrecision
) -> FlatShards:
    """Shard flat parameters, their gradients and optimizer state with FSDP1. Changes the model, and returns what
    trains.

    Args:
        model: Its optimizer is made afterwards.
        parallel: The degrees and FSDP1's own settings.
        mesh: Of all ranks, with dimensions as `Parallel.axes` names them.
        chosen: The modules around which a wrapper goes, besides the model.
        types: Those of gathered parameters and of reduced gradients.

    Raises:
        UsageError: A unit has frozen and other parameters, which `use_orig_params=false` does not allow, or
            parameters of several types.
    """
    shards = mesh.get_group("fsdp")
    replicas = parallel.ddp > 1
    members = {id(one) for one in chosen}
    device = next(model.parameters()).device
    try:
        wrapper = FlatShards(
            model,
            process_group=(shards, mesh.get_group("ddp")) if replicas else shards,
            sharding_strategy=_STRATEGIES[parallel.reshard_after_forward is not False, replicas],
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in members),
            backward_prefetch=_PREFETCHES[parallel.backward_prefetch],
            mixed_precision=types,
            limit_all_gathers=parallel.limit_all_gathers,
            use_orig_params=parallel.use_orig_params,
            device_id=torch.device("cpu") if device.type == "cpu" else None,
        )
    except ValueError as error:
        if "uniform" not in str(error) and "requires_grad" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        way_out = "give its parameters one type, or use fsdp_version=2"
        if "requires_grad" in reason:
            way_out = "a unit with frozen and other parameters needs use_orig_params=true"
        raise UsageError(
            f"parallel: FullyShardedDataParallel does not flatten what a unit holds ({reason}); {way_out}"
        ) from error
    wrapper.accumulates = parallel.no_sync
    return wrapper
