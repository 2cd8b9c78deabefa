"""The worker's side of trials: their server, a running trial with its sensors, and its outcome.

Start reading at `RunningTrial`, which forks a trial, listens to it, and runs the sensors of its process and of each
rank. `Observed` (in `reports`) records both, and `outcome_of` derives the status. A server that dies or stops answering
raises `ServerLost`; the caller starts another.

`MpsDaemon` is CUDA's multi-process service (MPS), started for one worker's GPU and ended with its trial server. Under
MPS, kernels of several processes run side by side; without it they take turns. The service is part of the driver:
NVIDIA's program `nvidia-cuda-mps-control`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from conf.children.containment import descendants_of, line_of
from conf.children.running import MEMORY, ChildServer, Ended, ServerLost, receive
from conf.errors import OUTPUT_STARTS, safe_text
from conf.files.own_folders import delete_folder, make_folder
from workers.devices import Slot, TrialSettings
from workers.devices.steadiness import TargetFollower
from workers.telemetry.nvml import NvmlSensor
from workers.telemetry.sensors import Sensor, TelemetrySampler, WatchTarget, make_sensors
from workers.trial.body import is_device_fault
from workers.trial.reports import ENDINGS, READINGS_KEPT, Observed, ReportReader

# Key in a trial server's environment: the Python that executes it; default: this process's Python.
PYTHON_VARIABLE = "GPUFARM_TRIAL_PYTHON"
_ANSWER_TIMEOUT_S = 30.0  # for a killed trial to end
_GOODBYE_S = 30.0  # for a trial to end after its last report: freeing its memory may take long
_RECEIVE_BYTES = 1 << 18
_SIGNALS = {number.value: number.name for number in signal.Signals}  # real-time signals have no names
_READS_AFTER_EXIT = 64  # more than a socket buffers; beyond it, a surviving process of the trial is still writing
_PROGRAM = "nvidia-cuda-mps-control"
_PATIENCE_S = 20.0
_TREE_SOURCE = "process"  # source that reads the whole process tree of a trial with several ranks
_FOLDER_PREFIX = "gpufarm-trial-mps-"  # short, because the folder holds sockets


class TrialServer(ChildServer):
    """One trial server process. Use from one thread; `close` is safe at any time."""

    name = "the trial server"

    def __init__(self, environment: dict[str, str]) -> None:
        """Execute the server with `environment` added to this process's. Returns at once; `hello` waits for it."""
        python = environment.get(PYTHON_VARIABLE, sys.executable)
        # NumPy's OpenBLAS would start threads at import, but a process that forks must have a single thread.
        variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment}
        super().__init__([python, "-m", "workers.trial"], variables, keeps_output=True)


class MpsUnavailable(RuntimeError):
    """The service cannot be started here; the message gives the reason."""


class MpsDaemon:
    """The control daemon of one GPU, in its own folders; its server starts with the first trial.

    It inherits this process's environment. If this dispatcher is killed, the next one finds the daemon by a marker in
    that environment and ends it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it with `environment`, which names the GPU, added to this process's. Raises `MpsUnavailable`."""
        self._folder = make_folder(_FOLDER_PREFIX)
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
        }
        for folder in self.environment.values():
            os.mkdir(folder)
        self._surroundings = {**os.environ, **environment, **self.environment}
        try:
            self._run(["-d"], "")
        except MpsUnavailable:
            delete_folder(self._folder)
            raise

    def close(self) -> None:
        """End the service and the processes under it."""
        with contextlib.suppress(MpsUnavailable):
            self._run([], "quit -t 1\n")
        delete_folder(self._folder)

    def _run(self, arguments: list[str], words: str) -> None:
        output = self._folder / "control.log"  # a daemon would hold a pipe open
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


def kernels_missing(observed: Observed) -> str | None:
    """Return why a finished trial did not report its kernels; None if it did."""
    if observed.profiled:
        return observed.profile_problem
    code = observed.exit.code
    how = observed.broken or observed.killed_for or ("it was not done in time" if code is None else _ending(code))
    return f"the trial ended before it had reported them: {how}"


def failed_rank(observed: Observed) -> int | None:
    """Return the rank that ended the trial; None if none did, or if the trial has a single process."""
    if observed.rank_ended is not None:
        return observed.rank_ended.rank
    return None if observed.failure is None else observed.failure.rank


def exit_code(observed: Observed) -> int | None:
    """Return the exit code of the trial, or of the rank that ended it; negative for a signal."""
    return observed.exit.code if observed.rank_ended is None else observed.rank_ended.code


def kernel_oom_kills() -> int:
    """Return the number of processes that the kernel's out-of-memory killer has killed since boot; 0 if unknown."""
    return int(line_of("/proc/vmstat", "oom_kill ") or "0")


def outcome_of(
    observed: Observed, settings: TrialSettings, lost: str | None, backend: str, ranks: int = 1
) -> tuple[dict[str, Any], bool]:
    """Return status, oom_kind, error_type and error of a run, and whether another attempt may end differently.

    A trial's claims about a device other than `backend` are ignored. With several `ranks` the error names the one that
    ended the trial.
    """
    rank = failed_rank(observed)
    who, prefix = ("the trial", "") if rank is None else (f"rank {rank} of {ranks}", f"rank {rank} of {ranks}: ")

    def outcome(
        status: str,
        oom_kind: str | None = None,
        error_type: str | None = None,
        error: str | None = None,
        retryable: bool = False,
    ) -> tuple[dict[str, Any], bool]:
        text, output = None if error is None else safe_text(error), safe_text(observed.exit.output).strip()
        if text is not None and output and output not in text:
            text = f"{text}{OUTPUT_STARTS}\n{output}"
        return {"status": status, "oom_kind": oom_kind, "error_type": error_type, "error": text}, retryable

    if observed.finished:
        return outcome("ok")
    if observed.failure is not None:
        failure = observed.failure
        faulty = failure.device_fault and is_device_fault(backend, failure.error_type, failure.error)
        return outcome(failure.status, failure.oom_kind, failure.error_type, prefix + failure.error, faulty)
    if observed.broken is not None:
        return outcome("crashed", error_type="BrokenReport", error=f"the trial reported {observed.broken}")
    if lost is not None:
        return outcome("crashed", error_type="ServerLost", error=lost, retryable=True)
    if observed.killed_for is not None:
        kind = "device" if backend == "cpu" else "host"
        return outcome("oom", kind, "HostOutOfMemory", f"{prefix}killed: {observed.killed_for}")
    if observed.timed_out:
        return outcome(
            "timeout", error_type="Timeout", error=f"not done after trial.timeout_s={settings.timeout_s:g} s"
        )
    code = exit_code(observed)
    if code == -signal.SIGKILL:
        return outcome("crashed", error_type="SIGKILL", error=f"{who} was killed from outside", retryable=True)
    if code is not None and code < 0:
        name = _ending(code)
        return outcome("crashed", error_type=name, error=f"{who} died of {name}")
    return outcome("crashed", error_type="Exit", error=f"{who} exited with code {code} and no result")


def _ending(code: int) -> str:
    """Return an exit code's text, such as `code 3`; of a signal, its name."""
    return f"code {code}" if code >= 0 else _SIGNALS.get(-code, f"SIG{-code}")


class RunningTrial:
    """A trial's process, the socket on which it reports, and from `watch` on the sensors of its processes.

    Each of several ranks has its own sensors, whose samples carry its number; another one reads the whole process tree.
    The figures of the first rank decide when the window ends.

    Args:
        server: The trial server, which forks a child.
        trial: A JSON-able mapping, see `body.run_trial`. With `ahead` the child prepares and waits for `tell("go")`.
        reader: Reads the trial's reports.
        memory_limit_mib: Host memory beyond which the trial is ended.
        settings: The trial's settings.
        slots: The worker's slots: one, or one for each rank.
    """

    def __init__(
        self,
        server: TrialServer,
        trial: dict[str, Any],
        reader: ReportReader,
        memory_limit_mib: float,
        settings: TrialSettings,
        slots: Sequence[Slot],
    ) -> None:
        self._server, self._reader, self._memory_limit_mib = server, reader, memory_limit_mib
        self._settings, self._slots, self._sampled = settings, slots, not reader.virtual
        self._partners: tuple[int, ...] = ()
        self._samplers: list[TelemetrySampler] = []  # of the whole trial, then of each of several ranks
        self._steady_sent = self._dismissed = False
        self.leave_by_ns: int | None = None  # monotonic time at which a trial that still runs is killed
        self.living = True
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # Libraries import torch's compiler, and checkpointing reads its settings: the server imports it once for all.
        compiles = trial["config"].get("family") == "zoo" or bool(trial["config"].get("activation_checkpointing"))
        try:
            with theirs:
                self._child = server.start(
                    "workers.trial.body:run",
                    trial,
                    theirs,
                    memory_limit_bytes=memory_limit_mib * 2**20,
                    imports=("torch._dynamo.convert_frame",) if compiles else (),
                )
        except BaseException:
            self._channel.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def observed(self) -> Observed:
        """Return the record of the trial's reports, the sensors' readings, and the reasons for missing ones."""
        return self._reader.observed

    def outgrew_memory(self) -> bool:
        """Return whether the keeper has reported that it ended the trial at its memory limit; never waits."""
        while self._child.ended is None and select.select([self._child], [], [], 0)[0]:
            self._child.has_ended()
        return self._child.ended is not None and self._child.ended.limit == MEMORY

    def watch(self, observed: Observed, deadline_ns: int, tick_s: float, partners: Sequence[int]) -> None:
        """Begin to listen to the trial and to sample its processes.

        Args:
            observed: Receives what is observed.
            deadline_ns: Monotonic time at which the trial is killed.
            tick_s: Longest time that `step` waits.
            partners: Processes of trials that run beside it, which do not count as others on the device.
        """
        self._reader.observed, self._partners = observed, tuple(partners)
        sources = self._settings.telemetry.sources
        if self._reader.ranks > 1:
            sources = tuple(source for source in sources if source == _TREE_SOURCE)
        self._start_sampler(sources, self._slots[0].device_uuid, self.pid)
        self._follow(self._samplers[0])
        self._events = self._events_until(deadline_ns, tick_s)

    @property
    def reported(self) -> bool:
        """Return whether the trial has reported its outcome, or can no longer report."""
        observed = self.observed
        endings = (observed.failure, observed.broken, observed.rank_ended)
        return not self.living or observed.finished or any(ending is not None for ending in endings)

    def step(self) -> str | Ended | None:
        """Take the trial's next event and return its name; None without an event. Raises `ServerLost`."""
        event, observed = next(self._events), self.observed
        if isinstance(event, Ended):
            observed.exit, self.living = event, False
            if event.used_bytes is not None:
                limit = f"trial.host_memory_limit_mib={self._memory_limit_mib:.0f}"
                observed.killed_for = f"its {event.used_bytes / 2**20:.0f} MiB of host memory exceed {limit}"
            elif -signal.SIGKILL in (event.code, exit_code(observed)) and kernel_oom_kills() > observed.oom_kills:
                observed.killed_for = "the kernel's out-of-memory killer"
            return event
        if event == "ranks":
            self._watch_ranks()
        elif event == "window":
            self._follower.begin(observed.window_ns or 0, observed.warmup_ns)
        elif event == "step" and not (step := observed.samples[-1][1]).rank:
            self._follower.mark_step(step.t_ns)
        elif event in ENDINGS and not observed.shared:
            observed.half_widths |= self._updated_follower().half_widths()
        if event in (None, "window") and not self._steady_sent:
            self._steady_sent = self._updated_follower().steady(time.monotonic_ns())
            if self._steady_sent:
                self.tell("steady")
        return event

    def dismiss(self) -> None:
        """Take last samples while the trial holds its memory, then send `bye`."""
        if self.living and not self._dismissed:
            self._dismissed = True
            for sampler in self._samplers:
                sampler.wind_up(self.observed.window_end_ns)
            self.tell("bye")

    def close(self) -> None:
        """End the sensors, record their readings, and close the sockets."""
        observed, reader = self.observed, self._reader
        for place, sampler in enumerate(self._samplers):
            rank = place - 1 if place else None
            samples = sampler.stop(observed.window_end_ns)
            observed.samples += [(name, replace(sample, rank=rank)) for name, sample in samples]
            for name, reason in sampler.missing.items():
                observed.missing.setdefault(name, reason)
        with_memory = any("process_memory_mib" in sample.values for _, sample in observed.samples)
        if self._slots[0].device_uuid is not None and self._sampled and not with_memory:
            observed.missing.setdefault(
                "nvml.process_memory_mib",
                "NVML never listed the trial's process; in a container the host's pids are needed (--pid=host)",
            )
        if reader.readings > READINGS_KEPT:
            source = "simulated" if reader.virtual else "torch"
            observed.missing[source] = f"kept {READINGS_KEPT:,} of {reader.readings:,} readings of the trial"
        self._channel.close()
        self._child.line.close()

    def _watch_ranks(self) -> None:
        """Start the sensors of the ranks' processes; a process that is not the trial's is not watched."""
        descendants = set(descendants_of(self.pid)) if self._sampled else set()
        for rank, pid in enumerate(self.observed.rank_pids):
            if pid not in descendants:  # it has ended, or belongs to somebody else
                self.observed.missing["ranks"] = f"process {pid} of rank {rank} is not the trial's"
                pid = self.pid
            uuid = self._slots[rank % len(self._slots)].device_uuid
            self._start_sampler(self._settings.telemetry.sources, uuid, pid)
        self._follow(self._samplers[1])

    def _follow(self, sampler: TelemetrySampler) -> None:
        """Follow a sampler's figures, which decide when the window ends."""
        self._decisive = sampler
        self._follower = TargetFollower(self._settings.window, sampler.sensor_names, self._settings.telemetry.period_s)

    def _updated_follower(self) -> TargetFollower:
        """Give the follower the samples so far, and return it."""
        self._follower.add(self._decisive.new_samples())
        return self._follower

    def _start_sampler(self, sources: Sequence[str], uuid: str | None, pid: int) -> None:
        telemetry = replace(self._settings.telemetry, sources=tuple(sources))
        sensors: tuple[Sensor, ...] = ()
        if self._sampled:
            sensors, missing = make_sensors(telemetry, WatchTarget(uuid, pid))
            for name, reason in missing.items():
                self.observed.missing.setdefault(name, reason)
        for sensor in sensors:
            if self._partners and isinstance(sensor, NvmlSensor):
                sensor.ignore(self._partners)
        sampler = TelemetrySampler(sensors, telemetry.period_s)
        sampler.start()
        self._samplers.append(sampler)

    def _events_until(self, deadline_ns: int, tick_s: float) -> Iterator[str | Ended | None]:
        """Yield the names of the trial's recorded events, None at least every `tick_s`, and last how it ended.

        The trial and its processes are killed at `deadline_ns` or `leave_by_ns` (monotonic), after a broken report, or
        half a minute after `bye`.
        """
        channel_open, over, killed, reads_after_exit = True, False, False, 0
        next_tick_ns = time.monotonic_ns()
        while True:
            now_ns = time.monotonic_ns()
            if not killed and self.leave_by_ns is not None:
                deadline_ns = min(deadline_ns, self.leave_by_ns)
            overdue = now_ns >= deadline_ns
            observed = self.observed
            if not killed and (observed.broken is not None or overdue):
                killed, observed.timed_out = True, overdue
                self._child.end()
                deadline_ns = now_ns + int(_ANSWER_TIMEOUT_S * 1e9)
            elif killed and overdue and not over:
                raise ServerLost("a killed trial did not end")
            if now_ns >= next_tick_ns:  # also while the trial reports without a pause
                next_tick_ns = now_ns + int(tick_s * 1e9)
                yield None
            waiting: list[Any] = [*([self._channel] if channel_open else []), *([] if over else [self._child])]
            timeout_s = max(0.0, (min(next_tick_ns, deadline_ns) - time.monotonic_ns()) / 1e9)
            readable = select.select(waiting, [], [], 0.0 if over else timeout_s)[0]
            if channel_open and self._channel in readable:
                data = receive(self._channel, _RECEIVE_BYTES)
                reads_after_exit += over
                channel_open = bool(data) and reads_after_exit < _READS_AFTER_EXIT
                yield from self._reader.feed(data)  # read all reports before the exit
            elif self._child in readable:
                over = self._has_ended()
            elif over:
                assert self._child.ended is not None
                yield self._child.ended
                return

    def tell(self, word: str) -> None:
        """Send `go`, `steady`, `open` or `bye` to the trial (see `body`); no effect once it has ended."""
        if word == "bye":
            self.leave_by_ns = time.monotonic_ns() + int(_GOODBYE_S * 1e9)
        with contextlib.suppress(OSError):
            self._channel.sendall(word.encode() + b"\n")

    def discard(self) -> None:
        """Kill a prepared trial that is not needed, and wait until it has ended. Raises `ServerLost`."""
        self._child.end()
        try:
            self._child.wait(_ANSWER_TIMEOUT_S)
        finally:
            self.close()

    def _has_ended(self) -> bool:
        try:
            return self._child.has_ended()
        except ServerLost as lost:
            raise ServerLost(f"{lost}{self._server.output_suffix()}") from lost
