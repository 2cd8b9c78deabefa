"""A trial under way and how it ended: its reports, the sensors on its process and on each of its ranks, its status.

Start reading at `TrialRun`, which listens to one trial; `TrialWatch` has the sensors, `Observed` (of `reports`) is the
record of both, and `outcome_of` derives the status.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Sequence
from typing import Any

from conf.children.containment import descendants_of
from conf.plain_text import OUTPUT_STARTS, safe_text
from workers.devices import Slot
from workers.devices.steadiness import TargetFollower
from workers.settings import TrialSettings
from workers.telemetry.base import Sample, Sensor, WatchTarget
from workers.telemetry.nvml import NvmlSensor
from workers.telemetry.sampler import TelemetrySampler, make_sensors
from workers.trial.body import is_device_fault
from workers.trial.reports import ENDINGS, READINGS_KEPT, Observed, TrialExit
from workers.trial.server_client import RunningTrial, TrialServer

_OF_TREE = "process"  # the source that reads a trial of several ranks as a whole


def startup_s(observed: Observed, t0_ns: int | None) -> float | None:
    """Return the seconds from the task's start to its first step; None in virtual time, or without a step."""
    if t0_ns is None or observed.warmup_ns is None:
        return None
    return (observed.warmup_ns - t0_ns) / 1e9


def kernels_missing(observed: Observed) -> str | None:
    """Return why a finished trial that was to report its kernels has none; None if it has."""
    if observed.profiled:
        return observed.profile_problem
    if observed.broken is not None:
        return f"the trial reported {observed.broken}"
    ended = observed.exit
    if ended.code is None:
        return f"the trial was killed before it had reported them: {ended.killed_for or 'it was not done in time'}"
    how = signal_name(-ended.code) if ended.code < 0 else f"code {ended.code}"
    return f"the trial's process ended with {how} before it had reported them"


def failed_rank(observed: Observed) -> int | None:
    """Return the rank that ended the trial; None if none did, and of a trial that runs alone."""
    if observed.rank_ended is not None:
        return observed.rank_ended.rank
    return None if observed.failure is None else observed.failure.rank


def exit_code(observed: Observed) -> int | None:
    """Return the exit code of the trial, or of the rank that ended it; negative for a signal."""
    return observed.exit.code if observed.rank_ended is None else observed.rank_ended.code


def kernel_oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has killed since boot (0 if not reported)."""
    try:
        with open("/proc/vmstat") as lines:
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0


def outcome_of(
    observed: Observed, settings: TrialSettings, lost: str | None, backend: str, ranks: int = 1
) -> tuple[dict[str, Any], bool]:
    """Return (status, oom_kind, error_type, error) of a run, and whether another attempt may end differently.

    `backend` is the device's; a trial's claims about a device that it did not have are ignored. Of `ranks` processes
    the error names the one that ended the trial.
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
        text, output = None if error is None else safe_text(error), observed.exit.output
        if text is not None and output and output not in text:
            text = f"{text}{OUTPUT_STARTS}\n{output}"
        return {"status": status, "oom_kind": oom_kind, "error_type": error_type, "error": text}, retryable

    ended = observed.exit
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
    if ended.killed_for is not None:
        kind = "device" if backend == "cpu" else "host"
        return outcome("oom", kind, "HostOutOfMemory", f"{prefix}killed: {ended.killed_for}")
    if ended.timed_out:
        return outcome(
            "timeout", error_type="Timeout", error=f"not done after trial.timeout_s={settings.timeout_s:g} s"
        )
    code = exit_code(observed)
    if code == -signal.SIGKILL:
        return outcome("crashed", error_type="SIGKILL", error=f"{who} was killed from outside", retryable=True)
    if code is not None and code < 0:
        name = signal_name(-code)
        return outcome("crashed", error_type=name, error=f"{who} died of {name}")
    return outcome("crashed", error_type="Exit", error=f"{who} exited with code {code} and no result")


def signal_name(number: int) -> str:
    """Return a signal's name, as `SIGSEGV`; `SIG40` for one without a name, as real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class TrialRun:
    """Listens to one trial, and keeps what comes of it.

    Args:
        server: The trial's server.
        trial: Its process.
        watch: Its sensors.
        observed: Takes what it reports and what the sensors read.
        deadline_ns: When it is killed, by the monotonic clock.
        tick_s: How long `step` waits at most.
    """

    def __init__(
        self,
        server: TrialServer,
        trial: RunningTrial,
        watch: TrialWatch,
        observed: Observed,
        deadline_ns: int,
        tick_s: float,
    ) -> None:
        self._server, self.trial, self._watch, self.observed = server, trial, watch, observed
        trial.reader.observed = observed
        self._events = server.events(trial, deadline_ns, tick_s)
        self._steady_sent = self._dismissed = False
        self.living = True

    @property
    def reported(self) -> bool:
        """Return whether it has said how it went, or cannot any more."""
        observed = self.observed
        endings = (observed.failure, observed.broken, observed.rank_ended)
        return not self.living or observed.finished or any(ending is not None for ending in endings)

    def step(self) -> str | TrialExit | None:
        """Take the trial's next event and return its name; None: there was none. Raises `ServerLost`."""
        event, observed, watch = next(self._events), self.observed, self._watch
        if isinstance(event, TrialExit):
            observed.exit, self.living = event, False
            if -signal.SIGKILL in (event.code, exit_code(observed)) and kernel_oom_kills() > observed.oom_kills:
                event.killed_for = event.killed_for or "the kernel's out-of-memory killer"
            return event
        if event == "ranks":
            watch.ranks_started(observed.rank_pids)
        elif event == "window":
            watch.begin_window(observed.window_ns or 0, observed.warmup_ns)
        elif event == "step" and not (step := observed.samples[-1][1]).rank:
            watch.mark_step(step.t_ns)
        elif event in ENDINGS and not observed.shared:
            observed.half_widths |= watch.half_widths()
        if event in (None, "window") and not self._steady_sent:
            self._steady_sent = watch.steady(time.monotonic_ns())
            if self._steady_sent:
                self.tell("steady")
        return event

    def tell(self, word: str) -> None:
        """Send a word to the trial."""
        self._server.tell(self.trial, word)

    def dismiss(self) -> None:
        """Dismiss the trial; the last sample still sees its memory."""
        if self.living and not self._dismissed:
            self._dismissed = True
            self._watch.wind_up(self.observed.window_end_ns)
            self.tell("bye")

    def close(self) -> None:
        """End the sensors, and keep what they have read."""
        self._watch.stop(self.observed.window_end_ns)
        self.trial.close()
        reader = self.trial.reader
        if reader.readings_left_out:
            source = "simulated" if reader.virtual else "torch"
            self.observed.missing[source] = f"kept {READINGS_KEPT:,} of {reader.readings:,} readings of the trial"


class TrialWatch:
    """Samples a trial while it runs, and notes when what it samples is steady.

    Of several ranks each has sensors of its own, whose samples carry its number, and the whole process tree one more.
    The first rank's figures decide on the window, as it does itself.

    Args:
        settings: The trial's settings.
        slots: The worker's slots: one, or one for each rank.
        ranks: Processes that train.
        pid: Process of the trial.
        observed: Takes the reasons why sensors read nothing, and in the end the samples.
        sampled: Whether the device is sampled at all.
        partners: Processes of trials that run beside it, which do not count as strangers on the device.
    """

    def __init__(
        self,
        settings: TrialSettings,
        slots: Sequence[Slot],
        ranks: int,
        pid: int,
        observed: Observed,
        *,
        sampled: bool,
        partners: Sequence[int] = (),
    ) -> None:
        self._settings, self._slots, self._pid, self._observed = settings, slots, pid, observed
        self._sampled, self._several, self._partners = sampled, ranks > 1, tuple(partners)
        self._of_ranks: list[TelemetrySampler] = []
        self._follower: TargetFollower | None = None
        observed.missing = {}
        sources = settings.telemetry.sources
        if self._several:
            sources = tuple(source for source in sources if source == _OF_TREE)
        self._whole = self._started(sources, slots[0].device_uuid, pid)

    def ranks_started(self, pids: Sequence[int]) -> None:
        """Watch the ranks' processes, as far as they are the trial's."""
        descendants = set(descendants_of(self._pid)) if self._sampled else set()
        for rank, pid in enumerate(pids):
            if pid not in descendants:  # it has ended, or is another's
                self._observed.missing["ranks"] = f"process {pid} of rank {rank} is not the trial's"
                pid = self._pid
            uuid = self._slots[rank % len(self._slots)].device_uuid
            self._of_ranks.append(self._started(self._settings.telemetry.sources, uuid, pid))

    def begin_window(self, t_ns: int, warmup_ns: int | None) -> None:
        """Follow the samples of the window that began at `t_ns`."""
        telemetry = self._settings.telemetry
        self._follower = TargetFollower(self._settings.window, self._decisive.sensor_names, telemetry.period_s)
        self._follower.begin(t_ns, warmup_ns)

    def steady(self, now_ns: int) -> bool:
        """Return whether every sampled figure of the window is steady."""
        if self._follower is None:
            return False
        self._follower.add(self._decisive.new_samples())
        return self._follower.steady(now_ns)

    def mark_step(self, t_ns: int) -> None:
        """Note the end of a step."""
        if self._follower is not None:
            self._follower.mark_step(t_ns)

    def half_widths(self) -> dict[str, float]:
        """Return the half-width of each figure's interval, as far as the window has come."""
        if self._follower is None:
            return {}
        self._follower.add(self._decisive.new_samples())
        return self._follower.half_widths()

    def wind_up(self, until_ns: int | None) -> None:
        """Take the last samples, while the trial still holds its memory."""
        for sampler in self._samplers:
            sampler.wind_up(until_ns)

    def stop(self, until_ns: int | None) -> None:
        """End all sensors, and pass their samples to `observed`."""
        observed = self._observed
        for sampler in self._samplers:
            rank = self._of_ranks.index(sampler) if sampler in self._of_ranks else None
            observed.samples += [(name, _of_rank(sample, rank)) for name, sample in sampler.stop(until_ns)]
            for name, reason in sampler.missing.items():
                observed.missing.setdefault(name, reason)
        with_memory = any("process_memory_mib" in sample.values for _, sample in observed.samples)
        if self._slots[0].device_uuid is not None and self._sampled and not with_memory:
            observed.missing.setdefault(
                "nvml.process_memory_mib",
                "NVML never listed the trial's process; in a container the host's pids are needed (--pid=host)",
            )

    @property
    def _samplers(self) -> list[TelemetrySampler]:
        return [self._whole, *self._of_ranks]

    @property
    def _decisive(self) -> TelemetrySampler:
        return self._of_ranks[0] if self._of_ranks else self._whole

    def _started(self, sources: Sequence[str], uuid: str | None, pid: int) -> TelemetrySampler:
        telemetry = dataclasses.replace(self._settings.telemetry, sources=tuple(sources))
        sensors: tuple[Sensor, ...] = ()
        if self._sampled:
            sensors, missing = make_sensors(telemetry, WatchTarget(uuid, pid))
            for name, reason in missing.items():
                self._observed.missing.setdefault(name, reason)
        for sensor in sensors:
            if self._partners and isinstance(sensor, NvmlSensor):
                sensor.ignore(self._partners)
        sampler = TelemetrySampler(sensors, telemetry.period_s)
        sampler.start()
        return sampler


def _of_rank(sample: Sample, rank: int | None) -> Sample:
    return sample if rank is None else dataclasses.replace(sample, rank=rank)
