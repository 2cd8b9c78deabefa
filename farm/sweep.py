"""Finds and ends processes that a killed dispatcher left behind: trial servers, trials, Ray's helpers.

Start reading at `sweep_orphans`. Every process that a dispatcher starts inherits `SESSION_VARIABLE`, which names the
dispatcher by process id and start time, so that a process number that was used again is not mistaken for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from conf.identity import alive, identity

__all__ = ["SESSION_VARIABLE", "alive", "descendants", "identity", "session_marker", "sweep_orphans"]

SESSION_VARIABLE = "GPUFARM_SESSION"


def session_marker() -> str:
    """`PID@START@WHERE` of this process: the value for `SESSION_VARIABLE`."""
    return identity(os.getpid())


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
