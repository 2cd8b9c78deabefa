"""Steps after the first, derived from its record: on the same batch, on other batch shapes, with a loop's variables.

Start reading at `SecondStep`: the passes are repeated from the record, and the optimizer runs. A model that keeps
something from step to step runs its second step, too: its first step changes what the model or the loss holds
(`State`), draws a random number, reads a value that the step computes, or leaves more memory behind than gradients
and a loop's variables. `StepSequence.play` runs each batch shape once. `StepsInALoop.looped` turns steps that were
traced without a loop's variables into those of a usual loop, which copies a batch to the device while the previous
one is alive, and holds output and loss until it assigns the next ones.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from featurize.recording.block_record import RecordMoment, Stretch
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import Event, Operator, StepTrace
from featurize.trace.trace_cache import State
from featurize.training.training_step import TrainingStep

if TYPE_CHECKING:
    from featurize.recording.block_record import BlockRecord


@dataclass
class _Step:
    """One step, whose moments are numbers of events.

    at      moment -> when the step first reached it
    given   blocks of its inputs as the model takes them, which end with the step in any loop
    held    blocks of its own output and loss
    """

    at: dict[str, int] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)

    def frees_late(self, index: int, block: int) -> bool:
        """Return whether a loop frees a block later than the step, which frees it at the event `index`: its output and
        loss, and what the step frees as it drops these."""
        at = self.at
        drops = at["assigned"] <= index < at["backward"] or at["updated"] <= index < at["end"]
        return block not in self.given and (drops or block in self.held)


class StepsInALoop:
    """Two steps of one recorder on one batch, which is on the device. The steps report to it as they run."""

    def __init__(self, recorder: BlockRecord) -> None:
        self._recorder = recorder
        self._steps: list[_Step] = []

    def reached(self, moment: str, *variables: set[int]) -> None:
        """Record that a step has reached a moment: one of `TrainingStep`, or of its caller.

        Args:
            moment: The moment. A step `begins` before its batch exists.
            variables: Where output and loss are `assigned`: blocks of the model's inputs, and of these two.
        """
        if moment == "begins":
            self._steps.append(_Step())
        step = self._steps[-1]
        step.at.setdefault(moment, len(self._recorder.events))
        if moment == "assigned":
            step.given, step.held = variables

    def looped(self, trace: StepTrace) -> StepTrace:
        """Return the trace of the same steps in a usual loop."""
        first, second = self._steps
        begins, ends = second.at["begins"], len(trace.events)
        events, blocks = list(trace.events), list(trace.blocks)
        late = {
            index
            for step, end in ((first, begins), (second, ends))
            for index in range(step.at["assigned"], end)
            if events[index].nbytes < 0 and step.frees_late(index, events[index].block)
        }
        batch = [e for e in events[first.at["begins"] : first.at["held"]] if blocks[e.block].kind == "batch"]
        brought = [event._replace(block=len(blocks) + position, step=2) for position, event in enumerate(batch)]
        given_back = [event._replace(nbytes=-event.nbytes, step=2) for event in batch]
        let_go = [events[index]._replace(step=2, phase="forward") for index in sorted(late) if index < begins]

        def usual(begin: int, end: int) -> list[Event]:
            return [events[index] for index in range(begin, end) if index not in late]

        in_loop = (
            *usual(0, begins),
            *brought,
            *given_back,
            *usual(begins, second.at["held"]),
            *let_go,
            *usual(second.at["held"], ends),
        )
        blocks += [blocks[event.block] for event in batch]
        return replace(trace, events=in_loop, blocks=self._recorder.named_by_lifetime(blocks, in_loop))


_PASSES = ("forward", "held", "assigned", "backward")  # moments of a step before its update
_REPEATED = (*_PASSES, "updated")  # what follows them repeats; the update runs


class TraceAgain(Exception):
    """The trace must be made again, on a model that has not run, with more of its request known."""

    def __init__(self, **request: Any) -> None:
        super().__init__("the trace must be made again")
        self.request = request


class SecondStep:
    """Follows the first step, and then replaces the second.

    Args:
        recorder: Records the steps.
        step: The training step. It accumulates no gradients, and frees them before it begins.
        before: Result of `kept_by` at the start of the first step.
    """

    def __init__(self, recorder: Recorder, step: TrainingStep, before: State | None) -> None:
        self._recorder, self._step, self._before = recorder, step, before
        self._decided = recorder.decided
        self._moment, self._mark = "", recorder.memory.mark()
        self._after: dict[str, Stretch] = {}  # moment -> what the first step did from there to the next one
        self._variables: dict[str, tuple[set[int], ...]] = {}  # moment -> blocks of the step's variables

    def reached(self, moment: str, *variables: set[int]) -> None:
        """Record that the first step has reached a moment, as `StepsInALoop.reached`."""
        recorder = self._recorder
        if moment == self._moment:  # a further phase of the optimizer, in which an average is updated
            return
        if moment == "optimizer":
            self._decided -= recorder.decided
            recorder.log.keep_operators = False  # the second step's operators count
        if self._moment in _REPEATED:
            self._after[self._moment] = recorder.memory.since(self._mark)
        self._moment, self._mark = moment, recorder.memory.mark()
        self._variables[moment] = variables

    def goes_alike(self) -> bool:
        """Return whether the first step shows that the second one's passes are the same."""
        recorder = self._recorder
        gradients = self._step.gradients()
        if self._decided or self._before is None or any(gradient.is_sparse for gradient in gradients):
            return False
        passes, end = [self._after[moment] for moment in _PASSES], self._after["updated"]
        left = {block for stretch in passes for block in stretch.leaving}
        given_back = {block for stretch in (*passes, end) for block in stretch.entering}
        held = state_of(self._step.held)  # also within objects, such as caches of keys and values
        tensors = () if held is None else (tensor for reference in held.tensors if (tensor := reference()) is not None)
        self._held = recorder.memory.blocks_in(tensors)
        kept = recorder.memory.blocks_in(gradients) | self._held
        memory = given_back <= left and left - given_back == kept and not end.leaving
        return memory and self._before.stays(kept_by(self._step))

    def run(self, batch: tuple[Tensor, ...], reached: Callable[..., None]) -> None:
        """Record the second step. Raises `TraceAgain` if something that `goes_alike` does not see holds a variable that
        the loop frees.

        Args:
            batch: It is copied to the device before; empty if it stays there.
            reached: Called with the second step's moments, as `StepsInALoop.reached`.
        """
        memory, step = self._recorder.memory, self._step
        memory.step, memory.phase = 2, "forward"
        known: dict[int, int] = {}  # block of the first step -> the second step's

        def seconds(blocks: set[int]) -> set[int]:
            return {known.get(block, block) for block in blocks}

        def report(moment: str) -> None:
            reached(moment, *map(seconds, self._variables[moment]))

        report("begins")
        if batch:
            self._recorder.new_batch(batch)
        for block in dict.fromkeys(map(memory.block_of, step.gradients())):
            memory.give_back(block)
        for moment in _PASSES:
            if moment == "held":
                held = [memory.storages[block] for block in self._held]
                step.hold()
                if any(storage in memory.live for storage in held):
                    raise TraceAgain(repeats=False)
            report(moment)
            known |= memory.repeat(self._after[moment], known)
        self._recorder.log.keep_operators = True
        with self._recorder:
            step.update()
        report("updated")
        memory.repeat(self._after["updated"], known)
        report("end")


def kept_by(step: TrainingStep) -> State | None:
    """Return the state of a step's model and loss, and of the generators of random numbers on the host: a model may
    draw which of its layers run."""
    of_python = hash(random.getstate())
    return state_of(step.model, step.loss, torch.default_generator.get_state(), of_python, np.random.get_state())


def state_of(*roots: object) -> State | None:
    """Return the present state of objects; None if it cannot be described."""
    try:
        return State(*roots)
    except Exception:  # any object may raise anything when it is inspected
        return None


Left: TypeAlias = tuple[tuple[str, str, str], ...]  # kind, operator and module of each block that a step leaves alive


class StepsDiffer(RuntimeError):
    """A step finds other tensors of the previous step alive than when it was recorded."""


@dataclass(frozen=True)
class _Run:
    """One step that ran: its events in memory, and the blocks alive before and after it, by kind and age."""

    shape: int
    stretch: Stretch
    before: Sequence[int]
    after: Sequence[int]
    operators: tuple[Operator, ...]

    @property
    def born_bytes(self) -> int:
        """Maximum of the bytes alive at once of what the step itself allocated."""
        born = [event.nbytes for event in self.stretch.events if event.block not in self.stretch.entering]
        return max(accumulate(born, initial=0))


class StepSequence:
    """Plays the steps of a training job whose batches have several shapes.

    A step runs once for each shape, after the first step, which creates the optimizer's state. It runs again only if
    the step before it leaves blocks of other kinds alive. Blocks that a step leaves alive (gradients, held output, its
    batch) have the sizes of its own shape, and end when the next step frees them.
    """

    def __init__(self, recorder: Recorder, run: Callable[[int, int], None]) -> None:
        """`run(number, shape)` runs one step on the batch of that shape."""
        self._memory, self._log, self._run = recorder.memory, recorder.log, run
        self._alive = self._after(self._memory.since(RecordMoment(0, 0)), ())
        self._recorded: dict[tuple[int, Left], _Run] = {}
        self._held: Sequence[int] = ()  # blocks that the last step that ran left alive, by kind and age
        self._sequence: list[_Run] = []

    def play(self, shapes: Sequence[int]) -> int:
        """Play a step for each of the shapes, in order, then two of the longest. Return the longest: the shape whose
        step needs the most memory.

        The first shape runs again before those two if it was run in the first step only.
        """
        for shape in shapes if shapes[0] in shapes[1:] else [*shapes, shapes[0]]:
            self._step(shape)
        longest = max(self._recorded.values(), key=lambda run: run.born_bytes).shape
        for _ in range(2):
            self._step(longest)
        return longest

    @property
    def shapes(self) -> tuple[int, ...]:
        """The shape of each step."""
        return tuple(run.shape for run in self._sequence)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators of the last step."""
        return self._sequence[-1].operators

    def _step(self, shape: int) -> None:
        left = self._left(self._alive)
        run = self._recorded.get((shape, left))
        if run is not None:
            self._memory.step = len(self._sequence) + 1
            known = self._memory.repeat(run.stretch, dict(zip(run.before, self._alive, strict=True)))
            self._alive = [known[block] for block in run.after]
        elif not self._sequence:
            run = self._ran(shape)
        else:
            run = self._recorded[shape, left] = self._ran_after(left, shape)
        self._sequence.append(run)

    def _ran_after(self, left: Left, shape: int) -> _Run:
        """Run a step after one that left such blocks: if the last one that ran left others, this one runs before."""
        memory = self._memory
        if self._left(self._held) != left:
            alive, mark = self._alive, memory.mark()
            self._ran(self._sequence[-1].shape)
            del memory.events[mark.events :]
            self._alive = alive
        if self._left(self._held) != left:
            raise StepsDiffer("the steps of different batch shapes leave tensors behind that cannot be matched")
        for held, block in zip(self._held, self._alive, strict=True):
            if held != block:
                memory.hold_in(memory.storages[held], block)
        return self._ran(shape)

    def _ran(self, shape: int) -> _Run:
        """Run a step."""
        before, mark = self._alive, self._memory.mark()
        self._run(len(self._sequence) + 1, shape)
        stretch = self._memory.since(mark)
        self._alive = self._held = self._after(stretch, before)
        return _Run(shape, stretch, before, self._held, tuple(self._log.operators))

    def _after(self, stretch: Stretch, before: Sequence[int]) -> Sequence[int]:
        """Return the blocks alive, by kind and age: optimizer state from the first step has the place that it has
        later."""
        alive = {*before, *stretch.leaving}.difference(stretch.entering)
        return sorted(alive, key=lambda block: (self._memory.blocks[block].kind, block))

    def _left(self, blocks: Sequence[int]) -> Left:
        alive = map(self._memory.blocks.__getitem__, blocks)
        return tuple((block.kind, block.operator, block.module) for block in alive)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Restore the random generators at the end of the block."""
    drawn = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        try:
            yield
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])
