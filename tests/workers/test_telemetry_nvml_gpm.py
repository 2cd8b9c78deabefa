"""The nvml and gpm sensors on a recorded NVML session: units, missing queries, processes that come and go."""

from __future__ import annotations

import os

import pytest
from recorded_nvml import (
    A100_UUID,
    DISPLAY_UUID,
    MIG_SESSION,
    SLICE_UUID,
    SMALL_SLICE_UUID,
    Clock,
    FakeGpmNvml,
    RecordedNvml,
)

from tests.surroundings import waiting_process
from workers.telemetry import nvml as nvml_module
from workers.telemetry.nvml import GpmSensor, NvmlSensor, belongs_to
from workers.telemetry.sensors import SensorUnavailable, WatchTarget

STRANGER = 999_999_999  # in the recording: a process that is not the trial's
MIB = 2**20


@pytest.fixture(autouse=True)
def host_pids(monkeypatch):
    """As on a host; wherever the tests run."""
    monkeypatch.setattr(nvml_module, "in_initial_pid_namespace", lambda: True)


def watched(nvml: RecordedNvml, uuid: str = A100_UUID, make=NvmlSensor, **options):
    return make(WatchTarget(uuid, os.getpid()), nvml, **options)


def gpm_watched(nvml: FakeGpmNvml, uuid: str = A100_UUID):
    """A sensor that has its first GPM sample, and its clock."""
    clock = Clock()
    sensor = watched(nvml, uuid, GpmSensor, clock_ns=clock)
    assert sensor.sample() == []  # one sample is no interval
    return sensor, clock


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
        "ecc_uncorrected": 0,
        "other_processes": 0,
        "other_memory_mib": 0,
    }


def test_process_memory_is_the_trials_tree_only_and_absent_while_it_has_no_context():
    with waiting_process() as child:
        nvml = RecordedNvml(pids={"trial": os.getpid(), "child": child.pid})
        sensor = watched(nvml)
        seen = []
        for _ in range(6):
            (sample,) = sensor.sample()
            seen.append(sample.values.get("process_memory_mib"))
            nvml.advance()
        # before, alone, grown, with a child; then the driver does not say; then gone
        assert seen == [None, 423.0, 8701.0, 9001.0, None, None]


def test_other_processes_and_their_memory_are_counted_compute_and_graphics(monkeypatch):
    nvml, clock = RecordedNvml(pids={"trial": os.getpid(), STRANGER: os.getppid()}), Clock()
    with waiting_process(start_new_session=True) as draws:
        monkeypatch.setattr(nvml_module, "belongs_to", lambda pid, root: pid == root)  # else both are ours
        nvml.answers[0]["nvmlDeviceGetGraphicsRunningProcesses"] = [
            {"pid": draws.pid, "usedGpuMemory": 16 * MIB},
            {"pid": STRANGER, "usedGpuMemory": 16 * MIB},  # in both lists: counted once, by what computing takes
        ]
        sensor = watched(nvml, clock_ns=clock)
        nvml.advance()
        (sample,) = sensor.sample()
        assert (sample.values["other_processes"], sample.values["other_memory_mib"]) == (2, 80)
        assert sample.values["process_memory_mib"] == 423
        nvml.answers[0]["nvmlDeviceGetGraphicsRunningProcesses"] = []
        clock.pass_s(0.1)
        values = sensor.sample()[0].values
        assert values["other_processes"] == 2 and "ecc_uncorrected" not in values  # asked once a second
        clock.pass_s(1)
        values = sensor.sample()[0].values
        assert (values["other_processes"], values["ecc_uncorrected"]) == (1, 0)
        sensor.ignore([os.getppid()])  # processes of the farm are not others
        assert sensor.sample()[0].values["other_processes"] == 0


def test_clients_of_a_multi_process_service_stand_in_a_list_of_their_own(monkeypatch):
    monkeypatch.setattr(nvml_module, "_name", lambda pid: "nvidia-cuda-mps-server" if pid == os.getppid() else "python")
    nvml = RecordedNvml(pids={"trial": os.getpid(), STRANGER: os.getppid()})
    nvml.answers[0]["nvmlDeviceGetComputeRunningProcesses"] = [{"pid": STRANGER, "usedGpuMemory": 30 * MIB}]
    nvml.answers[0]["nvmlDeviceGetMPSComputeRunningProcesses"] = [{"pid": "trial", "usedGpuMemory": 500 * MIB}]
    sensor = watched(nvml)
    sensor.sample()
    (sample,) = sensor.sample()
    assert sample.values["process_memory_mib"] == 500
    assert sample.values["other_processes"] == 0  # the service computes nothing of its own


def test_mig_slice_has_its_memory_and_processes_and_its_gpus_clocks():
    nvml = RecordedNvml(MIG_SESSION, pids={"trial": os.getpid(), "neighbour": os.getppid()})
    sensor = watched(nvml, SLICE_UUID)
    (sample,) = sensor.sample()
    assert sample.values == {
        "memory_used_mib": 1083179008 / MIB,
        "process_memory_mib": 1024,
        "other_processes": 0,
        "other_memory_mib": 0,
        "sm_clock_mhz": 1410,
        "memory_clock_mhz": 1215,
        "temperature_c": 44,
        "throttle_reasons": 0,
        "ecc_uncorrected": 0,
    }
    of_the_gpu = ("gpu_util", "memory_util", "power_w", "energy_j", "pcie_tx_mib_s", "pcie_rx_mib_s")
    assert [metric for metric in of_the_gpu if "MIG slice" not in sensor.dropped[metric]] == []
    nvml.slices[0][2]["nvmlDeviceGetComputeRunningProcesses"].append({"pid": "trial", "usedGpuMemory": MIB})
    (other,) = watched(nvml, SMALL_SLICE_UUID).sample()
    assert (other.values["other_processes"], other.values["other_memory_mib"]) == (1, 256)


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
        "ecc_uncorrected": "not known to this driver",
        "pcie_tx_mib_s": "not known to this driver",
        "pcie_rx_mib_s": "not known to this driver",
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
    assert after.values["power_w"] == 331.007 and "power_w" not in sensor.dropped


def test_lost_gpu_ends_the_sensor_with_its_reason():
    nvml = RecordedNvml()
    sensor = watched(nvml)
    nvml.answers[0]["nvmlDeviceGetMemoryInfo"] = {"error": 15}
    with pytest.raises(SensorUnavailable, match="GPU is lost"):
        sensor.sample()


def test_pcie_traffic_comes_from_counters_and_a_counter_that_wrapped_says_nothing():
    nvml, clock = RecordedNvml(), Clock()
    sensor = watched(nvml, clock_ns=clock)

    def rates():
        return {name: value for name, value in sensor.sample()[0].values.items() if name.startswith("pcie")}

    assert rates() == {}
    clock.pass_s(0.04)
    assert rates() == {}, "two readings that are too close give no rate"
    still = {"pcie_tx_mib_s": 0, "pcie_rx_mib_s": 0}
    grown = {"pcie_tx_mib_s": pytest.approx(100), "pcie_rx_mib_s": pytest.approx(1000)}
    for expected in (still, grown, still, still, {"pcie_tx_mib_s": 0}):
        nvml.advance()
        clock.pass_s(0.1)
        assert rates() == expected


def test_descendants_belong_to_a_trial_and_strangers_do_not():
    with waiting_process(start_new_session=True) as child:
        assert belongs_to(child.pid, os.getpid()) and not belongs_to(os.getpid(), child.pid)


def test_gpm_percentages_become_ratios_of_the_interval_between_two_samples():
    nvml = FakeGpmNvml()
    sensor, clock = gpm_watched(nvml)
    clock.pass_s(0.099)
    assert sensor.sample() == [] and nvml.taken == 1  # too close: the older sample stays
    clock.pass_s(0.001)
    (sample,) = sensor.sample()
    assert (sample.t_ns, sample.since_ns) == (clock.now_ns, clock.now_ns - 100_000_000)
    assert sample.values == {
        "gract": 0.96,
        "smact": 0.8125,
        "smocc": 0.4,
        "int_active": 0.0625,
        "tensor_active": 0.2,
        "tensor_dfma_active": 0.0,
        "tensor_hmma_active": 0.18,
        "tensor_imma_active": 0.005,
        "drama": 0.44,
        "fp64_active": 0.0,
        "fp32_active": 1.0,
        "fp16_active": 0.03,
        "pcie_tx_mib_s": 12.5,
        "pcie_rx_mib_s": 800.0,
        "nvlink_rx_mib_s": 1024.0,
        "nvlink_tx_mib_s": 2048.0,
    }
    for nvml.failing in (999, None):
        clock.pass_s(0.1)
        (after,) = sensor.sample()
    assert after.since_ns == sample.t_ns, "it spans the sample that failed"
    assert nvml.allocated == 2
    sensor.close()
    sensor.close()
    assert nvml.allocated == 0 and nvml.initialised == 0


@pytest.mark.parametrize(("code", "times"), [(15, 1), (999, 10)])
def test_gpm_that_is_gone_or_never_comes_back_ends_the_sensor(code, times):
    nvml = FakeGpmNvml()
    sensor, clock = gpm_watched(nvml)
    nvml.failing = code
    clock.pass_s(0.1)
    for _ in range(times - 1):
        assert sensor.sample()[0].quality == "unavailable"
        clock.pass_s(0.1)
    with pytest.raises(SensorUnavailable, match="GPM"):
        sensor.sample()


def test_gpm_of_a_mig_slice_samples_its_gpu_instance():
    nvml = FakeGpmNvml(path=MIG_SESSION)
    sensor, clock = gpm_watched(nvml, SMALL_SLICE_UUID)
    clock.pass_s(0.1)
    (sample,) = sensor.sample()
    assert nvml.instances == [9, 9] and sample.values["smact"] == 0.8125


@pytest.mark.parametrize("nonsense", [float("nan"), -1.0, 250.0])
def test_gpm_figure_that_is_no_percentage_is_absent(nonsense):
    nvml = FakeGpmNvml()
    nvml.percent[2] = nonsense
    nvml.returns[3] = 3  # this metric: not supported
    sensor, clock = gpm_watched(nvml)
    clock.pass_s(0.1)
    (sample,) = sensor.sample()
    assert {"smact", "smocc"}.isdisjoint(sample.values)
    assert sample.values["drama"] == 0.44
    assert "Not Supported" in sensor.dropped["smocc"]


def test_gpm_on_an_older_gpu_says_what_it_needs():
    with pytest.raises(SensorUnavailable, match=r"needs Hopper or later, this is NVIDIA A100.*dcgm"):
        watched(FakeGpmNvml(supported=False), make=GpmSensor)


def test_profiling_of_a_slice_that_shares_its_gpu_instance_is_refused_and_its_memory_is_not():
    nvml = FakeGpmNvml(path=MIG_SESSION)
    nvml.slices[0][0]["nvmlDeviceGetAttributes"]["computeInstanceSliceCount"] = 1
    with pytest.raises(SensorUnavailable, match="shares with other compute instances"):
        watched(nvml, SLICE_UUID, GpmSensor)
    assert "memory_used_mib" in watched(nvml, SLICE_UUID).sample()[0].values
