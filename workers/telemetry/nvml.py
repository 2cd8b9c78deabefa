"""The `nvml` sensor: memory, power, energy, clocks and utilization of one GPU, through NVIDIA's management library.

Start reading at `NvmlSensor`; `Nvml` is all of the library that is used, `open_nvml` loads the real one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from workers.telemetry.base import Sample, SensorUnavailable, Target

_BYTES_PER_MIB = 1024**2
_PCIE_PERIOD_S = 1.0

# NVML's return codes (nvml.h). What a device or driver cannot do it never will: asking again only costs time.
_NEVER = {
    3: "not supported by this device",
    4: "no permission",
    13: "not known to this driver",
    26: "deprecated",
}
# The whole device or library is gone.
_GONE = {1, 9, 12, 15, 16, 18, 28}


class Nvml(Protocol):
    """The part of `pynvml` that sensors and discovery use; the module itself satisfies it, so does a recording."""

    NVMLError: type[Exception]  # instances carry NVML's return code as `value`
    NVML_CLOCK_SM: int
    NVML_CLOCK_MEM: int
    NVML_TEMPERATURE_GPU: int
    NVML_PCIE_UTIL_TX_BYTES: int
    NVML_PCIE_UTIL_RX_BYTES: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetDisplayActive(self, handle: Any) -> int: ...
    def nvmlDeviceGetDisplayMode(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int: ...
    def nvmlDeviceGetClockInfo(self, handle: Any, type: int) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int: ...
    def nvmlDeviceGetPcieThroughput(self, handle: Any, counter: int) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]: ...


def open_nvml() -> Nvml:
    """`pynvml`, initialised; each success is to be paired with `nvmlShutdown`. Raises `SensorUnavailable`."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        if error.name != "pynvml":
            raise
        raise SensorUnavailable("the package nvidia-ml-py is not installed") from error
    initialise(pynvml)
    return pynvml


def initialise(nvml: Nvml) -> None:
    """`nvmlInit`, its failure told as `SensorUnavailable`. NVML counts initialisations, so nesting is fine."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise SensorUnavailable(f"{_said(error)}; is the NVIDIA driver installed and loaded?") from error


def _said(error: Exception) -> str:
    text = str(error)
    return text if text.startswith("NVML") else f"NVML: {text}"


def as_text(value: str | bytes) -> str:
    """Older pynvml releases return names as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def device_handle(nvml: Nvml, uuid: str | None) -> Any:
    """NVML's handle of the GPU with this UUID. Raises `SensorUnavailable`."""
    if uuid is None:
        raise SensorUnavailable("this worker has no GPU")
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        raise SensorUnavailable(f"NVML knows no GPU with UUID {uuid}: {error}") from error


def ratio(value: float, full: float = 100.0) -> float | None:
    """`value / full` in [0, 1]; None for what is no share. Rounding may lift a reading a little above full."""
    share = value / full
    if not math.isfinite(share) or share < 0 or share > 1.05:
        return None
    return min(share, 1.0)


class NvmlSensor:
    """One GPU by UUID. A query that the device or driver lacks is asked once, then left out; see `dropped`.

    `gpu_util` and `memory_util` are NVML's own averages over its last 1/6 to 1 s, `power_w` covers a part of the
    time only (on most boards a 1 s average): energy is to be taken from differences of `energy_j`.
    PCIe throughput is off by default, since each of its two calls blocks for the 20 ms it measures; `pcie=True` takes
    it once a second. `process_memory_mib` needs the pids that NVML reports to be of this pid namespace: in a container
    that means the host's (`--pid=host`).
    """

    name = "nvml"
    period_s = 0.1  # the counters behind memory and energy move at about this pace

    def __init__(self, nvml: Nvml | None = None, *, pcie: bool = False) -> None:
        if nvml is None:
            nvml = open_nvml()
        else:
            initialise(nvml)
        self._nvml: Nvml | None = nvml
        self._handle: Any = None
        self._target: Target | None = None
        self._readers: dict[str, Callable[[], dict[str, float]]] = {}
        self._pcie = pcie
        self._pcie_due_ns = 0
        self._seen_process = False
        self.dropped: dict[str, str] = {}  # metric -> why this device does not give it
        self.metrics: tuple[str, ...] = (
            "memory_used_mib", "process_memory_mib", "gpu_util", "memory_util", "power_w", "energy_j",
            "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons",
        )  # fmt: skip
        if pcie:
            self.metrics += ("pcie_tx_mib_s", "pcie_rx_mib_s")

    @classmethod
    def create(cls, settings: Any, device_uuid: str | None) -> NvmlSensor:
        """As `make_sensors` builds it: checks at once that the device is there."""
        sensor = cls()
        try:
            device_handle(sensor._nvml, device_uuid)
        except SensorUnavailable:
            sensor.close()
            raise
        return sensor

    def watch(self, target: Target) -> None:
        if self._nvml is None:
            raise SensorUnavailable("the nvml sensor was closed")
        self._handle = device_handle(self._nvml, target.device_uuid)
        self._target = target
        self._seen_process = False
        self.dropped = {}
        self._readers = {
            "memory_used_mib": self._memory,
            "process_memory_mib": self._process_memory,
            "gpu_util": self._utilization,
            "power_w": self._power,
            "energy_j": self._energy,
            "sm_clock_mhz": self._sm_clock,
            "memory_clock_mhz": self._memory_clock,
            "temperature_c": self._temperature,
            "throttle_reasons": self._throttle_reasons,
        }
        if self._pcie:
            self._readers["pcie_tx_mib_s"] = self._pcie_throughput

    def sample(self) -> list[Sample]:
        if self._nvml is None or self._handle is None:
            raise SensorUnavailable("the nvml sensor watches nothing")
        t_ns = time.monotonic_ns()
        values: dict[str, float] = {}
        for metric, read in list(self._readers.items()):
            try:
                values |= read()
            except self._nvml.NVMLError as error:
                self._judge(metric, error)
        return [Sample(t_ns, values)] if values else []

    def _judge(self, metric: str, error: Exception) -> None:
        """What can never work is dropped, a lost device ends the sensor, anything else may pass by the next time."""
        code = getattr(error, "value", None)  # pynvml's version-mismatch error carries none
        if code in _GONE:
            raise SensorUnavailable(_said(error)) from error
        if code in _NEVER or code is None:
            del self._readers[metric]
            reason = _NEVER.get(code, str(error))
            together = {"gpu_util": ("memory_util",), "pcie_tx_mib_s": ("pcie_rx_mib_s",)}.get(metric, ())
            for name in (metric, *together):
                self.dropped[name] = reason

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        self._handle = None
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                pass  # a driver that is gone cannot be left in a worse state

    # one method per NVML call; each returns metrics in our units

    def _memory(self) -> dict[str, float]:
        # version 1 of this struct counts the driver's own reservation as used, which is what a second job cannot have
        return {"memory_used_mib": self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / _BYTES_PER_MIB}

    def _process_memory(self) -> dict[str, float]:
        listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        own = [p for p in listed if belongs_to(p.pid, self._target.pid)]
        if own:
            self._seen_process = True
            self.dropped.pop("process_memory_mib", None)
        elif listed and not self._seen_process:
            self.dropped["process_memory_mib"] = (
                "NVML lists processes, but none of this trial's; in a container the host's pids are needed (--pid=host)"
            )
        charged = [p.usedGpuMemory for p in own]
        if not charged or None in charged:  # None: the driver does not say (WDDM, some containers)
            return {}
        return {"process_memory_mib": sum(charged) / _BYTES_PER_MIB}

    def _utilization(self) -> dict[str, float]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        shares = {"gpu_util": ratio(rates.gpu), "memory_util": ratio(rates.memory)}
        return {name: share for name, share in shares.items() if share is not None}

    def _power(self) -> dict[str, float]:
        return {"power_w": self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000}

    def _energy(self) -> dict[str, float]:
        return {"energy_j": self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000}

    def _sm_clock(self) -> dict[str, float]:
        return {"sm_clock_mhz": self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)}

    def _memory_clock(self) -> dict[str, float]:
        return {"memory_clock_mhz": self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_MEM)}

    def _temperature(self) -> dict[str, float]:
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        return {"temperature_c": self._nvml.nvmlDeviceGetTemperature(self._handle, sensor)}

    def _throttle_reasons(self) -> dict[str, float]:
        # the call's old name, which every driver knows; the new one is nvmlDeviceGetCurrentClocksEventReasons
        return {"throttle_reasons": self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)}

    def _pcie_throughput(self) -> dict[str, float]:
        now_ns = time.monotonic_ns()
        if now_ns < self._pcie_due_ns:
            return {}
        self._pcie_due_ns = now_ns + int(_PCIE_PERIOD_S * 1e9)
        read, nvml = self._nvml.nvmlDeviceGetPcieThroughput, self._nvml
        return {  # NVML says KB/s and counts 1024 bytes
            "pcie_tx_mib_s": read(self._handle, nvml.NVML_PCIE_UTIL_TX_BYTES) / 1024,
            "pcie_rx_mib_s": read(self._handle, nvml.NVML_PCIE_UTIL_RX_BYTES) / 1024,
        }


def belongs_to(pid: int, root: int) -> bool:
    """Whether `pid` is `root`, of its session, or below it in the process tree."""
    if pid == root:
        return True
    try:
        if os.getsid(pid) == root:
            return True
    except OSError:  # vanished, or of another pid namespace
        return False
    import psutil

    try:
        return any(parent.pid == root for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False
