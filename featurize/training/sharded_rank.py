"""One rank of a job whose wrapper is PyTorch's own, in a trace: `fully_shard` itself runs, on meta tensors.

Start reading at `ShardedRank`, which works within `pretended_ranks`: a trace is one rank of a process group without
processes (`pretended_mesh`). `shards_on_meta` makes `fully_shard` and FSDP1 work on meta tensors, and reports the kinds
of their memory to a recorder. The parts that it replaces are private to PyTorch; real ranks test it with the installed
release (tests/featurize/test_sharded_ranks.py, test_flat_ranks.py).
`ring_attention` is context parallelism, also for real ranks: keys and values are gathered or rotated, and partial
outputs merged by their log-sum-exp, by torch.distributed.tensor.experimental.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    _flat_param,
    _fully_shard,
    _init_utils,
    _runtime_utils,
    fully_sharded_data_parallel,
)
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)
from torch.distributed.tensor import DTensor, Shard, _dispatch, _op_schema, _random, _redistribute
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from conf.errors import UsageError
from featurize.job.layout import ROTATIONS, Parallel
from featurize.operators.replacing import Change, all_replaced, instead_of, replaced
from featurize.operators.tensor_parts import is_shared
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import COMMUNICATION, GATHERED, UNREDUCED, Collective
from featurize.recording.values import Inputs, mapped, named_tensors
from featurize.training.rank import ReplicatedRank, Streams
from featurize.training.ranks import Ranks
from featurize.training.sharding import expert_mesh, mesh_of_sizes, real_tensors, shard
from featurize.training.training_step import TrainingStep

_lock = threading.RLock()  # groups and replacements are per process: one trace at a time


class ShardedRank(ReplicatedRank):
    """A rank of FSDP, tensor, context and expert parallelism, and of models whose own code spreads them.

    Args:
        parallel: The job.
        mesh: The mesh of all ranks.
        streams: The GPU's streams.
        experts: Result of `featurize.training.sharding.expert_mesh`, with `ep`.
    """

    divides_graphs = True

    def __init__(
        self, parallel: Parallel, mesh: DeviceMesh, streams: Streams, experts: DeviceMesh | None = None
    ) -> None:
        super().__init__(parallel, streams, axis="ddp")
        self.bucket_limits, self.needs_factory = None, parallel.degrees.own > 1
        self._mesh, self._experts = mesh, experts
        self._sequence = sequence_mesh(mesh, parallel) if parallel.degrees.cp > 1 else None

    def part_of(self, inputs: object, target: Tensor | None) -> tuple[object, Tensor | None]:
        if self._sequence is None:
            return inputs, target
        return part_of_sequence(inputs, target, self._sequence, self.parallel)

    def attach(self, recorder: Recorder) -> contextlib.AbstractContextManager[object]:
        """Report to a recorder, and make attention cover the sequence of all ranks while entered."""
        context = super().attach(recorder)
        others = [mesh for mesh in (self._sequence, self._experts) if mesh is not None]
        # A group of all ranks has the name of the first mesh that it is part of.
        names = ((mesh, name) for mesh in (*others, self._mesh) for name in mesh.mesh_dim_names or ())
        axes: dict[str, str] = {mesh.get_group(name).group_name: name for mesh, name in names}
        self._ranks = Ranks(self._streams, axes)
        recorder.among_ranks = self._ranks.ran
        return context if self._sequence is None else ring_attention(self._sequence, self.parallel)

    def wrap(self, step: TrainingStep, inputs: Inputs) -> None:
        super().wrap(step, inputs)
        before = step.model
        step.take(self._wrap(step.model, inputs))
        if step.model is not before:
            self.recorder.stack.add(step.model)  # a wrapper runs its own operators
        if self.parallel.fsdp.cpu_offload:
            self.recorder.memory.hold_on_host(step.model.parameters())

    def _wrap(self, model: nn.Module, inputs: Inputs) -> nn.Module:
        if self.parallel.degrees.own == 1:
            return shard(model, self.parallel, self._mesh, self._experts)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the forward pass that found the target left the outermost unit gathered
        return model

    def begin_step(self) -> None:
        super().begin_step()
        self._ranks.begin_step()

    def collectives(self) -> tuple[Collective, ...]:
        """Return the ranks' collectives in the last step. Raises `UsageError` for a model of `own` that does not
        communicate with other ranks."""
        sent, ranks = super().collectives(), self.parallel.degrees.own
        if ranks > 1 and not (sent or any(map(is_shared, self._step.model.parameters()))):
            raise UsageError(
                f"parallel: own={ranks}: the factory spreads nothing: no parameter is a DTensor, and ranks send "
                f"nothing; spread it there, as in own={ranks} with fully_shard(model), or give fsdp={ranks}"
            )
        return tuple(sorted(sent, key=lambda collective: collective.after)) if self._replicas else sent


@contextlib.contextmanager
def pretended_ranks(parallel: Parallel, rank: int) -> Iterator[tuple[DeviceMesh, Streams, DeviceMesh | None]]:
    """Make this process one of a job's ranks while entered, with PyTorch's wrappers working on meta tensors.

    Args:
        parallel: The job.
        rank: The rank's number, from 0. The first rank has the largest part of unevenly sharded parameters.

    Yields:
        Arguments of `ShardedRank`: the mesh, the streams, and the mesh of experts.
    """
    streams = Streams()
    with _lock, pretended_mesh(parallel, rank) as mesh, shards_on_meta(streams), _quiet():
        yield mesh, streams, expert_mesh(mesh, parallel) if parallel.degrees.ep > 1 else None


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
        "_group_count": 1 << 30,  # names of groups are numbers; those of the caller's groups are smaller
        "_world": distributed_c10d._World(),
        "_backend": distributed_c10d._backend,
        "_default_pg_init_method": distributed_c10d._default_pg_init_method,
    }
    changes: list[Change] = [(distributed_c10d, name, value) for name, value in replacements.items()]
    # The start of a group replaces the hook by one that names the rank.
    changes.append((sys, "excepthook", sys.excepthook))
    calls = (torch.distributed, "init_process_group"), (torch.cuda, "set_device")  # of a model's own code
    with contextlib.ExitStack() as stack:
        # Finally, this process gets the rank of its own group back.
        stack.callback(distributed_c10d._update_default_pg, distributed_c10d.GroupMember.WORLD)
        stack.enter_context(all_replaced(changes))
        # The backend that sends nothing.
        distributed_c10d.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.ranks)
        try:
            with real_tensors():
                mesh = init_device_mesh("cpu", tuple(parallel.axes.values()), mesh_dim_names=tuple(parallel.axes))
            _forget_plans()
            with all_replaced((owner, name, lambda *_, **__: None) for owner, name in calls):
                yield mesh
        finally:
            _forget_plans()
            # Not destroy_process_group: that also removes the caller's groups from the registry.
            for name in list(distributed_c10d._world.pg_names.values()):
                distributed_c10d._unregister_process_group(name)


def _forget_plans() -> None:
    """Clear DTensor's cache of redistributions: its key is the mesh's shape, without groups and rank."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # from 2.11 on; real ranks do not need it

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings that the real job shows too: of fully_shard on outputs that are views, and of DTensor on
    consecutive reductions."""
    logger = logging.getLogger("torch.distributed")
    with warnings.catch_warnings(action="ignore"), contextlib.ExitStack() as stack:
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        yield


_LENGTH = 1  # the dimension of inputs and targets that holds the sequence
_TOKENS = "input_ids"
_ATTENTION = "scaled_dot_product_attention"


def sequence_mesh(mesh: DeviceMesh, parallel: Parallel) -> DeviceMesh:
    """Return the ranks that share a batch's sequence with this one. Every rank of the job has to call it."""
    cp, tp = parallel.degrees.cp, parallel.degrees.tp
    return mesh_of_sizes(mesh, {"batches": parallel.ranks // (cp * tp), "cp": cp, "tp": tp})["cp"]


@contextlib.contextmanager
def ring_attention(mesh: DeviceMesh, parallel: Parallel) -> Iterator[None]:
    """Make `scaled_dot_product_attention` attend to the sequence of all ranks while entered.

    Args:
        mesh: The mesh of the ranks that share the sequence, as `sequence_mesh` returns it.
        parallel: The job's layout.

    Raises:
        UsageError: Attention with a mask, or of a kind that `cp_load_balance` does not support; no attention at all.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring  # a slow import

    methods = ring._RotateMethod
    method = methods.ALL_TO_ALL if parallel.context.cp_rotate == ROTATIONS[1] else methods.ALL_GATHER
    local, calls = getattr(F, _ATTENTION), 0

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        nonlocal calls
        calls += 1
        if attn_mask is not None:
            raise UsageError(
                "parallel: cp: attention with a mask does not run over several ranks in PyTorch, is_causal=True does; "
                "leave the attention mask out of the inputs"
            )
        if _is_balanced(parallel) and not is_causal:
            raise UsageError(
                "parallel: cp: balanced parts of the sequence are of causal attention only; give cp_load_balance=false"
            )
        # Each rank has a part of the sequence of [N, heads, L, E].
        shared = (DTensor.from_local(tensor, mesh, [Shard(2)], run_check=False) for tensor in (query, key, value))
        more = {"enable_gqa": True} if enable_gqa else {}
        out = local(*shared, None, dropout_p, is_causal, scale=scale, **more)
        assert isinstance(out, DTensor)
        return out.to_local()

    with (
        replaced(ring._cp_options, "rotate_method", method),
        replaced(ring._cp_options, "enable_load_balance", _is_balanced(parallel)),
        replaced(F, _ATTENTION, attend),
    ):
        ring._enable_context_parallel_dispatcher()
        try:
            yield
        finally:
            ring._disable_context_parallel_dispatcher()
    if not calls:
        raise UsageError(
            f"parallel: cp: the model does not call torch.nn.functional.{_ATTENTION}, which is what PyTorch runs over "
            "several ranks; of transformers' models attn_implementation=sdpa does; leave cp out otherwise"
        )


def sequence_length(inputs: object) -> int:
    """Return the length of a batch's sequences: that of `input_ids`, or of the first tensor with two dimensions. Raises
    `UsageError` if there is none."""
    named = dict(named_tensors(inputs))
    first = named.get(_TOKENS) if _TOKENS in named else next((t for t in named.values() if t.dim() > _LENGTH), None)
    if first is None or first.dim() <= _LENGTH:
        raise UsageError("parallel: cp: no input has a sequence in its second dimension, as [batch, length] has")
    return first.shape[_LENGTH]


def part_of_sequence(inputs: object, target: Tensor | None, mesh: DeviceMesh, parallel: Parallel) -> tuple[Any, ...]:
    """Return this rank's part of a batch: of each tensor with the sequence's length in its second dimension.

    Args:
        inputs: The batch of the ranks that share it.
        target: The batch's target, or None.
        mesh: As `sequence_mesh` returns it.
        parallel: The job's layout.

    Raises:
        UsageError: As `sequence_length`; or the sequence does not divide into equal parts.
    """
    length, cp = sequence_length(inputs), parallel.degrees.cp
    parts = cp * (2 if _is_balanced(parallel) else 1)
    if length % parts:
        why = "two parts for each rank" if _is_balanced(parallel) else "a part for each rank"
        raise UsageError(f"parallel: cp={cp}: a sequence of {length} does not divide into {parts} parts ({why})")
    place = mesh.get_local_rank()
    chosen = [place, parts - 1 - place] if _is_balanced(parallel) else [place]

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() <= _LENGTH or tensor.shape[_LENGTH] != length:
            return tensor
        chunks = tensor.detach().chunk(parts, dim=_LENGTH)
        return torch.cat([chunks[number] for number in chosen], dim=_LENGTH).requires_grad_(tensor.requires_grad)

    return mapped(inputs, part), None if target is None else part(target)


def _is_balanced(parallel: Parallel) -> bool:
    return parallel.context.cp_load_balance is not False


_META = torch.device("meta")


def shards_on_meta(streams: Streams, device: torch.device = _META) -> contextlib.AbstractContextManager[None]:
    """Make meshes represent GPUs that hold meta tensors while entered.

    Args:
        streams: The GPU's streams. Their recorder is notified of resized storages and of kinds of blocks.
        device: The device that meta tensors report.
    """

    def resized(_: object, storage: torch.UntypedStorage, nbytes: int) -> None:
        if streams.recorder is not None:
            streams.recorder.memory.resized(storage, nbytes)

    changes = *_changes_of_fully_shard(streams, device), *_changes_of_flat(streams, device)
    return all_replaced((_heard(torch.UntypedStorage, "resize_", resized), *changes))


def _around(owner: object, name: str, function: Callable[..., Any]) -> Change:
    """Return the change that calls `function` with the original, then with its arguments."""
    return owner, name, instead_of(getattr(owner, name), function)


def _heard(owner: object, name: str, heard: Callable[..., None]) -> Change:
    """Return the change that calls `heard(result, *arguments)` after the original."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        heard(out, *args)
        return out

    return _around(owner, name, call)


def _changes_of_fully_shard(streams: Streams, device: torch.device) -> tuple[Change, ...]:
    """Return the changes that make `fully_shard` and DTensor work on meta."""

    def foreach_reduce(
        reduce: Callable[..., Any], params: Any, gradients: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        streams.name(gradients, UNREDUCED)
        on_host = [parameter for parameter in params if parameter.offload_to_cpu]
        for parameter in on_host:
            parameter.offload_to_cpu = False  # there are no values to copy
        try:
            out = reduce(params, gradients, *args, **kwargs)
        finally:
            for parameter in on_host:
                parameter.offload_to_cpu, parameter.sharded_param.grad = True, None
        streams.name([out[0]], COMMUNICATION)  # kept until it is sent
        return out

    inputs: property = vars(_fsdp_param.FSDPParam)["all_gather_inputs"]
    streams_of_output = "record_grad_output_stream"  # from 2.15 on; it does nothing on CUDA
    return (
        *(
            (module, "_get_device_handle", lambda *_: streams)
            for module in (_fsdp_init, _fsdp_param_group, _fsdp_state, _fsdp_collectives)
        ),
        *((module, "_get_device_from_mesh", lambda _: device) for module in (_fsdp_init, _fully_shard._fully_shard)),
        (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
        (_fsdp_param_group.FSDPParamGroup, "_validate_cpu_offload_params", lambda _: None),
        (_fsdp_param.FSDPParam, "all_gather_inputs", property(instead_of(inputs.fget, _copied_from_host))),
        _heard(
            _fsdp_param.FSDPParam,
            "init_all_gather_outputs",
            lambda _, made, *__: streams.name(made.all_gather_outputs, GATHERED),
        ),
        _heard(
            _fsdp_collectives.DefaultAllGather, "allocate", lambda buffer, *_: streams.name([buffer], COMMUNICATION)
        ),
        _around(_fsdp_param_group, "foreach_reduce", foreach_reduce),
        *(
            (module, streams_of_output, lambda *_: None)
            for module in [_fsdp_collectives]
            if hasattr(module, streams_of_output)
        ),
        _around(ShardingPropagator, "_propagate_tensor_meta_non_cached", _unseen),
        (_op_schema, "_rebuild_tensor_from_dtensor_meta", _of_shape),
        # There are no random numbers to agree on.
        *((module, "is_rng_supported_mesh", lambda _: False) for module in (_dispatch, _random)),
    )


def _changes_of_flat(streams: Streams, device: torch.device) -> tuple[Change, ...]:
    """Return the changes that make FSDP1's flat parameters on meta represent those on a GPU."""

    def init_device_handle(state: Any, *_: object) -> Any:
        state._device_handle = streams
        return state

    def name_parts(_: object, handle: Any) -> None:
        kinds = {"_full_param_padded": GATHERED, "_full_prec_full_param_padded": GATHERED, "_mp_shard": COMMUNICATION}
        for name, kind in kinds.items():
            if (tensor := getattr(handle.flat_param, name, None)) is not None:
                streams.name([tensor], kind)

    def post_backward_hook(reduce: Callable[..., None], state: Any, handle: Any, *args: Any) -> None:
        if handle.flat_param.grad is not None:
            streams.name([handle.flat_param.grad], UNREDUCED)
        reduce(state, handle, *args)

    return (
        (_FSDPDeviceHandle, "from_device", lambda _: streams),
        (fully_sharded_data_parallel, "_init_device_handle", init_device_handle),
        (_init_utils, "_need_to_materialize_module", lambda *_: (False, False)),
        *((module, "_no_dispatch_record_stream", streams.use) for module in (_flat_param, _runtime_utils)),
        (_init_utils, "_get_compute_device", lambda *_: device),
        # The norm is kept, and no operator makes it.
        _heard(
            fully_sharded_data_parallel.FullyShardedDataParallel,
            "clip_grad_norm_",
            lambda _, model, *__: streams.name([model._zero_scalar], "buffer"),
        ),
        # Tensors without memory have no addresses: their storages are compared.
        (_flat_param, "_same_storage", _same_storage),
        (_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0),
        (_runtime_utils, "_catch_all_reshard", _catch_all_reshard),
        _heard(_flat_param.FlatParamHandle, "init_flat_param_attributes", name_parts),
        _around(_runtime_utils, "_post_backward_hook", post_backward_hook),
        _heard(_runtime_utils, "_get_reduce_scatter_tensors", lambda made, *_: streams.name(made[:1], COMMUNICATION)),
    )


def _copied_from_host(inputs: Callable[..., Any], parameter: _fsdp_param.FSDPParam) -> Any:
    """Gather a copy of a shard that is in host memory."""
    if not parameter.offload_to_cpu:
        return inputs(parameter)
    with replaced(parameter, "_sharded_param_data", parameter._sharded_param_data.clone()):
        return inputs(parameter)


def _of_shape(value: Any) -> Any:
    """Return a value that DTensor uses for shapes on meta, even if the mesh is of GPUs that this PyTorch may not
    know."""
    tensor = value.tensor_meta
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=tensor.dtype, device=_META)


def _unseen(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function unrecorded: DTensor computes the shapes of whole results, without kernels of this rank."""
    with _disable_current_modes():
        return function(*args, **kwargs)


def _same_storage(tensor: Tensor, other: Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _catch_all_reshard(state: Any) -> None:
    """Free units that no hook of the backward pass has freed, such as a frozen one whose inputs need no gradient."""
    handle = state._handle
    if handle is None:
        return
    is_shard = _same_storage(handle.flat_param, handle.flat_param._local_shard)
    if not is_shard or handle._skipped_use_sharded_views:
        _runtime_utils._reshard(state, handle, _runtime_utils._should_free_in_backward(state, handle))


class ShardStates:
    """The state of a model's shards: gathered or free.

    Args:
        model: A model with or without modules that `fully_shard` wrapped.
        recorder: The recorder, suspended in `bring_to`.
        streams: The streams, suspended as well.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, streams: Streams) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._recorder, self._streams = recorder, streams

    def now(self) -> Hashable:
        """Return the state of each module's parameters."""
        states = (module._get_fsdp_state() for module in self._modules)
        return tuple(tuple(group._sharded_state for group in state._fsdp_param_groups) for state in states)

    def bring_to(self, state: Hashable) -> None:
        """Gather or free parameters to restore a state."""
        if state == self.now():
            return
        assert isinstance(state, tuple), "a result of `now`"
        with replaced(self._streams, "recorder", None), replaced(self._recorder, "paused", True):
            for module, wanted in zip(self._modules, state, strict=True):
                if _fsdp_param.ShardedState.UNSHARDED in wanted:
                    module.unshard()
                else:
                    module.reshard()
