"""Verifies one Parquet file: by its checksum, or in full where an older version wrote it.

Start reading at `file_problem`.
"""

from __future__ import annotations

from pathlib import Path

from warehouse.checksum import verify
from warehouse.damage import damage_of
from warehouse.plain_file import NoPlainFile


def file_problem(path: Path) -> tuple[bool, str | None]:
    """Return whether a Parquet file carries a checksum, and what is wrong with it; one without is decoded in full.

    Whatever is no plain file has a problem. Raises `FileNotFoundError` for a file that is gone, other `OSError` for one
    that the disk does not give.
    """
    try:
        has_checksum, problem = verify(path)
    except NoPlainFile as error:
        return False, str(error)
    if problem is None:
        problem = damage_of(path, pages=not has_checksum)
    return has_checksum, problem
