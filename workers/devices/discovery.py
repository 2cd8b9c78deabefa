"""Which GPUs this machine has, and which of them may be workers; through NVML, without torch and without a context.

Start reading at `discover_gpus`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.telemetry.base import SensorUnavailable
from workers.telemetry.nvml import Nvml, as_text, initialise, open_nvml

_BYTES_PER_MIB = 1024**2
_MUCH_SMALLER = 0.25  # of the main model's memory: a display adapter next to compute GPUs, not another compute GPU


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """One GPU as NVML numbers it (PCI bus order). `excluded_reason` is None for one that may be a worker."""

    index: int
    uuid: str
    name: str
    memory_mib: float | None
    display_active: bool | None
    mig: bool | None
    compute_capability: tuple[int, int] | None
    excluded_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What NVML sees. `reason` says why there is no GPU to use; None when there is one."""

    gpus: tuple[GpuInfo, ...] = ()
    driver_version: str | None = None
    reason: str | None = None

    @property
    def usable(self) -> tuple[GpuInfo, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.excluded_reason is None)


def discover_gpus(nvml: Nvml | None = None, environment: Mapping[str, str] | None = None) -> Discovery:
    """Every GPU of this machine, each with the reason if it must not be a worker. Never raises for missing hardware.

    Excluded: a GPU that drives a display, a much smaller model than the machine's main one (a DGX Station's display GPU
    sits between the A100s in every numbering), one split by MIG, and what CUDA_VISIBLE_DEVICES leaves out.
    """
    environment = os.environ if environment is None else environment
    try:
        if nvml is None:
            nvml = open_nvml()
        else:
            initialise(nvml)
    except SensorUnavailable as reason:
        return Discovery(reason=str(reason))
    try:
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
        found, displays = [], {}
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = _describe(nvml, index, handle)
            except nvml.NVMLError as error:  # a lost GPU must not hide the others
                found.append(_unreadable(index, error))
                continue
            found.append(gpu)
            displays[index] = bool(_ask(nvml, nvml.nvmlDeviceGetDisplayMode, handle))
    except nvml.NVMLError as error:
        return Discovery(reason=f"NVML: {error}")
    finally:
        _ask(nvml, nvml.nvmlShutdown)
    gpus = _exclude(found, displays, environment)
    return Discovery(
        gpus=gpus,
        driver_version=None if driver is None else as_text(driver),
        reason=_why_none(gpus),
    )


def torch_cuda_build() -> str | None:
    """The CUDA version that the installed torch was built with, read from its `version.py` without importing torch.

    None: no torch, or a build without CUDA.
    """
    text = _torch_version_text()
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE) if text else None
    return found.group(1) if found else None


def _torch_version_text() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None


def _ask(nvml: Nvml, query: Any, *arguments: Any) -> Any:
    """The answer, or None where NVML has none."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _describe(nvml: Nvml, index: int, handle: Any) -> GpuInfo:
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
    )


def _unreadable(index: int, error: Exception) -> GpuInfo:
    return GpuInfo(
        index=index,
        uuid="",
        name="unreadable GPU",
        memory_mib=None,
        display_active=None,
        mig=None,
        compute_capability=None,
        excluded_reason=f"NVML: {error}",
    )


def _exclude(gpus: list[GpuInfo], displays: Mapping[int, bool], environment: Mapping[str, str]) -> tuple[GpuInfo, ...]:
    main = _main_model(gpus)
    visible = _visible(gpus, environment)
    return tuple(
        gpu
        if gpu.excluded_reason
        else replace(gpu, excluded_reason=_reason(gpu, main, displays.get(gpu.index, False), visible))
        for gpu in gpus
    )


def _main_model(gpus: list[GpuInfo]) -> tuple[str, float] | None:
    """(name, memory of one in MiB) of the model that has most memory in all."""
    by_name: dict[str, list[GpuInfo]] = defaultdict(list)
    for gpu in gpus:
        if gpu.memory_mib is not None:
            by_name[gpu.name].append(gpu)
    if not by_name:
        return None
    group = max(by_name.values(), key=lambda members: sum(gpu.memory_mib for gpu in members))
    return group[0].name, max(gpu.memory_mib for gpu in group)


def _reason(gpu: GpuInfo, main: tuple[str, float] | None, display: bool, visible: set[int] | None) -> str | None:
    if gpu.display_active:
        return "drives a display"
    if main is not None and gpu.name != main[0]:
        # display mode alone says little: many compute GPUs report it as enabled
        if gpu.memory_mib is not None and gpu.memory_mib < _MUCH_SMALLER * main[1]:
            return f"a display adapter next to {main[0]}: {gpu.memory_mib:.0f} MiB against {main[1]:.0f}"
        if display and "display" in gpu.name.lower():
            return f"a display adapter next to {main[0]}"
    if gpu.mig:
        return f"in MIG mode, whose slices are no workers; turn it off with nvidia-smi -i {gpu.index} -mig 0"
    if visible is not None and gpu.index not in visible:
        return "left out by CUDA_VISIBLE_DEVICES"
    return None


def _visible(gpus: list[GpuInfo], environment: Mapping[str, str]) -> set[int] | None:
    """NVML indices that CUDA_VISIBLE_DEVICES lets through; None where it is not set.

    As CUDA reads it: entries are indices or (beginnings of) UUIDs, and the first one that names nothing ends the list.
    CUDA counts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, while NVML counts by PCI bus; which is fastest is
    judged by compute capability and memory, which tells a display adapter from compute GPUs.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    order = [gpu.index for gpu in gpus]
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        order = [
            gpu.index
            for gpu in sorted(
                gpus, key=lambda gpu: (gpu.compute_capability or (0, 0), gpu.memory_mib or 0), reverse=True
            )
        ]
    visible: set[int] = set()
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdigit():
            named = order[int(entry) : int(entry) + 1]
        else:
            named = [gpu.index for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        visible.update(named)
    return visible


def _why_none(gpus: tuple[GpuInfo, ...]) -> str | None:
    if not gpus:
        return "NVML sees no GPU"
    if any(gpu.excluded_reason is None for gpu in gpus):
        return None
    return "; ".join(f"GPU {gpu.index} ({gpu.name}): {gpu.excluded_reason}" for gpu in gpus)
