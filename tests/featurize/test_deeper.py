"""A deep model's trace from two shallow ones is its own."""

import pytest
import torch
from torch import nn

from featurize.device.device_spec import describe_device
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.memory.replay import replay
from featurize.recording.skeleton import alike_blocks, built_to_shorten, with_blocks
from featurize.recording.step_trace import deeper
from featurize.timing.simulation import simulate
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Block, Stack

WIDTH, DEPTH, SHALLOW = 64, 8, 4
SPEC = describe_device("H100-SXM5-80GB")
PLAN = {"blocks.*.wide": "colwise", "blocks.*.narrow": "rowwise"}
LAYOUTS = {
    "shards": {"fsdp": 4},
    "replicas of shards": {"ddp": 2, "fsdp": 4},
    "gathered once": {"fsdp": 4, "reshard_after_forward": False},
    "halves": {"fsdp": 4, "param_dtype": "bf16", "reduce_dtype": "fp32"},
    "split": {"tp": 2, "tp_plan": PLAN},
    "split and sharded": {"fsdp": 4, "tp": 2, "tp_plan": PLAN},
}
INPUTS = torch.zeros(2, 32, dtype=torch.long)
WAYS = {"plain": {}, "recomputed": {"checkpointing": "full"}, "two micro-steps": {"accumulation": 2}}


def net(depth=DEPTH):
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1000, bias=False), nn.Flatten(0, 1))
    return Stack((Block(WIDTH) for _ in range(depth)), head, first=nn.Embedding(1000, WIDTH))


@pytest.mark.spread(18)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deep_trace_is_that_of_the_whole_model(layout, way):
    model, settings = built_to_shorten(net), Training(optimizer="adamw", **WAYS[way])
    models = (with_blocks(model, SHALLOW), with_blocks(model, SHALLOW + 1), model)
    shallow, longer, whole = (
        trace_step(lambda one=one: one, INPUTS, device=SPEC, settings=settings, parallel=Parallel(**LAYOUTS[layout]))
        for one in models
    )
    made = deeper(shallow, longer, alike_blocks(model) - SHALLOW)
    assert made.events == whole.events and made.parameter_bytes == whole.parameter_bytes
    assert replay(made, SPEC).peak_reserved == replay(whole, SPEC).peak_reserved
    assert made.collectives == whole.collectives
    assert simulate(made, SPEC, settings).step_time_ms == pytest.approx(
        simulate(whole, SPEC, settings).step_time_ms, rel=1e-3
    )


def test_blocks_that_differ_or_share_are_not_alike():
    frozen, without_bias, tied, shared, masked = (net() for _ in range(5))
    frozen.blocks[3].wide.weight.requires_grad_(False)
    without_bias.blocks[3].wide = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
    tied.blocks[3].wide.weight = tied.blocks[2].wide.weight
    shared.again = shared.blocks[5].wide
    masked.blocks[3].register_buffer("mask", torch.zeros(4))
    models = (frozen, without_bias, tied, shared, masked, nn.Linear(3, 3))
    assert [alike_blocks(model) for model in models] == [0] * len(models)
