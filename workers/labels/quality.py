"""Judges a run's samples: which readings are in doubt, why, and which metrics they spoil.

Start reading at `REASONS`; `judge` judges samples, `workers.labels.verdict` their run. No sample is deleted.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from warehouse.tables.schema import SAMPLE_QUALITIES
from workers.telemetry.base import Sample
from workers.telemetry.means import REACH, usual_interval_ns

Samples = Sequence[tuple[str, Sample]]  # (sensor, sample)

PROFILING = (
    "smact",
    "smocc",
    "drama",
    "gract",
    "tensor_active",
    "fp16_active",
    "fp32_active",
    "fp64_active",
    "int_active",
    "tensor_hmma_active",
    "tensor_imma_active",
    "tensor_dfma_active",
)

BUSY = 0.9  # gpu_util from which on a GPU that shows no activity, or another clock, is odd
CLOCK_JUMP = 0.10  # of the window's median SM clock


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A reason to doubt readings or labels.

    `spoils`: metrics whose means leave such readings out. A run that shows it in more than `suspect_from` of its window
    is suspect; in more than `untrusted_from`, untrusted (None: never by itself).
    """

    meaning: str
    spoils: frozenset[str] = frozenset()
    suspect_from: float = 0.0
    untrusted_from: float | None = None


REASONS: dict[str, Reason] = {
    "profiling_zero": Reason(
        meaning="every profiling counter was exactly 0 while the GPU was busy",
        spoils=frozenset(PROFILING),
        untrusted_from=0.5,
    ),
    "clock_jump": Reason(
        meaning=f"the SM clock was more than {CLOCK_JUMP:.0%} off its median while the GPU was busy", suspect_from=0.05
    ),
    "power_cap": Reason(meaning="the driver lowered the clocks to stay within the power limit", suspect_from=0.1),
    "thermal_slowdown": Reason(meaning="the GPU was too hot and ran slower", untrusted_from=0.1),
    "hw_slowdown": Reason(
        meaning="the board slowed the GPU down (external power brake or another hardware reason)", untrusted_from=0.1
    ),
    "other_process": Reason(meaning="a process that is not the trial's was on the GPU", untrusted_from=0.0),
    "foreign_memory": Reason(
        meaning="device memory was in use that neither the trial nor the driver accounts for", untrusted_from=0.0
    ),
    "ecc_errors": Reason(meaning="uncorrected memory errors were counted", untrusted_from=0.0),
    "sampler_gap": Reason(meaning=f"nothing was sampled for more than {REACH} periods"),
    "host_clock": Reason(meaning="the host's clock was set, or the host slept"),
    "partner_ended": Reason(meaning="a trial that ran beside it ended before its window did"),
    "processes_left": Reason(meaning="the trial left processes behind, which ran beside it"),
    "sources_disagree": Reason(meaning="two sources of one metric disagree", untrusted_from=0.0),
    "low_coverage": Reason(
        meaning="readings that can be used stand for less than half of the window, though their source works",
        untrusted_from=0.0,
    ),
    "coarse_readings": Reason(
        meaning="the readings average more time outside of the window than inside, or nobody knows how much"
    ),
    "nvml_error": Reason(meaning="NVML answered with an error"),
    "exporter_timeout": Reason(meaning="the dcgm-exporter did not answer in time"),
    "exporter_error": Reason(meaning="the dcgm-exporter could not be reached, or answered with an error"),
}

SPOILS = {name: reason.spoils for name, reason in REASONS.items() if reason.spoils}

# NVML's clocks-event bits (nvml.h, nvmlClocksEventReason*). The slowdown bit is also set with the two that say why.
_POWER_CAP, _HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80


def judge(
    samples: Samples, window_ns: int | None, window_end_ns: int | None, period_s: float
) -> list[tuple[str, Sample]]:
    """Mark the samples in doubt as `suspect`, with their reasons; values stay as they were read.

    A sensor's own verdict on its samples stays. A pure function; `period_s` is the intended sampling period.
    """
    by_sensor = split_by_sensor(samples)
    usage = _Usage(by_sensor)
    reasons_of: dict[int, list[str]] = {}

    def mark(sample: Sample, reason: str) -> None:
        reasons_of.setdefault(id(sample), []).append(reason)

    for sensor in ("gpm", "dcgm"):
        previous_ns = None
        for sample in own_readings(by_sensor.get(sensor, ())):
            since_ns = sample.since_ns if sample.since_ns is not None else previous_ns
            previous_ns = sample.t_ns
            shown = [sample.values[metric] for metric in PROFILING if metric in sample.values]
            if shown and not any(shown) and usage.busy(since_ns or sample.t_ns, sample.t_ns):
                mark(sample, "profiling_zero")
    for sensor in ("nvml", "dcgm"):
        of_sensor = own_readings(by_sensor.get(sensor, ()))
        for sample in _clock_jumps(of_sensor, usage, window_ns, window_end_ns):
            mark(sample, "clock_jump")
    first_errors = None
    for sample in by_sensor.get("nvml", ()):
        for reason in _throttled(int(sample.values.get("throttle_reasons", 0))):
            mark(sample, reason)
        if sample.values.get("other_processes", 0) > 0:
            mark(sample, "other_process")
        if "ecc_uncorrected" in sample.values:
            errors = sample.values["ecc_uncorrected"]
            first_errors = errors if first_errors is None else first_errors
            if errors > first_errors:
                mark(sample, "ecc_errors")
    for sensor in ("nvml", "gpm", "process"):  # those of the common thread: they stop together, or not at all
        for sample, _ in gaps_in(by_sensor.get(sensor, ()), period_s, window_ns, window_end_ns):
            mark(sample, "sampler_gap")
    return [(sensor, _marked(sample, reasons_of.get(id(sample)))) for sensor, sample in samples]


def count_qualities(samples: Samples, window_ns: int | None, window_end_ns: int | None) -> dict[str, int]:
    """Return the run's columns `samples_measured` and so on: the window's telemetry rows by quality."""
    counts = dict.fromkeys(SAMPLE_QUALITIES, 0)
    if window_ns is not None:
        for _, sample in samples:
            if sample.t_ns >= window_ns and (window_end_ns is None or sample.t_ns <= window_end_ns):
                counts[sample.quality] += 1
    return {f"samples_{quality}": count for quality, count in counts.items()}


class _Usage:
    """The GPU's utilization over time, from NVML if it reads it, else from DCGM."""

    def __init__(self, by_sensor: Mapping[str, list[Sample]]) -> None:
        self._times_ns: list[int] = []
        self._shares: list[float] = []
        for sensor in ("nvml", "dcgm"):
            readings = [s for s in own_readings(by_sensor.get(sensor, ())) if "gpu_util" in s.values]
            if readings:
                self._times_ns = [sample.t_ns for sample in readings]
                self._shares = [sample.values["gpu_util"] for sample in readings]
                return

    def busy(self, since_ns: int, t_ns: int) -> bool:
        """Return whether the GPU was busy by every reading inside the interval and the first one after it."""
        first = bisect.bisect_right(self._times_ns, since_ns)
        last = bisect.bisect_left(self._times_ns, t_ns) + 1
        spoken = self._shares[first:last]
        return bool(spoken) and min(spoken) >= BUSY


def _clock_jumps(
    readings: list[Sample], usage: _Usage, window_ns: int | None, window_end_ns: int | None
) -> list[Sample]:
    if window_ns is None:
        return []
    busy = [
        sample
        for sample in readings
        if "sm_clock_mhz" in sample.values
        and window_ns <= sample.t_ns
        and (window_end_ns is None or sample.t_ns <= window_end_ns)
        and usage.busy(sample.t_ns - 1, sample.t_ns)
    ]
    if not busy:
        return []
    median = statistics.median(sample.values["sm_clock_mhz"] for sample in busy)
    return [sample for sample in busy if abs(sample.values["sm_clock_mhz"] - median) > CLOCK_JUMP * median]


def _throttled(bits: int) -> list[str]:
    reasons = []
    if bits & _POWER_CAP:
        reasons.append("power_cap")
    if bits & (_SW_THERMAL | _HW_THERMAL):
        reasons.append("thermal_slowdown")
    if bits & _POWER_BRAKE or (bits & _HW_SLOWDOWN and not bits & _HW_THERMAL):
        reasons.append("hw_slowdown")
    return reasons


def gaps_in(
    samples: Iterable[Sample], period_s: float, window_ns: int | None, window_end_ns: int | None
) -> list[tuple[Sample, int]]:
    """Return (sample that ends it, length in ns) of each stretch of the window in which the sensor was not read."""
    ordered = sorted(samples, key=lambda sample: sample.t_ns)
    if window_ns is None or not ordered:
        return []
    limit_ns = REACH * max(usual_interval_ns([sample.t_ns for sample in ordered]), period_s * 1e9)
    end_ns = ordered[-1].t_ns if window_end_ns is None else window_end_ns
    gaps, before_ns = [], max(window_ns, ordered[0].t_ns)
    for sample in ordered:
        gap_ns = min(sample.t_ns, end_ns) - before_ns
        if gap_ns > limit_ns:
            gaps.append((sample, gap_ns))
        before_ns = max(before_ns, sample.t_ns)
    return gaps


def split_by_sensor(samples: Samples) -> dict[str, list[Sample]]:
    """Return each sensor's samples, sorted by time."""
    by_sensor: dict[str, list[Sample]] = {}
    for sensor, sample in samples:
        by_sensor.setdefault(sensor, []).append(sample)
    for of_sensor in by_sensor.values():
        of_sensor.sort(key=lambda sample: sample.t_ns)
    return by_sensor


def own_readings(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples that are fresh readings."""
    return [sample for sample in samples if sample.quality in ("measured", "suspect")]


def _marked(sample: Sample, reasons: list[str] | None) -> Sample:
    if not reasons:
        return sample
    together = tuple(dict.fromkeys((*sample.reasons, *reasons)))
    quality = "suspect" if sample.quality == "measured" else sample.quality
    return dataclasses.replace(sample, quality=quality, reasons=together)
