"""Promises of each family with a plan of its own: the plan tells the truth, models train, mistakes have words."""

import dataclasses

import pytest
from family_table import FAMILY
from plan_checks import assert_plan_tells_the_truth, assert_recomputing_keeps_gradients, assert_trains, gradients

from conf.errors import UsageError
from featurize.families import cnn

pytestmark = pytest.mark.usefixtures("one_thread")


def over(field):
    """Parametrize a test with each family's changes of a field of the table."""
    cases = [(name, changes) for name, family in FAMILY.items() for changes in getattr(family, field)]
    return pytest.mark.parametrize(("family", "changes"), cases, ids=str)


def changed(family, changes):
    return dataclasses.replace(FAMILY[family].small, **changes)


@pytest.fixture
def narrow(monkeypatch):
    """Convolutions grow to 64 filters in place of 2048, which train for seconds."""
    monkeypatch.setattr(cnn, "MAX_FILTERS", 64)


@pytest.mark.spread(2)
@over("plans")
def test_the_plan_tells_the_truth(family, changes):
    assert_plan_tells_the_truth(changed(family, changes), FAMILY[family].functional, FAMILY[family].kinds)


@pytest.mark.spread(3)
@over("steps")
def test_a_step_has_finite_gradients(narrow, family, changes):
    gradients(changed(family, changes))


@over("trains")
def test_a_model_trains(family, changes):
    assert_trains(changed(family, changes))


@pytest.mark.spread(2)
@over("recomputes")
def test_recomputing_keeps_the_gradients(narrow, family, changes):
    assert_recomputing_keeps_gradients(changed(family, changes))


@over("refused")
def test_impossible_configs_are_refused_in_words(family, changes):
    change, message = changes
    with pytest.raises(UsageError, match=message):
        changed(family, change)
