"""Families: spaces build, plans tell the truth, modules train, mistakes have words. Runs over the family table."""

import dataclasses
from collections import Counter

import pytest
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
from featurize.configs.space import POLICIES, sample_range
from featurize.configs.trial import config_from_mapping
from featurize.families import cnn, family_names, get_family, layers_of, mlp, repaired
from tests.featurize.small_configs import own_space


def small(family, **changes):
    return dataclasses.replace(FAMILY[family].small, **changes)


over_families = pytest.mark.parametrize("family", family_names())


@pytest.mark.parametrize("policy", POLICIES)
@over_families
def test_every_point_of_the_default_space_is_a_valid_config_of_its_own(family, policy):
    rejections = Counter()
    configs = list(sample_range(own_space(family), 7, 0, 8, policy, rejections=rejections))
    assert [config_from_mapping(config.to_mapping()) for config in configs] == configs
    assert len(set(configs)) == 8 and {config.family for config in configs} == {family} and not rejections


@over_families
def test_default_space_holds_training_settings_constant_and_reaches_every_topology(family):
    space = own_space(family)
    fixed = {"optimizer", "precision", "activation_checkpointing", "cudnn_benchmark", "channels_last"}
    assert fixed <= {d.name for d in space.dimensions} - {d.name for d in space.varied}
    if hasattr(get_family(family), "TOPOLOGIES"):
        seen = {c.topology for c in sample_range(space, 1, 0, 100)}
        assert seen == set(get_family(family).TOPOLOGIES)


@pytest.mark.spread(3)
@over_families
def test_plan_parameters_equal_the_modules_for_sampled_configs(family):
    for config in sample_range(own_space(family), 3, 0, 2):
        assert sum(layer.parameters for layer in layers_of(config)) == parameters_of(on_meta(config)), config


SHAPE = dict(input_size=1000, classes=100, depth=4)


@pytest.mark.parametrize(
    ("module", "changes", "expected"),
    [
        (mlp, dict(topology="pyramid", **SHAPE), [500, 250, 125, 100, 100]),
        (mlp, dict(topology="bottleneck", **SHAPE), [500, 250, 125, 100, 100, 100]),
        (mlp, dict(topology="uniform", **SHAPE), [1000, 1000, 1000, 1000, 100]),
        (mlp, dict(topology="gradual", **SHAPE), [775, 550, 325, 100, 100]),
        (mlp, dict(topology="gradual", input_size=10, classes=30, depth=2), [30, 40, 30]),  # as published
        (cnn, dict(topology="uniform", depth=4, base_filters=128), [128] * 4),
        (cnn, dict(topology="pyramid", depth=4, base_filters=128), [128, 256, 512, 1024]),
        (cnn, dict(topology="reverse_pyramid", depth=4, base_filters=128), [128, 64, 32, 16]),
        (cnn, dict(topology="gradual", depth=4, base_filters=512), [512, 608, 724, 861]),
        (cnn, dict(topology="bottleneck", depth=5, base_filters=128), [256, 128, 256, 512, 1024]),
        (cnn, dict(topology="hourglass", depth=8, base_filters=128), [128, 256, 512, 1024, 1024, 512, 256, 128]),
        (cnn, dict(topology="residual", depth=8, base_filters=8), [8, 16, 32, 64]),
        (cnn, dict(topology="bottleneck", depth=2, base_filters=1500), [2048, 1500]),
        (cnn, dict(topology="reverse_pyramid", depth=2, base_filters=1), [1, 1]),
    ],
)
def test_widths_follow_each_topology_and_convolutions_stay_within_2048_filters(module, changes, expected):
    assert module.widths(small(module.Config.family, **changes)) == expected


def over(field, n=1):
    """Parametrize a test with each family's changes of a field of the table, of which `make test` runs each n-th."""
    cases = [
        pytest.param(name, changes, marks=pytest.mark.spread(n, name))
        for name, family in FAMILY.items()
        for changes in getattr(family, field)
    ]
    return pytest.mark.parametrize(("family", "changes"), cases, ids=str)


@pytest.fixture
def narrow(monkeypatch):
    """Convolutions grow to 64 filters in place of 2048, which train for seconds."""
    monkeypatch.setattr(cnn, "MAX_FILTERS", 64)


def test_each_family_is_in_the_table():
    assert set(FAMILY) == set(family_names()) - {"zoo"}, "zoo's models are any library's"


@over("plans", 8)
def test_the_plan_tells_the_truth(family, changes):
    assert_plan_tells_the_truth(small(family, **changes), FAMILY[family].functional, FAMILY[family].kinds)


@over("steps", 8)
def test_a_step_has_finite_gradients(narrow, family, changes):
    gradients(small(family, **changes))


@over("trains", 4)
def test_a_model_trains(family, changes):
    assert_trains(small(family, **changes))


@over("recomputes", 4)
def test_recomputing_keeps_the_gradients(narrow, family, changes):
    assert_recomputing_keeps_gradients(small(family, **changes))


@over("refused")
def test_impossible_configs_are_refused_in_words(family, changes):
    change, message = changes
    with pytest.raises(UsageError, match=message):
        small(family, **change)


@over("causal")
def test_a_token_sees_only_those_before_it(family, changes):
    config, module = small(family, **changes), get_family(family)
    model = module.build(config).eval()
    (tokens,), _ = module.batch(config, "cpu")
    changed = tokens.clone()
    changed[:, 4] = (tokens[:, 4] + 1) % config.vocabulary_size

    def logits(given):
        output = model(given)
        return output[0] if isinstance(output, tuple) else output

    differs = (logits(changed) - logits(tokens)).abs().amax(dim=(0, 2)) > 1e-6
    assert differs.tolist() == [position >= 4 for position in range(config.sequence_length)]


@over("repaired")
def test_sampled_values_become_fields_that_fit(family, changes):
    values, draw, fields = changes
    before = dict(values)
    assert repaired(family, values, draw.__getitem__ if isinstance(draw, dict) else lambda _: draw) == fields
    assert values == before


@over("published")
def test_a_network_has_its_published_parameters(family, changes):
    change, parameters = changes
    config = small(family, **change)
    assert sum(layer.parameters for layer in layers_of(config)) == parameters_of(on_meta(config)) == parameters
