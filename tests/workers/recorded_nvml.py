"""Replays an NVML session from JSON behind the same functions as `pynvml`, and fakes its GPM on top.

Start reading at `RecordedNvml`; the format is told in the `comment` of `data/nvml_session.json`, which is hand-made.
"""

from __future__ import annotations

import json
import types
from pathlib import Path

import pynvml

SESSION = Path(__file__).parent / "data" / "nvml_session.json"
A100_UUID = "GPU-5a7c1f0e-3d21-4b8a-9c44-0f6d2e81b701"
DISPLAY_UUID = "GPU-8daf4c31-6054-7ebd-cf77-3c9051b4ea34"
UNKNOWN_UUID = "GPU-00000000-0000-0000-0000-000000000000"


class RecordedNvml:
    """Answers from the recording; `advance` steps every device to its next frame. `calls` counts by function name.

    `pids` maps the recording's names of processes to real pids. `initialised` counts nvmlInit less nvmlShutdown.
    """

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_CLOCK_MEM = pynvml.NVML_CLOCK_MEM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_PCIE_UTIL_TX_BYTES = pynvml.NVML_PCIE_UTIL_TX_BYTES
    NVML_PCIE_UTIL_RX_BYTES = pynvml.NVML_PCIE_UTIL_RX_BYTES

    def __init__(self, path: Path = SESSION, pids: dict[str, int] | None = None) -> None:
        recording = json.loads(path.read_text())
        self._driver_version = recording["driver_version"]
        self.answers = [dict(device["answers"]) for device in recording["devices"]]
        self._frames = [list(device["frames"]) for device in recording["devices"]]
        self._pids = pids or {}
        self.initialised = 0
        self.calls: dict[str, int] = {}
        self.advance()

    def advance(self) -> None:
        for answers, frames in zip(self.answers, self._frames, strict=True):
            if frames:
                answers.update(frames.pop(0))

    def nvmlInit(self) -> None:
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        if not self.initialised:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        self.initialised -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self._driver_version

    def nvmlDeviceGetCount(self) -> int:
        return len(self.answers)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < len(self.answers):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for index, answers in enumerate(self.answers):
            if answers["nvmlDeviceGetUUID"] == uuid:
                return index
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list:
        return [
            types.SimpleNamespace(pid=self._pids.get(p["pid"], p["pid"]), usedGpuMemory=p["usedGpuMemory"])
            for p in self._answer("nvmlDeviceGetComputeRunningProcesses", handle)
            if isinstance(self._pids.get(p["pid"], p["pid"]), int)
        ]

    def __getattr__(self, name: str):
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return lambda handle, *arguments: self._answer(name, handle, *arguments)

    def _answer(self, name: str, handle: int, *arguments):
        self.calls[name] = self.calls.get(name, 0) + 1
        value = self.answers[handle][name]
        if isinstance(value, dict) and "error" in value:
            raise pynvml.NVMLError(value["error"])
        if arguments:
            return value[str(arguments[0])]
        return types.SimpleNamespace(**value) if isinstance(value, dict) else value


class FakeGpmNvml(RecordedNvml):
    """A Hopper-like library: GPM percentages by metric id in `percent`, return codes in `returns`; real structs."""

    c_nvmlGpmMetricsGet_t = pynvml.c_nvmlGpmMetricsGet_t
    NVML_GPM_METRICS_GET_VERSION = pynvml.NVML_GPM_METRICS_GET_VERSION

    def __init__(self, supported: bool = True) -> None:
        super().__init__()
        self.supported = supported
        self.percent = {1: 96.0, 2: 81.25, 3: 40.0, 5: 20.0, 10: 44.0, 11: 0.0, 12: 100.004, 13: 3.0}
        self.percent |= {20: 12.5, 21: 800.0}  # MiB/s
        self.returns: dict[int, int] = {}
        self.allocated = 0
        self.taken = 0

    def nvmlGpmQueryDeviceSupport(self, handle: int):
        return types.SimpleNamespace(isSupportedDevice=int(self.supported))

    def nvmlGpmSampleAlloc(self):
        self.allocated += 1
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleFree(self, buffer) -> None:
        self.allocated -= 1

    def nvmlGpmSampleGet(self, handle: int, buffer):
        self.taken += 1
        return buffer

    def nvmlGpmMetricsGet(self, get):
        assert get.version == self.NVML_GPM_METRICS_GET_VERSION
        for slot in range(get.numMetrics):
            entry = get.metrics[slot]
            entry.nvmlReturn = self.returns.get(entry.metricId, 0)
            entry.value = self.percent[entry.metricId]
        return get
