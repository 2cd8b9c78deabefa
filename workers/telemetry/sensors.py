"""The sensor Protocol that every telemetry source implements, means of readings, and the sampling of a trial's sensors.

Start reading at `Sensor`. A sensor declares its metrics (keys of `warehouse.tables.schema.METRICS`) and its period, and
converts units itself. Its constructor raises `SensorUnavailable` where the hardware, driver, library, exporter or
target is missing; the message must tell a person how to act. Later, `sample` leaves out metrics that it cannot read.
`window_mean` computes the mean of a metric over a window, and how well the readings cover the window.

`TelemetrySampler` reads a trial's sensors while it runs; `make_sensors` builds those that can watch it, and `to_table`
turns the readings into rows of `telemetry`. `call_within` calls drivers and networks with a timeout, because such calls
may never return.
"""

from __future__ import annotations

import logging
import math
import operator
import pkgutil
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from conf.cli.settings import Checked, key
from conf.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa


# A reading without the start of its interval covers the time since the previous reading, but at most this many usual
# intervals: longer gaps are unknown.
REACH = 5
# NVML averages these metrics itself, and DCGM passes the averages on. By product, utilization covers the last 1/6 to 1
# s and power up to 1 s. In a window's first second a reading may therefore cover time before the first step.
LOOKBACK_NS: Mapping[str, int] = {"gpu_util": 1_000_000_000, "power_w": 1_000_000_000}
Spoils = Mapping[str, Collection[str]]  # reason of a sample -> metrics that it makes unusable


class SensorUnavailable(RuntimeError):
    """The sensor cannot be used here. The message gives the reason and, if there is one, the remedy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. `t_ns` is the `time.monotonic_ns()` that the values belong to; a missing key is not measured.

    Averages end at `t_ns`, from which a lagging source has subtracted its lag. They begin at `since_ns` (None: at the
    previous sample). `quality` is one of `warehouse.tables.schema.SAMPLE_QUALITIES`. A sensor sets `repeated` for
    values that it served before, and `unavailable`, without values, for a failed reading. `workers.quality` sets
    `suspect`. `reasons` explain the quality.
    """

    t_ns: int
    values: dict[str, float]
    quality: str = "measured"
    reasons: tuple[str, ...] = ()
    since_ns: int | None = None
    rank: int | None = None  # the rank that was read, in a trial with several; None: the whole trial


@dataclass(frozen=True, slots=True)
class WatchTarget:
    """The target of a trial's sensors: the device with this UUID (None: no GPU) and the trial's root process."""

    device_uuid: str | None
    pid: int


@runtime_checkable
class Sensor(Protocol):
    """A source of samples of one trial, from its construction until `close`. Use from one thread at a time.

    Sensors inherit the defaults from this class.
    """

    name: str  # nvml | gpm | dcgm | process
    metrics: tuple[str, ...]
    period_s: float  # the fastest useful period; the sampler never asks more often
    slow: bool = False  # whether a reading may wait for a network; the sampler then reads it in a separate thread
    lag_s: float = 0.0  # age of its readings when they become available
    dropped: Mapping[str, str] = MappingProxyType({})  # metric -> why this device does not read it

    def __init__(self, target: WatchTarget) -> None: ...

    @classmethod
    def create(cls, settings: Any, target: WatchTarget) -> Sensor:
        """Return the sensor of a trial by `TelemetrySettings`. Raises `SensorUnavailable`."""
        return cls(target)

    def sample(self) -> list[Sample]:
        """Return the readings since the last call, oldest first; empty if nothing is new."""

    def close(self) -> None:
        """Release what the sensor holds; a second call has no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMean:
    """A metric over a window, from one sensor. `mean` is None if no reading covers the window."""

    mean: float | None = None
    coverage: float = 0.0  # share of the window's time that readings cover
    readings: int = 0  # number of readings in the mean
    largest_gap_s: float = 0.0  # longest stretch of the window that no reading covers
    outside: float = 0.0  # share of the readings' covered time that lies outside the window
    deviation: float = 0.0  # standard deviation of the readings, weighted with their time

    @property
    def standard_error(self) -> float:
        """Return the standard error of the mean, as if readings were independent."""
        return self.deviation / math.sqrt(self.readings) if self.readings > 1 else math.inf


def window_mean(
    samples: Iterable[Sample], metric: str, start_ns: int, end_ns: int, spoils: Spoils | None = None
) -> WindowMean:
    """Return the mean of `metric` over [start_ns, end_ns], each value weighted with the time that it covers.

    `samples` come from one sensor; zeros count. Utilization, profiling and power readings are means over the interval
    from `since_ns` to `t_ns`. Without `since_ns` the interval starts at the previous reading, the first one at the
    window's start. Repeated samples have no weight. Readings whose `reasons` spoil the metric are left out, and their
    time is not covered.

    A reading's weight is the time of its interval inside the window. The mean uses only readings wholly inside if a
    reading averages more than a quarter of the window and those inside cover half of it: the others mostly describe
    the time around the window. Shorter readings at the edges count: they cover parts of the first and the last step.

    The mean is None unless a reading ends in the window, or gives an interval that lies mostly inside. Readings around
    a window that is shorter than the sensor's period say little about it.
    """
    intervals = _intervals(samples, metric, start_ns, spoils or {})
    inside: list[tuple[int, int, float]] = []  # (weight in ns, own length in ns, value)
    touching: list[tuple[int, int, float]] = []
    inside_ns = covered_ns = largest_gap_ns = 0
    covered_to = start_ns
    describes_window, last = False, None
    for since_ns, t_ns, value, has_start in intervals:
        overlap_ns = min(t_ns, end_ns) - max(since_ns, start_ns)
        if start_ns <= t_ns <= end_ns:
            describes_window, last = True, value
        if overlap_ns <= 0:
            continue
        length_ns = t_ns - since_ns
        describes_window = describes_window or (has_start and 2 * overlap_ns > length_ns)
        touching.append((overlap_ns, length_ns, value))
        covered_ns += overlap_ns
        largest_gap_ns = max(largest_gap_ns, since_ns - covered_to)
        covered_to = min(t_ns, end_ns)
        if overlap_ns == length_ns:
            inside.append((overlap_ns, length_ns, value))
            inside_ns += overlap_ns
    largest_gap_ns = max(largest_gap_ns, end_ns - covered_to)
    window_ns = end_ns - start_ns
    coverage = covered_ns / window_ns if window_ns > 0 else 0.0
    if not describes_window:
        return WindowMean(coverage=coverage, largest_gap_s=largest_gap_ns / 1e9)
    if not touching:  # a single reading on the window's first instant, or a window without length
        return WindowMean(mean=last, readings=1, largest_gap_s=largest_gap_ns / 1e9)
    long = 4 * max(length_ns for _, length_ns, _ in touching) > window_ns
    averaged = inside if long and 2 * inside_ns >= window_ns else touching
    weight = sum(weight_ns for weight_ns, _, _ in averaged)
    averaged_ns = sum(length_ns for _, length_ns, _ in averaged)
    mean = sum(weight_ns * value for weight_ns, _, value in averaged) / weight
    variance = sum(weight_ns * (value - mean) ** 2 for weight_ns, _, value in averaged) / weight
    return WindowMean(
        mean=mean,
        coverage=coverage,
        readings=len(averaged),
        largest_gap_s=largest_gap_ns / 1e9,
        outside=1 - weight / averaged_ns,
        deviation=math.sqrt(variance),
    )


def spoken_from_ns(metric: str, window_ns: int, warmup_ns: int | None) -> int:
    """Return the time from which readings of a metric describe the window: its start, or later.

    Readings look back into the warm-up, in which the GPU is as busy as in the window. After a warm-up shorter than
    that look-back, the first readings also cover idle time, so they are skipped.
    """
    if warmup_ns is None:
        return window_ns
    return max(window_ns, warmup_ns + LOOKBACK_NS.get(metric, 0))


def share(samples: Iterable[Sample], reason: str, metric: str, start_ns: int, end_ns: int) -> float:
    """Return the share of [start_ns, end_ns] in which a sensor's readings of `metric` carry `reason`."""
    flags = [
        Sample(sample.t_ns, {metric: float(reason in sample.reasons)}, sample.quality, (), sample.since_ns)
        for sample in samples
        if metric in sample.values
    ]
    return window_mean(flags, metric, start_ns, end_ns).mean or 0.0


def _intervals(
    samples: Iterable[Sample], metric: str, start_ns: int, spoils: Spoils
) -> list[tuple[int, int, float, bool]]:
    """Return (start, end, value, whether the start was given) of each usable reading, by time, without overlap."""
    readings = [sample for sample in samples if sample.quality != "repeated" and metric in sample.values]
    readings.sort(key=operator.attrgetter("t_ns"))
    reach_ns = REACH * usual_interval_ns([sample.t_ns for sample in readings])
    intervals = []
    previous_ns: int | None = None
    for sample in readings:
        t_ns, since_ns = sample.t_ns, sample.since_ns
        if since_ns is None:
            since_ns = min(start_ns, t_ns) if previous_ns is None else previous_ns
            if reach_ns:
                since_ns = max(since_ns, t_ns - reach_ns)
        if previous_ns is not None:
            since_ns = max(since_ns, previous_ns)
        previous_ns = t_ns
        if not (sample.reasons and any(metric in spoils.get(reason, ()) for reason in sample.reasons)):
            intervals.append((since_ns, t_ns, sample.values[metric], sample.since_ns is not None))
    return intervals


def usual_interval_ns(times_ns: list[int]) -> int:
    """Return the median distance between neighbours in an ordered list; 0 without neighbours."""
    gaps = sorted(later - earlier for earlier, later in pairwise(times_ns) if later > earlier)
    return gaps[len(gaps) // 2] if gaps else 0


# ---- sampling of a trial's sensors

Answer = TypeVar("Answer")

_hanging: dict[str, Future[Any]] = {}  # name -> the call that has not returned
_log = logging.getLogger(__name__)
# source -> its sensor
SENSORS = {
    "nvml": "workers.telemetry.nvml:NvmlSensor",
    "gpm": "workers.telemetry.nvml:GpmSensor",
    "dcgm": "workers.telemetry.dcgm:DcgmSensor",
    "process": "workers.telemetry.process:ProcessSensor",
}
SOURCES = (*SENSORS, "torch")  # torch: the trial itself reports it, so it needs no sensor
DEFAULT_URL = "http://localhost:9400/metrics"  # of the dcgm-exporter
_JOIN_S = 2.0
_START_S = 5.0  # time to open a sensor's driver or exporter
_READ_ON_S = 1.0  # longest wait for a source that lags


def call_in_thread(name: str, function: Callable[..., Answer], *arguments: Any) -> Future[Answer]:
    """Start a call in a thread of its own. A call that never returns does not keep the process from ending."""
    call: Future[Answer] = Future()

    def run() -> None:
        try:
            call.set_result(function(*arguments))
        except BaseException as error:
            call.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return call


def call_within(name: str, timeout_s: float, function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Return or raise the result of `function`. Raises `SensorUnavailable` after `timeout_s` seconds.

    A call that hangs in a driver cannot be ended. Its thread stays, and other calls with the same name fail at once
    until it returns.
    """
    if (earlier := _hanging.get(name)) is not None and not earlier.done():
        raise SensorUnavailable(f"{name} has not returned from an earlier call")
    call = call_in_thread("telemetry-call", function, *arguments)
    if not wait([call], timeout_s).done:
        _hanging[name] = call
        raise SensorUnavailable(f"{name} does not answer within {timeout_s:g} s")
    return call.result()


@dataclass(frozen=True, kw_only=True)
class DcgmAddress(Checked, section="telemetry"):
    """The address of NVIDIA's dcgm-exporter."""

    dcgm_url: str = key(DEFAULT_URL, "address of the dcgm-exporter")

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parts = urllib.parse.urlsplit(self.dcgm_url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is not a number
            valid = False
        if not valid or any(character.isspace() for character in self.dcgm_url):
            raise UsageError(f"telemetry.dcgm_url must be like {DEFAULT_URL}, got {self.dcgm_url!r}")


@dataclass(frozen=True, kw_only=True)
class TelemetrySettings(DcgmAddress):
    """Which sources to use and how often. Raises `UsageError` naming the key."""

    sources: tuple[str, ...] = key(
        SOURCES, "sensors to read; missing ones are reported once and leave NULLs", "list of text", SOURCES
    )
    period_s: float = key(0.1, "sampling period of each sensor", "number 0.001 to 3600")


def make_sensors(settings: TelemetrySettings, target: WatchTarget) -> tuple[tuple[Sensor, ...], dict[str, str]]:
    """Return the sensors that can watch a trial, and the reason for each source that cannot."""
    sensors: list[Sensor] = []
    missing: dict[str, str] = {}
    for source in dict.fromkeys(settings.sources):
        if source not in SENSORS:
            continue
        try:
            create = pkgutil.resolve_name(SENSORS[source]).create
            sensors.append(call_within(source, _START_S, create, settings, target))
        except SensorUnavailable as reason:
            missing[source] = str(reason)
    return tuple(sensors), missing


class TelemetrySampler:
    """Owns the sensors of one trial: `start` samples them, `wind_up` takes a last sample, `stop` ends sampling.

    Each sensor is read every `max(period_s, sensor.period_s)`. Sensors that wait for a network (`slow = True`) have a
    thread each; one thread reads all others. After a delay, missed readings are skipped. `missing` maps each sensor
    (`dcgm`) or single metric (`nvml.energy_j`) that read nothing to the reason.
    """

    def __init__(self, sensors: Sequence[Sensor], period_s: float = 0.1) -> None:
        self._sensors = tuple(sensors)
        self._period_s = period_s
        self._threads: list[threading.Thread] = []
        self._common: threading.Thread | None = None  # thread of the sensors that do not wait for a network
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._samples: list[tuple[str, Sample]] = []
        self._stopped = False
        self._last: dict[str, Sample] = {}  # each sensor's last reading
        self._until_ns: int | None = None
        self._returned = 0  # number of samples that `new_samples` has returned
        self.missing: dict[str, str] = {}

    def start(self) -> None:
        """Start sampling."""
        assert not self._threads and not self._stopped, "a sampler serves one trial"
        together = [sensor for sensor in self._sensors if not sensor.slow]
        alone = [[sensor] for sensor in self._sensors if sensor.slow]
        for group in filter(None, (together, *alone)):
            name = "telemetry-" + "-".join(sensor.name for sensor in group)
            thread = threading.Thread(target=self._run, args=(group,), name=name, daemon=True)
            self._threads.append(thread)
            if group is together:
                self._common = thread
            thread.start()

    def stop(self, until_ns: int | None = None) -> list[tuple[str, Sample]]:
        """Stop, and return every reading as (sensor name, sample), by time. A second call returns none."""
        if self._stopped:
            return []
        self._stopped = True
        self.wind_up(until_ns)
        self._join(self._threads)
        for sensor in self._sensors:
            for metric, reason in dict(sensor.dropped).items():
                self.missing.setdefault(f"{sensor.name}.{metric}", reason)
        if not any(thread.is_alive() for thread in self._threads):
            for sensor in self._sensors:
                sensor.close()
        else:
            _log.warning("a telemetry sensor does not return; its readings end here")
        with self._lock:
            taken, self._samples = self._samples, []
        return sorted(taken, key=lambda pair: pair[1].t_ns)

    def wind_up(self, until_ns: int | None = None) -> None:
        """Read each sensor of the common thread a last time. Call it while the trial still holds its memory.

        A lagging source (`lag_s`) is read further in its own thread, until its readings cover `until_ns`, the window's
        end. That takes at most its lag plus two of its intervals, and at most one second. If it would take longer, the
        source is not read further.
        """
        if not self._stopping.is_set():
            self._until_ns = until_ns
            self._stopping.set()
            self._join([] if self._common is None else [self._common])

    def _join(self, threads: list[threading.Thread]) -> None:
        deadline = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def sensor_names(self) -> tuple[str, ...]:
        """Return the names of the sensors that watch the trial."""
        return tuple(sensor.name for sensor in self._sensors)

    def new_samples(self) -> list[tuple[str, Sample]]:
        """Return readings since the last call as (sensor name, sample); `stop` repeats them. Safe from any thread."""
        with self._lock:
            new, self._returned = self._samples[self._returned :], len(self._samples)
        return new

    def _run(self, group: list[Sensor]) -> None:
        """Run the sampling loop of one thread. After `stop`, sensors that cannot block are read a last time."""
        due = {id(sensor): 0.0 for sensor in group}
        active = list(group)
        while active and not self._stopping.is_set():
            for sensor in list(active):
                now = time.monotonic()
                if due[id(sensor)] > now:
                    continue
                period = max(self._period_s, sensor.period_s)
                # keep the sensor's grid; skip missed ticks
                due[id(sensor)] = max(due[id(sensor)] + period, now + period / 2) if due[id(sensor)] else now + period
                if not self._take(sensor):
                    active.remove(sensor)
            if active:
                next_due = min(due[id(sensor)] for sensor in active)
                self._stopping.wait(max(0.0, next_due - time.monotonic()))
        for sensor in active:
            if sensor.lag_s > 0:
                self._read_on(sensor)
            elif not sensor.slow:
                self._take(sensor)

    def _read_on(self, sensor: Sensor) -> None:
        """Read a lagging source until its readings cover the window's end."""
        stopped_ns = time.monotonic_ns()
        while (last := self._last.get(sensor.name)) is not None and self._until_ns is not None:
            if last.since_ns is None:  # the source's interval is not known yet
                return
            interval_ns = max(1, last.t_ns - last.since_ns)
            missing = -((last.t_ns - self._until_ns) // interval_ns)  # readings, rounded up
            lag_ns = int(sensor.lag_s * 1e9)
            give_up_ns = stopped_ns + min(lag_ns + 2 * interval_ns, int(_READ_ON_S * 1e9))
            due_ns = last.t_ns + missing * interval_ns + lag_ns
            now_ns = time.monotonic_ns()
            if missing <= 0 or max(due_ns, now_ns) >= give_up_ns:
                return
            time.sleep(max(0, min(int(sensor.period_s * 1e9), give_up_ns - now_ns)) / 1e9)
            if not self._take(sensor):
                return

    def _take(self, sensor: Sensor) -> bool:
        """Read one sensor; return False if it must be left out from now on."""
        try:
            samples = sensor.sample()
        except SensorUnavailable as reason:
            self.missing[sensor.name] = str(reason)
            return False
        except Exception as error:  # a defect in one sensor must not end the readings of the others
            _log.exception("telemetry sensor %s failed", sensor.name)
            self.missing[sensor.name] = f"failed with {type(error).__name__}: {error}"
            return False
        if samples:
            samples = [_numbers_only(sample) for sample in samples]
            with self._lock:
                self._samples += [(sensor.name, sample) for sample in samples]
            if readings := [sample for sample in samples if sample.quality in ("measured", "suspect")]:
                self._last[sensor.name] = readings[-1]
        return True


def _numbers_only(sample: Sample) -> Sample:
    """Return the sample without values that are not finite, which would spoil a mean."""
    if all(map(math.isfinite, sample.values.values())):
        return sample
    return replace(sample, values={name: value for name, value in sample.values.items() if math.isfinite(value)})


def to_table(
    run_id: str,
    samples: Iterable[tuple[str, Sample]],
    t0_ns: int,
    warmup_ns: int | None,
    window_ns: int | None,
    window_end_ns: int | None,
) -> pa.Table:
    """Return rows of `telemetry` (warehouse.tables.schema.TELEMETRY_SCHEMA), by time; metrics not measured are NULL.

    The times are the start of the run, of warm-up and of the window, and the window's end, by `time.monotonic_ns`.
    None: the trial did not get that far, and the previous phase lasts to the end.
    """
    import pyarrow as pa

    from warehouse.tables.schema import METRICS, TELEMETRY_SCHEMA

    ordered = sorted(samples, key=lambda pair: pair[1].t_ns)
    columns: dict[str, list[Any]] = {
        "run_id": [run_id] * len(ordered),
        "t_ms": [(sample.t_ns - t0_ns) / 1e6 for _, sample in ordered],
        "sensor": [name for name, _ in ordered],
        "phase": [_phase(sample.t_ns, warmup_ns, window_ns, window_end_ns) for _, sample in ordered],
        "quality": [sample.quality for _, sample in ordered],
        "reasons": [",".join(sample.reasons) or None for _, sample in ordered],
        "rank": [sample.rank for _, sample in ordered],
    }
    for metric in METRICS:
        columns[metric] = [sample.values.get(metric) for _, sample in ordered]
    return pa.table(columns, schema=TELEMETRY_SCHEMA)


def _phase(t_ns: int, warmup_ns: int | None, window_ns: int | None, window_end_ns: int | None) -> str | None:
    if window_ns is not None and t_ns >= window_ns:
        return "window" if window_end_ns is None or t_ns <= window_end_ns else None
    if warmup_ns is not None and t_ns >= warmup_ns:
        return "warmup"
    return None
