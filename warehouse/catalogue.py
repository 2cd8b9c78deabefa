"""The catalogue of a data folder: which of its files count, and which runs are in merged files.

Start reading at `counting`. The catalogue of a table is its listings, one for each merged file (`warehouse.merged`).
A merged file counts if it is listed; any file counts unless a listing has its name. So a run is shown once, wherever
else a copy of its file may be. Listings are taken at their word: whoever writes a false one into the folder can hide
runs, but not have them deleted (`warehouse.compact`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem
from conf.plain_text import first_line, one_line
from warehouse import damage
from warehouse.damage import DamagedFile
from warehouse.layout import KINDS, FolderLayout
from warehouse.merged import Listing, Unreadable, is_merged_name
from warehouse.plain_file import identity, plain

T = TypeVar("T")
SNAPSHOT_LISTING = "snapshot.parquet"  # of a snapshot, which has one for all its merged files
_PARTITION = "family="
_NO_FAMILY = "family=_"  # of files without rows
_LOOKS = 100  # at a folder that compactions change meanwhile


@dataclass(frozen=True)
class DamagedListing(DamagedFile):
    """A listing that can be read neither itself nor from its merged file."""

    merged: Path | None = None  # the merged file of its name, if it exists and cannot replace the listing

    def line(self) -> str:
        """Return the file and the reason as commands print them."""
        if self.merged is None:
            return one_line(f"ignoring {self.path}, which is not a valid listing: {self.reason}")
        return (
            f"{self.path} is damaged ({self.reason}) and cannot be recovered from {self.merged}, whose rows may be "
            "lost; restore both files from a copy, or run `python -m farm.doctor repair=true` to measure the runs again"
        )


@dataclass(frozen=True)
class Catalogue:
    """The listings of one table, and what they say of its files."""

    root: Path  # of the table's files
    listings: tuple[Listing, ...]
    damaged: tuple[DamagedListing, ...] = ()
    is_left_out: Callable[[Path], bool] = lambda path: False  # files that are known to be damaged

    @functools.cached_property
    def lost(self) -> tuple[Listing, ...]:
        """The listings whose merged file is gone, though no other replaces it and its runs' own files are gone too."""
        return tuple(one for one in self._missing if not self.gives_back(one) and not self.hides(one.merged))

    @functools.cached_property
    def whole(self) -> tuple[Listing, ...]:
        """The listings whose merged file is there and not damaged, as far as its footer tells."""
        return tuple(listing for listing in self.listings if self._is_whole(listing))

    @functools.cached_property
    def _missing(self) -> tuple[Listing, ...]:
        return tuple(listing for listing in self.listings if not os.path.lexists(self.path(listing)))

    @functools.cached_property
    def _hiding(self) -> tuple[Listing, ...]:
        return (*self.whole, *(listing for listing in self._missing if not self.gives_back(listing)))

    def _is_whole(self, listing: Listing) -> bool:
        path = self.path(listing)
        return not self.is_left_out(path) and merged_damage(path) is None

    def path(self, listing: Listing) -> Path:
        """Return the path of the merged file of a listing."""
        return self.root / listing.merged

    def gives_back(self, listing: Listing) -> bool:
        """Return whether all the files that a lost merged file replaced are there, so that they count again."""
        return bool(listing.hidden) and all(os.path.lexists(self.root / name) for name in listing.hidden)

    def hides(self, name: str) -> bool:
        """Return whether a file, `family=F/NAME.parquet`, does not count since a merged file stands for it."""
        return any(name in listing.hidden for listing in self._hiding)

    def counts(self, name: str) -> bool:
        """Return whether a file counts, damaged or not."""
        if is_merged_name(os.path.basename(name)) and not any(name == listing.merged for listing in self.listings):
            return False
        return not self.hides(name)

    def holder(self, name: str) -> Listing | None:
        """Return the listing that counts and has a run's own name, None if the run is in no merged file."""
        holders = (listing for listing in self.listings if name in listing.hidden and self._is_whole(listing))
        return next((listing for listing in holders if not self.hides(listing.merged)), None)

    def lost_lines(self) -> list[str]:
        """Return a line for each merged file and listing that is lost: without it, counts would be too low."""
        lines = [self.lost_line(listing) for listing in self.lost]
        return lines + [one.line() for one in self.damaged if one.merged is not None and not self._is_replaced(one)]

    def lost_line(self, listing: Listing) -> str:
        """Describe a merged file that is gone."""
        rows = "its rows are" if listing.rows is None else f"its {listing.rows:,} rows are"
        return (
            f"{self.path(listing)} is gone, though {listing.file} lists it: {rows} missing; "
            f"put the file back, or run `python -m farm.doctor repair=true` to measure its runs again"
        )

    def _is_replaced(self, damaged: DamagedListing) -> bool:
        assert damaged.merged is not None
        return self.hides(f"{damaged.merged.parent.name}/{damaged.merged.name}")


def look(
    folder: FolderLayout, kind: str, at: Callable[[Catalogue], T], is_left_out: Callable[[Path], bool] | None = None
) -> T:
    """Return what `at` makes of the catalogue of a table, which stayed the same meanwhile.

    So the files that `at` finds are those of the listings: a compaction writes a merged file before its listing, and
    deletes what it replaces later. Raises `EnvironmentProblem` if compactions never leave it the time.
    """
    for _ in range(_LOOKS):
        state = _state(folder, kind)
        catalogue = _read(folder, kind, state)
        if is_left_out is not None:
            catalogue = replace(catalogue, is_left_out=is_left_out)
        result = at(catalogue)
        if _state(folder, kind) == state:
            return result
    raise EnvironmentProblem(f"the files of {folder.root / kind} change faster than they are listed; try again")


def read_catalogue(folder: FolderLayout, kind: str) -> Catalogue:
    """Return the catalogue of a table as it is now, for whoever holds the compaction's lock."""
    return look(folder, kind, lambda catalogue: catalogue)


def names_on_disk(root: Path, family: str | None = None) -> Iterator[str]:
    """Yield the Parquet files of a table, sorted, as `family=F/NAME.parquet`; of all families or of one."""
    for partition in _names_in(root):
        if not partition.startswith(_PARTITION) or partition.startswith(_NO_FAMILY):
            continue
        if family in (None, partition.removeprefix(_PARTITION)):
            yield from (f"{partition}/{name}" for name in _names_in(root / partition) if name.endswith(".parquet"))


def counting(catalogue: Catalogue, family: str | None = None) -> list[str]:
    """Return those of `names_on_disk` that count, damaged or not."""
    return [name for name in names_on_disk(catalogue.root, family) if catalogue.counts(name)]


def counting_files(folder: FolderLayout, kind: str, family: str) -> list[Path]:
    """Return the files of a partition whose rows count, sorted, whether they are damaged or not."""
    names = look(folder, kind, lambda catalogue: counting(catalogue, family))
    return [folder.root / kind / name for name in names]


def merged_file_with(folder: FolderLayout, kind: str, family: str, run_id: str) -> Path | None:
    """Return the merged file that counts and holds the run, or None. Damaged files hold no runs."""
    name = f"{folder.partition(kind, family).name}/{run_id}.parquet"

    def at(catalogue: Catalogue) -> Path | None:
        holder = catalogue.holder(name)
        return None if holder is None else catalogue.path(holder)

    return look(folder, kind, at)


def refuse_lost(folder: FolderLayout, kinds: Sequence[str] = KINDS) -> None:
    """Raise `EnvironmentProblem` for each merged file or listing that is lost: without it, counts would be too low."""
    lines = [line for kind in kinds for line in look(folder, kind, Catalogue.lost_lines)]
    if lines:
        raise EnvironmentProblem("; ".join(lines))


def merged_damage(path: Path) -> str | None:
    """Return why a merged file cannot be used: not there, no Parquet file, or columns of other types; None if it can.

    Only the footer is read, once while the file stays the same.
    """
    known = identity(path)
    return "it is not there" if known is None else _damage(path, known)


@functools.lru_cache(4096)
def _damage(path: Path, known: Hashable) -> str | None:
    try:
        return damage.damage_of(path)
    except FileNotFoundError as error:  # a link to nothing, or gone since
        return first_line(error)


def _names_in(path: Path) -> list[str]:
    """Return the names in a folder, sorted; none where there is no folder."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _state(folder: FolderLayout, kind: str) -> list[tuple[Path, Hashable]]:
    """Return the listings of a table, each with a value that changes when the file does."""
    root = folder.listings(kind)
    names = [name for name in _names_in(root) if name == SNAPSHOT_LISTING or is_merged_name(name)]
    return [(root / name, identity(root / name)) for name in names if name.endswith(".parquet")]


def _read(folder: FolderLayout, kind: str, state: Sequence[tuple[Path, Hashable]]) -> Catalogue:
    listings: list[Listing] = []
    damaged: list[DamagedListing] = []
    for path, known in state:
        if known is None:  # compaction has removed it since
            continue
        if path.name == SNAPSHOT_LISTING:
            listings += _of_snapshot(path, known)
            continue
        try:
            listing = _listing(path, known)
            if not listing.is_current:
                merged = folder.root / kind / listing.merged
                with contextlib.suppress(Unreadable, OSError):  # damaged: it hides nothing, and is named elsewhere
                    listing = _completed(listing, merged, identity(merged))
            listings.append(listing)
        except (ValueError, OSError) as error:
            recovered = _recovered(path, _merged_file_named(folder.root / kind, path.name), first_line(error))
            if isinstance(recovered, Listing):
                listings.append(recovered)
            else:
                damaged.append(recovered)
    listings.sort(key=lambda listing: (listing.published_at_s, listing.merged))
    return Catalogue(folder.root / kind, tuple(listings), tuple(damaged))


def _recovered(path: Path, merged: Path | None, problem: str) -> Listing | DamagedListing:
    """Return a damaged listing as its merged file has it; a line on stderr says so."""
    damaged = DamagedListing(path, problem, merged)
    if merged is None:
        _warn_once(path, damaged.line())
        return damaged
    try:
        listing = _scanned(path, merged, identity(merged))
    except (Unreadable, OSError):
        return damaged
    _warn_once(path, f"{path}: this listing is damaged ({problem}): reading its content from {merged}")
    return listing


@functools.lru_cache(1024)
def _listing(path: Path, known: Hashable) -> Listing:
    return Listing.read(path)


@functools.lru_cache(1024)
def _completed(listing: Listing, merged: Path, known: Hashable) -> Listing:
    """Return a listing of an older version with the names of all runs of its merged file."""
    scanned = Listing.of_merged(listing.file, merged, listing.published_at_s, verified=False)
    return replace(listing, hidden=listing.hidden | scanned.hidden)


@functools.lru_cache(1024)
def _scanned(file: Path, merged: Path, known: Hashable) -> Listing:
    return Listing.of_merged(file, merged, merged.stat().st_mtime)


@functools.lru_cache(64)
def _of_snapshot(path: Path, known: Hashable) -> list[Listing]:
    """Return a snapshot's merged files, all of which count, as listings."""
    try:
        rows = pq.ParquetFile(plain(path)).read().to_pylist()
        return [Listing(path, row["path"], frozenset(), 0.0) for row in rows if not row["hidden"]]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise EnvironmentProblem(f"{path} is damaged: {first_line(error)}") from error


def _merged_file_named(root: Path, name: str) -> Path | None:
    """Return the merged file of that name, of whichever family; None if there is none."""
    places = [root / partition / name for partition in _names_in(root) if partition.startswith(_PARTITION)]
    return next((path for path in places if os.path.lexists(path)), None)


_warned: set[Hashable] = set()


def _warn_once(path: Path, line: str) -> None:
    """Print a line on stderr, once in a process while the file stays as it is."""
    key = (path, identity(path), line)
    if key not in _warned:
        _warned.add(key)
        print(one_line(f"warning: {line}"), file=sys.stderr, flush=True)
