"""A model cut into the stages of a pipeline: each keeps a part of the repeated blocks, in the order in which they run.

Start reading at `cut`; `featurize.parallel.survey` looks at the whole model before. What runs before the blocks belongs
to the first stage, what runs after them to the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from featurize.batches import Inputs
from featurize.parallel.survey import BEFORE, Form, Survey, result_of


class Stage:
    """A model that runs as one stage, made by `cut`: its first argument is what the stage before gave.

    first, last   whether it is the first or the last one
    received, given   tensors like those that it receives and gives; the first stage receives none
    """

    def __init__(self, model: nn.Module, survey: Survey, begin: int, end: int, inputs: Inputs) -> None:
        self.model = model
        self.first, self.last = begin == 0, end == len(survey.names)
        self.received = None if self.first else survey.outputs[begin - 1]
        self.given = survey.result if self.last else survey.outputs[end - 1]
        self.pause: Callable[[bool], None] = lambda paused: None
        self._inputs, self._forward = inputs, _WithOwnHooks(model)
        self._arriving: Tensor | None = None
        self._leaving: Tensor | None = None
        self._output: Any = None
        vars(model)["forward"] = self._run  # shadows the class's method

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_grad_enabled()
        try:
            if self.first:
                out = self._forward(*args, **kwargs)
            else:
                self._arriving = args[0]
                self._stop()
                inputs = self._inputs
                out = self._forward(**inputs) if isinstance(inputs, dict) else self._forward(*inputs)
            if not self.last:
                return self._leaving
            self._output = out
            return result_of(out)
        finally:
            self._arriving = self._leaving = None
            self.pause(False)
            torch.set_grad_enabled(enabled)

    def output(self) -> Any:
        """Return all that the last stage gave, once: schedules know tensors only."""
        output, self._output = self._output, None
        return output

    def arrived(self) -> Tensor:
        """Return what the stage before gave: from here on, it is this stage that runs."""
        assert self._arriving is not None, "a stage runs from its beginning"
        arriving, self._arriving = self._arriving, None
        self.pause(False)
        torch.set_grad_enabled(True)
        return arriving

    def leave(self, tensor: Tensor) -> None:
        """Hear what is given on: from here on, it is another stage that runs."""
        self._leaving = tensor
        self._stop()

    def _stop(self) -> None:
        self.pause(True)
        torch.set_grad_enabled(False)


class _WithOwnHooks:
    """A model's whole forward pass with the hooks of its own, which what a stage gives does not go through. Takes them
    from the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._forward = model, model.forward
        self._before = [
            (one, key in model._forward_pre_hooks_with_kwargs) for key, one in _taken(model._forward_pre_hooks)
        ]
        self._after = [(one, key in model._forward_hooks_with_kwargs) for key, one in _taken(model._forward_hooks)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook, takes_named in self._before:
            if takes_named:
                args, kwargs = hook(self._model, args, kwargs) or (args, kwargs)
            elif (changed := hook(self._model, args)) is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        out = self._forward(*args, **kwargs)
        for hook, takes_named in self._after:
            named = (kwargs,) if takes_named else ()
            if (changed := hook(self._model, args, *named, out)) is not None:
                out = changed
        return out


def _taken(hooks: dict[int, Any]) -> list[tuple[int, Any]]:
    taken = list(hooks.items())
    hooks.clear()
    return taken


def cut(model: nn.Module, survey: Survey, begin: int, end: int, inputs: Inputs) -> Stage:
    """Leave in a model what one stage needs. Changes the model.

    Modules outside of the blocks stay, so that what they compute without parameters (positions, masks) is there in
    each stage; they run unrecorded where it is not theirs.

    Args:
        model: The whole one, as it was surveyed.
        survey: Of it.
        begin: Place of the stage's first member.
        end: The place after its last one.
        inputs: Of one micro-batch, which stages but the first need for what they compute of it themselves.
    """
    places = set(range(begin, end))
    places |= {BEFORE} if begin == 0 else set()
    places |= {len(survey.names)} if end == len(survey.names) else set()
    stage = Stage(model, survey, begin, end, inputs)
    for place, name in enumerate(survey.names):
        if place in places:
            continue
        kind = _Enter if place == begin - 1 else _Leave if place == end else _PassedBy
        survey.container._modules[name] = kind(survey.forms[place], survey.outputs[place].detach(), stage)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not survey.uses[id(parameter)] & places:
                del module._parameters[name]
                vars(module)[name] = parameter.detach()
    return stage


class _PassedBy(nn.Module):
    """Stands for a member of another stage: gives a tensor like its own, whatever comes in."""

    def __init__(self, form: Form, example: Tensor, stage: Stage) -> None:
        super().__init__()
        self.form = form
        self.example = example
        vars(self)["stage"] = stage  # not as a submodule: it holds the model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.form.of(self.example)


class _Enter(_PassedBy):
    """Stands for the member before a stage's first one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.form.of(vars(self)["stage"].arrived())


class _Leave(_PassedBy):
    """Stands for the member after a stage's last one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["stage"].leave(next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)))
        return super().forward()
