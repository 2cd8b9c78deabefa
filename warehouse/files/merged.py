"""Merged files and their listings: contents, writing and reading.

Start reading at `Listing` and `read_listings`; a damaged listing is recovered from the merged file of the same name.
`held_ids` finds runs in merged files, `holders` the files that replaced a merged file.
`warehouse.files.counting` names the files that count; `warehouse.files.compaction` explains why merging is safe.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import first_line, one_line
from conf.files.outputs import parse_json, replacing, sync
from warehouse.files.damage import DamagedFile, warn_once
from warehouse.files.folder import (
    COMPRESSION,
    LISTING_SCHEMA,
    DataFolder,
    checksum_problem,
    recorded_checksum,
    write_parquet,
    write_sealed,
)
from warehouse.files.plain_file import forget_all, is_passing, names_in, plain, remember
from warehouse.tables.schema import MERGED_PREFIX

SOURCES = b"gpufarm_sources"  # key of a merged file's metadata: its source files, as JSON
_OWN_NAME = re.compile(r"merged-\d{8}T\d{6}-[0-9a-f]{12}\.parquet")
_PUBLISHED_AT = b"gpufarm_published_at"
_CHECKSUM = b"gpufarm_merged_checksum"
_ROWS = b"gpufarm_merged_rows"
PARTITION = "family="
SNAPSHOT_LISTING = "snapshot.parquet"  # lists all merged files of a snapshot
T = TypeVar("T")
_REMEMBERED_IDS = 3_200_000  # some 100 bytes each
_group_memory: dict[Hashable, frozenset[str]] = {}  # ids of row groups; a compaction writes 100,000 rows into each


@dataclass(frozen=True)
class Listing:
    """A merged file that counts, and the files it replaces. Paths are relative to `runs/` or `telemetry/`."""

    file: Path  # the listing's own file
    merged: str
    hidden: tuple[str, ...]  # in the merged file's partition; on disk, at least when the listing was written
    published_at_s: float  # seconds since the epoch
    checksum: str | None = None  # the merged file's; None in listings of older versions
    rows: int | None = None  # the merged file's
    foreign: tuple[str, ...] = ()  # other names, which it hides from plain DuckDB clients until `write` drops them
    is_whole: bool = field(default=True, compare=False)  # read from `file`; else from the merged file or a snapshot's

    @functools.cached_property
    def path(self) -> Path:
        """The merged file."""
        return self.file.parents[2] / self.file.parent.name / self.merged

    @classmethod
    def read(cls, file: Path) -> Listing:
        """Read a listing. Raises `ValueError` for a damaged file or none, `OSError` if it cannot be read."""
        problem = checksum_problem(file)
        if problem is not None:
            raise ValueError(problem)
        try:
            table = pq.ParquetFile(file).read()
            rows = table.to_pylist()
            if not all(isinstance(row["path"], str) for row in rows):
                raise TypeError("a path is not a string")
            (merged,) = (row["path"] for row in rows if not row["hidden"])
            named = [row["path"] for row in rows if row["hidden"]]
            hidden = _in_partition_of(merged, named)
            metadata = table.schema.metadata
            return cls(
                file=file,
                merged=merged,
                hidden=hidden,
                published_at_s=float(metadata[_PUBLISHED_AT]),
                checksum=metadata[_CHECKSUM].decode() if _CHECKSUM in metadata else None,
                rows=int(metadata[_ROWS]) if _ROWS in metadata else None,
                foreign=tuple(sorted(set(named).difference(hidden))),
            )
        except (pa.ArrowException, KeyError, TypeError) as error:
            raise ValueError(f"it is not a listing: {first_line(error)}") from error

    def write(self) -> None:
        """Write the listing atomically; from this moment `merged` counts and `hidden` does not."""
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


def _in_partition_of(merged: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the Parquet files in a merged file's partition: it replaces no others, whatever it or its listing says."""
    partition = os.path.dirname(merged)
    return tuple(name for name in names if os.path.dirname(name) == partition and name.endswith(".parquet"))


def new_merged_name() -> str:
    """Return a unique name for a merged file."""
    return f"{MERGED_PREFIX}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}.parquet"


def is_merged_name(name: str) -> bool:
    return name.startswith(MERGED_PREFIX)


def has_own_name(path: Path) -> bool:
    """Return whether the name of a merged file or listing has the form that `new_merged_name` makes."""
    return _OWN_NAME.fullmatch(path.name) is not None


def sources_of(merged: Path) -> tuple[str, ...]:
    """Return the sources of a merged file, from its footer.

    Raises `KeyError` for a file of an older version, and `pa.ArrowException`, `OSError` or `ValueError` if the footer
    cannot be read.
    """
    return tuple(map(str, parse_json((pq.read_metadata(plain(merged)).metadata or {})[SOURCES])))


def listing_file(folder: DataFolder, kind: str, merged_name: str) -> Path:
    """Return the path of a merged file's listing, which has the same name; the file counts if this path exists."""
    return folder.listings(kind) / merged_name


def land_merged(
    folder: DataFolder,
    kind: str,
    target: Path,
    table: pa.Table,
    sources: Sequence[str],
    now_s: float,
    row_group_size: int | None = None,
) -> None:
    """Write the merged file `target`, then its listing, which hides `sources` from the same moment on.

    The file names its sources too, so a damaged listing can be recovered from it.
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
        if not listing.file.exists():  # the disk is full: leave no partial result
            target.unlink(missing_ok=True)
        raise


def holders(listing: Listing, listings: Sequence[Listing]) -> Iterator[Listing]:
    """Yield a listing, then those whose merged files replaced its merged file, directly or in several merges.

    Each of these merged files holds the rows that the listing hides, so one that is intact speaks for all.
    """
    chain = [listing]
    for holder in chain:
        yield holder
        chain += [other for other in listings if holder.merged in other.hidden and other not in chain]


def land_batch(folder: DataFolder, kind: str, family: str, table: pa.Table) -> Path:
    """Make rows durable in a new merged file and return its path. Readers see all of the rows or none.

    They count once the listing is written; a kill before that leaves a file that does not count. The caller ensures
    that none of the rows has landed before.
    """
    partition = folder.partition(kind, family)
    if not partition.exists():
        partition.mkdir(parents=True, exist_ok=True)
        sync(partition.parent)
    target = partition / new_merged_name()
    land_merged(folder, kind, target, table, (), time.time())
    return target


@dataclass(frozen=True)
class DamagedListing(DamagedFile):
    """A damaged listing that cannot be recovered from its merged file either."""

    merged: Path | None = None  # the merged file of its name, if it exists
    error: OSError | None = None  # a read error that may pass

    def line(self) -> str:
        """Return the file and the reason as commands print them."""
        return one_line(f"ignoring {self.path}, which is not a valid listing: {self.reason}")


OnDamage = Callable[[DamagedListing], None]


def read_listings(
    folder: DataFolder, kind: str, on_damage: OnDamage = lambda damaged: warn_once(damaged.path, damaged.line())
) -> list[Listing]:
    """Return the listings of `runs` or `telemetry`, oldest first. Each has the name of the merged file that it lists.

    A damaged one is recovered from its merged file, which names the files that it replaces; a line on stderr says so.
    If that fails too, `on_damage` is called (default: a line on stderr), and the merged file does not count. Of a
    snapshot, also a copied one, each merged file has a listing of its own here, though all are in one file.
    """
    while True:
        try:
            reads = _read_all(folder, kind)
            break
        except FileNotFoundError:  # a compaction removed it, or wrote listings in place of a snapshot's one
            continue
    for read in reads:
        if isinstance(read, DamagedListing):
            on_damage(read)
    listings = [read for read in reads if isinstance(read, Listing)]
    return sorted(listings, key=lambda listing: (listing.published_at_s, listing.merged))


def _read_all(folder: DataFolder, kind: str) -> list[Listing | DamagedListing]:
    """Return each listing or its damage. Raises `FileNotFoundError` for one that is gone since the folder was read."""
    names = names_in(folder.listings(kind))
    paths = [folder.listings(kind) / name for name in names if is_merged_name(name) and name.endswith(".parquet")]
    reads = [_read(folder, kind, path) for path in paths]
    if SNAPSHOT_LISTING in names:  # a merged file's own listing goes before: it may hide files
        reads += _read_snapshot(folder, kind, paths)
    return reads


def _read_snapshot(folder: DataFolder, kind: str, others: Sequence[Path]) -> Sequence[Listing | DamagedListing]:
    """Return a listing, which hides nothing, for each merged file of a snapshot without one among `others`.

    Raises `OSError` if it may pass.
    """
    path = folder.listings(kind) / SNAPSHOT_LISTING
    try:
        merged = remember(path, lambda: _listed_by_snapshot(path), "snapshot")
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, FileNotFoundError) or is_passing(error):
            raise
        return [DamagedListing(path, first_line(error), folder.root / kind)]
    files = {listing_file(folder, kind, os.path.basename(name)): name for name in merged}
    return [Listing(file, name, (), 0.0, is_whole=False) for file, name in files.items() if file not in others]


def _listed_by_snapshot(path: Path) -> list[str]:
    """Return the merged files of a snapshot's listing. Raises `ValueError` for one that no snapshot wrote."""
    problem = checksum_problem(path)
    if problem is not None:
        raise ValueError(problem)
    merged = [str(row["path"]) for row in pq.ParquetFile(path).read().to_pylist() if not row["hidden"]]
    for name in merged:
        if not name.startswith(PARTITION) or _OWN_NAME.fullmatch(name.partition("/")[2]) is None:
            raise ValueError(f"it names {name!r}, which is not a merged file")
    return merged


def recover_listing(file: Path, merged: Path) -> Listing | None:
    """Recover a listing from its merged file; None if that is damaged, too old to contain it, or of another name.

    Listings are written atomically, so a damaged one was once complete: its merged file counted. Raises `OSError` if
    the merged file cannot be read now.
    """
    try:
        if not has_own_name(merged) or checksum_problem(merged) is not None:
            return None
        name = f"{merged.parent.name}/{merged.name}"
        return Listing(
            file=file,
            merged=name,
            hidden=_in_partition_of(name, sources_of(merged)),
            published_at_s=merged.stat().st_mtime,
            checksum=recorded_checksum(merged),
            rows=pq.read_metadata(merged).num_rows,
            is_whole=False,
        )
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        if is_passing(error):
            raise
        return None


def _read(folder: DataFolder, kind: str, path: Path) -> Listing | DamagedListing:
    """Return the listing, from its merged file if need be, or the damage. Raises `FileNotFoundError`."""
    if not has_own_name(path):
        return DamagedListing(path, "compaction creates no file of this name")
    passing = None
    try:
        content = remember(path, lambda: _content(path), "listing")
    except FileNotFoundError:
        raise
    except OSError as error:
        content, passing = first_line(error), error if is_passing(error) else None
    if isinstance(content, Listing):
        partition, _, name = content.merged.partition("/")
        if name == path.name and partition.startswith(PARTITION):
            return content
        return DamagedListing(path, f"it names {content.merged!r} instead of the merged file with its own name")
    root = folder.root / kind
    places = [root / partition / path.name for partition in names_in(root) if partition.startswith(PARTITION)]
    merged = [place for place in places if os.path.lexists(place)]
    if not merged:
        return DamagedListing(path, content, error=passing)
    recovered = None
    try:
        if len(merged) == 1:
            recovered = remember(merged[0], lambda: recover_listing(path, merged[0]), "listing")
    except OSError as error:  # includes a broken link, and a file that is gone now
        passing = error if is_passing(error) else passing
    if recovered is None:
        return DamagedListing(path, content, merged[0], passing)
    warn_once(path, f"{path}: this listing is damaged ({content}): reading its content from {merged[0]}")
    return recovered


def _content(path: Path) -> Listing | str:
    """Return the listing, or the problem of its content. Raises `OSError` as opening does."""
    try:
        return Listing.read(path)
    except (ValueError, pa.ArrowException) as error:
        return str(error)


def held_ids(partition: Path, merged: Iterable[str], run_ids: Iterable[str]) -> set[str]:
    """Return those of `run_ids` that one of the partition's merged files holds, by their names.

    Only row groups whose statistics do not rule the runs out are read. A missing or damaged file holds no runs; damage
    is reported elsewhere. Raises `OSError` if a file cannot be read now.
    """
    wanted = sorted(run_id for run_id in run_ids if run_id is not None)  # a damaged file may have nulls
    held: set[str] = set()
    for name in merged if wanted else ():
        with contextlib.suppress(FileNotFoundError):
            for group, (least, most) in enumerate(id_ranges(partition / name)):
                within = wanted[bisect.bisect_left(wanted, least) : bisect.bisect_right(wanted, most)]
                if within:
                    held |= group_ids(partition / name, group).intersection(within)
    return held


def id_ranges(path: Path) -> list[tuple[str, str]]:
    """Return (least, greatest) run_id of each row group; none for a damaged file. Raises as `read_intact`."""

    def read() -> list[tuple[str, str]]:
        metadata = pq.read_metadata(plain(path))
        column = metadata.schema.names.index("run_id")
        ranges = []
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(column).statistics
            known = statistics is not None and statistics.has_min_max and isinstance(statistics.min, str)
            ranges.append((statistics.min, statistics.max) if known else ("", "\U0010ffff"))
        return ranges

    return read_intact(path, lambda: remember(path, read, "ranges"), [])


def group_ids(path: Path, group: int) -> frozenset[str]:
    def read() -> frozenset[str]:
        if sum(map(len, list(_group_memory.values()))) > _REMEMBERED_IDS:
            forget_all(_group_memory)
        file = pq.ParquetFile(plain(path), read_dictionary=["run_id"])
        return frozenset(file.read_row_group(group, columns=["run_id"]).column("run_id").unique().to_pylist())

    return read_intact(path, lambda: remember(path, read, group, _group_memory), frozenset())


def read_intact(path: Path, read: Callable[[], T], nothing: T) -> T:
    """Return the result of `read`; `nothing` for a damaged file.

    Raises `FileNotFoundError` if there is no file, another `OSError`, with its path, if it cannot be read now.
    """
    try:
        return read()
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # includes a link to itself
        if isinstance(error, OSError) and is_passing(error):
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        return nothing
