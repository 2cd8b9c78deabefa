"""Steps on batches of several shapes: each shape runs once, and its record is repeated for the other steps.

Start reading at `StepSequence.play`; `featurize.trace.tracing` runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from featurize.recording.block_record import RecordMoment, Stretch
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import Operator

Left: TypeAlias = tuple[tuple[str, str, str], ...]  # kind, operator and module of each block that a step leaves alive


class StepsDiffer(RuntimeError):
    """A step finds other tensors alive of the step before it than when it was recorded."""


@dataclass(frozen=True)
class _Run:
    """One step that ran: what it did to memory, and the blocks alive before and after it, by kind and age.

    born_bytes   most bytes alive at once of what the step itself made
    """

    shape: int
    stretch: Stretch
    before: Sequence[int]
    after: Sequence[int]
    born_bytes: int
    operators: tuple[Operator, ...]


class StepSequence:
    """Plays the steps of a training job whose batches have several shapes.

    A step runs once for each shape, after the first step, which makes the optimizer's state. It runs again only where
    the step before it leaves blocks of other kinds alive. What a step leaves alive (gradients, the held output, its
    batch) has the sizes of its own shape, and ends when the next step gives it back.
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

        The first shape is met again before those two, where it was met in the first step only.
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
        """Those of the last step."""
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
        """Run a step after one that left such blocks: where the last one that ran left others, this one runs before."""
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
                memory.hold_in(memory.storage_of(held), block)
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
        """Return the blocks alive, by kind and age: optimizer state made in the first step stands where it stands
        later."""
        alive = {*before, *stretch.leaving}.difference(stretch.entering)
        return sorted(alive, key=lambda block: (self._memory.kind_of(block), block))

    def _left(self, blocks: Sequence[int]) -> Left:
        return tuple((self._memory.kind_of(block), *self._memory.maker_of(block)) for block in blocks)


def _born_bytes(stretch: Stretch) -> int:
    """The most bytes alive at once of the blocks that a stretch takes."""
    live = most = 0
    for event in stretch.events:
        if event.block not in stretch.entering:
            live += event.nbytes
            most = max(most, live)
    return most
