"""A model whose parameters are spread over ranks, wrapped as its user would: `fully_shard` around its blocks.

Start reading at `shard`. The same for a trace and for real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from conf.errors import UsageError
from featurize.checkpointing import repeated_blocks
from featurize.parallel.experts import divide_experts
from featurize.parallel.flat_sharding import shard_flat
from featurize.parallel.layout import Parallel
from featurize.parallel.layout_modes import EXPERT_REPLICAS, EXPERT_SHARDS, EXPERTS
from featurize.parallel.tensor_plan import apply_plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, parallel: Parallel, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> nn.Module:
    """Split modules by plan, divide experts, then shard parameters, gradients and optimizer state with FSDP. Changes
    the model, and returns what trains: the model itself, or FSDP1's wrapper of it.

    Args:
        model: Its optimizer is made afterwards.
        parallel: The degrees and FSDP2's own settings.
        mesh: Of all ranks, with dimensions as `Parallel.axes` names them.
        experts: As `featurize.parallel.experts.expert_mesh` returns it, where there is `ep`.

    Raises:
        UsageError: There is no module of a class that `wrap` names; the plan or `ep` does not fit the model.
    """
    if parallel.flat:
        types = MixedPrecision(param_dtype=_dtype(parallel.param_dtype), reduce_dtype=_dtype(parallel.reduce_dtype))
        return shard_flat(model, parallel, mesh, units(model, parallel.wrap), types)
    mixtures = split_modules(model, parallel, mesh, experts)
    if parallel.sharded > 1:
        shard_units(model, parallel, mesh, units(model, parallel.wrap), experts, mixtures)
    return model


def split_modules(
    model: nn.Module, parallel: Parallel, mesh: DeviceMesh, experts: DeviceMesh | None = None
) -> list[list[nn.Module]]:
    """Split modules by plan and divide experts, where the layout has ranks that share them. Changes the model.

    Args:
        model, parallel, mesh, experts: As `shard`.

    Returns:
        Modules with the experts of each mixture, as `featurize.parallel.experts.divide_experts` does.
    """
    if parallel.tp > 1:
        apply_plan(model, parallel.tp_plan, mesh["tp"], whole_experts=parallel.ep > 1)
    if experts is None:
        return []
    return divide_experts(model, experts[EXPERTS], mesh["tp"] if parallel.tp > 1 else None)


def shard_units(
    model: nn.Module,
    parallel: Parallel,
    mesh: DeviceMesh,
    chosen: Sequence[nn.Module],
    experts: DeviceMesh | None = None,
    mixtures: Sequence[list[nn.Module]] = (),
) -> None:
    """Shard parameters with FSDP2, where the layout does. Changes the model.

    Args:
        model: Whose parameters outside of the units are one more unit.
        parallel: The degrees and FSDP2's own settings.
        mesh: As `shard`.
        chosen: What `units` returns.
        experts: As `shard`.
        mixtures: Modules with the experts of each mixture, as `divide_experts` returns them.
    """
    if parallel.sharded == 1:
        return
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_dtype(parallel.param_dtype), reduce_dtype=_dtype(parallel.reduce_dtype)
        ),
        "offload_policy": CPUOffloadPolicy() if parallel.cpu_offload else OffloadPolicy(),
    }
    if parallel.reshard_after_forward is not None:  # torch 2.6 does not take None for its own choice
        options["reshard_after_forward"] = parallel.reshard_after_forward
    if experts is not None:
        _shard_experts(mixtures, parallel, experts, options)
    own = mesh["ddp", "fsdp"] if parallel.ddp > 1 else mesh["fsdp"]
    for unit in (*chosen, model):
        fully_shard(unit, mesh=own, **options)


def _shard_experts(
    mixtures: Sequence[list[nn.Module]], parallel: Parallel, mesh: DeviceMesh, options: dict[str, Any]
) -> None:
    """Spread each rank's experts over those that have the same ones, in units of their own."""
    kept = parallel.reshard_after_forward
    if isinstance(kept, int) and not isinstance(kept, bool):
        options = {**options, "reshard_after_forward": True}
    own = mesh[EXPERT_REPLICAS, EXPERT_SHARDS] if parallel.ddp > 1 else mesh[EXPERT_SHARDS]
    for modules in mixtures:
        unit = fully_shard(modules, mesh=own, shard_placement_fn=_placement(mesh[EXPERT_SHARDS].size()), **options)
        for one in unit:
            if isinstance(one, FSDPModule):
                # Of an expert's gradients, all ranks' batches are the mean: a sum, divided by itself.
                one.set_gradient_divide_factor(float(parallel.ddp * parallel.sharded))
                one.set_force_sum_reduction_for_comms(mesh[EXPERT_SHARDS].size() > 1)


def _placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Fewer experts than ranks are spread along their next dimension, as in torchtitan: FSDP2 would gather padding."""

    def place(parameter: nn.Parameter) -> Shard | None:
        few = parameter.dim() > 1 and len(parameter) < ranks and parameter.shape[1] % ranks == 0
        return Shard(1) if few else None

    return place


def units(model: nn.Module, classes: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, inner ones first; the rest is the model's own unit.

    Args:
        model: Whose modules.
        classes: Names of their classes. None: the repeated blocks; none of these where the model has none.
    """
    if classes is None:
        return repeated_blocks(model)
    chosen = [module for module in model.modules() if type(module).__name__ in classes and module is not model]
    known = {type(module).__name__ for module in chosen}
    if missing := [name for name in classes if name not in known]:
        there = sorted({type(module).__name__ for module in model.modules() if any(module.children())})
        raise UsageError(
            f"parallel: wrap: the model has no module of class {', '.join(missing)}; it has {', '.join(there)}"
        )
    return chosen[::-1]


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]
