"""The execution trace: which operators one training step runs, and when its memory is taken and given back.

Start reading at `trace_step` and `StepTrace`. Facts only, of no particular GPU model: `featurize.replay` places the
memory, `featurize.roofline` prices the operators. All runs on the meta device, so nothing that the job needs is taken.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from conf.errors import UsageError
from featurize.cuda_policy import as_on_cuda
from featurize.device_spec import DEFAULT_DEVICE, DeviceSpec, load_device
from featurize.library_calls import LibraryCall
from featurize.skeleton import build_on_meta, on_meta
from featurize.training import AUTOCAST_DTYPES, Training, TrainingSettings, TrainingStep, targets_for
from featurize.trial import TrialConfig

STEPS = 2  # the optimizer makes its state in the first; the second is as all later ones
PHASES = ("setup", "forward", "backward", "optimizer")
BLOCK_KINDS = (
    "parameter", "buffer", "batch", "gradient", "optimizer_state",
    "activation",  # made by a forward pass and needed by the backward
    "temporary",
    "workspace",  # taken by a kernel for its own run
)  # fmt: skip


BATCH = -2  # the source of an input that is the step's batch


class Operator(NamedTuple):
    """One operator of the steady step that runs on the GPU. Bytes are of distinct tensors, not of cache misses."""

    name: str  # aten::mm
    phase: str
    dtype: str  # of its arithmetic: float32, bfloat16, ...
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    flops: int
    bytes_read: int
    bytes_written: int
    launches: int  # kernels
    module: str = ""  # path of the module that called it, in the backward pass of the one whose operator it derives
    sources: tuple[int, ...] = ()  # indices of the operators that made its inputs; BATCH; -1: it was there before


class Event(NamedTuple):
    """Memory taken (`nbytes` > 0) or given back (< 0), in order. `block` indexes `StepTrace.blocks`.

    A workspace is one event of 0 bytes: how much the library takes at that moment is said by `Block.call`."""

    block: int
    nbytes: int
    step: int  # 0 for what exists before the first step
    phase: str


class Block(NamedTuple):
    """One storage, whatever number of views it has, or one library call's workspace."""

    nbytes: int
    kind: str
    operator: str = ""  # that made it, empty for what the step began with
    module: str = ""  # path of the module that ran it
    call: LibraryCall | None = None  # of a workspace


class TraceError(Exception):
    """The step cannot be traced: the message names what failed, the operator and the module where they are known."""

    def __init__(self, doing: str, operator: str, module: str, cause: BaseException) -> None:
        self.operator, self.module = operator, module
        where = f" in operator {operator}" if operator else ""
        where += f" {'of' if operator else 'in'} module {module!r}" if module else ""
        lines = str(cause).strip().splitlines()
        super().__init__(f"{doing}{where}: {type(cause).__name__}: {lines[0] if lines else ''}")
        self._made_of = doing, operator, module, cause

    def __reduce__(self):
        return type(self), self._made_of


@dataclass(frozen=True)
class StepTrace:
    """`operators` of the second step; `events` of the set-up and both steps."""

    operators: tuple[Operator, ...]
    events: tuple[Event, ...]
    blocks: tuple[Block, ...]
    parameters: int  # elements
    parameter_bytes: int
    compute_capability: tuple[int, int]

    @property
    def flops(self) -> int:
        """FLOPs of one steady step."""
        return sum(op.flops for op in self.operators)

    @cached_property
    def peak_live_bytes(self) -> int:
        """The most bytes alive at once, without any allocator's rounding and library's workspace."""
        return sum(self.breakdown.values())

    @cached_property
    def breakdown(self) -> dict[str, int]:
        """Bytes alive at the peak, by block kind."""
        live = peak = peak_at = 0
        for index, event in enumerate(self.events):
            live += event.nbytes
            if live > peak:
                peak, peak_at = live, index
        by_kind: Counter[str] = Counter()
        for event in self.events[: peak_at + 1] if peak else ():
            by_kind[self.blocks[event.block].kind] += event.nbytes
        return {kind: by_kind[kind] for kind in BLOCK_KINDS}


def trace_config(
    config: TrialConfig, *, device: str | DeviceSpec = DEFAULT_DEVICE, training_loop: bool = False
) -> StepTrace:
    """The trace of one training step of a family's model, run as the farm's devices do. Raises `TraceError`."""
    from featurize.families import get_family, loss_of

    family = get_family(config.family)
    return trace_step(
        lambda: family.build(config),
        lambda on: family.batch(config, on),
        loss=loss_of(config),
        settings=config,
        device=device,
        training_loop=training_loop,
    )


def trace_step(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Tensor | tuple[Tensor, ...] | Callable,
    target: Tensor | None = None,
    loss: Callable[[object, Tensor], Tensor] | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    device: str | DeviceSpec = DEFAULT_DEVICE,
    *,
    settings: TrainingSettings | None = None,
    training_loop: bool = True,
) -> StepTrace:
    """The trace of one training step as CUDA would run it: forward, loss, backward, optimizer.

    model      a module, which is left as it is, or a zero-argument factory, built without memory
    inputs     positional arguments of the model: meta tensors, or a function of the device that gives
               `(inputs, target)`, where target may be None
    target     class indices; None makes them to suit the model's output
    loss       `loss(output, target)`; None takes cross entropy of the output, its `logits` or its first tensor
    optimizer  adam (the default), adamw, sgd or momentum; precision: fp32 (default), tf32, bf16 or fp16
    device     the GPU model whose kernels are meant: its compute capability decides which attention kernels there are
    settings   all training settings at once, instead of `optimizer` and `precision`
    training_loop  the usual loop: each step's batch is copied to the device while the last one's is alive, and output
               and loss live until the next ones are assigned. Without, the batch lies on the device and the step
               leaves nothing behind, as in the farm's own trials.

    Modelled of CUDA's own behaviour: autocast's casts and its cache of weights, fused attention, fused dropout,
    for-each optimizers, fused kernels that meta tensors run in pieces; `featurize.library_calls` notes what cuDNN and
    flash attention take besides. Of recurrent layers, `featurize.cudnn_rnn` models the memory and counts the products;
    their many small kernels are one launch. Raises `TraceError`, for instance where a forward pass reads a value back
    (`.item()`), and `UsageError` for unknown names.
    """
    from featurize.recorder import Recorder, origin

    if settings is None:
        settings = Training(optimizer=optimizer or "adam", precision=precision or "fp32")
    elif optimizer is not None or precision is not None:
        raise TypeError("optimizer and precision are part of settings: give either")
    capability = (device if isinstance(device, DeviceSpec) else load_device(device)).compute_capability
    collecting = gc.isenabled()
    gc.disable()  # a collection at a random moment would make two traces differ
    doing = "the model cannot be built on the meta device"
    try:
        model = on_meta(model) if isinstance(model, nn.Module) else build_on_meta(model)
        if isinstance(model, nn.Module) and not any(p.requires_grad for p in model.parameters()):
            raise UsageError("no parameter of the model requires a gradient: there is nothing to train")
        recorder = Recorder(model)
        step = TrainingStep(model, settings, "meta", loss=loss, holds_output=training_loop)
        policy = as_on_cuda(AUTOCAST_DTYPES.get(settings.precision), capability)
        with recorder.modules(), policy as enter_policy:
            if callable(inputs):
                with torch.device("meta"):
                    inputs, target = inputs("meta")
            inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
            doing = "the model cannot be traced: it fails"
            if target is None:
                target = _target_for(recorder, model, inputs, loss)
            recorder.hold(model.parameters(), "parameter")
            recorder.hold(model.buffers(), "buffer")
            _record(recorder, step, inputs, target, enter_policy, training_loop)
        blocks = recorder.final_blocks()
        return StepTrace(
            operators=tuple(recorder.operators),
            events=tuple(recorder.events),
            blocks=tuple(blocks),
            parameters=sum(p.numel() for p in model.parameters()),
            parameter_bytes=sum(block.nbytes for block in blocks if block.kind == "parameter"),
            compute_capability=tuple(capability),
        )
    except (UsageError, TraceError):
        raise
    except Exception as error:  # a model may raise anything
        operator, module = origin(error)
        raise TraceError(doing, operator, module, error) from error
    finally:
        if collecting:
            gc.enable()


def _record(recorder, step: TrainingStep, inputs, target, enter_policy, training_loop: bool) -> None:
    parameters = list(step.model.parameters())

    def enter(phase: str) -> None:
        recorder.phase = phase
        enter_policy(phase)
        if phase == "optimizer":
            recorder.name((p.grad for p in parameters if p.grad is not None), "gradient")

    step.on_phase = enter
    for number in range(1, STEPS + 1):
        recorder.step, recorder.phase, recorder.keep_operators = number, "forward", number == STEPS
        if number == 1 or training_loop:
            recorder.new_batch((*inputs, target))
        with recorder:
            step(inputs, target)
        state = (v for s in step.optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
        recorder.name(state, "optimizer_state")
    recorder.stop()


def _target_for(recorder, model: nn.Module, inputs: tuple[Tensor, ...], loss: Callable | None) -> Tensor:
    with torch.no_grad(), recorder.watched():
        return targets_for(model.train()(*inputs), loss)
