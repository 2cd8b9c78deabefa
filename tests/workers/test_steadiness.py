"""When sampled figures are steady, on synthetic signals that repeat with the training step, read as the sensors would.

`python tests/workers/test_steadiness.py` prints how long a window each signal needs.
"""

import bisect
import math
import random
import statistics

import pytest

from workers.devices.steadiness import TARGETS, TargetFollower, mean_half_width, student_t
from workers.settings import WindowSettings
from workers.telemetry.base import Sample

WINDOW = WindowSettings(kind="adaptive")
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
    follower = TargetFollower(WINDOW, sensors, 0.1, {target: TARGETS[target] for target in targets})
    now, reported, begun, step, given = -1.4, -math.inf, False, first + 1, 0
    while now - start_s < min(WINDOW.max_seconds, signal.until):
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
COUNTER = {"sensor": "nvml", "metric": "energy_j"}
# name -> (step in s, the wave, how it is read, seconds within which 9 of 10 windows end)
SIGNALS = {
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


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", SIGNALS)
def test_a_window_ends_soon_and_its_interval_holds_the_true_mean(name):
    step_s, wave, read, limit_s = SIGNALS[name]
    runs = [trial(seed, step_s, wave, until=4 * limit_s, **read) for seed in range(100)]
    assert sum(held for held, _, _ in runs) >= 93
    assert sorted(seconds for _, seconds, _ in runs)[89] <= limit_s
    assert all(ended for _, _, ended in runs)


def test_an_idle_and_a_saturated_unit_are_steady_at_once():
    for wave in ({"high": 0.0}, {"duty": 1.0, "high": 1.0}):
        held, seconds, _ = trial(0, 0.01, wave)
        assert held and seconds < 1.0


def test_a_constant_start_of_a_long_step_is_no_constant():
    signal = Signal(0, 5.0, jitter=0)
    _, seconds, _ = follow(signal, Source(signal, 0))
    assert seconds >= 15, "high for 3 s, then low"


def test_a_source_that_never_answers_is_not_waited_for():
    signal = Signal(0, 0.01)
    follower, seconds, _ = follow(signal, sensors=("gpm", "nvml"), targets=("smact", "gpu_util", "power_w"))
    assert seconds <= 1.2 and follower.half_widths() == {}
    assert follow(signal, sensors=())[1] <= 1.0


@pytest.mark.parametrize("metric", ["gpu_util", "power_w"])
def test_an_average_that_looks_back_to_before_the_first_step_does_not_hold_a_trial(metric):
    scale = {"gpu_util": 0.97, "power_w": 400.0}[metric]
    follower = TargetFollower(WINDOW, ("nvml",), 0.1, {metric: TARGETS[metric]})
    for tick in range(-10, 100):
        now = tick * 0.1
        busy = min(1.0, max(0.0, now + 0.3))  # the first step began at -0.3 s, readings average the last second
        follower.add([("nvml", Sample(ns(now), {metric: scale * (busy - 0.002 * (tick % 2))}))])
        if tick == 0:
            follower.begin(ns(0), ns(-0.3))
        if tick > 0:
            follower.mark_step(ns(now - 0.01))
        if tick >= 10 and follower.steady(ns(now)):
            break
    assert now <= 2.0 and follower.means()[metric] == pytest.approx(scale, rel=0.005)


def test_an_exporter_at_30_s_does_not_hold_a_trial():
    signal = Signal(0, 0.01)
    exporter = Source(signal, 0, sensor="dcgm", period_s=30.0)
    _, seconds, _ = follow(signal, exporter, Source(signal, 0), sensors=("gpm", "dcgm"), targets=("smact", "gpu_util"))
    assert seconds <= 1.2


def test_a_source_that_ends_is_not_waited_for_and_keeps_what_it_told():
    signal = Signal(0, 0.13)
    follower, seconds, ended = follow(signal, Source(signal, 0, ends=3.0))
    assert ended and 3.0 < seconds < 4.5
    assert follower.half_widths()["smact"] > WINDOW.utilization_tolerance


def test_gpm_comes_before_dcgm_and_stands_in_for_nothing():
    signal, other = Signal(0, 0.01), Signal(0, 0.01, high=0.5)
    sources = Source(signal, 0), Source(other, 0, sensor="dcgm")
    follower, _, _ = follow(signal, *sources, sensors=("gpm", "dcgm"))
    assert follower.means()["smact"] == pytest.approx(signal.mean, abs=0.02)
    follower, _, _ = follow(signal, sources[1], sensors=("gpm", "dcgm"))
    assert follower.means()["smact"] == pytest.approx(other.mean, abs=0.02)


def test_power_comes_from_the_energy_counter_where_there_is_one():
    signal = Signal(0, 0.01, low=0.3)
    counter = Source(signal, 0, **COUNTER, counter_s=0.02)
    wrong = Source(Signal(0, 0.01, high=0.2), 0, sensor="nvml", metric="power_w")
    follower, _, _ = follow(signal, counter, wrong, sensors=("nvml",), targets=("power_w",))
    assert follower.means()["power_w"] == pytest.approx(300 * signal.mean, rel=0.02)


def steady_after(samples, steps=50):
    follower = TargetFollower(WINDOW, ("gpm",), 0.1)
    follower.begin(ns(0))
    for index in range(1, steps):
        follower.mark_step(ns(index * 0.1))
    follower.add([("gpm", sample) for sample in samples])
    return follower


@pytest.mark.parametrize(
    "odd",
    [
        {"quality": "repeated"},
        {"quality": "unavailable"},
        {"quality": "suspect", "reasons": ("profiling_zero",)},
    ],
)
def test_what_is_no_reading_does_not_count(odd):
    good = [Sample(ns(0.1 * k), {"smact": 0.5}, since_ns=ns(0.1 * (k - 1))) for k in range(1, 30)]
    bad = [Sample(ns(0.1 * k + 0.05), {"smact": 0.0}, **odd) for k in range(1, 30)]
    mixed = [sample for pair in zip(good, bad, strict=True) for sample in pair]
    assert steady_after(mixed).means() == steady_after(good).means()
    assert steady_after(good).means()["smact"] == pytest.approx(0.5)


def test_other_doubts_leave_a_reading_in():
    doubtful = [Sample(ns(0.1 * k), {"smact": 0.5}, "suspect", ("power_cap",)) for k in range(1, 30)]
    assert steady_after(doubtful).means()["smact"] == pytest.approx(0.5)


def test_readings_may_come_before_the_window_is_announced():
    readings = [Sample(ns(0.1 * k), {"smact": 0.2 if k <= 0 else 0.6}) for k in range(-20, 30)]
    early, late = TargetFollower(WINDOW, ("gpm",)), TargetFollower(WINDOW, ("gpm",))
    early.begin(ns(0))
    for follower in (early, late):
        follower.add([("gpm", sample) for sample in readings])
        for index in range(1, 28):
            follower.mark_step(ns(index * 0.1))
    assert not late.steady(ns(3)) and late.means() == {}
    late.begin(ns(0))
    assert late.means() == early.means() and early.means()["smact"] == pytest.approx(0.6)


def test_half_width_of_independent_blocks_is_students():
    draw = random.Random(0)
    held = 0
    for _ in range(400):
        values = [draw.gauss(1.0, 0.1) for _ in range(6)]
        held += abs(statistics.fmean(values) - 1.0) <= mean_half_width(values, [1.0] * 6)
    assert held >= 0.93 * 400
    assert (student_t(1), student_t(20)) == (12.706, 2.086)
    assert student_t(30) == pytest.approx(2.042, rel=3e-3) and student_t(1000) == pytest.approx(1.962, rel=3e-3)


def test_blocks_that_resemble_their_neighbours_widen_the_interval():
    mixed, sorted_ = [1, 4, 2, 5, 3, 6], [1, 2, 3, 4, 5, 6]
    assert mean_half_width(sorted_, [1.0] * 6) > 1.3 * mean_half_width(mixed, [1.0] * 6)
    assert mean_half_width([1.0], [1.0]) == math.inf


if __name__ == "__main__":
    print(f"{'signal':42} {'median s':>8} {'9 of 10':>8} {'held':>6}")
    for name, (step_s, wave, read, limit_s) in SIGNALS.items():
        runs = [trial(seed, step_s, wave, until=4 * limit_s, **read) for seed in range(100)]
        seconds = sorted(run[1] for run in runs)
        print(f"{name:42} {seconds[50]:8.1f} {seconds[89]:8.1f} {sum(run[0] for run in runs):4d} %", flush=True)
