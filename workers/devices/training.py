"""The measured training loop that real devices share: build, warm up until steady, measure until the window ends.

Start reading at `measure_training`; `window.py` holds the rules. Runs in the trial's child; every time is
`time.monotonic_ns()`, which the worker that samples telemetry on the same machine reads too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from workers.devices.base import Link, Place
from workers.devices.profiling import report_kernels
from workers.devices.window import MeasuredWindow, MemoryWatch, RunStep, followed_window, measure_window, warm_up

if TYPE_CHECKING:
    import torch
    from torch import nn

    from featurize.configs.trial import TrialConfig
    from workers.devices.lockstep import Lockstep
    from workers.settings import TrialSettings, WindowSettings

_REPORT_PERIOD_NS = 100_000_000
# Up to here one thread of the host has a model ready within a second or so; larger ones are made quicker on the device.
_HOST_PARAMETERS = 50_000_000
_BATCHES_APART = 1_000_003  # between the seeds of two ranks' batches


class Meter(Protocol):
    """The part that differs between devices: waiting for the device, and reading its allocator."""

    device: torch.device

    def synchronize(self) -> None: ...

    def memory(self) -> dict[str, float]: ...


def measure_training(
    config: TrialConfig,
    open_meter: Callable[[], Meter],
    settings: TrialSettings,
    seed: int,
    link: Link,
    place: Place | None = None,
) -> None:
    """Train one trial and report `built`, `warmup`, `window`, `step` (thinned) and `result` with the labels.

    One step copies the batch to the device, runs forward, loss, backward and optimizer, and waits for the device, as
    a loop that reads its loss does. A trial that is made ready ahead makes its batch, and its model unless that is
    large, on the host and moves them when it is its turn: only then is `open_meter` called, before which nothing may
    touch the device. A rank at `place` trains beside the others, on a batch of its own.
    """
    import torch

    from featurize.families import get_family, layers_of, loss_of
    from featurize.job.layers import totals
    from featurize.training.training_step import TrainingStep

    family = get_family(config.family)

    def make_batch() -> tuple[Any, Any]:
        # The same batch wherever the model was built; the same model on each rank.
        torch.manual_seed(seed if place is None else seed + place.rank * _BATCHES_APART)
        inputs, targets = family.batch(config, torch.device("cpu"))
        return inputs, targets

    model = batch = None
    if link.ahead:
        if totals(layers_of(config)).parameters <= _HOST_PARAMETERS:
            torch.manual_seed(seed)
            model = family.build(config)
        batch = make_batch()
        link.wait_for_go()
    meter = open_meter()
    if model is None:
        torch.manual_seed(seed)
        with meter.device:  # parameters are made where they are used: no copy in host memory first
            model = family.build(config)
    else:
        model = model.to(meter.device)  # parameter by parameter: no second copy on the device
    inputs, targets = batch or make_batch()
    link.report("built", parameters=sum(parameter.numel() for parameter in model.parameters()))
    ranks = None if place is None else _joined(place, meter.device)
    step = TrainingStep(model, config, meter.device, loss=loss_of(config), wrap=_wrapper(config))
    memory = MemoryWatch(meter.memory)
    reporter = _StepReporter(memory, link)

    def train_step() -> None:
        step(
            tuple(tensor.to(meter.device, non_blocking=True) for tensor in inputs),
            targets.to(meter.device, non_blocking=True),
        )
        meter.synchronize()

    def run_step() -> tuple[int, float]:
        start_ns = time.monotonic_ns()
        train_step()
        end_ns = time.monotonic_ns()
        step_ms = (end_ns - start_ns) / 1e6
        memory.step(end_ns)
        reporter.step(end_ns, step_ms)
        return end_ns, step_ms

    def optimizer_ready() -> bool:
        return config.optimizer == "sgd" or any(True for _ in step.optimizer_tensors())  # plain SGD keeps no state

    def begin_window() -> int:
        reporter.flush()
        start_ns = time.monotonic_ns()
        link.report("window", t_ns=start_ns)
        return start_ns

    link.report("warmup", t_ns=time.monotonic_ns())
    if ranks is not None and not ranks.leads:
        window = followed_window(ranks.followed(run_step, begin_window))
    else:
        window = _decided_window(run_step, begin_window, memory, settings.window, link, optimizer_ready, ranks)
    reporter.flush()
    step_time_ms = statistics.median(window.step_times_ms)
    half_widths = {} if window.half_width_ms is None else {"step_time_ms": window.half_width_ms}
    link.report(
        "result",
        window_end_ns=window.end_ns,
        window_ended=window.ended,
        values={
            **{name: value for name, value in meter.memory().items() if name.startswith("peak_")},
            "step_time_ms": step_time_ms,
            "steps": len(window.step_times_ms),
            "half_widths": half_widths,
        },
    )

    while link.together is not None and link.awaits("bye"):  # its partners' windows see it at work
        train_step()
    if settings.kernels.steps and ranks is None and link.together is None and link.labels_taken():
        report_kernels(train_step, settings.kernels.steps, step_time_ms, meter.device.type, link)


def _decided_window(
    run_step: RunStep,
    begin_window: Callable[[], int],
    memory: MemoryWatch,
    rules: WindowSettings,
    link: Link,
    optimizer_ready: Callable[[], bool],
    ranks: Lockstep | None,
) -> MeasuredWindow:
    """Warm up and measure, deciding when either ends; tell it to the other `ranks`, if there are some."""
    run = run_step if ranks is None else ranks.leading(run_step)
    warm_up(run, memory, rules, optimizer_ready)
    if link.together is not None:  # windows open when all are warm
        link.report("warm", t_ns=time.monotonic_ns())
        while link.awaits("open"):
            run()
    if ranks is not None:
        ranks.begin_window()
    start_ns = begin_window()
    window = measure_window(run, memory, lambda: link.received("steady"), rules, start_ns)
    if ranks is not None:
        ranks.end()
    return window


def _joined(place: Place, device: torch.device) -> Lockstep:
    from workers.devices.lockstep import Lockstep

    return Lockstep(place, device)


def _wrapper(config: TrialConfig) -> Callable[[nn.Module], nn.Module] | None:
    """Return what puts a rank's model into its wrapper; None: the trial runs alone."""
    layout = config.layout
    if layout is None:
        return None
    from featurize.training.sharding import wrapped

    return lambda model: wrapped(model, layout)


class _StepReporter:
    """Reports steps at most every 100 ms: a tiny model takes thousands a second, and the worker shares the cores."""

    def __init__(self, memory: MemoryWatch, link: Link):
        self._memory = memory
        self._link = link
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
        memory = self._memory.values
        values = {name: memory[name] for name in ("allocated_mib", "reserved_mib") if name in memory}
        self._link.report("step", t_ns=t_ns, values={"step_time_ms": step_ms, **values})
