"""Families of tokens: the experts of `moe` and the recurrent layers of `rnn`."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
    parameters_of,
)
from torch.utils.flop_counter import FlopCounterMode

from featurize.families import layers_of, loss_of, moe, rnn
from featurize.job.layers import totals
from featurize.nets.prenorm import RoutedExperts
from featurize.trace.tracer import trace_config
from featurize.training.training_step import cross_entropy
from tests.featurize.trace_sums import bytes_of

MOE, RNN = (FAMILY[name].small for name in ("moe", "rnn"))


# -- moe


def experts(capacity, choices, count=4):
    torch.manual_seed(0)
    return RoutedExperts(16, 24, experts=count, choices=choices, capacity=capacity, activation_name="gelu")


def one_by_one(routed, x, choices, capacity):
    """The same by a loop over samples, choices and tokens."""
    result, odds = torch.zeros_like(x), routed.router(x).softmax(-1)
    for n in range(len(x)):
        taken = [0] * routed.experts
        best = odds[n].topk(choices, dim=-1)
        for k in range(choices):
            for t in range(x.shape[1]):
                expert = int(best.indices[t, k])
                weight = best.values[t, k] / (best.values[t].sum() if choices > 1 else 1.0)
                taken[expert] += 1
                if taken[expert] <= capacity:
                    hidden = routed.activation(x[n, t] @ routed.rise.weight[expert] + routed.rise.bias[expert, 0])
                    result[n, t] += weight * (hidden @ routed.fall.weight[expert] + routed.fall.bias[expert, 0])
    return result


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_tokens_go_to_their_experts_as_long_as_there_is_room(choices, capacity):
    routed = experts(capacity, choices)
    x = torch.randn(3, 8, 16)
    with torch.no_grad():
        torch.testing.assert_close(routed(x)[0], one_by_one(routed, x, choices, capacity))


def test_balance_is_1_where_experts_are_used_alike_and_grows_to_their_number():
    routed = experts(capacity=8, choices=1, count=2)
    x = torch.zeros(1, 8, 16)
    with torch.no_grad():
        x[:, :4, 0], x[:, 4:, 0] = 1.0, -1.0
        routed.router.weight.zero_()[0, 0] = 50.0
        routed.router.weight[1, 0] = -50.0
        assert routed(x)[1].item() == pytest.approx(1.0)
        assert routed(x.abs())[1].item() == pytest.approx(2.0)


def test_the_auxiliary_loss_reaches_every_router():
    config = replace(MOE, moe_every=1, top_k=1)
    torch.manual_seed(0)
    module = moe.build(config)
    inputs, targets = moe.batch(config, "cpu")
    output = module(*inputs)
    difference = loss_of(config)(output, targets) - cross_entropy(output[0], targets)
    torch.testing.assert_close(difference, moe.BALANCE_WEIGHT * output[1])
    output[1].backward()
    assert all(block.forward_part.router.weight.grad.abs().sum() > 0 for block in module.body.blocks)


def test_each_expert_adds_its_own_parameters_in_every_routed_block():
    expert = 2 * 16 * 24 + 24 + 16 + 16  # two linear layers, and a row of the router
    for moe_every, routed in ((1, 2), (2, 1)):
        counts = [parameters_of(on_meta(replace(MOE, experts=n, moe_every=moe_every))) for n in (4, 8)]
        assert counts[1] - counts[0] == routed * 4 * expert


def test_capacity_is_the_even_share_times_the_factor_and_never_more_than_the_tokens():
    assert moe.capacity(replace(MOE, top_k=2, capacity_factor=1.0)) == 4
    assert moe.capacity(replace(MOE, top_k=1, capacity_factor=1.25)) == 3  # 2.5
    assert moe.capacity(replace(MOE, experts=64, top_k=1)) == 1
    assert moe.capacity(replace(MOE, capacity_factor=100.0)) == 8


# -- rnn


def cases():
    for cell, task, both, depth in itertools.product(rnn.GATES, rnn.TASKS, (False, True), (1, 3)):
        if not (both and task == "language_model"):
            yield replace(RNN, cell=cell, task=task, bidirectional=both, depth=depth)


CASES = list(cases())


@pytest.mark.spread(3)
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
    recurrent = [layer for layer in layers_of(config) if layer.kind == config.cell]
    both = 2 if config.bidirectional else 1
    assert [layer.output_elements for layer in recurrent] == [7 * 20 * both] * config.depth


def test_the_last_state_is_where_each_direction_ends():
    config = replace(RNN, bidirectional=True)
    torch.manual_seed(0)
    module = rnn.build(config)
    (tokens,), _ = rnn.batch(config, "cpu")
    outputs, last = module.body(module.embedding(tokens))
    torch.testing.assert_close(last, torch.cat([outputs[:, -1, :20], outputs[:, 0, 20:]], dim=1))
    torch.testing.assert_close(module(tokens), module.head(last))
    module = rnn.build(replace(RNN, task="classify_mean"))
    outputs, _ = module.body(module.embedding(tokens))
    torch.testing.assert_close(module(tokens), module.head(outputs.mean(1)))


def test_dropout_with_one_layer_is_no_reason_for_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_meta(replace(RNN, depth=1, dropout=0.5))


@pytest.mark.parametrize("cell", rnn.GATES)
def test_the_trace_has_one_call_for_all_layers_and_again_where_it_is_recomputed(cell):
    def calls(**changes):
        trace = trace_config(replace(RNN, cell=cell, **changes))
        assert bytes_of(trace, "gradient") == 2 * trace.parameter_bytes
        return [op.phase for op in trace.operators if op.name == "aten::_cudnn_rnn"]

    assert calls() == ["forward"]
    assert calls(activation_checkpointing=True) == ["forward", "backward"]
