"""Tensor parallelism by plan: which modules are split over ranks, and how.

Start reading at `apply_plan`. Styles are named as in plans of transformers' models (`base_model_tp_plan`), and done by
PyTorch's `parallelize_module`. Of a mixture, every rank has a part of each expert, and partial outputs are summed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from conf.errors import UsageError, shown
from featurize.job.layout import EXAMPLE_PLAN

STYLES: Mapping[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_scatter_output": lambda: RowwiseParallel(output_layouts=Shard(1)),
    "colwise_gather_input": lambda: ColwiseParallel(input_layouts=Shard(1)),
    "sequence_parallel": SequenceParallel,
    "replicate": lambda: None,
}


_ATTENTION = re.compile(r"att(ention|n)[^.]*$", re.IGNORECASE)


def apply_plan(
    model: nn.Module, plan: Mapping[str, str] | None, mesh: DeviceMesh, *, whole_experts: bool = False
) -> nn.Module:
    """Split a model's modules over the ranks of a mesh. Changes the model.

    Args:
        model: Its optimizer is made afterwards.
        plan: Path of a module, with `*` for any part of it -> its style, of `STYLES`. None: the model's own.
        mesh: Of the ranks that share each module.
        whole_experts: Rules of mixtures are left out, as their experts are divided.

    Raises:
        UsageError: There is no plan, it names no module or an unknown style, or heads do not divide.
    """
    chosen = own_plan(model) if plan is None else dict(plan)
    if not chosen:
        raise UsageError(
            "parallel: tp: the model has no plan of its own (base_model_tp_plan, as in many of transformers); give "
            f"tp_plan, as in {EXAMPLE_PLAN}"
        )
    of_experts, chosen = rules_of_experts(chosen)
    if unknown := sorted(set(chosen.values()) - STYLES.keys()):
        known = ", ".join((*STYLES, STYLE))
        raise UsageError(f"parallel: tp_plan: unknown style {', '.join(unknown)}; known: {known}")
    styles = styles_of(model, chosen)
    if not whole_experts:
        split_experts(model, of_experts, mesh)
    _require_whole_heads(model, styles, mesh.size())
    done: dict[str, ParallelStyle] = {}
    for path, style in styles.items():
        if (made := STYLES[style]()) is not None:
            done[path] = made
    # Without a rank whose weights the others would be sent.
    parallelize_module(model, mesh, done, src_data_rank=None)
    return model


def own_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that a model of transformers brings along, by paths within this module; empty for others."""
    for path, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None) or getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            before = f"{path}." if path else ""
            return {before + str(name): str(style) for name, style in plan.items()}
    return {}


def styles_of(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module that a plan names, by its path.

    Raises:
        UsageError: A name of the plan fits no module.
    """
    paths = [path for path, _ in model.named_modules() if path]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        fitting = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
        if not fitting:
            raise UsageError(
                f"parallel: tp_plan: {shown(pattern)} fits no module of the model, which has {_some(paths)}"
            )
        styles |= dict.fromkeys(fitting, style)
    return styles


def _require_whole_heads(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
    """Raise `UsageError` where a module with heads has parts that are split, and its heads cannot be."""
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if not any(inner.startswith(f"{path}.") for inner in styles) or not _ATTENTION.search(path):
            continue
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if isinstance(heads, int) and heads % ranks:
                fitting = ", ".join(str(one) for one in range(2, heads + 1) if heads % one == 0)
                raise UsageError(
                    f"parallel: tp={ranks} does not divide the {heads} heads of {path} ({name}); of these, {fitting} do"
                )


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")


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
