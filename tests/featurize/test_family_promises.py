"""Promises of each family with a plan of its own: the plan tells the truth, models train, mistakes have words."""

import dataclasses

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    assert_plan_tells_the_truth,
    assert_recomputing_keeps_gradients,
    assert_trains,
    gradients,
    on_meta,
    parameters_of,
)

from conf.errors import UsageError
from featurize.families import cnn, family_names, get_family, layers_of
from featurize.job.layers import totals

pytestmark = pytest.mark.usefixtures("one_thread")


def over(field, n=1):
    """Parametrize a test with each family's changes of a field of the table, of which `make test` runs each n-th."""
    cases = [
        pytest.param(name, changes, marks=pytest.mark.spread(n, name))
        for name, family in FAMILY.items()
        for changes in getattr(family, field)
    ]
    return pytest.mark.parametrize(("family", "changes"), cases, ids=str)


def changed(family, changes):
    return dataclasses.replace(FAMILY[family].small, **changes)


@pytest.fixture
def narrow(monkeypatch):
    """Convolutions grow to 64 filters in place of 2048, which train for seconds."""
    monkeypatch.setattr(cnn, "MAX_FILTERS", 64)


def test_each_family_is_in_the_table():
    assert set(FAMILY) == set(family_names()) - {"zoo"}, "zoo's models are any library's"


@over("plans", 8)
def test_the_plan_tells_the_truth(family, changes):
    assert_plan_tells_the_truth(changed(family, changes), FAMILY[family].functional, FAMILY[family].kinds)


@over("steps", 8)
def test_a_step_has_finite_gradients(narrow, family, changes):
    gradients(changed(family, changes))


@over("trains", 4)
def test_a_model_trains(family, changes):
    assert_trains(changed(family, changes))


@over("recomputes", 4)
def test_recomputing_keeps_the_gradients(narrow, family, changes):
    assert_recomputing_keeps_gradients(changed(family, changes))


@over("refused")
def test_impossible_configs_are_refused_in_words(family, changes):
    change, message = changes
    with pytest.raises(UsageError, match=message):
        changed(family, change)


@over("causal")
def test_a_token_sees_only_those_before_it(family, changes):
    config, module = changed(family, changes), get_family(family)
    torch.manual_seed(0)
    model = module.build(config).eval()
    (tokens,), targets = module.batch(config, "cpu")

    def logits():
        output = model(tokens)
        return output[0] if isinstance(output, tuple) else output

    before = logits()
    tokens[:, 4] = (tokens[:, 4] + 1) % config.vocabulary_size
    differs = (logits() - before).abs().amax(dim=(0, 2)) > 1e-6
    assert differs.tolist() == [position >= 4 for position in range(config.sequence_length)]
    assert before.shape == (*targets.shape, config.vocabulary_size) and targets.shape == tokens.shape


@over("repaired")
def test_sampled_values_become_fields_that_fit(family, changes):
    values, draw, fields = changes
    before = dict(values)
    assert get_family(family).repair(values, draw.__getitem__ if isinstance(draw, dict) else lambda _: draw) == fields
    assert values == before


@over("published")
def test_a_network_has_its_published_parameters(family, changes):
    change, parameters = changes
    config = changed(family, change)
    assert totals(layers_of(config)).parameters == parameters_of(on_meta(config)) == parameters
