"""Families of tokens: `moe`, `rnn`, and `gpt` against GPT-2 as transformers has it."""

import functools
import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
    parameters_of,
)
from torch.utils.flop_counter import FlopCounterMode

from featurize.configs.features import group_key
from featurize.families import gpt, layers_of, loss_of, moe, rnn
from featurize.job.layers import totals
from featurize.nets import vision
from featurize.nets.prenorm import Conv1D, GeluNew, RoutedExperts
from featurize.trace.tracer import trace_config, trace_step
from featurize.training.training_step import cross_entropy
from tests.featurize.trace_sums import bytes_of

MOE, RNN = (FAMILY[name].small for name in ("moe", "rnn"))


# -- moe


def one_by_one(routed, x):
    """The same by a loop over samples, choices and tokens."""
    result, odds = torch.zeros_like(x), routed.router(x).softmax(-1)
    for n in range(len(x)):
        room = [routed.capacity] * routed.experts
        best = odds[n].topk(routed.choices, dim=-1)
        for k, t in itertools.product(range(routed.choices), range(x.shape[1])):
            expert = int(best.indices[t, k])
            weight = best.values[t, k] / (best.values[t].sum() if routed.choices > 1 else 1.0)
            room[expert] -= 1
            if room[expert] >= 0:
                hidden = routed.activation(x[n, t] @ routed.rise.weight[expert] + routed.rise.bias[expert, 0])
                result[n, t] += weight * (hidden @ routed.fall.weight[expert] + routed.fall.bias[expert, 0])
    return result


@pytest.mark.parametrize(("choices", "capacity"), [(1, 3), (2, 1), (2, 3), (2, 8)])
def test_tokens_go_to_their_experts_as_long_as_there_is_room(choices, capacity):
    routed = RoutedExperts(16, 24, experts=4, choices=choices, capacity=capacity, activation_name="gelu")
    x = torch.randn(3, 8, 16)
    with torch.no_grad():
        torch.testing.assert_close(routed(x)[0], one_by_one(routed, x))


def test_the_auxiliary_loss_reaches_every_router():
    config = replace(MOE, moe_every=1, top_k=1)
    module = moe.build(config)
    inputs, targets = moe.batch(config, "cpu")
    output = module(*inputs)
    difference = loss_of(config)(output, targets) - cross_entropy(output[0], targets)
    torch.testing.assert_close(difference, moe.BALANCE_WEIGHT * output[1])
    output[1].backward()
    assert all(block.forward_part.router.weight.grad.abs().sum() > 0 for block in module.body.blocks)


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"top_k": 2, "capacity_factor": 1.0}, 4),
        ({"capacity_factor": 1.25, "top_k": 1}, 3),
        ({"capacity_factor": 100}, 8),
    ],
)
def test_capacity_is_the_even_share_times_the_factor_and_never_more_than_the_tokens(changes, places):
    assert moe.capacity(replace(MOE, **changes)) == places


# -- rnn


CASES = [
    replace(RNN, cell=cell, task=task, bidirectional=both, depth=depth)
    for cell, task, both, depth in itertools.product(rnn.GATES, rnn.TASKS, (False, True), (1, 3))
    if not (both and task == "language_model")
]


@pytest.mark.spread(8)
@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.cell}-{c.task}-{c.bidirectional}-{c.depth}")
def test_parameters_flops_and_outputs_are_the_modules(config):
    module, (inputs, targets) = on_meta(config), rnn.batch(config, "meta")
    with FlopCounterMode(display=False) as counter:
        output = module(*inputs)
    sums = totals(layers_of(config))
    assert sums.parameters == parameters_of(module)
    assert config.batch_size * sums.flops == counter.get_total_flops()
    places = (7, 50) if config.task == "language_model" else (5,)
    assert output.shape == (3, *places) and targets.shape == (3, *places[:-1])


def test_the_last_state_is_where_each_direction_ends():
    config = replace(RNN, bidirectional=True)
    torch.manual_seed(0)
    module = rnn.build(config)
    (tokens,), _ = rnn.batch(config, "cpu")
    outputs, last = module.body(module.embedding(tokens))
    torch.testing.assert_close(last, torch.cat([outputs[:, -1, :20], outputs[:, 0, 20:]], dim=1))
    torch.testing.assert_close(module(tokens), module.head(last))


@pytest.mark.parametrize("cell", rnn.GATES)
def test_the_trace_has_one_call_for_all_layers_and_again_where_it_is_recomputed(cell):
    def calls(**changes):
        trace = trace_config(replace(RNN, cell=cell, **changes))
        assert bytes_of(trace, "gradient") == 2 * trace.parameter_bytes
        return [op.phase for op in trace.operators if op.name == "aten::_cudnn_rnn"]

    assert calls() == ["forward"]
    assert calls(activation_checkpointing=True) == ["forward", "backward"]


# -- gpt


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
small = functools.partial(replace, FAMILY["gpt"].small)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_takes_what_transformers_own_gpt2_takes(precision):
    transformers = vision.import_library("transformers")
    config = replace(GPT2, depth=3, precision=precision)

    def theirs():
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, use_cache=False))

    own = trace_config(config)
    other = trace_step(theirs, lambda on: gpt.batch(config, on), precision=precision, training_loop=False)
    assert own.parameters == other.parameters
    assert own.breakdown == pytest.approx(other.breakdown, rel=1e-3, abs=2**17)
    assert own.flops == pytest.approx(other.flops, rel=1e-5)


def test_tied_weights_are_one_tensor_and_count_once():
    tied, own = small(tied_embeddings=True), small(tied_embeddings=False)
    blocks = [[b for b in trace_config(c).blocks if b.kind == "parameter"] for c in (tied, own)]
    assert sum(b.nbytes for b in blocks[1]) - sum(b.nbytes for b in blocks[0]) == 4 * 50 * 16
    assert group_key(tied) != group_key(own)


def test_projections_of_both_kinds_compute_the_same():
    theirs, own = torch.nn.Linear(6, 10), Conv1D(6, 10)
    with torch.no_grad():
        own.weight.copy_(theirs.weight.T)
        own.bias.copy_(theirs.bias)
    x = torch.randn(3, 4, 6)
    torch.testing.assert_close(own(x), theirs(x))
    torch.testing.assert_close(GeluNew()(x), torch.nn.functional.gelu(x, approximate="tanh"))
