"""What the stages of a pipeline need to know of a model: its members in the order in which they run, and where stages
may begin.

Start reading at `surveyed`; `featurize.parallel.stages` cuts the model. What runs before the blocks belongs to the
first stage, what runs after them to the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from conf.errors import UsageError
from featurize.batches import Inputs, call, mapped
from featurize.checkpointing import repeated_blocks
from featurize.deeper import container_of
from featurize.parallel.layout import Parallel
from featurize.parallel.layout_modes import EXAMPLE_STARTS

BEFORE = -1  # the place of what runs before the first member


@dataclass(frozen=True)
class Form:
    """What a member of the line gives: the tensor that the next one takes, alone or before things that are no tensors.

    rest  of a tuple, what comes after the tensor; None: the tensor is alone
    """

    rest: tuple[Any, ...] | None

    def of(self, tensor: Tensor) -> Any:
        """Return a tensor in this form."""
        return tensor if self.rest is None else (tensor, *self.rest)


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
        survey.result = _like(result_of(call(model, cast(Inputs, mapped(inputs, watch.cast)))))
    ran = [place for place in range(len(survey.names)) if place in survey.forms]
    if len(ran) < len(survey.names):
        lacking = next(place for place in range(len(survey.names)) if place not in survey.forms)
        raise UsageError(f"parallel: pp: {survey.paths[lacking]} does not run in the forward pass, so no stage has it")
    for path, parameter in model.named_parameters():
        if id(parameter) not in survey.uses:
            survey.uses[id(parameter)] = {_place_of(path, survey.paths)}
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
    container = container_of(model, blocks) if blocks else _sequence_of(model, stages)
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


def _sequence_of(model: nn.Module, stages: int) -> nn.Module | None:
    """The outermost sequence of enough members."""
    return next((one for one in model.modules() if isinstance(one, nn.Sequential) and len(one) >= stages), None)


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
        for one in _flat((args, kwargs or {})):
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
                self._survey.inputs[place] = _like(taken)
            return tree_map(self.cast, (args, kwargs))

        return entered

    def _leaving(self, place: int) -> Callable[..., None]:
        def left(_module: nn.Module, _args: Any, output: Any) -> None:
            self._survey.forms[place], self._survey.outputs[place] = _form_of(output, self._survey.paths[place])
            self._given = next(_flat(output))
            if place == len(self._survey.names) - 1:
                self._now = len(self._survey.names)

        return left


def _form_of(output: Any, path: str) -> tuple[Form, Tensor]:
    if isinstance(output, Tensor):
        return Form(None), _like(output)
    first, *rest = output if isinstance(output, tuple) and output else (None,)
    if isinstance(first, Tensor) and not any(isinstance(one, Tensor) for one in _flat(rest)):
        return Form(tuple(rest)), _like(first)
    raise UsageError(
        f"parallel: pp: {path} gives the next block more than one tensor, or none; stages that send each other one "
        "tensor are estimated"
    )


def _like(tensor: Tensor) -> Tensor:
    """Without what made it."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
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


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _place_of(path: str, members: Sequence[str]) -> int:
    """The place of a parameter that no operator was seen to use: that of its member, or before all of them."""
    return next((place for place, member in enumerate(members) if path.startswith(f"{member}.")), BEFORE)


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
