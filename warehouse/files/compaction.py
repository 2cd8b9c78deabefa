"""Merges the many small files of runs into few large ones, under running readers.

Start reading at `compact`; `read_files` reads many small files together. Readers see each row exactly once, and a kill
does no harm, for these reasons:

- A merged file counts from the moment its listing exists (one `os.replace`); from that moment the files that it
  replaces do not. Readers expand the listings before the data files (`warehouse.files.views`), so a reader that
  finds a listing also finds its merged file; a reader that does not find it still finds the replaced files.
- A later compaction deletes replaced files when their listing is older than `grace_s` and no DuckDB client has the
  warehouse open, because a query that began earlier still opens (and then drops) them; `warehouse.connect` plans such a
  query again.
- After a kill before the listing is written, the merged file does not count, and its sources are merged again. A later
  compaction deletes it once files that count hold all its runs. After a kill while deleting, the files stay hidden,
  and the next compaction continues.
- A file with a wrong checksum is reported, and never merged or deleted. Rows are deleted only if an intact file that
  counts holds them, whatever a listing or a merged file claims. `warehouse.files.counting` proves it, and repairs the
  results of kills, disk damage and foreign changes (`settle_listings`).

No clocks are compared between processes, so clock changes and long transactions do no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.cli.settings import Checked, data_key, key
from conf.errors import first_line
from conf.files.outputs import TEMPORARY_SUFFIX, sync
from conf.plain_text import escaped_glob, sql_text
from warehouse.files.counting import (
    REDUNDANT,
    Catalogue,
    Unreadable,
    counting_files,
    held_ids,
    intact_merged_names,
    is_merged_name,
    land_merged,
    listing_file,
    new_merged_name,
    read_listings,
    run_ids_of,
    settle_listings,
    unlisted_files,
)
from warehouse.files.folder import DamagedFile, DataFolder, checksum_problem, content_problem, require_intact
from warehouse.files.plain_file import (
    NoPlainFile,
    is_passing,
    is_shared_by_any,
    names_in,
    open_binary,
    open_lock,
    plain,
)
from warehouse.tables.duckdb_access import scratch_cursor
from warehouse.tables.schema import KINDS, OF_RUNS, TABLES

SORT_KEYS = {
    "runs": ["run_id"],
    "telemetry": ["run_id", "t_ms"],
    "kernels": ["run_id", "kernel_row"],
    "ranks": ["run_id", "rank_row"],
    "collocations": ["run_id", "member_row"],
}
ROW_GROUP_ROWS = 100_000
_BATCH_FILES = 500  # DuckDB keeps their footers while reading, some 50 KiB each
_BATCH_BYTES = 8 * 2**20  # compressed; may be a million rows
_MOST_READERS = 2  # threads, each with a batch in memory
_WHOLE_BYTES = 2**20  # files up to this size are read in one piece to verify their checksum
# Arrow's schema among a footer's key-value pairs: base64 in Thrift's compact protocol.
_SCHEMA_KEY = b"ARROW:schema"
_STORED_SCHEMA = re.compile(_SCHEMA_KEY + rb"\x18[\x80-\xff]*[\x00-\x7f]([A-Za-z0-9+/=]+)")
_OWN_BYTES = 14 * 2**10  # bytes of a small file beside its rows: column names, statistics, page headers
_ABANDONED_AFTER_S = 86_400.0  # no running process owns a temporary file this old
_probes: dict[Path, tuple[int, int]] = {}  # path -> inode, descriptor


@dataclass(frozen=True, kw_only=True)
class CompactionSettings(Checked):
    """Thresholds for merging and deleting files.

      python -m warehouse.compact
      python -m warehouse.compact data=/srv/farm grace_s=600

    Safe to kill at any point. A later compaction deletes the merged files once they are grace_s old and no other DuckDB
    client has the warehouse open.
    """

    grace_s: float = key(
        3600, "seconds before a later compaction deletes the files that were merged", "number 0 to 1e9"
    )
    force_after_s: float = key(
        86400, "seconds after which it deletes them even while a DuckDB client is open", "number 0 to 1e9"
    )
    target_mib: float = key(64, "target size of merged files, MiB; larger files are left alone", "number > 0 to 1e9")
    target_rows: int = key(1000000, "target rows of merged files; bounds a merge's memory", "int 1 to 1000000000")
    min_files: int = key(8, "fewer small files of a family are left as they are", "int >= 2")
    data: str | None = data_key()


@dataclass
class CompactionReport:
    """Result of a compaction. Paths are relative to the data folder."""

    busy: bool = False  # another compaction is running; nothing was done
    merged: dict[str, int] = field(default_factory=dict)  # new file -> number of files it replaces
    rows: int = 0  # in the new files
    deleted_files: int = 0
    kept_files: int = 0  # hidden and due for deletion, but kept because the warehouse is open
    problems: list[str] = field(default_factory=list)  # lines, each with a file and its problem
    left: set[Path] = field(default_factory=set)  # files neither merged nor deleted, named in `problems`

    def left_alone(self, path: Path, why: str) -> None:
        """Report a file that is neither merged nor deleted, once."""
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

    Only one compaction runs at a time; a second one returns immediately with `busy`. `now_s` is in seconds since the
    epoch. Killing it at any point is safe. Raises `UsageError` if there is no such folder, `OSError` if the disk is
    full.
    """
    now_s = time.time() if now_s is None else now_s
    folder.open()
    report = CompactionReport()
    work = Compaction(folder=folder, settings=settings or CompactionSettings(), now_s=now_s, report=report)
    with compaction_lock(folder) as is_locked:
        if not is_locked:
            report.busy = True
            return report
        # Runs last: their files show which samples and kernels belong to a landed run.
        for kind in reversed(KINDS):
            with _report_passing(report, kind):
                _delete_replaced(work, kind)
            for family in folder.families(kind):
                with _report_passing(report, f"{kind} of {family}"):
                    settle_unlisted(work, kind, family)
                    _remove_abandoned(folder.partition(kind, family), now_s)
                    _merge_family(work, kind, family)
    return report


@contextlib.contextmanager
def _report_passing(report: CompactionReport, part: str) -> Iterator[None]:
    """Report an error that may pass and leave `part` to the next compaction, which is as safe as after a kill."""
    try:
        yield
    except OSError as error:
        if not is_passing(error):
            raise
        report.problems.append(f"{part}: not compacted now: {error}")


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
            # If a run landed again during the merge, its new file is hidden from here on; both are equally good.
            land_merged(work.folder, kind, target, table, sources, work.now_s, row_group_size=ROW_GROUP_ROWS)
            report.merged[str(target.relative_to(work.folder.root))] = len(files)
            report.rows += table.num_rows
            del table


def _in_order(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the rows sorted by `keys`; most are sorted already, because files are read in order of their names."""
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
    """Yield the groups of small files that are worth a merge.

    Groups are formed by file size, since row counts are known only after reading.
    """
    folder, settings, report = work.folder, work.settings, work.report
    target_bytes = settings.target_mib * 2**20
    small: list[tuple[int, Path]] = []  # bytes in a merged file, path
    # What a damaged merged file replaced is not merged again: that file may be put back.
    listings = read_listings(folder, kind, report.damaged)
    counting = counting_files(folder, kind, family, Catalogue.of(listings, listings))
    run_ids = [path.stem for path in counting if not is_merged_name(path.name)]
    # A run that landed twice, as after the queue was lost, must not be merged twice.
    waiting = held_ids(folder.partition(kind, family), intact_merged_names(folder, kind, family), run_ids)
    if kind in OF_RUNS:  # a run that is being written, or was lost and will be measured again
        runs = folder.partition("runs", family)  # read after the files above, so none is missed
        landed = held_ids(runs, intact_merged_names(folder, "runs", family), run_ids)
        waiting |= set(run_ids) - landed - {name.removesuffix(".parquet") for name in names_in(runs)}
    merged_ids: set[str] = set()
    for path in counting:
        if path in report.left or path.stem in waiting:
            continue
        try:
            size = os.stat(plain(path)).st_size
            if size > target_bytes / 2:
                continue
            if is_merged_name(path.name):
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
    # A merged file joins only if the others are large enough, so each row is rewritten few times.
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
            continue  # a merged file is deleted after all files that its listing hides, or they would count again
        if age_s < settings.force_after_s and is_open_somewhere(folder):
            report.kept_files += len(listing.hidden)
            continue
        undeletable = tuple(name for name in listing.hidden if root / name in report.left)
        deletable = [name for name in listing.hidden if name not in undeletable]
        for name in deletable:
            with contextlib.suppress(FileNotFoundError):
                (root / name).unlink()
                report.deleted_files += 1
        sync((root / listing.merged).parent)  # durably deleted before the listing stops hiding them
        # Delete a merged file's listing before rewriting the listing that hides the file: otherwise its rows would
        # seem lost in between.
        for name in map(os.path.basename, deletable):
            if is_merged_name(name):
                listing_file(folder, kind, name).unlink(missing_ok=True)
        dataclasses.replace(listing, hidden=undeletable).write()
        if not undeletable:
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
    # Keep the descriptor open: closing it would drop the locks that DuckDB holds on the file in this process.
    if path not in _probes or _probes[path][0] != inode:
        if path in _probes:
            os.close(_probes.pop(path)[1])
        _probes[path] = inode, os.open(path, os.O_RDONLY)
    return is_shared_by_any(_probes[path][1])


@contextlib.contextmanager
def compaction_lock(folder: DataFolder, tell: Callable[[str], None] | None = None) -> Iterator[bool]:
    """Take the compaction lock and yield whether it was acquired.

    With `tell`, block until it is; `tell` gets a line if another process holds it.
    """
    with open_lock(folder.compaction_lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if tell is None:
                yield False
                return
            tell("waiting for a compaction that is at work on this folder")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def settle_unlisted(work: Compaction, kind: str, family: str) -> None:
    """Settle merged files without a listing, left by a kill or put there by a user.

    It is deleted if a merge wrote it and intact files that count hold its runs. Otherwise it stays and is reported.
    """
    for path, problem in unlisted_files(work.folder, kind, family, work.settings.grace_s, work.now_s):
        if problem != REDUNDANT:
            work.report.left_alone(path, problem)
        elif not is_open_somewhere(work.folder):
            path.unlink()


# ---- reading many small files through DuckDB, in a fraction of pyarrow's time


class DamagedContent(ValueError):
    """The content of a file does not match its checksum."""


def read_files(
    paths: Sequence[Path], schema: pa.Schema, most_rows: int, unreadable: Callable[[Path, Exception], None]
) -> Iterator[tuple[list[Path], pa.Table]]:
    """Yield (files, their rows) in the files' order, about `most_rows` rows at a time.

    Tables have the schema's columns and unknown ones; columns that a file lacks are NULL. Unreadable files and those
    with a wrong checksum are left out and passed to `unreadable`. Rows of a file, and files of one schema, keep their
    order.
    """
    files: list[Path] = []
    tables: list[pa.Table] = []
    rows = 0
    for batch_files, batch in _read_batches(paths, most_rows, unreadable):
        batch_rows = sum(table.num_rows for table in batch)
        if files and rows + batch_rows > most_rows:
            yield files, _unite(schema, tables)
            files, rows = [], 0
        files += batch_files
        tables += batch
        rows += batch_rows
        del batch
    if files:
        yield files, _unite(schema, tables)


def _unite(schema: pa.Schema, tables: list[pa.Table]) -> pa.Table:
    """Return the concatenated table and empty `tables`: the rows are in memory once."""
    united = pa.concat_tables([schema.empty_table(), *tables], promote_options="permissive")
    tables.clear()
    return united


@dataclass
class _Batch:
    """Result of reading some files: the intact ones, their rows, and the others with the reason."""

    files: list[Path]
    tables: list[pa.Table]
    damaged: list[tuple[Path, Exception]]


def _read_batches(
    paths: Sequence[Path], most_rows: int, unreadable: Callable[[Path, Exception], None]
) -> Iterator[tuple[list[Path], list[pa.Table]]]:
    for files, reading in _read_ahead(paths):
        try:
            batch = reading.result()
        except (duckdb.Error, OSError):  # singly, to name the file
            yield from _read_singly(files, unreadable)
            continue
        del reading
        for path, error in batch.damaged:
            unreadable(path, error)
        if len(batch.files) > 1 and sum(table.num_rows for table in batch.tables) > most_rows:
            batch.tables.clear()
            yield from _read_singly(batch.files, unreadable)
        elif batch.files:
            yield batch.files, batch.tables
        del batch


def _read_singly(
    paths: Sequence[Path], unreadable: Callable[[Path, Exception], None]
) -> Iterator[tuple[list[Path], list[pa.Table]]]:
    for path in paths:
        try:
            require_intact(path)
            yield [path], [pq.ParquetFile(path).read()]
        except (pa.ArrowException, OSError, ValueError) as error:
            unreadable(path, error)


def _read_ahead(paths: Sequence[Path]) -> Iterator[tuple[list[Path], Future[_Batch]]]:
    """Yield batches and their tables in order, while reading the next ones."""
    readers = min(_MOST_READERS, len(os.sched_getaffinity(0)))
    waiting: deque[tuple[list[Path], Future[_Batch]]] = deque()
    with scratch_cursor() as connection, ThreadPoolExecutor(readers) as pool:
        for batch in _batches(paths):
            waiting.append((batch, pool.submit(_read_batch, connection, batch)))
            if len(waiting) > readers:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()


def _read_batch(connection: duckdb.DuckDBPyConnection, paths: Sequence[Path]) -> _Batch:
    """Return a table for each set of columns; DuckDB takes half the time if it need not unite them.

    Files with a wrong checksum are left out. Those without one are read unverified.
    """
    alike: dict[Hashable, list[Path]] = {}
    batch = _Batch([], [], [])
    for path in paths:
        try:
            key = _verify_schema(path) or path
        except (DamagedContent, NoPlainFile, FileNotFoundError) as error:
            batch.damaged.append((path, error))
            continue
        batch.files.append(path)
        alike.setdefault(key, []).append(path)
    with connection.cursor() as cursor:
        batch.tables = [
            cursor.sql(f"SELECT * FROM read_parquet({_list(group)}, hive_partitioning=false)").to_arrow_table()
            for group in alike.values()
        ]
    return batch


def _verify_schema(path: Path) -> bytes | None:
    """Return the schema as Arrow stores it in a file, None if unknown. Raises `DamagedContent`."""
    with open_binary(path) as file:
        content = file.read(_WHOLE_BYTES)
        is_whole = not file.read(1)
    problem = content_problem(content) if is_whole else checksum_problem(path)
    if problem is not None:
        raise DamagedContent(problem)
    if not is_whole:
        return None
    # The last occurrence: texts of runs come before it.
    stored = _STORED_SCHEMA.match(content, max(0, content.rfind(_SCHEMA_KEY)))
    return None if stored is None else stored[1]


def _list(paths: Sequence[Path]) -> str:
    return f"[{', '.join(sql_text(escaped_glob(path)) for path in paths)}]"


def _batches(paths: Sequence[Path]) -> Iterator[list[Path]]:
    batch: list[Path] = []
    size = 0
    for path in paths:
        batch.append(path)
        with contextlib.suppress(FileNotFoundError):  # the reader reports it
            size += path.stat().st_size
        if len(batch) >= _BATCH_FILES or size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
