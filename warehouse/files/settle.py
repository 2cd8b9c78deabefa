"""Repairs merged files and listings after kills, disk damage and foreign changes.

Start reading at `settled_listings`. Only rows count as proof (`warehouse.files.held_rows`).
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from warehouse.files.aside import set_aside
from warehouse.files.believed import lost_line, lost_merged_files
from warehouse.files.compaction import Compaction, CompactionReport, is_open_somewhere
from warehouse.files.folder import DataFolder
from warehouse.files.held_rows import Unreadable, run_ids_of, unheld_ids, unproven_sources
from warehouse.files.listings import is_whole_listing, read_listings
from warehouse.files.merged import MERGED_PREFIX, Listing, has_own_name, is_own_merge, listing_file

REDUNDANT = ""  # of a merged file whose runs intact files that count hold, too


def settled_listings(folder: DataFolder, kind: str, report: CompactionReport) -> list[Listing]:
    """Return the listings whose merged files hold the runs that they hide, after repairs; report the others.

    If a merged file lacks hidden runs, their files are removed from its listing and count again. If a merged file is
    gone while all hidden files exist, its listing is set aside, so they count again too.
    """
    listings = read_listings(folder, kind, report.damaged)
    hidden = {name for listing in listings for name in listing.hidden}
    settled = []
    for listing in listings:
        merged = folder.root / kind / listing.merged
        if not os.path.lexists(merged):
            if listing.merged in hidden:
                settled.append(listing)  # deleted as a part of a later merge, whose compaction was killed
            elif listing.hidden and all((folder.root / kind / name).exists() for name in listing.hidden):
                aside = set_aside(folder, listing.file, f"it lists {listing.merged}, which is not there")
                report.problems.append(
                    f"{listing.file}: {listing.merged} is gone, and the {len(listing.hidden):,} "
                    f"files that it replaced count again; moved to {aside}"
                )
            elif listing in lost_merged_files(folder, kind):
                report.problems.append(lost_line(folder, kind, listing))
            else:
                listing.file.unlink(missing_ok=True)
            continue
        if not is_whole_listing(listing.file):
            write_anew(folder, listing)  # as its merged file has it
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
            report.problems.append(
                f"{listing.file} hides {len(unproven.unheld):,} files whose runs {listing.merged} "
                f"does not hold, as {some} ({why}); they count again"
            )
            hidden_now = tuple(name for name in listing.hidden if name not in unproven.unheld)
            listing = dataclasses.replace(listing, hidden=hidden_now)
            listing.write()
        settled.append(listing)
    return settled


def write_anew(folder: DataFolder, listing: Listing) -> None:
    """Write a listing over any file of its name. A folder of that name is set aside."""
    if listing.file.is_dir():
        set_aside(folder, listing.file, "it is a folder, not a listing")
    listing.write()


def settle_unlisted(work: Compaction, kind: str, family: str) -> None:
    """Settle a merged file without a listing, which a kill left or somebody put there.

    It is deleted if a merge wrote it and intact files that count hold its runs. Otherwise it stays and is reported.
    """
    for path in work.folder.partition(kind, family).glob(f"{MERGED_PREFIX}*.parquet"):
        problem = unlisted_problem(work.folder, kind, family, path, work.settings.grace_s, work.now_s)
        if problem:
            work.report.left_alone(path, problem)
        elif problem == REDUNDANT and not is_open_somewhere(work.folder):
            path.unlink()


def unlisted_problem(
    folder: DataFolder, kind: str, family: str, path: Path, young_s: float, now_s: float | None = None
) -> str | None:
    """Return the problem of a merged file without listing; `REDUNDANT` if it may be deleted, None if it has none.

    A listed file has no problem, nor one younger than `young_s`, which may be landing right now.
    """
    if has_own_name(path) and listing_file(folder, kind, path.name).exists():
        return None
    try:
        if (time.time() if now_s is None else now_s) - path.stat().st_mtime <= young_s:
            return None
        if not is_own_merge(path):
            return "no compaction wrote it, and no listing names it"
        missing = unheld_ids(folder, kind, family, run_ids_of(path), read_listings(folder, kind, lambda damaged: None))
    except FileNotFoundError:
        return None
    except (Unreadable, OSError) as error:
        return f"no listing names it, and it cannot be read: {error}"
    return f"no listing names it, and {len(missing):,} of its runs are in no other file" if missing else REDUNDANT
