"""torch.distributed for the only process that runs: rank 0 of a group whose other ranks are assumed to send the same.

Start reading at `RankZero.begin`, which has the rank's streams, its wrappers and its collectives; then at
`install_process_group`. DistributedDataParallel keeps its buckets and copies, without its reducer, whose C++ needs
tensors of a GPU; its rules are in `featurize.training.rank`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed import device_mesh, distributed_c10d
from torch.utils._pytree import tree_map

from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.operators.replacing import instead_of, replace_attribute, replaced
from featurize.operators.torch_releases import SHARDS, complete_collectives, refused_modes, require_torch
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import BUCKET, Collective
from featurize.recording.values import remember
from featurize.training.rank import Replica, Streams
from learn.script.command_line import ScriptCommand
from learn.script.fake_cuda import CUDA, giving, on_the_gpu
from learn.script.records import note

if TYPE_CHECKING:
    from featurize.training.ranks import Ranks
    from featurize.training.zero import ZeroRank

REPLICA = "_gpufarm_replica"  # attribute of a DistributedDataParallel: its `Replica`


class RankZero:
    """The only process that runs, of those that a launcher starts.

    `launched` is the number of processes. A script that starts processes itself changes it. `parameters` is the number
    of elements of the model that `play` partitions; 0: the rank holds all of its model.
    """

    parameters = 0

    def __init__(self, recorder: Recorder, command: ScriptCommand) -> None:
        self.recorder, self._command, self.launched = recorder, command, command.nodes * command.per_node
        self.streams = Streams()
        self.streams.recorder = recorder
        self._zero: ZeroRank | None = None
        self.wrapper: Parallel | None = None  # layout of the first model that is wrapped for all ranks
        self._ranks: Ranks | None = None  # there is a process group of several ranks
        self._collectives: tuple[Collective, ...] = ()
        self._entered = contextlib.ExitStack()  # left when the process ends

    def begin(self) -> None:
        """Start recording collectives: the script has created its process group, with several ranks. PyTorch's own
        wrappers then run on meta tensors, where the release allows that."""
        if self._ranks is not None:
            return
        from featurize.training.ranks import Ranks  # its imports are slow

        complete_collectives()
        self._ranks = Ranks(self.streams, {})
        self.recorder.among_ranks = self._ranks.ran
        if "fsdp" not in refused_modes():
            from featurize.training.sharded_rank import shards_on_meta

            self._entered.enter_context(shards_on_meta(self.streams, CUDA))

    def settings(self, **given: Any) -> Parallel:
        """Return the layout of a replica with these settings of DistributedDataParallel, or of ZeRO."""
        return self._command.layout(self.launched).changed(own=1, ddp=self.launched, **given)

    def play(self, layout: Parallel, settings: Training, parameters: int) -> ZeroRank:
        """Return the simulated rank of ZeRO, with the script's recorder, for a model of `parameters` elements. It is
        active from now on."""
        from featurize.trace.tracer import played_rank
        from featurize.training.zero import ZeroRank

        self.wrapper, played = layout, self._entered.enter_context(played_rank(layout, settings))
        assert isinstance(played, ZeroRank), "a layout of ZeRO"
        played.attach(self.recorder)
        self.parameters = parameters
        self._zero = played
        return played

    def begin_phase(self, phase: str) -> None:
        """Begin a backward pass, or what follows it."""
        if self._zero is not None:
            self._zero.begin_phase(phase)

    def axis_of(self, group: Any) -> str:
        """Return the name of a process group, as collectives have it."""
        from featurize.training.ranks import own_axis

        return "" if group is None or self._ranks is None else own_axis(group.group_name)

    def begin_step(self) -> None:
        """Begin a step."""
        self.streams.begin_step()
        if self._zero is not None:
            self._zero.begin_step()
        if self._ranks is not None:
            self._ranks.begin_step()

    def end_step(self) -> None:
        """End a step; the last step's collectives count."""
        of_zero = () if self._zero is None else self._zero.collectives()
        self._collectives = (*self.streams.collectives(), *of_zero)

    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives of the last step; empty for a single process."""
        return self._collectives if self.layout() is not None else ()

    def layout(self) -> Parallel | None:
        """Return the layout of the job; None for one process, or for several that never communicate."""
        if self.launched == 1 or self._ranks is None:
            return None
        return self.wrapper or self._command.layout(self.launched)

    def remarks(self) -> list[str]:
        """Return the assumptions about the ranks."""
        if self.launched == 1:
            return []
        if self._ranks is None:
            return [f"the script starts no process group: each of its {self.launched} processes trains by itself"]
        return [f"the script ran as rank 0 of {self.launched}; where other ranks run other code, they may need more"]

    def assign_reduced(self, tensor: Tensor, op: Any, ranks: int) -> None:
        """Assign a reduced tensor its value, assuming equal tensors on all ranks, as far as values are known."""
        values = self.recorder.values.of(tensor)
        if ranks == 1 or values is None or op not in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
            return
        total = values * ranks if op == dist.ReduceOp.SUM else values**ranks
        if tensor.is_meta:
            self._learn(tensor, total)
        else:
            tensor.detach().copy_(total)

    def assign_gathered(self, outputs: Tensor | list[Tensor], tensor: Tensor) -> None:
        """Assign gathered tensors of a GPU this rank's value, as far as it is known."""
        values = self.recorder.values.of(tensor) if tensor.is_meta else None
        if values is None:
            return
        if isinstance(outputs, Tensor):
            copies = outputs.numel() // max(values.numel(), 1)
            values, outputs = values.flatten().repeat(copies).reshape(outputs.shape), [outputs]
        for output in outputs:
            self._learn(output, values)

    def _learn(self, tensor: Tensor, values: Tensor) -> None:
        remember(tensor, values.clone())
        self.recorder.values.learn([tensor])


ALONE = "torch.distributed runs with one process: buffers of NCCL are not counted"
_SHARDS_ALONE = "fully_shard cannot be followed in one process: start the script with torchrun, or leave it out"
_OFFLOADED = (
    "CPU offload of shards is not followed in scripts: estimate the model itself with parallel=fsdp=N,cpu_offload=true"
)
_MIXED = "DistributedDataParallel's mixed_precision is not followed: use torch.autocast"


class _Done:
    """The handle of a completed collective."""

    wait = is_completed = is_success = giving(True)


def install_process_group(rank: RankZero) -> None:
    """Make torch.distributed work in the process of a rank, if the release has it."""

    def call_directly(fn: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        if rank.launched != 1 != nprocs:
            raise RuntimeError(f"each of {rank.launched} processes starts {nprocs} more: that is not followed")
        rank.launched = max(rank.launched, nprocs)
        fn(0, *args)

    replace_attribute(torch.multiprocessing, "spawn", call_directly)
    replace_attribute(torch.multiprocessing, "start_processes", call_directly)
    if not dist.is_available():
        return
    _install_group(rank)
    _install_collectives(rank)
    _install_replicas(rank)


def _replace(**functions: Any) -> None:
    for name, function in functions.items():
        before = getattr(dist, name, None)
        for module in (dist, distributed_c10d, device_mesh):
            if getattr(module, name, None) is before:  # `device_mesh.reduce` of older releases is functools.reduce
                replace_attribute(module, name, function)


def _install_group(rank: RankZero) -> None:
    begin, group_of = dist.init_process_group, dist.new_group
    signature = inspect.signature(begin)
    backends = ["nccl"]

    @functools.wraps(begin)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        given = signature.bind(*args, **kwargs).arguments
        world_size = given.get("world_size", -1)
        ranks = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        if ranks != rank.launched:
            raise RuntimeError(
                f"the script asks for {ranks} processes and its command starts {rank.launched}; start it with "
                f"torchrun --nproc-per-node {ranks}, or as it is queued"
            )
        backends[0] = str(given.get("backend") or "nccl")
        begin("fake", store=FakeStore(), rank=0, world_size=ranks)
        if ranks == 1:
            note(ALONE)
        else:
            rank.begin()
        _refuse_shards(ranks)

    @functools.wraps(group_of)
    def new_group(ranks: Any = None, *_: Any, use_local_synchronization: bool = False, **__: Any) -> Any:
        return group_of(ranks, use_local_synchronization=use_local_synchronization)

    _replace(
        init_process_group=init_process_group,
        new_group=new_group,
        get_backend=lambda group=None: backends[0],
        is_nccl_available=lambda: True,
    )


def _refuse_shards(ranks: int) -> None:
    """Refuse the wrappers of PyTorch that cannot be followed among these ranks, and in the installed release."""
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def offload(self: Any, offload_params: bool = False) -> None:
        if offload_params:
            raise RuntimeError(_OFFLOADED)
        self.offload_params = False

    def refuse_release(*_: Any, **__: Any) -> None:
        require_torch(SHARDS, "FSDP or tensor parallelism in a script")

    if ranks == 1:
        replace_attribute(FSDPState, "init", _refusing(_SHARDS_ALONE))
        return
    replace_attribute(CPUOffload, "__init__", offload)
    replace_attribute(CPUOffloadPolicy, "__init__", _refusing(_OFFLOADED))
    if "fsdp" not in refused_modes():
        return
    for owner, name in (
        (FSDPState, "init"),
        (FullyShardedDataParallel, "__init__"),
        (DTensor, "__new__"),
        (Shard, "_shard_tensor"),
        (Replicate, "_replicate_tensor"),
    ):
        replace_attribute(owner, name, refuse_release)


def _refusing(reason: str) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(reason)

    return refuse


def _install_collectives(rank: RankZero) -> None:
    """Run collectives of GPU tensors unchanged: their group sends nothing, and the recorder is notified of them. For
    tensors on the host, and for objects, each rank is assumed to have this rank's."""
    all_reduce = dist.all_reduce

    def gathered(gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs, tensor, *_ = inspect.signature(gather).bind(*args, **kwargs).arguments.values()
        work = gather(*args, **kwargs)
        rank.assign_gathered(outputs, tensor)
        return work

    @functools.wraps(all_reduce)
    def reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        with torch._C.DisableTorchFunction():  # a mode would call this function again
            work = all_reduce(tensor, op, group, async_op)
        rank.assign_reduced(tensor, op, dist.get_world_size(group))
        return work

    def reduce_to_one(tensor: Tensor, dst: Any = None, *args: Any, group_dst: Any = None, **kwargs: Any) -> Any:
        return reduce(tensor, *args, **kwargs)

    def gather(tensor: Tensor, gather_list: Any = None, *_: Any, async_op: bool = False, **__: Any) -> Any:
        return _copy([(output, tensor) for output in gather_list or ()], async_op)

    def scatter(tensor: Tensor, scatter_list: Any = None, *_: Any, async_op: bool = False, **__: Any) -> Any:
        return _copy([(tensor, scatter_list[0])] if scatter_list else [], async_op)

    refuse = _refusing("messages between two ranks, as pipelines send them, are not followed in scripts")
    _replace(
        all_reduce=reduce,
        all_gather=instead_of(dist.all_gather, gathered),
        all_gather_into_tensor=instead_of(dist.all_gather_into_tensor, gathered),
        reduce=reduce_to_one,
        gather=gather,
        scatter=scatter,
        **dict.fromkeys(("barrier", "monitored_barrier", "broadcast_object_list"), _nothing),
        all_gather_object=_fill,
        gather_object=lambda obj, object_gather_list=None, *_, **__: _fill(object_gather_list or [], obj),
        scatter_object_list=_scatter_objects,
        **dict.fromkeys(("send", "recv", "isend", "irecv", "batch_isend_irecv"), refuse),
        **dict.fromkeys(("send_object_list", "recv_object_list"), refuse),
    )


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]], async_op: bool) -> _Done | None:
    for output, tensor in pairs:
        output.copy_(tensor)
    return _nothing(async_op=async_op)


def _nothing(*_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    return _Done() if async_op else None


def _fill(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _scatter_objects(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *_: Any, **__: Any
) -> None:
    _fill(scatter_object_output_list, (scatter_object_input_list or [None])[0])


def _install_replicas(rank: RankZero) -> None:
    """Replace the functions of DistributedDataParallel, in this process."""
    begin = nn.parallel.DistributedDataParallel.__init__
    signature = inspect.signature(begin)
    switches = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "broadcast_buffers")
    ignored = (
        "delay_all_reduce_named_params",
        "skip_all_reduce_unused_params",
        "bucket_cap_mb_list",
        "batched_grad_copy",
    )

    @functools.wraps(begin)  # scripts look up which arguments the release has
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        # In newer releases, `forward_sync_buffers` overrides `broadcast_buffers`. Without either, buffers are sent.
        choices = given.get("forward_sync_buffers"), given["broadcast_buffers"]
        given["broadcast_buffers"] = next((choice for choice in choices if choice is not None), True)
        if not dist.is_initialized():
            raise RuntimeError("DistributedDataParallel needs torch.distributed.init_process_group first")
        if given["mixed_precision"] is not None:
            raise RuntimeError(_MIXED)
        for name in ignored:
            if given.get(name):
                note(f"assumed: DistributedDataParallel's {name} changes neither memory nor messages")
        mesh, process_group = given["device_mesh"], given["process_group"]
        if mesh is not None:
            process_group = mesh.get_group(mesh_dim=0)
        nn.Module.__init__(self)
        for name in ("module", "device_ids", "output_device", "dim", *switches):
            setattr(self, name, given[name])
        self.process_group = process_group or dist.group.WORLD
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        settings = rank.settings(bucket_cap_mb=given["bucket_cap_mb"], **{name: bool(given[name]) for name in switches})
        replica = Replica(
            self.module,
            rank.streams,
            settings,
            kind=BUCKET if rank.launched > 1 else "gradient",
            axis=rank.axis_of(process_group),
        )
        object.__setattr__(self, REPLICA, replica)
        if dist.get_world_size(process_group) == rank.launched:
            rank.wrapper = rank.wrapper or settings

    for name, function in (
        ("__init__", init),
        ("forward", _forward),
        ("no_sync", lambda self: replaced(self, "require_backward_grad_sync", False)),
        ("join", lambda self, *args, **kwargs: contextlib.nullcontext()),
        (
            "register_comm_hook",
            lambda *_, **__: note(
                "assumed: a communication hook of DistributedDataParallel takes no memory, and sends what it is given"
            ),
        ),
        ("_set_static_graph", lambda self: None),
    ):
        replace_attribute(nn.parallel.DistributedDataParallel, name, function)


def _forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Forward pass of a replica, in torch's order (torch/nn/parallel/distributed.py: `_pre_forward`,
    `_post_forward`)."""
    replica: Replica = getattr(self, REPLICA)
    trains = torch.is_grad_enabled()
    if trains:
        if names := replica.without_gradient():
            raise RuntimeError(
                f"{len(names)} parameters get no gradient (the first: {names[0]}), at which DistributedDataParallel "
                "stops in its second step; pass find_unused_parameters=True, or freeze them"
            )
        replica.rebuild()
    if self.require_forward_param_sync and self.broadcast_buffers:
        replica.broadcast_buffers()
    if self.device_ids:
        inputs, kwargs = tree_map(on_the_gpu, inputs), tree_map(on_the_gpu, kwargs)
    with self._inside_ddp_forward():  # a compiled module finds the buckets that split its graph there
        output = self.module(*inputs, **kwargs)
    self.require_forward_param_sync = trains and self.require_backward_grad_sync
    if trains:
        replica.begin_pass(synchronizes=self.require_backward_grad_sync)
    return output
