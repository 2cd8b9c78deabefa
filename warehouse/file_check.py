"""Verifies one Parquet file by its checksum, or in full if an older version wrote it without one.

Start reading at `file_problem`.
"""

from __future__ import annotations

from pathlib import Path

from warehouse.checksum import verify
from warehouse.damage import damage_of
from warehouse.plain_file import NoPlainFile


def file_problem(path: Path) -> tuple[bool, str | None]:
    """Return whether a Parquet file carries a checksum, and its problem or None; without checksum, decode it in full.

    Anything but a plain file has a problem. Raises `FileNotFoundError` if there is no file, another `OSError` if the
    disk cannot read it.
    """
    try:
        has_checksum, problem = verify(path)
    except NoPlainFile as error:
        return False, str(error)
    if problem is None:
        problem = damage_of(path, pages=not has_checksum)
    return has_checksum, problem
