"""Judges a run's samples and labels: which readings are doubtful, why, and which labels they spoil.

Start reading at `REASONS`, which has the reasons and their limits. `judge` judges samples. `judge_run` judges their
run, also by other processes on the GPU and by a second source. No sample is deleted.
"""

from __future__ import annotations

import bisect
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workers.telemetry.sensors import Sample, WindowMean, share, usual_interval_ns
from workers.trial.reports import Observed

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

BUSY = 0.9  # gpu_util from which zero activity or another clock is suspicious
CLOCK_JUMP = 0.10  # ratio to the window's median SM clock
CONTEXT_MIB = 1024.0  # the most memory that a CUDA context and its libraries take
CONTEXT_LEAST_MIB = 64.0  # the least; a process with less cannot compute, such as an X server
HOST_CLOCK_S = 1.0  # allowed drift between the wall clock and the monotonic one over a run
_OF_USAGE = ("nvml", "dcgm")
_TIME = operator.attrgetter("t_ns")
_MIN_PERIODS = 3  # periods of a source; a shorter window may hold no reading
_MIN_READINGS = 5  # readings that each of two sources needs before their means are compared
_ENERGY_TOLERANCE = 0.10
_POWER_CHECK_S = 5.0  # in shorter windows the power sensor, which averages up to 1 s, shows too much of the time before


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A reason to doubt readings or labels.

    `spoils` names the metrics whose means leave out such readings. A run with the reason in more than `suspect_from`
    of its window is suspect, in more than `untrusted_from` untrusted (None: never by itself).
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

# NVML's clocks-event bits (nvml.h, nvmlClocksEventReason*). The two bits with a cause also set the slowdown bit.
_POWER_CAP, _HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80


def judge(samples: Samples, window_ns: int | None, window_end_ns: int | None) -> list[tuple[str, Sample]]:
    """Return the samples, doubtful ones marked as `suspect` with their reasons.

    Values, and a sensor's own verdicts, stay as they are.
    """
    by_sensor = split_by_sensor(samples)
    # The readings of the GPU's utilization, from NVML if it has any, else from DCGM.
    of_usage = ([s for s in own_readings(by_sensor.get(name, ())) if "gpu_util" in s.values] for name in _OF_USAGE)
    usage: list[Sample] = next(filter(None, of_usage), [])
    reasons_of: dict[int, list[str]] = {}

    def mark(sample: Sample, reason: str) -> None:
        reasons_of.setdefault(id(sample), []).append(reason)

    for sensor in ("gpm", "dcgm"):
        previous_ns = None
        for sample in own_readings(by_sensor.get(sensor, ())):
            since_ns = sample.since_ns if sample.since_ns is not None else previous_ns
            previous_ns = sample.t_ns
            shown = [sample.values[metric] for metric in PROFILING if metric in sample.values]
            if shown and not any(shown) and _is_busy(usage, since_ns or sample.t_ns, sample.t_ns):
                mark(sample, "profiling_zero")
    for sensor in ("nvml", "dcgm"):
        readings = own_readings(by_sensor.get(sensor, ()))
        for sample in _clock_jumps(readings, usage, window_ns, window_end_ns):
            mark(sample, "clock_jump")
    first_errors = None
    for sample in by_sensor.get("nvml", ()):
        for reason in _list_throttled(int(sample.values.get("throttle_reasons", 0))):
            mark(sample, reason)
        if sample.values.get("other_processes", 0) > 0:
            mark(sample, "other_process")
        if "ecc_uncorrected" in sample.values:
            errors = sample.values["ecc_uncorrected"]
            first_errors = errors if first_errors is None else first_errors
            if errors > first_errors:
                mark(sample, "ecc_errors")
    return [(sensor, _mark(sample, reasons_of.get(id(sample)))) for sensor, sample in samples]


def _is_busy(usage: Sequence[Sample], since_ns: int, t_ns: int) -> bool:
    """Return whether every reading in the interval, and the first one after it, shows the GPU busy."""
    first = bisect.bisect_right(usage, since_ns, key=_TIME)
    last = bisect.bisect_left(usage, t_ns, key=_TIME) + 1
    return first < min(last, len(usage)) and all(sample.values["gpu_util"] >= BUSY for sample in usage[first:last])


def _clock_jumps(
    readings: list[Sample], usage: Sequence[Sample], window_ns: int | None, window_end_ns: int | None
) -> list[Sample]:
    if window_ns is None:
        return []
    busy = [
        sample
        for sample in readings
        if "sm_clock_mhz" in sample.values
        and window_ns <= sample.t_ns
        and (window_end_ns is None or sample.t_ns <= window_end_ns)
        and _is_busy(usage, sample.t_ns - 1, sample.t_ns)
    ]
    if not busy:
        return []
    median = statistics.median(sample.values["sm_clock_mhz"] for sample in busy)
    return [sample for sample in busy if abs(sample.values["sm_clock_mhz"] - median) > CLOCK_JUMP * median]


def _list_throttled(bits: int) -> list[str]:
    reasons = []
    if bits & _POWER_CAP:
        reasons.append("power_cap")
    if bits & (_SW_THERMAL | _HW_THERMAL):
        reasons.append("thermal_slowdown")
    if bits & _POWER_BRAKE or (bits & _HW_SLOWDOWN and not bits & _HW_THERMAL):
        reasons.append("hw_slowdown")
    return reasons


def split_by_sensor(samples: Samples) -> dict[str, list[Sample]]:
    """Return each sensor's samples, sorted by time."""
    by_sensor: dict[str, list[Sample]] = {}
    for sensor, sample in samples:
        by_sensor.setdefault(sensor, []).append(sample)
    for sensor_samples in by_sensor.values():
        sensor_samples.sort(key=_TIME)
    return by_sensor


def own_readings(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples with fresh readings."""
    return [sample for sample in samples if sample.quality in ("measured", "suspect")]


def _mark(sample: Sample, reasons: list[str] | None) -> Sample:
    if not reasons:
        return sample
    together = tuple(dict.fromkeys((*sample.reasons, *reasons)))
    quality = "suspect" if sample.quality == "measured" else sample.quality
    return replace(sample, quality=quality, reasons=together)


# Memory in use before the trial: NVML counts the driver's own reservation, 0.5 GiB and more on large cards.
FOREIGN_MIB, FOREIGN_SHARE = 1024.0, 0.025

# metric -> (two sensors, absolute and relative tolerance): the larger of the two counts.
# NVML's memory includes the driver's reservation, DCGM's does not.
CROSS_CHECKS: dict[str, tuple[tuple[str, str], float, float]] = {
    **dict.fromkeys(("smact", "smocc", "drama", "gract"), (("gpm", "dcgm"), 0.05, 0.0)),
    "gpu_util": (("nvml", "dcgm"), 0.05, 0.0),
    "power_w": (("nvml", "dcgm"), 0.0, 0.10),
    "memory_used_mib": (("nvml", "dcgm"), FOREIGN_MIB, 0.02),
}


@dataclass
class Verdict:
    """The reasons to doubt a run's labels, in words, and a summary that fits into JSON.

    `judge_run` describes the first fields.
    """

    facts: Observed
    label_sensors: Mapping[str, str | None]
    means: Mapping[str, Mapping[str, WindowMean]]
    energy_j: float | None
    summary: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    _untrusted: bool = False

    def add(self, reason: str, words: str, amount: float = 1.0, untrusted: bool = True) -> None:
        """Add a reason with its share of the window. With `untrusted=False` it makes the run suspect at most."""
        if amount <= 0 or amount < REASONS[reason].suspect_from:
            return
        self.reasons[reason] = f"{self.reasons[reason]}; {words}" if reason in self.reasons else words
        limit = REASONS[reason].untrusted_from
        self._untrusted |= untrusted and limit is not None and amount > limit

    @property
    def quality(self) -> str:
        """Return one of `warehouse.tables.schema.QUALITIES`."""
        return "untrusted" if self._untrusted else "suspect" if self.reasons else "trusted"


def judge_run(
    samples: Samples,
    observed: Observed,
    label_sensors: Mapping[str, str | None],
    means: Mapping[str, Mapping[str, WindowMean]],
    energy_j: float | None,
) -> Verdict:
    """Return the verdict on a run's labels.

    A run without a window is judged by what affects its outcome. Another process that holds memory makes an
    out-of-memory untrusted; one that computes makes a timeout untrusted. Memory errors make any run untrusted.

    Args:
        samples: The samples that `judge` returned.
        observed: The ended trial.
        label_sensors: Metric of a label -> its sensor; None: no sensor has a mean.
        means: Metric -> sensor -> mean over the window, from these samples.
        energy_j: Energy over the window by the energy counter.
    """
    judged = Verdict(observed, label_sensors, means, energy_j)
    if observed.exit.left:
        stayed = f", {observed.exit.stayed} could not be killed" if observed.exit.stayed else ""
        judged.add("processes_left", f"{observed.exit.left} had to be killed after the trial had ended{stayed}")
    if observed.backend == "simulated" or observed.status == "invalid":
        return judged
    by_sensor = split_by_sensor(samples)
    if abs(observed.clock_drift_s) > HOST_CLOCK_S:
        judged.add("host_clock", f"it moved by {observed.clock_drift_s:+.1f} s against the time that passed")
    if observed.backend == "cuda":
        _judge_neighbours(judged, by_sensor.get("nvml", []))
        _judge_slowdowns(judged, by_sensor)
        if observed.window_ns is not None and observed.window_end_ns is not None:
            window = (observed.window_ns, observed.window_end_ns)
            _judge_labels(judged, by_sensor, *window)
            _cross_check(judged, by_sensor, *window)
    return judged


def _judge_neighbours(judged: Verdict, nvml: list[Sample]) -> None:
    """Judge other processes and memory errors over the whole trial, not only the window."""
    facts = judged.facts
    # Neighbours on the GPU affect labels, device out-of-memory, and timeouts.
    matters = facts.status in ("ok", "timeout") or (facts.status == "oom" and facts.oom_kind == "device")
    neighbour_readings = [sample.values for sample in nvml if "other_process" in sample.reasons]
    if neighbour_readings and matters:
        memory_mib = max((v["other_memory_mib"] for v in neighbour_readings if "other_memory_mib" in v), default=None)
        held_text = "memory that is not known" if memory_mib is None else f"{memory_mib:.0f} MiB"
        processes = max(values["other_processes"] for values in neighbour_readings)
        judged.add(
            "other_process",
            f"up to {processes:.0f} with {held_text}, in {len(neighbour_readings)} of {len(nvml)} readings",
            untrusted=memory_mib is None or memory_mib >= CONTEXT_LEAST_MIB,
        )
    foreign_mib, allowed_mib = _foreign_memory_mib(nvml, facts.device_memory_mib)
    if matters and not neighbour_readings and not facts.shared and foreign_mib > allowed_mib:
        judged.add("foreign_memory", f"{foreign_mib:.0f} MiB, where up to {allowed_mib:.0f} MiB may be the driver's")
    errors = [sample.values["ecc_uncorrected"] for sample in nvml if "ecc_uncorrected" in sample.values]
    if errors and errors[-1] > errors[0]:
        judged.add("ecc_errors", f"{errors[-1] - errors[0]:.0f} during the trial")


def _judge_slowdowns(judged: Verdict, by_sensor: Mapping[str, list[Sample]]) -> None:
    facts, nvml = judged.facts, by_sensor.get("nvml", [])
    if facts.status not in ("ok", "timeout") or not nvml:
        return
    start_ns, end_ns = facts.window_ns, facts.window_end_ns
    if start_ns is None or end_ns is None:  # the trial has no window: take all readings
        start_ns, end_ns = nvml[0].t_ns, nvml[-1].t_ns
    where = "of the window" if facts.window_end_ns is not None else "of the trial"
    for reason, metric in (
        ("power_cap", "throttle_reasons"),
        ("thermal_slowdown", "throttle_reasons"),
        ("hw_slowdown", "throttle_reasons"),
        ("clock_jump", "sm_clock_mhz"),
    ):
        amount = share(nvml, reason, metric, start_ns, end_ns)
        judged.add(reason, f"in {amount:.0%} {where}", amount)


def _judge_labels(judged: Verdict, by_sensor: Mapping[str, list[Sample]], start_ns: int, end_ns: int) -> None:
    """Judge how well each label's readings cover the window, and how much a stalled profiler spoils."""
    metrics = judged.summary.setdefault("metrics", {})
    poor, coarse = [], []
    for metric, sensor in judged.label_sensors.items():
        sensor = sensor or next((name for name in judged.means.get(metric, {})), None)
        if sensor is None:
            continue
        mean = judged.means[metric][sensor]
        metrics[metric] = {
            "sensor": sensor,
            "coverage": round(mean.coverage, 4),
            "readings": mean.readings,
            "largest_gap_s": round(mean.largest_gap_s, 3),
        }
        period_ns = _period_ns(by_sensor[sensor], metric)
        if mean.coverage < 0.5 and period_ns and end_ns - start_ns >= _MIN_PERIODS * period_ns:
            poor.append(f"{metric} ({sensor}) {mean.coverage:.0%}")
        elif mean.mean is not None and (mean.outside > 0.5 or not period_ns):
            coarse.append(f"{metric} ({sensor}) {mean.outside:.0%} outside, {mean.readings} readings")
    if poor:
        judged.add("low_coverage", ", ".join(poor))
    if coarse:
        judged.add("coarse_readings", ", ".join(coarse))
    used = set(judged.label_sensors.values())
    for sensor in ("gpm", "dcgm"):
        readings = by_sensor.get(sensor, [])
        metric = next((name for name in PROFILING if any(name in s.values for s in readings)), "smact")
        amount = share(readings, "profiling_zero", metric, start_ns, end_ns)
        # A stalled source spoils nothing if the labels come from another one.
        judged.add("profiling_zero", f"{sensor}: in {amount:.0%} of the window", amount, untrusted=sensor in used)


def _cross_check(judged: Verdict, by_sensor: Mapping[str, list[Sample]], start_ns: int, end_ns: int) -> None:
    """Compare two sources of a metric if both have enough readings."""
    checks = judged.summary.setdefault("checks", {})

    def check(name: str, figures: Mapping[str, float], agree: bool, words: str, untrusted: bool) -> None:
        checks[name] = {**figures, "agree": agree}
        if not agree:
            judged.add("sources_disagree", words, untrusted=untrusted)

    for metric, (sensors, absolute, relative) in CROSS_CHECKS.items():
        first, second = (judged.means.get(metric, {}).get(sensor) for sensor in sensors)
        if first is None or first.mean is None or second is None or second.mean is None:
            continue
        if any(reading.readings < _MIN_READINGS or reading.coverage < 0.5 for reading in (first, second)):
            continue
        # Readings scatter: only a difference larger than chance counts.
        chance = 2 * (first.standard_error**2 + second.standard_error**2) ** 0.5
        allowed = max(absolute, relative * max(abs(first.mean), abs(second.mean))) + chance
        check(
            metric,
            {sensors[0]: round(first.mean, 4), sensors[1]: round(second.mean, 4)},
            abs(first.mean - second.mean) <= allowed,
            f"{metric}: {sensors[0]} {first.mean:.4g}, {sensors[1]} {second.mean:.4g}",
            untrusted=metric in judged.label_sensors,
        )
    power = judged.means.get("power_w", {}).get("nvml")
    window_s = (end_ns - start_ns) / 1e9
    if judged.energy_j is not None and power is not None and power.mean and window_s >= _POWER_CHECK_S:
        by_counter_w = judged.energy_j / window_s
        allowed_w = _ENERGY_TOLERANCE * power.mean + 2 * power.standard_error
        check(
            "energy_j",
            {"power": round(power.mean, 2), "counter": round(by_counter_w, 2)},
            abs(power.mean - by_counter_w) <= allowed_w,
            f"power: sensor {power.mean:.4g} W, energy counter {by_counter_w:.4g} W",
            untrusted=False,  # the power sensor sees only a part of the time, and boards differ: a repeat does not help
        )


def _foreign_memory_mib(nvml: list[Sample], device_memory_mib: float | None) -> tuple[float, float]:
    """Return (memory in use that is not charged to the trial, the most that the driver may hold), in MiB.

    The first is a median, because NVML reads the two figures at slightly different times. If nothing is charged to the
    trial, it is the least memory in use, which may include the trial's context.
    """
    allowed_mib = max(FOREIGN_MIB, FOREIGN_SHARE * (device_memory_mib or 0.0))
    used = [sample.values for sample in nvml if "memory_used_mib" in sample.values]
    charged = [values for values in used if "process_memory_mib" in values]
    if charged:
        return statistics.median(v["memory_used_mib"] - v["process_memory_mib"] for v in charged), allowed_mib
    return min((values["memory_used_mib"] for values in used), default=0.0), allowed_mib + CONTEXT_MIB


def _period_ns(samples: list[Sample], metric: str) -> int:
    """Return the sensor's period for the metric in ns, or its averaging time if that is longer; 0 if unknown."""
    readings = [sample for sample in own_readings(samples) if metric in sample.values]
    lengths = [sample.t_ns - sample.since_ns for sample in readings if sample.since_ns is not None]
    return max(usual_interval_ns([sample.t_ns for sample in readings]), int(statistics.median(lengths or [0])))
