"""Knows which step and phase a script is in, and which settings it chooses: an optimizer's `step()` ends a step.

Start reading at `StepWatch.install`. After `STEPS` steps the next forward pass ends the process: see `on_done`.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint

from featurize.operators.replacing import replace_in, replaced
from featurize.trace.tracer import STEPS
from learn.script.process_group import RankZero
from learn.script.records import Setting
from learn.script.script_recorder import ScriptRecorder

# Classes of optimizers -> their names, where these are not the classes' own in small letters.
_NAMES = {"adamw8bit": "adamw_8bit", "pagedadamw8bit": "paged_adamw_8bit", "pagedadamw": "paged_adamw"}


class StepWatch:
    """Follows a script's training loop by its optimizers.

    Of several optimizers (a generator's and a discriminator's), a step ends when each has stepped.

    seen   settings of `featurize.job.training_settings.Training` that were chosen; the others have their default
    """

    def __init__(self, recorder: ScriptRecorder, rank: RankZero, on_done: Callable[[], None]) -> None:
        self._recorder, self._rank, self._on_done = recorder, rank, on_done
        self.seen: dict[str, Setting] = {}
        self.steps = 0  # done
        self._by_engine = False  # which updates the model
        self._in_backward = False
        self._in_forward = False  # a forward pass of the step has begun, and no backward pass
        self._backwards = 0  # backward passes of the step that runs
        self.most_backwards = 0
        self.batch_size = 0
        self.optimizer_name = ""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def install(self, enter_policy: Callable[[str], None]) -> None:
        """Hook into every optimizer and every backward pass of this process.

        Args:
            enter_policy: Called with each phase that begins.
        """
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
            if self._in_backward:  # a checkpoint that is recomputed
                backward(*args, **kwargs)
                return
            self._rank.begin_backward()
            self._begin("backward")
            with replaced(self, "_in_backward", True):
                backward(*args, **kwargs)
            self._rank.end_backward()
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
                if isinstance(limit, int | float) and math.isfinite(limit):  # an infinite one measures the norm only
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
        """Note the name of the first optimizer, and the implementation that the script asked of it."""
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
        """The outermost module's forward pass begins."""
        if self._in_backward or not torch.is_grad_enabled():
            return
        with torch._C.DisableTorchFunction():
            samples = _samples(inputs)
            parameter = next(module.parameters(), None)
            if not samples and (parameter is None or not parameter.is_meta):
                return  # on the host, as transforms of images are
        recorder = self._recorder
        if recorder.updated_by_hand and not self._stepped:
            self.optimizer_name = self.optimizer_name or "an optimizer of its own"  # none of torch's
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
        """While entered, an engine updates the model, by optimizers of its own; the step ends with it."""
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
            states = (state.values() for state in optimizer.state.values() if isinstance(state, dict))
            tensors = (value for values in states for value in values if isinstance(value, Tensor))
            self._recorder.memory.name(tensors, "optimizer_state")
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
    """Return the optimizer's name as the project spells it: its class, and `momentum` or `nesterov` for such an SGD."""
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
    """Return how many samples a model's inputs are: the first dimension of the first tensor on the GPU that has one,
    or the length of a list of tensors. 0 where there is neither."""
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
