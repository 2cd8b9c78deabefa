"""Repairs a data folder: moves damaged files aside, and queues the tasks of damaged or missing runs again.

Start reading at `repair`. Nothing is deleted, and a kill at any point is safe: running it again continues.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.errors import CommandError, EnvironmentProblem
from farm.queue.jobs import Queue
from farm.queue.leftovers import hold_dispatcher_lock
from warehouse.files.compaction import ROW_GROUP_ROWS, CompactionReport, compaction_lock
from warehouse.files.counting import (
    held_ids,
    holder_of,
    holders,
    is_merged_name,
    land_merged,
    listing_file,
    new_merged_name,
    read_listings,
    recover_listing,
    settle_listings,
    write_anew,
)
from warehouse.files.folder import DamagedFile, DataFolder, set_aside
from warehouse.files.integrity import Progress, compare, examine
from warehouse.tables.schema import KINDS, OF_RUNS

_DATA = (*KINDS, "jobs", "stale", "compactions")


@dataclass
class RepairReport:
    """The result of a repair, with the problems that are left."""

    moved: dict[Path, tuple[Path, str]] = field(default_factory=dict)  # file -> where it is now, and why
    mended: list[str] = field(default_factory=list)  # lines
    queued: dict[str, int] = field(default_factory=dict)  # job_id -> tasks
    left: list[str] = field(default_factory=list)  # lines

    def lines(self, root: Path) -> list[str]:
        """Return the report as lines of text."""
        lines = [f"moved to {new}: {path}: {why}" for path, (new, why) in self.moved.items()]
        lines += self.mended
        lines += [f"{job_id}: {count:,} tasks queued again" for job_id, count in self.queued.items()]
        lines += [f"left as it is: {line}" for line in self.left]
        total = sum(self.queued.values())
        lines.append(
            f"{root}: {len(self.moved):,} files moved aside, {total:,} tasks queued again"
            + ("; `python -m farm.work` runs them" if total else "")
        )
        return lines


def repair(folder: DataFolder, progress: Progress | None = None) -> RepairReport:
    """Move damaged files aside, repair listings, and queue the tasks of damaged or missing runs again.

    Takes the dispatcher's lock and the compaction's. With nothing changed, raises `DispatcherBusy` beside a dispatcher,
    `EnvironmentProblem` beside a compaction, and `UsageError` for a folder that is not a data folder.
    """
    folder.open()
    with hold_dispatcher_lock(folder.dispatcher_lock), compaction_lock(folder) as is_locked:
        if not is_locked:
            raise EnvironmentProblem(f"a compaction is at work on data={folder.root}; repair it when that is done")
        report = RepairReport()
        examined = examine(folder, progress=progress)
        damaged = {file.path for file in examined.damaged}
        # Listings last: a damaged listing moves aside together with a damaged merged file.
        for file in sorted(examined.damaged, key=lambda file: file.path.is_relative_to(folder.root / "compactions")):
            _repair_file(folder, file, damaged, report)
        for listing in examined.lost:
            _move_aside(folder, listing.file, f"it lists {listing.merged}, which is gone", report)
        for kind in KINDS:
            settled = CompactionReport()
            settle_listings(folder, kind, settled)
            report.mended += settled.problems
        _queue_again(folder, report)
    return report


def _repair_file(folder: DataFolder, file: DamagedFile, damaged: Collection[Path], report: RepairReport) -> None:
    place = file.path.relative_to(folder.root).parts
    if place[0] not in _DATA:
        report.left.append(f"{file.path}: {file.reason}")
        return
    if not os.path.lexists(file.path):  # already moved, with the file that it belongs to
        return
    if place[0] == "compactions":
        _repair_listing(folder, place[1], file, report)
    elif place[0] in KINDS and is_merged_name(file.path.name):
        _repair_merged(folder, place[0], file, damaged, report)
    else:
        _move_aside(folder, file.path, file.reason, report)


def _repair_listing(folder: DataFolder, kind: str, file: DamagedFile, report: RepairReport) -> None:
    listings = {listing.file: listing for listing in read_listings(folder, kind, lambda damaged: None)}
    if file.path not in listings:
        _move_aside(folder, file.path, file.reason, report)
    elif not listings[file.path].is_whole:  # `settle_listings` rewrites it, and one that hides too much
        report.mended.append(f"{file.path} was damaged ({file.reason}) and is rewritten from its merged file")


def _repair_merged(
    folder: DataFolder, kind: str, file: DamagedFile, damaged: Collection[Path], report: RepairReport
) -> None:
    path = listing_file(folder, kind, file.path.name)
    if not path.exists():
        with contextlib.suppress(OSError):  # not a plain file, or unreadable
            recovered = recover_listing(path, file.path)
            # An intact merged file whose rows are nowhere else: its listing was lost.
            if recovered is not None and recovered.checksum is not None:
                write_anew(folder, replace(recovered, published_at_s=time.time()))
                report.mended.append(f"{file.path}: {file.reason}; it is listed again")
                return
    # Its listing first: the files that it replaced then count again, if they still exist. While an intact file holds
    # them, the listing stays.
    listings = read_listings(folder, kind, lambda damaged: None)
    own = [listing for listing in listings if listing.file == path]
    if not any(holder_of(listing, listings, damaged.__contains__) for listing in own):
        _move_aside(folder, path, f"its merged file is damaged: {file.reason}", report)
    _move_aside(folder, file.path, file.reason, report)


def _move_aside(folder: DataFolder, path: Path, reason: str, report: RepairReport) -> None:
    if os.path.lexists(path):
        report.moved[path] = set_aside(folder, path, reason), reason


def _queue_again(folder: DataFolder, report: RepairReport) -> None:
    if not folder.queue.is_file():
        return
    try:
        queue = Queue.open(folder.queue)
    except CommandError:  # damaged, as reported above
        return
    with queue:
        gone = compare(folder).gone
        ids: dict[str, set[str]] = {}
        for job_id, indexes in gone.items():
            families = queue.families(job_id)
            for index in sorted(indexes):
                ids.setdefault(families[index], set()).add(f"{job_id}-{index:06d}")
        # Samples first: those of a lost run must not pass for the new run's.
        for family, run_ids in ids.items():
            _drop_samples(folder, family, run_ids, report)
        for job_id, indexes in gone.items():
            count = queue.requeue(job_id, sorted(indexes))
            if count:
                report.queued[job_id] = count
            if queue.counts(job_id).cancelled:
                report.mended.append(f"{job_id} is cancelled: submit it again to run its lost tasks")


def _drop_samples(folder: DataFolder, family: str, run_ids: set[str], report: RepairReport) -> None:
    """Take the rows of lost runs out of merged telemetry and kernels; new runs overwrite small files.

    The other rows land first, in a new merged file that hides all that the old one replaced. Then the old files and
    their listings are set aside, also those that would hide the small file of a new run. A kill in between leaves
    listings that the next repair finds.
    """
    for kind in OF_RUNS:
        partition = folder.partition(kind, family)
        small = {f"{partition.name}/{run_id}.parquet" for run_id in run_ids}
        listings = [
            listing
            for listing in read_listings(folder, kind, lambda damaged: None)
            if os.path.dirname(listing.merged) == partition.name
        ]
        replaced: dict[str, set[str]] = {listing.merged: set() for listing in listings}  # directly or in several merges
        for listing in listings:
            for holder in holders(listing, listings):
                replaced[holder.merged].update(listing.hidden)
        stale = [
            name
            for name, sources in replaced.items()
            if small & sources or held_ids(partition, [os.path.basename(name)], run_ids)
        ]
        kept_rows = 0
        for name in stale:
            path = folder.root / kind / name
            if any(name in sources for sources in replaced.values()) or not path.exists():
                continue
            table = pq.ParquetFile(path).read()
            others = table.filter(pc.invert(pc.is_in(table.column("run_id"), pa.array(sorted(run_ids)))))
            if others.num_rows:
                target = partition / new_merged_name()
                sources = [name, *sorted(replaced[name] - small)]
                land_merged(folder, kind, target, others, sources, time.time(), row_group_size=ROW_GROUP_ROWS)
                kept_rows += others.num_rows
        reason = f"it holds {kind} of runs that are lost and run again; {kept_rows:,} other rows are in a new file"
        for name in stale:
            _move_aside(folder, folder.root / kind / name, reason, report)
            _move_aside(folder, listing_file(folder, kind, os.path.basename(name)), reason, report)
