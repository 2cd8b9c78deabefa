"""Figures that follow from a GPU's architecture alone: the home of what differs by vendor.

Start reading at `architecture_of`. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from conf.units import MIB

NVIDIA, AMD = "NVIDIA", "AMD"
_ANY_WIDTH = 1 << 31


class AttentionKernels(NamedTuple):
    """The widest head that each kind of PyTorch's fused attention takes; 0 where it has no kernels for the GPU."""

    flash: int
    efficient: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture.

    Args:
        title: In answers: `compute capability 8.0`, `AMD gfx942`.
        vendor: `NVIDIA` or `AMD`.
        fp32_lanes: Of a multiprocessor, as the data sheet's rate of vectors counts them.
        warp_size: Lanes that run together: a warp, AMD's wavefront.
        watts_per_tflop: W per TFLOP/s of fp32 that a chip takes at full load, below which its clock falls; None where
            nothing is known of that.
        blas_workspace_bytes: That PyTorch gives the library of matrix products, for each thread that calls it.
        blas_fallback_bytes: The same of a second library, for products that the first one cannot do.
        attention: PyTorch's kernels.
        tf32_convolutions: Whether convolutions of fp32 tensors may run in TF32, where the GPU has it.
        torch_capability: What `torch.cuda.get_device_capability` says.
    """

    title: str
    vendor: str
    fp32_lanes: int
    warp_size: int
    watts_per_tflop: float | None
    blas_workspace_bytes: int
    blas_fallback_bytes: int
    attention: AttentionKernels
    tf32_convolutions: bool
    torch_capability: tuple[int, int]


# FP32 lanes of an SM from a compute capability on (CUDA C Programming Guide, arithmetic instructions), newest first.
_FP32_LANES = (((8, 6), 128), ((7, 0), 64), ((6, 1), 128), ((6, 0), 64), ((5, 0), 128), ((0, 0), 192))
# Chosen by the process: 4 to 5, 7 to 8, 12 and 16 nm; by compute capability, the newest first.
_WATTS_PER_TFLOP = (((8, 9), 8.0), ((8, 0), 11.0), ((7, 0), 16.0), ((6, 0), 20.0), ((0, 0), 25.0))


def _of_amd(
    name: str, *, lanes: int, blas_mib: int, fallback_mib: int, widest_head: int, capability: tuple[int, int]
) -> Architecture:
    """Wavefronts of CDNA have 64 lanes. MIOpen does not take TF32 (PyTorch's pull request 162943), matrix products do.
    What power a chip takes at full load is not known.

    Args:
        name: The LLVM target.
        lanes: Such that two FLOP each make up the data sheet's rate of vectors; packed FP32 counts twice on gfx942.
        blas_mib: Of hipBLASLt where PyTorch prefers it (Context.cpp: gfx90a and gfx942), else of hipBLAS
            (CublasHandlePool.cpp).
        fallback_mib: Of hipBLAS, where hipBLASLt comes first.
        widest_head: Of AOTriton's kernels, flash and memory-efficient alike (sdp_utils.cpp: from AOTriton 0.9 on).
        capability: As PyTorch reports it.
    """
    return Architecture(
        title=f"{AMD} {name}",
        vendor=AMD,
        fp32_lanes=lanes,
        warp_size=64,
        watts_per_tflop=None,
        blas_workspace_bytes=blas_mib * MIB,
        blas_fallback_bytes=fallback_mib * MIB,
        attention=AttentionKernels(widest_head, widest_head),
        tf32_convolutions=False,
        torch_capability=capability,
    )


_TARGETS: Mapping[str, Architecture] = {
    "gfx908": _of_amd("gfx908", lanes=64, blas_mib=32, fallback_mib=0, widest_head=0, capability=(9, 0)),
    "gfx90a": _of_amd("gfx90a", lanes=64, blas_mib=76, fallback_mib=32, widest_head=512, capability=(9, 0)),
    "gfx942": _of_amd("gfx942", lanes=128, blas_mib=76, fallback_mib=128, widest_head=512, capability=(9, 4)),
}
LLVM_TARGETS = tuple(_TARGETS)


@functools.cache
def architecture_of(compute_capability: tuple[int, int] | None, llvm_target: str | None) -> Architecture:
    """Return the architecture of NVIDIA's compute capability, or of AMD's LLVM target, one of `LLVM_TARGETS`. Exactly
    one is given."""
    if llvm_target is not None:
        return _TARGETS[llvm_target]
    assert compute_capability is not None, "a description has either"
    return _of_nvidia(compute_capability)


def _of_nvidia(capability: tuple[int, int]) -> Architecture:
    """Sources: ATen/cuda/CublasHandlePool.cpp (4096 KiB x 2 + 16 KiB x 8, on Hopper 4096 KiB x 8; cuBLASLt shares it
    from PyTorch 2.8 on, and took 1 MiB more for single calls before, which is left out) and sdp_utils.cpp (flash
    attention from compute capability 8.0 on, heads up to 256)."""
    return Architecture(
        title=f"compute capability {capability[0]}.{capability[1]}",
        vendor=NVIDIA,
        fp32_lanes=next(lanes for oldest, lanes in _FP32_LANES if capability >= oldest),
        warp_size=32,
        watts_per_tflop=next(watts for oldest, watts in _WATTS_PER_TFLOP if capability >= oldest),
        blas_workspace_bytes=32 * MIB if capability[0] == 9 else 8 * MIB + 128 * 1024,
        blas_fallback_bytes=0,
        attention=AttentionKernels(256 if capability >= (8, 0) else 0, _ANY_WIDTH),
        tf32_convolutions=True,
        torch_capability=capability,
    )
