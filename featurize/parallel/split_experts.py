"""Mixtures in a tensor plan: every rank has a part of each expert, and partial outputs are summed.

Start reading at `split_experts`. Styles are those of plans of transformers' models: `moe_tp_experts` of a module, and
how its parameters [experts, out, in] are split.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from conf.errors import UsageError

STYLE = "moe_tp_experts"
# Style of a parameter -> the dimension that is split. Of packed ones each rank has a part of either half.
OF_PARAMETERS: Mapping[str, int] = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}


def rules_of_experts(plan: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the rules of a plan that are of experts, path of their module -> name of a parameter -> style, and the
    others."""
    paths = [path for path, style in plan.items() if style == STYLE]
    of_experts: dict[str, dict[str, str]] = {path: {} for path in paths}
    rest = {}
    for path, style in plan.items():
        owner, _, name = path.rpartition(".")
        if owner in of_experts and style in OF_PARAMETERS:
            of_experts[owner][name] = style
        elif path not in of_experts:
            rest[path] = style
    return of_experts, rest


def split_experts(model: nn.Module, rules: Mapping[str, Mapping[str, str]], mesh: DeviceMesh) -> None:
    """Split parameters of experts over the ranks of a mesh. Changes the model.

    Args:
        model: Its optimizer is made afterwards.
        rules: As `rules_of_experts` returns them.
        mesh: Of the ranks that share each module.

    Raises:
        UsageError: The ranks do not divide a parameter.
    """
    for path, module in model.named_modules():
        for pattern, styles in rules.items():
            if fnmatch.fnmatchcase(path, pattern):
                _split(path, module, styles, mesh)


def _split(path: str, module: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    for name, style in styles.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        place = OF_PARAMETERS[style] % parameter.dim()
        if parameter.shape[place] % mesh.size():
            raise UsageError(
                f"parallel: tp={mesh.size()} does not divide the {parameter.shape[place]} features of {path}.{name}"
            )
        own = distribute_tensor(parameter.detach(), mesh, [Shard(place)], src_data_rank=None)
        setattr(module, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
    vars(module)["forward"] = _summed(module, module.forward, mesh.get_group())


def _summed(module: nn.Module, forward: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    signature = inspect.signature(forward)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = [
            _SummedGradient.apply(one, group) if isinstance(one, Tensor) and one.requires_grad else one
            for one in signature.bind(*args, **kwargs).arguments.values()
        ]
        with _own_parts(module):
            out = forward(*given)
        summed = _Summed.apply(out, group)
        assert isinstance(summed, Tensor)
        return summed

    return run


@contextlib.contextmanager
def _own_parts(module: nn.Module) -> Iterator[None]:
    """While entered, a module's parameters are this rank's parts, as plain tensors."""
    whole = dict(module._parameters)
    parts: dict[str, Any] = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in whole.items()}
    module._parameters.update(parts)
    try:
        yield
    finally:
        module._parameters.update(whole)


class _Summed(torch.autograd.Function):
    """The sum of all ranks' tensors, in place; each rank's own gets the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(partial)
        dist.all_reduce(partial, group=group)
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SummedGradient(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own = gradients[0].contiguous()
        dist.all_reduce(own, group=ctx.group)
        return own, None
