"""The program that runs the probes: what its exit code and its last line say of what could be measured."""

import pytest

from workers.devices import Slot
from workers.probes import children, questions


@pytest.fixture
def answers(monkeypatch):
    """Make each question's process give a reason, or none, by its name; there is a GPU."""
    slot = Slot(index=0, device_name="NVIDIA H100 80GB HBM3", device_uuid="GPU-1", device_memory_mib=81000.0)
    reasons = {}
    monkeypatch.setattr(children, "gpu_of", lambda device: (slot, {}, None))
    monkeypatch.setattr(
        children, "run_child", lambda measurement, *others: ([{"figure": 1.0}], reasons.get(measurement.name))
    )
    monkeypatch.setattr(questions, "ANSWERS", dict.fromkeys(("first", "second"), lambda rows: "Yes."))
    return reasons


def measure(out, device="cuda"):
    return children.main(["probes=questions", f"out={out}", f"device={device}", "seconds=100"])


def test_a_probe_that_fails_everywhere_has_failed(answers, tmp_path, capsys):
    answers |= {"first": "CUDA error: out of memory", "second": "its process ended with code 1"}
    assert measure(tmp_path) == 1
    output = capsys.readouterr().out
    assert "questions: 0 measured, 0 before, 0 left" in output
    assert output.splitlines()[-1] == "failed: 2 measurements, first first: CUDA error: out of memory"


def test_what_fails_in_part_is_left_until_it_is_measured(answers, tmp_path, capsys):
    answers["second"] = "it took more than 60 s"
    assert measure(tmp_path) == children.EXIT_LEFT
    assert capsys.readouterr().out.splitlines()[-1] == "failed: 1 measurement, first second: it took more than 60 s"
    answers.clear()
    assert measure(tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == ["questions: 1 measured, 1 before, 0 left"]


def test_without_a_gpu_nothing_can_be_measured_here(tmp_path, capsys):
    assert measure(tmp_path, "cpu") == children.EXIT_NOT_HERE
    assert "stands in for a GPU" in capsys.readouterr().out.splitlines()[-1]


def test_what_is_measured_already_needs_no_gpu(answers, tmp_path, monkeypatch):
    assert measure(tmp_path) == 0
    monkeypatch.setattr(children, "gpu_of", lambda device: (None, {}, "no GPU"))
    assert measure(tmp_path) == 0
