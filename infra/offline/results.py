"""Packs the work folder of a lent machine into a few result files, and unpacks them on the next machine.

Start reading at `pack`, and at `prepare` for how a call continues. An archive is cut into slices. summary.json names
the valid ones, and is replaced once they are durable: after a kill at any moment the newest whole archive is valid.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sqlite3
import sys
import tarfile
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from conf.errors import EnvironmentProblem, UsageError
from conf.files.outputs import TEMPORARY_SUFFIX, json_lines, write_file
from conf.plain_text import exception_line
from warehouse.files.compaction import compaction_lock
from warehouse.files.counting import counting_files
from warehouse.files.folder import DataFolder
from warehouse.tables.schema import KINDS

SLICE_BYTES = 16 * 2**20  # size of a file that comes back
MOST_SLICES = 6  # the machine returns eight files; `SUMMARY` and `LOG` are the others
FULL_BYTES = 40 * 2**20  # size of an archive beside which one more generation of three slices fits
SUMMARY, LOG = "summary.json", "log.txt"
SERIES = "series.json"  # in the work folder: identity of the series of calls, and how often it was packed
DATA, CALLS, TESTS = "data", "calls.jsonl", "tests.jsonl"  # also there: runs, a line per step, outcomes of tests
_XZ_PRESET: Final = 1  # packs small Parquet files 20 times smaller, because their footers resemble each other
_LEFT_OUT = ("locks", "features", "warehouse.duckdb")  # parts of the data folder that can be made again
_QUEUE = "queue.sqlite"
_SLICE = ".slice"
_LOG_BYTES = 2**18  # end of the log that comes back beside the slices; they hold all of it


@dataclass(frozen=True)
class Series:
    """A series of calls that continue each other, and the number of its work folder's newest archive."""

    name: str
    generation: int = 0

    @classmethod
    def of_work(cls, work: Path) -> Series | None:
        """Return the series of a work folder; None if it is empty. Raises `UsageError` for any other folder."""
        try:
            values = json.loads((work / SERIES).read_text())
            return cls(str(values["series"]), int(values["generation"]))
        except (FileNotFoundError, NotADirectoryError):
            if work.exists() and (not work.is_dir() or any(work.iterdir())):
                raise UsageError(
                    f"work={work} is not a work folder: it has no {SERIES}; name an empty or new one"
                ) from None
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{work / SERIES} is damaged; name another folder with work=") from error

    @classmethod
    def begun(cls, work: Path) -> Series:
        """Begin a series in an empty work folder."""
        work.mkdir(parents=True, exist_ok=True)
        return cls(uuid.uuid4().hex[:8]).written(work)

    def written(self, work: Path) -> Series:
        """Write the series durably into its work folder; return it."""
        content = {"series": self.name, "generation": self.generation}
        write_file(work / SERIES, (json.dumps(content) + "\n").encode())
        return self


@dataclass(frozen=True)
class Archive:
    """A complete archive in a results folder."""

    series: Series
    slices: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.slices)


def pack(work: Path, results: Path, summary: Mapping[str, Any]) -> Archive:
    """Write the work folder durably into `results`, then delete the older archive there.

    A dispatcher may be running: the archive takes valid rows and a consistent copy of the queue. `summary` becomes part
    of summary.json. Raises `EnvironmentProblem` if the archive needs more than six slices of 16 MiB; the older one then
    stays.
    """
    before = Series.of_work(work)
    assert before is not None, "the series has begun"
    series = Series(before.name, before.generation + 1).written(work)  # durable before any slice names it
    content = _archive(work)
    pieces = [content[start : start + SLICE_BYTES] for start in range(0, len(content), SLICE_BYTES)]
    if len(pieces) > MOST_SLICES:
        raise EnvironmentProblem(
            f"{work} packs to {len(content) / 2**20:.0f} MiB, more than {MOST_SLICES} files of "
            f"{SLICE_BYTES // 2**20} MiB; begin a new series with an empty work="
        )
    older = None
    with contextlib.suppress(UsageError):  # replace damaged results
        older = newest(results)
    # Without room for both, delete the older one first; callers that stop at `FULL_BYTES` always have room.
    _clear(results, older if older is not None and len(pieces) + len(older.slices) <= MOST_SLICES else None)
    digests = {}
    for number, piece in enumerate(pieces, start=1):
        name = f"gpufarm-g{series.generation:05d}-{number}of{len(pieces)}{_SLICE}"
        digests[name] = sha256(piece).hexdigest()
        write_file(results / name, piece)
    (results / LOG).unlink(missing_ok=True)  # the summary's temporary file would be a ninth file
    head = {"series": series.name, "generation": series.generation, "slices": digests, "bytes": len(content)}
    write_file(results / SUMMARY, (json.dumps({**head, **summary}, indent=1) + "\n").encode())
    archive = Archive(series, tuple(results / name for name in digests))
    _clear(results, archive)
    with contextlib.suppress(FileNotFoundError), open(work / LOG, "rb") as file:
        file.seek(max(0, (work / LOG).stat().st_size - _LOG_BYTES))
        write_file(results / LOG, file.read())
    return archive


def _clear(results: Path, kept: Archive | None) -> None:
    """Delete temporary files, and slices of all archives except `kept`."""
    for path in results.iterdir():
        if path.name.endswith((_SLICE, TEMPORARY_SUFFIX)) and (kept is None or path not in kept.slices):
            path.unlink()


def newest(results: Path) -> Archive | None:
    """Return the archive of a results folder; None without results.

    Raises `UsageError` that names a missing or torn file.
    """
    if (summary := _summary(results)) is None:
        if any(results.glob(f"*{_SLICE}")):
            raise UsageError(f"{results} cannot be read: {SUMMARY} is missing")
        return None
    series, digests = summary
    for name, digest in digests.items():
        if not (results / name).is_file():
            raise UsageError(f"{results} cannot be read: {name} is missing")
        if sha256((results / name).read_bytes()).hexdigest() != digest:
            raise UsageError(f"{results} cannot be read: {name} is torn")
    return Archive(series, tuple(results / name for name in digests))


def _summary(results: Path) -> tuple[Series, dict[str, str]] | None:
    """Return the series and each slice's digest by name; None without a summary. Raises `UsageError` if damaged."""
    path = results / SUMMARY
    try:
        summary = json.loads(path.read_text())
        return Series(str(summary["series"]), int(summary["generation"])), dict(summary["slices"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {exception_line(error)}; begin with an empty results=") from error


def prepare(work: Path, results: Path) -> None:
    """Make both folders. Keep an existing work folder, else unpack the results, else begin a new series.

    Raises `UsageError` if a folder holds other files, or if the two belong to different calls.
    """
    if results.resolve().is_relative_to(work):
        raise UsageError(f"results={results} lies in work={work}, which is packed into it; name another folder")
    if results.exists() and not results.is_dir():
        raise UsageError(f"results={results} is a file, not a folder")
    for path in sorted(results.iterdir()) if results.exists() else ():
        if path.name not in (SUMMARY, LOG) and not path.name.endswith((_SLICE, TEMPORARY_SUFFIX)):
            raise UsageError(
                f"results={results} holds {path.name}, which is not a file of results; name an empty folder"
            )
    series, summary, archive = Series.of_work(work), _summary(results), None
    if series is not None and summary is not None:  # also with torn slices: results of other calls must stay
        packed_series, _ = summary
        if series.name != packed_series.name:
            raise UsageError(
                f"work={work} and results={results} belong to different series of calls; name another work="
            )
        if series.generation < packed_series.generation:
            raise UsageError(f"work={work} is older than results={results}; delete it, or name another work=")
    try:
        archive = newest(results)
    except UsageError as error:
        if series is None:
            raise
        print(f"{error}; the work folder is whole and is packed again", file=sys.stderr)  # killed while packing
    results.mkdir(parents=True, exist_ok=True)
    if series is None and archive is not None:
        unpack(archive, work)
    elif series is None:
        Series.begun(work)


def unpack(archive: Archive, work: Path) -> None:
    """Make the work folder from an archive, whole or not at all. An empty folder may exist there."""
    work.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{work.name}-", dir=work.parent) as folder:
        content = io.BytesIO(b"".join(path.read_bytes() for path in archive.slices))
        with tarfile.open(fileobj=content, mode="r:xz") as packed:
            packed.extractall(Path(folder, "work"), filter="data")
        with contextlib.suppress(FileNotFoundError):
            work.rmdir()
        os.replace(Path(folder, "work"), work)
    if (work / DATA / "format.json").is_file():
        # Make the parts that an archive omits: locks, views, files without rows.
        DataFolder.resolve(work / DATA).create()


def _archive(work: Path) -> bytes:
    """Return the work folder as a compressed tar archive."""
    content = io.BytesIO()
    with tarfile.open(None, "w:xz", content, preset=_XZ_PRESET) as packed, contextlib.ExitStack() as held:
        if (work / DATA / "format.json").is_file():
            held.enter_context(compaction_lock(DataFolder.resolve(work / DATA), lambda line: None))
        for name, path in _files(work, Path(held.enter_context(tempfile.TemporaryDirectory(prefix="gpufarm-pack-")))):
            with contextlib.suppress(FileNotFoundError):  # a temporary or replaced file
                data = path.read_bytes()
                if name.endswith(".jsonl"):  # its last line may be incomplete
                    data = data[: data.rfind(b"\n") + 1]
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                entry.mtime = int(path.stat().st_mtime)
                packed.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def _files(work: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name in the archive and the path of each file to pack.

    The queue comes first, and runs come before their samples. A dispatcher writes them in the opposite order, so the
    archive has a run for each done task and samples for each run.
    """
    folder = DataFolder.resolve(work / DATA)
    if folder.queue.is_file():
        yield f"{DATA}/{_QUEUE}", _queue_copy(folder.queue, scratch / _QUEUE)
    for kind in KINDS:
        for family in folder.families(kind):
            for path in counting_files(folder, kind, family):
                yield str(path.relative_to(work)), path
    for path in sorted(work.rglob("*")):
        inside = path.relative_to(work).parts
        if inside[0] == DATA and (inside[1:2] or ("",))[0].startswith((*_LEFT_OUT, *KINDS, _QUEUE)):
            continue
        if path.is_file() and not path.is_symlink() and not path.name.endswith(TEMPORARY_SUFFIX):
            yield str(path.relative_to(work)), path


def _queue_copy(path: Path, copy: Path) -> Path:
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


@dataclass(frozen=True)
class Outcomes:
    """(Outcome, reason) of each ended test, and how many of the tests selected last did not end."""

    tests: dict[str, tuple[str, str]]
    not_run: int

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of tests by outcome."""
        ended = Counter(outcome for outcome, _ in self.tests.values())
        counts = {outcome: ended[outcome] for outcome in ("passed", "failed", "skipped")}
        return {**counts, "not run": self.not_run} if self.not_run else counts

    def __str__(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())


def outcomes_of(path: Path, start: int = 0) -> Outcomes | None:
    """Return the outcomes in a file from the byte `start` on; None if no test was selected."""
    selected: list[str] | None = None
    tests: dict[str, tuple[str, str]] = {}
    for record in json_lines(path, start):
        if "selected" in record:  # a number in results of a former format
            selected = record["selected"] if isinstance(record["selected"], list) else []
        if {"test", "outcome", "reason"} <= record.keys():
            tests[record["test"]] = record["outcome"], record["reason"]
    return None if selected is None else Outcomes(tests, len(set(selected) - tests.keys()))
