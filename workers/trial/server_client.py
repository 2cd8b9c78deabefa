"""The worker's side of a trial server: starts it, sends it trials, reads their reports, kills it.

Start reading at `TrialServer.start_trial`. A server that dies or stops answering raises `ServerLost`; the caller starts
another.

`MpsDaemon` is CUDA's multi-process service (MPS), started for one worker's GPU and ended with its trial server. Under
MPS kernels of several processes run side by side; without it they take turns. The service comes with the driver:
NVIDIA's program `nvidia-cuda-mps-control`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.children.keeper import MEMORY, Ended, receive
from conf.children.running import Child, ChildServer, ServerLost
from conf.files.identity import OWNER_FILE, identity
from conf.plain_text import safe_text
from workers.trial.reports import BROKEN, ReportReader, TrialExit
from workers.trial.trial_server import modules_of_trace

__all__ = ["RunningTrial", "ServerLost", "TrialServer"]

# Key of a trial server's environment: the Python that executes it; without it, this process's own.
PYTHON_VARIABLE = "GPUFARM_TRIAL_PYTHON"
_ANSWER_TIMEOUT_S = 30.0  # for a killed trial to end
_GOODBYE_S = 30.0  # for a trial to end after its last report: giving back its memory may take long
_RECEIVE_BYTES = 1 << 18
_READS_AFTER_EXIT = 64  # more than a socket holds: beyond it, a process that could not be killed is still writing
_PROGRAM = "nvidia-cuda-mps-control"
_PATIENCE_S = 20.0
# Of the temporary folder, which `farm.queue.leftovers` deletes where its process is dead. Short: it holds sockets.
FOLDER_PREFIX = "gpufarm-trial-mps-"


@dataclass
class RunningTrial:
    """A trial in flight: its process, and the socket on which it reports."""

    child: Child
    channel: socket.socket
    memory_limit_mib: float
    reader: ReportReader = field(default_factory=ReportReader)
    broken: bool = False  # it broke the rules of its socket, and is killed
    leave_by_ns: int | None = None  # monotonic; set it, and a trial that is still there then is killed

    @property
    def pid(self) -> int:
        return self.child.pid

    def close(self) -> None:
        """Close the sockets to it."""
        self.channel.close()
        self.child.line.close()

    def outgrew_memory(self) -> bool:
        """Return whether the trial was ended at its memory limit, by what has come from its keeper; never waits."""
        while self.child.ended is None and select.select([self.child], [], [], 0)[0]:
            self.child.has_ended()
        return self.child.ended is not None and self.child.ended.limit == MEMORY

    def exit_of(self, ended: Ended, timed_out: bool) -> TrialExit:
        """Return how the trial ended."""
        killed_for = None
        if ended.used_bytes is not None:
            limit = f"trial.host_memory_limit_mib={self.memory_limit_mib:.0f}"
            killed_for = f"its {ended.used_bytes / 2**20:.0f} MiB of host memory exceed {limit}"
        return TrialExit(
            code=ended.code,
            timed_out=timed_out,
            killed_for=killed_for,
            output=safe_text(ended.output).strip(),
            left=ended.left,
            stayed=ended.stayed,
        )


class TrialServer(ChildServer):
    """One trial server process. Use from one thread; `close` is safe at any time."""

    name = "the trial server"

    def __init__(self, environment: dict[str, str]) -> None:
        """Execute the server with `environment` added to ours. Returns at once; `hello` waits for the server."""
        python = environment.get(PYTHON_VARIABLE, sys.executable)
        # NumPy's OpenBLAS would start threads at import, and a process that forks must have one only.
        variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment}
        super().__init__([python, "-m", "workers.trial.trial_server"], variables, keeps_output=True)

    def start_trial(
        self, trial: dict[str, Any], reader: ReportReader | None = None, memory_limit_mib: float = float("inf")
    ) -> RunningTrial:
        """Fork a child for `trial` (a JSON-able mapping, see `body.run_trial`); `reader` reads its reports.

        With `trial["ahead"]` it gets ready and waits; `tell(trial, "go")` lets it run. Beyond `memory_limit_mib`
        of host memory it is ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                child = self.start(
                    "workers.trial.trial_server:run",
                    trial,
                    theirs,
                    memory_limit_bytes=memory_limit_mib * 2**20,
                    imports=modules_of_trace(trial["config"]),
                )
        except BaseException:
            ours.close()
            raise
        return RunningTrial(child, ours, memory_limit_mib, reader or ReportReader())

    def events(self, trial: RunningTrial, deadline_ns: int, tick_s: float) -> Iterator[str | TrialExit | None]:
        """Yield the names of the trial's recorded events, None at least every `tick_s`, and last its `TrialExit`.

        At `deadline_ns` or `trial.leave_by_ns` (monotonic), or when a report was broken, it is killed with all that it
        started. So is any that has not ended half a minute after `bye`.
        """
        channel_open, over, killed, timed_out, reads_after_exit = True, False, False, False, 0
        next_tick_ns = time.monotonic_ns()
        while True:
            now_ns = time.monotonic_ns()
            if not killed and trial.leave_by_ns is not None:
                deadline_ns = min(deadline_ns, trial.leave_by_ns)
            overdue = now_ns >= deadline_ns
            if not killed and (trial.broken or overdue):
                killed, timed_out = True, overdue
                trial.child.end()
                deadline_ns = now_ns + int(_ANSWER_TIMEOUT_S * 1e9)
            elif killed and overdue and not over:
                raise ServerLost("a killed trial did not end")
            if now_ns >= next_tick_ns:  # also while the trial talks without a pause
                next_tick_ns = now_ns + int(tick_s * 1e9)
                yield None
            waiting: list[Any] = [*([trial.channel] if channel_open else []), *([] if over else [trial.child])]
            timeout_s = max(0.0, (min(next_tick_ns, deadline_ns) - time.monotonic_ns()) / 1e9)
            readable = select.select(waiting, [], [], 0.0 if over else timeout_s)[0]
            if channel_open and trial.channel in readable:
                data = receive(trial.channel, _RECEIVE_BYTES)
                reads_after_exit += over
                channel_open = bool(data) and reads_after_exit < _READS_AFTER_EXIT
                for event in trial.reader.feed(data):  # the trial's reports come before its exit
                    trial.broken = event == BROKEN
                    yield event
            elif trial.child in readable:
                over = self._has_ended(trial.child)
            elif over:
                assert trial.child.ended is not None
                yield trial.exit_of(trial.child.ended, timed_out)
                return

    def tell(self, trial: RunningTrial, word: str) -> None:
        """Send `go`, `steady`, `open` or `bye` to a trial (see `body`); no effect on one that has ended."""
        if word == "bye":
            trial.leave_by_ns = time.monotonic_ns() + int(_GOODBYE_S * 1e9)
        with contextlib.suppress(OSError):
            trial.channel.sendall(word.encode() + b"\n")

    def discard(self, trial: RunningTrial) -> None:
        """Kill a prepared trial that is not needed, and wait until it is gone. Raises `ServerLost`."""
        trial.child.end()
        try:
            trial.child.wait(_ANSWER_TIMEOUT_S)
        finally:
            trial.close()

    def _has_ended(self, child: Child) -> bool:
        try:
            return child.has_ended()
        except ServerLost as lost:
            raise ServerLost(f"{lost}{self.output_suffix()}") from lost


class MpsUnavailable(RuntimeError):
    """The service cannot be started here; the message has the reason."""


class MpsDaemon:
    """The control daemon of one GPU, with folders of its own; its server starts with the first trial.

    It carries this process's environment, by whose marker the next dispatcher ends it where this one was killed.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it with `environment` added to ours, which names the GPU. Raises `MpsUnavailable`."""
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        home = Path(self._folder.name)
        (home / OWNER_FILE).write_text(identity(os.getpid()))
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(home / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(home / "log")}
        for folder in self.environment.values():
            os.mkdir(folder)
        self._surroundings = {**os.environ, **environment, **self.environment}
        try:
            self._run(["-d"], "")
        except MpsUnavailable:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        """End the service and what runs under it."""
        with contextlib.suppress(MpsUnavailable):
            self._run([], "quit -t 1\n")
        self._folder.cleanup()

    def _run(self, arguments: list[str], words: str) -> None:
        output = Path(self._folder.name) / "control.log"  # no pipe, which a daemon would hold open
        try:
            with open(output, "wb") as log:
                completed = subprocess.run(
                    [_PROGRAM, *arguments],
                    input=words.encode(),
                    env=self._surroundings,
                    timeout=_PATIENCE_S,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    check=False,
                )
        except FileNotFoundError:
            raise MpsUnavailable(f"{_PROGRAM} is not installed; it comes with NVIDIA's driver") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsUnavailable(f"{_PROGRAM}: {error}") from error
        if completed.returncode:
            text = output.read_text(errors="replace").strip() or "no output"
            raise MpsUnavailable(f"{_PROGRAM} ended with code {completed.returncode}: {text[:500]}")
