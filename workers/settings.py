"""A job's settings for a worker, as typed frozen values; plain mappings on the wire.

Start reading at `TrialSettings`, which travels with every task. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conf.cli.settings import Checked, key, section
from conf.errors import UsageError
from workers.telemetry.sensors import TelemetrySettings

PREPARE_AHEAD = ("auto", "always", "never")
SHARING = ("time_slicing", "mps")  # how trials that run together share a GPU


@dataclass(frozen=True, kw_only=True)
class WindowSettings(Checked, section="window"):
    """Rules for the start and end of a run's window. Seconds are real on a real device, virtual when simulated.

    Tolerances are half-widths of 95 % confidence intervals: `tolerance` of the step time and `power_tolerance` are
    relative, `utilization_tolerance` absolute. `memory_steps`: steps without a new peak of memory.
    """

    kind: str = key("adaptive", choices=("adaptive", "fixed"))
    warmup_steps: int = key(
        3, "steps before the window, at least: the first ones grow the allocator and autotune", "int >= 0"
    )
    warmup_max_seconds: float = key(
        20.0,
        "warm-up also waits until memory and step time are steady, but past this for two steps only",
        "number 0 to 1e7",
    )
    min_steps: int = key(5, "least number of steps, unless max_seconds have passed", "int >= 1")
    min_seconds: float = key(1.0, "shortest window", "number 0 to 1e7")
    max_seconds: float = key(60.0, "longest window", "number 0 to 1e7")
    tolerance: float = key(0.02, "relative half-width of the 95 % confidence interval of the step time", "number >= 0")
    utilization_tolerance: float = key(
        0.01, "absolute half-width for GPU utilization, SM activity, occupancy and DRAM activity", "number >= 0"
    )
    power_tolerance: float = key(0.02, "relative half-width for power", "number >= 0")
    memory_steps: int = key(5, "steps without a new peak of memory, warm-up's included", "int >= 0")
    seconds: float | None = key(None, "the whole window, of kind=fixed", "number 0 to 1e7")

    def __post_init__(self) -> None:
        if self.kind == "fixed":
            if self.seconds is None:
                raise UsageError("window.seconds is missing: kind=fixed needs it")
            object.__setattr__(self, "min_seconds", self.seconds)
            object.__setattr__(self, "max_seconds", self.seconds)
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        if self.max_seconds < self.min_seconds:
            yield f"window.max_seconds must be >= window.min_seconds ({self.min_seconds}), got {self.max_seconds}"


@dataclass(frozen=True, kw_only=True)
class TrialRules(Checked, section="trial"):
    """The `trial` key of a command: deadline, preparation, host memory and repeats of each trial."""

    timeout_s: float = key(300, "a trial that takes longer is killed and lands as `timeout`", "number 0.001 to 1e7")
    prepare_ahead: str = key(
        "auto",
        "make the next trial's process ready while one runs; auto: on GPUs, where cores are free",
        choices=PREPARE_AHEAD,
    )
    host_memory_limit_mib: float | None = key(
        None, "host memory of one trial; default: 90 % of the machine's, divided among the workers", "number >= 1"
    )
    # A repeat is one of a task's three attempts.
    quality_repeats: int = key(1, "how often a trial with untrusted labels runs again", "int 0 to 2")


@dataclass(frozen=True, kw_only=True)
class KernelSettings(Checked, section="kernels"):
    """The `kernels` key of a command: which trials are profiled once their labels are taken."""

    steps: int = key(
        0,
        "training steps under torch.profiler after the window, whose kernels land in `kernels`; 0: none",
        "int 0 to 100",
    )


@dataclass(frozen=True, kw_only=True)
class TrialSettings(TrialRules):
    """How each trial of a job is run: everything but its config and the device."""

    window: WindowSettings = section(WindowSettings, required=True)
    telemetry: TelemetrySettings = section(TelemetrySettings)
    kernels: KernelSettings = section(KernelSettings)
    sharing: str = "time_slicing"  # how trials that run together share

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields as a mapping, without default `kernels` and `sharing`, so ids of older jobs stay."""
        values = dataclasses.asdict(self)
        if self.kernels == KernelSettings():
            del values["kernels"]
        if self.sharing == "time_slicing":
            del values["sharing"]
        return values
