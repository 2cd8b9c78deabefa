"""Merged files and their listings: what each says, and how both are written.

Start reading at `Listing`. `warehouse.catalogue` reads those of a folder and names the files that count;
`warehouse.compact` explains why it is safe.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conf.json_file import parse_json
from conf.outputs import replacing, sync
from conf.plain_text import first_line
from warehouse import damage
from warehouse.checksum import checksum_problem, recorded_checksum, write_sealed
from warehouse.layout import COMPRESSION, LISTING_SCHEMA, FolderLayout, write_parquet
from warehouse.plain_file import plain

MERGED_PREFIX = "merged-"
SOURCES = b"gpufarm_sources"  # in a merged file's metadata: names that it replaces beside its runs' own, as JSON
_OWN_NAME = re.compile(r"merged-\d{8}T\d{6}-[0-9a-f]{12}\.parquet")
_PUBLISHED_AT = b"gpufarm_published_at"
_CHECKSUM = b"gpufarm_merged_checksum"
_ROWS = b"gpufarm_merged_rows"
_HAS_EVERY_RUN = b"gpufarm_every_run"  # missing in listings of older versions, which forgot the files that are deleted


class Unreadable(Exception):
    """The rows of a file cannot be read; the message has the reason."""


@dataclass(frozen=True)
class Listing:
    """A merged file that counts, and the names that do not count because of it: `family=F/NAME.parquet`.

    These are the names of all its runs, whether there are such files or not, and of the merged files that it replaces.
    """

    file: Path  # of the listing itself
    merged: str
    hidden: frozenset[str]
    published_at_s: float  # seconds since the epoch
    checksum: str | None = None  # of the merged file; None in listings of older versions
    rows: int | None = None  # of the merged file
    is_current: bool = True  # False: the file has to be written anew, as an older version wrote it or it is damaged

    @classmethod
    def read(cls, file: Path) -> Listing:
        """Read a listing. Raises `ValueError` if the file is damaged or no listing, `OSError` if it cannot be read."""
        problem = checksum_problem(file) or damage.damage_of(file)
        if problem is not None:
            raise ValueError(problem)
        try:
            table = pq.ParquetFile(file).read()
            rows = table.to_pylist()
            (merged,) = (row["path"] for row in rows if not row["hidden"])
            metadata = table.schema.metadata
            listing = cls(
                file=file,
                merged=merged,
                hidden=frozenset(row["path"] for row in rows if row["hidden"]),
                published_at_s=float(metadata[_PUBLISHED_AT]),
                checksum=metadata[_CHECKSUM].decode() if _CHECKSUM in metadata else None,
                rows=int(metadata[_ROWS]) if _ROWS in metadata else None,
                is_current=_HAS_EVERY_RUN in metadata,
            )
        except (pa.ArrowException, KeyError, TypeError) as error:
            raise ValueError(f"it is no listing: {first_line(error)}") from error
        if Path(merged).name != file.name:
            raise ValueError(f"it names {merged!r} instead of the merged file with its own name")
        return listing

    @classmethod
    def of_merged(cls, file: Path, path: Path, published_at_s: float, *, verified: bool = True) -> Listing:
        """Return the listing `file` of a merged file, from its rows and footer. Raises `Unreadable` or `OSError`.

        With `verified`, the file's checksum must be right.
        """
        run_ids = run_ids_of(path, verified=verified)
        metadata = pq.read_metadata(path)
        try:
            sources = parse_json((metadata.metadata or {}).get(SOURCES, b"[]"))
            hidden = frozenset(sources) | names_of(path.parent.name, run_ids)
        except (ValueError, TypeError) as error:
            raise Unreadable(f"its footer is damaged: {first_line(error)}") from error
        merged = f"{path.parent.name}/{path.name}"
        return cls(file, merged, hidden, published_at_s, recorded_checksum(path), metadata.num_rows, is_current=False)

    def write(self) -> None:
        """Write the listing atomically; from this moment `merged` counts, and `hidden` no longer does."""
        names = sorted(self.hidden)
        columns = [pa.array([self.merged, *names]), pa.array([False] + [True] * len(names))]
        metadata = {_PUBLISHED_AT: repr(self.published_at_s), _HAS_EVERY_RUN: "true"}
        if self.checksum is not None:
            metadata[_CHECKSUM] = self.checksum
        if self.rows is not None:
            metadata[_ROWS] = str(self.rows)
        table = pa.Table.from_arrays(columns, schema=LISTING_SCHEMA)
        write_parquet(self.file, table.replace_schema_metadata(metadata))


def new_merged_name() -> str:
    """Return a unique name for a merged file."""
    return f"{MERGED_PREFIX}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}.parquet"


def is_merged_name(name: str) -> bool:
    return name.startswith(MERGED_PREFIX)


def is_own_merge(path: Path) -> bool:
    """Return whether `land_merged` wrote a file, judged by name, checksum and metadata. Raises `OSError`."""
    if _OWN_NAME.fullmatch(path.name) is None or checksum_problem(path) or recorded_checksum(path) is None:
        return False
    try:
        return SOURCES in (pq.read_metadata(plain(path)).metadata or {})
    except pa.ArrowException:
        return False


def run_ids_of(path: Path, *, verified: bool = True) -> set[str]:
    """Return the run_ids of a file, with `verified` of one whose checksum is right.

    Raises `Unreadable`, or `FileNotFoundError` if there is no file.
    """
    try:
        problem = checksum_problem(path) if verified else None
        if problem is not None:
            raise Unreadable(problem)
        file = pq.ParquetFile(plain(path), read_dictionary=["run_id"])
        return set(file.read(columns=["run_id"]).column(0).unique().to_pylist())
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise Unreadable(first_line(error)) from error


def names_of(partition: str, run_ids: Iterable[str]) -> frozenset[str]:
    """Return the names that the runs' own files have, below the folder of their kind."""
    return frozenset(f"{partition}/{run_id}.parquet" for run_id in run_ids)


def listing_file(folder: FolderLayout, kind: str, merged_name: str) -> Path:
    """Return the path of a merged file's listing, which has the same name; the file counts if this path exists."""
    return folder.listings(kind) / merged_name


def land_merged(
    folder: FolderLayout,
    kind: str,
    target: Path,
    table: pa.Table,
    replaced: Iterable[str],
    now_s: float,
    row_group_size: int | None = None,
) -> None:
    """Write the merged file `target`, then its listing, which hides its runs' own files and `replaced` from then on.

    The file names what its runs do not, so a damaged listing can be read off it.
    """
    runs = names_of(target.parent.name, table.column("run_id").unique().to_pylist())
    others = sorted(set(replaced) - runs)
    table = table.replace_schema_metadata({SOURCES: json.dumps(others).encode()})
    with replacing(target) as temporary:
        checksum = write_sealed(table, temporary, row_group_size=row_group_size, **COMPRESSION)
    file = listing_file(folder, kind, target.name)
    merged = f"{target.parent.name}/{target.name}"
    try:
        Listing(file, merged, runs.union(others), now_s, checksum, table.num_rows).write()
    except BaseException:
        if not file.exists():  # the disk is full: nothing half-done stays
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
