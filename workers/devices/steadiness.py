"""Decides by confidence intervals when a running trial's sampled figures are steady.

Start reading at `TargetFollower`; `mean_half_width` has the statistics. Torch-free; callers pass the time.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from workers.devices import WindowSettings
from workers.telemetry.sensors import Sample, spoken_from_ns

# target -> (sensor, metric) that may read it, the preferred one first as in `workers.labels`. Power comes
# from the energy counter if there is one: NVIDIA's power reading covers only a part of the time.
TARGETS: Mapping[str, tuple[tuple[str, str], ...]] = {
    **{name: (("gpm", name), ("dcgm", name)) for name in ("smact", "smocc", "drama")},
    "gpu_util": (("nvml", "gpu_util"), ("dcgm", "gpu_util")),
    "power_w": (("nvml", "energy_j"), ("nvml", "power_w"), ("dcgm", "energy_j"), ("dcgm", "power_w")),
}
_PROFILING = ("smact", "smocc", "drama")

_MIN_BLOCKS = 4
_SURE_BLOCKS = 5  # with fewer, the half-width must be within half of the tolerance
_MANY_BLOCKS = 8  # fewer may agree by chance: their half-width counts as at least half of the tolerance
_MAX_BLOCKS = 12
_BLOCK_READINGS = 2  # shortest block, in sampling periods of its source
_CONSTANT_READINGS = 3
_GAPS = 32  # distances between readings from which a source's interval is known
_PATIENCE = 3  # sampling periods without a reading after which a source is not waited for ...
_LAG_NS = 500_000_000  # ... plus the delay of an exporter's values

# Ends of steps that readings cover: time, integral since the window's start, and distance to the nearest end of a
# reading, as a share of the reading.
Cuts = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]

# An interval that is checked repeatedly until it is narrow enough sometimes becomes narrow too early. This factor
# widens half-widths: more than 90 of 100 windows on noisy signals then include the true mean (95 and
# more on periodic ones).
_STOPPING = 1.15

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
)


def student_t(freedom: int) -> float:
    """Return Student's t for a 95 % confidence interval with these degrees of freedom, within 0.3 %."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom


def mean_half_width(sums: Sequence[float], lengths: Sequence[float]) -> float:
    """Return the half-width of the 95 % confidence interval of `sum(sums) / sum(lengths)`, the mean over blocks.

    The method is batch means (Law, Simulation Modeling and Analysis, chapter 9), with a ratio estimator for blocks of
    unequal length. Blocks that resemble their neighbours, as in a drifting series, carry less information. A positive
    correlation r of neighbours therefore multiplies the variance by (1 + r) / (1 - r), as in a first-order
    autoregression. Among n independent blocks r is -1/n on average, which is added back. Infinite below two blocks.
    """
    blocks = len(sums)
    if blocks < 2:
        return math.inf
    mean = math.fsum(sums) / math.fsum(lengths)
    residuals = [total - mean * length for total, length in zip(sums, lengths, strict=True)]
    squares = math.fsum(residual * residual for residual in residuals)
    if squares == 0:
        return 0.0
    correlation = math.fsum(a * b for a, b in pairwise(residuals)) / squares + 1 / blocks
    correlation = min(max(correlation, 0.0), 0.8)
    variance = squares / (blocks - 1) * (1 + correlation) / (1 - correlation)
    return _STOPPING * student_t(blocks - 1) * math.sqrt(variance * blocks) / math.fsum(lengths)


def parts(count: int) -> list[tuple[int, int]]:
    """Return (first, end) indices that divide `count` consecutive values into at most 12 groups of similar size."""
    groups = min(count, _MAX_BLOCKS)
    return list(pairwise(round(index * count / groups) for index in range(groups + 1))) if groups else []


@dataclass
class _Series:
    """One sensor's readings of a metric, each a span of time with a constant rate, which the ends of steps cut."""

    is_counter: bool
    window_ns: int = 0
    last: tuple[int, float] | None = None  # time and value of the last reading, inside the window or not
    gaps_ns: list[int] = field(default_factory=list)
    # The spans, in arrays that numpy reads without a loop.
    starts_ns: array[int] = field(default_factory=lambda: array("q"))
    ends_ns: array[int] = field(default_factory=lambda: array("q"))
    rates: array[float] = field(default_factory=lambda: array("d"))  # per second

    @property
    def interval_ns(self) -> int | None:
        """Return the observed time between the source's readings in ns; None before two readings."""
        return int(statistics.median(self.gaps_ns)) if self.gaps_ns else None

    def add(self, end_ns: int, start_ns: int | None, value: float) -> None:
        last = self.last
        if last is not None and (end_ns <= last[0] or (self.is_counter and value == last[1])):
            return  # an unchanged counter is not a reading
        self.last = end_ns, value
        since_ns = start_ns if last is None else last[0]
        if self.is_counter:
            if last is None or value < last[1]:  # the driver was reloaded: start counting from here
                return
            start_ns, value = last[0], (value - last[1]) / (end_ns - last[0]) * 1e9
        if since_ns is None:
            return
        if len(self.gaps_ns) < _GAPS:
            self.gaps_ns.append(end_ns - since_ns)
        self.starts_ns.append(since_ns if start_ns is None else start_ns)
        self.ends_ns.append(end_ns)
        self.rates.append(value)

    def first_in_window(self) -> int:
        """Return the index of the first span that ends in the window."""
        return bisect_right(self.ends_ns, self.window_ns)

    def cut(self, steps_ns: array[int]) -> Cuts:
        """Return the ends of steps that readings cover; at least one span must end in the window."""
        first = self.first_in_window()
        # Only the part inside the window counts of a reading that spans its start. A reading also stands for a gap
        # before it.
        times_ns = np.concatenate([[max(self.starts_ns[first], self.window_ns)], self.ends_ns[first:]])
        lengths_ns = np.diff(times_ns)
        amounts = lengths_ns * np.array(self.rates[first:]) / 1e9
        cuts_ns = np.array(steps_ns)
        cuts_ns = cuts_ns[(cuts_ns >= times_ns[0]) & (cuts_ns <= times_ns[-1])]
        reading = np.maximum(np.searchsorted(times_ns, cuts_ns), 1) - 1
        shares = (cuts_ns - times_ns[reading]) / lengths_ns[reading]
        integrals = (np.cumsum(amounts) - amounts)[reading] + shares * amounts[reading]
        return cuts_ns, integrals, np.minimum(shares, 1 - shares)

    def blocks(self, cuts: Cuts) -> tuple[list[float], list[float]]:
        """Return (integrals, lengths in s) of at most 12 blocks of similar length between ends of steps.

        A block is at least two sampling periods or one step long. If possible it ends near the end of a reading,
        because the integral is interpolated inside a reading. More blocks would hardly narrow Student's t; longer
        blocks depend less on the interpolation.
        """
        cuts_ns, integrals, distances = cuts
        if len(cuts_ns) < 2:
            return [], []
        since_ns = cuts_ns - cuts_ns[0]  # floats hold these exactly, but the clock only for 104 days
        shortest_ns = _BLOCK_READINGS * (self.interval_ns or 0)
        count = min(_MAX_BLOCKS, int(since_ns[-1] / max(shortest_ns, 1)))
        if count < 1:
            return [], []
        length_ns = float(since_ns[-1]) / count
        slack_ns = min(length_ns / 4, (length_ns - shortest_ns) / 2)
        ends: list[int] = []
        for index in range(count + 1):
            border_ns = index * length_ns
            low, high = np.searchsorted(since_ns, (border_ns - slack_ns, border_ns + slack_ns + 1)).tolist()
            if low < high:
                chosen = low + int(distances[low:high].argmin())
            else:
                chosen = min((low - 1, low), key=lambda place: abs(since_ns[place] - border_ns))
            if not ends or chosen > ends[-1]:
                ends.append(chosen)
        return np.diff(integrals[ends]).tolist(), (np.diff(since_ns[ends]) / 1e9).tolist()


class TargetFollower:
    """Follows a run's sampled targets, and decides when the confidence interval of each is within its tolerance.

    A GPU's activity repeats with the training step. The window is therefore cut into blocks of whole steps, at least
    two sampling periods or one step long. Their means scatter little, while a single reading depends on the part of a
    step that it covers. A block's mean comes from the integral of the readings, interpolated at its ends. Repeated and
    failed readings do not count, and neither do profiling figures while the profiler stalls.

    A source that has been silent for three of its periods, or is too slow for the window's `max_seconds`, is not waited
    for.
    Use from one thread.
    """

    def __init__(
        self,
        window: WindowSettings,
        sensors: Iterable[str],
        period_s: float = 0.1,
        targets: Mapping[str, Sequence[tuple[str, str]]] = TARGETS,
    ) -> None:
        """`sensors` are the names of the sampled ones, read every `period_s` or at their own longer period."""
        self._window = window
        self._period_ns = int(period_s * 1e9)
        names = set(sensors)
        self._targets = {
            target: tuple(source for source in sources if source[0] in names) for target, sources in targets.items()
        }
        self._series = {
            source: _Series(is_counter=source[1] == "energy_j")
            for sources in self._targets.values()
            for source in sources
        }
        self._steps_ns = array("q")
        self._window_ns: int | None = None

    def begin(self, window_ns: int, warmup_ns: int | None = None) -> None:
        """Record the start of the window; earlier readings may have been added.

        `warmup_ns` is the start of the first step; averages that look back past it are left out.
        """
        self._window_ns = window_ns
        self._steps_ns = array("q", [window_ns, *(step_ns for step_ns in self._steps_ns if step_ns > window_ns)])
        for (_, metric), series in self._series.items():
            series.window_ns = spoken_from_ns(metric, window_ns, warmup_ns)

    def add(self, samples: Iterable[tuple[str, Sample]]) -> None:
        """Add new readings as (sensor name, sample), each sensor's in order of time."""
        for sensor, sample in samples:
            if sample.quality in ("repeated", "unavailable"):
                continue
            stalled = sample.quality == "suspect" and "profiling_zero" in sample.reasons
            for metric, value in sample.values.items():
                series = self._series.get((sensor, metric))
                if series is not None and not (stalled and metric in _PROFILING):
                    series.add(sample.t_ns, sample.since_ns, value)

    def mark_step(self, t_ns: int) -> None:
        """Record that a training step ended at `t_ns`; callers may leave out steps."""
        if not self._steps_ns or t_ns > self._steps_ns[-1]:
            self._steps_ns.append(t_ns)

    def steady(self, now_ns: int) -> bool:
        """Return whether the interval of every target with readings is within its tolerance."""
        if self._window_ns is None:
            return False
        return all(self._target_steady(target, now_ns) for target in self._targets)

    def half_widths(self) -> dict[str, float]:
        """Return the half-width of each target's 95 % confidence interval, in its unit; leave out unknown ones."""
        return {target: interval[1] for target in self._targets if (interval := self._interval(target))}

    def means(self) -> dict[str, float]:
        """Return the mean of each target, around which its half-width lies."""
        return {target: interval[0] for target in self._targets if (interval := self._interval(target))}

    def _series_of(self, target: str) -> _Series | None:
        """Return the target's first source with readings in the window, or None."""
        sources = (self._series[source] for source in self._targets[target])
        return next((series for series in sources if series.ends_ns and series.ends_ns[-1] > series.window_ns), None)

    def _target_steady(self, target: str, now_ns: int) -> bool:
        waiting = [self._series[source] for source in self._targets[target]]
        waiting = [series for series in waiting if self._is_awaited(series, now_ns)]
        if not waiting:
            return True
        series = self._series_of(target)
        if series is None:
            return False  # the first reading may still come
        if series not in waiting:
            return True  # the source has ended: no more readings will come
        interval = self._interval(target)
        if interval is None:
            return False
        mean, half_width, blocks = interval
        return half_width <= self._tolerance(target, mean) * (1.0 if blocks >= _SURE_BLOCKS else 0.5)

    def _tolerance(self, target: str, mean: float) -> float:
        return self._window.power_tolerance * mean if target == "power_w" else self._window.utilization_tolerance

    def _is_awaited(self, series: _Series, now_ns: int) -> bool:
        interval_ns = series.interval_ns or self._period_ns
        shortest_ns = _MIN_BLOCKS * _BLOCK_READINGS * interval_ns
        if shortest_ns > self._window.max_seconds * 1e9:
            return False
        patience_ns = _PATIENCE * interval_ns + _LAG_NS
        if series.last is None:  # a slow exporter's first reading may still come within the shortest window
            patience_ns = max(patience_ns, int(self._window.min_seconds * 1e9))
        last_ns = 0 if series.last is None else series.last[0]
        return now_ns - max(last_ns, self._window_ns or 0) <= patience_ns

    def _interval(self, target: str) -> tuple[float, float, int] | None:
        """Return (mean, half-width, blocks) of a target; None while it has too few blocks."""
        series = self._series_of(target)
        if series is None or self._window_ns is None:
            return None
        cuts = series.cut(self._steps_ns)
        sums, lengths = series.blocks(cuts)
        if len(sums) >= _MIN_BLOCKS:
            mean, half_width = math.fsum(sums) / math.fsum(lengths), mean_half_width(sums, lengths)
            if half_width > 0 and len(sums) < _MANY_BLOCKS:
                half_width = max(half_width, self._tolerance(target, mean) / 2)
            return mean, half_width, len(sums)
        rates = series.rates[series.first_in_window() :]
        if len(rates) >= _CONSTANT_READINGS and len(cuts[0]) > _MIN_BLOCKS and not series.is_counter:
            low, high = min(rates), max(rates)
            if high - low <= self._window.utilization_tolerance / 10 * max(1.0, high):
                return (low + high) / 2, high - low, len(rates)  # constant figures of an idle or saturated unit
        return None
