"""The measured training loop that real devices share: build, warm up until steady, measure until the window ends.

Start reading at `measure_training`. Runs in the trial's child; every time is `time.monotonic_ns()`, which the worker
that samples telemetry on the same machine reads too.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Protocol

from workers.devices.base import Report

if TYPE_CHECKING:
    import torch

    from featurize.trial import TrialConfig
    from workers.settings import TrialSettings, WindowSettings

_REPORT_PERIOD_NS = 100_000_000
_STEADY_GAIN = 0.10  # a warm-up step that is faster than every one before by more than this calls for another


class Meter(Protocol):
    """What differs between devices: waiting for the device, and reading its allocator."""

    device: torch.device

    def synchronize(self) -> None: ...

    def memory(self) -> dict[str, float]: ...


def measure_training(config: TrialConfig, meter: Meter, settings: TrialSettings, seed: int, report: Report) -> None:
    """Train one trial and report `built`, `warmup`, `window`, `step` (thinned) and `result` with the labels.

    One step copies the batch to the device, runs forward, loss, backward and optimizer, and waits for the device, as
    a loop that reads its loss does.
    """
    import torch

    from featurize.families import get_family
    from featurize.training import TrainingStep

    family = get_family(config.family)
    torch.manual_seed(seed)
    with meter.device:  # parameters are made where they are used: no copy in host memory first
        model = family.build(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report("built", parameters=parameters)
    step = TrainingStep(model, config, meter.device)
    inputs, targets = family.batch(config, torch.device("cpu"))
    reporter = _StepReporter(meter, report)

    def run_step() -> float:
        start_ns = time.monotonic_ns()
        step(
            tuple(tensor.to(meter.device, non_blocking=True) for tensor in inputs),
            targets.to(meter.device, non_blocking=True),
        )
        meter.synchronize()
        end_ns = time.monotonic_ns()
        step_ms = (end_ns - start_ns) / 1e6
        reporter.step(end_ns, step_ms)
        return step_ms

    report("warmup", t_ns=time.monotonic_ns())
    _warm_up(run_step, meter, settings.window)
    start_ns = time.monotonic_ns()
    report("window", t_ns=start_ns)
    step_times_ms, ended = _measure_window(run_step, settings.window, start_ns)
    end_ns = time.monotonic_ns()
    reporter.flush()
    memory = meter.memory()
    report(
        "result",
        window_end_ns=end_ns,
        window_ended=ended,
        values={
            **{name: value for name, value in memory.items() if name.startswith("peak_")},
            "step_time_ms": statistics.median(step_times_ms),
            "steps": len(step_times_ms),
        },
    )


def _warm_up(run_step, meter: Meter, window: WindowSettings) -> None:
    """At least `warmup_steps`; then until memory and step time are steady or `warmup_max_seconds` have passed."""
    deadline_ns = time.monotonic_ns() + int(window.warmup_max_seconds * 1e9)
    times_ms: list[float] = []
    reserved_mib: list[float] = []
    while True:
        if len(times_ms) >= window.warmup_steps and (
            _steady(times_ms, reserved_mib) or time.monotonic_ns() >= deadline_ns
        ):
            return
        times_ms.append(run_step())
        reserved_mib.append(meter.memory()["reserved_mib"])


def _steady(times_ms: list[float], reserved_mib: list[float]) -> bool:
    """Whether the allocator has stopped growing and steps no longer get faster.

    It looks for a trend only: on a busy machine step times scatter for ever, and that is the window's business.
    """
    if len(times_ms) < 2:
        return False
    grown = reserved_mib[-1] > 1.01 * reserved_mib[-2]
    faster = times_ms[-1] < (1 - _STEADY_GAIN) * min(times_ms[:-1])
    return not grown and not faster


def _measure_window(run_step, window: WindowSettings, start_ns: int) -> tuple[list[float], str]:
    """Step times in ms, and why the window ended: `steady`, `max_seconds` or `fixed`."""
    times_ms: list[float] = []
    spread = RunningSpread()
    while True:
        times_ms.append(run_step())
        spread.add(times_ms[-1])
        elapsed_s = (time.monotonic_ns() - start_ns) / 1e9
        if elapsed_s >= window.max_seconds:
            if window.kind == "adaptive":
                return times_ms, "max_seconds"
            if len(times_ms) >= window.min_steps:
                return times_ms, "fixed"
        elif (
            window.kind == "adaptive"
            and elapsed_s >= window.min_seconds
            and len(times_ms) >= window.min_steps
            and spread.relative_half_width() <= window.tolerance
        ):
            return times_ms, "steady"


class RunningSpread:
    """Welford's running variance: the window asks after every step, and a small model takes thousands a second."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)

    def relative_half_width(self) -> float:
        """Half-width of the 95 % confidence interval of the mean, relative to it (normal approximation)."""
        if self.count < 2 or self.mean <= 0:
            return math.inf
        return 1.96 * math.sqrt(self._squares / (self.count - 1) / self.count) / self.mean


class _StepReporter:
    """Reports steps at most every 100 ms: a tiny model takes thousands a second, and the worker shares the cores."""

    def __init__(self, meter: Meter, report: Report):
        self._meter = meter
        self._report = report
        self._last_ns = 0
        self._unsent: tuple[int, float] | None = None

    def step(self, t_ns: int, step_ms: float) -> None:
        self._unsent = (t_ns, step_ms)
        if t_ns - self._last_ns >= _REPORT_PERIOD_NS:
            self.flush()

    def flush(self) -> None:
        if self._unsent is None:
            return
        t_ns, step_ms = self._unsent
        self._last_ns, self._unsent = t_ns, None
        memory = self._meter.memory()
        values = {name: memory[name] for name in ("allocated_mib", "reserved_mib") if name in memory}
        self._report("step", t_ns=t_ns, values={"step_time_ms": step_ms, **values})
