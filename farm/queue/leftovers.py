"""Finds and ends leftovers of killed processes: trial servers, trials, Ray's helpers, temporary folders.

Start reading at `sweep_leftovers`. A process is ended only with proof that it is the farm's: it runs as this user, its
environment has `SESSION_VARIABLE` with the identity of a dispatcher that has ended, and it began after that dispatcher.
What files say proves nothing. A temporary folder (`conf.files.own_folders`) goes once the process that made it is dead.

An identity is `PID@START@BOOT.NAMESPACE` (`conf.files.identity`). It is read from files and environments that anybody
may have written, so any other form is ignored.

`hold_dispatcher_lock` lets one dispatcher work on a data folder, and sweeps before and after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from conf.errors import EnvironmentProblem
from conf.files.identity import alive, identity, process_stat
from conf.files.own_folders import OWNER_FILE, PREFIXES, delete_folder, make_folder, open_own_file, own_folder
from warehouse.files.plain_file import is_held, locked, read_lock

# The process id, its start in kernel ticks since boot, the boot id, and the namespace.
_IDENTITY = re.compile(r"(?P<pid>[1-9][0-9]{0,9})@(?P<start>[0-9]{1,20})@(?P<boot>[0-9a-f]{8})\.[0-9]{1,20}")


def _parse_identity(text: object) -> re.Match[str] | None:
    """Return the parts of a process's identity; None for any other text."""
    return _IDENTITY.fullmatch(text) if isinstance(text, str) else None


_OWNER_BYTES = 256
_SOCKET_PATH_BYTES = 107  # the kernel's limit
_SOCKET_BYTES = len("/gpufarm-ray-12345678/session_2026-11-22_07-25-58_866444_1234567/sockets/plasma_store")
_UNOWNED_AFTER_S = 86_400.0  # a folder without an owner, or of an earlier boot, is left alone for this long


def make_ray_folder() -> Path | None:
    """Make a folder for a private Ray's session, at the first place where its sockets' paths are short enough.

    Returns None if there is no such place; Ray then chooses the folder, which is not swept.
    """
    for base in temporary_folders():
        if len(os.fsencode(base)) + _SOCKET_BYTES <= _SOCKET_PATH_BYTES and os.access(base, os.W_OK | os.X_OK):
            return make_folder("gpufarm-ray-", base)
    return None


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


def _folders(bases: Iterable[str | os.PathLike[str]]) -> list[Path]:
    folders = []
    for base in dict.fromkeys(map(os.path.realpath, bases)):
        with contextlib.suppress(OSError):
            folders += [Path(base, name) for name in sorted(os.listdir(base)) if name.startswith(PREFIXES)]
    return folders


def _delete_if_abandoned(path: Path, now: float) -> bool:
    with own_folder(path, private=False) as folder:
        if folder is None:
            return False
        owner, age_s = _owner_of(folder), now - os.fstat(folder).st_mtime
    maker, ours = _parse_identity(owner), _parse_identity(identity(os.getpid()))
    if maker is not None and ours is not None and maker["boot"] == ours["boot"]:
        abandoned = not alive(maker[0])
    else:
        abandoned = age_s > _UNOWNED_AFTER_S
    return abandoned and delete_folder(path)


def _owner_of(folder: int) -> str | None:
    try:
        with os.fdopen(open_own_file(folder, OWNER_FILE), "rb") as file:
            return file.read(_OWNER_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return None


SESSION_VARIABLE = "GPUFARM_SESSION"  # its value: the identity of the dispatcher, as `conf.files.identity` makes it
_END_WITHIN_S = 5.0


def sweep_orphans() -> list[int]:
    """Kill the processes that dead dispatchers of this user left, see above; return their ids."""
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    return end_processes([process for process in others if _is_orphan(process)])


def sweep_leftovers() -> None:
    """Kill the processes that dead dispatchers of this user left, then delete their folders."""
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


def _is_orphan(process: psutil.Process) -> bool:
    try:
        dispatcher = _parse_identity(_session_of(process.pid))
        if dispatcher is None or alive(dispatcher[0]):
            return False
        began_after = int(process_stat(process.pid)[19]) >= int(dispatcher["start"])
        return began_after and set(process.uids()) == {os.geteuid()}
    except (psutil.Error, OSError):  # gone, or not accessible
        return False


def _session_of(pid: int) -> str | None:
    """Return the value of `SESSION_VARIABLE` in a process's environment. Raises `OSError` where it cannot be read."""
    begin = f"{SESSION_VARIABLE}=".encode()
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    values = [os.fsdecode(variable[len(begin) :]) for variable in variables if variable.startswith(begin)]
    return values[-1] if values else None


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
        holder = _holder_of(path)
        named = f"process {holder['pid']}" if holder else "its process is not known"
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
    holder = _holder_of(path)
    return int(holder["pid"]) if holder is not None and alive(holder[0]) and is_held(path) else None


def _holder_of(path: Path) -> re.Match[str] | None:
    """Return the identity of the dispatcher that the lock names; None if it names none completely."""
    try:
        content = json.loads(read_lock(path, _LIMIT_BYTES))
    except (ValueError, RecursionError):  # ValueError includes invalid UTF-8
        return None
    return _parse_identity(content.get("dispatcher")) if isinstance(content, dict) else None
