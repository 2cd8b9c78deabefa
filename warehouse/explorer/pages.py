"""The contents of each page of the explorer. Start reading at `overview`; `render` turns a page's values into HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.errors import UsageError
from conf.reports.heat_map import heat_map
from conf.reports.svg import Svg
from warehouse.explorer.filters import NULL, ROWS_OF_A_PAGE, Filters
from warehouse.explorer.listings import RUNS
from warehouse.explorer.plot import LOG_BIN, RATIO_BIN, histogram, over_time
from warehouse.explorer.reading import ExplorerReader, QueryRows
from warehouse.reading.coverage import USABLE, memory_grid
from warehouse.tables.sql_text import sql_text

RATIOS = ("smact", "smocc", "drama", "gpu_util")
LABELS = ("peak_memory_mib", "smact", "smocc", "drama", "gpu_util", "power_w", "energy_j", "step_time_ms")
COUNTED = ("attempts", "telemetry", "kernels", "ranks", "collocations", "jobs", "stale")
_FACET_VALUES = 12  # shown of a facet, the most frequent ones
_POINTS = 400  # of a plot
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
_FAMILIES = 20  # of a picture, the most frequent ones


@dataclass(frozen=True)
class FacetValue:
    """A value that can be chosen. query: of the URL that chooses it, or no longer."""

    value: str
    rows: int
    query: str
    is_chosen: bool


@dataclass(frozen=True)
class ListPage:
    """One page of a list. columns: name, query of its order, arrow; nulls: column -> share of NULLs in all rows."""

    filters: Filters
    facets: Mapping[str, Sequence[FacetValue]]
    total: int
    nulls: Sequence[tuple[str, float]]
    columns: Sequence[tuple[str, str, str]]
    rows: Sequence[Mapping[str, Any]]
    sql: str

    @property
    def values(self) -> list[list[Any]]:
        """Return the rows' values in the order of the columns."""
        return [list(row.values()) for row in self.rows]

    @property
    def pages(self) -> int:
        """Return how many pages there are, at least 1."""
        return max(1, math.ceil(self.total / ROWS_OF_A_PAGE))


@dataclass(frozen=True)
class RunPage:
    """One run. sections: title -> (column, value) of what is not NULL; plots: metric -> picture."""

    run: Mapping[str, Any]
    config: str
    sections: Mapping[str, Sequence[tuple[str, Any]]]
    plots: Mapping[str, Svg]
    tables: Mapping[str, QueryRows]


@dataclass(frozen=True)
class Overview:
    """The whole warehouse.

    counts      facet -> values
    histograms  label -> picture
    coverage    source -> picture of how many usable runs each family has by peak memory
    nulls       label -> share of NULLs
    tables      name -> rows
    """

    runs: int
    counts: Mapping[str, Sequence[FacetValue]]
    histograms: Mapping[str, Svg]
    coverage: Mapping[str, Svg]
    nulls: Sequence[tuple[str, float]]
    tables: Mapping[str, int]
    newest: QueryRows


def overview(reader: ExplorerReader) -> Overview:
    """Return the first page: how many runs of what, what was not measured, the newest runs."""
    facets = _facets(reader, Filters())
    columns = ", ".join(f"count({name})" for name in LABELS)
    (total, *known) = reader.rows(f"SELECT count(*), {columns} FROM runs").rows[0]
    tables = {name: reader.rows(f"SELECT count(*) FROM {name}").rows[0][0] for name in COUNTED}
    newest = reader.rows(
        f"SELECT {', '.join(RUNS.columns)} FROM runs ORDER BY started_at DESC NULLS LAST, run_id LIMIT 10"
    )
    nulls = _nulls(LABELS, known, total)
    return Overview(total, facets, _histograms(reader), _coverage(reader), nulls, tables, newest)


def _histograms(reader: ExplorerReader) -> dict[str, Svg]:
    """Return a picture of each label with values: how many runs of each source have how much."""
    bins = {name: RATIO_BIN if name in RATIOS else LOG_BIN for name in LABELS}
    parts = [
        f"SELECT '{name}', source, {sql.format(name)}::INT, count(*) FROM runs "
        f"WHERE {name} {'>=' if name in RATIOS else '>'} 0 AND isfinite({name}) GROUP BY ALL"
        for name, sql in bins.items()
    ]
    counts: dict[str, dict[str, dict[int, int]]] = {name: {} for name in LABELS}
    for name, source, place, runs in reader.rows(" UNION ALL ".join(parts)).rows:
        counts[name].setdefault(source, {})[place] = runs
    return {
        name: histogram(name, by_source, is_log=name not in RATIOS) for name, by_source in counts.items() if by_source
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


def list_page(reader: ExplorerReader, filters: Filters) -> ListPage:
    """Return a list in one state of its filters."""
    facets = _facets(reader, filters)
    total, *known = reader.rows(filters.total_sql()).rows[0]
    answer = reader.rows(filters.page_sql())
    names, order = filters.listing.columns, filters.effective_order
    columns = [(name, filters.ordered_by(name).query(), {name: "↑", f"-{name}": "↓"}.get(order, "")) for name in names]
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    return ListPage(filters, facets, total, _nulls(names, known, total), columns, rows, filters.page_sql())


def _nulls(names: Sequence[str], known: Sequence[int], total: int) -> list[tuple[str, float]]:
    return [(name, 1 - count / total if total else 1.0) for name, count in zip(names, known, strict=True)]


def run_page(reader: ExplorerReader, run_id: str) -> RunPage | None:
    """Return one run, or None where there is none of this id."""
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
    return RunPage(run, _indented(run["config"]), _sections(run), plots, {k: v for k, v in tables.items() if v.rows})


def _facets(reader: ExplorerReader, filters: Filters) -> dict[str, list[FacetValue]]:
    """Return the most frequent values of each facet with their counts, and the chosen ones."""
    counted: dict[str, list[tuple[str, int]]] = {facet: [] for facet in filters.listing.facets}
    for facet, value, rows in reader.rows(filters.counts_sql()).rows:
        counted[facet].append((NULL if value is None else value, rows))
    facets = {}
    for facet, values in counted.items():
        chosen = filters.chosen.get(facet, ())
        visible = [pair for at, pair in enumerate(values) if at < _FACET_VALUES or pair[0] in chosen]
        visible += [(value, 0) for value in chosen if value not in [name for name, _ in values]]
        facets[facet] = [
            FacetValue(value, rows, filters.toggled(facet, value).query(), value in chosen) for value, rows in visible
        ]
    return facets


def _plots(reader: ExplorerReader, run_id: str, window: tuple[float, float] | None) -> dict[str, Svg]:
    """Return a picture of each metric with values, thinned to what a picture shows."""
    means = ", ".join(f"avg({name})" for name in _PLOTTED)
    answer = reader.rows(
        "WITH samples AS (SELECT * FROM telemetry WHERE run_id = ?), "
        "span AS (SELECT min(t_ms) AS first, greatest(max(t_ms) - min(t_ms), 1e-6) AS length FROM samples) "
        f"SELECT avg(t_ms), {means} FROM samples, span "
        f"GROUP BY least(floor((t_ms - first) / length * {_POINTS}), {_POINTS - 1}), sensor ORDER BY 1",
        [run_id],
    )
    plots = {}
    for at, name in enumerate(_PLOTTED, start=1):
        points = [(row[0], float(row[at])) for row in answer.rows if row[at] is not None and math.isfinite(row[at])]
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


def _indented(config: object) -> str:
    try:
        return json.dumps(json.loads(str(config)), indent=1)
    except (ValueError, RecursionError):
        return str(config)


def require_run_id(text: str) -> str:
    """Return the id of a run as a URL holds it. Raises `UsageError` for what is none."""
    if not text or len(text) > 300 or "\0" in text:
        raise UsageError("a run's id is wanted")
    return text
