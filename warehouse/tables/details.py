"""Tables whose rows belong to a run, beside its telemetry: `kernels`, `ranks` and `collocations`; see `DETAILS`.

Landing, checks, export, publication and ingest treat them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from warehouse.tables.schema import (
    COLLOCATION_SCHEMA,
    KERNEL_PHASES,
    KERNEL_SCHEMA,
    KERNEL_TIMINGS,
    QUALITIES,
    RANK_OF_RUN,
    RANK_SCHEMA,
    RANK_STATUSES,
    SHARINGS,
    SOURCES,
    STATUSES,
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
        imported: Whether rows may be imported, which belong to no run.
    """

    schema: pa.Schema
    row_id: str
    letter: str
    count: str
    required: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]
    of_run: tuple[str, ...]
    row: str
    imported: bool = False


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
        imported=True,
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
    "collocations": Detail(
        schema=COLLOCATION_SCHEMA,
        row_id="member_row",
        letter="c",
        count="collocation_rows",
        required=("member_row", "group_id", "member", "group_size", "source", "sharing", "status"),
        words={"source": SOURCES, "sharing": SHARINGS, "status": STATUSES},
        of_run=("source", "device_name", "config", "batch_size", "precision"),
        row="member of a group",
        imported=True,
    ),
}
