"""A worker on a real GPU: pinned by UUID, measured by NVML, out of memory as a result. Skipped where there is none."""

import sys
from pathlib import Path

import pytest

from featurize.families import family_names, get_family
from workers.devices import DeviceChoice, DeviceUnavailable, KernelSettings, TrialSettings, WindowSettings, make_device
from workers.task import Task
from workers.worker import Worker

sys.path.insert(0, str(Path(__file__).parents[1] / "featurize"))
from small_configs import small_config

pytestmark = pytest.mark.gpu
CHOICE = DeviceChoice(backend="cuda")


@pytest.fixture(scope="module")
def worker():
    try:
        slot = make_device(CHOICE).slots()[0]
    except DeviceUnavailable as reason:
        pytest.skip(f"no usable GPU: {reason}")
    worker = Worker(CHOICE, slot.device_uuid, "gpu-test")
    yield worker
    worker.close()


def task(config, index=0, **settings):
    settings = TrialSettings(window=WindowSettings(kind="adaptive", max_seconds=5.0), **settings)
    return Task(
        job_id=f"{config.family}-00000000",
        task_index=index,
        attempt=1,
        config=config,
        settings=settings,
    )


def run(worker, family, index=0, **values):
    return worker.run(task(get_family(family).Config(**values), index))


def cnn(**changes):
    return {
        "batch_size": 16,
        "image_size": 64,
        "channels": 3,
        "classes": 10,
        "base_filters": 32,
        "depth": 4,
        "kernel_size": 3,
        **changes,
    }


def test_the_trial_server_has_not_touched_cuda_and_every_trial_starts_clean(worker):
    first = run(worker, "cnn", 0, **cnn()).run
    again = run(worker, "cnn", 1, **cnn()).run
    assert (first.status, again.status) == ("ok", "ok"), first.error or again.error
    assert again.peak_memory_mib == pytest.approx(first.peak_memory_mib, rel=0.01)


def test_a_trial_that_was_made_ready_on_the_host_measures_the_same(worker):
    config = get_family("cnn").Config(**cnn())
    first, second = (task(config, index, prepare_ahead="always") for index in (0, 1))
    fresh = worker.run(first, second).run
    prepared = worker.run(second).run
    assert (fresh.prepared, prepared.prepared) == (False, True)
    assert prepared.peak_memory_mib == pytest.approx(fresh.peak_memory_mib, rel=0.01)
    assert prepared.peak_allocated_mib == pytest.approx(fresh.peak_allocated_mib, rel=0.01)


@pytest.mark.parametrize("family", family_names())
def test_every_family_trains(worker, family):
    measured = worker.run(task(small_config(family, 3))).run
    assert measured.status == "ok", measured.error
    assert measured.peak_memory_mib > measured.peak_allocated_mib > 0


def test_labels_come_from_the_device_and_an_idle_card_of_ones_own_gives_runs_that_can_be_trusted(worker):
    measured = run(worker, "cnn", **cnn(batch_size=62, image_size=128)).run
    assert measured.status == "ok", measured.error
    assert measured.quality == "trusted", measured.quality_reasons
    assert measured.source == "measured"
    assert measured.peak_memory_mib > measured.peak_reserved_mib >= measured.peak_allocated_mib > 0
    assert 0 < measured.gpu_util <= 1
    assert measured.power_w > 0
    for ratio in ("smact", "smocc", "drama"):
        value = getattr(measured, ratio)
        assert value is None or 0 < value <= 1


def test_more_than_the_card_is_an_oom_and_the_next_trial_runs(worker):
    result = run(worker, "mlp", batch_size=4, input_size=300_000, classes=2, depth=2, topology="uniform")
    assert (result.run.status, result.run.oom_kind) == ("oom", "device")
    assert run(worker, "cnn", **cnn()).run.status == "ok"


def test_a_share_of_the_card_plays_a_smaller_one(worker):
    wide = {"batch_size": 4, "input_size": 20_000, "classes": 2, "depth": 2, "topology": "uniform"}  # some 10 GB
    slot = make_device(CHOICE).slots()[0]
    small = Worker(DeviceChoice(backend="cuda", memory_fraction=0.02), slot.device_uuid, "gpu-small")
    try:
        limited = run(small, "mlp", **wide).run
    finally:
        small.close()
    assert (limited.status, limited.oom_kind, limited.memory_fraction) == ("oom", "device", 0.02)
    assert limited.device_memory_mib == slot.device_memory_mib
    whole = run(worker, "mlp", **wide).run
    assert (whole.status, whole.memory_fraction) == ("ok", None), whole.error


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_precision_trains(worker, precision):
    assert run(worker, "cnn", **cnn(precision=precision)).run.status == "ok"


def test_kernels_of_a_trial_come_from_cupti_after_its_labels(worker):
    plain = worker.run(task(get_family("cnn").Config(**cnn()), 0)).run
    asked = worker.run(task(get_family("cnn").Config(**cnn()), 1, kernels=KernelSettings(steps=3)))
    assert asked.run.status == "ok", asked.run.error
    assert asked.kernels is not None, asked.run.telemetry_missing
    kernels = [row for row in asked.kernels.to_pylist() if row["grid_x"] is not None]
    assert {row["phase"] for row in kernels} >= {"forward", "backward", "optimizer"}
    assert all(row["timing"] == "cupti" and row["duration_us"] > 0 and row["registers_per_thread"] for row in kernels)
    operators = {row["operator"] for row in kernels}
    assert {"aten::convolution", "aten::convolution_backward"} <= operators and "unknown" not in operators
    busy_ms = sum(row["duration_us"] * row["count"] for row in kernels) / 3 / 1e3
    assert 0 < busy_ms < 2 * asked.run.step_time_ms
    assert asked.run.peak_memory_mib == pytest.approx(plain.peak_memory_mib, rel=0.01)  # the profiler's is not counted
