"""DistributedDataParallel in a script: its buckets and copies, without its reducer.

Start reading at `install_replicas`. The reducer's C++ needs tensors of a GPU; its rules are in
`featurize.parallel.data_parallel`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from featurize.parallel.data_parallel import Replica, limits_of
from featurize.replacing import replace_attribute
from featurize.step_trace import BUCKET
from learn.script.compiling import BUCKETS
from learn.script.device_mode import CUDA
from learn.script.rank_zero import RankZero

_HOOK = "assumed: a communication hook of DistributedDataParallel takes no memory, and sends what it is given"
_MIXED = "DistributedDataParallel's mixed_precision is not followed: use torch.autocast"


def install_replicas(rank: RankZero, note: Callable[[str], None]) -> None:
    """Replace what DistributedDataParallel does, in this process.

    Args:
        rank: Hears of each wrapped model.
        note: Hears what is left out.
    """

    def init(
        self: Any, module: nn.Module, device_ids: list | None = None, output_device: Any = None, dim: int = 0,
        broadcast_buffers: bool = True, init_sync: bool = True, process_group: Any = None,
        bucket_cap_mb: float | None = None, find_unused_parameters: bool = False, check_reduction: bool = False,
        gradient_as_bucket_view: bool = False, static_graph: bool = False, *_: Any, **more: Any,
    ) -> None:  # fmt: skip
        if not dist.is_initialized():
            raise RuntimeError("DistributedDataParallel needs torch.distributed.init_process_group first")
        if more.get("mixed_precision") is not None:
            raise RuntimeError(_MIXED)
        if (mesh := more.get("device_mesh")) is not None:
            process_group = mesh.get_group(mesh_dim=0)
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device, self.dim = module, device_ids, output_device, dim
        self.find_unused_parameters, self.gradient_as_bucket_view = find_unused_parameters, gradient_as_bucket_view
        self.process_group, self.static_graph = process_group or dist.group.WORLD, static_graph
        self.require_backward_grad_sync, self.require_forward_param_sync = True, True
        self.broadcast_buffers = broadcast_buffers
        settings = rank.settings(
            bucket_cap_mb=bucket_cap_mb, find_unused_parameters=bool(find_unused_parameters),
            gradient_as_bucket_view=bool(gradient_as_bucket_view), static_graph=bool(static_graph),
            broadcast_buffers=bool(broadcast_buffers),
        )  # fmt: skip
        replica = Replica(
            module, rank.recorder, settings, kind=BUCKET if rank.launched > 1 else "gradient",
            axis=rank.axis_of(process_group),
        )  # fmt: skip
        object.__setattr__(self, "_gpufarm_replica", replica)
        object.__setattr__(self, BUCKETS, limits_of(bucket_cap_mb))
        rank.add(replica, settings if dist.get_world_size(process_group) == rank.launched else None)

    def register_comm_hook(self: Any, *_: Any, **__: Any) -> None:
        note(_HOOK)

    for name, function in (
        ("__init__", init),
        ("forward", _forward),
        ("no_sync", _no_sync),
        ("join", lambda self, *args, **kwargs: contextlib.nullcontext()),
        ("register_comm_hook", register_comm_hook),
        ("_set_static_graph", lambda self: None),
    ):
        replace_attribute(nn.parallel.DistributedDataParallel, name, function)


def _forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    """As torch's, in its order (torch/nn/parallel/distributed.py: `_pre_forward`, `_post_forward`)."""
    replica: Replica = self._gpufarm_replica
    trains = torch.is_grad_enabled()
    if trains:
        if replica.buckets.has_reduced and (names := replica.without_gradient()):
            raise RuntimeError(
                f"{len(names)} parameters get no gradient (the first: {names[0]}), at which DistributedDataParallel "
                "stops in its second step; pass find_unused_parameters=True, or freeze them"
            )
        replica.buckets.rebuild()
    if self.require_forward_param_sync and self.broadcast_buffers:
        replica.broadcast_buffers()
    if self.device_ids:
        inputs, kwargs = tree_map(_on_the_gpu, inputs), tree_map(_on_the_gpu, kwargs)
    with self._inside_ddp_forward():  # which tells a compiled module whose buckets cut its graph
        output = self.module(*inputs, **kwargs)
    self.require_forward_param_sync = trains and self.require_backward_grad_sync
    if trains:
        replica.buckets.synchronizes = self.require_backward_grad_sync
    return output


@contextlib.contextmanager
def _no_sync(self: Any) -> Iterator[None]:
    """Forward passes within leave the gradients of their backward passes unreduced."""
    before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
    try:
        yield
    finally:
        self.require_backward_grad_sync = before


def _on_the_gpu(value: Any) -> Any:
    return value.to(CUDA) if isinstance(value, Tensor) else value
