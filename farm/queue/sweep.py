"""Finds and ends processes that a killed dispatcher left: trial servers, trials, Ray's helpers.

Start reading at `sweep_orphans`. A process is ended only with proof that it is ours: it runs as this user, and either
its environment holds `SESSION_VARIABLE` with the identity of a dispatcher that runs no more, or that dispatcher wrote
its identity into a folder that only this user can write to (`farm.queue.leftovers`). What a data folder says is no
proof.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import psutil

from conf.files.identity import identity
from farm.queue.leftovers import recorded_processes, sweep_folders
from farm.queue.process_marker import has_ended, parse_marker

SESSION_VARIABLE = "GPUFARM_SESSION"  # its value: the identity of the dispatcher, as `conf.files.identity` makes it
_END_WITHIN_S = 5.0


def descendants() -> list[str]:
    """Return the identities of this process's descendants, for `farm.queue.leftovers.record_processes`."""
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
    """Kill what dead dispatchers of this user left running, then delete their folders, which record some of it."""
    sweep_orphans()
    sweep_folders()


def end_processes(processes: Sequence[psutil.Process]) -> list[int]:
    """Kill the processes, wait until they are gone, and return their ids. psutil guards against reused ids."""
    killed = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
            killed.append(process)
    psutil.wait_procs(killed, timeout=_END_WITHIN_S)
    return [process.pid for process in killed]


def _is_orphan(process: psutil.Process, recorded: set[str]) -> bool:
    try:
        if set(process.uids()) != {os.geteuid()}:
            return False
        own = identity(process.pid)
        marker = process.environ().get(SESSION_VARIABLE)
    except (psutil.Error, OSError):  # gone, or not ours to look at
        return False
    return own in recorded or (has_ended(marker) and _began_after(own, marker))


def _began_after(own: str, dispatcher: str | None) -> bool:
    process, begun = parse_marker(own), parse_marker(dispatcher)
    return process is not None and begun is not None and process.start_ticks >= begun.start_ticks
