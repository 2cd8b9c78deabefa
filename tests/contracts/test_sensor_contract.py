"""The contract of every telemetry sensor, run for each implementation. Start reading at `CASES`."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "workers"))  # the recordings live with the sensors' own tests

from dcgm_server import DcgmServer
from recorded_nvml import A100_UUID, UNKNOWN_UUID, FakeGpmNvml, RecordedNvml

from tests.surroundings import await_
from warehouse.tables.schema import METRICS, SAMPLE_QUALITIES
from workers.telemetry.dcgm import DcgmSensor
from workers.telemetry.nvml import GpmSensor, NvmlSensor
from workers.telemetry.process import ProcessSensor
from workers.telemetry.sensors import SENSORS, Sample, Sensor, SensorUnavailable, WatchTarget

RATIOS = {name for name, (unit, _) in METRICS.items() if unit == "ratio"}


@dataclass
class Case:
    """How a sensor is made, what makes its source move on and what makes it fail, and a target it cannot know."""

    make: Callable[[WatchTarget], Sensor]
    step: Callable[[], None] = lambda: None
    fail: Callable[[], None] | None = None
    target: WatchTarget = field(default_factory=lambda: WatchTarget(A100_UUID, os.getpid()))
    unknown: WatchTarget = field(default_factory=lambda: WatchTarget(UNKNOWN_UUID, os.getpid()))

    @cached_property
    def sensor(self) -> Sensor:
        return self.make(self.target)


@contextlib.contextmanager
def nvml_case() -> Iterator[Case]:
    nvml = RecordedNvml(pids={"trial": os.getpid()})

    def fail() -> None:
        for query in nvml.answers[0].keys() - {"nvmlDeviceGetUUID"}:
            nvml.answers[0][query] = {"error": 999}

    yield Case(lambda target: NvmlSensor(target, nvml), nvml.advance, fail)


@contextlib.contextmanager
def gpm_case() -> Iterator[Case]:
    nvml = FakeGpmNvml()
    nvml.returns[13] = 3
    yield Case(lambda target: GpmSensor(target, nvml), fail=lambda: setattr(nvml, "failing", 999))


@contextlib.contextmanager
def dcgm_case() -> Iterator[Case]:
    energies = itertools.pairwise(map(str, range(81234605949, 81234999999)))
    with DcgmServer() as server:
        yield Case(
            lambda target: DcgmSensor(target, server.url),
            lambda: server.replace(*next(energies)),
            lambda: setattr(server, "status", 500),
        )


@contextlib.contextmanager
def process_case() -> Iterator[Case]:
    yield Case(ProcessSensor, unknown=WatchTarget(None, 999_999_999))


CASES = {"nvml": nvml_case, "gpm": gpm_case, "dcgm": dcgm_case, "process": process_case}


@pytest.fixture(params=CASES)
def case(request):
    with CASES[request.param]() as made:
        yield made
        made.sensor.close()


def readings(case: Case, enough: int = 4) -> list[Sample]:
    """At least `enough` further samples: asked again and again, as the sampler does, until the sensor has them."""
    readings: list[Sample] = []

    def complete() -> bool:
        case.step()
        readings.extend(case.sensor.sample())
        return len(readings) >= enough

    await_(complete, "the sensor's samples")
    return readings


def test_every_source_of_the_factory_has_a_case():
    assert set(CASES) == set(SENSORS)


def test_every_sample_is_of_declared_metrics_numbers_and_words(case):
    assert isinstance(case.sensor, Sensor) and case.sensor.name in SENSORS and 0 < case.sensor.period_s <= 1
    assert set(case.sensor.metrics) <= set(METRICS)
    for sample in readings(case):
        assert sample.quality in SAMPLE_QUALITIES
        assert bool(sample.reasons) == (sample.quality in ("unavailable", "suspect"))
        assert sample.values and set(sample.values) <= set(case.sensor.metrics)
        assert set(sample.values).isdisjoint(getattr(case.sensor, "dropped", {})), "what was not measured is absent"
        for name, value in sample.values.items():
            assert isinstance(value, int | float) and value >= 0, name
            assert name not in RATIOS or value <= 1, name


def test_sample_times_grow_and_are_not_in_the_future_and_averages_begin_before_they_end(case):
    before_ns = time.monotonic_ns()
    samples = readings(case)
    times = [sample.t_ns for sample in samples]
    intervals = [(sample.since_ns, sample.t_ns) for sample in samples if sample.since_ns is not None]
    assert times == sorted(times) and intervals == sorted(intervals), "they do not go back"
    assert before_ns <= times[0] and times[-1] <= time.monotonic_ns() - case.sensor.lag_s * 1e9
    assert all(since_ns < t_ns for since_ns, t_ns in intervals)


def test_a_source_that_fails_for_once_says_so_and_keeps_no_old_values(case):
    if case.fail is None:
        pytest.skip("this source does not fail without its process")
    readings(case, enough=1)
    case.fail()
    case.step = lambda: None
    (failed,) = readings(case, enough=1)
    assert (failed.values, failed.quality) == ({}, "unavailable")
    assert all(reason.isidentifier() for reason in failed.reasons) and failed.reasons


def test_unknown_target_is_refused_with_a_reason(case):
    with pytest.raises(SensorUnavailable, match=r".{10,}"):
        case.make(case.unknown)
