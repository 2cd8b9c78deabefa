"""Scripts have more than a training loop: packages of its own, evaluations, frameworks, habits."""

import shutil

import pytest

from conf.errors import UsageError
from learn import estimate_script
from learn.script import saved_files
from tests.learn import test_script_kinds as kinds


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_hydra_application_imports_its_own_packages_of_this_projects_names():
    command = ["python", str(kinds.SCRIPTS / "hydra_app" / "train.py"), "batch=16"]
    script = estimate_script(command, estimator="trace")
    assert script.parameters == 64 * 512 + 512 + 512 * 16 + 16
    assert script.warnings[0] == "the script trains with adamw, fp32, 16 samples in a forward pass"


def test_a_script_reads_its_checkpoints_back_and_leaves_the_users_files_alone(tmp_path):
    (tmp_path / "kept.pt").write_text("the user's own")
    (tmp_path / "earlier.json").write_text("{}")
    script = kinds.run("checkpoints")
    assert script.warnings[0] == "the script trains with adamw, tf32, 8 samples in a forward pass"
    assert "the script also chooses zero_grad=after_forward" in script.warnings
    assert saved_files.NOTE in script.warnings
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "kept.pt": "the user's own",
        "earlier.json": "{}",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer_saves", "accelerate_saves", "lightning_saves"])
def test_a_frameworks_checkpoints_are_saved_and_read_back_without_a_file(tmp_path, name):
    assert kinds.run(name, estimator="trace").peak_memory_mib > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_what_fails_within_hydra_is_named_at_the_applications_line(tmp_path):
    shutil.copytree(kinds.SCRIPTS / "hydra_app", tmp_path / "app")
    (tmp_path / "app" / "learn" / "sizes.py").write_text("OUTPUTS = 'sixteen'\n")
    with pytest.raises(UsageError, match=r"exits with 1 after .*models\.py:9: TypeError"):
        estimate_script(["python", "app/train.py"])


@pytest.mark.wide
def test_evaluations_torchscript_and_an_optimizer_of_its_own_are_followed(tmp_path):
    script = kinds.run("many_habits", estimator="trace")
    samples = "32 samples in a forward pass, 2 backward passes in a step"
    assert script.warnings[0] == f"the script trains with an optimizer of its own, fp32, {samples}"
    assert "TorchScript was left out: its functions and modules run as they are written" in script.warnings
    parts = script.breakdown
    trained = (1024 * 2048 + 2048 + 2048 * 10 + 10) * 4 / 2**20  # a layer is never used
    assert parts["gradients"] == pytest.approx(trained, rel=0.01)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_detector_may_be_evaluated_before_it_trains():
    script = kinds.run("mask_rcnn_evaluated", estimator="trace")
    assert script.warnings[0] == "the script trains with momentum, fp32, 2 samples in a forward pass"
