"""Counts usable rows by cell of a grid. Start reading at `memory_grid`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from conf.plain_text import sql_text
from conf.reports.charts import Grid

OUT_OF_MEMORY = "OOM"
# Rows that `farm.sampling.coverage` learns from: with a label or out of device memory, and without doubt.
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
