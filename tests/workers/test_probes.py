"""The probes without a GPU: children that fail, files that go on, numbers for calibration, answers from figures."""

import json
import lzma
import os
import subprocess
import sys
import threading
from pathlib import Path

import probed
import pytest
import torch
from recorded_nvml import A100_UUID, FakeGpmNvml, RecordedNvml
from standing_in_gpu import standing_in

from featurize.device.device_spec import load_device
from infra.offline.block_comparison import compare_blocks
from learn.calibrate import calibrate, measured_in_csv
from workers.devices import Slot
from workers.probes import children, contexts, histories, questions, workspaces
from workers.probes.children import Measured, Measurement, measure_all, measured_in, trial_step

PROBES = (contexts, workspaces, histories, questions)
HERE = str(Path(__file__).parent)
H100 = Slot(index=0, device_name="NVIDIA H100 80GB HBM3", device_uuid="GPU-1", device_memory_mib=81000.0)


def forever():
    return 1000.0


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Make the probes start their children as if there were a GPU."""
    monkeypatch.setattr(children, "gpu_of", lambda device: (H100, {"CUDA_VISIBLE_DEVICES": "GPU-1"}, None))


def child(name, function, **arguments):
    return Measurement(name=name, function=f"probed:{function}", arguments=arguments, environment={"PYTHONPATH": HERE})


def measured(folder, *measurements, seconds_left=forever):
    return measure_all(folder, measurements, "cuda", seconds_left)


def stages(folder):
    """The kept rows' stages of the only measurement of a folder."""
    (kept,) = measured_in(folder)
    return [row["stage"] for row in kept.rows]


@pytest.mark.parametrize("probe", PROBES)
def test_a_cpu_gives_reasons_and_no_figures(probe, tmp_path):
    result = probe.measure(tmp_path, "cpu", forever)
    assert not result.measured and not result.kept and not result.left
    assert set(result.failed.values()) == {"device=cpu stands in for a GPU; this needs one"}
    kept = [one for folder in tmp_path.iterdir() for one in measured_in(folder)]
    assert kept and not any(one.rows for one in kept) and not list(tmp_path.glob("*.csv"))


def test_a_failed_measurement_is_a_row_with_its_reason_and_the_next_one_runs(on_a_gpu, tmp_path):
    result = measured(tmp_path, child("broken", "raises"), child("whole", "two_rows"))
    assert result.measured == ["whole"]
    assert "no kernel image is available" in result.failed["broken"]
    assert [len(one.rows) for one in measured_in(tmp_path)] == [0, 2]
    assert measured(tmp_path, child("broken", "two_rows")).measured == ["broken"]  # it is tried again
    assert all(one.reason is None for one in measured_in(tmp_path))


def test_a_killed_child_keeps_the_rows_that_it_gave(on_a_gpu, tmp_path):
    assert "ended with code -9" in measured(tmp_path, child("killed", "is_killed", after=2)).failed["killed"]
    assert stages(tmp_path) == ["row 0", "row 1"]
    measured(tmp_path, child("killed", "is_killed", after=1))  # which gives less, and takes nothing away
    assert stages(tmp_path) == ["row 0", "row 1"]


def test_a_child_that_hangs_ends_at_the_limit(on_a_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(children, "_MOST_S", 6.0)  # of which the imports of a busy machine take some
    assert measured(tmp_path, child("hanging", "hangs")).failed == {"hanging": "it took more than 6 s"}
    assert stages(tmp_path) == ["begun"]


KILLED = """
import sys
from pathlib import Path
from workers.devices import Slot
from workers.probes import children
from workers.probes.children import Measurement, measure_all

slot = Slot(index=0, device_name="", device_uuid="GPU-1", device_memory_mib=None)
children.gpu_of = lambda device: (slot, {}, None)
for function in ("two_rows", "hangs"):
    one = Measurement(name=function, function=f"probed:{function}", environment={"PYTHONPATH": sys.argv[2]})
    measure_all(Path(sys.argv[1]), [one], "cuda", lambda: 1000.0)
    print(function, flush=True)
"""


def test_a_killed_call_leaves_whole_files_and_the_next_one_goes_on(on_a_gpu, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), HERE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(HERE).parents[1]) as call:
        assert call.stdout.readline() == "two_rows\n"
        call.kill()
    assert measured_in(tmp_path) == [Measured("two_rows", [*probed.two_rows("GPU-1")])]
    after = measured(tmp_path, child("two_rows", "raises"), child("hangs", "two_rows"))
    assert after.kept == ["two_rows"] and after.measured == ["hangs"] and not after.failed


def test_without_time_nothing_begins(on_a_gpu, tmp_path):
    result = measured(tmp_path, child("first", "two_rows"), seconds_left=lambda: 3.0)
    assert result.left == ["first"] and not list(tmp_path.iterdir())


def test_a_child_has_its_variables_and_no_others_settings_of_the_allocator(on_a_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    eager = Measurement(
        name="eager", function="probed:environment", environment={"PYTHONPATH": HERE, "CUDA_MODULE_LOADING": "EAGER"}
    )
    rows, reason = children.run_child(eager, H100, {}, 20)
    assert reason is None
    assert rows == [{"stage": "GPU-1", "CUDA_MODULE_LOADING": "EAGER", "PYTORCH_ALLOC_CONF": None}]


def test_a_damaged_file_is_named_and_measured_again(on_a_gpu, tmp_path):
    contents = (b'{"rows": [', b"\xfd7zXZ", lzma.compress(b"[1]"), lzma.compress(b'{"rows": [1]}'))
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.json.xz").write_bytes(content)
    damaged = measured_in(tmp_path)
    assert [(one.name, one.rows) for one in damaged] == [(str(number), []) for number in range(4)]
    assert all(f"{one.name}.json.xz cannot be read" in one.reason for one in damaged)
    assert measured(tmp_path, child("3", "two_rows")).measured == ["3"]
    assert [one.reason is None for one in measured_in(tmp_path)] == [False, False, False, True]


# ---- contexts


def context_row(name, stage, loading, *, process_mib, card_mib=None, reserved_mib=0.0, cudnn=False):
    return {
        "name": name,
        "stage": stage,
        "module_loading": loading,
        "process_mib": process_mib,
        "card_before_mib": 300.0,
        "card_mib": card_mib,
        "reserved_mib": reserved_mib,
        "allocated_mib": 0.0,
        "cudnn": cudnn,
        "reason": None,
    }


def test_the_numbers_calibrate_a_machine(tmp_path):
    rows = [
        context_row("idle", "idle", None, process_mib=None, card_mib=300.0),
        context_row("context lazy", "context", "lazy", process_mib=502.0, card_mib=802.0, reserved_mib=2.0),
        context_row("training lazy", "training", "lazy", process_mib=640.0, card_mib=940.0, reserved_mib=100.0),
        # in a container, where NVML does not list the process
        context_row("cnn lazy", "training", "lazy", process_mib=None, card_mib=1010.0, reserved_mib=100.0, cudnn=True),
    ]
    (tmp_path / "contexts").mkdir()
    content = json.dumps({"rows": rows, "reason": None}).encode()
    (tmp_path / "contexts" / "all.json.xz").write_bytes(lzma.compress(content))
    contexts.measure(tmp_path, "cpu", forever)
    device = load_device("H100-SXM5-80GB")
    profile = calibrate(measured_in_csv(tmp_path / "numbers.csv", device), device)
    parts_mib = [profile.other_mib, profile.context_mib, profile.kernels_mib, profile.cudnn_mib]
    assert parts_mib == pytest.approx([300, 500, 40, 70], abs=1)
    assert not (tmp_path / "numbers_eager.csv").exists()


def as_nvml(monkeypatch, nvml):
    """Make the probes read this NVML; return it."""
    monkeypatch.setattr("workers.telemetry.nvml.open_nvml", lambda *_: nvml.nvmlInit() or nvml)
    return nvml


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_stage_reads_what_nvml_charges_its_own_process_or_says_why_it_does_not(monkeypatch, is_listed):
    recorded = as_nvml(monkeypatch, RecordedNvml(pids={"trial": os.getpid()}))
    if is_listed:
        recorded.advance()
    with standing_in():
        (row,) = contexts.stage(A100_UUID, "cublas", "lazy")
    assert row["stage"] == "cublas" and not row["cudnn"] and row["module_loading"] == "lazy"
    assert ((row["process_mib"] or 0) > 0, row["reason"] is None) == (is_listed, is_listed)
    (idle,) = contexts.idle(A100_UUID)
    assert idle["card_mib"] == idle["card_before_mib"] == row["card_mib"] > 0 and recorded.initialised == 0


# ---- workspaces


@pytest.mark.wide
def test_each_case_of_a_layer_is_measured_in_both_phases(monkeypatch):
    case = ({"in_channels": 8, "out_channels": 8, "kernel_size": 3, "padding": 1}, (2, 8, 16, 16))
    monkeypatch.setattr(workspaces, "CASES", {"conv2d": [case]})
    monkeypatch.setattr(workspaces, "PRECISIONS", {"tf32": "float32", "bf16-true": "bfloat16"})
    with standing_in():
        rows = list(workspaces.layers("GPU-1", "conv2d", False))
    assert [(row["dtype"], row["phase"]) for row in rows] == [
        (precision, phase) for precision in workspaces.PRECISIONS for phase in ("forward", "backward")
    ]
    assert all(row["measured_bytes"] == 0 < row["assumed_bytes"] for row in rows)  # the CPU takes none
    assert rows[0]["requests"] == [[2 * 8 * 16 * 16 * 4, True]]  # and not the one of the gradient that is given
    assert all(len(row["requests"]) == 3 for row in rows[1::2])  # for the input, the weight and the bias


@pytest.mark.parametrize("layer", ["linear", "attention", pytest.param("lstm", marks=pytest.mark.wide)])
def test_the_trace_knows_every_probed_layer(layer):
    case = workspaces.CASES[layer][0]
    assumed = workspaces.assumed_bytes(layer, *case, "fp16-true", load_device("H100-SXM5-80GB"))
    assert assumed["backward"]["assumed_bytes"] > 0 or assumed["backward"]["assumed_kept_bytes"] > 0


def test_a_calls_results_are_told_from_its_workspaces():
    entries = [
        {"action": "alloc", "size": 1000, "addr": 1},  # the result
        {"action": "alloc", "size": 300, "addr": 2},
        {"action": "alloc", "size": 500, "addr": 3},
        {"action": "free_completed", "size": 512, "addr": 3},
        {"action": "free_completed", "size": 512, "addr": 2},
        {"action": "alloc", "size": 400, "addr": 2},
        {"action": "free_completed", "size": 512, "addr": 2},
        {"action": "alloc", "size": 7, "addr": 4},  # kept: cuBLAS's
        {"action": "free_completed", "size": 512, "addr": 99},  # of an earlier call
    ]
    beside = workspaces.requests_beside(entries, [1000])
    assert beside["measured_bytes"] == 800 and beside["kept_bytes"] == 7
    assert beside["requests"] == [[1000, True], [300, False], [500, False], [400, False], [7, True]]


# ---- histories

SMALL = {"family": "cnn", "image_size": 32, "channels": 3, "classes": 10, "base_filters": 16, "depth": 3}
SMALL |= {"batch_size": 4, "batch_norm": True}


def test_a_recorded_job_is_compared_with_its_trace(monkeypatch):
    """On the CPU: no library's workspaces, and an optimizer that goes parameter by parameter; all else as traced."""

    def with_a_copy(*arguments):  # the CPU's batch is where it is used already
        model, step = trial_step(*arguments)
        return model, lambda: (torch.ones(77), step())

    monkeypatch.setattr(histories, "trial_step", with_a_copy)
    with standing_in():
        two, three = histories.record("GPU-1", SMALL, "")
    assert len(two["marks"]) == 3 and two["trace"] == three["trace"][: len(two["trace"])]
    in_steps = [entry for entry in three["trace"][three["marks"][0] :] if entry["action"] == "alloc"]
    assert {entry["where"].split()[0] for entry in in_steps} == {"batch", "forward", "backward", "optimizer"}
    assert [entry["where"] for entry in in_steps if entry["size"] == 4 * 77] == ["batch"] * 3
    compared = compare_blocks({"name": "cnn", **json.loads(json.dumps(three))})
    assert compared.allocator_difference is None
    unlike = {one.where.split()[0] for one in compared.in_step.only_traced if one.nbytes > 4096}
    assert unlike <= {"workspace", "batch"}
    assert {one.where for one in compared.in_step.only_measured} <= {"optimizer", "batch"}


# ---- questions


def test_processes_hold_their_memory_together(monkeypatch):
    nvml = as_nvml(monkeypatch, RecordedNvml())
    monkeypatch.setattr(questions, "hold", probed.holds)
    with questions._holding("GPU-1", [1, 2]) as answers:
        assert [answer["held_mib"] for answer in answers] == [1, 2]
        assert all(Path(f"/proc/{answer['pid']}").exists() for answer in answers)
    (row,) = questions.nvml_process_and_card(A100_UUID)
    assert row["held_mib"] > 0 and row["card_before_mib"] > 0
    assert not any(Path(f"/proc/{held['pid']}").exists() for held in (*answers, row)) and nvml.initialised == 0


def test_gpm_is_read_while_the_gpu_is_busy(monkeypatch):
    monkeypatch.setattr(questions, "_BUSY_S", 0.0)
    monkeypatch.setattr(questions, "_GPM_S", 0.4)
    small, threads_before = torch.ones(2, 2), threading.active_count()
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: small)
    nvml = as_nvml(monkeypatch, FakeGpmNvml())
    with standing_in():
        rows = list(questions.gpm_first_sample(A100_UUID))
    assert rows and all(row["smact"] == 0.8125 and row["problem"] is None for row in rows)
    assert "is usable: it gives 0.812" in questions.answer_gpm(rows)
    assert "not usable: it gives 0.000" in questions.answer_gpm([{**rows[0], "smact": 0.0}, *rows])
    assert nvml.allocated == nvml.initialised == 0 and threading.active_count() == threads_before


@pytest.mark.parametrize(
    ("process_mib", "listed", "expected"),
    [
        ((1500.0, 2500.0), {"1 python": 1500.0, "2 python": 2500.0}, "each client its own memory"),
        ((None, None), {"1 python": 1500.0, "2 python": 3500.0}, "each client its own memory"),
        ((None, None), {"9 nvidia-cuda-mps-server": 4000.0}, "all clients' memory to one process"),
        ((None, None), {"9 nvidia-cuda-mps-server": 30.0}, "lists no process with the clients' memory"),
        ((None, None), {"71 unknown": 1500.0, "72 unknown": 3500.0}, "pids of another pid namespace"),
    ],
)
def test_mps_charges_are_told_apart(process_mib, listed, expected):
    rows = [
        {"pid": pid, "held_mib": held, "process_mib": mib, "listed_mib": listed}
        for pid, held, mib in zip((1, 2), (1024.0, 2048.0), process_mib, strict=True)
    ]
    assert expected in questions.answer_mps(rows)


# ---- the command


@pytest.fixture
def answers(on_a_gpu, monkeypatch):
    """Make each question's process give a reason, or none, by its name; there is a GPU."""
    reasons = {}
    monkeypatch.setattr(
        children, "run_child", lambda measurement, *others: ([{"figure": 1.0}], reasons.get(measurement.name))
    )
    monkeypatch.setattr(questions, "ANSWERS", dict.fromkeys(("first", "second"), lambda rows: "Yes."))
    return reasons


def measure(out, device="cuda"):
    return children.main(["probes=questions", f"out={out}", f"device={device}", "seconds=100"])


def test_what_fails_everywhere_has_failed_and_what_fails_in_part_is_left_until_it_is_measured(
    answers, tmp_path, capsys
):
    answers |= {"first": "CUDA error: out of memory", "second": "it took more than 60 s"}
    assert measure(tmp_path) == 1
    output = capsys.readouterr().out
    assert "questions: 0 measured, 0 before, 0 left" in output
    assert output.splitlines()[-1] == "failed: 2 measurements, first first: CUDA error: out of memory"
    del answers["first"]
    assert measure(tmp_path) == children.EXIT_LEFT
    assert capsys.readouterr().out.splitlines()[-1] == "failed: 1 measurement, first second: it took more than 60 s"
    answers.clear()
    assert measure(tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == ["questions: 1 measured, 1 before, 0 left"]


def test_without_a_gpu_nothing_can_be_measured_here(tmp_path, capsys):
    assert measure(tmp_path, "cpu") == children.EXIT_NOT_HERE
    assert "stands in for a GPU" in capsys.readouterr().out.splitlines()[-1]
