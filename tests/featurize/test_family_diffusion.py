"""The family `diffusion`: a published network, the timestep, the attention and the loss."""

import dataclasses
import functools

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
    parameters_of,
)

from featurize.families import diffusion
from featurize.trace.tracer import trace_config

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = FAMILY["diffusion"].small


small = functools.partial(dataclasses.replace, SMALL)


def test_the_published_network_for_images_of_32_pixels_has_its_parameters():
    # Ho et al. (arXiv 2006.11239): 35.7 million for CIFAR-10, widths 128, 256, 256, 256, attention at 16 pixels
    config = small(
        image_size=32,
        base_channels=128,
        levels=4,
        blocks=2,
        widest=2,
        attention_size=16,
        attention_size_min=16,
        heads=1,
        dropout=0.1,
    )
    assert parameters_of(on_meta(config)) == 35_746_307


def test_the_decoders_blocks_read_every_map_of_the_encoder_once():
    config = small(levels=3, blocks=2, image_size=16)
    read = [part.inputs for part in diffusion.decoder(config) if part.kind in ("block", "attending")]
    assert read == [128 + 128, 128 + 128, 128 + 64, 128 + 64, 64 + 64, 64 + 32, 64 + 32, 32 + 32, 32 + 32]
    assert [p.map_out for p in diffusion.encoder(config) if p.kind == "halve"] == [8, 4]
    assert [p.map_out for p in diffusion.decoder(config) if p.kind == "double"] == [8, 16]


def test_attention_is_where_the_map_is_small_enough():
    def attended(**changes):
        config = small(image_size=32, levels=3, **changes)
        parts = (*diffusion.encoder(config), *diffusion.decoder(config))
        return sorted({part.map_out for part in parts if part.kind == "attending"})

    assert attended(attention_size=16) == [8, 16]
    assert attended(attention_size=16, attention_size_min=16) == [16]
    assert attended(attention_size=0) == []
    names = [op.name for op in trace_config(small(attention_size=0)).operators]
    assert names.count("aten::_scaled_dot_product_efficient_attention") == 1  # the middle always attends


def test_attention_takes_the_fused_kernel_and_keeps_no_scores():
    places = dict(image_size=64, attention_size=64, levels=2)
    traces = [trace_config(small(**places, attention_size_min=least)) for least in (64, 65)]
    with_attention, without = (t.peak_live_bytes for t in traces)
    scores = 4 * SMALL.batch_size * SMALL.heads * (64**2) ** 2  # of one block: 256 MiB
    assert with_attention - without < scores / 4
    half = trace_config(small(**places, precision="bf16"))
    assert any(op.name == "aten::_scaled_dot_product_flash_attention" for op in half.operators)


def test_the_noise_depends_on_the_timestep_and_every_place_on_every_other():
    torch.manual_seed(0)
    module = diffusion.build(SMALL).eval()
    (images, steps), noise = diffusion.batch(SMALL, "cpu")
    assert noise.shape == images.shape == module(images, steps).shape and noise.is_floating_point()
    assert steps.dtype == torch.int64 and steps.shape == (2,) and steps.max() < diffusion.TIMESTEPS
    assert not torch.allclose(module(images, steps), module(images, steps + 100))
    images.requires_grad_()
    (grad,) = torch.autograd.grad(module(images, steps)[0, :, 0, 0].sum(), images)
    assert (grad[0].abs().sum(0) > 0).all() and not grad[1].any()


def test_the_traced_loss_is_the_mean_squared_error():
    operators = trace_config(SMALL).operators
    names = {op.name for op in operators}
    assert {"aten::mse_loss", "aten::mse_loss_backward"} <= names and "aten::_log_softmax" not in names
    predicted, noise = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(diffusion.loss(SMALL)(predicted, noise), ((predicted - noise) ** 2).mean())


def test_sampled_heads_keep_a_multiple_of_eight_channels():
    def repaired(width, heads):
        return diffusion.repair({"base_channels": width, "heads": heads}, lambda _: 0.5)

    assert repaired(70, 8) == {"base_channels": 64, "heads": 8}
    assert repaired(32, 8) == {"base_channels": 32, "heads": 4}
    assert repaired(96, 8) == {"base_channels": 96, "heads": 6}
