"""One rank of a job whose wrapper is PyTorch's own, in a trace: `fully_shard` itself runs, on meta tensors.

Start reading at `ShardedRank`, which `featurize.parallel.play_rank.sharded_rank` makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from conf.errors import CommandError, UsageError
from conf.plain_text import exception_line
from featurize.batches import Inputs
from featurize.module_stack import origin
from featurize.optimizers import is_shared
from featurize.parallel.data_parallel import DataParallel, Replica
from featurize.parallel.layout import Parallel
from featurize.parallel.ranks import Ranks
from featurize.parallel.ring_attention import part_of_sequence, ring_attention, sequence_length, sequence_mesh
from featurize.parallel.sharding import shard
from featurize.parallel.streams import Streams
from featurize.parallel.world import axes_of_groups
from featurize.recorder import Recorder
from featurize.step_trace import Collective, PipelinePart

if TYPE_CHECKING:
    from featurize.parallel.pipeline import PipelineRank
    from featurize.training import TrainingStep


class ShardedRank:
    """A model's wrapper in a trace; made by `featurize.parallel.play_rank.sharded_rank`.

    Args:
        parallel: The job.
        mesh: Of all ranks.
        streams: Of the GPU.
        experts: As `featurize.parallel.experts.expert_mesh` returns it, where there is `ep`.
    """

    recorder: Recorder
    pipeline: PipelineRank | None = None  # what runs the step of a pipeline's rank

    def __init__(
        self, parallel: Parallel, mesh: DeviceMesh, streams: Streams, experts: DeviceMesh | None = None
    ) -> None:
        self.parallel, self._mesh, self._streams, self._experts = parallel, mesh, streams, experts
        self._replicas: list[Replica] = []
        self._spreads = True
        self._length = 0  # of the sequence that ranks share
        self._sequence = sequence_mesh(mesh, parallel) if parallel.cp > 1 else None

    def part_of(self, inputs: object, target: Tensor | None) -> tuple[object, Tensor | None]:
        """Return what this rank has of the batch of those that share one. Raises `UsageError` where that is not a part
        for each."""
        if self._sequence is None:
            return inputs, target
        self._length = sequence_length(inputs)
        return part_of_sequence(inputs, target, self._sequence, self.parallel)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While entered, the model's steps run as those of one among several ranks. Raises `UsageError` for models that
        do not."""
        if self._sequence is None:
            yield
            return
        try:
            with ring_attention(self._sequence, self.parallel):
                yield
        except CommandError:
            raise
        except Exception as error:  # a model may raise anything of a part
            operator, module = origin(error)
            raise UsageError(
                f"parallel: cp divides the second dimension of the inputs, here of {self._length}, which has to be the "
                f"sequence, as in [batch, length]; on its part the model fails in operator {operator or 'none'} of "
                f"module {module!r}: {exception_line(error)}"
            ) from error

    def attach(self, recorder: Recorder) -> None:
        """Tell a recorder of ranks and streams from now on. None is told before."""
        self.recorder = self._streams.recorder = recorder
        others = [mesh for mesh in (self._sequence, self._experts) if mesh is not None]
        # A group of all ranks has the name of the first mesh that it is part of.
        recorder.ranks = self._ranks = Ranks(self._streams, axes_of_groups(*others, self._mesh))

    def parts_of(self, model: nn.Module) -> nn.Module:
        """Return the model that trains, before anything is spread: it has all stages of a pipeline's rank."""
        return model

    def wrapped(self, model: nn.Module, inputs: Inputs) -> nn.Module:
        """Return the model, whose parameters are this rank's part from now on.

        Args:
            model: That trains.
            inputs: Of a step.
        """
        if self.parallel.own == 1:
            return shard(model, self.parallel, self._mesh, self._experts)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass that looked for the target left the outermost one gathered
        self._spreads = any(is_shared(parameter) for parameter in model.parameters())
        return model

    def begin(self, step: TrainingStep, inputs: Inputs, target: Tensor | None) -> None:
        """Make ready for steps on a batch."""
        if self.parallel.replicates:
            micro_steps = step.settings.accumulation
            self._replicas = [DataParallel(step.model, self.recorder, self.parallel, micro_steps, axis="ddp")]

    def part(self) -> PipelinePart | None:
        """Return what a pipeline's rank did in the last step; None of other jobs."""
        return None

    def begin_step(self) -> None:
        """Forget the step before."""
        self._ranks.begin_step()
        for replica in self._replicas:
            replica.begin_step()

    def begin_phase(self, phase: str) -> None:
        """Raise `UsageError` before the update where a parameter that replicas reduce has no gradient. Others may go
        without one, as FSDP2 allows."""
        for replica in self._replicas:
            replica.begin_phase(phase)

    def collectives(self) -> tuple[Collective, ...]:
        """Return what the ranks sent in the last step. Raises `UsageError` for a model of `own` that has nothing to do
        with other ranks."""
        sent = self._streams.collectives()
        if not (self._spreads or sent):
            raise UsageError(
                f"parallel: own={self.parallel.own}: the factory spreads nothing: no parameter is a DTensor, and "
                f"ranks send nothing; spread it there, as in own={self.parallel.own} with fully_shard(model), or give "
                f"fsdp={self.parallel.own}"
            )
        reduced = [one for replica in self._replicas for one in replica.collectives()]
        return tuple(sorted((*reduced, *sent), key=lambda one: one.after)) if reduced else sent
