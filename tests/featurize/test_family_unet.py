"""The family `unet`: widths, joined maps, and the loss over pixels."""

import dataclasses
import functools

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
    parameters_of,
)
from torch import nn

from featurize.families import loss_of, unet
from featurize.trace.tracer import trace_config

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = FAMILY["unet"].small


small = functools.partial(dataclasses.replace, SMALL)


def test_every_pixel_gets_logits():
    (images,), targets = unet.batch(SMALL, "cpu")
    logits = unet.build(SMALL)(images)
    assert logits.shape == (2, 5, 16, 16) and targets.shape == (2, 16, 16)
    assert targets.dtype == torch.int64 and targets.min() >= 0 and targets.max() < 5


def test_parameters_follow_from_the_widths():
    config = small(channels=1, classes=2, base_channels=64, depth=4, batch_norm=False)
    assert unet.widths(config) == [64, 128, 256, 512, 1024]

    def conv(inputs, outputs, side):
        return inputs * outputs * side**2 + outputs

    blocks = [(1, 64), (64, 128), (128, 256), (256, 512), (512, 1024), (1024, 512), (512, 256), (256, 128), (128, 64)]
    expected = sum(conv(i, o, 3) + conv(o, o, 3) for i, o in blocks)
    expected += sum(conv(2 * width, width, 2) for width in (64, 128, 256, 512)) + conv(64, 2, 1)
    assert parameters_of(on_meta(config)) == expected == 31_030_658
    assert unet.widths(small(image_size=64, base_channels=96, depth=5)) == [96, 192, 384, 768, 1024, 1024]


def test_the_decoder_reads_the_encoders_map_of_the_same_size():
    module, joined = on_meta(small(depth=3)), []
    for level in module.decoder:
        level.register_forward_pre_hook(lambda _, args: joined.append(tuple(args[0].shape[1:])))
    module(*unet.batch(SMALL, "meta")[0])
    assert joined == [(32, 4, 4), (16, 8, 8), (8, 16, 16)]
    torch.manual_seed(0)
    module = unet.build(small(batch_norm=False))
    for parameter in module.enlarge.parameters():
        nn.init.zeros_(parameter)  # nothing comes from below
    (images,), _ = unet.batch(SMALL, "cpu")
    module(images).sum().backward()
    used = [level.blocks[0][0].weight.grad.abs().sum() > 0 for level in module.encoder]
    assert used == [True, False, False]


def test_maps_that_are_kept_for_the_decoder_cost_memory_unless_blocks_are_recomputed():
    shape = dict(image_size=128, base_channels=16, depth=3)
    plain, again = (trace_config(small(**shape, activation_checkpointing=switch)) for switch in (False, True))
    assert again.peak_live_bytes < 0.8 * plain.peak_live_bytes and again.flops > 1.2 * plain.flops


def test_the_classes_are_the_second_dimension_also_where_there_are_as_many_as_pixels_a_side():
    config = small(classes=16)
    logits, targets = torch.randn(2, 16, 16, 16), torch.zeros(2, 16, 16, dtype=torch.long)
    expected = -logits.log_softmax(dim=1)[:, 0].mean()
    torch.testing.assert_close(loss_of(config)(logits, targets), expected)
    assert any(op.name == "aten::nll_loss2d_forward" for op in trace_config(config).operators)
