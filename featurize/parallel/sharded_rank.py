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

from featurize.batches import Inputs
from featurize.parallel.layout import Parallel
from featurize.parallel.ranks import Ranks
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
def sharded_rank(parallel: Parallel, rank: int = 0) -> Iterator[ShardedRank]:
    """Play one rank. Of unevenly sharded parameters the first one has the largest part.

    Args:
        parallel: The job.
        rank: Which one, from 0.
    """
    streams = Streams()
    with _lock, pretended_mesh(parallel, rank) as mesh, shards_on_meta(streams), _quiet():
        if parallel.pp == 1:
            yield ShardedRank(parallel, mesh, streams)
            return
        from featurize.parallel.pipeline import PipelineRank, schedules_on_meta  # their imports take a second

        with schedules_on_meta(streams):
            yield ShardedRank(parallel, mesh, streams, PipelineRank(parallel, mesh, streams, rank))


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
        self, parallel: Parallel, mesh: DeviceMesh, streams: Streams, pipeline: PipelineRank | None = None
    ) -> None:
        self._parallel, self._mesh, self._streams, self.pipeline = parallel, mesh, streams, pipeline
        self._ranks: Ranks | None = None

    def attach(self, recorder: Recorder) -> None:
        """Tell a recorder, which hears nothing before, of ranks and streams from now on."""
        self._streams.recorder = recorder
        recorder.ranks = self._ranks = Ranks(self._streams, axes_of_groups(self._mesh))

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
            return model
        return shard(model, self._parallel, self._mesh)

    def begin(self, step: TrainingStep, inputs: Inputs, target: Tensor | None) -> None:
        """Make ready for steps on a batch."""
        recorder = self._streams.recorder
        if self.pipeline is not None and recorder is not None:
            self.pipeline.begin(step, recorder, inputs, target)

    def part(self) -> PipelinePart | None:
        """Return what a pipeline's rank did in the last step; None of other jobs."""
        return None if self.pipeline is None else self.pipeline.part()

    def begin_step(self) -> None:
        """Hear that a step begins."""
        if self._ranks is not None:
            self._ranks.begin_step()

    def require_gradients(self) -> None:
        """Allow parameters without a gradient, as FSDP2 does, but where stages of a pipeline are replicated."""
        if self.pipeline is not None:
            self.pipeline.require_gradients()

    def collectives(self) -> tuple[Collective, ...]:
        """Return what the ranks sent in the last step."""
        more = () if self.pipeline is None else self.pipeline.collectives()
        return (*self._streams.collectives(), *more)
