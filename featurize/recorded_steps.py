"""Runs the recorded steps of a trace on their batches.

Start reading at `StepRunner`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from featurize.batches import Inputs, arguments, as_meta, call, mapped, named_tensors, own_loss, tensors_of
from featurize.recorder import Recorder
from featurize.training import TrainingStep, targets_for
from featurize.values import name_tensor

if TYPE_CHECKING:
    from featurize.parallel.data_parallel import DataParallel
    from featurize.parallel.pipeline import PipelineRank
    from featurize.parallel.sharded_rank import ShardedRank
    from featurize.parallel.zero import ZeroRank
    from featurize.parallel.zero3 import ZeroShardedRank
    from featurize.steps_in_a_loop import StepsInALoop

    Wrapper = DataParallel | ShardedRank | ZeroRank | ZeroShardedRank


def batch_on_meta(
    inputs: Tensor | Inputs | Callable | None, target: Tensor | None, sharded: ShardedRank | None
) -> tuple[Inputs, Tensor | None]:
    """Return inputs and target on meta, with names and small values; of ranks that share a batch, this one's part."""
    made: object = inputs
    if callable(inputs):
        with torch.device("meta"):
            made, target = inputs("meta")
    if sharded is not None:
        made, target = sharded.part_of(arguments(made), target)
    given, wanted = arguments(mapped(made, as_meta)), None if target is None else as_meta(target)
    for name, tensor in (*named_tensors(given), *named_tensors(wanted, "the target")):
        name_tensor(tensor, name)
    return given, wanted


class StepRunner:
    """Runs recorded steps.

    Args:
        recorder: Of the trace.
        step: What it runs.
        enter_policy: Hears of each phase, as `featurize.cuda_policy.as_on_cuda` gives it.
        loop: Each step's batch is copied to the device.
        wrapper: Of a job on several GPUs.
        pipeline: Which runs the step, where there is one.
        in_a_loop: Hears what tells how the steps go in a usual loop, where they are run without one.
    """

    def __init__(
        self,
        recorder: Recorder,
        step: TrainingStep,
        enter_policy: Callable[[str], None],
        loop: bool,
        wrapper: Wrapper | None,
        pipeline: PipelineRank | None,
        in_a_loop: StepsInALoop | None,
    ) -> None:
        self._pipeline, self._in_a_loop = pipeline, in_a_loop
        self._recorder, self._step, self._training_loop, self._wrapper = recorder, step, loop, wrapper
        parameters = list(step.model.parameters())

        def enter(phase: str) -> None:
            if in_a_loop is not None and phase == "backward":
                in_a_loop.dropped()
            if wrapper is not None:
                wrapper.begin_phase(phase)
            recorder.begin_phase(phase)
            enter_policy(phase)
            if phase == "optimizer":
                recorder.name((p.grad for p in parameters if p.grad is not None), "gradient")

        step.on_phase = enter
        if in_a_loop is not None:
            step.on_hold, step.on_updated = in_a_loop.hold, in_a_loop.drops

    def run(
        self,
        number: int,
        inputs: Inputs,
        target: Tensor | None,
        *,
        keep_operators: bool = True,
        mixed: bool = False,
    ) -> None:
        """Run one step. Each step of `mixed` shapes brings its own batch, whatever the loop."""
        recorder, step = self._recorder, self._step

        def next_batch() -> None:
            if self._training_loop:
                recorder.new_batch(batch)

        run: Callable[[Inputs, Tensor | None], object] = step
        batch = tuple(tensors_of((inputs, target)))
        if self._pipeline is not None:
            run, batch = self._pipeline.run, self._pipeline.held(inputs, target)
        step.on_batch = next_batch
        recorder.begin_step(number, keep_operators=keep_operators)
        if self._wrapper is not None:
            self._wrapper.begin_step()
        if self._in_a_loop is not None:
            self._in_a_loop.begin()
        if number == 1 or self._training_loop or mixed:
            recorder.new_batch(batch)
        with recorder:
            run(inputs, target)
        if self._in_a_loop is not None:
            self._in_a_loop.dropped()
        recorder.name(step.optimizer_tensors(), "optimizer_state")


def target_for(recorder: Recorder, step: TrainingStep, inputs: Inputs, loss: Callable | None) -> Tensor | None:
    """Return what suits the model's output; None where the output holds a loss."""
    if loss is None and isinstance(inputs, Mapping) and inputs.get("labels") is not None:
        return None  # a second forward pass would only show that the output holds a loss
    recorder.values.learn(step.model.buffers())
    recorder.values.learn(tensors_of(inputs), default=1)
    with torch.no_grad(), recorder.watched():
        output = call(step.model, step.converted(inputs))
    if loss is None and own_loss(output) is not None:
        return None
    return targets_for(output, loss)
