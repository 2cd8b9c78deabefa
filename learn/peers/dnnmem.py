"""`dnnmem`: liveness of tensors over the graph of forward and backward operators, plus the framework's overhead.

Start reading at `DNNMem.parts_mib`; `_record` makes the graph and `_liveness` walks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import OPTIMIZERS
from featurize.recording.values import call, tensors_of
from learn.job.training_job import TrainingJob
from learn.peers.base import Peer, batch_tensors, explain_errors, loss_of, meta_model, unique_bytes

BLOCK = 512  # PyTorch's allocator rounds every tensor up to this
RESERVED_MIB = 64.0  # resident buffer of the framework's memory management, the published constant


class DNNMem(Peer):
    """Peak of weights, gradients, optimizer state, operator outputs, their gradients and workspaces, by liveness, plus
    CUDA context and a reserved buffer.

    Source: Gao et al., Estimating GPU memory consumption of deep learning models, ESEC/FSE 2020. Operators run in the
    order of the forward pass, then backwards. Weights, their gradients and the optimizer's tensors live throughout. An
    operator's output lives until its backward operator has run; the gradient of an output from the first backward
    operator that makes it until the one that consumes it. Every tensor is rounded up to 512 bytes.

    Assumed: an operator is one that PyTorch dispatches on meta tensors; views and in-place results are not new tensors;
    attention is the plain one, whose scores are stored, as when this was published. A convolution's workspace is that
    of explicit GEMM on one sample, its input unrolled (the paper asks cuDNN, which needs a GPU). The context is the
    device description's. Tensors have the model's own dtype: autocast is not followed. The segments that the
    allocator reserves around tensors are not modelled.
    """

    name: ClassVar[str] = "dnnmem"

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        model = meta_model(workload)
        with explain_errors("the forward pass"):
            inputs, targets = workload.batch("meta")
            operators = _record(workload, model, inputs, targets)
        weights = sum(map(_round_up, unique_bytes(model.parameters())))
        trained = sum(map(_round_up, unique_bytes(p for p in model.parameters() if p.requires_grad)))
        others = sum(map(_round_up, unique_bytes([*model.buffers(), *batch_tensors(inputs, targets)])))
        parts = {
            "weights": weights,
            "weight gradients": trained,
            "optimizer state": OPTIMIZERS[workload.settings.optimizer].states * trained,
            "buffers and batch": others,
            **_liveness(operators),
        }
        return {name: nbytes / MIB for name, nbytes in parts.items()} | {
            "context": float(device.context_mib),
            "reserved buffer": RESERVED_MIB,
        }


@dataclass(frozen=True, slots=True)
class _Operator:
    """One forward operator: the tensors it makes (id -> bytes), the read ids that need a gradient, and its
    workspace."""

    made: Mapping[int, int]
    read: tuple[int, ...]
    workspace: int


def _liveness(operators: Sequence[_Operator]) -> dict[str, int]:
    """Return the bytes at the peak, by kind, without the tensors that live throughout."""
    size = {tensor: nbytes for op in operators for tensor, nbytes in op.made.items()}
    outputs = gradients = 0
    peak = {"outputs": 0, "output gradients": 0, "workspace": 0}

    def look(workspace: int) -> None:
        nonlocal peak
        if outputs + gradients + workspace > sum(peak.values()):
            peak = {"outputs": outputs, "output gradients": gradients, "workspace": workspace}

    for op in operators:
        outputs += sum(op.made.values())
        look(op.workspace)
    live: set[int] = set()
    for op in reversed(operators):
        wanted = {tensor for tensor in op.read if tensor in size} - live
        if not op.read and not live & set(op.made):
            outputs -= sum(op.made.values())
            continue
        gradients += sum(size[tensor] for tensor in wanted)
        live |= wanted
        look(op.workspace)
        ended = live & set(op.made)
        gradients -= sum(size[tensor] for tensor in ended)
        live -= ended
        outputs -= sum(op.made.values())
    return peak


def _record(workload: TrainingJob, model: nn.Module, inputs: Any, targets: Any) -> list[_Operator]:
    """Return the forward operators of model and loss, in order, from dispatch on meta tensors."""
    operators: list[_Operator] = []
    storages = {}  # storage -> itself: living storages keep their ids, and meta storages take no memory
    made_here: set[int] = set()

    def storage_of(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return int(storage._cdata)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: Callable[..., Any],
            types: Any,
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            given = [(storage_of(t), t.is_floating_point()) for t in tensors_of([args, kwargs or {}])]
            result = func(*args, **(kwargs or {}))
            known = made_here | {storage for storage, _ in given}
            made = {}
            for tensor in tensors_of(result):
                if (storage := storage_of(tensor)) not in known:
                    made[storage] = _round_up(tensor.untyped_storage().nbytes())
            read = tuple(storage for storage, floats in given if floats and storage in made_here)
            made_here.update(made)
            if made:
                operators.append(_Operator(made, read, _workspace(func, args)))
            return result

    with Recorder():
        loss_of(workload, call(model, inputs), targets)
    return operators


def _workspace(func: Callable[..., Any], args: Sequence[Any]) -> int:
    """Return the bytes of one sample's unrolled input; 0 for operators other than convolutions."""
    if not str(func).startswith("aten.convolution"):
        return 0
    given, weight = args[0], args[1]
    spatial = weight.shape[2:]
    stride, padding, dilation = (list(args[i]) * (len(spatial) if len(args[i]) == 1 else 1) for i in (3, 4, 5))
    transposed = args[6]
    places = columns = 1
    for i, kernel in enumerate(spatial):
        columns *= kernel
        length = given.shape[2 + i]
        if not transposed:
            length = (length + 2 * padding[i] - dilation[i] * (kernel - 1) - 1) // stride[i] + 1
        places *= length
    return _round_up(weight.shape[1] * columns * places * given.element_size())


def _round_up(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
