"""Limits a trial's host memory to its share, before the kernel kills another process.

Start reading at `HostMemoryGuard`.
"""

from __future__ import annotations

from conf.children.containment import descendants_of
from conf.children.memory import TreeMemory


class HostMemoryGuard:
    """Ends a trial that takes more host memory than its share, before the kernel kills another process."""

    def __init__(self, pid: int, limit_mib: float) -> None:
        self._pid = pid
        self._limit_mib = limit_mib
        self._memory = TreeMemory()

    def exceeded(self) -> str | None:
        """Return why the trial must be killed, or None."""
        used_bytes = self._memory.beyond([self._pid, *descendants_of(self._pid)], self._limit_mib * 2**20)
        if used_bytes is None:
            return None
        used_mib = used_bytes / 2**20
        return f"its {used_mib:.0f} MiB of host memory exceed trial.host_memory_limit_mib={self._limit_mib:.0f}"


def kernel_oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has killed since boot (0 if not reported)."""
    try:
        with open("/proc/vmstat") as lines:
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0
