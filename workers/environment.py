"""What can invalidate labels: versions of torch, CUDA, cuDNN, Python and the allocator's settings.

Called where torch is imported already (the trial server and its children).
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

TRACES_ONLY = "GPUFARM_TRACES_ONLY"  # set for a trial server whose trials run no step of their own
_HOST_MEMORY_SHARE = 0.9


def software_environment() -> dict[str, str | None]:
    """Columns of `runs` that are known without touching the GPU."""
    import torch

    return {
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "python_version": platform.python_version(),
        "allocator_settings": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "farm_version": farm_version(),
    }


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_mib() -> float:
    """What this process may use of the host's memory: all of it, or its control group's limit where that is less."""
    import psutil

    total_mib: float = psutil.virtual_memory().total / 2**20
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(total_mib, int(limit.read()) / 2**20)
    except (OSError, ValueError):  # no control groups of version 2 here, or no limit ("max")
        return total_mib


def host_memory_share_mib(workers: int) -> float:
    """What the trial of each of `workers` may take by default: 90 % of the memory, divided evenly."""
    return host_memory_mib() * _HOST_MEMORY_SHARE / workers


def farm_version() -> str | None:
    """This project's installed version; None when run from a tree that is not installed."""
    try:
        return version("gpufarm")
    except PackageNotFoundError:
        return None
