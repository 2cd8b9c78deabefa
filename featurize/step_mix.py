"""Steps on batches of several shapes: each shape runs once, and the memory of all steps is joined from those runs.

Start reading at `StepSequence.play`; `featurize.trace` runs the steps, and a replay places the joined events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from featurize.library_calls import CUBLAS
from featurize.recorder import Recorder
from featurize.step_trace import Block, Event, Operator

Left: TypeAlias = tuple[tuple[str, str, str], ...]  # kind, operator and module of each block that a step leaves alive


class StepsDiffer(RuntimeError):
    """A step finds other tensors alive of the step before it than when it was recorded."""


@dataclass(frozen=True)
class _Run:
    """One step that ran: its events, and the blocks alive before and after it, by kind and age.

    born_bytes   most bytes alive at once of what the step itself made
    """

    shape: int
    events: tuple[Event, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    left: Left
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
        self._recorder, self._run = recorder, run
        self._alive: dict[int, None] = {}
        self._runs = 0
        self._recorded: dict[tuple[int, Left], _Run] = {}
        self._setup = tuple(recorder.events)
        self._follow(self._setup)
        self._before = self._in_order()
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

    def joined(self, recorded: Sequence[Block]) -> tuple[tuple[Event, ...], tuple[Block, ...]]:
        """Return the events and blocks of all steps, made of the recorder's blocks."""
        events: list[Event] = []
        blocks: list[Block] = []
        handles: set[int] = set()  # of cuBLAS, which are taken once

        def emit(given: Sequence[Event], known: dict[int, int], step: int) -> None:
            for event in given:
                source = recorded[event.block]
                if source.call is not None and source.call.kind == CUBLAS:
                    if event.block in handles:
                        continue
                    handles.add(event.block)
                block = known.get(event.block)
                if block is None:
                    block = known[event.block] = len(blocks)
                    blocks.append(source)
                # What another step made has the size that it has there.
                nbytes = -blocks[block].nbytes if event.nbytes < 0 else event.nbytes
                events.append(Event(block, nbytes, step, event.phase))

        known: dict[int, int] = {}
        emit(self._setup, known, 0)
        alive = [known[block] for block in self._sequence[0].before]
        for step, run in enumerate(self._sequence, start=1):
            known = dict(zip(run.before, alive, strict=True))
            emit(run.events, known, step)
            alive = [known[block] for block in run.after]
        return tuple(events), tuple(blocks)

    def _step(self, shape: int) -> None:
        if not self._sequence:
            self._sequence.append(self._ran(shape))
            return
        before = self._sequence[-1]
        run = self._recorded.get((shape, before.left))
        if run is None:
            if self._ran_last is not None and self._ran_last.left != before.left:
                self._ran(before.shape)
            run = self._ran(shape)
            if len(run.before) != len(before.after) or self._met != before.left:
                raise StepsDiffer("the steps of different batch shapes leave tensors behind that cannot be matched")
            self._recorded[shape, before.left] = run
        self._sequence.append(run)

    def _ran(self, shape: int) -> _Run:
        """Run a step."""
        recorder = self._recorder
        first = len(recorder.events)
        before = self._before
        self._met = self._ran_last.left if self._ran_last is not None else ()
        self._runs += 1
        self._run(self._runs, shape)
        events = tuple(recorder.events[first:])
        self._follow(events)
        self._before = after = self._in_order()
        left = tuple((recorder.kind_of(block), *recorder.maker_of(block)) for block in after)
        run = _Run(shape, events, before, after, left, _born_bytes(events), tuple(recorder.operators))
        self._ran_last = run
        return run

    def _follow(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.nbytes > 0:
                self._alive[event.block] = None
            elif event.nbytes < 0:
                self._alive.pop(event.block, None)

    def _in_order(self) -> tuple[int, ...]:
        """The blocks alive, by kind and age: optimizer state made in the first step stands where it stands later."""
        return tuple(sorted(self._alive, key=lambda block: (self._recorder.kind_of(block), block)))


def _born_bytes(events: Sequence[Event]) -> int:
    """The most bytes alive at once of the blocks that these events begin."""
    born: set[int] = set()
    live = most = 0
    for event in events:
        if event.nbytes > 0:
            born.add(event.block)
        if event.block in born:
            live += event.nbytes
            most = max(most, live)
    return most
