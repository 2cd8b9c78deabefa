"""How steps that were traced without a loop's variables go in a usual loop: the same operators, some memory for longer.

Start reading at `StepsInALoop.looped`. A usual loop copies a batch to the device for each step, while the last one's is
alive, and holds output and loss until it assigns the next ones. So a trace without them shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from featurize.recording.batches import tensors_of
from featurize.recording.step_trace import Event, StepTrace

if TYPE_CHECKING:
    from featurize.recording.block_record import BlockRecord


@dataclass
class _Step:
    """Moments of one step, by numbers of events.

    begins    before its batch is there
    lets_go   when a loop lets go of the last step's output and loss
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
    """Two steps of one recorder on one batch, which lies on the device. The steps tell of themselves as they run."""

    def __init__(self, recorder: BlockRecord) -> None:
        self._recorder = recorder
        self._steps: list[_Step] = []
        self._dropping_from: int | None = None

    def begin(self) -> None:
        """A step begins, before its batch is there."""
        self._steps.append(_Step(begins=self._now))

    def hold(self, inputs: object, *variables: object) -> None:
        """The step's model has run, or, with its output and loss as `variables`, its loss."""
        step = self._steps[-1]
        if not variables:
            step.lets_go = self._now
            return
        step.held, step.given = (
            self._recorder.blocks_in(tensors_of(variables)),
            self._recorder.blocks_in(tensors_of(inputs)),
        )
        self._dropping_from = self._now

    def drops(self) -> None:
        """Note that what the step holds is dropped from now on."""
        self._dropping_from = self._now

    def dropped(self) -> None:
        """Note that all of it is dropped."""
        if self._dropping_from is not None:
            self._steps[-1].drops.append((self._dropping_from, self._now))
            self._dropping_from = None

    def repeat(self, begins: int, known: Mapping[int, int], moved: Callable[[int], int]) -> None:
        """Note that the first step was repeated.

        Args:
            begins: Before the second step's batch.
            known: Block of the first step -> the second step's, where it has its own.
            moved: Gives the moment of the second step for one of the first.
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
        brought = [event._replace(block=len(blocks) + at, step=2) for at, event in enumerate(batch)]
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

    @property
    def _now(self) -> int:
        return len(self._recorder.events)


def _is_late(step: _Step, index: int, block: int) -> bool:
    """Return whether a loop gives back later what the step gives back at that moment."""
    return block in step.held or any(begin <= index < end for begin, end in step.drops)
