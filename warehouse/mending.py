"""Mends the catalogue of a data folder after kills, disk damage and deletions by hand.

Start reading at `mend_listings`. The caller holds the compaction's lock.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from warehouse.aside import set_aside
from warehouse.catalogue import Catalogue, look, read_catalogue
from warehouse.checksum import checksum_problem
from warehouse.compaction import CompactionReport
from warehouse.folder import DataFolder
from warehouse.merged import MERGED_PREFIX, Unreadable, is_own_merge, listing_file, names_of, run_ids_of

REDUNDANT = ""  # of a merged file whose runs intact files that count hold, too


def mend_listings(folder: DataFolder, kind: str, report: CompactionReport) -> Catalogue:
    """Return the catalogue of a table after repairs, and report what is damaged or lost.

    If a merged file is gone while all files that it replaced exist, its listing is set aside, so they count again.
    """
    catalogue = read_catalogue(folder, kind)
    for damaged in catalogue.damaged:
        report.left_alone(damaged.path, damaged.reason)
    report.problems += map(catalogue.lost_line, catalogue.lost)
    for listing in catalogue.listings:
        path = catalogue.path(listing)
        if os.path.lexists(path):
            if not listing.is_current:
                if listing.file.is_dir():
                    set_aside(folder, listing.file, "it is a folder, not a listing")
                listing.write()
        elif catalogue.gives_back(listing):
            aside = set_aside(folder, listing.file, f"it lists {listing.merged}, which is not there")
            report.problems.append(
                f"{listing.file}: {listing.merged} is gone, and the {len(listing.hidden):,} files that it replaced "
                f"count again; moved to {aside}"
            )
        elif listing not in catalogue.lost:
            listing.file.unlink(missing_ok=True)
    return read_catalogue(folder, kind)


def unlisted_problems(
    folder: DataFolder, kind: str, family: str, young_s: float, now_s: float | None = None
) -> dict[Path, str]:
    """Return the problem of each merged file without listing; `REDUNDANT` if it may be deleted.

    Those younger than `young_s` have none, as they may be landing right now.
    """
    problems = {}
    for path in sorted(folder.partition(kind, family).glob(f"{MERGED_PREFIX}*.parquet")):
        try:
            is_young = (time.time() if now_s is None else now_s) - path.lstat().st_mtime <= young_s
            if is_young or os.path.lexists(listing_file(folder, kind, path.name)):
                continue
            if not is_own_merge(path):
                problems[path] = "no compaction wrote it, and no listing names it"
                continue
            missing = _missing(folder, kind, path)
        except FileNotFoundError:
            continue
        except (Unreadable, OSError) as error:
            problems[path] = f"no listing names it, and it cannot be read: {error}"
            continue
        lost = f"no listing names it, and {len(missing):,} of its runs are in no other file"
        problems[path] = lost if missing else REDUNDANT
    return problems


def _missing(folder: DataFolder, kind: str, path: Path) -> frozenset[str]:
    """Return the names of the runs of a merged file that no intact file that counts holds."""

    def held(catalogue: Catalogue, name: str) -> bool:
        holder = catalogue.holder(name)
        own = catalogue.root / name if holder is None else catalogue.path(holder)
        try:
            return (holder is not None or catalogue.counts(name)) and checksum_problem(own) is None
        except FileNotFoundError:
            return False

    names = names_of(path.parent.name, run_ids_of(path))
    return look(folder, kind, lambda catalogue: frozenset(name for name in names if not held(catalogue, name)))
