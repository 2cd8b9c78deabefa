"""A trace of one rank leaves the process as it was, whose own ranks may talk over groups of their own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from featurize.job.layout import Parallel
from featurize.trace.tracer import TraceError, trace_step
from tests.featurize.small_nets import stops_in_backward

pytestmark = pytest.mark.needs_mode("fsdp")

SHARDS = Parallel(fsdp=2)


@pytest.fixture
def own_groups():
    """Process groups of this process: the default one and another."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


def traced(model=lambda: nn.Linear(4, 4)):
    return trace_step(model, torch.empty(2, 4, device="meta"), parallel=SHARDS)


def fails():
    with pytest.raises(TraceError, match="in the middle"):
        traced(lambda: nn.Sequential(stops_in_backward(4)))


@pytest.mark.parametrize("trace", [traced, fails])
def test_groups_of_the_caller_work_after_a_trace(own_groups, trace):
    mesh = init_device_mesh("cpu", (1,))
    trace()
    assert dist.get_process_group_ranks(own_groups) == [0] and dist.get_backend(own_groups) == "gloo"
    for group in (dist.group.WORLD, own_groups, dist.new_group([0])):
        dist.all_reduce(torch.ones(3), group=group)
        assert functional.all_reduce(torch.ones(3), "sum", group).tolist() == [1, 1, 1]
    net = fully_shard(nn.Linear(4, 2), mesh=mesh)
    net(torch.ones(2, 4)).sum().backward()


def test_the_first_group_after_a_trace_is_named_as_without_one():
    traced()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.group_name == "0"
    dist.destroy_process_group()


def test_traces_in_several_threads_are_as_those_in_one():
    widths = [8, 16, 24, 32] * 2

    def peak(width):
        return traced(lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))).peak_live_bytes

    alone = [peak(width) for width in widths]
    with ThreadPoolExecutor(len(widths)) as pool:
        assert list(pool.map(peak, widths)) == alone
    assert not dist.is_initialized()
