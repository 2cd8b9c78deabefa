"""One rank of `fully_shard` in a trace, against real ranks that talk over gloo: bytes and collectives are the same."""

import math

import pytest
import torch
from rank_nets import LENGTH, Attending, Grouped, Mixture, efficient_attention_on_cpu, routed
from rank_nets import WIDTH as ATTENTION_WIDTH
from rank_watch import loss_of, watched_training
from real_ranks import assert_like_real, chosen_cases, mesh_of, run_ranks, with_wide
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from uneven_net import BATCH, WIDTH, Net

from conf.errors import UsageError
from featurize.job.layout import Parallel
from featurize.trace.tracer import trace_step
from featurize.training.experts import expert_mesh
from featurize.training.sharded_rank import part_of_sequence, ring_attention, sequence_mesh
from featurize.training.sharding import shard
from featurize.training.training_step import Training
from tests.featurize.small_nets import Computes

pytestmark = pytest.mark.needs_mode("fsdp")

PLAN = {"first": "colwise_gather_output", "blocks.*.wide": "colwise", "blocks.*.narrow": "rowwise"}
# Of `Parallel`, and whether blocks are computed again.
CASES = {
    "two": ({"fsdp": 2}, False),
    "three": ({"fsdp": 3}, False),
    "kept": ({"fsdp": 2, "reshard_after_forward": False}, False),
    "halves": ({"fsdp": 3, "param_dtype": "bf16", "reduce_dtype": "fp32"}, False),
    "checkpointed": ({"fsdp": 2}, True),
    "hybrid": ({"ddp": 2, "fsdp": 2}, False),
    "hybrid halves": ({"ddp": 2, "fsdp": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"}, True),
    "part": ({"fsdp": 4, "reshard_after_forward": 2}, False),
    "wrapped": ({"fsdp": 2, "wrap": ("Linear",)}, False),
    "split": ({"tp": 2, "tp_plan": PLAN}, False),
    "split in three": ({"tp": 3, "tp_plan": PLAN}, True),
    "split and sharded": ({"fsdp": 2, "tp": 2, "tp_plan": PLAN, "param_dtype": "bf16"}, True),
}
# The same of models whose ranks share a sequence, or the experts of a mixture; and the model.
PARTS = {"blocks.*.part": "colwise_gather_output"}
OF_EXPERTS = {
    "blocks.*.part.experts": "moe_tp_experts",
    "blocks.*.part.experts.rise": "packed_rowwise",
    "blocks.*.part.experts.fall": "colwise",
}
ROUTERS = {"blocks.*.part.router": "colwise_gather_output"}
PARTS_CASES = {
    "sequence": ({"cp": 4}, Attending),
    "rotated": ({"cp": 4, "cp_rotate": "alltoall"}, Attending),
    "sequence and shards": ({"fsdp": 2, "cp": 2}, Attending),
    "sequence and replicas": ({"ddp": 2, "cp": 2}, Attending),
    "sequence and split": ({"cp": 2, "tp": 2, "tp_plan": PARTS}, Attending),
    "not causal": ({"cp": 4, "cp_load_balance": False}, lambda: Attending(causal=False)),
    "experts": ({"fsdp": 4, "ep": 2}, lambda: Attending(forward_part=Mixture)),
    "whole experts": ({"fsdp": 4, "ep": 4}, lambda: Attending(forward_part=Mixture)),
    "fewer experts than shards": ({"fsdp": 4, "ep": 2}, lambda: Attending(forward_part=lambda: Mixture(experts=2))),
    "grouped experts": ({"fsdp": 4, "ep": 2}, lambda: Attending(forward_part=lambda: Mixture(Grouped))),
    "experts with places": ({"fsdp": 4, "ep": 2}, lambda: Attending(forward_part=routed)),
    "replicas of experts": ({"ddp": 2, "fsdp": 2, "ep": 2}, lambda: Attending(forward_part=Mixture)),
    "split experts": ({"tp": 4, "tp_plan": OF_EXPERTS}, lambda: Attending(forward_part=Mixture)),
    "split experts and shards": ({"fsdp": 2, "tp": 2, "tp_plan": OF_EXPERTS}, lambda: Attending(forward_part=Mixture)),
    "split and experts": ({"tp": 4, "ep": 4, "tp_plan": ROUTERS}, lambda: Attending(forward_part=Mixture)),
    "split, shards and experts": (
        {"fsdp": 2, "tp": 2, "ep": 4, "tp_plan": ROUTERS},
        lambda: Attending(forward_part=Mixture),
    ),
    "split and shards of experts": (
        {"fsdp": 2, "tp": 2, "ep": 2, "tp_plan": ROUTERS | OF_EXPERTS},
        lambda: Attending(forward_part=Mixture),
    ),
    "sequence and experts": ({"fsdp": 2, "cp": 2, "ep": 4}, lambda: Attending(forward_part=Mixture)),
}
PLAIN_PARTS = (  # others have all that these have, and all their dimensions together
    "sequence",
    "rotated",
    "experts",
    "whole experts",
    "split experts",
    "split experts and shards",
    "split and experts",
    "split, shards and experts",
)
CLIPPED = ("sequence and shards", "replicas of experts", "split and shards of experts")


SEQUENCES = (2, LENGTH, ATTENTION_WIDTH)


def training(name=None):
    """How a case trains: how the optimizer and the norm treat the shards is asked of a few only, as it takes PyTorch
    longer than all else."""
    if name in PARTS_CASES and name not in CLIPPED:
        return Training(optimizer="sgd", implementation="foreach")
    return Training(optimizer="momentum", implementation="foreach", clip_norm=1.0)


def train_real(rank, names):
    """One of four real processes, which trains the cases in which it takes part."""
    measured = {}
    for name in [name for name in names if name in CASES]:
        options, again = CASES[name]
        parallel = Parallel(**options)
        mesh = mesh_of(parallel)
        if rank < parallel.ranks:
            model = shard(Net(again), parallel, mesh)
            measured[name] = watched_training(model, torch.randn(BATCH, WIDTH), training())
    with efficient_attention_on_cpu():
        for name in [name for name in names if name in PARTS_CASES]:
            options, make = PARTS_CASES[name]
            measured[name] = train_part(make, Parallel(**options), training(name))
    return measured


def train_part(make, parallel, settings):
    mesh = init_device_mesh("cpu", tuple(parallel.axes.values()), mesh_dim_names=tuple(parallel.axes))
    experts = expert_mesh(mesh, parallel) if parallel.degrees.ep > 1 else None
    batch = torch.randn(SEQUENCES)
    model = shard(make(), parallel, mesh, experts)
    if parallel.degrees.cp == 1:
        return watched_training(model, batch, settings)
    sequence = sequence_mesh(mesh, parallel)
    (batch,), _ = part_of_sequence((batch,), None, sequence, parallel)
    with ring_attention(sequence, parallel):
        return watched_training(model, batch, settings)


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    return run_ranks(train_real, tmp_path_factory.mktemp("ranks"), 4, chosen_cases(request, [*CASES, *PARTS_CASES]))


def traced(options, make=Net, rank=0, shape=(BATCH, WIDTH), name=None):
    return trace_step(
        make,
        torch.empty(shape, device="meta"),
        torch.empty((), device="meta"),
        loss_of,
        settings=training(name),
        training_loop=False,
        rank=rank,
        parallel=Parallel(**options),
    )


def words():
    layers = {"words": nn.Embedding(64, WIDTH), "last": nn.Linear(WIDTH, 5)}
    return Computes(lambda net, ids: net.last(net.words(ids)), **layers)


def test_replicas_reduce_a_ranks_part_of_all_gradients_once_a_step():
    ids = torch.empty(BATCH, 3, dtype=torch.long, device="meta")
    rows = Parallel(tp=2, tp_plan={"words": "embedding_rowwise"})
    whole, part = (trace_step(words, ids, settings=training(), parallel=layout) for layout in (None, rows))
    assert whole.parameter_bytes - part.parameter_bytes == 64 * WIDTH * 4 / 2
    plan = {"words": "embedding_rowwise", "last": "rowwise_split_input"}
    settings = Training(optimizer="sgd", accumulation=3)
    split, replicated = (
        trace_step(words, ids, settings=settings, parallel=Parallel(tp=2, tp_plan=plan, ddp=ddp)) for ddp in (1, 4)
    )
    reduced = [one for one in replicated.collectives if one.axis == "ddp"]
    assert sum(one.nbytes for one in reduced) == 4 * (64 // 2 * WIDTH + 5 * math.ceil(WIDTH / 2) + 5)
    assert replicated.peak_live_bytes > split.peak_live_bytes


@pytest.mark.parametrize(
    "name", with_wide(CASES, ("two", "halves", "checkpointed", "hybrid", "split", "split in three"))
)
def test_bytes_and_collectives_are_those_of_real_ranks(measured, name):
    options, again = CASES[name]
    for rank in range(Parallel(**options).ranks):
        assert_like_real(traced(options, lambda: Net(again), rank), measured[rank][name])


@pytest.mark.parametrize("name", with_wide(PARTS_CASES, PLAIN_PARTS))
def test_bytes_and_collectives_of_shared_sequences_and_experts_are_those_of_real_ranks(measured, name):
    options, make = PARTS_CASES[name]
    for rank in (0, 3):
        assert_like_real(traced(options, make, rank, SEQUENCES, name), measured[rank][name])


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
