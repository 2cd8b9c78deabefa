"""Tensor parallelism by plan: which modules are split over ranks, and how.

Start reading at `apply_plan`. Styles are named as in plans of transformers' models (`base_model_tp_plan`), and done by
PyTorch's `parallelize_module`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from conf.errors import UsageError, shown
from featurize.parallel.layout_modes import EXAMPLE_PLAN
from featurize.parallel.split_experts import STYLE as MIXTURE
from featurize.parallel.split_experts import rules_of_experts, split_experts

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
        known = ", ".join((*STYLES, MIXTURE))
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
