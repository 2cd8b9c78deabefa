"""Judges a run's labels by its samples, by other processes on the GPU and by a second source.

Start reading at `judge_run`; the reasons and their limits are in `workers.labels.quality`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.labels.quality import PROFILING, REASONS, Samples, gaps_in, own_readings, split_by_sensor
from workers.telemetry.base import Sample
from workers.telemetry.means import WindowMean, share, usual_interval_ns
from workers.trial.outcome import Observed

# Memory in use before the trial: NVML counts what the driver reserves for itself, some 0.5 GiB and more on large cards.
FOREIGN_MIB, FOREIGN_SHARE = 1024.0, 0.025
CONTEXT_MIB = 1024.0  # what a CUDA context and its libraries take at most
CONTEXT_LEAST_MIB = 64.0  # ... and at least: a process with less cannot compute (an X server on every GPU of a machine)
HOST_CLOCK_S = 1.0  # by which the wall clock and the monotonic one may differ over a run
_MIN_PERIODS = 3  # of a source: a shorter window need not hold a reading
_MIN_READINGS = 5  # of each of two sources before their means are compared

# metric -> (two sensors, absolute and relative tolerance): the larger of the two counts.
# DCGM's memory leaves out what the driver reserves, NVML's does not.
CROSS_CHECKS: dict[str, tuple[tuple[str, str], float, float]] = {
    **dict.fromkeys(("smact", "smocc", "drama", "gract"), (("gpm", "dcgm"), 0.05, 0.0)),
    "gpu_util": (("nvml", "dcgm"), 0.05, 0.0),
    "power_w": (("nvml", "dcgm"), 0.0, 0.10),
    "memory_used_mib": (("nvml", "dcgm"), FOREIGN_MIB, 0.02),
}
_ENERGY_TOLERANCE = 0.10
_POWER_CHECK_S = (
    5.0  # the power sensor averages up to a second, so that in a short window it still shows the time before
)
_MEMORY_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`quality` is one of `warehouse.tables.schema.QUALITIES`, `reasons` are in words, `summary` fits into JSON."""

    quality: str
    reasons: Mapping[str, str]
    summary: Mapping[str, Any]


def judge_run(
    samples: Samples,
    observed: Observed,
    label_sensors: Mapping[str, str | None],
    means: Mapping[str, Mapping[str, WindowMean]],
    energy_j: float | None,
) -> Verdict:
    """Return the verdict on a run's labels.

    A run without a window is judged by what affects its outcome: another process that holds memory makes an
    out-of-memory untrusted, and one that computes a timeout. Memory errors make any run untrusted.

    Args:
        samples: As `workers.labels.quality.judge` returned them.
        observed: The ended trial.
        label_sensors: Metric of a label -> the sensor that it is from; None: no sensor has one.
        means: Metric -> sensor -> its mean over the window, from these samples.
        energy_j: By the energy counter, over the window.
    """
    judged = _Judged(observed, label_sensors, means, energy_j)
    if observed.exit.left:
        stayed = f", {observed.exit.stayed} could not be killed" if observed.exit.stayed else ""
        judged.add("processes_left", f"{observed.exit.left} had to be killed after the trial had ended{stayed}")
    if observed.backend == "simulated" or observed.status == "invalid":
        return judged.verdict()
    by_sensor = split_by_sensor(samples)
    _judge_host(judged, by_sensor)
    if observed.backend == "cuda":
        _judge_neighbours(judged, by_sensor.get("nvml", []))
        _judge_slowdowns(judged, by_sensor)
        if observed.window_ns is not None and observed.window_end_ns is not None:
            window = (observed.window_ns, observed.window_end_ns)
            _judge_labels(judged, by_sensor, *window)
            _cross_check(judged, by_sensor, *window)
    return judged.verdict()


@dataclass
class _Judged:
    """Collects the reasons of one run; the first fields are as in `judge_run`."""

    facts: Observed
    label_sensors: Mapping[str, str | None]
    means: Mapping[str, Mapping[str, WindowMean]]
    energy_j: float | None
    summary: dict[str, Any] = field(default_factory=dict)
    _said: dict[str, list[str]] = field(default_factory=dict)
    _untrusted: bool = False

    def add(self, reason: str, words: str, amount: float = 1.0, untrusted: bool = True) -> None:
        """Add a reason. `amount`: its share of the window. `untrusted=False`: it makes the run suspect at most."""
        if amount <= 0 or amount < REASONS[reason].suspect_from:
            return
        self._said.setdefault(reason, []).append(words)
        limit = REASONS[reason].untrusted_from
        self._untrusted |= untrusted and limit is not None and amount > limit

    def verdict(self) -> Verdict:
        quality = "untrusted" if self._untrusted else "suspect" if self._said else "trusted"
        reasons = {reason: "; ".join(words) for reason, words in self._said.items()}
        return Verdict(quality=quality, reasons=reasons, summary=self.summary)


def _judge_host(judged: _Judged, by_sensor: Mapping[str, list[Sample]]) -> None:
    facts = judged.facts
    if abs(facts.clock_drift_s) > HOST_CLOCK_S:
        judged.add("host_clock", f"it moved by {facts.clock_drift_s:+.1f} s against the time that passed")
    for sensor in ("nvml", "gpm", "process"):
        gaps = gaps_in(by_sensor.get(sensor, ()), facts.period_s, facts.window_ns, facts.window_end_ns)
        if gaps:
            longest_s = max(gap_ns for _, gap_ns in gaps) / 1e9
            judged.add("sampler_gap", f"{sensor}: {len(gaps)} gaps, the longest {longest_s:.2f} s")


def _judge_neighbours(judged: _Judged, nvml: list[Sample]) -> None:
    """Judge other processes and memory errors over the whole trial, not only the window."""
    facts = judged.facts
    # What was on the GPU bears on labels, on an out-of-memory there, and on how long a trial took.
    matters = facts.status in ("ok", "timeout") or (facts.status == "oom" and facts.oom_kind == "device")
    seen = [sample.values for sample in nvml if "other_process" in sample.reasons]
    if seen and matters:
        memory_mib = max((v["other_memory_mib"] for v in seen if "other_memory_mib" in v), default=None)
        held = "memory that is not known" if memory_mib is None else f"{memory_mib:.0f} MiB"
        processes = max(values["other_processes"] for values in seen)
        judged.add(
            "other_process",
            f"up to {processes:.0f} with {held}, in {len(seen)} of {len(nvml)} readings",
            untrusted=memory_mib is None or memory_mib >= CONTEXT_LEAST_MIB,
        )
    foreign_mib, allowed_mib = _foreign_memory_mib(nvml, facts.device_memory_mib)
    if matters and not seen and not facts.shared and foreign_mib > allowed_mib:
        judged.add("foreign_memory", f"{foreign_mib:.0f} MiB, where up to {allowed_mib:.0f} MiB may be the driver's")
    errors = [sample.values["ecc_uncorrected"] for sample in nvml if "ecc_uncorrected" in sample.values]
    if errors and errors[-1] > errors[0]:
        judged.add("ecc_errors", f"{errors[-1] - errors[0]:.0f} during the trial")


def _judge_slowdowns(judged: _Judged, by_sensor: Mapping[str, list[Sample]]) -> None:
    facts, nvml = judged.facts, by_sensor.get("nvml", [])
    if facts.status not in ("ok", "timeout") or not nvml:
        return
    start_ns, end_ns = facts.window_ns, facts.window_end_ns
    if start_ns is None or end_ns is None:  # it never came so far: what there is
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


def _judge_labels(judged: _Judged, by_sensor: Mapping[str, list[Sample]], start_ns: int, end_ns: int) -> None:
    """Judge how well each label's readings cover the window, and how many had to be left out."""
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
        # A source that stalls spoils nothing where the labels are of another.
        judged.add("profiling_zero", f"{sensor}: in {amount:.0%} of the window", amount, untrusted=sensor in used)


def _cross_check(judged: _Judged, by_sensor: Mapping[str, list[Sample]], start_ns: int, end_ns: int) -> None:
    """Compare two sources of one metric, if both have read it often enough."""
    checks = judged.summary.setdefault("checks", {})
    for metric, (sensors, absolute, relative) in CROSS_CHECKS.items():
        first, second = (judged.means.get(metric, {}).get(sensor) for sensor in sensors)
        if first is None or first.mean is None or second is None or second.mean is None:
            continue
        if any(one.readings < _MIN_READINGS or one.coverage < 0.5 for one in (first, second)):
            continue
        # Readings scatter: only a difference that chance does not explain is one.
        chance = 2 * (first.standard_error**2 + second.standard_error**2) ** 0.5
        allowed = max(absolute, relative * max(abs(first.mean), abs(second.mean))) + chance
        agree = abs(first.mean - second.mean) <= allowed
        checks[metric] = {sensors[0]: round(first.mean, 4), sensors[1]: round(second.mean, 4), "agree": agree}
        if not agree:
            words = f"{metric}: {sensors[0]} {first.mean:.4g}, {sensors[1]} {second.mean:.4g}"
            judged.add("sources_disagree", words, untrusted=metric in judged.label_sensors)
    power = judged.means.get("power_w", {}).get("nvml")
    window_s = (end_ns - start_ns) / 1e9
    if judged.energy_j is not None and power is not None and power.mean and window_s >= _POWER_CHECK_S:
        by_counter_w = judged.energy_j / window_s
        allowed_w = _ENERGY_TOLERANCE * power.mean + 2 * power.standard_error
        agree = abs(power.mean - by_counter_w) <= allowed_w
        checks["energy_j"] = {"power": round(power.mean, 2), "counter": round(by_counter_w, 2), "agree": agree}
        if not agree:  # the sensor samples a part of the time, and differs by board: a repeat does not help
            words = f"power: sensor {power.mean:.4g} W, energy counter {by_counter_w:.4g} W"
            judged.add("sources_disagree", words, untrusted=False)
    charged = _median_in(by_sensor.get("nvml", ()), "process_memory_mib", start_ns, end_ns)
    reserved = _median_in(by_sensor.get("torch", ()), "reserved_mib", start_ns, end_ns)
    if charged is not None and reserved is not None:
        agree = charged >= (1 - _MEMORY_TOLERANCE) * reserved
        checks["process_memory_mib"] = {"nvml": round(charged, 1), "torch": round(reserved, 1), "agree": agree}
        if not agree:
            words = f"memory: NVML charges {charged:.0f} MiB, torch has reserved {reserved:.0f} MiB"
            judged.add("sources_disagree", words)


def _foreign_memory_mib(nvml: list[Sample], device_memory_mib: float | None) -> tuple[float, float]:
    """Return (memory in use that is not charged to the trial, the driver's possible part of it), in MiB.

    The median, since the two figures are not of the very same instant. Where nothing is charged to the trial it is the
    least memory in use, which may hold the trial's context.
    """
    allowed_mib = max(FOREIGN_MIB, FOREIGN_SHARE * (device_memory_mib or 0.0))
    used = [sample.values for sample in nvml if "memory_used_mib" in sample.values]
    charged = [values for values in used if "process_memory_mib" in values]
    if charged:
        return statistics.median(v["memory_used_mib"] - v["process_memory_mib"] for v in charged), allowed_mib
    return min((values["memory_used_mib"] for values in used), default=0.0), allowed_mib + CONTEXT_MIB


def _period_ns(samples: list[Sample], metric: str) -> int:
    """Return the sensor's period for the metric, or its averaging time if longer, in ns; 0: unknown."""
    readings = [sample for sample in own_readings(samples) if metric in sample.values]
    lengths = [sample.t_ns - sample.since_ns for sample in readings if sample.since_ns is not None]
    return max(usual_interval_ns([sample.t_ns for sample in readings]), int(statistics.median(lengths or [0])))


def _median_in(samples: Iterable[Sample], metric: str, start_ns: int, end_ns: int) -> float | None:
    values = [s.values[metric] for s in samples if metric in s.values and start_ns <= s.t_ns <= end_ns]
    return statistics.median(values) if values else None
