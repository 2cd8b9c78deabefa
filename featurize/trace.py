"""The execution trace: which operators one training step runs, and when its memory is taken and given back.

Start reading at `trace_config` and `StepTrace`. Facts only, of no particular GPU model: `featurize.simulate` prices
them. Everything runs on the meta device, so nothing that the model or the batch needs is allocated.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from featurize import op_cost
from featurize.cuda_policy import as_on_cuda
from featurize.training import AUTOCAST_DTYPES, Training, TrainingSettings, TrainingStep
from featurize.trial import TrialConfig

STEPS = 2  # the optimizer makes its state in the first; the second is as all later ones
PHASES = ("setup", "forward", "backward", "optimizer")
BLOCK_KINDS = (
    "parameter", "buffer", "batch", "gradient", "optimizer_state",
    "activation",  # made by a forward pass and needed by the backward
    "workspace",  # taken by a kernel for its own run
    "spare_workspace",  # the same, where the library has a slower algorithm that needs none
    "temporary",
)  # fmt: skip


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


class Event(NamedTuple):
    """Memory taken (`nbytes` > 0) or given back (< 0), in order. `block` indexes `StepTrace.blocks`."""

    block: int
    nbytes: int
    step: int  # 0 for what exists before the first step
    phase: str


class Block(NamedTuple):
    """One storage, whatever number of views it has."""

    nbytes: int
    kind: str


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
        """The most bytes alive at once, without any allocator's rounding."""
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


def trace_config(config: TrialConfig, *, compute_capability: tuple[int, int] = (8, 0)) -> StepTrace:
    """The trace of one training step of a family's model."""
    from featurize.families import get_family

    family = get_family(config.family)
    return trace_step(
        lambda: family.build(config),
        lambda device: family.batch(config, device),
        config,
        compute_capability=compute_capability,
    )


def trace_step(
    model_factory: Callable[[], nn.Module],
    batch: Callable[[str], tuple[tuple[Tensor, ...], Tensor]],
    settings: TrainingSettings | None = None,
    *,
    compute_capability: tuple[int, int] = (8, 0),
) -> StepTrace:
    """The trace of one training step as CUDA would run it; Adam and fp32 unless `settings` say otherwise.

    `model_factory` runs with meta as the default device; `batch("meta")` gives `(inputs, targets)`.
    `compute_capability` decides which attention kernels there are. What is modelled of CUDA's own behaviour:
    autocast's casts and its cache of weights, fused attention, fused dropout, for-each optimizers, flash attention's
    workspace, convolutions' layout copies. What is not: the algorithms that cuDNN picks, its fused recurrent layers.
    Raises what the model raises, for instance when its forward pass reads a value back (`.item()`).
    """
    settings = settings or Training()
    collecting = gc.isenabled()
    gc.disable()  # a collection at a random moment would make two traces differ
    try:
        with torch.device("meta"):
            model = model_factory()
            inputs, targets = batch("meta")
        recorder = _Recorder()
        step = TrainingStep(model, settings, "meta")
        recorder.hold(model.parameters(), "parameter")
        recorder.hold(model.buffers(), "buffer")
        recorder.hold((*inputs, targets), "batch")
        with as_on_cuda(AUTOCAST_DTYPES.get(settings.precision), compute_capability) as enter_policy:
            _record(recorder, step, inputs, targets, enter_policy)
        blocks = recorder.final_blocks()
        return StepTrace(
            operators=tuple(recorder.operators),
            events=tuple(recorder.events),
            blocks=tuple(blocks),
            parameters=sum(p.numel() for p in model.parameters()),
            parameter_bytes=sum(block.nbytes for block in blocks if block.kind == "parameter"),
            compute_capability=tuple(compute_capability),
        )
    finally:
        if collecting:
            gc.enable()


def _record(recorder: _Recorder, step: TrainingStep, inputs, targets, enter_policy: Callable[[str], None]) -> None:
    parameters = list(step.model.parameters())

    def enter(phase: str) -> None:
        recorder.phase = phase
        enter_policy(phase)
        if phase == "optimizer":
            recorder.name((p.grad for p in parameters if p.grad is not None), "gradient")

    step.on_phase = enter
    for number in range(1, STEPS + 1):
        recorder.step, recorder.phase, recorder.keep_operators = number, "forward", number == STEPS
        with recorder:
            step(inputs, targets)
        state = (v for s in step.optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
        recorder.name(state, "optimizer_state")
    recorder.stop()


class _Recorder(TorchDispatchMode):
    """Sees every operator below autograd, and every storage's first sight and end."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.events: list[Event] = []
        self.step, self.phase, self.keep_operators = 0, "setup", False
        self._sizes: list[int] = []
        self._kinds: list[str | None] = []
        # storage -> its block, and the reference whose callback tells of its end
        self._live: dict[int, tuple[int, weakref.ref]] = {}
        self._traits: dict[object, _Traits] = {}

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Blocks that exist before the first step."""
        for tensor in tensors:
            if tensor.device.type == "meta":
                self._see(tensor.untyped_storage(), kind)

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what live blocks are."""
        for tensor in tensors:
            if tensor.device.type == "meta":
                self._see(tensor.untyped_storage(), kind)
                block = self._live[tensor.untyped_storage()._cdata][0]
                if self._kinds[block] is None:
                    self._kinds[block] = kind

    def stop(self) -> None:
        """End the record: what dies from here on is not the step's doing."""
        self._live.clear()

    def final_blocks(self) -> list[Block]:
        """The blocks, those without a name classified by their lifetime."""
        forward: dict[int, int] = {}
        kept: set[int] = set()
        for event in self.events:
            if event.nbytes > 0 and event.phase == "forward":
                forward[event.block] = event.step
            elif event.nbytes < 0 and event.block in forward:
                outlived = event.phase != "forward" or event.step != forward[event.block]
                if outlived:
                    kept.add(event.block)
        return [
            Block(size, kind or ("activation" if block in kept else "temporary"))
            for block, (size, kind) in enumerate(zip(self._sizes, self._kinds, strict=True))
        ]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = _Traits(func)
        out = func(*args, **kwargs)
        if traits.view:
            return out
        outputs = _meta_tensors((out,))
        inputs = _meta_tensors(args)
        if kwargs:
            inputs += _meta_tensors(kwargs.values())
        if not (inputs or outputs):  # an optimizer's step counter: host arithmetic
            return out
        for tensor in inputs:  # a constant that the model holds without registering it as a buffer
            self._see(tensor.untyped_storage(), "buffer")
        fresh = False
        for tensor in outputs:
            fresh |= self._see(tensor.untyped_storage(), None)
        if traits.workspaces is not None:
            for nbytes in traits.workspaces(args, outputs):
                self._give_back(self._take(nbytes, traits.workspace_kind))
        if self.keep_operators and traits.kernel and (fresh or traits.mutates):
            self._note(traits, args, inputs, outputs)
        return out

    def _note(self, traits: _Traits, args, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        written = {id(t) for i in traits.written for t in _meta_tensors(args[i : i + 1])}
        seen: set[int] = set()
        reads = writes = elements = 0
        for tensor in inputs:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            nbytes = _nbytes(tensor)
            if id(tensor) in written:
                writes += nbytes
                reads += 0 if traits.write_only else nbytes
            else:
                reads += nbytes
            elements = max(elements, tensor.numel())
        for tensor in outputs:
            if id(tensor) not in seen:
                writes += _nbytes(tensor)
                elements = max(elements, tensor.numel())
        if traits.gathers:
            source = _nbytes(args[0])
            reads += min(source, writes) - source
            elements = max(t.numel() for t in outputs)
        launches = 1
        if traits.foreach:
            lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
            sizes = [t.numel() for t in lists[0]]
            elements = sum(sizes)
            launches = op_cost.foreach_launches(len(lists), sizes)
        floating = next((t for t in (*outputs, *inputs) if t.is_floating_point()), None)
        dtype = (floating if floating is not None else (outputs or inputs)[0]).dtype
        self.operators.append(
            Operator(
                traits.name,
                self.phase,
                str(dtype).removeprefix("torch."),
                tuple(tuple(t.shape) for t in inputs),
                tuple(tuple(t.shape) for t in outputs),
                op_cost.flops(traits.name, args, outputs, elements),
                reads,
                writes,
                launches,
            )
        )

    def _see(self, storage: torch.UntypedStorage, kind: str | None) -> bool:
        """Register a storage on first sight; whether it was the first."""
        key = storage._cdata
        if key in self._live:
            return False
        nbytes = storage.nbytes()
        block = self._take(nbytes, kind)

        def died(_: weakref.ref, key: int = key, block: int = block) -> None:
            if self._live.pop(key, None) is not None:
                self._give_back(block)

        self._live[key] = (block, weakref.ref(storage, died))
        return True

    def _take(self, nbytes: int, kind: str | None) -> int:
        self._sizes.append(nbytes)
        self._kinds.append(kind)
        self.events.append(Event(len(self._sizes) - 1, nbytes, self.step, self.phase))
        return len(self._sizes) - 1

    def _give_back(self, block: int) -> None:
        self.events.append(Event(block, -self._sizes[block], self.step, self.phase))


class _Traits:
    """What is the same for every call of one operator overload."""

    __slots__ = (
        "foreach", "gathers", "kernel", "mutates", "name", "view", "workspace_kind", "workspaces",
        "write_only", "written",
    )  # fmt: skip

    def __init__(self, func) -> None:
        schema = func._schema
        self.name: str = schema.name
        self.view: bool = func.is_view
        self.written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        self.mutates = bool(self.written)
        self.kernel = self.name not in op_cost.NO_KERNEL
        self.gathers = self.name in op_cost.GATHERS
        self.write_only = self.name in op_cost.WRITE_ONLY
        self.foreach = self.name.startswith("aten::_foreach_")
        self.workspaces = _WORKSPACES.get(self.name)
        self.workspace_kind = "spare_workspace" if self.name.startswith("aten::convolution") else "workspace"


def _flash_backward_workspace(args, outputs) -> tuple[int, ...]:
    """Bytes of the fp32 query-gradient accumulator and row sums of csrc/flash_attn/flash_api.cpp, mha_bwd."""
    batch, heads, length, width = args[1].shape
    rows = batch * heads * (-(-length // 128) * 128)
    return (4 * rows * (-(-width // 32) * 32) + 4 * rows,)


def _convolution_workspace(args, outputs) -> tuple[int, ...]:
    """cuDNN's tensor-core kernels want channels last; for other layouts it makes copies of all three tensors.

    First order: which algorithm cuDNN picks, and so its true workspace, is its secret."""
    x, weight = args[:2]
    if x.dim() != 4 or x.is_contiguous(memory_format=torch.channels_last):
        return ()
    return (_nbytes(x) + _nbytes(weight) + _nbytes(outputs[0]),)


def _convolution_backward_workspace(args, outputs) -> tuple[int, ...]:
    grad, x, weight = args[:3]
    if x.dim() != 4 or x.is_contiguous(memory_format=torch.channels_last):
        return ()
    whole = _nbytes(grad) + _nbytes(x) + _nbytes(weight)
    return (whole,) * (bool(args[10][0]) + bool(args[10][1]))


_WORKSPACES = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward_workspace,
    "aten::convolution": _convolution_workspace,
    "aten::convolution_backward": _convolution_backward_workspace,
}


def _meta_tensors(values: Iterable) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_meta:
                found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(v for v in value if isinstance(v, Tensor) and v.is_meta)
    return found


def _nbytes(tensor: Tensor) -> int:
    """Bytes that reading it once takes; an expanded tensor is no larger than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
