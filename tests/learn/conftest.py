"""Fits of these tests grow fewer trees in fewer folds than a user's, in a third of the time: what they show stays."""

import contextlib
import dataclasses
import functools

import pytest

from learn.estimators import hybrid, protocol, trees
from learn.rows import step_store
from tests.learn.script_server import prepared_runner, script_server


@pytest.fixture(autouse=True, scope="module")
def few_trees(module_patch):
    module_patch.setattr(trees.LightGBMEstimator, "rounds", 30)
    for module in (trees, hybrid):
        module_patch.setattr(module, "FOLDS", 2)
    for name in ("_MEMORY", "_OTHERS"):
        module_patch.setattr(hybrid, name, dataclasses.replace(getattr(hybrid, name), rounds=25))
    module_patch.setattr(step_store, "MANY", 10_000)  # a few dozen jobs are traced here


@pytest.fixture
def data(tmp_path):
    """A data folder that nothing was written to."""
    return tmp_path / "a'; echo foo [b]*?"


@pytest.fixture
def no_models_of_ones_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path_factory.getbasetemp() / "none"))


@pytest.fixture
def fakes(monkeypatch):
    """The estimators of `fake_methods` are known by name, and need no fit."""
    names = ("hundreds", "endless", "hoarder")
    for name in names:
        monkeypatch.setitem(protocol.ESTIMATORS, name, f"fake_methods:{name.capitalize()}Estimator")
    monkeypatch.setattr("learn.benchmark.TRAINING_FREE", (*protocol.TRAINING_FREE, *names))


@pytest.fixture(scope="session")
def server_of_scripts():
    with contextlib.closing(script_server()) as server:
        yield server


@pytest.fixture
def prepared_scripts(server_of_scripts, tmp_path, monkeypatch):
    """Scripts run in an empty folder, in forks of one process that has their imports."""
    monkeypatch.setattr("learn.script.estimating.local_server", functools.partial(prepared_runner, server_of_scripts))
    monkeypatch.chdir(tmp_path)
