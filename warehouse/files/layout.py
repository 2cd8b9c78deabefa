"""Paths of a data folder, and atomic writes of files in it. Imports no reader and no writer.

Start reading at `FolderLayout`; `warehouse.files.folder` makes and opens data folders.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.files.outputs import OWN_FILES, OWN_FOLDERS, replacing, sync
from warehouse.files.checksum import sealed_bytes
from warehouse.tables.schema import JOB_SCHEMA, SCHEMA_VERSION, STALE_SCHEMA, TABLES

KINDS = ("runs", "telemetry", "kernels", "ranks", "collocations")  # what is partitioned by family and compacted
OF_RUNS = KINDS[1:]  # rows that belong to a run, and land before it
COMPRESSION: dict[str, Any] = {"compression": "zstd", "compression_level": 3}
# Of at most one row: larger with compression or dictionaries, and three times as long to write.
_PLAIN: dict[str, Any] = {"compression": "none", "use_dictionary": False}

# One small file per merged file, see `warehouse.compact`: the merged file (hidden=false) and what it replaces.
LISTING_SCHEMA = pa.schema([("path", pa.string()), ("hidden", pa.bool_())])

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_ANCHOR_FAMILY = "_schema"  # no family can be called so: a name starts with a letter or digit


@dataclass(frozen=True)
class FolderLayout:
    """A data folder's paths."""

    root: Path  # absolute

    def own(self, name: str) -> Path:
        """Return the path of a file or folder that `conf.files.outputs` lets no command overwrite."""
        assert name in (*OWN_FOLDERS, *OWN_FILES), f"{name} is missing in conf.files.outputs"
        return self.root / name

    @property
    def format_marker(self) -> Path:
        return self.own("format.json")

    @property
    def queue(self) -> Path:
        """SQLite: jobs and tasks."""
        return self.own("queue.sqlite")

    @property
    def warehouse(self) -> Path:
        """DuckDB file of views only."""
        return self.own("warehouse.duckdb")

    @property
    def runs(self) -> Path:
        return self.own("runs")

    @property
    def telemetry(self) -> Path:
        return self.own("telemetry")

    @property
    def kernels(self) -> Path:
        return self.own("kernels")

    @property
    def ranks(self) -> Path:
        return self.own("ranks")

    @property
    def collocations(self) -> Path:
        return self.own("collocations")

    @property
    def jobs(self) -> Path:
        return self.own("jobs")

    @property
    def stale(self) -> Path:
        """Marks of labels that no longer hold, see `warehouse.files.stale`."""
        return self.own("stale")

    @property
    def models(self) -> Path:
        return self.own("models")

    @property
    def features(self) -> Path:
        """Computed features, by their version: a cache that may be deleted."""
        return self.own("features")

    @property
    def snapshots(self) -> Path:
        """A folder for each snapshot, see `warehouse.snapshot`."""
        return self.own("snapshots")

    @property
    def growth(self) -> Path:
        """The growth cycles' journal and plans, see `farm.nights`."""
        return self.own("growth")

    @property
    def reports(self) -> Path:
        """The growth cycles' reports, a page and a JSON file for each, and `latest` of both."""
        return self.own("reports")

    @property
    def replays(self) -> Path:
        """Pages of replayed traces and their JSON, see `farm.replaying`."""
        return self.own("replays")

    @property
    def environments(self) -> Path:
        """A data folder for each environment that was compared, see `farm.comparison`."""
        return self.own("environments")

    @property
    def comparisons(self) -> Path:
        """Pages of comparisons and their JSON, see `farm.comparison`."""
        return self.own("comparisons")

    @property
    def machines(self) -> Path:
        """Profiles of machines, by GPU model, see `learn.calibrate`."""
        return self.own("machines")

    @property
    def locks(self) -> Path:
        return self.own("locks")

    @property
    def damaged(self) -> Path:
        """Folder of damaged files that were set aside, each with the reason beside it; see `farm.queue.repair`."""
        return self.own("damaged")

    @property
    def dispatcher_lock(self) -> Path:
        return self.locks / "dispatcher.lock"

    @property
    def compaction_lock(self) -> Path:
        return self.locks / "compaction.lock"

    @property
    def growth_lock(self) -> Path:
        return self.locks / "growth.lock"

    @property
    def ingest_lock(self) -> Path:
        return self.locks / "ingest.lock"

    @property
    def service_lock(self) -> Path:
        return self.locks / "service.lock"

    @property
    def service(self) -> Path:
        """Questions that the service traces, and their answers: SQLite that may be deleted, see `farm.serving`."""
        return self.own("service.sqlite")

    def listings(self, kind: str) -> Path:
        """Return the folder of the listings of merged files of one of `KINDS`."""
        return self.own("compactions") / kind

    def partition(self, kind: str, family: str) -> Path:
        """Return the folder of one family's part of one of `KINDS`. Raises `ValueError` for an invalid folder name."""
        return self.root / kind / f"family={checked_name('family', family)}"

    def families(self, kind: str) -> list[str]:
        """Return the families that have a partition."""
        prefix = "family="
        names = [path.name.removeprefix(prefix) for path in (self.root / kind).glob(prefix + "*")]
        return sorted(name for name in names if name != _ANCHOR_FAMILY)

    def write_anchors(self) -> None:
        """Write the missing files without rows, so that every glob of the views matches a file."""
        for path, schema in self._anchors().items():
            if not path.exists():
                _write_file(path, _without_rows(schema))

    def _anchors(self) -> dict[Path, pa.Schema]:
        """An older one does too, as views add columns."""
        name, partition = f"anchor-v{SCHEMA_VERSION}.parquet", f"family={_ANCHOR_FAMILY}"
        return {
            **{self.root / kind / partition / name: TABLES[kind] for kind in KINDS},
            self.jobs / f"_{name}": JOB_SCHEMA,
            self.stale / f"_{name}": STALE_SCHEMA,
            **{self.listings(kind) / f"_{name}": LISTING_SCHEMA for kind in KINDS},
        }


def checked_name(kind: str, name: object) -> str:
    """Return `name` if it can be part of a file's path and of a hive partition unchanged, else raise `ValueError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 180:
        raise ValueError(
            f"{kind} must be of letters, digits and _ . + - and start with a letter or digit, got {name!r}"
        )
    return name


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file atomically and durably."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(content)


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a small table atomically and durably, with its checksum in the footer; its folder is made if missing."""
    _write_file(path, sealed_bytes(table, **(COMPRESSION if table.num_rows > 1 else _PLAIN)))


def _write_file(path: Path, content: bytes) -> None:
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        sync(path.parent.parent)
    write_bytes(path, content)


@functools.cache
def _without_rows(schema: pa.Schema) -> bytes:
    """The same in every folder, and as much work as a file with rows."""
    return sealed_bytes(schema.empty_table(), **_PLAIN)
