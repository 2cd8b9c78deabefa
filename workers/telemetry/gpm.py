"""The `gpm` sensor: SM activity, occupancy, DRAM and pipe activity of Hopper and later GPUs, through NVML's GPM.

Start reading at `GpmSensor`; `_METRICS` says which GPM metric becomes which column.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from workers.telemetry.base import Sample, SensorUnavailable, Target
from workers.telemetry.nvml import Nvml, device_handle, initialise, open_nvml, ratio

_MIN_INTERVAL_NS = 100_000_000  # NVIDIA: figures from two samples closer than 100 ms are not reliable

# GPM metric id (nvmlGpmMetricId_t in nvml.h) -> column; the percentages become ratios
_METRICS = {
    1: "gract",  # NVML_GPM_METRIC_GRAPHICS_UTIL
    2: "smact",  # NVML_GPM_METRIC_SM_UTIL
    3: "smocc",  # NVML_GPM_METRIC_SM_OCCUPANCY
    5: "tensor_active",  # NVML_GPM_METRIC_ANY_TENSOR_UTIL
    10: "drama",  # NVML_GPM_METRIC_DRAM_BW_UTIL
    11: "fp64_active",  # NVML_GPM_METRIC_FP64_UTIL
    12: "fp32_active",  # NVML_GPM_METRIC_FP32_UTIL
    13: "fp16_active",  # NVML_GPM_METRIC_FP16_UTIL
    20: "pcie_tx_mib_s",  # NVML_GPM_METRIC_PCIE_TX_PER_SEC, MiB/s already
    21: "pcie_rx_mib_s",  # NVML_GPM_METRIC_PCIE_RX_PER_SEC
}
_RATES = ("pcie_tx_mib_s", "pcie_rx_mib_s")


class GpmSensor:
    """One GPU by UUID. Each reading is the average between two GPM samples, so the first call after `watch` gives none.

    A reading's time is that of its second sample: it speaks of the time since the previous reading.
    """

    name = "gpm"
    metrics = tuple(_METRICS.values())
    period_s = 0.1

    def __init__(self, nvml: Nvml | Any | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        if nvml is None:
            nvml = open_nvml()
        else:
            initialise(nvml)
        self._nvml: Any = nvml
        self._handle: Any = None
        self._older: Any = None  # two GPM sample buffers that change places
        self._newer: Any = None
        self._older_ns: int | None = None
        self.dropped: dict[str, str] = {}  # metric -> why this device does not give it

    @classmethod
    def create(cls, settings: Any, device_uuid: str | None) -> GpmSensor:
        """As `make_sensors` builds it: checks at once that the device has GPM."""
        sensor = cls()
        try:
            sensor._supported_handle(device_uuid)
        except SensorUnavailable:
            sensor.close()
            raise
        return sensor

    def _supported_handle(self, uuid: str | None) -> Any:
        handle = device_handle(self._nvml, uuid)
        try:
            supported = self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
        except self._nvml.NVMLError as error:  # drivers before GPM do not know the call
            raise SensorUnavailable(f"GPM needs Hopper or later and a driver that knows it: {error}") from error
        if not supported:
            name = self._nvml.nvmlDeviceGetName(handle)
            raise SensorUnavailable(f"GPM needs Hopper or later, this is {name}; use dcgm for SM activity here")
        return handle

    def watch(self, target: Target) -> None:
        if self._nvml is None:
            raise SensorUnavailable("the gpm sensor was closed")
        self._handle = self._supported_handle(target.device_uuid)
        self._older_ns = None
        self.dropped = {}
        try:
            if self._older is None:
                self._older = self._nvml.nvmlGpmSampleAlloc()
            if self._newer is None:
                self._newer = self._nvml.nvmlGpmSampleAlloc()
        except self._nvml.NVMLError as error:
            raise SensorUnavailable(f"GPM gives no sample buffer: {error}") from error

    def sample(self) -> list[Sample]:
        if self._nvml is None or self._handle is None:
            raise SensorUnavailable("the gpm sensor watches nothing")
        now_ns = self._clock_ns()
        if self._older_ns is not None and now_ns - self._older_ns < _MIN_INTERVAL_NS:
            return []
        try:
            self._nvml.nvmlGpmSampleGet(self._handle, self._newer)
            values = self._values() if self._older_ns is not None else {}
        except self._nvml.NVMLError as error:
            raise SensorUnavailable(f"GPM: {error}") from error
        self._older, self._newer, self._older_ns = self._newer, self._older, now_ns
        return [Sample(now_ns, values)] if values else []

    def _values(self) -> dict[str, float]:
        get = self._nvml.c_nvmlGpmMetricsGet_t()
        get.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        get.sample1, get.sample2 = self._older, self._newer
        get.numMetrics = len(_METRICS)
        for slot, metric_id in enumerate(_METRICS):
            get.metrics[slot].metricId = metric_id
        self._nvml.nvmlGpmMetricsGet(get)
        values = {}
        for slot, name in enumerate(_METRICS.values()):
            entry = get.metrics[slot]
            if entry.nvmlReturn != 0:  # each metric has its own return code
                self.dropped[name] = f"GPM: {self._nvml.NVMLError(entry.nvmlReturn)}"
                continue
            if name in _RATES:
                value = entry.value if math.isfinite(entry.value) and entry.value >= 0 else None
            else:
                value = ratio(entry.value)
            if value is not None:
                values[name] = value
                self.dropped.pop(name, None)
        return values

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is None:
            return
        buffers = [buffer for buffer in (self._older, self._newer) if buffer is not None]
        self._handle = self._older = self._newer = None
        try:
            for buffer in buffers:
                nvml.nvmlGpmSampleFree(buffer)
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass  # a driver that is gone cannot be left in a worse state
