"""Writes a user's output files atomically, and reads JSON within limits.

Start reading at `output_file`, for `out=` and `report=`. A plain file appears whole or not at all. Links are followed.
Devices, pipes and standard output are written to directly. A data folder's own files are refused. `new_folder` makes a
folder that appears whole. `read_json` reads an untrusted file, and raises `ValueError` for any fault in its content.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from conf.errors import CommandError, EnvironmentProblem, UsageError

# Folders of a data folder; other names in it belong to the user. `warehouse.files.folder` takes its paths from here.
DATA_FORMAT = "gpufarm-data"
OWN_FOLDERS = (
    "runs",
    "telemetry",
    "kernels",
    "ranks",
    "collocations",
    "jobs",
    "stale",
    "compactions",
    "models",
    "features",
    "snapshots",
    "growth",
    "reports",
    "locks",
    "damaged",
    "environments",
    "comparisons",
    "replays",
    "machines",
)
# Files of a data folder, also with suffixes that SQLite and DuckDB add.
OWN_FILES = ("format.json", "queue.sqlite", "service.sqlite", "warehouse.duckdb")

TEMPORARY_SUFFIX = ".tmp"  # not `.parquet`: one torn file would break a whole glob
_ABANDONED_AFTER_S = 86_400.0
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_BYTES = 1 << 30  # limit for files that grow with the data: a list of files, a plan
MARKER_BYTES = 1 << 16  # limit for the file that identifies a folder


@dataclass(frozen=True)
class Output:
    """The resolved path of a user's output."""

    key: str  # the user's key: out or report
    given: str
    path: Path  # of a plain file, after following links
    descriptor: int | None  # standard output or standard error, if it is that file
    is_plain: bool  # a regular file, which is replaced in one step; False for devices, pipes and standard output


def checked_output(out: str | os.PathLike[str], *, key: str = "out", data: Path | None = None) -> Output:
    """Resolve `out` and check that it can be written, before any work is done.

    A file that is written in place must also be no hard link of a file of `data`, a data folder.

    Raises:
        UsageError: A folder, a file in a missing folder, or a data folder's own file.
        EnvironmentProblem: The file cannot be written.
    """
    output = _output(out, key, data)
    if not output.is_plain:
        return output
    if not output.path.parent.is_dir():
        raise UsageError(f"{key}={output.given} cannot be written: there is no folder {output.path.parent}")
    try:
        _try_to_write(output.path)
    except OSError as error:
        raise EnvironmentProblem(f"{key}={output.given} cannot be written: {error.strerror or error}") from error
    return output


def output_problems(out: str | os.PathLike[str], *, key: str = "out") -> list[str]:
    """Return why `out` cannot be written, as `checked_output` says it; empty if it can."""
    try:
        checked_output(out, key=key)
    except CommandError as error:
        return [str(error)]
    return []


def _try_to_write(path: Path) -> None:
    """Make a temporary file beside `path` and remove it. Raises `OSError` if that fails."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"):
        pass


def _output(out: str | os.PathLike[str], key: str, data: Path | None = None) -> Output:
    given = os.fspath(out)

    def refused(why: str) -> UsageError:
        return UsageError(f"{key}={given} cannot be written: {why}")

    if not given or "\0" in given:
        raise refused("it is not a valid path")
    path = Path(os.path.expanduser(given))
    try:
        real = Path(os.path.realpath(path))
        status = _status(path)
    except OSError as error:
        raise refused(os.strerror(error.errno) if error.errno else str(error)) from error
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise refused("it is a folder")
    owner = _owner(real)
    if owner is None and data is not None and status is not None and _is_link_of_own(status, data):
        owner = data
    if owner is not None:
        raise refused(f"it is a file of the data folder {owner}; choose a place outside")
    descriptor = None if status is None else _standard_descriptor(status)
    is_plain = descriptor is None and (status is None or stat.S_ISREG(status.st_mode))
    return Output(key, given, real if is_plain else path, descriptor, is_plain)


def folder_problems(out: str | os.PathLike[str], *, key: str = "out") -> list[str]:
    """Return why a command cannot make files in the folder `out`: it belongs to a data folder, or is read-only."""
    real = Path(os.path.realpath(os.path.expanduser(out)))
    place = real
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        _try_to_write(place / real.name)
    except OSError as error:
        return [f"{key}={os.fspath(out)} cannot be used: no file can be made in {place}: {error.strerror or error}"]
    if (owner := _owner(real / OWN_FILES[0])) is not None:  # also where the folder itself is the data folder
        return [f"{key}={os.fspath(out)} cannot be used: it belongs to the data folder {owner}; choose a place outside"]
    return []


@contextlib.contextmanager
def output_file(out: str | os.PathLike[str] | Output, *, key: str = "out") -> Iterator[BinaryIO]:
    """Open a binary file for the output of `key`.

    A plain file appears, whole and durable, when the block ends; an error changes nothing. Raises `UsageError` as
    `checked_output` does, and `EnvironmentProblem` for system errors such as a full disk.
    """
    target = out if isinstance(out, Output) else _output(out, key)
    try:
        with _replaced(target.path) if target.is_plain else _stream(target) as file:
            yield file
    except BrokenPipeError:  # the reader needs no more
        raise
    except OSError as error:
        if error.errno is None:  # raised by the block's own reading, such as Arrow's
            raise
        # Use the number: a library's text may name the temporary file.
        why = os.strerror(error.errno)
        raise EnvironmentProblem(f"{target.key}={target.given} cannot be written: {why}") from error


def write_output(out: str | os.PathLike[str] | Output, content: bytes, *, key: str = "out") -> None:
    """Write `content` to `out`. Raises the errors of `output_file`."""
    with output_file(out, key=key) as file:
        file.write(content)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):  # the caller checks its folder
        return None


def _standard_descriptor(status: os.stat_result) -> int | None:
    """Return the descriptor of standard output or standard error if it is this file."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(status, os.fstat(descriptor)):
                return descriptor
    return None


def _owner(path: Path) -> Path | None:
    """Return the data folder that the file belongs to."""
    for folder in path.parents:
        if _is_data_folder(folder):
            inside = path.relative_to(folder)
            if inside.parts[0] in OWN_FOLDERS or (len(inside.parts) == 1 and inside.name.startswith(OWN_FILES)):
                return folder
    return None


def _is_link_of_own(status: os.stat_result, data: Path) -> bool:
    """Return whether the file with this status is a hard link of one of the data folder's own files."""
    if status.st_nlink == 1:
        return False
    for folder, _, names in os.walk(data):
        for own in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # a temporary file, renamed meanwhile
                if os.path.samestat(own.lstat(), status) and _owner(own) is not None:
                    return True
    return False


def _is_data_folder(folder: Path) -> bool:
    try:
        marker = read_json(folder / "format.json", MARKER_BYTES)
    except OSError:
        return False
    except ValueError:  # damaged, but still a data folder if it has the queue
        return (folder / "queue.sqlite").exists() or (folder / "runs").is_dir()
    return isinstance(marker, dict) and marker.get("format") == DATA_FORMAT


def write_file(path: Path, content: bytes) -> None:
    """Write a file of the program durably, whole or not at all; make its folder if it is missing."""
    if not path.parent.exists():
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            with contextlib.suppress(PermissionError):  # a folder may be writable but not readable
                sync(folder.parent)
    with _replaced(path) as file:
        file.write(content)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    before = _status(path)
    with replacing(path) as temporary:
        with open(temporary, "xb") as file:
            yield file
        if before is not None:
            os.chmod(temporary, stat.S_IMODE(before.st_mode))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success rename it to `path` durably, on any error remove it."""
    temporary = path.with_name(f".{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        _name_file(error, path)
        raise
    sync(path.parent)


@contextlib.contextmanager
def new_folder(path: Path, *, of_links: bool = False) -> Iterator[Path]:
    """Yield a hidden folder beside `path`, which the caller makes; rename it to `path` durably on success.

    On any error it is removed. Folders that killed processes left for the same path are removed after a day.

    Args:
        path: A path that does not exist, or an empty folder.
        of_links: Whether its files are links to files that are already durable.
    """
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.????????{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - abandoned.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(abandoned, ignore_errors=True)
    building = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}")
    try:
        yield building
        for made in (*building.rglob("*"), building):
            if made.is_dir() or not of_links:
                sync(made)
        os.rename(building, path)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        _name_file(error, path)
        raise
    sync(path.parent)


def _name_file(error: BaseException, path: Path) -> None:
    """Add the path to an error of writing that does not name a file."""
    if isinstance(error, OSError) and error.errno in _OF_WRITING and error.filename is None:
        error.filename = str(path)


def sync(path: Path) -> None:
    """Call fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stream(target: Output) -> BinaryIO:
    if target.descriptor is None:
        return os.fdopen(os.open(target.path, os.O_WRONLY), "wb")
    for printed in (sys.stdout, sys.stderr):  # keep the order with earlier prints
        printed.flush()
    return os.fdopen(os.dup(target.descriptor), "wb")


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file of at most `most_bytes`.

    Raises `ValueError` for a longer file, too deep nesting, bad UTF-8 and bad JSON, and the `OSError` of `open`.
    """
    with Path(path).open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return parse_json(content)


def parse_json(content: bytes | str) -> Any:
    """Return the value of JSON; bytes must be UTF-8. Raises the `ValueError` of `read_json`."""
    try:
        return json.loads(content.decode() if isinstance(content, bytes) else content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, empty if the file is missing.

    An incomplete line, left by a kill, is skipped.
    """
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            records.append(parse_json(line))
    return [record for record in records if isinstance(record, dict)]
