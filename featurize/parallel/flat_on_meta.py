"""Lets PyTorch's `FullyShardedDataParallel` work on meta tensors, and tells a recorder what its memory is for.

Start reading at `flat_on_meta`. What is replaced there is private to PyTorch: real ranks are the test of it
(tests/featurize/test_flat_ranks.py), with the installed release.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import _flat_param as flat
from torch.distributed.fsdp import _init_utils as init
from torch.distributed.fsdp import _runtime_utils as runtime
from torch.distributed.fsdp import fully_sharded_data_parallel as wrapper
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle

from featurize.parallel.streams import Streams
from featurize.replacing import replaced
from featurize.step_trace import COMMUNICATION, GATHERED, UNREDUCED


@contextlib.contextmanager
def flat_on_meta(streams: Streams, device: torch.device) -> Iterator[None]:
    """While entered, flat parameters on meta stand for those on a GPU.

    Args:
        streams: Of the GPU. Its recorder hears what blocks are for.
        device: What meta tensors say that they lie on.
    """
    with contextlib.ExitStack() as stack:

        def replace(owner: object, name: str, value: object) -> None:
            stack.enter_context(replaced(owner, name, value))

        replace(_FSDPDeviceHandle, "from_device", lambda _: streams)
        replace(wrapper, "_init_device_handle", _with_streams(streams))
        replace(init, "_need_to_materialize_module", lambda *_: (False, False))
        for module in (flat, runtime):
            replace(module, "_no_dispatch_record_stream", streams.use)
        replace(init, "_get_compute_device", lambda *_: device)
        clip = wrapper.FullyShardedDataParallel.clip_grad_norm_
        replace(wrapper.FullyShardedDataParallel, "clip_grad_norm_", _naming_scalar(streams, clip))
        # Tensors without memory have no addresses: their storages are compared.
        replace(flat, "_same_storage", _same_storage)
        replace(flat, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0)
        replace(runtime, "_catch_all_reshard", _catch_all_reshard)
        handle = flat.FlatParamHandle
        replace(handle, "init_flat_param_attributes", _naming_parts(streams, handle.init_flat_param_attributes))
        replace(runtime, "_post_backward_hook", _naming_gradient(streams, runtime._post_backward_hook))
        replace(runtime, "_get_reduce_scatter_tensors", _naming_copy(streams, runtime._get_reduce_scatter_tensors))
        yield


def _with_streams(streams: Streams) -> Callable[..., Any]:
    def init_device_handle(state: Any, *_: object) -> Any:
        state._device_handle = streams
        return state

    return init_device_handle


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


def _naming_parts(streams: Streams, make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def init_flat_param_attributes(self: Any) -> None:
        make(self)
        parameter = self.flat_param
        for name, kind in (
            ("_full_param_padded", GATHERED),
            ("_full_prec_full_param_padded", GATHERED),
            ("_mp_shard", COMMUNICATION),
        ):
            if (tensor := getattr(parameter, name, None)) is not None:
                streams.name([tensor], kind)

    return init_flat_param_attributes


def _naming_scalar(streams: Streams, clip: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(clip)
    def clip_grad_norm_(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        norm = clip(self, *args, **kwargs)
        streams.name([self._zero_scalar], "buffer")  # which is kept, and which no operator makes
        return norm

    return clip_grad_norm_


def _naming_gradient(streams: Streams, reduce: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(reduce)
    def post_backward_hook(state: Any, handle: Any, *args: Any) -> None:
        if (gradient := handle.flat_param.grad) is not None:
            streams.name([gradient], UNREDUCED)
        del gradient
        reduce(state, handle, *args)

    return post_backward_hook


def _naming_copy(streams: Streams, make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def get_reduce_scatter_tensors(state: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        padded, part = make(state, gradient)
        streams.name([padded], COMMUNICATION)
        return padded, part

    return get_reduce_scatter_tensors
