"""Memory that a process takes outside PyTorch's allocator on one machine: driver, kernels, libraries, other users.

Start reading at `MachineProfile`; `learn.calibrate` fits one to a user's own measurements. Torch-free.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from conf.errors import EnvironmentProblem, UsageError, unknown_name
from conf.plain_text import exception_line
from featurize.device.architecture import AMD
from featurize.device.device_spec import DeviceSpec

CURRENT, EAGER, DESCRIBED = "current", "eager", "described"
MACHINES = (CURRENT, DESCRIBED, EAGER)
# Kernels of a small training step, each loaded when it first runs (the default of CUDA 12); typical, not measured.
LAZY_KERNELS_MIB, LAZY_CUDNN_MIB = 40.0, 50.0
# What all of PyTorch's and cuBLAS's kernels take besides, loaded at once: an A100's measured 1,430 MiB less a typical
# 450 under lazy loading. `CUDNN_MIB` is of such a process, too.
EAGER_KERNELS_MIB = 1020.0
# MiB that a process takes more, outside the allocator, once cuDNN has loaded its convolutions: the gap between measured
# MLPs and CNNs on one machine (A100, cuDNN 9.1).
CUDNN_MIB = 270
# Device -> context and kernels under lazy loading, where the description's `context_mib` was measured on another stack.
_LAZY_CONTEXT_MIB = {"A100-SXM4-40GB": 450.0}
_LARGEST_MIB = 1e7


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """Device memory outside the caching allocator, in MiB.

    Args:
        name: Its name in answers.
        context_mib: The driver's and the CUDA context's share of a process.
        kernels_mib: Kernels of PyTorch and cuBLAS that a training step loads.
        cudnn_mib: What comes on top where cuDNN's layers run.
        other_mib: What the machine holds without the process: a display, other processes, the driver's reserve.

    Raises:
        UsageError: A figure is no number of at least 0.
    """

    name: str
    context_mib: float
    kernels_mib: float
    cudnn_mib: float
    other_mib: float = 0.0

    def __post_init__(self) -> None:
        bad = [
            f"{part} must be a number from 0 to {_LARGEST_MIB:,.0f}, got {value!r}"
            for part in PARTS
            if not (isinstance(value := getattr(self, part), int | float) and 0 <= value <= _LARGEST_MIB)
        ]
        if bad:
            raise UsageError(f"machine {self.name}: " + "; ".join(bad))

    def outside_mib(self, loads_cudnn: bool) -> float:
        """Return what the process takes outside the allocator."""
        return self.context_mib + self.kernels_mib + (self.cudnn_mib if loads_cudnn else 0.0)

    def to_mapping(self) -> dict[str, Any]:
        """Return the profile as `from_mapping` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Return the profile that a mapping describes. Raises `UsageError` that names missing and unknown keys."""
        wanted = {"name", *PARTS}
        problems = [f"missing {key}" for key in sorted(wanted - set(mapping))]
        problems += [f"unknown {key}" for key in sorted(map(str, set(mapping) - wanted))]
        if problems:
            raise UsageError(f"machine {mapping.get('name', '?')}: " + "; ".join(problems))
        return cls(**mapping)


PARTS = ("context_mib", "kernels_mib", "cudnn_mib", "other_mib")


def machine(name: str, spec: DeviceSpec) -> MachineProfile:
    """Return one of the profiles that come along, for one GPU model.

    `current` is CUDA 12 with lazy loading of kernels, `eager` a stack that loads all of them at once (CUDA 11, or
    CUDA_MODULE_LOADING=EAGER), `described` what the device's description says: the machine of the measured rows.

    Of an AMD GPU, MIOpen is taken to need what cuDNN does.

    Raises:
        UsageError: An unknown name, or `eager` of an AMD GPU; the message lists the known ones.
    """
    lazy_mib = _LAZY_CONTEXT_MIB.get(spec.name, spec.context_mib)
    context_mib = max(lazy_mib - LAZY_KERNELS_MIB, 0.0)
    figures_mib = {
        CURRENT: (context_mib, lazy_mib - context_mib, LAZY_CUDNN_MIB),
        EAGER: (context_mib, EAGER_KERNELS_MIB, float(CUDNN_MIB)),
        DESCRIBED: (spec.context_mib, 0.0, float(CUDNN_MIB)),
    }
    if name not in figures_mib:
        raise unknown_name("machine", name, MACHINES)
    if name == EAGER and spec.architecture.vendor == AMD:
        raise UsageError(
            f"machine={EAGER} is a stack of CUDA, and {spec.name} is an AMD GPU: pass machine={CURRENT} or "
            f"machine={DESCRIBED}"
        )
    return MachineProfile(name=name, **dict(zip(PARTS[:3], figures_mib[name], strict=True)))


def read_machine(path: Path) -> MachineProfile:
    """Return the profile that a JSON file holds. Raises `EnvironmentProblem` where it cannot be read as one."""
    try:
        return MachineProfile.from_mapping(json.loads(path.read_text(encoding="utf-8"))["machine"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} is no machine profile: {exception_line(error)}") from error
