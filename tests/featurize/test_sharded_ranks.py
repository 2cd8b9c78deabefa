"""One rank of `fully_shard` in a trace, against real ranks that talk over gloo, and what ranks do not divide."""

import math
from functools import partial

import pytest
import torch
from rank_nets import LENGTH, WIDTH as ATTENTION_WIDTH, Grouped, Mixture, attending, efficient_attention_on_cpu, routed
from rank_watch import loss_of, watched_training
from real_ranks import assert_like_real, some_ranks, train_cases, with_wide
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from uneven_net import BATCH, WIDTH, Net

from conf.errors import UsageError
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.trace.tracer import trace_step
from featurize.training.sharded_rank import part_of_sequence, ring_attention, sequence_mesh
from featurize.training.sharding import divide_experts, expert_mesh, shard
from tests.featurize.small_nets import Computes

pytestmark = pytest.mark.needs_mode("fsdp")

PLAN = {"first": "colwise_gather_output", "blocks.*.wide": "colwise", "blocks.*.narrow": "rowwise"}
# Of `Parallel`, and the model.
WHOLE = {
    "two": ({"fsdp": 2}, Net),
    "three": ({"fsdp": 3}, Net),
    "kept": ({"fsdp": 2, "reshard_after_forward": False}, Net),
    "halves": ({"fsdp": 3, "param_dtype": "bf16", "reduce_dtype": "fp32"}, Net),
    "checkpointed": ({"fsdp": 2}, lambda: Net(again=True)),
    "hybrid": ({"ddp": 2, "fsdp": 2}, Net),
    "hybrid halves": (
        {"ddp": 2, "fsdp": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"},
        lambda: Net(again=True),
    ),
    "part": ({"fsdp": 4, "reshard_after_forward": 2}, Net),
    "wrapped": ({"fsdp": 2, "wrap": ("Linear",)}, Net),
    "split": ({"tp": 2, "tp_plan": PLAN}, Net),
    "split in three": ({"tp": 3, "tp_plan": PLAN}, lambda: Net(again=True)),
    "split and sharded": ({"fsdp": 2, "tp": 2, "tp_plan": PLAN, "param_dtype": "bf16"}, lambda: Net(again=True)),
}
mixing = partial(attending, Mixture)
not_causal = partial(attending, causal=False)
# The same of models whose ranks share a sequence, or the experts of a mixture.
PARTS = {"blocks.*.part": "colwise_gather_output"}
OF_EXPERTS = {
    "blocks.*.part.experts": "moe_tp_experts",
    "blocks.*.part.experts.rise": "packed_rowwise",
    "blocks.*.part.experts.fall": "colwise",
}
ROUTERS = {"blocks.*.part.router": "colwise_gather_output"}
OF_PARTS = {
    "sequence": ({"cp": 4}, attending),
    "rotated": ({"cp": 4, "cp_rotate": "alltoall"}, attending),
    "sequence and shards": ({"fsdp": 2, "cp": 2}, attending),
    "sequence and replicas": ({"ddp": 2, "cp": 2}, attending),
    "sequence and split": ({"cp": 2, "tp": 2, "tp_plan": PARTS}, attending),
    "not causal": ({"cp": 4, "cp_load_balance": False}, not_causal),
    "experts": ({"fsdp": 4, "ep": 2}, mixing),
    "whole experts": ({"fsdp": 4, "ep": 4}, mixing),
    "fewer experts than shards": ({"fsdp": 4, "ep": 2}, lambda: attending(lambda: Mixture(experts=2))),
    "grouped experts": ({"fsdp": 4, "ep": 2}, lambda: attending(lambda: Mixture(Grouped))),
    "experts with places": ({"fsdp": 4, "ep": 2}, lambda: attending(routed)),
    "replicas of experts": ({"ddp": 2, "fsdp": 2, "ep": 2}, mixing),
    "split experts": ({"tp": 4, "tp_plan": OF_EXPERTS}, mixing),
    "split experts and shards": ({"fsdp": 2, "tp": 2, "tp_plan": OF_EXPERTS}, mixing),
    "split and experts": ({"tp": 4, "ep": 4, "tp_plan": ROUTERS}, mixing),
    "split, shards and experts": (
        {"fsdp": 2, "tp": 2, "ep": 4, "tp_plan": ROUTERS},
        mixing,
    ),
    "split and shards of experts": (
        {"fsdp": 2, "tp": 2, "ep": 2, "tp_plan": ROUTERS | OF_EXPERTS},
        mixing,
    ),
    "sequence and experts": ({"fsdp": 2, "cp": 2, "ep": 4}, mixing),
}
CASES = WHOLE | OF_PARTS
PLAIN = (  # others have all that these have, and all their dimensions together
    *("two", "kept", "halves", "checkpointed", "hybrid", "part", "split", "split in three"),
    "sequence and replicas",
    "sequence and split",
    "fewer experts than shards",
    "experts with places",
    "sequence",
    "experts",
    "whole experts",
    "split experts",
    "split experts and shards",
    "split and experts",
    "split, shards and experts",
    "sequence and experts",  # which stages of a pipeline have, too
)
# Routed as it comes, so that some experts get more than others; whether all ranks have the same tokens.
DIVIDED = [
    (lambda: Mixture(balanced=False), False),
    (lambda: Mixture(balanced=False), True),
    (lambda: Mixture(Grouped, balanced=False), False),
    (routed, False),
]
PLAINLY_TRAINED = ({*OF_PARTS} - {"replicas of experts"}) | {"wrapped", "hybrid halves"}


SHAPES = (BATCH, WIDTH), (2, LENGTH, ATTENTION_WIDTH)  # of a batch, also of sequences


def training(name=None):
    """How a case trains: how the optimizer and the norm treat the shards is asked of a few only, as it takes PyTorch
    longer than all else."""
    if name in PLAINLY_TRAINED:
        return Training(optimizer="sgd", implementation="foreach")
    return Training(optimizer="momentum", implementation="foreach", clip_norm=1.0)


def layout_of(name):
    return Parallel(**CASES[name][0])


def train_real(rank, names):
    """One of four real processes."""
    divided = [difference_of_divided(rank, *case) for case in DIVIDED]
    with efficient_attention_on_cpu():
        return {"divided": divided, **train_cases(rank, names, layout_of, train)}


def difference_of_divided(rank, make, shared):
    """Return how far outputs and gradients of divided experts are from those of whole ones."""
    torch.manual_seed(0)
    whole, divided = make(), make()
    divided.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (4,))
    divide_experts(nn.ModuleDict({"part": divided}), mesh, mesh if shared else None)
    batch, results = torch.randn(4, 2, LENGTH, ATTENTION_WIDTH)[0 if shared else rank], []
    for model in (whole, divided):
        x = batch.clone().requires_grad_()
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()
        results.append((out, x.grad))
    return max(((one - other).abs().max() / one.abs().max()).item() for one, other in zip(*results, strict=True))


def train(name, parallel, mesh):
    experts = expert_mesh(mesh, parallel) if parallel.degrees.ep > 1 else None
    batch, settings = torch.randn(SHAPES[name in OF_PARTS]), training(name)
    model = shard(CASES[name][1](), parallel, mesh, experts)
    if parallel.degrees.cp == 1:
        return watched_training(model, batch, settings)
    sequence = sequence_mesh(mesh, parallel)
    (batch,), _ = part_of_sequence((batch,), None, sequence, parallel)
    with ring_attention(sequence, parallel):
        return watched_training(model, batch, settings)


def traced(options, make=Net, rank=0, name=None):
    return trace_step(
        make,
        torch.empty(SHAPES[name in OF_PARTS], device="meta"),
        torch.empty((), device="meta"),
        loss_of,
        settings=training(name),
        training_loop=False,
        rank=rank,
        parallel=Parallel(**options),
    )


def words():
    return Computes(lambda net, ids: net.last(net.words(ids)), words=nn.Embedding(64, WIDTH), last=nn.Linear(WIDTH, 5))


def test_replicas_reduce_a_ranks_part_of_all_gradients_once_a_step():
    ids = torch.empty(BATCH, 3, dtype=torch.long, device="meta")
    plan = {"words": "embedding_rowwise", "last": "rowwise_split_input"}
    settings = Training(optimizer="sgd", accumulation=3)
    split, replicated = (
        trace_step(words, ids, settings=settings, parallel=Parallel(tp=2, tp_plan=plan, ddp=ddp)) for ddp in (1, 4)
    )
    reduced = [one for one in replicated.collectives if one.axis == "ddp"]
    assert sum(one.nbytes for one in reduced) == 4 * (64 // 2 * WIDTH + 5 * math.ceil(WIDTH / 2) + 5)
    assert replicated.peak_live_bytes > split.peak_live_bytes


@pytest.mark.parametrize("name", with_wide(CASES, PLAIN))
def test_bytes_and_collectives_are_those_of_real_ranks(measured, name):
    options, make = CASES[name]
    for rank in some_ranks(Parallel(**options).ranks):
        assert_like_real(traced(options, make, rank, name), measured[rank][name])


def test_divided_experts_compute_what_whole_ones_do(measured):
    assert all(difference < 1e-5 for rank in measured for difference in rank["divided"])


def own_shards():
    """A model whose own code spreads it, as it would on GPUs."""
    torch.distributed.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_a_model_that_is_spread_by_its_own_code_is_taken_as_it_is():
    own = traced({"own": 4}, own_shards)
    ours = traced({"ddp": 2, "fsdp": 2})
    assert own.breakdown == ours.breakdown
    assert [one[:4] for one in own.collectives] == [one[:4] for one in ours.collectives]
    assert {one.axis for one in own.collectives} == {"2x1", "2x2"}
    with pytest.raises(UsageError, match="the model is a factory"):
        traced({"own": 4}, Net())


def test_gathered_weights_are_waited_for_where_they_are_unpacked():
    trace = traced({"fsdp": 2})
    unpacked = [place for place, op in enumerate(trace.operators) if op.name == "fsdp::split_with_sizes_copy"]
    assert [one.before for one in trace.collectives if one.kind == "all_gather"] == unpacked


def test_shards_in_host_memory_take_nothing_of_the_gpu_but_what_is_gathered():
    there, on_host = (traced({"fsdp": 2, "cpu_offload": off}) for off in (False, True))
    kept = ("parameter", "gradient", "optimizer_state")
    assert all(there.breakdown[kind] for kind in ("parameter", "optimizer_state"))
    assert not any(on_host.breakdown[kind] for kind in kept)
    assert 0 < on_host.peak_live_bytes < there.peak_live_bytes
    assert [one[:2] for one in on_host.collectives if one.kind != "all_reduce"] == [
        one[:2] for one in there.collectives if one.kind != "all_reduce"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": 2, "wrap": ("Nope",)}, "no module of class Nope; it has Block, ModuleList, Net"),
        ({"tp": 2}, "no plan of its own"),
        ({"tp": 2, "tp_plan": {"*.nope": "colwise"}}, "'\\*.nope' fits no module"),
        ({"tp": 2, "tp_plan": {"first": "diagonal"}}, "unknown style diagonal; known: colwise, rowwise"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_with_what_it_has(options, message):
    with pytest.raises(UsageError, match=message):
        traced(options)


def attends_masked(net, x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
    heads = net.line(x).unflatten(2, (4, -1)).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads, mask).flatten(2)


def masked():
    return Computes(attends_masked, line=nn.Linear(ATTENTION_WIDTH, ATTENTION_WIDTH))


def listed():
    experts = nn.ModuleList(nn.Linear(ATTENTION_WIDTH, ATTENTION_WIDTH) for _ in range(4))
    return Computes(lambda net, x: sum(expert(x) for expert in net.experts), experts=experts)


def divided(make, length=LENGTH, **options):
    return trace_step(
        make, torch.empty(2, length, ATTENTION_WIDTH, device="meta"), settings=Training(), parallel=Parallel(**options)
    )


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (attending, {"length": 250}, "a sequence of 250 does not divide into 8 parts .two parts for"),
        (attending, {"length": 250, "cp_load_balance": False}, "does not divide into 4 parts .a part for each rank"),
        (masked, {}, "attention with a mask does not run over several ranks"),
        (not_causal, {}, "are of causal attention only; give cp_load_balance=false"),
        (attending, {"length": 64}, "row sums of 32 queries or a multiple, and a part of the sequence has 8"),
        (attending, {"length": 192, "cp_load_balance": False}, "has 48; .* a multiple of 128 tokens"),
        (lambda: nn.Linear(ATTENTION_WIDTH, 3), {}, "does not call torch.nn.functional.scaled_dot_product_attention"),
    ],
)
def test_what_does_not_run_over_parts_of_a_sequence_is_refused(make, options, message):
    with pytest.raises(UsageError, match=f"parallel: cp.*{message}"):
        divided(make, cp=4, **options)


def test_an_input_without_a_sequence_is_refused():
    with pytest.raises(UsageError, match="cp: no input has a sequence in its second dimension"):
        trace_step(
            lambda: nn.Linear(ATTENTION_WIDTH, 3), torch.empty(ATTENTION_WIDTH, device="meta"), parallel=Parallel(cp=2)
        )


@pytest.mark.parametrize(
    ("make", "ranks", "message"),
    [
        (mixing, 3, "=3 does not divide the 8 experts of .*; ep can be 2, 4, 8"),
        (listed, 4, "experts .ModuleList. is not divided; what is: a module named `experts` whose parameters"),
        (attending, 4, "the model has no experts of a known kind"),
    ],
)
def test_experts_that_are_not_divided_are_refused(make, ranks, message):
    with pytest.raises(UsageError, match=f"parallel: ep.*{message}"):
        divided(make, fsdp=ranks, ep=ranks)


def test_what_ranks_talk_about_has_a_group_for_each_kind():
    layout = Parallel(ddp=2, fsdp=4, cp=2, tp=2, ep=8)
    dense = {"ddp": (2, 16), "fsdp": (8, 2), "tp": (2, 1), "cp": (2, 2)}
    assert layout.groups == {**dense, "eddp": (2, 16), "ep": (8, 1), "efsdp": (2, 8)}
    assert Parallel(cp=8).groups == {"fsdp": (8, 1)}  # all ranks talk in one group, whatever about
