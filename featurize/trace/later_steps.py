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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from featurize.recording.block_record import RecordMoment, Stretch
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import Event, Operator, StepTrace
from featurize.recording.values import tensors_of
from featurize.trace.trace_cache import State
from featurize.training.training_step import TrainingStep

if TYPE_CHECKING:
    from featurize.recording.block_record import BlockRecord


@dataclass
class _Step:
    """Moments of one step, as numbers of events.

    begins    before its batch is there
    lets_go   when a loop frees the previous step's output and loss
    held      blocks of its own output and loss
    given     blocks of its inputs as the model takes them, which end with the step in any loop
    drops     from and until when the step drops its output, and then its loss, with all that only these hold
    """

    begins: int
    lets_go: int = 0
    held: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    drops: list[tuple[int, int]] = field(default_factory=list)


class StepsInALoop:
    """Two steps of one recorder on one batch, which is on the device. The steps report to it as they run."""

    def __init__(self, recorder: BlockRecord) -> None:
        self._recorder = recorder
        self._steps: list[_Step] = []
        self._dropping_from: int | None = None

    def reached(self, moment: str, inputs: object, variables: Sequence[object]) -> None:
        """Record that a step has reached a moment: one of `TrainingStep`, or of its caller.

        Args:
            moment: The moment. A step `begins` before its batch exists.
            inputs: The model's inputs where its output and loss are assigned.
            variables: These two.
        """
        now = len(self._recorder.events)
        if moment == "begins":
            self._steps.append(_Step(begins=now))
        step = self._steps[-1]
        if moment == "held":
            step.lets_go = now
        elif moment == "assigned":
            step.held = self._recorder.blocks_in(tensors_of(variables))
            step.given = self._recorder.blocks_in(tensors_of(inputs))
        elif moment in ("backward", "end") and self._dropping_from is not None:
            step.drops.append((self._dropping_from, now))
            self._dropping_from = None
        if moment in ("assigned", "updated"):  # from here on, the step drops what it holds
            self._dropping_from = now

    def repeat(self, begins: int, known: Mapping[int, int], moved: Callable[[int], int]) -> None:
        """Record that the first step was repeated.

        Args:
            begins: Before the second step's batch.
            known: Block of the first step -> the second step's, where it has its own.
            moved: Returns the moment of the second step for one of the first.
        """
        first = self._steps[0]
        held, given = ({known.get(block, block) for block in blocks} for blocks in (first.held, first.given))
        drops = [(moved(since), moved(until)) for since, until in first.drops]
        self._steps.append(_Step(begins, moved(first.lets_go), held, given, drops))

    def looped(self, trace: StepTrace) -> StepTrace:
        """Return the trace of the same steps in a usual loop."""
        first, second = self._steps
        events, blocks = list(trace.events), list(trace.blocks)
        late = {
            index
            for step, end in ((first, second.begins), (second, len(events)))
            for index in range(step.drops[0][0], end)
            if (event := events[index]).nbytes < 0
            and event.block not in step.given
            and _is_late(step, index, event.block)
        }
        batch = [event for event in events[first.begins : first.lets_go] if blocks[event.block].kind == "batch"]
        brought = [event._replace(block=len(blocks) + position, step=2) for position, event in enumerate(batch)]
        given_back = [event._replace(nbytes=-event.nbytes, step=2) for event in batch]
        let_go = [events[index]._replace(step=2, phase="forward") for index in sorted(late) if index < second.begins]

        def usual(begin: int, end: int) -> list[Event]:
            return [events[index] for index in range(begin, end) if index not in late]

        in_loop = (
            *usual(0, second.begins),
            *brought,
            *given_back,
            *usual(second.begins, second.lets_go),
            *let_go,
            *usual(second.lets_go, len(events)),
        )
        blocks += [blocks[event.block] for event in batch]
        return replace(trace, events=in_loop, blocks=self._recorder.named_by_lifetime(blocks, in_loop))


def _is_late(step: _Step, index: int, block: int) -> bool:
    """Return whether a loop frees a block later than the step, which frees it at the event `index`."""
    return block in step.held or any(begin <= index < end for begin, end in step.drops)


_MOMENTS = ("forward", "held", "optimizer", "updated", "end")


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
        loop: Notified of both steps; None if the steps already run in a loop.
        before: Result of `kept_by` at the start of the first step.
    """

    def __init__(self, recorder: Recorder, step: TrainingStep, loop: StepsInALoop | None, before: State | None) -> None:
        self._recorder, self._step, self._loop, self._before = recorder, step, loop, before
        self._decided = recorder.decided
        self._marks: list[RecordMoment] = []
        self._stretches: list[Stretch] = []  # until the model's output is held, the optimizer, its end, the step's end

    def reached(self, moment: str) -> None:
        """Record that the first step has reached one of `_MOMENTS`."""
        recorder = self._recorder
        if moment != _MOMENTS[len(self._marks)]:  # a loop's, or the phase in which an average is updated
            return
        if moment == "optimizer":
            self._decided -= recorder.decided
            recorder.log.keep_operators = False  # the second step's operators count
        if self._marks:
            self._stretches.append(recorder.memory.since(self._marks[-1]))
        self._marks.append(recorder.memory.mark())

    def goes_alike(self) -> bool:
        """Return whether the first step shows that the second one's passes are the same."""
        recorder = self._recorder
        gradients = self._step.gradients()
        if self._decided or self._before is None or any(gradient.is_sparse for gradient in gradients):
            return False
        forward, rest, _update, end = self._stretches
        left = {*forward.leaving, *rest.leaving}
        given_back = {*forward.entering, *rest.entering, *end.entering}
        held = state_of(self._step.held)  # also within objects, such as caches of keys and values
        tensors = () if held is None else (tensor for reference in held.tensors if (tensor := reference()) is not None)
        self._held = recorder.memory.blocks_in(tensors)
        kept = recorder.memory.blocks_in(gradients) | self._held
        memory = given_back <= left and left - given_back == kept and not end.leaving
        return memory and self._before.stays(kept_by(self._step))

    def run(self, batch: tuple[Tensor, ...]) -> None:
        """Record the second step. `batch` is copied to the device before; if it stays there, it is empty.

        Raises `TraceAgain` if something that `goes_alike` does not see holds a variable that the loop frees.
        """
        recorder, step = self._recorder, self._step
        forward, rest, _update, end = self._stretches
        recorder.memory.step, recorder.memory.phase, begins = 2, "forward", len(recorder.memory.events)
        if batch:
            recorder.new_batch(batch)
        for block in dict.fromkeys(map(recorder.memory.block_of, step.gradients())):
            recorder.memory.give_back(block)
        passes = len(recorder.memory.events)
        known = recorder.memory.repeat(forward, {})
        held = [recorder.memory.storages[block] for block in self._held]
        step.hold()
        if any(storage in recorder.memory.live for storage in held):
            raise TraceAgain(repeats=False)
        known |= recorder.memory.repeat(rest, known)
        recorder.log.keep_operators = True
        with recorder:
            step.update()
        updated = len(recorder.memory.events)
        recorder.memory.repeat(end, {block: known[block] for block in end.entering})
        if self._loop is not None:
            self._loop.repeat(begins, known, self._moved(known, passes, updated))

    def _moved(self, known: Mapping[int, int], passes: int, updated: int) -> Callable[[int], int]:
        """Return a function from the number of an event of the first step to that of the second step's event.

        Args:
            known: Block of the first step -> the second step's; none for those that are allocated once.
            passes: Number of the event at which the second step's passes begin.
            updated: Number of the event after its update.
        """
        first, after = self._marks[0].events, self._marks[-2].events
        events = (*self._stretches[0].events, *self._stretches[1].events)
        before = list(accumulate((event.block in known for event in events), initial=0))
        return lambda event_index: (
            passes + before[event_index - first] if event_index < after else updated + event_index - after
        )


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
    """One step that ran: its events in memory, and the blocks alive before and after it, by kind and age.

    born_bytes   maximum of the bytes alive at once of what the step itself allocated
    """

    shape: int
    stretch: Stretch
    before: Sequence[int]
    after: Sequence[int]
    born_bytes: int
    operators: tuple[Operator, ...]


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
        self._ran_last: _Run | None = None
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
        if self._left(self._held()) != left:
            alive, mark = self._alive, memory.mark()
            self._ran(self._sequence[-1].shape)
            del memory.events[mark.events :]
            self._alive = alive
        if self._left(self._held()) != left:
            raise StepsDiffer("the steps of different batch shapes leave tensors behind that cannot be matched")
        for held, block in zip(self._held(), self._alive, strict=True):
            if held != block:
                memory.hold_in(memory.storages[held], block)
        return self._ran(shape)

    def _held(self) -> Sequence[int]:
        """Return the blocks that the last step that ran left alive, by kind and age."""
        assert self._ran_last is not None, "the first step runs"
        return self._ran_last.after

    def _ran(self, shape: int) -> _Run:
        """Run a step."""
        before, mark = self._alive, self._memory.mark()
        self._run(len(self._sequence) + 1, shape)
        stretch = self._memory.since(mark)
        self._alive = after = self._after(stretch, before)
        self._ran_last = _Run(shape, stretch, before, after, _born_bytes(stretch), tuple(self._log.operators))
        return self._ran_last

    def _after(self, stretch: Stretch, before: Sequence[int]) -> Sequence[int]:
        """Return the blocks alive, by kind and age: optimizer state from the first step has the place that it has
        later."""
        alive = {*before, *stretch.leaving}.difference(stretch.entering)
        return sorted(alive, key=lambda block: (self._memory.blocks[block].kind, block))

    def _left(self, blocks: Sequence[int]) -> Left:
        alive = map(self._memory.blocks.__getitem__, blocks)
        return tuple((block.kind, block.operator, block.module) for block in alive)


def _born_bytes(stretch: Stretch) -> int:
    """Return the maximum of the bytes alive at once of the blocks that a stretch allocates."""
    born = [event.nbytes for event in stretch.events if event.block not in stretch.entering]
    return max(accumulate(born, initial=0))


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
