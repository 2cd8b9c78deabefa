"""The family `vit` against the vision transformers of torchvision and timm."""

import dataclasses
import functools
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
    parameters_of,
)

from featurize.families import layers_of, timm, vit
from featurize.job.layers import totals
from featurize.recording.skeleton import plan_of_module
from featurize.trace.tracer import trace_config

BASE = vit.Config(
    batch_size=2,
    image_size=224,
    patch_size=16,
    classes=1000,
    embedding_size=768,
    heads=12,
    depth=12,
    feed_forward=3072,
)
SMALL = FAMILY["vit"].small


small = functools.partial(dataclasses.replace, SMALL)


@pytest.mark.parametrize(
    ("width", "heads", "depth", "parameters"),
    [(192, 3, 12, 5_717_416), (384, 6, 12, 22_050_664), (768, 12, 12, 86_567_656), (1024, 16, 24, 304_326_632)],
)
def test_models_of_every_size_have_their_published_parameters(width, heads, depth, parameters):
    config = dataclasses.replace(BASE, embedding_size=width, heads=heads, depth=depth, feed_forward=4 * width)
    assert totals(layers_of(config)).parameters == parameters_of(on_meta(config)) == parameters


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_plan_and_trace_are_those_of_timms_model():
    tiny = dataclasses.replace(BASE, embedding_size=192, heads=3, feed_forward=768, precision="bf16")
    theirs = timm.Config(batch_size=2, model="vit_tiny_patch16_224", precision="bf16")
    assert layers_of(tiny) == timm.layers(theirs)
    own, other = trace_config(tiny), trace_config(theirs)
    assert own.breakdown == pytest.approx(other.breakdown, rel=1e-3, abs=2**17)
    assert own.flops == pytest.approx(other.flops, rel=1e-3)


def test_the_plan_is_that_of_its_module():
    config = small(channels=1)
    assert plan_of_module(on_meta(config), (1, 24, 24)) == layers_of(config)


def test_the_class_token_sees_every_patch():
    torch.manual_seed(0)
    module = vit.build(SMALL).eval()
    (images,), targets = vit.batch(SMALL, "cpu")
    images.requires_grad_()
    output = module(images)
    output.sum().backward()
    assert output.shape == (2, 5) and targets.shape == (2,)
    assert (images.grad != 0).all()


def test_repair_cuts_images_to_whole_patches():
    draw = {"heads": 0.99}.__getitem__
    values = {"image_size": 224, "patch_size": 14, "embedding_size": 200, "feed_forward_multiple": 3}
    assert vit.repair({**values, "image_size": 230}, draw) == {
        "image_size": 224,
        "patch_size": 14,
        "embedding_size": 192,
        "heads": 2,
        "feed_forward": 576,
    }
    assert vit.repair({"image_size": 5, "patch_size": 8}, draw) == {"image_size": 8, "patch_size": 8}
