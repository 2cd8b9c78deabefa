"""The sampler's threads and reports, the factory, the window means and the table."""

from __future__ import annotations

import os
import threading

import pytest
from dcgm_server import DcgmServer
from recorded_nvml import A100_UUID, RecordedNvml

from conf.errors import UsageError
from warehouse.schema import METRICS, TELEMETRY_SCHEMA
from workers.telemetry.base import Sample, SensorUnavailable, Target
from workers.telemetry.dcgm import DcgmSensor
from workers.telemetry.nvml import NvmlSensor
from workers.telemetry.process import ProcessSensor
from workers.telemetry.sampler import (
    SENSORS,
    TelemetrySampler,
    TelemetrySettings,
    make_sensors,
    time_weighted_mean,
    to_table,
)

TARGET = Target(A100_UUID, os.getpid())


class Scripted:
    """A sensor that does what it is told; `sampled` is set at its nth call."""

    metrics = ("gpu_util",)
    period_s = 0.001

    def __init__(self, name, act, nth=3):
        self.name, self._act, self._nth = name, act, nth
        self.calls, self.closed = 0, 0
        self.sampled = threading.Event()

    def watch(self, target):
        pass

    def sample(self):
        self.calls += 1
        if self.calls >= self._nth:
            self.sampled.set()
        return self._act(self.calls)

    def close(self):
        self.closed += 1


def reading(call):
    return [Sample(call, {"gpu_util": 0.5})]


def test_every_sensor_is_read_and_closed_and_the_second_stop_is_empty():
    first, second = Scripted("nvml", reading), Scripted("process", reading)
    sampler = TelemetrySampler([first, second], period_s=0.001)
    sampler.start(TARGET)
    assert first.sampled.wait(10) and second.sampled.wait(10)
    samples = sampler.stop()
    assert {name for name, _ in samples} == {"nvml", "process"}
    assert [sample.t_ns for _, sample in samples] == sorted(sample.t_ns for _, sample in samples)
    assert len(samples) == first.calls + second.calls
    assert sampler.stop() == []
    assert first.closed == second.closed == 1
    assert sampler.missing == {}


def test_a_last_reading_is_taken_at_stop():
    sensor = Scripted("nvml", reading, nth=1)
    sensor.period_s = 3600.0
    sampler = TelemetrySampler([sensor])
    sampler.start(TARGET)
    assert sensor.sampled.wait(10)
    assert len(sampler.stop()) == 2


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
    sampler.start(TARGET)
    assert healthy.sampled.wait(10)
    samples = sampler.stop()
    assert sampler.missing == {"nvml": "NVML: GPU is lost", "gpm": "failed with KeyError: 'defect'"}
    assert lost.calls == 2 and defect.calls == 1
    assert sum(name == "nvml" for name, _ in samples) == 1


def test_sensor_that_cannot_watch_is_reported_and_not_read():
    sensor = Scripted("dcgm", reading)

    def refuse(target):
        raise SensorUnavailable("no exporter")

    sensor.watch = refuse
    sampler = TelemetrySampler([sensor])
    sampler.start(TARGET)
    assert sampler.stop() == []
    assert sampler.missing == {"dcgm": "no exporter"}
    assert sensor.calls == 0 and sensor.closed == 1


def test_slow_sensor_does_not_hold_up_the_others():
    release = threading.Event()

    def stuck(call):
        assert release.wait(30)
        return []

    slow, fast = Scripted("dcgm", stuck, nth=1), Scripted("nvml", reading, nth=20)
    slow.slow = True
    sampler = TelemetrySampler([slow, fast], period_s=0.001)
    sampler.start(TARGET)
    assert slow.sampled.wait(10)
    assert fast.sampled.wait(10)  # twenty readings while the slow one hangs in its first
    release.set()
    sampler.stop()


def test_metric_that_a_device_lacks_is_reported_by_name():
    nvml = RecordedNvml()
    nvml.answers[0]["nvmlDeviceGetTotalEnergyConsumption"] = {"error": 3}
    sampler = TelemetrySampler([NvmlSensor(nvml), ProcessSensor()])
    sampler.start(TARGET)
    samples = sampler.stop()
    assert {name for name, _ in samples} == {"nvml", "process"}
    assert sampler.missing == {"nvml.energy_j": "not supported by this device"}
    assert nvml.initialised == 0


def test_real_exporter_and_process_are_sampled_together():
    with DcgmServer() as server:
        sampler = TelemetrySampler([DcgmSensor(server.url), ProcessSensor()])
        server.replace("0.812045", "0.500000")
        sampler.start(TARGET)
        samples = sampler.stop()
    assert "process" in {name for name, _ in samples}
    assert "dcgm" not in sampler.missing


def test_factory_makes_what_works_here_and_says_why_the_rest_does_not():
    sensors, missing = make_sensors(TelemetrySettings(dcgm_url="http://127.0.0.1:9/metrics"), None)
    assert [sensor.name for sensor in sensors] == ["process"]
    assert set(missing) == {"nvml", "gpm", "dcgm"}
    assert all(missing.values())
    for sensor in sensors:
        sensor.close()


def test_factory_leaves_out_what_is_not_asked_for():
    assert make_sensors(TelemetrySettings(sources=("torch",)), None) == ((), {})
    sensors, missing = make_sensors(TelemetrySettings(sources=["process", "process"]), None)
    assert len(sensors) == 1 and missing == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sources": ("nvml", "nvlm")},
            "unknown telemetry source 'nvlm'; known: dcgm, gpm, nvml, process, torch",
        ),
        ({"sources": "nvml"}, "telemetry.sources must be a list"),
        ({"period_s": 0}, "telemetry.period_s must be a number > 0, got 0"),
        ({"period_s": float("nan")}, "telemetry.period_s"),
        ({"period_s": True}, "telemetry.period_s"),
    ],
)
def test_wrong_settings_name_the_key_and_the_choices(settings, message):
    with pytest.raises(UsageError, match=message):
        TelemetrySettings(**settings)


@pytest.mark.parametrize("uuid", [None, A100_UUID])
def test_broken_exporter_url_is_reported_as_a_mistake_even_without_a_gpu(uuid):
    with pytest.raises(UsageError, match=r"telemetry\.dcgm_url"):
        make_sensors(TelemetrySettings(sources=("dcgm",), dcgm_url="localhost"), uuid)


@pytest.mark.parametrize("source", SENSORS)
def test_table_of_sensors_names_classes_that_exist(source):
    import importlib

    module, _, name = SENSORS[source].partition(":")
    sensor = getattr(importlib.import_module(module), name)
    assert sensor.name == source and sensor.create


def samples_of(*pairs):
    return [Sample(t_ns, {"smact": value}) for t_ns, value in pairs]


def test_mean_weights_each_value_with_the_time_that_it_ends():
    assert time_weighted_mean(samples_of((10, 1.0), (100, 0.0)), "smact", 0, 100) == pytest.approx(0.1)


def test_mean_counts_zeros_and_ignores_the_order_and_other_metrics():
    samples = [*samples_of((100, 0.0), (50, 1.0)), Sample(10, {"smocc": 0.7})]
    assert time_weighted_mean(samples, "smact", 0, 100) == pytest.approx(0.5)


def test_an_idle_second_before_the_window_is_not_charged_to_it():
    """A 1 Hz exporter, idle until 10.0 s, busy in the window from 10.2 to 11.4 s."""
    samples = samples_of((9000, 0.0), (10_000, 0.0), (11_000, 1.0), (12_000, 1.0), (13_000, 0.0))
    assert time_weighted_mean(samples, "smact", 10_200, 11_400) == pytest.approx(1.0)


def test_the_first_sample_after_the_window_stands_for_its_rest_and_later_ones_for_nothing():
    samples = samples_of((20, 0.3), (60, 1.0), (110, 0.0), (120, 0.9))
    assert time_weighted_mean(samples, "smact", 20, 100) == pytest.approx(0.5)


def test_the_first_value_stands_for_the_time_since_the_windows_start():
    assert time_weighted_mean(samples_of((50, 0.4)), "smact", 0, 100) == pytest.approx(0.4)


@pytest.mark.parametrize("samples", [[], samples_of((5, 0.3)), samples_of((101, 0.3))])
def test_window_without_a_sample_has_no_mean(samples):
    assert time_weighted_mean(samples, "smact", 10, 100) is None


def test_sample_on_the_windows_last_instant_is_its_mean():
    assert time_weighted_mean(samples_of((100, 0.3)), "smact", 10, 100) == 0.3
    assert time_weighted_mean(samples_of((10, 0.3)), "smact", 10, 10) == 0.3


def test_table_has_phases_units_and_nulls():
    samples = [
        ("process", Sample(3_000_000, {"rss_mib": 100.0})),
        ("nvml", Sample(1_000_000, {"power_w": 50.0, "throttle_reasons": 4})),
        ("nvml", Sample(2_000_000, {"power_w": 0.0})),
        ("nvml", Sample(5_000_000, {"power_w": 60.0})),
    ]
    table = to_table("a'; echo foo", samples, 500_000, 2_000_000, 3_000_000, 4_000_000)
    assert table.schema.equals(TELEMETRY_SCHEMA)
    rows = table.to_pylist()
    assert [row["t_ms"] for row in rows] == [0.5, 1.5, 2.5, 4.5]
    assert [row["phase"] for row in rows] == [None, "warmup", "window", None]
    assert [row["power_w"] for row in rows] == [50.0, 0.0, None, 60.0]
    assert rows[0]["throttle_reasons"] == 4
    assert rows[0]["run_id"] == "a'; echo foo"
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


def test_no_samples_make_an_empty_table_of_the_same_schema():
    table = to_table("run", [], 0, None, None, None)
    assert table.num_rows == 0 and table.schema.equals(TELEMETRY_SCHEMA)
