"""Proves, before a file is deleted or hidden, that other files hold its runs.

Start reading at `unheld_ids`. A listing or a merged file may be damaged or foreign, so `warehouse.compact` trusts
neither: it deletes a file only after finding the rows of its runs in an intact file that stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conf.plain_text import first_line
from warehouse.files.checksum import checksum_problem
from warehouse.files.counting import counting_files
from warehouse.files.folder import DataFolder
from warehouse.files.listings import read_listings
from warehouse.files.merged import Listing, is_merged_name


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
