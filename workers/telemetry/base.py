"""The sensor Protocol: what every telemetry source offers, and the one error family it may raise.

A sensor declares its metrics (keys of `warehouse.tables.schema.METRICS`) and its period, and converts units once, here.
Constructing a sensor must raise `SensorUnavailable` with a reason a person can act on when the hardware, driver,
library or exporter is not there; after that `sample` returns what it has, without the metrics it could not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable


class SensorUnavailable(RuntimeError):
    """The sensor cannot be used here; the message has the reason and, where there is one, the remedy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. `t_ns` is `time.monotonic_ns()` at the moment the values are of; no key means not measured.

    Averages end at `t_ns`, which a source that lags has put back, and begin at `since_ns` (None: at the sample before).
    `quality` is one of `warehouse.tables.schema.SAMPLE_QUALITIES`: a sensor says `repeated` for what it had served
    before and `unavailable`, without values, for a reading that failed; `workers.labels.quality` finds what is suspect.
    `reasons` say why.
    """

    t_ns: int
    values: dict[str, float]
    quality: str = "measured"
    reasons: tuple[str, ...] = ()
    since_ns: int | None = None
    rank: int | None = None  # of a trial of several that the reading is of; None: of the whole trial


@dataclass(frozen=True, slots=True)
class WatchTarget:
    """Target of the sensors: the device by UUID (None: no GPU) and the trial's root process."""

    device_uuid: str | None
    pid: int


@runtime_checkable
class Sensor(Protocol):
    """A source of samples. Used from one thread at a time; `watch` is called before a trial's first `sample`.

    Sensors inherit from it, which gives them the defaults.
    """

    name: str  # nvml | gpm | dcgm | process
    metrics: tuple[str, ...]
    period_s: float  # the fastest useful period; the sampler never asks more often
    slow: bool = False  # whether a reading may wait for a network: the sampler gives it a thread of its own
    lag_s: float = 0.0  # age of its readings when they become available
    dropped: Mapping[str, str] = MappingProxyType({})  # metric -> why this device does not give it

    def watch(self, target: WatchTarget) -> None:
        """Point the sensor at a device and process. Raises `SensorUnavailable`."""
        ...

    def sample(self) -> list[Sample]:
        """Return the readings since the last call, oldest first: usually one, none if there is nothing new."""
        ...

    def close(self) -> None: ...
