"""torch.cuda as on a machine with one GPU of the model asked for: its properties, streams, events, memory statistics.

Start reading at `install`. What it replaces belongs to the process that runs the script, and stays replaced there.
"""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _device as default_device
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map

from conf.units import MIB
from featurize.device_spec import DeviceSpec
from featurize.replacing import replace_attribute
from learn.script.device_mode import CUDA, names_cuda
from learn.script.script_recorder import ScriptRecorder


class _Build(NamedTuple):
    """What a build of PyTorch says of itself and of its libraries; MIOpen and RCCL answer in cuDNN's and NCCL's
    place."""

    cuda: str | None
    hip: str | None
    cudnn: int
    nccl: tuple[int, int, int]
    arch_name: str  # gcnArchName
    compiled_for: str
    bf16: bool
    tf32: bool


def _build_of(spec: DeviceSpec) -> _Build:
    """Return the build for a GPU model. Of the MI200 and MI300 series, PyTorch reports a name with two features."""
    if spec.llvm_target is not None:
        tf32 = spec.peak_tflops.tf32 is not None
        name = f"{spec.llvm_target}:sramecc+:xnack-"
        return _Build(None, "6.4.43482", 3_04_000, (2, 22, 3), name, spec.llvm_target, True, tf32)
    major, minor = spec.architecture.torch_capability
    newer = (major, minor) >= (8, 0)
    return _Build("12.8", None, 91002, (2, 26, 2), "", f"sm_{major}{minor}", newer, newer)


# Functions of `torch._C` that libraries take directly, once they see a GPU, and what they give.
_OF_CUDA_BUILDS: dict[str, int | bool | None] = {
    "_cuda_getCurrentRawStream": 0,
    "_cuda_getDevice": 0,
    "_cuda_isInBadFork": False,
    "_cuda_synchronize": None,
    "_cuda_clearCublasWorkspaces": None,
}


class FakeStream:
    """The one stream that there is."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device, self.priority, self.cuda_stream, self.stream_id = CUDA, priority, 0, 0
        self.device_index, self.device_type = 0, 1

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None: ...


class FakeEvent:
    """An event that has happened. A millisecond lies between any two."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0


class _DeviceContext:
    """`torch.cuda.device(0)`."""

    def __init__(self, device: Any = None) -> None:
        self.idx, self.prev_idx = 0, 0

    def __enter__(self) -> _DeviceContext:
        return self

    def __exit__(self, *error: object) -> None: ...


def install(spec: DeviceSpec, recorder: ScriptRecorder, autocast: Any, *, gpus: int = 1) -> None:
    """Make this process's torch look like one with a GPU.

    Args:
        spec: The GPU model.
        recorder: Knows the bytes that are alive.
        autocast: `featurize.autocast.Autocast` of the process: knows which type is cast to.
        gpus: How many there are; the first one is used.
    """
    build, capability = _build_of(spec), spec.architecture.torch_capability
    properties = types.SimpleNamespace(
        name=spec.name,
        major=capability[0],
        minor=capability[1],
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
        gcnArchName=build.arch_name,
        uuid="GPU-00000000-0000-0000-0000-000000000000",
    )
    stream = FakeStream()
    constants: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "_is_compiled": True,
        "device_count": gpus,
        "_device_count_nvml": gpus,
        "current_device": 0,
        "get_device_name": spec.name,
        "get_device_capability": capability,
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
    }
    nothing = (
        "init", "_lazy_init", "synchronize", "set_device", "set_stream", "empty_cache", "ipc_collect", "manual_seed",
        "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "set_sync_debug_mode",
        "set_per_process_memory_fraction", "reset_accumulated_memory_stats",
        "_lazy_call", "_check_capability", "_check_cubins", "_set_rng_state_offset", "_sleep",
    )  # fmt: skip
    cuda = torch.cuda
    for name, value in constants.items():
        replace_attribute(cuda, name, _giving(value))
    for name in nothing:
        replace_attribute(cuda, name, _giving(None))
    replace_attribute(cuda, "get_rng_state", lambda device="cuda": torch.zeros(16, dtype=torch.uint8))
    for name in cuda.random.__all__:  # transformers and others call them there
        replace_attribute(cuda.random, name, getattr(cuda, name))
    replace_attribute(cuda, "_exchange_device", _giving(0))
    replace_attribute(cuda, "_maybe_exchange_device", _giving(0))
    for name, kind in (
        ("Stream", FakeStream), ("ExternalStream", FakeStream), ("Event", FakeEvent), ("device", _DeviceContext),
        ("device_of", _DeviceContext),
    ):  # fmt: skip
        replace_attribute(cuda, name, kind)
    replace_attribute(cuda, "stream", lambda stream: contextlib.nullcontext(stream))
    replace_attribute(cuda, "StreamContext", lambda stream: contextlib.nullcontext(stream))
    _install_memory(spec, recorder)
    _install_accelerator(cuda, gpus)
    _install_default_device(recorder)
    _install_dtypes(autocast)
    replace_attribute(torch.nn.DataParallel, "scatter", _to_one_device)
    # Its C++ takes torch's own streams only, and reads them before a mode is asked.
    replace_attribute(torch.Tensor, "record_stream", _giving(None))
    torch.version.cuda, torch.version.hip = build.cuda, build.hip
    replace_attribute(torch.backends.cudnn, "is_available", _giving(True))
    replace_attribute(torch.backends.cudnn, "version", _giving(build.cudnn))
    replace_attribute(torch.backends.cudnn, "is_acceptable", _giving(False))  # weights are not flattened
    replace_attribute(torch.backends.cuda, "is_built", _giving(True))
    replace_attribute(torch.cuda.nccl, "version", _giving(build.nccl))
    of_cuda_builds = {**_OF_CUDA_BUILDS, "_cuda_getDeviceCount": gpus}
    for name, value in of_cuda_builds.items():  # a CPU build of torch has none of them
        setattr(torch._C, name, _giving(value))
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        replace_attribute(torch.cuda.nvtx, name, _giving(0))


def _install_memory(spec: DeviceSpec, recorder: ScriptRecorder) -> None:
    cuda = torch.cuda
    total = int((spec.memory_mib - spec.context_mib) * MIB)

    def live(device: Any = None) -> int:
        return recorder.live_bytes

    def peak(device: Any = None) -> int:
        return recorder.peak_live_bytes

    def reset(device: Any = None) -> None:
        recorder.peak_live_bytes = recorder.live_bytes

    def statistics(device: Any = None) -> collections.OrderedDict[str, int]:
        figures: collections.OrderedDict[str, int] = collections.OrderedDict()
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
            for pool in ("all", "small_pool", "large_pool"):
                figures[f"{kind}.{pool}.current"] = live()
                figures[f"{kind}.{pool}.peak"] = peak()
                figures[f"{kind}.{pool}.allocated"] = figures[f"{kind}.{pool}.freed"] = 0
        figures["num_alloc_retries"] = figures["num_ooms"] = 0
        return figures

    for module in (cuda, cuda.memory, torch.accelerator):
        for function, names in (
            (live, ("memory_allocated", "memory_reserved", "memory_cached", "device_memory_used")),
            (peak, ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")),
            (reset, ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")),
            (statistics, ("memory_stats",)),
        ):
            for name in names:
                replace_attribute(module, name, function)
    replace_attribute(
        cuda, "mem_get_info", lambda device=None: (max(0, total - recorder.live_bytes), int(spec.memory_mib * MIB))
    )
    replace_attribute(cuda.memory, "mem_get_info", cuda.mem_get_info)
    for name in ("_record_memory_history", "_dump_snapshot"):  # of the real allocator, which takes no part
        replace_attribute(cuda.memory, name, _giving(None))
    replace_attribute(cuda.memory, "_snapshot", _giving({"segments": [], "device_traces": []}))


def _install_accelerator(cuda: Any, gpus: int) -> None:
    accelerator = torch.accelerator
    for name, value in {
        "is_available": True, "device_count": gpus, "current_accelerator": torch.device("cuda"),
        "current_device_index": 0, "current_device_idx": 0, "current_stream": cuda.current_stream(),
        "synchronize": None, "set_device_index": None, "set_device_idx": None, "set_stream": None, "empty_cache": None,
    }.items():  # fmt: skip
        replace_attribute(accelerator, name, _giving(value))
    replace_attribute(torch._C, "_get_accelerator", _giving(torch.device("cuda")))  # of meshes by default
    original = torch.Generator

    class Generator(metaclass=_InstancesOf):
        made_as = original

        def __new__(cls, device: Any = "cpu") -> Any:
            return original("cpu" if names_cuda(device) else device)

    replace_attribute(torch, "Generator", Generator)
    kernels = _foreach_utils._get_foreach_kernels_supported_devices

    def foreach_devices() -> list[str]:
        return [*kernels(), "cuda", "meta"]

    _foreach_utils._get_foreach_kernels_supported_devices = foreach_devices


def _install_default_device(recorder: ScriptRecorder) -> None:
    """What is made while the default device is a GPU lies there; what is made on meta takes nothing, until it is moved
    or emptied onto a GPU."""
    context = default_device.DeviceContext
    making, calling = context.__init__, context.__torch_function__

    def with_default(self: Any, device: Any) -> None:
        making(self, torch.device("meta") if names_cuda(device) else device)
        self.takes_nothing = not names_cuda(device) and self.device.type == "meta"

    def call(self: Any, *function: Any) -> Any:  # `with torch.device` is C++, and calls no `__enter__`
        recorder.nowhere += self.takes_nothing
        try:
            return calling(self, *function)
        finally:
            recorder.nowhere -= self.takes_nothing

    replace_attribute(context, "__init__", with_default)
    replace_attribute(context, "__torch_function__", call)


class _InstancesOf(type):
    """Instances of the class that another one stands in for are instances of that."""

    made_as: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.made_as)


def _install_dtypes(autocast: Any) -> None:
    """What asks whether autocast is on."""
    enabled, dtype_of, any_enabled = (
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
        torch._C._is_any_autocast_enabled,
    )

    def is_enabled(device_type: Any = "cuda") -> bool:
        return autocast.dtype is not None if device_type in ("cuda", "meta") else enabled(device_type)

    def dtype(device_type: str = "cuda") -> torch.dtype:
        if device_type in ("cuda", "meta"):
            return autocast.dtype or torch.float16
        return dtype_of(device_type)

    replace_attribute(torch, "is_autocast_enabled", is_enabled)
    replace_attribute(torch, "get_autocast_dtype", dtype)
    replace_attribute(torch, "get_autocast_gpu_dtype", lambda: dtype("cuda"))
    replace_attribute(torch._C, "_is_any_autocast_enabled", lambda: autocast.dtype is not None or any_enabled())


def _to_one_device(_model: Any, inputs: Any, kwargs: Any, _device_ids: Any) -> tuple[tuple[Any], tuple[Any]]:
    """What DataParallel gives its only replica."""

    def moved(value: Any) -> Any:
        return value.to(CUDA) if isinstance(value, torch.Tensor) else value

    return (tree_map(moved, inputs),), (tree_map(moved, kwargs or {}),)


def _giving(value: Any) -> Callable[..., Any]:
    def give(*args: Any, **kwargs: Any) -> Any:
        return value

    return give
