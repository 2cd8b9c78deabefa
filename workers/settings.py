"""A job's settings for a worker, as typed frozen values; plain mappings on the wire.

Start reading at `TrialSettings`, which travels with every task. Torch-free.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.errors import UsageError, unknown_name
from workers.telemetry.sampler import TelemetrySettings

QUALITY_REPEATS = (0, 1, 2)  # a repeat is one of a task's three attempts
PREPARE_AHEAD = ("auto", "always", "never")


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """Rules for the begin and end of a run's window. Seconds are real on a real device, virtual when simulated.

    Tolerances are half-widths of 95 % confidence intervals: `tolerance` of the step time and `power_tolerance` are
    relative, `utilization_tolerance` absolute. `memory_steps`: steps without a new peak of memory.
    """

    kind: str
    warmup_steps: int = 3
    warmup_max_seconds: float = 20.0
    min_steps: int = 5
    min_seconds: float = 1.0
    max_seconds: float = 60.0
    tolerance: float = 0.02
    utilization_tolerance: float = 0.01
    power_tolerance: float = 0.02
    memory_steps: int = 5
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("adaptive", "fixed"):
            raise unknown_name("window", self.kind, ("adaptive", "fixed"))
        _check(self, "window", warmup_steps=0, min_steps=1, memory_steps=0)
        _check(self, "window", warmup_max_seconds=0, min_seconds=0, max_seconds=0)
        _check(self, "window", tolerance=0, utilization_tolerance=0, power_tolerance=0)
        if self.kind == "fixed":
            _check(self, "window", seconds=0)
            object.__setattr__(self, "min_seconds", self.seconds)
            object.__setattr__(self, "max_seconds", self.seconds)
        if self.max_seconds < self.min_seconds:
            raise UsageError(
                f"window.max_seconds must be >= window.min_seconds ({self.min_seconds}), got {self.max_seconds}"
            )


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings of each trial of a job: everything but its config and the device."""

    window: WindowSettings
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    timeout_s: float = 300.0
    host_memory_limit_mib: float | None = None
    prepare_ahead: str = "auto"
    quality_repeats: int = 1

    def __post_init__(self) -> None:
        if self.prepare_ahead not in PREPARE_AHEAD:
            raise unknown_name("trial.prepare_ahead", str(self.prepare_ahead), PREPARE_AHEAD)
        _check(self, "trial", timeout_s=0.001)
        if isinstance(self.quality_repeats, bool) or self.quality_repeats not in QUALITY_REPEATS:
            known = ", ".join(map(str, QUALITY_REPEATS))
            raise UsageError(f"trial.quality_repeats must be one of {known}, got {self.quality_repeats!r}")
        if self.host_memory_limit_mib is not None:
            _check(self, "trial", host_memory_limit_mib=1)

    def to_mapping(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> TrialSettings:
        """Parse the result of `to_mapping`, or a command's config. Raises `UsageError`."""
        values = dict(mapping)
        window = WindowSettings(**values.pop("window"))
        if "telemetry" in values:
            values["telemetry"] = TelemetrySettings(**values["telemetry"])
        return cls(window=window, **values)


def _check(settings: Any, prefix: str, **floors: float) -> None:
    """Raise as `window.min_steps must be >= 1, got 0` for a value that is no finite number or below its floor."""
    for name, floor in floors.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < floor:
            raise UsageError(f"{prefix}.{name} must be a number >= {floor}, got {value!r}")
