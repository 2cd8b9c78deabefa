"""Operators of a rank in a traced job: whether they run on tensors that ranks share, and their collectives.

Start reading at `Ranks.ran`. It is a separate module, since a job on one GPU does not need torch.distributed.tensor,
whose import is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from featurize.recording.block_record import is_composite
from featurize.recording.recorder import KERNEL
from featurize.recording.values import tensors_of
from featurize.timing.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, SEND
from featurize.training.rank import Streams

# Operators of process groups, into given tensors (torch/csrc/distributed/c10d/Ops.cpp), and those of DTensor, which run
# beside the kernels until a wait (Functional.cpp).
_KINDS = {
    **dict.fromkeys(
        (
            "c10d::_allgather_base_",
            "c10d::allgather_",
            "c10d::allgather_into_tensor_coalesced_",
            "_c10d_functional::all_gather_into_tensor",
            "_c10d_functional::all_gather_into_tensor_coalesced",
        ),
        ALL_GATHER,
    ),
    **dict.fromkeys(
        (
            "c10d::_reduce_scatter_base_",
            "c10d::reduce_scatter_",
            "c10d::reduce_scatter_tensor_coalesced_",
            "_c10d_functional::reduce_scatter_tensor",
            "_c10d_functional::reduce_scatter_tensor_coalesced",
        ),
        REDUCE_SCATTER,
    ),
    **dict.fromkeys(
        (
            "c10d::allreduce_",
            "c10d::allreduce_coalesced_",
            "_c10d_functional::all_reduce",
            "_c10d_functional::all_reduce_",
            "_c10d_functional::all_reduce_coalesced",
        ),
        ALL_REDUCE,
    ),
    **dict.fromkeys(("c10d::broadcast_", "_c10d_functional::broadcast"), BROADCAST),
    **dict.fromkeys(("c10d::alltoall_base_", "c10d::alltoall_", "_c10d_functional::all_to_all_single"), ALL_TO_ALL),
}
_COPY_IN = "fsdp::all_gather_copy_in"


class Ranks:
    """One rank among those of a traced job.

    Args:
        streams: The streams of its GPU, with the recorder of its step.
        axes: Name of a process group -> the mesh's dimension that it joins.
    """

    def __init__(self, streams: Streams, axes: Mapping[str, str]) -> None:
        assert streams.recorder is not None
        self._recorder, self.streams, self._axes = streams.recorder, streams, axes
        # Storage of a result -> its collective, and the inputs that live until it has ended.
        self._under_way: dict[int, tuple[int, list[Tensor]]] = {}

    def ran(self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that sends, or waits for a collective; return `KERNEL` for one that computes. Returns
        NotImplemented where its tensors are shared among ranks: PyTorch then runs it on this rank's part of them.

        Args:
            func: The operator.
            types: Types of its tensors.
            args: Its arguments, with meta tensors.
            kwargs: Its keyword arguments.
        """
        if any(issubclass(tensor_type, DTensor | AsyncCollectiveTensor) for tensor_type in types):
            return NotImplemented
        name = func._schema.name
        if name.startswith("aten::"):
            if not is_composite(func):
                return KERNEL
            with self._recorder:  # operators below DTensor were not decomposed above it
                return func.decompose(*args, **kwargs)
        if name == "_c10d_functional::wait_tensor":
            if (under_way := self._under_way.pop(args[0].untyped_storage()._cdata, None)) is not None:
                self.streams.wait_for(under_way[0])
            return args[0]
        if name == "_c10d_functional::_wrap_tensor_autograd":  # its kernel for meta tensors does not wrap
            return AsyncCollectiveTensor(args[0])
        kind = _KINDS.get(name)
        if name == _COPY_IN and not self._recorder.paused:
            self._recorder.log.copied(args[0])
        if name == _COPY_IN or name.startswith("profiler::") or (kind is not None and self._recorder.paused):
            return func(*args, **kwargs)
        if kind is None:
            return KERNEL
        axis = self._axis(func, args, kwargs)
        if name.startswith("c10d::"):
            asynchronous = bool(_argument(func, args, kwargs, "async_op", True))
            self.streams.send(kind, _nbytes(args[:2]), axis, asynchronous=asynchronous)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        given, outputs = list(tensors_of(args[0])), list(tensors_of(out))
        if kind == ALL_TO_ALL:
            sizes = _argument(func, args, kwargs, "input_split_sizes", ())
            kind = SEND if sum(size > 0 for size in sizes) == 1 < len(sizes) else kind  # all data goes to one rank
        number = self.streams.send(kind, _nbytes((given, outputs)), axis, asynchronous=True)
        for tensor in outputs:
            self._recorder.made(tensor, name)
            self._under_way[tensor.untyped_storage()._cdata] = number, given
        return out

    def begin_step(self) -> None:
        """Reset the state of the last step, but for its streams."""
        self._under_way.clear()

    def _axis(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        group = _argument(func, args, kwargs, "process_group", _argument(func, args, kwargs, "group_name", None))
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        name = group if isinstance(group, str) else getattr(group, "group_name", "")
        return self._axes.get(name) or own_axis(name)


def own_axis(group: Any) -> str:
    """Return the name that `fabrics_of` uses for a process group that the model made itself, from the group's name."""
    members = dist.get_process_group_ranks(_resolve_process_group(group))
    if len(members) == dist.get_world_size():
        return ""
    return f"{len(members)}x{members[1] - members[0] if len(members) > 1 else 1}"


def _argument(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: object) -> Any:
    if name in kwargs:
        return kwargs[name]
    names = [argument.name for argument in func._schema.arguments]
    return args[names.index(name)] if name in names and names.index(name) < len(args) else default


def _nbytes(sides: Sequence[Any]) -> int:
    """Return the bytes of the larger side: the gathered or scattered tensor, or the equal sides of an exchange."""
    return max((sum(tensor.nbytes for tensor in tensors_of(side)) for side in sides), default=0)
