"""Verifies a data folder byte by byte: Parquet files, listings, snapshots, artifacts, the queue.

Start reading at `examine`. Nothing is changed; `python -m warehouse.check` prints the report.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from conf.errors import CommandError
from conf.files.identity import OWN_SHA256, own_sha256, sha256_of
from conf.plain_text import first_line, print_lines
from warehouse.files.counting import Unreadable, lost_line, lost_merged_files, unlisted_problem, unproven_sources
from warehouse.files.damage import DamagedFile, file_problem, parquet_files
from warehouse.files.folder import DataFolder, recorded_checksum
from warehouse.files.merged import Listing, read_listings
from warehouse.files.plain_file import is_out_of_descriptors, patiently
from warehouse.files.presence import Presence, compare, queue_problem
from warehouse.files.snapshots import MANIFEST, read_manifest
from warehouse.tables.schema import KINDS

Progress = Callable[[int, int], None]  # (files verified, files in all)

_CHUNK_FILES = 64  # files per task of a thread
_UNLISTED_AFTER_S = 3600.0  # a merged file this old will not get a listing any more


@dataclass
class IntegrityReport:
    """Result of a verification: counts and problems."""

    files: int = 0
    without_checksum: int = 0  # files of older versions, which are read in full instead
    damaged: list[DamagedFile] = field(default_factory=list)
    lost: list[tuple[str, Listing]] = field(default_factory=list)  # kind and listing of merged files that are gone
    lost_lines: list[str] = field(default_factory=list)
    presence: Presence = field(default_factory=Presence)

    @property
    def is_well(self) -> bool:
        """Return whether nothing is damaged or missing."""
        return not (self.damaged or self.lost or self.presence.gone)

    def lines(self, root: Path) -> list[str]:
        """Return a line for each damaged or missing file, then the counts."""
        lines = [f"damaged: {file.path}: {file.reason}" for file in self.damaged]
        lines += [f"missing: {line}" for line in self.lost_lines]
        lines += [f"missing: {line}" for line in [self.presence.gone_line(root)] if line]
        lines += [line for line in [self.presence.unknown_line(root)] if line]
        older = f", {self.without_checksum:,} of them of older versions without a checksum" * bool(
            self.without_checksum
        )
        problems = len(self.damaged) + len(self.lost)
        lines.append(f"{root}: {self.files:,} files verified{older}; {problems:,} damaged or missing")
        return lines

    def as_json(self, root: Path) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "data": str(root),
            "files": self.files,
            "without_checksum": self.without_checksum,
            "damaged": [{"path": str(file.path), "reason": file.reason} for file in self.damaged],
            "missing": [
                {"path": str(root / kind / listing.merged), "listing": str(listing.file), "rows": listing.rows}
                for kind, listing in self.lost
            ],
            "runs_gone": {job_id: indexes.tolist() for job_id, indexes in self.presence.gone.items()},
            "runs_unknown": {job_id: len(indexes) for job_id, indexes in self.presence.unknown.items()},
        }


def examine(folder: DataFolder, *, workers: int | None = None, progress: Progress | None = None) -> IntegrityReport:
    """Verify every file of the folder in `workers` threads (default: the CPUs this process may use).

    Files that a compaction deletes in the meantime are left out. Raises `UsageError` if there is no such data folder.
    """
    folder.open()
    report = IntegrityReport()
    paths = list(parquet_files(folder))
    chunks = [paths[start : start + _CHUNK_FILES] for start in range(0, len(paths), _CHUNK_FILES)]
    jobs: list[Callable[[], list[_Verified]]] = [partial(_verify_parquet, chunk) for chunk in chunks]
    jobs += [partial(_verify_snapshot, path) for path in sorted(folder.snapshots.glob(f"[!.]*/{MANIFEST}"))]
    jobs += [partial(_verify_artifact, path) for path in sorted(folder.models.glob("*/*/*.json"))]
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        waiting = [pool.submit(job) for job in jobs]
        try:
            for future in as_completed(waiting):
                _count(report, future.result())
                if progress is not None:
                    progress(report.files, max(report.files, len(paths)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    _examine_listings(folder, report)
    problem = queue_problem(folder)
    if problem is not None:
        report.damaged.append(DamagedFile(folder.queue, problem))
    report.files += folder.queue.is_file()
    try:
        report.presence = compare(folder)
    except sqlite3.Error:
        pass  # the queue is damaged, as reported above
    except OSError as error:
        if not report.damaged:
            raise
        print_lines([f"warning: the queue is not compared with the runs: {error}"], sys.stderr)
    report.damaged.sort(key=lambda file: file.path)
    return report


@dataclass(frozen=True)
class _Verified:
    path: Path
    has_checksum: bool
    problem: str | None
    files: int = 1


def _count(report: IntegrityReport, verified: Sequence[_Verified]) -> None:
    for check in verified:
        report.files += check.files
        report.without_checksum += not check.has_checksum and check.problem is None
        if check.problem is not None:
            report.damaged.append(DamagedFile(check.path, check.problem))


def _verify_parquet(paths: Sequence[Path]) -> list[_Verified]:
    """Verify files; a disk error counts only if it persists over several looks."""
    verified: list[_Verified] = []
    for path in paths:
        try:
            verified.append(_Verified(path, *patiently(partial(file_problem, path))))
        except FileNotFoundError:
            continue
        except OSError as error:
            if is_out_of_descriptors(error):
                raise
            verified.append(_Verified(path, False, error.strerror or str(error)))
    return verified


def _verify_snapshot(manifest: Path) -> list[_Verified]:
    try:
        snapshot = read_manifest(manifest)
    except (CommandError, OSError) as error:
        return [_Verified(manifest, True, str(error))]
    problems = snapshot.problems()
    verified = [_Verified(manifest.parent, True, f"snapshot {snapshot.name}: {problem}", 0) for problem in problems]
    return [*verified, _Verified(manifest, True, None, 1 + len(snapshot.files))]


def _verify_artifact(path: Path) -> list[_Verified]:
    """Verify an artifact. Its JSON has its files under `files`, as `{path: {"sha256": hex, "bytes": n}}`, and its own
    SHA-256, computed without that key, as `own_sha256`. Older artifacts have neither."""
    try:
        described = json.loads(path.read_bytes())
        if not isinstance(described, dict) or not isinstance(described.get("files"), dict):
            return []  # a file of an older version, or one of an artifact's other files
        if OWN_SHA256 in described and described[OWN_SHA256] != own_sha256(described):
            return [_Verified(path, True, "it is not what was written: its SHA-256 is another")]
        verified = [_Verified(path, True, None)]
        for name, about in described["files"].items():
            named = path.parent / name
            problem = None
            if not named.resolve().is_relative_to(path.parent.resolve()) or not isinstance(about, dict):
                problem = f"it names {name!r}, which is not a file of it"
            elif not named.is_file():
                problem = "it is not there"
            elif named.stat().st_size != about.get("bytes") or sha256_of(named) != about.get("sha256"):
                problem = "it is not what was written: its size or SHA-256 is another"
            verified.append(_Verified(named, True, problem))
        return verified
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        return [_Verified(path, True, f"it cannot be read: {first_line(error)}")]


def _examine_listings(folder: DataFolder, report: IntegrityReport) -> None:
    """Report listings whose files contradict them."""
    known = {file.path for file in report.damaged}

    def add(path: Path, reason: str) -> None:
        if path not in known:
            known.add(path)
            report.damaged.append(DamagedFile(path, reason))

    for kind in KINDS:
        listings = read_listings(folder, kind, lambda file: add(file.path, file.reason))
        for listing in lost_merged_files(folder, kind):
            report.lost.append((kind, listing))
            report.lost_lines.append(lost_line(folder, kind, listing))
        for listing in listings:
            merged = folder.root / kind / listing.merged
            try:
                if listing.checksum is not None and recorded_checksum(merged) != listing.checksum:
                    add(merged, f"it is another file than {listing.file} names")
                unproven = unproven_sources(folder, kind, listing, listings) if listing.hidden else None
            except (OSError, Unreadable, ValueError):
                continue  # damaged or lost, as reported above
            if unproven is not None and unproven.unheld:
                name, why = next(iter(unproven.unheld.items()))
                add(
                    listing.file,
                    f"it hides {len(unproven.unheld):,} files without holding their runs, as {name} ({why})",
                )
        for family in folder.families(kind):
            for path in folder.partition(kind, family).glob("merged-*.parquet"):
                problem = unlisted_problem(folder, kind, family, path, _UNLISTED_AFTER_S)
                if problem:
                    add(path, problem)
