"""`python -m warehouse.compact`: merges the many small files of runs into few large ones, under running readers.

Start reading at `compact`. Why no reader sees a row twice or not at all, and no kill matters:

- A merged file counts only from the moment its listing is there (one `os.replace`), and from that moment the files
  it replaces do not. Readers expand the listings before the data files (`warehouse.views`), so a reader that finds
  a listing also finds its merged file; a reader that does not find it still finds the replaced files.
- Replaced files are deleted by a later compaction, when their listing is older than `grace_s` and nobody has the
  warehouse open, as a query that began earlier still opens (and then drops) them.
- Killed before the listing: the merged file does not count. The next compaction lists it if what it merged is
  unchanged, else deletes it. Killed while deleting: the files stay hidden, and the next compaction goes on.

No clock is compared between processes, so neither stepped clocks nor long transactions matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from conf.cli import command
from conf.errors import UsageError
from warehouse.folder import COMPRESSION, KINDS, TEMPORARY_SUFFIX, DataFolder, replacing, sync
from warehouse.lock_file import open_lock
from warehouse.merged import (
    Listing,
    counting_files,
    has_landed,
    is_merged_name,
    listing_file,
    new_merged_name,
    read_listings,
)
from warehouse.schema import RUN_SCHEMA, TELEMETRY_SCHEMA
from warehouse.small_files import read_files

SCHEMAS = {"runs": RUN_SCHEMA, "telemetry": TELEMETRY_SCHEMA}
SORT_KEYS = {"runs": ["run_id"], "telemetry": ["run_id", "t_ms"]}
ROW_GROUP_ROWS = 100_000
_SOURCES = b"gpufarm_sources"
_OWN_BYTES = 14 * 2**10  # of a small file are its columns' names, statistics and page headers, not rows
_ABANDONED_AFTER_S = 86_400.0  # a temporary file this old belongs to nobody who lives


@dataclass(frozen=True, kw_only=True)
class CompactionSettings:
    """When files are merged and deleted."""

    grace_s: float = 3600.0  # least age of a listing before what it replaced is deleted
    force_after_s: float = 86_400.0  # from this age on also while somebody has the warehouse open
    target_mib: float = 64.0  # merged files grow to about this size; larger ones are left alone
    target_rows: int = 1_000_000  # ... and to about this many rows, which bounds the memory a merge takes
    min_files: int = 8  # fewer small files of a family are not worth a merge

    def __post_init__(self) -> None:
        found = [
            f"{name} must be >= {floor}, got {getattr(self, name)}"
            for name, floor in (("grace_s", 0), ("force_after_s", 0), ("target_rows", 1), ("min_files", 2))
            if getattr(self, name) < floor
        ]
        if not self.target_mib > 0:
            found.append(f"target_mib must be > 0, got {self.target_mib}")
        if found:
            raise UsageError("; ".join(found))


@dataclass
class CompactionReport:
    """What a compaction did. Paths are relative to the data folder."""

    busy: bool = False  # another compaction was at work, nothing was done
    merged: dict[str, int] = field(default_factory=dict)  # new file -> number of files it replaces
    rows: int = 0  # in the new files
    deleted_files: int = 0
    kept_files: int = 0  # hidden, due for deletion, kept since somebody has the warehouse open
    problems: list[str] = field(default_factory=list)  # files that could not be read, and were left alone

    def lines(self) -> list[str]:
        """The report in words."""
        if self.busy:
            return ["another compaction is at work on this folder; nothing done"]
        said = [f"{path}: {count} files merged" for path, count in self.merged.items()]
        said += [f"not merged, unreadable: {problem}" for problem in self.problems]
        total = sum(self.merged.values())
        said.append(f"{total} files with {self.rows} rows merged into {len(self.merged)}; "
                    f"{self.deleted_files} replaced files deleted")  # fmt: skip
        if self.kept_files:
            said.append(f"{self.kept_files} replaced files kept, because the warehouse is open somewhere")
        return said


def compact(
    folder: DataFolder, *, now_s: float | None = None, settings: CompactionSettings | None = None
) -> CompactionReport:
    """Merge small files of `runs` and `telemetry`, family by family, and delete what was merged long ago.

    One compaction at a time: a second returns at once with `busy`. `now_s` is in seconds since the epoch. May be
    killed at any point. Raises `UsageError` for a folder that is none, `OSError` for a full disk.
    """
    now_s = time.time() if now_s is None else now_s
    settings = settings or CompactionSettings()
    folder.open()
    report = CompactionReport()
    with compaction_lock(folder) as got_it:
        if not got_it:
            report.busy = True
            return report
        # Telemetry first: which samples belong to a landed run is read off the files of runs.
        for kind in reversed(KINDS):
            _delete_replaced(folder, kind, now_s, settings, report)
            for family in folder.families(kind):
                _settle_interrupted(folder, kind, family, now_s, settings)
                _remove_abandoned(folder.partition(kind, family), now_s)
                _merge_family(folder, kind, family, now_s, settings, report)
    return report


def _merge_family(
    folder: DataFolder,
    kind: str,
    family: str,
    now_s: float,
    settings: CompactionSettings,
    report: CompactionReport,
) -> None:
    def unreadable(path: Path, error: Exception) -> None:
        report.problems.append(f"{path.relative_to(folder.root)} ({error})")

    for group in _plan(folder, kind, family, settings, unreadable):
        paths = list(group)
        for files, rows in read_files(paths, SCHEMAS[kind], settings.target_rows, unreadable):
            if len(files) < settings.min_files and (len(files) < 2 or files[-1] == paths[-1]):
                continue
            table = _in_order(rows, SORT_KEYS[kind])
            del rows
            target = paths[0].parent / new_merged_name()
            sources = {f"{path.parent.name}/{path.name}": list(group[path]) for path in files}
            table = table.replace_schema_metadata({_SOURCES: json.dumps(sources).encode()})
            with replacing(target) as temporary:
                pq.write_table(table, temporary, row_group_size=ROW_GROUP_ROWS, **COMPRESSION)
            # A run that landed again while it was merged: its repeat is as good, and from here on hidden.
            _listing(folder, kind, target, list(sources), now_s).write()
            report.merged[str(target.relative_to(folder.root))] = len(files)
            report.rows += table.num_rows
            del table


def _in_order(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The rows sorted by `keys`. Most are already, as files are read in the order of their names."""
    first, *more = [(table.column(key)[:-1], table.column(key)[1:]) for key in reversed(keys)]
    ascends = pc.less_equal(*first)
    for pair in more:
        ascends = pc.or_(pc.less(*pair), pc.and_(pc.equal(*pair), ascends))
    if pc.all(ascends, skip_nulls=False).as_py():
        return table
    return table.sort_by([(key, "ascending") for key in keys])


def _plan(
    folder: DataFolder,
    kind: str,
    family: str,
    settings: CompactionSettings,
    unreadable: Callable[[Path, Exception], None],
) -> Iterator[dict[Path, tuple[int, int, int]]]:
    """Groups of small files that are worth a merge, and their identities before they are read.

    By their sizes: how many rows a run has shows when it is read.
    """
    target_bytes = settings.target_mib * 2**20
    small: list[tuple[int, Path, tuple[int, int, int]]] = []  # bytes in a merged file, path, identity
    counting = counting_files(folder, kind, family)
    landed = _landed_files(folder, family) if kind == "telemetry" else set()  # read later, so none is missed
    for path in counting:
        is_merged = is_merged_name(path.name)
        identity = _identity(path)
        if identity is None or identity[1] > target_bytes / 2:
            continue
        if kind == "telemetry" and not (is_merged or path.name in landed or has_landed(folder, family, path.stem)):
            continue  # its run is being written, or was lost and will come again with other samples
        try:
            if is_merged and pq.read_metadata(path).num_rows > settings.target_rows / 2:
                continue
        except (pa.ArrowInvalid, OSError) as error:
            unreadable(path, error)
            continue
        small.append((max(identity[1] - _OWN_BYTES, identity[1] // 8), path, identity))
    # A merged file joins only when the rest is worth rewriting it, so each row is rewritten few times.
    small.sort(key=lambda entry: (entry[0], entry[1].name))
    total = sum(size for size, *_ in small)
    while small and is_merged_name(small[-1][1].name) and small[-1][0] > 4 * (total - small[-1][0]):
        total -= small.pop()[0]
    small.sort(key=lambda entry: entry[1].name)
    groups: list[dict[Path, tuple[int, int, int]]] = [{}]
    group_bytes = 0
    for size, path, identity in small:
        if groups[-1] and group_bytes + size > target_bytes:
            groups.append({})
            group_bytes = 0
        groups[-1][path] = identity
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


def _listing(folder: DataFolder, kind: str, merged: Path, sources: Sequence[str], now_s: float) -> Listing:
    return Listing(
        file=listing_file(folder, kind, merged.name),
        merged=f"{merged.parent.name}/{merged.name}",
        hidden=tuple(sources),
        published_at_s=now_s,
    )


def _settle_interrupted(folder: DataFolder, kind: str, family: str, now_s: float, settings: CompactionSettings) -> None:
    """A merged file without a listing was left by a kill: list it if it still holds what its sources hold."""
    for path in folder.partition(kind, family).glob("merged-*.parquet"):
        if listing_file(folder, kind, path.name).exists():
            continue
        sources = json.loads((pq.read_schema(path).metadata or {}).get(_SOURCES, b"{}"))
        root = folder.root / kind
        hidden = {name for listing in read_listings(folder, kind) for name in listing.hidden}
        unchanged = sources and all(
            name not in hidden and _identity(root / name) == tuple(identity) for name, identity in sources.items()
        )
        if unchanged:
            _listing(folder, kind, path, list(sources), now_s).write()
        elif now_s - path.stat().st_mtime > settings.grace_s and not is_open_somewhere(folder):
            path.unlink()


def _delete_replaced(
    folder: DataFolder, kind: str, now_s: float, settings: CompactionSettings, report: CompactionReport
) -> None:
    root = folder.root / kind
    listings = read_listings(folder, kind)
    still_hiding = {listing.merged for listing in listings if listing.hidden}
    for listing in listings:
        if not (root / listing.merged).exists():
            # Deleted below as part of a later merge, by a compaction that was killed before it removed the listing.
            listing.file.unlink(missing_ok=True)
            continue
        age_s = now_s - listing.published_at_s
        if not listing.hidden or age_s < settings.grace_s:
            continue
        if still_hiding.intersection(listing.hidden):
            continue  # a merged file goes after all that its own listing hides, else that would count again
        if age_s < settings.force_after_s and is_open_somewhere(folder):
            report.kept_files += len(listing.hidden)
            continue
        for name in listing.hidden:
            with contextlib.suppress(FileNotFoundError):
                (root / name).unlink()
                report.deleted_files += 1
        sync((root / listing.merged).parent)  # gone for good, before the listing forgets to hide them
        dataclasses.replace(listing, hidden=()).write()
        still_hiding.discard(listing.merged)
        for name in map(os.path.basename, listing.hidden):
            if is_merged_name(name):
                listing_file(folder, kind, name).unlink(missing_ok=True)


def _remove_abandoned(partition: Path, now_s: float) -> None:
    """Temporary files of writers that were killed."""
    for path in partition.glob(f".*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if now_s - path.stat().st_mtime > _ABANDONED_AFTER_S:
                path.unlink()


_probes: dict[Path, tuple[int, int]] = {}  # path -> inode, descriptor


def is_open_somewhere(folder: DataFolder) -> bool:
    """Whether a DuckDB client has `warehouse.duckdb` open: each holds a POSIX read lock on it while it is open."""
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
    # struct flock: l_type, l_whence, l_start, l_len, l_pid; asked for an open file description, so that this
    # process's own locks count too.
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    (lock_type,) = struct.unpack_from("h", fcntl.fcntl(_probes[path][1], fcntl.F_OFD_GETLK, asked))
    return lock_type != fcntl.F_UNLCK


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is replaced: inode, size and modification time in ns; None for no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def compaction_lock(folder: DataFolder, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process may merge and delete files, or rely on nobody doing so; `wait` until it may."""
    with open_lock(folder.compaction_lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def entry(cfg) -> int:
    """Compact the folder that `cfg` names and print what was done."""
    settings = CompactionSettings(
        **{f.name: cfg[f.name] for f in dataclasses.fields(CompactionSettings) if f.name in cfg}
    )
    report = compact(DataFolder.resolve(cfg.data), settings=settings)
    print("\n".join(report.lines()))
    return 1 if report.problems else 0


def main() -> None:
    command("compact", entry)


if __name__ == "__main__":
    main()
