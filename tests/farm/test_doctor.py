"""`farm.doctor`: a report for every state of the machine and of the data folder, as a table and as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "workers"))  # the NVML recording lives there

from dcgm_server import DcgmServer
from recorded_nvml import MIG_SESSION, SLICE_UUID, FakeGpmNvml, RecordedNvml

from conf.cli.command_line import run
from farm import doctor
from warehouse.files.folder import DataFolder
from workers.devices.cuda import discover_gpus
from workers.telemetry.nvml import open_nvml


def report(capsys, *overrides: str, refused: bool = False) -> dict:
    """The report; `refused`: with the exit code for what `data=` names and is not a data folder."""
    assert run("doctor", doctor.entry, ["format=json", *overrides]) == 2 * refused
    printed = capsys.readouterr()
    assert printed.err.count("\n") == refused
    return json.loads(printed.out)


def override(path: Path) -> str:
    """A path as Hydra's grammar wants it quoted."""
    return 'data="' + str(path) + '"'


def made(path: Path) -> Path:
    """A data folder at that path."""
    return DataFolder.resolve(path).create().root


@pytest.fixture
def no_gpu(monkeypatch):
    class NoDriver(RecordedNvml):
        def nvmlInit(self):
            raise self.NVMLError(9)

    monkeypatch.setattr("workers.devices.cuda.open_nvml", lambda given=None: open_nvml(given or NoDriver()))
    monkeypatch.setattr("workers.telemetry.nvml.open_nvml", lambda given=None: open_nvml(given or NoDriver()))


@pytest.mark.parametrize(
    ("name", "values", "lines"),
    [
        (
            "L4",
            {"compute_capability": "8.9", "sm_count": 58},
            ["bandwidth 300 GB/s"],
        ),
        (
            "MI300X",
            {"llvm_target": "gfx942", "warp_size": 64, "mig_slices": []},
            ["model MI300X, AMD gfx942", "304, each of 32 warps of 64 threads"],
        ),
    ],
)
def test_a_described_gpu_model_is_shown_with_what_follows_from_it(capsys, tmp_path, no_gpu, name, values, lines):
    arguments = (override(made(tmp_path)), f"device={name}")
    shown = report(capsys, *arguments)["device"]["description"]
    assert shown["name"] == name and values.items() <= shown.items()
    assert ("compute_capability" in shown) == ("compute_capability" in values)
    assert run("doctor", doctor.entry, arguments) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert [line for line in lines if line not in table] == []


def test_machine_without_a_gpu_gets_a_reason_for_everything_that_is_missing(capsys, tmp_path, no_gpu):
    doctor_report = report(capsys, override(tmp_path / "a'; echo foo"), refused=True)
    assert doctor_report["gpus"] == [] and "Driver Not Loaded" in doctor_report["gpus_reason"]
    assert doctor_report["device"]["chosen"] == "simulated"
    assert "4 x A100-SXM4-40GB (simulated)" in doctor_report["device"]["said"]
    sources = doctor_report["telemetry"].values()
    assert all(one["available"] == (one["reason"] is None) == bool(one["metrics"]) for one in sources)
    assert doctor_report["telemetry"]["process"]["available"]
    assert not doctor_report["telemetry"]["nvml"]["available"]


def test_gpus_are_listed_with_the_reason_why_one_is_no_worker(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "discover_gpus", lambda: discover_gpus(RecordedNvml(), {}))
    overrides = [override(made(tmp_path)), "telemetry.dcgm_url=http://127.0.0.1:9/metrics"]
    doctor_report = report(capsys, *overrides)
    assert [gpu["usable"] for gpu in doctor_report["gpus"]] == [True, True, True, False, True]
    assert "display adapter" in doctor_report["gpus"][3]["excluded_reason"]
    assert "no dcgm-exporter answers at http://127.0.0.1:9/metrics" in doctor_report["telemetry"]["dcgm"]["reason"]
    assert run("doctor", doctor.entry, overrides) == 0
    table = capsys.readouterr().out
    assert "NVIDIA DGX Display" in table and "550.54.15" in table


@pytest.fixture
def hopper(monkeypatch):
    """A machine with a GPU that has GPM."""
    nvml = FakeGpmNvml()
    nvml.returns[13] = 3
    for module in ("nvml", "dcgm"):
        monkeypatch.setattr(f"workers.telemetry.{module}.open_nvml", lambda given=None: open_nvml(given or nvml))
    monkeypatch.setattr(doctor, "discover_gpus", lambda: discover_gpus(nvml, {}))
    monkeypatch.setattr(doctor, "_LISTEN_S", 0.6)
    return nvml


def test_each_source_is_listened_to_and_tells_what_it_gives_here(capsys, tmp_path, hopper):
    with DcgmServer() as server:
        doctor_report = report(capsys, override(made(tmp_path)), f"telemetry.dcgm_url={server.url}")["telemetry"]
        assert "fp16_active" not in doctor_report["gpm"]["metrics"] and "drama" in doctor_report["gpm"]["metrics"]
        assert "Not Supported" in doctor_report["gpm"]["not_given"]["fp16_active"]
        assert {"power_w", "pcie_tx_mib_s"} <= set(doctor_report["nvml"]["metrics"])
        assert "counter file" in doctor_report["dcgm"]["not_given"]["int_active"]
        assert run("doctor", doctor.entry, [override(made(tmp_path)), f"telemetry.dcgm_url={server.url}"]) == 0
    assert "without fp16_active: GPM: Not Supported" in " ".join(capsys.readouterr().out.split())


def test_mig_slices_and_a_multi_process_service_are_shown(capsys, tmp_path, monkeypatch, no_gpu):
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    environment = {"CUDA_VISIBLE_DEVICES": SLICE_UUID, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    monkeypatch.setattr(doctor, "discover_gpus", lambda: discover_gpus(RecordedNvml(MIG_SESSION), environment))
    doctor_report = report(capsys, override(made(tmp_path / "data")))["gpus"]
    assert [gpu["usable"] for gpu in doctor_report] == [False, True, False, False]
    assert [gpu["mig_profile"] for gpu in doctor_report] == [None, "3g.20gb", "1g.5gb", None]
    assert run("doctor", doctor.entry, [override(made(tmp_path / "data"))]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "MIG slice 3g.20gb" in table and "multi-process service (MPS)" in table


@pytest.mark.parametrize("named", [False, True])
def test_data_folder_that_is_not_there_yet_is_refused_only_where_it_is_named_and_not_made(
    capsys, tmp_path, no_gpu, monkeypatch, named
):
    path = tmp_path / "deep" / "a'; echo foo"
    monkeypatch.setenv("GPUFARM_DATA", str(path))
    data = report(capsys, *([override(path)] if named else []), refused=named)["data"]
    assert data["path"] == str(tmp_path / "deep" / "a'; echo foo")
    assert not data["exists"] and data["writable"]
    assert data["runs_gone"] is data["schema_version"] is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["not json", '{"format": "gpufarm-data", "schema_version": 999}'])
def test_unreadable_data_folder_is_part_of_the_report(capsys, tmp_path, no_gpu, content):
    folder = DataFolder.resolve(tmp_path / "data").create()
    folder.format_marker.write_text(content)
    data = report(capsys, override(folder.root), refused=True)["data"]
    assert data["reason"] and data["runs_gone"] is None
    queue = made(tmp_path / "other") / "queue.sqlite"
    queue.write_bytes(b"no database" * 100)
    assert "queue.sqlite" in doctor.data_state(str(queue.parent))["reason"]
