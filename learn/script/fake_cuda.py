"""torch.cuda as on a machine with one GPU of the requested model, and meta tensors that pass for CUDA tensors.

Start reading at `PretendCuda.__torch_function__`: device arguments that name a GPU become meta, and meta tensors report
cuda:0, while code of `featurize` and `learn.script` sees the real devices. `install_cuda` replaces properties,
streams, events and memory statistics, permanently, in the process that runs the script.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device, _foreach_utils, checkpoint
from torch.utils._pytree import tree_map

from conf.cli.own_packages import ROOT
from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.operators.cuda_policy import Autocast
from featurize.operators.replacing import replace_attribute, replace_in, replaced
from featurize.recording.recorder import Recorder

CUDA = torch.device("cuda", 0)
_META = torch.device("meta")
# Files, not modules' names: a script may have packages of the same names as ours.
_OWN = tuple(str(ROOT / folder) + os.sep for folder in ("featurize", "learn"))


def names_cuda(device: object) -> bool:
    """Return whether a device argument names a GPU: `cuda`, `cuda:1` or a device of that type."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))


class PretendCuda(TorchFunctionMode):
    """While entered, tensors made for or moved to a GPU lie on meta and report `cuda:0`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            special = _SPECIAL.get(func)
        except TypeError:  # not hashable
            special = None
        if special is not None:
            return special(func, args, kwargs)
        return func(*_on_meta(args), **_without_cuda(kwargs))


def on_the_gpu(value: Any) -> Any:
    """Return a tensor on the GPU, and any other value unchanged."""
    return value.to(CUDA) if isinstance(value, Tensor) else value


def _on_meta(args: Sequence[Any]) -> Sequence[Any]:
    if any(type(value) is torch.device or type(value) is str for value in args):
        return tuple(_META if names_cuda(value) else value for value in args)
    return args


def _without_cuda(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments for meta: no pinned memory, and no generator of a GPU."""
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


def _device(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    device = func(*args)
    return CUDA if device.type == "meta" and not _asked_by_own_code() else device


def _data_ptr(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return a distinct address for tensors that share memory, as libraries compare it; that of meta tensors is 0."""
    tensor = args[0]
    if not tensor.is_meta:
        return func(*args)
    return _storage_ptr(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()


def _storage_ptr(storage: torch.UntypedStorage) -> int:
    return storage._cdata if storage.device.type == "meta" and storage.nbytes() else _POINTER_OF_STORAGE(storage)


def _to(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    # A bare index is a GPU; `to(other)` with a tensor needs no change.
    tensor, *arguments = args
    if arguments and type(arguments[0]) is int:
        arguments[0] = _META
    return func(tensor, *_on_meta(arguments), **_without_cuda(kwargs))


def _from_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Make a tensor on the host and copy it, so that values of small integer tensors stay known."""
    device = kwargs.get("device")
    is_tensor = bool(args) and isinstance(args[0], Tensor)
    if device is None and not is_tensor:
        device = default_device.CURRENT_DEVICE
    if device is None or not (names_cuda(device) or type(device) is int or torch.device(device).type == "meta"):
        return func(*args, **_without_cuda(kwargs))
    options = {key: value for key, value in kwargs.items() if key not in ("device", "requires_grad", "pin_memory")}
    tensor_on_meta = func(*args, **options, **({} if is_tensor else {"device": "cpu"})).to(_META)
    return tensor_on_meta.requires_grad_() if kwargs.get("requires_grad") else tensor_on_meta


def _format(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    tensor, *arguments = args
    return format(tensor.item(), *arguments) if tensor.is_meta and tensor.dim() == 0 else func(*args, **kwargs)


def _repr(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    tensor = args[0]
    if not tensor.is_meta:
        return func(*args, **kwargs)
    value = tensor.item() if tensor.dim() == 0 else "..."
    return f"tensor({value}, size={tuple(tensor.shape)}, device='cuda:0', dtype={tensor.dtype})"


def _type(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensor, *wanted = args
    if not wanted and not kwargs:
        on_host: str = func(torch.empty(0, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor)
        return on_host.replace("torch.", "torch.cuda.") if tensor.is_meta else on_host
    if wanted and isinstance(wanted[0], str) and wanted[0].startswith("torch.cuda."):
        kind = getattr(torch, wanted[0].removeprefix("torch.cuda."), torch.FloatTensor)
        return tensor.to(_META, kind.dtype)
    return func(*args, **kwargs)


def _set_data(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run `p.data = p.data.cuda()`: set_data refuses a tensor of another type, although CUDA tensors are allowed."""
    tensor, new = args
    if tensor.is_meta == new.is_meta:
        func(tensor, new)
        return
    replacement = new.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        replacement = torch.nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, replacement)


def enter_everywhere(unless: Callable[[], bool]) -> None:
    """Enter the mode inside autograd's engine: it is left when `backward` is called, and recomputed forward passes,
    hooks and custom functions run inside the engine. Treat a bare index as a GPU where no mode intervenes. `unless`
    returns whether a compiler runs the engine on its own tensors, which a mode would confuse."""

    @replace_in("_engine_run_backward", torch.autograd)
    def run_inside(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack() or unless():
            return engine(*args, **kwargs)
        with PretendCuda():
            return engine(*args, **kwargs)

    @replace_in("_parse_to", torch._C._nn)
    def parse_to(parse: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # called by `module.to(0)`
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return parse(*args, **kwargs)

    replace_attribute(torch.UntypedStorage, "data_ptr", _storage_ptr)
    # A checkpoint compares devices that it read below the mode, in the forward pass, with those inside the mode.
    checks = getattr(checkpoint, "_allowed_determinism_checks_to_fns", {})
    if "default" in checks:
        checks["default"] = lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}


# Getters of the properties, as descriptors.
_DEVICE, _IS_CUDA, _IS_META, _DATA = (
    inspect.getattr_static(Tensor, name) for name in ("device", "is_cuda", "is_meta", "data")
)
_POINTER_OF_STORAGE = torch.UntypedStorage.data_ptr
_SPECIAL: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.device: lambda func, args, kwargs: (  # a bare index is a GPU
        torch.device("cuda", args[0]) if len(args) == 1 and type(args[0]) is int else func(*args, **kwargs)
    ),
    _DEVICE.__get__: _device,
    _IS_CUDA.__get__: lambda func, args, kwargs: func(*args) if _asked_by_own_code() else args[0].is_meta,
    _IS_META.__get__: lambda func, args, kwargs: func(*args) and _asked_by_own_code(),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), _from_values),
    Tensor.get_device: lambda func, args, kwargs: 0 if args[0].is_meta else func(*args),
    Tensor.data_ptr: _data_ptr,
    Tensor.cuda: lambda func, args, kwargs: args[0].to(
        _META, memory_format=kwargs.get("memory_format") or torch.preserve_format
    ),
    Tensor.to: _to,
    Tensor.pin_memory: lambda func, args, kwargs: args[0],
    Tensor.is_pinned: lambda func, args, kwargs: False,
    Tensor.tolist: lambda func, args, kwargs: func(args[0].detach().cpu() if args[0].is_meta else args[0]),
    Tensor.__format__: _format,
    Tensor.__repr__: _repr,
    Tensor.type: _type,
    _DATA.__set__: _set_data,
}


def giving(value: Any) -> Callable[..., Any]:
    """Return a function that returns this value for any arguments."""

    def give(*args: Any, **kwargs: Any) -> Any:
        return value

    return give


class FakeEvent:
    """An event that has already happened. Any two are a millisecond apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = giving(None)
    query = giving(True)
    elapsed_time = giving(1.0)


class FakeStream(contextlib.nullcontext[Any]):
    """The only stream."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        super().__init__(self)
        self.device, self.priority, self.cuda_stream, self.stream_id = CUDA, priority, 0, 0
        self.device_index, self.device_type = 0, 1

    wait_stream = wait_event = synchronize = giving(None)
    query = giving(True)
    is_capturing = giving(False)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()


class _DeviceContext(contextlib.nullcontext[Any]):
    """`torch.cuda.device(0)`."""

    def __init__(self, device: Any = None) -> None:
        super().__init__(self)
        self.idx, self.prev_idx = 0, 0


# Classes and functions of torch.cuda -> their replacements.
_KINDS: dict[str, Callable[..., Any]] = {
    "Stream ExternalStream": FakeStream,
    "Event": FakeEvent,
    "device device_of": _DeviceContext,
    "stream StreamContext": contextlib.nullcontext,
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
}


def install_cuda(spec: DeviceSpec, recorder: Recorder, autocast: Autocast, *, gpus: int = 1) -> None:
    """Make this process's torch report GPUs of a model, of which only the first one is used. The recorder knows the
    live bytes, the casts know the type to cast to."""
    cuda, accelerator = torch.cuda, torch.accelerator
    build, properties, device, stream = _build_of(spec), _properties_of(spec), torch.device("cuda"), FakeStream()
    torch.version.cuda, torch.version.hip = build.cuda, build.hip
    # Attributes that libraries use directly once they see a GPU; a CPU build lacks them.
    for names, value in {
        "_cuda_synchronize _cuda_clearCublasWorkspaces": None,
        "_cuda_getCurrentRawStream _cuda_getDevice": 0,
        "_cuda_isInBadFork": False,
        "_cuda_getDeviceCount": gpus,
    }.items():
        for name in names.split():
            setattr(torch._C, name, giving(value))
    constants: dict[Any, dict[str, Any]] = {  # names of functions -> their result
        cuda: {
            "init _lazy_init synchronize set_device set_stream empty_cache ipc_collect manual_seed manual_seed_all "
            "seed seed_all set_rng_state set_rng_state_all set_sync_debug_mode set_per_process_memory_fraction "
            "reset_accumulated_memory_stats _lazy_call _check_capability _check_cubins _set_rng_state_offset "
            "_sleep": None,
            "is_available is_initialized _is_compiled": True,
            "_is_in_bad_fork can_device_access_peer is_current_stream_capturing": False,
            "device_count _device_count_nvml": gpus,
            "current_device get_sync_debug_mode initial_seed _exchange_device _maybe_exchange_device utilization": 0,
            "get_device_name": spec.name,
            "get_device_capability": spec.architecture.torch_capability,
            "get_device_properties _get_device_properties": properties,
            "get_arch_list": [build.compiled_for],
            "is_bf16_supported": build.bf16,
            "is_tf32_supported": build.tf32,
            "current_stream default_stream": stream,
            "temperature": 40,
            "power_draw": int(spec.idle_power_w * 1000),
            "clock_rate": 1410,
            "get_allocator_backend": "native",
            "memory_summary": "",
            "memory_snapshot": [],
            "get_rng_state_all": [],
        },
        # Functions of the real allocator, which is not used.
        cuda.memory: {
            "_record_memory_history _dump_snapshot": None,
            "_snapshot": {"segments": [], "device_traces": []},
        },
        cuda.nvtx: {"range_push range_pop mark range_start range_end": 0},
        cuda.nccl: {"version": build.nccl},
        accelerator: {
            "synchronize set_device_index set_device_idx set_stream empty_cache": None,
            "is_available": True,
            "device_count": gpus,
            "current_accelerator": device,
            "current_device_index current_device_idx": 0,
            "current_stream": stream,
        },
        # Weights of recurrent layers are not flattened.
        torch.backends.cudnn: {"is_available": True, "version": build.cudnn, "is_acceptable": False},
        torch.backends.cuda: {"is_built": True},
        torch._C: {"_get_accelerator": device},  # the default device of meshes
        torch.Tensor: {"record_stream": None},  # its C++ code checks for torch's own streams before any mode sees it
    }
    memory = _memory_functions(spec, recorder)
    for owner, results in constants.items():
        for names, value in results.items():
            for name in names.split():  # a function each: PyTorch's compiler refuses one that has several names
                replace_attribute(owner, name, giving(value))
    for owner, functions in (
        (cuda, memory),
        (cuda.memory, memory),
        (accelerator, memory),
        (cuda, _KINDS),
        (torch.nn.DataParallel, {"scatter": _to_one_device}),
    ):
        for names, function in functions.items():
            for name in names.split():
                replace_attribute(owner, name, function)
    for name in cuda.random.__all__:  # transformers and others call them through this module
        replace_attribute(cuda.random, name, getattr(cuda, name))
    replace_in("_get_foreach_kernels_supported_devices", _foreach_utils)(lambda kernels: [*kernels(), "cuda", "meta"])
    _install_generator()
    _install_default_device(recorder)
    _install_dtypes(autocast)


def _build_of(spec: DeviceSpec) -> types.SimpleNamespace:
    """Return the versions that a build of PyTorch reports of itself and its libraries. On AMD, MIOpen and RCCL are
    reported as cuDNN and NCCL. For the MI200 and MI300 series, PyTorch reports an architecture name with two
    features."""
    if spec.llvm_target is not None:
        return types.SimpleNamespace(
            cuda=None,
            hip="6.4.43482",
            cudnn=3_04_000,
            nccl=(2, 22, 3),
            compiled_for=spec.llvm_target,
            arch_name=f"{spec.llvm_target}:sramecc+:xnack-",
            bf16=True,
            tf32=spec.peak_tflops.tf32 is not None,
        )
    major, minor = spec.architecture.torch_capability
    is_newer = (major, minor) >= (8, 0)
    return types.SimpleNamespace(
        cuda="12.8",
        hip=None,
        cudnn=91002,
        nccl=(2, 26, 2),
        compiled_for=f"sm_{major}{minor}",
        arch_name="",
        bf16=is_newer,
        tf32=is_newer,
    )


def _properties_of(spec: DeviceSpec) -> types.SimpleNamespace:
    major, minor = spec.architecture.torch_capability
    return types.SimpleNamespace(
        name=spec.name,
        major=major,
        minor=minor,
        total_memory=int(spec.memory_mib * MIB),
        multi_processor_count=spec.sm_count,
        max_threads_per_multi_processor=spec.threads_per_sm,
        warp_size=spec.architecture.warp_size,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=101376,
        shared_memory_per_multiprocessor=102400,
        L2_cache_size=int(spec.l2_mib * MIB),
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName=_build_of(spec).arch_name,
        uuid="GPU-00000000-0000-0000-0000-000000000000",
    )


def _memory_functions(spec: DeviceSpec, recorder: Recorder) -> dict[str, Callable[..., Any]]:
    total, usable = int(spec.memory_mib * MIB), int((spec.memory_mib - spec.context_mib) * MIB)

    def live(device: Any = None) -> int:
        return recorder.memory.live_bytes

    def peak(device: Any = None) -> int:
        return recorder.memory.peak_live_bytes

    def reset(device: Any = None) -> None:
        recorder.memory.peak_live_bytes = recorder.memory.live_bytes

    def statistics(device: Any = None) -> OrderedDict[str, int]:
        figures = OrderedDict(num_alloc_retries=0, num_ooms=0)
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
            for pool in ("all", "small_pool", "large_pool"):
                now = {"current": live(), "peak": peak(), "allocated": 0, "freed": 0}
                figures.update({f"{kind}.{pool}.{name}": value for name, value in now.items()})
        return figures

    return {
        "memory_allocated memory_reserved memory_cached device_memory_used": live,
        "max_memory_allocated max_memory_reserved max_memory_cached": peak,
        "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached": reset,
        "memory_stats": statistics,
        "mem_get_info": lambda device=None: (max(0, usable - recorder.memory.live_bytes), total),
    }


def _install_generator() -> None:
    original = torch.Generator

    def make(_cls: type, device: Any = "cpu") -> Any:
        return original("cpu" if names_cuda(device) else device)

    generator = abc.ABCMeta("Generator", (), {"__new__": make})
    generator.register(original)  # original generators are instances of the replacement
    replace_attribute(torch, "Generator", generator)


def _install_default_device(recorder: Recorder) -> None:
    """Put tensors on the GPU that are made while it is the default device. Tensors made on meta take no memory until
    they are moved or emptied onto a GPU."""

    @replace_in("__init__", default_device.DeviceContext)
    def with_default(make: Callable[..., None], self: Any, device: Any) -> None:
        make(self, torch.device("meta") if names_cuda(device) else device)
        self.takes_nothing = not names_cuda(device) and self.device.type == "meta"

    # `with torch.device` is implemented in C++, and does not call `__enter__`.
    @replace_in("__torch_function__", default_device.DeviceContext)
    def call(calling: Callable[..., Any], self: Any, *function: Any) -> Any:
        with replaced(recorder.memory, "nowhere", recorder.memory.nowhere + self.takes_nothing):
            return calling(self, *function)


def _install_dtypes(autocast: Autocast) -> None:
    """Answer queries of autocast's state for the GPU."""

    @replace_in("is_autocast_enabled", torch)
    @replace_in("get_autocast_dtype", torch)
    def ask_about_meta(ask: Callable[..., Any], device_type: Any = "cuda") -> Any:
        return ask("meta" if device_type == "cuda" else device_type)

    @replace_in("_is_any_autocast_enabled", torch._C)
    def is_any_enabled(any_enabled: Callable[..., bool]) -> bool:
        return autocast.dtype is not None or any_enabled()


def _to_one_device(_model: Any, inputs: Any, kwargs: Any, _device_ids: Any) -> tuple[tuple[Any], tuple[Any]]:
    """Return the arguments that DataParallel passes to its only replica."""
    return (tree_map(on_the_gpu, inputs),), (tree_map(on_the_gpu, kwargs or {}),)
