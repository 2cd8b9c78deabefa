"""The family `gpt` against GPT-2 as transformers has it, and what its switches change."""

import dataclasses
import functools
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    parameters_of,
)

from featurize.configs.features import group_key
from featurize.families import gpt
from featurize.nets import vision
from featurize.nets.prenorm import Conv1D, GeluNew
from featurize.trace.tracer import trace_config, trace_step

GPT2 = gpt.Config(
    batch_size=2,
    vocabulary_size=50257,
    sequence_length=1024,
    embedding_size=768,
    heads=12,
    depth=12,
    feed_forward=3072,
    activation="gelu_new",
)
SMALL = FAMILY["gpt"].small


small = functools.partial(dataclasses.replace, SMALL)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_takes_what_transformers_own_gpt2_takes(precision):
    transformers = vision.import_library("transformers")
    config = dataclasses.replace(GPT2, depth=3, precision=precision)

    def theirs():
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, use_cache=False))

    own = trace_config(config)
    other = trace_step(theirs, lambda on: gpt.batch(config, on), precision=precision, training_loop=False)
    assert own.parameters == other.parameters
    assert own.breakdown == pytest.approx(other.breakdown, rel=1e-3, abs=2**17)
    assert own.flops == pytest.approx(other.flops, rel=1e-5)


def test_tied_weights_are_one_tensor_and_count_once():
    tied, own = small(tied_embeddings=True), small(tied_embeddings=False)
    module = gpt.build(tied)
    assert module.head.weight is module.embedding.weight
    assert parameters_of(gpt.build(own)) - parameters_of(module) == 50 * 16
    blocks = [[b for b in trace_config(c).blocks if b.kind == "parameter"] for c in (tied, own)]
    assert sum(b.nbytes for b in blocks[1]) - sum(b.nbytes for b in blocks[0]) == 4 * 50 * 16
    assert len(blocks[1]) == len(blocks[0]) + 1
    assert group_key(tied) != group_key(own)


def test_projections_of_both_kinds_compute_the_same():
    torch.manual_seed(0)
    theirs, own = torch.nn.Linear(6, 10), Conv1D(6, 10)
    with torch.no_grad():
        own.weight.copy_(theirs.weight.T)
        own.bias.copy_(theirs.bias)
    x = torch.randn(3, 4, 6)
    torch.testing.assert_close(own(x), theirs(x))
    torch.testing.assert_close(GeluNew()(x), torch.nn.functional.gelu(x, approximate="tanh"))


def test_the_tanh_formula_keeps_three_more_tensors_a_block():
    fused, pieces = (trace_config(small(activation=name, sequence_length=64, batch_size=8)) for name in gpt.ACTIVATIONS)
    activations = pieces.breakdown["activation"] - fused.breakdown["activation"]
    assert activations == SMALL.depth * 3 * 4 * 8 * 64 * SMALL.feed_forward
