"""torch.cuda as on a machine with one GPU of the model asked for: its properties, streams, events, memory statistics.

Start reading at `install_cuda`. What it replaces belongs to the process that runs the script, and stays replaced there.
"""

from __future__ import annotations

import abc
import contextlib
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device as default_device
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.operators.replacing import replace_attribute, stands_for
from learn.script.device_mode import CUDA, names_cuda, on_the_gpu
from learn.script.script_recorder import ScriptRecorder

# Functions of torch.cuda that do nothing.
_NOTHING = (
    "init",
    "_lazy_init",
    "synchronize",
    "set_device",
    "set_stream",
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
    "set_sync_debug_mode",
    "set_per_process_memory_fraction",
    "reset_accumulated_memory_stats",
    "_lazy_call",
    "_check_capability",
    "_check_cubins",
    "_set_rng_state_offset",
    "_sleep",
)
# Functions of `torch._C` that libraries take directly, once they see a GPU, and what they give. A CPU build has none.
_OF_CUDA_BUILDS = {
    "_cuda_getCurrentRawStream": 0,
    "_cuda_getDevice": 0,
    "_cuda_isInBadFork": False,
    "_cuda_synchronize": None,
    "_cuda_clearCublasWorkspaces": None,
}


def giving(value: Any) -> Callable[..., Any]:
    """Return a function that returns this value, whatever it is called with."""

    def give(*args: Any, **kwargs: Any) -> Any:
        return value

    return give


class FakeEvent:
    """An event that has happened. A millisecond lies between any two."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = giving(None)
    query = giving(True)
    elapsed_time = giving(1.0)


class FakeStream(contextlib.nullcontext):
    """The one stream that there is."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        super().__init__(self)
        self.device, self.priority, self.cuda_stream, self.stream_id = CUDA, priority, 0, 0
        self.device_index, self.device_type = 0, 1

    wait_stream = wait_event = synchronize = giving(None)
    query = giving(True)
    is_capturing = giving(False)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()


class _DeviceContext(contextlib.nullcontext):
    """`torch.cuda.device(0)`."""

    def __init__(self, device: Any = None) -> None:
        super().__init__(self)
        self.idx, self.prev_idx = 0, 0


# Classes and functions of torch.cuda that something else stands for.
_KINDS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("Stream", "ExternalStream"), FakeStream),
    "Event": FakeEvent,
    **dict.fromkeys(("device", "device_of"), _DeviceContext),
    **dict.fromkeys(("stream", "StreamContext"), contextlib.nullcontext),
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
}


def install_cuda(spec: DeviceSpec, recorder: ScriptRecorder, autocast: Any, *, gpus: int = 1) -> None:
    """Make this process's torch look like one with a GPU.

    Args:
        spec: The GPU model.
        recorder: Knows the bytes that are alive.
        autocast: `featurize.operators.autocast.Autocast` of the process: knows which type is cast to.
        gpus: How many there are; the first one is used.
    """
    cuda, accelerator = torch.cuda, torch.accelerator
    build, properties, device, stream = _build_of(spec), _properties_of(spec), torch.device("cuda"), FakeStream()
    torch.version.cuda, torch.version.hip = build.cuda, build.hip
    for name, value in {**_OF_CUDA_BUILDS, "_cuda_getDeviceCount": gpus}.items():
        setattr(torch._C, name, giving(value))
    constants: dict[Any, dict[str, Any]] = {
        cuda: {
            **dict.fromkeys(_NOTHING),
            "is_available": True,
            "is_initialized": True,
            "_is_in_bad_fork": False,
            "_is_compiled": True,
            "device_count": gpus,
            "_device_count_nvml": gpus,
            "current_device": 0,
            "get_device_name": spec.name,
            "get_device_capability": spec.architecture.torch_capability,
            "get_device_properties": properties,
            "_get_device_properties": properties,
            "get_arch_list": [build.compiled_for],
            "is_bf16_supported": build.bf16,
            "is_tf32_supported": build.tf32,
            "current_stream": stream,
            "default_stream": stream,
            "can_device_access_peer": False,
            "utilization": 0,
            "temperature": 40,
            "power_draw": int(spec.idle_power_w * 1000),
            "clock_rate": 1410,
            "get_allocator_backend": "native",
            "get_sync_debug_mode": 0,
            "initial_seed": 0,
            "is_current_stream_capturing": False,
            "memory_summary": "",
            "memory_snapshot": [],
            "get_rng_state_all": [],
            "_exchange_device": 0,
            "_maybe_exchange_device": 0,
        },
        # Of the real allocator, which takes no part.
        cuda.memory: {
            "_record_memory_history": None,
            "_dump_snapshot": None,
            "_snapshot": {"segments": [], "device_traces": []},
        },
        cuda.nvtx: dict.fromkeys(("range_push", "range_pop", "mark", "range_start", "range_end"), 0),
        cuda.nccl: {"version": build.nccl},
        accelerator: {
            "is_available": True,
            "device_count": gpus,
            "current_accelerator": device,
            "current_device_index": 0,
            "current_device_idx": 0,
            "current_stream": stream,
            "synchronize": None,
            "set_device_index": None,
            "set_device_idx": None,
            "set_stream": None,
            "empty_cache": None,
        },
        # Weights of recurrent layers are not flattened.
        torch.backends.cudnn: {"is_available": True, "version": build.cudnn, "is_acceptable": False},
        torch.backends.cuda: {"is_built": True},
        torch._C: {"_get_accelerator": device},  # of meshes by default
        torch.Tensor: {"record_stream": None},  # its C++ takes torch's own streams, before a mode is asked
    }
    memory = _memory_functions(spec, recorder)
    for owner, functions in (
        *((owner, {name: giving(value) for name, value in values.items()}) for owner, values in constants.items()),
        (cuda, memory),
        (cuda.memory, memory),
        (accelerator, memory),
        (cuda, _KINDS),
        (torch.nn.DataParallel, {"scatter": _to_one_device}),
    ):
        for name, function in functions.items():
            replace_attribute(owner, name, function)
    for name in cuda.random.__all__:  # transformers and others call them there
        replace_attribute(cuda.random, name, getattr(cuda, name))
    stands_for("_get_foreach_kernels_supported_devices", _foreach_utils)(lambda kernels: [*kernels(), "cuda", "meta"])
    _install_generator()
    _install_default_device(recorder)
    _install_dtypes(autocast)


def _build_of(spec: DeviceSpec) -> types.SimpleNamespace:
    """Return what a build of PyTorch says of itself and of its libraries. For AMD, MIOpen and RCCL answer in cuDNN's
    and NCCL's place. Of the MI200 and MI300 series, PyTorch reports a name with two features."""
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


def _memory_functions(spec: DeviceSpec, recorder: ScriptRecorder) -> dict[str, Callable[..., Any]]:
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
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached", "device_memory_used"), live),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), peak),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), reset),
        "memory_stats": statistics,
        "mem_get_info": lambda device=None: (max(0, usable - recorder.memory.live_bytes), total),
    }


def _install_generator() -> None:
    original = torch.Generator

    def make(_cls: type, device: Any = "cpu") -> Any:
        return original("cpu" if names_cuda(device) else device)

    generator = abc.ABCMeta("Generator", (), {"__new__": make})
    generator.register(original)  # those are instances of it
    replace_attribute(torch, "Generator", generator)


def _install_default_device(recorder: ScriptRecorder) -> None:
    """Put what is made while the default device is a GPU there. What is made on meta takes nothing, until it is moved
    or emptied onto a GPU."""

    @stands_for("__init__", default_device.DeviceContext)
    def with_default(make: Callable[..., None], self: Any, device: Any) -> None:
        make(self, torch.device("meta") if names_cuda(device) else device)
        self.takes_nothing = not names_cuda(device) and self.device.type == "meta"

    # `with torch.device` is C++, and calls no `__enter__`.
    @stands_for("__torch_function__", default_device.DeviceContext)
    def call(calling: Callable[..., Any], self: Any, *function: Any) -> Any:
        recorder.memory.nowhere += self.takes_nothing
        try:
            return calling(self, *function)
        finally:
            recorder.memory.nowhere -= self.takes_nothing


def _install_dtypes(autocast: Any) -> None:
    """Answer for the GPU what asks whether autocast is on."""

    @stands_for("is_autocast_enabled", torch)
    def is_enabled(enabled: Callable[..., bool], device_type: Any = "cuda") -> bool:
        return autocast.dtype is not None if device_type in ("cuda", "meta") else enabled(device_type)

    @stands_for("get_autocast_dtype", torch)
    def dtype(dtype_of: Callable[..., torch.dtype], device_type: str = "cuda") -> torch.dtype:
        return autocast.dtype or torch.float16 if device_type in ("cuda", "meta") else dtype_of(device_type)

    @stands_for("_is_any_autocast_enabled", torch._C)
    def is_any_enabled(any_enabled: Callable[..., bool]) -> bool:
        return autocast.dtype is not None or any_enabled()

    replace_attribute(torch, "get_autocast_gpu_dtype", torch.get_autocast_dtype)


def _to_one_device(_model: Any, inputs: Any, kwargs: Any, _device_ids: Any) -> tuple[tuple[Any], tuple[Any]]:
    """Return what DataParallel gives its only replica."""
    return (tree_map(on_the_gpu, inputs),), (tree_map(on_the_gpu, kwargs or {}),)
