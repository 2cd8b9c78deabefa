"""The software environment that labels depend on: versions of torch, CUDA, cuDNN, Python, and allocator settings.

Called only where torch is already imported (the trial server and its children).
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

TRACES_ONLY = "GPUFARM_TRACES_ONLY"  # set for a trial server whose trials run no step of their own
_HOST_MEMORY_SHARE = 0.9


def software_environment() -> dict[str, str | None]:
    """Return the columns of `runs` that are known without touching the GPU."""
    import torch

    return {
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "python_version": platform.python_version(),
        "allocator_settings": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "farm_version": farm_version(),
    }


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_mib() -> float:
    """Return the host memory in MiB that this process may use: all, or its control group's limit if that is less."""
    import psutil

    total_mib: float = psutil.virtual_memory().total / 2**20
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(total_mib, int(limit.read()) / 2**20)
    except (OSError, ValueError):  # no control groups of version 2 here, or no limit ("max")
        return total_mib


def host_memory_share_mib(workers: int) -> float:
    """Return each trial's default share of the host memory in MiB: 90 % of it, divided evenly among `workers`."""
    return host_memory_mib() * _HOST_MEMORY_SHARE / workers


def farm_version() -> str | None:
    """Return this project's installed version; None if it runs from a source tree."""
    try:
        return version("gpufarm")
    except PackageNotFoundError:
        return None
