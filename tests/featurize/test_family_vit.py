"""The family `vit` against the vision transformers of torchvision and timm."""

import dataclasses
from importlib.util import find_spec

import pytest
import torch
from plan_checks import (
    assert_plan_tells_the_truth,
    assert_recomputing_keeps_gradients,
    assert_trains,
    gradients,
    on_meta,
    parameters_of,
)

from conf.errors import UsageError
from featurize.families import layers_of, timm, vit
from featurize.job.layers import totals
from featurize.nets import vision
from featurize.recording.plan_of_module import plan_of_module
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
SMALL = vit.Config(
    batch_size=2, image_size=24, patch_size=8, classes=5, embedding_size=16, heads=2, depth=2, feed_forward=32
)


def small(**changes):
    return dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("width", "heads", "depth", "parameters"),
    [(192, 3, 12, 5_717_416), (384, 6, 12, 22_050_664), (768, 12, 12, 86_567_656), (1024, 16, 24, 304_326_632)],
)
def test_models_of_every_size_have_their_published_parameters(width, heads, depth, parameters):
    config = dataclasses.replace(BASE, embedding_size=width, heads=heads, depth=depth, feed_forward=4 * width)
    assert totals(layers_of(config)).parameters == parameters_of(on_meta(config)) == parameters


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_torchvisions_model_has_as_many():
    with torch.device("meta"):
        theirs = vision.import_library("torchvision.models").vit_b_16()
    assert parameters_of(theirs) == parameters_of(on_meta(BASE))


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_plan_and_trace_are_those_of_timms_model():
    tiny = dataclasses.replace(BASE, embedding_size=192, heads=3, feed_forward=768, precision="bf16")
    theirs = timm.Config(batch_size=2, model="vit_tiny_patch16_224", precision="bf16")
    assert layers_of(tiny) == timm.layers(theirs)
    own, other = trace_config(tiny), trace_config(theirs)
    assert own.breakdown == pytest.approx(other.breakdown, rel=1e-3, abs=2**17)
    assert own.flops == pytest.approx(other.flops, rel=1e-3)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_the_plan_tells_the_truth(rate):
    config = small(dropout=rate, channels=1)
    assert_plan_tells_the_truth(config, {"position", "attention", "add", "concat"})
    if not rate:
        assert plan_of_module(on_meta(config), (1, 24, 24)) == layers_of(config)


def test_it_trains_and_recomputes():
    assert_trains(small(channels_last=True))
    assert_trains(small(precision="bf16"))
    assert_recomputing_keeps_gradients(SMALL)
    gradients(small(dropout=0.2))


def test_the_class_token_sees_every_patch():
    torch.manual_seed(0)
    module = vit.build(SMALL).eval()
    (images,), targets = vit.batch(SMALL, "cpu")
    images.requires_grad_()
    output = module(images)
    output.sum().backward()
    assert output.shape == (2, 5) and targets.shape == (2,)
    assert (images.grad != 0).all()


def test_attention_scores_are_never_kept():
    scores = 8 * 2 * (64**2 + 1) ** 2  # pairs of tokens, for each sample and head
    trace = trace_config(small(batch_size=8, image_size=512))
    assert max(block.nbytes for block in trace.blocks) < 4 * scores / 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(patch_size=7), "patch_size must divide image_size, got 7 for images of 24 pixels"),
        (dict(patch_size=7, heads=3), "patch_size must .*; heads must divide embedding_size, got 3 heads"),
        (dict(dropout=1.0), r"dropout must be a number in \[0, 1\), got 1.0"),
    ],
)
def test_impossible_configs_are_refused_in_words(changes, message):
    with pytest.raises(UsageError, match=message):
        small(**changes)


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
