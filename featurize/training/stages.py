"""A model cut into the stages of a pipeline, each with a part of the repeated blocks, and passes that repeat.

Start reading at `survey_model`, which inspects the whole model, and at `Stage`. Code before the blocks belongs to the
first stage, code after them to the last one. `RepeatedPasses.run` runs one pass of a stage and notes its operators, its
collectives, and its allocations and frees. That record is repeated for other micro-batches, with tensors in place of
the stage's results.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from conf.errors import UsageError
from featurize.job.layout import EXAMPLE_STARTS, Parallel
from featurize.nets.checkpointing import repeated_blocks
from featurize.operators.replacing import all_replaced
from featurize.recording.block_record import BlockRecord, RecordMoment, Stretch
from featurize.recording.recorder import Recorder
from featurize.recording.skeleton import container_of
from featurize.recording.step_trace import Operator
from featurize.recording.values import Inputs, call, mapped
from featurize.training.rank import SentNote, StepMoment, Streams
from featurize.training.training_step import logits_of

if TYPE_CHECKING:
    from featurize.training.sharded_rank import ShardStates


BEFORE = -1  # the place of code before the first member


# Puts a member's input tensor into the form in which a member returns it: alone, or before other values.
Form: TypeAlias = Callable[[Tensor], Any]


@dataclass
class Survey:
    """A model's members in the order in which they run, and the members that use each parameter.

    container  the container whose members the stages share
    names      the members' names within the container
    paths      the members' paths within the model
    blocks     places of the repeated blocks among them; all places if there are none
    outputs    place -> a tensor like the one that the next member takes
    forms      place -> the form in which it is returned
    inputs     place -> a tensor like the one that the member takes, if the model computes it from the previous member's
               output
    uses       id of a parameter -> places where it is used; the number of members stands for code after all of them
    result     the tensor among the model's outputs that the loss is computed from
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


def survey_model(model: nn.Module, inputs: Inputs, stages: int, dtype: torch.dtype | None = None) -> Survey:
    """Run a model once, and return the survey that its stages need.

    Args:
        model: The whole model, on the meta device.
        inputs: Inputs of one micro-batch.
        stages: Number of stages.
        dtype: Type to which `fully_shard` casts parameters and inputs of the units (`MixedPrecisionPolicy`); None: no
            cast.

    Raises:
        UsageError: The model has no blocks in one container, or these pass more than a tensor to each other.
    """
    survey = _line_of(model, stages)
    watch = _Uses(model, survey, dtype)
    with contextlib.ExitStack() as hooks, watch:
        for place, member in enumerate(survey.members()):
            on_entry, on_exit = functools.partial(watch.entered, place), functools.partial(watch.left, place)
            hooks.enter_context(member.register_forward_pre_hook(on_entry, with_kwargs=True))
            hooks.enter_context(member.register_forward_hook(on_exit))
        survey.result = like(result_of(call(model, cast(Inputs, mapped(inputs, watch.cast)))))
    if lacking := [path for place, path in enumerate(survey.paths) if place not in survey.forms]:
        raise UsageError(f"parallel: pp: {lacking[0]} does not run in the forward pass, so no stage has it")
    for path, parameter in model.named_parameters():
        if id(parameter) not in survey.uses:
            # No operator used it.
            members = (place for place, member in enumerate(survey.paths) if path.startswith(f"{member}."))
            survey.uses[id(parameter)] = {next(members, BEFORE)}
    return survey


def starts_of(survey: Survey, parallel: Parallel) -> list[int]:
    """Return the places at which the stages begin, and the end of the last one.

    Each stage gets equally many blocks, as in Megatron. Blocks that the stages do not divide are spread as in
    torchtitan (`generate_llm_fqn_per_model_part`): parameters before them count as one block, and so do those after
    them.

    Raises:
        UsageError: There are fewer blocks than stages, a path is not a member's, or a stage begins with a member that
            takes another kind of tensor than the previous one returns.
    """
    starts = _chosen_starts(survey, parallel)
    for place in starts[1:-1]:
        given, accepted = survey.outputs[place - 1], survey.inputs.get(place)
        if accepted is not None and (accepted.shape, accepted.dtype) != (given.shape, given.dtype):
            raise UsageError(
                f"parallel: pp: the model changes what {survey.paths[place - 1]} gives ({_describe(given)}) before "
                f"{survey.paths[place]} takes it ({_describe(accepted)}), so that no stage begins between the two; "
                f"stage_starts names other modules, {EXAMPLE_STARTS}"
            )
    return starts


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _chosen_starts(survey: Survey, parallel: Parallel) -> list[int]:
    stages, count = parallel.stages, len(survey.blocks)
    if parallel.pipeline.stage_starts is not None:
        return [BEFORE + 1, *_named_starts(survey, parallel.pipeline.stage_starts), len(survey.names)]
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
    later = (survey.blocks[position] for position in itertools.accumulate(sizes[:-1]))
    return [0, *later, len(survey.names)]


def _even(count: int, stages: int) -> list[int]:
    quotient, remainder = divmod(count, stages)
    return [quotient + (stage < remainder) for stage in range(stages)]


def _line_of(model: nn.Module, stages: int) -> Survey:
    blocks = repeated_blocks(model)
    # The outermost container with enough members.
    sequences = (
        sequence for sequence in model.modules() if isinstance(sequence, nn.Sequential) and len(sequence) >= stages
    )
    container = container_of(model, blocks) if blocks else next(sequences, None)
    if container is None:
        raise UsageError(
            "parallel: pp: stages share the blocks of one nn.ModuleList or nn.Sequential, and this model has "
            + ("them in several" if blocks else f"none of {stages} members or more")
        )
    within = next(path for path, module in model.named_modules() if module is container)
    members, chosen = list(container.named_children()), {id(block) for block in blocks}
    if not isinstance(container, nn.Sequential):  # its other members may run at any time, or not at all
        members = [(name, member) for name, member in members if id(member) in chosen]
    return Survey(
        container=container,
        names=[name for name, _ in members],
        paths=[f"{within}.{name}" if within else name for name, _ in members],
        blocks=[place for place, (_, member) in enumerate(members) if not chosen or id(member) in chosen],
    )


class _Uses(TorchFunctionMode):
    """Notes the running member for each use of a parameter, and the output of each member."""

    def __init__(self, model: nn.Module, survey: Survey, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._survey, self._now, self._dtype = survey, BEFORE, dtype
        self._given: Any = None  # output of the last member
        self._parameters = {id(parameter) for parameter in model.parameters()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self._parameters:
                self._survey.uses.setdefault(id(leaf), set()).add(self._now)
        if self._dtype is not None:
            args, kwargs = tree_map(
                lambda leaf: self.cast(leaf) if id(leaf) in self._parameters else leaf, (args, kwargs)
            )
        return func(*args, **(kwargs or {}))

    def cast(self, value: Any) -> Any:
        """Return a floating-point tensor in the type that modules compute in, and other values unchanged."""
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if floats and self._dtype is not None else value

    def entered(self, place: int, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin a member's forward pass, with its inputs in the type that it computes in."""
        if place < self._now:
            raise UsageError(
                f"parallel: pp: {self._survey.paths[place]} runs after {self._survey.paths[self._now]}, so that "
                "no cut between the two is a stage's"
            )
        self._now = place
        accepted = _first_tensor(args, kwargs)
        if accepted is not None and accepted is not self._given:
            self._survey.inputs[place] = like(accepted)
        return tree_map(self.cast, (args, kwargs))

    def left(self, place: int, _module: nn.Module, _args: Any, output: Any) -> None:
        """End a member's forward pass."""
        self._survey.forms[place], self._survey.outputs[place] = _form_of(output, self._survey.paths[place])
        self._given = tree_leaves(output)[0]
        if place == len(self._survey.names) - 1:
            self._now = len(self._survey.names)


def _first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    return next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)), None)


def _form_of(output: Any, path: str) -> tuple[Form, Tensor]:
    if isinstance(output, Tensor):
        return lambda tensor: tensor, like(output)
    first, *rest = output if isinstance(output, tuple) and output else (None,)
    if isinstance(first, Tensor) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(rest)):
        return lambda tensor: (tensor, *rest), like(first)
    raise UsageError(
        f"parallel: pp: {path} gives the next block more than one tensor, or none; stages that send each other one "
        "tensor are estimated"
    )


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of the same form on meta, without its history.

    Args:
        dtype: Type of the result; None: the same.
    """
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )


def result_of(output: Any) -> Tensor:
    """Return the tensor among a model's outputs that the loss is computed from. Raises `UsageError` if there is
    none."""
    if not isinstance(logits := logits_of(output), Tensor):
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
    """A model reduced to one stage, which changes it: its first argument is the previous stage's output.

    Modules outside of the blocks stay, so that values that they compute without parameters (positions, masks) exist in
    each stage; they run unrecorded in the other stages. The model's own hooks still apply to its whole forward pass.

    Args:
        model: The whole model, as it was surveyed.
        survey: The model's survey.
        begin: Place of the stage's first member.
        end: The place after its last one.
        inputs: One micro-batch. Stages after the first need it for values that they compute from it.
        recorder: The step's recorder.

    first, last   whether it is the first or the last stage
    received, given   tensors like its input and its output; the first stage receives none
    """

    def __init__(
        self, model: nn.Module, survey: Survey, begin: int, end: int, inputs: Inputs, recorder: Recorder
    ) -> None:
        self.model, self._recorder = model, recorder
        self.first, self.last = begin == 0, end == len(survey.names)
        self.received = None if self.first else survey.outputs[begin - 1]
        self.given = survey.result if self.last else survey.outputs[end - 1]
        self._inputs = inputs
        self._arriving: Tensor | None = None
        self._leaving: Tensor | None = None
        self._output: Any = None
        for place, name in enumerate(survey.names):
            if not begin <= place < end:
                survey.container._modules[name] = _Placeholder(
                    survey.forms[place], self._giver(survey, place, begin, end)
                )
        # With the code before the first member, and that after the last one.
        own_places = set(range(begin - self.first, end + self.last))
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and not survey.uses[id(parameter)] & own_places:
                    del module._parameters[name]
                    vars(module)[name] = parameter.detach()
        self._own = {name: getattr(model, name) for name in ("_forward_pre_hooks", "_forward_hooks", "forward")}
        self._own |= {"_backward_hooks": {}, "_backward_pre_hooks": {}}  # these apply to the stage
        vars(model).update(_forward_pre_hooks=OrderedDict(), _forward_hooks=OrderedDict(), forward=self._run)

    def _giver(self, survey: Survey, place: int, begin: int, end: int) -> Callable[[Tensor | None], Tensor]:
        """Return what gives the next member's input in place of a member of another stage."""
        example = survey.outputs[place].detach()
        if place == begin - 1:
            return self._arrive
        if place == end:
            return functools.partial(self._leave, survey.paths[place], example)
        return lambda _taken: example

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's whole forward pass, with its own hooks. It is not run on a copy, as members and hooks may
        read attributes of the model."""
        with all_replaced((self.model, name, value) for name, value in self._own.items()):
            return self.model(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_grad_enabled()
        try:
            if self.first:
                out = self._whole(*args, **kwargs)
            else:
                self._arriving = args[0]
                self._stop()
                inputs = self._inputs
                out = self._whole(**inputs) if isinstance(inputs, dict) else self._whole(*inputs)
            if not self.last:
                return self._leaving
            self._output = out
            return result_of(out)
        finally:
            self._arriving = self._leaving = None
            self._recorder.paused = False
            torch.set_grad_enabled(enabled)

    def output(self) -> Any:
        """Return the last stage's full output, once: schedules handle tensors only."""
        output, self._output = self._output, None
        return output

    def _arrive(self, _taken: Tensor | None) -> Tensor:
        """Return the previous stage's result: from here on, this stage runs."""
        assert self._arriving is not None, "a stage runs from its beginning"
        arriving, self._arriving = self._arriving, None
        self._recorder.paused = False
        torch.set_grad_enabled(True)
        return arriving

    def _leave(self, path: str, example: Tensor, taken: Tensor | None) -> Tensor:
        """Store the result that is passed on, and return a tensor in place of the next member's: another stage runs
        from here on. Raises `UsageError` with that member's path if it takes no tensor."""
        if taken is None:
            raise UsageError(
                f"parallel: pp: {path} takes its tensor inside another argument, or none, and stages send each other "
                "one tensor; let it take that as an argument of its own"
            )
        self._leaving = taken
        self._stop()
        return example

    def _stop(self) -> None:
        self._recorder.paused = True
        torch.set_grad_enabled(False)


class _Placeholder(nn.Module):
    """Replaces a member of another stage: `give(input tensor)` is the next member's input."""

    def __init__(self, form: Form, give: Callable[[Tensor | None], Tensor]) -> None:
        super().__init__()
        self._form, self._give = form, give

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._form(self._give(_first_tensor(args, kwargs)))


FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"  # kinds of passes


class DoesNotRepeat(Exception):
    """A pass did something that another one cannot repeat: each pass has to run."""


class _Result(NamedTuple):
    """A tensor that a pass returns: its block, and its form."""

    block: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Held(NamedTuple):
    """A storage that outlives passes: its block before a pass, and its block after it."""

    storage: int
    before: int
    after: int


class _Note(NamedTuple):
    """The record of a pass. Numbers of operators count from the start of its step.

    stretch     its events in memory
    kept        blocks that earlier passes of the micro-batch keep for later ones
    keeps       the same after this pass
    held        storages with another block before each pass
    results     its results
    operators   its operators
    sent        its collectives
    state       state of the stage's shards afterwards
    began, ended   the moments before and after it
    """

    stretch: Stretch
    kept: list[int]
    keeps: list[int]
    held: list[_Held]
    results: list[_Result | None]
    operators: list[Operator]
    sent: list[SentNote]
    state: Hashable
    began: StepMoment
    ended: StepMoment


class RepeatedPasses:
    """Runs passes of the stages of one rank, or repeats recorded ones.

    Args:
        recorder: The step's recorder.
        streams: The GPU's streams.
        states: States of each stage's shards: passes repeat others that begin in the same state.
        noted: Stage -> micro-batches whose passes run, and are recorded, in the first run of the schedule. None: all
            passes run in every run.
        unlike: Micro-batches whose passes always run, since no other is like them.
        values_differ: Whether micro-batches have different values, so that passes that read values do not repeat.
    """

    def __init__(
        self,
        recorder: Recorder,
        streams: Streams,
        states: Mapping[int, ShardStates],
        noted: Mapping[int, Collection[int]] | None,
        unlike: Collection[int],
        *,
        values_differ: bool,
    ) -> None:
        self._recorder, self._streams, self._states = recorder, streams, states
        self._noted, self._unlike, self._values_differ, self._schedules = noted, unlike, values_differ, 0
        self._notes: dict[Hashable, _Note] = {}
        # stage and micro-batch -> the blocks that its passes so far keep for later ones
        self._kept: dict[tuple[int, int], list[int]] = {}

    def begin_schedule(self) -> None:
        """Begin another run of the schedule."""
        self._kept.clear()
        self._schedules += 1

    def run(
        self, kind: str, stage: int, micro_batch: int, compute: Callable[[], Sequence[Tensor | None]]
    ) -> Sequence[Tensor | None]:
        """Return a pass's results.

        Args:
            kind: Kind of the pass; a micro-batch has one of each, `BACKWARD` last.
            stage: Number of the stage.
            micro_batch: Number of the micro-batch.
            compute: Runs the pass.

        Raises:
            DoesNotRepeat: The pass cannot be repeated.
        """
        if self._noted is None or micro_batch in self._unlike:
            return compute()
        key = stage, kind, self._states[stage].now()
        kept = self._kept.get((stage, micro_batch), [])
        if self._schedules > 1 or micro_batch not in self._noted[stage]:
            if key not in self._notes:
                raise DoesNotRepeat(f"no {kind} pass of stage {stage} was noted in the same state")
            return self._repeat(self._notes[key], stage, micro_batch, kept)
        recorder = self._recorder
        decided, mark, began = recorder.decided, recorder.memory.mark(), self._streams.moment()
        results = compute()
        if self._values_differ and recorder.decided > decided:
            raise DoesNotRepeat("the pass depends on the numbers of its micro-batch")
        note = self._notes[key] = self._note(stage, kept, results, mark, began)
        self._kept[stage, micro_batch] = note.keeps
        if kind == BACKWARD and note.keeps:
            raise DoesNotRepeat(f"a backward pass leaves memory behind: {recorder.memory.blocks[note.keeps[0]][2:4]}")
        return results

    def _note(
        self, stage: int, kept: list[int], results: Sequence[Tensor | None], mark: RecordMoment, began: StepMoment
    ) -> _Note:
        """Return the record of a pass that has ended.

        Args:
            stage: Number of the stage.
            kept: The blocks that earlier passes of its micro-batch keep.
            results: The pass's results.
            mark, began: The moment before it.

        Raises:
            DoesNotRepeat: It frees or returns memory of another pass.
        """
        memory, streams = self._recorder.memory, self._streams
        stretch = memory.since(mark)
        placed = [result if result is None else _result_of(memory, result) for result in results]
        given = {result.block for result in placed if result is not None}
        leaving = [block for block in stretch.leaving if block not in given]
        own = set(kept)
        held = [_hold(memory, block, leaving) for block in stretch.entering if block not in own]
        used = given.union(stretch.entering)
        if not given <= own.union(stretch.leaving):
            raise DoesNotRepeat("a pass gives what was there before")
        return _Note(
            stretch=stretch,
            kept=kept,
            keeps=[*(block for block in kept if block not in used), *leaving],
            held=held,
            results=placed,
            operators=self._recorder.log.operators[began.operators :],
            sent=streams.sent[began.collectives :],
            state=self._states[stage].now(),
            began=began,
            ended=streams.moment(),
        )

    def _repeat(self, note: _Note, stage: int, micro_batch: int, kept: list[int]) -> list[Tensor | None]:
        log, known = self._recorder.log, self._repeat_memory(note, kept)
        self._kept[stage, micro_batch] = [known[block] for block in note.keeps]
        if any(sent.before is not None and sent.before > note.ended.operators for sent in note.sent):
            raise DoesNotRepeat("a collective is waited for after its pass")
        self._streams.repeat(note.sent, note.began, note.ended)
        if log.keep_operators:
            log.operators.extend(note.operators)
        storages: dict[int, torch.UntypedStorage] = {}
        with _disable_current_modes():
            results = [result and self._result(result, known[result.block], storages) for result in note.results]
        self._states[stage].bring_to(note.state)
        return results

    def _repeat_memory(self, note: _Note, kept: list[int]) -> dict[int, int]:
        """Repeat a pass's effect on memory; return the recorded blocks with their replacements."""
        memory, blocks = self._recorder.memory, self._recorder.memory.blocks
        entering = dict(zip(note.kept, kept, strict=False))
        # Blocks are alike without their kinds, which they may get later.
        alike = (blocks[noted] == blocks[own].named(blocks[noted].kind) for noted, own in entering.items())
        if len(kept) != len(note.kept) or not all(alike):
            raise DoesNotRepeat("what passes keep differs")
        for storage, before, _after in note.held:
            now = memory.block_in(storage)
            if now is None or memory.blocks[now].nbytes != memory.blocks[before].nbytes:
                raise DoesNotRepeat("there is nothing alike to give back")
            entering[before] = now
        known = memory.repeat(note.stretch, entering)
        for storage, _before, after in note.held:
            memory.hold_in(storage, known[after])
        return known

    def _result(self, result: _Result, block: int, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        if block not in storages:
            storages[block] = torch.UntypedStorage(self._recorder.memory.blocks[block].nbytes, device="meta")
            self._recorder.memory.stand_for(block, storages[block])
        return torch.empty(0, dtype=result.dtype, device="meta").set_(
            storages[block], result.offset, result.size, result.stride
        )


def _hold(memory: BlockRecord, before: int, leaving: list[int]) -> _Held:
    """Return the storage whose block a pass frees, with the block that it allocates in its place, which is removed from
    `leaving`."""
    about, storage = memory.blocks[before], memory.storages[before]
    resized = (
        candidate
        for candidate in leaving
        if memory.storages[candidate] == storage and memory.blocks[candidate][1:] == about[1:]
    )
    after = next(resized, None) or next((candidate for candidate in leaving if memory.blocks[candidate] == about), None)
    if after is None:
        raise DoesNotRepeat("a pass gives back what another one took")
    leaving.remove(after)
    return _Held(memory.storages[after], before, after)


def _result_of(memory: BlockRecord, tensor: Tensor) -> _Result:
    try:
        block = memory.block_of(getattr(tensor, "elem", tensor))  # for the result of a collective
    except KeyError:
        raise DoesNotRepeat("a pass gives what no operator made") from None
    return _Result(block, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
