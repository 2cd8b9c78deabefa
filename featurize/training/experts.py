"""Expert parallelism: each rank keeps some of a mixture's experts, and tokens are sent to the ranks of theirs and back.

Start reading at `divide_experts`, which serves traces and real ranks alike. A trace does not know where a router sends
tokens: there, each rank receives as many as it sends. `pretended_mesh` is a process group without processes, in which a
trace acts as one rank.

Shape suffixes: T tokens of a rank, K experts of a token, R rows that a rank receives, E width, X experts.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute
from torch.utils._python_dispatch import _disable_current_modes

from conf.errors import UsageError
from featurize.job.layout import EXPERT_REPLICAS, EXPERT_SHARDS, EXPERTS, Parallel
from featurize.nets.modules import RoutedExperts
from featurize.operators.replacing import Change, all_replaced

_FAKE = "fake"  # torch's backend that sends nothing (torch/testing/_internal/distributed/fake_pg.py)
_FIRST_NAME = 1 << 30  # names of groups are numbers; those of the caller's groups are smaller


@contextlib.contextmanager
def pretended_mesh(parallel: Parallel, rank: int = 0) -> Iterator[DeviceMesh]:
    """Yield the mesh of a job's ranks, as one of them has it; nothing is sent within it.

    Process groups of the caller are hidden inside, and restored afterwards.

    Args:
        parallel: The job.
        rank: The rank's number, from 0.
    """
    # The import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Torch keeps its process groups in variables of its module.
    replacements = {
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
        # Finally, this process gets the rank of its own group back.
        stack.callback(distributed_c10d._update_default_pg, distributed_c10d.GroupMember.WORLD)
        changes: list[Change] = [(distributed_c10d, name, value) for name, value in replacements.items()]
        # The start of a group replaces the hook by one that names the rank.
        stack.enter_context(all_replaced([*changes, (sys, "excepthook", sys.excepthook)]))
        distributed_c10d.init_process_group(_FAKE, store=FakeStore(), rank=rank, world_size=parallel.ranks)
        stack.callback(_forget_groups)
        with _real_tensors():
            mesh = init_device_mesh("cpu", tuple(parallel.axes.values()), mesh_dim_names=tuple(parallel.axes))
        _forget_plans()
        calls = (torch.distributed, "init_process_group"), (torch.cuda, "set_device")  # of a model's own code
        with all_replaced((owner, name, lambda *_, **__: None) for owner, name in calls):
            yield mesh


def _forget_groups() -> None:
    _forget_plans()
    # Not destroy_process_group: that also removes the caller's groups from the registry.
    for name in list(distributed_c10d._world.pg_names.values()):
        distributed_c10d._unregister_process_group(name)


def mesh_of_sizes(mesh: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the ranks of a mesh in other dimensions, with new groups. Every rank has to call it.

    Args:
        mesh: The mesh of all ranks of a job.
        sizes: Name of a dimension -> its size, the outermost first.
    """
    with _real_tensors():
        return DeviceMesh(mesh.device_type, mesh.mesh.reshape(*sizes.values()), mesh_dim_names=tuple(sizes))


@contextlib.contextmanager
def _real_tensors() -> Iterator[None]:
    """Give the mesh a real tensor of ranks while entered, as it reads the tensor."""
    with torch.device("cpu"), _disable_current_modes():
        yield


def _forget_plans() -> None:
    """Clear DTensor's cache of redistributions: its key is the mesh's shape, without groups and rank."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # from 2.11 on; real ranks do not need it

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()


def axes_of_groups(*meshes: DeviceMesh) -> dict[str, str]:
    """Return process group name -> the dimension of a mesh that the group connects."""
    return {mesh.get_group(name).group_name: name for mesh in meshes for name in mesh.mesh_dim_names or ()}


_NAME = "experts"  # name of the module that holds a mixture's experts
_KNOWN = (
    "a module named `experts` whose parameters are [experts, ...] and whose forward pass takes (tokens, top_k_index, "
    "top_k_weights), as in transformers, or (tokens, num_tokens_per_expert), as in torchtitan"
)


def expert_mesh(mesh: DeviceMesh, parallel: Parallel) -> DeviceMesh:
    """Return the ranks as experts are divided among them: replicas, shards of an expert, ranks with different experts;
    in a pipeline, within each stage. Every rank of the job has to call it."""
    sizes = {EXPERT_REPLICAS: parallel.degrees.ddp, EXPERT_SHARDS: parallel.expert_shards, EXPERTS: parallel.degrees.ep}
    return mesh_of_sizes(mesh, {"stages": parallel.degrees.pp, **sizes})[tuple(sizes)]


def divide_experts(model: nn.Module, mesh: DeviceMesh, sharing: DeviceMesh | None = None) -> list[list[nn.Module]]:
    """Keep this rank's experts of each mixture, and make its forward pass exchange tokens. Changes the model.

    Args:
        model: The model, before its optimizer is made.
        mesh: The mesh of the ranks that have different experts.
        sharing: The mesh of those among them with the same tokens, which exchange a part each; None: no tokens are
            shared.

    Returns:
        The modules that hold experts, in a list for each mixture.

    Raises:
        UsageError: The model has no mixture of a known kind, or its experts do not divide.
    """
    mixtures = []
    for path, module in list(model.named_modules()):
        if isinstance(module, RoutedExperts):
            if sharing is not None:
                raise UsageError(f"parallel: ep with tp: {path} ({type(module).__name__}) is not divided; leave tp out")
            mixtures.append(_divide_places(path, module, mesh))
        elif path.rpartition(".")[2] == _NAME:
            mixtures.append(_divide_grouped(path, module, mesh, sharing))
    if not mixtures:
        raise UsageError(f"parallel: ep: the model has no experts of a known kind: {_KNOWN}")
    return mixtures


def expert_counts(model: nn.Module) -> set[int]:
    """Return the numbers of experts of mixtures that `divide_experts` supports: a degree of `ep` divides all of
    them."""
    counts = {module.experts for module in model.modules() if isinstance(module, RoutedExperts)}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == _NAME and not isinstance(module, nn.ModuleList):
            sizes = _sizes_of(module)
            if len(sizes) == 1 and _exchange_of(module) is not None:
                counts |= sizes
    return counts


def _sizes_of(module: nn.Module) -> set[int]:
    return {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() > 1}


def _exchange_of(module: nn.Module) -> Callable[..., Tensor] | None:
    return _EXCHANGES.get(len(inspect.signature(module.forward).parameters))


def _divide_grouped(path: str, module: nn.Module, mesh: DeviceMesh, sharing: DeviceMesh | None) -> list[nn.Module]:
    """Divide experts that lie side by side in each parameter of one module."""
    sizes, exchange, signature = _sizes_of(module), _exchange_of(module), inspect.signature(module.forward)
    if len(sizes) != 1 or exchange is None or (sharing is not None and exchange is not _of_choices):
        raise UsageError(f"parallel: ep: {path} ({type(module).__name__}) is not divided; what is: {_KNOWN}")
    experts = sizes.pop()
    _keep_own(path, module, experts, mesh)
    if hasattr(module, "num_experts"):
        vars(module)["num_experts"] = experts // mesh.size()
    own_forward, ranks = module.forward, _Ranks(mesh, experts)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = list(signature.bind(*args, **kwargs).arguments.values())
        if sharing is None:
            return exchange(own_forward, ranks, *given)
        return _whole(
            exchange(own_forward, ranks, *(_part(tensor, sharing) for tensor in given)), len(given[0]), sharing
        )

    # A module's own `forward` takes precedence over its class's, whatever wrapper changes the class.
    vars(module)["forward"] = forward
    return [module]


def _divide_places(path: str, module: RoutedExperts, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide experts with equal numbers of places: tokens move before their first layer, and back after the last."""
    for name in ("rise", "fall"):
        _keep_own(f"{path}.{name}", getattr(module, name), module.experts, mesh)
    ranks = _Ranks(mesh, module.experts)

    def to_experts(_module: nn.Module, args: tuple[Tensor]) -> Tensor:
        parts: Tensor = ranks.exchange(args[0]).unflatten(0, (mesh.size(), -1))
        return parts.transpose(0, 1).flatten(1, 2)

    def to_tokens(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        return ranks.exchange(out.unflatten(1, (mesh.size(), -1)).transpose(0, 1).flatten(0, 1))

    module.rise.register_forward_pre_hook(to_experts)
    module.fall.register_forward_hook(to_tokens)
    return [module.rise, module.fall]


def _keep_own(path: str, module: nn.Module, experts: int, mesh: DeviceMesh) -> None:
    ranks = mesh.size()
    if experts % ranks:
        fitting = ", ".join(str(number) for number in range(2, experts + 1) if experts % number == 0)
        raise UsageError(f"parallel: ep={ranks} does not divide the {experts} experts of {path}; ep can be {fitting}")
    count = experts // ranks
    first = mesh.get_local_rank() * count
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.shape[:1] == (experts,):
            own_experts = parameter.detach()[first : first + count].clone()
            setattr(module, name, nn.Parameter(own_experts, requires_grad=parameter.requires_grad))


@dataclass(frozen=True)
class _Ranks:
    """The ranks that share a mixture's experts."""

    mesh: DeviceMesh
    experts: int

    @property
    def local_experts(self) -> int:
        return self.experts // self.mesh.size()

    def counts_of(self, counts_X: Tensor) -> Tensor:
        """Return the number of rows that each rank sends to each of this rank's experts: [ranks, local experts]."""
        return self.exchange(counts_X.view(self.mesh.size(), self.local_experts))

    def sizes_of(self, sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
        """Return the numbers of rows to send to, and to receive from, each rank. In a trace, all ranks get equal
        numbers, and the first ones the remainder."""
        ranks = self.mesh.size()
        if not sent.is_meta:
            outward_and_inward: Sequence[list[int]] = torch.stack(
                [sent.view(ranks, -1).sum(1), received.sum(1)]
            ).tolist()
            return outward_and_inward[0], outward_and_inward[1]
        shares = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return shares, [shares[self.mesh.get_local_rank()]] * ranks

    def experts_of(self, received: Tensor, rows: int) -> Tensor:
        """Return the expert of each row that this rank receives, given the result of `counts_of`."""
        if received.is_meta:
            return torch.arange(rows, device=received.device).remainder_(self.local_experts)
        numbers = torch.arange(self.local_experts, device=received.device).repeat(self.mesh.size())
        return numbers.repeat_interleave(received.view(-1).long())

    def exchange(self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Return the rows that all ranks send to this one, equally many from each without numbers of rows."""
        out = functional.all_to_all_single_autograd(rows.contiguous(), received, sent, self.mesh.get_group())
        arrived: Tensor = functional.wait_tensor(out)
        return arrived


def _of_choices(
    forward: Callable[..., Tensor], ranks: _Ranks, tokens_TE: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Send each choice of a token to its expert, as a token with a single choice; weight the returned rows."""
    choices, (tokens, choices_each) = index_TK.reshape(-1), index_TK.shape
    order = torch.argsort(choices)
    sent = torch.zeros(ranks.experts, dtype=torch.int64, device=choices.device)
    sent.scatter_add_(0, choices, torch.ones_like(choices))
    received = ranks.counts_of(sent)
    outwards, inwards = ranks.sizes_of(sent, received, tokens * choices_each)
    rows_RE = ranks.exchange(tokens_TE[order // choices_each], outwards, inwards)
    expert_R = ranks.experts_of(received, sum(inwards))
    out_RE = forward(rows_RE, expert_R.unsqueeze(-1), rows_RE.new_ones(sum(inwards), 1))
    back = ranks.exchange(out_RE, inwards, outwards)
    restored = torch.empty_like(back)
    restored[order] = back
    return (restored.view(tokens, choices_each, -1) * weights_TK.unsqueeze(-1)).sum(dim=1).to(tokens_TE.dtype)


def _of_groups(forward: Callable[..., Tensor], ranks: _Ranks, tokens_RE: Tensor, counts_X: Tensor) -> Tensor:
    """Send rows that are sorted by expert to their ranks; there, one expert's rows from all ranks are joined."""
    received = ranks.counts_of(counts_X)
    outwards, inwards = ranks.sizes_of(counts_X, received, len(tokens_RE))
    rows_RE = ranks.exchange(tokens_RE, outwards, inwards)
    order = torch.argsort(ranks.experts_of(received, sum(inwards)), stable=True)
    out_RE = forward(rows_RE[order], received.sum(0))
    restored = torch.empty_like(out_RE)
    restored[order] = out_RE
    return ranks.exchange(restored, inwards, outwards)


# Arguments of a mixture's forward pass -> the function that exchanges its tokens.
_EXCHANGES: Mapping[int, Callable[..., Tensor]] = {2: _of_groups, 3: _of_choices}


def _part(shared: Tensor, sharing: DeviceMesh) -> Tensor:
    """Return this rank's rows of a shared tensor; its gradient is gathered."""
    replicated = DTensor.from_local(shared, sharing, [Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(0)]).to_local()


def _whole(rows: Tensor, count: int, sharing: DeviceMesh) -> Tensor:
    """Return the rows of all ranks that share tokens."""
    size = torch.Size((count, *rows.shape[1:]))
    parts = DTensor.from_local(
        rows.contiguous(), sharing, [Shard(0)], run_check=False, shape=size, stride=(rows.shape[1], 1)
    )
    return parts.full_tensor()
