"""Spreads a model's parameters over ranks and wraps it as its user would, with tensor parallelism by plan.

Start reading at `wrap_for_rank` for real ranks, and at `shard`, which serves traces and real ranks alike. Styles of
`apply_plan` have the names of plans of transformers' models (`base_model_tp_plan`), and are applied by PyTorch's
`parallelize_module`. In a mixture, every rank has a part of each expert, and partial outputs are summed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from conf.errors import UsageError, shown
from featurize.job.layout import EXAMPLE_PLAN, EXPERT_REPLICAS, EXPERT_SHARDS, EXPERTS, WRAPPED, Parallel
from featurize.nets.checkpointing import repeated_blocks
from featurize.operators.tensor_parts import local_tensor, own_part
from featurize.training.experts import divide_experts
from featurize.training.optimizers import OwnOptimizer, run_step

_PREFETCHES = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
_STRATEGIES = {  # whether parameters are freed after the forward pass, whether there are replicas
    (True, False): ShardingStrategy.FULL_SHARD,
    (False, False): ShardingStrategy.SHARD_GRAD_OP,
    (True, True): ShardingStrategy.HYBRID_SHARD,
    (False, True): ShardingStrategy._HYBRID_SHARD_ZERO2,
}


class FlatShards(FullyShardedDataParallel):
    """The outermost wrapper of a model. With `accumulates`, all micro-steps except the last keep full gradients."""

    accumulates = False

    def between_updates(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of all micro-steps of a step except the last."""
        return self.no_sync() if self.accumulates else contextlib.nullcontext()

    def clip_over_ranks(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`, and return the norm."""
        return self.clip_grad_norm_(max_norm)


def shard_flat(model: nn.Module, parallel: Parallel, mesh: DeviceMesh) -> FlatShards:
    """Shard flat parameters, their gradients and optimizer state with FSDP1. Changes the model, and returns the wrapper
    to train.

    Args:
        model: The model, before its optimizer is made.
        parallel: The degrees and FSDP1's own settings.
        mesh: The mesh of all ranks, with dimensions as `Parallel.axes` names them.
    """
    shards = mesh.get_group("fsdp")
    replicas = parallel.degrees.ddp > 1
    members = {id(member) for member in units(model, parallel.fsdp.wrap)}
    device = next(model.parameters()).device
    wrapper = FlatShards(
        model,
        process_group=(shards, mesh.get_group("ddp")) if replicas else shards,
        sharding_strategy=_STRATEGIES[parallel.fsdp.reshard_after_forward is not False, replicas],
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in members),
        backward_prefetch=_PREFETCHES[parallel.fsdp.backward_prefetch],
        mixed_precision=MixedPrecision(
            param_dtype=DTYPES[parallel.fsdp.param_dtype], reduce_dtype=DTYPES[parallel.fsdp.reduce_dtype]
        ),
        limit_all_gathers=parallel.fsdp.limit_all_gathers,
        use_orig_params=parallel.fsdp.use_orig_params,
        device_id=torch.device("cpu") if device.type == "cpu" else None,
    )
    wrapper.accumulates = parallel.fsdp.no_sync
    return wrapper


DTYPES: Mapping[str | None, torch.dtype | None] = {
    None: None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def shard(model: nn.Module, parallel: Parallel, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> nn.Module:
    """Split modules by plan, divide experts, then shard parameters, gradients and optimizer state with FSDP. Changes
    the model, and returns the module to train: the model itself, or FSDP1's wrapper of it.

    Args:
        model: The model, before its optimizer is made.
        parallel: The degrees and FSDP2's own settings.
        mesh: The mesh of all ranks, with dimensions as `Parallel.axes` names them.
        experts: Result of `featurize.training.experts.expert_mesh`, with `ep`.

    Raises:
        UsageError: No module is of a class in `wrap`, or the plan or `ep` does not fit the model.
    """
    if parallel.flat:
        return shard_flat(model, parallel, mesh)
    mixtures = split_modules(model, parallel, mesh, experts)
    shard_units(model, parallel, mesh, units(model, parallel.fsdp.wrap), experts, mixtures)
    return model


def split_modules(
    model: nn.Module, parallel: Parallel, mesh: DeviceMesh, experts: DeviceMesh | None = None
) -> list[list[nn.Module]]:
    """Split modules by plan and divide experts, if the layout has ranks that share them. Changes the model.

    Args:
        model, parallel, mesh, experts: As in `shard`.

    Returns:
        Modules with the experts of each mixture, as from `featurize.training.experts.divide_experts`.
    """
    if parallel.degrees.tp > 1:
        apply_plan(model, parallel.tensor.tp_plan, mesh["tp"], whole_experts=parallel.degrees.ep > 1)
    if experts is None:
        return []
    return divide_experts(model, experts[EXPERTS], mesh["tp"] if parallel.degrees.tp > 1 else None)


def shard_units(
    model: nn.Module,
    parallel: Parallel,
    mesh: DeviceMesh,
    chosen: Sequence[nn.Module],
    experts: DeviceMesh | None = None,
    mixtures: Sequence[list[nn.Module]] = (),
) -> None:
    """Shard parameters with FSDP2, if the layout does. Changes the model.

    Args:
        model: The model. Its parameters outside of the units are one more unit.
        parallel: The degrees and FSDP2's own settings.
        mesh: As in `shard`.
        chosen: Result of `units`.
        experts: As in `shard`.
        mixtures: Modules with the experts of each mixture, as `divide_experts` returns them.
    """
    if parallel.sharded == 1:
        return
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[parallel.fsdp.param_dtype], reduce_dtype=DTYPES[parallel.fsdp.reduce_dtype]
        ),
        "offload_policy": CPUOffloadPolicy() if parallel.fsdp.cpu_offload else OffloadPolicy(),
    }
    if parallel.fsdp.reshard_after_forward is not None:  # torch 2.6 does not accept None for its own choice
        options["reshard_after_forward"] = parallel.fsdp.reshard_after_forward
    if experts is not None:
        _shard_experts(mixtures, parallel, experts, options)
    unit_mesh = mesh["ddp", "fsdp"] if parallel.degrees.ddp > 1 else mesh["fsdp"]
    for unit in (*chosen, model):
        fully_shard(unit, mesh=unit_mesh, **options)


def _shard_experts(
    mixtures: Sequence[list[nn.Module]], parallel: Parallel, mesh: DeviceMesh, options: dict[str, Any]
) -> None:
    """Spread each rank's experts over the ranks that have the same ones, in separate units."""
    reshard = parallel.fsdp.reshard_after_forward
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        options = {**options, "reshard_after_forward": True}
    expert_mesh = mesh[EXPERT_REPLICAS, EXPERT_SHARDS] if parallel.degrees.ddp > 1 else mesh[EXPERT_SHARDS]
    ranks = parallel.expert_shards

    def place(parameter: nn.Parameter) -> Shard | None:
        """Spread fewer experts than ranks along their next dimension, as torchtitan does: FSDP2 would gather
        padding."""
        few = parameter.dim() > 1 and len(parameter) < ranks and parameter.shape[1] % ranks == 0
        return Shard(1) if few else None

    for modules in mixtures:
        unit = fully_shard(modules, mesh=expert_mesh, shard_placement_fn=place, **options)
        for part in unit:
            if isinstance(part, FSDPModule):
                # The gradient of an expert is the mean over all ranks' batches: a sum, divided by itself.
                part.set_gradient_divide_factor(float(parallel.degrees.ddp * parallel.sharded))
                part.set_force_sum_reduction_for_comms(ranks > 1)


def units(model: nn.Module, classes: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, inner ones first; others are the model's own unit.

    Args:
        model: The modules' model.
        classes: Names of their classes. None: the repeated blocks, if the model has any.
    """
    if classes is None:
        return repeated_blocks(model)
    chosen = [module for module in model.modules() if type(module).__name__ in classes and module is not model]
    known = {type(module).__name__ for module in chosen}
    if missing := [name for name in classes if name not in known]:
        present = sorted({type(module).__name__ for module in model.modules() if any(module.children())})
        raise UsageError(
            f"parallel: wrap: the model has no module of class {', '.join(missing)}; it has {', '.join(present)}"
        )
    return chosen[::-1]


def wrap_for_rank(model: nn.Module, parallel: Parallel) -> nn.Module:
    """Return the model as a rank trains it: in `DistributedDataParallel`, or as its parts of shared tensors.

    Args:
        model: On this rank's device, with the parameters and types that it trains with.
        parallel: The job's layout. The default process group has its ranks.

    Raises:
        UsageError: A mode that real ranks do not run in yet; a plan or a class that does not fit the model.
    """
    unknown = [mode for mode in parallel.modes if mode not in WRAPPED]
    if unknown:
        raise UsageError(f"parallel: {', '.join(unknown)}: not run yet; modes that ranks run in: {', '.join(WRAPPED)}")
    if parallel.replicates and parallel.degrees.tp > 1:
        raise UsageError("parallel: ddp with tp: real ranks need fsdp there, as in ddp=2,fsdp=4,tp=2")
    if parallel.zero.stage:
        raise UsageError(
            f"parallel: zero={parallel.zero.stage}: real ranks do not run DeepSpeed; estimate it, or simulate it with "
            "device=A100-SXM4-40GB"
        )
    if parallel.shards:
        device = next(model.parameters()).device.type
        names = tuple(parallel.axes)
        return shard(model, parallel, init_device_mesh(device, tuple(parallel.axes.values()), mesh_dim_names=names))
    # torch 2.13 warns about this argument, whatever its value, and has no other with the same meaning.
    buffers: dict[str, Any] = {} if parallel.ddp.broadcast_buffers else {"broadcast_buffers": False}
    return nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb=parallel.ddp.bucket_cap_mb,
        find_unused_parameters=parallel.ddp.find_unused_parameters,
        gradient_as_bucket_view=parallel.ddp.gradient_as_bucket_view,
        static_graph=parallel.ddp.static_graph,
        **buffers,
    )


class LocalOptimizer(OwnOptimizer):
    """Updates parts of parameters; reads and frees gradients where the wrapper leaves them.

    Args:
        parameters: Parameters of the wrapped model.
        make: Returns an elementwise optimizer for given parameters.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self._pairs = [(p, nn.Parameter(local_tensor(p.detach()), requires_grad=p.requires_grad)) for p in parameters]
        self.inner: list[torch.optim.Optimizer] = [make([own_copy for _, own_copy in self._pairs])]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or fill them with zeros."""
        for parameter, _ in self._pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                local_tensor(parameter.grad).zero_()

    def step(self) -> None:
        for parameter, own_copy in self._pairs:
            own_copy.grad = None if parameter.grad is None else own_part(parameter.grad, parameter)
        run_step(self.inner[0])
        for _, own_copy in self._pairs:
            own_copy.grad = None


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
        model: The model, before its optimizer is made.
        plan: Path of a module, with `*` for any part of it -> its style, of `STYLES`. None: the model's own plan.
        mesh: The mesh of the ranks that share each module.
        whole_experts: Whether rules of mixtures are skipped, as their experts are divided.

    Raises:
        UsageError: There is no plan, it has an unknown path or style, or heads do not divide.
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
    plan_made = {
        path: parallel_style for path, style in styles.items() if (parallel_style := STYLES[style]()) is not None
    }
    # No rank's weights are sent to the others.
    parallelize_module(model, mesh, plan_made, src_data_rank=None)
    return model


def own_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan in the code of a transformers model, by paths within this module; empty for others."""
    for path, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None) or getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            before = f"{path}." if path else ""
            return {before + str(name): str(style) for name, style in plan.items()}
    return {}


def styles_of(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module that a plan names, by its path.

    Raises:
        UsageError: A path of the plan matches no module.
    """
    paths = [path for path, _ in model.named_modules() if path]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        fitting = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
        if not fitting:
            some = ", ".join(paths[:8]) + ", ..." * (len(paths) > 8)
            raise UsageError(f"parallel: tp_plan: {shown(pattern)} fits no module of the model, which has {some}")
        styles |= dict.fromkeys(fitting, style)
    return styles


def _require_whole_heads(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
    """Raise `UsageError` where parts of a module with heads are split, and its heads do not divide."""
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if not any(inner.startswith(f"{path}.") for inner in styles) or not _ATTENTION.search(path):
            continue
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if isinstance(heads, int) and heads % ranks:
                fitting = ", ".join(str(number) for number in range(2, heads + 1) if heads % number == 0)
                raise UsageError(
                    f"parallel: tp={ranks} does not divide the {heads} heads of {path} ({name}); tp can be {fitting}"
                )


STYLE = "moe_tp_experts"
# Style of a parameter -> the dimension that is split. Of packed ones, each rank has a part of either half.
OF_PARAMETERS: Mapping[str, int] = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}


def rules_of_experts(plan: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the rules of a plan that apply to experts, path of their module -> name of a parameter -> style, and the
    other rules."""
    paths = [path for path, style in plan.items() if style == STYLE]
    of_experts: dict[str, dict[str, str]] = {path: {} for path in paths}
    others = {}
    for path, style in plan.items():
        owner, _, name = path.rpartition(".")
        if owner in of_experts and style in OF_PARAMETERS:
            of_experts[owner][name] = style
        elif path not in of_experts:
            others[path] = style
    return of_experts, others


def split_experts(model: nn.Module, rules: Mapping[str, Mapping[str, str]], mesh: DeviceMesh) -> None:
    """Split parameters of experts over the ranks of a mesh. Changes the model.

    Args:
        model: The model, before its optimizer is made.
        rules: Result of `rules_of_experts`.
        mesh: The mesh of the ranks that share each module.

    Raises:
        UsageError: The ranks do not divide a parameter.
    """
    fitting = [
        (path, module, styles)
        for path, module in model.named_modules()
        for pattern, styles in rules.items()
        if fnmatch.fnmatchcase(path, pattern)
    ]
    for path, module, styles in fitting:
        for name, style in styles.items():
            parameter = module._parameters.get(name)
            if parameter is None:
                continue
            place = OF_PARAMETERS[style] % parameter.dim()
            if parameter.shape[place] % mesh.size():
                raise UsageError(
                    f"parallel: tp={mesh.size()} does not divide the {parameter.shape[place]} features of {path}.{name}"
                )
            own_experts = distribute_tensor(parameter.detach(), mesh, [Shard(place)], src_data_rank=None)
            setattr(module, name, nn.Parameter(own_experts, requires_grad=parameter.requires_grad))
        vars(module)["forward"] = _sum_gradients(module, module.forward, mesh.get_group())


def _sum_gradients(
    module: nn.Module, forward: Callable[..., Tensor], group: dist.ProcessGroup
) -> Callable[..., Tensor]:
    signature = inspect.signature(forward)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = [
            _SummedGradient.apply(argument, group)
            if isinstance(argument, Tensor) and argument.requires_grad
            else argument
            for argument in signature.bind(*args, **kwargs).arguments.values()
        ]
        with _own_parts(module):
            summed: Tensor = _Summed.apply(forward(*given), group)
        return summed

    return run


@contextlib.contextmanager
def _own_parts(module: nn.Module) -> Iterator[None]:
    """Make a module's parameters this rank's parts while entered, as plain tensors."""
    parameters = dict(module._parameters)
    parts: dict[str, Any] = {
        name: value.to_local() if isinstance(value, DTensor) else value for name, value in parameters.items()
    }
    module._parameters.update(parts)
    try:
        yield
    finally:
        module._parameters.update(parameters)


class _Summed(torch.autograd.Function):
    """The sum of all ranks' tensors, in place; each rank's own tensor gets the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(partial)
        dist.all_reduce(partial, group=group)
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SummedGradient(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
