"""Merges the many small files of runs into few large ones, under running readers; repairs after kills and damage.

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
  file that counts holds them (`unproven_sources`, `unheld_ids`), whatever a listing or a merged file claims.

No clocks are compared between processes, so stepped clocks and long transactions do no harm. `settle_listings` and
`settle_unlisted` repair what kills, disk damage and foreign changes left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.cli.settings import Checked, data_key, key
from conf.files.outputs import TEMPORARY_SUFFIX, sync
from conf.plain_text import first_line
from warehouse.files.counting import counting_files, counting_merged_names, held_ids, lost_line, lost_merged_files
from warehouse.files.damage import DamagedFile, set_aside
from warehouse.files.folder import DataFolder, checksum_problem
from warehouse.files.merged import (
    Listing,
    has_own_name,
    is_merged_name,
    is_own_merge,
    is_whole_listing,
    land_merged,
    listing_file,
    names_in,
    new_merged_name,
    read_listings,
)
from warehouse.files.plain_file import NoPlainFile, is_shared_by_any, open_lock
from warehouse.files.small_files import read_files
from warehouse.tables.schema import KINDS, MERGED_PREFIX, OF_RUNS, TABLES

SORT_KEYS = {
    "runs": ["run_id"],
    "telemetry": ["run_id", "t_ms"],
    "kernels": ["run_id", "kernel_row"],
    "ranks": ["run_id", "rank_row"],
    "collocations": ["run_id", "member_row"],
}
ROW_GROUP_ROWS = 100_000
_OWN_BYTES = 14 * 2**10  # a small file's column names, statistics and page headers: everything but rows
_ABANDONED_AFTER_S = 86_400.0  # no running process owns a temporary file this old
_probes: dict[Path, tuple[int, int]] = {}  # path -> inode, descriptor
REDUNDANT = ""  # the reason when every run of a merged file is also in an intact file that counts


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
        86400, "seconds after which it deletes them even while the warehouse is open", "number 0 to 1e9"
    )
    target_mib: float = key(64, "size that merged files grow to, MiB; larger ones are left alone", "number > 0 to 1e9")
    target_rows: int = key(1000000, "rows that merged files grow to; bounds a merge's memory", "int 1 to 1000000000")
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

    for paths in _merge_groups(work, kind, family, unreadable):
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


def _merge_groups(
    work: Compaction, kind: str, family: str, unreadable: Callable[[Path, Exception], None]
) -> Iterator[list[Path]]:
    """Return the groups of small files that are worth a merge.

    Groups are formed by file size, since row counts are known only after reading.
    """
    folder, settings, report = work.folder, work.settings, work.report
    target_bytes = settings.target_mib * 2**20
    small: list[tuple[int, Path]] = []  # bytes in a merged file, path
    counting = counting_files(folder, kind, family, read_listings(folder, kind, report.damaged))
    run_ids = [path.stem for path in counting if not is_merged_name(path.name)]
    merged_already = held_ids(folder.partition(kind, family), _merged_names(folder, kind, family), run_ids)
    merged_ids: set[str] = set()
    landed: set[str] = set()
    if kind in OF_RUNS:  # read later, so none is missed
        landed = held_ids(folder.partition("runs", family), _merged_names(folder, "runs", family), run_ids)
        landed |= {name.removesuffix(".parquet") for name in names_in(folder.partition("runs", family))}
    for path in counting:
        is_merged = is_merged_name(path.name)
        try:
            status = path.stat()
        except FileNotFoundError:
            if path.is_symlink():
                unreadable(path, NoPlainFile("it is a link to a file that does not exist"))
            continue
        if not stat.S_ISREG(status.st_mode):
            unreadable(path, NoPlainFile("it is not a plain file"))
            continue
        size = status.st_size
        if size > target_bytes / 2 or path in report.left:
            continue
        if kind in OF_RUNS and not is_merged and path.stem not in landed:
            continue  # its run is being written, or was lost and will come again with other rows
        if not is_merged and path.stem in merged_already:
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
    # A merged file joins only when the others are worth rewriting it, so each row is rewritten few times.
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


def _merged_names(folder: DataFolder, kind: str, family: str) -> list[str]:
    """Return the names of a partition's merged files that count."""
    names = map(os.path.split, counting_merged_names(folder, kind))
    return [name for partition, name in names if partition == folder.partition(kind, family).name]


def _delete_replaced(work: Compaction, kind: str) -> None:
    folder, settings, report = work.folder, work.settings, work.report
    root = folder.root / kind
    listings = settle_listings(folder, kind, report)
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
        left &= _find_landed(folder, family, left)
    return left


def _find_landed(folder: DataFolder, family: str, ids: set[str]) -> set[str]:
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


def settle_listings(folder: DataFolder, kind: str, report: CompactionReport) -> list[Listing]:
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
