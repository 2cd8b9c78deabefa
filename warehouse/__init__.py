"""The warehouse: Arrow schemas, atomic Parquet writer, DuckDB views, compaction. Start reading at `schema.py`.

Imports no sibling but `conf`, and never torch or Ray, so that `query` and `status` answer at once.
"""

from __future__ import annotations

__all__ = ["connect"]


def connect(data=None):
    """Open the warehouse read-only and return a DuckDB connection; see `warehouse.views.connect`."""
    from warehouse.views import connect as _connect

    return _connect(data)
