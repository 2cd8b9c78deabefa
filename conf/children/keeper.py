"""A server of children, and the keeper that it forks for each child. The keeper ends the child and its descendants.

Start reading at `serve` and `keep`; `conf.children.running` is the caller's side. The server is a small single-threaded
process. It imports slow modules such as torch once, so that a child starts within milliseconds. The keeper is a
subreaper: a process below it, in any session, group or environment, becomes the keeper's child when its own parent
ends. The keeper can therefore end all of them when the child ends, reaches a limit, or is no longer wanted.
`ChildOutput` keeps the beginning and the end of a child's output.

Wire: the control socket and each child's line are SOCK_SEQPACKET, with a JSON object per packet.
  caller -> server   {"function": "module:name", "arguments": VALUE, ...} + the keeper's end of the line [+ a channel]
  server -> caller   {"hello": VALUE}, once; or {"problem": TEXT}
  keeper -> caller   on the line: {"started": PID}, then the fields of `Ended`
A word from the caller on the line, or the end of the line, ends the child. The line ends when the server has reaped the
keeper. The end of the control socket ends everything.

If one of them is killed, the others end what is below it:
  child              the keeper: what the child started, by its control group if it has one
  keeper             the kernel: the child (parent-death signal); the server: what the child started, now its children
  server             each keeper, which looks at its parent: its child, and what that started
  caller             the server, which looks at its parent, and each keeper, whose line ends: everything
  keeper and server  the kernel: the child; what it started is left to the farm's next dispatcher, which reads
                     environments (`farm.queue.leftovers`), or to the next keeper, if it is in a control group
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import math
import os
import pkgutil
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from conf.children.containment import (
    ControlGroup,
    TreeMemory,
    become_subreaper,
    children_of,
    descendants_of,
    die_with_parent,
    end_below,
    run_as_child,
)
from conf.errors import left_out
from conf.files.identity import identity
from conf.files.own_folders import kept_folder

_HEAD_BYTES, _TAIL_BYTES = 2000, 4000
_CHUNK_BYTES = 1 << 16
_DRAIN_CHUNKS = 64  # most chunks to read at once, because other work waits meanwhile
_LOOK_S = 0.1
_END_S = 10.0  # a killed process ends within milliseconds, unless the kernel hangs in it
_PAUSE_S = 0.0005
_ENDED_BY_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # ignored: a keeper ends with its child or caller


class ChildOutput:
    """The reading end of a child's output: keeps a few kilobytes of any amount. Never blocks."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._head = bytearray()
        self._tail = bytearray()
        self._length = 0
        self.open = True  # False once no process can write

    def fileno(self) -> int:
        return self.reader

    def drain(self) -> None:
        """Read the available output, at most 4 MiB."""
        for _ in range(_DRAIN_CHUNKS):
            try:
                data = os.read(self.reader, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.open = False
                return
            self._length += len(data)
            if (room := _HEAD_BYTES - len(self._head)) > 0:
                self._head += data[:room]
                data = data[room:]
            self._tail += data[-_TAIL_BYTES:]
            del self._tail[:-_TAIL_BYTES]

    def close_writer(self) -> None:
        """Close the writing end in the reading process."""
        os.close(self.writer)

    def text(self) -> str:
        """Return the output; if it is long, its beginning and end, and the size of the gap."""
        between = self._length - len(self._head) - len(self._tail)
        middle = left_out(between, "bytes").encode() if between else b""
        return bytes(self._head + middle + self._tail).decode(errors="replace")

    def close(self) -> None:
        os.close(self.reader)


TIME, MEMORY = "time", "memory"


def receive(source: socket.socket, most_bytes: int) -> bytes:
    """Return the data that has arrived; empty at the end, also if the other side was killed."""
    try:
        return source.recv(most_bytes)
    except ConnectionResetError:
        return b""


class Ended(NamedTuple):
    """How a child ended. `code` is its exit code, negative for a signal; None if a limit or the caller ended it.

    limit       the limit that it reached: `TIME`, `MEMORY` or None
    used_bytes  its memory when that exceeded the limit
    output      beginning and end of its output, if that was read
    left        number of processes that it left behind and that were killed
    stayed      number of those that could not be killed
    """

    code: int | None
    limit: str | None = None
    used_bytes: int | None = None
    output: str = ""
    left: int = 0
    stayed: int = 0


def keep(
    body: Callable[[], None],
    line: socket.socket,
    parent: int,
    *,
    time_limit_s: float = math.inf,
    memory_limit_bytes: float = math.inf,
    output: ChildOutput | None = None,
) -> Ended:
    """Run a function in a forked child, and end the child with all that it started. Make this process its keeper.

    Call it once per process, on the main thread, without other threads or children.

    Args:
        body: Function that the child runs, in its own session.
        line: Connection to the caller, which gets the child's id. Anything that arrives on it, or its end, ends the
            child.
        parent: The process that forked this one; its end also ends the child.
        time_limit_s: Seconds after which everything ends.
        memory_limit_bytes: Memory of all processes below this one beyond which everything ends.
        output: Receives the child's output; None: the child shares this process's.
    """
    wake = wakes_on_exit()
    become_subreaper()
    keeper = os.getpid()
    group = ControlGroup.of_owner(identity(keeper))
    child = os.fork()
    if not child:
        run_as_child(lambda: _begin_child(body, keeper, group, output, (*wake, line.fileno())))
    if output is not None:
        output.close_writer()
    line.send(json.dumps({"started": child}).encode())
    memory, next_look, ends = TreeMemory(), 0.0, time.monotonic() + time_limit_s
    ended: Ended | None = None
    while ended is None:
        waiting: list[Any] = [wake[0], line]
        if output is not None and output.open:
            waiting.append(output)
        readable = select.select(waiting, [], [], _LOOK_S)[0]
        if output is not None and output in readable:
            output.drain()
        if wake[0] in readable:
            os.read(wake[0], 512)
            for orphan in children_of(keeper):
                if orphan != child:
                    os.waitpid(orphan, os.WNOHANG)
        now, used_bytes = time.monotonic(), None
        if now >= next_look:
            next_look = now + _LOOK_S
            used_bytes = memory.beyond(descendants_of(keeper), memory_limit_bytes)
        if (code := _exit_code(child)) is not None:
            ended = Ended(code)
        elif line in readable or os.getppid() != parent:
            ended = Ended(None)
        elif now >= ends:
            ended = Ended(None, TIME)
        elif used_bytes is not None:
            ended = Ended(None, MEMORY, used_bytes)
    if ended.code is None:
        _kill_session(child)
    left, stayed = end_below(keeper, group)
    if output is not None:
        output.drain()
        ended = ended._replace(output=output.text())
    return ended._replace(left=left, stayed=stayed)


def _ignore_signals() -> None:
    for number in _ENDED_BY_OTHERS:
        signal.signal(number, signal.SIG_IGN)


def wakes_on_exit() -> tuple[int, int]:
    """Return a pipe that becomes readable when a child ends; ignore signals that other processes handle."""
    _ignore_signals()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up byte to be written
    return wake_read, wake_write


def _begin_child(
    body: Callable[[], None],
    keeper: int,
    group: ControlGroup | None,
    output: ChildOutput | None,
    others: tuple[int, ...],
) -> None:
    signal.set_wakeup_fd(-1)
    for ignored in (signal.SIGCHLD, *_ENDED_BY_OTHERS):
        signal.signal(ignored, signal.SIG_DFL)
    os.setsid()  # a signal to its own process group must not reach the keeper and the server
    die_with_parent(keeper)
    if group is not None:
        group.enter()
    if output is None:
        os.dup2(2, 1)  # its output must not mix with the caller's
    else:
        for number in (1, 2):
            os.dup2(output.writer, number)
        others = (*others, output.reader, output.writer)
    for descriptor in others:
        os.close(descriptor)
    body()


def _exit_code(child: int) -> int | None:
    """Return the exit code of a child that has ended. It stays a zombie: its id must not be used again."""
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _kill_session(child: int) -> None:
    """Kill a child and its process group, even if it has left the group, and wait until it has ended."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty; gVisor returns EPERM
            kill(child, signal.SIGKILL)
    give_up = time.monotonic() + _END_S
    while _exit_code(child) is None and time.monotonic() < give_up:
        time.sleep(_PAUSE_S)


PACKET_BYTES = 1 << 20
_GRACE_S = 10.0  # for keepers to end by themselves
_CALLER_LOOK_S = 1.0  # period of checks that the caller still exists


def run_server(control: int, folder_base: str, prepare: Callable[[], Any]) -> None:
    """Serve until the caller is gone, then end the process. The main function of a server's process.

    Args:
        control: Descriptor of the control socket.
        folder_base: Where to make a folder that lives as long as the server and that its hello names; empty for none.
        prepare: Imports modules that children need, and returns further values of the hello.
    """
    os.set_inheritable(control, False)
    caller = os.getppid()
    _ignore_signals()  # also while it imports
    hello = prepare() or {}
    with socket.socket(fileno=control) as channel:
        try:
            with kept_folder(folder_base) if folder_base else contextlib.nullcontext() as folder:
                serve(channel, hello if folder is None else {**hello, "folder": folder}, caller)
        except OSError as error:
            _tell(channel, {"problem": str(error)})
    os._exit(0)  # torch's normal exit takes a second, and nothing is left to write


def serve(control: socket.socket, hello: dict[str, Any], caller: int) -> None:
    """Fork a keeper for each request until the caller is gone; then end everything below this process.

    Call it on the main thread of a process without other threads.
    """
    wake = wakes_on_exit()
    become_subreaper()
    _tell(control, {"hello": hello})
    gc.collect()
    gc.freeze()  # never collect the current objects: children then do not copy their pages
    server = os.getpid()
    lines: dict[int, socket.socket] = {}
    while os.getppid() == caller:  # the socket is not enough: a process forked from the caller may hold it open
        waiting: list[Any] = [control, wake[0]]
        readable = select.select(waiting, [], [], _CALLER_LOOK_S)[0]
        if wake[0] in readable:
            os.read(wake[0], 512)
            _reap(lines)
        if control not in readable:
            continue
        packet, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 2)
        if not packet:
            break
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # programs that a child runs must not inherit it
        line, *channels = descriptors
        wanted = json.loads(packet)
        for module in wanted["imports"]:
            importlib.import_module(module)
        try:
            keeper = os.fork()
        except OSError as error:
            with socket.socket(fileno=line) as to_caller:
                _tell(to_caller, {"problem": f"no process can be started: {error.strerror}"})
        else:
            if not keeper:
                for end in (control, *lines.values()):
                    end.close()
                for descriptor in wake:
                    os.close(descriptor)
                run_as_child(functools.partial(_keep, server, wanted, line, channels))
            lines[keeper] = socket.socket(fileno=line)
        for descriptor in channels:
            os.close(descriptor)
    for end in lines.values():
        end.shutdown(socket.SHUT_RD)  # the keeper then ends its child and deletes the child's folder
    give_up = time.monotonic() + _GRACE_S
    while lines and time.monotonic() < give_up:
        if select.select([wake[0]], [], [], _GRACE_S)[0]:
            os.read(wake[0], 512)
            _reap(lines)
    end_below(server)


def _reap(lines: dict[int, socket.socket]) -> None:
    """Close the lines of ended keepers; if a keeper was killed, end the processes that it kept."""
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            keeper, status = end
            line = lines.pop(keeper, None)
            if line is not None:
                if status:
                    end_below(os.getpid(), spared=tuple(lines))
                line.close()


def _keep(server: int, wanted: dict[str, Any], line: int, channels: list[int]) -> None:
    """Keep one child. The body of a keeper's process."""
    output = ChildOutput() if wanted["keeps_output"] else None
    with (
        socket.socket(fileno=line) as to_caller,
        kept_folder(tempfile.gettempdir()) if wanted["has_folder"] else contextlib.nullcontext() as folder,
    ):
        ended = keep(
            lambda: _run(wanted, folder, channels),
            to_caller,
            server,
            time_limit_s=wanted["time_limit_s"],
            memory_limit_bytes=wanted["memory_limit_bytes"],
            output=output,
        )
        _tell(to_caller, ended._asdict())


def _run(wanted: dict[str, Any], folder: str | None, channels: list[int]) -> None:
    if folder is not None:  # for all temporary files; the keeper deletes it
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    pkgutil.resolve_name(wanted["function"])(wanted["arguments"], *channels)


def _tell(to: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the caller is gone
        to.send(json.dumps(message).encode())
