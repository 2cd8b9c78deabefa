"""Real NVIDIA GPUs: finds those that can be workers, and trains trials on them.

Start reading at `CudaDevice`. `discover_gpus` lists this machine's GPUs through NVML, without torch or a CUDA context;
`cuda_visible_devices` reads the user's choice.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from workers.devices import DeviceChoice, DeviceUnavailable, Link, Place, Slot, TrialSettings
from workers.telemetry.nvml import Nvml, as_text, open_nvml
from workers.telemetry.sensors import SensorUnavailable

if TYPE_CHECKING:
    import torch

    from featurize.configs.trial import TrialConfig


class CudaDevice:
    """GPUs by UUID, without display adapters; one trial at a time on each."""

    backend = "cuda"
    source = "measured"
    sampled = True
    prepares = True

    def __init__(self, choice: DeviceChoice):
        self.choice = choice

    def slots(self) -> tuple[Slot, ...]:
        """Return the usable GPUs, at most `count`. Raises `DeviceUnavailable` without driver, GPU or CUDA build."""
        discovery = discover_gpus()
        usable = discovery.usable[: self.choice.count]
        if not usable:
            raise DeviceUnavailable(discovery.reason or "")
        if torch_cuda_build() is None:
            raise DeviceUnavailable("the installed torch is a CPU build; the README says how to get the CUDA build")
        return tuple(
            Slot(
                index=index,
                device_name=gpu.name,
                device_uuid=gpu.uuid,
                device_memory_mib=gpu.memory_mib,
                driver_version=discovery.driver_version,
                memory_fraction=self.choice.memory_fraction,
                mig_profile=gpu.mig_profile,
                mps=gpu.mps,
            )
            for index, gpu in enumerate(usable)
        )

    def environment(self, *slots: Slot) -> dict[str, str]:
        """Return the variables that select GPUs by UUID; NVML (PCI bus order) and CUDA (fastest first) differ."""
        uuids = ",".join(slot.device_uuid or "" for slot in slots)
        return {"CUDA_VISIBLE_DEVICES": uuids, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def measure(
        self,
        config: TrialConfig,
        slot: Slot,
        settings: TrialSettings,
        seed: int,
        link: Link,
        place: Place | None = None,
    ) -> None:
        import torch

        from workers.devices.training import measure_training

        if place is not None and slot.mig_profile is not None:
            raise UsageError(f"ranks cannot talk between MIG slices ({slot.mig_profile}); run the trial on whole GPUs")
        number = 0 if place is None else place.rank  # index among the GPUs that the trial's server was pinned to

        def open_meter() -> CudaMeter:
            torch.cuda.init()
            if place is not None:
                torch.cuda.set_device(number)
            if slot.memory_fraction is not None:
                # A share of the whole card, for the caching allocator alone: context and libraries lie outside.
                torch.cuda.set_per_process_memory_fraction(slot.memory_fraction, number)
            cudnn = torch.backends.cudnn.version()
            link.report("environment", cudnn_version=None if cudnn is None else str(cudnn))
            torch.cuda.reset_peak_memory_stats()
            torch.set_num_threads(threads)
            return CudaMeter(torch.device("cuda", number))

        threads = torch.get_num_threads()
        if link.ahead:  # one core at most: another trial is being measured
            torch.set_num_threads(1)
        measure_training(config, open_meter, settings, seed, link, place)


class CudaMeter:
    """Reads the caching allocator and waits for the stream (torch.cuda.memory_stats)."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self._cuda = torch.cuda

    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)

    def memory(self) -> dict[str, float]:
        """Return allocated_mib and reserved_mib, and their peaks since the process started."""
        stats = self._cuda.memory_stats_as_nested_dict(self.device)  # `memory_stats` would flatten and sort all of it
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return {
            "allocated_mib": allocated["current"] / 2**20,
            "reserved_mib": reserved["current"] / 2**20,
            "peak_allocated_mib": allocated["peak"] / 2**20,
            "peak_reserved_mib": reserved["peak"] / 2**20,
        }


_BYTES_PER_MIB = 1024**2
_MUCH_SMALLER = 0.25  # share of the main model's memory below which a GPU counts as a display adapter
_MPS_PIPES = "/tmp/nvidia-mps"  # CUDA's default for CUDA_MPS_PIPE_DIRECTORY
_PROFILE = re.compile(r"\bMIG\s+(\S+)")


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """One GPU, or a MIG slice of it. `index` follows NVML's PCI bus order; `excluded_reason` is None for a usable one.

    A slice has its GPU's `index`, its own `uuid` (`MIG-...`), memory and `mig_profile` (`1g.5gb`; None: a whole GPU).
    `mig` says whether the GPU is in MIG mode, `mps` whether CUDA programs reach it through a multi-process service.
    """

    index: int
    uuid: str
    name: str
    memory_mib: float | None = None
    display_active: bool | None = None
    mig: bool | None = None
    compute_capability: tuple[int, int] | None = None
    mig_profile: str | None = None
    mps: bool = False
    prohibited: bool = False  # by the compute mode
    excluded_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """GPUs that NVML lists. `reason` explains why none is usable; None if one is."""

    gpus: tuple[GpuInfo, ...] = ()
    driver_version: str | None = None
    reason: str | None = None

    @property
    def usable(self) -> tuple[GpuInfo, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.excluded_reason is None)


def discover_gpus(nvml: Nvml | None = None, environment: Mapping[str, str] | None = None) -> Discovery:
    """Return every GPU of this machine and its MIG slices, each with the reason if it cannot be a worker.

    Never raises for missing hardware. It excludes GPUs that

    - CUDA_VISIBLE_DEVICES leaves out;
    - drive a display, unless CUDA_VISIBLE_DEVICES names their whole UUID;
    - are much smaller than the machine's main model: a DGX Station's display GPU sits between the A100s in every
      numbering;
    - are in MIG mode: slices that CUDA_VISIBLE_DEVICES names are workers instead;
    - have the compute mode `prohibited`.
    """
    environment = os.environ if environment is None else environment
    try:
        nvml = open_nvml(nvml)
    except SensorUnavailable as reason:
        return Discovery(reason=str(reason))
    try:
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
        service = _mps_service(environment)
        gpu_infos: list[GpuInfo] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = _describe(nvml, index, handle, service)
            except nvml.NVMLError as error:  # a lost GPU must not hide the others
                gpu_infos.append(GpuInfo(index=index, uuid="", name="unreadable GPU", excluded_reason=f"NVML: {error}"))
                continue
            gpu_infos += [gpu, *(_slices(nvml, gpu, handle) if gpu.mig else ())]
    except nvml.NVMLError as error:
        return Discovery(reason=f"NVML: {error}")
    finally:
        _ask(nvml, nvml.nvmlShutdown)
    main, visible = _main_model(gpu_infos), cuda_visible_devices(gpu_infos, environment)
    gpus = tuple(
        gpu if gpu.excluded_reason else replace(gpu, excluded_reason=_reason(gpu, main, visible, environment))
        for gpu in gpu_infos
    )
    return Discovery(
        gpus=gpus,
        driver_version=None if driver is None else as_text(driver),
        reason=_why_none(gpus),
    )


def torch_cuda_build() -> str | None:
    """Return the CUDA version that the installed torch was built with, from its `version.py`, without importing torch.

    None if torch is missing or built without CUDA.
    """
    text = _torch_version_text()
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE) if text else None
    return match.group(1) if match else None


def _torch_version_text() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("version.py").read_text()


def _ask(nvml: Nvml, query: Any, *arguments: Any) -> Any:
    """Return NVML's answer, or None after an error."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _describe(nvml: Nvml, index: int, handle: Any, mps_service: bool) -> GpuInfo:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    display = _ask(nvml, nvml.nvmlDeviceGetDisplayActive, handle)
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return GpuInfo(
        index=index,
        uuid=as_text(nvml.nvmlDeviceGetUUID(handle)),
        name=as_text(nvml.nvmlDeviceGetName(handle)),
        memory_mib=None if memory is None else memory.total / _BYTES_PER_MIB,
        display_active=None if display is None else bool(display),
        mig=None if mig is None else bool(mig[0]),
        compute_capability=None if capability is None else tuple(capability),
        mps=mps_service or _mps_server(nvml, handle),
        prohibited=_ask(nvml, nvml.nvmlDeviceGetComputeMode, handle) == nvml.NVML_COMPUTEMODE_PROHIBITED,
    )


def _slices(nvml: Nvml, gpu: GpuInfo, handle: Any) -> list[GpuInfo]:
    """Return the MIG slices of a GPU in MIG mode."""
    slices = []
    for place in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        uuid = None if device is None else _ask(nvml, nvml.nvmlDeviceGetUUID, device)
        if uuid is None:  # NVML finds nothing in a place without a slice
            continue
        memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, device)
        profile = _PROFILE.search(as_text(_ask(nvml, nvml.nvmlDeviceGetName, device) or ""))
        slices.append(
            replace(
                gpu,
                uuid=as_text(uuid),
                name=gpu.name if profile is None else f"{gpu.name} MIG {profile[1]}",
                memory_mib=None if memory is None else memory.total / _BYTES_PER_MIB,
                mig_profile=None if profile is None else profile[1],
                mps=gpu.mps or _mps_server(nvml, device),
            )
        )
    return slices


def _mps_service(environment: Mapping[str, str]) -> bool:
    """Return whether CUDA programs started with `environment` find a multi-process service."""
    pipes = Path(environment.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_PIPES)
    try:
        pid = int((pipes / "nvidia-cuda-mps-control.pid").read_text())
    except (OSError, ValueError):  # the pipes outlive a killed service, so check its pid
        return False
    return Path(f"/proc/{pid}").exists()


def _mps_server(nvml: Nvml, handle: Any) -> bool:
    """Return whether any user's multi-process server holds this GPU."""
    import psutil

    for process in _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
        try:
            if psutil.Process(process.pid).name().startswith("nvidia-cuda-mps"):
                return True
        except (psutil.Error, ValueError):
            continue
    return False


def _main_model(gpus: Sequence[GpuInfo]) -> tuple[str, float] | None:
    """Return (name, memory of one GPU in MiB) of the model with the most memory in total."""
    memory_mib: dict[str, list[float]] = defaultdict(list)
    for gpu in gpus:
        if gpu.memory_mib is not None and not _is_slice(gpu):
            memory_mib[gpu.name].append(gpu.memory_mib)
    if not memory_mib:
        return None
    name = max(memory_mib, key=lambda name: sum(memory_mib[name]))
    return name, max(memory_mib[name])


def _is_slice(gpu: GpuInfo) -> bool:
    return gpu.uuid.startswith("MIG-")


def _reason(
    gpu: GpuInfo,
    main: tuple[str, float] | None,
    visible: set[str] | None,
    environment: Mapping[str, str],
) -> str | None:
    if _is_slice(gpu):
        if visible is not None and gpu.uuid in visible:
            return None
        return f"a MIG slice that CUDA_VISIBLE_DEVICES does not name; CUDA_VISIBLE_DEVICES={gpu.uuid} makes it a worker"
    if main is not None and gpu.memory_mib is not None and gpu.memory_mib < _MUCH_SMALLER * main[1]:
        return f"a display adapter next to {main[0]}: {gpu.memory_mib:.0f} MiB against {main[1]:.0f}"
    if gpu.display_active and gpu.uuid not in _entries(environment):
        return f"drives a display; to use it anyway, name it: CUDA_VISIBLE_DEVICES={gpu.uuid}"
    if gpu.mig:
        return (
            f"in MIG mode: name slices in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them), or turn it off with "
            f"nvidia-smi -i {gpu.index} -mig 0"
        )
    if gpu.prohibited:
        return f"its compute mode is prohibited; nvidia-smi -i {gpu.index} -c DEFAULT allows computing"
    if visible is not None and gpu.uuid not in visible:
        return "left out by CUDA_VISIBLE_DEVICES"
    return None


def _entries(environment: Mapping[str, str]) -> list[str]:
    return [part.strip() for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]


def cuda_visible_devices(gpus: Sequence[GpuInfo], environment: Mapping[str, str]) -> set[str] | None:
    """Return the UUIDs that CUDA_VISIBLE_DEVICES selects; None if it is not set.

    Follows CUDA's rules: entries are indices or prefixes of UUIDs of GPUs or MIG slices, and the first invalid entry
    ends the list. CUDA numbers the fastest GPU first unless CUDA_DEVICE_ORDER=PCI_BUS_ID; NVML numbers by PCI bus.
    Compute capability and memory decide which GPU is fastest. That is enough to tell a display adapter from compute
    GPUs.
    """
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return None
    numbered = [gpu for gpu in gpus if not _is_slice(gpu)]
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        numbered.sort(key=lambda gpu: (gpu.compute_capability or (0, 0), gpu.memory_mib or 0), reverse=True)
    visible: set[str] = set()
    for entry in _entries(environment):
        if entry.isdigit():
            named = numbered[int(entry) : int(entry) + 1]
        else:
            named = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        visible.add(named[0].uuid)
    return visible


def _why_none(gpus: tuple[GpuInfo, ...]) -> str | None:
    if not gpus:
        return "NVML sees no GPU"
    if any(gpu.excluded_reason is None for gpu in gpus):
        return None
    return "; ".join(f"GPU {gpu.index} ({gpu.name}): {gpu.excluded_reason}" for gpu in gpus)
