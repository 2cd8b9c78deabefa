"""The sensors of one GPU through NVML: `nvml` (memory, power, energy, clocks, utilization, processes) and `gpm`.

Start reading at `NvmlSensor`; `open_nvml` loads the library, `find_gpu` looks up a UUID. `GpuProcesses` attributes the
processes on a GPU to the trial, to the farm, or to others that disturb the measurement. `GpmSensor` reads SM activity,
occupancy, DRAM and pipe activity of Hopper and later GPUs through NVML's GPM.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workers.telemetry.sensors import Sample, Sensor, SensorUnavailable, WatchTarget

# The initial namespace's inode number, a constant of Linux (PROC_PID_INIT_INO in include/linux/proc_ns.h).
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_MPS_SERVICES = ("nvidia-cuda-mps-server", "nvidia-cuda-mps-control")

NO_HOST_PIDS = (
    "NVML lists pids of another pid namespace or of a virtual machine's host; a container needs the host's pids "
    "(--pid=host)"
)
OF_PROCESSES = ("process_memory_mib", "other_processes", "other_memory_mib")
_BYTES_PER_MIB = 1024**2
_SLOW_PERIOD_NS = 1_000_000_000  # period for figures that rarely change: ECC counts, graphics processes
_MIN_RATE_INTERVAL_NS = 50_000_000  # rates over shorter intervals are mostly noise
# NVML's return codes (nvml.h) that stay the same however often a query is repeated.
_NEVER = {
    3: "not supported by this device",
    4: "no permission",
    13: "not known to this driver",
    26: "deprecated",
}
# NVML's return codes for a lost device or library.
GONE = {1, 9, 12, 15, 16, 18, 28}
# The untyped module `pynvml`, or a recording of it. Its `NVMLError` has NVML's return code as `value`.
Nvml = Any


class GpuProcesses:
    """Sorts the pids that NVML lists for one trial's GPU. Each pid is looked up once while it stays listed.

    NVML reports the pids of the driver's machine. In a container with its own pid namespace, or in a virtual machine
    that uses its host's driver, these pids name nothing or a different process. Other processes are therefore counted
    only after NVML has listed the trial's own process. Outside the initial namespace, every listed pid must also exist
    here.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self.known_pids: frozenset[int] = frozenset()
        self._seen_own = False
        self.mps = False  # whether CUDA's multi-process service runs on this GPU
        self._kinds: dict[int, str] = {}

    def figures(self, listed: Mapping[int, int | None]) -> tuple[dict[str, float], dict[str, str]]:
        """Return the metrics of `OF_PROCESSES`, and the reason for each that is unknown.

        `listed` maps each pid to the bytes of device memory charged to it (None: not reported).
        """
        kinds = {pid: self._kinds.get(pid) or self._kind(pid) for pid in listed}
        self._kinds = {pid: kind for pid, kind in kinds.items() if kind != "unknown"}
        by_kind: dict[str, list[int | None]] = {}
        for pid, kind in kinds.items():
            by_kind.setdefault(kind, []).append(listed[pid])
        own_bytes, other_bytes = by_kind.get("own", []), by_kind.get("other", [])
        self.mps = "service" in by_kind
        self._seen_own = self._seen_own or bool(own_bytes)
        if in_initial_pid_namespace():  # a pid that does not exist has just ended
            countable = self._seen_own or not other_bytes
        else:
            countable = self._seen_own and "unknown" not in by_kind
        figures = {"process_memory_mib": _mib(own_bytes) if own_bytes else None}
        if countable:
            figures |= {"other_processes": len(other_bytes), "other_memory_mib": _mib(other_bytes)}
        lacking = () if countable else OF_PROCESSES[1:] if self._seen_own else OF_PROCESSES
        known = {name: figure for name, figure in figures.items() if figure is not None}
        return known, dict.fromkeys(lacking, NO_HOST_PIDS)

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
        """Count these processes and their descendants as the farm's: neither as the trial's nor as others."""
        self.known_pids = frozenset(pids)
        self._kinds = {}


def in_initial_pid_namespace() -> bool:
    """Return whether this process sees the pids that the driver reports."""
    return os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE


def belongs_to(pid: int, root: int) -> bool:
    """Return whether `pid` is `root`, belongs to its session, or descends from it."""
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
    """Return the program's name; None if the process does not exist."""
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.AccessDenied:
        return ""
    except (psutil.Error, ValueError, OverflowError):
        return None


def _mib(charged: list[int | None]) -> float | None:
    known = [bytes_ for bytes_ in charged if bytes_ is not None]
    return sum(known) / _BYTES_PER_MIB if len(known) == len(charged) else None


def open_nvml(given: Nvml | None = None) -> Nvml:
    """Initialise and return `pynvml`, or the `given` NVML. Call `nvmlShutdown` after each success.

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
    """NVML handles of a UUID: `device` is the GPU or MIG slice, `gpu` the whole GPU."""

    device: Any
    gpu: Any
    instance_id: int | None = None  # id of the MIG GPU instance; None: a whole GPU
    shares_instance: bool = False  # other compute instances count towards figures of its GPU instance


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
    """Raise `SensorUnavailable` for a slice that shares its GPU instance: profiling counts per instance."""
    if handles.shares_instance:
        raise SensorUnavailable(f"profiling is per MIG GPU instance, which {uuid} shares with other compute instances")


def memory_before(nvml: Nvml, uuid: str | None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> list[Sample]:
    """Return one sample of the device memory in use, from which growth counts if NVML lists no trial process."""
    try:
        used = nvml.nvmlDeviceGetMemoryInfo(find_gpu(nvml, uuid).device).used
    except (SensorUnavailable, nvml.NVMLError):  # the sensor reports the reason
        return []
    return [Sample(clock_ns(), {"memory_used_mib": used / _BYTES_PER_MIB})]


def ratio(value: float, full: float = 100.0) -> float | None:
    """Return `value / full`, at most 1, since rounding may lift a reading above `full`; None if it is not a share."""
    share = value / full
    if not math.isfinite(share) or share < 0 or share > 1.05:
        return None
    return min(share, 1.0)


class NvmlSensor(Sensor):
    """One GPU or MIG slice by UUID. A query that the device or driver does not support is tried once; see `dropped`.

    NVML averages `gpu_util` and `memory_util` over the last 1/6 to 1 s. `power_w` covers only a part of the time, on
    most boards as a 1 s average: take energy from differences of `energy_j`. PCIe traffic comes from the byte counters
    of newer drivers. The older query blocks for 20 ms in each direction and is not used.

    `process_memory_mib`, `other_processes` and `other_memory_mib` (compute and graphics) need pids of this process's
    namespace: a container needs the host's (`--pid=host`). NVML knows only memory and processes of a MIG slice. Its
    clocks, temperature, throttle reasons and ECC errors are those of its GPU.

    A reading in which every query failed is `unavailable`, with the reason `nvml_error`.
    """

    name = "nvml"
    period_s = 0.1  # the counters of memory and energy change about this often
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
        self, target: WatchTarget, nvml: Nvml | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._nvml = nvml = open_nvml(nvml)
        self._clock_ns = clock_ns
        self._processes = GpuProcesses(target.pid)
        self._graphics: dict[int, int | None] = {}
        self._slow_due_ns = 0
        self._slow = False
        self._pcie: tuple[int, tuple[int, int]] | None = None
        self.dropped: dict[str, str] = {}  # metric -> why this device does not read it
        try:
            handles = find_gpu(nvml, target.device_uuid)
        except SensorUnavailable:
            self.close()
            raise
        self._device, self._gpu = device, gpu = handles.device, handles.gpu
        self._readers: dict[str, Callable[[], dict[str, float]]] = {
            # Version 1 of this struct counts the driver's own reservation as used: a second job cannot have it.
            "memory_used_mib": lambda: {"memory_used_mib": nvml.nvmlDeviceGetMemoryInfo(device).used / _BYTES_PER_MIB},
            "process_memory_mib": self._process_memory,
        }
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
            # Every driver knows this old name; the new one is nvmlDeviceGetCurrentClocksEventReasons.
            "throttle_reasons": lambda: {"throttle_reasons": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)},
            "ecc_uncorrected": self._ecc,
        }

    def ignore(self, pids: Iterable[int]) -> None:
        """Do not count these processes and their descendants as others."""
        self._processes.ignore(pids)

    def sample(self) -> list[Sample]:
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
        """Drop a query that can never work, end the sensor if the device is lost, and ignore any other error."""
        code = getattr(error, "value", None)  # pynvml's version-mismatch error has none
        if code in GONE:
            raise SensorUnavailable(_text_of(error)) from error
        if code is None or code in _NEVER:
            del self._readers[metric]
            self._drop(metric, str(error) if code is None else _NEVER[code])

    def _drop(self, metric: str, reason: str) -> None:
        """Record why `metric`, and others of the same query, are not read."""
        together = {
            "gpu_util": ("memory_util",),
            "pcie_tx_mib_s": ("pcie_rx_mib_s",),
            "process_memory_mib": OF_PROCESSES[1:],
        }
        self.dropped.update(dict.fromkeys((metric, *together.get(metric, ())), reason))

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):  # a driver that is gone cannot be left in a worse state
                nvml.nvmlShutdown()

    # Each of the following methods returns metrics in the farm's units.

    def _process_memory(self) -> dict[str, float]:
        nvml = self._nvml
        listed = _charges(nvml.nvmlDeviceGetComputeRunningProcesses(self._device))
        if self._slow:
            self._graphics = self._optional(nvml.nvmlDeviceGetGraphicsRunningProcesses)
        if self._processes.mps:  # NVML lists its clients separately
            listed = self._optional(nvml.nvmlDeviceGetMPSComputeRunningProcesses) | listed
        values, lacking = self._processes.figures(self._graphics | listed)
        for name in OF_PROCESSES:
            self.dropped.pop(name, None)
        self.dropped |= lacking
        return values

    def _optional(self, list_processes: Callable[[Any], list[Any]]) -> dict[int, int | None]:
        """Return a list of processes; empty on devices and drivers that do not have it."""
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
        """Return MiB/s since the previous reading. Counters may wrap: a smaller count is skipped."""
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
    """Return bytes by pid; None if the driver does not report them (WDDM, some containers)."""
    return {process.pid: process.usedGpuMemory for process in listed}


_GPM_INTERVAL_NS = 100_000_000  # by NVIDIA, figures from samples closer than 100 ms are unreliable
_GPM_FAILURES = 10  # failures in a row before GPM counts as gone

# GPM metric id (nvmlGpmMetricId_t in nvml.h) -> column; the percentages become ratios
_GPM_METRICS = {
    1: "gract",  # NVML_GPM_METRIC_GRAPHICS_UTIL
    2: "smact",  # NVML_GPM_METRIC_SM_UTIL
    3: "smocc",  # NVML_GPM_METRIC_SM_OCCUPANCY
    4: "int_active",  # NVML_GPM_METRIC_INTEGER_UTIL
    5: "tensor_active",  # NVML_GPM_METRIC_ANY_TENSOR_UTIL
    6: "tensor_dfma_active",  # NVML_GPM_METRIC_DFMA_TENSOR_UTIL
    7: "tensor_hmma_active",  # NVML_GPM_METRIC_HMMA_TENSOR_UTIL
    9: "tensor_imma_active",  # NVML_GPM_METRIC_IMMA_TENSOR_UTIL
    10: "drama",  # NVML_GPM_METRIC_DRAM_BW_UTIL
    11: "fp64_active",  # NVML_GPM_METRIC_FP64_UTIL
    12: "fp32_active",  # NVML_GPM_METRIC_FP32_UTIL
    13: "fp16_active",  # NVML_GPM_METRIC_FP16_UTIL
    20: "pcie_tx_mib_s",  # NVML_GPM_METRIC_PCIE_TX_PER_SEC, MiB/s already
    21: "pcie_rx_mib_s",  # NVML_GPM_METRIC_PCIE_RX_PER_SEC
    60: "nvlink_rx_mib_s",  # NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC
    61: "nvlink_tx_mib_s",  # NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC
}


class GpmSensor(Sensor):
    """One GPU or MIG slice by UUID. A reading averages the time between two GPM samples: the first call returns none.

    A reading's `t_ns` is the time of its second sample, `since_ns` the time of its first. If GPM fails to take a
    sample, the reading is `unavailable` with the reason `nvml_error`, and the next reading spans it. The figures of a
    MIG slice are those of its GPU instance.
    """

    name = "gpm"
    metrics = tuple(_GPM_METRICS.values())
    period_s = 0.11  # slightly above GPM's shortest interval: a call that comes a little early reads nothing

    def __init__(
        self, target: WatchTarget, nvml: Nvml | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._clock_ns = clock_ns
        self._nvml = open_nvml(nvml)
        self._buffers: list[Any] = []  # two GPM samples, the older one first; they swap
        self._older_ns: int | None = None
        self._failures = 0
        self._question: Any = None  # one struct for all readings: it has room for hundreds of metrics
        self._entries: list[tuple[str, bool, Any]] = []  # (column, whether a percentage, its place in the struct)
        self.dropped: dict[str, str] = {}  # metric -> why this device does not read it
        try:
            self._handles = self._supported(target.device_uuid)
            for _ in range(2):
                self._buffers.append(self._nvml.nvmlGpmSampleAlloc())
            self._ask()
        except self._nvml.NVMLError as error:
            self.close()
            raise SensorUnavailable(f"GPM gives no sample buffer: {error}") from error
        except SensorUnavailable:
            self.close()
            raise

    def _supported(self, uuid: str | None) -> GpuHandles:
        handles = find_gpu(self._nvml, uuid)
        try:
            supported = self._nvml.nvmlGpmQueryDeviceSupport(handles.gpu).isSupportedDevice
        except self._nvml.NVMLError as error:  # drivers before GPM do not know the call
            raise SensorUnavailable(f"GPM needs Hopper or later and a driver that knows it: {error}") from error
        if not supported:
            name = self._nvml.nvmlDeviceGetName(handles.gpu)
            raise SensorUnavailable(f"GPM needs Hopper or later, this is {name}; use dcgm for SM activity here")
        refuse_shared(handles, uuid)
        return handles

    def _ask(self) -> None:
        question = self._nvml.c_nvmlGpmMetricsGet_t()
        question.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(_GPM_METRICS)
        for slot, (metric_id, name) in enumerate(_GPM_METRICS.items()):
            entry = question.metrics[slot]
            entry.metricId = metric_id
            self._entries.append((name, not name.endswith("_mib_s"), entry))
        self._question = question

    def sample(self) -> list[Sample]:
        now_ns, since_ns = self._clock_ns(), self._older_ns
        if since_ns is not None and now_ns - since_ns < _GPM_INTERVAL_NS:
            return []
        try:
            newer = self._buffers[1]
            if self._handles.instance_id is None:
                self._nvml.nvmlGpmSampleGet(self._handles.gpu, newer)
            else:
                self._nvml.nvmlGpmMigSampleGet(self._handles.gpu, self._handles.instance_id, newer)
            values = self._values() if since_ns is not None else {}
        except self._nvml.NVMLError as error:
            self._failures += 1
            if getattr(error, "value", None) in GONE or self._failures >= _GPM_FAILURES:
                raise SensorUnavailable(f"GPM: {error}") from error
            return [Sample(now_ns, {}, "unavailable", ("nvml_error",))]
        self._failures = 0
        self._buffers.reverse()
        self._older_ns = now_ns
        if since_ns is None:
            return []
        if not values:
            return [Sample(now_ns, {}, "unavailable", ("nvml_error",))]
        return [Sample(now_ns, values, since_ns=since_ns)]

    def _values(self) -> dict[str, float]:
        question = self._question
        question.sample1, question.sample2 = self._buffers
        self._nvml.nvmlGpmMetricsGet(question)
        values = {}
        for name, percentage, entry in self._entries:
            code, figure = entry.nvmlReturn, entry.value
            if code != 0:  # each metric has its own return code
                if name not in self.dropped:
                    self.dropped[name] = f"GPM: {self._nvml.NVMLError(code)}"
                continue
            value = ratio(figure) if percentage else _rate(figure)
            if value is not None:
                values[name] = value
                self.dropped.pop(name, None)
        return values

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):  # a driver that is gone cannot be left in a worse state
                for buffer in self._buffers:
                    nvml.nvmlGpmSampleFree(buffer)
                nvml.nvmlShutdown()


def _rate(figure: float) -> float | None:
    return figure if math.isfinite(figure) and figure >= 0 else None
