"""Marks labels that no longer hold in an environment: the run, the label and the environment of its device.

Start reading at `write_marks`; the view `stale` shows them, and `learn.rows.data.load_rows` leaves such rows out while
the device is in that environment. No row is deleted: in the old environment the rows count again.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from warehouse.files.folder import DataFolder
from warehouse.files.layout import check_name, write_parquet
from warehouse.tables.schema import ENVIRONMENT, STALE_SCHEMA

if TYPE_CHECKING:
    import duckdb

    from warehouse.reading.connection import WarehouseConnection


_AS_THEY_ARE = ("run_id", "label", "device_name", "source", "shift", "said")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One label of one run.

    environment  columns of `warehouse.tables.schema.ENVIRONMENT` in which it is stale
    operators    operator families of the run that moved
    shift        median shift of the canaries that moved: relative, for ratios the difference; `said`: in words
    """

    run_id: str
    label: str
    operators: tuple[str, ...]
    device_name: str
    source: str
    environment: Mapping[str, str | None]
    shift: float | None
    said: str


def write_marks(folder: DataFolder, cycle: str, marks: Sequence[Mark], *, marked_at: datetime.datetime) -> Path:
    """Write the marks of one growth cycle durably, all or none, in place of its earlier ones.

    Equal calls write equal files. Raises `ValueError` if the cycle's name is not a valid file name.
    """
    folder.create()
    ordered = sorted(marks, key=lambda mark: (mark.run_id, mark.label))
    columns = {name: [getattr(mark, name) for mark in ordered] for name in _AS_THEY_ARE}
    columns["operators"] = [", ".join(mark.operators) for mark in ordered]
    columns |= {name: [mark.environment.get(name) for mark in ordered] for name in ENVIRONMENT}
    columns |= {"marked_at": [marked_at] * len(ordered), "cycle": [cycle] * len(ordered)}
    path = folder.stale / f"{check_name('cycle', cycle)}.parquet"
    write_parquet(path, pa.table(columns, schema=STALE_SCHEMA))
    return path


def stale_now(connection: duckdb.DuckDBPyConnection | WarehouseConnection, label: str) -> set[str]:
    """Return the run_ids of the rows whose `label` (a column of `runs`) is stale now.

    Now is the environment of the newest run that is ok on the same device with the same source; others may have ended
    before they could say what they ran in.
    """
    marks = connection.execute(
        f"SELECT run_id, device_name, source, {', '.join(ENVIRONMENT)} FROM stale WHERE label = ?", [label]
    ).fetchall()
    if not marks:
        return set()
    newest = connection.execute(
        f"""SELECT device_name, source, {", ".join(ENVIRONMENT)} FROM runs WHERE status = 'ok'
        QUALIFY row_number() OVER (
            PARTITION BY device_name, source ORDER BY coalesce(finished_at, started_at) DESC NULLS LAST, run_id DESC
        ) = 1"""
    ).fetchall()
    now = {tuple(row) for row in newest}
    return {run_id for run_id, *where in marks if tuple(where) in now}
