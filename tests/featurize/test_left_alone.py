"""A trace leaves the process as it was: what it replaces meanwhile and groups of the caller, also after a failure."""

import contextlib
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
import torch._dynamo  # before a trace imports it: it wraps torch.manual_seed for good
import torch.distributed as dist
from rank_nets import LENGTH, WIDTH as ATTENTION_WIDTH, attending
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _fully_shard, fully_shard
from torch.nn.modules import module as hooks

from conf.errors import UsageError
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.trace.tracer import TraceError, trace_step
from tests.featurize.small_nets import Computes, linear_then

OWNERS = (
    *(torch, torch._VF, torch.Tensor, torch.UntypedStorage, nn.functional, nn.Module, hooks, dist, sys),
    *(_fully_shard._fully_shard, _fully_shard._fsdp_init, _fully_shard._fsdp_param_group),
)

HOOKS = [name for name in vars(hooks) if name.startswith("_global_") and hasattr(getattr(hooks, name), "__len__")]

LOGGERS = ("torch.distributed", "torch.distributed.pipelining")

QUIET = {"_C", "last_exc", "last_type", "last_value", "last_traceback", "modules"}  # which change by themselves


def recurrent():
    """A recurrent layer whose length is read from a tensor that it makes."""
    return Computes(
        lambda net, x: net.head(net.layer(x)[0][: int(torch.tensor([2]).sum())]),
        layer=nn.LSTM(4, 4),
        head=nn.Linear(4, 4),
    )


def failing():
    """A linear layer whose backward pass fails."""

    def stop(*_):
        raise RuntimeError("in the middle")

    layer = linear()
    layer.register_full_backward_hook(stop)
    return layer


def trace(model, shape=(2, 4), precision="fp32", **layout):
    parallel = Parallel(**layout) if layout else None
    settings = Training(optimizer="momentum", precision=precision)
    return trace_step(model, torch.empty(shape, device="meta"), None, sum_of, settings=settings, parallel=parallel)


def sum_of(output, _):
    return output.float().sum()


def linear():
    return nn.Linear(4, 4)


TRACES = {
    "autocast": lambda: trace(linear, precision="bf16"),
    "recurrent": lambda: trace(recurrent, (3, 2, 4)),
    "failing": lambda: trace(failing),
    "unbuilt": lambda: trace(lambda: {}["width"]),
    "reading": lambda: trace(lambda: linear_then(lambda y: y * y.sum().item(), 4, 4)),
    "stage 3": lambda: trace(linear, ddp=2, zero=3),
    "replicas": lambda: trace(linear, ddp=2),
    "shards": lambda: trace(linear, fsdp=2),
    "failing shards": lambda: trace(failing, fsdp=2),
    "sequence": lambda: trace(attending, (2, LENGTH, ATTENTION_WIDTH), cp=2),
    "no sequence": lambda: trace(linear, cp=2),
}

FAIL = ("failing", "unbuilt", "reading", "failing shards", "no sequence")


def state():
    replaceable = {
        (owner.__name__, name): value for owner in OWNERS for name, value in vars(owner).items() if name not in QUIET
    }
    levels = [logging.getLogger(name).level for name in LOGGERS]
    return replaceable, [len(getattr(hooks, name)) for name in HOOKS], levels, sys.excepthook


@pytest.mark.needs_mode("fsdp")
@pytest.mark.parametrize("name", TRACES)
def test_what_a_trace_replaces_is_back_after_it(name, monkeypatch):
    for logger in LOGGERS:
        monkeypatch.setattr(logging.getLogger(logger), "level", 17)  # whatever an earlier trace has left there
    before, *others = state()
    with pytest.raises((TraceError, UsageError)) if name in FAIL else contextlib.nullcontext():
        TRACES[name]()
    after, *others_after = state()
    assert [key for key, value in before.items() if after.get(key) is not value] == []
    added = [key for key in after.keys() - before.keys() if not isinstance(after[key], ModuleType)]
    assert added == [] and "matmul" not in vars(torch.Tensor)
    assert others_after == others and not dist.is_initialized()


@pytest.mark.needs_mode("fsdp")
@pytest.mark.parametrize("name", ["shards", "failing shards"])
def test_groups_of_the_caller_work_after_a_trace(own_groups, name):
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(TraceError) if name in FAIL else contextlib.nullcontext():
        TRACES[name]()
    assert dist.get_process_group_ranks(own_groups) == [0] and dist.get_backend(own_groups) == "gloo"
    for group in (dist.group.WORLD, own_groups, dist.new_group([0])):
        dist.all_reduce(torch.ones(3), group=group)
        assert functional.all_reduce(torch.ones(3), "sum", group).tolist() == [1, 1, 1]
    net = fully_shard(nn.Linear(4, 2), mesh=mesh)
    net(torch.ones(2, 4)).sum().backward()


@pytest.mark.needs_mode("fsdp")
def test_traces_in_several_threads_are_as_those_in_one():
    widths = [8, 16, 24, 32] * 2

    def peak(width):
        return trace(lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)), fsdp=2).peak_live_bytes

    alone = [peak(width) for width in widths]
    with ThreadPoolExecutor(len(widths)) as pool:
        assert list(pool.map(peak, widths)) == alone
    assert not dist.is_initialized()
