"""Which files of a data folder count for one query: checked against the listings, each run in one place only.

Start reading at `counting_plan`. It costs a listing of the folders; content is read in doubtful cases only.

A listing is believed if compaction could have written it: its name is one that compaction gives, it stands for the
merged file of that name, and that file holds every run of the files that it hides. Checksums are `warehouse.check`'s.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import UsageError
from conf.plain_text import one_line
from warehouse import damage
from warehouse.damage import DamagedFile
from warehouse.folder import DataFolder
from warehouse.merged import Listing, is_merged_name

SNAPSHOT_LISTING = "snapshot.parquet"
_MERGED_NAME = re.compile(r"merged-\d{8}T\d{6}-[0-9a-f]{12}\.parquet")
_PARTITION = "family="
_NO_FAMILY = "family=_"  # of files without rows
_SOURCES = b"gpufarm_sources"
_PASSES = 20  # over the folder, while compaction deletes what the last pass has found
_REMEMBERED = 4096
_REMEMBERED_GROUPS = 32


@dataclass(frozen=True)
class FamilyPlan:
    """The files of one family that count, by name, and the runs of a merged file that another file holds already."""

    family: str
    names: tuple[str, ...]
    doubled: Mapping[str, frozenset[str]] = field(default_factory=dict)


def counting_plan(folder: DataFolder, kind: str, left_out: Callable[[Path], bool]) -> list[FamilyPlan]:
    """Return the files of `runs` or `telemetry` that count now, by family.

    `left_out` says of a file whether it is known to be damaged. A merged file that is listed and missing raises
    `UsageError`: its rows are lost, and no count may hide that. A listing that cannot be compaction's hides nothing.
    """
    for _ in range(_PASSES):
        # The listings before the files: a merged file that is found listed was there before its listing.
        listed, hidden = _listed_and_hidden(folder, kind, left_out)
        on_disk = _names_on_disk(folder.root / kind)
        missing = [name for name in listed if name not in hidden and not _is_there(on_disk, name)]
        if not missing:
            break
    else:
        missing = [name for name in missing if not _is_superseded(folder, kind, on_disk, name)]
        if missing:
            lines = ", ".join(f"{listed[name]} lists {folder.root / kind / name}" for name in missing)
            raise UsageError(
                f"{len(missing)} merged file{'s are' if len(missing) > 1 else ' is'} missing with all rows: {lines}; "
                "restore the file from a copy, or run `python -m farm.doctor repair=true` to measure its runs again"
            )
    return [_family_plan(folder, kind, family, names, listed, hidden, left_out) for family, names in on_disk.items()]


def _names_on_disk(root: Path) -> dict[str, list[str]]:
    """Family -> names of its Parquet files, sorted."""
    found: dict[str, list[str]] = {}
    for partition in sorted(_scan(root)):
        if partition.startswith(_PARTITION) and not partition.startswith(_NO_FAMILY):
            names = _scan(root / partition)
            found[partition.removeprefix(_PARTITION)] = sorted(name for name in names if name.endswith(".parquet"))
    return found


def _scan(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_there(on_disk: Mapping[str, list[str]], name: str) -> bool:
    partition, _, file_name = name.partition("/")
    return file_name in on_disk.get(partition.removeprefix(_PARTITION), ())


def _listed_and_hidden(
    folder: DataFolder, kind: str, left_out: Callable[[Path], bool]
) -> tuple[dict[str, Path], set[str]]:
    """(name of each merged file that is listed -> its listing, names of the files that listings hide).

    A damaged merged file hides nothing: what it replaces may still be there.
    """
    listed: dict[str, Path] = {}
    hidden: set[str] = set()
    listings = folder.listings(kind)
    for file_name in sorted(_scan(listings)):
        path = listings / file_name
        if file_name == SNAPSHOT_LISTING:  # of a snapshot, whose merged files all count
            listed |= dict.fromkeys(_snapshot_names(path), path)
        elif file_name.endswith(".parquet") and is_merged_name(file_name):
            try:
                listing = _remembered(path, lambda path=path: _read_listing(folder, kind, path))
            except FileNotFoundError:  # compaction has replaced it since
                continue
            if listing is not None:
                listed[listing.merged] = path
                if not left_out(folder.root / kind / listing.merged):
                    hidden.update(listing.hidden)
    return listed, hidden


def _snapshot_names(path: Path) -> list[str]:
    table = _remembered(path, lambda: pq.ParquetFile(path).read())
    return [row["path"] for row in table.to_pylist() if not row["hidden"]]


def _read_listing(folder: DataFolder, kind: str, path: Path) -> Listing | None:
    """The listing, or None for one that compaction has not written. Of a torn one, what its merged file says."""
    if not _MERGED_NAME.fullmatch(path.name):
        _warn(path, "its name is none that compaction gives: the listing is ignored")
        return None
    reason = damage.damage_of(path, pages=True)
    if reason is not None:
        damage.report([DamagedFile(path, reason)])
        return _listing_of_merged(folder, kind, path)
    try:
        listing = Listing.read(path)
    except (ValueError, KeyError, TypeError, pa.ArrowException):
        _warn(path, "it is no listing of one merged file: it is ignored")
        return None
    if os.path.basename(listing.merged) != path.name or not _is_name(listing.merged):
        _warn(path, f"it lists {listing.merged!r} instead of the merged file of its own name: it is ignored")
        return None
    not_held = _hidden_and_not_held(folder, kind, listing)
    if not_held:
        _warn(
            path,
            f"it hides {not_held[0]!r} and {len(not_held) - 1} more, whose runs its merged file does not hold: "
            "it is ignored",
        )
        return None
    return listing


def _listing_of_merged(folder: DataFolder, kind: str, path: Path) -> Listing | None:
    """Where a listing is torn, its name says which merged file counts, and that file's footer what it was made of."""
    root = folder.root / kind
    for merged in root.glob(f"{_PARTITION}*/{path.name}"):
        name = f"{merged.parent.name}/{merged.name}"
        try:
            hidden = tuple(_sources(merged))
        except (pa.ArrowException, OSError, ValueError):
            hidden = ()
        listing = Listing(file=path, merged=name, hidden=hidden, published_at_s=0.0)
        return listing if not _hidden_and_not_held(folder, kind, listing) else None
    return None


def _hidden_and_not_held(folder: DataFolder, kind: str, listing: Listing) -> list[str]:
    """The files that a listing hides, that are still there and have a run which the merged file lacks."""
    root = folder.root / kind
    partition = os.path.dirname(listing.merged)
    there = set(_scan(root / partition))
    hidden = [name for name in listing.hidden if os.path.dirname(name) == partition and os.path.basename(name) in there]
    foreign = [name for name in listing.hidden if not _is_name(name) or os.path.dirname(name) != partition]
    if not hidden:
        return foreign
    try:
        held = _ids(root / listing.merged)
    except (pa.ArrowException, OSError):  # torn or gone, which is another matter: it is named there
        return foreign
    not_held = []
    for name in hidden:
        file_name = os.path.basename(name)
        if not is_merged_name(file_name) and file_name.removesuffix(".parquet") in held:
            continue
        try:
            if not _ids(root / name) <= held:  # a file without rows has nothing to be held
                not_held.append(name)
        except (pa.ArrowException, OSError):  # torn after it was merged, or deleted
            continue
    return foreign + not_held


def _is_superseded(folder: DataFolder, kind: str, on_disk: Mapping[str, list[str]], name: str) -> bool:
    """Whether a merged file that is there was made of the missing one: compaction was killed before it tidied up."""
    partition = os.path.dirname(name)
    for file_name in on_disk.get(partition.removeprefix(_PARTITION), ()):
        if is_merged_name(file_name):
            try:
                if name in _sources(folder.root / kind / partition / file_name):
                    return True
            except (pa.ArrowException, OSError, ValueError):
                continue
    return False


def _sources(merged: Path) -> Mapping[str, Any]:
    """The files that a merged file was made of, as its footer has them."""
    return json.loads((pq.read_schema(merged).metadata or {}).get(_SOURCES, b"{}"))


def _family_plan(
    folder: DataFolder,
    kind: str,
    family: str,
    names: list[str],
    listed: Mapping[str, Path],
    hidden: set[str],
    left_out: Callable[[Path], bool],
) -> FamilyPlan:
    partition = folder.root / kind / f"{_PARTITION}{family}"
    prefix = f"{partition.name}/"
    own, merged = [], []
    for name in names:
        if prefix + name in hidden:
            continue
        if not is_merged_name(name):
            own.append(name)
        elif prefix + name in listed:
            merged.append(name)
    own = [name for name in own if not left_out(partition / name)]
    merged = [name for name in merged if not left_out(partition / name)]
    if merged:
        own = _without_merged(partition, own, merged)
    doubled = _doubled(partition, merged) if len(merged) > 1 else {}
    return FamilyPlan(family, (*own, *merged), doubled)


def _without_merged(partition: Path, own: list[str], merged: list[str]) -> list[str]:
    """The runs' own files whose run no merged file holds. Where both are there, the merged one came first."""
    for name in merged:
        if not own:
            break
        held: set[str] = set()
        for group, (least, most) in enumerate(_ranges(partition / name)):
            if any(least <= file_name[:-8] <= most for file_name in own):
                held |= _group_ids(partition / name, group)
        own = [file_name for file_name in own if file_name[:-8] not in held]
    return own


def _doubled(partition: Path, merged: list[str]) -> dict[str, frozenset[str]]:
    """Merged file -> its runs that an earlier merged file holds. Statistics rule out nearly all pairs.

    The answer is remembered while the files stay the same.
    """
    key = tuple(_key(partition / name, "doubled") for name in merged)
    return _remembered_by(key, lambda: _compared(partition, merged), _memory, _REMEMBERED)


def _compared(partition: Path, merged: list[str]) -> dict[str, frozenset[str]]:
    groups = [
        (least, most, order, group)
        for order, name in enumerate(merged)
        for group, (least, most) in enumerate(_ranges(partition / name))
    ]
    groups.sort()
    doubled: dict[str, set[str]] = {}
    open_groups: list[tuple[str, int, int]] = []  # most, file, row group
    for least, most, order, group in groups:
        open_groups = [entry for entry in open_groups if entry[0] >= least]
        for _, other, other_group in open_groups:
            if other == order:
                continue
            both = _group_ids(partition / merged[order], group) & _group_ids(partition / merged[other], other_group)
            if both:
                doubled.setdefault(merged[max(order, other)], set()).update(both)
        open_groups.append((most, order, group))
    return {name: frozenset(ids) for name, ids in doubled.items()}


def _ranges(path: Path) -> list[tuple[str, str]]:
    """(least, greatest) run_id of each row group; of a file that cannot be read none, as it is named elsewhere."""

    def read() -> list[tuple[str, str]]:
        metadata = pq.read_metadata(path)
        column = metadata.schema.to_arrow_schema().get_field_index("run_id")
        found = []
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(column).statistics
            known = statistics is not None and statistics.has_min_max
            found.append((statistics.min, statistics.max) if known else ("", "\U0010ffff"))
        return found

    try:
        return _remembered(path, read, "ranges")
    except (pa.ArrowException, OSError):
        return []


def _group_ids(path: Path, group: int) -> frozenset[str]:
    def read() -> frozenset[str]:
        file = pq.ParquetFile(path, read_dictionary=["run_id"])
        return _distinct(file.read_row_group(group, columns=["run_id"]))

    try:
        return _remembered(path, read, group, _group_memory, _REMEMBERED_GROUPS)
    except (pa.ArrowException, OSError):
        return frozenset()


def _ids(path: Path) -> frozenset[str]:
    return _distinct(pq.ParquetFile(path).read(columns=["run_id"]))


def _distinct(table: pa.Table) -> frozenset[str]:
    return frozenset(table.column("run_id").unique().to_pylist())


def _is_name(name: str) -> bool:
    """Whether `name` is family=F/NAME.parquet and leads nowhere else."""
    partition, slash, file_name = name.partition("/")
    return bool(slash) and partition.startswith(_PARTITION) and "/" not in file_name and file_name.endswith(".parquet")


_memory: dict[Hashable, Any] = {}
_group_memory: dict[Hashable, Any] = {}  # up to 100,000 ids each
_memory_lock = threading.Lock()


def _remembered(
    path: Path,
    read: Callable[[], Any],
    what: Hashable = "listing",
    memory: dict[Hashable, Any] = _memory,
    most: int = _REMEMBERED,
) -> Any:
    """What `read` gives of a file, once in a process while the file stays the same."""
    return _remembered_by(_key(path, what), read, memory, most)


def _key(path: Path, what: Hashable) -> Hashable:
    status = path.stat()
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns, what


def _remembered_by(key: Hashable, read: Callable[[], Any], memory: dict[Hashable, Any], most: int) -> Any:
    with _memory_lock:
        if key in memory:
            return memory[key]
    value = read()
    with _memory_lock:
        if len(memory) >= most:
            memory.clear()
        memory[key] = value
    return value


def _warn(path: Path, text: str) -> None:
    print(one_line(f"warning: {path}: {text}"), file=sys.stderr, flush=True)
