"""Keeps a child's processes together so that all can be ended: subreapers, and a control group where allowed.

Start reading at `end_below`. A process below a subreaper cannot leave: when its parent ends it becomes the subreaper's
child, whatever session, group, environment or descriptors it gave up (prctl(2), PR_SET_CHILD_SUBREAPER). Linux only;
imports little, since a keeper needs no more than this.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from conf.files.identity import alive

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GROUP_PREFIX = "gpufarm-"
_END_S = 10.0  # a killed process goes within milliseconds, unless the kernel itself hangs in it
_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


def become_subreaper() -> None:
    """Become the parent of every descendant that loses its own parent. The caller must reap them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGKILL when its parent dies. The parent must have a single thread."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def children_of(pid: int) -> list[int]:
    """Return the children of a process, zombies included; none if the process is gone.

    The kernel lists them by thread (CONFIG_PROC_CHILDREN); without that list the whole process table is read.
    """
    children: list[int] = []
    is_partial = False
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        threads, is_partial = [], True
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as listed:
                children += map(int, listed.read().split())
        except OSError:  # the thread has ended since: its children are another's
            is_partial = True
    if is_partial and not lists_children():
        return [child for child, parent in _parents().items() if parent == pid]
    return children


def lists_children() -> bool:
    """Return whether the kernel lists each thread's children."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def descendants_of(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return all descendants of a process, without `spared` and their descendants."""
    below: dict[int, None] = {}
    todo = [pid]
    while todo:
        for child in children_of(todo.pop()):
            if child not in spared and child not in below:
                below[child] = None
                todo.append(child)
    return list(below)


def end_below(pid: int, group: ControlGroup | None = None, spared: Collection[int] = ()) -> tuple[int, int]:
    """Kill and reap all descendants of this process (`pid` is its own), without `spared` and their descendants.

    Returns the number of living processes that were killed, and of those that still exist after ten seconds.
    """
    killed: set[int] = set()
    give_up = time.monotonic() + _END_S
    pause_s = _PAUSE_S
    while True:
        if group is not None:
            killed |= group.kill()  # all at once: one that forks for ever cannot run ahead
        remaining = 0
        for process in descendants_of(pid, spared):
            if _reap(process):
                continue
            remaining += 1
            if kill(process):
                killed.add(process)
        if not remaining and (group is None or group.remove()):
            return len(killed), 0
        if time.monotonic() >= give_up:
            return len(killed), remaining
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def kill(pid: int) -> bool:
    """Send SIGKILL to one process. Return False if it has ended or belongs to another user."""
    try:
        if _is_zombie(pid):
            return False
        os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError, IndexError):
        return False
    return True


def _reap(pid: int) -> bool:
    """Reap the process; return whether it was an ended child of ours."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[0] == b"Z"


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, which may hold any text: state, parent, ..."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()


def _parents() -> dict[int, int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(_stat(name)[1])
            except (OSError, IndexError):
                continue
    return parents


class ControlGroup:
    """A control group (version 2) of a keeper's child. One write kills all its processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_owner(cls, owner: str) -> ControlGroup | None:
        """Create the group of one keeper's child, and end groups whose owner is dead.

        `owner` is a process's `conf.files.identity.identity`. Returns None if we may not write to any control group.
        """
        own = _own_group()
        if own is None or not os.access(own, os.W_OK):
            return None
        for left in own.glob(f"{_GROUP_PREFIX}*@*"):
            if not alive(left.name.removeprefix(_GROUP_PREFIX)):
                group = cls(left)
                group.kill()
                group.remove()
        made = cls(own / (_GROUP_PREFIX + owner))
        try:
            made.path.mkdir()
        except OSError:
            return None
        if not (made.path / "cgroup.kill").exists():  # Linux before 5.14
            made.remove()
            return None
        return made

    def enter(self) -> None:
        """Move this process into the group; processes that it starts afterwards are inside as well."""
        try:
            (self.path / "cgroup.procs").write_text("0")
        except OSError:
            pass  # without the group there is still the subreaper

    def kill(self) -> set[int]:
        """Send SIGKILL to all processes inside; return their ids, without zombies."""
        inside: set[int] = set()
        try:
            for listed in (self.path / "cgroup.procs", *self.path.glob("**/cgroup.procs")):
                inside |= set(map(int, listed.read_text().split()))
            if inside:
                (self.path / "cgroup.kill").write_text("1")
        except OSError:
            pass
        return inside

    def remove(self) -> bool:
        """Remove the group; return False if it still holds a process."""
        try:
            for inner in sorted(self.path.glob("**/"), reverse=True):
                inner.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return not self.path.exists()
        return not self.path.exists()


def _own_group() -> Path | None:
    """Return this process's control group of version 2, None if no such file system is mounted."""
    try:
        with open("/proc/self/cgroup") as lines:
            inside = next(line[3:].rstrip("\n") for line in lines if line.startswith("0::"))
        with open("/proc/self/mountinfo") as lines:
            for line in lines:
                fields, _, kind = line.partition(" - ")
                if kind.startswith("cgroup2 "):
                    root, mounted_on = fields.split()[3:5]
                    relative = os.path.relpath(inside, root)
                    if not relative.startswith(".."):
                        return Path(mounted_on, relative)
    except (OSError, StopIteration):
        pass
    return None
