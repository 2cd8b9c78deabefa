"""Real processes that train together over gloo, of which libraries are imported once. Start reading at `run_ranks`."""

import json
import multiprocessing

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh


def chosen_cases(request, names):
    """Return those of the names whose tests this run has: real ranks train no others."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = {item.callspec.params.get("name") for item in tests}
    return [name for name in names if name in chosen]


def with_wide(names, combined):
    """Return the names as cases of a test; those that only combine what others show are `wide`."""
    return [pytest.param(name, marks=pytest.mark.wide) if name in combined else name for name in names]


def some_ranks(ranks):
    """Return all of three ranks, else the first and the last, which differ in their place along each axis of a mesh."""
    return range(3) if ranks == 3 else (0, ranks - 1)


# What the ranks need, imported once a session.
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "featurize.trace.tracer", "featurize.training.sharding"]


def run_ranks(train, folder, ranks, *arguments):
    """Call `train(rank, *arguments)` in each of so many processes of one process group, and return what each gives, by
    rank. The ranks are copies of one process, taken before PyTorch starts a thread.

    Args:
        train: A function of a module, which gives what JSON can hold.
        folder: An empty one.
        ranks: Their number.
        arguments: What the ranks take besides.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    given = (train, folder, ranks, arguments)
    torch.multiprocessing.start_processes(_one_rank, args=given, nprocs=ranks, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _one_rank(rank, train, folder, ranks, arguments):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    (folder / f"{rank}.json").write_text(json.dumps(train(rank, *arguments)))
    torch.distributed.destroy_process_group()


def mesh_of(parallel):
    """Return the mesh of a layout, which may have fewer ranks than there are processes."""
    places = torch.arange(parallel.ranks).view(*parallel.axes.values())
    return DeviceMesh("cpu", places, mesh_dim_names=tuple(parallel.axes))


def train_cases(rank, names, layout_of, train):
    """Return what `train(name, parallel, mesh)` gives of each case in which a rank takes part, by its name.

    Args:
        rank: Of all processes; the layout of a case may have fewer.
        names: Of the cases.
        layout_of: Gives the layout of a case by its name.
        train: Trains a case.
    """
    measured = {}
    for name in names:
        parallel = layout_of(name)
        mesh = mesh_of(parallel)  # which all processes make together
        if rank < parallel.ranks:
            measured[name] = train(name, parallel, mesh)
    return measured


def assert_like_real(trace, real):
    """Assert that a trace sends what a real rank sent, as `rank_watch.watched_steps` gives it, and has its peak."""
    assert [[one.kind, one.nbytes] for one in trace.collectives] == real["sent"]
    assert trace.peak_live_bytes == real["peak"]
