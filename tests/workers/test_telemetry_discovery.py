"""GPU discovery on a recorded NVML session: four A100 with a display adapter at index 3."""

from __future__ import annotations

import os

import pytest
from recorded_nvml import A100_UUID, DISPLAY_UUID, MIG_SESSION, SLICE_UUID, SMALL_SLICE_UUID, RecordedNvml

from workers.devices.cuda import discover_gpus, torch_cuda_build


def usable(nvml=None, **environment) -> list[int]:
    return [gpu.index for gpu in discover_gpus(nvml or RecordedNvml(), environment).usable]


def test_display_adapter_among_the_a100_is_no_worker():
    nvml = RecordedNvml()
    discovery = discover_gpus(nvml, {})
    assert [gpu.index for gpu in discovery.usable] == [0, 1, 2, 4]
    assert "display adapter next to NVIDIA A100-SXM4-40GB" in discovery.gpus[3].excluded_reason
    assert (discovery.driver_version, discovery.reason) == ("550.54.15", None)
    first = discovery.gpus[0]
    assert (first.uuid, first.memory_mib, first.compute_capability) == (A100_UUID, 40960.0, (8, 0))
    assert first.mig is False and first.display_active is False
    assert nvml.initialised == 0


# Of a machine with four A100 and a display adapter at index 3: a GPU, what NVML says of it, why it is left out, and the
# GPUs that are used.
MACHINES = {
    "a GPU drives a display": (1, {"nvmlDeviceGetDisplayActive": 1}, "drives a display", [0, 2, 4]),
    "processes are prohibited": (0, {"nvmlDeviceGetComputeMode": 2}, "nvidia-smi -i 0 -c DEFAULT", [1, 2, 4]),
    "one process at a time, as the farm's": (0, {"nvmlDeviceGetComputeMode": 3}, None, [0, 1, 2, 4]),
    "MIG splits a GPU": (2, {"nvmlDeviceGetMigMode": [1, 1]}, "nvidia-smi -i 2 -mig 0", [0, 1, 4]),
    "a GPU is lost": (0, {"nvmlDeviceGetUUID": {"error": 15}}, "GPU is lost", [1, 2, 4]),
    "another compute model of like size": (
        4,
        {
            "nvmlDeviceGetName": "NVIDIA A30",
            "nvmlDeviceGetMemoryInfo": {"total": 24 * 2**30, "free": 24 * 2**30, "used": 0},
        },
        None,
        [0, 1, 2, 4],
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_gpu_that_cannot_train_is_no_worker_and_says_why(name):
    index, answers, reason, expected = MACHINES[name]
    nvml = RecordedNvml()
    nvml.answers[index].update(answers)
    discovery = discover_gpus(nvml, {})
    assert [gpu.index for gpu in discovery.usable] == expected
    assert (reason or "") in (discovery.gpus[index].excluded_reason or "")


def test_only_gpu_of_a_machine_that_drives_its_display_is_used_when_named_by_its_whole_uuid():
    nvml = RecordedNvml()
    del nvml.answers[1:]
    nvml.answers[0]["nvmlDeviceGetDisplayActive"] = 1
    assert f"CUDA_VISIBLE_DEVICES={A100_UUID}" in discover_gpus(nvml, {}).reason
    assert usable(nvml, CUDA_VISIBLE_DEVICES=A100_UUID) == [0]
    assert [usable(nvml, CUDA_VISIBLE_DEVICES=vague) for vague in ("0", A100_UUID[:12], "GPU-")] == [[], [], []]


def test_mig_slices_are_workers_where_cuda_visible_devices_names_them():
    nvml = RecordedNvml(MIG_SESSION)
    discovery = discover_gpus(nvml, {"CUDA_VISIBLE_DEVICES": f"{SMALL_SLICE_UUID},{SLICE_UUID}"})
    assert [(gpu.index, gpu.uuid, gpu.mig_profile, gpu.name) for gpu in discovery.usable] == [
        (0, SLICE_UUID, "3g.20gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
        (0, SMALL_SLICE_UUID, "1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
    ]
    assert [gpu.memory_mib for gpu in discovery.usable] == [19968, 4864]
    assert [gpu.mig for gpu in discovery.gpus] == [True, True, True, False]
    assert "name slices in CUDA_VISIBLE_DEVICES" in discovery.gpus[0].excluded_reason
    assert discovery.gpus[3].excluded_reason == "left out by CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (SLICE_UUID, [SLICE_UUID]),
        (SLICE_UUID[:10], [SLICE_UUID]),
        ("MIG-", []),  # names several
        (f"{SLICE_UUID}1", []),
        (A100_UUID, []),  # the GPU that is split
        ("1", ["GPU-6b8d2a1f-4e32-5c9b-ad55-1a7e3f92c812"]),
    ],
)
def test_a_slice_is_named_by_its_uuid(visible, expected):
    discovery = discover_gpus(RecordedNvml(MIG_SESSION), {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.uuid for gpu in discovery.usable] == expected


def test_multi_process_service_is_recognised_by_its_living_daemon(place):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(place)}
    assert not any(gpu.mps for gpu in discover_gpus(RecordedNvml(), environment).gpus)
    (place / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    assert all(gpu.mps for gpu in discover_gpus(RecordedNvml(), environment).gpus)
    (place / "nvidia-cuda-mps-control.pid").write_text("999999999")  # killed: the folder is still there
    assert not any(gpu.mps for gpu in discover_gpus(RecordedNvml(), environment).gpus)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,4", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0, 4]),
        ({"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, []),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [4]),  # CUDA counts the display adapter last
        ({"CUDA_VISIBLE_DEVICES": "1, 2"}, [1, 2]),
        ({"CUDA_VISIBLE_DEVICES": A100_UUID}, [0]),
        ({"CUDA_VISIBLE_DEVICES": f"{A100_UUID[:12]},GPU-6b8d"}, [0, 1]),
        ({"CUDA_VISIBLE_DEVICES": DISPLAY_UUID}, []),  # named, but still a display adapter
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, []),  # names several
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "a'; echo foo"}, []),
        ({}, [0, 1, 2, 4]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(environment, expected):
    assert usable(None, **environment) == expected


def test_no_usable_gpu_says_why_for_each():
    discovery = discover_gpus(RecordedNvml(), {"CUDA_VISIBLE_DEVICES": ""})
    assert discovery.usable == () and len(discovery.gpus) == 5
    assert discovery.reason.count("left out by CUDA_VISIBLE_DEVICES") == 4
    assert "GPU 3 (NVIDIA DGX Display): a display adapter" in discovery.reason


VERSION_PY = """from typing import Optional
__version__ = '2.13.0+{flavour}'
cuda: Optional[str] = {cuda}
hip: Optional[str] = {hip}
"""


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (VERSION_PY.format(flavour="cu130", cuda="'13.0'", hip="None"), "13.0"),
        (VERSION_PY.format(flavour="cpu", cuda="None", hip="None"), None),
        (VERSION_PY.format(flavour="rocm7", cuda="None", hip="'7.0'"), None),
        ("__version__ = '2.4.0'\ncuda = '12.1'\n", "12.1"),
        (None, None),
    ],
)
def test_cuda_build_of_torch_is_read_from_its_version_file(monkeypatch, text, build):
    monkeypatch.setattr("workers.devices.cuda._torch_version_text", lambda: text)
    assert torch_cuda_build() == build
