"""Reads the listings of a data folder; a damaged one is recovered from the merged file of the same name.

Start reading at `read_listings`. `warehouse.files.believed` decides whether a listing is valid;
`warehouse.files.merged` writes listings. File contents are cached in memory while the file stays the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conf.files.json_file import parse_json
from conf.plain_text import first_line, one_line
from warehouse.files import damage
from warehouse.files.checksum import checksum_problem, recorded_checksum
from warehouse.files.damage import DamagedFile
from warehouse.files.layout import FolderLayout
from warehouse.files.merged import SOURCES, Listing, has_own_name, is_merged_name
from warehouse.files.remembered import file_key, remembered, remembered_by

PARTITION = "family="


@dataclass(frozen=True)
class DamagedListing(DamagedFile):
    """A listing that can be read neither itself nor from its merged file."""

    merged: Path | None = None  # the merged file of its name, if it exists and cannot replace the listing

    def line(self) -> str:
        """Return the file and the reason as commands print them."""
        return one_line(f"ignoring {self.path}, which is not a valid listing: {self.reason}")


OnDamage = Callable[[DamagedListing], None]


def read_listings(folder: FolderLayout, kind: str, on_damage: OnDamage | None = None) -> list[Listing]:
    """Return the listings of `runs` or `telemetry`, oldest first. Each has the name of the merged file that it lists.

    A damaged one is read off its merged file, which names the files that it replaces; a line on stderr says so. Where
    that fails too, `on_damage` is called (default: a line on stderr), and the merged file does not count.
    """
    listings = []
    for name in names_in(folder.listings(kind)):
        if not (is_merged_name(name) and name.endswith(".parquet")):
            continue
        try:
            read = _read(folder, kind, folder.listings(kind) / name)
        except FileNotFoundError:  # compaction has removed it since
            continue
        if isinstance(read, Listing):
            listings.append(read)
        elif on_damage is not None:
            on_damage(read)
        else:
            warn_once(read.path, read.line())
    return sorted(listings, key=lambda listing: (listing.published_at_s, listing.merged))


def recovered_listing(folder: FolderLayout, kind: str, file: Path) -> Listing | None:
    """Return the content of a damaged listing, from its merged file; None if that is damaged, or too old to hold it.

    A listing is written whole, so a damaged one was there: its merged file counted.
    """
    candidates = _merged_files_named(folder, kind, file.name)
    if len(candidates) != 1:
        return None
    (path,) = candidates
    try:
        if checksum_problem(path) is not None:
            return None
        metadata = pq.read_metadata(path)
        sources = parse_json((metadata.metadata or {})[SOURCES])
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


def is_whole_listing(file: Path) -> bool:
    """Return whether a listing is readable and lists the merged file of its own name."""
    try:
        content = _content(file)
    except OSError:
        return False
    return isinstance(content, Listing) and _lists_own_name(content)


def names_in(path: Path) -> list[str]:
    """Return the names in a folder, sorted; none where there is no folder."""
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


_warned: set[Hashable] = set()


def warn_once(path: Path, line: str) -> None:
    """Print a line on stderr, once in a process while the file stays as it is."""
    try:
        key = (file_key(path), line)
    except OSError:
        return
    if key not in _warned:
        _warned.add(key)
        print(one_line(f"warning: {line}"), file=sys.stderr, flush=True)


def _read(folder: FolderLayout, kind: str, path: Path) -> Listing | DamagedListing:
    """Return the listing, from its merged file if need be, or the damage. Raises `FileNotFoundError`."""
    if not has_own_name(path):
        return DamagedListing(path, "compaction creates no file of this name")
    try:
        content = remembered(path, lambda: _content(path), "listing")
    except FileNotFoundError as error:
        if not path.is_symlink():
            raise
        content = first_line(error)
    except OSError as error:  # of the disk: it may be gone at the next look
        content = first_line(error)
    if isinstance(content, Listing):
        if _lists_own_name(content):
            return content
        return DamagedListing(path, f"it names {content.merged!r} instead of the merged file with its own name")
    merged = _merged_files_named(folder, kind, path.name)
    if not merged:
        return DamagedListing(path, content)
    try:
        key = ("recovered", content, *map(file_key, merged))
        recovered = remembered_by(key, lambda: recovered_listing(folder, kind, path))
    except OSError:  # a link to nothing, or gone since
        recovered = None
    if recovered is None:
        return DamagedListing(path, content, merged[0])
    warn_once(path, f"{path}: this listing is damaged ({content}): reading its content from {merged[0]}")
    return recovered


def _content(path: Path) -> Listing | str:
    """Return the listing, or the problem of the file."""
    reason = damage.damage_of(path, pages=True)
    if reason is not None:
        return reason
    try:
        return Listing.read(path)
    except (ValueError, pa.ArrowException) as error:
        return str(error)


def _lists_own_name(listing: Listing) -> bool:
    partition, slash, name = listing.merged.partition("/")
    return name == listing.file.name and bool(slash) and partition.startswith(PARTITION)


def _merged_files_named(folder: FolderLayout, kind: str, name: str) -> list[Path]:
    root = folder.root / kind
    paths = [root / partition / name for partition in names_in(root) if partition.startswith(PARTITION)]
    return [path for path in paths if os.path.lexists(path)]
