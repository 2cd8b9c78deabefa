"""What a script chooses, where it fails and which loggers it finds, without running one."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.cudnn import oracle
from featurize.device_spec import describe_device
from learn.commands import estimate_script
from learn.commands.estimate import EstimateSettings
from learn.estimation import estimate_view
from learn.estimation.answers import Question
from learn.script import estimating
from learn.script.containment import SilentLoggers
from learn.script.run import explained
from learn.script.step_watch import _samples, name_of
from tests.learn.test_script_failures import RECORD

DEVICE = describe_device("A100-SXM4-40GB")


def answered(settings, **more):
    record = dataclasses.replace(RECORD, settings=settings)
    job = estimating._workload(record, "train.py")
    return Question(job=job, **more).answered(DEVICE)[0], tuple(estimating._notes(record))


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

    class Oracle:
        version = "9"

        def prepare(self, search):
            searches.append(search)

        def answers(self, signatures, search):
            searches.append(search)
            return {}

    monkeypatch.setattr(oracle, "oracle_for", lambda device: Oracle())
    settings = {"optimizer": "adam", "precision": "fp32", "cudnn_allow_tf32": False, "cudnn_deterministic": True}
    answered(settings, workspaces="cudnn")
    assert {search.to_text() for search in searches} == {"A deterministic"}


def test_a_measured_run_at_the_scripts_batch_moves_its_estimate():
    runs = estimating._known_runs([{"batch_size": 2, "memory_mib": 700.0}], None)
    estimating._require_batch_of_script(runs, 2)
    done, _notes = answered({"optimizer": "adam", "precision": "fp32"}, known=runs)
    assert done.process_mib < 700 and done.answered_by["memory"] == "trace with 1 measured run"


@pytest.mark.parametrize(
    ("known", "estimator", "message"),
    [
        (
            [{"batch_size": 8, "memory_mib": 700.0}],
            None,
            r"known\[0\] is of batch_size=8, and the script",
        ),
        ([{"batch_size": 2, "memory_mib": 700.0}], "hybrid", "leave estimator=hybrid out"),
        ("runs", None, "known=runs is for trial configs"),
    ],
)
def test_measured_runs_that_are_none_of_the_scripts_are_refused(known, estimator, message):
    with pytest.raises(UsageError, match=message):
        estimating._require_batch_of_script(estimating._known_runs(known, estimator), 2)


def test_every_key_of_the_command_is_passed_on_or_refused_beside_a_script(monkeypatch):
    passed = {}
    monkeypatch.setattr(estimate_script, "estimate_script", lambda command, **given: passed.update(given))
    monkeypatch.setattr(estimate_view, "print_table", lambda *_, **__: None)
    estimate_script.entry_of_script(EstimateSettings(), ["python", "train.py"])
    given = {field.name: [] for field in dataclasses.fields(EstimateSettings)}
    settings = SimpleNamespace(**{**given, "input_dtype": "int64"}, require_format=lambda: None)
    with pytest.raises(UsageError) as refused:
        settings.trust, settings.devices = ("mine",), ("L4",)
        estimate_script.entry_of_script(settings, ["python", "train.py"])
    refusal = str(refused.value).partition("leave ")[2].removesuffix(" out").split(", ")
    assert set(given) - set(passed) - set(refusal) == {"method", "format", "notes"}  # which are checked, or printed by
    assert not set(passed) & set(refusal)


def test_an_optimizer_has_the_projects_name():
    weights = [nn.Parameter(torch.zeros(2))]
    assert name_of(torch.optim.Adadelta(weights)) == "adadelta"
    of_sgd = ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True})
    assert [name_of(torch.optim.SGD(weights, 0.1, **more)) for more in of_sgd] == ["sgd", "momentum", "nesterov"]


def test_the_samples_are_those_of_the_models_own_inputs():
    images = torch.zeros(8, 3, 4, 4, device="meta")
    assert _samples(((images, torch.zeros(5)), {})) == 8
    assert _samples(((), {"labels": torch.zeros((), device="meta"), "pixel_values": images})) == 8
    assert _samples((([images[0], images[1]], [{"boxes": images}]), {})) == 2
    assert _samples(((torch.zeros(3),), {"scale": 2})) == 0


def test_a_failure_is_named_by_the_innermost_line_of_the_users_own_code(tmp_path, monkeypatch):
    package = tmp_path / "helpers_of_the_script"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\n\ndef spoil():\n    torch.zeros(2) + torch.zeros(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import helpers_of_the_script

    with pytest.raises(RuntimeError) as raised:
        helpers_of_the_script.spoil()
    message = explained(raised.value, str(tmp_path / "train.py"))
    assert message.startswith(f"{package / '__init__.py'}:4: RuntimeError: The size of tensor a")


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
