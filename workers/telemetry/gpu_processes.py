"""Attributes the processes on a GPU to the trial, to the farm, or to others that disturb the measurement.

Start reading at `GpuProcesses.share`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# The initial namespace's inode number, a constant of Linux (PROC_PID_INIT_INO in include/linux/proc_ns.h).
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_MPS_SERVICES = ("nvidia-cuda-mps-server", "nvidia-cuda-mps-control")

NO_HOST_PIDS = (
    "NVML's pids are of another pid namespace or of a virtual machine's host; in a container the host's are needed "
    "(--pid=host)"
)


@dataclass(frozen=True, slots=True)
class Share:
    """Division of a GPU's processes. None: unknown; `reason` says why others cannot be counted."""

    own_bytes: int | None
    own_seen: bool
    others: int | None
    other_bytes: int | None
    reason: str | None


class GpuProcesses:
    """Sorts the pids that NVML lists for one trial's GPU. Each pid is looked up once while it stays listed.

    NVML reports the pids of the driver's machine. Inside a pid namespace of one's own (a container) and in a virtual
    machine that reaches its host's driver they mean nothing, or, worse, somebody else: so others are counted only once
    the trial's own process was listed, which shows that the pids are ours, and outside of the initial namespace only
    while every listed pid exists here.
    """

    def __init__(self, root: int, known_pids: frozenset[int] = frozenset()) -> None:
        self.root = root
        self.known_pids = known_pids
        self.seen_own = False
        self.mps = False  # whether CUDA's multi-process service runs on this GPU
        self._kinds: dict[int, str] = {}

    def share(self, listed: Mapping[int, int | None]) -> Share:
        """Divide the processes. `listed`: pid -> bytes of device memory charged to it (None: not reported)."""
        kinds = {pid: self._kinds.get(pid) or self._kind(pid) for pid in listed}
        self._kinds = {pid: kind for pid, kind in kinds.items() if kind != "unknown"}
        by_kind: dict[str, list[int | None]] = {}
        for pid, kind in kinds.items():
            by_kind.setdefault(kind, []).append(listed[pid])
        own, others = by_kind.get("own", []), by_kind.get("other", [])
        self.mps = "service" in by_kind
        self.seen_own = self.seen_own or bool(own)
        if in_initial_pid_namespace():  # a pid that is not there has just ended
            countable = self.seen_own or not others
        else:
            countable = self.seen_own and "unknown" not in by_kind
        return Share(
            own_bytes=_sum(own) if own else None,
            own_seen=bool(own),
            others=len(others) if countable else None,
            other_bytes=_sum(others) if countable else None,
            reason=None if countable else NO_HOST_PIDS,
        )

    def _kind(self, pid: int) -> str:
        if belongs_to(pid, self.root):
            return "own"
        if any(belongs_to(pid, known) for known in self.known_pids):
            return "ignored"
        name = _name(pid)
        if name is None:
            return "unknown"
        return "service" if name.startswith(_MPS_SERVICES) else "other"

    def ignore(self, pids: Iterable[int]) -> None:
        """Treat these processes and their descendants as the farm's from now on: neither the trial's nor others."""
        self.known_pids = frozenset(pids)
        self._kinds = {}


def in_initial_pid_namespace() -> bool:
    """Return whether this process sees the pids that the driver reports."""
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE
    except OSError:  # no /proc: not Linux, where there are no such namespaces
        return os.name == "nt"


def belongs_to(pid: int, root: int) -> bool:
    """Return whether `pid` is `root`, in its session, or its descendant."""
    if pid == root:
        return True
    try:
        if os.getsid(pid) == root:
            return True
    except (OSError, OverflowError):  # vanished, of another pid namespace, or no pid at all
        return False
    import psutil

    try:
        return any(parent.pid == root for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def _name(pid: int) -> str | None:
    """Return the program's name; None if there is no such process."""
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.AccessDenied:
        return ""
    except (psutil.Error, ValueError, OverflowError):
        return None


def _sum(charged: list[int | None]) -> int | None:
    known = [bytes_ for bytes_ in charged if bytes_ is not None]
    return sum(known) if len(known) == len(charged) else None
