"""Lets PyTorch's `fully_shard`, and FSDP1, work on meta tensors, and tells a recorder what its memory is for.

Start reading at `shards_on_meta`. What is replaced there is private to PyTorch: real ranks are the test of it
(tests/featurize/test_sharded_ranks.py), with the installed release.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import _fully_shard as package
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_init as init
from torch.distributed.fsdp._fully_shard import _fsdp_param as param
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
from torch.distributed.fsdp._fully_shard import _fsdp_state as state
from torch.distributed.tensor import _dispatch as dispatch
from torch.distributed.tensor import _op_schema as op_schema
from torch.distributed.tensor import _random as random
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from featurize.parallel.flat_on_meta import flat_on_meta
from featurize.parallel.streams import Streams
from featurize.replacing import replaced
from featurize.step_trace import COMMUNICATION, GATHERED, UNREDUCED

_META = torch.device("meta")


@contextlib.contextmanager
def shards_on_meta(streams: Streams, device: torch.device = _META) -> Iterator[None]:
    """While entered, meshes stand for GPUs on which meta tensors lie.

    Args:
        streams: Of the GPU. Its recorder hears of storages that are resized, and of what blocks are for.
        device: What meta tensors say that they lie on.
    """
    with contextlib.ExitStack() as stack:

        def replace(owner: object, name: str, value: object) -> None:
            stack.enter_context(replaced(owner, name, value))

        for module in (init, group, state, collectives):
            replace(module, "_get_device_handle", lambda *_: streams)
        for module in (init, package._fully_shard):
            replace(module, "_get_device_from_mesh", lambda _: device)
        replace(group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None)
        replace(group.FSDPParamGroup, "_validate_cpu_offload_params", lambda _: None)
        replace(param.FSDPParam, "all_gather_inputs", _copied_from_host())
        replace(torch.UntypedStorage, "resize_", _resizing(streams))
        replace(param.FSDPParam, "init_all_gather_outputs", _naming_gathered(streams))
        replace(collectives.DefaultAllGather, "allocate", _naming_buffer(streams))
        replace(group, "foreach_reduce", _naming_gradients(streams))
        if hasattr(collectives, "record_grad_output_stream"):  # from 2.15 on; it does nothing on CUDA
            replace(collectives, "record_grad_output_stream", lambda *_: None)
        name = "_propagate_tensor_meta_non_cached"
        replace(ShardingPropagator, name, _unseen(getattr(ShardingPropagator, name)))
        replace(op_schema, "_rebuild_tensor_from_dtensor_meta", _of_shape)
        for module in (dispatch, random):  # there are no random numbers to agree on
            replace(module, "is_rng_supported_mesh", lambda _: False)
        stack.enter_context(flat_on_meta(streams, device))
        yield


def _resizing(streams: Streams) -> Callable[..., Any]:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        out = resize(storage, nbytes)
        if streams.recorder is not None:
            streams.recorder.resized(storage, nbytes)
        return out

    return resize_


def _naming_gathered(streams: Streams) -> Callable[..., None]:
    make = param.FSDPParam.init_all_gather_outputs

    @functools.wraps(make)
    def init_all_gather_outputs(self: param.FSDPParam, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        streams.name(self.all_gather_outputs, GATHERED)

    return init_all_gather_outputs


def _naming_buffer(streams: Streams) -> Callable[..., torch.Tensor]:
    make = collectives.DefaultAllGather.allocate

    @functools.wraps(make)
    def allocate(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer = make(self, *args, **kwargs)
        streams.name([buffer], COMMUNICATION)
        return buffer

    return allocate


def _naming_gradients(streams: Streams) -> Callable[..., Any]:
    reduce = group.foreach_reduce

    @functools.wraps(reduce)
    def foreach_reduce(params: Any, gradients: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        streams.name(gradients, UNREDUCED)
        on_host = [one for one in params if one.offload_to_cpu]
        for one in on_host:
            one.offload_to_cpu = False  # there are no values to copy
        try:
            out = reduce(params, gradients, *args, **kwargs)
        finally:
            for one in on_host:
                one.offload_to_cpu, one.sharded_param.grad = True, None
        streams.name([out[0]], COMMUNICATION)  # which is kept until it was sent
        return out

    return foreach_reduce


def _copied_from_host() -> property:
    inputs: property = vars(param.FSDPParam)["all_gather_inputs"]

    def all_gather_inputs(self: param.FSDPParam) -> list[torch.Tensor]:
        if not self.offload_to_cpu:
            return inputs.__get__(self)
        kept = self._sharded_param_data
        self._sharded_param_data = kept.clone()
        try:
            return inputs.__get__(self)
        finally:
            self._sharded_param_data = kept

    return property(all_gather_inputs)


def _of_shape(value: Any) -> Any:
    """What DTensor asks for shapes by: on meta, also where the mesh is of GPUs, which this PyTorch may not know."""
    tensor = value.tensor_meta
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype, device=_META)


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor asks for the shapes of whole results: no kernels of this rank."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call
