"""The warehouse: Arrow schemas, atomic Parquet writer, DuckDB views, compaction. Start reading at `tables/schema.py`.

Imports no sibling but `conf`, and never torch or Ray, so `query` and `status` start quickly.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warehouse.files.folder import DataFolder
    from warehouse.reading.connection import WarehouseConnection

__all__ = ["connect"]

if sys.argv[:1] == [
    "-m"
]:  # `python -m warehouse.query` puts the working folder first on the path: before any other import
    runpy.run_path(str(Path(__file__).parents[1] / "conf" / "cli" / "own_packages.py"), run_name="__main__")


def connect(
    data: str | os.PathLike[str] | DataFolder | None = None, *, snapshot: str | None = None
) -> WarehouseConnection:
    """Open the warehouse, or one of its snapshots, read-only.

    The connection behaves as DuckDB's own and sees the views `runs`, `telemetry`, ... Close it when done. DuckDB is
    imported on the first call.

    Args:
        data: The data folder; None is `$GPUFARM_DATA`, else `./data`.
        snapshot: Name of one of the folder's snapshots, whose rows never change.

    Returns:
        A DuckDB connection that cannot write; `warehouse.reading.connection.connect` says how that is ensured.

    Raises:
        UsageError: There is no such folder or snapshot, a file of the snapshot has changed, or a file that other files
            were merged into is missing.
    """
    from conf.cli.commands import naming_the_extra

    with naming_the_extra():
        from warehouse.reading.connection import connect as open_folder

    return open_folder(data, snapshot=snapshot)
