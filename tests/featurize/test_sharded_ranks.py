"""One rank of `fully_shard` in a trace, against real ranks that talk over gloo: bytes and collectives are the same."""

import itertools
import logging
import sys

import pytest
import torch
from rank_watch import watched_steps
from real_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from conf.errors import UsageError
from featurize.parallel.layout import Parallel
from featurize.parallel.sharding import shard
from featurize.trace import TraceError, trace_step
from featurize.training import Training, TrainingStep

WIDTH, HIDDEN, BATCH = 67, 132, 24  # ranks divide what a plan splits; what is sharded is uneven
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


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return checkpoint(self.change, x, use_reentrant=False) if self.again else self.change(x)

    def change(self, x):
        return self.narrow(torch.relu(self.wide(x)))


class Net(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(again) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.frozen(x))


def loss_of(output, _target):
    return output.square().sum()


def training():
    return Training(optimizer="momentum", implementation="foreach", clip_norm=1.0)


def train_real(rank):
    """One of four real processes, which trains the cases in which it takes part."""
    measured = {}
    for name, (options, again) in CASES.items():
        parallel = Parallel(**options)
        places = torch.arange(parallel.ranks).view(*parallel.axes.values())
        mesh = DeviceMesh("cpu", places, mesh_dim_names=tuple(parallel.axes))
        if rank < parallel.ranks:
            measured[name] = train(shard(Net(again), parallel, mesh))
    return measured


def train(model):
    step = TrainingStep(model, training(), "cpu", loss=loss_of)
    batch, target = torch.randn(BATCH, WIDTH), torch.zeros(())
    return watched_steps(step.model, (batch, target), lambda: step((batch,), target))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run_ranks(train_real, tmp_path_factory.mktemp("ranks"), 4)


def traced(options, again=False, rank=0):
    inputs, target = torch.empty(BATCH, WIDTH, device="meta"), torch.empty((), device="meta")
    return trace_step(
        lambda: Net(again), inputs, target, loss_of, settings=training(), training_loop=False, rank=rank,
        parallel=Parallel(**options),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["split", "split and sharded"])
@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"ema": True}], ids=["scaled", "averaged"])
def test_modules_that_are_not_split_train_beside_those_that_are(name, settings):
    options, _ = CASES[name]
    trace = trace_step(
        Net, torch.empty(BATCH, WIDTH, device="meta"), settings=Training(**settings), parallel=Parallel(**options)
    )
    assert {one.kind for one in trace.collectives} >= {"all_reduce"}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, ids):
        return self.last(self.words(ids))


def test_a_gradient_that_each_rank_has_whole_updates_its_part_of_a_table_of_words():
    def trace(**options):
        ids = torch.empty(BATCH, 3, dtype=torch.long, device="meta")
        return trace_step(Words, ids, settings=training(), parallel=Parallel(**options) if options else None)

    split = trace(tp=2, tp_plan={"words": "embedding_rowwise"})
    assert trace().parameter_bytes - split.parameter_bytes == 64 * WIDTH * 4 / 2


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_collectives_are_those_of_real_ranks(measured, name):
    options, again = CASES[name]
    for rank in range(Parallel(**options).ranks):
        trace = traced(options, again, rank)
        real = measured[rank][name]
        assert [[one.kind, one.nbytes] for one in trace.collectives] == real["sent"]
        assert trace.peak_live_bytes == real["peak"]


def own_shards():
    """A model whose own code spreads it, as it would on GPUs."""
    torch.distributed.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_a_model_that_is_spread_by_its_own_code_is_taken_as_it_is():
    inputs, target = torch.empty(BATCH, WIDTH, device="meta"), torch.empty((), device="meta")
    own = trace_step(
        own_shards, inputs, target, loss_of, settings=training(), training_loop=False, parallel=Parallel(own=4)
    )
    ours = traced({"ddp": 2, "fsdp": 2})
    assert own.breakdown == ours.breakdown
    assert [one[:4] for one in own.collectives] == [one[:4] for one in ours.collectives]
    assert {one.axis for one in own.collectives} == {"2x1", "2x2"}
    with pytest.raises(UsageError, match="the model is a factory"):
        trace_step(Net(), inputs, target, loss_of, parallel=Parallel(own=4))


def test_the_callers_process_group_and_hooks_are_left_alone():
    before = sys.excepthook, torch.UntypedStorage.resize_, logging.getLogger("torch.distributed").level
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        hook = sys.excepthook
        traced({"fsdp": 2})
        with pytest.raises(TraceError):
            trace_step(Net, torch.empty(3, 3, device="meta"), loss=loss_of, parallel=Parallel(fsdp=2))
        assert torch.distributed.get_world_size() == 1 and sys.excepthook is hook
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = before[0]
    assert (torch.UntypedStorage.resize_, logging.getLogger("torch.distributed").level) == before[1:]


def test_shards_in_host_memory_take_nothing_of_the_gpu_but_what_is_gathered():
    there, on_host = (traced({"fsdp": 2, "cpu_offload": off}) for off in (False, True))
    kept = ("parameter", "gradient", "optimizer_state")
    assert all(there.breakdown[kind] for kind in ("parameter", "optimizer_state"))
    assert not any(on_host.breakdown[kind] for kind in kept)
    assert 0 < on_host.peak_live_bytes < there.peak_live_bytes
    assert [one[:2] for one in on_host.collectives if one.kind != "all_reduce"] == [
        one[:2] for one in there.collectives if one.kind != "all_reduce"
    ]


def test_the_next_units_parameters_are_gathered_while_one_computes():
    gathers = [one for one in traced({"fsdp": 2}).collectives if one.kind == "all_gather"]
    assert any(one.after < earlier.before < one.before for earlier, one in itertools.pairwise(gathers))
    assert all(one.after <= one.before for one in gathers)


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
