"""A trial's host memory: its share is enforced here, before the kernel kills something else.

Start reading at `HostMemoryGuard`. The memory of several processes is less than the sum of their resident sets: what a
fork shares with its parent is there once. The kernel's proportional set size (PSS, proc_pid_smaps_rollup(5)) gives each
process its part of a shared page. It walks the page tables, some milliseconds a GiB, so it is asked for seldom.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


class HostMemoryGuard:
    """Kills a trial that takes more host memory than its share, before the kernel kills something else."""

    def __init__(self, pid: int, limit_mib: float):
        import psutil

        self._limit_mib = limit_mib
        self._process = None
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(pid)

    def exceeded(self) -> str | None:
        """Why the trial must go, or None."""
        import psutil

        if self._process is None:
            return None
        try:
            tree = [self._process, *self._process.children(recursive=True)]
        except psutil.Error:
            return None
        resident = resident_bytes(tree)
        if sum(resident.values()) <= self._limit_mib * 2**20:
            return None
        used_mib = tree_memory_bytes(resident) / 2**20
        if used_mib <= self._limit_mib:
            return None
        return f"its {used_mib:.0f} MiB of host memory exceed trial.host_memory_limit_mib={self._limit_mib:.0f}"


def resident_bytes(processes: Iterable[psutil.Process]) -> dict[int, int]:
    """Process id -> resident set in bytes, of those that are still there."""
    import psutil

    resident = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            resident[process.pid] = process.memory_info().rss
    return resident


def tree_memory_bytes(resident: Mapping[int, int]) -> int:
    """Return the memory of a tree of processes in bytes, shared pages counted once. `resident` is by process id.

    One process: its resident set. Several: the sum of their proportional sets, or the largest resident set where that
    is more, since what the tree shares with processes outside of it counts in part only. Both are at most what the
    tree uses. Where the kernel does not tell (before Linux 4.14, another user's process) the resident set counts.
    """
    if len(resident) < 2:
        return sum(resident.values())
    proportional = 0
    for pid, resident_set in resident.items():
        own = proportional_bytes(pid)
        proportional += resident_set if own is None else own
    return max(proportional, *resident.values())


def proportional_bytes(pid: int) -> int | None:
    """A process's proportional set size in bytes; None where the kernel does not say."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as lines:
            for line in lines:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def kernel_oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has taken since boot (0 where it does not say)."""
    try:
        with open("/proc/vmstat") as lines:
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0
