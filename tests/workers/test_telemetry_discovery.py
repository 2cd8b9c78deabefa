"""GPU discovery on a recorded NVML session: four A100 with a display adapter at index 3."""

from __future__ import annotations

import subprocess
import sys

import pytest
from recorded_nvml import A100_UUID, DISPLAY_UUID, RecordedNvml

from workers.devices.discovery import discover_gpus, torch_cuda_build


def usable(nvml=None, **environment) -> list[int]:
    return [gpu.index for gpu in discover_gpus(nvml or RecordedNvml(), environment).usable]


def test_display_adapter_among_the_a100_is_no_worker():
    nvml = RecordedNvml()
    found = discover_gpus(nvml, {})
    assert [gpu.index for gpu in found.usable] == [0, 1, 2, 4]
    assert [gpu.name for gpu in found.gpus][3] == "NVIDIA DGX Display"
    assert "display adapter next to NVIDIA A100-SXM4-40GB" in found.gpus[3].excluded_reason
    assert found.gpus[3].mig is None  # NVML does not say
    assert found.driver_version == "550.54.15"
    assert found.reason is None
    first = found.gpus[0]
    assert (first.uuid, first.memory_mib, first.compute_capability) == (A100_UUID, 40960.0, (8, 0))
    assert first.mig is False and first.display_active is False
    assert nvml.initialised == 0


def test_gpu_that_drives_a_display_is_no_worker_whatever_its_model():
    nvml = RecordedNvml()
    nvml.answers[1]["nvmlDeviceGetDisplayActive"] = 1
    found = discover_gpus(nvml, {})
    assert found.gpus[1].excluded_reason == "drives a display"
    assert [gpu.index for gpu in found.usable] == [0, 2, 4]


def test_other_compute_model_of_like_size_is_a_worker():
    nvml = RecordedNvml()
    nvml.answers[4]["nvmlDeviceGetName"] = "NVIDIA A30"
    nvml.answers[4]["nvmlDeviceGetMemoryInfo"] = {"total": 24 * 2**30, "free": 24 * 2**30, "used": 0}
    assert usable(nvml) == [0, 1, 2, 4]


def test_gpu_in_mig_mode_is_no_worker_and_says_how_to_leave_it():
    nvml = RecordedNvml()
    nvml.answers[2]["nvmlDeviceGetMigMode"] = [1, 1]
    assert "nvidia-smi -i 2 -mig 0" in discover_gpus(nvml, {}).gpus[2].excluded_reason


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
    found = discover_gpus(RecordedNvml(), {"CUDA_VISIBLE_DEVICES": ""})
    assert found.usable == () and len(found.gpus) == 5
    assert found.reason.count("left out by CUDA_VISIBLE_DEVICES") == 4
    assert "GPU 3 (NVIDIA DGX Display): a display adapter" in found.reason


def test_lost_gpu_does_not_hide_the_others():
    nvml = RecordedNvml()
    nvml.answers[0]["nvmlDeviceGetUUID"] = {"error": 15}
    found = discover_gpus(nvml, {})
    assert [gpu.index for gpu in found.usable] == [1, 2, 4]
    assert "GPU is lost" in found.gpus[0].excluded_reason


def test_machine_without_a_driver_has_no_gpus_and_a_reason():
    class NoDriver(RecordedNvml):
        def nvmlInit(self):
            raise self.NVMLError(9)

    found = discover_gpus(NoDriver(), {})
    assert found.gpus == () and found.driver_version is None
    assert "Driver Not Loaded" in found.reason


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
    monkeypatch.setattr("workers.devices.discovery._torch_version_text", lambda: text)
    assert torch_cuda_build() == build


def test_cuda_build_is_found_without_importing_torch_and_agrees_with_it():
    code = (
        "import sys; from workers.devices.discovery import torch_cuda_build; build = torch_cuda_build();"
        "assert 'torch' not in sys.modules; import torch; assert build == torch.version.cuda, build"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
