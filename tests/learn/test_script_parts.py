"""Settings of a script, its failures and its loggers, without running one."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from conf.errors import UsageError
from featurize.cudnn import oracle
from featurize.device.device_spec import describe_device
from learn.commands.estimate import EstimateSettings, entry_of_script
from learn.estimation import answers
from learn.estimation.known_runs import known_runs
from learn.estimation.platforms import platform_of
from learn.estimation.requests import AnswerOptions, Request
from learn.script import estimating
from learn.script.containment import SilentLoggers
from learn.script.run import explained
from tests.learn.test_script_failures import RECORD

DEVICE = describe_device("A100-SXM4-40GB")


def answered(settings, known=(), workspaces=None):
    record = dataclasses.replace(RECORD, settings=settings)
    platform = dataclasses.replace(platform_of(DEVICE), workspaces=workspaces)
    job = estimating._job(record, "train.py", lambda: record.trace)
    request = Request(job=job, platform=platform, options=AnswerOptions(known=known))
    return answers.make_estimate(request)[0], tuple(estimating._notes(record))


def test_an_optimizer_that_nobody_knows_fails_no_answer():
    settings = {"optimizer": "adadelta", "precision": "fp32", "implementation": "fused", "clip_norm": 1.0}
    done, notes = answered(settings)
    assert done.peak_memory_mib > 0 and done.answered_by["memory"] == "trace"
    assert "no model was fitted on optimizer=adadelta, implementation=fused, clip_norm=1.0: the trace answers" in (
        done.warnings
    )
    assert notes[1].text == "the script also chooses implementation=fused, clip_norm=1.0"


def test_gradients_that_are_freed_after_the_forward_pass_leave_the_answer_to_the_fitted_models():
    usual, _notes = answered({"optimizer": "adam", "precision": "fp32"})
    late, notes = answered({"optimizer": "adam", "precision": "fp32", "zero_grad": "after_forward"})
    assert late.answered_by == usual.answered_by and late.answered_by["memory"] != "trace"
    assert late.loops == usual.loops
    assert "the script also chooses zero_grad=after_forward" in [note.text for note in notes]


def test_a_scripts_convolutions_are_asked_about_with_its_own_search(monkeypatch):
    searches = []
    asked = SimpleNamespace(
        version="9", prepare=searches.append, answers=lambda _, search: searches.append(search) or {}
    )
    monkeypatch.setattr(oracle, "oracle_for", lambda device: asked)
    settings = {"optimizer": "adam", "precision": "fp32", "cudnn_allow_tf32": False, "cudnn_deterministic": True}
    answered(settings, workspaces="cudnn")
    assert {search.to_text() for search in searches} == {"A deterministic"}


def test_measured_runs_at_the_scripts_batch_move_its_estimate_and_others_are_refused():
    here, elsewhere = ([{"batch_size": size, "memory_mib": 700.0}] for size in (2, 8))
    runs = known_runs(here)
    estimating._require_batch_of_script(runs, 2)
    done, _notes = answered({"optimizer": "adam", "precision": "fp32"}, known=runs)
    assert done.process_mib < 700 and done.answered_by["memory"] == "trace with 1 measured run"
    with pytest.raises(UsageError, match=r"known\[0\] is of batch_size=8, and the script"):
        estimating._require_batch_of_script(known_runs(elsewhere), 2)
    for given, message in (
        ({"known": here, "estimator": "hybrid"}, "cannot be combined with estimator=hybrid"),
        ({"known": "runs"}, "known=runs is for trial configs"),
        ({"batch_size": 8}, "unknown keyword 'batch_size'; known: allocator, coverage"),
    ):
        with pytest.raises(UsageError, match=message):
            estimating.estimate_script(["python", __file__], **given)


def test_every_key_of_the_command_is_passed_on_or_refused_beside_a_script(monkeypatch):
    passed = {}
    monkeypatch.setattr(estimating, "estimate_script", lambda command, **given: passed.update(given))
    monkeypatch.setattr("learn.commands.estimate.print_table", lambda *_, **__: None)
    entry_of_script(EstimateSettings(), ["python", "train.py"])
    given = {field.name: [] for field in dataclasses.fields(EstimateSettings)}
    settings = SimpleNamespace(**{**given, "input_dtype": "int64"})
    with pytest.raises(UsageError) as refused:
        settings.trust, settings.devices = ("mine",), ("L4",)
        entry_of_script(settings, ["python", "train.py"])
    refusal = str(refused.value).partition("leave ")[2].removesuffix(" out").split(", ")
    assert set(given) - set(passed) - set(refusal) == {"method", "format", "notes"}  # which are checked, or printed by
    assert not set(passed) & set(refusal)


def test_a_missing_variable_of_a_launcher_is_explained(tmp_path):
    message = explained(KeyError("LOCAL_RANK"), str(tmp_path / "train.py"))
    assert "estimate the command that starts it, such as torchrun --nproc-per-node 8" in message


def test_a_logger_that_is_not_installed_is_absent_where_the_script_is_ready_for_that(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(sys, "meta_path", [SilentLoggers(notes.append), *sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    program = tmp_path / "logging_script.py"
    program.write_text(
        "import importlib.util\n"
        "try:\n    import swanlab\nexcept ImportError:\n    swanlab = None\n"
        "try:\n    import aim\nexcept ImportError:\n    import tensorboardX\n    tensorboardX.SummaryWriter()\n"
        "probe = importlib.util.find_spec('swanlab')\n"
        "with open(__file__):\n    import clearml\nclearml.Task.init()\n"
        "(__import__('pathlib').Path(__file__).parent / 'mlflow.py').write_text('1 / 0')\n"
        "importlib.invalidate_caches()\n"
        "try:\n    import mlflow\nexcept ImportError:\n    mlflow = None\n"
    )
    import logging_script

    try:
        assert logging_script.swanlab is None and logging_script.probe is None
        assert logging_script.mlflow.log_metric("loss", 1.0) is not None
        assert notes == [f"{name} was kept from logging" for name in ("tensorboardX", "clearml", "mlflow")]
    finally:
        for name in ("tensorboardX", "clearml", "mlflow", "logging_script"):
            sys.modules.pop(name, None)
