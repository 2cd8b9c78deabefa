"""Labels of a run: means over its window, peaks, energy, and their quality.

Start reading at `label_run`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workers.labels.quality import SPOILS, Samples, count_qualities, judge, split_by_sensor
from workers.labels.verdict import CROSS_CHECKS, judge_run
from workers.telemetry.base import Sample
from workers.telemetry.means import WindowMean, spoken_from_ns, usual_interval_ns, window_mean
from workers.trial.outcome import Observed

# metric -> sensors that give it, the preferred one first: a window's mean is of one sensor, figures are never mixed.
MEANS = {
    **dict.fromkeys(("smact", "smocc", "drama"), ("gpm", "dcgm", "simulated")),
    **dict.fromkeys(("gpu_util", "power_w"), ("nvml", "dcgm", "simulated")),
}
_ENERGY_SENSORS = ("nvml", "dcgm")
_GROWTH = "growth of the device's memory in use, as NVML charges none to the trial"
_SHOWN = 0.98  # of what the allocator holds that such growth must show, or it is not the trial's
_COUNTER_STEPS = 8  # of the energy counter that a window must hold for its mean power to be taken from there


def label_run(observed: Observed) -> tuple[dict[str, Any], list[tuple[str, Sample]]]:
    """Return the columns of `runs` (labels, times, quality) and the judged samples. Not measured: absent or None."""
    start_ns, end_ns = observed.window_ns, observed.window_end_ns
    samples = list(observed.samples)
    if observed.backend != "simulated":
        samples = judge(samples, start_ns, end_ns, observed.period_s)
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
    columns["peak_rss_mib"] = _peak(samples, "rss_mib")
    columns |= {name: value for name, value in observed.values.items() if value is not None}
    if observed.backend == "cpu" and columns["peak_memory_mib"] is not None:
        # The trial reports its own process; what that started counts as well.
        columns["peak_memory_mib"] = max(columns["peak_memory_mib"], columns["peak_rss_mib"] or 0.0)
    verdict = judge_run(samples, observed, chosen, means, columns.get("energy_j"))
    if observed.shared:
        columns |= dict.fromkeys((*MEANS, "energy_j"))
    summary = {**verdict.summary, **({"peak_memory": _GROWTH} if growth else {})}
    columns |= {
        "quality": verdict.quality,
        "quality_reasons": verdict.reasons or None,
        "quality_summary": summary or None,
        **count_qualities(samples, start_ns, end_ns),
    }
    return columns, samples


def window_means(
    by_sensor: Mapping[str, Sequence[Sample]], start_ns: int, end_ns: int, warmup_ns: int | None
) -> dict[str, dict[str, WindowMean]]:
    """Return metric -> sensor -> mean over the window, for every label and every cross-checked metric.

    Sensors stand in the order in which labels take them; those that never read the metric are left out. Of averages
    that look back past the first step the window's later part is taken, a quarter of it at least.
    """
    wanted: dict[str, list[str]] = {metric: list(sensors) for metric, sensors in MEANS.items()}
    for metric, (pair, _, _) in CROSS_CHECKS.items():
        wanted.setdefault(metric, []).extend(s for s in pair if s not in wanted[metric])
    means: dict[str, dict[str, WindowMean]] = {}
    for metric, sensors in wanted.items():
        from_ns = min(spoken_from_ns(metric, start_ns, warmup_ns), (start_ns + 3 * end_ns) // 4)
        for sensor in sensors:
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

    The power sensor sees a part of the time, and averages up to a second, the one before the window too; the counter
    does neither.
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

    Between two readings it is taken to grow evenly, so that the window's edges are interpolated; where no reading
    lies beyond an edge, the growth is scaled from the time that was seen. None without two readings that say anything.
    """
    readings = [(s.t_ns, s.values[metric]) for s in samples if s.quality != "repeated" and metric in s.values]
    readings.sort()
    times_ns = [t_ns for t_ns, _ in readings]
    first = max(0, bisect.bisect_right(times_ns, start_ns) - 1)
    last = min(len(readings) - 1, bisect.bisect_left(times_ns, end_ns))
    # At least one reading must be inside: those around a window shorter than the period say little about it.
    if last <= first or not any(start_ns <= t_ns <= end_ns for t_ns in times_ns[first : last + 1]):
        return None
    from_ns, to_ns = max(start_ns, times_ns[first]), min(end_ns, times_ns[last])
    if to_ns <= from_ns:
        return None
    grown = _at(readings, last, to_ns) - _at(readings, first + 1, from_ns)
    return grown * (end_ns - start_ns) / (to_ns - from_ns)


def _at(readings: list[tuple[int, float]], index: int, t_ns: int) -> float:
    """Interpolate a counter between readings `index - 1` and `index`."""
    (before_ns, before), (after_ns, after) = readings[index - 1], readings[index]
    return before + (after - before) * ((t_ns - before_ns) / (after_ns - before_ns) if after_ns > before_ns else 1.0)


def peak_memory_mib(
    samples: Samples, reserved_peak_mib: float | None, *, alone: bool = True
) -> tuple[float | None, bool]:
    """Return (peak in MiB, whether it is the growth of the device's memory).

    The peak is NVML's highest charge to the trial's processes, or, between two samples, the allocator's own peak plus
    the memory outside the allocator (context, libraries) as last seen.

    Where NVML charges nothing to the trial (its pids are of another machine or namespace), what the device's memory in
    use has grown by since before the trial stands for the charge: the same, where the trial has the GPU to itself
    (`alone`).
    """
    reserved = [sample.values["reserved_mib"] for _, sample in samples if "reserved_mib" in sample.values]
    charged = [sample.values["process_memory_mib"] for _, sample in samples if "process_memory_mib" in sample.values]
    by_growth = not charged
    if by_growth and not alone:
        return None, False
    if by_growth:
        charged = _growth_mib(samples)
        on_device = bool(reserved) or reserved_peak_mib is not None
        if not charged or not on_device or (reserved and max(charged) < _SHOWN * reserved[-1]):
            return None, False
    sampled = max(charged)
    if reserved_peak_mib is None or not reserved:
        return sampled, by_growth
    return max(sampled, reserved_peak_mib + max(0.0, charged[-1] - reserved[-1])), by_growth


def _growth_mib(samples: Samples) -> list[float]:
    """Return the device memory in use, at each of NVML's readings, above the least until then.

    So memory that an earlier trial still gives back is not charged to this one."""
    used = [s.values["memory_used_mib"] for sensor, s in samples if sensor == "nvml" and "memory_used_mib" in s.values]
    return [now - least for now, least in zip(used, itertools.accumulate(used, min), strict=True)]


def _peak(samples: Samples, metric: str) -> float | None:
    return max((sample.values[metric] for _, sample in samples if metric in sample.values), default=None)
