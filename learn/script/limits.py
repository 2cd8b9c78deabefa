"""Runs a process within limits of time and memory, with whatever processes it starts.

Start reading at `run_limited`. Linux: memory is the resident memory that /proc shows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

TOO_LONG, TOO_LARGE = "time", "memory"
_LOOK_EVERY_S = 0.2


def run_limited(
    command: Sequence[str], output: BinaryIO | None, *, time_limit_s: float, memory_limit_bytes: int
) -> int | str:
    """Run a command in a session of its own, and end all of its session with it.

    Args:
        command: The program and its arguments.
        output: Where its standard output and standard error go; None is this process's standard error.
        time_limit_s: Seconds after which it is ended.
        memory_limit_bytes: Resident memory of its session beyond which it is ended.

    Returns:
        The exit code, or `TOO_LONG` or `TOO_LARGE` where it was ended.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if output is None else output,
        stderr=sys.stderr if output is None else output,
        start_new_session=True,
    )
    ends_ns = time.monotonic_ns() + int(time_limit_s * 1e9)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_EVERY_S)
            if time.monotonic_ns() > ends_ns:
                return TOO_LONG
            if resident_bytes(process.pid) > memory_limit_bytes:
                return TOO_LARGE
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # also the script's own children
        process.wait()


def resident_bytes(session: int) -> int:
    """Resident memory of the processes of a session; pages that they share count for each."""
    pages = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.getsid(int(entry.name)) == session:
                pages += int(Path(entry.path, "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
