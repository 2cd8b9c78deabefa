"""`python -m warehouse.compact`: merges the many small files of runs into few large ones, under running readers.

Start reading at `compact`. Why no reader sees a row twice or not at all, and no kill matters:

- A merged file counts only from the moment its listing is there (one `os.replace`), and from that moment the files
  it replaces do not. Readers expand the listings before the data files (`warehouse.files.views`), so a reader that
  finds a listing also finds its merged file; a reader that does not find it still finds the replaced files.
- Replaced files are deleted by a later compaction, when their listing is older than `grace_s` and nobody has the
  warehouse open, as a query that began earlier still opens (and then drops) them.
- After a kill before the listing is written, the merged file does not count, and its sources are merged again. A later
  compaction deletes it once files that count hold all its runs. After a kill while deleting, the files stay hidden,
  and the next compaction continues.
- A file with a wrong checksum is reported, and never merged or deleted. Rows are deleted or hidden only if an intact
  file that counts holds them (`warehouse.files.held_rows`), whatever a listing or a merged file claims.

No clocks are compared between processes, so stepped clocks and long transactions do no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.cli.command_line import command
from conf.files.outputs import TEMPORARY_SUFFIX, sync
from conf.plain_text import first_line
from warehouse.files.compaction import (
    Compaction,
    CompactionReport,
    CompactionSettings,
    compaction_lock,
    is_open_somewhere,
)
from warehouse.files.counting import counting_files
from warehouse.files.folder import DataFolder
from warehouse.files.held_rows import Unreadable, run_ids_of
from warehouse.files.layout import KINDS, OF_RUNS
from warehouse.files.listings import read_listings
from warehouse.files.merged import is_merged_name, land_merged, listing_file, new_merged_name
from warehouse.files.merged_index import MergedIndex
from warehouse.files.plain_file import NoPlainFile
from warehouse.files.settle import settle_unlisted, settled_listings
from warehouse.files.small_files import read_files
from warehouse.tables.schema import TABLES

SORT_KEYS = {
    "runs": ["run_id"],
    "telemetry": ["run_id", "t_ms"],
    "kernels": ["run_id", "kernel_row"],
    "ranks": ["run_id", "rank_row"],
    "collocations": ["run_id", "member_row"],
}
ROW_GROUP_ROWS = 100_000
_OWN_BYTES = 14 * 2**10  # of a small file are its columns' names, statistics and page headers, not rows
_ABANDONED_AFTER_S = 86_400.0  # no running process owns a temporary file this old


def compact(
    folder: DataFolder, *, now_s: float | None = None, settings: CompactionSettings | None = None
) -> CompactionReport:
    """Merge small files of every table of runs by family, and delete files that were replaced long ago.

    Only one compaction runs at a time; a second one returns at once with `busy`. `now_s` is in seconds since the
    epoch. Killing it at any point is safe. Raises `UsageError` if there is no such folder, `OSError` if the disk is
    full.
    """
    now_s = time.time() if now_s is None else now_s
    folder.open()
    report = CompactionReport()
    work = Compaction(folder=folder, settings=settings or CompactionSettings(), now_s=now_s, report=report)
    with compaction_lock(folder) as got_it:
        if not got_it:
            report.busy = True
            return report
        # Runs last: which samples and kernels belong to a landed run is read off the files of runs.
        for kind in reversed(KINDS):
            _delete_replaced(work, kind)
            for family in folder.families(kind):
                settle_unlisted(work, kind, family)
                _remove_abandoned(folder.partition(kind, family), now_s)
                _merge_family(work, kind, family)
    return report


def _merge_family(work: Compaction, kind: str, family: str) -> None:
    settings, report = work.settings, work.report

    def unreadable(path: Path, error: Exception) -> None:
        if not isinstance(error, FileNotFoundError):
            report.left_alone(path, first_line(error))

    for paths in _plan(work, kind, family, unreadable):
        for files, rows in read_files(paths, TABLES[kind], settings.target_rows, unreadable):
            if len(files) < settings.min_files and (len(files) < 2 or files[-1] == paths[-1]):
                continue
            table = _in_order(rows, SORT_KEYS[kind])
            del rows
            target = paths[0].parent / new_merged_name()
            sources = [f"{path.parent.name}/{path.name}" for path in files]
            # A run that landed again while it was merged: its repeat is as good, and from here on hidden.
            land_merged(work.folder, kind, target, table, sources, work.now_s, row_group_size=ROW_GROUP_ROWS)
            report.merged[str(target.relative_to(work.folder.root))] = len(files)
            report.rows += table.num_rows
            del table


def _in_order(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the rows sorted by `keys`; most are sorted already, as files are read in the order of their names."""
    first, *more = [(table.column(key)[:-1], table.column(key)[1:]) for key in reversed(keys)]
    ascends = pc.less_equal(*first)
    for pair in more:
        ascends = pc.or_(pc.less(*pair), pc.and_(pc.equal(*pair), ascends))
    if pc.all(ascends, skip_nulls=False).as_py():
        return table
    return table.sort_by([(key, "ascending") for key in keys])


def _plan(
    work: Compaction, kind: str, family: str, unreadable: Callable[[Path, Exception], None]
) -> Iterator[list[Path]]:
    """Return the groups of small files that are worth a merge.

    Groups are formed by file size, since row counts are known only after reading.
    """
    folder, settings, report = work.folder, work.settings, work.report
    target_bytes = settings.target_mib * 2**20
    small: list[tuple[int, Path]] = []  # bytes in a merged file, path
    counting = counting_files(folder, kind, family, read_listings(folder, kind, report.damaged))
    has_merged_run = MergedIndex(folder).holder(family)
    is_merged_already = MergedIndex(folder, kind).holder(family)
    merged_ids: set[str] = set()
    landed = _landed_files(folder, family) if kind in OF_RUNS else set()  # read later, so none is missed
    for path in counting:
        is_merged = is_merged_name(path.name)
        try:
            status = path.stat()
        except FileNotFoundError:
            if path.is_symlink():
                unreadable(path, NoPlainFile("it is a link to a file that does not exist"))
            continue
        if not stat.S_ISREG(status.st_mode):
            unreadable(path, NoPlainFile("it is no plain file"))
            continue
        size = status.st_size
        if size > target_bytes / 2 or path in report.left:
            continue
        if kind in OF_RUNS and not (is_merged or path.name in landed or has_merged_run(path.stem)):
            continue  # its run is being written, or was lost and will come again with other rows
        if not is_merged and is_merged_already(path.stem):
            continue  # a run that landed twice, as after the queue was lost: merged, it would be there twice
        try:
            if is_merged:
                if pq.read_metadata(path).num_rows > settings.target_rows / 2:
                    continue
                ids = run_ids_of(path)
                if merged_ids & ids:
                    continue
                merged_ids |= ids
        except (pa.ArrowException, OSError, Unreadable) as error:
            unreadable(path, error)
            continue
        small.append((max(size - _OWN_BYTES, size // 8), path))
    # A merged file joins only when the rest is worth rewriting it, so each row is rewritten few times.
    small.sort(key=lambda entry: (entry[0], entry[1].name))
    total = sum(size for size, _ in small)
    while small and is_merged_name(small[-1][1].name) and small[-1][0] > 4 * (total - small[-1][0]):
        total -= small.pop()[0]
    small.sort(key=lambda entry: entry[1].name)
    groups: list[list[Path]] = [[]]
    group_bytes = 0
    for size, path in small:
        if groups[-1] and group_bytes + size > target_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(path)
        group_bytes += size
    full = len(groups) > 1
    for group in groups:
        if len(group) >= settings.min_files or (full and group is not groups[-1] and len(group) > 1):
            yield group


def _landed_files(folder: DataFolder, family: str) -> set[str]:
    """The names of the files of runs, one of which says that its run has landed."""
    try:
        return set(os.listdir(folder.partition("runs", family)))
    except FileNotFoundError:
        return set()


def _delete_replaced(work: Compaction, kind: str) -> None:
    folder, settings, report = work.folder, work.settings, work.report
    root = folder.root / kind
    listings = settled_listings(folder, kind, report)
    still_hiding = {listing.merged for listing in listings if listing.hidden}
    for listing in listings:
        age_s = work.now_s - listing.published_at_s
        if not listing.hidden or age_s < settings.grace_s:
            continue
        if still_hiding.intersection(listing.hidden):
            continue  # a merged file goes after all that its own listing hides, else that would count again
        if age_s < settings.force_after_s and is_open_somewhere(folder):
            report.kept_files += len(listing.hidden)
            continue
        kept = tuple(name for name in listing.hidden if root / name in report.left)
        deletable = [name for name in listing.hidden if name not in kept]
        for name in deletable:
            with contextlib.suppress(FileNotFoundError):
                (root / name).unlink()
                report.deleted_files += 1
        sync((root / listing.merged).parent)  # gone for good, before the listing forgets to hide them
        # The listing of a merged file goes before the one that hides the file forgets it: otherwise, in between, it
        # would look as if its rows were lost.
        for name in map(os.path.basename, deletable):
            if is_merged_name(name):
                listing_file(folder, kind, name).unlink(missing_ok=True)
        dataclasses.replace(listing, hidden=kept).write()
        if not kept:
            still_hiding.discard(listing.merged)


def _remove_abandoned(partition: Path, now_s: float) -> None:
    """Delete temporary files of writers that were killed."""
    for path in partition.glob(f".*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if now_s - path.stat().st_mtime > _ABANDONED_AFTER_S:
                path.unlink()


def entry(settings: CompactionSettings) -> int:
    """Compact the folder and print the report."""
    report = compact(DataFolder.resolve(settings.data), settings=settings)
    print("\n".join(report.lines()))
    return 1 if report.problems else 0


if __name__ == "__main__":
    command("compact", entry)
