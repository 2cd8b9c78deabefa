"""One rank of a job in a trace: what it holds of the model and of the batch, and what it sends.

Start reading at `Rank`, which each way of spreading a job extends; `featurize.training.play_rank` chooses among them.
"""

from __future__ import annotations

import contextlib

from torch import Tensor, nn

from featurize.job.layout import Parallel
from featurize.operators.own_operators import elements
from featurize.recording.recorder import Recorder
from featurize.recording.step_trace import Collective, PipelinePart
from featurize.recording.values import Inputs, tensors_of
from featurize.training.data_parallel import DataParallel, Replica, limits_of
from featurize.training.training_step import TrainingStep


class Rank:
    """A rank as a trace asks it. This one is the only one of its job: it has all, and sends nothing.

    A trace calls `prepare`, `attach` and `part_of`, then, within `intercept`, `wrap` and `begin`. A step calls
    `begin_step`, `begin_phase` and `run`; `collectives` and `part` are of the last one.

    Attributes:
        needs_factory: The model's own code spreads it as it is made.
        divides_graphs: Hooks of its wrapper divide a compiled model's graph at blocks, as checkpoints do.
        bucket_limits: Bytes of the buckets at which a wrapper divides that graph; None: at none.
        keeps_operators: Operators of all steps are kept, since later ones repeat them.
        parameters: Elements of the whole model, from `wrap` on.
        recorder: The trace's recorder, from `attach` on.
    """

    needs_factory = divides_graphs = keeps_operators = False
    bucket_limits: tuple[float, ...] | None = None
    parameters = 0
    recorder: Recorder
    _step: TrainingStep

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model that trains, before anything is spread. Raises `UsageError` for one that cannot be."""
        return model

    def attach(self, recorder: Recorder) -> None:
        """Report to a recorder of the rank from now on; to none before."""
        self.recorder = recorder

    def part_of(self, inputs: object, target: Tensor | None) -> tuple[object, Tensor | None]:
        """Return what this rank has of the batch of those that share one. Raises `UsageError` where that is not a part
        for each."""
        return inputs, target

    def intercept(self) -> contextlib.AbstractContextManager[object]:
        """Return what the model's steps run in."""
        return contextlib.nullcontext()

    def wrap(self, step: TrainingStep, inputs: Inputs) -> None:
        """Wrap the model of a step, whose parameters are this rank's part from then on.

        Args:
            step: The training step.
            inputs: Inputs of a step.
        """
        self.parameters = elements(step.model)

    def begin(self, step: TrainingStep, inputs: Inputs, target: Tensor | None) -> None:
        """Make ready for steps on a batch; the recorder knows the wrapped parameters."""
        self._step = step

    def held(self, inputs: Inputs, target: Tensor | None) -> tuple[Tensor, ...]:
        """Return what of a batch lies on this rank's GPU."""
        return tuple(tensors_of((inputs, target)))

    def begin_step(self) -> None:
        """Forget the step before."""

    def begin_phase(self, phase: str) -> None:
        """Begin a phase of a step, which ends the one before. Raises `UsageError` where the job's wrapper stops."""

    def run(self, inputs: Inputs, target: Tensor | None) -> None:
        """Run one optimizer step on a batch."""
        self._step(inputs, target)

    def collectives(self) -> tuple[Collective, ...]:
        """Return what the ranks sent in the last step."""
        return ()

    def part(self) -> PipelinePart | None:
        """Return what a pipeline's rank did in the last step; None of other jobs."""
        return None


class ReplicatedRank(Rank):
    """A rank that reduces gradients in the buckets of DistributedDataParallel, where the layout has such replicas."""

    def __init__(self, parallel: Parallel, *, axis: str = "") -> None:
        self.parallel, self._axis = parallel, axis
        self.bucket_limits = limits_of(parallel.bucket_cap_mb)
        self._replicas: list[Replica] = []

    def begin(self, step: TrainingStep, inputs: Inputs, target: Tensor | None) -> None:
        super().begin(step, inputs, target)
        if self.parallel.replicates:
            micro_steps = step.settings.accumulation
            self._replicas = [DataParallel(step.model, self.recorder, self.parallel, micro_steps, axis=self._axis)]

    def begin_step(self) -> None:
        for replica in self._replicas:
            replica.begin_step()

    def begin_phase(self, phase: str) -> None:
        for replica in self._replicas:
            replica.begin_phase(phase)

    def collectives(self) -> tuple[Collective, ...]:
        return tuple(collective for replica in self._replicas for collective in replica.collectives())
