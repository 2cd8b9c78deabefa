"""The family `cudnn`: single convolutions of every kind, and what `repair` makes of a sampled point."""

import dataclasses

import pytest
from plan_checks import assert_plan_tells_the_truth, assert_recomputing_keeps_gradients, assert_trains
from torch import nn

from conf.errors import UsageError
from farm.sampling import sample_range
from farm.space import default_space, parse_space
from featurize.families import asks_cudnn, cudnn, get_family
from featurize.trace import trace_config

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = cudnn.Config(batch_size=2, image_size=9, channels=8, filters=4, kernel_size=3)
KINDS = {
    nn.PReLU: "prelu",
    **{getattr(nn, f"Conv{n}d"): f"conv{n}d" for n in cudnn.SPATIAL},
    **{getattr(nn, f"ConvTranspose{n}d"): f"conv_transpose{n}d" for n in cudnn.SPATIAL},
    **{getattr(nn, f"AdaptiveAvgPool{n}d"): f"adaptive_avg_pool{n}d" for n in cudnn.SPATIAL},
}


def small(**changes):
    return dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        *({"spatial": spatial, "transposed": transposed, "stride": 2, "groups": 2}
          for spatial in cudnn.SPATIAL for transposed in (False, True)),
        {"dilation": 2, "padded": False}, {"kernel_size": 4}, {"groups": 4, "channels": 4},
    ],
)  # fmt: skip
def test_the_plan_tells_the_truth(changes):
    assert_plan_tells_the_truth(small(**changes), set(), KINDS)


@pytest.mark.parametrize("changes", [{}, {"spatial": 1}, {"spatial": 3, "transposed": True}, {"channels_last": True}])
def test_a_convolution_trains(changes):
    assert_trains(small(**changes))


def test_recomputing_keeps_the_gradients():
    assert_recomputing_keeps_gradients(SMALL)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_step_needs_the_convolution_and_both_of_its_gradients(transposed):
    calls = [block.call for block in trace_config(small(transposed=transposed)).blocks if block.call is not None]
    operations = {call.convolution.operation for call in calls if call.convolution is not None}
    assert operations == {"forward", "data_gradient", "weight_gradient"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(spatial=4), "spatial must be one of 1, 2, 3, got 4"),
        (dict(groups=3), "groups must divide channels = 8, got 3; groups must divide filters = 4, got 3"),
        (dict(kernel_size=11, padded=False), "kernel_size must fit the image of 9, but reaches over 11"),
        (dict(spatial=3, channels_last=True), "channels_last must be false with spatial = 3"),
        (dict(padded=1), "padded must be true or false, got 1"),
    ],
)
def test_what_no_convolution_is_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        small(**changes)


def test_the_space_reaches_every_kind_of_convolution_and_no_tensor_is_too_large():
    configs = list(sample_range(parse_space("cudnn", default_space("cudnn")), 0, 0, 300))
    assert {config.spatial for config in configs} == {1, 2, 3}
    assert {config.transposed for config in configs} == {config.padded for config in configs} == {False, True}
    depthwise = [config for config in configs if 1 < config.groups == config.channels]
    assert len(depthwise) > 20 and any(1 < config.groups < config.channels for config in configs)
    assert max(config.channels for config in configs) > 1500 and max(config.batch_size for config in configs) > 400
    for config in configs:
        elements = config.batch_size * config.channels * config.image_size**config.spatial
        assert elements <= cudnn.LARGEST_TENSOR
        outputs = config.batch_size * config.filters * cudnn.side_out(config) ** config.spatial
        assert outputs <= cudnn.LARGEST_TENSOR


def test_a_fixed_group_count_is_kept_where_grouping_is_sampled():
    point = {"grouping": "depthwise", "groups": 2, "channels": 8, "filters": 6, "batch_size": 1, "image_size": 8}
    mended = cudnn.repair({**point, "kernel_size": 3}, lambda name: 0.5)
    assert (mended["groups"], mended["channels"], mended["filters"]) == (2, 8, 6)


def test_it_is_the_family_that_asks_cudnn():
    assert asks_cudnn("cudnn") and not asks_cudnn("cnn") and get_family("cudnn").ASKS_CUDNN
