"""`farm.doctor`: a report for every state of the machine and of the data folder, as a table and as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "workers"))  # the NVML recording lives there

from dcgm_server import DcgmServer
from recorded_nvml import FakeGpmNvml, RecordedNvml

from farm import doctor
from warehouse.files.folder import DataFolder
from workers.devices.cuda import discover_gpus
from workers.telemetry.nvml import open_nvml


@pytest.fixture
def report(outcome):
    """The report; `refused`: with the exit code for what `data=` names and is not a data folder."""

    def report(*overrides: str, refused: bool = False) -> dict:
        code, out, err = outcome("doctor", "format=json", *overrides)
        assert (code, err.count("\n")) == (2 * refused, refused)
        return json.loads(out)

    return report


def override(path: Path) -> str:
    """A path as Hydra's grammar wants it quoted."""
    return 'data="' + str(path) + '"'


@pytest.fixture
def no_gpu(monkeypatch):
    class NoDriver(RecordedNvml):
        def nvmlInit(self):
            raise self.NVMLError(9)

    for module in ("devices.cuda", "telemetry.nvml"):
        monkeypatch.setattr(f"workers.{module}.open_nvml", lambda given=None: open_nvml(given or NoDriver()))


def test_machine_without_a_gpu_gets_a_reason_for_everything_that_is_missing(report, tmp_path, no_gpu):
    doctor_report = report(override(tmp_path / "a'; echo foo"), refused=True)
    device, sources = doctor_report["device"], doctor_report["telemetry"]
    assert doctor_report["gpus"] == [] and "Driver Not Loaded" in doctor_report["gpus_reason"]
    assert device["chosen"] == "simulated" and "4 x A100-SXM4-40GB (simulated)" in device["said"]
    assert all(one["available"] == (one["reason"] is None) == bool(one["metrics"]) for one in sources.values())
    assert (sources["process"]["available"], sources["nvml"]["available"]) == (True, False)


def test_gpus_are_listed_with_the_reason_why_one_is_no_worker(report, shown, folder, monkeypatch):
    monkeypatch.setattr(doctor, "discover_gpus", lambda: discover_gpus(RecordedNvml(), {}))
    overrides = [override(folder.root), "telemetry.dcgm_url=http://127.0.0.1:9/metrics"]
    doctor_report = report(*overrides)
    assert [gpu["usable"] for gpu in doctor_report["gpus"]] == [True, True, True, False, True]
    assert "display adapter" in doctor_report["gpus"][3]["excluded_reason"]
    assert "no dcgm-exporter answers at http://127.0.0.1:9/metrics" in doctor_report["telemetry"]["dcgm"]["reason"]
    table = " ".join(shown("doctor", *overrides).split())
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


def test_each_source_is_listened_to_and_tells_what_it_gives_here(report, shown, folder, hopper):
    with DcgmServer() as server:
        overrides = (override(folder.root), f"telemetry.dcgm_url={server.url}")
        sources, table = report(*overrides)["telemetry"], " ".join(shown("doctor", *overrides).split())
    gpm = sources["gpm"]
    assert "fp16_active" not in gpm["metrics"] and "drama" in gpm["metrics"]
    assert "Not Supported" in gpm["not_given"]["fp16_active"] and "fp16_active: GPM: Not Supported" in table
    assert {"power_w", "pcie_tx_mib_s"} <= set(sources["nvml"]["metrics"])
    assert "counter file" in sources["dcgm"]["not_given"]["int_active"]


@pytest.mark.parametrize("named", [False, True])
def test_data_folder_that_is_not_there_yet_is_refused_only_where_it_is_named_and_not_made(
    report, tmp_path, no_gpu, monkeypatch, named
):
    path = tmp_path / "deep" / "a'; echo foo"
    monkeypatch.setenv("GPUFARM_DATA", str(path))
    data = report(*([override(path)] if named else []), refused=named)["data"]
    assert (data["path"], data["exists"], data["writable"]) == (str(path), False, True)
    assert data["runs_gone"] is data["schema_version"] is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["not json", '{"format": "gpufarm-data", "schema_version": 999}'])
def test_unreadable_data_folder_is_part_of_the_report(report, folder, tmp_path, no_gpu, content):
    folder.format_marker.write_text(content)
    data = report(override(folder.root), refused=True)["data"]
    assert data["reason"] and data["runs_gone"] is None
    other = DataFolder.resolve(tmp_path / "other").create()
    other.queue.write_bytes(b"no database" * 100)
    assert "queue.sqlite" in doctor.data_state(str(other.root))["reason"]
