"""Lands the pairs of published files in `collocations`, with the figures of their jobs alone.

Start reading at `land_groups`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from conf.errors import UsageError
from warehouse.connection import connect
from warehouse.folder import DataFolder
from warehouse.imported_rows import UNKNOWN_FAMILY, ImportedFile, run_ids
from warehouse.merged import land_batch
from warehouse.published_groups import Member, group_members
from warehouse.schema import COLLOCATION_SCHEMA
from warehouse.writer import detail_table


def land_groups(
    folder: DataFolder, source: str, files: Sequence[ImportedFile], device_name: str | None
) -> list[tuple[ImportedFile, list[Member], int]]:
    """Land those pairs that the folder lacks, in one batch a file; call it once the runs have landed.

    Returns each file that has pairs, with their members and how many of these are new. Raises `UsageError` for pairs
    of jobs of which none has figures alone.
    """
    with_pairs = [file for file in files if file.pairs]
    if not with_pairs:
        return []
    alone, known = _alone_and_known(folder, source)
    landed = []
    for file in with_pairs:
        members = group_members(source, file.pairs, alone, device_name)
        if not any(member.columns.get("solo_run_id") for member in members):
            raise UsageError(
                f"path={file.path}: figures of these jobs alone are in no file of the path, nor in data={folder.root}; "
                f"ingest the file of jobs alone first, or name the folder with both"
            )
        new = [member.columns for member in members if member.columns["member_row"] not in known]
        known |= {columns["member_row"] for columns in new}
        if new:
            (batch,) = run_ids(source, ["\n".join(columns["member_row"] for columns in new)])
            land_batch(folder, "collocations", UNKNOWN_FAMILY, _table(new, batch))
        landed.append((file, members, len(new)))
    return landed


def _table(rows: Sequence[dict[str, Any]], batch: str) -> pa.Table:
    fields = [field for field in COLLOCATION_SCHEMA if field.name != "run_id"]
    return detail_table("collocations", pa.Table.from_pylist(list(rows), schema=pa.schema(fields)), {"run_id": batch})


def _alone_and_known(folder: DataFolder, source: str) -> tuple[list[dict[str, Any]], set[str]]:
    with contextlib.closing(connect(folder)) as connection:
        runs = connection.sql(
            "SELECT run_id, status, origin, peak_memory_mib, gpu_util, step_time_ms FROM runs "
            f"WHERE source = 'imported' AND job_id = 'import-{source}' AND origin IS NOT NULL ORDER BY run_id"
        ).to_arrow_table()
        rows = connection.execute("SELECT member_row FROM collocations WHERE source = 'imported'").fetchall()
    return runs.to_pylist(), {member_row for (member_row,) in rows}
