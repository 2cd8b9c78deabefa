"""Describes a GPU model to cuDNN, as its device-property JSON, from the model's own description.

Start reading at `device_properties`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from conf.errors import UsageError
from featurize.device_spec import DeviceSpec


class _Multiprocessor(NamedTuple):
    """What follows from the compute capability."""

    fp32_cores: int
    max_blocks: int
    shared_memory_kib: int  # that a block can opt in to
    reserved_bytes: int  # of shared memory, of each block


# CUDA C++ Programming Guide 12.9, tables "Technical Specifications per Compute Capability" and "Arithmetic Throughput".
_MULTIPROCESSORS = {
    (7, 0): _Multiprocessor(64, 32, 96, 0),
    (7, 5): _Multiprocessor(64, 16, 64, 0),
    (8, 0): _Multiprocessor(64, 32, 163, 1024),
    (8, 6): _Multiprocessor(128, 16, 99, 1024),
    (8, 7): _Multiprocessor(128, 16, 163, 1024),
    (8, 9): _Multiprocessor(128, 24, 99, 1024),
    (9, 0): _Multiprocessor(128, 32, 227, 1024),
    (10, 0): _Multiprocessor(128, 32, 227, 1024),
    (12, 0): _Multiprocessor(128, 24, 99, 1024),
}
_MEMORY_BUS_BITS = 4096


def cudnn_capability(spec: DeviceSpec) -> tuple[int, int]:
    """Return the compute capability of a GPU model that cuDNN runs on.

    Raises:
        UsageError: An AMD GPU.
    """
    if spec.compute_capability is None:
        raise UsageError(
            f"cuDNN does not run on {spec.name}, an AMD GPU: pass workspaces=guessed, the default, or workspaces=auto"
        )
    return spec.compute_capability


def device_properties(spec: DeviceSpec) -> dict[str, Any]:
    """Return what cuDNN wants to know of a GPU model.

    The clock is that at which the cores reach the described fp32 rate. The width of the memory bus is the same for all
    models, and the memory's clock makes up the described bandwidth: neither changed an answer of cuDNN 9.28 for 60
    random signatures on compute capability 8.0.

    Raises:
        UsageError: An AMD GPU, or a compute capability that the table does not have.
    """
    major, minor = cudnn_capability(spec)
    sm = _MULTIPROCESSORS.get((major, minor))
    if sm is None:
        known = ", ".join(f"{known_major}.{known_minor}" for known_major, known_minor in _MULTIPROCESSORS)
        raise UsageError(f"cuDNN cannot be asked about compute capability {major}.{minor}; known are {known}")
    return {
        "deviceName": spec.name,
        "deviceVer": 100 * major + 10 * minor,
        "multiProcessorCount": spec.sm_count,
        "smCountOrigin": 0,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "maxBlockSize": [1024, 1024, 64],
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxThreadsPerSM": spec.threads_per_sm,
        "maxCtasPerSM": sm.max_blocks,
        "regsPerBlock": 65536,
        "maxRegistersPerSM": 65536,
        "maxSharedMemoryPerBlock": 48 * 1024,
        "maxSharedMemoryPerBlockOptin": sm.shared_memory_kib * 1024,
        "oversizedSharedMemoryPerBlock": 0,
        "reservedSharedMemoryPerBlock": sm.reserved_bytes,
        "l2CacheSize": int(spec.l2_mib * 2**20),
        "totalGlobalMem": int(spec.memory_mib * 2**20),
        "smClockRateKHz": round(spec.peak_tflops.fp32 * 1e9 / (2 * sm.fp32_cores * spec.sm_count)),
        "memClockRateKHz": round(spec.bandwidth_gb_s * 1e6 * 8 / (2 * _MEMORY_BUS_BITS)),
        "memoryBusWidth": _MEMORY_BUS_BITS,
        "supportCoopLaunch": 1,
        "isTccDriver": 0,
        "pciDeviceId": 0,
        "cudaDeviceId": 0,
        "driverVer": 0,  # the process that asks sets it to the runtime's
    }
