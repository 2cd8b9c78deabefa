"""Finds and ends leftovers of killed processes: trial servers, trials, Ray's helpers, temporary folders.

Start reading at `sweep_leftovers`. A process is ended only with proof that it is the farm's: it runs as this user, and
either its environment has `SESSION_VARIABLE` with the identity of a dispatcher that has ended, or that dispatcher wrote
its identity into a folder that only this user can write to. The contents of a data folder prove nothing.

A temporary folder `gpufarm-trial-*`, `gpufarm-ray-*` or `gpufarm-child-*` holds a file `owner` with the identity of the
process that made it; it is deleted once that process is dead. Ray's folder also holds a file `processes`: Ray's agents
overwrite their environment with their title, so they lose the variable, and they outlive a killed Ray by up to a
minute.

An identity is `PID@START@BOOT.NAMESPACE` (`conf.files.identity`). It is read from files and environments that anybody
may have written, so any other form is ignored.

`hold_dispatcher_lock` lets one dispatcher work on a data folder, and sweeps before and after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from conf.children.keeper import FOLDER_PREFIX
from conf.errors import EnvironmentProblem
from conf.files.identity import OWNER_FILE, alive, identity
from conf.files.outputs import open_own_file, own_folder
from warehouse.files.plain_file import is_held, locked, read_lock

_MARKER = re.compile(r"([1-9][0-9]{0,9})@([0-9]{1,20})@([0-9a-f]{8})\.[0-9]{1,20}")


@dataclass(frozen=True, kw_only=True)
class Marker:
    """A process: id, start in kernel ticks since boot, boot id."""

    pid: int
    start_ticks: int
    boot: str


def parse_marker(text: object) -> Marker | None:
    """Parse a process's identity; return None for any other text."""
    match = _MARKER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    return Marker(pid=int(match[1]), start_ticks=int(match[2]), boot=match[3])


def has_ended(text: object) -> bool:
    """Return whether the text identifies a process of this boot and namespace that has ended."""
    return parse_marker(text) is not None and not alive(str(text))


PREFIXES = ("gpufarm-trial-", "gpufarm-ray-", FOLDER_PREFIX)
_OWNER_BYTES = 256
_PROCESSES_FILE = "processes"
_PROCESSES_BYTES = 1 << 20  # largest record that is read: some ten thousand processes
_SOCKET_PATH_BYTES = 107  # the kernel's limit
_SOCKET_BYTES = len("/gpufarm-ray-12345678/session_2026-11-22_07-25-58_866444_1234567/sockets/plasma_store")
_UNOWNED_AFTER_S = 86_400.0  # a folder without an owner, or of an earlier boot, is left alone for this long


def make_folder(prefix: str, base: str | os.PathLike[str] | None = None) -> Path:
    """Make a temporary folder (mode 0700) that `sweep_folders` deletes once this process is dead."""
    assert prefix in PREFIXES, prefix
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    (path / OWNER_FILE).write_text(identity(os.getpid()))
    return path


def make_ray_folder() -> Path | None:
    """Make a folder for a private Ray's session, at the first place where its sockets' paths are short enough.

    Returns None if there is no such place; Ray then chooses the folder, which is not swept.
    """
    for base in temporary_folders():
        if len(os.fsencode(base)) + _SOCKET_BYTES <= _SOCKET_PATH_BYTES and os.access(base, os.W_OK | os.X_OK):
            return make_folder("gpufarm-ray-", base)
    return None


def record_processes(folder: Path, processes: list[str]) -> None:
    """Record the identities of processes that are to end with this one. A failed write is ignored."""
    with contextlib.suppress(OSError):
        (folder / _PROCESSES_FILE).write_text(json.dumps(processes))


def recorded_processes() -> set[str]:
    """Return the identities that folders of ended processes record, of processes that began after the owner.

    A record counts only as a plain file of this user in a folder that only this user may write to.
    """
    recorded: set[str] = set()
    for path in _folders(temporary_folders()):
        with own_folder(path, private=True) as folder:
            owner = None if folder is None else _owner_of(folder)
            if folder is not None and has_ended(owner):
                recorded |= {text for text in _recorded_in(folder) if _began_after(text, owner)}
    return recorded


def sweep_folders(bases: Iterable[str | os.PathLike[str]] | None = None, now: float | None = None) -> list[Path]:
    """Delete the temporary folders of ended processes; return their paths.

    Only folders of this user are deleted, never links or their targets. A folder without an `owner`, or whose owner ran
    before the last boot, is deleted when it is older than a day. `now` is in seconds since the epoch.
    """
    now = time.time() if now is None else now
    bases = temporary_folders() if bases is None else bases
    return [path for path in _folders(bases) if _delete_if_abandoned(path, now)]


def temporary_folders() -> list[str]:
    """Return the places where the farm's processes make temporary folders."""
    ray = os.environ.get("RAY_TMPDIR")
    return [*([ray] if ray else []), tempfile.gettempdir(), "/tmp"]


def delete_folder(path: Path) -> bool:
    """Delete a folder of this user with its contents, following no link; return whether it is gone."""
    with own_folder(path, private=False) as folder:
        if folder is None:
            return False
        _empty(folder)
    with contextlib.suppress(OSError):
        os.rmdir(path)  # a folder put in its place would stay unless it is empty
        return True
    return False


def _folders(bases: Iterable[str | os.PathLike[str]]) -> list[Path]:
    folders = []
    for base in dict.fromkeys(map(os.path.realpath, bases)):
        with contextlib.suppress(OSError):
            folders += [Path(base, name) for name in sorted(os.listdir(base)) if name.startswith(PREFIXES)]
    return folders


def _recorded_in(folder: int) -> list[str]:
    try:
        with os.fdopen(open_own_file(folder, _PROCESSES_FILE), "rb") as file:
            content = json.loads(file.read(_PROCESSES_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    return [text for text in content if isinstance(text, str)] if isinstance(content, list) else []


def _delete_if_abandoned(path: Path, now: float) -> bool:
    with own_folder(path, private=False) as folder:
        if folder is None:
            return False
        owner, age_s = _owner_of(folder), now - os.fstat(folder).st_mtime
    marker, ours = parse_marker(owner), parse_marker(identity(os.getpid()))
    if marker is not None and ours is not None and marker.boot == ours.boot:
        abandoned = has_ended(owner)
    else:
        abandoned = age_s > _UNOWNED_AFTER_S
    return abandoned and delete_folder(path)


def _owner_of(folder: int) -> str | None:
    try:
        with os.fdopen(open_own_file(folder, OWNER_FILE), "rb") as file:
            return file.read(_OWNER_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return None


def _empty(folder: int) -> None:
    """Delete everything in a folder through its descriptor, which no link can redirect.

    The owner file goes last, and stays beside what a process that still ends has written meanwhile: without it, the
    next sweep would leave the folder alone for a day.
    """
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.name, ignore_errors=True, dir_fd=folder)
            elif entry.name != OWNER_FILE:
                os.unlink(entry.name, dir_fd=folder)
    if os.listdir(folder) == [OWNER_FILE]:
        with contextlib.suppress(OSError):
            os.unlink(OWNER_FILE, dir_fd=folder)


SESSION_VARIABLE = "GPUFARM_SESSION"  # its value: the identity of the dispatcher, as `conf.files.identity` makes it
_END_WITHIN_S = 5.0


def descendants() -> list[str]:
    """Return the identities of this process's descendants, for `record_processes`."""
    identities = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            identities.append(identity(process.pid))
    return identities


def sweep_orphans() -> list[int]:
    """Kill the processes that dead dispatchers of this user left, see above; return their ids."""
    recorded = recorded_processes()
    return end_processes(
        [process for process in psutil.process_iter() if process.pid != os.getpid() and _is_orphan(process, recorded)]
    )


def sweep_leftovers() -> None:
    """Kill the processes that dead dispatchers of this user left, then delete their folders, which record some."""
    sweep_orphans()
    sweep_folders()


def end_processes(processes: Sequence[psutil.Process]) -> list[int]:
    """Kill the processes, wait until they end, and return their ids. psutil guards against reused ids."""
    killed = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
            killed.append(process)
    psutil.wait_procs(killed, timeout=_END_WITHIN_S)
    return [process.pid for process in killed]


def _is_orphan(process: psutil.Process, recorded: set[str]) -> bool:
    try:
        marker = _session_of(process.pid)
        if marker is None and not recorded:  # most processes, of which psutil need not read more
            return False
        if set(process.uids()) != {os.geteuid()}:
            return False
        marker_now = identity(process.pid)
    except (psutil.Error, OSError):  # gone, or not accessible
        return False
    return marker_now in recorded or (has_ended(marker) and _began_after(marker_now, marker))


def _session_of(pid: int) -> str | None:
    """Return the value of `SESSION_VARIABLE` in a process's environment. Raises `OSError` where it cannot be read."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().partition(b"\0\0")[0]  # then there may be an old title
    begin = f"{SESSION_VARIABLE}=".encode()
    values = [os.fsdecode(entry[len(begin) :]) for entry in environment.split(b"\0") if entry.startswith(begin)]
    return values[-1] if values else None


def _began_after(process_marker: str, owner: str | None) -> bool:
    process, begun = parse_marker(process_marker), parse_marker(owner)
    return process is not None and begun is not None and process.start_ticks >= begun.start_ticks


_LIMIT_BYTES = 4096  # largest lock that is read: one line


class DispatcherBusy(EnvironmentProblem):
    """Another dispatcher works on this data folder."""


@contextlib.contextmanager
def hold_dispatcher_lock(path: Path) -> Iterator[None]:
    """Hold the dispatcher's lock of a data folder, an advisory lock that the kernel drops when the process ends.

    Leftovers of this user's killed dispatchers are swept at the start and at the end. The file names its holder, for
    messages only: any process that may write to the folder may write anything there.

    Raises `DispatcherBusy` naming the holder; `EnvironmentProblem` if the lock is a link or not a plain file.
    """

    def busy() -> DispatcherBusy:
        marker = parse_marker(_holder_of(path))
        named = f"process {marker.pid}" if marker else "its process is not known"
        return DispatcherBusy(f"a dispatcher ({named}) already works on data={path.parent.parent}")

    with locked(path, busy, written=True) as file:
        file.truncate()
        file.write(json.dumps({"dispatcher": identity(os.getpid())}).encode())
        file.flush()
        try:
            sweep_leftovers()
            yield
        finally:
            sweep_leftovers()  # workers killed at the end, as Ray's are, leave some


def dispatcher_of(path: Path) -> int | None:
    """Return the process id of the dispatcher that works on this folder, None if there is none.

    It counts while the lock is held, even if its process is in another boot or namespace and cannot be examined.
    """
    text = _holder_of(path)
    marker = parse_marker(text)
    return marker.pid if marker is not None and alive(str(text)) and is_held(path) else None


def _holder_of(path: Path) -> str | None:
    """Return the marker in the lock; None if it holds no complete marker of a dispatcher."""
    try:
        content = json.loads(read_lock(path, _LIMIT_BYTES))
    except (ValueError, RecursionError):  # ValueError includes invalid UTF-8
        return None
    marker = content.get("dispatcher") if isinstance(content, dict) else None
    return marker if isinstance(marker, str) and parse_marker(marker) else None
