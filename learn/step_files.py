"""Where records of traced steps lie in a data folder: parts, each whole or not there.

Start reading at `StepFiles`. A case that two parts hold is the same in both.
"""

from __future__ import annotations

import hashlib
import json
import uuid
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from conf.identity import version_of
from featurize.version import FEATURES_VERSION
from learn.step_record import StepRecord

_LIBRARIES = ("torch", "timm", "torchvision", "transformers")  # whose code a traced step follows from


def record_version() -> str:
    """Return the name of the folder of stored records: the features' version and the libraries' releases, hashed."""
    return f"{FEATURES_VERSION}-{hashlib.sha256(libraries().encode()).hexdigest()[:12]}"


@cache
def libraries() -> str:
    """Return the releases of the libraries, as `NAME VERSION ...`."""
    return " ".join(f"{name} {version_of(name)}" for name in _LIBRARIES)


class StepFiles:
    """Stored records of one data folder, of this code's features and the libraries that are installed.

    Args:
        features: the folder of stored features; it need not exist until something is written
    """

    def __init__(self, features: Path) -> None:
        self._features = features
        self._named: set[Path] = set()  # damaged parts that have been warned of

    def read(self, wanted: set[str]) -> Iterator[tuple[str, StepRecord]]:
        """Yield the (key, record) of the wanted keys. A damaged part is left out with a warning."""
        import pyarrow as pa

        for path in sorted((self._features / record_version()).glob("*.parquet")):
            try:
                records = _records(path, wanted)
            except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
                if path not in self._named:
                    self._named.add(path)
                    warnings.warn(
                        f"{path} holds no features that can be read ({type(error).__name__}); what is missing is "
                        "computed again, and the file may be deleted",
                        stacklevel=4,  # who called prepare
                    )
                continue
            yield from records

    def write(self, records: Sequence[tuple[str, StepRecord]]) -> None:
        """Write a part of these (key, record). Those that may change without the case (`passing`) are left out."""
        import pyarrow as pa

        from warehouse.layout import write_parquet

        records = [(key, record) for key, record in records if not record.passing]
        if not records:
            return
        folder = self._features / record_version()
        folder.mkdir(parents=True, exist_ok=True)
        features = [json.dumps(dict(record.values)) for _, record in records]
        graphs = [record.packed_graph() for _, record in records]
        table = pa.table(
            {
                "key": pa.array([key for key, _ in records], pa.string()),
                "error": pa.array([record.error for _, record in records], pa.string()),
                "seconds": pa.array([record.seconds for _, record in records], pa.float64()),
                "features": pa.array(features, pa.string()),
                "graph": pa.array(graphs, pa.binary()),
                "sha256": pa.array(
                    [
                        _checksum(key, record.error, text, graph)
                        for (key, record), text, graph in zip(records, features, graphs, strict=True)
                    ],
                    pa.string(),
                ),
            }
        )
        write_parquet(folder / f"part-{uuid.uuid4().hex[:12]}.parquet", table)


def _checksum(key: str, error: str | None, features: str, graph: bytes) -> str:
    """Over what a record is used for: one that a flipped bit has changed is computed again."""
    digest = hashlib.sha256()
    for part in (key.encode(), (error or "").encode(), features.encode(), graph):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _records(path: Path, wanted: set[str]) -> list[tuple[str, StepRecord]]:
    import pyarrow.parquet as pq

    if not path.is_file() or not path.resolve().is_relative_to(path.parent.resolve()):
        raise OSError("a folder, a pipe, or a link that leads out of this one")
    records = []
    for row in pq.read_table(path).to_pylist():
        if row["key"] not in wanted:
            continue
        values, graph, error = json.loads(row["features"]), row["graph"], row["error"]
        if not isinstance(values, dict) or not isinstance(graph, bytes) or (error is None and not (values and graph)):
            raise ValueError(f"no record of a step: key {row['key']}")
        if row["sha256"] != _checksum(row["key"], error, row["features"], graph):
            raise ValueError(f"a record is not what was written: key {row['key']}")
        records.append((row["key"], StepRecord(values=values, graph=graph, error=error, seconds=row["seconds"])))
    return records
