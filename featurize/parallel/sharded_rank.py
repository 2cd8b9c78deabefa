"""One rank of a job whose wrapper is PyTorch's own, in a trace: `fully_shard` itself runs, on meta tensors.

Start reading at `sharded_rank`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
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
from featurize.parallel.data_parallel import DataParallel
from featurize.parallel.experts import expert_mesh
from featurize.parallel.layout import Parallel
from featurize.parallel.ranks import Ranks
from featurize.parallel.ring_attention import part_of_sequence, ring_attention, sequence_length, sequence_mesh
from featurize.parallel.sharding import shard
from featurize.parallel.shards_on_meta import shards_on_meta
from featurize.parallel.streams import Streams
from featurize.parallel.world import axes_of_groups, pretended_mesh
from featurize.recorder import Recorder
from featurize.step_trace import Collective, PipelinePart

if TYPE_CHECKING:
    from featurize.parallel.pipeline import PipelineRank
    from featurize.training import TrainingStep

_lock = threading.RLock()  # groups and replacements are the process's: one trace at a time


@contextlib.contextmanager
def sharded_rank(parallel: Parallel, rank: int = 0, *, every_pass: bool = True) -> Iterator[ShardedRank]:
    """Play one rank. Of unevenly sharded parameters the first one has the largest part.

    Args:
        parallel: The job.
        rank: Which one, from 0.
        every_pass: As `featurize.parallel.pipeline.PipelineRank` takes it.
    """
    streams = Streams()
    with _lock, pretended_mesh(parallel, rank) as mesh, shards_on_meta(streams), _quiet():
        experts = expert_mesh(mesh, parallel) if parallel.ep > 1 else None
        if parallel.pp == 1:
            yield ShardedRank(parallel, mesh, streams, experts)
            return
        from featurize.parallel.pipeline import PipelineRank  # its imports take a second
        from featurize.parallel.traced_stage import schedules_on_meta

        with schedules_on_meta(streams):
            pipeline = PipelineRank(parallel, mesh, streams, rank, experts=experts, every_pass=every_pass)
            yield ShardedRank(parallel, mesh, streams, experts, pipeline)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings that the real job gives, too: of fully_shard on outputs that are views, of DTensor on reductions
    one after the other."""
    logger = logging.getLogger("torch.distributed")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


class ShardedRank:
    """A model's wrapper in a trace; made by `sharded_rank`."""

    def __init__(
        self,
        parallel: Parallel,
        mesh: DeviceMesh,
        streams: Streams,
        experts: DeviceMesh | None = None,
        pipeline: PipelineRank | None = None,
    ) -> None:
        self._parallel, self._mesh, self._streams, self.pipeline = parallel, mesh, streams, pipeline
        self._experts = experts
        self._ranks: Ranks | None = None
        self._replica: DataParallel | None = None
        self._spreads = True
        self._length = 0  # of the sequence that ranks share
        self._sequence = sequence_mesh(mesh, parallel) if parallel.cp > 1 else None

    def part_of(self, inputs: object, target: Tensor | None) -> tuple[object, Tensor | None]:
        """Return what this rank has of the batch of those that share one. Raises `UsageError` where that is not a part
        for each."""
        if self._sequence is None:
            return inputs, target
        self._length = sequence_length(inputs)
        return part_of_sequence(inputs, target, self._sequence, self._parallel)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While entered, the model's steps run as those of one among several ranks. Raises `UsageError` for models that
        do not."""
        if self._sequence is None:
            yield
            return
        try:
            with ring_attention(self._sequence, self._parallel):
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
        """Tell a recorder, which hears nothing before, of ranks and streams from now on."""
        self._streams.recorder = recorder
        recorder.ranks = self._ranks = Ranks(self._streams, self._axes())

    def _axes(self) -> dict[str, str]:
        others = (self._sequence, self._experts)
        # A group of all ranks has the name of the first mesh that it is part of.
        return axes_of_groups(*(mesh for mesh in others if mesh is not None), self._mesh)

    def parts_of(self, model: nn.Module) -> nn.Module:
        """Return the model that trains, before anything is spread: it has all stages of a pipeline's rank."""
        return model if self.pipeline is None else self.pipeline.parts_of(model)

    def wrapped(self, model: nn.Module, inputs: Inputs) -> nn.Module:
        """Return the model, whose parameters are this rank's part from now on.

        Args:
            model: That trains.
            inputs: Of a step.
        """
        recorder = self._streams.recorder
        if self.pipeline is not None and recorder is not None:
            return self.pipeline.wrapped(model, recorder, inputs)
        if self._parallel.own > 1:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward pass that looked for the target left the outermost one gathered
            self._spreads = any(is_shared(parameter) for parameter in model.parameters())
            return model
        return shard(model, self._parallel, self._mesh, self._experts)

    def begin(self, step: TrainingStep, inputs: Inputs, target: Tensor | None) -> None:
        """Make ready for steps on a batch."""
        recorder = self._streams.recorder
        if self.pipeline is not None and recorder is not None:
            self.pipeline.begin(step, recorder, inputs, target)
        elif self._parallel.replicates and recorder is not None:
            micro_steps = step.settings.accumulation
            self._replica = DataParallel(step.model, recorder, self._parallel, micro_steps, axis="ddp")

    def part(self) -> PipelinePart | None:
        """Return what a pipeline's rank did in the last step; None of other jobs."""
        return None if self.pipeline is None else self.pipeline.part()

    def begin_step(self) -> None:
        """Hear that a step begins."""
        if self._ranks is not None:
            self._ranks.begin_step()
        if self._replica is not None:
            self._replica.begin_step()

    def begin_phase(self, phase: str) -> None:
        """Hear that a phase begins. Parameters may go without a gradient, as FSDP2 allows, but where stages of a
        pipeline are replicated."""
        if (wrapper := self.pipeline or self._replica) is not None:
            wrapper.begin_phase(phase)

    def collectives(self) -> tuple[Collective, ...]:
        """Return what the ranks sent in the last step. Raises `UsageError` for a model of `own` that has nothing to do
        with other ranks."""
        sent = self._streams.collectives()
        if not (self._spreads or sent):
            raise UsageError(
                f"parallel: own={self._parallel.own}: the factory spreads nothing: no parameter is a DTensor, and "
                f"ranks send nothing; spread it there, as in own={self._parallel.own} with fully_shard(model), or give "
                f"fsdp={self._parallel.own}"
            )
        wrapper = self.pipeline or self._replica
        of_replicas = () if wrapper is None else wrapper.collectives()
        return tuple(sorted((*of_replicas, *sent), key=lambda one: one.after)) if of_replicas else tuple(sent)
