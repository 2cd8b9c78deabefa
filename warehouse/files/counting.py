"""Finds the files of a data folder whose rows count: merged files with a listing, and files that no listing hides.

Start reading at `counting_files`; `counting_plan` is for queries, which also show each run once and leave damaged files
out. Both cost a listing of the folders; content is read in doubtful cases only.

`warehouse.files.believed` decides which listings are valid. `warehouse.check` verifies the checksums of data files.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem
from warehouse.files.believed import Judgement, is_damaged_merged, judge, refuse_lost
from warehouse.files.layout import FolderLayout
from warehouse.files.listings import PARTITION, names_in
from warehouse.files.merged import Listing, is_merged_name
from warehouse.files.plain_file import plain
from warehouse.files.remembered import file_key, remembered, remembered_by

_NO_FAMILY = "family=_"  # of files without rows
_PASSES = 20  # over the folder, while compaction deletes what the last pass has found
_REMEMBERED_GROUPS = 32
_group_memory: dict[Hashable, Any] = {}  # up to 100,000 ids each


@dataclass(frozen=True)
class FamilyPlan:
    """Names of one family's files that count, and the runs of a merged file that another file already holds."""

    family: str
    names: tuple[str, ...]
    doubled: Mapping[str, frozenset[str]] = field(default_factory=dict)


def counting_plan(folder: FolderLayout, kind: str, left_out: Callable[[Path], bool]) -> list[FamilyPlan]:
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
        if all(name in judgement.hidden or _is_there(on_disk, name) for name in judgement.listed):
            break
    else:
        refuse_lost(folder, [kind])
    return [
        _family_plan(folder.root / kind / partition, names, judgement, is_left_out)
        for partition, names in on_disk.items()
    ]


def counting_files(
    folder: FolderLayout, kind: str, family: str, listings: Sequence[Listing] | None = None
) -> list[Path]:
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


def _is_there(on_disk: Mapping[str, list[str]], path: str) -> bool:
    partition, _, name = path.partition("/")
    names = on_disk.get(partition, [])
    at = bisect.bisect_left(names, name)
    return names[at : at + 1] == [name]


def _family_plan(
    partition: Path, names: Sequence[str], judgement: Judgement, left_out: Callable[[Path], bool]
) -> FamilyPlan:
    own: list[str] = []
    merged: list[str] = []
    for name in _counting_names(partition.name, names, judgement):
        if not left_out(partition / name):
            (merged if is_merged_name(name) else own).append(name)
    if merged:
        own = _without_merged(partition, own, merged)
    doubled = _doubled(partition, merged) if len(merged) > 1 else {}
    return FamilyPlan(partition.name.removeprefix(PARTITION), (*own, *merged), doubled)


def _without_merged(partition: Path, own: list[str], merged: list[str]) -> list[str]:
    """Return the runs' own files whose run is in no merged file. Where both exist, the merged one came first."""
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
    """Return, for each merged file, its runs that an earlier merged file holds. Statistics rule out most pairs.

    The result is cached while the files stay the same.
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
    """Return (least, greatest) run_id of each row group; none for an unreadable file, which is reported elsewhere."""

    def read() -> list[tuple[str, str]]:
        metadata = pq.read_metadata(plain(path))
        column = metadata.schema.to_arrow_schema().get_field_index("run_id")
        ranges = []
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(column).statistics
            known = statistics is not None and statistics.has_min_max
            ranges.append((statistics.min, statistics.max) if known else ("", "\U0010ffff"))
        return ranges

    try:
        return remembered(path, read, "ranges")
    except (pa.ArrowException, OSError):
        return []


def _group_ids(path: Path, group: int) -> frozenset[str]:
    def read() -> frozenset[str]:
        file = pq.ParquetFile(plain(path), read_dictionary=["run_id"])
        return _distinct(file.read_row_group(group, columns=["run_id"]))

    try:
        return remembered(path, read, group, _group_memory, _REMEMBERED_GROUPS)
    except (pa.ArrowException, OSError):
        return frozenset()


def _distinct(table: pa.Table) -> frozenset[str]:
    return frozenset(table.column("run_id").unique().to_pylist())
