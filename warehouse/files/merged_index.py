"""Finds the merged file that holds a run. Every landing asks, so file contents are cached in memory.

Start reading at `MergedIndex.file_with`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.files.believed import counting_merged_names, merged_damage
from warehouse.files.layout import FolderLayout
from warehouse.files.merged import has_own_name


class MergedIndex:
    """The run_ids of merged files, 8 bytes each. A merged file never changes, and no name comes twice.

    Of files whose range of run_ids does not hold the one asked for, only the footer is read. Not for several threads.
    """

    def __init__(self, folder: FolderLayout, kind: str = "runs"):
        self._folder = folder
        self._kind = kind
        self._files: dict[tuple[str, str], _MergedFile | None] = {}  # family and name; None: not there

    def file_with(self, family: str, run_id: str) -> Path | None:
        """Return the merged file that counts and holds the run, or None. Unreadable files hold no runs."""
        while any(file.has(run_id) for file in self._of(family)):
            listings = self._listings()
            counting = self._counting(family)
            for file in self._of(family):
                if file.path.name in counting and file.has(run_id):
                    return file.path
            if listings == self._listings():
                return None
            # A compaction has merged the file once more meanwhile: the next look finds the new one.
        return None

    def holder(self, family: str) -> Callable[[str], bool]:
        """Return a function that tells whether a current merged file holds a run, for asking about many runs."""
        counting = self._counting(family)
        files = [file for file in self._of(family) if file.path.name in counting]
        return lambda run_id: any(file.has(run_id) for file in files)

    def _counting(self, family: str) -> frozenset[str]:
        """The names of the merged files of a family that queries count, by the same judgement."""
        partition = self._folder.partition(self._kind, family).name
        names = counting_merged_names(self._folder, self._kind)
        return frozenset(os.path.basename(name) for name in names if os.path.dirname(name) == partition)

    def _listings(self) -> list[str]:
        return os.listdir(self._folder.listings(self._kind))

    def _of(self, family: str) -> Iterator[_MergedFile]:
        # By the listings, which are few: the partition may hold 100,000 small files.
        partition = self._folder.partition(self._kind, family)
        for name in self._listings():
            path = partition / name
            if not has_own_name(path):
                continue
            if (family, name) not in self._files:
                try:
                    if merged_damage(path) is not None:
                        continue
                    self._files[family, name] = _MergedFile(path)
                except FileNotFoundError:  # of another family: a merged file is there before its listing
                    self._files[family, name] = None
                except (pa.ArrowException, OSError):  # of the disk, or of its load: looked at again next time
                    continue
            file = self._files[family, name]
            if file is not None:
                yield file


class _MergedFile:
    def __init__(self, path: Path):
        self.path = path
        self._hashes: np.ndarray | None = None  # sorted; of this process, whose hashes of texts are its own
        metadata = pq.read_metadata(path)
        column = metadata.schema.names.index("run_id") if "run_id" in metadata.schema.names else None
        self._ranges: list[tuple[str, str]] | None = []
        for group in range(metadata.num_row_groups):
            statistics = None if column is None else metadata.row_group(group).column(column).statistics
            if statistics is None or not statistics.has_min_max:
                self._ranges = None
                break
            self._ranges.append((statistics.min, statistics.max))

    def has(self, run_id: str) -> bool:
        return self._may_hold(run_id) and self._holds(run_id)

    def _may_hold(self, run_id: str) -> bool:
        return self._ranges is None or any(low <= run_id <= high for low, high in self._ranges)

    def _holds(self, run_id: str) -> bool:
        try:
            if self._hashes is None:
                ids = self._ids()
                self._hashes = np.sort(np.fromiter(map(hash, ids), np.int64, len(ids)))
            key = hash(run_id)
            place = int(np.searchsorted(self._hashes, key))
            if place == len(self._hashes) or self._hashes[place] != key:
                return False
            return run_id in set(self._ids())  # two texts may have one hash
        except (pa.ArrowException, OSError):
            return False

    def _ids(self) -> list[str]:
        file = pq.ParquetFile(self.path, read_dictionary=["run_id"])
        run_ids: list[str] = file.read(columns=["run_id"]).column(0).unique().to_pylist()
        return run_ids
