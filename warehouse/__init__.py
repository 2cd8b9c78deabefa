"""The warehouse: Arrow schemas, atomic Parquet writer, DuckDB views, compaction. Start reading at `schema.py`.

Imports no sibling but `conf`, and never torch or Ray, so that `query` and `status` answer at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warehouse.folder import DataFolder
    from warehouse.reader import WarehouseConnection

__all__ = ["connect"]


def connect(
    data: str | os.PathLike[str] | DataFolder | None = None, *, snapshot: str | None = None
) -> WarehouseConnection:
    """Open the warehouse, or one of its snapshots, read-only: a DuckDB connection; see `warehouse.connection`."""
    from warehouse.connection import connect as _connect

    return _connect(data, snapshot=snapshot)
