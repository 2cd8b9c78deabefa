"""The memory of a tree of processes. Start reading at `TreeMemory`.

The memory of several processes is less than the sum of their resident sets: what a fork shares with its parent is
there once. The kernel's proportional set size (PSS, proc_pid_smaps_rollup(5)) gives each process its part of a shared
page; asking walks the page tables, some milliseconds a GiB, so that is done seldom.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LOOK_PERIOD_NS = 1_000_000_000
_SHARES = (b"Pss", b"Private_Clean", b"Private_Dirty")


def resident_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Return the resident set in bytes of each process that still exists, by process id."""
    resident = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as sizes:
            resident[pid] = int(sizes.read().split()[1]) * _PAGE_BYTES
    return resident


class TreeMemory:
    """Memory of one process tree over successive readings.

    Shared memory is read when a process starts or ends, and once a second; between, the growth of the resident sets is
    added as if it were not shared.
    """

    def __init__(self) -> None:
        self._processes: frozenset[int] = frozenset()  # of which it is known what they share
        self._shared_bytes = 0  # that the sum of their resident sets has more than once
        self._looked_ns = 0

    def beyond(self, pids: Iterable[int], limit_bytes: float) -> int | None:
        """Return the memory of these processes in bytes where it is beyond the limit, else None."""
        resident = resident_bytes(pids)
        if sum(resident.values()) <= limit_bytes:
            return None
        used_bytes = self.bytes(resident, time.monotonic_ns())
        return used_bytes if used_bytes > limit_bytes else None

    def bytes(self, resident: Mapping[int, int], now_ns: int) -> int:
        """Return the memory of the tree in bytes, as `tree_memory_bytes` does; `resident` is by process id."""
        total = sum(resident.values())
        if len(resident) < 2:
            return total
        if resident.keys() != self._processes or now_ns - self._looked_ns >= _LOOK_PERIOD_NS:
            self._processes, self._looked_ns = frozenset(resident), now_ns
            self._shared_bytes = total - tree_memory_bytes(resident)
        return max(total - self._shared_bytes, *resident.values())


def tree_memory_bytes(resident: Mapping[int, int]) -> int:
    """Return the memory of a tree of processes in bytes, shared pages counted once. `resident` is by process id.

    One process: its resident set. Several: the sum of their proportional sets, or the resident set of one of them with
    the private pages of the others, whichever is most. Each of these is at most what the tree uses: the former counts
    what is shared with processes outside of the tree in part, the latter leaves out what only the others share. Where
    the kernel does not tell (before Linux 4.14, another user's process) a resident set counts as private. A process
    that has ended since counts no more.
    """
    if len(resident) < 2:
        return sum(resident.values())
    proportional = private = most_shared = 0
    for pid, resident_set in resident.items():
        shares = shares_bytes(pid)
        if shares is None:
            resident_set = resident_bytes([pid]).get(pid, 0)
        own_share, own = shares or (resident_set, resident_set)
        proportional += own_share
        private += own
        most_shared = max(most_shared, resident_set - own)
    return max(proportional, private + most_shared)


def shares_bytes(pid: int) -> tuple[int, int] | None:
    """Return (proportional set size, private pages) of a process in bytes; None if the kernel does not report them."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as lines:
            parted = (line.partition(b":") for line in lines)
            sizes = {name: int(size.split()[0]) * 1024 for name, _, size in parted if name in _SHARES}
        return sizes[b"Pss"], sizes[b"Private_Clean"] + sizes[b"Private_Dirty"]
    except (OSError, ValueError, LookupError):
        return None
