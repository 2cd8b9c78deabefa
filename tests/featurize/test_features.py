"""Scalar features, group keys and the feature version."""

import dataclasses
import math

import pytest

from featurize.configs import features
from featurize.configs.draws import sample_range
from featurize.configs.features import feature_columns, group_key
from featurize.families import cnn, family_names, layers_of, mlp
from featurize.job.layers import rough_memory_mib, totals
from tests.featurize.small_configs import own_space, scalar_features

CNN = dict(image_size=32, channels=3, classes=10, base_filters=16, depth=8, batch_size=4)


def sampled(family, n):
    """`n` configs of the family's own space; a fifth of them where every plan is a trace of a library's model."""
    n = max(1, n // 5) if family in ("timm", "zoo") else n
    return list(sample_range(own_space(family), 11, 0, n))


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", family_names())
def test_features_are_finite_numbers_or_text_and_the_same_columns_for_a_family(family):
    tables = [scalar_features(config) for config in sampled(family, 10)]
    assert len({tuple(table) for table in tables}) == 1
    for value in (value for table in tables for value in table.values()):
        assert isinstance(value, str) or (type(value) is float and math.isfinite(value))


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", family_names())
def test_features_of_many_configs_are_those_of_each_alone(family):
    configs = sampled(family, 10)
    together = feature_columns(configs)
    for place, config in enumerate(configs):
        alone = scalar_features(config)
        assert {name: together[name][place] for name in alone} == alone


@pytest.mark.parametrize("family", family_names())
def test_features_hold_the_configs_own_fields_and_the_plans_totals(family):
    for config in sampled(family, 5):
        found, plan = scalar_features(config), layers_of(config)
        for name, value in config.to_mapping().items():
            if isinstance(value, str | int | float):
                assert found[name] == value
        sums = totals(plan)
        for name in ("layers", "parameters", "output_elements", "flops"):
            assert found[name] == getattr(sums, name)
        assert found["batch_output_elements"] == config.batch_size * sums.output_elements
        assert found["rough_memory_mib"] == rough_memory_mib(plan, config.batch_size, config.optimizer)
        for prefix, total in (("count", sums.layers), ("elements", sums.output_elements)):
            assert sum(found[f"{prefix}_{kind}"] for kind in features.KINDS) == total
        if family in ("mlp", "cnn", "transformer"):
            assert found["count_other"] == 0


def test_group_key_ignores_batch_size_training_settings_and_dropout():
    config = cnn.Config(**CNN)
    for change in (
        dict(batch_size=60),
        dict(optimizer="sgd"),
        dict(precision="bf16"),
        dict(dropout=0.3),
        dict(activation_checkpointing=True),
        dict(cudnn_benchmark=True),
        dict(channels_last=True),
    ):
        assert group_key(dataclasses.replace(config, **change)) == group_key(config)


def test_group_key_tells_architectures_apart():
    config = cnn.Config(**CNN)
    keys = {group_key(config), group_key(mlp.Config(input_size=9, classes=2, depth=1, batch_size=4))}
    changes = (
        dict(image_size=33),
        dict(channels=1),
        dict(classes=11),
        dict(base_filters=17),
        dict(depth=9),
        dict(topology="gradual"),
        dict(kernel_size=1),
        dict(activation="prelu"),
        dict(batch_norm=True),
    )
    keys |= {group_key(dataclasses.replace(config, **change)) for change in changes}
    assert len(keys) == 2 + len(changes)


def test_group_key_joins_configs_that_build_the_same_network():
    dense = cnn.Config(**CNN | dict(topology="dense"))
    assert group_key(dense) == group_key(dataclasses.replace(dense, base_filters=99, depth=11))
