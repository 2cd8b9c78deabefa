"""Device backends behind one Protocol, `cuda`, `cpu`, `simulated` and `auto`, which chooses, and settings of trials.

Start reading at `Device`, the interface between a backend, its worker and the measured trial. `make_device` imports a
backend. `TrialSettings` travels with every task: typed frozen values, plain mappings on the wire. Torch-free; a backend
imports torch only in `measure`, which runs in the trial's child. `software_environment` has the versions that labels
depend on. Only the trial server and its children, which have imported torch, call it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import platform
import select
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from conf.children.running import receive
from conf.cli.settings import Checked, key, section
from conf.errors import EnvironmentProblem, UsageError
from conf.files.identity import version_of
from workers.telemetry.sensors import TelemetrySettings

if TYPE_CHECKING:
    from featurize.configs.trial import TrialConfig


BACKENDS = ("auto", "cuda", "cpu", "simulated")
TRACES_ONLY = "GPUFARM_TRACES_ONLY"  # set for a trial server whose trials only trace their step
_HOST_MEMORY_SHARE = 0.9
_ACKNOWLEDGE_TIMEOUT_S = 5.0
_WORD_BYTES = 256
_TABLE = {
    "cuda": "workers.devices.cuda:CudaDevice",
    "cpu": "workers.devices.cpu:CpuDevice",
    "simulated": "workers.devices.simulated:SimulatedDevice",
}


@dataclass(frozen=True, kw_only=True)
class MemberAlone:
    """A group member's figures alone, which a simulated device needs."""

    memory_mib: float
    gpu_util: float
    smact: float
    smocc: float
    drama: float
    power_w: float


@dataclass(frozen=True, kw_only=True)
class Together:
    """A group of trials on one device, from the view of one member.

    Args:
        member: Number of this member.
        size: Number of members.
        sharing: One of `SHARING`.
        alone: Each member's figures alone, for simulated devices; None for a member that ran out of memory.
    """

    member: int
    size: int
    sharing: str
    alone: tuple[MemberAlone | None, ...] = ()


class Link:
    """The trial's side of its socket: sends events as JSON lines, receives words; `workers.trial.body` lists them.

    Args:
        channel: Leads to the worker.
        ahead: The trial is prepared while another one runs, and must not touch the device before `go`.
        together: The group that the trial runs in; None: it has the device to itself.
    """

    def __init__(self, channel: socket.socket, ahead: bool = False, together: Together | None = None):
        self.ahead = ahead
        self.together = together
        self._channel = channel
        self._pid = os.getpid()
        self._buffer = b""
        self._words: set[str] = set()
        self.reported_result = False
        self.ended = False  # the worker has closed its end of the socket

    def report(self, event: str, **values: Any) -> None:
        """Send one event. In a process that the trial's model has forked, exit instead."""
        if os.getpid() != self._pid:
            os._exit(0)
        self._channel.sendall(json.dumps({"event": event, **values}).encode() + b"\n")
        self.reported_result |= event == "result"

    def fileno(self) -> int:
        return self._channel.fileno()

    def close(self) -> None:
        self._channel.close()

    def received(self, word: str) -> bool:
        """Return whether the worker has sent this word; never waits."""
        if word not in self._words:
            self._listen(0.0)
        return word in self._words

    def awaits(self, word: str) -> bool:
        """Return whether the worker has not sent this word and still may; never waits."""
        return not self.received(word) and not self.ended

    def wait(self, word: str, timeout_s: float | None = None) -> bool:
        """Wait for a word. Return False when the worker is gone or the time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.received(word):
            left_s = None if deadline is None else deadline - time.monotonic()
            if self.ended or (left_s is not None and left_s <= 0):
                return False
            self._listen(left_s)
        return True

    def wait_for_go(self) -> None:
        """Wait until it is this trial's turn, if it was prepared ahead."""
        if self.ahead and not self.wait("go"):
            os._exit(0)  # the worker no longer needs this trial, which has measured nothing

    def labels_taken(self) -> bool:
        """Wait for the worker's `bye`; what the trial does later affects no label."""
        return self.wait("bye", _ACKNOWLEDGE_TIMEOUT_S)

    def _listen(self, timeout_s: float | None) -> None:
        if self.ended or not select.select([self._channel], [], [], timeout_s)[0]:
            return
        data = receive(self._channel, _WORD_BYTES)
        self.ended = not data
        *words, self._buffer = (self._buffer + data).split(b"\n")
        self._words |= {word.decode() for word in words}


class DeviceUnavailable(RuntimeError):
    """The backend cannot be used here; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class DeviceChoice(Checked, section="device"):
    """The `device` key of a command: backend, number of workers, and description of the device to model.

    `spec` holds the fields of `featurize.device.device_spec.DeviceSpec`; only `simulated` needs it (`auto` may).
    `memory_limit_mib` is for `cpu`: the host memory that one trial may take. `memory_fraction` is for GPUs: a trial's
    caching allocator may take only this share of the card's memory, as on a smaller card. 1 becomes None.
    """

    backend: str = key("auto", choices=BACKENDS)
    count: int | None = key(None, "simulated devices, or trials at a time on the CPU", "int 1 to 1024")
    spec: Mapping[str, Any] | None = None
    memory_limit_mib: float | None = key(
        None, "host memory a trial may take; default: 90 % of the machine's / count", "number >= 1"
    )
    memory_fraction: float | None = key(
        None,
        "share of the card's memory that a trial may take, as on a smaller card",
        "number > 0 to 1",
        build=lambda fraction: None if fraction in (None, 1) else float(fraction),
    )

    def problems(self) -> Iterator[str]:
        if self.memory_fraction is not None and self.backend == "cpu":
            yield "device.memory_fraction is for GPUs; device=cpu has device.memory_limit_mib"

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields, without a `memory_fraction` of None: ids of older jobs stay the same."""
        values = asdict(self)
        if self.memory_fraction is None:
            del values["memory_fraction"]
        return values


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One place to run trials: a GPU, a share of the CPU, or a simulated GPU. One worker is pinned to each."""

    index: int
    device_name: str
    device_uuid: str | None
    device_memory_mib: float | None
    driver_version: str | None = None
    memory_fraction: float | None = None  # share of its memory that a trial may take; None: all of it
    mig_profile: str | None = None  # a MIG slice's profile, such as 1g.5gb
    mps: bool | None = None  # whether CUDA's multi-process service runs on it


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's place in a trial with several; the ranks meet through the file `store`."""

    rank: int
    ranks: int
    store: str


@runtime_checkable
class Device(Protocol):
    """A device backend. The worker calls `slots` and `environment`; `measure` runs in the trial's child process."""

    backend: str
    source: str  # the source in its rows, one of warehouse.tables.schema.SOURCES
    sampled: bool  # whether the worker samples telemetry while the trial runs; otherwise the trial reports its own
    prepares: bool  # whether the next trial can be prepared on the host without disturbing the measured one

    def slots(self) -> tuple[Slot, ...]:
        """Return the slots of this machine. Raises `DeviceUnavailable` with the reason if it has none."""

    def environment(self, *slots: Slot) -> dict[str, str]:
        """Return the environment variables that pin a trial server to its devices."""

    def measure(
        self,
        config: TrialConfig,
        slot: Slot,
        settings: TrialSettings,
        seed: int,
        link: Link,
        place: Place | None = None,
    ) -> None:
        """Build, warm up and measure one trial, or one rank of it; `link.report` each event (see `workers.trial`)."""


def software_environment() -> dict[str, str | None]:
    """Return the columns of `runs` that are known without touching the GPU."""
    import torch

    return {
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "python_version": platform.python_version(),
        "allocator_settings": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "farm_version": version_of("gpufarm"),  # None if it runs from a source tree
    }


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_mib() -> float:
    """Return the host memory in MiB that this process may use: all, or less by its control group's limit."""
    import psutil

    limits: list[int] = [psutil.virtual_memory().total]
    for version in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # another version, or no limit ("max")
            limits.append(int(Path("/sys/fs/cgroup", version).read_text()))
    return min(limits) / 2**20


def host_memory_share_mib(workers: int) -> float:
    """Return each trial's default share of the host memory in MiB: 90 % of it, divided evenly among `workers`."""
    return host_memory_mib() * _HOST_MEMORY_SHARE / workers


def make_device(choice: DeviceChoice) -> Device:
    """Return the backend that `choice` names; `auto` must be resolved (`choose_device`)."""
    device: Device = pkgutil.resolve_name(_TABLE[choice.backend])(choice)
    return device


def choose_device(choice: DeviceChoice) -> tuple[DeviceChoice, str]:
    """Resolve `auto` to `cuda` if there is a usable GPU, else to `simulated`; return it with a line that explains it.

    Raises `EnvironmentProblem` if the requested backend cannot be used here.
    """
    if choice.backend != "auto":
        try:
            return choice, f"device: {_describe(choice)}"
        except DeviceUnavailable as reason:
            raise EnvironmentProblem(
                f"device={choice.backend}: {reason}; device=auto takes simulated GPUs where there is none"
            ) from reason
    cuda = DeviceChoice(backend="cuda", memory_fraction=choice.memory_fraction)
    try:
        make_device(cuda).slots()
        return cuda, f"device: {_describe(cuda)}"
    except DeviceUnavailable as reason:
        simulated = replace(choice, backend="simulated")
        return simulated, f"device: {_describe(simulated)}, because there is no usable GPU here ({reason})"


def _describe(choice: DeviceChoice) -> str:
    slots = make_device(choice).slots()
    share = "" if choice.memory_fraction is None else f", {choice.memory_fraction:g} of its memory"
    return f"{len(slots)} x {slots[0].device_name} ({choice.backend}{share})"


# ---- settings of trials

PREPARE_AHEAD = ("auto", "always", "never")
SHARING = ("time_slicing", "mps")  # how trials that run together share a GPU


@dataclass(frozen=True, kw_only=True)
class WindowSettings(Checked, section="window"):
    """Rules for the start and end of a run's window. Seconds are real on a real device, virtual when simulated.

    Tolerances are half-widths of 95 % confidence intervals: `tolerance` of the step time and `power_tolerance` are
    relative, `utilization_tolerance` absolute. `memory_steps`: steps without a new peak of memory.
    """

    kind: str = key("adaptive", choices=("adaptive", "fixed"))
    warmup_steps: int = key(
        3, "steps before the window, at least: the first ones grow the allocator and autotune", "int >= 0"
    )
    warmup_max_seconds: float = key(
        20.0,
        "warm-up also waits until memory and step time are steady, but past this for two steps only",
        "number 0 to 1e7",
    )
    min_steps: int = key(5, "least number of steps, unless max_seconds have passed", "int >= 1")
    min_seconds: float = key(1.0, "shortest window", "number 0 to 1e7")
    max_seconds: float = key(60.0, "longest window", "number 0 to 1e7")
    tolerance: float = key(0.02, "relative half-width of the 95 % confidence interval of the step time", "number >= 0")
    utilization_tolerance: float = key(
        0.01, "absolute half-width for GPU utilization, SM activity, occupancy and DRAM activity", "number >= 0"
    )
    power_tolerance: float = key(0.02, "relative half-width for power", "number >= 0")
    memory_steps: int = key(5, "steps without a new peak of memory, warm-up's included", "int >= 0")
    seconds: float | None = key(None, "the whole window, of kind=fixed", "number 0 to 1e7")

    def __post_init__(self) -> None:
        if self.kind == "fixed":
            if self.seconds is None:
                raise UsageError("window.seconds is missing: kind=fixed needs it")
            object.__setattr__(self, "min_seconds", self.seconds)
            object.__setattr__(self, "max_seconds", self.seconds)
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        if self.max_seconds < self.min_seconds:
            yield f"window.max_seconds must be >= window.min_seconds ({self.min_seconds}), got {self.max_seconds}"


@dataclass(frozen=True, kw_only=True)
class TrialRules(Checked, section="trial"):
    """The `trial` key of a command: deadline, preparation, host memory and repeats of each trial."""

    timeout_s: float = key(300, "a trial that takes longer is killed and lands as `timeout`", "number 0.001 to 1e7")
    prepare_ahead: str = key(
        "auto",
        "make the next trial's process ready while one runs; auto: on GPUs, where cores are free",
        choices=PREPARE_AHEAD,
    )
    host_memory_limit_mib: float | None = key(
        None, "host memory of one trial; default: 90 % of the machine's, divided among the workers", "number >= 1"
    )
    # A repeat is one of a task's three attempts.
    quality_repeats: int = key(1, "how often a trial with untrusted labels runs again", "int 0 to 2")


@dataclass(frozen=True, kw_only=True)
class KernelSettings(Checked, section="kernels"):
    """The `kernels` key of a command: which trials are profiled once their labels are taken."""

    steps: int = key(
        0,
        "training steps under torch.profiler after the window, whose kernels land in `kernels`; 0: none",
        "int 0 to 100",
    )


@dataclass(frozen=True, kw_only=True)
class TrialSettings(TrialRules):
    """How each trial of a job is run: everything but its config and the device."""

    window: WindowSettings = section(WindowSettings, required=True)
    telemetry: TelemetrySettings = section(TelemetrySettings)
    kernels: KernelSettings = section(KernelSettings)
    sharing: str = "time_slicing"  # how trials that run together share

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields as a mapping, without default `kernels` and `sharing`, so ids of older jobs stay."""
        values = asdict(self)
        if self.kernels == KernelSettings():
            del values["kernels"]
        if self.sharing == "time_slicing":
            del values["sharing"]
        return values
