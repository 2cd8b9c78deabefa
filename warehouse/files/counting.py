"""Finds the files of a data folder whose rows count: merged files with a listing, and files that no listing hides.

Start reading at `counting_files`; `counting_plan` is for queries, which also show each run once and leave damaged files
out. Both cost a listing of the folders; content is read in doubtful cases only.

`judge` decides which listings are valid, i.e. could come from a compaction, and which rows are lost. A valid listing
stands for the merged file of its own name, and that file holds every run of the files that it hides and that are there.
Compaction proves more before it deletes anything, and mends what is not valid (`warehouse.files.compaction`).
`warehouse.check` verifies the checksums of data files.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem
from warehouse.files import damage
from warehouse.files.damage import DamagedFile, warn_once
from warehouse.files.folder import DataFolder
from warehouse.files.merged import (
    PARTITION,
    DamagedListing,
    Listing,
    is_merged_name,
    names_in,
    read_listings,
    sources_of,
)
from warehouse.files.plain_file import file_key, plain, remember, remember_by
from warehouse.tables.schema import KINDS

SNAPSHOT_LISTING = "snapshot.parquet"
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)
_NO_FAMILY = "family=_"  # the partition of files without rows
_PASSES = 20  # over the folder, while compaction deletes what the last pass has found
_REMEMBERED_IDS = 3_200_000  # some 100 bytes each
_group_memory: dict[Hashable, frozenset[str]] = {}  # ids of row groups, of which a compaction writes 100,000 into each


@dataclass(frozen=True)
class Judgement:
    """State of a folder's files according to its listings; each file is named `family=F/NAME`."""

    listed: Mapping[str, Listing]  # by their merged files, which count unless another listing hides them
    hidden: frozenset[str]  # files that do not count, as a merged one stands for them
    lost: tuple[str, ...] = ()  # a line for each listing that cannot be read: rows may be missing, or there twice

    @classmethod
    def of(cls, listings: Iterable[Listing], hides: Callable[[Listing], bool] = lambda listing: True) -> Judgement:
        """Return the judgement in which every listing is valid; one for which `hides` is false hides nothing."""
        listed = {listing.merged: listing for listing in listings}
        return cls(listed, frozenset().union(*(listing.hidden for listing in listed.values() if hides(listing))))


def judge(folder: DataFolder, kind: str, left_out: Callable[[Path], bool] | None = None) -> Judgement:
    """Return the judgement of the valid listings of `runs` or `telemetry`. Invalid ones are reported on stderr.

    A damaged merged file hides nothing: what it replaces may still be there. `left_out` returns whether a file is
    damaged; by default only footers are looked at.
    """
    believed, lost = _find_believed(folder, kind)
    is_left_out = _is_damaged if left_out is None else left_out
    judgement = Judgement.of(believed, lambda listing: not is_left_out(folder.root / kind / listing.merged))
    return dataclasses.replace(judgement, lost=_lost_listing_lines(lost, judgement)) if lost else judgement


def counting_merged_names(folder: DataFolder, kind: str) -> frozenset[str]:
    """Return the merged files that count, as `family=F/NAME`: listed, not hidden, existing and intact."""
    root = folder.root / kind
    listings = [listing for listing in _find_believed(folder, kind)[0] if (root / listing.merged).exists()]
    whole = Judgement.of(listing for listing in listings if not _is_damaged(root / listing.merged))
    return frozenset(whole.listed) - whole.hidden


def merged_file_with(folder: DataFolder, family: str, run_id: str) -> Path | None:
    """Return the merged file that counts and holds a run, or None. Unreadable files hold no runs."""
    partition = folder.partition("runs", family)
    while True:
        listings = names_in(folder.listings("runs"))  # few, while the partition may hold 100,000 small files
        holding = [name for name in listings if is_merged_name(name) and held_ids(partition, [name], [run_id])]
        if not holding:
            return None
        counting = counting_merged_names(folder, "runs")
        for name in holding:
            if f"{partition.name}/{name}" in counting:
                return partition / name
        if listings == names_in(folder.listings("runs")):
            return None
        # A compaction has merged the file once more since: the next look finds the new one.


def lost_merged_files(folder: DataFolder, kind: str) -> list[Listing]:
    """Return the listings whose merged file is gone though no other listing replaces it: its rows are lost.

    Safe beside a compaction, which removes the listing of a merged file before it forgets what replaced that file.
    """
    lost = _listed_and_gone(folder, kind)
    if lost:  # a second look: a compaction may have been between the listings and their files
        again = {(listing.file, listing.merged) for listing in _listed_and_gone(folder, kind)}
        lost = [listing for listing in lost if (listing.file, listing.merged) in again]
    return lost


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
    """Return whether a file is an unusable merged one, and report it on stderr, once while it stays the same."""
    reason = _merged_damage(path) if is_merged_name(path.name) else None
    if reason is not None:
        damage.report([DamagedFile(path, reason)])
    return reason is not None


def _is_damaged(path: Path) -> bool:
    return _merged_damage(path) is not None


def _merged_damage(path: Path) -> str | None:
    """Return why a merged file cannot be used: no Parquet file, or columns of other types; None if it can, or is gone.

    Only the footer is read, once while the file stays the same.
    """
    try:
        return remember(path, lambda: damage.damage_of(path), "damage")
    except FileNotFoundError:
        return None


def _find_believed(folder: DataFolder, kind: str) -> tuple[list[Listing], list[DamagedListing]]:
    """Return the valid listings, and damaged ones whose merged file exists but cannot replace them.

    Their content is read once while they stay the same. What they hide is judged again, as files come and go.
    """
    lost: list[DamagedListing] = []

    def on_damage(damaged: DamagedListing) -> None:
        if damaged.merged is not None:
            lost.append(damaged)
        else:
            warn_once(damaged.path, damaged.line())

    listings = read_listings(folder, kind, on_damage)
    believed = [listing for listing in listings if _is_sound(folder, kind, listing)]
    return [*_of_snapshot(folder, kind), *believed], lost


def _of_snapshot(folder: DataFolder, kind: str) -> list[Listing]:
    """Return a snapshot's merged files, all of which count, as listings."""
    path = folder.listings(kind) / SNAPSHOT_LISTING
    try:
        rows = remember(path, lambda: pq.ParquetFile(plain(path)).read().to_pylist(), "snapshot")
    except FileNotFoundError:
        return []
    return [Listing(path, row["path"], (), 0.0) for row in rows if not row["hidden"]]


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
    believed, _ = _find_believed(folder, kind)
    gone = [listing for listing in believed if not os.path.lexists(root / listing.merged)]
    if not gone:
        return []
    replaced = set(Judgement.of(believed, lambda listing: not _is_damaged(root / listing.merged)).hidden)
    # A compaction of an older version removed the listing last; the merged file itself names its sources.
    for listing in believed:
        with contextlib.suppress(*_UNREADABLE):
            replaced.update(sources_of(root / listing.merged))
    return [listing for listing in gone if listing.merged not in replaced]


def _is_sound(folder: DataFolder, kind: str, listing: Listing) -> bool:
    not_held = _hidden_and_not_held(folder.root / kind, listing)
    if not_held:
        others = f" and {len(not_held) - 1} more files" if len(not_held) > 1 else ""
        warn_once(
            listing.file,
            f"{listing.file}: ignoring this listing: it hides {not_held[0]!r}{others}, whose runs its merged file does "
            "not hold",
        )
    return not not_held


def _hidden_and_not_held(root: Path, listing: Listing) -> Sequence[str]:
    """Return the existing files that a listing hides although they have a run that the merged file lacks."""
    merged = root / listing.merged
    foreign = remember_by(("foreign", listing.merged, listing.hidden), lambda: _foreign(listing))
    if foreign or _is_damaged(merged):  # a damaged one hides nothing, and is named where it would count
        return foreign
    try:
        key = file_key(merged)
        doubtful = remember_by(("doubtful", key, listing.hidden), lambda: _doubtful(merged, listing))
    except _UNREADABLE:  # torn or gone, which is another matter: it is named there
        return ()
    return [name for name in doubtful if not _is_held(root / name, merged, key)]


def _foreign(listing: Listing) -> tuple[str, ...]:
    """Return the hidden names outside the merged file's partition."""
    partition = os.path.dirname(listing.merged)
    return tuple(name for name in listing.hidden if not _is_name(name) or os.path.dirname(name) != partition)


def _doubtful(merged: Path, listing: Listing) -> tuple[str, ...]:
    """Return the hidden names whose content must be read to know whether the merged file holds their run."""
    held = _ids(merged) if listing.hidden else frozenset()
    return tuple(name for name in listing.hidden if os.path.basename(name).removesuffix(".parquet") not in held)


def _is_held(path: Path, merged: Path, merged_key: Hashable) -> bool:
    """Return whether a merged file holds all runs of a file; True also of one that is torn or gone."""

    def compare() -> bool:
        ids = _ids(path)  # none where it has no rows
        return len(held_ids(merged.parent, [merged.name], ids)) == len(ids)

    try:
        return remember_by(("held", merged_key, file_key(path)), compare)
    except _UNREADABLE:
        return True


def _ids(path: Path) -> frozenset[str]:
    return frozenset(pq.ParquetFile(plain(path)).read(columns=["run_id"]).column("run_id").unique().to_pylist())


def _is_name(name: str) -> bool:
    """Return whether `name` has the form family=F/NAME.parquet and leads nowhere else."""
    partition, slash, file_name = name.partition("/")
    return bool(slash) and partition.startswith(PARTITION) and "/" not in file_name and file_name.endswith(".parquet")


@dataclass(frozen=True)
class FamilyPlan:
    """Names of one family's files that count, and the runs of a merged file that another file already holds."""

    family: str
    names: tuple[str, ...]
    doubled: Mapping[str, frozenset[str]] = field(default_factory=dict)


def counting_plan(folder: DataFolder, kind: str, left_out: Callable[[Path], bool]) -> list[FamilyPlan]:
    """Return the files of `runs` or `telemetry` that count now, by family, each run in one of them only.

    `left_out` returns whether a file is known to be damaged. A listed merged file that is missing raises
    `EnvironmentProblem`, since its rows are lost. A listing that no compaction can have written hides nothing.
    """

    def is_left_out(path: Path) -> bool:
        return left_out(path) or is_damaged_merged(path)

    for _ in range(_PASSES):
        # The listings before the files: a merged file that is found listed was there before its listing.
        judgement = judge(folder, kind, is_left_out)
        if judgement.lost:
            raise EnvironmentProblem("; ".join(judgement.lost))
        on_disk = _names_on_disk(folder.root / kind)
        if all(name in judgement.hidden or os.path.lexists(folder.root / kind / name) for name in judgement.listed):
            break
    else:
        refuse_lost(folder, [kind])
    return [
        _family_plan(folder.root / kind / partition, names, judgement, is_left_out)
        for partition, names in on_disk.items()
    ]


def counting_files(folder: DataFolder, kind: str, family: str, listings: Sequence[Listing] | None = None) -> list[Path]:
    """Return the files of a partition whose rows count, sorted, whether they are damaged or not.

    Args:
        folder: the data folder.
        kind: `runs` or `telemetry`.
        family: the family of the partition.
        listings: taken at their word, and read before; by default those that are believed.
    """
    # The listings before the files, as queries do: a merged file that is found listed is there.
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


def _family_plan(
    partition: Path, names: Sequence[str], judgement: Judgement, left_out: Callable[[Path], bool]
) -> FamilyPlan:
    unmerged: list[str] = []
    merged: list[str] = []
    for name in _counting_names(partition.name, names, judgement):
        if not left_out(partition / name):
            (merged if is_merged_name(name) else unmerged).append(name)
    if merged:  # where a run's own file and a merged one exist, the merged one came first
        held = held_ids(partition, merged, (name.removesuffix(".parquet") for name in unmerged))
        unmerged = [name for name in unmerged if name.removesuffix(".parquet") not in held]
    key = ("doubled", *(file_key(partition / name) for name in merged))
    doubled = remember_by(key, lambda: _find_doubled(partition, merged))
    return FamilyPlan(partition.name.removeprefix(PARTITION), (*unmerged, *merged), doubled)


def held_ids(partition: Path, merged: Iterable[str], run_ids: Iterable[str]) -> set[str]:
    """Return those of `run_ids` that one of the partition's merged files holds, by their names.

    Content is read only of row groups whose statistics do not rule the runs out.
    """
    left = sorted(run_ids)
    held: set[str] = set()
    for name in merged:
        for group, (least, most) in enumerate(_ranges(partition / name)):
            within = left[bisect.bisect_left(left, least) : bisect.bisect_right(left, most)]
            if within:
                held |= _group_ids(partition / name, group).intersection(within)
    return held


def _find_doubled(partition: Path, merged: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return, for each merged file, its runs that an earlier merged file holds. Statistics rule out most pairs."""
    doubled: dict[str, frozenset[str]] = {}
    ranges = {name: _ranges(partition / name) for name in merged}
    for order, name in enumerate(merged):
        earlier = [entry for other in merged[:order] for entry in ranges[other]]
        for group, (least, most) in enumerate(ranges[name]):
            if any(low <= most and least <= high for low, high in earlier):
                ids = held_ids(partition, merged[:order], _group_ids(partition / name, group))
                doubled[name] = doubled.get(name, frozenset()) | ids
    return {name: ids for name, ids in doubled.items() if ids}


def _ranges(path: Path) -> list[tuple[str, str]]:
    """Return (least, greatest) run_id of each row group; none for an unreadable file, which is reported elsewhere."""

    def read() -> list[tuple[str, str]]:
        metadata = pq.read_metadata(plain(path))
        column = metadata.schema.names.index("run_id")
        ranges = []
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(column).statistics
            known = statistics is not None and statistics.has_min_max and isinstance(statistics.min, str)
            ranges.append((statistics.min, statistics.max) if known else ("", "\U0010ffff"))
        return ranges

    try:
        return remember(path, read, "ranges")
    except (pa.ArrowException, OSError, ValueError):
        return []


def _group_ids(path: Path, group: int) -> frozenset[str]:
    def read() -> frozenset[str]:
        if sum(map(len, list(_group_memory.values()))) > _REMEMBERED_IDS:
            _group_memory.clear()
        file = pq.ParquetFile(plain(path), read_dictionary=["run_id"])
        return frozenset(file.read_row_group(group, columns=["run_id"]).column("run_id").unique().to_pylist())

    try:
        return remember(path, read, group, _group_memory)
    except (pa.ArrowException, OSError):
        return frozenset()
