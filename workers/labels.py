"""Labels of a run: means over its window, peaks, energy, and how far they can be trusted; also for ranks and groups.

Start reading at `label_run`. `label_ranks` labels each rank of a run, and the run as its worst rank. `labelled_group`
labels trials that ran together, and makes their rows of `collocations`. `REASONS` has the reasons to doubt a reading or
a label, and their limits: `judge` judges samples, and `judge_run` their run, also by other processes on the GPU and by
a second source. No sample is deleted. Called by `workers.worker`.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from warehouse.tables.schema import (
    COLLOCATION_SCHEMA,
    QUALITIES,
    RANK_OF_RUN,
    RANK_SCHEMA,
    RUN_SCHEMA,
    SAMPLE_QUALITIES,
    Run,
)
from workers.devices import Slot
from workers.task import RunResult
from workers.telemetry.sensors import Sample, WindowMean, share, spoken_from_ns, usual_interval_ns, window_mean
from workers.trial.running import Observed, failed_rank

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


# metric -> sensors that read it, the preferred one first. A window's mean comes from one sensor; figures never mix.
MEANS = {
    **dict.fromkeys(("smact", "smocc", "drama"), ("gpm", "dcgm", "simulated")),
    **dict.fromkeys(("gpu_util", "power_w"), ("nvml", "dcgm", "simulated")),
}
_ENERGY_SENSORS = ("nvml", "dcgm")
_GROWTH = "growth of the device's memory in use, because NVML charges none to the trial"
_SHOWN = 0.98  # share of the allocator's memory that such growth must reach to count as the trial's
_COUNTER_STEPS = 8  # steps of the energy counter that a window needs before its mean power comes from the counter
_STOPPED = "stopped"
_PARTNER_ENDED = "partner_ended"
# Column of `collocations` -> column of the run alone.
_ALONE = {
    "solo_run_id": "run_id",
    "solo_step_ms": "step_time_ms",
    "solo_memory_mib": "peak_memory_mib",
    **{f"solo_{metric}": metric for metric in MEANS},
}
_OF_RUN = ("run_id", "member_row", "source", "device_name", "config", "batch_size", "precision")  # set by the writer


def label_run(observed: Observed) -> tuple[dict[str, Any], list[tuple[str, Sample]]]:
    """Return the columns of `runs` (labels, times, quality; None or absent if not measured) and the judged samples."""
    start_ns, end_ns = observed.window_ns, observed.window_end_ns
    samples = list(observed.samples)
    if observed.backend != "simulated":
        samples = judge(samples, start_ns, end_ns)
    columns: dict[str, Any] = {}
    if observed.warmup_ns is not None and start_ns is not None:
        columns["warmup_s"] = (start_ns - observed.warmup_ns) / 1e9
    means: dict[str, dict[str, WindowMean]] = {}
    chosen: dict[str, str | None] = {}
    if start_ns is not None and end_ns is not None:
        columns["window_s"] = (end_ns - start_ns) / 1e9
        columns["window_start_ms"] = (start_ns - observed.t0_ns) / 1e6
        columns["window_end_ms"] = (end_ns - observed.t0_ns) / 1e6
        by_sensor = split_by_sensor(samples)
        means = window_means(by_sensor, start_ns, end_ns, observed.warmup_ns)
        for metric in MEANS:
            known = ((s, mean.mean) for s, mean in means.get(metric, {}).items() if mean.mean is not None)
            chosen[metric], columns[metric] = next(known, (None, None))
        columns["energy_j"], power_w = _energy_and_power(by_sensor, start_ns, end_ns)
        if power_w is not None:
            columns["power_w"] = power_w
    reserved_peak_mib = observed.values.get("peak_reserved_mib")
    columns["peak_memory_mib"], growth = peak_memory_mib(samples, reserved_peak_mib, alone=not observed.shared)
    rss_mib = (sample.values["rss_mib"] for _, sample in samples if "rss_mib" in sample.values)
    columns["peak_rss_mib"] = max(rss_mib, default=None)
    columns |= {name: value for name, value in observed.values.items() if value is not None}
    if observed.backend == "cpu" and columns["peak_memory_mib"] is not None:
        # The trial reports its own process only; processes that it started count as well.
        columns["peak_memory_mib"] = max(columns["peak_memory_mib"], columns["peak_rss_mib"] or 0.0)
    verdict = judge_run(samples, observed, chosen, means, columns.get("energy_j"))
    if observed.shared:
        columns |= dict.fromkeys((*MEANS, "energy_j"))
    counts = Counter(
        sample.quality
        for _, sample in samples
        if start_ns is not None and start_ns <= sample.t_ns <= (end_ns or math.inf)
    )
    summary = {**verdict.summary, **({"peak_memory": _GROWTH} if growth else {})}
    columns |= {
        "quality": verdict.quality,
        "quality_reasons": verdict.reasons or None,
        "quality_summary": summary or None,
        **{f"samples_{quality}": counts[quality] for quality in SAMPLE_QUALITIES},  # of the window
    }
    return columns, samples


def window_means(
    by_sensor: Mapping[str, Sequence[Sample]], start_ns: int, end_ns: int, warmup_ns: int | None
) -> dict[str, dict[str, WindowMean]]:
    """Return metric -> sensor -> mean over the window, for every label and every cross-checked metric.

    Sensors come in the order of preference; those that never read the metric are left out. Some averages look back
    past the first step: their means use only the window's later part, at least a quarter of it.
    """
    means: dict[str, dict[str, WindowMean]] = {}
    for metric in {**MEANS, **CROSS_CHECKS}:
        pair = CROSS_CHECKS[metric][0] if metric in CROSS_CHECKS else ()
        from_ns = min(spoken_from_ns(metric, start_ns, warmup_ns), (start_ns + 3 * end_ns) // 4)
        for sensor in dict.fromkeys((*MEANS.get(metric, ()), *pair)):
            samples = by_sensor.get(sensor, ())
            if any(metric in sample.values for sample in samples):
                means.setdefault(metric, {})[sensor] = window_mean(
                    samples, metric, start_ns if sensor == "simulated" else from_ns, end_ns, SPOILS
                )
    return means


def _energy_and_power(
    by_sensor: Mapping[str, Sequence[Sample]], start_ns: int, end_ns: int
) -> tuple[float | None, float | None]:
    """Return (energy over the window in J, mean power in W) by the energy counter; power None if it is too coarse.

    The power sensor sees only a part of the time, and averages up to a second, including time before the window. The
    counter does neither.
    """
    for sensor in _ENERGY_SENSORS:
        samples = [sample for sample in by_sensor.get(sensor, ()) if "energy_j" in sample.values]
        energy_j = counter_growth(samples, "energy_j", start_ns, end_ns)
        if energy_j is not None:
            step_ns = usual_interval_ns([sample.t_ns for sample in samples if sample.quality != "repeated"])
            fine = 0 < _COUNTER_STEPS * step_ns <= end_ns - start_ns
            return energy_j, energy_j / ((end_ns - start_ns) / 1e9) if fine else None
    return None, None


def counter_growth(samples: Iterable[Sample], metric: str, start_ns: int, end_ns: int) -> float | None:
    """Return the growth of one sensor's counter over the window.

    The counter is interpolated at the window's edges. If no reading lies beyond an edge, the growth is scaled up from
    the time between the readings. Returns None without two usable readings.
    """
    readings = sorted((s.t_ns, s.values[metric]) for s in samples if s.quality != "repeated" and metric in s.values)
    times_ns = [t_ns for t_ns, _ in readings]
    # At least one reading must be inside: readings around a window shorter than the period say little about it.
    if not any(start_ns <= t_ns <= end_ns for t_ns in times_ns):
        return None
    from_ns, to_ns = max(start_ns, times_ns[0]), min(end_ns, times_ns[-1])
    if to_ns <= from_ns:
        return None
    at_start, at_end = np.interp((from_ns, to_ns), times_ns, [count for _, count in readings])
    return float(at_end - at_start) * (end_ns - start_ns) / (to_ns - from_ns)


def peak_memory_mib(
    samples: Samples, reserved_peak_mib: float | None, *, alone: bool = True
) -> tuple[float | None, bool]:
    """Return (peak in MiB, whether it is the growth of the device's memory).

    The peak is the larger of two: NVML's highest charge to the trial's processes, and the allocator's peak plus the
    memory outside the allocator (context, libraries) at the last sample.

    If NVML charges nothing to the trial, because its pids belong to another machine or namespace, the growth of the
    device's memory in use since before the trial takes the charge's place. That holds only if the trial has the GPU to
    itself (`alone`).
    """
    reserved = [sample.values["reserved_mib"] for _, sample in samples if "reserved_mib" in sample.values]
    charged = [sample.values["process_memory_mib"] for _, sample in samples if "process_memory_mib" in sample.values]
    by_growth = not charged
    if by_growth and not alone:
        return None, False
    if by_growth:
        used = [
            sample.values["memory_used_mib"]
            for sensor, sample in samples
            if sensor == "nvml" and "memory_used_mib" in sample.values
        ]
        # Minus the least use until then: memory that an earlier trial is still freeing is not charged to this one.
        charged = [now - least for now, least in zip(used, itertools.accumulate(used, min), strict=True)]
        on_device = bool(reserved) or reserved_peak_mib is not None
        if not charged or not on_device or (reserved and max(charged) < _SHOWN * reserved[-1]):
            return None, False
    sampled = max(charged)
    if reserved_peak_mib is None or not reserved:
        return sampled, by_growth
    return max(sampled, reserved_peak_mib + max(0.0, charged[-1] - reserved[-1])), by_growth


def label_ranks(
    observed: Observed, slots: Sequence[Slot], ranks: int
) -> tuple[dict[str, Any], list[tuple[str, Sample]], pa.Table]:
    """Label each rank by its samples and reports; return the run's columns, judged samples and rows of `ranks`.

    The run gets the labels of the worst rank: the failed one, else the one with the most memory. Its host memory
    covers all its processes, and its quality is that of its least trusted rank.
    """
    by_rank: dict[int, tuple[dict[str, Any], list[tuple[str, Sample]]]] = {}
    traced = {0, *(sample.rank for _, sample in observed.samples)}
    for rank in range(ranks):  # a simulated rank that was not traced gets the labels of the traced one before it
        has_own = rank in traced or observed.backend != "simulated"
        by_rank[rank] = _label_rank(observed, rank) if has_own else (by_rank[rank - 1][0], [])
    run_columns, samples = label_run(
        replace(observed, samples=[pair for pair in observed.samples if pair[1].rank is None])
    )
    failed = failed_rank(observed)
    worst = failed if failed is not None else max(by_rank, key=lambda rank: _rank_memory_mib(by_rank[rank][0]))
    columns = {**by_rank[worst][0], "ranks": ranks, "worst_rank": worst}
    if run_columns.get("peak_rss_mib") is not None:
        columns["peak_rss_mib"] = run_columns["peak_rss_mib"]
    rows = []
    for rank, (labels, rank_samples) in by_rank.items():
        samples += rank_samples
        slot = slots[rank] if len(slots) == ranks else None
        status = observed.status if failed in (None, rank) else _STOPPED
        rank_columns = {"rank": rank, "status": status, "device_uuid": slot.device_uuid if slot else None}
        rows.append({**observed.rank_values.get(rank, {}), **labels, **rank_columns})
    columns |= _common_quality([labels for labels, _ in by_rank.values()])
    fields = [field for field in RANK_SCHEMA if field.name not in ("run_id", "rank_row", *RANK_OF_RUN)]
    return columns, samples, table_of_rows(rows, fields)


def table_of_rows(rows: Sequence[Mapping[str, Any]], fields: Iterable[pa.Field]) -> pa.Table:
    """Return rows as a table with these columns; missing values are NULL."""
    return pa.table({field.name: pa.array([row.get(field.name) for row in rows], field.type) for field in fields})


def _label_rank(observed: Observed, rank: int) -> tuple[dict[str, Any], list[tuple[str, Sample]]]:
    samples = [pair for pair in observed.samples if pair[1].rank == rank]
    reported = observed.rank_values.get(rank, {})
    known = {name: value for name, value in reported.items() if name in RUN_SCHEMA.names}
    return label_run(replace(observed, samples=samples, values={**observed.values, **known}))


def _rank_memory_mib(labels: Mapping[str, Any]) -> float:
    return labels.get("peak_memory_mib") or labels.get("peak_reserved_mib") or 0.0


def _common_quality(labels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the lowest quality of the ranks, with the reasons of all."""
    quality = max((label["quality"] for label in labels), key=QUALITIES.index)
    reasons: dict[str, str] = {}
    for rank, label in enumerate(labels):
        for name, words in (label["quality_reasons"] or {}).items():
            reasons[name] = f"{reasons[name]}; rank {rank}: {words}" if name in reasons else f"rank {rank}: {words}"
    return {"quality": quality, "quality_reasons": reasons or None}


@dataclass(frozen=True)
class EndedMember:
    """An ended member of a group, and its run alone; None: it did not run alone."""

    result: RunResult
    observed: Observed
    alone: Run | None


def labelled_group(group_id: str, members: Sequence[EndedMember], *, sharing: str) -> list[RunResult]:
    """Return the results of a group's members, with their rows of `collocations`.

    A member's run keeps its own step time and memory; figures of the device go into the group's columns. If a member
    ended before its window did, the others shared the device with fewer from then on: they are suspect, and no member
    has a slowdown.

    Args:
        group_id: The task's run id.
        members: The members in the order of their numbers.
        sharing: time_slicing, mps or mig.
    """
    ended = [place for place, member in enumerate(members) if member.result.run.status != "ok"]
    joint = {} if ended else _joint(members)
    results = []
    for place, member in enumerate(members):
        alone, others = member.alone, [other for other in ended if other != place]
        run = replace(member.result.run, group_id=group_id)
        model = (run.config or {}).get("model")
        quality, reasons = run.quality, dict(run.quality_reasons or {})
        if place not in ended and others:
            quality = "suspect" if quality in ("trusted", None) else quality
            reasons[_PARTNER_ENDED] = ", ".join(_how_ended(members, other) for other in others)
        row = {
            "group_id": group_id,
            "member": place,
            "group_size": len(members),
            "sharing": sharing,
            "devices": 1,
            "model": model if isinstance(model, str) else run.family,  # the name by which it is held out
            "name": run.config_hash,
            **({} if alone is None else {column: getattr(alone, name) for column, name in _ALONE.items()}),
            **_figures_beside(members, place, ended),
            **joint,
        }
        result = replace(
            member.result,
            run=replace(run, quality=quality, quality_reasons=reasons or None),
            collocations=table_of_rows([row], [field for field in COLLOCATION_SCHEMA if field.name not in _OF_RUN]),
        )
        results.append(result)
    return results


def _how_ended(members: Sequence[EndedMember], place: int) -> str:
    return f"member {place} ended as {members[place].result.run.status}"


def _figures_beside(members: Sequence[EndedMember], place: int, ended: Sequence[int]) -> dict[str, Any]:
    """Return a member's figures beside the others; without a slowdown, `doubt` gives the reason."""
    member, run = members[place], members[place].result.run
    alone_ms = None if member.alone is None else member.alone.step_time_ms
    values: dict[str, Any] = {"status": run.status}
    if run.status == "oom" and run.oom_kind == "device":
        values["died_of"] = _memory_culprit(members, place)
    if ended:
        values["doubt"] = "; ".join(_how_ended(members, other) for other in ended)
    elif not alone_ms or not run.step_time_ms:
        how = "is not known" if member.alone is None else f"ended as {member.alone.status}"
        values["doubt"] = f"its run alone {how}"
    else:
        values |= {"shared_step_ms": run.step_time_ms, "slowdown": run.step_time_ms / alone_ms}
        doubted = run.quality == "untrusted"
        values["doubt"] = f"untrusted: {', '.join(sorted(run.quality_reasons or ()))}" if doubted else None
    return values


def _memory_culprit(members: Sequence[EndedMember], place: int) -> int:
    """Return the member whose allocations exhausted the memory.

    It is the member itself if it also ran out alone, else the partner that held the most.
    """
    alone = members[place].alone
    if alone is not None and alone.status == "oom":
        return place
    others = [other for other in range(len(members)) if other != place]
    holding = [other for other in others if members[other].result.run.status != "oom"]
    return max(holding or others, key=lambda other: _member_memory_mib(members[other]))


def _member_memory_mib(member: EndedMember) -> float:
    run = member.result.run
    known = run.peak_memory_mib or run.peak_reserved_mib or (member.alone and member.alone.peak_memory_mib)
    return known or 0.0


def _joint(members: Sequence[EndedMember]) -> dict[str, Any]:
    """Return the group's columns over the time from the latest start of a window to the latest end of one.

    All members are at work during that time. The device's figures come from one member's sensors: all saw the same.
    """
    first = members[0].observed
    backend = first.backend
    starts_ns = [member.observed.window_ns for member in members if member.observed.window_ns is not None]
    ends_ns = [member.observed.window_end_ns for member in members if member.observed.window_end_ns is not None]
    if len(starts_ns) < len(members) or len(ends_ns) < len(members):
        return {}
    start_ns, end_ns = max(starts_ns), max(ends_ns)
    if backend == "simulated":  # each member has its own virtual time
        start_ns, end_ns = starts_ns[0], ends_ns[0]
    samples: Samples = first.samples
    if backend != "simulated":
        samples = judge(samples, start_ns, end_ns)
    means = window_means(split_by_sensor(samples), start_ns, end_ns, None)
    joint: dict[str, Any] = {
        "window_start_ms": (start_ns - first.t0_ns) / 1e6,
        "window_end_ms": (end_ns - first.t0_ns) / 1e6,
        "joint_memory_mib": _joint_memory_mib(members, backend, start_ns, end_ns),
    }
    for metric in MEANS:
        known = (mean.mean for mean in means.get(metric, {}).values() if mean.mean is not None)
        joint[f"joint_{metric}"] = next(known, None)
    return joint


def _joint_memory_mib(members: Sequence[EndedMember], backend: str, start_ns: int, end_ns: int) -> float | None:
    """Return the members' peak memory: the device's minus its use before, or on a CPU that of their processes."""
    if backend == "cpu":
        return _peak_of_sum(
            [_series(member.observed.samples, "process", "rss_mib") for member in members], start_ns, end_ns
        )
    sensor = "simulated" if backend == "simulated" else "nvml"
    used = _series(members[0].observed.samples, sensor, "memory_used_mib")
    inside = [value for t_ns, value in used if start_ns <= t_ns <= end_ns]
    if not inside:
        return None
    before = 0.0 if backend == "simulated" else min(value for _, value in used)
    return max(inside) - before


def _series(samples: Samples, sensor: str, metric: str) -> list[tuple[int, float]]:
    return [
        (sample.t_ns, sample.values[metric]) for name, sample in samples if name == sensor and metric in sample.values
    ]


def _peak_of_sum(series: Sequence[Sequence[tuple[int, float]]], start_ns: int, end_ns: int) -> float | None:
    """Return the highest sum of the series' latest values, over the start and each reading.

    A window may be shorter than the time between two readings; then the last readings before it count.
    """
    times = [[t_ns for t_ns, _ in points] for points in series]
    peak: float | None = None
    for t_ns in (start_ns, *(t_ns for t_ns in itertools.chain(*times) if start_ns < t_ns <= end_ns)):
        places = [bisect.bisect_right(instants, t_ns) - 1 for instants in times]
        if min(places) >= 0:
            total = sum(points[place][1] for points, place in zip(series, places, strict=True))
            peak = total if peak is None else max(peak, total)
    return peak
