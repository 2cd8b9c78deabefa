"""Warm-up, the measured window, and when figures are steady: on scripted steps and signals; then the loop itself."""

import bisect
import itertools
import math
import random
import statistics

import pytest

from workers.devices import WindowSettings
from workers.devices.steadiness import TARGETS, TargetFollower, student_t
from workers.devices.training import MemoryWatch, measure_window, warm_up
from workers.telemetry.sensors import Sample

ADAPTIVE = WindowSettings(kind="adaptive")


class Script:
    """Runs steps of the given times; the last one repeats. `reserved` and `peak` likewise, in MiB after each step."""

    def __init__(self, times_ms, reserved=(100.0,), peak=None):
        self._times_ms, self._reserved, self._peak = times_ms, reserved, peak or reserved
        self.now_ns = self.steps = 0
        self.memory = MemoryWatch(self._read)

    def _read(self):
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


@pytest.mark.parametrize(
    ("times_ms", "reserved_mib", "steps"),
    [
        ([900, 300], [100], 3),  # a long first step is warm-up, and no more
        (
            [5000, 900, 700, 500, 300],
            [100],
            6,
        ),  # autotuning: what is compared lies behind the last slow step
        ([300], [100, 200, 300, 300, 400, 400], 7),  # memory that still grows
        ([21_000, 20_000], [100, 300], 2),  # steps of twenty seconds
    ],
)
def test_warm_up_ends_when_steps_and_memory_are_steady(times_ms, reserved_mib, steps):
    assert Script(times_ms, reserved=reserved_mib).warm_up() == steps


def test_warm_up_ends_at_its_limit_when_nothing_gets_steady():
    script = Script([50], reserved=range(100, 10_000, 10))
    script.warm_up()
    assert script.now_ns == pytest.approx(20e9, abs=60e6)
    for steps in (0, 1):
        at_once = WindowSettings(kind="fixed", seconds=1.0, warmup_steps=steps, warmup_max_seconds=0)
        assert Script([50]).warm_up(at_once) == steps


def test_a_loss_scale_that_skips_optimizer_steps_is_waited_for_but_not_for_ever():
    script = Script([300])
    assert script.warm_up(optimizer_ready=lambda: script.steps >= 9) == 9
    assert Script([300]).warm_up(optimizer_ready=lambda: False) == 32


def test_a_window_waits_for_the_word_of_the_worker():
    script = Script([10])
    asked = []
    window = script.window(steady=lambda: asked.append(script.now_ns) or script.now_ns >= 3e9)
    assert (window.ended, window.end_ns) == ("steady", pytest.approx(3e9, abs=60e6))
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 10e6, "asking costs a system call"
    assert Script([100]).window(steady=lambda: False).ended == "max_seconds"


@pytest.mark.parametrize(
    ("step_ms", "peak_mib", "settings", "ended", "steps"),
    [
        (10, [100], {}, "steady", 100),  # it lasts `min_seconds`
        (250, [100, 100, 100, 100, 150], {}, "steady", 10),  # a new peak of memory prolongs it
        (20_000, [100], {}, "max_seconds", 3),
        (25_000, [100], {}, "max_seconds", 2),  # a third would end at 75 s
        (70_000, [100], {}, "max_seconds", 1),
        (10, [100], {"kind": "fixed", "seconds": 2.0}, "fixed", 200),  # whatever is steady
        (900, [100], {"kind": "fixed", "seconds": 0.05, "min_steps": 3}, "fixed", 3),
    ],
)
def test_a_window_has_the_steps_that_its_settings_say(step_ms, peak_mib, settings, ended, steps):
    def steady():
        assert ended != "fixed", "asked"
        return True

    window = Script([step_ms], peak=peak_mib).window(WindowSettings(**{"kind": "adaptive", **settings}), steady)
    assert (window.ended, len(window.step_times_ms)) == (ended, steps)


@pytest.mark.parametrize(("step_ms", "memory"), [(5.0, 0.7), (20.0, 0.0), (1000.0, 0.0)])
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


TICK_S = 0.1
ORIGIN_S = 100.0


def ns(seconds):
    return int((seconds + ORIGIN_S) * 1e9)


class Signal:
    """A square wave: every step is at `high` for a share `duty` of its time and then at `low`.

    `jitter` and `noise`: relative deviations of a step's length and level; `drift`: how much is missing at 0 s, gone
    with a time constant of 0.3 s.
    """

    def __init__(self, seed, step_s, duty=0.6, high=0.9, low=0.0, jitter=0.01, noise=0.0, drift=0.0, until=65.0):
        draw = random.Random(seed)
        self.mean = high * duty + low * (1 - duty)
        self.step_ends, self._times, self._integrals = [], [-1.5], [0.0]
        self.until, now = until, -1.5
        while now < until + 8:
            length = step_s * max(0.2, 1 + draw.gauss(0, jitter))
            level = high * (1 + draw.gauss(0, noise)) * (1 - drift * math.exp(-max(0, now) / 0.3))
            self._knot(now + duty * length, self._integrals[-1] + level * duty * length)
            now += length
            if duty < 1:
                self._knot(now, self._integrals[-1] + low * (1 - duty) * length)
            self.step_ends.append(now)

    def _knot(self, time, integral):
        self._times.append(time)
        self._integrals.append(integral)

    def integral(self, t):
        at = min(max(1, bisect.bisect_left(self._times, t)), len(self._times) - 1)
        share = (t - self._times[at - 1]) / (self._times[at] - self._times[at - 1])
        return self._integrals[at - 1] + share * (self._integrals[at] - self._integrals[at - 1])


class Source:
    """Readings of a signal as (arrival in s, sensor, sample). `counter_s`: an energy counter that moves so often."""

    def __init__(
        self, signal, seed, sensor="gpm", metric="smact", period_s=0.1, lag_s=0.0, noise=0.0, counter_s=None, ends=1e9
    ):
        draw = random.Random(seed + 1000)
        self.readings = []
        before = -1.4
        now = before + period_s * (0.5 + draw.random() / 2)
        while now < min(ends, signal.until + 5):
            if counter_s is None:
                value = (signal.integral(now) - signal.integral(before)) / (now - before) + draw.gauss(0, noise)
                sample = Sample(ns(now), {metric: value}, since_ns=ns(before))
            else:
                sample = Sample(ns(now), {metric: 300 * signal.integral(math.floor(now / counter_s) * counter_s)})
            self.readings.append((now + lag_s, sensor, sample))
            before, now = now, now + period_s * draw.uniform(0.98, 1.02)


def follow(signal, *sources, sensors=("gpm",), targets=("smact",)):
    """(follower, seconds until it was steady, whether that was before `max_seconds`)."""
    readings = sorted((r for source in sources for r in source.readings), key=lambda reading: reading[0])
    first = bisect.bisect_left(signal.step_ends, 0.0)
    start_s = signal.step_ends[first]
    follower = TargetFollower(ADAPTIVE, sensors, 0.1, {target: TARGETS[target] for target in targets})
    now, reported, begun, step, given = -1.4, -math.inf, False, first + 1, 0
    while now - start_s < min(ADAPTIVE.max_seconds, signal.until):
        now += TICK_S
        new = []
        while given < len(readings) and readings[given][0] <= now:
            new.append(readings[given][1:])
            given += 1
        follower.add(new)
        if now >= start_s and not begun:
            follower.begin(ns(start_s))
            begun = True
        while signal.step_ends[step] <= now:
            if signal.step_ends[step] - reported >= 0.1:
                reported = signal.step_ends[step]
                follower.mark_step(ns(reported))
            step += 1
        if now - start_s >= 0.8 and follower.steady(ns(now)):
            return follower, now - start_s, True
    return follower, now - start_s, False


def trial(seed, step_s, wave=None, until=65.0, **read):
    signal = Signal(seed, step_s, until=until, **(wave or {}))
    target = "power_w" if read.get("counter_s") else "smact"
    sensor = read.get("sensor", "gpm")
    follower, seconds, ended = follow(signal, Source(signal, seed, **read), sensors=(sensor,), targets=(target,))
    true = signal.mean * (300 if read.get("counter_s") else 1)
    return abs(follower.means()[target] - true) <= follower.half_widths()[target] + 1e-9, seconds, ended


NOISY = {"noise": 0.05}
DRIFTING = {"drift": 0.2}
SEEDS = 50
COUNTER = {"sensor": "nvml", "metric": "energy_j"}
# name -> (step in s, the wave, how it is read, seconds within which 9 of 10 windows end)
SIGNALS = {
    "idle": (0.01, {"high": 0.0}, {}, 1.0),
    "saturated": (0.01, {"duty": 1.0, "high": 1.0}, {}, 1.0),
    "3 ms": (0.003, {}, {}, 1.3),
    "10 ms": (0.01, {}, {}, 1.3),
    "40 ms": (0.04, {}, {}, 2.6),
    "100 ms, as the readings": (0.1, {}, {}, 2.0),
    "130 ms": (0.13, {}, {}, 8.0),
    "300 ms": (0.3, {}, {}, 3.2),
    "1 s": (1.0, {}, {}, 7.5),
    "5 s": (5.0, {}, {}, 31.0),
    "10 ms, readings scatter by 0.01": (0.01, NOISY, {"noise": 0.01}, 2.5),
    "40 ms, levels scatter by 5 %": (0.04, NOISY, {"noise": 0.01}, 7.0),
    "300 ms, levels scatter by 5 %": (0.3, NOISY, {}, 25.0),
    "10 ms, 20 % missing at first": (0.01, DRIFTING, {}, 11.0),
    "10 ms, an exporter at 10 Hz that lags": (0.01, {}, {"sensor": "dcgm", "lag_s": 0.3}, 1.8),
    "10 ms, an exporter at 1 Hz": (0.01, {}, {"sensor": "dcgm", "lag_s": 0.3, "period_s": 1.0}, 10.0),
    "10 ms, energy counter": (0.01, {"low": 0.3}, {**COUNTER, "counter_s": 0.02}, 4.0),
    "130 ms, energy counter": (0.13, {"low": 0.3}, {**COUNTER, "counter_s": 0.02}, 6.0),
}


@pytest.mark.spread(5)
@pytest.mark.parametrize("name", SIGNALS)
def test_a_window_ends_soon_and_its_interval_holds_the_true_mean(name):
    step_s, wave, read, limit_s = SIGNALS[name]
    runs = [trial(seed, step_s, wave, until=2 * limit_s, **read) for seed in range(SEEDS)]
    assert sum(held for held, _, _ in runs) >= 0.93 * SEEDS
    assert sorted(seconds for _, seconds, _ in runs)[int(0.9 * SEEDS) - 1] <= limit_s
    assert all(ended for _, _, ended in runs)


def test_a_source_that_never_answers_or_every_30_s_is_not_waited_for():
    signal = Signal(0, 0.01)
    follower, seconds, _ = follow(signal, sensors=("gpm", "nvml"), targets=("smact", "gpu_util", "power_w"))
    assert seconds <= 1.2 and follower.half_widths() == {}
    assert follow(signal, sensors=())[1] <= 1.0
    exporter = Source(signal, 0, sensor="dcgm", period_s=30.0)
    _, seconds, _ = follow(signal, exporter, Source(signal, 0), sensors=("gpm", "dcgm"), targets=("smact", "gpu_util"))
    assert seconds <= 1.2


def test_a_source_that_ends_is_not_waited_for_and_keeps_what_it_told():
    signal = Signal(0, 0.13)
    for others in ((), (Source(signal, 0, sensor="dcgm"),)):
        follower, seconds, ended = follow(signal, Source(signal, 0, ends=3.0), *others, sensors=("gpm", "dcgm"))
        assert ended and 3.0 < seconds < 4.5 and follower.half_widths()["smact"] > ADAPTIVE.utilization_tolerance


def test_gpm_comes_before_dcgm_and_the_energy_counter_before_power_and_the_second_stands_in():
    signal, other = Signal(0, 0.01, low=0.3), Signal(0, 0.01, high=0.5)
    first = Source(signal, 0), Source(signal, 0, **COUNTER, counter_s=0.02)
    second = Source(other, 0, sensor="dcgm"), Source(other, 0, sensor="nvml", metric="power_w")
    watched = {"sensors": ("gpm", "dcgm", "nvml"), "targets": ("smact", "power_w")}
    means = follow(signal, *first, *second, **watched)[0].means()
    assert means == {"smact": pytest.approx(signal.mean, 0.02), "power_w": pytest.approx(300 * signal.mean, 0.02)}
    assert follow(signal, *second, **watched)[0].means() == pytest.approx(dict.fromkeys(means, other.mean), 0.05)


def test_an_average_that_looks_back_to_before_the_first_step_does_not_hold_a_trial():
    follower = TargetFollower(ADAPTIVE, ("nvml",), 0.1, {"gpu_util": TARGETS["gpu_util"]})
    follower.begin(ns(0), ns(-0.3))
    for tick in range(-10, 20):
        busy = min(1.0, max(0.0, tick * 0.1 + 0.3))  # the first step began at -0.3 s, readings average the last second
        follower.add([("nvml", Sample(ns(tick * 0.1), {"gpu_util": 0.97 * busy}))])
        follower.mark_step(ns(tick * 0.1))
    assert follower.steady(ns(1.9)) and follower.means()["gpu_util"] == pytest.approx(0.97)


def test_a_machine_that_has_run_for_months_has_windows_as_well():
    follower = TargetFollower(ADAPTIVE, ("gpm",), 0.1)
    start_ns = 2**53 + 4  # from where on floats hold even numbers only
    follower.begin(start_ns)
    for tick in range(1, 30):
        follower.add([("gpm", Sample(start_ns + 1491 * tick, {"smact": 0.5 if tick % 2 else 0.4}))])
        follower.mark_step(start_ns + 1491 * tick)
        means = follower.means()
    assert means["smact"] == pytest.approx(0.45, abs=0.01)


@pytest.mark.parametrize(
    ("odd", "mean"),
    [
        ({"quality": "repeated"}, 0.5),
        ({"quality": "unavailable"}, 0.5),
        ({"quality": "suspect", "reasons": ("profiling_zero",)}, 0.5),
        ({"quality": "suspect", "reasons": ("power_cap",)}, 0.25),
    ],
)
def test_what_is_no_reading_does_not_count_and_other_doubts_leave_one_in(odd, mean):
    follower = TargetFollower(ADAPTIVE, ("gpm",), 0.1)
    follower.begin(ns(0))
    for tick in range(1, 30):
        follower.add([("gpm", Sample(ns(0.1 * tick), {"smact": 0.5}))])
        follower.add([("gpm", Sample(ns(0.1 * tick + 0.05), {"smact": 0.0}, **odd))])
        follower.mark_step(ns(0.1 * tick))
    assert follower.means()["smact"] == pytest.approx(mean, abs=0.01)


def test_half_widths_are_of_students_distribution():
    assert (student_t(1), student_t(20)) == (12.706, 2.086)
    assert student_t(30) == pytest.approx(2.042, rel=3e-3) and student_t(1000) == pytest.approx(1.962, rel=3e-3)
