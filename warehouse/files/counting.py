"""Finds the files of a data folder whose rows count: the catalogue that queries, compaction and snapshots share.

Start reading at `counting_plan`, which is for queries, and `family_files`. Two rules decide:

1. A merged file counts if there is a listing of its name and it can be read.
2. Any other file counts unless a merged file that counts holds its run.

So a run is shown once, from whichever files it can be read, and nothing that a listing says hides a run. Where merged
files share runs, the one with more rows comes first. Content is read only where names and ranges of run_ids leave a
doubt. A listing is written after its merged file and removed before it: a listed file that is not there is lost.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem
from conf.plain_text import first_line
from warehouse.files import damage
from warehouse.files.layout import KINDS, FolderLayout
from warehouse.files.merged import (
    PARTITION,
    Listing,
    OnDamage,
    Unreadable,
    has_own_name,
    is_merged_name,
    names_in,
    read_listings,
    run_ids_of,
    sources_of,
)
from warehouse.files.plain_file import file_key, plain, remembered, remembered_by

SNAPSHOT_LISTING = "snapshot.parquet"  # a snapshot has one for all its merged files
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError)
_NO_FAMILY = "family=_"  # the partition of files without rows
_LOOKS = 100  # at a folder that compactions change meanwhile
_LAST = "\U0010ffff"  # no run_id is greater
T = TypeVar("T")


@dataclass(frozen=True)
class MergedFile:
    """A merged file whose footer can be read, and the runs in it."""

    path: Path
    key: Hashable  # changes when the file does
    rows: int
    least: str  # run_id, by the footer's statistics
    most: str

    @functools.cached_property
    def run_ids(self) -> pa.StringArray:
        """Return the runs in the file, sorted. Raises as `run_ids_of` does."""
        return pa.array(sorted(run_ids_of(self.path, verified=False)), pa.string())

    def may_hold(self, run_id: str) -> bool:
        """Return whether a run is in the range of the file's run_ids."""
        return self.least <= run_id <= self.most

    def holds(self, run_id: str) -> bool:
        """Return whether the file has a run. Raises as `run_ids` does."""
        if not self.may_hold(run_id):
            return False
        at = bisect_left(self.run_ids, run_id, key=lambda run_id: run_id.as_py())
        return at < len(self.run_ids) and self.run_ids[at].as_py() == run_id


@dataclass(frozen=True)
class FamilyFiles:
    """The files of one family that count."""

    partition: Path
    own: tuple[str, ...]  # names of files whose run no merged file holds, sorted, damaged or not
    merged: tuple[MergedFile, ...]  # those that hold a run which no file before them holds
    doubled: Mapping[Path, frozenset[str]]  # the runs of a merged file that files before it hold
    damaged: Mapping[Path, str]  # listed merged files that cannot be read, and why

    @property
    def paths(self) -> list[Path]:
        """Return the files that count, and listed ones that would if they could be read."""
        return [*(self.partition / name for name in self.own), *(file.path for file in self.merged), *self.damaged]


def counting_plan(folder: FolderLayout, kind: str, left_out: Callable[[Path], bool]) -> list[FamilyFiles]:
    """Return the files of one of `KINDS` that count now, by family.

    `left_out` returns whether a merged file is known to be damaged. Raises `EnvironmentProblem` for a merged file that
    is lost: without it, counts would be too low.
    """

    def look(listed: frozenset[str]) -> list[FamilyFiles]:
        root = folder.root / kind
        partitions = [name for name in names_in(root) if name.startswith(PARTITION) and not name.startswith(_NO_FAMILY)]
        on_disk = {partition: _parquet_names(root / partition) for partition in partitions}
        if not listed <= {name for names in on_disk.values() for name in names if is_merged_name(name)}:
            refuse_lost(folder, [kind])
        return [_family_files(root / partition, names, listed, left_out) for partition, names in on_disk.items()]

    return steadily(folder, kind, look)


def family_files(
    folder: FolderLayout, kind: str, family: str, left_out: Callable[[Path], bool] = lambda path: False
) -> FamilyFiles:
    """Return the files of a family's part of one of `KINDS` that count now; `left_out` is `counting_plan`'s."""
    partition = folder.partition(kind, family)
    return steadily(folder, kind, lambda listed: _family_files(partition, _parquet_names(partition), listed, left_out))


def counting_files(folder: FolderLayout, kind: str, family: str) -> list[Path]:
    """Return the files of a partition whose rows count, whether they are damaged or not."""
    return family_files(folder, kind, family).paths


def listed_files(folder: FolderLayout, kind: str, family: str) -> list[MergedFile]:
    """Return the listed merged files of a family that can be read, also those whose runs others hold."""
    partition = folder.partition(kind, family)
    return steadily(folder, kind, lambda listed: _whole(partition, sorted(listed)))


def merged_file_with(folder: FolderLayout, kind: str, family: str, run_id: str) -> Path | None:
    """Return a merged file that counts and holds the run, or None. Unreadable files hold no runs.

    A partition's 100,000 small files are not listed: every landing asks.
    """
    partition = folder.partition(kind, family)

    def look(listed: frozenset[str]) -> Path | None:
        for file in _whole(partition, sorted(listed)):
            try:
                if file.holds(run_id):
                    return file.path
            except (Unreadable, OSError):  # gone since: then the listings have changed
                continue
        return None

    return steadily(folder, kind, look)


def steadily(folder: FolderLayout, kind: str, look: Callable[[frozenset[str]], T]) -> T:
    """Return what `look` makes of the names of the listed merged files, which stayed the same meanwhile.

    So it sees either all files that a compaction replaces or the merged file. `FileNotFoundError` of a file that such a
    compaction has deleted is not raised.
    """
    for _ in range(_LOOKS):
        listed = _listed(folder, kind)
        try:
            result = look(listed)
        except FileNotFoundError:
            if listed == _listed(folder, kind):
                raise
            continue
        if listed == _listed(folder, kind):
            return result
    raise EnvironmentProblem(f"the files of {folder.root / kind} change faster than they are listed; try again")


def lost_merged_files(
    folder: FolderLayout, kind: str, on_damage: OnDamage | None = lambda damaged: None
) -> list[Listing]:
    """Return the listings whose merged file is gone, though no other merged file replaces it: its rows are lost.

    `on_damage` is called for listings that cannot be read; None prints a line on stderr.
    """
    root = folder.root / kind
    listings = [*_of_snapshot(folder, kind), *read_listings(folder, kind, on_damage)]
    # The file before its listing: a compaction removes the listing first.
    gone = [one for one in listings if not os.path.lexists(root / one.merged) and os.path.lexists(one.file)]
    if not gone:
        return []
    # A compaction of an older version removed the listing last.
    replaced = {name for listing in listings for name in listing.hidden}
    for listing in listings:
        try:
            replaced.update(sources_of(root / listing.merged))
        except _UNREADABLE:
            continue
    return [listing for listing in gone if listing.merged not in replaced]


def lost_line(folder: FolderLayout, kind: str, listing: Listing) -> str:
    """Describe a merged file that is gone."""
    rows = "its rows are" if listing.rows is None else f"its {listing.rows:,} rows are"
    return (
        f"{folder.root / kind / listing.merged} is gone, though {listing.file} lists it: {rows} missing; "
        f"put the file back, or run `python -m farm.doctor repair=true` to measure its runs again"
    )


def refuse_lost(folder: FolderLayout, kinds: Sequence[str] = KINDS) -> None:
    """Raise `EnvironmentProblem` for each merged file that is lost: without it, counts would be too low."""
    lines = [lost_line(folder, kind, listing) for kind in kinds for listing in lost_merged_files(folder, kind, None)]
    if lines:
        raise EnvironmentProblem("; ".join(lines))


def _listed(folder: FolderLayout, kind: str) -> frozenset[str]:
    """Return the names of the merged files that are listed, whatever is in their listings."""
    names = {name for name in names_in(folder.listings(kind)) if has_own_name(name)}
    return frozenset(names.union(os.path.basename(one.merged) for one in _of_snapshot(folder, kind)))


def _of_snapshot(folder: FolderLayout, kind: str) -> list[Listing]:
    """Return a snapshot's merged files, all of which count, as listings."""
    path = folder.listings(kind) / SNAPSHOT_LISTING
    try:
        rows = remembered(path, lambda: pq.ParquetFile(plain(path)).read().to_pylist(), "snapshot")
    except FileNotFoundError:
        return []
    return [Listing(path, row["path"], (), 0.0) for row in rows if not row["hidden"]]


def _parquet_names(partition: Path) -> list[str]:
    """Return the sorted names of a partition's Parquet files; sorting 100,000 paths instead would take seconds."""
    return [name for name in names_in(partition) if name.endswith(".parquet")]


def _read(path: Path) -> MergedFile | str:
    """Return a merged file by its footer, or why it cannot be read. Raises `FileNotFoundError`."""

    def read() -> MergedFile | str:
        reason = damage.damage_of(path)
        if reason is not None:
            return reason
        metadata = pq.read_metadata(path)
        column = metadata.schema.to_arrow_schema().get_field_index("run_id")
        groups = [metadata.row_group(group).column(column).statistics for group in range(metadata.num_row_groups)]
        is_known = all(statistics is not None and statistics.has_min_max for statistics in groups)
        least = min((statistics.min for statistics in groups), default=_LAST) if is_known else ""
        most = max((statistics.max for statistics in groups), default="") if is_known else _LAST
        return MergedFile(path, file_key(path), metadata.num_rows, least, most)

    try:
        return remembered(path, read, "merged file")
    except FileNotFoundError:
        return damage.damage_of(path) or "it was not there"  # a link to nothing has a reason
    except (pa.ArrowException, ValueError) as error:
        return first_line(error)


def _whole(partition: Path, names: Collection[str]) -> list[MergedFile]:
    """Return those of the named merged files that are in a partition and can be read."""
    files = []
    for name in names:
        try:
            file = _read(partition / name)
        except OSError:  # another family's, or an error of the disk or its load
            continue
        if isinstance(file, MergedFile):
            files.append(file)
    return files


def _family_files(
    partition: Path, names: Sequence[str], listed: frozenset[str], left_out: Callable[[Path], bool]
) -> FamilyFiles:
    own = [name for name in names if not is_merged_name(name)]
    merged: list[MergedFile] = []
    damaged: dict[Path, str] = {}
    for name in listed.intersection(names):
        path = partition / name
        file = "it is left out" if left_out(path) else _read(path)
        if isinstance(file, MergedFile):
            merged.append(file)
        else:
            damaged[path] = file
    merged.sort(key=lambda file: (-file.rows, file.path.name))
    while True:
        try:
            doubled, unmerged = _doubled(merged), _unmerged(own, merged)
            break
        except Unreadable as error:
            damaged[error.path] = str(error)
            merged = [file for file in merged if file.path != error.path]
    left = [one for one in merged if one.path not in doubled or len(doubled[one.path]) < len(one.run_ids)]
    return FamilyFiles(partition, tuple(unmerged), tuple(left), doubled, damaged)


def _unmerged(own: list[str], merged: Sequence[MergedFile]) -> list[str]:
    """Return the names of the files whose run is in no merged file. Where both exist, the merged one came first."""
    for file in merged:
        run_ids = [name.removesuffix(".parquet") for name in own]
        if any(map(file.may_hold, run_ids)):
            # As bytes: a name that somebody put there may be no text.
            names = pa.array(map(os.fsencode, run_ids), pa.binary())
            is_held = pc.is_in(names, value_set=file.run_ids.cast(pa.binary())).to_pylist()
            own = [name for name, held in zip(own, is_held, strict=True) if not held]
    return own


def _doubled(merged: Sequence[MergedFile]) -> dict[Path, frozenset[str]]:
    """Return, for each merged file, its runs that a file before it holds; compared once while they stay the same."""
    return remembered_by(("doubled", *(file.key for file in merged)), lambda: _compared(merged))


def _compared(merged: Sequence[MergedFile]) -> dict[Path, frozenset[str]]:
    doubled: dict[Path, frozenset[str]] = {}
    for at, file in enumerate(merged):
        for other in merged[:at]:
            if file.least <= other.most and other.least <= file.most:
                both = file.run_ids.filter(pc.is_in(file.run_ids, value_set=other.run_ids))
                doubled[file.path] = doubled.get(file.path, frozenset()).union(both.to_pylist())
    return {path: run_ids for path, run_ids in doubled.items() if run_ids}
