"""Labels of a run: means over its window, peaks, energy, and their quality; also for ranks and for groups.

Start reading at `label_run`; `label_ranks` labels each rank of a run, and the run as its worst rank. `labelled_group`
labels trials that ran together, and makes their rows of `collocations`. Called by `workers.worker`; it calls telemetry
and `workers.quality`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from workers.quality import CROSS_CHECKS, SPOILS, Samples, judge, judge_run, split_by_sensor
from workers.task import RunResult
from workers.telemetry.sensors import Sample, WindowMean, spoken_from_ns, usual_interval_ns, window_mean
from workers.trial.reports import Observed
from workers.trial.running import failed_rank

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
