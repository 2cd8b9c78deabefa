"""Replays an NVML session from JSON behind the same functions as `pynvml`, and fakes its GPM on top.

Start reading at `RecordedNvml`; the format is told in the `comment` of `data/nvml_session.json`, which is hand-made.
"""

from __future__ import annotations

import functools
import json
import types
from pathlib import Path

import pynvml

SESSION = Path(__file__).parent / "data" / "nvml_session.json"
MIG_SESSION = Path(__file__).parent / "data" / "nvml_mig_session.json"
A100_UUID = "GPU-5a7c1f0e-3d21-4b8a-9c44-0f6d2e81b701"
DISPLAY_UUID = "GPU-8daf4c31-6054-7ebd-cf77-3c9051b4ea34"
SLICE_UUID = "MIG-1b4a2c6e-70d3-5f18-8b29-43c6d7e8f901"  # 3g.20gb, GPU instance 1
SMALL_SLICE_UUID = "MIG-2c5b3d7f-81e4-6029-9c3a-54d7e8f90a12"  # 1g.5gb, GPU instance 9
UNKNOWN_UUID = "GPU-00000000-0000-0000-0000-000000000000"


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


class RecordedNvml:
    """Answers from the recording; `advance` steps every device to its next frame. `calls` counts by function name.

    `pids` maps the recording's names of processes to real pids. `initialised` counts nvmlInit less nvmlShutdown.
    Handles are indices, those of MIG slices (index, place). What has no answer in the recording, the driver does not
    know. Constants and errors are pynvml's.
    """

    def __init__(self, path: Path = SESSION, pids: dict[str, int] | None = None) -> None:
        recording = json.loads(path.read_text())
        self._driver_version = recording["driver_version"]
        self.answers = [dict(device["answers"]) for device in recording["devices"]]
        self.slices = [device.get("slices", []) for device in recording["devices"]]
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

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int | tuple[int, int]:
        for index, answers in enumerate(self.answers):
            if answers["nvmlDeviceGetUUID"] == uuid:
                return index
            for place, slice_uuid in enumerate(self.slices[index]):
                if slice_uuid is not None and slice_uuid["nvmlDeviceGetUUID"] == uuid:
                    return index, place
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> tuple[int, int]:
        if place >= len(self.slices[handle]) or self.slices[handle][place] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle, place

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: tuple[int, int]) -> int:
        return handle[0]

    def _processes(self, name: str, handle) -> list:
        return [
            types.SimpleNamespace(pid=self._pids.get(p["pid"], p["pid"]), usedGpuMemory=p["usedGpuMemory"])
            for p in self._answer(name, handle)
            if isinstance(self._pids.get(p["pid"], p["pid"]), int)
        ]

    def nvmlDeviceGetFieldValues(self, handle, fields: list[int]):
        recorded = vars(self._answer("nvmlDeviceGetFieldValues", handle))
        values = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for value, field in zip(values, fields, strict=True):
            value.fieldId = field
            if str(field) in recorded:
                value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
                value.value.ullVal = recorded[str(field)]
            else:
                value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return values

    def __getattr__(self, name: str):
        if name.startswith("NVML"):
            return getattr(pynvml, name)
        if not name.startswith("nvmlDeviceGet") or not hasattr(pynvml, name):
            raise AttributeError(name)
        answer = self._processes if name.endswith("RunningProcesses") else self._answer
        return functools.partial(answer, name)

    def _answer(self, name: str, handle, *arguments):
        self.calls[name] = self.calls.get(name, 0) + 1
        answers = self.answers[handle] if isinstance(handle, int) else self.slices[handle[0]][handle[1]]
        value = answers.get(name, {"error": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
        if isinstance(value, dict) and "error" in value:
            raise pynvml.NVMLError(value["error"])
        if arguments:
            return value[str(arguments[0])]
        return types.SimpleNamespace(**value) if isinstance(value, dict) else value


class FakeGpmNvml(RecordedNvml):
    """A Hopper-like library: GPM percentages by metric id in `percent`, return codes in `returns`; real structs."""

    c_nvmlGpmMetricsGet_t = pynvml.c_nvmlGpmMetricsGet_t

    def __init__(self, supported: bool = True, path: Path = SESSION) -> None:
        super().__init__(path)
        self.supported = supported
        self.percent = {1: 96.0, 2: 81.25, 3: 40.0, 4: 6.25, 5: 20.0, 6: 0.0, 7: 18.0, 9: 0.5}
        self.percent |= {10: 44.0, 11: 0.0, 12: 100.004, 13: 3.0}
        self.percent |= {20: 12.5, 21: 800.0, 60: 1024.0, 61: 2048.0}  # MiB/s
        self.returns: dict[int, int] = {}
        self.failing: int | None = None  # the return code of every GPM sample
        self.instances: list[int] = []  # MIG GPU instances that were sampled
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
        if self.failing is not None:
            raise pynvml.NVMLError(self.failing)
        self.taken += 1
        return buffer

    def nvmlGpmMigSampleGet(self, handle: int, instance_id: int, buffer):
        self.instances.append(instance_id)
        return self.nvmlGpmSampleGet(handle, buffer)

    def nvmlGpmMetricsGet(self, get):
        assert get.version == self.NVML_GPM_METRICS_GET_VERSION
        for slot in range(get.numMetrics):
            entry = get.metrics[slot]
            entry.nvmlReturn = self.returns.get(entry.metricId, 0)
            entry.value = self.percent[entry.metricId]
        return get
