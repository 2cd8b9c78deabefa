"""What a recorder asks about the ranks of a traced job: which tensors are shared among them, what they send.

Start reading at `Ranks.ran`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from featurize.batches import tensors_of
from featurize.operator_record import is_composite
from featurize.parallel.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, SEND
from featurize.parallel.streams import Streams
from featurize.recorder import KERNEL

_WRAPPERS = (DTensor, AsyncCollectiveTensor)
# torch/csrc/distributed/c10d/Ops.cpp: what process groups run, into tensors that they are given.
_OF_GROUPS = {
    "c10d::_allgather_base_": ALL_GATHER, "c10d::allgather_": ALL_GATHER,
    "c10d::allgather_into_tensor_coalesced_": ALL_GATHER, "c10d::_reduce_scatter_base_": REDUCE_SCATTER,
    "c10d::reduce_scatter_": REDUCE_SCATTER, "c10d::reduce_scatter_tensor_coalesced_": REDUCE_SCATTER,
    "c10d::allreduce_": ALL_REDUCE, "c10d::allreduce_coalesced_": ALL_REDUCE, "c10d::broadcast_": BROADCAST,
    "c10d::alltoall_base_": ALL_TO_ALL, "c10d::alltoall_": ALL_TO_ALL,
}  # fmt: skip
# torch/csrc/distributed/c10d/Functional.cpp: those of DTensor, which run beside the kernels until they are waited for.
_FUNCTIONAL = {
    "_c10d_functional::all_gather_into_tensor": ALL_GATHER, "_c10d_functional::all_reduce": ALL_REDUCE,
    "_c10d_functional::all_reduce_": ALL_REDUCE, "_c10d_functional::reduce_scatter_tensor": REDUCE_SCATTER,
    "_c10d_functional::all_to_all_single": ALL_TO_ALL, "_c10d_functional::broadcast": BROADCAST,
    "_c10d_functional::all_gather_into_tensor_coalesced": ALL_GATHER,
    "_c10d_functional::reduce_scatter_tensor_coalesced": REDUCE_SCATTER,
    "_c10d_functional::all_reduce_coalesced": ALL_REDUCE,
}  # fmt: skip
_WAIT = "_c10d_functional::wait_tensor"
_WRAP = "_c10d_functional::_wrap_tensor_autograd"  # whose kernel for meta tensors does not
_NO_WORK = "profiler::"
_COPY_IN = "fsdp::all_gather_copy_in"


class Ranks:
    """One rank among those of a traced job.

    Args:
        streams: Of its GPU, with the recorder of its step.
        axes: Name of a process group -> the mesh's dimension that it joins.
    """

    def __init__(self, streams: Streams, axes: Mapping[str, str]) -> None:
        assert streams.recorder is not None
        self._recorder, self._streams, self._axes = streams.recorder, streams, axes
        # Storage of a result -> its collective, and the inputs that live until it is over.
        self._under_way: dict[int, tuple[int, list[Tensor]]] = {}

    def ran(self, func: OpOverload, types: Sequence[type], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator that sends, or waits for what was sent; `KERNEL` for one that computes. NotImplemented where
        its tensors are shared among ranks: PyTorch then runs it on this one's part of them.

        Args:
            func: The operator.
            types: Of its tensors.
            args: On meta tensors.
            kwargs: Likewise.
        """
        if self.are_shared(types):
            return NotImplemented
        name = func._schema.name
        if name.startswith("aten::"):
            return self._in_parts(func, args, kwargs) if _is_composite(func) else KERNEL
        if name == _WAIT:
            return self._waited(args[0])
        if name == _WRAP:
            return AsyncCollectiveTensor(args[0])
        if name.startswith(_NO_WORK):
            return func(*args, **kwargs)
        if name == _COPY_IN:
            if not self._recorder.paused:
                self._recorder.copied(args[0])
            return func(*args, **kwargs)
        if self._recorder.paused and name in (*_OF_GROUPS, *_FUNCTIONAL):
            return func(*args, **kwargs)
        if (kind := _OF_GROUPS.get(name)) is not None:
            return self._of_group(kind, func, args, kwargs)
        if (kind := _FUNCTIONAL.get(name)) is not None:
            return self._functional(kind, func, args, kwargs)
        return KERNEL

    def _in_parts(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What runs below DTensor was not taken apart above it."""
        with self._recorder:
            return func.decompose(*args, **kwargs)

    @staticmethod
    def are_shared(types: Sequence[type]) -> bool:
        """Return whether some of these types of tensors are shared among ranks."""
        return any(issubclass(one, _WRAPPERS) for one in types)

    def _of_group(self, kind: str, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        asynchronous = bool(_argument(func, args, kwargs, "async_op", True))
        self._streams.send(kind, _nbytes(args[:2]), self._axis(func, args, kwargs), asynchronous=asynchronous)
        return func(*args, **kwargs)

    def _functional(self, kind: str, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        given, made = list(tensors_of(args[0])), list(tensors_of(out))
        if kind == ALL_TO_ALL and _is_message(_argument(func, args, kwargs, "input_split_sizes", ())):
            kind = SEND
        number = self._streams.send(kind, _nbytes((given, made)), self._axis(func, args, kwargs), asynchronous=True)
        for tensor in made:
            self._recorder.made(tensor, func._schema.name)
            self._under_way[tensor.untyped_storage()._cdata] = number, given
        return out

    def _waited(self, tensor: Tensor) -> Tensor:
        if (under_way := self._under_way.pop(tensor.untyped_storage()._cdata, None)) is not None:
            self._streams.wait_for(under_way[0])
        return tensor

    def begin_step(self) -> None:
        """Forget the step before."""
        self._under_way.clear()
        self._streams.begin_step()

    def _axis(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> str:
        group = _argument(func, args, kwargs, "process_group", None)
        if group is None:
            group = _argument(func, args, kwargs, "group_name", None)
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        name = group if isinstance(group, str) else getattr(group, "group_name", "")
        return self._axes.get(name) or own_axis(name)


_is_composite = functools.cache(is_composite)


def _is_message(split_sizes: Sequence[int]) -> bool:
    """Whether all goes to one rank."""
    return sum(size > 0 for size in split_sizes) == 1 < len(split_sizes)


def own_axis(group: Any) -> str:
    """Return what `fabrics_of` calls a process group that the model made itself, by the group's name."""
    members = dist.get_process_group_ranks(_resolve_process_group(group))
    if len(members) == dist.get_world_size():
        return ""
    return f"{len(members)}x{members[1] - members[0] if len(members) > 1 else 1}"


def _argument(func: OpOverload, args: tuple, kwargs: dict[str, Any], name: str, default: object) -> Any:
    if name in kwargs:
        return kwargs[name]
    names = [argument.name for argument in func._schema.arguments]
    return args[names.index(name)] if name in names and names.index(name) < len(args) else default


def _nbytes(sides: Sequence) -> int:
    """Bytes of the larger side: what is gathered, or scattered, or sent and received alike."""
    return max((sum(tensor.nbytes for tensor in tensors_of(side)) for side in sides), default=0)
