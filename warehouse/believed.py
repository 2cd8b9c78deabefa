"""Which listings of a data folder are believed: those that compaction could have written.

Start reading at `believed_listings`. Queries and `warehouse.merged_index` judge by it.

The name of a believed listing is one that compaction gives, it stands for the merged file of that name, and that file
holds every run of the files that it hides and that are there. A damaged listing is read off its merged file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conf.plain_text import one_line
from warehouse import damage
from warehouse.damage import DamagedFile
from warehouse.folder import DataFolder
from warehouse.merged import Listing, has_own_name, is_merged_name, recovered_listing
from warehouse.remembered import file_key, remembered, remembered_by

PARTITION = "family="
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError)


@dataclass(frozen=True)
class LostListing:
    """A damaged listing that cannot be read off its merged file, which is there."""

    file: Path
    merged: Path
    reason: str


@dataclass
class Believed:
    """The listings that are believed, and those that are lost."""

    listings: list[Listing] = field(default_factory=list)
    lost: list[LostListing] = field(default_factory=list)


def believed_listings(folder: DataFolder, kind: str) -> Believed:
    """Return the believed listings of `runs` or `telemetry`, by name. Each other one is named in a line on stderr.

    Their content is read once while they stay the same. What they hide is judged anew, as files come and go.
    """
    believed = Believed()
    for name in sorted(names_in(folder.listings(kind))):
        if not name.endswith(".parquet") or not is_merged_name(name):
            continue
        path = folder.listings(kind) / name
        if not has_own_name(path):
            _warn(path, "ignoring this listing: compaction does not create files with this name")
            continue
        try:
            listing = _read(folder, kind, path)
        except FileNotFoundError:  # compaction has replaced it since
            continue
        if isinstance(listing, LostListing):
            believed.lost.append(listing)
        elif listing is not None and _is_sound(folder, kind, listing):
            believed.listings.append(listing)
    return believed


def counting_merged_names(folder: DataFolder, kind: str) -> frozenset[str]:
    """Return the merged files that count, as `family=F/NAME`: listed, not hidden, there, and not damaged."""
    listings = believed_listings(folder, kind).listings
    whole = [listing for listing in listings if _is_whole(folder.root / kind / listing.merged)]
    hidden = {name for listing in whole for name in listing.hidden if is_merged_name(os.path.basename(name))}
    return frozenset(listing.merged for listing in whole if listing.merged not in hidden)


def merged_damage(path: Path) -> str | None:
    """Return why a merged file cannot be used: no Parquet file, or columns of other types; None if it can.

    Raises `FileNotFoundError`. Only the footer is read, once while the file stays the same.
    """
    return remembered(path, lambda: damage.damage_of(path), "damage")


def names_in(path: Path) -> list[str]:
    """Return the names in a folder, none where there is no folder."""
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_whole(path: Path) -> bool:
    try:
        return merged_damage(path) is None
    except FileNotFoundError:
        return False


def _read(folder: DataFolder, kind: str, path: Path) -> Listing | LostListing | None:
    """What a listing says, or its merged file where it is damaged. None for a file that is no listing."""
    try:
        read = remembered(path, lambda: _content(path), "listing")
    except FileNotFoundError:
        raise
    except OSError as error:  # of the disk: it may be gone at the next look
        read = str(error)
    if isinstance(read, Listing):
        return read
    merged = sorted((folder.root / kind).glob(f"{PARTITION}*/{path.name}"))
    if not merged:
        _warn(path, f"ignoring this file: it is not a valid listing ({read})")
        return None
    try:
        key = ("recovered", file_key(path), *map(file_key, merged))
        recovered = remembered_by(key, lambda: recovered_listing(folder, kind, path))
    except FileNotFoundError:
        recovered = None
    if recovered is None:
        return LostListing(path, merged[0], read) if merged[0].exists() else None
    _warn(path, f"this listing is damaged ({read}): reading its content from {merged[0]}")
    return recovered


def _content(path: Path) -> Listing | str:
    """The listing, or what is wrong with the file."""
    reason = damage.damage_of(path, pages=True)
    if reason is not None:
        return reason
    try:
        return Listing.read(path)
    except (ValueError, pa.ArrowException) as error:
        return str(error)


def _is_sound(folder: DataFolder, kind: str, listing: Listing) -> bool:
    if not _is_name(listing.merged) or os.path.basename(listing.merged) != listing.file.name:
        _warn(
            listing.file,
            f"ignoring this listing: it names {listing.merged!r} instead of the merged file with its own name",
        )
        return False
    not_held = _hidden_and_not_held(folder, kind, listing)
    if not_held:
        others = f" and {len(not_held) - 1} more files" if len(not_held) > 1 else ""
        _warn(
            listing.file,
            f"ignoring this listing: it hides {not_held[0]!r}{others}, whose runs its merged file does not hold",
        )
    return not not_held


def _hidden_and_not_held(folder: DataFolder, kind: str, listing: Listing) -> tuple[str, ...]:
    """The files that a listing hides, that are there now and have a run which the merged file lacks."""
    root = folder.root / kind
    merged = root / listing.merged
    try:
        if merged_damage(merged) is not None:  # it hides nothing, and is named where it would count
            return _foreign(listing)
        key = ("doubtful", file_key(merged), _listing_key(listing))
        foreign, doubtful = remembered_by(key, lambda: (_foreign(listing), _doubtful(merged, listing)))
    except _UNREADABLE:  # torn or gone, which is another matter: it is named there
        return _foreign(listing)
    if foreign or not doubtful:
        return foreign
    present = _present(root, doubtful)
    if not present:
        return ()
    try:
        return remembered_by(
            ("not held", key, tuple(present.values())), lambda: _not_held(root, merged, tuple(present))
        )
    except _UNREADABLE:
        return ()


def _listing_key(listing: Listing) -> Hashable:
    try:
        return file_key(listing.file)
    except OSError:  # replaced since it was read
        return listing.hidden


def _foreign(listing: Listing) -> tuple[str, ...]:
    """The hidden names that are not of the merged file's partition."""
    partition = os.path.dirname(listing.merged)
    return tuple(name for name in listing.hidden if not _is_name(name) or os.path.dirname(name) != partition)


def _doubtful(merged: Path, listing: Listing) -> tuple[str, ...]:
    """The hidden names that do not say that the merged file holds their run: their content has to."""
    if not listing.hidden:
        return ()
    held = _ids(merged)
    return tuple(name for name in listing.hidden if os.path.basename(name).removesuffix(".parquet") not in held)


def _present(root: Path, names: tuple[str, ...]) -> dict[str, Hashable]:
    """Those of the names that are there, and what changes when they are written."""
    present = {}
    for name in names:
        try:
            present[name] = file_key(root / name)
        except OSError:
            continue
    return present


def _not_held(root: Path, merged: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    held = _ids(merged)
    not_held = []
    for name in names:
        try:
            if not _ids(root / name) <= held:  # a file without rows has nothing to be held
                not_held.append(name)
        except _UNREADABLE:  # torn after it was merged, or deleted
            continue
    return tuple(not_held)


def _ids(path: Path) -> frozenset[str]:
    return frozenset(pq.ParquetFile(path).read(columns=["run_id"]).column("run_id").unique().to_pylist())


def _is_name(name: str) -> bool:
    """Whether `name` is family=F/NAME.parquet and leads nowhere else."""
    partition, slash, file_name = name.partition("/")
    return bool(slash) and partition.startswith(PARTITION) and "/" not in file_name and file_name.endswith(".parquet")


_warned: set[Hashable] = set()


def _warn(path: Path, text: str) -> None:
    """Print a line on stderr, once in a process while the file stays as it is."""
    try:
        key = (file_key(path), text)
    except OSError:
        return
    if key not in _warned:
        _warned.add(key)
        print(one_line(f"warning: {path}: {text}"), file=sys.stderr, flush=True)


def report_damaged_merged(path: Path, reason: str) -> None:
    """Name a merged file that is left out, once in a process while the file stays as it is."""
    damage.report([DamagedFile(path, reason)])
