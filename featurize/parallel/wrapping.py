"""A real model in the wrapper of its job's layout, within a process group that is there already.

Start reading at `wrapped`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from conf.errors import UsageError
from featurize.parallel.layout import Parallel
from featurize.parallel.layout_modes import EXPERTS, MODES, OWN, WRAPPED


def wrapped(model: nn.Module, parallel: Parallel) -> nn.Module:
    """Return the model as a rank trains it: in `DistributedDataParallel`, or its parts of what ranks share.

    Args:
        model: On this rank's device, with the parameters and types that it trains with.
        parallel: The job's layout. The default process group has its ranks.

    Raises:
        UsageError: A mode that real ranks do not run in yet; a plan or a class that the model does not have.
    """
    unknown = [name for name in (*MODES, EXPERTS, OWN) if name not in WRAPPED and getattr(parallel, name, 1) > 1]
    if unknown:
        raise UsageError(f"parallel: {', '.join(unknown)}: not run yet; modes that ranks run in: {', '.join(WRAPPED)}")
    if parallel.replicates and parallel.tp > 1:
        raise UsageError("parallel: ddp with tp: real ranks need fsdp there, as in ddp=2,fsdp=4,tp=2")
    if parallel.zero:
        raise UsageError(
            f"parallel: zero={parallel.zero}: real ranks do not run DeepSpeed; estimate it, or simulate it with "
            "device=A100-SXM4-40GB"
        )
    if parallel.shards:
        from torch.distributed.device_mesh import init_device_mesh

        from featurize.parallel.sharding import shard  # both take a while to import

        device = next(model.parameters()).device.type
        names = tuple(parallel.axes)
        return shard(model, parallel, init_device_mesh(device, tuple(parallel.axes.values()), mesh_dim_names=names))
    # torch 2.13 warns of the argument, whatever it is, and has no other that means the same.
    buffers: dict[str, Any] = {} if parallel.broadcast_buffers else {"broadcast_buffers": False}
    return nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb=parallel.bucket_cap_mb,
        find_unused_parameters=parallel.find_unused_parameters,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
        static_graph=parallel.static_graph,
        **buffers,
    )
