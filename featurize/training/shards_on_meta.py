"""Lets PyTorch's `fully_shard` and FSDP1 work on meta tensors, and tells a recorder what their memory is for.

Start reading at `shards_on_meta`. What is replaced here is private to PyTorch. Real ranks test it with the installed
release (tests/featurize/test_sharded_ranks.py, test_flat_ranks.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import _flat_param as flat
from torch.distributed.fsdp import _fully_shard as package
from torch.distributed.fsdp import _init_utils as flat_init
from torch.distributed.fsdp import _runtime_utils as runtime
from torch.distributed.fsdp import fully_sharded_data_parallel as wrapper
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_init as init
from torch.distributed.fsdp._fully_shard import _fsdp_param as param
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
from torch.distributed.fsdp._fully_shard import _fsdp_state as state
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import _dispatch as dispatch
from torch.distributed.tensor import _op_schema as op_schema
from torch.distributed.tensor import _random as random
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from featurize.operators.replacing import replaced
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import COMMUNICATION, GATHERED, UNREDUCED
from featurize.training.streams import Streams

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

        def hear(owner: object, name: str, heard: Callable[..., None]) -> None:
            replace(owner, name, _heard(getattr(owner, name), heard))

        def resized(_: object, storage: torch.UntypedStorage, nbytes: int) -> None:
            if streams.recorder is not None:
                streams.recorder.memory.resized(storage, nbytes)

        hear(torch.UntypedStorage, "resize_", resized)
        _replace_sharding(replace, hear, streams, device)
        _replace_flat(replace, hear, streams, device)
        yield


def _replace_sharding(
    replace: Callable[..., None], hear: Callable[..., None], streams: Streams, device: torch.device
) -> None:
    """Let `fully_shard` and DTensor work on meta."""
    for module in (init, group, state, collectives):
        replace(module, "_get_device_handle", lambda *_: streams)
    for module in (init, package._fully_shard):
        replace(module, "_get_device_from_mesh", lambda _: device)
    replace(group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None)
    replace(group.FSDPParamGroup, "_validate_cpu_offload_params", lambda _: None)
    replace(param.FSDPParam, "all_gather_inputs", _copied_from_host())
    hear(
        param.FSDPParam,
        "init_all_gather_outputs",
        lambda _, made, *__: streams.name(made.all_gather_outputs, GATHERED),
    )
    hear(collectives.DefaultAllGather, "allocate", lambda buffer, *_: streams.name([buffer], COMMUNICATION))
    replace(group, "foreach_reduce", _naming_gradients(streams))
    if hasattr(collectives, "record_grad_output_stream"):  # from 2.15 on; it does nothing on CUDA
        replace(collectives, "record_grad_output_stream", lambda *_: None)
    name = "_propagate_tensor_meta_non_cached"
    replace(ShardingPropagator, name, _unseen(getattr(ShardingPropagator, name)))
    replace(op_schema, "_rebuild_tensor_from_dtensor_meta", _of_shape)
    for module in (dispatch, random):  # there are no random numbers to agree on
        replace(module, "is_rng_supported_mesh", lambda _: False)


def _replace_flat(
    replace: Callable[..., None], hear: Callable[..., None], streams: Streams, device: torch.device
) -> None:
    """Make FSDP1's flat parameters on meta stand for those on a GPU."""

    def init_device_handle(state: Any, *_: object) -> Any:
        state._device_handle = streams
        return state

    def name_parts(_: object, handle: Any) -> None:
        kinds = {"_full_param_padded": GATHERED, "_full_prec_full_param_padded": GATHERED, "_mp_shard": COMMUNICATION}
        for name, kind in kinds.items():
            if (tensor := getattr(handle.flat_param, name, None)) is not None:
                streams.name([tensor], kind)

    reduce = runtime._post_backward_hook

    @functools.wraps(reduce)
    def post_backward_hook(state: Any, handle: Any, *args: Any) -> None:
        if handle.flat_param.grad is not None:
            streams.name([handle.flat_param.grad], UNREDUCED)
        reduce(state, handle, *args)

    replace(_FSDPDeviceHandle, "from_device", lambda _: streams)
    replace(wrapper, "_init_device_handle", init_device_handle)
    replace(flat_init, "_need_to_materialize_module", lambda *_: (False, False))
    for module in (flat, runtime):
        replace(module, "_no_dispatch_record_stream", streams.use)
    replace(flat_init, "_get_compute_device", lambda *_: device)
    # The norm is kept, and no operator makes it.
    hear(
        wrapper.FullyShardedDataParallel,
        "clip_grad_norm_",
        lambda _, model, *__: streams.name([model._zero_scalar], "buffer"),
    )
    # Tensors without memory have no addresses: their storages are compared.
    replace(flat, "_same_storage", _same_storage)
    replace(flat, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0)
    replace(runtime, "_catch_all_reshard", _catch_all_reshard)
    hear(flat.FlatParamHandle, "init_flat_param_attributes", name_parts)
    replace(runtime, "_post_backward_hook", post_backward_hook)
    hear(runtime, "_get_reduce_scatter_tensors", lambda made, *_: streams.name(made[:1], COMMUNICATION))


def _heard(function: Callable[..., Any], heard: Callable[..., None]) -> Callable[..., Any]:
    """Return a function after which `heard(result, *arguments)` is called."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        heard(out, *args)
        return out

    return call


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
    """Return what DTensor asks for shapes: on meta, also where the mesh is of GPUs, which this PyTorch may not know."""
    tensor = value.tensor_meta
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype, device=_META)


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor asks for the shapes of whole results: no kernels of this rank."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _catch_all_reshard(state: Any) -> None:
    """Free what no hook of the backward pass has freed, such as a frozen unit whose inputs need no gradient."""
    handle = state._handle
    if handle is None:
        return
    is_shard = _same_storage(handle.flat_param, handle.flat_param._local_shard)
    if not is_shard or handle._skipped_use_sharded_views:
        runtime._reshard(state, handle, runtime._should_free_in_backward(state, handle))


class ShardStates:
    """The state of a model's shards.

    Args:
        model: With modules that `fully_shard` wrapped, or none.
        recorder: Hears nothing of what `bring_to` does.
        streams: Likewise.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, streams: Streams) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._recorder, self._streams = recorder, streams

    def now(self) -> Hashable:
        """Return the state of each module's parameters."""
        return tuple(tuple(group._sharded_state for group in _groups(module)) for module in self._modules)

    def bring_to(self, state: Hashable) -> None:
        """Gather or free parameters, as they are in another state."""
        if state == self.now():
            return
        assert isinstance(state, tuple), "it was `now` before"
        recorder, paused = self._streams.recorder, self._recorder.paused
        self._streams.recorder, self._recorder.paused = None, True
        try:
            for module, wanted in zip(self._modules, state, strict=True):
                if ShardedState.UNSHARDED in wanted:
                    module.unshard()
                else:
                    module.reshard()
        finally:
            self._streams.recorder, self._recorder.paused = recorder, paused


def _groups(module: FSDPModule) -> list[Any]:
    return module._get_fsdp_state()._fsdp_param_groups
