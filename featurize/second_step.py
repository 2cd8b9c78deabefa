"""The second step on a batch, made of the first: its passes are repeated from the record, and the optimizer runs.

Start reading at `SecondStep`. A model that keeps something from step to step runs its second step, too: two
forward passes of it differ, one reads a value or sets an attribute, or the first step leaves more behind than gradients
and what a loop holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sized
from itertools import accumulate

from torch import Tensor, nn

from featurize.batches import tensors_of
from featurize.block_record import RecordMoment, Stretch
from featurize.recorder import Recorder
from featurize.steps_in_a_loop import StepsInALoop
from featurize.training import TrainingStep

_IMMUTABLE = frozenset({bool, int, float, str, type(None)})
_MOMENTS = ("forward", "held", "optimizer", "updated", "end")


class SecondStep:
    """Follows a step's forward pass, which is tried before, and the first step, and then stands for the second.

    Args:
        recorder: Sees the steps.
        step: The training step. It accumulates no gradients, and frees them before it begins.
        loop: Hears of both steps; None: they run in a loop themselves.
    """

    def __init__(self, recorder: Recorder, step: TrainingStep, loop: StepsInALoop | None) -> None:
        self._recorder, self._step, self._loop = recorder, step, loop
        self._tried: list[tuple] = []
        self._marks: list[RecordMoment] = []
        self._stretches: list[Stretch] = []  # until the model's output is held, the optimizer, its end, the step's end
        self._alike = False

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Within, the forward pass and the loss run for the first time."""
        self._recorder.ran = self._tried
        try:
            yield
        finally:
            self._recorder.ran = None

    def reached(self, moment: str) -> None:
        """Note where the first step is: at one of `_MOMENTS`, or where its backward pass begins."""
        recorder = self._recorder
        if moment == "forward":
            recorder.ran, self._before = [], (recorder.decided, _attributes(self._step.model))
        elif moment == "backward":
            kept = recorder.decided, _attributes(self._step.model)
            self._alike = recorder.ran == self._tried and kept == self._before
            recorder.ran = None
        if moment != _MOMENTS[len(self._marks)]:  # an average is updated in a phase of its own
            return
        if moment == "optimizer":
            recorder.log.keep_operators = False  # the second step's counts
        if self._marks:
            self._stretches.append(recorder.memory.since(self._marks[-1]))
        self._marks.append(recorder.memory.mark())

    def goes_alike(self) -> bool:
        """Return whether the first step shows that passes of the second one are the same."""
        recorder = self._recorder
        gradients = self._gradients()
        if not self._alike or any(gradient.is_sparse for gradient in gradients):
            return False
        forward, rest, _update, end = self._stretches
        left = {*forward.leaving, *rest.leaving}
        given_back = {*forward.entering, *rest.entering, *end.entering}
        kept = recorder.memory.blocks_in([*gradients, *tensors_of(self._step.held)])
        return given_back <= left and left - given_back == kept and not end.leaving

    def run(self, batch: tuple[Tensor, ...]) -> None:
        """Note the second step. `batch` is copied to the device before; of a batch that stays there, it is empty."""
        recorder, step = self._recorder, self._step
        forward, rest, _update, end = self._stretches
        recorder.memory.step, recorder.memory.phase, begins = 2, "forward", len(recorder.memory.events)
        if batch:
            recorder.new_batch(batch)
        for block in dict.fromkeys(map(recorder.memory.block_of, self._gradients())):
            recorder.memory.give_back(block)
        passes = len(recorder.memory.events)
        known = recorder.memory.repeat(forward, {})
        step.hold()
        known |= recorder.memory.repeat(rest, known)
        recorder.log.keep_operators = True
        with recorder:
            step.update()
        updated = len(recorder.memory.events)
        recorder.memory.repeat(end, {block: known[block] for block in end.entering})
        if self._loop is not None:
            self._loop.repeat(begins, known, self._moved(known, passes, updated))

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


def _attributes(model: nn.Module) -> list[object]:
    """Return what shows that an attribute of a module was set: values that cannot change themselves, else where they
    are; of containers, also how much they hold."""
    values = [value for module in model.modules() for value in vars(module).values()]
    return [
        value if type(value) in _IMMUTABLE else (id(value), len(value) if isinstance(value, Sized) else 0)
        for value in values
    ]
