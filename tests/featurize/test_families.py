"""Families: spaces build, plans tell the truth about the modules, modules train. Runs over the family table."""

import dataclasses
from collections import Counter

import pytest
from family_table import FAMILY
from plan_checks import on_meta, parameters_of

from featurize.configs.draws import sample_range
from featurize.configs.trial import config_from_mapping
from featurize.families import cnn, family_names, get_family, layers_of, mlp
from featurize.job.layers import totals
from tests.featurize.small_configs import own_space


def small(family, **changes):
    return dataclasses.replace(FAMILY[family].small, **changes)


over_families = pytest.mark.parametrize("family", family_names())


@over_families
def test_every_point_of_the_default_space_is_a_valid_config(family):
    rejections = Counter()
    for config in sample_range(own_space(family), 7, 0, 20, rejections=rejections):
        assert config_from_mapping(config.to_mapping()) == config
    assert not rejections


@over_families
def test_default_space_holds_training_settings_constant_and_reaches_every_topology(family):
    space = own_space(family)
    fixed = {"optimizer", "precision", "activation_checkpointing", "cudnn_benchmark", "channels_last"}
    assert fixed <= {d.name for d in space.dimensions} - {d.name for d in space.varied}
    if hasattr(get_family(family), "TOPOLOGIES"):
        seen = {c.topology for c in sample_range(space, 1, 0, 100)}
        assert seen == set(get_family(family).TOPOLOGIES)


@pytest.mark.spread(2)
@over_families
def test_plan_parameters_equal_the_modules_for_sampled_configs(family):
    for config in sample_range(own_space(family), 3, 0, 2):
        assert totals(layers_of(config)).parameters == parameters_of(on_meta(config)), config


def test_mlp_widths_follow_each_topology():
    def widths(**changes):
        return mlp.widths(small("mlp", **changes))

    shape = dict(input_size=1000, classes=100, depth=4)
    assert widths(topology="pyramid", **shape) == [500, 250, 125, 100, 100]
    assert widths(topology="bottleneck", **shape) == [500, 250, 125, 100, 100, 100]
    assert widths(topology="uniform", **shape) == [1000, 1000, 1000, 1000, 100]
    assert widths(topology="gradual", **shape) == [775, 550, 325, 100, 100]
    assert widths(topology="gradual", input_size=10, classes=30, depth=2) == [30, 40, 30]  # as published


def test_cnn_widths_follow_each_topology_and_stay_within_2048_filters():
    def widths(topology, depth=4, base=128):
        return cnn.widths(small("cnn", topology=topology, depth=depth, base_filters=base))

    assert widths("uniform") == [128] * 4
    assert widths("pyramid") == [128, 256, 512, 1024]
    assert widths("reverse_pyramid") == [128, 64, 32, 16]
    assert widths("gradual", base=512) == [512, 608, 724, 861]
    assert widths("bottleneck", depth=5) == [256, 128, 256, 512, 1024]
    assert widths("hourglass", depth=8) == [128, 256, 512, 1024, 1024, 512, 256, 128]
    assert widths("residual", depth=8, base=8) == [8, 16, 32, 64]
    for topology in cnn.PLAIN:
        found = widths(topology, depth=29, base=511)
        assert len(found) == 29 and min(found) >= 1 and max(found) <= 2048


def test_cnn_blocks_shrink_by_strides_transitions_and_pools_but_not_below_7():
    def maps(**changes):
        return [(b.kind, b.map_out) for b in cnn.blocks(small("cnn", image_size=64, **changes))[:-1]]

    assert {side for _, side in maps(topology="pyramid", depth=9)} == {64}
    pooled = maps(topology="pyramid", depth=29, pooling=True, pool_interval=1)
    assert [side for kind, side in pooled if kind == "pool"] == [32, 16, 8, 4]
    residual = maps(topology="residual", depth=20)
    assert residual == [("residual", s) for s in (64, 32, 32, 16, 16, 8, 8, 4)]
    dense = maps(topology="dense", depth=16, pool_interval=2)
    assert dense == [
        ("dense", 64),
        ("transition", 32),
        ("dense", 32),
        ("dense", 32),
        ("transition", 16),
        ("dense", 16),
    ]
