"""The tables that the explorer lists, and the selection of a page's rows, as URL and as SQL.

Start reading at `LISTINGS` for columns, facets and order, and at `Filters` for a page's choices. `memory_grid` counts
the `USABLE` runs by peak memory, for the explorer and the night's report.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from conf.errors import UsageError, unknown_name
from conf.plain_text import sql_text
from conf.reports.charts import Grid

# A column of a dataset: its only value, or `several`.
_ONE = "CASE WHEN count(DISTINCT {0}) > 1 THEN 'several' ELSE min({0}) END AS {0}"
_OF_RUNS = f"""SELECT coalesce(job_id, '') || ' ' || source AS dataset_row, job_id, 'runs' AS table_name, source,
 {_ONE.format("family")}, {_ONE.format("device_name")}, NULL::VARCHAR AS series, count(*) AS rows,
 count(*) FILTER (status = 'ok') AS ok, count(peak_memory_mib) AS with_memory, count(step_time_ms) AS with_step_time,
 count(smact) AS with_smact, count(drama) AS with_drama, min(started_at) AS first_at, max(finished_at) AS last_at
 FROM runs GROUP BY job_id, source"""
_OF_KERNELS = """SELECT 'kernels ' || coalesce(device_name, ''), NULL, 'kernels', source, NULL, device_name, NULL,
 count(*), count(*), 0, count(duration_us), 0, 0, NULL, NULL FROM kernels WHERE run_id IS NULL
 GROUP BY device_name, source"""
_OF_COLLOCATIONS = f"""SELECT 'collocations ' || coalesce(series, ''), NULL, 'collocations', source, NULL,
 {_ONE.format("device_name")}, series, count(*), count(*) FILTER (status = 'ok'), count(joint_memory_mib),
 count(shared_step_ms), count(joint_smact), count(joint_drama), NULL, NULL FROM collocations WHERE run_id IS NULL
 GROUP BY series, source"""
ROWS_OF_A_PAGE = 50
NULL = "(null)"  # a facet's value where the column is NULL
_MOST_PAGES = 100_000


@dataclass(frozen=True, kw_only=True)
class ListedTable:
    """A table that the explorer lists.

    name      path of its pages, as in /runs
    row_is    a row in words
    rows_are  the same in the plural
    relation  SQL after FROM
    row_id    column that identifies rows and breaks ties in the order
    facets    columns with values to choose
    order     initial order: a column, with `-` before it for descending order
    keys      key of the URL -> column that must equal its value
    about     a sentence for the page
    """

    name: str
    row_is: str
    rows_are: str
    relation: str
    row_id: str
    columns: tuple[str, ...]
    facets: tuple[str, ...]
    order: str
    keys: Mapping[str, str] = field(default_factory=dict)
    about: str = ""


RUNS = ListedTable(
    name="runs",
    row_is="run",
    rows_are="runs",
    relation="runs",
    row_id="run_id",
    columns=(
        "run_id",
        "family",
        "status",
        "source",
        "device_name",
        "batch_size",
        "precision",
        "optimizer",
        "parameters",
        "peak_memory_mib",
        "smact",
        "smocc",
        "drama",
        "step_time_ms",
        "power_w",
        "started_at",
    ),
    facets=("source", "family", "status", "device_name", "precision", "optimizer", "torch_version", "quality"),
    order="-started_at",
    keys={"job": "job_id"},
)
KERNELS = ListedTable(
    name="kernels",
    row_is="kernel",
    rows_are="kernels",
    relation="kernels",
    row_id="kernel_row",
    columns=(
        "run_id",
        "operator",
        "kernel",
        "phase",
        "dtype",
        "dims",
        "duration_us",
        "count",
        "blocks_per_sm",
        "warps_per_sm",
        "registers_per_thread",
        "shared_memory_bytes",
        "timing",
        "device_name",
        "source",
    ),
    facets=("source", "device_name", "phase", "timing", "dtype", "torch_version", "operator"),
    order="-duration_us",
    keys={"run": "run_id"},
    about="A row is a kernel that a run launched, or an operator; its duration is the median of one launch.",
)
COLLOCATIONS = ListedTable(
    name="collocations",
    row_is="member of a group",
    rows_are="members of groups",
    relation="collocations",
    row_id="member_row",
    columns=(
        "group_id",
        "member",
        "group_size",
        "model",
        "batch_size",
        "precision",
        "sharing",
        "status",
        "source",
        "device_name",
        "solo_step_ms",
        "shared_step_ms",
        "slowdown",
        "solo_memory_mib",
        "joint_memory_mib",
        "doubt",
        "run_id",
    ),
    facets=("source", "series", "sharing", "group_size", "device_name", "status", "precision", "model"),
    order="group_id",
    keys={"group": "group_id", "run": "run_id"},
    about="A row is a job that shared a device with others; slowdown is its step beside them over its step alone.",
)

DATASETS = ListedTable(
    name="datasets",
    row_is="dataset",
    rows_are="datasets",
    relation=f"({_OF_RUNS} UNION ALL {_OF_KERNELS} UNION ALL {_OF_COLLOCATIONS}) AS datasets",
    row_id="dataset_row",
    columns=(
        "job_id",
        "table_name",
        "series",
        "source",
        "family",
        "device_name",
        "rows",
        "ok",
        "with_memory",
        "with_step_time",
        "with_smact",
        "with_drama",
        "first_at",
        "last_at",
    ),
    facets=("source", "table_name", "family", "device_name"),
    order="-rows",
    about="A dataset has the runs of one submission, or one imported table; with_… counts its labels.",
)
LISTINGS = {listing.name: listing for listing in (RUNS, KERNELS, COLLOCATIONS, DATASETS)}


@dataclass(frozen=True)
class Filters:
    """One state of a list. Raises `UsageError` for an invalid URL.

    listing  the table
    chosen   facet -> accepted values
    equal    key of the listing -> value that its column must have
    order    a column, with `-` before it for descending order; empty: the listing's own
    page     from 1
    """

    listing: ListedTable = RUNS
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    order: str = ""
    page: int = 1

    @classmethod
    def of(cls, query: Sequence[tuple[str, str]], listing: ListedTable = RUNS) -> Filters:
        """Return the state of a URL's query, as pairs."""
        chosen: dict[str, tuple[str, ...]] = {}
        equal: dict[str, str] = {}
        order, page = "", 1
        for name, value in query:
            if "\0" in value:
                raise UsageError(f"{name}: a value cannot hold a null character")
            if name in listing.facets:
                values = chosen.get(name, ())
                chosen[name] = values if value in values else (*values, value)
            elif name in listing.keys:
                equal[name] = value
            elif name == "order":
                if value.removeprefix("-") not in listing.columns:
                    raise unknown_name("order", value, listing.columns)
                order = "" if value == listing.order else value
            elif name == "page":
                if not (value.isascii() and value.isdigit() and 1 <= int(value) <= _MOST_PAGES):
                    raise UsageError(f"page must be from 1 to {_MOST_PAGES:,}, got {value!r}")
                page = int(value)
            else:
                raise unknown_name("key", name, (*listing.facets, *listing.keys, "order", "page"))
        return cls(listing, chosen, {name: value for name, value in equal.items() if value}, order, page)

    def query(self) -> str:
        """Return the URL's query; equal states have equal ones."""
        pairs = [(facet, value) for facet in self.listing.facets for value in sorted(self.chosen.get(facet, ()))]
        pairs += sorted(self.equal.items())
        pairs += [("order", self.order)] if self.order else []
        pairs += [("page", str(self.page))] if self.page != 1 else []
        return urlencode(pairs)

    def toggled(self, facet: str, value: str) -> Filters:
        """Return the state with a facet's value added, or removed if it was chosen."""
        values = self.chosen.get(facet, ())
        changed = tuple(entry for entry in values if entry != value) if value in values else (*values, value)
        chosen = {name: accepted for name, accepted in {**self.chosen, facet: changed}.items() if accepted}
        return dataclasses.replace(self, chosen=chosen, page=1)

    def ordered_by(self, column: str) -> Filters:
        """Return the state ordered by a column, in reverse if it is ordered by it already."""
        order = column if self.effective_order == f"-{column}" else f"-{column}"
        return dataclasses.replace(self, order="" if order == self.listing.order else order, page=1)

    def at_page(self, page: int) -> Filters:
        """Return the state at another page."""
        return dataclasses.replace(self, page=page)

    def where(self, without: str | None = None) -> str:
        """Return the condition of the chosen values, except those of the facet `without`; empty without choices."""
        parts = [_condition(facet, values) for facet, values in self.chosen.items() if facet != without and values]
        parts += [f"{self.listing.keys[name]} = {sql_text(value)}" for name, value in self.equal.items()]
        return f" WHERE {' AND '.join(parts)}" if parts else ""

    @property
    def effective_order(self) -> str:
        """Return the order of the URL, or the listing's."""
        return self.order or self.listing.order

    def rows_sql(self) -> str:
        """Return the query of this state's rows, on all pages, with ties in order of the row id and NULLs last."""
        columns = ", ".join(self.listing.columns)
        direction = "DESC" if self.effective_order.startswith("-") else "ASC"
        order = f"{self.effective_order.removeprefix('-')} {direction} NULLS LAST, {self.listing.row_id}"
        return f"SELECT {columns} FROM {self.listing.relation}{self.where()} ORDER BY {order}"

    def page_sql(self) -> str:
        """Return the query of this page's rows."""
        return f"{self.rows_sql()} LIMIT {ROWS_OF_A_PAGE} OFFSET {ROWS_OF_A_PAGE * (self.page - 1)}"

    def total_sql(self) -> str:
        """Return the query of the number of rows, and of each column's number of values."""
        counts = ", ".join(f"count({name})" for name in self.listing.columns)
        return f"SELECT count(*), {counts} FROM {self.listing.relation}{self.where()}"

    def counts_sql(self) -> str:
        """Return the query of facets, values and counts; each facet ignores its own choice."""
        free = [facet for facet in self.listing.facets if facet not in self.chosen]
        parts = []
        if free:
            columns = ", ".join(free)
            case = " ".join(f"WHEN grouping({facet}) = 0 THEN {sql_text(facet)}" for facet in free)
            value = " ".join(f"WHEN grouping({facet}) = 0 THEN {facet}::VARCHAR" for facet in free)
            sets = ", ".join(f"({facet})" for facet in free)
            parts.append(
                f"SELECT CASE {case} END AS facet, CASE {value} END AS value, count(*) AS count FROM "
                f"(SELECT {columns} FROM {self.listing.relation}{self.where()}) GROUP BY GROUPING SETS ({sets})"
            )
        parts += [
            f"SELECT {sql_text(facet)} AS facet, {facet}::VARCHAR AS value, count(*) AS count "
            f"FROM {self.listing.relation}{self.where(facet)} GROUP BY 2"
            for facet in self.chosen
        ]
        return " UNION ALL ".join(parts) + " ORDER BY facet, count DESC, value"


def _condition(facet: str, values: Sequence[str]) -> str:
    named = [sql_text(value) for value in values if value != NULL]
    parts = [f"{facet} IN ({', '.join(named)})"] if named else []
    parts += [f"{facet} IS NULL"] if NULL in values else []
    return parts[0] if len(parts) == 1 else f"({' OR '.join(parts)})"


OUT_OF_MEMORY = "OOM"
# Rows that `farm.sampling.selection` learns from: with a label or out of device memory, and without doubt.
USABLE = (
    "group_id IS NULL AND quality IS DISTINCT FROM 'untrusted' AND error_type IS DISTINCT FROM 'doubt' AND "
    "((status = 'ok' AND peak_memory_mib > 0) OR (status = 'oom' AND oom_kind = 'device'))"
)
COUNTED = "count(*), count(*) FILTER (tonight)"
_GIB = 1024.0  # MiB
_FINE_GIB = (1.0, 2.0, 4.0, 8.0)  # edges within the published 8-GB bin that holds most rows
_MOST_WIDE_BINS = 18
Execute = Callable[[str], Sequence[tuple[Any, ...]]]  # SQL -> its rows


def memory_grid(execute: Execute, relation: str, families: Sequence[str]) -> Grid:
    """Return the memory grid: fine bins up to 8 GiB, then 8-GiB ones up to the card's memory, then out of memory.

    Args:
        execute: Runs a query.
        relation: Rows with `family`, `status`, `usable`, `tonight`, `peak_memory_mib` and `device_memory_mib`.
        families: The grid's rows.
    """
    ((top_mib,),) = execute(
        "SELECT greatest(max(peak_memory_mib) FILTER (status = 'ok' AND isfinite(peak_memory_mib)), "
        f"max(device_memory_mib)) FROM {relation} WHERE usable"
    )
    width, top = 8.0, math.ceil((top_mib or 0.0) / _GIB)
    while (top - 8) / width > _MOST_WIDE_BINS:
        width *= 2
    edges = [0.0, *_FINE_GIB]
    while edges[-1] < top:
        edges.append(edges[-1] + width)
    columns = [f"{low:g}–{high:g}" for low, high in itertools.pairwise(edges)] + [OUT_OF_MEMORY]
    over = " + ".join(f"(peak_memory_mib >= {edge * _GIB!r})::INT" for edge in edges[1:-1])
    column = f"CASE WHEN status = 'oom' THEN {len(columns) - 1} ELSE {over} END"
    place = place_of_family(families)
    query = f"SELECT {place}, {column}, {COUNTED} FROM {relation} WHERE usable AND {place} >= 0 GROUP BY ALL"
    return filled_grid(execute, "peak memory [GiB]", families, columns, query)


def filled_grid(execute: Execute, name: str, rows: Sequence[str], columns: Sequence[str], query: str) -> Grid:
    """Return the grid of a query that selects (row index, column index, number of rows, rows of tonight)."""
    counts = [[0] * len(columns) for _ in rows]
    new = [[0] * len(columns) for _ in rows]
    for row, column, count, gain in execute(query):
        counts[row][column], new[row][column] = count, gain
    return Grid(
        name=name,
        rows=tuple(rows),
        columns=tuple(columns),
        counts=tuple(map(tuple, counts)),
        tonight=tuple(map(tuple, new)),
    )


def place_of_family(families: Sequence[str]) -> str:
    """Return the SQL of a row's place among the families, from 0; NULL for another family."""
    return f"list_position([{', '.join(map(sql_text, families))}]::VARCHAR[], family) - 1"
