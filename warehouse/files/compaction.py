"""Settings, report and lock of a compaction, and whether any client has the warehouse open.

Start reading at `CompactionReport`; `warehouse.compact` merges, `warehouse.files.compaction` repairs after kills and
damage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conf.cli.settings import Checked, data_key, key
from conf.plain_text import first_line
from warehouse.files.counting import counting_files, lost_line, lost_merged_files
from warehouse.files.damage import DamagedFile, set_aside
from warehouse.files.folder import DataFolder
from warehouse.files.layout import checksum_problem
from warehouse.files.merged import (
    MERGED_PREFIX,
    Listing,
    has_own_name,
    is_merged_name,
    is_own_merge,
    is_whole_listing,
    listing_file,
    read_listings,
)
from warehouse.files.plain_file import is_shared_by_any, open_lock


@dataclass(frozen=True, kw_only=True)
class CompactionSettings(Checked):
    """Thresholds for merging and deleting files.

      python -m warehouse.compact
      python -m warehouse.compact data=/srv/farm grace_s=600

    Safe to kill at any point. Files that were merged are deleted by a later compaction, when they are grace_s old and
    nobody has the warehouse open.
    """

    grace_s: float = key(
        3600, "seconds before a later compaction deletes the files that were merged", "number 0 to 1e9"
    )
    force_after_s: float = key(
        86400, "seconds after which it deletes them also while somebody has the warehouse open", "number 0 to 1e9"
    )
    target_mib: float = key(64, "size that merged files grow to, MiB; larger ones are left alone", "number > 0 to 1e9")
    target_rows: int = key(
        1000000, "rows that merged files grow to; bounds the memory that a merge takes", "int 1 to 1000000000"
    )
    min_files: int = key(8, "fewer small files of a family are left as they are", "int >= 2")
    data: str | None = data_key()


@dataclass
class CompactionReport:
    """Result of a compaction. Paths are relative to the data folder."""

    busy: bool = False  # another compaction was at work, nothing was done
    merged: dict[str, int] = field(default_factory=dict)  # new file -> number of files it replaces
    rows: int = 0  # in the new files
    deleted_files: int = 0
    kept_files: int = 0  # hidden, due for deletion, kept since somebody has the warehouse open
    problems: list[str] = field(default_factory=list)  # lines that each name a file and what is wrong with it
    left: set[Path] = field(default_factory=set)  # files that are neither merged nor deleted, named in `problems`

    def left_alone(self, path: Path, why: str) -> None:
        """Report a file that is neither merged nor deleted; each file is reported once."""
        if path not in self.left:
            self.left.add(path)
            self.problems.append(f"{path} is left alone: {why}")

    def damaged(self, file: DamagedFile) -> None:
        """Report an unreadable file."""
        self.left_alone(file.path, file.reason)

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        if self.busy:
            return ["another compaction is at work on this folder; nothing done"]
        lines = [f"{path}: {count} files merged" for path, count in self.merged.items()]
        lines += self.problems
        total = sum(self.merged.values())
        lines.append(
            f"{total} files with {self.rows} rows merged into {len(self.merged)}; "
            f"{self.deleted_files} replaced files deleted"
        )
        if self.kept_files:
            lines.append(f"{self.kept_files} replaced files kept, because the warehouse is open somewhere")
        return lines


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """State that the steps of a running compaction share."""

    folder: DataFolder
    settings: CompactionSettings
    now_s: float  # seconds since the epoch
    report: CompactionReport


_probes: dict[Path, tuple[int, int]] = {}  # path -> inode, descriptor


def is_open_somewhere(folder: DataFolder) -> bool:
    """Return whether a DuckDB client has `warehouse.duckdb` open, i.e. holds a POSIX read lock on it."""
    path = folder.warehouse
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return False
    # The descriptor stays open: closing one drops the locks that DuckDB holds on the file in this very process.
    if path not in _probes or _probes[path][0] != inode:
        if path in _probes:
            os.close(_probes.pop(path)[1])
        _probes[path] = inode, os.open(path, os.O_RDONLY)
    return is_shared_by_any(_probes[path][1])


@contextlib.contextmanager
def compaction_lock(folder: DataFolder, *, wait: bool = False) -> Iterator[bool]:
    """Take the compaction lock and yield whether it was acquired; with `wait`, block until it is."""
    with open_lock(folder.compaction_lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


class Unreadable(Exception):
    """The rows of a file cannot be read; the message has the reason."""


def run_ids_of(path: Path) -> set[str]:
    """Return the run_ids of an intact file. Raises `Unreadable`, or `FileNotFoundError` if there is none."""
    try:
        problem = checksum_problem(path)
        if problem is not None:
            raise Unreadable(problem)
        file = pq.ParquetFile(path, read_dictionary=["run_id"])
        return set(file.read(columns=["run_id"]).column(0).unique().to_pylist())
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise Unreadable(first_line(error)) from error


def unheld_ids(
    folder: DataFolder, kind: str, family: str, ids: Iterable[str], listings: Sequence[Listing], but: Path | None = None
) -> set[str]:
    """Return those of `ids` that no intact file of the partition holds, among files that count and are not `but`.

    For telemetry, only samples of landed runs are reported: others belong to no visible run.
    """
    left = set(ids)
    merged: list[Path] = []
    for path in counting_files(folder, kind, family, listings):
        if path == but:
            continue
        if is_merged_name(path.name):
            merged.append(path)
        elif path.stem in left and checksum_problem(path) is None:
            left.discard(path.stem)
    for path in merged:
        if not left:
            break
        try:
            left -= run_ids_of(path)
        except (Unreadable, FileNotFoundError):
            continue
    if left and kind == "telemetry":
        left &= _landed_among(folder, family, left)
    return left


def _landed_among(folder: DataFolder, family: str, ids: set[str]) -> set[str]:
    missing = unheld_ids(folder, "runs", family, ids, read_listings(folder, "runs"))
    return ids - missing


@dataclass
class Unproven:
    """Files that a listing hides and that must not be deleted, with the reasons by name."""

    unheld: dict[str, str] = field(default_factory=dict)  # no file that counts holds their runs
    unreadable: dict[str, str] = field(default_factory=dict)


def unproven_sources(folder: DataFolder, kind: str, listing: Listing, listings: Sequence[Listing]) -> Unproven:
    """Return the files that a listing hides without proof that its merged file holds their runs.

    Deleted files need no proof. Raises `Unreadable` for a damaged merged file, `FileNotFoundError` for a missing one.
    """
    root = folder.root / kind
    path = root / listing.merged
    held = run_ids_of(path)
    family = path.parent.name.removeprefix("family=")
    partition = path.parent.name + "/"
    there = {f"{partition}{name}" for name in os.listdir(path.parent)}
    unproven = Unproven()
    for name in listing.hidden:
        if not name.startswith(partition) or "/" in name.removeprefix(partition):
            unproven.unheld[name] = "it is of another family"
            continue
        if name not in there or Path(name).stem in held:
            continue
        try:
            missing = run_ids_of(root / name) - held
        except FileNotFoundError:
            continue
        except Unreadable as error:
            unproven.unreadable[name] = str(error)
            continue
        if missing:
            missing = unheld_ids(folder, kind, family, missing, listings)
        if missing:
            unproven.unheld[name] = f"{len(missing):,} of its runs are not there"
    return unproven


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
