"""Models that do not exist are refused before anything is queued; the user's own code is imported by a child alone."""

import importlib.util
import json
import sys

import psutil
import pytest

from conf.children import running
from conf.children.running import ChildServer
from conf.cli import command_line as cli
from conf.errors import UsageError
from farm import grow as grow_module
from farm import submit as submit_module
from farm.comparison.pairs import code_folder
from farm.submission import model_check
from farm.submission.model_check import problem_of, require_models, require_models_in_any
from featurize.configs.dimensions import own_space
from featurize.configs.space import parse_space
from warehouse.files.folder import DataFolder

NETS = """
import sys
print("a module may say what it likes")
print('"and spoil no answer"', file=sys.__stdout__, flush=True)
from torch import nn

def factory(width=4): return nn.Linear(4, width)
def never_called(): raise RuntimeError("factories of one's own are looked up and not called")
number = 3
"""

LEAVES = """
import os, sys, torch
torch.optim.SGD([torch.zeros(1)])
assert "torch._dynamo.eval_frame" not in sys.modules, "the check waits for torch's compiler"
os._exit(0)
"""


def installed(*libraries):
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with modules of the user's own."""
    folder = tmp_path / "a'; echo foo"
    (folder / "checked_nets").mkdir(parents=True)
    (folder / "checked_nets" / "__init__.py").touch()
    (folder / "checked_nets" / "small.py").write_text(NETS)
    (folder / "checked_fails.py").write_text("import no_such_package_at_all\n")
    (folder / "checked_leaves.py").write_text(LEAVES)
    (folder / "checked_exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.startswith("checked_")]:
        del sys.modules[name]


def zoo(model, **values):
    return parse_space("zoo", {"model": model, "inputs": "float32[4]", "batch_size": 2, **values})


def problem(space):
    (model,) = model_check._models_of(space)
    return problem_of(json.loads(json.dumps(model)))


@pytest.mark.parametrize("family", ["zoo", "timm", "mlp"])
def test_a_familys_own_space_starts_no_child(family, monkeypatch):
    monkeypatch.setattr(model_check, "_ask", None)
    require_models([own_space(family)])


def test_models_of_a_library_that_is_not_installed_are_checked_also_where_the_space_is_the_familys_own(monkeypatch):
    monkeypatch.setattr(model_check, "version_of", lambda name: None if name == "torchvision" else "1")
    names = {model["name"].partition(".")[0] for model in model_check._models_of(own_space("zoo"))}
    assert names == {"torchvision"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("checked_nets.small:fatcory", "checked_nets.small has no attribute 'fatcory'; near names: factory"),
        ("checked_nets.smal:factory", "No module named 'checked_nets.smal'; near names: checked_nets.small"),
        ("checked_net.small:factory", "No module named 'checked_net'; near names: checked_nets"),
        ("checked_fails:build", "cannot import checked_fails: No module named 'no_such_package_at_all'"),
        ("checked_nets.small:number", "number is int, neither a module nor a factory"),
    ],
)
def test_a_name_of_ones_own_that_does_not_exist_is_one_line_with_near_names(here, model, message):
    error_line = problem(zoo(model))
    assert message in error_line and model in error_line and error_line.isprintable()


def test_a_factory_of_ones_own_is_looked_up_and_not_called(here):
    assert problem(zoo("checked_nets.small:never_called")) is None
    assert problem(zoo("checked_nets.small:factory float32[4] {width: 7}", inputs=None)) is None


@installed("torchvision")
def test_an_unknown_name_of_a_library_has_near_names(here):
    assert "has no attribute 'resnt18'; near names: resnet18" in problem(zoo("torchvision.models:resnt18"))
    assert problem(zoo("torchvision.models:resnet18", arguments="{num_classes: 7}")) is None
    assert "num_clases" in problem(zoo("torchvision.models:resnet18", arguments="{num_clases: 7}"))


@installed("timm")
def test_an_unknown_model_of_timm_has_near_names(here):
    assert "has no model 'resnt18'; near names: resnet18" in problem(parse_space("timm", {"model": "resnt18"} | SIZE))
    assert "near names: resnet18" in problem(zoo("timm:create_model", arguments="{model_name: resnt18}"))
    sizes = {"model": "resnet14t", "image_size": [64, 96]} | SIZE
    assert problem(parse_space("timm", sizes)) is None


SIZE = {"batch_size": 2}


def test_a_typo_is_refused_before_anything_is_queued(here, capsys):
    """By the real child, which is one process for all models, whatever they do while they are imported."""
    names = [
        "checked_nets.small:factory",
        "checked_exits:build",
        "checked_nets.small:fatcory",
        "checked_leaves:build",
        "checked_nets.small:never_called",
    ]
    models = ",".join(f"'{name} float32[4]'" for name in names)
    assert (
        cli.run(
            "submit",
            submit_module.entry,
            ["+arch=zoo", "n=4", f"arch.space.model=[{models}]", "detach=true", "data=data"],
        )
        == 2
    )
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and printed.out == ""
    for part in (
        "'checked_exits:build float32[4]' raises SystemExit",
        "near names: factory",
        "importing 'checked_leaves:build float32[4]' ends the process",
    ):
        assert part in printed.err
    assert "never_called" not in printed.err and not (here / "data").exists()
    assert "checked_nets" not in sys.modules, "the command itself imports nothing of the user's"


def test_models_that_take_too_long_to_check_are_queued_unchecked(here, capsys):
    require_models([zoo("checked_nets.small:fatcory")], patience_s=0.01)
    assert "checking the models took more than 0.01 s; 1 of 1 is queued unchecked\n" in capsys.readouterr().err


def test_models_are_not_blamed_where_the_process_that_checks_them_is_killed(here, capsys, monkeypatch):
    monkeypatch.setattr(ChildServer, "ask", lambda *_, **__: (b"null\nnull\n", None))
    require_models([zoo(["checked_nets.small:factory", "checked_nets.small:never_called"])])
    assert "the process that checks models was killed; 1 of 2 is queued unchecked\n" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_check_that_takes_a_while_says_so_on_a_terminal(here, capsys, monkeypatch, terminal):
    monkeypatch.setattr(model_check, "_QUIET_S", 0.005)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    require_models([zoo("checked_nets.small:factory")], patience_s=0.01)
    assert ("checking that the models exist" in capsys.readouterr().err) == terminal


def test_ctrl_c_ends_the_child_that_checks_models(here, monkeypatch):
    children = []

    class Interrupted(ChildServer):
        def start(self, *arguments, **options):
            children.extend([self.pid, super().start(*arguments, **options).pid])
            raise KeyboardInterrupt

    monkeypatch.setattr("conf.children.running.ChildServer", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        require_models([zoo("checked_nets.small:factory")])
    assert len(children) == 2 and not any(map(psutil.pid_exists, children))


def test_a_night_of_a_mistyped_model_does_not_begin(here, capsys, monkeypatch):
    def ask(models, _patience_s):
        return [problem_of(model) for model in models]

    monkeypatch.setattr(model_check, "_ask", ask)
    command = [
        "families=[zoo]",
        "space={model: 'checked_nets.small:fatcory', inputs: 'float32[4]'}",
        "n=2",
        "device=simulated",
        "dry_run=true",
        "data=data",
    ]
    assert cli.run("grow", grow_module.entry, command) == 2
    assert "near names: factory" in capsys.readouterr().err
    assert not DataFolder.resolve(here / "data").root.exists()


def test_several_problems_are_told_together_and_the_same_once(monkeypatch):
    monkeypatch.setattr(model_check, "_ask", lambda models, _: ["a", "a", None, "b", "c", "d", "e"][: len(models)])
    space = zoo([f"checked_nets.small:f{index}" for index in range(7)])
    with pytest.raises(UsageError) as refused:
        require_models([space])
    assert str(refused.value) == "a; b; c; 2 more"


def test_another_environment_is_asked_without_the_packages_beside_this_projects_own(tmp_path, monkeypatch):
    """Installed from a wheel, they are this environment's, perhaps of another Python."""
    monkeypatch.chdir(tmp_path)
    space = zoo("of_this_environment:build")
    with code_folder() as installed_in, code_folder() as code:
        (installed_in / "of_this_environment.py").write_text("build = print")
        monkeypatch.setattr(running, "_ROOT", installed_in)
        with pytest.raises(UsageError, match="No module named 'of_this_environment'"):
            require_models_in_any([space], [(sys.executable, code)])
