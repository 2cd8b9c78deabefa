"""Fits of these tests grow fewer trees than a user's: what they show does not hang on more, and takes half the time."""

import dataclasses
import json

import pytest

from learn.estimators import hybrid, tabular
from tests.learn.learn_rows import run_estimate


@pytest.fixture(autouse=True, scope="module")
def few_trees():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tabular.LightGBMEstimator, "rounds", 100)
        patch.setattr(hybrid, "_OTHERS", dataclasses.replace(hybrid._OTHERS, rounds=120))
        yield


@pytest.fixture
def shown(capsys):
    """What a command prints that ends well: `shown("config=...")`, of `learn.estimate` or of `run=`."""

    def printed(*argv, run=run_estimate):
        assert run(*argv) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def answer(shown):
    """The same as JSON."""
    return lambda *argv, **of: json.loads(shown(*argv, "format=json", **of))


@pytest.fixture
def refused(capsys):
    """The one line in which a command refuses its arguments, with exit code 2."""

    def line(*argv, run=run_estimate):
        assert run(*argv) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("error: ") and len(said.err.splitlines()) == 1
        return said.err

    return line
