"""Merged files and their listings: what each says, and how both are written.

Start reading at `Listing`. `warehouse.files.listings` reads those of a folder, `warehouse.files.believed` judges them,
and `warehouse.files.counting` names the files that count. `warehouse.compact` explains why it is safe.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.files.json_file import parse_json
from conf.files.outputs import replacing, sync
from conf.plain_text import first_line
from warehouse.files.checksum import checksum_problem, recorded_checksum, write_sealed
from warehouse.files.layout import COMPRESSION, LISTING_SCHEMA, FolderLayout, write_parquet
from warehouse.files.plain_file import plain

MERGED_PREFIX = "merged-"
SOURCES = b"gpufarm_sources"  # in a merged file's metadata: the files whose rows it has, as JSON
_OWN_NAME = re.compile(r"merged-\d{8}T\d{6}-[0-9a-f]{12}\.parquet")
_PUBLISHED_AT = b"gpufarm_published_at"
_CHECKSUM = b"gpufarm_merged_checksum"
_ROWS = b"gpufarm_merged_rows"


@dataclass(frozen=True)
class Listing:
    """A merged file that counts, and the files it replaces. Paths are relative to `runs/` or `telemetry/`."""

    file: Path  # of the listing itself
    merged: str
    hidden: tuple[str, ...]  # still on disk, or were when the listing was written
    published_at_s: float  # seconds since the epoch
    checksum: str | None = None  # of the merged file; None in listings of older versions
    rows: int | None = None  # of the merged file

    @classmethod
    def read(cls, file: Path) -> Listing:
        """Read a listing. Raises `ValueError` if the file is damaged or no listing, `OSError` if it cannot be read."""
        problem = checksum_problem(file)
        if problem is not None:
            raise ValueError(problem)
        try:
            table = pq.ParquetFile(file).read()
            rows = table.to_pylist()
            (merged,) = (row["path"] for row in rows if not row["hidden"])
            metadata = table.schema.metadata
            return cls(
                file=file,
                merged=merged,
                hidden=tuple(row["path"] for row in rows if row["hidden"]),
                published_at_s=float(metadata[_PUBLISHED_AT]),
                checksum=metadata[_CHECKSUM].decode() if _CHECKSUM in metadata else None,
                rows=int(metadata[_ROWS]) if _ROWS in metadata else None,
            )
        except (pa.ArrowException, KeyError, TypeError) as error:
            raise ValueError(f"it is no listing: {first_line(error)}") from error

    def write(self) -> None:
        """Write the listing atomically; from this moment `merged` counts, and `hidden` no longer does."""
        table = pa.Table.from_arrays(
            [
                pa.array([self.merged, *self.hidden]),
                pa.array([False] + [True] * len(self.hidden)),
            ],
            schema=LISTING_SCHEMA,
        )
        metadata = {_PUBLISHED_AT: repr(self.published_at_s)}
        if self.checksum is not None:
            metadata[_CHECKSUM] = self.checksum
        if self.rows is not None:
            metadata[_ROWS] = str(self.rows)
        write_parquet(self.file, table.replace_schema_metadata(metadata))


def new_merged_name() -> str:
    """Return a unique name for a merged file."""
    return f"{MERGED_PREFIX}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}.parquet"


def is_merged_name(name: str) -> bool:
    return name.startswith(MERGED_PREFIX)


def has_own_name(path: Path) -> bool:
    """Return whether the name of a merged file or listing is of the form that `new_merged_name` gives."""
    return _OWN_NAME.fullmatch(path.name) is not None


def is_own_merge(path: Path) -> bool:
    """Return whether `land_merged` wrote a file, judged by name, checksum and metadata. Raises `OSError`."""
    if not has_own_name(path) or checksum_problem(path) is not None or recorded_checksum(path) is None:
        return False
    try:
        return SOURCES in (pq.read_metadata(plain(path)).metadata or {})
    except pa.ArrowException:
        return False


def sources_of(merged: Path) -> Mapping[str, Any]:
    """Return the sources of a merged file, as its footer names them; none for a file of an older version.

    Raises `pa.ArrowException`, `OSError` or `ValueError` where the footer cannot be read.
    """
    named: dict[str, Any] = parse_json((pq.read_metadata(plain(merged)).metadata or {}).get(SOURCES, b"{}"))
    return named


def listing_file(folder: FolderLayout, kind: str, merged_name: str) -> Path:
    """Return the path of a merged file's listing, which has the same name; the file counts if this path exists."""
    return folder.listings(kind) / merged_name


def land_merged(
    folder: FolderLayout,
    kind: str,
    target: Path,
    table: pa.Table,
    sources: Sequence[str],
    now_s: float,
    row_group_size: int | None = None,
) -> None:
    """Write the merged file `target`, then its listing, which hides `sources` from the same moment on.

    The file names its sources too, so a damaged listing can be read off it.
    """
    table = table.replace_schema_metadata({SOURCES: json.dumps(dict.fromkeys(sources)).encode()})
    with replacing(target) as temporary:
        checksum = write_sealed(table, temporary, row_group_size=row_group_size, **COMPRESSION)
    listing = Listing(
        file=listing_file(folder, kind, target.name),
        merged=f"{target.parent.name}/{target.name}",
        hidden=tuple(sources),
        published_at_s=now_s,
        checksum=checksum,
        rows=table.num_rows,
    )
    try:
        listing.write()
    except BaseException:
        if not listing.file.exists():  # the disk is full: nothing half-done stays
            target.unlink(missing_ok=True)
        raise


def land_batch(folder: FolderLayout, kind: str, family: str, table: pa.Table) -> Path:
    """Make rows durable in a new merged file and return its path. Readers see all of the rows or none.

    They count from the moment that the listing is written; a kill before leaves a file that does not count. The caller
    makes sure that none of the rows has landed before.
    """
    partition = folder.partition(kind, family)
    if not partition.exists():
        partition.mkdir(parents=True, exist_ok=True)
        sync(partition.parent)
    target = partition / new_merged_name()
    land_merged(folder, kind, target, table, (), time.time())
    return target
