"""The family `moe`: routing computes what it should, its shapes depend on no data, and experts count as they are."""

import dataclasses
import functools

import pytest
import torch
from family_table import FAMILY
from plan_checks import (
    on_meta,
    parameters_of,
)

from featurize.families import loss_of, moe
from featurize.nets.prenorm import RoutedExperts
from featurize.trace.tracer import trace_config
from featurize.training.training_step import cross_entropy

SMALL = FAMILY["moe"].small


small = functools.partial(dataclasses.replace, SMALL)


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
    config = small(moe_every=1, top_k=1)
    torch.manual_seed(0)
    module = moe.build(config)
    inputs, targets = moe.batch(config, "cpu")
    output = module(*inputs)
    difference = loss_of(config)(output, targets) - cross_entropy(output[0], targets)
    torch.testing.assert_close(difference, moe.BALANCE_WEIGHT * output[1])
    output[1].backward()
    assert all(block.forward_part.router.weight.grad.abs().sum() > 0 for block in module.body.blocks)


def test_outputs_suit_the_targets():
    for topology, shape in (("decoder", (2, 8, 50)), ("encoder", (2, 5))):
        config = small(topology=topology)
        inputs, targets = moe.batch(config, "meta")
        logits, balance = on_meta(config)(*inputs)
        assert logits.shape == shape and balance.shape == ()
        assert targets.shape == (shape[:-1] if topology == "decoder" else shape[:1])


def test_each_expert_adds_its_own_parameters_in_every_routed_block():
    expert = 2 * 16 * 24 + 24 + 16 + 16  # two linear layers, and a row of the router
    for moe_every, routed in ((1, 2), (2, 1)):
        counts = [parameters_of(on_meta(small(experts=n, moe_every=moe_every))) for n in (4, 8)]
        assert counts[1] - counts[0] == routed * 4 * expert


def test_capacity_is_the_even_share_times_the_factor_and_never_more_than_the_tokens():
    assert moe.capacity(small(top_k=2, capacity_factor=1.0)) == 4
    assert moe.capacity(small(top_k=1, capacity_factor=1.25)) == 3  # 2.5
    assert moe.capacity(small(experts=64, top_k=1)) == 1
    assert moe.capacity(small(capacity_factor=100.0)) == 8


def test_memory_follows_the_room_there_is_and_not_how_many_experts_share_it():
    shape = dict(batch_size=8, sequence_length=64, capacity_factor=1.0, moe_every=1)
    few, many, roomy = (
        trace_config(small(**{**shape, **changes})).breakdown["activation"]
        for changes in ({}, {"experts": 8}, {"capacity_factor": 2.0})
    )
    rows = 8 * 2 * 64  # of all experts together; twice as many in each of two blocks, inside and outside of GELU
    assert roomy - few >= 2 * 4 * rows * (24 + 16)
    assert abs(many - few) < (roomy - few) / 2


def test_repair_makes_room_for_one_routed_block():
    draw = {"heads": 0.0}.__getitem__
    repaired = moe.repair({"depth": 2, "moe_every": 4, "topology": "decoder", "classes": 7}, draw)
    assert repaired == {"depth": 4, "moe_every": 4, "topology": "decoder"}
    assert moe.repair({"topology": "encoder", "classes": 7}, draw) == {"topology": "encoder", "classes": 7}
