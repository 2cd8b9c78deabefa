"""The dcgm sensor against a real HTTP server with pages in dcgm-exporter's format."""

from __future__ import annotations

import itertools
import os

import pytest
from dcgm_server import DcgmServer
from recorded_nvml import A100_UUID, DISPLAY_UUID, UNKNOWN_UUID

from conf.errors import UsageError
from workers.telemetry.base import SensorUnavailable, Target
from workers.telemetry.dcgm import DcgmSensor, parse_page

OLD_STYLE_UUID = "GPU-6b8d2a1f-4e32-5c9b-ad55-1a7e3f92c812"
MIG_UUID = "GPU-7c9e3b20-5f43-6dac-be66-2b8f40a3d923"


class Clock:
    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def server():
    with DcgmServer() as running:
        yield running


@pytest.fixture
def clock():
    return Clock()


def watched(server: DcgmServer, clock: Clock, uuid: str = A100_UUID, **options) -> DcgmSensor:
    sensor = DcgmSensor(server.url, clock_ns=clock, **options)
    sensor.watch(Target(uuid, os.getpid()))
    return sensor


def test_fields_of_our_gpu_come_in_our_units(server, clock):
    sensor = watched(server, clock)
    clock.pass_s(1)
    server.replace("81234605949", "81234640120")
    (sample,) = sensor.sample()
    assert sample.t_ns == clock.now_ns
    assert sample.values == {
        "smact": 0.812045,
        "smocc": 0.387214,
        "drama": 0.44193,
        "gract": 0.96231,
        "tensor_active": 0.205117,
        "fp32_active": 0.11884,
        "memory_used_mib": 9215,
        "gpu_util": 0.97,
        "memory_util": 0.41,
        "power_w": 312.48,
        "energy_j": 81234640.120,
        "sm_clock_mhz": 1410,
        "memory_clock_mhz": 1215,
        "temperature_c": 41,
    }  # fp64_active is DCGM's blank number on this page, fp16_active is not in it
    assert "counter file" in sensor.dropped["fp16_active"]


def test_older_label_style_matches_and_a_measured_zero_stays_zero(server, clock):
    sensor = watched(server, clock, OLD_STYLE_UUID)
    server.replace("70230060115", "70230065000")
    (sample,) = sensor.sample()
    assert sample.values["smact"] == 0.0
    assert sample.values["gpu_util"] == 0.0
    assert sample.values["memory_used_mib"] == 450


def test_page_from_before_the_trial_and_repeated_pages_give_no_reading(server, clock):
    sensor = watched(server, clock)
    for _ in range(5):
        clock.pass_s(0.2)
        assert sensor.sample() == []
    server.replace("0.812045", "0.500000")
    assert sensor.sample()[0].values["smact"] == 0.5
    assert sensor.sample() == []


def test_change_of_another_gpu_is_no_reading_of_ours(server, clock):
    sensor = watched(server, clock)
    server.replace("70230060115", "70230065000")
    assert sensor.sample() == []


def test_value_that_stays_the_same_is_reported_at_the_exporters_interval(server, clock):
    sensor = watched(server, clock)
    for energy_mj in (81234605949, 81234605950, 81234605951):  # the exporter's interval is learned: a second
        server.replace(str(energy_mj), str(energy_mj + 1))
        clock.pass_s(1)
        assert len(sensor.sample()) == 1
    times = []
    for _ in range(20):  # then nothing changes for four seconds
        clock.pass_s(0.2)
        times += [sample.t_ns for sample in sensor.sample()]
    assert len(times) == 4
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {1_000_000_000}


def test_unchanged_page_is_reported_after_the_default_interval_where_none_was_learned(server, clock):
    sensor = watched(server, clock, interval_s=2)
    clock.pass_s(1.9)
    assert sensor.sample() == []
    clock.pass_s(0.1)
    assert len(sensor.sample()) == 1


def test_stalled_profiling_on_a_busy_gpu_is_missing_and_not_zero(server, clock):
    sensor = watched(server, clock)
    for figure in ("0.962310", "0.812045", "0.387214", "0.205117", "0.441930", "0.118840"):
        server.replace(f" {figure}", " 0.000000")
    (sample,) = sensor.sample()
    assert sample.values["gpu_util"] == 0.97
    assert {"smact", "smocc", "drama", "gract", "tensor_active", "fp32_active"}.isdisjoint(sample.values)


BROKEN_URLS = (
    "localhost:9400/metrics", "ftp://localhost/metrics", "http:///metrics", "http://host:port/", "http://a b/", "",
    None,
)  # fmt: skip


@pytest.mark.parametrize("url", BROKEN_URLS)
def test_broken_url_is_the_users_mistake_and_names_the_key(url):
    with pytest.raises(UsageError, match=r"telemetry\.dcgm_url"):
        DcgmSensor(url)


def test_nobody_answering_is_a_reason(server):
    url = server.url
    server.__exit__()
    with pytest.raises(SensorUnavailable, match=f"no dcgm-exporter answers at {url}"):
        DcgmSensor(url)


def test_http_error_is_a_reason(server):
    server.status = 503
    with pytest.raises(SensorUnavailable, match="503"):
        DcgmSensor(server.url)


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


def test_one_failed_scrape_is_survived_and_a_gone_exporter_is_reported(server, clock):
    sensor = watched(server, clock)
    server.status = 500
    assert sensor.sample() == []
    server.status = 200
    server.replace("0.812045", "0.500000")
    assert len(sensor.sample()) == 1
    server.status = 500
    assert sensor.sample() == sensor.sample() == []
    with pytest.raises(SensorUnavailable, match="500"):
        sensor.sample()


def test_torn_page_and_foreign_text_say_nothing():
    torn = f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{A100_UUID}"}} 97\nDCGM_FI_PROF_SM_ACTIVE{{gpu="0",UUID="{A100_UUID}"'
    assert parse_page(torn, A100_UUID)[0] == {"DCGM_FI_DEV_GPU_UTIL": 97}
    assert parse_page(f"<html>{A100_UUID} is = not { {} }</html>", A100_UUID) == ({}, False, False)
