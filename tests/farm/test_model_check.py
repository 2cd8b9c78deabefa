"""Models that do not exist are refused before anything is queued; the user's own code is imported by a child alone."""

import importlib.util
import json
import sys

import pytest

from conf.children.running import ChildServer
from conf.errors import UsageError
from farm.submission import model_check
from farm.submission.model_check import problem_of, require_models
from featurize.configs.space import parse_space

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


MODULES = {
    "checked_nets/__init__.py": "",
    "checked_nets/small.py": NETS,
    "checked_fails.py": "import no_such_package_at_all\n",
    "checked_leaves.py": LEAVES,
    "checked_exits.py": "raise SystemExit(3)\n",
}


@pytest.fixture
def here(place, monkeypatch):
    """The current folder, with modules of the user's own."""
    (place / "checked_nets").mkdir()
    for name, text in MODULES.items():
        (place / name).write_text(text)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    yield place
    for name in [name for name in sys.modules if name.startswith("checked_")]:
        del sys.modules[name]


def zoo(model, **values):
    return parse_space("zoo", {"model": model, "inputs": "float32[4]", "batch_size": 2, **values})


def problem(space):
    (model,) = model_check._models_of(space)
    return problem_of(json.loads(json.dumps(model)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("checked_nets.small:fatcory", "checked_nets.small has no attribute 'fatcory'; near names: factory"),
        ("checked_nets.smal:factory", "No module named 'checked_nets.smal'"),
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


def test_a_model_that_one_of_the_environments_has_is_no_mistake(monkeypatch):
    lacking = {"old": {"torch.nn:New"}, "new": {"torch.nn:Removed"}, "newer": {"torch.nn:Removed", "torch.nn:New"}}

    def answers(models, server):
        return ["none" if model["name"] in lacking[server] else None for model in models]

    monkeypatch.setattr(model_check, "_ask", answers)
    spaces = [zoo(["torch.nn:New", "torch.nn:Removed"])]
    require_models(spaces, servers=["old", "new"])
    with pytest.raises(UsageError, match=r"^none$"):
        require_models(spaces, servers=["new", "newer"])


def test_code_of_ones_own_is_not_checked_where_estimates_cannot_be_imported(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "learn.job.training_job", None)
    assert problem(zoo("checked_nets.small:nope")) is None


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_an_unknown_model_of_timm_has_near_names(here):
    assert "has no model 'resnt18'; near names: resnet18" in problem(parse_space("timm", {"model": "resnt18"} | SIZE))
    assert "resnt18" in problem(zoo("timm:create_model", arguments="{model_name: resnt18}"))
    sizes = {"model": "resnet14t", "image_size": [64, 96]} | SIZE
    assert problem(parse_space("timm", sizes)) is None


SIZE = {"batch_size": 2}


def test_a_typo_is_refused_before_anything_is_queued(here, refused):
    """By the real child, which is one process for all models, whatever they do while they are imported."""
    names = [
        "checked_nets.small:factory",
        "checked_exits:build",
        "checked_nets.small:fatcory",
        "checked_leaves:build",
        "checked_nets.small:never_called",
    ]
    models = ",".join(f"'{name} float32[4]'" for name in names)
    error = refused("submit", "+arch=zoo", "n=4", f"arch.space.model=[{models}]", "detach=true", "data=data")
    for part in (
        "'checked_exits:build float32[4]' raises SystemExit",
        "near names: factory",
        "importing 'checked_leaves:build float32[4]' ends the process",
    ):
        assert part in error
    assert "never_called" not in error and not (here / "data").exists()
    assert "checked_nets" not in sys.modules, "the command itself imports nothing of the user's"


def test_models_are_not_blamed_where_the_process_that_checks_them_is_killed(here, capsys, monkeypatch):
    monkeypatch.setattr(ChildServer, "ask", lambda *_, **__: (b"null\nnull\n", None))
    require_models([zoo(["checked_nets.small:factory", "checked_nets.small:never_called"])])
    assert "1 of 2 models cannot be checked now, and are queued unchecked\n" in capsys.readouterr().err
