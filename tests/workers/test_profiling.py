"""Kernels of a trial: from the profiler's trace to rows, over the trial's socket, and what costs them."""

import json
import os
import signal

import pytest
import torch

from tests.trials import mlp, task as trial
from warehouse.tables.schema import KERNEL_SCHEMA
from workers.devices import KernelSettings, TrialSettings, WindowSettings, training
from workers.devices.training import dims_text, kernels_of_trace, report_kernels
from workers.labels import table_of_rows
from workers.trial.reports import BROKEN, KERNEL_COLUMNS, ReportReader
from workers.trial.running import RunningTrial


def call(name, ts, dur, external=0, thread=1, category="cpu_op", **args):
    shapes = args.pop("shapes", [])
    given = {"External id": external, "Input Dims": shapes, "Input type": ["float"] * len(shapes), **args}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": ts, "dur": dur, "args": given}


def kernel(name, external, dur, **args):
    figures = {
        "stream": 7,
        "registers per thread": 40,
        "shared memory": 1024,
        "blocks per SM": 0.5,
        "warps per SM": 4.0,
        "grid": [4, 2, 1],
        "block": [256, 1, 1],
    }
    args = {"External id": external, **figures, **args}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": 5000 + external,
        "dur": dur,
        "args": args,
    }


CONVOLUTION = [[2, 3, 8, 8], [4, 3, 3, 3], []]
# As torch.profiler exports a step on a GPU: the calls of the host by thread, nested, and kernels by External id.
RECORDED = [
    call("aten::conv2d", 0, 100, 1, shapes=CONVOLUTION),
    call(
        "aten::convolution",
        1,
        90,
        2,
        shapes=CONVOLUTION,
        **{"Concrete Inputs": ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]},
    ),
    call("aten::cudnn_convolution", 2, 80, 3, shapes=CONVOLUTION),
    kernel("ampere_scudnn_128x32", 3, 12.0),
    kernel("ampere_scudnn_128x32", 3, 14.0),
    kernel("ampere_scudnn_128x32", 3, 90.0),
    call("autograd::engine::evaluate_function: ConvolutionBackward0", 0, 50, 10, thread=2),
    call("ConvolutionBackward0", 1, 48, 11, thread=2),
    call("aten::convolution_backward", 2, 40, 12, thread=2, shapes=CONVOLUTION),
    kernel("dgrad", 12, 30.0, stream=9),
    call("Optimizer.step#SGD.step", 200, 50, 20, category="user_annotation"),
    call("aten::_foreach_add_", 205, 20, 21, shapes=[[[4, 3, 3, 3], [4]]]),
    kernel("multi_tensor_apply", 21, 5.0),
    kernel("lost", 99, 3.0),
    {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": "Memcpy HtoD (Pageable -> Device)",
        "pid": 0,
        "tid": 7,
        "ts": 1,
        "dur": 2,
        "args": {"External id": 31, "stream": 7, "bytes": 4},
    },
    call("aten::copy_", 300, 9, 31, shapes=[[4], [4]]),
    {"ph": "i", "name": "Record Window End"},
]


def test_a_kernel_is_of_the_operator_that_pytorch_dispatches_with_its_launch_and_median_time():
    rows = {row["kernel"]: row for row in kernels_of_trace(RECORDED, 3)}
    assert rows["ampere_scudnn_128x32"] == {
        "phase": "forward",
        "operator": "aten::convolution",
        "dtype": "float32",
        "kernel": "ampere_scudnn_128x32",
        "dims": dims_text(
            CONVOLUTION,
            {
                "stride": [2, 2],
                "padding": [1, 1],
                "dilation": [1, 1],
                "transposed": False,
                "output_padding": [0, 0],
                "groups": 1,
            },
        ),
        "grid_x": 4,
        "grid_y": 2,
        "grid_z": 1,
        "block_x": 256,
        "block_y": 1,
        "block_z": 1,
        "blocks_per_sm": 0.5,
        "warps_per_sm": 4.0,
        "registers_per_thread": 40,
        "shared_memory_bytes": 1024,
        "stream": 7,
        "timing": "cupti",
        "duration_us": 14.0,
        "count": 3,
        "steps": 3,
    }
    of = {name: (row["operator"], row["phase"]) for name, row in rows.items()}
    assert of["dgrad"] == ("aten::convolution_backward", "backward")
    assert of["multi_tensor_apply"] == ("aten::_foreach_add_", "optimizer")
    assert of["lost"] == ("unknown", None)
    copied = rows["Memcpy HtoD (Pageable -> Device)"]
    assert (copied["operator"], copied["grid_x"], copied["duration_us"]) == ("aten::copy_", None, 2.0)
    table_of_rows(list(rows.values()), [KERNEL_SCHEMA.field(name) for name in KERNEL_COLUMNS])


class FakeLink:
    together = None

    def __init__(self):
        self.events = []

    def report(self, event, **values):
        self.events.append((event, values))


def reported(monkeypatch, trace, step_time_ms=1.0, train_step=lambda: None):
    if trace is not None:
        monkeypatch.setattr(training, "profiled_trace", lambda *_: trace)
    link = FakeLink()
    report_kernels(train_step, 3, step_time_ms, "cpu", link)
    return link.events


def test_kernels_come_in_parts_and_are_ended(monkeypatch):
    trace = [kernel(f"k{index}", 0, 1.0 + index) for index in range(250)]
    events = reported(monkeypatch, trace)
    assert [name for name, _ in events] == ["kernels"] * 3 + ["profiled"]
    assert sum(len(values.get("rows", ())) for _, values in events) == 250 and events[-1][1] == {"problem": None}


def test_whatever_fails_while_profiling_is_a_reason_and_no_error(monkeypatch):
    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert reported(monkeypatch, None, train_step=out_of_memory) == [
        ("profiled", {"problem": "OutOfMemoryError: CUDA out of memory"})
    ]
    ((_, values),) = reported(monkeypatch, [])
    assert "saw no kernel" in values["problem"]
    ((_, values),) = reported(monkeypatch, RECORDED, step_time_ms=11_000.0)
    assert values["problem"] == "a step takes 11.0 s, too long for the profiler"


def line(event, **values):
    return json.dumps({"event": event, **values}).encode() + b"\n"


RESULT = line("warmup", t_ns=1) + line("window", t_ns=2)
RESULT += line("result", window_end_ns=3, window_ended="fixed", values={"steps": 5})
ROW = {"operator": "aten::mm", "duration_us": 3.5, "count": 2, "timing": "cupti", "grid_x": 4, "kernel": None}


def test_kernels_follow_the_result_where_they_were_asked_for():
    content = RESULT + line("kernels", rows=[ROW]) + line("profiled", problem=None) + line("kernels", rows=[ROW])
    reader = ReportReader(virtual=True, kernels=True)
    assert list(reader.feed(content))[-2:] == ["kernels", "profiled"]
    assert reader.observed.kernels == [{name: value for name, value in ROW.items() if value is not None}]
    assert reader.observed.profiled and reader.observed.profile_problem is None
    assert list(ReportReader(virtual=True).feed(content))[-1] == "result"


@pytest.mark.parametrize(
    "content",
    [
        line("kernels", rows=[ROW]),
        RESULT + line("step", t_ns=4, values={}),
        RESULT + line("kernels", rows=ROW),
        RESULT + line("kernels", rows=[ROW | {"run_id": "another"}]),
        RESULT + line("kernels", rows=[ROW | {"grid_x": -1}]),
        RESULT + line("kernels", rows=[ROW | {"timing": "mine"}]),
        RESULT + line("kernels", rows=[ROW | {"phase": "sleep"}]),
        RESULT + line("kernels", rows=[ROW | {"dims": "{"}]),
        RESULT + line("kernels", rows=[{"operator": "aten::mm"}]),
        RESULT + line("profiled", problem=7),
    ],
)
def test_a_trial_that_reports_other_kernels_broke_the_rules(content):
    assert list(ReportReader(virtual=True, kernels=True).feed(content))[-1] == BROKEN


def test_ids_of_jobs_without_kernels_stay_as_they_were():
    assert "kernels" not in TrialSettings(window=WindowSettings()).to_mapping()


@pytest.fixture(params=["worker", "simulated"])
def either(request):
    return request.getfixturevalue(request.param)


def task(steps):
    return trial(mlp(), kernels=KernelSettings(steps=steps))


def test_the_trial_server_forks_from_a_single_thread_with_torch_imported(either):
    assert either.ready()["torch_version"]
    assert len(os.listdir(f"/proc/{either.server().pid}/task")) == 1


def test_a_trial_lands_the_operators_of_its_steps_after_its_labels(either):
    result = either.run(task(2))
    rows = result.kernels.to_pylist()
    assert result.run.status == "ok" and "kernels" not in (result.run.telemetry_missing or {})
    assert {row["timing"] for row in rows} == {"model" if result.run.source == "simulated" else "cpu"}
    product = next(row for row in rows if row["operator"] == "aten::addmm")
    assert json.loads(product["dims"])["shapes"][1][0] == 8 and product["dtype"] == "float32"
    assert {"forward", "backward", "optimizer"} <= {row["phase"] for row in rows}
    assert either.run(task(0)).kernels is None


def test_a_trial_that_dies_under_the_profiler_keeps_its_labels(worker, monkeypatch):
    tell = RunningTrial.tell

    def kill_instead(trial, word):
        if word == "bye":  # the labels are taken
            os.kill(trial.pid, signal.SIGKILL)
        else:
            tell(trial, word)

    monkeypatch.setattr(RunningTrial, "tell", kill_instead)
    result = worker.run(task(2))
    assert result.run.status == "ok" and result.run.step_time_ms > 0 and result.kernels is None
    assert "SIGKILL" in result.run.telemetry_missing["kernels"]
