"""A trial's host memory: its share is enforced here, before the kernel kills something else.

Start reading at `HostMemoryGuard`.
"""

from __future__ import annotations

import contextlib


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
            resident_mib = sum(process.memory_info().rss for process in tree) / 2**20
        except psutil.Error:
            return None
        if resident_mib <= self._limit_mib:
            return None
        return f"its {resident_mib:.0f} MiB of host memory exceed trial.host_memory_limit_mib={self._limit_mib:.0f}"


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
