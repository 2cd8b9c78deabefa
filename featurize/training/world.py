"""A process group without processes, in which a trace plays one rank.

Start reading at `pretended_mesh`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute
from torch.utils._python_dispatch import _disable_current_modes

from featurize.job.layout import Parallel
from featurize.operators.replacing import replaced

_FAKE = "fake"  # torch's backend that sends nothing (torch/testing/_internal/distributed/fake_pg.py)
_FIRST_NAME = 1 << 30  # names of groups are numbers; those of the caller's own groups are smaller


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

    # Torch's world of process groups lies in variables of its module.
    own = {
        "_pg_map": {},
        "_pg_names": {},
        "_pg_group_ranks": {},
        "_pg_backend_config": {},
        "_tags_to_pg": {},
        "_pg_to_tag": {},
        "_group_count": _FIRST_NAME,
        "_world": distributed_c10d._World(),
        "_backend": distributed_c10d._backend,
        "_default_pg_init_method": distributed_c10d._default_pg_init_method,
    }
    with contextlib.ExitStack() as stack:
        # In the end this process has the rank of its own group again.
        stack.callback(distributed_c10d._update_default_pg, distributed_c10d.GroupMember.WORLD)
        for name, value in own.items():
            stack.enter_context(replaced(distributed_c10d, name, value))
        # A group's start replaces the hook by one that names the rank.
        stack.enter_context(replaced(sys, "excepthook", sys.excepthook))
        distributed_c10d.init_process_group(_FAKE, store=FakeStore(), rank=rank, world_size=parallel.ranks)
        stack.callback(_forget_groups)
        with _real_tensors():
            mesh = init_device_mesh("cpu", tuple(parallel.axes.values()), mesh_dim_names=tuple(parallel.axes))
        _forget_plans()
        # A model's own code may call them.
        stack.enter_context(replaced(torch.distributed, "init_process_group", lambda *_, **__: None))
        stack.enter_context(replaced(torch.cuda, "set_device", lambda *_: None))
        yield mesh


def _forget_groups() -> None:
    _forget_plans()
    # No destroy_process_group: that takes the caller's groups from the registry, too.
    for name in list(distributed_c10d._world.pg_names.values()):
        distributed_c10d._unregister_process_group(name)


def mesh_of_sizes(mesh: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the ranks of a mesh in other dimensions, with groups of their own. Every rank has to call it.

    Args:
        mesh: Of all ranks of a job.
        sizes: Name of a dimension -> its size, the outermost first.
    """
    with _real_tensors():
        return DeviceMesh(mesh.device_type, mesh.mesh.reshape(*sizes.values()), mesh_dim_names=tuple(sizes))


@contextlib.contextmanager
def _real_tensors() -> Iterator[None]:
    """While entered, a mesh holds a real tensor of ranks, which it reads."""
    with torch.device("cpu"), _disable_current_modes():
        yield


def _forget_plans() -> None:
    """Clear how DTensor moves tensors: it keeps that by the mesh's shape, whatever the groups and the rank are."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # from 2.11 on; real ranks need none

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()


def axes_of_groups(*meshes: DeviceMesh) -> dict[str, str]:
    """Return which dimension of a mesh each of its process groups joins, by the group's name."""
    return {mesh.get_group(name).group_name: name for mesh in meshes for name in mesh.mesh_dim_names or ()}
