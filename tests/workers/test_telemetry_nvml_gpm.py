"""The nvml and gpm sensors on a recorded NVML session: units, missing queries, processes that come and go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from recorded_nvml import A100_UUID, DISPLAY_UUID, UNKNOWN_UUID, FakeGpmNvml, RecordedNvml

from workers.telemetry.base import SensorUnavailable, Target
from workers.telemetry.gpm import GpmSensor
from workers.telemetry.nvml import NvmlSensor, belongs_to


def watched(nvml: RecordedNvml, uuid: str = A100_UUID, **options) -> NvmlSensor:
    sensor = NvmlSensor(nvml, **options)
    sensor.watch(Target(uuid, os.getpid()))
    return sensor


def test_readings_come_in_our_units():
    nvml = RecordedNvml(pids={"trial": os.getpid()})
    sensor = watched(nvml)
    nvml.advance()
    nvml.advance()
    (sample,) = sensor.sample()
    assert sample.values == {
        "memory_used_mib": 9215.0,
        "process_memory_mib": 8701.0,
        "gpu_util": 0.97,
        "memory_util": 0.41,
        "power_w": 312.48,
        "energy_j": 81234605.949,
        "sm_clock_mhz": 1410,
        "memory_clock_mhz": 1215,
        "temperature_c": 38,
        "throttle_reasons": 0,
    }


def test_process_memory_is_the_trials_tree_only_and_absent_while_it_has_no_context():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        nvml = RecordedNvml(pids={"trial": os.getpid(), "child": child.pid})
        sensor = watched(nvml)
        seen = []
        for _ in range(6):
            (sample,) = sensor.sample()
            seen.append(sample.values.get("process_memory_mib"))
            nvml.advance()
        # before, alone, grown, with a child; then the driver does not say; then gone
        assert seen == [None, 423.0, 8701.0, 9001.0, None, None]
    finally:
        child.communicate(b"\n")


def test_processes_of_another_pid_namespace_are_reported_as_such():
    nvml = RecordedNvml(pids={"trial": 999_999_998})
    sensor = watched(nvml)
    nvml.advance()
    (sample,) = sensor.sample()
    assert "process_memory_mib" not in sample.values
    assert "--pid=host" in sensor.dropped["process_memory_mib"]


def test_query_that_a_device_lacks_is_asked_once_and_reported():
    nvml = RecordedNvml()
    sensor = watched(nvml, DISPLAY_UUID)
    for _ in range(3):
        (sample,) = sensor.sample()
    assert {"energy_j", "gpu_util", "memory_util", "throttle_reasons"}.isdisjoint(sample.values)
    assert sample.values["power_w"] == 4.12
    assert sensor.dropped == {
        "energy_j": "not supported by this device",
        "gpu_util": "not supported by this device",
        "memory_util": "not supported by this device",
        "throttle_reasons": "not known to this driver",
    }
    assert nvml.calls["nvmlDeviceGetTotalEnergyConsumption"] == 1


def test_passing_error_costs_one_reading_of_one_metric():
    nvml = RecordedNvml(pids={"trial": os.getpid()})
    sensor = watched(nvml)
    for _ in range(3):
        nvml.advance()
    (during,) = sensor.sample()
    nvml.advance()
    (after,) = sensor.sample()
    assert "power_w" not in during.values and "energy_j" in during.values
    assert after.values["power_w"] == 331.007
    assert "power_w" not in sensor.dropped


def test_lost_gpu_ends_the_sensor_with_its_reason():
    nvml = RecordedNvml()
    sensor = watched(nvml)
    nvml.answers[0]["nvmlDeviceGetMemoryInfo"] = {"error": 15}
    with pytest.raises(SensorUnavailable, match="GPU is lost"):
        sensor.sample()


def test_pcie_is_left_out_unless_asked_for_and_then_rare():
    nvml = RecordedNvml()
    assert "pcie_tx_mib_s" not in watched(nvml).sample()[0].values
    sensor = watched(nvml, pcie=True)
    first, second = sensor.sample()[0], sensor.sample()[0]
    assert first.values["pcie_tx_mib_s"] == pytest.approx(350 / 1024)
    assert first.values["pcie_rx_mib_s"] == pytest.approx(1250 / 1024)
    assert "pcie_tx_mib_s" not in second.values
    assert "pcie_tx_mib_s" in sensor.metrics


def test_close_gives_back_what_the_constructor_took():
    nvml = RecordedNvml()
    sensor = NvmlSensor(nvml)
    assert nvml.initialised == 1
    sensor.close()
    sensor.close()
    assert nvml.initialised == 0


def test_session_members_and_descendants_belong_to_a_trial_and_strangers_do_not():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert belongs_to(child.pid, child.pid)
        assert belongs_to(child.pid, os.getpid())
        assert not belongs_to(os.getpid(), child.pid)
        assert not belongs_to(999_999_999, os.getpid())
    finally:
        child.communicate(b"\n")


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def pass_ms(self, milliseconds: int) -> None:
        self.now_ns += milliseconds * 1_000_000


def test_gpm_percentages_become_ratios_of_the_interval_between_two_samples():
    nvml, clock = FakeGpmNvml(), Clock()
    sensor = GpmSensor(nvml, clock_ns=clock)
    sensor.watch(Target(A100_UUID, os.getpid()))
    assert sensor.sample() == []  # one sample is no interval
    clock.pass_ms(99)
    assert sensor.sample() == [] and nvml.taken == 1  # too close: the older sample stays
    clock.pass_ms(1)
    (sample,) = sensor.sample()
    assert sample.t_ns == clock.now_ns
    assert sample.values == {
        "gract": 0.96,
        "smact": 0.8125,
        "smocc": 0.4,
        "tensor_active": 0.2,
        "drama": 0.44,
        "fp64_active": 0.0,
        "fp32_active": 1.0,
        "fp16_active": 0.03,
        "pcie_tx_mib_s": 12.5,
        "pcie_rx_mib_s": 800.0,
    }


@pytest.mark.parametrize("nonsense", [float("nan"), -1.0, 250.0, float("inf")])
def test_gpm_figure_that_is_no_percentage_is_absent(nonsense):
    nvml, clock = FakeGpmNvml(), Clock()
    nvml.percent[2] = nonsense
    nvml.returns[3] = 3  # this metric: not supported
    sensor = GpmSensor(nvml, clock_ns=clock)
    sensor.watch(Target(A100_UUID, os.getpid()))
    sensor.sample()
    clock.pass_ms(100)
    (sample,) = sensor.sample()
    assert {"smact", "smocc"}.isdisjoint(sample.values)
    assert sample.values["drama"] == 0.44
    assert "Not Supported" in sensor.dropped["smocc"]


def test_gpm_on_an_older_gpu_says_what_it_needs():
    sensor = GpmSensor(FakeGpmNvml(supported=False))
    with pytest.raises(SensorUnavailable, match=r"needs Hopper or later, this is NVIDIA A100.*dcgm"):
        sensor.watch(Target(A100_UUID, os.getpid()))


def test_gpm_buffers_are_freed_and_reused_from_trial_to_trial():
    nvml = FakeGpmNvml()
    sensor = GpmSensor(nvml)
    for _ in range(3):
        sensor.watch(Target(A100_UUID, os.getpid()))
    assert nvml.allocated == 2
    sensor.close()
    assert nvml.allocated == 0 and nvml.initialised == 0


@pytest.mark.parametrize("sensor", [NvmlSensor, GpmSensor])
def test_unknown_gpu_is_named(sensor):
    with pytest.raises(SensorUnavailable, match=UNKNOWN_UUID):
        sensor(FakeGpmNvml()).watch(Target(UNKNOWN_UUID, os.getpid()))
