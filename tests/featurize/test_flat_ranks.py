"""A rank of `FullyShardedDataParallel` in a trace, against real ones over gloo: bytes and collectives are the same."""

from functools import partial

import pytest
import torch
from rank_watch import loss_of, watched_training
from real_ranks import assert_like_real, some_ranks, train_cases, with_wide
from torch import nn
from uneven_net import BATCH, WIDTH, Net

from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.trace.tracer import TraceError, trace_step
from featurize.training.sharding import shard

pytestmark = pytest.mark.needs_mode("fsdp")


def adapted():
    """A frozen net whose blocks have a small part that trains beside, as with LoRA."""
    net = Net().requires_grad_(False)
    for block in net.blocks:
        block.wide.bias.requires_grad_(True)
    return nn.Sequential(net)


HALVES = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
# Of `Parallel`, of `Training`, and the model.
CASES = {
    "two": ({"fsdp": 2}, {}, Net),
    "three": ({"fsdp": 3}, {}, Net),
    "whole flat parameters": ({"fsdp": 2, "use_orig_params": False}, {}, lambda: Net().requires_grad_(True)),
    "kept": ({"fsdp": 2, "reshard_after_forward": False}, {}, Net),
    "halves": ({"fsdp": 3, **HALVES}, {}, Net),
    "reduced in halves": ({"fsdp": 2, "param_dtype": "bf16"}, {}, Net),
    "true halves": ({"fsdp": 2}, {"precision": "bf16-true"}, Net),
    "kept halves": ({"fsdp": 2, "reshard_after_forward": False, **HALVES}, {}, Net),
    "checkpointed": ({"fsdp": 2}, {}, lambda: Net(again=True)),
    "gathered after": ({"fsdp": 2, "backward_prefetch": "post"}, {}, Net),
    "not ahead": ({"fsdp": 2, "backward_prefetch": "none"}, {}, Net),
    "no limit": ({"fsdp": 2, "limit_all_gathers": False}, {}, Net),
    "one unit each": ({"fsdp": 2, "wrap": ("Linear",)}, {}, Net),
    "accumulated": ({"fsdp": 2}, {"accumulation": 3}, Net),
    "accumulated apart": ({"fsdp": 2, "no_sync": True}, {"accumulation": 3}, Net),
    "accumulated halves": ({"fsdp": 3, "no_sync": True, **HALVES}, {"accumulation": 2}, Net),
    "kept apart": ({"fsdp": 2, "no_sync": True, "reshard_after_forward": False}, {"accumulation": 2}, Net),
    "adapted": ({"fsdp": 2}, {"optimizer": "momentum"}, adapted),
    "adapted apart": ({"fsdp": 3, "no_sync": True}, {"accumulation": 2}, adapted),
    "clipped": ({"fsdp": 2}, {"clip_norm": 1.0}, Net),
    "hybrid": ({"ddp": 2, "fsdp": 2}, {}, Net),
    "hybrid halves": ({"ddp": 2, "fsdp": 2, "reshard_after_forward": False, **HALVES}, {}, lambda: Net(again=True)),
}


def layout_of(name):
    return Parallel(fsdp_version=1, **CASES[name][0])


def training_of(name):
    return Training(**{"optimizer": "sgd", "implementation": "foreach", **CASES[name][1]})


def train_real(rank, names):
    """One of four real processes."""
    return train_cases(rank, names, layout_of, train)


def train(name, parallel, mesh):
    sharded = partial(shard, parallel=parallel, mesh=mesh)
    return watched_training(CASES[name][2](), torch.randn(BATCH, WIDTH), training_of(name), sharded)


def traced(name, rank=0):
    return trace_step(
        CASES[name][2],
        torch.empty(BATCH, WIDTH, device="meta"),
        torch.empty((), device="meta"),
        loss_of,
        settings=training_of(name),
        training_loop=False,
        parallel=layout_of(name),
        rank=rank,
    )


@pytest.mark.parametrize(
    "name",
    with_wide(
        CASES,
        (
            *("two", "three", "kept", "halves", "true halves", "kept halves", "checkpointed", "not ahead"),
            *("accumulated", "accumulated apart", "kept apart", "adapted", "hybrid"),
        ),
    ),
)
def test_bytes_and_collectives_are_those_of_real_flat_ranks(measured, name):
    for rank in some_ranks(layout_of(name).ranks):
        assert_like_real(traced(name, rank), measured[rank][name])


def mixed():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("model", "settings", "problem"),
    [
        (adapted, {"use_orig_params": False}, "does not support wrapping such modules when use_orig_params=False"),
        (mixed, {}, "uniform dtype"),
    ],
)
def test_parameters_that_do_not_go_flat_together_are_refused_as_torch_refuses_them(model, settings, problem):
    layout = Parallel(fsdp=2, fsdp_version=1, **settings)
    with pytest.raises(TraceError, match=problem):
        trace_step(model, torch.empty(BATCH, WIDTH, device="meta"), parallel=layout)
