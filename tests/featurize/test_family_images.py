"""Families of images: what `diffusion`, `unet` and `vit` compute, their parameters, losses and memory."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
)

from featurize.families import diffusion, layers_of, loss_of, timm, unet, vit
from featurize.trace.tracer import trace_config

pytestmark = pytest.mark.usefixtures("one_thread")

DIFFUSION, UNET = (FAMILY[name].small for name in ("diffusion", "unet"))


# -- diffusion


def test_the_decoders_blocks_read_every_map_of_the_encoder_once():
    config = replace(DIFFUSION, levels=3, blocks=2, image_size=16)
    read = [part.inputs for part in diffusion.decoder(config) if part.kind in ("block", "attending")]
    assert read == [128 + 128, 128 + 128, 128 + 64, 128 + 64, 64 + 64, 64 + 32, 64 + 32, 32 + 32, 32 + 32]
    assert [p.map_out for p in diffusion.encoder(config) if p.kind == "halve"] == [8, 4]
    assert [p.map_out for p in diffusion.decoder(config) if p.kind == "double"] == [8, 16]


def test_the_noise_depends_on_the_timestep_and_every_place_on_every_other():
    torch.manual_seed(0)
    module = diffusion.build(DIFFUSION).eval()
    (images, steps), noise = diffusion.batch(DIFFUSION, "cpu")
    assert noise.shape == images.shape == module(images, steps).shape and noise.is_floating_point()
    assert steps.dtype == torch.int64 and steps.shape == (2,) and steps.max() < diffusion.TIMESTEPS
    assert not torch.allclose(module(images, steps), module(images, steps + 100))
    images.requires_grad_()
    (grad,) = torch.autograd.grad(module(images, steps)[0, :, 0, 0].sum(), images)
    assert (grad[0].abs().sum(0) > 0).all() and not grad[1].any()


def test_the_traced_loss_is_the_mean_squared_error():
    operators = trace_config(DIFFUSION).operators
    names = {op.name for op in operators}
    assert {"aten::mse_loss", "aten::mse_loss_backward"} <= names and "aten::_log_softmax" not in names
    predicted, noise = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(diffusion.loss(DIFFUSION)(predicted, noise), ((predicted - noise) ** 2).mean())


# -- unet


def test_the_decoder_reads_the_encoders_map_of_the_same_size():
    module, joined = on_meta(replace(UNET, depth=3)), []
    for level in module.decoder:
        level.register_forward_pre_hook(lambda _, args: joined.append(tuple(args[0].shape[1:])))
    module(*unet.batch(UNET, "meta")[0])
    assert joined == [(32, 4, 4), (16, 8, 8), (8, 16, 16)]


def test_the_classes_are_the_second_dimension_also_where_there_are_as_many_as_pixels_a_side():
    config = replace(UNET, classes=16)
    logits, targets = torch.randn(2, 16, 16, 16), torch.zeros(2, 16, 16, dtype=torch.long)
    expected = -logits.log_softmax(dim=1)[:, 0].mean()
    torch.testing.assert_close(loss_of(config)(logits, targets), expected)
    assert any(op.name == "aten::nll_loss2d_forward" for op in trace_config(config).operators)


# -- vit


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


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_plan_and_trace_are_those_of_timms_model():
    tiny = replace(BASE, embedding_size=192, heads=3, feed_forward=768, precision="bf16")
    theirs = timm.Config(batch_size=2, model="vit_tiny_patch16_224", precision="bf16")
    assert layers_of(tiny) == timm.layers(theirs)
    own, other = trace_config(tiny), trace_config(theirs)
    assert own.breakdown == pytest.approx(other.breakdown, rel=1e-3, abs=2**17)
    assert own.flops == pytest.approx(other.flops, rel=1e-3)
