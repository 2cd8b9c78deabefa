"""Finds the data folder's files whose rows count: merged files with a listing, and files that no listing hides.

Start reading at `counting_files`; `counting_plan` is for queries, which also show each run once and leave damaged files
out. Both cost a listing of the folders; content is read in doubtful cases only.

`judge` decides which listings are valid, i.e. could come from a compaction, and which rows are lost. A valid listing
names the merged file with the listing's own name. That file holds every run of the existing files that the listing
hides.

Deletion and repair need proof: `unproven_sources` reads checksums and content of the files that a listing hides, and
`settle_listings` repairs invalid listings. Compaction, snapshots, `warehouse.check` and `farm.doctor` use them.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem
from conf.plain_text import first_line
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
    is_own_merge,
    listed_names,
    listing_file,
    read_listings,
    sources_of,
)
from warehouse.files.plain_file import file_key, is_out_of_descriptors, names_in, plain, remember, remember_by
from warehouse.tables.schema import KINDS, OF_RUNS

if TYPE_CHECKING:
    from warehouse.files.compaction import CompactionReport

REDUNDANT = ""  # the reason when every run of a merged file is also in an intact file that counts
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)
_NO_FAMILY = "family=_"  # the partition of files without rows
_PASSES = 20  # over the folder, while compaction deletes files that the last pass found


@dataclass(frozen=True)
class Judgement:
    """State of a folder's files according to its listings; each file is named `family=F/NAME`."""

    listed: Mapping[str, Listing]  # by their merged files, which count unless another listing hides them
    hidden: frozenset[str]  # files that do not count, because a merged file replaces them
    lost: tuple[str, ...] = ()  # a line for each unreadable listing: rows may be missing or duplicated

    @classmethod
    def of(cls, listings: Sequence[Listing], hiding: Sequence[Listing] | None = None) -> Judgement:
        """Return the judgement with every listing valid; those of `hiding`, by default all, hide files."""
        names = (listing.hidden for listing in (listings if hiding is None else hiding))
        return cls({listing.merged: listing for listing in listings}, frozenset().union(*names))


def judge(folder: DataFolder, kind: str, left_out: Callable[[Path], bool] | None = None) -> Judgement:
    """Return the judgement of the valid listings of `runs` or `telemetry`. Invalid ones are reported on stderr.

    A damaged merged file that no other replaced hides nothing: the files that it replaces may still exist. `left_out`
    returns whether a file is damaged; by default only footers are read.
    """
    believed, lost = _find_valid(folder, kind)
    root = folder.root / kind
    is_left_out = _is_damaged if left_out is None else left_out
    hiding = [listing for listing in believed if listing.hidden and holder_of(root, listing, believed, is_left_out)]
    judgement = Judgement.of(believed, hiding)
    return dataclasses.replace(judgement, lost=_lost_listing_lines(lost, judgement)) if lost else judgement


def counting_merged_names(folder: DataFolder, kind: str, family: str) -> frozenset[str]:
    """Return the names of a partition's merged files that count: listed, not hidden, existing and intact.

    Raises `OSError` if one, or its listing, has a lasting error of the disk or the machine: a writer or a merge would
    otherwise take it for missing. Any other error is damage.
    """
    root = folder.root / kind
    listings = [listing for listing in _find_valid(folder, kind, family)[0] if (root / listing.merged).exists()]
    intact = Judgement.of([listing for listing in listings if _merged_damage(root / listing.merged) is None])
    return frozenset(map(os.path.basename, intact.listed.keys() - intact.hidden))


def merged_file_with(folder: DataFolder, family: str, run_id: str) -> Path | None:
    """Return the merged file that counts and holds a run, or None. Damaged files hold no runs.

    Raises `OSError` if a file cannot be read now: it may hold the run.
    """
    partition = folder.partition("runs", family)
    while True:
        listings = listed_names(folder, "runs")  # few, while the partition may hold 100,000 small files
        holding = [name for name in listings if held_ids(partition, [name], [run_id])]
        if not holding:
            return None
        counting = counting_merged_names(folder, "runs", family)
        for name in holding:
            if name in counting:
                return partition / name
        if listings == listed_names(folder, "runs"):
            return None
        # A compaction has merged the file again: the next look finds the new one.


def lost_merged_files(folder: DataFolder, kind: str) -> list[Listing]:
    """Return the listings whose merged file is gone and not replaced by another listing: its rows are lost.

    Safe beside a compaction, which removes the listing of a merged file before it forgets what replaced that file.
    """
    lost = {listing.merged for listing in _listed_and_gone(folder, kind)}
    # Look again: a compaction may have run between reading listings and files.
    return [listing for listing in _listed_and_gone(folder, kind) if listing.merged in lost] if lost else []


def lost_line(folder: DataFolder, kind: str, listing: Listing) -> str:
    """Describe a merged file that is gone."""
    rows = "its rows are" if listing.rows is None else f"its {listing.rows:,} rows are"
    return (
        f"{folder.root / kind / listing.merged} is gone, though {listing.file} lists it: {rows} missing; "
        f"put the file back, or run `python -m farm.doctor repair=true` to measure its runs again"
    )


def refuse_lost(folder: DataFolder, kinds: Sequence[str] = KINDS) -> None:
    """Raise `EnvironmentProblem` for each merged file or listing that is lost: without it, counts would be too low."""
    lines: list[str] = []
    for kind in kinds:
        lines += [lost_line(folder, kind, listing) for listing in lost_merged_files(folder, kind)]
        lines += judge(folder, kind).lost
    if lines:
        raise EnvironmentProblem("; ".join(lines))


def is_damaged_merged(path: Path) -> bool:
    """Return whether a file is an unusable merged one; report it on stderr, once while it is unchanged."""
    reason = damage.damage_now(lambda: _merged_damage(path)) if is_merged_name(path.name) else None
    if reason is not None:
        damage.report([DamagedFile(path, reason)])
    return reason is not None


def _is_damaged(path: Path) -> bool:
    return damage.damage_now(lambda: _merged_damage(path)) is not None


def _merged_damage(path: Path) -> str | None:
    """Return why a merged file cannot be used: not Parquet, or wrong column types; None if it can, or is gone.

    Only the footer is read, once while the file is unchanged. Raises `OSError` if it cannot be read now.
    """
    try:
        return remember(path, lambda: damage.damage_of(path), "damage")
    except FileNotFoundError:
        return None


def _find_valid(folder: DataFolder, kind: str, family: str | None = None) -> tuple[list[Listing], list[DamagedListing]]:
    """Return the valid listings, of `family` or of all, and damaged ones that their merged file cannot recover.

    Listings are read once while unchanged. The files that they hide are judged each time, as files come and go. Raises
    `OSError` if a listing and its merged file cannot be read now.
    """
    lost: list[DamagedListing] = []
    partition = None if family is None else folder.partition(kind, family)

    def on_damage(damaged: DamagedListing) -> None:
        if damaged.error is not None and (partition is None or os.path.lexists(partition / damaged.path.name)):
            raise damaged.error
        if damaged.merged is not None:
            lost.append(damaged)
        else:
            warn_once(damaged.path, damaged.line())

    listings = read_listings(folder, kind, on_damage)
    asked = [listing for listing in listings if partition is None or os.path.dirname(listing.merged) == partition.name]
    return [listing for listing in asked if _is_sound(folder, kind, listing, asked)], lost


def holder_of(
    root: Path, listing: Listing, listings: Sequence[Listing], is_left_out: Callable[[Path], bool]
) -> Path | None:
    """Return the merged file that holds the rows that a listing hides; None if all of these are gone or left out."""
    files = (root / holder.merged for holder in holders(listing, listings))
    return next((path for path in files if os.path.lexists(path) and not is_left_out(path)), None)


def _lost_listing_lines(lost: Iterable[DamagedListing], judgement: Judgement) -> tuple[str, ...]:
    """Return a line for each lost listing whose merged file no other listing replaces."""
    return tuple(
        f"{damaged.path} is damaged ({damaged.reason}) and cannot be recovered from {damaged.merged}, whose rows may "
        "be lost; restore both files from a copy, or run `python -m farm.doctor repair=true` to measure the runs again"
        for damaged in lost
        if damaged.merged is not None and f"{damaged.merged.parent.name}/{damaged.merged.name}" not in judgement.hidden
    )


def _listed_and_gone(folder: DataFolder, kind: str) -> list[Listing]:
    root = folder.root / kind
    listings = read_listings(folder, kind, lambda damaged: None)
    if all(os.path.lexists(root / listing.merged) for listing in listings):  # without reading the files
        return []
    judgement = judge(folder, kind)
    believed = judgement.listed.values()
    gone = [listing for listing in believed if not os.path.lexists(root / listing.merged)]
    if not gone:
        return []
    # Older versions removed the listing last, but the merged file itself names its sources.
    replaced = judgement.hidden.union(*(_known_sources(root / listing.merged) for listing in believed))
    return [listing for listing in gone if listing.merged not in replaced]


def _known_sources(merged: Path) -> tuple[str, ...]:
    """Return the sources of a merged file; none if it is unreadable or of an older version."""
    try:
        return sources_of(merged)
    except _UNREADABLE:
        return ()


def _is_sound(folder: DataFolder, kind: str, listing: Listing, listings: Sequence[Listing]) -> bool:
    not_held = _hidden_and_not_held(folder.root / kind, listing, listings) if listing.hidden else ()
    if not_held:
        others = f" and {len(not_held) - 1} more files" if len(not_held) > 1 else ""
        warn_once(
            listing.file,
            f"{listing.file}: ignoring this listing: it hides {not_held[0]!r}{others}, whose runs its merged file does "
            "not hold",
        )
    return not not_held


def _hidden_and_not_held(root: Path, listing: Listing, listings: Sequence[Listing]) -> Sequence[str]:
    """Return the existing files that a listing hides although they have a run that the merged file lacks."""
    foreign = remember_by(("foreign", listing.merged, listing.hidden), lambda: _foreign(listing))
    merged = holder_of(root, listing, listings, _is_damaged)
    if foreign or merged is None:  # without one it hides nothing, and is reported where it would count
        return foreign
    try:
        key = file_key(merged)
        doubtful = remember_by(("doubtful", key, listing.hidden), lambda: _doubtful(merged, listing))
    except _UNREADABLE:  # torn or gone, which is reported elsewhere
        return ()
    return [name for name in doubtful if not _is_held(root / name, merged, key)]


def _foreign(listing: Listing) -> tuple[str, ...]:
    """Return the hidden names that are not files directly in the merged file's partition."""
    prefix = f"{os.path.dirname(listing.merged)}/"
    return tuple(
        name
        for name in listing.hidden
        if not name.startswith(prefix) or not name.endswith(".parquet") or "/" in name.removeprefix(prefix)
    )


def _doubtful(merged: Path, listing: Listing) -> tuple[str, ...]:
    """Return the hidden names whose content must be read to decide whether the merged file holds their run."""
    held = _ids(merged)
    return tuple(name for name in listing.hidden if os.path.basename(name).removesuffix(".parquet") not in held)


def _is_held(path: Path, merged: Path, merged_key: Hashable) -> bool:
    """Return whether a merged file holds all runs of a file; True if the file is torn or gone."""

    def compare() -> bool:
        ids = _ids(path)  # empty without rows
        if None in ids:  # which `held_ids` leaves out
            return ids <= _ids(merged)
        return len(held_ids(merged.parent, [merged.name], ids)) == len(ids)

    try:
        return remember_by(("held", merged_key, file_key(path)), compare)
    except _UNREADABLE:
        return True


def _ids(path: Path) -> frozenset[str]:
    file = pq.ParquetFile(plain(path), read_dictionary=["run_id"])
    return frozenset(file.read(columns=["run_id"]).column("run_id").unique().to_pylist())


def counting_plan(
    folder: DataFolder, kind: str, left_out: Callable[[Path], bool]
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield (family=F/NAME, runs that another file holds) for each file of one of `KINDS` that counts now.

    `left_out` returns whether a file is known to be damaged. A listed merged file that is missing raises
    `EnvironmentProblem`, since its rows are lost. A listing that no compaction can have written hides nothing.
    """

    def is_left_out(path: Path) -> bool:
        return left_out(path) or is_damaged_merged(path)

    for _ in range(_PASSES):
        # Listings before files: a merged file exists before its listing.
        judgement = judge(folder, kind, is_left_out)
        if judgement.lost:
            raise EnvironmentProblem("; ".join(judgement.lost))
        on_disk = _names_on_disk(folder.root / kind)
        if all(name in judgement.hidden or os.path.lexists(folder.root / kind / name) for name in judgement.listed):
            break
    else:
        refuse_lost(folder, [kind])
    for partition, names in on_disk.items():
        yield from _partition_plan(folder.root / kind / partition, names, judgement, is_left_out)


def counting_files(folder: DataFolder, kind: str, family: str, listings: Sequence[Listing] | None = None) -> list[Path]:
    """Return the files of a partition whose rows count, sorted, whether they are damaged or not.

    Args:
        folder: the data folder.
        kind: `runs` or `telemetry`.
        family: the family of the partition.
        listings: used without validation; by default the valid ones.
    """
    # Listings before files, as in queries: a merged file exists before its listing.
    judgement = judge(folder, kind) if listings is None else Judgement.of(listings)
    partition = folder.partition(kind, family)
    return [partition / name for name in _counting_names(partition.name, _parquet_names(partition), judgement)]


def _parquet_names(partition: Path) -> list[str]:
    """Return the sorted names of a partition's Parquet files; sorting 100,000 paths instead would take seconds."""
    return [name for name in names_in(partition) if name.endswith(".parquet")]


def _counting_names(partition: str, names: Sequence[str], judgement: Judgement) -> list[str]:
    """Return the partition's files that count: listed merged files, and others that no listing hides."""
    prefix, hidden, listed = f"{partition}/", judgement.hidden, judgement.listed
    return [
        name for name in names if prefix + name not in hidden and (not is_merged_name(name) or prefix + name in listed)
    ]


def _names_on_disk(root: Path) -> dict[str, list[str]]:
    """Return the sorted names of the Parquet files of each partition."""
    return {
        partition: _parquet_names(root / partition)
        for partition in names_in(root)
        if partition.startswith(PARTITION) and not partition.startswith(_NO_FAMILY)
    }


def _partition_plan(
    partition: Path, names: Sequence[str], judgement: Judgement, left_out: Callable[[Path], bool]
) -> Iterator[tuple[str, frozenset[str]]]:
    unmerged: list[str] = []
    merged: list[str] = []
    for name in _counting_names(partition.name, names, judgement):
        if not left_out(partition / name):
            (merged if is_merged_name(name) else unmerged).append(name)
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
        return set(_ids(path))
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        if is_out_of_descriptors(error):
            raise
        raise Unreadable(first_line(error)) from error


def _unheld_ids(
    folder: DataFolder, kind: str, family: str, ids: Iterable[str], listings: Sequence[Listing]
) -> set[str]:
    """Return those of `ids` that no intact file of the partition holds, among files that count.

    Of samples, kernels and other rows of runs, only those of landed runs are reported: others belong to no visible run.
    """
    unheld = set(ids)
    merged: list[Path] = []
    for path in counting_files(folder, kind, family, listings):
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
    root = folder.root / kind
    path, held = _proof(root, listing, listings)
    family = path.parent.name.removeprefix("family=")
    partition = path.parent.name + "/"
    existing = {f"{partition}{name}" for name in os.listdir(path.parent)}
    unproven = Unproven(dict.fromkeys(_foreign(listing), "it is of another family"))
    for name in listing.hidden:
        if name not in existing or Path(name).stem in held:
            continue
        try:
            missing = run_ids_of(root / name) - held
        except FileNotFoundError:
            continue
        except Unreadable as error:
            if name not in _known_sources(path):  # else it was intact when it was merged
                unproven.unreadable[name] = str(error)
            continue
        if missing:
            missing = _unheld_ids(folder, kind, family, missing, listings)
        if missing:
            unproven.unheld[name] = f"{len(missing):,} of its runs are not there"
    return unproven


def _proof(root: Path, listing: Listing, listings: Sequence[Listing]) -> tuple[Path, set[str]]:
    """Return an intact merged file that holds what a listing hides, and its runs. Raises as `run_ids_of`."""
    errors: list[Exception] = []
    for holder in holders(listing, listings):
        try:
            return root / holder.merged, run_ids_of(root / holder.merged)
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
        merged = folder.root / kind / listing.merged
        if not os.path.lexists(merged) and listing.merged not in hidden:
            if listing.hidden and all((folder.root / kind / name).exists() for name in listing.hidden):
                aside = set_aside(folder, listing.file, f"it lists {listing.merged}, which is not there")
                report.problems.append(
                    f"{listing.file}: {listing.merged} is gone, and the {len(listing.hidden):,} "
                    f"files that it replaced count again; moved to {aside}"
                )
            elif listing in lost_merged_files(folder, kind):
                report.problems.append(lost_line(folder, kind, listing))
            else:
                listing.file.unlink(missing_ok=True)
            continue
        if not listing.hidden:
            settled.append(listing)
            continue
        try:
            unproven = unproven_sources(folder, kind, listing, listings)
        except (Unreadable, FileNotFoundError) as error:
            report.left_alone(merged, f"{error}; the files that it replaced stay")
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
            listing = dataclasses.replace(listing, hidden=hidden_now)
            listing.write()
        settled.append(listing)
    return settled


def write_anew(folder: DataFolder, listing: Listing) -> None:
    """Write a listing over any file of its name. A folder of that name is set aside."""
    if listing.file.is_dir():
        set_aside(folder, listing.file, "it is a folder, not a listing")
    listing.write()


def unlisted_problem(
    folder: DataFolder, kind: str, family: str, path: Path, young_s: float, now_s: float | None = None
) -> str | None:
    """Return the problem of a merged file without listing: `REDUNDANT` if it may be deleted, None if there is none.

    A listed file has no problem. Neither has one younger than `young_s`, which may be landing now.
    """
    listing = listing_file(folder, kind, path.name)
    if has_own_name(path) and (listing.exists() or path.name in listed_names(folder, kind)):
        return None
    try:
        if (time.time() if now_s is None else now_s) - path.stat().st_mtime <= young_s:
            return None
        if not is_own_merge(path):
            return "no compaction wrote it, and no listing names it"
        missing = _unheld_ids(folder, kind, family, run_ids_of(path), read_listings(folder, kind, lambda damaged: None))
    except FileNotFoundError:
        return None
    except (Unreadable, OSError) as error:
        return f"no listing names it, and it cannot be read: {error}"
    return f"no listing names it, and {len(missing):,} of its runs are in no other file" if missing else REDUNDANT
