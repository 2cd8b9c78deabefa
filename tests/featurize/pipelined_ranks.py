"""Real ranks that run torch.distributed.pipelining over gloo, with stages as a user writes them.

Start reading at `CASES`; `train_real` runs them all.
"""

import contextlib
from functools import partial
from typing import NamedTuple

import torch
from rank_nets import LENGTH, WIDTH as ATTENTION_WIDTH, AttendingBlock, Mixture, efficient_attention_on_cpu
from rank_watch import reduced_buckets, watched_steps
from real_ranks import train_cases
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from uneven_net import BATCH, WIDTH, Block

from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.timing.pipeline_orders import SCHEDULES
from featurize.training.sharded_rank import part_of_sequence, ring_attention, sequence_mesh
from featurize.training.sharding import expert_mesh, shard_units, split_modules
from featurize.training.training_step import TrainingStep

BLOCKS, CLASSES = 6, 5
PLAN = {"blocks.*.wide": "colwise", "blocks.*.narrow": "rowwise"}
HALVES = {"param_dtype": "bf16", "reduce_dtype": "fp32"}


class Net(nn.Module):
    """[N, ..., width] -> [N, ..., CLASSES]: a stage of a pipeline, or all of them."""

    def __init__(self, make_block=Block, blocks=BLOCKS, width=WIDTH, first=True, last=True):
        super().__init__()
        if first:
            self.first = nn.Linear(width, width)
            self.position = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(make_block() for _ in range(blocks))
        if last:
            self.frozen = nn.Linear(width, width).requires_grad_(False)
            self.last = nn.Linear(width, CLASSES)
        self.ends = first, last

    def forward(self, x):
        first, last = self.ends
        if first:
            x = self.first(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.last(self.frozen(x)) if last else x


class Case(NamedTuple):
    """options: of `Parallel`; blocks: of each stage; shape: of a batch."""

    options: dict
    blocks: tuple
    make_block: type = Block
    shape: tuple = (BATCH, WIDTH)

    def net(self, blocks=None, **ends):
        return Net(self.make_block, blocks or sum(self.blocks), self.shape[-1], **ends)


def attending(options, make_block=AttendingBlock):
    return Case(options, (1, 1), make_block, (4, LENGTH, ATTENTION_WIDTH))


CASES = {
    "1f1b": Case({"pp": 2}, (3, 3)),
    "gpipe": Case({"pp": 2, "schedule": "gpipe", "micro_batches": 3}, (3, 3)),
    "three": Case({"pp": 3, "micro_batches": 8}, (2, 2, 2)),
    "uneven": Case(
        {"pp": 3, "micro_batches": 4, "stage_starts": ("blocks.1", "blocks.2"), "drop_outputs": True}, (1, 1, 4)
    ),
    "interleaved": Case({"pp": 2, "schedule": "interleaved"}, (1, 2, 2, 1)),
    "sharded": Case({"pp": 2, "fsdp": 2}, (3, 3)),
    "halves": Case({"pp": 2, "fsdp": 2, "schedule": "gpipe", **HALVES}, (3, 3)),
    "interleaved and sharded": Case({"pp": 2, "fsdp": 2, "schedule": "interleaved", **HALVES}, (1, 2, 2, 1)),
    "split": Case({"pp": 2, "tp": 2, "tp_plan": PLAN}, (3, 3)),
    "replicas": Case({"pp": 2, "ddp": 2, "bucket_cap_mb": 0.1}, (3, 3)),
    "replicas with views": Case({"pp": 2, "ddp": 2, "gradient_as_bucket_view": True, "schedule": "gpipe"}, (3, 3)),
    "interleaved replicas": Case({"pp": 2, "ddp": 2, "schedule": "interleaved"}, (1, 2, 2, 1)),
    "sequence": attending({"pp": 2, "cp": 2}),
    "rotated": attending({"pp": 2, "cp": 2, "cp_rotate": "alltoall"}),
    "experts": attending({"pp": 2, "fsdp": 2, "ep": 2}, partial(AttendingBlock, Mixture)),
    "sequence and experts": attending(
        {"pp": 2, "cp": 2, "ep": 2, "schedule": "gpipe"}, partial(AttendingBlock, Mixture)
    ),
}


def loss_of(output, target):
    return (output - target).square().mean()


def training(parallel):
    """How a layout trains: how the optimizer treats shards is asked in `test_sharded_ranks`, as it takes PyTorch longer
    than all else."""
    has_shards = parallel.of_stage > parallel.degrees.ddp
    return Training(optimizer="sgd" if has_shards else "momentum", implementation="foreach")


def layout_of(name):
    return Parallel(**CASES[name].options)


def train_real(rank, names):
    """One of four real processes."""
    return train_cases(rank, names, layout_of, partial(train, rank))


def train(rank, name, parallel, mesh):
    """Steps of one rank of a case."""
    case = CASES[name]
    place = rank // parallel.of_stage  # among the ranks of `pp`
    with contextlib.ExitStack() as entered:
        batch, target = torch.randn(case.shape), torch.randn(*case.shape[:-1], CLASSES)
        if parallel.degrees.cp > 1:
            sequence = sequence_mesh(mesh, parallel)
            (batch,), target = part_of_sequence((batch,), target, sequence, parallel)
            entered.enter_context(efficient_attention_on_cpu())
            entered.enter_context(ring_attention(sequence, parallel))
        elif case.make_block is not Block:
            entered.enter_context(efficient_attention_on_cpu())
        numbers = range(place, parallel.stages, parallel.degrees.pp)
        models = nn.ModuleList(case.net(case.blocks[n], first=n == 0, last=n == parallel.stages - 1) for n in numbers)
        experts = expert_mesh(mesh, parallel) if parallel.degrees.ep > 1 else None
        for model in models:
            mixtures = split_modules(model, parallel, mesh, experts)
            shard_units(model, parallel, mesh, model.blocks, experts, mixtures)
        held = [*([batch] if place == 0 else []), *([target] if place == parallel.degrees.pp - 1 else [])]

        def steps(watch):
            wrapped = list(models)
            if parallel.degrees.ddp > 1:
                wrapped = [reduced_buckets(replicated(model, parallel, mesh), watch) for model in models]
            return one_step(models, wrapped, parallel, mesh, place, batch, target)

        # Of replicas, what says how the buckets were made anew is sent in the second step alone.
        return watched_steps(models, held, steps=3 if parallel.degrees.ddp > 1 else 2, made_by=steps)


def replicated(model, parallel, mesh):
    return DistributedDataParallel(
        model,
        process_group=mesh.get_group("ddp"),
        bucket_cap_mb=parallel.ddp.bucket_cap_mb,
        gradient_as_bucket_view=parallel.ddp.gradient_as_bucket_view,
    )


def stage_of(model, number, parallel, mesh, shape):
    """PyTorch's stage of so many; `shape` is that of a micro-batch."""
    dtype = torch.bfloat16 if parallel.fsdp.param_dtype else torch.float32
    first, last = number == 0, number == parallel.stages - 1
    given = torch.empty(shape, device="meta", requires_grad=not first, dtype=torch.float32 if first else dtype)
    made = torch.empty(*shape[:-1], CLASSES if last else shape[-1], device="meta", requires_grad=True, dtype=dtype)
    # With tp, PyTorch's own search for shapes leaves a result that nobody waits for, and that stays; with ddp, it makes
    # the reducer count its parameters twice.
    searched = parallel.of_stage == 1 or (parallel.degrees.fsdp == parallel.of_stage and parallel.degrees.ep == 1)
    return PipelineStage(
        model,
        number,
        parallel.stages,
        torch.device("cpu"),
        group=mesh.get_group("pp"),
        **({} if searched else {"input_args": given, "output_args": made}),
    )


def one_step(models, wrapped, parallel, mesh, place, batch, target):
    shape = len(batch) // parallel.chunks, *batch.shape[1:]
    numbers = range(place, parallel.stages, parallel.degrees.pp)
    stages = [stage_of(model, n, parallel, mesh, shape) for n, model in zip(numbers, wrapped, strict=True)]
    run = SCHEDULES[parallel.order](stages if parallel.parts > 1 else stages[0], parallel.chunks, loss_fn=loss_of)
    step = TrainingStep(models, training(parallel), "cpu")
    first, last = place == 0, place == parallel.degrees.pp - 1

    def one():
        step.zero_grad()
        run.step(
            *([batch] if first else []),
            target=target if last else None,
            losses=[],
            return_outputs=not parallel.pipeline.drop_outputs,
        )
        step.update()

    return one
