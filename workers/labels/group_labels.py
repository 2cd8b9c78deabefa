"""Labels of trials that ran together: what is each one's own, and the rows of `collocations`.

Start reading at `labelled_group`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from featurize.configs.trial import TrialConfig, config_hash
from warehouse.tables.schema import COLLOCATION_SCHEMA
from workers.alone import AloneRun
from workers.labels.quality import Samples, judge, split_by_sensor
from workers.labels.run_labels import MEANS, window_means
from workers.task import RunResult, Task
from workers.trial.outcome import Observed

if TYPE_CHECKING:
    import pyarrow as pa

_PARTNER_ENDED = "partner_ended"
_OF_RUN = ("run_id", "member_row", "source", "device_name", "config", "batch_size", "precision")  # the writer's to give


@dataclass(frozen=True, kw_only=True)
class EndedMember:
    """One member of a group that has ended, and its run alone; None: it was not run alone."""

    spec: Task
    result: RunResult
    observed: Observed
    alone: AloneRun | None

    @property
    def ok(self) -> bool:
        return self.result.run.status == "ok"


def labelled_group(group_id: str, members: Sequence[EndedMember], *, sharing: str) -> list[RunResult]:
    """Return the results of a group's members with their rows of `collocations`.

    A member's run keeps its own step time and memory; what the device showed is in the group's columns. Where a member
    ended before its window did, the others had the device to themselves from then on: they are suspect, and nobody has
    a slowdown.

    Args:
        group_id: The task's own run id.
        members: In the order of their numbers.
        sharing: time_slicing, mps or mig.
    """
    ended = [place for place, member in enumerate(members) if not member.ok]
    joint = {} if ended else _joint(members)
    results = []
    for place, member in enumerate(members):
        others = [other for other in ended if other != place]
        run = dataclasses.replace(member.result.run, group_id=group_id)
        quality, reasons = run.quality, dict(run.quality_reasons or {})
        if member.ok and others:
            quality = "suspect" if quality in ("trusted", None) else quality
            reasons[_PARTNER_ENDED] = ", ".join(_how_ended(members, other) for other in others)
        row = {
            "group_id": group_id,
            "member": place,
            "group_size": len(members),
            "sharing": sharing,
            "devices": 1,
            "model": model_of(member.spec.config),
            "name": config_hash(member.spec.config),
            **_figures_alone(member.alone),
            **_figures_beside(members, place, ended),
            **joint,
        }
        result = dataclasses.replace(
            member.result,
            run=dataclasses.replace(run, quality=quality, quality_reasons=reasons or None),
            collocations=_table(row),
        )
        results.append(result)
    return results


def model_of(config: TrialConfig) -> str:
    """Return the name by which a member's model is held out: its library's, else its family."""
    name = getattr(config, "model", None)
    return name if isinstance(name, str) else config.family


def _how_ended(members: Sequence[EndedMember], place: int) -> str:
    return f"member {place} ended as {members[place].result.run.status}"


def _figures_alone(alone: AloneRun | None) -> dict[str, Any]:
    if alone is None:
        return {}
    return {
        "solo_run_id": alone.run_id,
        "solo_step_ms": alone.step_ms,
        "solo_memory_mib": alone.memory_mib,
        "solo_gpu_util": alone.gpu_util,
        "solo_smact": alone.smact,
        "solo_smocc": alone.smocc,
        "solo_drama": alone.drama,
        "solo_power_w": alone.power_w,
    }


def _figures_beside(members: Sequence[EndedMember], place: int, ended: Sequence[int]) -> dict[str, Any]:
    """Return a member's figures beside the others; where there is no slowdown, `doubt` says why."""
    member, run = members[place], members[place].result.run
    alone_ms = None if member.alone is None else member.alone.step_ms
    values: dict[str, Any] = {"status": run.status}
    if run.status == "oom" and run.oom_kind == "device":
        values["died_of"] = _died_of(members, place)
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


def _died_of(members: Sequence[EndedMember], place: int) -> int:
    """Return the member whose allocation exhausted the memory: the one itself where it ran out alone as well, else the
    partner that held the most."""
    alone = members[place].alone
    if alone is not None and alone.status == "oom":
        return place
    others = [other for other in range(len(members)) if other != place]
    holding = [other for other in others if members[other].result.run.status != "oom"]
    return max(holding or others, key=lambda other: _memory(members[other]))


def _memory(member: EndedMember) -> float:
    run = member.result.run
    known = run.peak_memory_mib or run.peak_reserved_mib or (member.alone and member.alone.memory_mib)
    return known or 0.0


def _joint(members: Sequence[EndedMember]) -> dict[str, Any]:
    """Return the group's columns, over the time from the latest begin of a window to the latest end of one.

    In all of it every member was at work. What the device showed is read from one member's sensors: all saw the same.
    """
    first = members[0].observed
    backend = first.backend
    begins = [member.observed.window_ns for member in members if member.observed.window_ns is not None]
    ends = [member.observed.window_end_ns for member in members if member.observed.window_end_ns is not None]
    if len(begins) < len(members) or len(ends) < len(members):
        return {}
    start_ns, end_ns = max(begins), max(ends)
    if backend == "simulated":  # of virtual time, in which each has its own
        start_ns, end_ns = begins[0], ends[0]
    samples: Samples = first.samples
    if backend != "simulated":
        samples = judge(samples, start_ns, end_ns, first.period_s)
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
    """Return the peak of the members' memory: of the device's, less what was in use before; of a CPU's processes."""
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
    return [(one.t_ns, one.values[metric]) for name, one in samples if name == sensor and metric in one.values]


def _peak_of_sum(series: Sequence[Sequence[tuple[int, float]]], start_ns: int, end_ns: int) -> float | None:
    """Return the highest sum of the series' latest values, at the start and at each reading.

    A window may be shorter than the time between two readings; what was read last before it then counts.
    """
    times = [[t_ns for t_ns, _ in one] for one in series]
    peak: float | None = None
    for t_ns in (start_ns, *(t_ns for t_ns in itertools.chain(*times) if start_ns < t_ns <= end_ns)):
        places = [bisect.bisect_right(own, t_ns) - 1 for own in times]
        if min(places) >= 0:
            total = sum(one[place][1] for one, place in zip(series, places, strict=True))
            peak = total if peak is None else max(peak, total)
    return peak


def _table(row: Mapping[str, Any]) -> pa.Table:
    import pyarrow as pa

    own = [column for column in COLLOCATION_SCHEMA if column.name not in _OF_RUN]
    return pa.table({column.name: pa.array([row.get(column.name)], column.type) for column in own})
