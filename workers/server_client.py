"""The worker's side of a trial server: starts it, sends it trials, reads their reports, kills it.

Start reading at `TrialServer.start`. A server that dies or stops answering raises
`ServerLost`; the caller starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.identity import OWNER_FILE, identity
from workers.reports import BrokenReport, Report, ReportReader
from workers.safe_text import quoted, safe_text
from workers.trial_server import PACKET_BYTES

# Key of a trial server's environment: the Python that executes it; without it, this process's own.
PYTHON_VARIABLE = "GPUFARM_TRIAL_PYTHON"
_START_TIMEOUT_S = 120.0  # importing torch from a cold disk takes long
_ANSWER_TIMEOUT_S = 30.0  # a fork takes milliseconds; a machine that swaps takes seconds
_GOODBYE_S = 30.0  # for a trial to end after its last report: giving back its memory may take long
_CLOSE_TIMEOUT_S = 15.0  # the keeper gives the server ten seconds
_LOG_TAIL_BYTES = 4000
_RECEIVE_BYTES = 1 << 18
_READS_AFTER_EXIT = 64  # more than a socket holds: beyond it, a process that could not be killed is still writing
_EXIT_KEYS = {"exited", "code", "signal", "output", "left", "stayed"}


class ServerLost(RuntimeError):
    """The trial server died or did not answer. The trial is not at fault, so the task should be tried again."""


@dataclass
class TrialExit:
    """The end of a trial's process: `code` of a normal exit, `signal` of a kill; both None while it runs."""

    code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    killed_for: str | None = None  # why the worker killed it, other than the deadline
    output: str = ""  # of its standard output and error: the beginning and the end
    left: int = 0  # processes that it left behind and that had to be killed
    stayed: int = 0  # those of them that could not be


@dataclass
class RunningTrial:
    """A trial in flight: its process group leader, and the socket on which it reports."""

    pid: int
    channel: socket.socket
    reader: ReportReader = field(default_factory=ReportReader)
    kill_reason: str | None = None  # memory that it may not have: set it, and the trial is killed
    broken: bool = False  # it broke the rules of its socket, and is killed
    leave_by_ns: int | None = None  # monotonic; set it, and a trial that is still there then is killed


class TrialServer:
    """One trial server process. Use from one thread; `close` is safe at any time."""

    def __init__(self, environment: dict[str, str]):
        """Execute the server with `environment` added to ours. Returns at once; `hello` waits for the server."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = tempfile.TemporaryDirectory(prefix="gpufarm-trial-")
        self._exited: dict[int, dict[str, Any]] = {}  # pid -> its exit, received while waiting for another trial
        Path(self._folder.name, OWNER_FILE).write_text(identity(os.getpid()))
        self._server_log_path = Path(self._folder.name) / "server.log"
        self._control = ours
        self._hello: dict[str, Any] | None = None
        self._pid: int | None = None
        self._line: int | None
        line, self._line = os.pipe()  # closing it signals this process's end to the keeper
        with open(self._server_log_path, "wb") as log, theirs:
            python = environment.get(PYTHON_VARIABLE, sys.executable)
            self._process = subprocess.Popen(
                [python, "-m", "workers.keeper", str(line), str(theirs.fileno())],
                # NumPy's OpenBLAS would start threads at import, and a process that forks must have one only.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment},
                pass_fds=(line, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is the dispatcher's to handle
            )
        os.close(line)

    @property
    def pid(self) -> int:
        """Return the server's process id; waits until the server is ready."""
        self.hello()
        assert self._pid is not None
        return self._pid

    def hello(self) -> dict[str, Any]:
        """Return the software environment, once torch is imported. Raises `ServerLost` with the server's output."""
        if self._hello is None:
            message = self._receive(_START_TIMEOUT_S)
            if not {"hello", "pid"} <= message.keys():
                raise ServerLost(f"the trial server sent an invalid message: {quoted(json.dumps(message))}")
            self._hello, self._pid = message["hello"], message["pid"]
        return self._hello

    def start(self, trial: dict[str, Any], reader: ReportReader | None = None) -> RunningTrial:
        """Fork a child for `trial` (a JSON-able mapping, see `workers.trial.run_trial`); `reader` reads its reports.

        With `trial["ahead"]` it gets itself ready and waits; `tell(trial, "go")` lets it run.
        """
        self.hello()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        packet = json.dumps({"run": trial}).encode()
        assert len(packet) < PACKET_BYTES
        try:
            with theirs:
                socket.send_fds(self._control, [packet], [theirs.fileno()])
            while "started" not in (message := self._receive(_ANSWER_TIMEOUT_S)):
                self._note_exit(message)  # of the other trial
            return RunningTrial(message["started"], ours, reader or ReportReader())
        except OSError as error:
            ours.close()
            raise ServerLost(f"the trial server is gone: {error}{self._server_words()}") from error
        except ServerLost:
            ours.close()
            raise

    def events(self, trial: RunningTrial, deadline_ns: int, tick_s: float) -> Iterator[Report | TrialExit | None]:
        """Yield the trial's reports as they come, None at least every `tick_s`, and last its `TrialExit`.

        At `deadline_ns` or `trial.leave_by_ns` (monotonic), when `trial.kill_reason` has been set or a report was
        broken, its whole process group is killed. So is what has not ended half a minute after it was told `bye`.
        """
        channel_open, killed, timed_out, reads_after_exit = True, False, False, 0
        next_tick_ns = time.monotonic_ns()
        while True:
            exited = self._exited.get(trial.pid)  # it may have arrived while the caller handled the other trial
            now_ns = time.monotonic_ns()
            if not killed and trial.leave_by_ns is not None:
                deadline_ns = min(deadline_ns, trial.leave_by_ns)
            overdue = now_ns >= deadline_ns
            if not killed and (trial.kill_reason is not None or trial.broken or overdue):
                killed, timed_out = True, overdue and trial.kill_reason is None
                self._send({"kill": trial.pid})
                deadline_ns = now_ns + int(_ANSWER_TIMEOUT_S * 1e9)
            elif killed and overdue and not exited:
                raise ServerLost("a killed trial did not end")
            if now_ns >= next_tick_ns:  # also while the trial talks without a pause
                next_tick_ns = now_ns + int(tick_s * 1e9)
                yield None
            waiting = [self._control, trial.channel] if channel_open else [self._control]
            timeout_s = max(0.0, (min(next_tick_ns, deadline_ns) - time.monotonic_ns()) / 1e9)
            readable, _, _ = select.select(waiting, [], [], 0.0 if exited else timeout_s)
            if channel_open and trial.channel in readable:
                reports, channel_open = self._read_reports(trial)
                reads_after_exit += exited is not None
                channel_open &= reads_after_exit < _READS_AFTER_EXIT
                for report in reports:  # the trial's reports come before its exit
                    if isinstance(report, BrokenReport):
                        trial.broken = True
                    yield report
            elif exited:
                del self._exited[trial.pid]
                yield TrialExit(
                    code=exited["code"],
                    signal=exited["signal"],
                    timed_out=timed_out,
                    killed_for=trial.kill_reason,
                    output=exited["output"],
                    left=exited["left"],
                    stayed=exited["stayed"],
                )
                return
            elif self._control in readable:
                self._note_exit(self._receive(_ANSWER_TIMEOUT_S))

    def tell(self, trial: RunningTrial, word: str) -> None:
        """Send `go`, `steady`, `open` or `bye` to a trial (see `workers.trial`); no effect on one that has ended."""
        if word == "bye":
            trial.leave_by_ns = time.monotonic_ns() + int(_GOODBYE_S * 1e9)
        with contextlib.suppress(OSError):
            trial.channel.sendall(word.encode() + b"\n")

    def discard(self, trial: RunningTrial) -> None:
        """Kill a prepared trial that is not needed, and wait until it is gone. Raises `ServerLost`."""
        trial.channel.close()
        self._send({"kill": trial.pid})
        while trial.pid not in self._exited:
            self._note_exit(self._receive(_ANSWER_TIMEOUT_S))
        del self._exited[trial.pid]

    def close(self) -> None:
        """End the server and all processes under it."""
        if self._line is None:
            return
        line, self._line = self._line, None
        self._control.close()  # the server ends its trials when it reads the end of file, and then itself
        os.close(line)
        try:
            self._process.wait(timeout=_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._process.kill()  # the server sees it, and a trial dies with the server (parent-death signal)
            self._process.wait()
        self._folder.cleanup()

    def _note_exit(self, message: dict[str, Any]) -> None:
        if not message.keys() >= _EXIT_KEYS:
            raise ServerLost(f"the trial server sent an invalid message: {quoted(json.dumps(message))}")
        self._exited[message["exited"]] = message

    def _read_reports(self, trial: RunningTrial) -> tuple[list[Report], bool]:
        try:
            data = trial.channel.recv(_RECEIVE_BYTES)
        except ConnectionResetError:
            data = b""
        return trial.reader.feed(data), bool(data)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError as error:
            raise ServerLost(f"the trial server is gone: {error}{self._server_words()}") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        try:
            packet = self._control.recv(PACKET_BYTES)
        except TimeoutError as error:
            raise ServerLost(
                f"the trial server did not answer within {timeout_s:.0f} s{self._server_words()}"
            ) from error
        except OSError as error:
            raise ServerLost(f"the trial server is gone: {error}{self._server_words()}") from error
        if not packet:
            raise ServerLost(f"the trial server died{self._server_words()}")
        try:
            message = json.loads(packet)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ServerLost(f"the trial server sent an invalid message: {quoted(packet)}")
        return message

    def _server_words(self) -> str:
        tail = _tail(self._server_log_path)
        return f"; it said:\n{tail}" if tail else ""


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            return safe_text(log.read().decode(errors="replace")).strip()
    except FileNotFoundError:
        return ""
