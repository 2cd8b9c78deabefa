"""A worker on a real GPU: pinned by UUID, measured by NVML, out of memory as a result. Skipped where there is none."""

import pytest

from featurize.families import get_family
from featurize.trial import canonical_json
from workers.devices import DeviceChoice, DeviceUnavailable, make_device
from workers.settings import TrialSettings, WindowSettings
from workers.worker import TaskSpec, Worker

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


def run(worker, family, index=0, **values):
    config = get_family(family).Config(**values)
    settings = TrialSettings(window=WindowSettings(kind="adaptive", max_seconds=5.0))
    return worker.run(
        TaskSpec(
            job_id=f"{family}-00000000",
            task_index=index,
            attempt=1,
            config=canonical_json(config.to_mapping()),
            settings=canonical_json(settings.to_mapping()),
            seed=0,
        )
    )


def cnn(**changes):
    return {
        "batch_size": 16, "image_size": 64, "channels": 3, "classes": 10, "base_filters": 32, "depth": 4,
        "kernel_size": 3, **changes,
    }  # fmt: skip


def test_the_trial_server_has_not_touched_cuda_and_every_trial_starts_clean(worker):
    first = run(worker, "cnn", 0, **cnn()).run
    again = run(worker, "cnn", 1, **cnn()).run
    assert (first["status"], again["status"]) == ("ok", "ok"), first["error"] or again["error"]
    assert again["peak_memory_mib"] == pytest.approx(first["peak_memory_mib"], rel=0.01)


def test_labels_come_from_the_device(worker):
    measured = run(worker, "cnn", **cnn(batch_size=62, image_size=128)).run
    assert measured["status"] == "ok", measured["error"]
    assert measured["source"] == "measured"
    assert measured["peak_memory_mib"] > measured["peak_reserved_mib"] >= measured["peak_allocated_mib"] > 0
    assert 0 < measured["gpu_util"] <= 1
    assert measured["power_w"] > 0
    for ratio in ("smact", "smocc", "drama"):
        assert measured[ratio] is None or 0 < measured[ratio] <= 1


def test_more_than_the_card_is_an_oom_and_the_next_trial_runs(worker):
    result = run(worker, "mlp", batch_size=4, input_size=300_000, classes=2, depth=2, topology="uniform")
    assert (result.run["status"], result.run["oom_kind"]) == ("oom", "device")
    assert run(worker, "cnn", **cnn()).run["status"] == "ok"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_precision_trains(worker, precision):
    assert run(worker, "cnn", **cnn(precision=precision)).run["status"] == "ok"
