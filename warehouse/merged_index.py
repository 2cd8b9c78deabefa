"""Which merged file holds a run: asked at every landing, so what was read once is kept in memory.

Start reading at `MergedIndex.file_with`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.folder import DataFolder
from warehouse.merged import is_merged_name


class MergedIndex:
    """The run_ids of merged files, 8 bytes each. A merged file never changes, and no name comes twice.

    Of files whose range of run_ids does not hold the one asked for, only the footer is read. Not for several threads.
    """

    def __init__(self, folder: DataFolder, kind: str = "runs"):
        self._folder = folder
        self._kind = kind
        self._files: dict[tuple[str, str], _MergedFile | None] = {}  # family and name; None: not there, or unreadable

    def file_with(self, family: str, run_id: str) -> Path | None:
        """The merged file that counts and holds the run, or None. A file that cannot be read holds none."""
        return next((file.path for file in self._of(family) if file.has(run_id) and file.path.exists()), None)

    def holder(self, family: str) -> Callable[[str], bool]:
        """Return a function that says whether a merged file of now holds a run, for asking about many."""
        files = list(self._of(family))
        return lambda run_id: any(file.has(run_id) for file in files)

    def _of(self, family: str) -> Iterator[_MergedFile]:
        # By the listings, which are few: the partition may hold 100,000 small files.
        partition = self._folder.partition(self._kind, family)
        for name in os.listdir(self._folder.listings(self._kind)):
            if not is_merged_name(name) or not name.endswith(".parquet"):
                continue
            if (family, name) not in self._files:
                try:
                    self._files[family, name] = _MergedFile(partition / name)
                except (pa.ArrowException, OSError):  # of another family: a merged file is there before its listing
                    self._files[family, name] = None
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
        return file.read(columns=["run_id"]).column(0).unique().to_pylist()
