"""The `gpm` sensor: SM activity, occupancy, DRAM and pipe activity of Hopper and later GPUs, through NVML's GPM.

Start reading at `GpmSensor`; `_METRICS` says which GPM metric becomes which column.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from workers.telemetry.base import Sample, Sensor, SensorUnavailable, WatchTarget
from workers.telemetry.nvml import GONE, GpuHandles, Nvml, find_gpu, open_nvml, ratio, refuse_shared

_MIN_INTERVAL_NS = 100_000_000  # NVIDIA: figures from two samples closer than 100 ms are not reliable
_FAILURES_ALLOWED = 10  # in a row, before GPM counts as gone

# GPM metric id (nvmlGpmMetricId_t in nvml.h) -> column; the percentages become ratios
_METRICS = {
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
    """One GPU or MIG slice by UUID. A reading averages the time between two GPM samples, so the first call has none.

    A reading's time is that of its second sample, `since_ns` that of its first. A sample that GPM failed to take comes
    as `unavailable`, with the reason `nvml_error`, and the next reading spans it. The figures of a MIG slice are those
    of its GPU instance.
    """

    name = "gpm"
    metrics = tuple(_METRICS.values())
    period_s = 0.11  # a little over the least interval: a call that comes early by a hair would read nothing

    def __init__(self, nvml: Nvml | Any | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._nvml: Any = open_nvml(nvml)
        self._found: GpuHandles | None = None
        self._older: Any = None  # two GPM sample buffers that change places
        self._newer: Any = None
        self._older_ns: int | None = None
        self._failures = 0
        self._question: Any = None  # one struct for all readings: it holds room for hundreds of metrics
        self._entries: list[tuple[str, bool, Any]] = []  # (column, whether a percentage, its place in the struct)
        self.dropped: dict[str, str] = {}  # metric -> why this device does not read it

    @classmethod
    def create(cls, settings: Any, device_uuid: str | None) -> GpmSensor:
        """Build the sensor for `make_sensors`; checks at once that the device has GPM."""
        sensor = cls()
        try:
            sensor._supported(device_uuid)
        except SensorUnavailable:
            sensor.close()
            raise
        return sensor

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

    def watch(self, target: WatchTarget) -> None:
        if self._nvml is None:
            raise SensorUnavailable("the gpm sensor was closed")
        self._found = self._supported(target.device_uuid)
        self._older_ns = None
        self._failures = 0
        self.dropped = {}
        try:
            if self._older is None:
                self._older = self._nvml.nvmlGpmSampleAlloc()
            if self._newer is None:
                self._newer = self._nvml.nvmlGpmSampleAlloc()
        except self._nvml.NVMLError as error:
            raise SensorUnavailable(f"GPM gives no sample buffer: {error}") from error
        if self._question is None:
            self._ask()

    def _ask(self) -> None:
        question = self._nvml.c_nvmlGpmMetricsGet_t()
        question.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(_METRICS)
        for slot, (metric_id, name) in enumerate(_METRICS.items()):
            entry = question.metrics[slot]
            entry.metricId = metric_id
            self._entries.append((name, not name.endswith("_mib_s"), entry))
        self._question = question

    def sample(self) -> list[Sample]:
        if self._nvml is None or self._found is None:
            raise SensorUnavailable("the gpm sensor watches nothing")
        now_ns, since_ns = self._clock_ns(), self._older_ns
        if since_ns is not None and now_ns - since_ns < _MIN_INTERVAL_NS:
            return []
        try:
            self._take()
            values = self._values() if since_ns is not None else {}
        except self._nvml.NVMLError as error:
            self._failures += 1
            if getattr(error, "value", None) in GONE or self._failures >= _FAILURES_ALLOWED:
                raise SensorUnavailable(f"GPM: {error}") from error
            return [Sample(now_ns, {}, "unavailable", ("nvml_error",))]
        self._failures = 0
        self._older, self._newer, self._older_ns = self._newer, self._older, now_ns
        if since_ns is None:
            return []
        if not values:
            return [Sample(now_ns, {}, "unavailable", ("nvml_error",))]
        return [Sample(now_ns, values, since_ns=since_ns)]

    def _take(self) -> None:
        """Fill the newer buffer."""
        if (handles := self._found) is None:
            raise SensorUnavailable("the gpm sensor watches nothing")
        if handles.instance_id is None:
            self._nvml.nvmlGpmSampleGet(handles.gpu, self._newer)
        else:
            self._nvml.nvmlGpmMigSampleGet(handles.gpu, handles.instance_id, self._newer)

    def _values(self) -> dict[str, float]:
        question = self._question
        question.sample1, question.sample2 = self._older, self._newer
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
        if nvml is None:
            return
        buffers = [buffer for buffer in (self._older, self._newer) if buffer is not None]
        self._found = self._older = self._newer = None
        try:
            for buffer in buffers:
                nvml.nvmlGpmSampleFree(buffer)
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass  # a driver that is gone cannot be left in a worse state


def _rate(figure: float) -> float | None:
    return figure if math.isfinite(figure) and figure >= 0 else None
