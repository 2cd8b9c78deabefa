"""Samples a trial's sensors while it runs, and turns the readings into window means and rows of `telemetry`.

Start reading at `TelemetrySampler`; `make_sensors` builds the sensors that a machine has.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.errors import UsageError, unknown_name
from workers.telemetry.base import Sample, Sensor, SensorUnavailable, Target

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

# source -> its sensor. A class offers `create(settings, device_uuid)`.
SENSORS = {
    "nvml": "workers.telemetry.nvml:NvmlSensor",
    "gpm": "workers.telemetry.gpm:GpmSensor",
    "dcgm": "workers.telemetry.dcgm:DcgmSensor",
    "process": "workers.telemetry.process:ProcessSensor",
}
SOURCES = (*SENSORS, "torch")  # torch: reported by the trial itself, so there is no sensor to make
_JOIN_S = 2.0


@dataclass(frozen=True, kw_only=True)
class TelemetrySettings:
    """Which sources to use and how often. Raises `UsageError` naming the key."""

    sources: tuple[str, ...] = SOURCES
    period_s: float = 0.1
    dcgm_url: str = "http://localhost:9400/metrics"

    def __post_init__(self) -> None:
        if isinstance(self.sources, str):
            raise UsageError(f"telemetry.sources must be a list, got {self.sources!r}")
        object.__setattr__(self, "sources", tuple(self.sources))
        for source in self.sources:
            if source not in SOURCES:
                raise unknown_name("telemetry source", source, SOURCES)
        period = self.period_s
        if (
            isinstance(period, bool)
            or not isinstance(period, int | float)
            or not (math.isfinite(period) and period > 0)
        ):
            raise UsageError(f"telemetry.period_s must be a number > 0, got {period!r}")
        from workers.telemetry.dcgm import checked_url

        checked_url(self.dcgm_url)


def make_sensors(settings: TelemetrySettings, device_uuid: str | None) -> tuple[tuple[Sensor, ...], dict[str, str]]:
    """(the sensors that work here, source -> why it does not). Raises `UsageError` for a broken setting."""
    sensors: list[Sensor] = []
    missing: dict[str, str] = {}
    for source in dict.fromkeys(settings.sources):
        if source not in SENSORS:
            continue
        module, _, name = SENSORS[source].partition(":")
        try:
            sensors.append(getattr(importlib.import_module(module), name).create(settings, device_uuid))
        except SensorUnavailable as reason:
            missing[source] = str(reason)
    return tuple(sensors), missing


class TelemetrySampler:
    """Owns its sensors for one trial: `start` watches the trial, `stop` samples a last time and closes the sensors.

    Each sensor is read every `max(period_s, sensor.period_s)`, all from one thread, but those that wait for a network
    (`slow = True`) from one each. A reading that is late is taken once, not caught up on. `missing` says, once
    for each, which sensor (`dcgm`) or single metric (`nvml.energy_j`) gave nothing and why.
    """

    def __init__(self, sensors: Sequence[Sensor], period_s: float = 0.1) -> None:
        self._sensors = tuple(sensors)
        self._period_s = period_s
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._samples: list[tuple[str, Sample]] = []
        self._watching: list[Sensor] = []
        self._stopped = False
        self.missing: dict[str, str] = {}

    def start(self, target: Target) -> None:
        """Point every sensor at the trial and begin. Sensors that cannot watch it are in `missing`."""
        assert not self._threads and not self._stopped, "a sampler serves one trial"
        for sensor in self._sensors:
            try:
                sensor.watch(target)
                self._watching.append(sensor)
            except SensorUnavailable as reason:
                self.missing[sensor.name] = str(reason)
        together = [sensor for sensor in self._watching if not getattr(sensor, "slow", False)]
        alone = [[sensor] for sensor in self._watching if getattr(sensor, "slow", False)]
        for group in filter(None, (together, *alone)):
            name = "telemetry-" + "-".join(sensor.name for sensor in group)
            thread = threading.Thread(target=self._run, args=(group,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> list[tuple[str, Sample]]:
        """Every reading as (sensor name, sample), by time. A second call gives nothing.

        Call it while the trial still holds its memory: each sensor of the common thread is read a last time.
        """
        if self._stopped:
            return []
        self._stopped = True
        self._stopping.set()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for sensor in self._watching:
            for metric, reason in getattr(sensor, "dropped", {}).copy().items():
                self.missing.setdefault(f"{sensor.name}.{metric}", reason)
        if not any(thread.is_alive() for thread in self._threads):
            for sensor in self._sensors:
                sensor.close()
        else:
            _log.warning("a telemetry sensor does not return; its readings end here")
        with self._lock:
            taken, self._samples = self._samples, []
        return sorted(taken, key=lambda pair: pair[1].t_ns)

    def _run(self, group: list[Sensor]) -> None:
        """The sampling loop of one thread. Leaves a last round after `stop`, except to sensors that may wait long."""
        due = {id(sensor): 0.0 for sensor in group}
        active = list(group)
        while active and not self._stopping.is_set():
            for sensor in list(active):
                now = time.monotonic()
                if due[id(sensor)] > now:
                    continue
                period = max(self._period_s, sensor.period_s)
                # on the sensor's own grid; ticks that were missed are skipped
                due[id(sensor)] = max(due[id(sensor)] + period, now + period / 2) if due[id(sensor)] else now + period
                if not self._take(sensor):
                    active.remove(sensor)
            if active:
                next_due = min(due[id(sensor)] for sensor in active)
                self._stopping.wait(max(0.0, next_due - time.monotonic()))
        for sensor in active:
            if not getattr(sensor, "slow", False):
                self._take(sensor)

    def _take(self, sensor: Sensor) -> bool:
        """Read one sensor; False when it is to be left out from now on."""
        try:
            found = sensor.sample()
        except SensorUnavailable as reason:
            self.missing[sensor.name] = str(reason)
            return False
        except Exception as error:  # a defect in one sensor must not end the others' readings unseen
            _log.exception("telemetry sensor %s failed", sensor.name)
            self.missing[sensor.name] = f"failed with {type(error).__name__}: {error}"
            return False
        if found:
            with self._lock:
                self._samples += [(sensor.name, sample) for sample in found]
        return True


def time_weighted_mean(samples: Iterable[Sample], metric: str, start_ns: int, end_ns: int) -> float | None:
    """The mean of `metric` over [start_ns, end_ns], each value weighted with the time it stands for; zeros count.

    `samples` are of one sensor. Utilization, profiling and power readings are means of the interval that they end, so a
    value stands for the time since the sample before it (the first: since the window's start); the first sample after
    the window stands for the rest of it. None unless at least one sample lies in the window: what was read around a
    window that is shorter than the sensor's period says little about it.
    """
    readings = sorted((sample.t_ns, sample.values[metric]) for sample in samples if metric in sample.values)
    inside = [value for t_ns, value in readings if start_ns <= t_ns <= end_ns]
    if not inside:
        return None
    total = weight = 0
    since_ns = start_ns
    for t_ns, value in readings:
        span_ns = min(t_ns, end_ns) - max(since_ns, start_ns)
        if span_ns > 0:
            total += value * span_ns
            weight += span_ns
        since_ns = t_ns
        if t_ns >= end_ns:
            break
    if weight == 0:  # a single sample on the window's first instant, or a window without length
        return inside[-1]
    return total / weight


def to_table(
    run_id: str,
    samples: Iterable[tuple[str, Sample]],
    t0_ns: int,
    warmup_ns: int | None,
    window_ns: int | None,
    window_end_ns: int | None,
) -> pa.Table:
    """Rows of `telemetry` (warehouse.schema.TELEMETRY_SCHEMA), by time; metrics that were not measured are NULL.

    All times are of `time.monotonic_ns`: the run's start, the warm-up's, the window's start and end. None: the trial
    never came that far, so that the phase before it lasts to the end.
    """
    import pyarrow as pa

    from warehouse.schema import METRICS, TELEMETRY_SCHEMA

    ordered = sorted(samples, key=lambda pair: pair[1].t_ns)
    columns: dict[str, list] = {
        "run_id": [run_id] * len(ordered),
        "t_ms": [(sample.t_ns - t0_ns) / 1e6 for _, sample in ordered],
        "sensor": [name for name, _ in ordered],
        "phase": [_phase(sample.t_ns, warmup_ns, window_ns, window_end_ns) for _, sample in ordered],
    }
    for metric in METRICS:
        columns[metric] = [sample.values.get(metric) for _, sample in ordered]
    return pa.table(columns, schema=TELEMETRY_SCHEMA)


def _phase(t_ns: int, warmup_ns: int | None, window_ns: int | None, window_end_ns: int | None) -> str | None:
    if window_ns is not None and t_ns >= window_ns:
        return "window" if window_end_ns is None or t_ns <= window_end_ns else None
    if warmup_ns is not None and t_ns >= warmup_ns:
        return "warmup"
    return None
