"""A model cut into the stages of a pipeline: each keeps a part of the repeated blocks, in the order in which they run.

Start reading at `surveyed`, which looks at the whole model, and at `cut`. What runs before the blocks belongs to the
first stage, what runs after them to the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from conf.errors import UsageError
from featurize.job.layout import EXAMPLE_STARTS, Parallel
from featurize.nets.checkpointing import repeated_blocks
from featurize.recording.batches import Inputs, call, mapped
from featurize.recording.deeper import container_of

BEFORE = -1  # the place of what runs before the first member


# Puts the tensor that the next member takes into the form in which a member gives it: alone, or before other things.
Form: TypeAlias = Callable[[Tensor], Any]


@dataclass
class Survey:
    """A model's members in the order in which they run, and who uses which parameter.

    container  whose members the stages share
    names      of the members, within the container
    paths      of the members, within the model
    blocks     places of the repeated blocks among them; all places where there are none
    outputs    place -> a tensor like that which the next member takes
    forms      place -> in what form it is given
    inputs     place -> a tensor like that which the member takes, where the model computes it of what the one before
               gave
    uses       parameter (by its id) -> places where it is used; the number of members: after all of them
    result     the tensor among what the model gives that the loss is computed from
    """

    container: nn.Module
    names: list[str]
    paths: list[str]
    blocks: list[int]
    outputs: dict[int, Tensor] = field(default_factory=dict)
    forms: dict[int, Form] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    uses: dict[int, set[int]] = field(default_factory=dict)
    result: Tensor | None = None

    def members(self) -> list[nn.Module]:
        """Return the members themselves."""
        return [self.container._modules[name] for name in self.names]  # type: ignore[misc]


def surveyed(model: nn.Module, inputs: Inputs, stages: int, dtype: torch.dtype | None = None) -> Survey:
    """Run a model once, and return what its stages need to know of it.

    Args:
        model: The whole one, on the meta device.
        inputs: Of one micro-batch.
        stages: Their number.
        dtype: To which `fully_shard` casts parameters and inputs of the units (`MixedPrecisionPolicy`); None: as they
            are.

    Raises:
        UsageError: The model has no blocks in one container, or these give one another more than a tensor.
    """
    survey = _line_of(model, stages)
    watch = _Uses(model, survey, dtype)
    with watch.hooks(), watch:
        survey.result = like(result_of(call(model, cast(Inputs, mapped(inputs, watch.cast)))))
    if lacking := [path for place, path in enumerate(survey.paths) if place not in survey.forms]:
        raise UsageError(f"parallel: pp: {lacking[0]} does not run in the forward pass, so no stage has it")
    for path, parameter in model.named_parameters():
        if id(parameter) not in survey.uses:
            # No operator was seen to use it.
            members = (place for place, member in enumerate(survey.paths) if path.startswith(f"{member}."))
            survey.uses[id(parameter)] = {next(members, BEFORE)}
    return survey


def starts_of(survey: Survey, parallel: Parallel) -> list[int]:
    """Return the places at which the stages begin, and the end of the last one.

    As many blocks to each stage, as Megatron does it. Blocks that stages do not divide are spread as torchtitan does it
    (`generate_llm_fqn_per_model_part`): parameters used before them count as one more, those used after, too.

    Raises:
        UsageError: There are fewer blocks than stages, a path that is no member's, or a stage begins with a member that
            takes another kind of tensor than the one before gives.
    """
    starts = _chosen_starts(survey, parallel)
    for place in starts[1:-1]:
        given, taken = survey.outputs[place - 1], survey.inputs.get(place)
        if taken is not None and (taken.shape, taken.dtype) != (given.shape, given.dtype):
            raise UsageError(
                f"parallel: pp: the model changes what {survey.paths[place - 1]} gives ({_described(given)}) before "
                f"{survey.paths[place]} takes it ({_described(taken)}), so that no stage begins between the two; "
                f"stage_starts names other modules, {EXAMPLE_STARTS}"
            )
    return starts


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _chosen_starts(survey: Survey, parallel: Parallel) -> list[int]:
    stages, count = parallel.stages, len(survey.blocks)
    if parallel.stage_starts is not None:
        return [BEFORE + 1, *_named_starts(survey, parallel.stage_starts), len(survey.names)]
    if count < stages:
        raise UsageError(
            f"parallel: pp: {stages} stages need as many blocks at least, and the model has {count} "
            f"({_some([survey.paths[place] for place in survey.blocks])})"
        )
    places = set().union(*survey.uses.values())
    first, last = survey.blocks[0], survey.blocks[-1]
    uneven = count % stages > 0
    extra = [uneven and any(place < first for place in places), uneven and any(place > last for place in places)]
    sizes = _even(count + sum(extra), stages)
    if sizes[0] > extra[0] and sizes[-1] > extra[1]:
        sizes[0] -= extra[0]
        sizes[-1] -= extra[1]
    else:
        sizes = _even(count, stages)
    starts, at = [0], 0
    for size in sizes[:-1]:
        at += size
        starts.append(survey.blocks[at])
    return [*starts, len(survey.names)]


def _even(count: int, stages: int) -> list[int]:
    each, more = divmod(count, stages)
    return [each + (stage < more) for stage in range(stages)]


def _line_of(model: nn.Module, stages: int) -> Survey:
    blocks = repeated_blocks(model)
    # The outermost one of enough members.
    sequences = (one for one in model.modules() if isinstance(one, nn.Sequential) and len(one) >= stages)
    container = container_of(model, blocks) if blocks else next(sequences, None)
    if container is None:
        raise UsageError(
            "parallel: pp: stages share the blocks of one nn.ModuleList or nn.Sequential, and this model has "
            + ("them in several" if blocks else f"none of {stages} members or more")
        )
    within = next(path for path, module in model.named_modules() if module is container)
    members, chosen = list(container.named_children()), {id(block) for block in blocks}
    if not isinstance(container, nn.Sequential):  # whose other members may run at any time, or not at all
        members = [(name, member) for name, member in members if id(member) in chosen]
    return Survey(
        container=container,
        names=[name for name, _ in members],
        paths=[f"{within}.{name}" if within else name for name, _ in members],
        blocks=[place for place, (_, member) in enumerate(members) if not chosen or id(member) in chosen],
    )


class _Uses(TorchFunctionMode):
    """Notes which member runs while a parameter is used, and what each one gives."""

    def __init__(self, model: nn.Module, survey: Survey, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._survey, self._now, self._dtype = survey, BEFORE, dtype
        self._given: Any = None  # by the last member
        self._parameters = {id(parameter) for parameter in model.parameters()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for one in tree_leaves((args, kwargs)):
            if id(one) in self._parameters:
                self._survey.uses.setdefault(id(one), set()).add(self._now)
        if self._dtype is not None:
            args, kwargs = tree_map(self._gathered, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def cast(self, value: Any) -> Any:
        """Return a tensor of floats in the type that modules compute in, and anything else as it is."""
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if floats and self._dtype is not None else value

    def _gathered(self, value: Any) -> Any:
        return self.cast(value) if id(value) in self._parameters else value

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """While entered, members are followed."""
        handles = []
        for place, member in enumerate(self._survey.members()):
            handles.append(member.register_forward_pre_hook(self._entering(place), with_kwargs=True))
            handles.append(member.register_forward_hook(self._leaving(place)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, place: int) -> Callable[..., None]:
        def entered(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if place < self._now:
                raise UsageError(
                    f"parallel: pp: {self._survey.paths[place]} runs after {self._survey.paths[self._now]}, so that "
                    "no cut between the two is a stage's"
                )
            self._now = place
            taken = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
            if taken is not None and taken is not self._given:
                self._survey.inputs[place] = like(taken)
            return tree_map(self.cast, (args, kwargs))

        return entered

    def _leaving(self, place: int) -> Callable[..., None]:
        def left(_module: nn.Module, _args: Any, output: Any) -> None:
            self._survey.forms[place], self._survey.outputs[place] = _form_of(output, self._survey.paths[place])
            self._given = tree_leaves(output)[0]
            if place == len(self._survey.names) - 1:
                self._now = len(self._survey.names)

        return left


def _form_of(output: Any, path: str) -> tuple[Form, Tensor]:
    if isinstance(output, Tensor):
        return lambda tensor: tensor, like(output)
    first, *rest = output if isinstance(output, tuple) and output else (None,)
    if isinstance(first, Tensor) and not any(isinstance(one, Tensor) for one in tree_leaves(rest)):
        return lambda tensor: (tensor, *rest), like(first)
    raise UsageError(
        f"parallel: pp: {path} gives the next block more than one tensor, or none; stages that send each other one "
        "tensor are estimated"
    )


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of the same form on meta, without what made it.

    Args:
        dtype: Its type; None: the same.
    """
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )


def result_of(output: Any) -> Tensor:
    """Return the tensor among what a model gives that the loss is computed from. Raises `UsageError` for none."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, list | tuple) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"parallel: pp: the model's output ({type(output).__name__}) holds no logits, which the last stage returns"
        )
    return logits


def _named_starts(survey: Survey, given: Sequence[str]) -> list[int]:
    if unknown := [path for path in given if path not in survey.paths[1:]]:
        raise UsageError(
            f"parallel: stage_starts: a stage cannot begin at {', '.join(unknown)}; at these it can: "
            f"{_some(survey.paths[1:])}"
        )
    places = [survey.paths.index(path) for path in given]
    if places != sorted(set(places)):
        raise UsageError("parallel: stage_starts must be in the order in which the modules run, each once")
    return places


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths) if len(paths) <= 6 else f"{', '.join(paths[:4])} to {paths[-1]}"


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
        """Take what is given on: from here on, another stage runs."""
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
        return self.form(self.example)


class _Enter(_PassedBy):
    """Stands for the member before a stage's first one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.form(vars(self)["stage"].arrived())


class _Leave(_PassedBy):
    """Stands for the member after a stage's last one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["stage"].leave(next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)))
        return super().forward()
