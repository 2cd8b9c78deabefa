"""Finds the data folder's files whose rows count, by one rule, which the SQL views follow too.

An intact listing is believed. A file counts if it is a listed merged file or no merged one, and if no listing hides it.
A listing hides nothing while neither its merged file nor one that replaced that is there and intact.

Start reading at `read_catalogue` and `counting_files`; `counting_plan` is for queries, which also show each run once
and leave damaged files out. They cost a listing of the folders, and footers of merged files.

Deletion and repair need proof: `unproven_sources` reads checksums and content of the files that a listing hides, and
`settle_listings` repairs the listings that hide too much. Compaction, snapshots, `warehouse.check` and `farm.doctor`
use them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem, first_line
from warehouse.files import damage
from warehouse.files.damage import DamagedFile, set_aside, warn_once
from warehouse.files.folder import DataFolder, checksum_problem
from warehouse.files.merged import (
    PARTITION,
    SNAPSHOT_LISTING,
    DamagedListing,
    Listing,
    group_ids,
    has_own_name,
    held_ids,
    holders,
    id_ranges,
    is_merged_name,
    listing_file,
    read_listings,
    recover_listing,
    sources_of,
)
from warehouse.files.plain_file import file_key, is_out_of_descriptors, names_in, plain, remember, remember_by
from warehouse.tables.schema import MERGED_PREFIX, OF_RUNS

if TYPE_CHECKING:
    from warehouse.files.compaction import CompactionReport

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
    lines: list[str] = []
    for catalogue in catalogues:
        lines += [*map(lost_line, catalogue.gone), *catalogue.lost]
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
    reason = damage.damage_now(lambda: _merged_damage(path)) if is_merged_name(path.name) else None
    if reason is not None:
        damage.report([DamagedFile(path, reason)])
    return reason is not None


def _merged_damage(path: Path) -> str | None:
    """Return why a merged file cannot be used: not Parquet, or wrong column types; None if it can, or is gone.

    Only the footer is read, once while the file is unchanged. Raises `OSError` if it cannot be read now.
    """
    try:
        return remember(path, lambda: damage.damage_of(path), "damage")
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
    names = (*catalogue.unmerged_names(partition), *catalogue.merged_names(partition))
    return [partition / name for name in names]


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
        problem = checksum_problem(path)
        if problem is not None:
            raise Unreadable(problem)
        file = pq.ParquetFile(plain(path), read_dictionary=["run_id"])
        return set(file.read(columns=["run_id"]).column("run_id").unique().to_pylist())
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        if is_out_of_descriptors(error):
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
