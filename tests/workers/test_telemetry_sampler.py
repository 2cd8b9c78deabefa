"""The sampler's threads and reports, the factory and the table."""

from __future__ import annotations

import os
import threading
import time

import pytest
from recorded_nvml import A100_UUID, RecordedNvml

from conf.errors import UsageError
from warehouse.tables.schema import METRICS, TELEMETRY_SCHEMA
from workers.telemetry.nvml import NvmlSensor
from workers.telemetry.sensors import (
    Sample,
    Sensor,
    SensorUnavailable,
    TelemetrySampler,
    TelemetrySettings,
    WatchTarget,
    make_sensors,
    to_table,
)

TARGET, NO_GPU = WatchTarget(A100_UUID, os.getpid()), WatchTarget(None, os.getpid())


class Scripted(Sensor):
    """A sensor that does what it is told; `sampled` is set at its nth call."""

    metrics = ("gpu_util",)
    period_s = 0.001

    def __init__(self, name, act, nth=3):
        self.name, self._act, self._nth = name, act, nth
        self.calls, self.closed = 0, 0
        self.sampled = threading.Event()

    def sample(self):
        self.calls += 1
        if self.calls >= self._nth:
            self.sampled.set()
        return self._act(self.calls)

    def close(self):
        self.closed += 1


def reading(call):
    return [Sample(call, {"gpu_util": 0.5})]


def started(*sensors):
    """A sampler of them under way, when each has been asked as often as its test wants."""
    sampler = TelemetrySampler(sensors, period_s=0.001)
    sampler.start()
    for sensor in sensors:
        assert not isinstance(sensor, Scripted) or sensor.sampled.wait(10)
    return sampler


def test_every_sensor_is_read_and_closed_and_the_second_stop_is_empty():
    first, second = Scripted("nvml", reading), Scripted("process", reading)
    sampler = started(first, second)
    samples = sampler.stop()
    assert {name for name, _ in samples} == {"nvml", "process"}
    assert [sample.t_ns for _, sample in samples] == sorted(sample.t_ns for _, sample in samples)
    assert len(samples) == first.calls + second.calls
    assert (sampler.stop(), sampler.missing) == ([], {})
    assert first.closed == second.closed == 1


def test_a_last_reading_is_taken_at_stop_and_a_metric_that_a_device_lacks_is_reported_by_name():
    sensor, nvml = Scripted("process", reading, nth=1), RecordedNvml()
    nvml.answers[0]["nvmlDeviceGetTotalEnergyConsumption"] = {"error": 3}
    sensor.period_s = 3600.0
    sampler = started(sensor, NvmlSensor(TARGET, nvml))
    assert [name for name, _ in sampler.stop()].count("process") == 2
    assert sampler.missing == {"nvml.energy_j": "not supported by this device"} and nvml.initialised == 0


def test_sensor_that_ends_mid_trial_is_reported_once_and_the_others_go_on():
    def gone(call):
        if call > 1:
            raise SensorUnavailable("NVML: GPU is lost")
        return reading(call)

    def broken(call):
        raise KeyError("defect")

    lost, defect, healthy = (
        Scripted("nvml", gone),
        Scripted("gpm", broken),
        Scripted("process", reading, nth=20),
    )
    sampler = TelemetrySampler([lost, defect, healthy], period_s=0.001)
    sampler.start()
    assert healthy.sampled.wait(10)
    samples = sampler.stop()
    assert sampler.missing == {"nvml": "NVML: GPU is lost", "gpm": "failed with KeyError: 'defect'"}
    assert lost.calls == 2 and defect.calls == 1
    assert sum(name == "nvml" for name, _ in samples) == 1


def test_slow_sensor_does_not_hold_up_the_others():
    release = threading.Event()

    def stuck(call):
        assert release.wait(30)
        return []

    slow, fast = Scripted("dcgm", stuck, nth=1), Scripted("nvml", reading, nth=20)
    slow.slow = True
    sampler = started(slow, fast)  # twenty readings while the slow one hangs in its first
    release.set()
    sampler.stop()


class Lagging(Scripted):
    """An exporter: what it gives at its nth call is of `times_ms[n]` and averages `interval_ms`."""

    lag_s, slow = 0.3, True

    def __init__(self, times_ms, interval_ms, nth=1):
        self._base_ns = time.monotonic_ns()
        super().__init__("dcgm", self._of, nth)
        self._times_ms, self._interval_ns = list(times_ms), int(interval_ms * 1e6)

    def _of(self, call):
        if call > len(self._times_ms):
            return []
        t_ns = self._base_ns + int(self._times_ms[call - 1] * 1e6)
        return [Sample(t_ns, {"smact": 0.5}, since_ns=t_ns - self._interval_ns)]


def stopped_at(sensor, until_ms):
    sampler = started(sensor)
    until_ns = None if until_ms is None else sensor._base_ns + int(until_ms * 1e6)
    return [(sample.t_ns - sensor._base_ns) / 1e6 for _, sample in sampler.stop(until_ns)]


def test_a_source_that_lags_is_read_on_until_it_has_spoken_of_the_windows_end():
    sensor = Lagging([-400, -300, -200, -100, 0, 100, 200], 100)
    sensor.period_s = 0.002
    assert stopped_at(sensor, until_ms=-50)[:5] == [-400, -300, -200, -100, 0]


@pytest.mark.parametrize(
    ("time_ms", "interval_ms", "until_ms"), [(-10_000, 30_000, 0), (0, 100, None)], ids=["too slow", "no window"]
)
def test_a_source_that_will_not_speak_of_a_windows_end_within_a_second_is_not_waited_for(
    time_ms, interval_ms, until_ms
):
    sensor = Lagging([time_ms], interval_ms)
    sensor.period_s = 3600.0
    assert stopped_at(sensor, until_ms) == [time_ms]
    assert sensor.calls == 1


def test_new_samples_are_given_once_and_stop_gives_them_all():
    sampler = started(Scripted("nvml", reading))
    given = sampler.new_samples() + sampler.new_samples()
    assert [sample.t_ns for _, sample in given] == list(range(1, 1 + len(given)))
    assert given and sampler.stop()[: len(given)] == given


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sources": ("nvml", "nvlm")},
            "unknown name in telemetry.sources: 'nvlm'; known: dcgm, gpm, nvml, process, torch",
        ),
        ({"sources": "nvml"}, "telemetry.sources must be a list"),
        ({"period_s": 0}, "telemetry.period_s must be a number >= 0.001, got 0"),
        ({"period_s": float("nan")}, "telemetry.period_s"),
        ({"period_s": True}, "telemetry.period_s"),
    ],
)
def test_wrong_settings_name_the_key_and_the_choices(settings, message):
    with pytest.raises(UsageError, match=message):
        TelemetrySettings(**settings)


def test_table_has_phases_units_and_nulls():
    samples = [
        ("process", Sample(3_000_000, {"rss_mib": 100.0}, "suspect", ("ecc_errors", "clock_jump"))),
        ("nvml", Sample(1_000_000, {"power_w": 50.0, "throttle_reasons": 4})),
        ("nvml", Sample(2_000_000, {"power_w": 0.0})),
        ("nvml", Sample(5_000_000, {"power_w": 60.0})),
    ]
    table = to_table("a'; echo foo", samples, 500_000, 2_000_000, 3_000_000, 4_000_000)
    assert table.schema.equals(TELEMETRY_SCHEMA)
    rows = table.to_pylist()
    columns = ("run_id", "t_ms", "phase", "power_w", "throttle_reasons", "quality", "reasons")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("a'; echo foo", 0.5, None, 50.0, 4, "measured", None),
        ("a'; echo foo", 1.5, "warmup", 0.0, None, "measured", None),
        ("a'; echo foo", 2.5, "window", None, None, "suspect", "ecc_errors,clock_jump"),
        ("a'; echo foo", 4.5, None, 60.0, None, "measured", None),
    ]
    assert all(rows[0][metric] is None for metric in METRICS if metric not in ("power_w", "throttle_reasons"))


@pytest.mark.parametrize(
    ("marks", "phases"),
    [
        ((None, None, None), [None, None, None]),
        ((15, None, None), [None, "warmup", "warmup"]),
        ((15, 25, None), [None, "warmup", "window"]),
    ],
)
def test_phase_of_a_trial_that_died_early_is_the_last_it_reached(marks, phases):
    samples = [("nvml", Sample(t_ns, {"power_w": 1.0})) for t_ns in (10, 20, 30)]
    assert to_table("run", samples, 0, *marks)["phase"].to_pylist() == phases


@pytest.fixture
def wedged(monkeypatch):
    """A driver that does not come back until the test is over."""
    monkeypatch.setattr("workers.telemetry.sensors._START_S", 0.2)
    released = threading.Event()
    yield released
    released.set()


def test_a_driver_that_hangs_when_it_is_opened_is_missing_and_asked_once(wedged, monkeypatch):
    calls = []

    def create(settings, target):
        calls.append(target)
        wedged.wait(60)
        return Scripted("wedged", reading)

    monkeypatch.setattr(Scripted, "create", staticmethod(create))
    monkeypatch.setattr("workers.telemetry.sensors.SENSORS", {"nvml": f"{__name__}:Scripted"})
    settings = TelemetrySettings(sources=("nvml",))
    assert make_sensors(settings, TARGET) == ((), {"nvml": "nvml does not answer within 0.2 s"})
    assert make_sensors(settings, TARGET) == ((), {"nvml": "nvml has not returned from an earlier call"})
    assert calls == [TARGET]


def test_readings_that_are_no_numbers_are_left_out():
    sensor = Scripted("nvml", lambda call: [Sample(call, {"gpu_util": float("nan"), "power_w": 5.0})])
    assert all(sample.values == {"power_w": 5.0} for _, sample in started(sensor).stop())
