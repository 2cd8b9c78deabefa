"""Which files of a data folder count for one query: checked against the listings, each run in one place only.

Start reading at `counting_plan`. It costs a listing of the folders; content is read in doubtful cases only.

Which listings are believed is `warehouse.believed`'s to say. Checksums of data files are `warehouse.check`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import UsageError
from warehouse.believed import PARTITION, believed_listings, merged_damage, names_in, report_damaged_merged
from warehouse.folder import DataFolder
from warehouse.merged import is_merged_name, sources_of
from warehouse.remembered import file_key, remembered, remembered_by

SNAPSHOT_LISTING = "snapshot.parquet"
_NO_FAMILY = "family=_"  # of files without rows
_PASSES = 20  # over the folder, while compaction deletes what the last pass has found
_REMEMBERED_GROUPS = 32
_group_memory: dict[Hashable, Any] = {}  # up to 100,000 ids each


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
    left_out = _or_damaged(left_out)
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
    for partition in sorted(names_in(root)):
        if partition.startswith(PARTITION) and not partition.startswith(_NO_FAMILY):
            names = names_in(root / partition)
            found[partition.removeprefix(PARTITION)] = sorted(name for name in names if name.endswith(".parquet"))
    return found


def _is_there(on_disk: Mapping[str, list[str]], name: str) -> bool:
    partition, _, file_name = name.partition("/")
    return file_name in on_disk.get(partition.removeprefix(PARTITION), ())


def _listed_and_hidden(
    folder: DataFolder, kind: str, left_out: Callable[[Path], bool]
) -> tuple[dict[str, Path], set[str]]:
    """(name of each merged file that is listed -> its listing, names of the files that listings hide).

    A damaged merged file hides nothing: what it replaces may still be there.
    """
    listed: dict[str, Path] = {}
    hidden: set[str] = set()
    snapshot_listing = folder.listings(kind) / SNAPSHOT_LISTING
    if snapshot_listing.exists():  # of a snapshot, whose merged files all count
        listed |= dict.fromkeys(_snapshot_names(snapshot_listing), snapshot_listing)
    believed = believed_listings(folder, kind)
    for listing in believed.listings:
        listed[listing.merged] = listing.file
        if not left_out(folder.root / kind / listing.merged):
            hidden.update(listing.hidden)
    lost = [entry for entry in believed.lost if f"{entry.merged.parent.name}/{entry.merged.name}" not in hidden]
    if lost:
        lines = ", ".join(f"{entry.file} ({entry.reason}) lists {entry.merged}" for entry in lost)
        raise UsageError(
            f"{len(lost)} listing{'s are' if len(lost) > 1 else ' is'} damaged and cannot be recovered from the merged "
            f"file, whose rows may be lost: {lines}; "
            "restore both files from a copy, or run `python -m farm.doctor repair=true` to measure the runs again"
        )
    return listed, hidden


def _or_damaged(left_out: Callable[[Path], bool]) -> Callable[[Path], bool]:
    """Say of a file whether it is left out, also of a merged file that has other columns than it should."""

    def is_left_out(path: Path) -> bool:
        if left_out(path):
            return True
        if not is_merged_name(path.name):
            return False
        try:
            reason = merged_damage(path)
        except FileNotFoundError:  # which is another matter
            return False
        if reason is not None:
            report_damaged_merged(path, reason)
        return reason is not None

    return is_left_out


def _snapshot_names(path: Path) -> list[str]:
    table = remembered(path, lambda: pq.ParquetFile(path).read(), "snapshot")
    return [row["path"] for row in table.to_pylist() if not row["hidden"]]


def _is_superseded(folder: DataFolder, kind: str, on_disk: Mapping[str, list[str]], name: str) -> bool:
    """Whether a merged file that is there was made of the missing one: compaction was killed before it tidied up."""
    partition = os.path.dirname(name)
    for file_name in on_disk.get(partition.removeprefix(PARTITION), ()):
        if is_merged_name(file_name):
            try:
                if name in sources_of(folder.root / kind / partition / file_name):
                    return True
            except (pa.ArrowException, OSError, ValueError):
                continue
    return False


def _family_plan(
    folder: DataFolder,
    kind: str,
    family: str,
    names: list[str],
    listed: Mapping[str, Path],
    hidden: set[str],
    left_out: Callable[[Path], bool],
) -> FamilyPlan:
    partition = folder.root / kind / f"{PARTITION}{family}"
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
    key = ("doubled", *(file_key(partition / name) for name in merged))
    return remembered_by(key, lambda: _compared(partition, merged))


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
        return remembered(path, read, "ranges")
    except (pa.ArrowException, OSError):
        return []


def _group_ids(path: Path, group: int) -> frozenset[str]:
    def read() -> frozenset[str]:
        file = pq.ParquetFile(path, read_dictionary=["run_id"])
        return _distinct(file.read_row_group(group, columns=["run_id"]))

    try:
        return remembered(path, read, group, _group_memory, _REMEMBERED_GROUPS)
    except (pa.ArrowException, OSError):
        return frozenset()


def _distinct(table: pa.Table) -> frozenset[str]:
    return frozenset(table.column("run_id").unique().to_pylist())
