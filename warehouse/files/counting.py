"""Merged files and their listings, and the files of a data folder whose rows count.

One rule, which the SQL views follow too: an intact listing is believed. A file counts if it is a listed merged file or
no merged one, and if no listing hides it. A listing hides nothing while neither its merged file nor one that replaced
that is there and intact. `warehouse.files.compaction` explains why merging is safe.

Start reading at `Listing` and `read_listings`; a damaged listing is recovered from the merged file of the same name.
`read_catalogue` and `counting_files` name the files that count; `counting_plan` is for queries, which also show each
run once and leave damaged files out. They cost a listing of the folders, and footers of merged files.

Deletion and repair need proof: `unproven_sources` reads checksums and content of the files that a listing hides, and
`settle_listings` repairs the listings that hide too much. Compaction, snapshots, `warehouse.check` and `farm.doctor`
use them.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem, first_line, one_line
from conf.files.outputs import parse_json, replacing, sync
from warehouse.files.folder import (
    COMPRESSION,
    LISTING_SCHEMA,
    DamagedFile,
    DataFolder,
    checksum_problem,
    damage_now,
    damage_of,
    recorded_checksum,
    report_damage,
    require_intact,
    set_aside,
    warn_once,
    write_parquet,
    write_sealed,
)
from warehouse.files.plain_file import (
    file_key,
    forget_all,
    is_out_of_descriptors,
    is_passing,
    names_in,
    plain,
    remember,
    remember_by,
)
from warehouse.tables.schema import MERGED_PREFIX, OF_RUNS

if TYPE_CHECKING:
    from warehouse.files.compaction import CompactionReport


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
        require_intact(file)
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
        known = {_PUBLISHED_AT: self.published_at_s, _CHECKSUM: self.checksum, _ROWS: self.rows}
        metadata = {name: str(value) for name, value in known.items() if value is not None}
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
    require_intact(path)
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


# ---- which files count

REDUNDANT = ""  # the reason when every run of a merged file is also in an intact file that counts
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)
_NO_FAMILY = "family=_"  # the partition of files without rows


@dataclass(frozen=True)
class Catalogue:
    """Which files of one of `KINDS` count; each is named `family=F/NAME`."""

    listed: frozenset[str]  # merged files that are there, which count unless another listing hides them
    hidden: frozenset[str]  # files that do not count, because a merged file replaces them
    gone: tuple[Listing, ...] = ()  # of merged files that are missing and that no other one replaced
    lost: tuple[str, ...] = ()  # a line for each unreadable listing: rows may be missing or duplicated

    @classmethod
    def of(cls, listings: Iterable[Listing], hiding: Iterable[Listing]) -> Catalogue:
        """Return the catalogue of the listings' merged files that are there; only listings of `hiding` hide files."""
        listed = frozenset(listing.merged for listing in listings if os.path.lexists(listing.path))
        return cls(listed, frozenset().union(*(listing.hidden for listing in hiding)))

    def merged_names(self, partition: Path) -> list[str]:
        """Return the names of a partition's merged files that count, sorted."""
        counting = self.listed - self.hidden
        return sorted(os.path.basename(name) for name in counting if os.path.dirname(name) == partition.name)

    def unmerged_names(self, partition: Path) -> list[str]:
        """Return the names of a partition's other files that count, sorted."""
        prefix = f"{partition.name}/"
        return [
            name
            for name in names_in(partition)
            if name.endswith(".parquet") and not is_merged_name(name) and prefix + name not in self.hidden
        ]


def refuse_losses(catalogues: Iterable[Catalogue]) -> None:
    """Raise `EnvironmentProblem` that names each lost merged file and listing: without these, counts are too low."""
    lines = [line for catalogue in catalogues for line in (*map(lost_line, catalogue.gone), *catalogue.lost)]
    if lines:
        raise EnvironmentProblem("; ".join(lines))


def lost_line(listing: Listing) -> str:
    """Describe a merged file that is gone."""
    rows = "its rows are" if listing.rows is None else f"its {listing.rows:,} rows are"
    return (
        f"{listing.path} is gone, though {listing.file} lists it: {rows} missing; "
        f"put the file back, or run `python -m farm.doctor repair=true` to measure its runs again"
    )


def is_damaged_merged(path: Path) -> bool:
    """Return whether a file is an unusable merged one; report it on stderr, once while it is unchanged."""
    reason = damage_now(lambda: _merged_damage(path)) if is_merged_name(path.name) else None
    if reason is not None:
        report_damage([DamagedFile(path, reason)])
    return reason is not None


def _merged_damage(path: Path) -> str | None:
    """Return why a merged file cannot be used: not Parquet, or wrong column types; None if it can, or is gone.

    Only the footer is read, once while the file is unchanged. Raises `OSError` if it cannot be read now.
    """
    try:
        return remember(path, lambda: damage_of(path), "damage")
    except FileNotFoundError:
        return None


def read_catalogue(
    folder: DataFolder,
    kind: str,
    is_left_out: Callable[[Path], bool] = is_damaged_merged,
    family: str | None = None,
) -> Catalogue:
    """Return which files count now. Looks again while merged files seem lost: a compaction may have replaced them.

    Args:
        folder: the data folder.
        kind: one of `KINDS`.
        is_left_out: whether a merged file is damaged; by default only footers are read.
        family: the only family that matters to the caller; by default all.

    Raises `OSError` if a listing, and the merged file that it names, cannot be read now.
    """
    gone: tuple[Listing, ...] = ()
    while True:
        catalogue = _look(folder, kind, is_left_out, family)
        if catalogue.gone == gone:
            return catalogue
        gone = catalogue.gone


def _look(folder: DataFolder, kind: str, is_left_out: Callable[[Path], bool], family: str | None) -> Catalogue:
    damaged: list[DamagedListing] = []
    listings = read_listings(folder, kind, damaged.append)
    hiding = [listing for listing in listings if listing.hidden and holder_of(listing, listings, is_left_out)]
    catalogue = Catalogue.of(listings, hiding)
    gone = [listing for listing in listings if listing.merged not in catalogue.listed]
    if gone:
        # Older versions removed the listing last, but the merged file itself names its sources.
        replaced = catalogue.hidden.union(*(_known_sources(listing.path) for listing in listings))
        gone = [listing for listing in gone if listing.merged not in replaced]
    lost = []
    for file in damaged:
        is_asked = family is None or os.path.lexists(folder.partition(kind, family) / file.path.name)
        if file.error is not None and is_asked:
            raise file.error
        if file.merged is None:
            warn_once(file.path, file.line())
        elif f"{file.merged.parent.name}/{file.merged.name}" not in catalogue.hidden:
            lost.append(
                f"{file.path} is damaged ({file.reason}) and cannot be recovered from {file.merged}, whose rows may "
                "be lost; restore both files from a copy, or run `python -m farm.doctor repair=true` to measure the "
                "runs again"
            )
    return dataclasses.replace(catalogue, gone=tuple(gone), lost=tuple(lost))


def holder_of(listing: Listing, listings: Sequence[Listing], is_left_out: Callable[[Path], bool]) -> Path | None:
    """Return the merged file that holds the rows that a listing hides; None if all of these are gone or left out."""
    files = (holder.path for holder in holders(listing, listings))
    return next((path for path in files if os.path.lexists(path) and not is_left_out(path)), None)


def _known_sources(merged: Path) -> tuple[str, ...]:
    """Return the sources of a merged file; none if it is unreadable or of an older version."""
    try:
        return sources_of(merged)
    except _UNREADABLE:
        return ()


def counting_files(folder: DataFolder, kind: str, family: str, catalogue: Catalogue | None = None) -> list[Path]:
    """Return the files of a partition whose rows count, damaged or not; by default, those that count now."""
    # Listings before files, as in queries: a merged file exists before its listing.
    catalogue = catalogue or read_catalogue(folder, kind)
    partition = folder.partition(kind, family)
    return [partition / name for name in (*catalogue.unmerged_names(partition), *catalogue.merged_names(partition))]


def intact_merged_names(folder: DataFolder, kind: str, family: str) -> list[str]:
    """Return the names of a partition's merged files that count and whose footers are intact.

    Raises `OSError` if one, or its listing, has a lasting error of the disk or the machine: a writer or a merge would
    otherwise take it for missing. Any other error is damage.
    """
    partition = folder.partition(kind, family)
    names = read_catalogue(folder, kind, family=family).merged_names(partition)
    return [name for name in names if _merged_damage(partition / name) is None]


def merged_file_with(folder: DataFolder, family: str, run_id: str) -> Path | None:
    """Return the merged file that counts and holds a run, or None. Damaged files hold no runs.

    Raises `OSError` if a file cannot be read now: it may hold the run.
    """
    partition = folder.partition("runs", family)
    # Names first: most runs are in none of these files, and reading all their listings takes longer.
    names = names_in(folder.listings("runs"))
    if SNAPSHOT_LISTING not in names and not held_ids(partition, names, [run_id]):
        return None
    for name in intact_merged_names(folder, "runs", family):
        if held_ids(partition, [name], [run_id]):
            return partition / name
    return None


def counting_plan(
    folder: DataFolder, kind: str, left_out: Callable[[Path], bool]
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield (family=F/NAME, runs that another file holds) for each file of one of `KINDS` that counts now.

    `left_out` returns whether a file is known to be damaged. A listed merged file that is missing raises
    `EnvironmentProblem`, since its rows are lost.
    """

    def is_left_out(path: Path) -> bool:
        return left_out(path) or is_damaged_merged(path)

    catalogue = read_catalogue(folder, kind, is_left_out)
    refuse_losses([catalogue])
    root = folder.root / kind
    places = [root / name for name in names_in(root) if name.startswith(PARTITION) and not name.startswith(_NO_FAMILY)]
    unmerged = [catalogue.unmerged_names(partition) for partition in places]
    for partition, names in zip(places, unmerged, strict=True):
        yield from _partition_plan(partition, names, catalogue.merged_names(partition), is_left_out)


def _partition_plan(
    partition: Path, unmerged: Sequence[str], merged: Sequence[str], left_out: Callable[[Path], bool]
) -> Iterator[tuple[str, frozenset[str]]]:
    unmerged = [name for name in unmerged if not left_out(partition / name)]
    merged = [name for name in merged if not left_out(partition / name)]
    if merged:  # if a run has a file and is in a merged file, the merged row is older
        held = held_ids(partition, merged, (name.removesuffix(".parquet") for name in unmerged))
        unmerged = [name for name in unmerged if name.removesuffix(".parquet") not in held]
    doubled: Mapping[str, frozenset[str]] = {}
    if len(merged) > 1:
        key = ("doubled", *(file_key(partition / name) for name in merged))
        doubled = remember_by(key, lambda: _find_doubled(partition, merged))
    for name in (*unmerged, *merged):
        yield f"{partition.name}/{name}", doubled.get(name, frozenset())


def _find_doubled(partition: Path, merged: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return, for each merged file, its runs that an earlier merged file holds. Statistics rule out most pairs."""
    doubled: dict[str, frozenset[str]] = {}
    ranges = {name: id_ranges(partition / name) for name in merged}
    for order, name in enumerate(merged):
        earlier = [entry for other in merged[:order] for entry in ranges[other]]
        for group, (least, most) in enumerate(ranges[name]):
            if any(low <= most and least <= high for low, high in earlier):
                ids = held_ids(partition, merged[:order], group_ids(partition / name, group))
                doubled[name] = doubled.get(name, frozenset()) | ids
    return {name: ids for name, ids in doubled.items() if ids}


# ---- proved by checksums, for deletion and repair


class Unreadable(Exception):
    """The rows of a file cannot be read; the message has the reason."""


def run_ids_of(path: Path) -> set[str]:
    """Return the run_ids of an intact file.

    Raises `Unreadable`, `FileNotFoundError` if there is no file, `OSError` if too many files are open.
    """
    try:
        require_intact(path)
        file = pq.ParquetFile(plain(path), read_dictionary=["run_id"])
        return set(file.read(columns=["run_id"]).column("run_id").unique().to_pylist())
    except _UNREADABLE as error:
        if isinstance(error, FileNotFoundError) or is_out_of_descriptors(error):
            raise
        raise Unreadable(first_line(error)) from error


def _unheld_ids(
    folder: DataFolder, kind: str, family: str, ids: Iterable[str], listings: Sequence[Listing]
) -> set[str]:
    """Return those of `ids` that no intact file of the partition holds, among files that no listing at all hides.

    Of samples, kernels and other rows of runs, only those of landed runs are reported: others belong to no visible run.
    """
    unheld = set(ids)
    merged: list[Path] = []
    for path in counting_files(folder, kind, family, Catalogue.of(listings, listings)):
        if is_merged_name(path.name):
            merged.append(path)
        elif path.stem in unheld and checksum_problem(path) is None:
            unheld.discard(path.stem)
    for path in merged:
        if not unheld:
            break
        try:
            unheld -= run_ids_of(path)
        except (Unreadable, FileNotFoundError):
            continue
    if unheld and kind in OF_RUNS:
        unheld -= _unheld_ids(folder, "runs", family, unheld, read_listings(folder, "runs"))
    return unheld


@dataclass
class Unproven:
    """Files that a listing hides and that must not be deleted, with the reasons by name."""

    unheld: dict[str, str] = field(default_factory=dict)  # no file that counts holds their runs
    unreadable: dict[str, str] = field(default_factory=dict)


def unproven_sources(folder: DataFolder, kind: str, listing: Listing, listings: Sequence[Listing]) -> Unproven:
    """Return the files that a listing hides without proof that its merged file, or one that replaced that, holds them.

    Deleted files need no proof. Raises `Unreadable` for a damaged merged file that no intact one replaced,
    `FileNotFoundError` for a missing one.
    """
    unproven = Unproven(dict.fromkeys(listing.foreign, "it is not a Parquet file of the same family"))
    if not listing.hidden:
        return unproven
    holder, held = _proof(listing, listings)
    family = holder.parent.name.removeprefix(PARTITION)
    for name in listing.hidden:
        if Path(name).stem in held:
            continue
        try:
            missing = run_ids_of(folder.root / kind / name) - held
        except FileNotFoundError:
            continue
        except Unreadable as error:
            if name not in _known_sources(holder):  # else it was intact when it was merged
                unproven.unreadable[name] = str(error)
            continue
        if missing:
            missing = _unheld_ids(folder, kind, family, missing, listings)
        if missing:
            unproven.unheld[name] = f"{len(missing):,} of its runs are not there"
    return unproven


def _proof(listing: Listing, listings: Sequence[Listing]) -> tuple[Path, set[str]]:
    """Return an intact merged file that holds what a listing hides, and its runs. Raises as `run_ids_of`."""
    errors: list[Exception] = []
    for holder in holders(listing, listings):
        try:
            return holder.path, run_ids_of(holder.path)
        except (Unreadable, FileNotFoundError) as error:
            errors.append(error)
    raise errors[0]


def settle_listings(folder: DataFolder, kind: str, report: CompactionReport) -> list[Listing]:
    """Return the listings whose merged files hold the runs that they hide, after repairs; report the others.

    A copied snapshot's merged files get listings of their own. If a merged file lacks hidden runs, their files are
    removed from its listing and count again. If a merged file is gone while all hidden files exist, its listing is set
    aside, so they count again too.
    """
    listings = read_listings(folder, kind, report.damaged)
    hidden = {name for listing in listings for name in listing.hidden}
    settled = []
    for listing in listings:
        if not listing.is_whole:
            write_anew(folder, listing)
    snapshot = folder.listings(kind) / SNAPSHOT_LISTING
    if snapshot not in report.left:
        snapshot.unlink(missing_ok=True)
    for listing in listings:
        if not os.path.lexists(listing.path) and listing.merged not in hidden:
            if listing.hidden and all((folder.root / kind / name).exists() for name in listing.hidden):
                aside = set_aside(folder, listing.file, f"it lists {listing.merged}, which is not there")
                report.problems.append(
                    f"{listing.file}: {listing.merged} is gone, and the {len(listing.hidden):,} "
                    f"files that it replaced count again; moved to {aside}"
                )
            elif listing in read_catalogue(folder, kind).gone:
                report.problems.append(lost_line(listing))
            else:
                listing.file.unlink(missing_ok=True)
            continue
        try:
            unproven = unproven_sources(folder, kind, listing, listings)
        except (Unreadable, FileNotFoundError) as error:
            report.left_alone(listing.path, f"{error}; the files that it replaced stay")
            continue
        for name, why in unproven.unreadable.items():
            report.left_alone(folder.root / kind / name, why)
        if unproven.unheld:
            example, why = next(iter(unproven.unheld.items()))
            report.problems.append(
                f"{listing.file} hides {len(unproven.unheld):,} files whose runs {listing.merged} "
                f"does not hold, as {example} ({why}); they count again"
            )
            hidden_now = tuple(name for name in listing.hidden if name not in unproven.unheld)
            listing = dataclasses.replace(listing, hidden=hidden_now, foreign=())
            listing.write()
        settled.append(listing)
    return settled


def write_anew(folder: DataFolder, listing: Listing) -> None:
    """Write a listing over any file of its name. A folder or link of that name is set aside."""
    if listing.file.is_dir() or listing.file.is_symlink():
        set_aside(folder, listing.file, "it is a folder or a link, not a listing")
    listing.write()


def unlisted_files(
    folder: DataFolder, kind: str, family: str, young_s: float, now_s: float
) -> Iterator[tuple[Path, str]]:
    """Yield each merged file without listing and its problem, which is `REDUNDANT` if it may be deleted.

    A file younger than `young_s` has no problem yet, as it may be landing now.
    """
    # Files before listings: the listing of a file that lands in between is found.
    paths = list(folder.partition(kind, family).glob(f"{MERGED_PREFIX}*.parquet"))
    listings = read_listings(folder, kind, lambda damaged: None)
    listed = {listing.path for listing in listings}
    for path in paths:
        listing = listing_file(folder, kind, path.name)
        if path in listed or (has_own_name(path) and listing.exists()):
            continue
        try:
            if now_s - path.stat().st_mtime <= young_s:
                continue
            recovered = recover_listing(listing, path)
            if recovered is None or recovered.checksum is None:  # a user may have written it
                yield path, "no compaction wrote it, and no listing names it"
                continue
            missing = _unheld_ids(folder, kind, family, run_ids_of(path), listings)
            lacking = f"no listing names it, and {len(missing):,} of its runs are in no other file"
            yield path, lacking if missing else REDUNDANT
        except FileNotFoundError:
            continue
        except (Unreadable, OSError) as error:
            yield path, f"no listing names it, and it cannot be read: {error}"
