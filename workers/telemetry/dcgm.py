"""The `dcgm` sensor: SM activity and other profiling figures of one GPU, scraped from NVIDIA's dcgm-exporter.

Start reading at `DcgmSensor`; `parse_page` reads a page of the exporter, `_FIELDS` maps its fields to columns.
"""

from __future__ import annotations

import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from conf.errors import UsageError
from workers.telemetry.base import Sample, SensorUnavailable, Target
from workers.telemetry.nvml import ratio

DEFAULT_URL = "http://localhost:9400/metrics"
EXPORTER_INTERVAL_S = 30.0  # dcgm-exporter's default (-c 30000)
_TIMEOUT_S = 0.5
_PAGE_LIMIT_BYTES = 16 * 1024**2
_FAILURES_ALLOWED = 3  # in a row, before the exporter counts as gone
_BUSY = 0.9

# DCGM's "blank" numbers (dcgm_structs.h) mean not measured; some exporter versions print them.
_INT32_BLANK = 0x7FFFFFF0
_FLOAT_BLANK = 140737488355328.0


def _share(value: float) -> float | None:
    return ratio(value, full=1.0)


def _plain(value: float) -> float | None:
    return value if 0 <= value < _INT32_BLANK else None


def _joules(value: float) -> float | None:
    return value / 1000 if 0 <= value < _FLOAT_BLANK else None


# exporter's field -> (column, conversion; None when the number means nothing)
_FIELDS: dict[str, tuple[str, Callable[[float], float | None]]] = {
    "DCGM_FI_PROF_SM_ACTIVE": ("smact", _share),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("smocc", _share),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("drama", _share),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("gract", _share),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active", _share),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": ("fp16_active", _share),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": ("fp32_active", _share),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": ("fp64_active", _share),
    "DCGM_FI_DEV_FB_USED": ("memory_used_mib", _plain),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu_util", ratio),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("memory_util", ratio),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", _plain),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_j", _joules),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_mhz", _plain),
    "DCGM_FI_DEV_MEM_CLOCK": ("memory_clock_mhz", _plain),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_c", _plain),
}
_PROFILING = tuple(name for field, (name, _) in _FIELDS.items() if field.startswith("DCGM_FI_PROF_"))


class DcgmSensor:
    """One GPU by UUID, from the exporter at `url`.

    The exporter serves values that it renews at its own interval (30 s by default, `-c 1000` makes it 1 s), so most
    scrapes repeat what was read before. A scrape in which no field of our GPU changed gives no reading, until the
    exporter's interval has passed since the last one: then the values truly stayed the same, and are reported as such.
    The interval is learned from the changes seen (the shortest of the last few), and is `interval_s` before the first.
    The page found by `watch` is of the time before the trial and is never reported. A reading's time is that of its
    scrape: the values are up to one scrape and some 300 ms older, and profiling figures average the interval before.

    DCGM's profiling sometimes stalls and gives zeros everywhere; a reading in which every profiling figure is exactly 0
    while the GPU is at least 90 % busy is reported without them.
    """

    name = "dcgm"
    metrics = tuple(name for name, _ in _FIELDS.values())
    period_s = 0.2  # DCGM's figures are wrong below 0.1 s, and each look costs a scrape
    slow = True  # waits for the network: the sampler gives it a thread of its own

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        interval_s: float = EXPORTER_INTERVAL_S,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises `UsageError` for a URL that cannot be meant, `SensorUnavailable` where no exporter answers."""
        self._url = checked_url(url)
        # no proxy: the exporter is on this machine or next to it
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._default_interval_s = interval_s
        self._clock_ns = clock_ns
        self._closed = False
        self._uuid: str | None = None
        self._fields: dict[str, float] = {}
        self._changed_ns = self._reported_ns = 0
        self._gaps_ns: deque[int] = deque(maxlen=8)
        self._failures = 0
        self.dropped: dict[str, str] = {}  # metric -> why it is not given
        self._scrape()

    @classmethod
    def create(cls, settings: Any, device_uuid: str | None) -> DcgmSensor:
        """As `make_sensors` builds it: checks at once that the exporter knows the device."""
        if device_uuid is None:
            checked_url(settings.dcgm_url)
            raise SensorUnavailable("this worker has no GPU")
        sensor = cls(settings.dcgm_url)
        sensor._read(device_uuid)
        return sensor

    def watch(self, target: Target) -> None:
        if self._closed:
            raise SensorUnavailable("the dcgm sensor was closed")
        if target.device_uuid is None:
            raise SensorUnavailable("this worker has no GPU")
        self._fields = self._read(target.device_uuid)
        self._uuid = target.device_uuid
        self._changed_ns, self._reported_ns = 0, self._clock_ns()
        self._gaps_ns.clear()
        self._failures = 0
        given = {_FIELDS[field][0] for field in self._fields}
        self.dropped = {
            name: f"not in the counter file of the exporter at {self._url}"
            for name in self.metrics
            if name not in given
        }

    def sample(self) -> list[Sample]:
        if self._closed or self._uuid is None:
            raise SensorUnavailable("the dcgm sensor watches nothing")
        t_ns = self._clock_ns()
        try:
            fields = self._read(self._uuid)
        except SensorUnavailable:
            self._failures += 1
            if self._failures >= _FAILURES_ALLOWED:
                raise
            return []
        self._failures = 0
        if fields != self._fields:
            if self._changed_ns:
                self._gaps_ns.append(t_ns - self._changed_ns)
            self._fields, self._changed_ns = fields, t_ns
        elif t_ns - self._reported_ns < self._interval_ns():
            return []
        self._reported_ns = t_ns
        values = self._values(fields)
        return [Sample(t_ns, values)] if values else []

    def _interval_ns(self) -> int:
        return min(self._gaps_ns) if self._gaps_ns else int(self._default_interval_s * 1e9)

    def _values(self, fields: dict[str, float]) -> dict[str, float]:
        values = {}
        for field, raw in fields.items():
            name, convert = _FIELDS[field]
            value = convert(raw)
            if value is not None:
                values[name] = value
        profiled = [name for name in _PROFILING if name in values]
        if values.get("gpu_util", 0) >= _BUSY and not any(values[name] for name in profiled):
            for name in profiled:
                del values[name]
        return values

    def _read(self, uuid: str) -> dict[str, float]:
        """Our fields of this GPU, as the exporter prints them. Raises `SensorUnavailable`."""
        fields, seen, sliced = parse_page(self._scrape(), uuid)
        if not fields and sliced:
            raise SensorUnavailable(f"{uuid} is split by MIG; the exporter at {self._url} tells of its slices only")
        if not seen:
            raise SensorUnavailable(f"the exporter at {self._url} knows no GPU with UUID {uuid}")
        if not any(field.startswith("DCGM_FI_PROF_") for field in fields):
            raise SensorUnavailable(
                f"the exporter at {self._url} gives no DCGM_FI_PROF_* fields for {uuid}: add them to its counter file "
                "(dcgm-exporter -f), and check that the GPU and its permissions allow profiling"
            )
        return fields

    def _scrape(self) -> str:
        try:
            with self._opener.open(self._url, timeout=_TIMEOUT_S) as answer:
                return answer.read(_PAGE_LIMIT_BYTES).decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            raise SensorUnavailable(f"{self._url} answers {error.code} {error.reason}") from error
        except (OSError, HTTPException) as error:  # URLError and time-outs are OSErrors
            reason = getattr(error, "reason", None) or error
            raise SensorUnavailable(f"no dcgm-exporter answers at {self._url}: {reason}") from error

    def close(self) -> None:
        self._closed = True


def parse_page(page: str, uuid: str) -> tuple[dict[str, float], bool, bool]:
    """(our fields of this GPU, whether any row is its, whether any row is of one of its MIG slices).

    Only the GPU's own lines reach the parser: a page holds every GPU of the node. Without the `# TYPE` lines the
    parser also leaves counters their names, to which it would add `_total`.
    """
    from prometheus_client.parser import text_string_to_metric_families

    fields: dict[str, float] = {}
    seen = sliced = False
    for line in page.splitlines():
        if uuid not in line or line.startswith("#"):
            continue
        try:
            samples = [s for family in text_string_to_metric_families(line + "\n") for s in family.samples]
        except ValueError:
            continue  # a torn or foreign line says nothing
        for row in samples:
            labels = {name.lower(): value for name, value in row.labels.items()}
            if labels.get("uuid") != uuid:  # exporter versions spell it UUID or uuid
                continue
            seen = True
            if labels.get("gpu_i_id"):
                sliced = True
            elif row.name in _FIELDS and math.isfinite(row.value):
                fields[row.name] = row.value
    return fields, seen, sliced


def checked_url(url: str) -> str:
    """`url` as it is. Raises `UsageError` when it can't be one."""
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, AttributeError, TypeError):  # a port that is no number, a value that is no text
        valid = False
    if not valid or any(character.isspace() for character in url):
        raise UsageError(f"telemetry.dcgm_url must be like {DEFAULT_URL}, got {url!r}")
    return url
