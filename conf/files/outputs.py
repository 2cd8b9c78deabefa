"""Files that a user names or sends: outputs are written whole, JSON is read within limits, private files are checked.

Start reading at `output_file`, for `out=` and `report=`. A plain file appears whole or not at all; links are followed;
devices, pipes and descriptors (`/dev/stdout`, `/dev/fd/3`) are written to as they are; a data folder's own files are
refused. `new_folder` makes a folder that appears whole. `read_json` reads an untrusted file: every fault of its content
is a `ValueError`. `own_folder` opens what only this user can change.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from conf.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer


# What a data folder consists of; other names in it belong to the user. `warehouse.files.folder` takes its paths from
# here.
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
# And what SQLite and DuckDB put beside them.
OWN_FILES = ("format.json", "queue.sqlite", "service.sqlite", "warehouse.duckdb")

TEMPORARY_SUFFIX = ".tmp"  # never `.parquet`: one torn file breaks a whole glob
_ABANDONED_AFTER_S = 86_400.0
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DESCRIPTOR = re.compile(r"/(?:dev/fd|proc/(?:self|thread-self|\d+)/fd)/(\d+)")
_STANDARD = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_LINKS = 40  # as many as the kernel follows
MOST_BYTES = 1 << 30  # most bytes of a file that grows with the data: a list of files, a plan
MARKER_BYTES = 1 << 16  # most bytes of a file that says what a folder is
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_MAY = 0o077
_OTHERS_MAY_WRITE = 0o022


@dataclass(frozen=True)
class Output:
    """The resolved place of a user's output."""

    key: str  # as the user spelled it: out or report
    given: str
    path: Path  # after all links; for a descriptor, the path as given
    descriptor: int | None = None  # an already open descriptor, where the output names one
    is_plain: bool = True  # a file that is replaced in one step; devices and pipes take what they are given


def checked_output(
    out: str | os.PathLike[str], *, key: str = "out", data: Sequence[str | os.PathLike[str]] = ()
) -> Output:
    """Return where `out` leads, checked before any work is done.

    `data` are data folders that are searched for hard links; others show by their `format.json`. Raises `UsageError`
    for a folder, for a file in a folder that does not exist, and for a data folder's own file, however it is named.
    """
    output = _output(out, key, data)
    if output.descriptor is None and not output.path.parent.is_dir():
        raise UsageError(f"{key}={output.given} cannot be written: there is no folder {output.path.parent}")
    return output


def checked_report(
    report: str | os.PathLike[str], *, key: str, like: str, data: Sequence[str | os.PathLike[str]]
) -> Path:
    """Return the path of a page that a command will write, checked to be writable before any work.

    Args:
        report: the path as the user gave it.
        key: the user's key for it, which messages name.
        like: an example of a file name, for messages.
        data: data folders whose own files are refused.

    Raises:
        UsageError: for a folder, for a file that cannot be written, and as `checked_output` does.
    """
    path = Path(report)
    if path.is_dir():
        raise UsageError(f"{key}={path} is a folder; name a file, as in {key}={like}")
    output = checked_output(path, key=key, data=data)
    if output.is_plain:
        try:
            _try_to_write(output.path)
        except OSError as error:
            kind = UsageError if error.errno == errno.ENAMETOOLONG else EnvironmentProblem
            raise kind(f"{key}={path} cannot be written: {error.strerror or error}") from error
    return path


def _try_to_write(path: Path) -> None:
    """Make a temporary file beside `path` and remove it. Raises `OSError` where no file can be made."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"):
        pass


def _output(out: str | os.PathLike[str], key: str, data: Sequence[str | os.PathLike[str]]) -> Output:
    given = os.fspath(out)

    def refused(why: str) -> UsageError:
        return UsageError(f"{key}={given} cannot be written: {why}")

    if not given or "\0" in given:
        raise refused("it is not a valid path")
    try:
        status: os.stat_result | None
        path, descriptor = _follow(os.path.abspath(os.path.expanduser(given)))
        if descriptor is not None:
            status = os.fstat(descriptor)
            path = Path(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        else:
            status = _status(path)
    except OSError as error:
        raise refused(os.strerror(error.errno) if error.errno else str(error)) from error
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise refused("it is a folder")
    if status is not None and stat.S_ISSOCK(status.st_mode):
        raise refused("it is a socket")
    owner = _owner(path, status, data)
    if owner is not None:
        raise refused(f"it is a file of the data folder {owner}; choose a place outside")
    is_plain = descriptor is None and (status is None or stat.S_ISREG(status.st_mode))
    return Output(key, given, path, descriptor, is_plain)


def folder_problems(out: str | os.PathLike[str], *, key: str = "out") -> list[str]:
    """Return why a command cannot make its own files in the folder `out`: it is a data folder's own, or read-only."""
    real = Path(os.path.realpath(os.path.expanduser(out)))
    place = real
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        _try_to_write(place / real.name)
    except OSError as error:
        return [f"{key}={os.fspath(out)} cannot be used: no file can be made in {place}: {error.strerror or error}"]
    for folder in (real, *real.parents):
        inside = real.relative_to(folder).parts
        if (not inside or inside[0] in OWN_FOLDERS) and _is_data_folder(folder):
            return [
                f"{key}={os.fspath(out)} cannot be used: it belongs to the data folder {folder}; choose a place outside"
            ]
    return []


def file_problems(path: Path, *, key: str = "out") -> list[str]:
    """Return why no file can be written to `path`: it is a folder, or its folder is not there."""
    if path.is_dir():
        return [f"{key}={path} is a folder; name a file"]
    return [] if path.parent.is_dir() else [f"{key}={path}: there is no folder {path.parent}"]


@contextlib.contextmanager
def output_file(
    out: str | os.PathLike[str] | Output, *, key: str = "out", data: Sequence[str | os.PathLike[str]] = ()
) -> Iterator[BinaryIO]:
    """Open a binary file for the output of `key`.

    A plain file becomes visible, whole and durable, when the block ends; after an error nothing has changed. Raises
    `UsageError` as `checked_output` does, and `EnvironmentProblem` for what the system refuses (a full disk).
    """
    target = out if isinstance(out, Output) else _output(out, key, data)
    try:
        with _replaced(target.path) if target.is_plain else _stream(target) as file:
            yield file
    except BrokenPipeError:  # the reader has what it wanted
        raise
    except OSError as error:
        if error.errno is None:  # raised by what the block reads, as Arrow does
            raise
        # By its number: a library's own text may name the temporary file.
        why = os.strerror(error.errno)
        raise EnvironmentProblem(f"{target.key}={target.given} cannot be written: {why}") from error


def write_output(
    out: str | os.PathLike[str] | Output,
    content: bytes,
    *,
    key: str = "out",
    data: Sequence[str | os.PathLike[str]] = (),
) -> None:
    """Write `content` to where `out` leads. Raises as `output_file` does."""
    with output_file(out, key=key, data=data) as file:
        file.write(content)


def _follow(path: str) -> tuple[Path, int | None]:
    """Follow links: return (path, None), or (path, descriptor) where they end at a descriptor of this process."""
    for _ in range(_LINKS):
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        match = _DESCRIPTOR.fullmatch(path)
        if path in _STANDARD or (match is not None and _is_own(path)):
            return Path(path), _STANDARD.get(path, int(match[1]) if match else -1)
        if not os.path.islink(path):
            return Path(path), None
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _is_own(path: str) -> bool:
    own_folders = ("/proc/self/", "/proc/thread-self/", f"/proc/{os.getpid()}/")
    return not path.startswith("/proc/") or path.startswith(own_folders)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):  # its folder is looked at elsewhere
        return None


def _owner(path: Path, status: os.stat_result | None, data: Sequence[str | os.PathLike[str]]) -> Path | None:
    """Return the data folder that the file belongs to, by its place or as a hard link of one of its files."""
    for folder in path.parents:
        if _is_data_folder(folder):
            inside = path.relative_to(folder)
            if inside.parts[0] in OWN_FOLDERS or (len(inside.parts) == 1 and inside.name.startswith(OWN_FILES)):
                return folder
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_nlink < 2:
        return None
    for folder in map(Path, data):
        root = Path(os.path.realpath(folder.expanduser()))
        if _is_data_folder(root) and any(os.path.samestat(status, other) for other in _statuses(root)):
            return root
    return None


def _is_data_folder(folder: Path) -> bool:
    try:
        marker = read_json(folder / "format.json", MARKER_BYTES)
    except OSError:
        return False
    except ValueError:  # damaged, and still somebody's data if the queue is beside it
        return (folder / "queue.sqlite").exists() or (folder / "runs").is_dir()
    return isinstance(marker, dict) and marker.get("format") == DATA_FORMAT


def _statuses(root: Path) -> Iterator[os.stat_result]:
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(folder, name))


def write_file(path: Path, content: bytes) -> None:
    """Write one of the program's own files, whole and durable or not at all; its folder is made if missing."""
    if not path.parent.exists():
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            with contextlib.suppress(PermissionError):  # one may write to a folder without being able to read it
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
    """Yield a temporary path beside `path`; rename it to `path` durably on success, remove it on any error."""
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
    """Yield a hidden folder beside `path`, for the caller to make; rename it to `path` durably on success, remove it on
    any error.

    What a killed process left of the same name at least a day ago is removed first.

    Args:
        path: Nothing yet, or an empty folder.
        of_links: Whether its files are links to files that are durable already.
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
    """Add the path to an error that only writing has, and that does not say what is written."""
    if isinstance(error, OSError) and error.errno in _OF_WRITING and error.filename is None:
        error.filename = str(path)


def sync(path: Path) -> None:
    """Call fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stream(target: Output) -> _Stream:
    if target.descriptor is None:
        return _Stream(os.open(target.path, os.O_WRONLY))
    for printed in (sys.stdout, sys.stderr):  # what was printed before comes before
        printed.flush()
    return _Stream(os.dup(target.descriptor))


class _Stream(io.BufferedWriter):
    """A file that counts the bytes written: Parquet's writer asks for its position, which a pipe does not know."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(io.FileIO(descriptor, "wb"))
        self._written = 0

    def write(self, content: Buffer, /) -> int:
        count = super().write(content)
        self._written += count
        return count

    def tell(self) -> int:
        return self._written

    def seekable(self) -> bool:
        return False


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file of at most `most_bytes`.

    Raises `ValueError` for a longer file, nesting too deep to read, bad UTF-8 and bad JSON; `OSError` as `open` does.
    """
    with Path(path).open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return parse_json(content)


def parse_json(content: bytes | str) -> Any:
    """Return the value of JSON, in UTF-8 where it is bytes. Raises `ValueError` as `read_json` does."""
    try:
        return json.loads(content.decode() if isinstance(content, bytes) else content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_lines(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, from the byte `start` on; no file has none.

    A line that a kill has cut off is left out.
    """
    records = []
    for line in path.read_bytes()[start:].splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            records.append(parse_json(line))
    return [record for record in records if isinstance(record, dict)]


@contextlib.contextmanager
def own_folder(path: str | os.PathLike[str], *, private: bool) -> Iterator[int | None]:
    """Open a real folder of this user and yield its descriptor; None for a link, another user's folder, or none.

    Args:
        path: the folder.
        private: whether it must also be closed to everybody else, as mode 0700 is.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.geteuid() and not (private and stat.S_IMODE(status.st_mode) & _OTHERS_MAY)
        yield descriptor if is_own else None
    finally:
        os.close(descriptor)


def open_own_file(folder: int, name: str, flags: int = os.O_RDONLY, *, private: bool = False) -> int:
    """Open a plain file of this user in an open folder and return its descriptor. Never blocks.

    `flags` are those of `os.open`; a file that they create has mode 0600. A `private` file is one that nobody else may
    write to. Raises `OSError` as opening does, and `PermissionError` for anything that is not such a file.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK | _NO_LINK, 0o600, dir_fd=folder)
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if is_own and not (private and status.st_mode & _OTHERS_MAY_WRITE):
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "it is not a plain file of this user alone", str(Path(name)))
