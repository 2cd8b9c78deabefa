"""The second step on a batch, made of the first: its passes are repeated from the record, and the optimizer runs.

Start reading at `SecondStep`. A model that keeps something from step to step runs its second step, too: the first one
changes what the model or the loss holds, draws a number, reads a value that the step computes, or leaves more memory
behind than gradients and what a loop holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from torch import Tensor

from featurize.recording.block_record import RecordMoment, Stretch
from featurize.recording.recorder import Recorder
from featurize.trace.kept_state import State, state_of
from featurize.trace.steps_in_a_loop import StepsInALoop
from featurize.training.training_step import TrainingStep

_MOMENTS = ("forward", "held", "optimizer", "updated", "end")


class TraceAgain(Exception):
    """The trace must be made anew, on a model that was not run before, with more of its request known."""

    def __init__(self, **request: Any) -> None:
        super().__init__("the trace must be made anew")
        self.request = request


class SecondStep:
    """Follows the first step, and then stands for the second.

    Args:
        recorder: Sees the steps.
        step: The training step. It accumulates no gradients, and frees them before it begins.
        loop: Hears of both steps; None: they run in a loop themselves.
        before: What `kept_by` gives as the first step begins.
    """

    def __init__(self, recorder: Recorder, step: TrainingStep, loop: StepsInALoop | None, before: State | None) -> None:
        self._recorder, self._step, self._loop, self._before = recorder, step, loop, before
        self._decided = recorder.decided
        self._marks: list[RecordMoment] = []
        self._stretches: list[Stretch] = []  # until the model's output is held, the optimizer, its end, the step's end

    def reached(self, moment: str) -> None:
        """Note where the first step is: at one of `_MOMENTS`."""
        recorder = self._recorder
        if moment != _MOMENTS[len(self._marks)]:  # an average is updated in a phase of its own
            return
        if moment == "optimizer":
            self._decided -= recorder.decided
            recorder.log.keep_operators = False  # the second step's counts
        if self._marks:
            self._stretches.append(recorder.memory.since(self._marks[-1]))
        self._marks.append(recorder.memory.mark())

    def goes_alike(self) -> bool:
        """Return whether the first step shows that passes of the second one are the same."""
        recorder = self._recorder
        gradients = self._gradients()
        if self._decided or self._before is None or any(gradient.is_sparse for gradient in gradients):
            return False
        forward, rest, _update, end = self._stretches
        left = {*forward.leaving, *rest.leaving}
        given_back = {*forward.entering, *rest.entering, *end.entering}
        kept = recorder.memory.blocks_in(gradients) | self._held()
        memory = given_back <= left and left - given_back == kept and not end.leaving
        return memory and self._before.stays(kept_by(self._step))

    def run(self, batch: tuple[Tensor, ...]) -> None:
        """Note the second step. `batch` is copied to the device before; of a batch that stays there, it is empty.

        Raises `TraceAgain` where somebody whom `goes_alike` does not see holds what the loop lets go of.
        """
        recorder, step = self._recorder, self._step
        forward, rest, _update, end = self._stretches
        recorder.memory.step, recorder.memory.phase, begins = 2, "forward", len(recorder.memory.events)
        if batch:
            recorder.new_batch(batch)
        for block in dict.fromkeys(map(recorder.memory.block_of, self._gradients())):
            recorder.memory.give_back(block)
        passes = len(recorder.memory.events)
        known = recorder.memory.repeat(forward, {})
        held = [recorder.memory.storage_of(block) for block in self._held()]
        step.hold()
        if any(recorder.memory.block_in(storage) is not None for storage in held):
            raise TraceAgain(repeats=False)
        known |= recorder.memory.repeat(rest, known)
        recorder.log.keep_operators = True
        with recorder:
            step.update()
        updated = len(recorder.memory.events)
        recorder.memory.repeat(end, {block: known[block] for block in end.entering})
        if self._loop is not None:
            self._loop.repeat(begins, known, self._moved(known, passes, updated))

    def _held(self) -> set[int]:
        """Return the blocks that a loop's variables hold, also within objects, as caches of keys and values are."""
        held = state_of(self._step.held)
        tensors = () if held is None else (tensor for one in held.tensors if (tensor := one()) is not None)
        return self._recorder.memory.blocks_in(tensors)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._step.model.parameters() if p.grad is not None]

    def _moved(self, known: Mapping[int, int], passes: int, updated: int) -> Callable[[int], int]:
        """Return what gives, for the number of an event of the first step, the number of the second step's.

        Args:
            known: Block of the first step -> the second step's; none for those that are taken once.
            passes: Number of the event at which the second step's passes begin.
            updated: Of the one after its update.
        """
        first, after = self._marks[0].events, self._marks[-2].events
        events = (*self._stretches[0].events, *self._stretches[1].events)
        before = list(accumulate((event.block in known for event in events), initial=0))
        return lambda at: passes + before[at - first] if at < after else updated + at - after


def kept_by(step: TrainingStep) -> State | None:
    """Return what the model and the loss of a step keep."""
    return state_of(step.model, step.loss)
