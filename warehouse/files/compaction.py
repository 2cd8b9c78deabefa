"""Settings, report and lock of a compaction, and whether any client has the warehouse open.

Start reading at `CompactionReport`; `warehouse.compact` merges, `warehouse.files.settle` repairs after kills and
damage.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conf.cli.settings import Checked, data_key, key
from warehouse.files.damage import DamagedFile
from warehouse.files.folder import DataFolder
from warehouse.files.lock_file import is_shared_by_any, open_lock


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
