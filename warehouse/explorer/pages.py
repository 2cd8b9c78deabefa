"""The contents of the explorer's pages, and their HTML.

Start reading at `overview`, `list_page` and `run_page`. `device_page` shows the errors of estimates on a device model,
`nights_page` the growth nights from their reports in the data folder. `over_time` and `histogram` draw telemetry and
labels. `rendered` makes the HTML, with links for the service or for files.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from conf.errors import UsageError
from conf.plain_text import figure, sql_text
from conf.reports.blocks import rendered as rendered_template
from conf.reports.charts import Axis, Margins, Plot, Svg, against, heat_map
from warehouse.explorer.filters import NULL, ROWS_OF_A_PAGE, RUNS, USABLE, Filters, memory_grid
from warehouse.explorer.limited_query import ExplorerReader, QueryRows
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RUN_RATIOS
from warehouse.reading.pairing import Pair, summed_up
from warehouse.tables.schema import SOURCES

LABELS = ("peak_memory_mib", "smact", "smocc", "drama", "gpu_util", "power_w", "energy_j", "step_time_ms")
COUNTED = ("attempts", "telemetry", "kernels", "ranks", "collocations", "jobs", "stale")
_FACET_VALUES = 12  # most frequent values of a facet to show
_POINTS = 400  # points of a plot
_PLOTTED = (
    "process_memory_mib",
    "memory_used_mib",
    "allocated_mib",
    "reserved_mib",
    "smact",
    "smocc",
    "drama",
    "gpu_util",
    "power_w",
    "sm_clock_mhz",
    "temperature_c",
    "cpu_cores",
    "rss_mib",
    "step_time_ms",
)
_KERNELS = 20
_FAMILIES = 20  # most frequent families in a picture
_MARGINS = Margins(height=170, right=14, top=14, bottom=30)
_LINES = 3  # least number of grid lines
SOURCE_COLOURS = {"measured": "k4", "simulated": "k5", "imported": "k1"}
_NIGHT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NIGHTS_SHOWN = 400  # newest nights to show
_LATEST_REPORT = "latest"
# Inline style sheets and data pictures only; forms stay on the service.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'self'; frame-ancestors 'none'"
Link: TypeAlias = Callable[..., "str | None"]
Values: TypeAlias = dict[str, Any]  # of a page's template, by name
SAMPLED_RUNS = 300  # runs of a device page, whose estimates take over a tenth of a second
BOUND = "upper_mib"
_TARGETS = ("peak_memory_mib", "step_time_ms", "smact", "smocc", "drama")  # errors of ratios are in points
_ORDER = ("measured", "imported", "simulated")  # the first of these that a device has is the default
# Returns the estimates of runs, in order: target or `BOUND` -> figure; None without an estimate.
Estimates = Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, float | None] | None]]


@dataclass(frozen=True)
class FacetValue:
    """A value that can be chosen. query: the URL query that selects this value, or deselects it."""

    value: str
    rows: int
    query: str
    is_chosen: bool


def overview(reader: ExplorerReader) -> Values:
    """Return the first page.

    runs, tables  numbers of rows; counts: facet -> values
    histograms    label -> picture; coverage: source -> picture of usable runs by family and peak memory
    nulls         (label, share of NULLs); newest: the newest runs
    """
    facets = _facets(reader, Filters())
    columns = ", ".join(f"count({name})" for name in LABELS)
    (total, *known) = reader.rows(f"SELECT count(*), {columns} FROM runs").rows[0]
    tables = {name: reader.rows(f"SELECT count(*) FROM {name}").rows[0][0] for name in COUNTED}
    newest = reader.rows(
        f"SELECT {', '.join(RUNS.columns)} FROM runs ORDER BY started_at DESC NULLS LAST, run_id LIMIT 10"
    )
    return {
        "runs": total,
        "counts": facets,
        "histograms": _histograms(reader),
        "coverage": _coverage(reader),
        "nulls": _nulls(LABELS, known, total),
        "tables": tables,
        "newest": newest,
    }


def _histograms(reader: ExplorerReader) -> dict[str, Svg]:
    """Return a histogram of each label that has values, by source."""
    bins = {name: RATIO_BIN if name in RUN_RATIOS else LOG_BIN for name in LABELS}
    parts = [
        f"SELECT '{name}', source, {sql.format(name)}::INT, count(*) FROM runs "
        f"WHERE {name} {'>=' if name in RUN_RATIOS else '>'} 0 AND isfinite({name}) GROUP BY ALL"
        for name, sql in bins.items()
    ]
    counts: dict[str, dict[str, dict[int, int]]] = {name: {} for name in LABELS}
    for name, source, place, runs in reader.rows(" UNION ALL ".join(parts)).rows:
        counts[name].setdefault(source, {})[place] = runs
    return {
        name: histogram(name, by_source, is_log=name not in RUN_RATIOS)
        for name, by_source in counts.items()
        if by_source
    }


def _coverage(reader: ExplorerReader) -> dict[str, Svg]:
    families: dict[str, list[str]] = {}
    for source, family in reader.rows(
        f"SELECT source, family FROM runs WHERE {USABLE} GROUP BY ALL ORDER BY source, count(*) DESC, family"
    ).rows:
        families.setdefault(source, []).append(family)
    pictures = {}
    for source, names in families.items():
        relation = (
            f"(SELECT family, status, {USABLE} AS usable, false AS tonight, peak_memory_mib, CASE WHEN device_uuid IS "
            f"NOT NULL THEN device_memory_mib END AS device_memory_mib FROM runs WHERE source = {sql_text(source)})"
        )
        grid = memory_grid(lambda sql: reader.rows(sql).rows, relation, sorted(names[:_FAMILIES]))
        pictures[source] = heat_map(grid, "family", "peak memory, GiB")
    return pictures


def list_page(reader: ExplorerReader, filters: Filters) -> Values:
    """Return one page of a list, in one state of its filters.

    total    rows of all pages; pages: number of pages, at least 1; sql: the query of the page's rows
    nulls    (column, share of NULLs in all rows); columns: name, query that orders by it, arrow
    """
    facets = _facets(reader, filters)
    total, *known = reader.rows(filters.total_sql()).rows[0]
    answer = reader.rows(filters.page_sql())
    names, order = filters.listing.columns, filters.effective_order
    columns = [(name, filters.ordered_by(name).query(), {name: "↑", f"-{name}": "↓"}.get(order, "")) for name in names]
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    return {
        "filters": filters,
        "facets": facets,
        "total": total,
        "pages": max(1, math.ceil(total / ROWS_OF_A_PAGE)),
        "nulls": _nulls(names, known, total),
        "columns": columns,
        "rows": rows,
        "cells": answer.rows,
        "sql": filters.page_sql(),
    }


def _nulls(names: Sequence[str], known: Sequence[int], total: int) -> list[tuple[str, float]]:
    return [(name, 1 - count / total if total else 1.0) for name, count in zip(names, known, strict=True)]


def run_page(reader: ExplorerReader, run_id: str) -> Values | None:
    """Return one run, or None if no run has this id.

    sections  title -> (column, value) of columns that are not NULL; plots: metric -> picture; tables: title -> rows
    """
    answer = reader.rows("SELECT * FROM runs WHERE run_id = ?", [run_id])
    if not answer.rows:
        return None
    run = dict(zip(answer.columns, answer.rows[0], strict=True))
    begin_ms, end_ms = run["window_start_ms"], run["window_end_ms"]
    plots = _plots(reader, run_id, None if begin_ms is None or end_ms is None else (begin_ms, end_ms))
    tables = {
        "Ranks": reader.rows("SELECT * EXCLUDE (run_id) FROM ranks WHERE run_id = ? ORDER BY rank", [run_id]),
        "Slowest kernels": reader.rows(
            "SELECT * EXCLUDE (run_id) FROM kernels WHERE run_id = ? "
            f"ORDER BY duration_us * count DESC NULLS LAST, kernel_row LIMIT {_KERNELS}",
            [run_id],
        ),
        "Jobs on the same GPU": reader.rows(
            "SELECT * EXCLUDE (run_id) FROM collocations WHERE run_id = ?", [run_id], most=_KERNELS
        ),
    }
    return {
        "run": run,
        "config": _indent(run["config"]),
        "sections": _sections(run),
        "plots": plots,
        "tables": {title: of_run for title, of_run in tables.items() if of_run.rows},
    }


def _facets(reader: ExplorerReader, filters: Filters) -> dict[str, list[FacetValue]]:
    """Return the most frequent values of each facet with their counts, and the chosen ones."""
    counted: dict[str, list[tuple[str, int]]] = {facet: [] for facet in filters.listing.facets}
    for facet, value, rows in reader.rows(filters.counts_sql()).rows:
        counted[facet].append((NULL if value is None else value, rows))
    facets = {}
    for facet, values in counted.items():
        chosen = filters.chosen.get(facet, ())
        visible = [pair for place, pair in enumerate(values) if place < _FACET_VALUES or pair[0] in chosen]
        visible += [(value, 0) for value in chosen if value not in [name for name, _ in values]]
        facets[facet] = [
            FacetValue(value, rows, filters.toggled(facet, value).query(), value in chosen) for value, rows in visible
        ]
    return facets


def _plots(reader: ExplorerReader, run_id: str, window: tuple[float, float] | None) -> dict[str, Svg]:
    """Return a picture of each metric with values, thinned to `_POINTS` points."""
    means = ", ".join(f"avg({name})" for name in _PLOTTED)
    answer = reader.rows(
        "WITH samples AS (SELECT * FROM telemetry WHERE run_id = ?), "
        "span AS (SELECT min(t_ms) AS first, greatest(max(t_ms) - min(t_ms), 1e-6) AS length FROM samples) "
        f"SELECT avg(t_ms), {means} FROM samples, span "
        f"GROUP BY least(floor((t_ms - first) / length * {_POINTS}), {_POINTS - 1}), sensor ORDER BY 1",
        [run_id],
    )
    plots = {}
    for column, name in enumerate(_PLOTTED, start=1):
        points = [
            (row[0], float(row[column]))
            for row in answer.rows
            if row[column] is not None and math.isfinite(row[column])
        ]
        if (picture := over_time(name, points, window)) is not None:
            plots[name] = picture
    return plots


def _sections(run: Mapping[str, Any]) -> dict[str, list[tuple[str, Any]]]:
    groups = {
        "Labels": (*LABELS, "peak_reserved_mib", "peak_allocated_mib", "peak_rss_mib"),
        "Job": (
            "job_id",
            "task_index",
            "attempt",
            "family",
            "batch_size",
            "precision",
            "optimizer",
            "parameters",
            "parallel",
            "ranks",
            "worst_rank",
            "group_id",
        ),
        "Environment": (
            "device_name",
            "device_memory_mib",
            "torch_version",
            "cuda_version",
            "cudnn_version",
            "driver_version",
            "python_version",
            "allocator_settings",
            "farm_version",
            "memory_fraction",
        ),
    }
    named = {name for names in groups.values() for name in names} | {"run_id", "config", "origin"}
    groups["Everything else"] = tuple(name for name in run if name not in named)
    return {
        title: [(name, run[name]) for name in names if run.get(name) is not None] for title, names in groups.items()
    }


def _indent(config: object) -> str:
    try:
        return json.dumps(json.loads(str(config)), indent=1)
    except (ValueError, RecursionError):
        return str(config)


_BINS_OF_A_DECADE, _RATIO_BINS = 8, 20
LOG_BIN = f"floor(log10({{}}) * {_BINS_OF_A_DECADE})"  # SQL of a value's bin in a histogram
RATIO_BIN = f"least(floor({{}} * {_RATIO_BINS}), {_RATIO_BINS - 1})"
_MOST_BINS, _FEWEST_BINS = 40, 8


def over_time(
    name: str, points: Sequence[tuple[float, float]], window: tuple[float, float] | None = None
) -> Svg | None:
    """Return the picture of one metric; None with fewer than two points.

    Args:
        name: The metric's column, with its unit.
        points: (time in ms, value), in the order of time.
        window: Start and end in ms of the measured window, to shade; None if unknown.
    """
    if len(points) < 2:
        return None
    first, values = points[0][0], [value for _, value in points]
    seconds = max((points[-1][0] - first) / 1e3, 1e-12)
    plot = Plot(Axis.within(0.0, seconds), Axis.of(min(0.0, *values), max(values), _LINES), _MARGINS)
    if window is not None:
        left, right = (plot.x(min(seconds, max(0.0, (t_ms - first) / 1e3))) for t_ms in window)
        plot.rect("window", left, plot.top, max(right - left, 1.0), plot.bottom - plot.top, title="window")
    plot.grid()
    plot.ticks_below(unit=" s")
    plot.line("line", [((t_ms - first) / 1e3, value) for t_ms, value in points])
    return plot.picture(f"{name} over time, up to {figure(max(values))}", css="drawn")


def histogram(name: str, counts: Mapping[str, Mapping[int, int]], *, is_log: bool) -> Svg:
    """Return the picture of runs by bin, as columns stacked by source.

    Args:
        name: The label, with its unit.
        counts: Source -> index of a bin -> runs, binned by `LOG_BIN` or `RATIO_BIN`; at least one run.
        is_log: Whether the axis is logarithmic.
    """
    places = sorted({place for by_place in counts.values() for place in by_place})
    first, last = (places[0], places[-1]) if is_log else (0, _RATIO_BINS - 1)
    missing = max(0, _FEWEST_BINS - (last - first + 1))
    first, last = first - missing // 2, last + missing - missing // 2
    per = max(1, math.ceil((last - first + 1) / _MOST_BINS))  # bins drawn as one
    edges = [
        10 ** (step / _BINS_OF_A_DECADE) if is_log else step / _RATIO_BINS for step in range(first, last + per + 1, per)
    ]
    runs_of: Counter[tuple[int, str]] = Counter()
    for source, by_place in counts.items():
        for place, runs in by_place.items():
            runs_of[(place - first) // per, source] += runs
    heights: Counter[int] = Counter()
    for (place, _), runs in runs_of.items():
        heights[place] += runs
    x_axis = Axis.log(edges[0], edges[-1]) if is_log else Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))
    most = max(heights.values())
    plot = Plot(x_axis, Axis.of(0.0, max(most, _LINES), _LINES), _MARGINS)
    plot.grid()
    plot.ticks_below()
    low: Counter[int] = Counter()
    for (place, source), runs in sorted(runs_of.items()):
        left, right = edges[place], edges[place + 1]
        title = f"{figure(left)} to {figure(right)}: {runs:,} {source}"
        plot.column(SOURCE_COLOURS.get(source, "k0"), left, right, low[place], low[place] + runs, title, gap=0.5)
        low[place] += runs
    label = f"{name} of {sum(heights.values()):,} runs, from {figure(edges[0])} to {figure(edges[-1])}"
    return plot.picture(label, css="drawn")


def nights_page(folder: DataFolder) -> Values:
    """Return the nights of a data folder, the newest first.

    unreadable  (name, reason) of each unreadable report; has_more: there are older nights
    """
    names = sorted((path.stem for path in folder.reports.glob("*.json") if path.stem != _LATEST_REPORT), reverse=True)
    nights, unreadable = [], []
    for name in names[:_NIGHTS_SHOWN]:
        try:
            nights.append(_night(folder, name))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            unreadable.append((name, type(error).__name__))
    return {"nights": nights, "unreadable": unreadable, "has_more": len(names) > _NIGHTS_SHOWN}


def night_report(folder: DataFolder, name: str) -> bytes | None:
    """Return the page of a night's report; None if there is none. Raises `UsageError` for an invalid name."""
    if not _NIGHT_NAME.fullmatch(name):
        raise UsageError("a night's name is wanted, as in 2026-11-20")
    path = folder.reports / f"{name}.html"
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return None


def _night(folder: DataFolder, name: str) -> Values:
    """Return one night from its report. level: good, look or bad; by_status: outcome -> runs."""
    path = folder.reports / f"{name}.json"
    report: dict[str, Any] = json.loads(path.read_text("utf-8"))
    outcome, run = report.get("said") or {}, report.get("run") or {}
    promoted = [
        f"{score['target']} by {score['estimator']}"
        for score in report.get("scores") or ()
        if score.get("cycle") == report.get("cycle") and score.get("decision") in ("promoted", "first")
    ]
    return {
        "cycle": name,
        "outcome": str(outcome.get("outcome") or "open"),
        "level": str(outcome.get("level") or "look"),
        "sentence": str(outcome.get("sentence") or ""),
        "runs": run.get("runs"),
        "by_status": dict(run.get("by_status") or {}),
        "promoted": promoted,
        "has_page": path.with_suffix(".html").is_file() and _NIGHT_NAME.fullmatch(name) is not None,
    }


def served_link(path: str, query: str = "") -> str | None:
    """Return the address of a page of the service."""
    return f"{path}?{query}" if query else path


def rendered(template: str, link: Link = served_link, **values: Any) -> str:
    """Return the HTML of a template of the explorer, every value cleaned and escaped.

    Args:
        template: Its name.
        link: Returns the address of a page by its path and query; None if the page does not exist.
        **values: The template's values.
    """
    links = {"link": link, "is_served": link is served_link}
    return rendered_template(f"explorer/{template}", "explorer", colours=SOURCE_COLOURS, **links, **values)


def devices_page(reader: ExplorerReader) -> QueryRows:
    """Return one row for each device model: runs by source and outcome, memory, means."""
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
) -> Values | None:
    """Return one device model: runs by source, figures of one source, residuals of a sample; None without runs.

    sampled  runs in the sample; without: those without an estimate; note: why there are no residuals

    Args:
        reader: Reads the warehouse.
        name: The runs' `device_name`.
        source: Source of the runs; default the first of measured, imported and simulated with runs.
        estimates: Estimates runs; None shows no residuals.

    Raises:
        UsageError: For a source that the device has no runs of.
    """
    where = f"FROM runs WHERE device_name = {sql_text(name)}"
    by_source = dict(reader.rows(f"SELECT source, count(*) {where} GROUP BY source ORDER BY 2 DESC, 1").rows)
    if not by_source:
        return None
    chosen = source if source is not None else next(label for label in (*_ORDER, *by_source) if label in by_source)
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
    sample = {"sampled": 0, "without": 0, "residuals": [], "note": None}
    return {
        "name": name,
        "source": chosen,
        "by_source": by_source,
        "families": families,
        "nulls": _nulls(LABELS, known, total),
        **(sample if estimates is None else _sample(reader, name, where, estimates)),
    }


def _sample(reader: ExplorerReader, name: str, where: str, estimates: Estimates) -> Values:
    """Return the residuals of some of a device's runs."""
    # Ordered by the hash of the id: the same runs every time, from all families.
    answer = reader.rows(
        f"SELECT run_id, family, source, device_name, config, {', '.join(_TARGETS)} FROM runs WHERE run_id IN "
        f"(SELECT run_id {where} AND status = 'ok' AND ranks IS NULL AND group_id IS NULL "
        f"ORDER BY hash(run_id) LIMIT {SAMPLED_RUNS}) AND device_name = {sql_text(name)} ORDER BY run_id"
    )
    runs = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    try:
        estimated = estimates(runs)
    except UsageError as error:
        return {"sampled": len(runs), "without": len(runs), "residuals": [], "note": str(error)}
    pairs = [(run, estimate) for run, estimate in zip(runs, estimated, strict=True) if estimate is not None]
    residuals = [residual for target in _TARGETS if (residual := residuals_of(target, pairs)) is not None]
    return {"sampled": len(runs), "without": len(runs) - len(pairs), "residuals": residuals, "note": None}


def residuals_of(target: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, float | None]]]) -> Values | None:
    """Return the errors of estimates of one target, from pairs (run, estimate); None if no pair has both figures.

    errors  family -> runs, median and 90th percentile of the absolute error in `unit`; `all` is first
    above   share of the runs measured above the estimated bound; None without bounds
    """
    known = [
        Pair(key={"run_id": run["run_id"], "family": str(run["family"])}, before=run, after=estimate)
        for run, estimate in pairs
        if _is_figure(run[target]) and _is_figure(estimate.get(target)) and (target in RUN_RATIOS or run[target] > 0)
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
    return {
        "target": target,
        "unit": "points" if target in RUN_RATIOS else "%",
        "errors": table,
        "above": sum(bounds) / len(bounds) if bounds else None,
        "picture": against(target, points, is_log=target not in RUN_RATIOS),
    }


def _is_figure(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
