"""The measured training loop that real devices share: build, warm up until steady, measure, and profile if asked to.

Start reading at `measure_training`. It runs in the trial's child. Every time is `time.monotonic_ns()`, the clock of the
worker that samples telemetry on the same machine. `warm_up` and `measure_window` decide by step times, memory and the
worker's message. Torch is imported on use.

In a trial with several ranks, `Lockstep` makes all run their steps together. The first rank decides when the warm-up
and the window end, and announces each step; the others follow. Announcements go over gloo also on GPUs: they add no
kernel to the measured ones.

After the trial's labels, `report_kernels` runs a few training steps under torch.profiler and reports their kernels;
`kernels_of_trace` turns the profiler's trace into rows of `kernels`. On a GPU each row describes a kernel by CUPTI, on
the CPU an operator.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from workers.devices import Link, Place, TrialSettings, WindowSettings
from workers.devices.steadiness import mean_half_width, parts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from featurize.configs.trial import TrialConfig


_STEP, _WINDOW, _END = range(3)
RunStep = Callable[[], tuple[int, float]]  # runs one step; returns (monotonic time of its end in ns, duration in ms)
_MEMORY_PERIOD_NS = 50_000_000  # reading the allocator's figures costs a tenth of a millisecond
_FIRST_STEPS = 5  # memory is read after each of them
_GROWTH = 1.002  # smaller ratios are the noise of a process's resident set
_LONG_NS = 1_000_000_000
_GROUP_NS = 100_000_000  # length of each of the two groups of steps that warm-up compares
_CHECK_NS = 25_000_000
_SURE_STEPS = 4  # a group of fewer steps is compared coarsely
_OPTIMIZER_STEPS = 32  # after 16 overflows a loss scale of 2**16 is 1, and the optimizer will never step
_BATCH_MS = 50.0  # length of the batches into which step times are grouped
_MIN_BATCHES = 4
_OUTLIER_BATCHES = 7  # with fewer, a slow stretch cannot be distinguished from a slow step
_ASK_NS = 10_000_000
_REPORT_PERIOD_NS = 100_000_000
# Up to this size one thread of the host builds a model in about a second; the device builds larger ones faster.
_HOST_PARAMETERS = 50_000_000
_BATCHES_APART = 1_000_003  # distance between the seeds of two ranks' batches


class Meter(Protocol):
    """The differences between devices: waiting for the device, and reading its allocator."""

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

    One step copies the batch to the device, runs forward, loss, backward and optimizer, and waits for the device, like
    a loop that reads its loss. A trial that is prepared ahead makes its batch on the host, and its model unless that is
    large. At its turn it calls `open_meter`, before which nothing may touch the device, and moves them. A rank at
    `place` trains beside the others, on its own batch.
    """
    import torch

    from featurize.families import get_family, layers_of, loss_of
    from featurize.training.training_step import TrainingStep, state_tensors

    family = get_family(config.family)

    def make_batch() -> tuple[Any, Any]:
        # The batch is the same wherever the model was built; the model is the same on each rank.
        torch.manual_seed(seed if place is None else seed + place.rank * _BATCHES_APART)
        inputs, targets = family.batch(config, torch.device("cpu"))
        return inputs, targets

    model = batch = None
    if link.ahead:
        if sum(layer.parameters for layer in layers_of(config)) <= _HOST_PARAMETERS:
            torch.manual_seed(seed)
            model = family.build(config)
        batch = make_batch()
        link.wait_for_go()
    meter = open_meter()
    if model is None:
        torch.manual_seed(seed)
        with meter.device:  # make parameters on the device, without a copy in host memory
            model = family.build(config)
    else:
        model = model.to(meter.device)  # moves one parameter after another: no second copy on the device
    inputs, targets = batch or make_batch()
    link.report("built", parameters=sum(parameter.numel() for parameter in model.parameters()))
    ranks = None if place is None else Lockstep(place, meter.device)
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
        return config.optimizer == "sgd" or any(True for _ in state_tensors(step.optimizer))  # plain SGD has no state

    def begin_window() -> int:
        reporter.flush()
        start_ns = time.monotonic_ns()
        link.report("window", t_ns=start_ns)
        return start_ns

    link.report("warmup", t_ns=time.monotonic_ns())
    if ranks is not None and not ranks.leads:
        ends_ns, times_ms = zip(*ranks.follow(run_step, begin_window), strict=True)
        window = MeasuredWindow(list(times_ms), ends_ns[-1], "fixed")
    else:
        window = _decide_window(run_step, begin_window, memory, settings.window, link, optimizer_ready, ranks)
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

    while link.together is not None and link.awaits("bye"):  # keep the device busy during the partners' windows
        train_step()
    if settings.kernels.steps and ranks is None and link.together is None and link.labels_taken():
        report_kernels(train_step, settings.kernels.steps, step_time_ms, meter.device.type, link)


def _decide_window(
    run_step: RunStep,
    begin_window: Callable[[], int],
    memory: MemoryWatch,
    rules: WindowSettings,
    link: Link,
    optimizer_ready: Callable[[], bool],
    ranks: Lockstep | None,
) -> MeasuredWindow:
    """Warm up, measure, and announce the steps to the other `ranks`, if any."""
    run = run_step if ranks is None else ranks.leading(run_step)
    warm_up(run, memory, rules, optimizer_ready)
    if link.together is not None:  # windows open once all members are warm
        link.report("warm", t_ns=time.monotonic_ns())
        while link.awaits("open"):
            run()
    if ranks is not None:
        ranks.announce(_WINDOW)
    start_ns = begin_window()
    window = measure_window(run, memory, lambda: link.received("steady"), rules, start_ns)
    if ranks is not None:
        ranks.announce(_END)
    return window


def _wrapper(config: TrialConfig) -> Callable[[nn.Module], nn.Module] | None:
    """Return a function that wraps a rank's model; None for a trial with a single process."""
    layout = config.layout
    if layout is None:
        return None
    from featurize.training.sharding import wrap_for_rank

    return lambda model: wrap_for_rank(model, layout)


class _StepReporter:
    """Reports a step at most every 100 ms: a tiny model runs thousands per second, and the worker needs the cores."""

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


class MemoryWatch:
    """Reads an allocator rarely, to not disturb the steps, and tracks when it last grew.

    `read` returns `reserved_mib` and, if the device has one, `peak_reserved_mib` or `peak_memory_mib`.
    """

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self._read = read
        self._read_ns = 0
        self._steps = 0
        self._reserved_mib = self._peak_mib = 0.0
        self._grew_step = self._grew_ns = self._peak_step = 0
        self.values: dict[str, float] = {}  # as last read

    def step(self, t_ns: int) -> None:
        """Record the end of a step. Read memory after each of the first five steps, then at most every 50 ms."""
        self._steps += 1
        if self._steps <= _FIRST_STEPS or t_ns - self._read_ns >= _MEMORY_PERIOD_NS:
            self.look(t_ns)

    def look(self, t_ns: int) -> None:
        """Read memory now."""
        self._read_ns = t_ns
        self.values = self._read()
        reserved_mib = self.values["reserved_mib"]
        peak_mib = self.values.get("peak_reserved_mib", self.values.get("peak_memory_mib", reserved_mib))
        if reserved_mib > _GROWTH * self._reserved_mib:
            self._reserved_mib, self._grew_step, self._grew_ns = reserved_mib, self._steps, t_ns
        if peak_mib > _GROWTH * self._peak_mib:
            self._peak_mib, self._peak_step = peak_mib, self._steps

    def unchanged(self, steps: int, t_ns: int) -> bool:
        """Return whether reserved memory has not grown for `steps` steps, or for a second and at least one step."""
        since = self._steps - self._grew_step
        return since >= steps or (since >= 1 and t_ns - self._grew_ns >= _LONG_NS)

    @property
    def steps_since_peak(self) -> int:
        """Return the number of steps, including warm-up, since the last new peak."""
        return self._steps - self._peak_step


def warm_up(
    run_step: RunStep, memory: MemoryWatch, window: WindowSettings, optimizer_ready: Callable[[], bool] | None = None
) -> int:
    """Run steps until memory and step time are steady; return how many.

    Three conditions must hold. At least `warmup_steps` have run. Reserved memory has not grown over the last steps.
    The median times of the last two groups of steps (0.1 s each, or single longer steps) differ by no more than they
    scatter: lazily loaded kernels, autotuning and rising clocks are over. Warm-up also waits for `optimizer_ready`:
    fp16 skips optimizer steps until its loss scale fits, and the first one allocates the optimizer's state.

    After `warmup_max_seconds` two steps are enough: the second runs with the optimizer's state.
    """
    times_ms: list[float] = []
    ends_ns: list[int] = []
    floor = min(window.warmup_steps, 2)
    if floor == 0 and window.warmup_max_seconds == 0:
        return 0
    deadline_ns: float = math.inf
    check_ns = 0
    while True:
        end_ns, step_ms = run_step()
        times_ms.append(step_ms)
        ends_ns.append(end_ns)
        if len(times_ms) == 1:
            deadline_ns = end_ns - int(step_ms * 1e6) + int(window.warmup_max_seconds * 1e9)
        if len(times_ms) >= floor and end_ns >= deadline_ns:
            return len(times_ms)
        if len(times_ms) < window.warmup_steps or end_ns < check_ns:
            continue
        check_ns = end_ns + _CHECK_NS
        waiting = optimizer_ready is not None and len(times_ms) < _OPTIMIZER_STEPS and not optimizer_ready()
        if not waiting and _no_trend(times_ms, ends_ns, memory):
            return len(times_ms)


def _no_trend(times_ms: list[float], ends_ns: list[int], memory: MemoryWatch) -> bool:
    group = max(1, len(ends_ns) - bisect_left(ends_ns, ends_ns[-1] - _GROUP_NS))
    if len(times_ms) < 2 * group + 1:  # neither group includes the very first step
        return False
    memory.look(ends_ns[-1])
    if not memory.unchanged(group + 1, ends_ns[-1]):
        return False
    before, last = times_ms[-2 * group : -group], times_ms[-group:]
    earlier, latest = statistics.median(before), statistics.median(last)
    if group < _SURE_STEPS:
        return abs(earlier - latest) <= 0.10 * earlier
    scatter = _deviation(before, earlier) + _deviation(last, latest)
    # the standard error of a median is about 1.25 standard deviations divided by the root of the number
    return abs(earlier - latest) <= max(0.03 * earlier, 3 * 1.25 * scatter / math.sqrt(2 * group))


def _deviation(values: list[float], middle: float) -> float:
    """Return the standard deviation, estimated from the median absolute deviation, which ignores outliers."""
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


@dataclass(frozen=True)
class MeasuredWindow:
    """Result of a window. `half_width_ms` belongs to the step time's 95 % interval; None: too few steps."""

    step_times_ms: list[float]
    end_ns: int
    ended: str  # steady | max_seconds | fixed
    half_width_ms: float | None = None


def measure_window(
    run_step: RunStep, memory: MemoryWatch, samples_steady: Callable[[], bool], window: WindowSettings, start_ns: int
) -> MeasuredWindow:
    """Run steps from `start_ns` to the window's end.

    A `fixed` window ends after `max_seconds` and `min_steps`. An `adaptive` one lasts at least `min_seconds` and
    `min_steps`. It then ends once the step time's interval is within its tolerance, memory had no new peak for
    `memory_steps` steps and the worker reports steady samples. It also ends after one step, or later, if another step
    would last past `max_seconds`.
    """
    times_ms: list[float] = []
    pace = StepPace()
    ask_ns = 0
    while True:
        end_ns, step_ms = run_step()
        times_ms.append(step_ms)
        pace.add(step_ms)
        elapsed_s = (end_ns - start_ns) / 1e9
        ended = None
        if window.kind == "fixed":
            if elapsed_s >= window.max_seconds and len(times_ms) >= window.min_steps:
                ended = "fixed"
        elif elapsed_s >= window.max_seconds or (len(times_ms) >= 2 and elapsed_s + step_ms / 1e3 > window.max_seconds):
            ended = "max_seconds"
        elif (
            elapsed_s >= window.min_seconds
            and len(times_ms) >= window.min_steps
            and memory.steps_since_peak >= window.memory_steps
            and end_ns >= ask_ns
            and pace.steady(window.tolerance)
        ):
            ask_ns = end_ns + _ASK_NS
            if samples_steady():
                ended = "steady"
        if ended is not None:
            half_width_ms = pace.half_width_ms()
            return MeasuredWindow(times_ms, end_ns, ended, half_width_ms if math.isfinite(half_width_ms) else None)


class StepPace:
    """The confidence interval of the typical step time, from the medians of batches of 50 ms (or single longer steps).

    A window's label is the median of its steps, because a pause of the machine must not count. Batches are clipped to
    5 deviations around their median for the same reason. The cost is negligible at thousands of steps per second.
    """

    def __init__(self) -> None:
        self._open_ms: list[float] = []
        self._open_total_ms = 0.0
        self._batches_ms: list[float] = []
        self._judged = 0  # batches at the last verdict
        self._verdict = False

    def add(self, step_ms: float) -> None:
        """Record the end of a step."""
        self._open_ms.append(step_ms)
        self._open_total_ms += step_ms
        if self._open_total_ms >= _BATCH_MS:
            self._batches_ms.append(statistics.median(self._open_ms))
            self._open_ms.clear()
            self._open_total_ms = 0.0

    def steady(self, tolerance: float) -> bool:
        """Return whether the half-width is at most `tolerance` times the step time, over the batches so far."""
        batches = self._batches_ms
        due = self._judged + 1 if self._verdict else 1.05 * self._judged + 1
        if len(batches) >= max(_MIN_BATCHES, due):
            self._judged = len(batches)
            self._verdict = self.half_width_ms() <= tolerance * statistics.fmean(batches)
        return self._verdict

    def half_width_ms(self) -> float:
        """Return the half-width of the 95 % confidence interval in ms; infinite before the second batch."""
        values = self._batches_ms
        if len(values) >= _OUTLIER_BATCHES:
            middle = statistics.median(values)
            reach = 5 * max(_deviation(values, middle), 0.002 * middle)
            values = [min(max(value, middle - reach), middle + reach) for value in values]
        groups = [values[a:b] for a, b in parts(len(values))]
        return mean_half_width([math.fsum(group) for group in groups], [len(group) for group in groups])


class Lockstep:
    """Makes a trial's ranks run their steps together. The constructor returns once all ranks have joined.

    Args:
        place: This rank's place.
        device: This rank's device: nccl connects ranks on GPUs, gloo ranks on the CPU.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks run on one node
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{place.store}",
            rank=place.rank,
            world_size=place.ranks,
            device_id=device if on_gpu else None,
        )
        self.leads = place.rank == 0
        self._group = dist.new_group(backend="gloo") if on_gpu else dist.group.WORLD

    def leading(self, run_step: RunStep) -> RunStep:
        """Return `run_step` for the first rank: it makes the others run a step beside it."""

        def run() -> tuple[int, float]:
            self.announce(_STEP)
            return run_step()

        return run

    def follow(self, run_step: RunStep, window_begins: Callable[[], object]) -> Iterator[tuple[int, float]]:
        """Run the steps that the first rank announces; yield those of the window."""
        in_window = False
        while (word := self.announce(_END)) != _END:
            if word == _WINDOW:
                in_window = True
                window_begins()
                continue
            step = run_step()
            if in_window:
                yield step

    def announce(self, word: int) -> int:
        """Send a word from the first rank; return it on every rank. The other ranks' argument is ignored.

        `_STEP` makes the others run a step, `_WINDOW` says that the next step is the window's first, `_END` that no
        more steps follow.
        """
        import torch
        import torch.distributed as dist

        first_word = torch.tensor(word)
        dist.broadcast(first_word, 0, group=self._group)
        return int(first_word)


# ---- kernels under torch.profiler

_BUDGET_MS = 10_000.0  # longest time of all profiled steps; the worker waits half a minute after the labels
_ROWS_A_REPORT = 100
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the trace
_TYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "int": "int32",
    "long int": "int64",
    "long": "int64",
    "bool": "bool",
    "unsigned char": "uint8",
    "signed char": "int8",
}
_NO_TENSORS = ("", "Scalar", "ScalarList")
_ARGUMENTS = (
    "stride",
    "padding",
    "dilation",
    "groups",
    "output_padding",
    "transposed",
    "dim",
    "is_causal",
    "reduction",
)
_OPTIMIZER, _BACKWARD = "Optimizer.", "autograd::engine"  # prefixes of the names of spans
_DIMS_CHARACTERS = 3_000  # the worker refuses longer ones
_SHOWN = 300  # characters of an error

Event = Mapping[str, Any]


def report_kernels(train_step: Callable[[], None], steps: int, step_time_ms: float, device: str, link: Link) -> None:
    """Profile up to `steps` training steps and report `kernels`, then `profiled`; never raises for a failure.

    Args:
        train_step: Runs one step and waits for the device.
        steps: Steps to profile; fewer if they would take more than ten seconds.
        step_time_ms: Measured time of a step, in ms.
        device: Type of the torch device, such as cuda.
        link: The connection to the worker.
    """
    steps = min(steps, int(_BUDGET_MS / max(step_time_ms, 1e-3)))
    problem, rows = None, []
    if steps < 1:
        problem = f"a step takes {step_time_ms / 1e3:.1f} s, too long for the profiler"
    else:
        try:
            rows = kernels_of_trace(profiled_trace(train_step, steps, device), steps)
        except Exception as error:  # the run is measured even if the profiler's libraries fail
            problem = f"{type(error).__name__}: {error}"[:_SHOWN]
        if problem is None and not rows:
            problem = "the profiler saw no kernel; CUPTI may be in use or not permitted"
    report_rows(rows, problem, link)


def report_rows(rows: list[dict[str, Any]], problem: str | None, link: Link) -> None:
    """Report rows of `kernels` in parts, then `profiled`."""
    for start in range(0, len(rows), _ROWS_A_REPORT):
        link.report("kernels", rows=rows[start : start + _ROWS_A_REPORT])
    link.report("profiled", problem=problem)


def profiled_trace(train_step: Callable[[], None], steps: int, device: str) -> list[Event]:
    """Run `steps` steps under torch.profiler, after one for its warm-up; return the events of its trace."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities):
        train_step()
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(steps):
            train_step()
    descriptor, path = tempfile.mkstemp(suffix=".json")  # only the exported trace has grid, block and registers
    os.close(descriptor)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            events: list[Event] = json.load(file)["traceEvents"]
    finally:
        os.unlink(path)
    return events


def kernels_of_trace(events: Iterable[Event], steps: int) -> list[dict[str, Any]]:
    """Return rows of `kernels`: one per kernel, operator and shapes, with the median duration and the count.

    A kernel belongs to the operator that PyTorch dispatches: `aten::convolution`, not the outer `aten::conv2d` or the
    inner `aten::cudnn_convolution`. A CPU's trace has no kernels; its rows describe operators.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    calls = list(_calls([event for event in complete if event.get("cat") in ("cpu_op", "user_annotation")]))
    on_device = [event for event in complete if event.get("cat") in _ON_DEVICE]
    durations: dict[Hashable, list[float]] = defaultdict(list)
    rows: dict[Hashable, dict[str, Any]] = {}

    def add(row: dict[str, Any], duration_us: float) -> None:
        key = tuple(row.values())
        rows.setdefault(key, row)
        durations[key].append(duration_us)

    if on_device:
        by_id = {call["args"].get("External id"): (operator, phase) for call, operator, phase in calls}
        for event in on_device:
            operator, phase = by_id.get(event["args"].get("External id"), (None, None))
            add(_kernel(event, operator, phase), float(event["dur"]))
    else:
        for call, operator, phase in calls:
            is_operator = "::" in call["name"] and not call["name"].startswith((_BACKWARD, "torch::autograd"))
            if operator is call and is_operator:
                add({**_operator(call, phase), "timing": "cpu"}, float(call["dur"]))
    return [
        {**row, "duration_us": statistics.median(durations[key]), "count": len(durations[key]), "steps": steps}
        for key, row in rows.items()
        if statistics.median(durations[key]) > 0
    ]


def _calls(spans: list[Event]) -> Iterator[tuple[Event, Event | None, str]]:
    """Yield each call of an operator, its dispatched operator, and its phase.

    Calls of a thread are nested: a call that begins before another's end is inside it.
    """
    threads: dict[Hashable, list[Event]] = defaultdict(list)
    for span in spans:
        threads[span.get("pid"), span.get("tid")].append(span)
    for thread in threads.values():
        # If two begin together, the longer one is outside.
        thread.sort(key=lambda span: (span["ts"], -span["dur"], span["args"].get("Ev Idx", 0)))
        outer: list[Event] = []
        for span in thread:
            while outer and span["ts"] >= outer[-1]["ts"] + outer[-1]["dur"]:
                outer.pop()
            outer.append(span)
            if span.get("cat") == "cpu_op":
                yield span, _find_dispatched(outer), _phase(outer)


def _find_dispatched(outer: Sequence[Event]) -> Event | None:
    """Return the outermost of nested calls that PyTorch's dispatcher runs as one operator; None without any."""
    for call in outer:
        if call["name"].startswith("aten::") and not _is_composite(call["name"]):
            return call
    operators = [call for call in outer if call.get("cat") == "cpu_op" and not call["name"].startswith(_BACKWARD)]
    return operators[-1] if operators and not operators[-1]["name"].startswith("aten::") else None


@functools.cache
def _is_composite(name: str) -> bool:
    """Return whether every overload of an operator is decomposed before dispatch, like aten::linear."""
    import torch

    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None:
        return False
    names = [name if overload == "default" else f"{name}.{overload}" for overload in packet.overloads()]
    # An `out` variant is never composite, and no model calls it; some overloads exist in TorchScript only.
    known = [overload for overload in names if not overload.endswith("out") and torch._C._dispatch_has_kernel(overload)]
    return bool(known) and all(
        torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd") for overload in known
    )


def _phase(outer: Sequence[Event]) -> str:
    if any(span["name"].startswith(_OPTIMIZER) for span in outer):
        return "optimizer"
    return "backward" if any(span["name"].startswith(_BACKWARD) for span in outer) else "forward"


def _operator(call: Event, phase: str | None) -> dict[str, Any]:
    arguments = call["args"]
    types = [name for name in arguments.get("Input type", ()) if name not in _NO_TENSORS]
    return {
        "phase": phase,
        "operator": call["name"],
        "dims": dims_text(arguments.get("Input Dims", []), _named_arguments(call)),
        "dtype": _TYPES.get(types[0], types[0]) if types else None,
    }


def dims_text(shapes: Sequence[Any], arguments: Mapping[str, Any] | None = None) -> str:
    """Return the column `dims`; for an operator on very many tensors, the numbers of tensors and elements."""
    dims: dict[str, Any] = {"shapes": shapes, **({"arguments": arguments} if arguments else {})}
    text = json.dumps(dims, sort_keys=True, separators=(",", ":"))
    if len(text) <= _DIMS_CHARACTERS:
        return text
    tensors = list(_flat(shapes))
    return json.dumps({"elements": sum(map(math.prod, tensors)), "tensors": len(tensors)}, separators=(",", ":"))


def _flat(shapes: Sequence[Any]) -> Iterator[Sequence[int]]:
    """Yield the shapes of tensors in nested lists of shapes."""
    for shape in shapes:
        if any(isinstance(size, list | tuple) for size in shape):
            yield from _flat(shape)
        elif shape:
            yield shape


def _named_arguments(call: Event) -> dict[str, Any]:
    """Return the known arguments that decide what is computed, such as the stride."""
    values = call["args"].get("Concrete Inputs", ())
    named = {}
    for name, text in zip(_argument_names(call["name"]), values, strict=False):
        if name in _ARGUMENTS and text:
            try:
                named[name] = json.loads(text.lower() if text in ("True", "False") else text)
            except ValueError:
                continue
    return named


@functools.cache
def _argument_names(name: str) -> tuple[str, ...]:
    import torch

    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None) if name.startswith("aten::") else None
    if packet is None or "default" not in packet.overloads():
        return ()
    return tuple(argument.name for argument in packet.default._schema.arguments)


def _kernel(event: Event, operator: Event | None, phase: str | None) -> dict[str, Any]:
    arguments = event["args"]
    row: dict[str, Any] = {"phase": phase, "operator": "unknown", "dims": None, "dtype": None}
    if operator is not None:
        row = _operator(operator, phase)
    row["kernel"] = event["name"]
    for kind in ("grid", "block"):
        extent = arguments.get(kind) or [None] * 3
        row |= {f"{kind}_{axis}": size for axis, size in zip("xyz", extent, strict=True)}
    figures = {
        "blocks_per_sm": "blocks per SM",
        "warps_per_sm": "warps per SM",
        "registers_per_thread": "registers per thread",
        "shared_memory_bytes": "shared memory",
        "stream": "stream",
    }
    return {**row, **{column: arguments.get(name) for column, name in figures.items()}, "timing": "cupti"}
