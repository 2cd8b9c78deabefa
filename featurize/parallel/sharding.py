"""A model whose parameters are spread over ranks, wrapped as its user would: `fully_shard` around its blocks.

Start reading at `shard`. The same for a trace and for real ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from conf.errors import UsageError
from featurize.checkpointing import repeated_blocks
from featurize.parallel.layout import Parallel
from featurize.parallel.tensor_plan import apply_plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, parallel: Parallel, mesh: DeviceMesh) -> nn.Module:
    """Split modules by plan, then shard parameters, gradients and optimizer state with FSDP2. Changes the model.

    Args:
        model: Its optimizer is made afterwards.
        parallel: The degrees and FSDP2's own settings.
        mesh: Of all ranks, with dimensions as `Parallel.axes` names them.

    Raises:
        UsageError: There is no module of a class that `wrap` names; the plan does not fit the model.
    """
    split_modules(model, parallel, mesh)
    if parallel.fsdp > 1:
        shard_units(model, parallel, mesh, units(model, parallel.wrap))
    return model


def split_modules(model: nn.Module, parallel: Parallel, mesh: DeviceMesh) -> None:
    """Split modules by plan, where the layout has ranks that share them. Changes the model. Arguments: as `shard`."""
    if parallel.tp > 1:
        apply_plan(model, parallel.tp_plan, mesh["tp"])


def shard_units(model: nn.Module, parallel: Parallel, mesh: DeviceMesh, chosen: Sequence[nn.Module]) -> None:
    """Shard parameters with FSDP2, where the layout does. Changes the model.

    Args:
        model: Whose parameters outside of the units are one more unit.
        parallel: The degrees and FSDP2's own settings.
        mesh: As `shard`.
        chosen: What `units` returns.
    """
    if parallel.fsdp == 1:
        return
    own = mesh["ddp", "fsdp"] if parallel.ddp > 1 else mesh["fsdp"]
    policy = MixedPrecisionPolicy(param_dtype=_dtype(parallel.param_dtype), reduce_dtype=_dtype(parallel.reduce_dtype))
    offload = CPUOffloadPolicy() if parallel.cpu_offload else OffloadPolicy()
    for unit in (*chosen, model):
        fully_shard(
            unit, mesh=own, mp_policy=policy, offload_policy=offload,
            reshard_after_forward=parallel.reshard_after_forward,
        )  # fmt: skip


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
