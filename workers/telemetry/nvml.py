"""The `nvml` sensor: memory, power, energy, clocks, utilization and other processes of one GPU, through NVML.

Start reading at `NvmlSensor`; `open_nvml` loads the library, `find_gpu` looks up what a UUID names. `GpuProcesses`
attributes the processes on a GPU to the trial, to the farm, or to others that disturb the measurement.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workers.telemetry.base import Sample, Sensor, SensorUnavailable, WatchTarget

# The initial namespace's inode number, a constant of Linux (PROC_PID_INIT_INO in include/linux/proc_ns.h).
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_MPS_SERVICES = ("nvidia-cuda-mps-server", "nvidia-cuda-mps-control")

NO_HOST_PIDS = (
    "NVML's pids are of another pid namespace or of a virtual machine's host; in a container the host's are needed "
    "(--pid=host)"
)
_BYTES_PER_MIB = 1024**2
_SLOW_PERIOD_NS = 1_000_000_000  # period of what rarely changes: ECC counts, processes that draw
_MIN_RATE_INTERVAL_NS = 50_000_000  # two counter readings that are closer are more noise than figure
# NVML's return codes (nvml.h). What a device or driver cannot do it never will: asking again only costs time.
_NEVER = {
    3: "not supported by this device",
    4: "no permission",
    13: "not known to this driver",
    26: "deprecated",
}
# The whole device or library is gone.
GONE = {1, 9, 12, 15, 16, 18, 28}
# The module `pynvml`, which has no types, or a recording of it. Its `NVMLError` carries NVML's return code as `value`.
Nvml = Any


@dataclass(frozen=True, slots=True)
class Share:
    """Division of a GPU's processes. None: unknown; `reason` says why others cannot be counted."""

    own_bytes: int | None
    own_seen: bool
    others: int | None
    other_bytes: int | None
    reason: str | None


class GpuProcesses:
    """Sorts the pids that NVML lists for one trial's GPU. Each pid is looked up once while it stays listed.

    NVML reports the pids of the driver's machine. Inside a pid namespace of one's own (a container) and in a virtual
    machine that reaches its host's driver they mean nothing, or, worse, somebody else: so others are counted only once
    the trial's own process was listed, which shows that the pids are ours, and outside of the initial namespace only
    while every listed pid exists here.
    """

    def __init__(self, root: int, known_pids: frozenset[int] = frozenset()) -> None:
        self.root = root
        self.known_pids = known_pids
        self.seen_own = False
        self.mps = False  # whether CUDA's multi-process service runs on this GPU
        self._kinds: dict[int, str] = {}

    def share(self, listed: Mapping[int, int | None]) -> Share:
        """Divide the processes. `listed`: pid -> bytes of device memory charged to it (None: not reported)."""
        kinds = {pid: self._kinds.get(pid) or self._kind(pid) for pid in listed}
        self._kinds = {pid: kind for pid, kind in kinds.items() if kind != "unknown"}
        by_kind: dict[str, list[int | None]] = {}
        for pid, kind in kinds.items():
            by_kind.setdefault(kind, []).append(listed[pid])
        own_processes, others = by_kind.get("own", []), by_kind.get("other", [])
        self.mps = "service" in by_kind
        self.seen_own = self.seen_own or bool(own_processes)
        if in_initial_pid_namespace():  # a pid that is not there has just ended
            countable = self.seen_own or not others
        else:
            countable = self.seen_own and "unknown" not in by_kind
        return Share(
            own_bytes=_sum(own_processes) if own_processes else None,
            own_seen=bool(own_processes),
            others=len(others) if countable else None,
            other_bytes=_sum(others) if countable else None,
            reason=None if countable else NO_HOST_PIDS,
        )

    def _kind(self, pid: int) -> str:
        if belongs_to(pid, self.root):
            return "own"
        if any(belongs_to(pid, known) for known in self.known_pids):
            return "ignored"
        name = _name(pid)
        if name is None:
            return "unknown"
        return "service" if name.startswith(_MPS_SERVICES) else "other"

    def ignore(self, pids: Iterable[int]) -> None:
        """Treat these processes and their descendants as the farm's from now on: neither the trial's nor others."""
        self.known_pids = frozenset(pids)
        self._kinds = {}


def in_initial_pid_namespace() -> bool:
    """Return whether this process sees the pids that the driver reports."""
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE
    except OSError:  # no /proc: not Linux, where there are no such namespaces
        return os.name == "nt"


def belongs_to(pid: int, root: int) -> bool:
    """Return whether `pid` is `root`, in its session, or its descendant."""
    if pid == root:
        return True
    try:
        if os.getsid(pid) == root:
            return True
    except (OSError, OverflowError):  # vanished, of another pid namespace, or no pid at all
        return False
    import psutil

    try:
        return any(parent.pid == root for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def _name(pid: int) -> str | None:
    """Return the program's name; None if there is no such process."""
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.AccessDenied:
        return ""
    except (psutil.Error, ValueError, OverflowError):
        return None


def _sum(charged: list[int | None]) -> int | None:
    known = [bytes_ for bytes_ in charged if bytes_ is not None]
    return sum(known) if len(known) == len(charged) else None


def open_nvml(given: Nvml | None = None) -> Nvml:
    """Return `pynvml` or the `given` NVML, initialised; pair each success with `nvmlShutdown`.

    NVML counts initialisations, so calls may nest. Raises `SensorUnavailable`.
    """
    nvml: Any = given
    if nvml is None:
        try:
            import pynvml
        except ModuleNotFoundError as error:
            if error.name != "pynvml":
                raise
            raise SensorUnavailable("the package nvidia-ml-py is not installed") from error
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise SensorUnavailable(f"{_text_of(error)}; is the NVIDIA driver installed and loaded?") from error
    return nvml


def _text_of(error: Exception) -> str:
    text = str(error)
    return text if text.startswith("NVML") else f"NVML: {text}"


def as_text(value: str | bytes) -> str:
    """Return a name as text; older pynvml releases return bytes."""
    return value.decode() if isinstance(value, bytes) else value


@dataclass(frozen=True)
class GpuHandles:
    """NVML handles of a UUID: `device` is the GPU or MIG slice itself, `gpu` the whole GPU that it is or belongs to."""

    device: Any
    gpu: Any
    instance_id: int | None = None  # id of the MIG GPU instance; None: a whole GPU
    shares_instance: bool = False  # with other compute instances: what is counted per GPU instance is not its alone


def find_gpu(nvml: Nvml, uuid: str | None) -> GpuHandles:
    """Return NVML's handles of the GPU or MIG slice with this UUID. Raises `SensorUnavailable`."""
    if uuid is None:
        raise SensorUnavailable("this worker has no GPU")
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        if not uuid.startswith("MIG-"):
            return GpuHandles(handle, handle)
        gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        part = nvml.nvmlDeviceGetAttributes(handle)
        shares = 0 < part.computeInstanceSliceCount < part.gpuInstanceSliceCount
        return GpuHandles(handle, gpu, nvml.nvmlDeviceGetGpuInstanceId(handle), shares)
    except nvml.NVMLError as error:
        raise SensorUnavailable(f"NVML knows no GPU with UUID {uuid}: {error}") from error


def refuse_shared(handles: GpuHandles, uuid: str | None) -> None:
    """Raise `SensorUnavailable` for a slice that shares its GPU instance, since profiling counts per instance."""
    if handles.shares_instance:
        raise SensorUnavailable(f"profiling is per MIG GPU instance, which {uuid} shares with other compute instances")


def memory_before(nvml: Nvml, uuid: str | None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> list[Sample]:
    """Return one sample of the device memory in use, or none: the base of growth if NVML lists no trial process."""
    try:
        used = nvml.nvmlDeviceGetMemoryInfo(find_gpu(nvml, uuid).device).used
    except (SensorUnavailable, nvml.NVMLError):  # the sensor says why
        return []
    return [Sample(clock_ns(), {"memory_used_mib": used / _BYTES_PER_MIB})]


def ratio(value: float, full: float = 100.0) -> float | None:
    """Return `value / full` in [0, 1], None if it is not a share. Rounding may lift a reading slightly above full."""
    share = value / full
    if not math.isfinite(share) or share < 0 or share > 1.05:
        return None
    return min(share, 1.0)


class NvmlSensor(Sensor):
    """One GPU or MIG slice by UUID. A query that the device or driver lacks is asked once, then left out: `dropped`.

    `gpu_util` and `memory_util` are NVML's own averages over its last 1/6 to 1 s, `power_w` covers a part of the time
    only (on most boards a 1 s average): energy is to be taken from differences of `energy_j`. PCIe traffic comes from
    the byte counters of newer drivers; the older query for it blocks for 20 ms in each direction and is not used.

    `process_memory_mib`, `other_processes` and `other_memory_mib` (compute and graphics) need NVML's pids to be of this
    pid namespace: in a container that means the host's (`--pid=host`). Of a MIG slice NVML knows memory and processes
    only; clocks, temperature, throttle reasons and ECC errors are those of the GPU that it is part of.

    A reading in which every query failed comes as `unavailable`, with the reason `nvml_error`.
    """

    name = "nvml"
    period_s = 0.1  # the counters behind memory and energy move at about this pace
    lag_s = 0.0
    metrics: tuple[str, ...] = (
        "memory_used_mib",
        "process_memory_mib",
        "other_processes",
        "other_memory_mib",
        "gpu_util",
        "memory_util",
        "power_w",
        "energy_j",
        "sm_clock_mhz",
        "memory_clock_mhz",
        "temperature_c",
        "throttle_reasons",
        "ecc_uncorrected",
        "pcie_tx_mib_s",
        "pcie_rx_mib_s",
    )

    def __init__(
        self,
        nvml: Nvml | None = None,
        *,
        known_pids: frozenset[int] = frozenset(),
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`known_pids`: processes of the farm that may be on the GPU beside the trial's; see `ignore`."""
        self._opened: Nvml | None = open_nvml(nvml)
        self._clock_ns = clock_ns
        self._device: Any = None  # the GPU or the MIG slice
        self._gpu: Any = None  # the GPU that it is part of
        self._known_pids = known_pids
        self._processes = GpuProcesses(0, known_pids)
        self._graphics: dict[int, int | None] = {}
        self._readers: dict[str, Callable[[], dict[str, float]]] = {}
        self._slow_due_ns = 0
        self._slow = False
        self._pcie: tuple[int, tuple[int, int]] | None = None
        self.dropped: dict[str, str] = {}  # metric -> why this device does not read it

    @classmethod
    def create(cls, settings: Any, device_uuid: str | None) -> NvmlSensor:
        """Build the sensor for `make_sensors`; checks at once that the device exists."""
        sensor = cls()
        try:
            find_gpu(sensor._nvml, device_uuid)
        except SensorUnavailable:
            sensor.close()
            raise
        return sensor

    @property
    def _nvml(self) -> Nvml:
        if self._opened is None:
            raise SensorUnavailable("the nvml sensor was closed")
        return self._opened

    def ignore(self, pids: Iterable[int]) -> None:
        """Do not count these processes and their descendants as others, for this trial and later ones."""
        self._known_pids = frozenset(pids)
        self._processes.ignore(self._known_pids)

    def watch(self, target: WatchTarget) -> None:
        handles = find_gpu(self._nvml, target.device_uuid)
        self._device, self._gpu = handles.device, handles.gpu
        self._processes = GpuProcesses(target.pid, self._known_pids)
        self._graphics = {}
        self._slow_due_ns = 0
        self._pcie = None
        self.dropped = {}
        self._readers = {"memory_used_mib": self._memory, "process_memory_mib": self._process_memory}
        nvml, device, gpu = self._nvml, self._device, self._gpu
        of_whole_gpu: dict[str, Callable[[], dict[str, float]]] = {
            "gpu_util": self._utilization,
            "power_w": lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(device) / 1000},
            "energy_j": lambda: {"energy_j": nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000},
            "pcie_tx_mib_s": self._pcie_rates,
        }
        if handles.instance_id is None:
            self._readers |= of_whole_gpu
        else:
            for metric in of_whole_gpu:
                self._drop(metric, "NVML does not give it for a MIG slice")
        self._readers |= {
            "sm_clock_mhz": lambda: {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)},
            "memory_clock_mhz": lambda: {"memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)},
            "temperature_c": lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)},
            # The call's old name, which every driver knows; the new one is nvmlDeviceGetCurrentClocksEventReasons.
            "throttle_reasons": lambda: {"throttle_reasons": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)},
            "ecc_uncorrected": self._ecc,
        }

    def sample(self) -> list[Sample]:
        if self._opened is None or self._device is None:
            raise SensorUnavailable("the nvml sensor watches nothing")
        t_ns = self._clock_ns()
        self._slow = t_ns >= self._slow_due_ns
        if self._slow:
            self._slow_due_ns = t_ns + _SLOW_PERIOD_NS
        values: dict[str, float] = {}
        for metric, read in list(self._readers.items()):
            try:
                values.update(read())
            except self._nvml.NVMLError as error:
                self._judge(metric, error)
        return [Sample(t_ns, values) if values else Sample(t_ns, {}, "unavailable", ("nvml_error",))]

    def _judge(self, metric: str, error: Exception) -> None:
        """Drop a query that can never work, end the sensor for a lost device, and ignore any other error."""
        code = getattr(error, "value", None)  # pynvml's version-mismatch error carries none
        if code in GONE:
            raise SensorUnavailable(_text_of(error)) from error
        if code is None or code in _NEVER:
            del self._readers[metric]
            self._drop(metric, str(error) if code is None else _NEVER[code])

    def _drop(self, metric: str, reason: str) -> None:
        """Record once why `metric`, and the others of the same query, are not given."""
        together = {
            "gpu_util": ("memory_util",),
            "pcie_tx_mib_s": ("pcie_rx_mib_s",),
            "process_memory_mib": ("other_processes", "other_memory_mib"),
        }
        self.dropped.update(dict.fromkeys((metric, *together.get(metric, ())), reason))

    def close(self) -> None:
        nvml, self._opened = self._opened, None
        self._device = self._gpu = None
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                pass  # a driver that is gone cannot be left in a worse state

    # Each returns metrics in our units.

    def _memory(self) -> dict[str, float]:
        # version 1 of this struct counts the driver's own reservation as used, which is what a second job cannot have
        return {"memory_used_mib": self._nvml.nvmlDeviceGetMemoryInfo(self._device).used / _BYTES_PER_MIB}

    def _process_memory(self) -> dict[str, float]:
        nvml = self._nvml
        listed = _charges(nvml.nvmlDeviceGetComputeRunningProcesses(self._device))
        if self._slow:
            self._graphics = self._optional(nvml.nvmlDeviceGetGraphicsRunningProcesses)
        if self._processes.mps:  # its clients stand in a list of their own
            listed = self._optional(nvml.nvmlDeviceGetMPSComputeRunningProcesses) | listed
        share = self._processes.share(self._graphics | listed)
        values = {}
        if share.own_bytes is not None:
            values["process_memory_mib"] = share.own_bytes / _BYTES_PER_MIB
        if share.others is not None:
            values["other_processes"] = share.others
        if share.other_bytes is not None:
            values["other_memory_mib"] = share.other_bytes / _BYTES_PER_MIB
        if share.own_seen:
            self.dropped.pop("process_memory_mib", None)
        elif share.reason is not None and not self._processes.seen_own:
            self.dropped["process_memory_mib"] = share.reason
        for name in ("other_processes", "other_memory_mib"):
            if share.reason is None:
                self.dropped.pop(name, None)
            else:
                self.dropped[name] = share.reason
        return values

    def _optional(self, list_processes: Callable[[Any], list[Any]]) -> dict[int, int | None]:
        """Return a list that some devices and drivers lack; without it, the compute processes must suffice."""
        try:
            return _charges(list_processes(self._device))
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) in GONE:
                raise
            return {}

    def _utilization(self) -> dict[str, float]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._device)
        shares = {"gpu_util": ratio(rates.gpu), "memory_util": ratio(rates.memory)}
        return {name: share for name, share in shares.items() if share is not None}

    def _ecc(self) -> dict[str, float]:
        if not self._slow:
            return {}
        nvml = self._nvml
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return {"ecc_uncorrected": nvml.nvmlDeviceGetTotalEccErrors(self._gpu, uncorrected, volatile)}

    def _pcie_rates(self) -> dict[str, float]:
        """Return MiB/s since the previous reading, from counters that may wrap; a smaller count is skipped."""
        nvml, now_ns = self._nvml, self._clock_ns()
        if self._pcie is not None and now_ns - self._pcie[0] < _MIN_RATE_INTERVAL_NS:
            return {}
        fields = [nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES]
        counters = nvml.nvmlDeviceGetFieldValues(self._device, fields)
        for field in counters:
            if field.nvmlReturn != 0:
                raise nvml.NVMLError(field.nvmlReturn)
        narrow = nvml.NVML_VALUE_TYPE_UNSIGNED_INT
        counts = tuple(f.value.uiVal if f.valueType == narrow else f.value.ullVal for f in counters)
        before, self._pcie = self._pcie, (now_ns, counts)
        if before is None:
            return {}
        elapsed_s = (now_ns - before[0]) / 1e9
        return {
            name: (count - last) / _BYTES_PER_MIB / elapsed_s
            for name, count, last in zip(("pcie_tx_mib_s", "pcie_rx_mib_s"), counts, before[1], strict=True)
            if count >= last
        }


def _charges(listed: Iterable[Any]) -> dict[int, int | None]:
    """Return bytes by pid; None where the driver does not report them (WDDM, some containers)."""
    return {process.pid: process.usedGpuMemory for process in listed}
