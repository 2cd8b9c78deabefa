"""Runs functions and programs as children within limits, through a server. Start reading at `ChildServer`."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from conf.children.keeper import PACKET_BYTES, ChildOutput, Ended, receive
from conf.errors import EnvironmentProblem

_ROOT = Path(__file__).parents[2]  # the folder of this project's packages
_START_TIMEOUT_S = 120.0  # importing torch from a cold disk is slow
_ANSWER_TIMEOUT_S = 30.0  # a fork takes milliseconds; a machine that swaps takes seconds
_CLOSE_TIMEOUT_S = 15.0
_PART_BYTES = 1 << 16


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
                handed_over = [end.fileno() for end in (theirs, channel) if end is not None]
                socket.send_fds(self._control, [packet], handed_over)
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
            while part := receive(ours, _PART_BYTES):
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
