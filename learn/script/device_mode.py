"""Makes meta tensors pass for CUDA tensors: device arguments that name a GPU become meta, and meta says it is cuda:0.

Start reading at `PretendCuda.__torch_function__`. Code of `featurize` and `learn.script` sees the devices as they are.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device
from torch.utils import checkpoint

from conf.cli.own_packages import ROOT
from featurize.operators.replacing import replace_attribute, stands_for

CUDA = torch.device("cuda", 0)
_META = torch.device("meta")
# Not by modules' names: a script may have packages that are called as ours.
_OWN = tuple(str(ROOT / folder) + os.sep for folder in ("featurize", "learn"))

_TYPE_NAMES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}


def names_cuda(device: object) -> bool:
    """Return whether a device argument names a GPU: `cuda`, `cuda:1` or a device of that type."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))


class PretendCuda(TorchFunctionMode):
    """While entered, tensors made for or moved to a GPU lie on meta and report `cuda:0`."""

    def __torch_function__(self, func: Callable, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
        kwargs = kwargs or {}
        try:
            special = _SPECIAL.get(func)
        except TypeError:  # not hashable
            special = None
        if special is not None:
            return special(func, args, kwargs)
        return func(*_on_meta(args), **_without_cuda(kwargs))


def on_the_gpu(value: Any) -> Any:
    """Return a tensor on the GPU, anything else as it is."""
    return value.to(CUDA) if isinstance(value, Tensor) else value


def _on_meta(args: Sequence) -> Sequence:
    if any(type(value) is torch.device or type(value) is str for value in args):
        return tuple(_META if names_cuda(value) else value for value in args)
    return args


def _without_cuda(kwargs: Mapping) -> Mapping:
    """Return the keyword arguments for meta: no pinned memory, no generator of a GPU."""
    if not kwargs:
        return kwargs
    kwargs = dict(kwargs)
    device = kwargs.get("device")
    if names_cuda(device) or type(device) is int:
        kwargs["device"] = _META
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    if kwargs.get("generator") is not None and str(kwargs.get("device")) == "meta":
        kwargs["generator"] = None
    return kwargs


def _asked_by_own_code() -> bool:
    """Return whether the frame that reads a property is of this project: the handler is called from C++."""
    return sys._getframe(3).f_code.co_filename.startswith(_OWN)


def _make_device(func: Callable, args: Sequence, kwargs: Mapping) -> torch.device:
    """Make a device; a bare index is a GPU."""
    return torch.device("cuda", args[0]) if len(args) == 1 and type(args[0]) is int else func(*args, **kwargs)


def _device(func: Callable, args: Sequence, kwargs: Mapping) -> torch.device:
    device = func(*args)
    return CUDA if device.type == "meta" and not _asked_by_own_code() else device


def _is_cuda(func: Callable, args: Sequence, kwargs: Mapping) -> bool:
    return func(*args) if _asked_by_own_code() else args[0].is_meta


def _is_meta(func: Callable, args: Sequence, kwargs: Mapping) -> bool:
    return func(*args) and _asked_by_own_code()


def _data_ptr(func: Callable, args: Sequence, kwargs: Mapping) -> int:
    """Return an address by which libraries know tensors that share memory; that of meta tensors is 0."""
    tensor = args[0]
    if not tensor.is_meta:
        return func(*args)
    return _storage_ptr(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()


def _storage_ptr(storage: torch.UntypedStorage) -> int:
    return storage._cdata if storage.device.type == "meta" and storage.nbytes() else _POINTER_OF_STORAGE(storage)


def _cuda(func: Callable, args: Sequence, kwargs: Mapping) -> Tensor:
    return args[0].to(_META, memory_format=kwargs.get("memory_format") or torch.preserve_format)


def _to(func: Callable, args: Sequence, kwargs: Mapping) -> Tensor:
    # A bare index is a GPU; `to(other)` with a tensor needs nothing.
    tensor, *rest = args
    if rest and type(rest[0]) is int:
        rest[0] = _META
    return func(tensor, *_on_meta(rest), **_without_cuda(kwargs))


def _from_values(func: Callable, args: Sequence, kwargs: Mapping) -> Tensor:
    """Make a tensor on the host and copy it, so that the values of small integers stay known."""
    device = kwargs.get("device")
    is_tensor = bool(args) and isinstance(args[0], Tensor)
    if device is None and not is_tensor:
        device = default_device.CURRENT_DEVICE
    if device is None or not (names_cuda(device) or type(device) is int or torch.device(device).type == "meta"):
        return func(*args, **_without_cuda(kwargs))
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "requires_grad", "pin_memory")}
    made = func(*args, **rest, **({} if is_tensor else {"device": "cpu"})).to(_META)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _tolist(func: Callable, args: Sequence, kwargs: Mapping) -> Any:
    return func(args[0].detach().cpu() if args[0].is_meta else args[0])


def _format(func: Callable, args: Sequence, kwargs: Mapping) -> str:
    tensor, *rest = args
    return format(tensor.item(), *rest) if tensor.is_meta and tensor.dim() == 0 else func(*args, **kwargs)


def _repr(func: Callable, args: Sequence, kwargs: Mapping) -> str:
    tensor = args[0]
    if not tensor.is_meta:
        return func(*args, **kwargs)
    value = tensor.item() if tensor.dim() == 0 else "..."
    return f"tensor({value}, size={tuple(tensor.shape)}, device='cuda:0', dtype={tensor.dtype})"


def _type(func: Callable, args: Sequence, kwargs: Mapping) -> Any:
    tensor, *wanted = args
    if not wanted and not kwargs:
        return f"torch.cuda.{_TYPE_NAMES.get(tensor.dtype, 'Float')}Tensor" if tensor.is_meta else func(tensor)
    if wanted and isinstance(wanted[0], str) and wanted[0].startswith("torch.cuda."):
        name = wanted[0].removeprefix("torch.cuda.").removesuffix("Tensor")
        dtype = next((dtype for dtype, known in _TYPE_NAMES.items() if known == name), torch.float32)
        return tensor.to(_META, dtype)
    return func(*args, **kwargs)


def _set_data(func: Callable, args: Sequence, kwargs: Mapping) -> None:
    """Run `p.data = p.data.cuda()`: set_data refuses another kind of tensor, which CUDA's is not."""
    tensor, new = args
    if tensor.is_meta == new.is_meta:
        func(tensor, new)
        return
    replacement = new.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        replacement = torch.nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, replacement)


def enter_everywhere(unless: Callable[[], bool]) -> None:
    """Enter the mode around autograd's engine: it is left when `backward` is called, and forward passes that are
    recomputed, hooks and custom functions run inside the engine. Take a bare index for a GPU where no mode is asked.
    `unless` says whether a compiler runs the engine on tensors of its own, which a mode would confuse."""

    @stands_for("_engine_run_backward", torch.autograd)
    def run_inside(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack() or unless():
            return engine(*args, **kwargs)
        with PretendCuda():
            return engine(*args, **kwargs)

    @stands_for("_parse_to", torch._C._nn)
    def parse_to(parse: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # of `module.to(0)`
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return parse(*args, **kwargs)

    replace_attribute(torch.UntypedStorage, "data_ptr", _storage_ptr)
    # A checkpoint compares devices that it read below the mode, in the forward pass, and inside it.
    checks = getattr(checkpoint, "_allowed_determinism_checks_to_fns", {})
    if "default" in checks:
        checks["default"] = lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}


# The properties themselves, as descriptors.
_DEVICE, _IS_CUDA, _IS_META, _DATA = (
    inspect.getattr_static(Tensor, name) for name in ("device", "is_cuda", "is_meta", "data")
)
_POINTER_OF_STORAGE = torch.UntypedStorage.data_ptr
_SPECIAL: dict[Callable, Callable] = {
    torch.device: _make_device,
    _DEVICE.__get__: _device,
    _IS_CUDA.__get__: _is_cuda,
    _IS_META.__get__: _is_meta,
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), _from_values),
    Tensor.get_device: lambda func, args, kwargs: 0 if args[0].is_meta else func(*args),
    Tensor.data_ptr: _data_ptr,
    Tensor.cuda: _cuda,
    Tensor.to: _to,
    Tensor.pin_memory: lambda func, args, kwargs: args[0],
    Tensor.is_pinned: lambda func, args, kwargs: False,
    Tensor.tolist: _tolist,
    Tensor.__format__: _format,
    Tensor.__repr__: _repr,
    Tensor.type: _type,
    _DATA.__set__: _set_data,
}
