"""Merged files and their listings: which files of a partition count, and which merged file holds a run.

Start reading at `Listing`. `warehouse.compact` writes what is read here, and explains why it is safe.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from warehouse.folder import COMPRESSION, LISTING_SCHEMA, DataFolder, replacing, sync, write_parquet

MERGED_PREFIX = "merged-"
_PUBLISHED_AT = b"gpufarm_published_at"


@dataclass(frozen=True)
class Listing:
    """A merged file that counts, and the files it replaces. Paths are relative to `runs/` or `telemetry/`."""

    file: Path  # of the listing itself
    merged: str
    hidden: tuple[str, ...]  # still on disk, or were when the listing was written
    published_at_s: float  # seconds since the epoch

    @classmethod
    def read(cls, file: Path) -> Listing:
        table = pq.ParquetFile(file).read()
        rows = table.to_pylist()
        (merged,) = (row["path"] for row in rows if not row["hidden"])
        return cls(
            file=file,
            merged=merged,
            hidden=tuple(row["path"] for row in rows if row["hidden"]),
            published_at_s=float(table.schema.metadata[_PUBLISHED_AT]),
        )

    def write(self) -> None:
        """Atomically: the moment at which `merged` begins to count and `hidden` ends to."""
        table = pa.Table.from_arrays(
            [
                pa.array([self.merged, *self.hidden]),
                pa.array([False] + [True] * len(self.hidden)),
            ],
            schema=LISTING_SCHEMA,
        )
        write_parquet(self.file, table.replace_schema_metadata({_PUBLISHED_AT: repr(self.published_at_s)}))


def new_merged_name() -> str:
    """A name that no file had or will have."""
    return f"{MERGED_PREFIX}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}.parquet"


def is_merged_name(name: str) -> bool:
    return name.startswith(MERGED_PREFIX)


def listing_file(folder: DataFolder, kind: str, merged_name: str) -> Path:
    """Where the listing of a merged file is: the same name, so its existence answers whether the file counts."""
    return folder.listings(kind) / merged_name


def read_listings(folder: DataFolder, kind: str) -> list[Listing]:
    """All listings, oldest first."""
    found = [Listing.read(path) for path in folder.listings(kind).glob(f"{MERGED_PREFIX}*.parquet")]
    return sorted(found, key=lambda listing: (listing.published_at_s, listing.merged))


def counting_files(folder: DataFolder, kind: str, family: str) -> list[Path]:
    """The files of a partition whose rows the views show, sorted: merged ones that are listed, others not hidden."""
    # The listings before the files, as the views do: a merged file that is found listed is there.
    hidden: set[str] = set()
    listed: set[str] = set()
    for listing in read_listings(folder, kind):
        hidden.update(listing.hidden)
        listed.add(listing.merged)
    partition = folder.partition(kind, family)
    try:
        names = sorted(os.listdir(partition))  # as names: of 100,000 paths the sorting alone takes seconds
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        if not name.endswith(".parquet"):
            continue
        path = f"{partition.name}/{name}"
        if path not in hidden and (path in listed or not is_merged_name(name)):
            found.append(partition / name)
    return found


def land_batch(folder: DataFolder, kind: str, family: str, table: pa.Table) -> Path:
    """Make rows durable in one merged file of their own; its path. Readers see all of them or none.

    They count from the moment of the listing. A kill before it leaves a file that does not count, which a later
    compaction deletes. That none of the rows is there already is the caller's business.
    """
    partition = folder.partition(kind, family)
    if not partition.exists():
        partition.mkdir(parents=True, exist_ok=True)
        sync(partition.parent)
    target = partition / new_merged_name()
    with replacing(target) as temporary:
        pq.write_table(table, temporary, **COMPRESSION)
    name = f"{partition.name}/{target.name}"
    Listing(listing_file(folder, kind, target.name), merged=name, hidden=(), published_at_s=time.time()).write()
    return target


def has_landed(folder: DataFolder, family: str, run_id: str) -> bool:
    """Whether the run is durable, in a file of its own or merged."""
    if (folder.partition("runs", family) / f"{run_id}.parquet").exists():
        return True
    return merged_file_with(folder, "runs", family, run_id) is not None


def merged_file_with(folder: DataFolder, kind: str, family: str, run_id: str) -> Path | None:
    """The merged file that counts and holds `run_id`, or None."""
    for path in folder.partition(kind, family).glob(f"{MERGED_PREFIX}*.parquet"):
        if listing_file(folder, kind, path.name).exists():
            try:
                if _holds(pq.ParquetFile(path), run_id):
                    return path
            except FileNotFoundError:  # merged once more, and deleted, since the glob
                continue
    return None


def _holds(file: pq.ParquetFile, run_id: str) -> bool:
    column = file.schema_arrow.get_field_index("run_id")
    for group in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(group).column(column).statistics
        if statistics is not None and statistics.has_min_max and not statistics.min <= run_id <= statistics.max:
            continue
        values = file.read_row_group(group, columns=["run_id"]).column(0)
        if pc.index(values, pa.scalar(run_id)).as_py() >= 0:
            return True
    return False
