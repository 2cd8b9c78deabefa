"""The worker's end of a trial server: start it, hand it a trial, read the trial's events, kill it.

Start reading at `TrialServer.start`. A server that dies or stops answering raises
`ServerLost`; the caller starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.trial_server import PACKET_BYTES, trial_log

# Key of a trial server's environment: the Python that executes it; without it, this process's own.
PYTHON_VARIABLE = "GPUFARM_TRIAL_PYTHON"
_START_TIMEOUT_S = 120.0  # importing torch from a cold disk takes long
_ANSWER_TIMEOUT_S = 30.0  # a fork takes milliseconds; a machine that swaps takes seconds
_LOG_TAIL_BYTES = 4000


class ServerLost(RuntimeError):
    """The trial server died or did not answer: not the trial's fault, the task should be tried again."""


@dataclass
class TrialExit:
    """How a trial's process ended. `code` for a normal exit, `signal` for a killed one; both None while it runs."""

    code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    killed_for: str | None = None  # why the worker killed it, other than the deadline
    log_tail: str = ""


@dataclass
class RunningTrial:
    """A trial in flight: its process group leader and the socket on which it reports."""

    pid: int
    channel: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    kill_reason: str | None = None


class TrialServer:
    """One trial server process. Use from one thread; `close` is safe at any time."""

    def __init__(self, environment: dict[str, str]):
        """Execute the server with `environment` added to ours; returns at once, `hello` waits for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder = tempfile.TemporaryDirectory(prefix="gpufarm-trial-")
        self._exited: dict[int, dict[str, Any]] = {}  # pid -> its exit, told while another trial was looked at
        self._server_log_path = Path(self._folder.name) / "server.log"
        self._control = ours
        self._hello: dict[str, Any] | None = None
        with open(self._server_log_path, "wb") as log, theirs:
            python = environment.get(PYTHON_VARIABLE, sys.executable)
            self._process = subprocess.Popen(
                [python, "-m", "workers.trial_server", str(theirs.fileno()), self._folder.name],
                # NumPy's OpenBLAS would start threads at import, and a process that forks must have one only.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is the dispatcher's to handle
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hello(self) -> dict[str, Any]:
        """The software environment, once torch is imported. Raises `ServerLost` with the server's own words."""
        if self._hello is None:
            self._hello = self._receive(_START_TIMEOUT_S)["hello"]
        return self._hello

    def start(self, trial: dict[str, Any]) -> RunningTrial:
        """Fork a child for `trial` (a JSON-able mapping, see `workers.trial.run_trial`).

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
                self._exited[message["exited"]] = message  # of the other trial
            return RunningTrial(message["started"], ours)
        except OSError as error:
            ours.close()
            raise ServerLost(f"the trial server is gone: {error}{self._server_words()}") from error
        except ServerLost:
            ours.close()
            raise

    def events(
        self, trial: RunningTrial, deadline_ns: int, tick_s: float
    ) -> Iterator[dict[str, Any] | TrialExit | None]:
        """Yield the trial's events as they come, None at least every `tick_s`, and last its `TrialExit`.

        At `deadline_ns` (monotonic), or when `trial.kill_reason` has been set, its whole process group is killed.
        """
        channel_open, killed, timed_out = True, False, False
        exited: dict[str, Any] | None = None
        next_tick_ns = time.monotonic_ns()
        while True:
            exited = exited or self._exited.pop(trial.pid, None)  # told while the caller dealt with the other trial
            now_ns = time.monotonic_ns()
            if not killed and (trial.kill_reason is not None or now_ns >= deadline_ns):
                killed, timed_out = True, trial.kill_reason is None
                self._send({"kill": trial.pid})
                deadline_ns = now_ns + int(_ANSWER_TIMEOUT_S * 1e9)
            elif killed and now_ns >= deadline_ns:
                raise ServerLost("a killed trial did not end")
            if now_ns >= next_tick_ns:  # also while the trial talks without a pause
                next_tick_ns = now_ns + int(tick_s * 1e9)
                yield None
            waiting = [self._control, trial.channel] if channel_open else [self._control]
            timeout_s = max(0.0, (min(next_tick_ns, deadline_ns) - time.monotonic_ns()) / 1e9)
            readable, _, _ = select.select(waiting, [], [], 0.0 if exited else timeout_s)
            if channel_open and trial.channel in readable:
                events, channel_open = self._read_events(trial)
                yield from events  # what the trial said comes before how it ended
            elif exited:
                yield TrialExit(
                    code=exited["code"],
                    signal=exited["signal"],
                    timed_out=timed_out,
                    killed_for=trial.kill_reason,
                    log_tail=self._take_log(trial.pid),
                )
                return
            elif self._control in readable:
                message = self._receive(_ANSWER_TIMEOUT_S)
                if message["exited"] == trial.pid:
                    exited = message
                else:
                    self._exited[message["exited"]] = message

    def tell(self, trial: RunningTrial, word: str) -> None:
        """Say `go`, `steady` or `bye` to a trial (see `workers.trial`); one that has ended does not hear it."""
        with contextlib.suppress(OSError):
            trial.channel.sendall(word.encode() + b"\n")

    def discard(self, trial: RunningTrial) -> None:
        """Kill a trial that was made ready and is not wanted, and wait until it is gone. Raises `ServerLost`."""
        trial.channel.close()
        self._send({"kill": trial.pid})
        while trial.pid not in self._exited:
            message = self._receive(_ANSWER_TIMEOUT_S)
            self._exited[message["exited"]] = message
        del self._exited[trial.pid]
        self._take_log(trial.pid)

    def close(self) -> None:
        """End the server and whatever runs under it."""
        self._control.close()  # the server kills its trial when it reads the end of file
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a trial dies with it (parent-death signal)
            self._process.wait()
        self._folder.cleanup()

    def _read_events(self, trial: RunningTrial) -> tuple[list[dict[str, Any]], bool]:
        try:
            data = trial.channel.recv(PACKET_BYTES)
        except ConnectionResetError:
            data = b""
        trial.buffer += data
        *lines, rest = trial.buffer.split(b"\n")
        trial.buffer = bytearray(rest)  # a killed trial may leave half a line: it is never an event
        return [json.loads(line) for line in lines], bool(data)

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
        return json.loads(packet)

    def _server_words(self) -> str:
        tail = _tail(self._server_log_path)
        return f"; it said:\n{tail}" if tail else ""

    def _take_log(self, pid: int) -> str:
        """The end of a trial's output; the log goes."""
        path = Path(trial_log(self._folder.name, pid))
        tail = _tail(path)
        path.unlink(missing_ok=True)
        return tail


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
