"""A trial under way: what it reports, and the sensors on its process and on each of its ranks.

Start reading at `TrialRun`; `TrialWatch` has the sensors.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Sequence

from conf.children.containment import descendants_of
from workers.devices.base import Slot
from workers.devices.steadiness import TargetFollower
from workers.settings import TrialSettings
from workers.telemetry.base import Sample, Sensor, WatchTarget
from workers.telemetry.nvml import NvmlSensor
from workers.telemetry.sampler import TelemetrySampler, make_sensors
from workers.trial.outcome import Observed, kernel_oom_kills, lost_rank_to_kill, take
from workers.trial.reports import (
    READINGS_KEPT,
    Failure,
    RankEnded,
    RanksStarted,
    Reading,
    Report,
    TrialResult,
    WindowBegun,
)
from workers.trial.server_client import RunningTrial, TrialExit, TrialServer

_OF_TREE = "process"  # the source that reads a trial of several ranks as a whole


class TrialRun:
    """Listens to one trial, and keeps what comes of it.

    Args:
        server: Of the trial.
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
        self._events = server.events(trial, deadline_ns, tick_s)
        self._steady_sent = self._dismissed = False
        self.living = True

    @property
    def reported(self) -> bool:
        """Return whether it has said how it went, or cannot any more."""
        observed = self.observed
        return not self.living or observed.finished or observed.failure is not None or observed.broken is not None

    def step(self) -> Report | TrialExit | None:
        """Take the trial's next event and return it; None: there was none. Raises `ServerLost`."""
        event, observed, watch = next(self._events), self.observed, self._watch
        if isinstance(event, TrialExit):
            observed.exit, self.living = event, False
            was_killed = event.signal == signal.SIGKILL or lost_rank_to_kill(observed)
            if was_killed and kernel_oom_kills() > observed.oom_kills:
                event.killed_for = event.killed_for or "the kernel's out-of-memory killer"
            return event
        if event is not None:
            take(event, observed)
        if isinstance(event, RanksStarted):
            watch.ranks_started(event.pids)
        elif isinstance(event, WindowBegun):
            watch.begin_window(event.t_ns, observed.warmup_ns)
        elif isinstance(event, Reading) and event.sensor == "torch" and not event.rank:
            watch.mark_step(event.t_ns)
        elif isinstance(event, TrialResult | Failure | RankEnded) and not observed.shared:
            observed.half_widths |= watch.half_widths()
        if (event is None or isinstance(event, WindowBegun)) and not self._steady_sent:
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
    """Samples a trial while it runs, and tells when what it samples is steady.

    Of several ranks each has sensors of its own, whose samples carry its number, and the whole process tree one more.
    The first rank's figures decide on the window, as it does itself.

    Args:
        settings: Of the trial.
        slots: Of the worker: one, or one for each rank.
        ranks: Processes that train.
        pid: Of the trial.
        observed: Learns why sensors give nothing, and gets the samples in the end.
        sampled: Whether the device is sampled at all.
        partners: Processes of trials that run beside it, which are no strangers on the device.
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
        own = set(descendants_of(self._pid)) if self._sampled else set()
        for rank, pid in enumerate(pids):
            if pid not in own:  # it has ended, or is another's
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
        """End all sensors, and give `observed` their samples."""
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
            sensors, missing = make_sensors(telemetry, uuid)
            for name, reason in missing.items():
                self._observed.missing.setdefault(name, reason)
        for sensor in sensors:
            if self._partners and isinstance(sensor, NvmlSensor):
                sensor.ignore(self._partners)
        sampler = TelemetrySampler(sensors, telemetry.period_s)
        sampler.start(WatchTarget(uuid, pid))
        return sampler


def _of_rank(sample: Sample, rank: int | None) -> Sample:
    return sample if rank is None else dataclasses.replace(sample, rank=rank)
