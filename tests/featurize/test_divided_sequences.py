"""Sequences and experts that ranks divide: what does not go with that is refused with what does."""

import pytest
import torch
from rank_nets import LENGTH, WIDTH, Attending, Mixture
from torch import nn
from torch.nn import functional

from conf.errors import UsageError
from featurize.job.layout import Parallel
from featurize.trace.tracer import trace_step
from featurize.training.training_step import Training
from tests.featurize.small_nets import Computes

pytestmark = pytest.mark.needs_mode("fsdp")


class Masked(Attending):
    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        heads = x.unflatten(2, (4, -1)).transpose(1, 2)
        return super().forward(functional.scaled_dot_product_attention(heads, heads, heads, mask).flatten(2))


def listed():
    experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    return Computes(lambda net, x: sum(expert(x) for expert in net.experts), experts=experts)


def traced(make, length=LENGTH, **options):
    return trace_step(
        make, torch.empty(2, length, WIDTH, device="meta"), settings=Training(), parallel=Parallel(**options)
    )


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Attending, {"length": 250}, "a sequence of 250 does not divide into 8 parts .*; .* are 248 and 256"),
        (Attending, {"length": 250, "cp_load_balance": False}, "does not divide into 4 parts .*; .* are 248 and 252"),
        (Masked, {}, "attention with a mask does not run over several ranks"),
        (lambda: Attending(causal=False), {}, "are of causal attention only; give cp_load_balance=false"),
        (Attending, {"length": 64}, "row sums of 32 queries or a multiple, and a part of the sequence has 8"),
        (Attending, {"length": 192, "cp_load_balance": False}, "has 48; .* a multiple of 128 tokens"),
        (lambda: nn.Linear(WIDTH, 3), {}, "does not call torch.nn.functional.scaled_dot_product_attention"),
    ],
)
def test_what_does_not_run_over_parts_of_a_sequence_is_refused(make, options, message):
    with pytest.raises(UsageError, match=f"parallel: cp.*{message}"):
        traced(make, cp=4, **options)


def test_an_input_without_a_sequence_is_refused():
    with pytest.raises(UsageError, match="cp: no input has a sequence in its second dimension"):
        trace_step(lambda: nn.Linear(WIDTH, 3), torch.empty(WIDTH, device="meta"), parallel=Parallel(cp=2))


@pytest.mark.parametrize(
    ("make", "ranks", "message"),
    [
        (lambda: Attending(forward_part=Mixture), 3, "=3 does not divide the 8 experts of .*; ep can be 2, 4, 8"),
        (listed, 4, "experts .ModuleList. is not divided; what is: a module named `experts` whose parameters"),
        (Attending, 4, "the model has no experts of a known kind"),
    ],
)
def test_experts_that_are_not_divided_are_refused(make, ranks, message):
    with pytest.raises(UsageError, match=f"parallel: ep.*{message}"):
        traced(make, fsdp=ranks, ep=ranks)


def mixtral():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        vocab_size=256,
    )
    return transformers.MixtralForCausalLM(config)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"fsdp": 4, "ep": 4}, ["all_to_all"]),
        ({"cp": 2, "fsdp": 2, "ep": 4}, ["all_to_all", "send"]),
        ({"tp": 2, "fsdp": 2}, ["all_reduce"]),
        ({"tp": 2, "fsdp": 2, "ep": 4}, ["all_reduce", "all_to_all"]),
    ],
    ids=str,
)
def test_a_mixture_of_transformers_is_divided(options, kinds):
    tokens = torch.empty(2, 64, dtype=torch.int64, device="meta")
    trace = trace_step(
        mixtral,
        {"input_ids": tokens, "labels": tokens},
        settings=Training(precision="bf16"),
        parallel=Parallel(**options),
    )
    alone = trace_step(mixtral, {"input_ids": tokens, "labels": tokens})
    assert {one.kind for one in trace.collectives} == {"all_gather", "reduce_scatter", *kinds}
    assert alone.parameter_bytes / 4 <= trace.parameter_bytes < alone.parameter_bytes / 3.5


def test_what_ranks_talk_about_has_a_group_for_each_kind():
    layout = Parallel(ddp=2, fsdp=4, cp=2, tp=2, ep=8)
    dense = {"ddp": (2, 16), "fsdp": (8, 2), "tp": (2, 1), "cp": (2, 2)}
    assert layout.groups == {**dense, "eddp": (2, 16), "ep": (8, 1), "efsdp": (2, 8)}
    assert Parallel(cp=8).groups == {"fsdp": (8, 1)}  # all ranks talk in one group, whatever about
