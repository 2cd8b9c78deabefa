"""What is known of a job alone, measured or estimated: slowdowns and admissions are worked out from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobProfile:
    """Figures of one job that has a GPU to itself; None where a figure is not known. Shares lie between 0 and 1."""

    name: str
    memory_mib: float | None = None  # peak that a driver counts: reserved memory and the context
    memory_bound_mib: float | None = None  # that an estimate does not expect to be exceeded
    step_ms: float | None = None
    gpu_util: float | None = None  # nvidia-smi's share of time with a kernel on the GPU
    memory_util: float | None = None  # nvidia-smi's share of time with the memory being read or written
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    tensor: float | None = None  # share of cycles in which a tensor pipe is active
    launches_per_s: float | None = None
    power_w: float | None = None
