"""The keeper: a small process between a caller and its child, which ends the child with everything below it.

Start reading at `keep`. The keeper is a subreaper: what a process below it starts, in whatever session, group or
environment, becomes the keeper's child at the latest when its own parent ends. So it can end all of them, whether the
child has ended, has reached a limit, or the caller is gone. The caller itself may have other children, and reaps none.

`main` keeps one program for `conf.children.running`. The program's process is its fork, so that Python starts once; the
keeper imports no more than this package, some 10 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from conf.children.containment import (
    ControlGroup,
    become_subreaper,
    children_of,
    descendants_of,
    die_with_parent,
    end_below,
)
from conf.children.forked import run_as_child
from conf.children.memory import TreeMemory
from conf.children.output import ChildOutput
from conf.identity import OWNER_FILE, identity

FOLDER_PREFIX = "gpufarm-child-"
TIME, MEMORY = "time", "memory"
_LOOK_S = 0.2
_ENDED_BY_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a keeper ends with its child or its caller


class Ended(NamedTuple):
    """How a child ended: `code` of its process, negative for a signal; None where a limit or the caller ended it.

    limit   which one it reached: `TIME`, `MEMORY` or None
    output  the beginning and the end of what it printed, where that was read
    """

    code: int | None
    limit: str | None = None
    output: str = ""


def keep(
    body: Callable[[], None],
    line: int,
    *,
    time_limit_s: float | None = None,
    memory_limit_bytes: float | None = None,
    output: ChildOutput | None = None,
    group: ControlGroup | None = None,
    handed_over: Sequence[int] = (),
    grace_s: float = 0.0,
) -> Ended:
    """Run a function in a forked child, and end the child with all that it started. Make this process its keeper.

    Call it once in a process, on its main thread, where no other thread and no other child is.

    Args:
        body: What the child runs, in a session of its own. It may execute a program.
        line: A descriptor of the caller's. When it can be read from, or is at its end, the child is no longer wanted.
        time_limit_s: Seconds after which everything ends.
        memory_limit_bytes: Memory of all processes below this one beyond which everything ends.
        output: Is read meanwhile. The body makes its writing end the child's output.
        group: A control group of the child's; the body enters it.
        handed_over: Descriptors that are the child's from then on.
        grace_s: Seconds in which the child can end by itself once the caller is gone.
    """
    wake = _wakes_on_exit()
    become_subreaper()
    keeper, caller = os.getpid(), os.getppid()
    child = os.fork()
    if not child:
        run_as_child(lambda: _begin_child(body))
    for descriptor in handed_over:
        os.close(descriptor)
    if output is not None:
        output.close_writer()
    memory, next_look = TreeMemory(), 0.0
    ends = None if time_limit_s is None else time.monotonic() + time_limit_s
    is_wanted, ended = True, Ended(None)
    while True:
        waiting: list[int | ChildOutput] = [wake, *([line] if is_wanted else [])]
        if output is not None and output.open:
            waiting.append(output)
        looks = ends is not None or memory_limit_bytes is not None
        readable, _, _ = select.select(waiting, [], [], _LOOK_S if looks else None)
        if output is not None and output in readable:
            output.drain()
        if wake in readable:
            os.read(wake, 512)
            if (code := _exit_code(child)) is not None:
                ended = Ended(code)
                break
            for orphan in children_of(keeper):
                if orphan != child:
                    os.waitpid(orphan, os.WNOHANG)
        now = time.monotonic()
        if is_wanted and (line in readable or os.getppid() != caller):
            is_wanted, ends = False, now + grace_s
        if ends is not None and now >= ends:
            ended = Ended(None, TIME if is_wanted else None)
            break
        if memory_limit_bytes is not None and now >= next_look:
            next_look = now + _LOOK_S
            if memory.beyond(descendants_of(keeper), memory_limit_bytes) is not None:
                ended = Ended(None, MEMORY)
                break
    end_below(keeper, group=group)
    if output is not None:
        output.drain()
        ended = ended._replace(output=output.text())
    return ended


@contextlib.contextmanager
def kept_folder(base: str) -> Iterator[str]:
    """Make a folder below `base`, which holds its owner's identity, and delete it at the end."""
    path = os.path.join(base, FOLDER_PREFIX + os.urandom(6).hex())
    os.mkdir(path, 0o700)
    try:
        Path(path, OWNER_FILE).write_text(identity(os.getpid()))
        yield path
    finally:
        _delete(path)


def _wakes_on_exit() -> int:
    """Return a descriptor that can be read from when a child has ended; ignore signals that others are to handle."""
    for number in _ENDED_BY_OTHERS:
        signal.signal(number, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up byte to be written
    return wake_read


def _begin_child(body: Callable[[], None]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_ENDED_BY_OTHERS):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()  # a kill of the keeper's session or group does not meet the child
    body()


def _exit_code(child: int) -> int | None:
    """Return the exit code of a child that has ended; it stays a zombie, so that its id is not used again."""
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _delete(folder: str) -> None:
    """Delete a folder with its contents, also with folders in it that may not be written to. Follows no link."""
    for parent, names, _ in os.walk(folder):
        for path in (os.path.join(parent, name) for name in names):
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    for parent, folders, files in os.walk(folder, topdown=False):
        paths = [os.path.join(parent, name) for name in (*folders, *files)]
        for path in paths:
            with contextlib.suppress(OSError):
                (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _execute(program: list[str], keeper: int, output: ChildOutput | None, group: ControlGroup | None) -> None:
    die_with_parent(keeper)
    if group is not None:
        group.enter()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(2 if output is None else output.writer, number)
    sys.argv = program
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _tell(message: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller is gone
        os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Make a folder below that of the first argument, run a program, and delete the folder.

    Prints the folder's path, reads the program and its limits, prints how it ended, and reads one more line, after
    which the folder goes; each is a line of JSON.
    """
    keeper = os.getpid()
    try:
        # Unbuffered, so that no line waits where `keep` does not look.
        with kept_folder(sys.argv[1]) as folder, open(0, "rb", buffering=0) as caller:
            _tell({"folder": folder})
            request = caller.readline().strip()
            if not request:
                return
            wanted = json.loads(request)
            output = None if wanted["shows_output"] else ChildOutput()
            group = ControlGroup.of_owner(identity(keeper))
            ended = keep(
                lambda: _execute(wanted["program"], keeper, output, group),
                caller.fileno(),
                time_limit_s=wanted["time_limit_s"],
                memory_limit_bytes=wanted["memory_limit_bytes"],
                output=output,
                group=group,
            )
            _tell(ended._asdict())
            caller.readline()
    except OSError as error:
        _tell({"problem": str(error)})
