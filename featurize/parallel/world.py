"""A process group without processes, in which a trace plays one rank.

Start reading at `pretended_mesh`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch._C._distributed_c10d import _register_process_group, _set_global_rank
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes

from featurize.parallel.layout import Parallel
from featurize.replacing import replaced

_FAKE = "fake"  # torch's backend that sends nothing (torch/testing/_internal/distributed/fake_pg.py)
_FIRST_NAME = 1 << 30  # names of groups are numbers; those of the caller's own groups are smaller
# What torch.distributed knows of each group, for all of a process (distributed_c10d.py).
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")


@contextlib.contextmanager
def pretended_mesh(parallel: Parallel, rank: int = 0) -> Iterator[DeviceMesh]:
    """The mesh of a job's ranks, as one of them has it; nothing is sent within it.

    Process groups of the caller are out of sight meanwhile, and are back afterwards.

    Args:
        parallel: The job.
        rank: Which of them, from 0.
    """
    # Its import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # A group's start replaces the hook by one that names the rank.
    with _no_groups(), replaced(sys, "excepthook", sys.excepthook):
        distributed_c10d.init_process_group(_FAKE, store=FakeStore(), rank=rank, world_size=parallel.ranks)
        try:
            # The mesh holds a tensor of ranks that it reads: a real one.
            with torch.device("cpu"), _disable_current_modes():
                mesh = init_device_mesh("cpu", tuple(parallel.axes.values()), mesh_dim_names=tuple(parallel.axes))
            _forget_plans()
            yield mesh
        finally:
            _forget_plans()
            distributed_c10d.destroy_process_group()


@contextlib.contextmanager
def _no_groups() -> Iterator[None]:
    """Hide the caller's process groups. What destroys all groups then destroys those of the trace only."""
    names = dict(distributed_c10d._world.pg_names)
    rank = -1 if (group := distributed_c10d._world.default_pg) is None else group.rank()
    with contextlib.ExitStack() as stack:
        for name in _TABLES:
            stack.enter_context(replaced(distributed_c10d, name, {}))
        for name in ("_backend", "_default_pg_init_method", "_group_count"):
            stack.enter_context(replaced(distributed_c10d, name, getattr(distributed_c10d, name)))
        world = distributed_c10d._World()
        stack.enter_context(replaced(distributed_c10d, "_world", world))
        world.group_count = _FIRST_NAME
        try:
            yield
        finally:
            # The table of C++ is emptied with the groups of the trace; functional collectives look there.
            for group, name in names.items():
                _register_process_group(name, group)
            _set_global_rank(rank)


def _forget_plans() -> None:
    """DTensor keeps how it moves tensors by the mesh's shape, whatever the groups and the rank are."""
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()


def axes_of_groups(mesh: DeviceMesh) -> dict[str, str]:
    """Return which dimension of the mesh each of its process groups joins, by the group's name."""
    return {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names or ()}
