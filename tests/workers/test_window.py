"""Warm-up and the measured window, on scripted steps with a clock of their own; then the loop itself, on the CPU."""

import itertools
import random
import statistics

import pytest

from conf.errors import UsageError
from featurize.families import get_family
from workers.devices.cpu import CpuMeter
from workers.devices.training import MemoryWatch, StepPace, measure_training, measure_window, warm_up
from workers.settings import TrialSettings, WindowSettings

ADAPTIVE = WindowSettings(kind="adaptive")


class Script:
    """Runs steps of the given times; the last one repeats. `reserved` and `peak` likewise, in MiB after each step."""

    def __init__(self, times_ms, reserved=(100.0,), peak=None):
        self._times_ms, self._reserved, self._peak = times_ms, reserved, peak or reserved
        self.now_ns = self.steps = self.reads = 0
        self.memory = MemoryWatch(self._read)

    def _read(self):
        self.reads += 1
        at = max(0, self.steps - 1)
        reserved = self._reserved[min(at, len(self._reserved) - 1)]
        return {"reserved_mib": reserved, "peak_reserved_mib": self._peak[min(at, len(self._peak) - 1)]}

    def step(self):
        times = self._times_ms
        step_ms = times(self.steps) if callable(times) else times[min(self.steps, len(times) - 1)]
        self.steps += 1
        self.now_ns += int(step_ms * 1e6)
        self.memory.step(self.now_ns)
        return self.now_ns, step_ms

    def warm_up(self, window=ADAPTIVE, **settings):
        return warm_up(self.step, self.memory, window, **settings)

    def window(self, window=ADAPTIVE, steady=lambda: True):
        return measure_window(self.step, self.memory, steady, window, self.now_ns)


def test_a_long_first_step_is_warm_up_and_no_more():
    assert Script([900, 300]).warm_up() == 3


def test_autotuning_steps_are_waited_for():
    script = Script([5000, 900, 700, 500, 300])
    assert script.warm_up() >= 6, "the groups that are compared must lie behind the last slow step"


def test_warm_up_of_a_tiny_model_takes_a_fraction_of_a_second():
    script = Script(lambda step: 400.0 if step == 0 else 0.3 * random.Random(step).uniform(0.9, 1.3))
    script.warm_up()
    assert 0.2e9 <= script.now_ns - 400e6 <= 0.4e9
    assert script.reads <= 5 + 30, "memory is not read after every step"


def test_rising_clocks_are_a_trend():
    script = Script(lambda step: 10 + 10 * 0.97**step)
    script.warm_up()
    assert script.step()[1] < 11.2


def test_memory_that_still_grows_keeps_it_warming_up():
    script = Script([300], reserved=[100, 200, 300, 300, 400, 400])
    assert script.warm_up() == 7


def test_warm_up_ends_at_its_limit_when_nothing_gets_steady():
    script = Script([50], reserved=range(100, 10_000, 10))
    script.warm_up()
    assert script.now_ns == pytest.approx(20e9, abs=60e6)


def test_steps_of_twenty_seconds_are_warmed_up_with_two():
    script = Script([21_000, 20_000], reserved=[100, 300])
    assert script.warm_up() == 2


def test_a_loss_scale_that_skips_optimizer_steps_is_waited_for_but_not_for_ever():
    script = Script([300])
    assert script.warm_up(optimizer_ready=lambda: script.steps >= 9) == 9
    assert Script([300]).warm_up(optimizer_ready=lambda: False) == 32


def test_a_steady_window_lasts_min_seconds():
    window = Script([10]).window()
    assert (window.ended, window.end_ns) == ("steady", pytest.approx(1.0e9, abs=60e6))
    assert window.half_width_ms == 0


def test_a_window_waits_for_the_word_of_the_worker():
    script = Script([10])
    asked = []
    window = script.window(steady=lambda: asked.append(script.now_ns) or script.now_ns >= 3e9)
    assert (window.ended, window.end_ns) == ("steady", pytest.approx(3e9, abs=60e6))
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 10e6, "asking costs a system call"
    assert Script([10]).window(steady=lambda: False).ended == "max_seconds"


def test_a_new_peak_of_memory_prolongs_the_window():
    script = Script([250], reserved=[100], peak=[100, 100, 100, 100, 150])
    window = script.window()
    assert (window.ended, len(window.step_times_ms)) == ("steady", 10)


def test_steps_of_warm_up_count_for_the_peak():
    script = Script([4000])
    script.warm_up()
    assert len(script.window().step_times_ms) == 5


def test_long_steps_stay_inside_max_seconds():
    assert len(Script([20_000]).window().step_times_ms) == 3
    window = Script([25_000]).window()
    assert (window.ended, len(window.step_times_ms)) == ("max_seconds", 2), "a third would end at 75 s"
    assert len(Script([70_000]).window().step_times_ms) == 1


def test_a_fixed_window_lasts_its_seconds_whatever_is_steady():
    fixed = WindowSettings(kind="fixed", seconds=2.0)
    window = Script([10]).window(fixed, steady=lambda: pytest.fail("asked"))
    assert (window.ended, len(window.step_times_ms)) == ("fixed", 200)
    window = Script([900]).window(WindowSettings(kind="fixed", seconds=0.05, min_steps=3))
    assert len(window.step_times_ms) == 3


@pytest.mark.parametrize(
    ("step_ms", "memory"), [(0.5, 0.0), (0.5, 0.7), (5.0, 0.7), (20.0, 0.0), (60.0, 0.0), (300.0, 0.0), (1000.0, 0.0)]
)
def test_the_interval_holds_the_typical_step_time_of_noisy_steps_with_pauses(step_ms, memory):
    """Each step's time takes over `memory` of the last one's deviation; one step in 50 is a pause of the machine."""
    held = 0
    for seed in range(60):
        draw, noise = random.Random(seed), [0.0]

        def step(_, draw=draw, noise=noise):
            noise[0] = memory * noise[0] + draw.gauss(0, 0.02)
            return step_ms * (1 + noise[0]) + (step_ms * 4 if draw.random() < 0.02 else 0)

        window = Script(step).window()
        held += abs(statistics.median(window.step_times_ms) - step_ms) <= window.half_width_ms
    assert held >= 0.93 * 60


def test_drift_is_not_steady():
    pace = StepPace()
    for index in range(60):
        pace.add(100 + index)
    assert not pace.steady(0.02)


def test_wrong_settings_say_what_is_allowed():
    with pytest.raises(UsageError, match=r"window.utilization_tolerance must be a number >= 0, got -1"):
        WindowSettings(kind="adaptive", utilization_tolerance=-1)
    with pytest.raises(UsageError, match=r"window.memory_steps must be an integer >= 0, got 'many'"):
        WindowSettings(kind="adaptive", memory_steps="many")


class Link:
    """A worker that says nothing but `steady`."""

    together = None

    def __init__(self, ahead=False):
        self.ahead, self.events, self.order = ahead, [], []

    def report(self, event, **values):
        self.events.append((event, values))
        self.order.append(event)

    def received(self, word):
        return word == "steady"

    def wait_for_go(self):
        self.order.append("go")
        return self.ahead


@pytest.mark.parametrize("ahead", [False, True])
def test_the_loop_reports_its_events_and_labels(ahead):
    link = Link(ahead)
    config = get_family("mlp").Config(batch_size=8, input_size=32, classes=4, depth=2)
    window = WindowSettings(kind="adaptive", min_seconds=0.2, max_seconds=2.0, tolerance=10.0)

    def open_meter():
        link.order.append("meter")
        return CpuMeter()

    measure_training(config, open_meter, TrialSettings(window=window), 0, link)
    assert link.order[: 3 + ahead] == (["go"] if ahead else []) + ["meter", "built", "warmup"]
    assert [event for event in link.order if event != "step"][-3:] == ["warmup", "window", "result"]
    events = dict(link.events)
    values = events["result"]["values"]
    assert values["steps"] >= 5 and values["step_time_ms"] > 0 and values["peak_memory_mib"] > 0
    assert values["half_widths"]["step_time_ms"] >= 0
    assert events["result"]["window_ended"] == "steady"
    assert events["result"]["window_end_ns"] - events["window"]["t_ns"] >= 0.2e9
    assert events["built"]["parameters"] > 0
