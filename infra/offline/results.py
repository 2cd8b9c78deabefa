"""Packs what a call has measured into a few result files, and unpacks them for the next call and for the page.

Start reading at `pack`. An archive is cut into slices, which are named by their content. summary.json lists those of
the newest archive, and is replaced once they are durable: after a kill at any moment it names a whole archive.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from conf.errors import EnvironmentProblem, UsageError, exception_line
from conf.files.outputs import TEMPORARY_SUFFIX, json_lines, new_folder, read_json, write_file
from warehouse.files.compaction import compaction_lock
from warehouse.files.counting import counting_files
from warehouse.files.folder import DataFolder
from warehouse.tables.schema import KINDS

SLICE_BYTES = 16 * 2**20  # size of a file that comes back
MOST_SLICES = 3  # with those of the archive before, the summary and its temporary file: eight files
FULL_BYTES = 40 * 2**20  # size of an archive that still leaves room for what running trials add
SUMMARY = "summary.json"
DATA, PROBES, CALLS, LOG = "data", "probes", "calls.jsonl", "log.txt"  # in the work folder
_XZ_PRESET: Final = 1  # packs small Parquet files 20 times smaller, because their footers resemble each other
_LEFT_OUT = ("locks", "features", "warehouse.duckdb")  # parts of the data folder that can be made again
_QUEUE = "queue.sqlite"
_SLICE = ".slice"
_TEST = re.compile(
    r"^(?P<test>tests/\S+::.+?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED) *(?P<reason>.*?) *(?:\[ *\d+%\])?$",
    re.MULTILINE,
)
_FAILED = re.compile(r"^(?P<outcome>FAILED|ERROR) (?P<test>tests/\S+::.+?) - (?P<reason>.*)", re.MULTILINE)


def begin(results: Path) -> Path:
    """Make the folder of results, and return a new work folder with what they hold.

    Raises `UsageError` if `results` is a file, holds files that are not of results, or is damaged.
    """
    if results.exists() and not results.is_dir():
        raise UsageError(f"results={results} is a file, not a folder")
    for path in sorted(results.glob("*")):
        if path.name != SUMMARY and path.suffix not in (_SLICE, TEMPORARY_SUFFIX):
            raise UsageError(
                f"results={results} holds {path.name}, which is not a file of results; name an empty folder"
            )
    slices = slices_of(results)
    results.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpufarm-work-"))
    if slices:
        unpack(slices, work)
    return work


def pack(work: Path, results: Path, summary: Mapping[str, Any]) -> tuple[Path, ...]:
    """Write the work folder durably into `results`, delete the older archive there, and return the slices.

    A dispatcher may be running: the archive takes valid rows and a consistent copy of the queue. `summary` becomes part
    of summary.json. Raises `EnvironmentProblem` if the archive needs more than three slices; the older one then stays.
    """
    content = _archive(work)
    if len(content) > MOST_SLICES * SLICE_BYTES:
        raise EnvironmentProblem(
            f"the results take {len(content) / 2**20:.0f} MiB, more than {MOST_SLICES} files of "
            f"{SLICE_BYTES // 2**20} MiB; name another results= for further steps"
        )
    if not (results / SUMMARY).exists():  # slices without a summary would be refused after a kill
        _write_summary(results, (), {})
    with contextlib.suppress(UsageError):  # damaged results are replaced
        _clear(results, slices_of(results))
    slices = []
    for start in range(0, len(content), SLICE_BYTES):
        piece = content[start : start + SLICE_BYTES]
        slices.append(results / f"{_name_of(piece)}{_SLICE}")
        write_file(slices[-1], piece)
    _write_summary(results, slices, summary)
    _clear(results, slices)
    return tuple(slices)


def _write_summary(results: Path, slices: Sequence[Path], summary: Mapping[str, Any]) -> None:
    content = {"slices": [path.name for path in slices], **summary}
    write_file(results / SUMMARY, (json.dumps(content, indent=1) + "\n").encode())


def _name_of(piece: bytes) -> str:
    return sha256(piece).hexdigest()[:16]


def _clear(results: Path, kept: Sequence[Path]) -> None:
    """Delete temporary files, and all slices except `kept`."""
    for path in results.iterdir():
        if path.suffix in (_SLICE, TEMPORARY_SUFFIX) and path not in kept:
            path.unlink()


def slices_of(results: Path) -> tuple[Path, ...]:
    """Return the slices of the newest archive, in order; empty without results.

    Raises `UsageError` that names a missing or torn file.
    """
    summary = results / SUMMARY
    try:
        slices = tuple(results / name for name in read_json(summary)["slices"])
    except (FileNotFoundError, NotADirectoryError):
        if any(results.glob(f"*{_SLICE}")):
            raise UsageError(f"{results} cannot be read: {SUMMARY} is missing") from None
        return ()
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{summary} is damaged: {exception_line(error)}; begin with an empty results=") from error
    for path in slices:
        if not path.is_file():
            raise UsageError(f"{results} cannot be read: {path.name} is missing")
        if _name_of(path.read_bytes()) != path.stem:
            raise UsageError(f"{results} cannot be read: {path.name} is torn")
    return slices


def unpack(slices: Sequence[Path], work: Path) -> None:
    """Make the work folder from an archive, whole or not at all. An empty folder may exist there."""
    work.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO(b"".join(path.read_bytes() for path in slices))
    with new_folder(work) as building, tarfile.open(fileobj=content, mode="r:xz") as packed:
        packed.extractall(building, filter="data")
    data = DataFolder.resolve(work / DATA)
    if data.format_marker.is_file():
        data.create()  # the parts that an archive omits: locks, views, files without rows


def _archive(work: Path) -> bytes:
    """Return the work folder as a compressed tar archive."""
    content = io.BytesIO()
    with tarfile.open(None, "w:xz", content, preset=_XZ_PRESET) as packed, contextlib.ExitStack() as held:
        folder = DataFolder.resolve(work / DATA)
        if folder.format_marker.is_file():
            held.enter_context(compaction_lock(folder, lambda line: None))
        scratch = held.enter_context(tempfile.TemporaryDirectory(prefix="gpufarm-pack-"))
        for name, path in _files(work, folder, Path(scratch, _QUEUE)):
            with contextlib.suppress(FileNotFoundError):  # a temporary or replaced file
                data = path.read_bytes()
                if name.endswith(".jsonl"):  # its last line may be incomplete
                    data = data[: data.rfind(b"\n") + 1]
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                entry.mtime = int(path.stat().st_mtime)
                packed.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def _files(work: Path, folder: DataFolder, queue_copy: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name in the archive and the path of each file to pack.

    The queue comes first, and runs come before their samples. A dispatcher writes them in the opposite order, so the
    archive has a run for each done task and samples for each run.
    """
    if folder.queue.is_file():
        with (
            contextlib.closing(sqlite3.connect(folder.queue)) as queue,
            contextlib.closing(sqlite3.connect(queue_copy)) as copy,
        ):
            queue.backup(copy)
        yield f"{DATA}/{_QUEUE}", queue_copy
    for kind in KINDS:
        for family in folder.families(kind):
            for path in counting_files(folder, kind, family):
                yield str(path.relative_to(work)), path
    for path in sorted(work.rglob("*")):
        place, *inside = path.relative_to(work).parts
        if place == DATA and inside and inside[0].startswith((*_LEFT_OUT, *KINDS, _QUEUE)):
            continue
        if path.is_file() and not path.is_symlink() and not path.name.endswith(TEMPORARY_SUFFIX):
            yield str(path.relative_to(work)), path


def outcomes_of(log: Path) -> dict[str, tuple[str, str]]:
    """Return (outcome, reason) of each test that pytest's output in a log names; the last one counts.

    The reason of a failure stands in the summary at the end of the output.
    """
    text = log.read_bytes().decode(errors="replace") if log.is_file() else ""
    outcomes = {match["test"]: (match["outcome"], match["reason"]) for match in _TEST.finditer(text)}
    for match in _FAILED.finditer(text):
        if outcomes.get(match["test"], ("", ""))[0] == match["outcome"]:
            outcomes[match["test"]] = match["outcome"], match["reason"]
    return outcomes


def unfinished_tests(work: Path) -> str | None:
    """Return why the tests of the last call with the step test did not end; None if they did, or were not run."""
    outcomes = [row["outcome"] for row in json_lines(work / CALLS) if row.get("step") == "test"]
    ended = ("done", "failed", "not here")
    return outcomes[-1] if outcomes and outcomes[-1] not in ended else None
