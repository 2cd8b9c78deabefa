"""A recorder for a script: it discovers the model, the steps and their settings while the script runs.

Start reading at `ScriptRecorder`, which also answers reads of values that meta tensors do not have. `StepWatch.install`
follows the loop: an optimizer's `step()` ends a step, and after `STEPS` steps the next forward pass ends the process.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, optimizer as optimizers
from torch.utils import checkpoint

from featurize.operators.own_operators import whole_elements
from featurize.operators.replacing import replace_in, replaced
from featurize.operators.tensor_parts import is_wrapper, local_tensor, tensors_in
from featurize.recording.block_record import Traits, traits_of
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import BATCH
from featurize.recording.values import ALL_KEPT, READ, UnknownValue
from featurize.trace.tracer import STEPS
from featurize.training.training_step import state_tensors
from learn.script.process_group import RankZero
from learn.script.records import Setting

_TO_COPY, _COPY = "aten::_to_copy", "aten::copy_"
_IN_PLACE_UPDATES = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad", "aten::_amp_")
# Random values of a large tensor on the host are left out, so that its untouched memory is never taken. So are the
# operators by which initialisers adjust a parameter's random values.
_LARGE = 2**20  # elements
_RANDOM = frozenset({"aten::normal_", "aten::uniform_", "aten::exponential_", "aten::log_normal_"})
_ADJUSTING = frozenset(f"aten::{name}_" for name in ("erfinv", "mul", "add", "clamp", "fill", "zero"))


class ScriptRecorder(Recorder):
    """Records all operators of an unmodified script on meta tensors."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.values.keeps_masked = True
        self.updating = False  # whether an optimizer's step is running
        self.trained: set[int] = set()  # storages of the parameters that have gradients
        # Whether one of these was written to after the backward pass, and not by a torch optimizer.
        self.updated_by_hand = False
        self._roots: list[weakref.ref[nn.Module]] = []
        self._copied: dict[int, int] = {}  # block that was copied from the host -> its first dimension
        self._loss = 1.0  # assumed value of a loss whose number of classes is not known

    # -- the model

    def add_model(self, module: nn.Module) -> None:
        """Register a module as a model if no other module calls it."""
        with torch._C.DisableTorchFunction():
            if not self.stack.knows(module):
                self._roots.append(weakref.ref(module))
                self.stack.add(module)

    def _models(self) -> list[nn.Module]:
        """Return the models that have run and still exist."""
        return [module for root in self._roots if (module := root()) is not None]

    def name_states(self) -> None:
        """Label the blocks that are parameters, buffers and gradients of the models that have run."""
        with torch._C.DisableTorchFunction():
            for module in self._models():
                self._name_of_model(module.parameters(), "parameter")
                self._name_of_model(module.buffers(), "buffer")

    def name_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Label the blocks that are gradients, with the parameters that they belong to."""
        with torch._C.DisableTorchFunction():
            parameters = list({id(p): p for p in (*parameters, *self._parameters())}.values())
            self._name_of_model(parameters, "parameter")
            self.trained = {
                local_tensor(p).untyped_storage()._cdata
                for p in parameters
                if p.grad is not None and p.is_meta and p.requires_grad
            }
            self.memory.name((p.grad for p in parameters if p.grad is not None), "gradient")

    def _name_of_model(self, tensors: Iterable[Tensor], kind: str) -> None:
        tensors = [local_tensor(t) for t in tensors if t.is_meta]
        self.memory.name(tensors, kind)
        for block in map(self.memory.block_of, tensors):
            self._copied.pop(block, None)
            if self.log.made_by.get(block) == BATCH:
                del self.log.made_by[block]

    def name_batches(self) -> None:
        """Label the blocks that were copied from the host and belong to no model as a batch."""
        for block in self._copied:
            self.memory.name_block(block, "batch")

    def parameters(self) -> int:
        """Return the number of elements of all parameters of the models that have run."""
        with torch._C.DisableTorchFunction():
            return whole_elements(self._models(), on_meta=True)

    def channels_last(self) -> bool:
        """Return whether the first convolution's weight is in channels-last format."""
        weights = (p for p in self._parameters() if p.dim() == 4 and p.shape[1] > 1 and max(p.shape[2:]) > 1)
        first = next(weights, None)
        return (
            first is not None and not first.is_contiguous() and first.is_contiguous(memory_format=torch.channels_last)
        )

    def weight_dtype(self) -> torch.dtype | None:
        """Return the type of the trainable parameters of the models that have run; None where there are several."""
        dtypes = {p.dtype for p in self._parameters() if p.requires_grad}
        return dtypes.pop() if len(dtypes) == 1 else None

    def _parameters(self) -> Iterator[Tensor]:
        return (p for module in self._models() for p in module.parameters() if p.is_meta)

    def batch_size(self) -> int:
        """Return the commonest first dimension of blocks that were copied from the host and belong to no model."""
        rows = Counter(rows for block, rows in self._copied.items() if self.memory.blocks[block].kind in ("", "batch"))
        return rows.most_common(1)[0][0] if rows else 1

    # -- the operators

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if any(map(is_wrapper, types)):
                return NotImplemented  # PyTorch then runs the subclass's own operators: a DTensor's, on its part
            if not _concerns_meta(args, kwargs):
                if _only_initialises(func, args):
                    return args[0]
                return func(*args, **(kwargs or {}))
            name = func._schema.name
            if self.memory.phase == "optimizer" and not self.updating and not self.updated_by_hand:
                written = tensors_in(args[place] for place in traits_of(func).written if place < len(args))
                self.updated_by_hand = any(tensor.untyped_storage()._cdata in self.trained for tensor in written)
            from_host = name in (_TO_COPY, _COPY) and any(isinstance(a, Tensor) and not a.is_meta for a in args)
            with replaced(self.log, "keep_operators", self.log.keep_operators and not from_host):
                out = super().__torch_dispatch__(func, types, args, kwargs)
            if from_host and name == _TO_COPY and isinstance(out, Tensor) and out.is_meta:
                self._copied_from_host(out)
            elif name == "aten::_log_softmax":
                self._loss = math.log(max(2, args[0].shape[args[1]]))
            return out

    def name_updates_state(self) -> None:
        """Label the blocks that an update without a torch optimizer has allocated and keeps as optimizer state."""
        live = {block for block, _ in self.memory.live.values()}
        for event in self.memory.events:
            if event.phase == "optimizer" and event.block in live:
                self.memory.name_block(event.block, "optimizer_state")

    def _copied_from_host(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:  # a meta tensor has no elements, and PyTorch no sparse products for it
            raise RuntimeError("a sparse tensor cannot be followed onto the GPU; estimate with a dense one")
        block = self.memory.block_in(tensor.untyped_storage()._cdata)
        if block is not None:
            self._copied[block] = tensor.shape[0] if tensor.dim() else 1
            self.log.made_by[block] = BATCH

    def follows_values(self) -> bool:
        """Return whether values are followed: as in any trace, but not between a backward pass and the script's
        update."""
        return not self.updating

    def run(self, func: OpOverload, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        name = traits.name
        if name == READ and args[0].is_meta:
            values = self.values.of(args[0])
            return self._plausible(args[0].dtype) if values is None else values.item()
        if name == _TO_COPY and args[0].is_meta and "device" in kwargs and kwargs["device"].type != "meta":
            return self._on_host(args[0], kwargs.get("dtype"))
        if name == _COPY and not args[0].is_meta and args[1].is_meta:
            return args[0].copy_(self._on_host(args[1], None))
        # The length of a count depends on the values; metrics ask for the least length that they need.
        if name == "aten::bincount":
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return torch.empty(max(1, least), dtype=torch.int64, device="meta")
        if name == "aten::masked_select" and any(self.values.of(argument) is None for argument in args):
            self.values.assume(ALL_KEPT)
            return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
        if name in ("aten::_unique2", "aten::unique_consecutive") and self.values.of(args[0]) is None:
            return self._all_distinct(args[0])
        if name.startswith(_IN_PLACE_UPDATES) and traits.mutates:
            return None if not func._schema.returns else args[0]
        try:
            return super().run(func, traits, args, kwargs)
        except UnknownValue:
            if name in ("aten::equal", "aten::is_nonzero"):
                return True
            raise

    def _all_distinct(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of `unique` for unknown values: all of them distinct."""
        self.values.assume("unique keeps everything where its argument is computed in the step: an upper bound")
        inverse = torch.empty(tensor.shape, dtype=torch.int64, device="meta")
        counts = torch.tensor([1]).expand(tensor.numel()).to("meta")
        return tensor.new_empty(tensor.numel()), inverse, counts

    def _on_host(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        values = self.values.of(tensor)
        if values is None:
            single = tensor.numel() == 1 or tensor.dtype is torch.bool
            fill = self._plausible(tensor.dtype) if single else 0
            values = torch.full(tensor.shape, fill, dtype=tensor.dtype)
        return values.to(dtype or tensor.dtype, copy=True)

    def _plausible(self, dtype: torch.dtype) -> bool | int | float:
        """Return a plausible value of an unknown scalar: a loss, a count of 0, a condition that holds."""
        if dtype is torch.bool:
            return True
        return self._loss if dtype.is_floating_point else 0


def _only_initialises(func: OpOverload, args: Any) -> bool:
    """Return whether an operator fills a large tensor on the host with random values, or adjusts those of a
    parameter."""
    name = func._schema.name
    if not (name in _RANDOM or (name in _ADJUSTING and isinstance(args[0], nn.Parameter))):
        return False
    return bool(args[0].is_floating_point()) and args[0].numel() >= _LARGE


def _concerns_meta(args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether any tensor among the arguments, or the device, is the GPU's."""
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, Tensor):
            if value.is_meta or value.is_sparse:
                return True
        elif isinstance(value, torch.device):
            if value.type == "meta":
                return True
        elif isinstance(value, list | tuple) and _concerns_meta(value):
            return True
    return False


# Classes of optimizers -> their names, where these are not the lower-case class names.
_NAMES = {"adamw8bit": "adamw_8bit", "pagedadamw8bit": "paged_adamw_8bit", "pagedadamw": "paged_adamw"}


class StepWatch:
    """Follows a script's training loop through its optimizers.

    Of several optimizers (a generator's and a discriminator's), a step ends when each has stepped.

    seen   settings of `featurize.job.training_settings.Training` that were chosen; the others have their default
    """

    def __init__(self, recorder: ScriptRecorder, rank: RankZero, on_done: Callable[[], None]) -> None:
        self._recorder, self._rank, self._on_done = recorder, rank, on_done
        self.seen: dict[str, Setting] = {}
        self.steps = 0  # completed steps
        self._by_engine = False  # whether an engine updates the model
        self._in_backward = False
        self._in_forward = False  # whether a forward pass of the step has begun, and no backward pass yet
        self._backwards = 0  # backward passes of the current step
        self.most_backwards = 0
        self.batch_size = 0
        self.optimizer_name = ""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def install(self, enter_policy: Callable[[str], None]) -> None:
        """Hook into every optimizer and every backward pass of this process; `enter_policy` is called with each phase
        that begins."""
        self._enter_policy = enter_policy
        self._watch_settings()
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)

        @replace_in("__call__", torch.nn.Module)  # its hooks for all modules get no keyword arguments
        def call(called: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._recorder.stack.running:
                self._recorder.add_model(module)
                self._forward(module, (args, kwargs))
            return called(module, *args, **kwargs)

        @replace_in("__init__", Optimizer)
        def init(make: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        @replace_in("backward", torch.autograd)
        def run_backward(backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            if self._in_backward:  # a recomputed checkpoint
                backward(*args, **kwargs)
                return
            self._rank.begin_phase("backward")
            self._begin("backward")
            with replaced(self, "_in_backward", True):
                backward(*args, **kwargs)
            self._rank.begin_phase("optimizer")
            self._after_backward()

        @replace_in("zero_grad", Optimizer)
        def watched_zero_grad(zero_grad: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if self._in_forward and not self._backwards:
                with torch._C.DisableTorchFunction():
                    if any(p.grad is not None and p.is_meta for p in _parameters(optimizer)):
                        self.seen["zero_grad"] = "after_forward"
            zero_grad(optimizer, *args, **kwargs)

    def _watch_settings(self) -> None:
        """Watch the functions that clip gradients and checkpoint activations."""

        def clips(name: str, setting: str, keyword: str) -> None:
            @replace_in(name, torch.nn.utils, clip_grad)
            def watched(clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
                limit = args[0] if args else kwargs.get(keyword)
                if isinstance(limit, int | float) and math.isfinite(limit):  # an infinite limit only measures the norm
                    self.seen[setting] = float(limit)
                return clip(parameters, *args, **kwargs)

        clips("clip_grad_norm_", "clip_norm", "max_norm")
        clips("clip_grad_value_", "clip_value", "clip_value")

        @replace_in("checkpoint", checkpoint)
        def watched_checkpoint(recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.seen["checkpointing"] = "selective" if "context_fn" in kwargs else "full"
            if kwargs.get("use_reentrant"):
                self.seen["checkpoint_reentrant"] = True
            return recompute(*args, **kwargs)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note the name of the first optimizer, and the implementation that the script chose."""
        self.optimizer_name = self.optimizer_name or name_of(optimizer)
        group = optimizer.param_groups[0]
        if group.get("fused"):
            self.seen["implementation"] = "fused"
        elif group.get("foreach") is not None:
            self.seen["implementation"] = "foreach" if group["foreach"] else "loop"

    def _begin(self, phase: str) -> None:
        self._recorder.begin_phase(phase)
        self._enter_policy(phase)

    def _forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Begin the forward pass of the outermost module."""
        if self._in_backward or not torch.is_grad_enabled():
            return
        with torch._C.DisableTorchFunction():
            samples = _samples(inputs)
            parameter = next(module.parameters(), None)
            if not samples and (parameter is None or not parameter.is_meta):
                return  # on the host, as transforms of images are
        recorder = self._recorder
        if recorder.updated_by_hand and not self._stepped:
            self.optimizer_name = self.optimizer_name or "an optimizer of its own"  # not a torch optimizer
            recorder.name_updates_state()
            self._end_step()
        if self.steps >= STEPS:
            self._on_done()
        if recorder.memory.phase in ("backward", "optimizer", "setup"):
            recorder.name_states()
            recorder.memory.step = recorder.memory.step or 1
            self._begin("forward")
        self._in_forward = True
        if samples and parameter is not None:
            self.batch_size = samples

    def _after_backward(self) -> None:
        self._backwards += 1
        self._in_forward = False
        self._recorder.name_gradients(p for optimizer in self._optimizers for p in _parameters(optimizer))
        self._begin("optimizer")

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Mark an engine's update of the model by its own optimizers; the step ends on exit."""
        self._begin("optimizer")
        with replaced(self, "_by_engine", True), replaced(self._recorder, "updating", True):
            yield
        self._end_step()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._by_engine:
            self._begin("optimizer")
            self._recorder.updating = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._by_engine:
            return
        self._recorder.updating = False
        again = optimizer in self._stepped
        with torch._C.DisableTorchFunction():
            self._recorder.memory.name(state_tensors(optimizer), "optimizer_state")
            if not _is_on_gpu(optimizer):
                return
            self._stepped.add(optimizer)
            waiting = [o for o in self._optimizers if o not in self._stepped and _is_on_gpu(o)]
        if again or not waiting:
            self.note_optimizer(optimizer)
            self._end_step()

    def _end_step(self) -> None:
        recorder = self._recorder
        self._stepped.clear()
        recorder.updated_by_hand = False
        self.most_backwards = max(self.most_backwards, self._backwards)
        self.steps, self._backwards = self.steps + 1, 0
        self._rank.end_step()
        recorder.log.keep_operators = self.steps + 1 == STEPS
        if self.steps < STEPS:
            recorder.memory.step = self.steps + 1
            self._begin("forward")
            self._rank.begin_step()


def name_of(optimizer: Optimizer) -> str:
    """Return the optimizer's name in this project: its class, or `momentum` or `nesterov` for such an SGD."""
    name = getattr(optimizer, "our_name", type(optimizer).__name__.lower())
    if name == "sgd" and optimizer.param_groups[0].get("momentum"):
        return "nesterov" if optimizer.param_groups[0].get("nesterov") else "momentum"
    if name == "adafactor" and type(optimizer).__module__.startswith("transformers."):
        return "transformers_adafactor"
    return _NAMES.get(name, name)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _is_on_gpu(optimizer: Optimizer) -> bool:
    return any(p.is_meta for p in _parameters(optimizer))


def _samples(inputs: Any) -> int:
    """Return the number of samples in a model's inputs: the first dimension of the first tensor on the GPU that has
    one, or the length of a list of tensors. 0 where there is neither."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.is_meta and inputs.dim() else 0
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if not isinstance(inputs, list | tuple):
        return 0
    for value in inputs:
        if isinstance(value, list) and value and all(isinstance(tensor, Tensor) and tensor.is_meta for tensor in value):
            return len(value)
        if samples := _samples(value):
            return samples
    return 0
