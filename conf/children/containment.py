"""Finds all processes of a child, ends them, and measures their memory.

Start reading at `end_below`, or at `TreeMemory`. A process below a subreaper cannot escape. When its parent ends, it
becomes the subreaper's child, even if it changed its session, group, environment or descriptors (prctl(2),
PR_SET_CHILD_SUBREAPER). If control groups are writable, each child gets its own. Linux only; imports little, because a
keeper needs nothing else.

The memory of several processes is less than the sum of their resident sets, because a fork shares pages with its
parent. The kernel's proportional set size (PSS, proc_pid_smaps_rollup(5)) splits a shared page among its processes.
Reading it walks the page tables, some milliseconds per GiB, so it is read rarely.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from conf.files.identity import alive, process_stat

_GROUP_PREFIX = "gpufarm-"
END_S = 10.0  # a killed process ends within milliseconds, unless the kernel hangs in it
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LOOK_PERIOD_NS = 1_000_000_000
_SHARES = (b"Pss", b"Private_Clean", b"Private_Dirty")


def run_as_child(body: Callable[[], None]) -> NoReturn:
    """Run a forked process's body and exit as Python does: with the code of `sys.exit`, or 1 and a traceback."""
    code = 1
    try:
        body()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback  # slow to import, and a keeper does not need it

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)  # a larger code would raise, and the child would continue


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


def become_subreaper() -> None:
    """Become the parent of every descendant that loses its own parent. The caller must reap them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies. The parent must have a single thread."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def children_of(pid: int) -> list[int]:
    """Return the children of a process, zombies included; none if the process is gone."""
    if not lists_children():
        return _children_by_parent()[pid]
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError),  # the thread has ended, and another one has its children
                open(f"/proc/{pid}/task/{thread}/children", "rb") as listed,
            ):
                children += map(int, listed.read().split())
    return children


@functools.cache
def lists_children() -> bool:
    """Return whether the kernel lists each thread's children (CONFIG_PROC_CHILDREN).

    Without that list the whole process table is read, which takes milliseconds instead of microseconds.
    """
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def descendants_of(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return all descendants of a process, without `spared` and their descendants."""
    # Without the lists, read the whole table once.
    children = children_of if lists_children() else _children_by_parent().__getitem__
    below: dict[int, None] = {}
    todo = [pid]
    while todo:
        for child in children(todo.pop()):
            if child not in spared and child not in below:
                below[child] = None
                todo.append(child)
    return list(below)


def end_below(pid: int, group: ControlGroup | None = None, spared: Collection[int] = ()) -> tuple[int, int]:
    """Kill and reap all descendants of this process, whose id is `pid`, except `spared` and their descendants.

    Returns the number of living processes that were killed, and the number that still exist after ten seconds.
    """
    killed: set[int] = set()
    give_up = time.monotonic() + END_S
    pause_s = PAUSE_S
    while True:
        remaining = 0
        for process in descendants_of(pid, spared):
            if _reap(process):
                continue
            remaining += 1
            if kill(process):
                killed.add(process)
        if group is not None:
            group.kill()  # all at once, so that a process that forks forever cannot escape
        if not remaining and (group is None or group.remove()):
            return len(killed), 0
        if time.monotonic() >= give_up:
            return len(killed), remaining
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def kill(pid: int) -> bool:
    """Send SIGKILL to one process. Return False if it has ended or belongs to another user."""
    try:
        if process_stat(pid)[0] == "Z":
            return False
        os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError, IndexError):
        return False
    return True


def _reap(pid: int) -> bool:
    """Reap the process; return whether it was an ended child of this process."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            children[int(process_stat(name)[1])].append(int(name))
    return children


class ControlGroup:
    """A control group (version 2) of a keeper's child. A single write kills all its processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_owner(cls, owner: str) -> ControlGroup | None:
        """Create the group for a keeper's child, and end groups whose owner is dead.

        `owner` is a process's `conf.files.identity.identity`. Returns None if control groups are not writable.
        """
        parent = _own_group()
        if parent is None or not os.access(parent, os.W_OK):
            return None
        for path in parent.glob(f"{_GROUP_PREFIX}*@*"):
            if not alive(path.name.removeprefix(_GROUP_PREFIX)):
                group = cls(path)
                group.kill()
                group.remove()
        made = cls(parent / (_GROUP_PREFIX + owner))
        try:
            made.path.mkdir()
        except OSError:
            return None
        if not (made.path / "cgroup.kill").exists():  # Linux before 5.14
            made.remove()
            return None
        return made

    def enter(self) -> None:
        """Move this process into the group; processes that it starts later are also inside."""
        with contextlib.suppress(OSError):  # the subreaper is still there
            (self.path / "cgroup.procs").write_text("0")

    def kill(self) -> None:
        """Send SIGKILL to all processes inside, also in groups that they have made."""
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Remove the group; return False if it still holds a process."""
        with contextlib.suppress(OSError):
            for inner in sorted(self.path.glob("**/"), reverse=True):
                inner.rmdir()
        return not self.path.exists()


def line_of(path: str, name: str) -> str | None:
    """Return the value after `name` and a colon in the first line of a /proc file that begins with it, or None."""
    with contextlib.suppress(OSError), open(path) as lines:
        return next((line.removeprefix(name).strip(": \t\n") for line in lines if line.startswith(name)), None)
    return None


def _own_group() -> Path | None:
    """Return this process's control group of version 2; None if no mounted file system shows it."""
    inside = line_of("/proc/self/cgroup", "0::")
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", errors="replace") as mounts:
        for fields, _, kind in (line.partition(" - ") for line in mounts):
            if inside and kind.startswith("cgroup2 "):
                root, mounted_on = fields.split()[3:5]  # the mount may show a subtree only
                relative = os.path.relpath(inside, root)
                if not relative.startswith(".."):
                    return Path(mounted_on, relative)
    return None


def resident_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Return process id -> resident set in bytes, for processes that still exist."""
    resident = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as sizes:
            resident[pid] = int(sizes.read().split()[1]) * _PAGE_BYTES
    return resident


class TreeMemory:
    """Memory of one process tree over successive readings.

    Shared memory is read when a process starts or ends, and once a second. In between, the growth of the resident sets
    counts as not shared.
    """

    def __init__(self) -> None:
        self._processes: frozenset[int] = frozenset()  # processes whose shares are known
        self._shared_bytes = 0  # memory that the sum of their resident sets counts more than once
        self._looked_ns = 0

    def beyond(self, pids: Iterable[int], limit_bytes: float) -> int | None:
        """Return the memory of these processes in bytes if it exceeds the limit, else None."""
        resident = resident_bytes(pids)
        if sum(resident.values()) <= limit_bytes:
            return None
        used_bytes = self.bytes(resident, time.monotonic_ns())
        return used_bytes if used_bytes > limit_bytes else None

    def bytes(self, resident: Mapping[int, int], now_ns: int) -> int:
        """Return the memory of the tree in bytes; `resident` maps process ids to resident sets."""
        total = sum(resident.values())
        if len(resident) < 2:
            return total
        if resident.keys() != self._processes or now_ns - self._looked_ns >= _LOOK_PERIOD_NS:
            self._processes, self._looked_ns = frozenset(resident), now_ns
            self._shared_bytes = total - tree_memory_bytes(resident)
        return max(total - self._shared_bytes, *resident.values())


def tree_memory_bytes(resident: Mapping[int, int]) -> int:
    """Return the memory of a tree of processes in bytes, with shared pages counted once.

    `resident` maps process ids to resident sets. For a single process the memory is its resident set. For several it is
    the larger of two lower bounds. The sum of the proportional sets counts pages shared with processes outside of the
    tree only in part. The largest shared part of a process plus all private pages leaves out pages that only other
    processes share. If the kernel does not report shares (before Linux 4.14, or for another user's process), a resident
    set counts as private. A process that has ended meanwhile does not count.
    """
    if len(resident) < 2:
        return sum(resident.values())
    proportional = private = most_shared = 0
    for pid, resident_set in resident.items():
        shares = shares_bytes(pid)
        if shares is None:
            resident_set = resident_bytes([pid]).get(pid, 0)
        own_share, unshared = shares or (resident_set, resident_set)
        proportional += own_share
        private += unshared
        most_shared = max(most_shared, resident_set - unshared)
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
