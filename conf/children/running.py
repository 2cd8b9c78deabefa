"""Runs functions and programs as children within limits, and ends them with everything that they start.

Start reading at `ChildServer`, the caller's side. `serve` is the server: a small single-threaded process, which imports
slow modules such as torch once, so that a child starts within milliseconds. It forks a keeper for each child (`keep`).
The keeper is a subreaper: a process below it, in any session, group or environment, becomes the keeper's child when its
own parent ends. The keeper can therefore end all of them when the child ends, reaches a limit, or is no longer wanted.
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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from conf.children.containment import (
    END_S,
    PAUSE_S,
    ControlGroup,
    TreeMemory,
    become_subreaper,
    children_of,
    descendants_of,
    die_with_parent,
    end_below,
    run_as_child,
)
from conf.errors import EnvironmentProblem, left_out
from conf.files.identity import identity
from conf.files.own_folders import kept_folder

_ROOT = Path(__file__).parents[2]  # the folder of this project's packages
_START_TIMEOUT_S = 120.0  # importing torch from a cold disk is slow
_ANSWER_TIMEOUT_S = 30.0  # a fork takes milliseconds; a machine that swaps takes seconds
_CLOSE_TIMEOUT_S = 15.0
_CHUNK_BYTES = 1 << 16


class ServerLost(EnvironmentProblem):
    """The server died or did not answer; the child did not cause it."""


@dataclass(eq=False)
class Child:
    """A running child: its process, and the line to its keeper."""

    pid: int
    line: socket.socket
    ended: Ended | None = None
    _unwanted: bool = False

    def fileno(self) -> int:
        return self.line.fileno()

    def end(self) -> None:
        """Ask to end the child with all that it started; `has_ended` tells when that is done."""
        self._unwanted = True
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)

    def has_ended(self) -> bool:
        """Read once from the line; return True at its end. Then `ended` is set, and no process is left.

        Raises `ServerLost` if the keeper or the server was killed.
        """
        if packet := receive(self.line, PACKET_BYTES):
            self.ended = Ended(**json.loads(packet))
            return False
        self.line.close()
        if self.ended is None or (self.ended.code is None and self.ended.limit is None and not self._unwanted):
            raise ServerLost("a child process was lost: its keeper was killed")
        return True

    def wait(self, timeout_s: float | None = None) -> Ended:
        """Wait until the child and all that it started have ended. Raises `ServerLost`, also after `timeout_s`."""
        self.line.settimeout(timeout_s)
        try:
            while not self.has_ended():
                pass
        except TimeoutError as error:
            raise ServerLost(f"it did not end within {timeout_s} s") from error
        assert self.ended is not None
        return self.ended


class ChildServer:
    """One server process; a context manager. Several threads may start children. `close` ends everything.

    Args:
        command: Starts the server; the descriptor of its control socket is added.
        environment: Environment of the server and its children; None: this process's.
        keeps_output: Whether to keep its output for the message of `ServerLost` rather than to print it.
    """

    name = "the server of child processes"

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, keeps_output: bool = False
    ) -> None:
        self._hello: dict[str, Any] | None = None
        self._greeting = threading.Lock()  # for the hello, which comes once
        self._output = ChildOutput() if keeps_output else None
        writer = None if self._output is None else self._output.writer
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    env=environment,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=writer,
                    stderr=writer,
                    start_new_session=True,  # only this process handles Ctrl-C in the terminal
                )
            except OSError as error:
                raise EnvironmentProblem(f"no child process can be started: {error}") from error
        if self._output is not None:
            self._output.close_writer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Return the server's process id; waits until the server is ready."""
        self.hello()
        return self._process.pid

    @property
    def folder(self) -> Path:
        """Return the folder that it made for its caller; waits until the server is ready."""
        return Path(self.hello()["folder"])

    def lives(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def hello(self) -> dict[str, Any]:
        """Wait until the server is ready; return its hello. Raises `ServerLost` with the server's output."""
        with self._greeting:
            if self._hello is None:
                try:
                    message = self._answer(self._control, _START_TIMEOUT_S)
                except OSError as error:  # of `close` in another thread
                    raise ServerLost(f"{self.name} was closed") from error
                if "problem" in message:
                    raise EnvironmentProblem(f"no child process can be run: {message['problem']}")
                self._hello = message["hello"]
            return self._hello

    def start(
        self,
        function: str,
        arguments: Any,
        channel: socket.socket | None = None,
        *,
        time_limit_s: float = math.inf,
        memory_limit_bytes: float = math.inf,
        keeps_output: bool = True,
        has_folder: bool = False,
        imports: Sequence[str] = (),
    ) -> Child:
        """Start a child. Raises `ServerLost`.

        Args:
            function: `module:function`, called with `arguments`, a JSON value, and the channel's descriptor.
            channel: A socket for the child.
            time_limit_s: Seconds after which it is ended.
            memory_limit_bytes: Memory of all of its processes beyond which they are ended.
            keeps_output: Whether its output goes into `Ended` rather than to the server's output.
            has_folder: Whether it gets its own folder for temporary files, which is deleted at its end.
            imports: Modules that the server imports, for this child and later ones.
        """
        self.hello()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wanted = {
            "function": function,
            "arguments": arguments,
            "time_limit_s": time_limit_s,
            "memory_limit_bytes": memory_limit_bytes,
            "keeps_output": keeps_output,
            "has_folder": has_folder,
            "imports": list(imports),
        }
        packet = json.dumps(wanted).encode()
        assert len(packet) < PACKET_BYTES
        try:
            with theirs:
                socket.send_fds(self._control, [packet], [end.fileno() for end in (theirs, channel) if end is not None])
            answer = self._answer(ours, _ANSWER_TIMEOUT_S)
            if "problem" in answer:
                raise ServerLost(f"{self.name}: {answer['problem']}")
            return Child(answer["started"], ours)
        except OSError as error:
            ours.close()
            raise ServerLost(f"{self.name} is gone: {error}{self.output_suffix()}") from error
        except ServerLost:
            ours.close()
            raise

    def ask(
        self,
        function: str,
        arguments: Any,
        question: bytes,
        *,
        time_limit_s: float = math.inf,
        memory_limit_bytes: float = math.inf,
        has_folder: bool = False,
    ) -> tuple[bytes, Ended | None]:
        """Send a question to a child; return its answer and how it ended, None if its keeper or the server was killed.

        The child reads the question to its end before it answers. The other arguments are those of `start`. Raises
        `ServerLost` if the child cannot be started.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                child = self.start(
                    function,
                    arguments,
                    theirs,
                    time_limit_s=time_limit_s,
                    memory_limit_bytes=memory_limit_bytes,
                    has_folder=has_folder,
                )
            with contextlib.suppress(OSError):  # the child has ended; its line says how
                ours.sendall(question)
                ours.shutdown(socket.SHUT_WR)
            written = bytearray()
            while part := receive(ours, _CHUNK_BYTES):
                written += part
            try:
                return bytes(written), child.wait()
            except ServerLost:
                return bytes(written), None

    def close(self) -> None:
        """End the server and all processes under it, also while another thread waits for its hello."""
        if self._hello is None:
            self._process.kill()  # it has no children, and would not notice before its imports are done
        with contextlib.suppress(OSError):  # another process forked from this one may hold the socket open
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(timeout=_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its keepers notice, and end their children
            self._process.wait()
        if self._output is not None:
            self._output.close()
            self._output = None

    def output_suffix(self) -> str:
        """Return the server's output, as the end of a message."""
        if self._output is None:
            return ""
        self._output.drain()
        text = self._output.text().strip()
        return f"; it said:\n{text}" if text else ""

    def _answer(self, source: socket.socket, timeout_s: float) -> dict[str, Any]:
        source.settimeout(timeout_s)
        try:
            packet = receive(source, PACKET_BYTES)
        except TimeoutError as error:
            raise ServerLost(f"{self.name} did not answer within {timeout_s:.0f} s{self.output_suffix()}") from error
        if not packet:
            raise ServerLost(f"{self.name} died{self.output_suffix()}")
        message: dict[str, Any] = json.loads(packet)
        return message


def local_server(
    prepare: str,
    environment: Mapping[str, str] | None = None,
    *,
    has_folder: bool = False,
    python: str | Path = sys.executable,
    code: Path = _ROOT,
    keeps_output: bool = False,
) -> ChildServer:
    """Return a server that runs from this project's own files.

    Args:
        prepare: `module:function` that imports modules for children; empty for none.
        environment: Environment of the server and its children; None: this process's.
        has_folder: Whether it makes a folder for its caller, which lives as long as the server.
        python: The Python that runs it.
        code: Folder of this project's packages; other packages there would hide those of `python`.
        keeps_output: As in `ChildServer`.
    """
    folder_base = tempfile.gettempdir() if has_folder else ""
    command = [str(python), str(code / "conf/children/__main__.py"), prepare, folder_base]
    return ChildServer(command, environment, keeps_output=keeps_output)


# ---- the server and the keepers

_HEAD_BYTES, _TAIL_BYTES = 2000, 4000
_DRAIN_CHUNKS = 64  # most chunks to read at once, because other work waits meanwhile
_LOOK_S = 0.1
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
    give_up = time.monotonic() + END_S
    while _exit_code(child) is None and time.monotonic() < give_up:
        time.sleep(PAUSE_S)


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
            if (line := lines.pop(keeper, None)) is not None:
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
