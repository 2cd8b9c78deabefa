"""The program that runs the probes: what its exit code and its last line say of what could be measured."""

import pytest

from infra.offline import probes
from workers.devices import Slot
from workers.probes import children, contexts


@pytest.fixture
def answers(monkeypatch):
    """Make each measurement's process give a reason, or none, by its name; there is a GPU."""
    slot = Slot(index=0, device_name="NVIDIA H100 80GB HBM3", device_uuid="GPU-1", device_memory_mib=81000.0)
    reasons = {}
    monkeypatch.setattr(children, "gpu_of", lambda device: (slot, {}, None))
    monkeypatch.setattr(
        children, "run_child", lambda measurement, *others: ([{"figure": 1.0}], reasons.get(measurement.name))
    )
    monkeypatch.setattr(contexts, "STAGES", {"context": False})
    return reasons


def measure(out, device="cuda"):
    return probes.main(["probes=contexts", f"out={out}", f"device={device}", "seconds=100"])


def test_a_probe_that_fails_everywhere_has_failed(answers, tmp_path, capsys):
    answers |= {"idle": "CUDA error: out of memory", **dict.fromkeys(("context lazy", "context eager"), "it crashed")}
    assert measure(tmp_path) == 1
    output = capsys.readouterr().out
    assert "contexts: 0 measured, 0 before, 0 left" in output
    assert output.splitlines()[-1] == "failed: 3 measurements, first idle: CUDA error: out of memory"


def test_what_fails_in_part_is_left_until_it_is_measured(answers, tmp_path, capsys):
    answers["context lazy"] = "it took more than 60 s"
    assert measure(tmp_path) == probes.EXIT_LEFT
    assert (
        capsys.readouterr().out.splitlines()[-1] == "failed: 1 measurement, first context lazy: it took more than 60 s"
    )
    answers.clear()
    assert measure(tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == ["contexts: 1 measured, 2 before, 0 left"]


def test_without_a_gpu_nothing_can_be_measured_here(tmp_path, capsys):
    assert measure(tmp_path, "cpu") == probes.EXIT_NOT_HERE
    assert "stands in for a GPU" in capsys.readouterr().out.splitlines()[-1]


def test_what_is_measured_already_needs_no_gpu(answers, tmp_path, monkeypatch):
    assert measure(tmp_path) == 0
    monkeypatch.setattr(children, "gpu_of", lambda device: (None, {}, "no GPU"))
    assert measure(tmp_path) == 0
