"""A simulated run of a family that asks cuDNN holds its answers; what a trial reports of them is checked."""

import json

import pytest

from conf import cli
from farm import submit as submit_module
from featurize.cudnn import libraries
from featurize.cudnn.recorded import read_answers
from featurize.families import cudnn
from tests.featurize.asking_cudnn.cudnn_library import needs_cudnn, why_missing
from workers.devices import DeviceChoice
from workers.reports import BrokenReport, ConvolutionsAsked, ReportReader
from workers.settings import TrialSettings, WindowSettings
from workers.task import TaskSpec
from workers.worker import Worker

SHORT = WindowSettings(kind="fixed", seconds=0.0, warmup_steps=0, warmup_max_seconds=0, min_steps=1)
SIGNATURE = ["forward", [2, 8, 9, 9], [4, 8, 3, 3], [2, 4, 9, 9], [1, 1], [1, 1], [1, 1], "float32", False]
ANSWERS = {
    "cudnn": "9.99.0",
    "search": {"heuristics": "A", "allow_tf32": True, "deterministic": False, "benchmark": False},
    "convolutions": [{"signature": SIGNATURE, "layout": "nchw", "engine": "eng1", "workspace_bytes": 64}],
}


def read(message, virtual=True):
    return ReportReader(virtual=virtual).feed(json.dumps({"event": "convolutions", **message}).encode() + b"\n")


def test_answers_of_a_simulated_device_are_taken_as_they_are():
    assert read({"answers": ANSWERS}) == [ConvolutionsAsked(ANSWERS)]


@pytest.mark.parametrize(
    "answers", [None, [], {}, {**ANSWERS, "cudnn": 9}, {**ANSWERS, "convolutions": [{"signature": [1]}]}]
)
def test_what_are_no_answers_breaks_the_report(answers):
    (report,) = read({"answers": answers})
    assert isinstance(report, BrokenReport) and "no answers of cuDNN" in report.reason


def test_other_devices_and_second_answers_are_refused():
    (report,) = read({"answers": ANSWERS}, virtual=False)
    assert isinstance(report, BrokenReport) and "only a simulated device" in report.reason
    line = json.dumps({"event": "convolutions", "answers": ANSWERS}).encode() + b"\n"
    assert isinstance(ReportReader(virtual=True).feed(line * 2)[1], BrokenReport)


@pytest.fixture
def run():
    worker = Worker(DeviceChoice(backend="simulated"), "0", "test-worker")
    config = cudnn.Config(batch_size=8, image_size=56, channels=64, filters=64, kernel_size=3, precision="fp16")
    task = TaskSpec(
        job_id="cudnn-00000000", task_index=0, attempt=1, config=config, settings=TrialSettings(window=SHORT), seed=0
    )
    try:
        yield worker.run(task).run
    finally:
        worker.close()


@needs_cudnn
def test_a_simulated_run_holds_the_answers_beside_its_usual_labels(run):
    assert run.status == "ok" and run.peak_memory_mib > 0 and run.step_time_ms > 0
    version, search, answers = read_answers(run.convolutions)
    assert version.startswith("9.") and search.allow_tf32 and not search.benchmark
    assert sorted(one.operation for one in answers) == ["data_gradient", "forward", "weight_gradient"]
    assert {(one.image, one.dtype) for one in answers} == {((8, 64, 56, 56), "float16")}
    assert all(answer.plans for answer in answers.values())


@pytest.mark.skipif(not why_missing(), reason="cuDNN is installed")
def test_a_trial_without_the_libraries_names_the_extra(run):
    assert run.status == "invalid" and "gpufarm[cudnn]" in run.error and run.convolutions is None


def test_a_submission_without_the_libraries_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(libraries, "missing_from_extra", lambda extra: f"not installed: pip install 'gpufarm[{extra}]'")
    data = tmp_path / "data"
    arguments = ["+arch=cudnn", "n=1", "device=simulated", "cluster=inline", f"data={data}"]
    assert cli.run("submit", submit_module.entry, arguments) == 2
    assert capsys.readouterr().err == "error: not installed: pip install 'gpufarm[cudnn]'\n" and not data.exists()
