"""The sensor Protocol that every telemetry source implements, its error, and means of readings.

Start reading at `Sensor`. A sensor declares its metrics (keys of `warehouse.tables.schema.METRICS`) and its period, and
converts units itself. Its constructor raises `SensorUnavailable` where the hardware, driver, library, exporter or
target is missing; the message must tell a person how to act. Later, `sample` leaves out metrics that it cannot read.
`window_mean` computes the mean of a metric over a window, and how well the readings cover the window.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

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
    values that it served before, and `unavailable`, without values, for a failed reading. `workers.labels.quality`
    sets `suspect`. `reasons` explain the quality.
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
