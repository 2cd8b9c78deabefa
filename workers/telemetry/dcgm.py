"""The `dcgm` sensor: SM activity and other profiling figures of one GPU, scraped from NVIDIA's dcgm-exporter.

Start reading at `DcgmSensor`; `PageReader` finds the lines of one GPU on the exporter's page, which has all GPUs of a
node. `FIELDS` maps its fields to columns of `telemetry`. infra/dcgm-exporter/ describes how to start an exporter.
"""

from __future__ import annotations

import http.client
import io
import math
import re
import socket
import time
import urllib.parse
from collections import deque
from collections.abc import Callable
from typing import Any

from workers.telemetry.nvml import Nvml, as_text, find_gpu, open_nvml, ratio, refuse_shared
from workers.telemetry.sensors import DEFAULT_URL, Sample, Sensor, SensorUnavailable, WatchTarget

# DCGM's "blank" numbers (dcgm_structs.h) mean not measured; some exporter versions print them. The blanks for 64-bit
# integers lie above the blank for floating-point numbers.
_INT32_BLANK = 0x7FFFFFF0
_FLOAT_BLANK = 140737488355328.0
_UUID_LABELS = ("uuid", "gpu_uuid")  # in small letters: versions differ
_INSTANCE_LABEL = "gpu_i_id"
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_LABELS = re.compile(rf"(?:{_LABEL.pattern})*")
EXPORTER_INTERVAL_S = 30.0  # dcgm-exporter's default (-c 30000)
LAG_S = 0.3  # age of DCGM's figures when they are served, as measured in NVIDIA's issue tracker and by users
_TIMEOUT_S = 0.5  # without a byte
_PAGE_TIMEOUT_S = 1.0  # for a whole page
_PAGE_LIMIT_BYTES = 16 * 1024**2
_BUSY = 0.9


def _share(value: float) -> float | None:
    return ratio(value, full=1.0)


def _plain(value: float) -> float | None:
    return value if 0 <= value < _INT32_BLANK else None


def _joules(value: float) -> float | None:
    return value / 1000 if 0 <= value < _FLOAT_BLANK else None


def _mib(value: float) -> float | None:
    return value / 1024**2 if 0 <= value < _FLOAT_BLANK else None


# exporter's field -> (column, conversion that returns None for meaningless numbers). With
# infra/dcgm-exporter/counters.csv the exporter serves exactly these fields. Throttle reasons are left to NVML: DCGM
# renamed their field, and the exporter serves nothing if its counter file has one unknown name.
FIELDS: dict[str, tuple[str, Callable[[float], float | None]]] = {
    "DCGM_FI_PROF_SM_ACTIVE": ("smact", _share),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("smocc", _share),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("drama", _share),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("gract", _share),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active", _share),
    "DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE": ("tensor_hmma_active", _share),
    "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE": ("tensor_imma_active", _share),
    "DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE": ("tensor_dfma_active", _share),
    "DCGM_FI_PROF_PIPE_INT_ACTIVE": ("int_active", _share),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": ("fp16_active", _share),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": ("fp32_active", _share),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": ("fp64_active", _share),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie_tx_mib_s", _mib),  # bytes a second, though some versions say `counter`
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie_rx_mib_s", _mib),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("nvlink_tx_mib_s", _mib),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("nvlink_rx_mib_s", _mib),
    "DCGM_FI_DEV_FB_USED": ("memory_used_mib", _plain),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu_util", ratio),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("memory_util", ratio),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", _plain),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_j", _joules),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_mhz", _plain),
    "DCGM_FI_DEV_MEM_CLOCK": ("memory_clock_mhz", _plain),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_c", _plain),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc_uncorrected", _plain),
}
# Activity metrics; if all are 0 on a busy GPU, profiling has stalled.
PROFILING = tuple(name for field, (name, convert) in FIELDS.items() if convert is _share)
# What the exporter repeats on the rows of a MIG slice, but is the whole GPU's.
WHOLE_GPU = frozenset(
    {
        "gpu_util",
        "memory_util",
        "power_w",
        "energy_j",
        "pcie_tx_mib_s",
        "pcie_rx_mib_s",
        "nvlink_tx_mib_s",
        "nvlink_rx_mib_s",
    }
)


class PageReader:
    """Reads the rows of one GPU or MIG slice from a page with every GPU of the node.

    After `read`, `seen` says whether the page had any row of it. `sliced` says whether a whole GPU was asked for but
    the page had rows of its MIG slices.
    """

    def __init__(self, uuid: str, instance_id: int | None = None) -> None:
        """`uuid` names the whole GPU, `instance_id` the MIG GPU instance (None: the whole GPU)."""
        self.uuid = uuid
        self.instance_id = None if instance_id is None else str(instance_id)
        self.seen = self.sliced = False

    def read(self, page: str) -> dict[str, float]:
        """Return the device's fields as the exporter prints them. Skips torn and other lines."""
        fields: dict[str, float] = {}
        self.seen = self.sliced = False
        for line in page.split("\n"):
            if self.uuid not in line or line.startswith("#"):
                continue
            head, _, tail = line.rpartition("}")
            name, _, text = head.partition("{")
            labels: dict[str, str] = {}  # by lower-case name; none if the text holds anything else
            if _LABELS.fullmatch(text):
                labels = {name.lower(): value for name, value in _LABEL.findall(text)}
            if self.uuid not in (labels.get(label) for label in _UUID_LABELS):
                continue
            if (labels.get(_INSTANCE_LABEL) or None) != self.instance_id:
                if self.instance_id is None:
                    self.seen = self.sliced = True
                continue
            self.seen = True
            field, number = name.strip(), _number(tail)
            if field in FIELDS and number is not None:
                fields[field] = number
        return fields


def _number(text: str) -> float | None:
    """Return the number after the labels; a time stamp may follow it."""
    try:
        value = float(text.split()[0])
    except (ValueError, IndexError):
        return None
    return value if math.isfinite(value) else None


_FAILURES_ALLOWED, _GONE_AFTER_S = 3, 3.0  # failures in a row, and their duration, before the exporter counts as gone


class ScrapeFailed(SensorUnavailable):
    """The scrape failed; `reason` goes into `Sample.reasons`."""

    def __init__(self, message: str, reason: str = "exporter_error") -> None:
        super().__init__(message)
        self.reason = reason


class DcgmSensor(Sensor):
    """One GPU or MIG slice by UUID, from the exporter at `url`.

    The exporter renews its values at its own interval (30 s by default, 0.1 s with `-c 100`), so scrapes may repeat
    earlier values. If no field of this GPU changed, the sample is `repeated`. Once the exporter's interval has passed
    since the last reading, unchanged values are a new reading. The sensor learns the interval from the changes that it
    sees; before two changes it takes the exporter's default.

    DCGM computes profiling figures over the last interval and has them some 0.3 s later. A sample's time is therefore
    the time of its scrape minus `lag_s`. A reading averages the time from `since_ns`, one interval earlier (None while
    the interval is unknown). Samples whose time lies before the sensor was made describe the time before the trial and
    are dropped.

    A failed scrape gives an `unavailable` sample with the reason `exporter_timeout` or `exporter_error`. DCGM's
    profiling sometimes stalls and reads zeros everywhere. A reading in which every activity is exactly 0 while the GPU
    is at least 90 % busy is `suspect`, with the reason `profiling_zero`.

    The exporter knows activity and memory of a MIG slice. `dropped` lists the metrics that it has for whole GPUs only.
    """

    name = "dcgm"
    metrics = tuple(name for name, _ in FIELDS.values())
    period_s = 0.1  # DCGM's figures are wrong below it
    slow = True  # waits for the network
    lag_s = LAG_S

    def __init__(
        self,
        target: WatchTarget,
        url: str = DEFAULT_URL,
        *,
        nvml: Nvml | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`nvml` looks up MIG slices; None takes the real NVML. Raises `SensorUnavailable`."""
        if target.device_uuid is None:
            raise SensorUnavailable("this worker has no GPU")
        self._url = url
        self._connection = _connection(url)
        self._nvml = nvml
        self._clock_ns = clock_ns
        self._reader = self._find(target.device_uuid)
        self._fields = self._read()
        self._watched_ns = self._reported_ns = clock_ns()
        self._changed_ns = 0
        self._gaps_ns: deque[int] = deque(maxlen=8)
        self._failures, self._failing_since_ns = 0, 0
        given = {FIELDS[field][0] for field in self._fields}
        self.dropped = {  # metric -> why it is not given
            name: f"not in the counter file of the exporter at {url}" for name in self.metrics if name not in given
        }
        if self._reader.instance_id is not None:
            self.dropped |= dict.fromkeys(WHOLE_GPU, "the exporter has it of the whole GPU only, not of a MIG slice")

    @classmethod
    def create(cls, settings: Any, target: WatchTarget) -> DcgmSensor:
        return cls(target, settings.dcgm_url)

    @property
    def interval_s(self) -> float | None:
        """Return the exporter's interval in seconds; None before two changes were seen."""
        return self._interval_ns() / 1e9 if self._gaps_ns else None

    def sample(self) -> list[Sample]:
        now_ns = self._clock_ns()
        t_ns = now_ns - int(self.lag_s * 1e9)
        try:
            fields = self._read()
        except SensorUnavailable as error:
            return self._failed(now_ns, t_ns, error)
        self._failures = 0
        if fields != self._fields:
            if self._changed_ns:
                self._gaps_ns.append(now_ns - self._changed_ns)
            self._fields, self._changed_ns = fields, now_ns
        elif now_ns - self._reported_ns < self._interval_ns():
            return self._given(Sample(t_ns, self._values(fields), "repeated"))
        self._reported_ns = now_ns
        since_ns = t_ns - self._interval_ns() if self._gaps_ns else None
        values = self._values(fields)
        profiled = [values[name] for name in PROFILING if name in values]
        if profiled and values.get("gpu_util", 0) >= _BUSY and not any(profiled):
            return self._given(Sample(t_ns, values, "suspect", ("profiling_zero",), since_ns))
        return self._given(Sample(t_ns, values, since_ns=since_ns))

    def _given(self, sample: Sample) -> list[Sample]:
        return [sample] if sample.values and sample.t_ns > self._watched_ns else []

    def _failed(self, now_ns: int, t_ns: int, error: SensorUnavailable) -> list[Sample]:
        if not self._failures:
            self._failing_since_ns = now_ns
        self._failures += 1
        if self._failures >= _FAILURES_ALLOWED and now_ns - self._failing_since_ns >= _GONE_AFTER_S * 1e9:
            raise error
        if t_ns <= self._watched_ns:
            return []
        reason = error.reason if isinstance(error, ScrapeFailed) else "exporter_error"
        return [Sample(t_ns, {}, "unavailable", (reason,))]

    def _interval_ns(self) -> int:
        if not self._gaps_ns:
            return int(EXPORTER_INTERVAL_S * 1e9)
        # A longer gap contains missed changes; the other gaps vary because scrapes come a little early or late.
        shortest = min(self._gaps_ns)
        single = [gap for gap in self._gaps_ns if gap < 1.5 * shortest]
        return sum(single) // len(single)

    def _values(self, fields: dict[str, float]) -> dict[str, float]:
        whole_gpu = self._reader.instance_id is None
        values = {}
        for field, raw in fields.items():
            name, convert = FIELDS[field]
            value = convert(raw)
            if value is not None and (whole_gpu or name not in WHOLE_GPU):
                values[name] = value
        return values

    def _find(self, uuid: str) -> PageReader:
        """Return the page reader of a device. The exporter names a slice by its GPU's UUID and its GPU instance."""
        if not uuid.startswith("MIG-"):
            return PageReader(uuid)
        nvml = open_nvml(self._nvml)
        try:
            handles = find_gpu(nvml, uuid)
            refuse_shared(handles, uuid)
            return PageReader(as_text(nvml.nvmlDeviceGetUUID(handles.gpu)), handles.instance_id)
        except nvml.NVMLError as error:
            raise SensorUnavailable(f"NVML does not say which GPU {uuid} is part of: {error}") from error
        finally:
            nvml.nvmlShutdown()

    def _read(self) -> dict[str, float]:
        """Return the device's fields as the exporter prints them. Raises `SensorUnavailable`."""
        reader = self._reader
        fields = reader.read(self._scrape())
        if not fields and reader.sliced:
            raise SensorUnavailable(
                f"{reader.uuid} is split by MIG; the exporter at {self._url} reports its slices only"
            )
        if not reader.seen:
            of_slice = "" if reader.instance_id is None else f" with a MIG instance {reader.instance_id}"
            raise SensorUnavailable(f"the exporter at {self._url} knows no GPU with UUID {reader.uuid}{of_slice}")
        if not any(field.startswith("DCGM_FI_PROF_") for field in fields):
            raise SensorUnavailable(
                f"the exporter at {self._url} gives no DCGM_FI_PROF_* fields for {reader.uuid}: start it with the "
                "counter file infra/dcgm-exporter/counters.csv (dcgm-exporter -f), and check that the GPU and its "
                "permissions allow profiling (--cap-add SYS_ADMIN)"
            )
        return fields

    def _scrape(self) -> str:
        """Return the page; reuse the connection if it is open. Raises `ScrapeFailed`."""
        reuses_connection = self._connection.sock is not None
        try:
            try:
                status, reason, body = self._get()
            except (http.client.RemoteDisconnected, ConnectionError):
                self._connection.close()
                if not reuses_connection:  # only a kept connection may have been closed since
                    raise
                status, reason, body = self._get()
        except TimeoutError as error:
            self._connection.close()
            message = f"the dcgm-exporter at {self._url} does not answer within {_TIMEOUT_S:g} s"
            raise ScrapeFailed(message, "exporter_timeout") from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ScrapeFailed(f"no dcgm-exporter answers at {self._url}: {error}") from error
        if len(body) > _PAGE_LIMIT_BYTES:
            raise ScrapeFailed(
                f"{self._url} answers with more than {_PAGE_LIMIT_BYTES // 2**20} MiB: no page of metrics"
            )
        if status != 200:
            raise ScrapeFailed(f"{self._url} answers {status} {reason}")
        return body.decode("utf-8", "replace")

    def _get(self) -> tuple[int, str, bytes]:
        """Return (status, reason phrase, body)."""
        parts = urllib.parse.urlsplit(self._url)
        self._connection.request("GET", urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, "")))
        answer = self._connection.getresponse()
        body = answer.read(_PAGE_LIMIT_BYTES + 1)
        if not answer.isclosed():  # longer than any page: the rest must not be taken for the next answer
            self._connection.close()
        return answer.status, answer.reason, body

    def close(self) -> None:
        self._connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    # no proxy: the exporter runs on this machine or near it
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    connection.response_class = _TimedResponse
    return connection


class _TimedResponse(http.client.HTTPResponse):
    """A response that must arrive in time as a whole, because a socket timeout restarts with each byte."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock))


class _TimedReader(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw = raw
        self._sock = sock
        self._give_up_ns = time.monotonic_ns() + int(_PAGE_TIMEOUT_S * 1e9)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = (self._give_up_ns - time.monotonic_ns()) / 1e9
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(min(left_s, _TIMEOUT_S))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
