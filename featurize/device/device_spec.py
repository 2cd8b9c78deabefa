"""Descriptions of GPU models, from their data sheets: what the kernel model and the simulated device know of a GPU.

Start reading at `DeviceSpec`. The files are conf/device/NAME.yaml; torch-free, and read only when asked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from conf.device_names import is_device_file, profiles_of, read_device_file, resolve_device, slice_values, split_slice
from conf.device_names import plain_device as plain_device
from conf.errors import UsageError
from featurize.device.architecture import LLVM_TARGETS, Architecture, architecture_of

DEFAULT_DEVICE = "A100-SXM4-40GB"  # what is simulated and estimated for where nobody names a GPU model
_LARGEST = 1e12  # of any figure, in its unit
_ARCHITECTURE = ("compute_capability", "llvm_target")  # of which a description has one
_OPTIONAL = (*_ARCHITECTURE, "interconnect", "power_cap_w")
_LEAST_CAP = 0.25  # of a board's own limit: as an A100-SXM4 takes it, 100 of 400 W; what lies below was not measured
_ABOVE_IDLE = 1.2  # times idle power is the least limit: below it, nothing is left for kernels
_NO_NUMBERS = ("name", "peak_tflops", *_OPTIONAL)


class UnsuitableDevice(UsageError):
    """This GPU model cannot run the job; others may."""


@dataclass(frozen=True, kw_only=True)
class PeakTflops:
    """Dense peak rates in TFLOP/s, a multiply-add counted as 2. None: no tensor cores for that type.

    `fp32` is that of vectors; `fp32_matrix` that of products on units for matrices, as AMD's GPUs have them in fp32.
    `fp8` is that of products of 8-bit floats, summed up in fp32, as `torch._scaled_mm` runs them.
    """

    fp32: float
    fp32_matrix: float | None = None
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Links of a GPU to the others of its node, in GB/s per direction, as data sheets give it.

    `link_gb_s`: all links of NVLink or Infinity Fabric together, where they join all GPUs of a node. None: the GPUs
    talk over PCIe.
    `mesh`: how many links join each GPU of a node to each other one, where no switch does, as `nvidia-smi topo -m`
    shows them. None: any GPU reaches any other one with all of its links.
    """

    pcie_gb_s: float
    link_gb_s: float | None = None
    mesh: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One GPU model. Raises `UsageError` naming the file's bad keys.

    `memory_mib` is what CUDA can use, `context_mib` what NVML charges a process before its first tensor (context
    and library kernels); `launch_overhead_us` is the host's time for one eager operator, which bounds small kernels.
    `power_limit_w` is the board's own limit, `power_cap_w` a lower one that is set (`nvidia-smi -pl`); None: none.
    `interconnect` is None where nothing is known; it decides nothing of a job on one GPU, so that neither equality nor
    the mapping that stands for a description in identities has it.
    An NVIDIA GPU has a `compute_capability`, an AMD GPU an `llvm_target` (gfx942), and none has both: PyTorch's
    numbers for AMD's GPUs are no compute capabilities. Of an AMD GPU, `sm_count` counts compute units, `warps_per_sm`
    the wavefronts that one holds.
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
        if bad:
            raise UsageError(f"device {self.name}: " + "; ".join(bad))

    @property
    def least_limit_w(self) -> float:
        """The lowest power limit that can be set, in W."""
        return max(_LEAST_CAP * self.power_limit_w, _ABOVE_IDLE * self.idle_power_w)

    def _problem_of_limit(self, key: str, limit_w: Any) -> list[str]:
        if _positive(limit_w) and self.least_limit_w <= limit_w <= self.power_limit_w:
            return []
        return [f"{key} must be {self.least_limit_w:g} to {self.power_limit_w:g}, got {limit_w!r}"]

    def under_board_limit(self, limit_w: float) -> DeviceSpec:
        """Return the GPU model with a limit that is set on its board, in W; a MIG slice has its share of that.

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
        """Return whether units for matrices take float32 operands, in TF32 or in full."""
        return self.peak_tflops.tf32 is not None or self.peak_tflops.fp32_matrix is not None

    def tflops(self, math: str) -> float:
        """Peak rate of a matrix product in `fp32`, `tf32`, `bf16`, `fp16` or `fp8`; fp32's where the GPU has no such
        units."""
        rates = self.peak_tflops
        return (getattr(rates, math) if math != "fp32" else None) or rates.fp32_matrix or rates.fp32

    def to_mapping(self) -> dict[str, Any]:
        """The description as `device_from_mapping` reads it and a YAML file would hold it, without the interconnect.

        The rate of 8-bit floats is left out where it is the described one: identities are older than it.
        """
        mapping = {name: value for name, value in dataclasses.asdict(self).items() if name not in _OPTIONAL}
        if self.peak_tflops.fp8 == _described_fp8(self.name):
            del mapping["peak_tflops"]["fp8"]
        if self.power_cap_w is not None:
            mapping["power_cap_w"] = self.power_cap_w
        if self.compute_capability is None:
            return {**mapping, "llvm_target": self.llvm_target}
        return {**mapping, "compute_capability": ".".join(map(str, self.compute_capability))}


def device_names() -> tuple[str, ...]:
    """The described GPU models, sorted; backend choices (files with the key `backend`) are not among them."""
    return tuple(sorted(_descriptions()))


def load_device(name: str) -> DeviceSpec:
    """The description of one GPU model, by a name as `conf.device_names.resolve_device` takes it.

    A MIG slice is named by its GPU and profile, as `conf.device_names` says. An unknown name raises `UsageError`
    listing the known ones, an ambiguous beginning its candidates.
    """
    return _load_device(name) if isinstance(name, str) else _load_device.__wrapped__(name)


@functools.lru_cache(maxsize=1024)
def _load_device(name: str) -> DeviceSpec:
    known = _descriptions()
    if (parts := split_slice(name)) is not None:
        parent = known[resolve_device(parts[0], known)]
        return device_from_mapping({**parent, **slice_values(parent, parts[1])})
    return device_from_mapping(known[resolve_device(name, known)])


def known_device(name: str | None) -> str | None:
    """Return the name, as `load_device` takes it, of the GPU model or MIG slice that a driver calls so; None without a
    description."""
    parent, profile = split_slice(name) or (name, None)
    known = next((one for one in device_names() if same_device(one, parent)), None)
    if known is None or profile is None:
        return known
    return f"{known}:{profile}" if profile in profiles_of(known) else None


def describe_device(name: str | DeviceSpec) -> DeviceSpec:
    """The description of a GPU by a name that `load_device` takes; a description is given back as
    it is. Unknown and ambiguous names raise `UsageError` listing the choices."""
    return name if isinstance(name, DeviceSpec) else load_device(name)


def device_of_user(device: str | DeviceSpec, power_limit_w: float | None = None) -> DeviceSpec:
    """Return the description that a user gives: a name, a description, or the path of a YAML file like those of
    `conf/device/`. Not for names out of rows or requests, which must open no file.

    Args:
        device: What the user gives.
        power_limit_w: Set on the GPU's board, in W; None: the description's own.

    Raises:
        UsageError: As `describe_device` and `device_from_mapping` do, or for a limit out of the GPU model's range.
    """
    if isinstance(device, str) and is_device_file(device):
        described = device_from_mapping(read_device_file(device))
    else:
        described = describe_device(device)
    return described if power_limit_w is None else described.under_board_limit(power_limit_w)


def device_from_mapping(mapping: Mapping[str, Any]) -> DeviceSpec:
    """A description as its YAML holds it. Missing and unknown keys are reported together as `UsageError`.

    `count`, how many of it the farm is to simulate, is no property of the device and is left out. A mapping without an
    `interconnect`, as `DeviceSpec.to_mapping` gives it, gets that of the described GPU model of its name; likewise one
    without a rate of 8-bit floats.
    """
    values = {name: value for name, value in mapping.items() if name != "count"}
    described = _descriptions().get(str(values.get("name")), {})
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
        values["compute_capability"] = None if capability is None else _capability(capability)
    except ValueError:
        problems.append(f"compute_capability must look like '8.0', got {capability!r}")
    if problems or not isinstance(rates, Mapping):
        raise UsageError(f"device {label}: " + "; ".join(problems))
    values["peak_tflops"] = PeakTflops(**{"fp8": _described_fp8(str(label)), **rates})
    if isinstance(joined, Mapping):
        mesh = joined.get("mesh")
        joined = Interconnect(**{**joined, "mesh": None if mesh is None else tuple(map(tuple, mesh))})
    values["interconnect"] = joined
    return DeviceSpec(**values)


def _described_fp8(name: str) -> float | None:
    """Return the described rate of 8-bit floats of a GPU model or MIG slice; None without a description."""
    parent, profile = split_slice(name) or (name, None)
    if parent not in _descriptions() or (profile is not None and profile not in profiles_of(parent)):
        return None
    described = _descriptions()[parent]
    values = described if profile is None else slice_values(described, profile)
    return values["peak_tflops"].get("fp8")


def same_device(one: str | None, other: str | None) -> bool:
    """Drivers say `NVIDIA A100-SXM4-40GB` where data sheets say `A100-SXM4-40GB`."""
    return plain_device(one) == plain_device(other)


def device_features(spec: DeviceSpec) -> dict[str, float]:
    """Return the features that a learner sees of a GPU model."""
    rates = spec.peak_tflops
    return {
        "gpu_memory_mib": spec.memory_mib,
        "gpu_bandwidth_gb_s": spec.bandwidth_gb_s,
        "gpu_fp32_tflops": rates.fp32,
        "gpu_tf32_tflops": rates.tf32 or rates.fp32,
        "gpu_half_tflops": rates.bf16 or rates.fp16 or rates.fp32,
        "gpu_sms": float(spec.sm_count),
        "gpu_l2_mib": spec.l2_mib,
        "gpu_compute_capability": capability_feature(spec.compute_capability),
        "gpu_power_limit_w": spec.power_limit_w,
        "gpu_context_mib": spec.context_mib,
    }


def capability_feature(compute_capability: tuple[int, int] | None) -> float:
    """Return a compute capability as a learner sees it, 8.6; 0 of AMD's GPUs, which have none."""
    major, minor = compute_capability or (0, 0)
    return major + minor / 10


def _capability(text: object) -> tuple[int, int]:
    major, minor = map(int, str(text).split("."))
    return major, minor


def _joins(joined: object) -> bool:
    """Return whether a mapping describes an `Interconnect`."""
    if not isinstance(joined, Mapping) or not set(joined) <= {f.name for f in dataclasses.fields(Interconnect)}:
        return False
    link_gb_s, mesh = joined.get("link_gb_s"), joined.get("mesh")
    meshes = mesh is None or (_positive(link_gb_s) and _is_mesh(mesh))
    return _positive(joined.get("pcie_gb_s")) and (link_gb_s is None or _positive(link_gb_s)) and meshes


def _is_mesh(mesh: object) -> bool:
    """Return whether these are numbers of links between each two GPUs."""
    if not isinstance(mesh, list | tuple) or len(mesh) < 2 or not all(isinstance(row, list | tuple) for row in mesh):
        return False
    counts = [count for row in mesh for count in row]
    if not all(isinstance(count, int) and not isinstance(count, bool) and 0 <= count < _LARGEST for count in counts):
        return False
    return [list(row) for row in mesh] == [list(row) for row in zip(*mesh, strict=False)] and all(
        mesh[at][at] == 0 < sum(mesh[at]) for at in range(len(mesh))
    )


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST


def _bound(value: object) -> str:
    return f"< {_LARGEST:g}" if isinstance(value, int | float) and value >= _LARGEST else "> 0"


@functools.cache
def _descriptions() -> dict[str, dict]:
    import yaml

    try:
        from yaml import CSafeLoader as SafeLoader  # ten times as fast
    except ImportError:  # PyYAML was built without libyaml
        from yaml import SafeLoader
    descriptions = {}
    for entry in resources.files("conf").joinpath("device").iterdir():
        if entry.name.endswith(".yaml"):
            mapping = yaml.load(entry.read_text(encoding="utf-8"), Loader=SafeLoader)
            if isinstance(mapping, dict) and "backend" not in mapping:
                descriptions[entry.name.removesuffix(".yaml")] = mapping
    return descriptions
