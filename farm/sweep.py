"""Finds and ends processes that a killed dispatcher left behind: trial servers, trials, Ray's helpers.

Start reading at `sweep_orphans`. Every process that a dispatcher starts inherits `SESSION_VARIABLE`, which names the
dispatcher by process id and start time, so that a process number that was used again is not mistaken for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable

SESSION_VARIABLE = "GPUFARM_SESSION"


def session_marker() -> str:
    """`PID@START@WHERE` of this process: the value for `SESSION_VARIABLE`."""
    return identity(os.getpid())


def identity(pid: int) -> str:
    """`PID@START@WHERE`: a process number, when its process started in the kernel's own ticks since boot, and in which
    boot and namespace: a container's processes are not ours to judge.

    Not psutil's `create_time`, which moves when the system's clock is set. Raises `ProcessLookupError`.
    """
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return f"{pid}@{stat.read().rpartition(')')[2].split()[19]}@{_where()}"
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error


@functools.cache
def _where() -> str:
    """This boot of this machine, and this process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()[:8]}.{os.stat('/proc/self/ns/pid').st_ino}"


def descendants() -> list[str]:
    """Identities of every process below this one, for `sweep_orphans` of a later dispatcher: Ray's agents lose the
    variable (they overwrite their environment with their title) and outlive a killed Ray by up to a minute."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            found.append(identity(process.pid))
    return found


def sweep_orphans(recorded: Iterable[str] = ()) -> list[int]:
    """Kill what dead dispatchers left: marked processes whose dispatcher is gone, and `recorded` identities.

    Returns the ids of the killed.
    """
    import psutil

    recorded, killed = set(recorded), []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            marker = process.environ().get(SESSION_VARIABLE)
        except (psutil.Error, OSError):  # gone, or another user's
            marker = None
        orphan = marker is not None and not alive(marker)
        try:
            if orphan or identity(process.pid) in recorded:
                process.kill()
                killed.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    psutil.wait_procs(killed, timeout=5.0)
    return [process.pid for process in killed]


def alive(marker: str) -> bool:
    """Whether the process with this identity runs (a zombie does not). One of elsewhere counts as alive."""
    if not marker.endswith(f"@{_where()}"):
        return True
    try:
        pid = int(marker.partition("@")[0])
        with open(f"/proc/{pid}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
        return state != "Z" and identity(pid) == marker
    except (OSError, ValueError):
        return False
