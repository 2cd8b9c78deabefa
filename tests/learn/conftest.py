"""Fits of these tests grow fewer trees than a user's: what they show does not hang on more, and takes half the time."""

import dataclasses
import json

import pytest

from learn.estimators import hybrid, protocol, tabular
from tests.learn.learn_rows import run_estimate


@pytest.fixture(autouse=True, scope="module")
def few_trees():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tabular.LightGBMEstimator, "rounds", 50)
        patch.setattr(hybrid, "_OTHERS", dataclasses.replace(hybrid._OTHERS, rounds=60))
        yield


@pytest.fixture
def shown(capsys):
    """Run a command that ends well, `learn.estimate` or `run`, and return what it prints."""

    def printed(*argv, run=run_estimate):
        assert run(*argv) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def answer(shown):
    """Run such a command and return its answer, from JSON."""
    return lambda *argv, **of: json.loads(shown(*argv, "format=json", **of))


@pytest.fixture
def refused(capsys):
    """Run a command that refuses its arguments and return the one line that says so."""

    def line(*argv, run=run_estimate):
        assert run(*argv) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("error: ") and len(said.err.splitlines()) == 1
        return said.err

    return line


@pytest.fixture
def fakes(monkeypatch):
    """The estimators of `fake_methods` are known by name, and need no fit."""
    names = ("hundreds", "endless", "hoarder")
    for name in names:
        monkeypatch.setitem(protocol.ESTIMATORS, name, f"fake_methods:{name.capitalize()}Estimator")
    monkeypatch.setattr("learn.benchmark.TRAINING_FREE", (*protocol.TRAINING_FREE, *names))
