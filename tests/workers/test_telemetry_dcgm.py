"""The dcgm sensor against a real HTTP server with pages in the formats of dcgm-exporter's releases."""

from __future__ import annotations

import csv
import itertools
import os
from pathlib import Path

import pytest
from dcgm_server import PAGE, DcgmServer
from recorded_nvml import (
    A100_UUID,
    DISPLAY_UUID,
    MIG_SESSION,
    SLICE_UUID,
    SMALL_SLICE_UUID,
    UNKNOWN_UUID,
    Clock,
    RecordedNvml,
)

from conf.errors import UsageError
from workers.telemetry.dcgm import FIELDS, DcgmSensor, PageReader
from workers.telemetry.sensors import SensorUnavailable, TelemetrySettings, WatchTarget

OLD_STYLE_UUID = "GPU-6b8d2a1f-4e32-5c9b-ad55-1a7e3f92c812"
MIG_UUID = "GPU-7c9e3b20-5f43-6dac-be66-2b8f40a3d923"
DATA = PAGE.parent
INFRA = Path(__file__).parents[2] / "infra" / "dcgm-exporter"
MS = 1_000_000
TARGET = WatchTarget(A100_UUID, os.getpid())


@pytest.fixture
def server():
    with DcgmServer() as running:
        yield running


@pytest.fixture
def clock():
    return Clock()


def watched(server: DcgmServer, clock: Clock, uuid: str = A100_UUID, **options) -> DcgmSensor:
    """A sensor that watches since 0.5 s, so that its lag reaches no further back."""
    sensor = DcgmSensor(WatchTarget(uuid, os.getpid()), server.url, clock_ns=clock, **options)
    clock.pass_s(0.5)
    return sensor


class Energy:
    """Makes a page that differs from the one before, as a GPU's energy counter does."""

    def __init__(self, server: DcgmServer) -> None:
        self.server, self.now = server, 81234605949

    def grow(self) -> None:
        self.server.replace(str(self.now), str(self.now + 1))
        self.now += 1


def qualities(samples) -> list[str]:
    return [sample.quality for sample in samples]


COMMON = {
    "smact": 0.812045,
    "smocc": 0.387214,
    "drama": 0.44193,
    "memory_used_mib": 9215,
    "gpu_util": 0.97,
    "memory_util": 0.41,
    "power_w": 312.48,
    "energy_j": 81234605.949,
    "sm_clock_mhz": 1410,
    "memory_clock_mhz": 1215,
    "temperature_c": 41,
}
PIPES = {
    "gract": 0.96231,
    "tensor_active": 0.205117,
    "fp64_active": 0,
    "fp32_active": 0.11884,
    "fp16_active": 0.01,
    "pcie_tx_mib_s": 2,
    "pcie_rx_mib_s": 500,
}
OURS = {
    "tensor_imma_active": 0,
    "tensor_hmma_active": 0.205117,
    "tensor_dfma_active": 0,
    "int_active": 0.064,
    "nvlink_tx_mib_s": 1,
    "nvlink_rx_mib_s": 3,
    "ecc_uncorrected": 0,
}
RELEASES = {
    "dcgm_exporter_2.0.txt": COMMON,
    "dcgm_exporter_3.1_kubernetes.txt": COMMON | PIPES,
    "dcgm_exporter_3.3.txt": COMMON | PIPES,
    "dcgm_exporter_4_kubernetes.txt": COMMON | PIPES | OURS,
}


@pytest.mark.parametrize("release", RELEASES)
def test_each_releases_labels_and_names_are_understood(release, clock):
    with DcgmServer(DATA / release) as server:
        sensor = watched(server, clock)
        Energy(server).grow()
        (sample,) = sensor.sample()
        assert sample.values == RELEASES[release] | {"energy_j": 81234605.950}
        assert set(sample.values).isdisjoint(sensor.dropped)
        assert set(sample.values) | set(sensor.dropped) == set(sensor.metrics)
        idle = watched(server, clock, OLD_STYLE_UUID)
        server.replace("70230060115", "70230060116")
        (other,) = idle.sample()
        assert other.quality == "measured", "zeros of an idle GPU are figures"
        assert (other.values["smact"], other.values["power_w"]) == (0.0, 52.345)


def test_blank_numbers_and_fields_that_are_not_served_are_no_values(server, clock):
    sensor = watched(server, clock)
    Energy(server).grow()
    (sample,) = sensor.sample()
    assert "fp64_active" not in sample.values  # DCGM's blank number on this page
    assert "counter file" in sensor.dropped["fp16_active"]
    assert sample.values["pcie_tx_mib_s"] == 2150400 / 2**20


def test_values_are_put_back_by_the_lag_and_average_one_interval(server, clock):
    sensor, energy = watched(server, clock), Energy(server)
    energy.grow()
    (first,) = sensor.sample()
    assert first.t_ns == clock.now_ns - 300 * MS
    assert first.since_ns is None  # the exporter's interval is not known yet
    clock.pass_s(0.1)
    energy.grow()
    (second,) = sensor.sample()
    assert (second.t_ns, second.since_ns) == (clock.now_ns - 300 * MS, clock.now_ns - 400 * MS)
    assert sensor.interval_s == 0.1


def test_value_that_stays_the_same_is_measured_at_the_exporters_interval(server, clock):
    sensor, energy = watched(server, clock), Energy(server)
    for gap_s in (1, 1, 2, 1):  # the exporter's interval is learned: a second, also where a change was missed
        energy.grow()
        clock.pass_s(gap_s)
        assert qualities(sensor.sample()) == ["measured"]
    samples = []
    for _ in range(20):  # then nothing changes for four seconds
        clock.pass_s(0.2)
        samples += sensor.sample()
    assert len(samples) == 20
    times = [sample.t_ns for sample in samples if sample.quality == "measured"]
    assert len(times) == 4
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {1_000_000_000}


def test_stalled_profiling_on_a_busy_gpu_is_suspect_and_keeps_its_values(server, clock):
    sensor = watched(server, clock)
    for figure in ("0.962310", "0.812045", "0.387214", "0.205117", "0.441930", "0.118840"):
        server.replace(f" {figure}", " 0.000000")
    (sample,) = sensor.sample()
    assert (sample.quality, sample.reasons) == ("suspect", ("profiling_zero",))
    assert sample.values["gpu_util"] == 0.97 and sample.values["smact"] == sample.values["drama"] == 0


def test_mig_slice_is_read_off_its_instances_rows(clock):
    with DcgmServer(DATA / "dcgm_exporter_3.3_mig.txt") as server:
        energy = Energy(server)
        figures = {}
        for uuid in (SLICE_UUID, SMALL_SLICE_UUID):
            sensor = watched(server, clock, uuid, nvml=RecordedNvml(MIG_SESSION))
            energy.grow()
            clock.pass_s(0.1)
            (sample,) = sensor.sample()
            figures[uuid] = (sample.values["smact"], sample.values["memory_used_mib"])
            assert {"gpu_util", "power_w", "energy_j", "pcie_tx_mib_s"}.isdisjoint(sample.values)
            assert "not of a MIG slice" in sensor.dropped["power_w"]
        assert figures == {SLICE_UUID: (0.7, 2048), SMALL_SLICE_UUID: (0.812045, 9215)}
        with pytest.raises(SensorUnavailable, match="split by MIG"):
            watched(server, clock, A100_UUID)


@pytest.mark.parametrize("url", ["localhost:9400/metrics", "http:///metrics", "http://host:port/", "http://a b/", None])
def test_broken_url_is_the_users_mistake_and_names_the_key(url):
    with pytest.raises(UsageError, match=r"telemetry\.dcgm_url"):
        TelemetrySettings(dcgm_url=url)


def test_nobody_answering_and_an_http_error_are_reasons(server):
    server.status = 503
    with pytest.raises(SensorUnavailable, match="503"):
        DcgmSensor(TARGET, server.url)
    server.__exit__()
    with pytest.raises(SensorUnavailable, match=f"no dcgm-exporter answers at {server.url}"):
        DcgmSensor(TARGET, server.url)


@pytest.mark.parametrize(
    ("uuid", "reason"),
    [
        (UNKNOWN_UUID, "knows no GPU with UUID"),
        (DISPLAY_UUID, "gives no DCGM_FI_PROF_"),
        (MIG_UUID, "split by MIG"),
        (None, "no GPU"),
    ],
)
def test_gpu_that_the_exporter_cannot_tell_of_is_a_reason(server, clock, uuid, reason):
    with pytest.raises(SensorUnavailable, match=reason):
        watched(server, clock, uuid)


def test_failed_scrapes_are_unavailable_and_an_exporter_gone_for_seconds_ends_the_sensor(server, clock):
    sensor = watched(server, clock)
    server.status = 500
    for _ in range(30):  # a restart takes a while
        assert qualities(sensor.sample()) == ["unavailable"]
        clock.pass_s(0.1)
    with pytest.raises(SensorUnavailable, match="500"):
        sensor.sample()


def dripping(server, monkeypatch):
    monkeypatch.setattr("workers.telemetry.dcgm._PAGE_TIMEOUT_S", 0.3)
    server.dripping = True


def endless(server, monkeypatch):
    monkeypatch.setattr("workers.telemetry.dcgm._PAGE_LIMIT_BYTES", 100_000)
    server.page += "# a'; echo foo\n" * 10_000


@pytest.mark.parametrize(("harm", "reason"), [(dripping, "exporter_timeout"), (endless, "exporter_error")])
def test_an_exporter_that_drips_or_never_ends_is_given_up_and_asked_again(server, clock, monkeypatch, harm, reason):
    sensor, page = watched(server, clock), server.page
    harm(server, monkeypatch)
    (sample,) = sensor.sample()
    assert (sample.quality, sample.reasons) == ("unavailable", (reason,))
    server.page, server.dripping = page, False
    monkeypatch.setattr("workers.telemetry.dcgm._PAGE_TIMEOUT_S", 30.0)
    assert qualities(sensor.sample()) == ["repeated"]  # and a late answer is not taken for this one's


def test_a_connection_that_the_exporter_closed_is_opened_again(server, clock):
    sensor = watched(server, clock)
    server.hang_up = True
    assert [qualities(sensor.sample()) for _ in range(3)] == [["repeated"]] * 3


def read(page: str):
    return PageReader(A100_UUID).read(page)


@pytest.mark.parametrize(
    "line",
    [
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",pod="{A100_UUID}",UUID="GPU-other"}} 97',  # in another label
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{A100_UUID}1"}} 97',  # the beginning of another UUID
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{A100_UUID}"}} ',
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{A100_UUID}"}} NaN',
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{A100_UUID}"}} many',
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{A100_UUID}"',
        f"# HELP {A100_UUID} {{}} 97",
        f"<html>{A100_UUID} is = not {{ }} </html>",
    ],
)
def test_torn_and_foreign_lines_say_nothing(line):
    whole = f'DCGM_FI_DEV_FB_USED{{gpu="0",UUID="{A100_UUID}",pod="a}} \\"b"}} 7 1700000000'
    assert read(f"{line}\n{whole}\r\n{line}") == {"DCGM_FI_DEV_FB_USED": 7}


def test_our_counter_file_has_the_fields_that_the_sensor_reads_in_the_exporters_format():
    with open(INFRA / "counters.csv", newline="") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row]
    assert {len(row) for row in rows} == {3}  # comments too: older releases read them as rows
    counters = [row for row in rows if not row[0].startswith("#")]
    assert sorted(field for field, _, _ in counters) == sorted(FIELDS)
    assert {kind for _, kind, _ in counters} == {"gauge", "counter"}
    assert [meaning for _, _, meaning in counters if not meaning or '"' in meaning] == []
