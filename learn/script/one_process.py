"""torch.distributed with the one process that there is: collectives of one rank, and DistributedDataParallel's memory.

Start reading at `install_one_process`. More than one process is refused in one line.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from featurize.parallel.buckets import limits_of
from featurize.parallel.gradient_buckets import GradientBuckets, dense_parameters
from featurize.replacing import replace_attribute
from learn.script.device_mode import CUDA
from learn.script.script_recorder import ScriptRecorder

NOTE = "torch.distributed runs with one process: buffers of NCCL are not counted"


class _Done:
    """The handle of a collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


def install_one_process(recorder: ScriptRecorder, note: Callable[[str], None]) -> None:
    """Make torch.distributed work for a group of one process, where the release has it.

    Args:
        recorder: Hears which blocks are buckets of gradients.
        note: Hears that the script uses torch.distributed.
    """
    replace_attribute(torch.multiprocessing, "spawn", _call_directly)
    replace_attribute(torch.multiprocessing, "start_processes", _call_directly)
    if not dist.is_available():
        return
    _install_group(note)
    _install_collectives()
    _install_ddp(recorder)


def _require_one(processes: int) -> None:
    if processes != 1:
        raise RuntimeError(f"the script asks for {processes} processes; one process is estimated at a time")


def _call_directly(fn: Callable[..., None], args: tuple = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
    _require_one(nprocs)
    fn(0, *args)


def _install_group(note: Callable[[str], None]) -> None:
    from torch.distributed import distributed_c10d

    begin = dist.init_process_group
    backends = ["nccl"]

    @functools.wraps(begin)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *_: Any,
        **__: Any,
    ) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        _require_one(world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1")))
        note(NOTE)
        backends[0] = str(backend or "nccl")
        begin("fake", store=FakeStore(), rank=0, world_size=1)
        _refuse_fully_shard()

    def world(*_: Any, **__: Any) -> Any:
        return dist.group.WORLD

    for name, function in (
        ("init_process_group", init_process_group),
        ("get_backend", lambda group=None: backends[0]),
        ("is_nccl_available", lambda: True),
        ("new_group", world),
    ):
        for module in (dist, distributed_c10d):
            replace_attribute(module, name, function)


def _refuse_fully_shard() -> None:
    """Its parameters are distributed tensors, which do not move to meta as others do."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError:  # a release without it
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("fully_shard cannot be followed: estimate one process without it")

    replace_attribute(FSDPState, "init", refuse)


def _install_collectives() -> None:
    from torch.distributed import distributed_c10d

    def same(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
        return _Done() if async_op else None

    def copying(copy: Callable[[Any, Any], None]) -> Callable[..., _Done | None]:
        def collective(output: Any, given: Any = None, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            with torch.no_grad():
                copy(output, given)
            return _Done() if async_op else None

        return collective

    def refused(name: str) -> Callable[..., None]:
        def collective(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"torch.distributed.{name} needs another process; one process is estimated at a time")

        return collective

    def to_first(outputs: list, given: Any) -> None:
        if isinstance(outputs[0], Tensor):
            outputs[0].copy_(given)
        else:
            outputs[0] = given

    def whole(output: Tensor, given: Tensor) -> None:
        output.copy_(given.reshape(output.shape))

    def from_first(output: Tensor, given: list[Tensor] | None) -> None:
        if given:
            output.copy_(given[0])

    def gathered(given: Any, outputs: list | None) -> None:
        if outputs:
            to_first(outputs, given)

    unchanged = (
        "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier",
        "broadcast_object_list",
    )  # fmt: skip
    collectives: dict[str, Callable] = {
        **dict.fromkeys(unchanged, same),
        **dict.fromkeys(("all_gather", "all_gather_object"), copying(to_first)),
        **dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"), copying(whole)),
        **dict.fromkeys(("reduce_scatter", "scatter"), copying(from_first)),
        **dict.fromkeys(("gather", "gather_object"), copying(gathered)),
        "scatter_object_list": copying(lambda outputs, given: to_first(outputs, given[0])),
        "all_to_all": copying(lambda outputs, given: to_first(outputs, given[0])),
        **{name: refused(name) for name in ("send", "recv", "isend", "irecv", "batch_isend_irecv")},
    }
    for name, function in collectives.items():
        for module in (dist, distributed_c10d):
            replace_attribute(module, name, function)


def _install_ddp(recorder: ScriptRecorder) -> None:
    """What DistributedDataParallel takes, its reducer's C++ left out: that needs tensors of a GPU."""
    kind = nn.parallel.DistributedDataParallel

    def init(
        self: Any, module: nn.Module, device_ids: list | None = None, output_device: Any = None, dim: int = 0,
        broadcast_buffers: bool = True, init_sync: bool = True, process_group: Any = None,
        bucket_cap_mb: float | None = None, find_unused_parameters: bool = False, check_reduction: bool = False,
        gradient_as_bucket_view: bool = False, static_graph: bool = False, *_: Any, **__: Any,
    ) -> None:  # fmt: skip
        if not dist.is_initialized():
            raise RuntimeError("DistributedDataParallel needs torch.distributed.init_process_group first")
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device, self.dim = module, device_ids, output_device, dim
        self.find_unused_parameters, self.gradient_as_bucket_view = find_unused_parameters, gradient_as_bucket_view
        self.process_group, self.static_graph = process_group or dist.group.WORLD, static_graph
        self.require_backward_grad_sync, self.broadcast_buffers = True, broadcast_buffers
        buckets = GradientBuckets(
            dense_parameters(module), recorder, limits=limits_of(bucket_cap_mb),
            rebuilds=static_graph or not find_unused_parameters, as_view=gradient_as_bucket_view, kind="gradient",
        )  # fmt: skip
        object.__setattr__(self, "_gpufarm_buckets", buckets)
        for parameter in buckets.parameters:
            parameter.register_post_accumulate_grad_hook(buckets.reduce)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._gpufarm_buckets.rebuild()
        if self.device_ids:
            inputs, kwargs = tree_map(_on_the_gpu, inputs), tree_map(_on_the_gpu, kwargs)
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        buckets = self._gpufarm_buckets
        before, buckets.synchronizes = buckets.synchronizes, False
        try:
            yield
        finally:
            buckets.synchronizes = before

    for name, function in (
        ("__init__", init),
        ("forward", forward),
        ("no_sync", no_sync),
        ("join", lambda self, *args, **kwargs: contextlib.nullcontext()),
        ("register_comm_hook", lambda self, *args, **kwargs: None),
        ("_set_static_graph", lambda self: None),
    ):
        replace_attribute(kind, name, function)


def _on_the_gpu(value: Any) -> Any:
    return value.to(CUDA) if isinstance(value, Tensor) else value
