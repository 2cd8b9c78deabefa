"""Packs the work folder of a lent machine into a few files that come back, and unpacks them on the next machine.

Start reading at `pack`. An archive is cut into slices whose names hold its generation and their checksums, so a new
one is written beside the old one, and after a kill at any moment the newest whole one counts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sqlite3
import tarfile
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from conf.errors import EnvironmentProblem, UsageError
from conf.files.outputs import TEMPORARY_SUFFIX, sync
from warehouse.files.compaction import compaction_lock
from warehouse.files.counting import counting_files
from warehouse.files.folder import DataFolder
from warehouse.files.layout import KINDS, write_bytes

SLICE_BYTES = 16 * 2**20  # size of a file that comes back
MOST_SLICES = 6  # slices among the eight files that come back; summary.json and log.txt are the others
FULL_BYTES = 40 * 2**20  # size of an archive: one more generation of three slices still fits beside it
SERIES = "series.json"  # in the work folder: which series of calls this is, and how often it was packed
DATA = "data"
_XZ_PRESET = 1  # 20 times smaller than the small Parquet files, whose footers resemble each other
_LEFT_OUT = ("locks", "features", "warehouse.duckdb")  # parts of the data folder that are made again
_QUEUE = "queue.sqlite"
_NAME = re.compile(r"gpufarm-([0-9a-f]{8})-g(\d{5})-([1-6])of([1-6])-([0-9a-f]{16})\.slice")


@dataclass(frozen=True)
class Series:
    """The calls that continue each other, and the number of the newest archive of their work folder."""

    name: str
    generation: int = 0

    @classmethod
    def of_work(cls, work: Path) -> Series | None:
        """Return the series of a work folder, None of an empty one. Raises `UsageError` for somebody else's folder."""
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
        return cls(uuid.uuid4().hex[:8])._written(work)

    def next(self, work: Path) -> Series:
        """Return the series with its generation counted up, which is durable in `work` before any slice has it."""
        return Series(self.name, self.generation + 1)._written(work)

    def _written(self, work: Path) -> Series:
        content = {"series": self.name, "generation": self.generation}
        write_bytes(work / SERIES, (json.dumps(content) + "\n").encode())
        return self


@dataclass(frozen=True)
class Archive:
    """A whole archive in a results folder. `note` says why a newer one that is not whole was passed over."""

    series: Series
    slices: tuple[Path, ...]
    note: str = ""

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.slices)


def pack(work: Path, results: Path) -> Archive:
    """Write the work folder into `results`, durably, then delete the older archive there.

    Rows that count and a consistent copy of the queue are taken beside a running dispatcher. Raises
    `EnvironmentProblem` where the archive has more than six slices of 16 MiB; the older one is then left.
    """
    current = Series.of_work(work)
    assert current is not None, "the series has begun"
    series = current.next(work)
    content = _archive(work)
    pieces = [content[start : start + SLICE_BYTES] for start in range(0, len(content), SLICE_BYTES)]
    # Slices of this generation can only be of a call that was killed before they were whole.
    _delete([path for path, parts in _slices_in(results).items() if parts[1] >= series.generation])
    older = _slices_in(results)
    if len(pieces) > MOST_SLICES:
        raise EnvironmentProblem(
            f"{work} packs to {len(content) / 2**20:.0f} MiB, more than {MOST_SLICES} files of "
            f"{SLICE_BYTES // 2**20} MiB; begin a new series with an empty work="
        )
    if len(pieces) + len(older) > MOST_SLICES:  # does not happen to those who stop at FULL_BYTES
        _delete(older)
    slices = []
    for number, piece in enumerate(pieces, start=1):
        digest = sha256(piece).hexdigest()[:16]
        name = f"gpufarm-{series.name}-g{series.generation:05d}-{number}of{len(pieces)}-{digest}.slice"
        slices.append(results / name)
        with open(slices[-1], "wb") as file:
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    sync(results)
    _delete(older)
    return Archive(series, tuple(slices))


def _delete(slices: Iterable[Path]) -> None:
    for path in slices:
        path.unlink(missing_ok=True)


def newest(results: Path) -> Archive:
    """Return the newest whole archive of a results folder. Raises `UsageError` that names what is missing or torn."""
    if not results.is_dir():
        raise UsageError(f"{results} is not a folder")
    names = _slices_in(results)
    if not names:
        raise UsageError(f"{results} holds no results: there is no file named gpufarm-*.slice")
    if len(series_names := {series for series, *_ in names.values()}) > 1:
        raise UsageError(f"{results} holds results of several series ({', '.join(sorted(series_names))}); keep one")
    (name,) = series_names
    problem = ""
    for generation in sorted({generation for _, generation, *_ in names.values()}, reverse=True):
        found_slices = {
            number: path for path, (_, slice_generation, number, *_) in names.items() if slice_generation == generation
        }
        count = max(count for _, slice_generation, _, count, _ in names.values() if slice_generation == generation)
        missing = sorted(set(range(1, count + 1)) - set(found_slices))
        torn = [path.name for path in found_slices.values() if _digest(path) != names[path][4]]
        if not missing and not torn:
            slices = tuple(found_slices[number] for number in sorted(found_slices))
            note = f"{problem}; generation {generation} is taken" if problem else ""
            return Archive(Series(name, generation), slices, note)
        wrong = f"{torn[0]} is torn" if torn else f"slice {missing[0]} of {count} is missing"
        problem = problem or f"generation {generation} is not whole ({wrong})"
    raise UsageError(f"{results} cannot be read: {problem}")


def unpack(archive: Archive, work: Path) -> None:
    """Make the work folder from an archive: whole or not at all. An empty folder may stand there."""
    work.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{work.name}-", dir=work.parent) as folder:
        content = io.BytesIO(b"".join(path.read_bytes() for path in archive.slices))
        with tarfile.open(fileobj=content, mode="r:xz") as packed:
            packed.extractall(Path(folder, "work"), filter="data")
        with contextlib.suppress(FileNotFoundError):
            work.rmdir()
        os.replace(Path(folder, "work"), work)
    if (work / DATA / "format.json").is_file():
        DataFolder.resolve(work / DATA).create()  # what is left out of an archive: locks, views, files without rows


def check_results(results: Path, series: Series | None) -> None:
    """Make the results folder. Raises `UsageError` where it holds another or a newer series, or files of others."""
    if results.exists() and not results.is_dir():
        raise UsageError(f"results={results} is a file, not a folder")
    results.mkdir(parents=True, exist_ok=True)
    for path in sorted(results.iterdir()):
        parts = _parts_of(path)
        if parts is None and path.name not in ("summary.json", "log.txt") and not path.name.endswith(TEMPORARY_SUFFIX):
            raise UsageError(
                f"results={results} holds {path.name}, which is not of these results; name an empty folder"
            )
        if parts is not None and (series is None or parts[0] != series.name):
            raise UsageError(
                f"results={results} holds results of another series ({parts[0]}); name an empty folder, or pass that "
                "one as previous="
            )
    if series is None or not _slices_in(results):
        return
    try:
        newest_there = newest(results).series.generation
    except UsageError:  # nothing there is whole, so nothing is lost
        return
    if newest_there > series.generation:
        raise UsageError(
            f"results={results} holds newer results (generation {newest_there}) than those that this call continues "
            f"(generation {series.generation}); name an empty folder, or pass that one as previous="
        )


def _slices_in(results: Path) -> dict[Path, tuple[str, int, int, int, str]]:
    """Return series, generation, number, count and checksum of the slices in a folder, by path."""
    return {path: parts for path in sorted(results.iterdir()) if (parts := _parts_of(path)) is not None}


def _parts_of(path: Path) -> tuple[str, int, int, int, str] | None:
    """Return series, generation, number, count and checksum of a slice by its name; None for any other file."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else (match[1], int(match[2]), int(match[3]), int(match[4]), match[5])


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()[:16]


def _archive(work: Path) -> bytes:
    """Return the work folder as a compressed tar archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=_XZ_PRESET) as packed, contextlib.ExitStack() as held:
        if (work / DATA / "format.json").is_file():
            held.enter_context(compaction_lock(DataFolder.resolve(work / DATA), wait=True))
        for name, path in _files(work, Path(held.enter_context(tempfile.TemporaryDirectory(prefix="gpufarm-pack-")))):
            with contextlib.suppress(FileNotFoundError):  # a temporary file, or one replaced since
                data = path.read_bytes()
                if name.endswith(".jsonl"):  # its last line may be in the middle of being written
                    data = data[: data.rfind(b"\n") + 1]
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                entry.mtime = int(path.stat().st_mtime)
                packed.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def _files(work: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files to pack by their names in the archive.

    The queue comes first and runs come before their samples, in the opposite order to a dispatcher's, so that no task
    is done without its run and no run is there without its samples.
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


def write_beside(results: Path, summary: dict, log: Path, log_bytes: int) -> None:
    """Write summary.json and the end of the log beside the slices."""
    write_bytes(results / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    with contextlib.suppress(FileNotFoundError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - log_bytes))
        write_bytes(results / "log.txt", file.read())
