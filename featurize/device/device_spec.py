"""Descriptions of GPU models, properties of their architectures, and a machine's memory outside the allocator.

Start reading at `DeviceSpec`: a data sheet, read on use from conf/device/NAME.yaml. `architecture_of` holds all that
differs by vendor. `MachineProfile` is a process's memory outside PyTorch's allocator, for the driver, kernels and
libraries; `learn.calibrate` fits one to a user's own measurements. Torch-free.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from conf.device_names import (
    DEVICE_FILES,
    plain_device as plain_device,
    profiles_of,
    read_device_file,
    resolve_device,
    slice_values,
    split_slice,
)
from conf.errors import EnvironmentProblem, UsageError, exception_line, refuse, require_one_of, unknown_name
from conf.units import MIB

NVIDIA, AMD = "NVIDIA", "AMD"
_ANY_WIDTH = 1 << 31


class AttentionKernels(NamedTuple):
    """The widest head of each kind of PyTorch's fused attention; 0 where it has no kernels for the GPU."""

    flash: int
    efficient: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture.

    Args:
        title: Name in answers: `compute capability 8.0`, `AMD gfx942`.
        vendor: `NVIDIA` or `AMD`.
        fp32_lanes: FP32 lanes of a multiprocessor, as the data sheet's vector rate counts them.
        warp_size: Lanes that run together: a warp, AMD's wavefront.
        watts_per_tflop: W per TFLOP/s of fp32 that a chip takes at full load, below which its clock falls; None where
            it is not known.
        blas_workspace_bytes: Workspace that PyTorch gives the matrix library, for each thread that calls it.
        blas_fallback_bytes: The same for a second library, for products that the first one does not support.
        attention: Widest heads of PyTorch's kernels.
        tf32_convolutions: Whether convolutions of fp32 tensors may run in TF32, where the GPU has it.
        torch_capability: Result of `torch.cuda.get_device_capability`.
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


# FP32 lanes of an SM, by the least compute capability (CUDA C Programming Guide, arithmetic instructions), newest
# first.
_FP32_LANES = (((8, 6), 128), ((7, 0), 64), ((6, 1), 128), ((6, 0), 64), ((5, 0), 128), ((0, 0), 192))
# Chosen by the manufacturing process: 4 to 5, 7 to 8, 12 and 16 nm; by compute capability, the newest first.
_WATTS_PER_TFLOP = (((8, 9), 8.0), ((8, 0), 11.0), ((7, 0), 16.0), ((6, 0), 20.0), ((0, 0), 25.0))


def _of_amd(
    name: str, *, lanes: int, blas_mib: int, fallback_mib: int, widest_head: int, capability: tuple[int, int]
) -> Architecture:
    """Return an AMD GPU's architecture. Wavefronts of CDNA have 64 lanes. MIOpen does not use TF32 (PyTorch's pull
    request 162943), matrix products do. The power of a chip at full load is not known.

    Args:
        name: The LLVM target.
        lanes: Number such that two FLOP a lane make up the data sheet's vector rate; packed FP32 counts twice on
            gfx942.
        blas_mib: Workspace of hipBLASLt where PyTorch prefers it (Context.cpp: gfx90a, gfx942), else of hipBLAS
            (CublasHandlePool.cpp).
        fallback_mib: Workspace of hipBLAS, where hipBLASLt comes first.
        widest_head: Widest head of AOTriton's kernels, flash or memory-efficient (sdp_utils.cpp: from AOTriton 0.9 on).
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
    # ATen/cuda/CublasHandlePool.cpp: 4096 KiB x 2 + 16 KiB x 8, on Hopper 4096 KiB x 8; cuBLASLt shares it from PyTorch
    # 2.8 on, and took 1 MiB more for single calls before, which is left out. sdp_utils.cpp: flash attention from
    # compute capability 8.0 on, heads up to 256.
    return Architecture(
        title=f"compute capability {compute_capability[0]}.{compute_capability[1]}",
        vendor=NVIDIA,
        fp32_lanes=next(lanes for oldest, lanes in _FP32_LANES if compute_capability >= oldest),
        warp_size=32,
        watts_per_tflop=next(watts for oldest, watts in _WATTS_PER_TFLOP if compute_capability >= oldest),
        blas_workspace_bytes=32 * MIB if compute_capability[0] == 9 else 8 * MIB + 128 * 1024,
        blas_fallback_bytes=0,
        attention=AttentionKernels(256 if compute_capability >= (8, 0) else 0, _ANY_WIDTH),
        tf32_convolutions=True,
        torch_capability=compute_capability,
    )


DEFAULT_DEVICE = "A100-SXM4-40GB"  # GPU model of simulations and estimates where none is named
_LARGEST = 1e12  # the largest figure, in its unit
# A description has one of the first two.
_OPTIONAL = ("compute_capability", "llvm_target", "interconnect", "power_cap_w")
_LEAST_CAP = 0.25  # least power limit as a share of the board's, as on an A100-SXM4: 100 of 400 W
_ABOVE_IDLE = 1.2  # least power limit as a multiple of idle power: below it, no power is left for kernels
_NO_NUMBERS = ("name", "peak_tflops", *_OPTIONAL)


class UnsuitableDevice(UsageError):
    """This GPU model cannot run the job; others may."""


@dataclass(frozen=True, kw_only=True)
class PeakTflops:
    """Dense peak rates in TFLOP/s, a multiply-add counted as 2. None: no tensor cores for that type.

    `fp32` is the vector rate; `fp32_matrix` the rate of products on matrix units, as AMD's GPUs have them in fp32.
    `fp8` is the rate of products of 8-bit floats, summed in fp32, as `torch._scaled_mm` runs them.
    """

    fp32: float
    fp32_matrix: float | None = None
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Links of a GPU to the others of its node, in GB/s per direction, from the data sheet.

    `link_gb_s`: all links of NVLink or Infinity Fabric together, if they join all GPUs of a node. None: the GPUs
    communicate over PCIe.
    `mesh`: number of links between each two GPUs of a node without a switch, as in `nvidia-smi topo -m`. None: any GPU
    reaches any other one with all of its links.
    """

    pcie_gb_s: float
    link_gb_s: float | None = None
    mesh: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One GPU model. Raises `UsageError` that names the bad keys.

    `memory_mib` is the memory that CUDA can use, `context_mib` the memory that NVML charges a process before its first
    tensor (context and library kernels); `launch_overhead_us` is the host's time for one eager operator, which bounds
    small kernels. `power_limit_w` is the board's own limit, `power_cap_w` a lower one that is set (`nvidia-smi -pl`);
    None: none. `interconnect` is None where it is not known; jobs on one GPU do not depend on it, so it is part neither
    of equality nor of the mapping that identifies a description.
    An NVIDIA GPU has a `compute_capability`, an AMD GPU an `llvm_target` (gfx942), never both: PyTorch's capability
    numbers of AMD's GPUs are not compute capabilities. For an AMD GPU, `sm_count` counts compute units, `warps_per_sm`
    their wavefronts.
    """

    name: str
    memory_mib: float
    bandwidth_gb_s: float
    peak_tflops: PeakTflops
    sm_count: int
    warps_per_sm: int
    l2_mib: float
    power_limit_w: float
    idle_power_w: float
    context_mib: float
    launch_overhead_us: float
    compute_capability: tuple[int, int] | None = None
    llvm_target: str | None = None
    power_cap_w: float | None = None
    interconnect: Interconnect | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        numbers = [f.name for f in dataclasses.fields(self) if f.name not in _NO_NUMBERS]
        bad = [f"{n} must be {_bound(v)}, got {v!r}" for n in numbers if not _positive(v := getattr(self, n))]
        if not isinstance(self.name, str) or not self.name:
            bad.append(f"name must be text, got {self.name!r}")
        if (self.compute_capability is None) == (self.llvm_target is None):
            bad.append("give compute_capability (as '8.0') for an NVIDIA GPU or llvm_target (as gfx942) for an AMD GPU")
        elif self.llvm_target is not None and self.llvm_target not in LLVM_TARGETS:
            bad.append(f"llvm_target must be one of {', '.join(LLVM_TARGETS)}, got {self.llvm_target!r}")
        elif self.power_cap_w is not None and not bad:
            bad += self._problem_of_limit("power_cap_w", self.power_cap_w)
        refuse(bad, f"device {self.name}: ")

    def __hash__(self) -> int:
        return hash(self.name)  # a description is the key of many caches: equal ones have equal names

    @property
    def least_limit_w(self) -> float:
        """The lowest power limit that can be set, in W."""
        return max(_LEAST_CAP * self.power_limit_w, _ABOVE_IDLE * self.idle_power_w)

    def _problem_of_limit(self, key: str, limit_w: Any) -> list[str]:
        if _positive(limit_w) and self.least_limit_w <= limit_w <= self.power_limit_w:
            return []
        return [f"{key} must be {self.least_limit_w:g} to {self.power_limit_w:g}, got {limit_w!r}"]

    def under_board_limit(self, limit_w: float) -> DeviceSpec:
        """Return the GPU model with a power limit in W set on its board; a MIG slice gets its share of the limit.

        Raises:
            UsageError: The limit is out of the board's range.
        """
        parts = split_slice(self.name)
        board = self if parts is None else load_device(parts[0])
        if problem := board._problem_of_limit("power_limit_w", limit_w):
            raise UsageError(f"device {board.name}: {problem[0]}")
        of_slice_w = limit_w * self.power_limit_w / board.power_limit_w
        return dataclasses.replace(self, power_cap_w=max(of_slice_w, self.least_limit_w))

    @property
    def architecture(self) -> Architecture:
        """Figures that follow from the compute capability or the LLVM target."""
        return architecture_of(self.compute_capability, self.llvm_target)

    @property
    def threads_per_sm(self) -> int:
        """Threads that a multiprocessor holds."""
        return self.warps_per_sm * self.architecture.warp_size

    @property
    def multiplies_fp32(self) -> bool:
        """Return whether matrix units take float32 operands, in TF32 or in full precision."""
        return self.peak_tflops.tf32 is not None or self.peak_tflops.fp32_matrix is not None

    def tflops(self, math: str) -> float:
        """Return the peak rate in TFLOP/s of a matrix product in `fp32`, `tf32`, `bf16`, `fp16` or `fp8`; fp32's where
        the GPU has no such units."""
        rates = self.peak_tflops
        return (getattr(rates, math) if math != "fp32" else None) or rates.fp32_matrix or rates.fp32

    def to_mapping(self) -> dict[str, Any]:
        """Return the description as a mapping for `device_from_mapping` and YAML files, without the interconnect.

        The rate of 8-bit floats is left out if it is the described one: identities are older than this field.
        """
        mapping = {name: value for name, value in vars(self).items() if name not in _OPTIONAL}
        mapping["peak_tflops"] = dict(vars(self.peak_tflops))
        if self.peak_tflops.fp8 == _described_fp8(self.name):
            del mapping["peak_tflops"]["fp8"]
        if self.power_cap_w is not None:
            mapping["power_cap_w"] = self.power_cap_w
        if self.compute_capability is None:
            return {**mapping, "llvm_target": self.llvm_target}
        return {**mapping, "compute_capability": ".".join(map(str, self.compute_capability))}


def device_names() -> tuple[str, ...]:
    """Return the described GPU models, sorted; files with the key `backend`, which choose a backend, are left out."""
    return tuple(sorted(_texts()))


@functools.lru_cache(maxsize=1024)
def load_device(name: str) -> DeviceSpec:
    """Return the description of one GPU model, by a name as `conf.device_names.resolve_device` takes it.

    A MIG slice is named by its GPU and profile, as in `conf.device_names`. Raises `UsageError` for an unknown name,
    with the known ones, and for an ambiguous prefix, with its candidates.
    """
    known = _texts()
    if (parts := split_slice(name)) is not None:
        parent = _description(resolve_device(parts[0], known))
        return device_from_mapping({**parent, **slice_values(parent, parts[1])})
    return device_from_mapping(_description(resolve_device(name, known)))


def known_device(name: str | None) -> str | None:
    """Return the name, as `load_device` takes it, of the GPU model or MIG slice with this driver name; None without a
    description."""
    parent, profile = split_slice(name) or (name, None)
    known = next((listed for listed in device_names() if same_device(listed, parent)), None)
    if known is None or profile is None:
        return known
    return f"{known}:{profile}" if profile in profiles_of(known) else None


def describe_device(name: str | DeviceSpec) -> DeviceSpec:
    """Return the description of a GPU by a name that `load_device` takes; a description is returned unchanged. Raises
    `UsageError`, with the choices, for unknown and ambiguous names."""
    return name if isinstance(name, DeviceSpec) else load_device(name)


def device_of_user(device: str | DeviceSpec, power_limit_w: float | None = None) -> DeviceSpec:
    """Return the description for a user's value: a name, a description, or the path of a YAML file like those of
    `conf/device/`. Not for names in rows or requests, which must not open files.

    Args:
        device: The user's value.
        power_limit_w: Limit set on the GPU's board, in W; None: the description's own.

    Raises:
        UsageError: As `describe_device` and `device_from_mapping` do, for a value of another kind, or for a limit out
            of the GPU model's range.
    """
    if not isinstance(device, str | DeviceSpec):
        raise unknown_name("device", device, device_names())
    if isinstance(device, str) and device.endswith(DEVICE_FILES):
        described = device_from_mapping(read_device_file(device))
    else:
        described = describe_device(device)
    return described if power_limit_w is None else described.under_board_limit(power_limit_w)


def device_from_mapping(mapping: Mapping[str, Any]) -> DeviceSpec:
    """Return a description from its mapping in YAML. Raises `UsageError` with all missing and unknown keys.

    `count`, the number of simulated devices, is not a property of the device and is ignored. A mapping without an
    `interconnect`, as from `DeviceSpec.to_mapping`, gets that of the described GPU model of its name; the same holds
    for the rate of 8-bit floats.
    """
    values = {name: value for name, value in mapping.items() if name != "count"}
    name = str(values.get("name"))
    described = _description(name) if name in _texts() else {}
    if "interconnect" not in values and "interconnect" in described:
        values["interconnect"] = described["interconnect"]
    label = values.get("name", "?")
    fields = {f.name for f in dataclasses.fields(DeviceSpec)}
    rates = values.get("peak_tflops")
    problems = [f"missing {key}" for key in sorted(fields - set(values) - set(_OPTIONAL))]
    problems += [f"unknown {key}" for key in sorted(map(str, set(values) - fields))]
    if "peak_tflops" in values and not (
        isinstance(rates, Mapping)
        and set(rates) <= {f.name for f in dataclasses.fields(PeakTflops)}
        and _positive(rates.get("fp32"))
        and all(rate is None or _positive(rate) for rate in rates.values())
    ):
        known = ", ".join(f.name for f in dataclasses.fields(PeakTflops) if f.name != "fp32")
        problems.append(f"peak_tflops must give fp32 and may give {known}: numbers > 0 or null")
    joined = values.get("interconnect")
    if joined is not None and not _joins(joined):
        problems.append(
            "interconnect must give pcie_gb_s and may give link_gb_s: numbers > 0; and with that mesh: for each GPU of "
            "a node its number of links to each other one, alike in both directions"
        )
    capability = values.get("compute_capability")
    try:
        if capability is not None:
            major, minor = map(int, str(capability).split("."))
            values["compute_capability"] = major, minor
    except ValueError:
        problems.append(f"compute_capability must look like '8.0', got {capability!r}")
    if problems or not isinstance(rates, Mapping):
        raise UsageError(f"device {label}: " + "; ".join(problems))
    values["peak_tflops"] = PeakTflops(**{"fp8": _described_fp8(str(label)), **rates})
    values["interconnect"] = Interconnect(**joined) if isinstance(joined, Mapping) else None
    return DeviceSpec(**values)


def _described_fp8(name: str) -> float | None:
    """Return the described rate of 8-bit floats of a GPU model or MIG slice; None without a description."""
    parent, profile = split_slice(name) or (name, None)
    if parent not in _texts() or (profile is not None and profile not in profiles_of(parent)):
        return None
    described = _description(parent)
    values = described if profile is None else slice_values(described, profile)
    fp8: float | None = values["peak_tflops"].get("fp8")
    return fp8


def same_device(name: str | None, other: str | None) -> bool:
    """Return whether two names are the same device: drivers prefix `NVIDIA ` to data sheets' `A100-SXM4-40GB`."""
    return plain_device(name) == plain_device(other)


@functools.lru_cache(maxsize=256)
def device_features(spec: DeviceSpec) -> Mapping[str, float]:
    """Return a GPU model's features for learners."""
    rates, (major, minor) = spec.peak_tflops, spec.compute_capability or (0, 0)  # AMD's GPUs have none
    return {
        "gpu_memory_mib": spec.memory_mib,
        "gpu_bandwidth_gb_s": spec.bandwidth_gb_s,
        "gpu_fp32_tflops": rates.fp32,
        "gpu_tf32_tflops": rates.tf32 or rates.fp32,
        "gpu_half_tflops": rates.bf16 or rates.fp16 or rates.fp32,
        "gpu_sms": float(spec.sm_count),
        "gpu_l2_mib": spec.l2_mib,
        "gpu_compute_capability": major + minor / 10,
        "gpu_power_limit_w": spec.power_limit_w,
        "gpu_context_mib": spec.context_mib,
    }


def _joins(joined: object) -> bool:
    """Return whether a mapping describes an `Interconnect`."""
    if not isinstance(joined, Mapping) or not set(joined) <= {f.name for f in dataclasses.fields(Interconnect)}:
        return False
    link_gb_s, mesh = joined.get("link_gb_s"), joined.get("mesh")
    meshes = mesh is None or (_positive(link_gb_s) and _is_mesh(mesh))
    return _positive(joined.get("pcie_gb_s")) and (link_gb_s is None or _positive(link_gb_s)) and meshes


def _is_mesh(mesh: object) -> bool:
    """Return whether the value is a matrix of the number of links between each two GPUs."""
    if not isinstance(mesh, list) or len(mesh) < 2 or not all(isinstance(row, list) for row in mesh):
        return False
    whole = all(type(count) is int and 0 <= count < _LARGEST for row in mesh for count in row)
    return (
        whole
        and mesh == [list(row) for row in zip(*mesh, strict=False)]
        and all(mesh[rank][rank] == 0 < sum(mesh[rank]) for rank in range(len(mesh)))
    )


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST


def _bound(value: object) -> str:
    return f"< {_LARGEST:g}" if isinstance(value, int | float) and value >= _LARGEST else "> 0"


@functools.cache
def _texts() -> dict[str, str]:
    """Return the YAML files of GPU models by name."""
    files = [file for file in resources.files("conf").joinpath("device").iterdir() if file.name.endswith(".yaml")]
    texts = {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in files}
    return {name: text for name, text in texts.items() if not re.search("^backend:", text, re.MULTILINE)}


@functools.cache
def _description(name: str) -> dict[str, Any]:
    """Return the mapping in one of these files. Parsing all of them takes 10 ms."""
    import yaml

    try:
        from yaml import CSafeLoader as SafeLoader  # ten times as fast
    except ImportError:  # PyYAML was built without libyaml
        from yaml import SafeLoader
    description: dict[str, Any] = yaml.load(_texts()[name], Loader=SafeLoader)
    return description


CURRENT, EAGER, DESCRIBED = "current", "eager", "described"
MACHINES = (CURRENT, DESCRIBED, EAGER)
# Kernels of a small training step, each loaded when it first runs (CUDA 12's default); typical, not measured.
LAZY_KERNELS_MIB, LAZY_CUDNN_MIB = 40.0, 50.0
# Additional memory of all of PyTorch's and cuBLAS's kernels, loaded together: an A100's measured 1,430 MiB less a
# typical 450 under lazy loading. `CUDNN_MIB` is for such a process, too.
EAGER_KERNELS_MIB = 1020.0
# Additional MiB of a process, outside the allocator, once cuDNN has loaded its convolutions: the gap between measured
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
        cudnn_mib: Additional memory where cuDNN's layers run.
        other_mib: Memory in use without the process: a display, other processes, the driver's reserve.

    Raises:
        UsageError: A figure is not a number of at least 0.
    """

    name: str
    context_mib: float
    kernels_mib: float
    cudnn_mib: float
    other_mib: float = 0.0

    def __post_init__(self) -> None:
        problems = [
            f"{part} must be a number from 0 to {_LARGEST_MIB:,.0f}, got {value!r}"
            for part in PARTS
            if not (isinstance(value := getattr(self, part), int | float) and 0 <= value <= _LARGEST_MIB)
        ]
        refuse(problems, f"machine {self.name}: ")

    def outside_mib(self, loads_cudnn: bool) -> float:
        """Return the process's memory in MiB outside the allocator."""
        return self.context_mib + self.kernels_mib + (self.cudnn_mib if loads_cudnn else 0.0)


PARTS = ("context_mib", "kernels_mib", "cudnn_mib", "other_mib")


@functools.lru_cache(maxsize=256)
def machine(name: str, spec: DeviceSpec) -> MachineProfile:
    """Return one of the packaged profiles, for one GPU model.

    `current` is CUDA 12 with lazy loading of kernels, `eager` a stack that loads all of them at start (CUDA 11, or
    CUDA_MODULE_LOADING=EAGER), `described` the device's description: the machine of the measured rows.

    On an AMD GPU, MIOpen is assumed to need as much as cuDNN.

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
    require_one_of("machine", name, MACHINES)
    if name == EAGER and spec.architecture.vendor == AMD:
        raise UsageError(
            f"machine={EAGER} is a stack of CUDA, and {spec.name} is an AMD GPU: pass machine={CURRENT} or "
            f"machine={DESCRIBED}"
        )
    return MachineProfile(name=name, **dict(zip(PARTS[:3], figures_mib[name], strict=True)))


def read_machine(path: Path) -> MachineProfile:
    """Return the profile in a JSON file. Raises `EnvironmentProblem` where it cannot be read as a profile."""
    try:
        return MachineProfile(**json.loads(path.read_text(encoding="utf-8"))["machine"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise EnvironmentProblem(f"{path} is not a machine profile: {exception_line(error)}") from error
