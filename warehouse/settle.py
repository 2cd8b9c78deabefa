"""Mends merged files and listings that a kill, a damaged disk or somebody left as compaction would not have.

Start reading at `settled_listings`. Nothing is believed that the rows do not prove (`warehouse.held_rows`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from warehouse.aside import set_aside
from warehouse.compaction import CompactionReport, CompactionSettings, is_open_somewhere
from warehouse.folder import DataFolder
from warehouse.held_rows import Unreadable, run_ids_of, unheld_ids, unproven_sources
from warehouse.merged import (
    MERGED_PREFIX,
    Listing,
    is_own_merge,
    listing_file,
    lost_line,
    lost_merged_files,
    read_listings,
)


def settled_listings(folder: DataFolder, kind: str, report: CompactionReport) -> list[Listing]:
    """The listings whose merged files hold what they hide, mended where they can be; others are named and left alone.

    A listing that hides runs which its merged file does not hold forgets those runs' files: they count again. One
    whose merged file is gone while everything that it hides is there is set aside, for the same reason.
    """
    listings = read_listings(folder, kind, report.damaged)
    hidden = {name for listing in listings for name in listing.hidden}
    settled = []
    for listing in listings:
        merged = folder.root / kind / listing.merged
        if not merged.exists():
            if listing.merged in hidden:
                settled.append(listing)  # deleted as a part of a later merge, whose compaction was killed
            elif listing.hidden and all((folder.root / kind / name).exists() for name in listing.hidden):
                aside = set_aside(folder, listing.file, f"it lists {listing.merged}, which is not there")
                report.problems.append(f"{listing.file}: {listing.merged} is gone, and the {len(listing.hidden):,} "
                                       f"files that it replaced count again; moved to {aside}")  # fmt: skip
            elif listing in lost_merged_files(folder, kind, report.damaged):
                report.problems.append(lost_line(folder, kind, listing))
            else:
                listing.file.unlink(missing_ok=True)
            continue
        if not _is_whole(listing.file):
            listing.write()  # what its merged file said of it
        if not listing.hidden:
            settled.append(listing)
            continue
        try:
            unproven = unproven_sources(folder, kind, listing, listings)
        except (Unreadable, FileNotFoundError) as error:
            report.left_alone(merged, f"{error}; the files that it replaced stay")
            continue
        for name, why in unproven.unreadable.items():
            report.left_alone(folder.root / kind / name, why)
        if unproven.unheld:
            some, why = next(iter(unproven.unheld.items()))
            report.problems.append(f"{listing.file} hides {len(unproven.unheld):,} files whose runs {listing.merged} "
                                   f"does not hold, as {some} ({why}); they count again")  # fmt: skip
            hidden_now = tuple(name for name in listing.hidden if name not in unproven.unheld)
            listing = dataclasses.replace(listing, hidden=hidden_now)
            listing.write()
        settled.append(listing)
    return settled


def _is_whole(listing_file: Path) -> bool:
    try:
        Listing.read(listing_file)
    except (ValueError, OSError):
        return False
    return True


def settle_unlisted(
    folder: DataFolder,
    kind: str,
    family: str,
    now_s: float,
    settings: CompactionSettings,
    report: CompactionReport,
) -> None:
    """A merged file without a listing was left by a kill, and its sources still count; or somebody put it there.

    It goes when it is a merge's own, and whole files that count hold its runs. Otherwise it stays, and is named.
    """
    partition = folder.partition(kind, family)
    for path in partition.glob(f"{MERGED_PREFIX}*.parquet"):
        if listing_file(folder, kind, path.name).exists():
            continue
        try:
            if now_s - path.stat().st_mtime <= settings.grace_s:
                continue  # it may be landing right now
            if not is_own_merge(path):
                problem = "no compaction wrote it, and no listing names it"
            else:
                missing = unheld_ids(
                    folder, kind, family, run_ids_of(path), read_listings(folder, kind, report.damaged)
                )
                problem = f"no listing names it, and {len(missing):,} of its runs are in no other file"
                if not missing:
                    if not is_open_somewhere(folder):
                        path.unlink()
                    continue
        except FileNotFoundError:
            continue
        except Unreadable as error:
            problem = f"no listing names it, and it cannot be read: {error}"
        report.left_alone(path, problem)
