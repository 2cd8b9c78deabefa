"""Merged files and their listings: which files of a partition count, and what is known of those that are gone.

Start reading at `Listing`. `warehouse.compact` writes what is read here, and explains why it is safe.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import UsageError
from warehouse.checksum import checksum_problem, recorded_checksum, write_sealed
from warehouse.damage import DamagedFile
from warehouse.damage import report as report_damage
from warehouse.folder import COMPRESSION, LISTING_SCHEMA, DataFolder, replacing, sync, write_parquet

MERGED_PREFIX = "merged-"
SOURCES = b"gpufarm_sources"  # in a merged file's metadata: the files whose rows it has, as JSON
_OWN_NAME = re.compile(r"merged-\d{8}T\d{6}-[0-9a-f]{12}\.parquet")
_PUBLISHED_AT = b"gpufarm_published_at"
_CHECKSUM = b"gpufarm_merged_checksum"
_ROWS = b"gpufarm_merged_rows"

OnDamage = Callable[[DamagedFile], None]


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
        """Read a listing. Raises `ValueError` where it is damaged or none, `OSError` where it cannot be read."""
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
            raise ValueError(f"it is no listing: {str(error).splitlines()[0]}") from error

    def write(self) -> None:
        """Atomically: the moment at which `merged` begins to count and `hidden` ends to."""
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
    """A name that no file had or will have."""
    return f"{MERGED_PREFIX}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}.parquet"


def is_merged_name(name: str) -> bool:
    return name.startswith(MERGED_PREFIX)


def has_own_name(path: Path) -> bool:
    """Whether the name of a merged file or listing is one that `new_merged_name` gives."""
    return _OWN_NAME.fullmatch(path.name) is not None


def is_own_merge(path: Path) -> bool:
    """Whether a file was written by `land_merged`, by its name, checksum and metadata. Raises `OSError`."""
    if not has_own_name(path) or checksum_problem(path) is not None or recorded_checksum(path) is None:
        return False
    try:
        return SOURCES in (pq.read_metadata(path).metadata or {})
    except pa.ArrowException:
        return False


def sources_of(merged: Path) -> Mapping[str, Any]:
    """The files that a merged file was made of, as its footer names them; none for a file of an older version.

    Raises `pa.ArrowException`, `OSError` or `ValueError` where the footer cannot be read.
    """
    return json.loads((pq.read_metadata(merged).metadata or {}).get(SOURCES, b"{}"))


def listing_file(folder: DataFolder, kind: str, merged_name: str) -> Path:
    """Where the listing of a merged file is: the same name, so its existence answers whether the file counts."""
    return folder.listings(kind) / merged_name


def read_listings(folder: DataFolder, kind: str, on_damage: OnDamage | None = None) -> list[Listing]:
    """All listings, oldest first.

    A damaged one is read off its merged file, which names the files it replaces. Where that fails too, `on_damage` is
    called (default: a line on stderr), and the merged file does not count.
    """
    listings = []
    for path in folder.listings(kind).glob(f"{MERGED_PREFIX}*.parquet"):
        try:
            listings.append(Listing.read(path))
        except FileNotFoundError:  # its merged file was merged once more, and deleted, since the glob
            continue
        except (ValueError, OSError) as error:
            recovered = recovered_listing(folder, kind, path)
            if recovered is not None:
                listings.append(recovered)
                continue
            damaged = DamagedFile(path, str(error))
            if on_damage is None:
                report_damage([damaged])
            else:
                on_damage(damaged)
    return sorted(listings, key=lambda listing: (listing.published_at_s, listing.merged))


def recovered_listing(folder: DataFolder, kind: str, file: Path) -> Listing | None:
    """What a damaged listing said, from the merged file of the same name; None if that is not whole, or too old.

    A listing is written whole, so a damaged one was there: its merged file counted.
    """
    candidates = list((folder.root / kind).glob(f"family=*/{file.name}"))
    if len(candidates) != 1:
        return None
    (path,) = candidates
    try:
        if checksum_problem(path) is not None:
            return None
        metadata = pq.read_metadata(path)
        sources = json.loads((metadata.metadata or {})[SOURCES])
        return Listing(
            file=file,
            merged=f"{path.parent.name}/{path.name}",
            hidden=tuple(sources),
            published_at_s=path.stat().st_mtime,
            checksum=recorded_checksum(path),
            rows=metadata.num_rows,
        )
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError):
        return None


def lost_merged_files(folder: DataFolder, kind: str, on_damage: OnDamage | None = None) -> list[Listing]:
    """Listings whose merged file is gone though no other listing replaces it: its rows are lost.

    Safe beside a compaction, which removes the listing of a merged file before it forgets what replaced that file.
    """
    lost = _listed_and_gone(folder, kind, on_damage)
    if lost:  # a second look: a compaction may have been between the listings and their files
        again = {listing.file for listing in _listed_and_gone(folder, kind, on_damage)}
        lost = [listing for listing in lost if listing.file in again]
    return lost


def _listed_and_gone(folder: DataFolder, kind: str, on_damage: OnDamage | None) -> list[Listing]:
    listings = read_listings(folder, kind, on_damage)
    root = folder.root / kind
    hidden = {name for listing in listings for name in listing.hidden}
    gone = [listing for listing in listings if listing.merged not in hidden and not (root / listing.merged).exists()]
    if not gone:
        return []
    # A compaction of an older version removed the listing last: what merged the file says so itself.
    replaced: set[str] = set()
    for listing in listings:
        try:
            replaced.update(sources_of(root / listing.merged))
        except (pa.ArrowException, OSError, ValueError):
            continue
    return [listing for listing in gone if listing.merged not in replaced]


def lost_line(folder: DataFolder, kind: str, listing: Listing) -> str:
    """What to tell of a merged file that is gone."""
    rows = "its rows are" if listing.rows is None else f"its {listing.rows:,} rows are"
    return (
        f"{folder.root / kind / listing.merged} is gone, though {listing.file} lists it: {rows} missing; "
        f"put the file back, or run `python -m farm.doctor repair=true` to measure its runs again"
    )


def refuse_lost(folder: DataFolder) -> None:
    """Raise `UsageError` for each merged file that is listed and gone: without it, counts would be silently too low."""
    lines = [lost_line(folder, kind, listing) for kind in ("runs", "telemetry")
             for listing in lost_merged_files(folder, kind)]  # fmt: skip
    if lines:
        raise UsageError("; ".join(lines))


def counting_files(folder: DataFolder, kind: str, family: str, listings: Sequence[Listing] | None = None) -> list[Path]:
    """The files of a partition whose rows the views show, sorted: merged ones that are listed, others not hidden.

    `listings` spares reading them for each family; they have to be read before.
    """
    # The listings before the files, as the views do: a merged file that is found listed is there.
    hidden: set[str] = set()
    listed: set[str] = set()
    for listing in read_listings(folder, kind) if listings is None else listings:
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


def land_merged(
    folder: DataFolder,
    kind: str,
    target: Path,
    table: pa.Table,
    sources: Sequence[str],
    now_s: float,
    **options: int | str,
) -> None:
    """Write the merged file `target`, then its listing, which hides `sources` from the same moment on.

    The file names its sources too, so a damaged listing can be read off it.
    """
    table = table.replace_schema_metadata({SOURCES: json.dumps(dict.fromkeys(sources)).encode()})
    with replacing(target) as temporary:
        checksum = write_sealed(table, temporary, **COMPRESSION, **options)
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


def land_batch(folder: DataFolder, kind: str, family: str, table: pa.Table) -> Path:
    """Make rows durable in one merged file of their own; its path. Readers see all of them or none.

    They count from the moment of the listing. A kill before it leaves a file that does not count. That none of the
    rows is there already is the caller's business.
    """
    partition = folder.partition(kind, family)
    if not partition.exists():
        partition.mkdir(parents=True, exist_ok=True)
        sync(partition.parent)
    target = partition / new_merged_name()
    land_merged(folder, kind, target, table, (), time.time())
    return target
