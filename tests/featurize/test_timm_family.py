"""Models of the timm library as a family: plans are read off the models, names are checked when they are built."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from conf.errors import UsageError
from featurize.families import timm
from featurize.job.layers import totals
from featurize.recording.skeleton import plan_of_module
from featurize.training.training_step import TrainingStep
from tests.featurize.small_nets import Computes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


def config(model="resnet10t", **changes):
    return timm.Config(**{"model": model, "batch_size": 2, **changes})


@pytest.mark.spread(7)
@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("resnet10t", 64),
        ("mobilenetv3_small_050", 64),
        ("vit_tiny_patch16_224", None),
        ("vit_tiny_patch16_224", 64),
        ("levit_128s", None),
        ("beit_base_patch16_224", None),
        ("swin_tiny_patch4_window7_224", None),
    ],
)
def test_a_plan_has_the_models_parameters_and_flops(model, size):
    one = config(model, image_size=size)
    with torch.device("meta"):
        module = timm.build(one)
    inputs, targets = timm.batch(one, "meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        assert module(*inputs).shape == (2, 1000) and targets.shape == (2,)
    sums = totals(timm.layers(one))
    assert sums.parameters == sum(p.numel() for p in module.parameters())
    assert 2 * sums.flops == counter.get_total_flops()


def test_parameters_that_no_layer_holds_are_positions_and_shared_ones_count_once():
    with torch.device("meta"):
        layers = {"token": nn.Parameter(torch.zeros(4)), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
        layers["b"].weight = layers["a"].weight
        plan = plan_of_module(Computes(lambda net, x: net.b(net.a(x + net.token)), **layers), (4,))
    assert [(x.kind, x.output_elements, x.parameters, x.flops) for x in plan] == [
        ("position", 4, 4, 0),
        ("linear", 4, 20, 32),
        ("linear", 4, 4, 32),
    ]


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}, {"channels_last": True}])
def test_a_model_trains(changes):
    one = config("mobilenetv3_small_050", image_size=64, **changes)
    torch.manual_seed(0)
    step = TrainingStep(timm.build(one), one, "cpu")
    assert torch.isfinite(step(*timm.batch(one, "cpu")))


@pytest.mark.parametrize(
    ("ask", "model", "changes", "message"),
    [
        (timm.build, "resnet5O", {}, r"timm 1\S* has no model 'resnet5O'; near names: .*resnet50"),
        (timm.layers, "levit_128s", {"image_size": 100}, "'levit_128s' does not run on images of 100x100"),
        (
            timm.layers,
            "xcit_nano_12_p16_224",
            {"image_size": 100},
            "'xcit_nano_12_p16_224' takes images of 224 pixels only",
        ),
        (timm.build, "vgg11", {"activation_checkpointing": True}, "'vgg11' has no activation_checkpointing"),
    ],
)
def test_an_unknown_model_is_told_with_near_names_and_a_size_that_does_not_fit(ask, model, changes, message):
    with pytest.raises(UsageError, match=message), torch.device("meta"):
        ask(config(model, **changes))


def test_models_are_grouped_by_the_librarys_modules():
    names = ("resnet50", "resnet10t", "convnext_tiny", "no_such_model")
    kinds = [timm.kind(timm.Config(model=name, batch_size=1)) for name in names]
    assert kinds == ["timm/resnet", "timm/resnet", "timm/convnext", "timm/unknown"]
