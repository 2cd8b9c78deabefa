"""Spreads a model's parameters over ranks and wraps it as its user would, with tensor parallelism by plan.

Start reading at `wrap_for_rank` for real ranks, and at `shard`, which serves traces and real ranks alike. Styles of
`apply_plan` have the names of plans of transformers' models (`base_model_tp_plan`), and are applied by PyTorch's
`parallelize_module`. In a mixture, every rank has a part of each expert, and partial outputs are summed; or each rank
keeps some experts, and tokens are sent to the ranks of theirs and back (`divide_experts`). A trace does not know where
a router sends tokens: there, each rank receives as many as it sends.

Shape suffixes: T tokens of a rank, K experts of a token, R rows that a rank receives, E width, X experts.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
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
from torch.utils._python_dispatch import _disable_current_modes

from conf.errors import UsageError, shown
from featurize.job.layout import EXAMPLE_PLAN, EXPERT_REPLICAS, EXPERT_SHARDS, EXPERTS, WRAPPED, Parallel
from featurize.nets.checkpointing import repeated_blocks
from featurize.nets.modules import RoutedExperts

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
        experts: Result of `expert_mesh`, with `ep`.

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
        Modules with the experts of each mixture, as from `divide_experts`.
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
    of_experts: dict[str, dict[str, str]] = {path: {} for path, style in plan.items() if style == STYLE}
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


def mesh_of_sizes(mesh: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the ranks of a mesh in other dimensions, with new groups. Every rank has to call it.

    Args:
        mesh: The mesh of all ranks of a job.
        sizes: Name of a dimension -> its size, the outermost first.
    """
    with real_tensors():
        return DeviceMesh(mesh.device_type, mesh.mesh.reshape(*sizes.values()), mesh_dim_names=tuple(sizes))


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Give the mesh a real tensor of ranks while entered, as it reads the tensor."""
    with torch.device("cpu"), _disable_current_modes():
        yield


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
