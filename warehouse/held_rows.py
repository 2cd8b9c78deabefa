"""Which runs a file holds, and whether files that count hold them too: the proof before anything is deleted or hidden.

Start reading at `unheld_ids`. A listing or a merged file may be damaged, or somebody may have put it there, so
`warehouse.compact` believes neither: a file goes only when the rows of its runs are found in a whole file that stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conf.plain_text import first_line
from warehouse.checksum import checksum_problem
from warehouse.counting import counting_files
from warehouse.folder import DataFolder
from warehouse.listings import read_listings
from warehouse.merged import Listing, is_merged_name


class Unreadable(Exception):
    """A file whose rows cannot be told, and why."""


def run_ids_of(path: Path) -> set[str]:
    """Return the run_ids of a whole file. Raises `Unreadable`; `FileNotFoundError` where it is gone."""
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
    """Return those of `ids` that no whole file of the partition holds that counts; `but` does not count here.

    Of telemetry, only samples whose run has landed are missed: others belong to no run that anybody sees.
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
    """Files that a listing hides and that must not be deleted: name -> why."""

    unheld: dict[str, str] = field(default_factory=dict)  # no file that counts holds their runs
    unreadable: dict[str, str] = field(default_factory=dict)


def unproven_sources(folder: DataFolder, kind: str, listing: Listing, listings: Sequence[Listing]) -> Unproven:
    """Return the files that a listing hides although its merged file may not hold their runs.

    Files that are deleted already are proven. Raises `Unreadable` for a merged file that is not whole, and
    `FileNotFoundError` for one that is gone.
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
