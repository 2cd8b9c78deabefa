"""Tables whose rows belong to a run, beside its telemetry: `kernels` and `ranks`. Start reading at `DETAILS`.

Landing, checks, export, publication and ingest treat them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from warehouse.schema import (
    KERNEL_PHASES,
    KERNEL_SCHEMA,
    KERNEL_TIMINGS,
    QUALITIES,
    RANK_OF_RUN,
    RANK_SCHEMA,
    RANK_STATUSES,
    SOURCES,
)


@dataclass(frozen=True, kw_only=True)
class Detail:
    """One such table.

    Args:
        schema: Its columns.
        row_id: Column with the id of each row, which begins with its run's.
        letter: Before the row's number in that id.
        count: Column of `runs` with the number of its rows.
        required: Columns that are never NULL, beside `run_id`.
        words: Column -> what it may hold.
        of_run: Columns that are the run's own.
        row: What one row is, in words.
    """

    schema: pa.Schema
    row_id: str
    letter: str
    count: str
    required: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]
    of_run: tuple[str, ...]
    row: str


DETAILS: Mapping[str, Detail] = {
    "kernels": Detail(
        schema=KERNEL_SCHEMA,
        row_id="kernel_row",
        letter="k",
        count="kernel_rows",
        required=("kernel_row", "source", "operator", "duration_us", "count", "timing"),
        words={"source": SOURCES, "phase": KERNEL_PHASES, "timing": KERNEL_TIMINGS},
        of_run=("source", "device_name", "torch_version", "cuda_version", "cudnn_version"),
        row="kernel",
    ),
    "ranks": Detail(
        schema=RANK_SCHEMA,
        row_id="rank_row",
        letter="r",
        count="ranks",
        required=("rank_row", "source", "rank", "status"),
        words={"source": SOURCES, "status": RANK_STATUSES, "quality": QUALITIES},
        of_run=RANK_OF_RUN,
        row="rank",
    ),
}
