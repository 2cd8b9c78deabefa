"""Device models that runs were measured on, and how far estimates are off on each.

Start reading at `devices_page` and `device_page`. The estimates come from the caller, so that this package needs no
estimator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.errors import UsageError
from conf.reports.charts import against
from conf.reports.svg import Svg
from warehouse.explorer.pages import LABELS
from warehouse.explorer.reading import ExplorerReader, QueryRows
from warehouse.reading.pairing import Pair, summed_up
from warehouse.tables.schema import SOURCES
from warehouse.tables.sql_text import sql_text

SAMPLED_RUNS = 300  # of one device page: their estimates take a good tenth of a second
RATIOS = ("smact", "smocc", "drama")  # whose errors are differences, in points; of others they are relative
BOUND = "upper_mib"
_TARGETS = ("peak_memory_mib", "step_time_ms", *RATIOS)
_ORDER = ("measured", "imported", "simulated")  # the first that a device has is shown first

# Estimates of some runs, in order: target or `BOUND` -> figure; None where there is no estimate.
Estimates = Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, float | None] | None]]


@dataclass(frozen=True)
class Residuals:
    """How far the estimates of one target are off.

    errors   family -> runs, median and 90th percentile of the absolute error; `all` is first
    unit     of the errors
    above    share of the runs whose measurement is above the estimated bound; None without one
    """

    target: str
    unit: str
    errors: Mapping[str, tuple[int, float, float]]
    above: float | None
    picture: Svg | None


@dataclass(frozen=True)
class DevicePage:
    """One device model: its runs by source, those of one source in figures, residuals of a sample of them."""

    name: str
    source: str
    by_source: Mapping[str, int]
    families: QueryRows
    nulls: Sequence[tuple[str, float]]
    sampled: int
    without: int  # of the sample: no estimate
    residuals: Sequence[Residuals] = field(default_factory=tuple)
    note: str | None = None


def devices_page(reader: ExplorerReader) -> QueryRows:
    """Return a row a device model: runs by source and outcome, memory, means."""
    sources = ", ".join(f"count(*) FILTER (source = {sql_text(name)}) AS {name}" for name in SOURCES)
    return reader.rows(
        f"SELECT device_name, max(device_memory_mib) AS device_memory_mib, count(*) AS runs, {sources}, "
        "count(*) FILTER (status = 'ok') AS ok, count(*) FILTER (status = 'oom') AS oom, "
        "max(peak_memory_mib) AS most_memory_mib, avg(smact) AS mean_smact, avg(smocc) AS mean_smocc, "
        "avg(drama) AS mean_drama, max(finished_at) AS last_at "
        "FROM runs WHERE device_name IS NOT NULL GROUP BY device_name ORDER BY runs DESC, device_name",
        most=1_000,
    )


def device_page(
    reader: ExplorerReader, name: str, source: str | None = None, estimates: Estimates | None = None
) -> DevicePage | None:
    """Return a device model's page; None where no run has it.

    Args:
        reader: Of the warehouse.
        name: As runs have it in `device_name`.
        source: Whose runs; default the first that there is of measured, imported, simulated.
        estimates: Estimates runs; None shows no residuals.

    Raises:
        UsageError: For a source that the device has no runs of.
    """
    where = f"FROM runs WHERE device_name = {sql_text(name)}"
    by_source = dict(reader.rows(f"SELECT source, count(*) {where} GROUP BY source ORDER BY 2 DESC, 1").rows)
    if not by_source:
        return None
    chosen = source if source is not None else next(one for one in (*_ORDER, *by_source) if one in by_source)
    if chosen not in by_source:
        raise UsageError(f"{name} has no runs of source {chosen!r}; it has {', '.join(by_source)}")
    where += f" AND source = {sql_text(chosen)}"
    families = reader.rows(
        "SELECT family, count(*) AS runs, count(*) FILTER (status = 'ok') AS ok, "
        "count(*) FILTER (status = 'oom') AS oom, median(peak_memory_mib) AS median_memory_mib, "
        "median(step_time_ms) AS median_step_ms, avg(smact) AS mean_smact, avg(smocc) AS mean_smocc, "
        f"avg(drama) AS mean_drama {where} GROUP BY family ORDER BY runs DESC, family"
    )
    total, *known = reader.rows(f"SELECT count(*), {', '.join(f'count({label})' for label in LABELS)} {where}").rows[0]
    nulls = [(label, 1 - count / total) for label, count in zip(LABELS, known, strict=True)]
    page = DevicePage(name, chosen, by_source, families, nulls, 0, 0)
    return page if estimates is None else _with_residuals(reader, page, where, estimates)


def _with_residuals(reader: ExplorerReader, page: DevicePage, where: str, estimates: Estimates) -> DevicePage:
    # By the hash of the id: the same runs at every look, and no family first.
    answer = reader.rows(
        f"SELECT run_id, family, source, device_name, config, {', '.join(_TARGETS)} FROM runs WHERE run_id IN "
        f"(SELECT run_id {where} AND status = 'ok' AND ranks IS NULL AND group_id IS NULL "
        f"ORDER BY hash(run_id) LIMIT {SAMPLED_RUNS}) AND device_name = {sql_text(page.name)} ORDER BY run_id"
    )
    runs = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    try:
        done = estimates(runs)
    except UsageError as error:
        return DevicePage(**{**vars(page), "sampled": len(runs), "without": len(runs), "note": str(error)})
    pairs = [(run, one) for run, one in zip(runs, done, strict=True) if one is not None]
    residuals = [one for target in _TARGETS if (one := residuals_of(target, pairs)) is not None]
    without = len(runs) - len(pairs)
    return DevicePage(**{**vars(page), "sampled": len(runs), "without": without, "residuals": tuple(residuals)})


def residuals_of(
    target: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, float | None]]]
) -> Residuals | None:
    """Return the residuals of one target from (run, estimate) pairs; None where no pair has both figures."""
    known = [
        Pair(key={"run_id": run["run_id"], "family": str(run["family"])}, before=run, after=estimate)
        for run, estimate in pairs
        if _is_figure(run[target]) and _is_figure(estimate.get(target)) and (target in RATIOS or run[target] > 0)
    ]
    if not known:
        return None
    shifts = [shift for by in ((), ("family",)) for shift in summed_up(known, target, math.inf, by)]
    table = {
        shift.group.get("family", "all"): (shift.pairs, 100 * shift.median_size, 100 * shift.p90) for shift in shifts
    }
    points = [(p.before[target], p.after[target], f"{p.key['run_id']} ({p.key['family']})") for p in known]
    bounds = [
        pair.before[target] > pair.after[BOUND]
        for pair in known
        if target == "peak_memory_mib" and pair.after.get(BOUND) is not None
    ]
    above = sum(bounds) / len(bounds) if bounds else None
    unit = "points" if target in RATIOS else "%"
    return Residuals(target, unit, table, above, against(target, points, is_log=target not in RATIOS))


def _is_figure(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
