"""The sensor Protocol: what every telemetry source offers, its one error family, and means of readings.

Start reading at `Sensor`. A sensor declares its metrics (keys of `warehouse.tables.schema.METRICS`) and its period, and
converts units once, here. Constructing a sensor must raise `SensorUnavailable` with a reason a person can act on when
the hardware, driver, library, exporter or target is not there; after that `sample` returns what it has, without the
metrics it could not read. `window_mean` is the mean over a window from readings that are averages of intervals, and how
well the readings cover the window.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

# A reading without the start of its interval stands for the time since the one before it, but at most for this
# many usual intervals: longer gaps are unknown.
REACH = 5
# NVML's own averages, which DCGM passes on: a reading may cover as much time before it (utilization of 1/6 to 1 s,
# power of up to 1 s, by product), so that in a window's first second it may cover the time before the first step.
LOOKBACK_NS: Mapping[str, int] = {"gpu_util": 1_000_000_000, "power_w": 1_000_000_000}
Spoils = Mapping[str, Collection[str]]  # reason of a sample -> the metrics that it makes unusable


class SensorUnavailable(RuntimeError):
    """The sensor cannot be used here; the message has the reason and, where there is one, the remedy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. `t_ns` is `time.monotonic_ns()` at the moment the values are of; no key means not measured.

    Averages end at `t_ns`, which a source that lags has put back, and begin at `since_ns` (None: at the sample before).
    `quality` is one of `warehouse.tables.schema.SAMPLE_QUALITIES`: a sensor says `repeated` for what it had served
    before and `unavailable`, without values, for a reading that failed; `workers.labels.quality` finds what is suspect.
    `reasons` say why.
    """

    t_ns: int
    values: dict[str, float]
    quality: str = "measured"
    reasons: tuple[str, ...] = ()
    since_ns: int | None = None
    rank: int | None = None  # the rank that the reading is of, in a trial of several; None: the whole trial


@dataclass(frozen=True, slots=True)
class WatchTarget:
    """Target of a trial's sensors: the device by UUID (None: no GPU) and the trial's root process."""

    device_uuid: str | None
    pid: int


@runtime_checkable
class Sensor(Protocol):
    """A source of samples of one trial, from its construction until `close`. Used from one thread at a time.

    Sensors inherit from it, which gives them the defaults.
    """

    name: str  # nvml | gpm | dcgm | process
    metrics: tuple[str, ...]
    period_s: float  # the fastest useful period; the sampler never asks more often
    slow: bool = False  # whether a reading may wait for a network: the sampler gives it a thread of its own
    lag_s: float = 0.0  # age of its readings when they become available
    dropped: Mapping[str, str] = MappingProxyType({})  # metric -> why this device does not read it

    def __init__(self, target: WatchTarget) -> None: ...

    @classmethod
    def create(cls, settings: Any, target: WatchTarget) -> Sensor:
        """Return the sensor of a trial, as `TelemetrySettings` have it. Raises `SensorUnavailable`."""
        return cls(target)

    def sample(self) -> list[Sample]:
        """Return the readings since the last call, oldest first: usually one, none if there is nothing new."""

    def close(self) -> None:
        """Release what the sensor holds; a second call has no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMean:
    """A metric over a window, from one sensor. `mean` is None if no reading covers the window."""

    mean: float | None = None
    coverage: float = 0.0  # share of the window's time that readings stand for
    readings: int = 0  # number of readings in the mean
    largest_gap_s: float = 0.0  # the longest stretch of the window that no reading stands for
    outside: float = 0.0  # share of those readings' own time that lies outside of the window
    deviation: float = 0.0  # standard deviation among the readings' values, each weighted with its time

    @property
    def standard_error(self) -> float:
        """Return the standard error of the mean, as if readings were independent."""
        return self.deviation / math.sqrt(self.readings) if self.readings > 1 else math.inf


def window_mean(
    samples: Iterable[Sample], metric: str, start_ns: int, end_ns: int, spoils: Spoils | None = None
) -> WindowMean:
    """Return the mean of `metric` over [start_ns, end_ns], each value weighted with the time that it stands for; zeros
    count.

    `samples` are of one sensor. Utilization, profiling and power readings are means of the interval that they end, so
    a value stands for the time from `since_ns` to `t_ns`; without `since_ns`, since the reading before it (the first:
    since the window's start). What was repeated weighs nothing: the reading that it repeats stands for its own
    interval. A reading whose `reasons` spoil the metric is left out, and its time is not covered.

    A reading counts with the part of its time that lies inside. Where readings are long (one averages more than a
    quarter of the window) and those that lie wholly inside cover half of it, the mean is of these alone: the others
    are mostly about the time around. Short ones stay, since without the window's edges a mean would miss parts of the
    first and the last step. None unless a reading ends in the window, or names an interval of which the most lies in
    it: what was read around a window that is shorter than the sensor's period says little about it.
    """
    intervals = _intervals(samples, metric, start_ns, spoils or {})
    inside: list[tuple[int, int, float]] = []  # (weight in ns, own length in ns, value)
    touching: list[tuple[int, int, float]] = []
    inside_ns = covered_ns = largest_gap_ns = 0
    covered_to = start_ns
    speaks, last = False, None
    for since_ns, t_ns, value, named in intervals:
        overlap_ns = min(t_ns, end_ns) - max(since_ns, start_ns)
        if start_ns <= t_ns <= end_ns:
            speaks, last = True, value
        if overlap_ns <= 0:
            continue
        length_ns = t_ns - since_ns
        speaks = speaks or (named and 2 * overlap_ns > length_ns)
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
    if not speaks:
        return WindowMean(coverage=coverage, largest_gap_s=largest_gap_ns / 1e9)
    if not touching:  # a single reading on the window's first instant, or a window without length
        return WindowMean(mean=last, readings=1, largest_gap_s=largest_gap_ns / 1e9)
    long = 4 * max(length_ns for _, length_ns, _ in touching) > window_ns
    used = inside if long and 2 * inside_ns >= window_ns else touching
    weight = sum(weight_ns for weight_ns, _, _ in used)
    seen_ns = sum(length_ns for _, length_ns, _ in used)
    mean = sum(weight_ns * value for weight_ns, _, value in used) / weight
    variance = sum(weight_ns * (value - mean) ** 2 for weight_ns, _, value in used) / weight
    return WindowMean(
        mean=mean,
        coverage=coverage,
        readings=len(used),
        largest_gap_s=largest_gap_ns / 1e9,
        outside=1 - weight / seen_ns,
        deviation=math.sqrt(variance),
    )


def spoken_from_ns(metric: str, window_ns: int, warmup_ns: int | None) -> int:
    """Return when readings of a metric begin to describe the window: at its start or later.

    It is later if warm-up, in which the GPU is as busy as in the window, was shorter than the metric's look back."""
    if warmup_ns is None:
        return window_ns
    return max(window_ns, warmup_ns + LOOKBACK_NS.get(metric, 0))


def share(samples: Iterable[Sample], reason: str, metric: str, start_ns: int, end_ns: int) -> float:
    """Return the share of [start_ns, end_ns] in which readings of `metric`, all of one sensor, carry `reason`."""
    flags = [
        Sample(sample.t_ns, {metric: float(reason in sample.reasons)}, sample.quality, (), sample.since_ns)
        for sample in samples
        if metric in sample.values
    ]
    return window_mean(flags, metric, start_ns, end_ns).mean or 0.0


def _intervals(
    samples: Iterable[Sample], metric: str, start_ns: int, spoils: Spoils
) -> list[tuple[int, int, float, bool]]:
    """Return (since, until, value, whether it names `since`) of each usable reading, by time, without overlap."""
    readings = [sample for sample in samples if sample.quality != "repeated" and metric in sample.values]
    readings.sort(key=_time)
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
    """Return the median distance between neighbours of an ordered list; 0 without neighbours."""
    gaps = sorted(later - earlier for earlier, later in pairwise(times_ns) if later > earlier)
    return gaps[len(gaps) // 2] if gaps else 0


def _time(sample: Sample) -> int:
    return sample.t_ns
