"""The device Protocol: what a backend offers to the worker that uses it and to the trial that is measured on it.

Start reading at `Device`. Torch-free; a backend imports torch only inside `measure`, which runs in the trial's child.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from conf.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from featurize.trial import TrialConfig
    from workers.settings import TrialSettings

BACKENDS = ("auto", "cuda", "cpu", "simulated")

Report = Callable[..., None]


class DeviceUnavailable(RuntimeError):
    """This backend cannot be used here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """The `device` key of a command: which backend, how many workers, and the device description to model.

    `spec` holds the fields of `featurize.device_spec.DeviceSpec`; only `simulated` needs it (`auto` may).
    `memory_limit_mib` is for `cpu`: the host memory that one trial may take.
    """

    backend: str
    count: int | None = None
    spec: Mapping[str, Any] | None = None
    memory_limit_mib: float | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise unknown_name("device", self.backend, BACKENDS)
        if self.count is not None and (not isinstance(self.count, int) or self.count < 1):
            raise UsageError(f"device.count must be an integer >= 1, got {self.count!r}")

    def to_mapping(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One place to run trials: a GPU, a share of the CPU, or a simulated GPU. One worker is pinned to each."""

    index: int
    device_name: str
    device_uuid: str | None
    device_memory_mib: float | None
    driver_version: str | None = None


@runtime_checkable
class Device(Protocol):
    """A backend. `slots` and `environment` are for the worker; `measure` runs in the trial's child process."""

    backend: str
    source: str  # warehouse.schema.SOURCES: what its rows say of themselves
    sampled: bool  # whether the worker samples telemetry while the trial runs; otherwise the trial reports its own

    def slots(self) -> tuple[Slot, ...]:
        """The places this machine has. Raises `DeviceUnavailable` with the reason when there is none."""
        ...

    def environment(self, slot: Slot) -> dict[str, str]:
        """Environment variables for the trial server of this slot: what pins it to its device."""
        ...

    def measure(self, config: TrialConfig, slot: Slot, settings: TrialSettings, seed: int, report: Report) -> None:
        """Build, warm up and measure one trial; call `report` for each event (see `workers.trial`)."""
        ...
