"""The warehouse: Arrow schemas, atomic Parquet writer, DuckDB views, compaction. Start reading at `schema.py`.

Imports no sibling but `conf`, and never torch or Ray, so that `query` and `status` answer at once.
"""

from __future__ import annotations

__all__ = ["connect"]


def connect(data=None, *, snapshot=None):
    """Open the warehouse, or one of its snapshots, read-only: a DuckDB connection; see `warehouse.connection`."""
    from warehouse.connection import connect as _connect

    return _connect(data, snapshot=snapshot)
