"""Knows which step and phase a script is in: an optimizer's `step()` ends a step.

Start reading at `StepWatch.install`. After `STEPS` steps the next forward pass ends the process: see `on_done`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from featurize.replacing import replace_attribute
from featurize.trace import STEPS
from learn.script.choices import Choices, name_of
from learn.script.script_recorder import ScriptRecorder

BY_HAND = "an optimizer of its own"  # the name of an optimizer that is none of torch's


class StepWatch:
    """Follows a script's training loop by its optimizers.

    Of several optimizers (a generator's and a discriminator's), a step ends when each has stepped.
    """

    def __init__(
        self, recorder: ScriptRecorder, enter_policy: Callable[[str], None], on_done: Callable[[], None]
    ) -> None:
        self.steps = 0  # done
        self._by_engine = False  # which updates the model
        self._in_backward = False
        self._in_forward = False  # a forward pass of the step has begun, and no backward pass
        self.backwards = 0  # of the step that runs
        self.most_backwards = 0
        self.batch_size = 0
        self.optimizer_name = ""
        self.choices = Choices()
        self.on_begin: Callable[[], None] = lambda: None  # of a step
        self.on_end: Callable[[], None] = lambda: None
        self.on_backward: Callable[[], None] = lambda: None  # a backward pass begins
        self.on_backward_end: Callable[[], None] = lambda: None
        self._recorder, self._enter_policy, self._on_done = recorder, enter_policy, on_done
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def install(self) -> None:
        """Hook into every optimizer and every backward pass of this process."""
        self._recorder.on_forward = self._forward
        self._recorder.follow_calls()
        self.choices.install()
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        made = Optimizer.__init__
        backward = torch.autograd.backward
        zero_grad = Optimizer.zero_grad

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        def run_backward(*args: Any, **kwargs: Any) -> None:
            if self._in_backward:  # of a checkpoint that is recomputed
                backward(*args, **kwargs)
                return
            self.on_backward()
            self._begin("backward")
            self._in_backward = True
            try:
                backward(*args, **kwargs)
            finally:
                self._in_backward = False
            self.on_backward_end()
            self._after_backward()

        @functools.wraps(zero_grad)
        def watched_zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if self._in_forward and not self.backwards:
                self._note_late_zero_grad(optimizer)
            zero_grad(optimizer, *args, **kwargs)

        replace_attribute(Optimizer, "__init__", init)
        replace_attribute(Optimizer, "zero_grad", watched_zero_grad)
        replace_attribute(torch.autograd, "backward", run_backward)

    def _note_late_zero_grad(self, optimizer: Optimizer) -> None:
        with torch._C.DisableTorchFunction():
            if any(p.grad is not None and p.is_meta for group in optimizer.param_groups for p in group["params"]):
                self.choices.seen["zero_grad"] = "after_forward"

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
            self.optimizer_name = self.optimizer_name or BY_HAND
            recorder.name_updates_state()
            self._end_step()
        if self.steps >= STEPS:
            self._on_done()
        if recorder.phase in ("backward", "optimizer", "setup"):
            recorder.name_states()
            if recorder.step == 0:
                recorder.step = 1
            self._begin("forward")
        self._in_forward = True
        if samples and parameter is not None:
            self.batch_size = samples

    def _after_backward(self) -> None:
        self.backwards += 1
        self._in_forward = False
        parameters = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        self._recorder.name_gradients(parameters)
        self._begin("optimizer")

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """While entered, an engine updates the model, by optimizers of its own; the step ends with it."""
        self._begin("optimizer")
        self._by_engine = self._recorder.updating = True
        try:
            yield
        finally:
            self._by_engine = self._recorder.updating = False
        self._end_step()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._by_engine:
            return
        self._begin("optimizer")
        self._recorder.updating = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._by_engine:
            return
        recorder = self._recorder
        recorder.updating = False
        with torch._C.DisableTorchFunction():
            recorder.name(
                (
                    v
                    for s in optimizer.state.values()
                    if isinstance(s, dict)
                    for v in s.values()
                    if isinstance(v, Tensor)
                ),
                "optimizer_state",
            )
            trains = any(p.is_meta for group in optimizer.param_groups for p in group["params"])
        if not trains:
            return
        again = optimizer in self._stepped
        self._stepped.add(optimizer)
        with torch._C.DisableTorchFunction():
            waiting = [o for o in self._optimizers if o not in self._stepped and _has_gradients(o)]
        if waiting and not again:
            return
        self.optimizer_name = self.optimizer_name or name_of(optimizer)
        self.choices.of_optimizer(optimizer)
        self._end_step()

    def _end_step(self) -> None:
        recorder = self._recorder
        self._stepped.clear()
        recorder.updated_by_hand = False
        self.most_backwards = max(self.most_backwards, self.backwards)
        self.steps, self.backwards = self.steps + 1, 0
        self.on_end()
        if self.steps < STEPS:
            recorder.step, recorder.keep_operators = self.steps + 1, self.steps + 1 == STEPS
            self._begin("forward")
            self.on_begin()
        else:
            recorder.keep_operators = False


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.is_meta for group in optimizer.param_groups for p in group["params"])


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
        if isinstance(value, list) and value and all(isinstance(one, Tensor) and one.is_meta for one in value):
            return len(value)
        if samples := _samples(value):
            return samples
    return 0
