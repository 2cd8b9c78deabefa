"""Replays as a table in the terminal and as JSON. Start reading at `lines`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from conf.plain_text import table_lines
from conf.reports.page_text import MISSING, count_of
from farm.replaying.crossing import CrossedReplays, Interval, Standing
from farm.replaying.simulator import ReplayResult

HEADS = (
    "policy",
    "estimator",
    "makespan h",
    "of exclusive",
    "waiting min",
    "completion min",
    "slowdown",
    "out of memory",
    "SM activity",
    "energy kWh",
)
CAVEAT = (
    "Simulated: memory and minutes of the jobs are published, utilization is computed from traced steps, and slowdowns "
    "come from a contention model that no policy sees."
)
_J_PER_KWH = 3.6e6
_NAMED = 4  # policies of which none stands out


def lines(done: CrossedReplays) -> list[str]:
    """Return the terminal's lines."""
    table = table_lines(HEADS, [cells(one) for one in done.standings])
    return [title(done), *table, f"shortest makespan: {verdict(done)}", *notes(done)]


def leading(done: CrossedReplays) -> list[Standing]:
    """Return the standings that may be the best, the shortest mean makespan first.

    A standing is out where the interval of another one lies below its own, and the other one crashed no more jobs. One
    seed has no interval, and tells nothing apart.
    """
    known = [one for one in done.standings if not math.isnan(Interval.of(one.over_exclusive).mean)]
    ordered = sorted(known, key=lambda one: Interval.of(one.over_exclusive).mean)
    return [one for one in ordered if not any(_is_better(other, one) for other in ordered)]


def _is_better(first: Standing, other: Standing) -> bool:
    ours, theirs = Interval.of(first.over_exclusive), Interval.of(other.over_exclusive)
    if ours.half is None or theirs.half is None or first.crashes > other.crashes:
        return False
    return ours.mean + ours.half < theirs.mean - theirs.half


def verdict(done: CrossedReplays) -> str:
    """Return which policy has the shortest makespan, or which ones may have it, with how many jobs crashed."""
    names = [f"{one.name} ({one.crashes:,} out of memory)" for one in leading(done)]
    if not names:
        return "not known, as no job ran"
    if len(names) == 1:
        return names[0]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"none stands out: {', '.join(names[:_NAMED])}{more}"


def title(done: CrossedReplays) -> str:
    settings = done.settings
    return (
        f"{done.trace_name}: {count_of(done.jobs, 'job')} on {settings.gpu_count:,} x {settings.spec.name}, "
        f"{settings.sharing}, {count_of(len(settings.seeds), 'seed')}; means ± 95 % intervals over the seeds"
    )


def notes(done: CrossedReplays) -> list[str]:
    """Return sentences on jobs that did not run, and on what the figures are."""
    texts = []
    if done.left_out:
        texts.append(
            f"{count_of(done.left_out, 'job')} of the file left out: they ran on no GPU, or their times are missing"
        )
    if failed := max(result.failed for one in done.standings for result in one.results):
        texts.append(f"up to {count_of(failed, 'job')} of a replay did not run: too large for a GPU or for the cluster")
    return [*texts, CAVEAT]


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of what is known; NaN where nothing is."""
    known = [value for value in values if value == value]
    return statistics.fmean(known) if known else math.nan


FIGURES = {
    "makespan_h": lambda result: result.makespan_s / 3600,
    "waiting_min": lambda result: mean_of(result.waiting_s) / 60,
    "completion_min": lambda result: mean_of(result.completion_s) / 60,
    "slowdown": lambda result: mean_of(result.slowdown),
    "out_of_memory": lambda result: float(result.crashes),
    "smact": lambda result: result.smact,
    "energy_kwh": lambda result: result.energy_j / _J_PER_KWH,
}


def cells(one: Standing) -> tuple[str, ...]:
    """Return a standing under `HEADS`; crashes are the sum over all seeds."""
    shown = {name: one.interval(figure) for name, figure in FIGURES.items()}
    ratio = Interval.of(one.over_exclusive)
    return (
        one.policy,
        one.estimator,
        _text(shown["makespan_h"], 2),
        _text(ratio, 3),
        _text(shown["waiting_min"], 1),
        _text(shown["completion_min"], 1),
        _text(shown["slowdown"], 2),
        f"{one.crashes}",
        _text(shown["smact"], 2),
        _text(shown["energy_kwh"], 1),
    )


def _text(interval: Interval, digits: int) -> str:
    if interval.mean != interval.mean:
        return MISSING
    half = "" if interval.half is None else f" ± {interval.half:,.{digits}f}"
    return f"{interval.mean:,.{digits}f}{half}"


def as_mapping(done: CrossedReplays) -> dict[str, Any]:
    """Return all figures as JSON holds them; None for what is not known."""
    settings = done.settings
    return {
        "trace": done.trace_name,
        "jobs": done.jobs,
        "left_out": done.left_out,
        "gpus": settings.gpu_count,
        "device": settings.spec.name,
        "sharing": settings.sharing,
        "load": settings.load,
        "seeds": list(settings.seeds),
        "source": "simulated",
        "replays": [_standing(one) for one in done.standings],
        "best": [one.name for one in leading(done)],
        "notes": notes(done),
    }


def _standing(one: Standing) -> dict[str, Any]:
    figures = {name: _interval(one.interval(figure)) for name, figure in FIGURES.items()}
    return {
        "policy": one.policy,
        "estimator": one.estimator,
        **figures,
        "makespan_over_exclusive": _interval(Interval.of(one.over_exclusive)),
        "by_seed": [_result(result) for result in one.results],
    }


def _interval(interval: Interval) -> dict[str, float | None]:
    return {"mean": interval.mean if interval.mean == interval.mean else None, "half_width_95": interval.half}


def _result(result: ReplayResult) -> dict[str, Any]:
    return {
        "makespan_s": result.makespan_s,
        "out_of_memory": result.crashes,
        "failed": result.failed,
        "smact": result.smact,
        "gpus_with_a_job": result.used,
        "energy_j": result.energy_j,
        "joined": result.collocated,
    }
